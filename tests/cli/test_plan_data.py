"""`plan` reads the data of tuning, preferences and prompts: its numbers are those of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Lmworks
from test_start_tuning import ROWS

from base_models import write_model, write_tokenizer
from lmworks.io.files import read_json
from lmworks.metrics.log import read
from lmworks.recipe.load import load_recipe
from lmworks.run import stage_data
from lmworks.tokenizer import load


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    write_tokenizer(folder, "qwen")
    write_model(folder, ROWS)
    return folder


def _lines(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


def _recipe(folder: Path, base: Path, count: int = 45, **changes: Any) -> Path:
    """Questions of different lengths, some twice, one too long, one of no form."""
    asked = [f"What is {a} + {a * 7 % 13}? " + "Please say it. " * (a % 5) for a in range(count)]
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": f"It is {n}."}] for n, text in enumerate(asked)]
    rows = [{"messages": one} for one in [*chats, chats[0]]] + [{"foo": "bar"}]
    pairs = [{"prompt": text, "chosen": "It is right.", "rejected": "No, it is not."} for text in [*asked, "long " * 300]]
    small = {"sequence_length": "96 tokens", "lr_schedule": {"kind": "constant", "warmup": "0%"}}
    tree = {
        "name": "tuned", "threads": 1, "start_from": str(base), "run_dir": str(folder / "run"),
        "train": {"precision": "fp32", "compile": False, "micro_batch_sequences": 2},
        "tune": {"data": [{"name": "own", "kind": "files", "path": _lines(folder / "chats.jsonl", rows)}], "epochs": 3,
                 "global_batch_tokens": "384 tokens", **small},
        "dpo": {"data": [{"name": "own", "kind": "files", "path": _lines(folder / "pairs.jsonl", pairs)}], "pairs_per_step": 8,
                "epochs": 1.5, **small},
        "evaluate": {"benchmarks": []}, "export": {"huggingface": False, "gguf": False},
    }  # fmt: skip
    for name, more in changes.items():
        tree[name] = {**tree.get(name, {}), **more}  # type: ignore[dict-item]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def test_the_plan_has_the_steps_and_tokens_of_the_run(lmworks: Lmworks, base: Path, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, base)
    planned = lmworks("plan", recipe, "--json")
    assert planned.code == 0, planned.err
    plan = json.loads(planned.out)
    done = lmworks("dpo", recipe)
    assert done.code == 0, done.err
    for stage, noun in (("tune", "conversations"), ("dpo", "pairs")):
        found, folder = plan["data"][stage], tmp_path / "run" / stage
        last = list(read(folder))[-1]
        (phase,) = (one for one in plan["phases"] if one["name"] == stage)
        assert (found["steps"], found["read"]) == (last["step"], last["train/tokens"]) == (phase["steps"], phase["tokens"])
        manifest = read_json(folder / "data" / "manifest.json")
        body = manifest["data"]["own"]
        of_splits = body if stage == "tune" else manifest
        assert (found["examples"], found["tokens"]) == (of_splits["train"][noun], of_splits["train"]["tokens"])
        assert found["held_out"] == of_splits["validation"][noun]
        assert found["left_out"] == body["left_out"] and sum(body["left_out"].values()) == {"tune": 2, "dpo": 1}[stage]
        assert found["counted"] == "exact"
    assert plan["data"]["tune"]["passes"] == 3 and plan["data"]["dpo"]["passes"] == 1.5


def test_the_plan_warns_where_data_and_batch_do_not_fit(lmworks: Lmworks, base: Path, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, base, tune={"global_batch_tokens": "8064 tokens", "epochs": 1, "final_weights": "best"},
        dpo={"epochs": 20.0})
    done = lmworks("plan", recipe, "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)["warnings"]
    few = next(line for line in said if line.startswith("tune: ") and "make 1 step; set tune.global_batch_tokens=" in line)
    assert any("final_weights: best is decided by 1 held-out conversation, too few" in line for line in said)
    assert any(line.startswith("dpo: ") and "is read 20 times" in line for line in said)
    better = few.split("global_batch_tokens=")[1].split(",")[0]
    again = json.loads(lmworks("plan", recipe, "--json", "--set", f"tune.global_batch_tokens={better} tokens").out)
    assert again["data"]["tune"]["steps"] >= 20
    assert not any("tune: " in line and "make" in line for line in again["warnings"])


def test_the_plan_warns_where_a_step_asks_a_prompt_twice(lmworks: Lmworks, base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "asked.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"What is {number} + 1?", "answer": str(number + 1)}) + "\n" for number in range(9)))
    own = {"name": "own", "kind": "files", "path": str(rows), "reward": "numeric"}
    tree = {
        "name": "few", "start_from": str(base), "run_dir": str(tmp_path / "few"), "threads": 1,
        "grpo": {"data": [own], "steps": 2, "prompts_per_step": 8, "validation_prompts": 2, "sequence_length": "64 tokens",
        "max_new_tokens": 8},
        "export": {"huggingface": False, "gguf": False},
    }  # fmt: skip
    (tmp_path / "few.yaml").write_text(json.dumps(tree))
    said = json.loads(lmworks("plan", tmp_path / "few.yaml", "--json").out)["warnings"]
    assert any(line.startswith("grpo: a step asks 8 prompts of the 7 that there are, some of them twice; set grpo.") for line in said), said
    fewer = json.loads(lmworks("plan", tmp_path / "few.yaml", "--json", "--set", "grpo.prompts_per_step=7").out)["warnings"]
    assert not any("twice" in line for line in fewer)


def test_without_a_tokenizer_tokens_are_estimated_and_large_files_are_sampled(
    lmworks: Lmworks, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(_recipe(tmp_path, base, count=400)).recipe
    exact = stage_data.read_stage(recipe, "tune", load(base), tmp_path, lambda: ((), None))
    by_bytes = stage_data.read_stage(recipe, "tune", None, tmp_path, lambda: ((), None))
    assert (exact.counted, by_bytes.counted) == ("exact", "by bytes")
    assert by_bytes.examples == exact.examples and 0.2 < by_bytes.tokens / exact.tokens < 1.5
    monkeypatch.setattr(stage_data, "_SAMPLE", 100)
    sampled = stage_data.read_stage(recipe, "tune", load(base), tmp_path, lambda: ((), None), most=1000)
    assert sampled.counted == "sampled"
    assert sampled.examples == pytest.approx(exact.examples, rel=0.05) and sampled.tokens == pytest.approx(exact.tokens, rel=0.1)
    assert sampled.steps == pytest.approx(exact.steps, rel=0.1)
