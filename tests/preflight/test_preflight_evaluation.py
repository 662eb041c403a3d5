"""Preflight's pass of everything that a run will measure: it is silent where all is there, and names what would fail after the training."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lmworks.cli.main import main
from lmworks.evaluate.generation import humaneval
from lmworks.preflight import checks
from lmworks.untrusted.sandbox import RunResult
from tiny_run import Tiny


@pytest.fixture
def preflight(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Run the one check; the exit code and what it says."""
    monkeypatch.setattr(checks, "CHECKS", tuple(check for check in checks.CHECKS if check.name == "evaluation"))

    def run(*overrides: str) -> tuple[int, dict[str, str]]:
        sets = [word for one in (f"run_dir={tiny.run_dir}", *overrides) for word in ("--set", one)]
        monkeypatch.setattr(sys, "argv", ["lmworks", "preflight", str(tiny.recipe), *sets, "--json"])
        code = 0
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
        (answer,) = json.loads(capfd.readouterr().out)
        return code, answer

    return run


def task(folder: Path, rows: int = 6) -> Path:
    lines = [json.dumps({"question": f"what is {n}?", "choices": ["red", "green"], "answer": n % 2}) for n in range(rows)]
    (folder / "colors.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "colors.yaml").write_text("file: colors.jsonl\nchoices: choices\n", encoding="utf-8")
    return folder / "colors.yaml"


def test_all_sets_tasks_and_metrics_of_training_are_tried(preflight, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    options = (f"evaluate.benchmarks=[{task(tmp_path)}]", "evaluate.every=4 steps", "evaluate.tasks=[spell_backward]")
    code, found = preflight(*options)
    assert (code, found["result"]) == (0, "ok"), found
    assert found["text"] == "2 scores of colors, spell_backward; 4 metrics during training"


def test_a_set_that_is_not_there_and_a_sandbox_that_does_not_start_fail(  # type: ignore[no-untyped-def]
    preflight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = preflight(f"evaluate.benchmarks=[{{name: piqa, path: {tmp_path}/none}}]")
    assert (code, found["result"]) == (1, "fail") and "has no data files" in found["text"], found
    monkeypatch.setattr(humaneval, "judge_python", lambda *_: RunResult("refused", "no user namespaces"))
    code, found = preflight("evaluate.benchmarks=[humaneval]")
    assert (code, found["result"]) == (1, "fail") and "only in a sandbox: no user namespaces" in found["text"], found


@pytest.mark.parametrize(("reward", "result", "text"), [
    ("return len(answer)", "ok", "rewards: own"), ("raise KeyError('score')", "fail", "grpo.data.own: KeyError"),
])  # fmt: skip
def test_a_reward_that_raises_is_found_with_its_error(  # type: ignore[no-untyped-def]
    preflight, tmp_path: Path, reward: str, result: str, text: str
) -> None:
    (tmp_path / "reward.py").write_text(f"def reward(prompt, answer, row):\n    {reward}\n", encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say something"}\n' * 4, encoding="utf-8")
    data = {"name": "own", "kind": "files", "path": f"{tmp_path}/prompts.jsonl", "reward": "python", "file": f"{tmp_path}/reward.py"}
    code, found = preflight(f"grpo={json.dumps({'data': [data]})}")
    assert (code, found["result"]) == (int(result == "fail"), result) and text in found["text"], found
