"""`lmworks ablate` with kinds that other tests only resolve: whole ablations of tiny runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command import Lmworks

from lmworks.ablate.resolve import Experiment, resolve
from lmworks.ablate.run_set import Run
from lmworks.ablate.runs import recipe_of
from lmworks.host import machine
from lmworks.metrics.log import read
from lmworks.shards.batches import Batches
from lmworks.watch.ledger import read_ledger
from tiny_run import Tiny, checkpoint


def write(folder: Path, **keys: Any) -> Experiment:
    """An ablation with these keys in `folder`."""
    path = folder / "made.yaml"
    path.write_text(yaml.safe_dump({"out": str(folder / "out")} | keys, sort_keys=False))
    return resolve(path)


@pytest.mark.slow
def test_an_annealed_checkpoint_reads_old_and_new_data(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole: a real checkpoint of 70% code and 30% docs, continued with its mixture, and with 40% of it and 60% of docs."""
    monkeypatch.setenv(machine.VARIABLE, "speed=1e9,cores=1,peak=1e11")  # so that no speed is measured
    trained = tiny.copy(tmp_path / "run")
    general = yaml.safe_load(tiny.recipe.read_text())["train"]["phases"][0]
    trained.walk("train.phases=" + json.dumps([general | {"tokens": "3072 tokens", "batch_ramp": None}]), last="pretrain")
    start = trained.run_dir / "checkpoints" / "step-00000008"
    experiment = write(
        tmp_path, kind="anneal", recipe=str(trained.run_dir), checkpoint=str(start), budget="4096 tokens", seeds=2,
        candidates={"docs": {"docs": 1.0}}, measures=["validation/bits_per_byte", "validation/docs/bits_per_byte"],
    )  # fmt: skip
    done = lmworks("ablate", experiment.path, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["unfinished"] == [] and document["started_at"] == 8 * 256
    fractions: dict[str, list[float]] = {}
    for run in experiment.runs:
        events = read_ledger(run.directory / "ledger.jsonl")
        assert [(e["event"], e["step"]) for e in events if e["event"] == "resume"] == [("resume", 8)], "with its optimizer state"
        lines = read(run.directory)
        assert [line["step"] for line in lines] == list(range(9, 25)), "16 steps of 256 tokens"
        rates = [line["optim/learning_rate"] for line in lines]
        assert rates[0] == pytest.approx(0.01 * 15 / 16, rel=0.08) and rates[-1] < 0.1 * rates[0] and rates == sorted(rates, reverse=True)
        fractions.setdefault(run.arm.name, []).append(_fraction_of_docs(run))
    # 128 sequences of 32 tokens: the mixture is met by quota, and a sequence that begins in one document may end in the next
    assert fractions == {"old": [pytest.approx(0.3, abs=0.03)] * 2, "docs": [pytest.approx(0.72, abs=0.03)] * 2}
    values = document["measures"]["validation/docs/bits_per_byte"]["values"]
    for seed in ("1", "2"):
        assert values["docs"][seed] < values["old"][seed], "docs are predicted better behind 2.4 times as many of them"
    assert {one["arm"] for one in document["verdicts"]} == {"docs"} and len(document["verdicts"]) == 2
    assert start.is_dir(), "the run that was continued keeps its checkpoint"


def _fraction_of_docs(run: Run) -> float:
    """Of the sequences that a run has read behind the checkpoint, by the order of its own shards."""
    order = Batches(recipe_of(run), run.directory / "shards").order
    located = order.locate(1, np.arange(4096 // 32))
    return float((located.source == order.sources.index("docs")).mean())


@pytest.mark.slow
def test_trained_tokenizers_are_compared_per_byte_of_equal_text(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole: three tokenizers are trained, each with a model of its vocabulary, and all are judged on the same held-out bytes."""
    monkeypatch.setenv(machine.VARIABLE, "speed=1e9,cores=1,peak=1e11")
    keys = {"vocab_sizes": [320], "kinds": ["sentencepiece"], "seeds": 1, "budget": "3072 tokens"}
    experiment = write(tmp_path, kind="tokenizer", recipe=str(tiny.run_dir), **keys)
    done = lmworks("ablate", experiment.path, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["unfinished"] == []
    results, rows = {}, {}
    for run in experiment.runs:
        results[run.arm.name] = json.loads((run.directory / "evaluate" / "results.json").read_text())["models"]["base"]["bits_per_byte"]
        rows[run.arm.name] = checkpoint(run.directory)["model/embedding.weight"].shape[0]
    assert rows == {"recipe": 512, "vocab-320": 320, "sentencepiece": 512}
    assert len({one["overall"]["bytes"] for one in results.values()}) == 1, "the same text, however many tokens it is"
    assert len({one["overall"]["tokens"] for one in results.values()}) == 3
    values = document["measures"]["evaluation/bits_per_byte"]["values"]
    assert values == {arm: {"1": one["overall"]["bits_per_byte"]} for arm, one in results.items()}
    assert {one["arm"] for one in document["verdicts"]} == {"vocab-320", "sentencepiece"}
