"""`lmworks corpus prepare` as a user meets it: a recipe without a model, the gate's three answers, a dry run of deduplication."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from command import Lmworks

from lmworks.documents import corpus_files

QUESTION = "Which of the four winds carries the salt of the seventh sea over the glass hills before the first bell of autumn rings?"
PROSE = (
    "The committee met on the first of May and heard what the farmers of the valley had to say. Nobody expected that the river would rise "
    "again so soon after the long rains of that spring. With great patience they repaired the old bridge, stone by stone, before the "
    "harvest came in. It is said that children still find coins in the mud where the market once used to be."
)
Write = Callable[..., Path]


def words(seed: int, count: int = 120) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(10**6)}" for _ in range(count))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A recipe of a corpus and nothing else, and its one source."""

    def make(texts: list[str], **more: Any) -> Path:
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        source = {"name": "mine", "kind": "jsonl", "path": f"{tmp_path}/texts.jsonl", "license": "mine", "domain": "prose"}
        corpus = {"sources": [source], "steps": [{"step": "rules"}], "validation_fraction": 0, **more.pop("corpus", {})}
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({"name": "mine", "run_dir": f"{tmp_path}/run", "corpus": corpus, **more}))
        return path

    return make


def kept(run: Path) -> list[str]:
    paths = [path for found in corpus_files(run / "corpus", "train").values() for path in found]
    return sorted(identity for path in paths for identity in pq.read_table(path)["id"].to_pylist())


def test_no_model_is_needed_and_what_rules_drop_is_told_with_value_and_limit(lmworks: Lmworks, write: Write, tmp_path: Path) -> None:
    recipe = write([PROSE, *(f"Too short {number}." for number in range(3))])
    told = lmworks("corpus", "prepare", recipe)
    assert told.code == 0, told.err
    assert "of 4 dropped by the rule word_count" in told.out
    drawn = json.loads(lmworks("corpus", "sample", recipe, "--reason", "word_count", "--json").out)
    assert [one["detail"] for one in drawn] == ["3, at least 50"] * 3
    assert "dropped: word_count (3, at least 50)" in lmworks("corpus", "trace", tmp_path / "run", "mine/0/1").out
    recipe.write_text(recipe.read_text() + "model: {preset: glm-tiny}\n")
    assert "done before" in lmworks("corpus", "prepare", recipe).out, "a model makes no other corpus"


@pytest.fixture
def leaky(write: Write, tmp_path: Path) -> Callable[[str], Path]:
    """A recipe whose second document holds a question that is asked."""

    def make(gate: str) -> Path:
        (tmp_path / "test.jsonl").write_text(json.dumps({"q": QUESTION, "a": "none"}) + "\n")
        protect = [{"name": "riddles", "path": f"{tmp_path}/test.jsonl", "question": "q", "answer": "a"}]
        corpus = {"steps": [], "decontaminate": {"action": gate}}
        return write([words(1), f"{words(2)}\n{QUESTION}\n{words(3)}", words(4)], corpus=corpus, evaluate={"protect": protect})

    return make


def test_the_gate_drops_what_is_asked(lmworks: Lmworks, leaky: Callable[[str], Path], tmp_path: Path) -> None:
    told = lmworks("corpus", "prepare", leaky("drop"))
    assert told.code == 0 and kept(tmp_path / "run") == ["mine/0/0", "mine/0/2"], told.err
    report = json.loads((tmp_path / "run/corpus/report.json").read_text())
    assert report["protected"]["riddles"] == {"items": 1, "trivial": 0, "found": 1, "documents": 1}


def test_a_gate_that_reports_names_the_leak_and_keeps_it(lmworks: Lmworks, leaky: Callable[[str], Path], tmp_path: Path) -> None:
    told = lmworks("corpus", "prepare", leaky("report"))
    assert told.code == 0 and kept(tmp_path / "run") == ["mine/0/0", "mine/0/1", "mine/0/2"], told.err
    report = json.loads((tmp_path / "run/corpus/report.json").read_text())
    (leak,) = report["contamination"]
    assert leak["id"] == "mine/0/1" and leak["against"].startswith("riddles") and QUESTION[:30] in leak["passage"]
    assert "kept, but contains protected text" in lmworks("corpus", "trace", tmp_path / "run", "mine/0/1").out


def test_a_gate_that_fails_stops_the_command_and_names_the_leak(lmworks: Lmworks, leaky: Callable[[str], Path], tmp_path: Path) -> None:
    recipe = leaky("fail")
    for _ in range(2):  # a second try finds it again
        error = lmworks("corpus", "prepare", recipe).error
        assert "1 training documents contain protected text, the first mine/0/1 that of riddles" in error
        assert "set corpus.decontaminate.action to drop" in error
        assert not (tmp_path / "run/corpus/report.json").exists()
    assert lmworks("corpus", "prepare", recipe, "--set", "corpus.decontaminate.action=drop").code == 0
    assert kept(tmp_path / "run") == ["mine/0/0", "mine/0/2"]


def test_a_dry_run_of_deduplication_says_what_prepare_will_drop_and_writes_nothing(lmworks: Lmworks, write: Write, tmp_path: Path) -> None:
    base, passage = words(1), words(9, 60)
    near = base.replace(base.split()[50], "another")
    dedup = {"substring": {"min_length": 50}}
    recipe = write([base, base.upper(), near, f"{words(2)} {passage}", f"{words(3)} {passage}"], corpus={"steps": [], "dedup": dedup})
    before = sorted(tmp_path.rglob("*"))
    found = json.loads(lmworks("corpus", "prepare", recipe, "--dedup-dry-run", "--json").out)
    assert sorted(tmp_path.rglob("*")) == before
    assert found[0]["came"]["documents"] == 5
    dropped = {method: one["documents"] for method, one in found[0]["dropped"].items()}
    assert dropped == {"duplicate": 1, "near_duplicate": 1, "passages_cut": 1}
    assert found[0]["dropped"]["passages_cut"]["bytes"] >= len(passage)
    example = found[0]["examples"]["near_duplicate"][0]
    assert (example["id"], example["copy_of"]) == ("mine/0/2", "mine/0/0") and example["copied_text"] == base[:400]
    told = lmworks("corpus", "prepare", recipe, "--dedup-dry-run").out
    assert "mine/0/2  near duplicate of mine/0/0" in told and "passages cut" in told
    assert lmworks("corpus", "prepare", recipe, "--json").error.startswith("--json needs --dedup-dry-run")
    assert lmworks("corpus", "prepare", recipe).code == 0
    assert kept(tmp_path / "run") == ["mine/0/0", "mine/0/3", "mine/0/4"], "it drops what the dry run has said"
