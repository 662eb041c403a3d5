"""Generation sets from the command line, on a model with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Lmworks

from generation_models import GSM8K, HUMANEVAL, write_rows
from lmworks.errors import Unavailable
from lmworks.evaluate.generation import ruler_texts
from lmworks.untrusted.sandbox import run_python
from saved_run import save_run
from tiny_run import Tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "gsm8k.jsonl", GSM8K)
    write_rows(tmp_path / "data" / "humaneval.jsonl", HUMANEVAL)
    return tmp_path / "data"


def scored(lmworks: Lmworks, model: str, *options: object) -> dict[str, Any]:
    done = lmworks("evaluate", model, *options, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any]
    (found,) = json.loads(done.out)["models"].values()
    return found


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_numbers_programs_and_their_failures(lmworks: Lmworks, tiny: Tiny, data: Path, tmp_path: Path) -> None:
    if (ran := run_python("pass")).outcome == "refused":
        pytest.skip(ran.detail)
    save_run(tiny, tmp_path / "run")
    options = ("--data", data, "--items", 2, "--shots", 0, "--out", tmp_path / "out")
    model = f"{tmp_path}/run@base"
    scores = scored(lmworks, model, "--tasks", "gsm8k,humaneval", "--samples", 10, *options)["scores"]
    assert set(scores) == {"gsm8k/generate/0-shot", "humaneval/generate/0-shot/pass@1", "humaneval/generate/0-shot/pass@10"}
    for name, score in scores.items():
        assert (score["n"], score["form"], score["set"]) == (2, "generate", name.split("/")[0])
        assert sum(score["failures"].values()) == (20 if "humaneval" in name else 2) and score["score"] == 0
    outcomes = records(tmp_path / "out" / "outcomes-run@base.jsonl")
    assert len(outcomes) == 6 and all(one["failure"] and one["tokens"] > 5 and one["value"] == 0 for one in outcomes)
    # with the number that the model wrote as the right answer, it is right
    items = [one for one in records(tmp_path / "out" / "items-run@base.jsonl") if one["set"] == "gsm8k"]
    rows = [{**row, "answer": "#### 1"} for row in GSM8K]
    for item in items:
        rows[int(item["id"])]["answer"] = f"#### {item['extracted'] or 0}"
    said = sum(item["failure"] == "format" for item in items)
    write_rows(data / "gsm8k.jsonl", rows)
    again = scored(lmworks, model, "--tasks", "gsm8k", *options)["scores"]["gsm8k/generate/0-shot"]
    assert again["correct"] == said


def test_ruler_at_two_lengths_for_both_models_of_a_run(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    try:
        ruler_texts.words()
    except Unavailable as reason:
        pytest.skip(str(reason))
    save_run(tiny, tmp_path / "run", "model.max_position_embeddings=1200 tokens")
    for which in ("base", "tuned"):
        options = ("--tasks", "ruler-niah-single-1,ruler-vt", "--lengths", "900,1100", "--items", 2, "--out", tmp_path / which)
        found = scored(lmworks, f"{tmp_path}/run@{which}", *options)
        names = {f"ruler-{task}/generate/0-shot/{length}" for task in ("niah-single-1", "vt") for length in (900, 1100)}
        assert set(found["scores"]) == names, found["unavailable"]
        for one in records(tmp_path / which / f"outcomes-run@{which}.jsonl"):
            length, reply = int(one["score"].split("/")[-1]), 30 if "vt" in one["score"] else 128
            assert length - 30 < one["tokens"] + reply <= length


def test_what_cannot_be_measured_is_said_in_one_line(
    lmworks: Lmworks, tiny: Tiny, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    save_run(tiny, tmp_path / "run")
    monkeypatch.setenv("LMWORKS_MACHINE", "peak=1e11,sandbox=no")
    model = f"{tmp_path}/run@base"
    done = lmworks("evaluate", model, "--tasks", "humaneval,gsm8k", "--data", data, "--items", 2, "--shots", 0)
    assert done.code == 0 and "gsm8k/generate/0-shot" in done.out
    assert "only in a sandbox: this machine has none" in " ".join(done.out.split())
    for options, message in (
        (("--tasks", "gsm8k", "--shots", 9), "evaluate.benchmarks.gsm8k.shots: this set has 8 worked examples at most"),
        (("--tasks", "humaneval", "--shots", 2), "evaluate.benchmarks.humaneval.shots: this set has no worked examples"),
        (("--tasks", "gsm8k", "--samples", 5), "--samples: none of the sets of --tasks has this option"),
        (("--tasks", "humaneval", "--samples", 5, "--temperature", 0), "humaneval.temperature: at 0 all samples are the same"),
        (("--tasks", "ruler-vt", "--lengths", "many"), "--lengths many: a length is a number of tokens"),
        (("--tasks", "ruler-v", "--items", 1), "no benchmark set is called 'ruler-v'; did you mean ruler-vt?"),
    ):
        done = lmworks("evaluate", model, *options)
        assert done.code == 2 and message in " ".join(done.err.split()), (done.err, done.out)
