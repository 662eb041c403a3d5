"""What general text costs is measured while a stage trains: the stage warns, stops when told to, and goes on as it was after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from command import Lmworks

from base_models import write_model, write_tokenizer
from cli.test_start_tuning import ROWS, write_recipe
from lmworks.metrics.log import read
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.shards.batch import IGNORE
from lmworks.tokenizer import load
from lmworks.train.observe.forgetting import GENERAL, RISE, shipped_text
from lmworks.train.validation import validate
from lmworks.watch.ledger import read_ledger
from lmworks.weights.huggingface import read_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_tokenizer(folder, "qwen")
    write_model(folder, ROWS)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": f"What is {a} + {b}?", "completion": f"It is {a + b}."} for a in range(9) for b in range(9)]
    path = tmp_path_factory.mktemp("chats") / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_general_text_begins_with_one_bos(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "llama")
    tokenizer = load(tmp_path)
    (bos,) = tokenizer.prefix
    for batches in shipped_text(tokenizer, 64, 3).values():
        assert batches[0].tokens[0, 0] == bos and bos not in batches[0].labels[0]


def test_the_cost_of_general_text_is_that_of_transformers(base: Path) -> None:
    """Bits per byte over the shipped text, each document from its beginning, nothing leaking from one row into another."""
    import transformers

    text = shipped_text(load(base), 512, 3)
    assert text.keys() == {"prose", "code", "languages"}
    found = validate(ParallelModel([read_model(base)]), text)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    nats, size = 0.0, 0
    for batches in text.values():
        for batch in batches:
            assert batch.tokens.shape == (3, 512)
            size += batch.text_bytes
            for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
                inputs = int((labels != IGNORE).sum())
                if inputs:
                    ids = torch.tensor([[*tokens[:inputs], labels[inputs - 1]]]).long()
                    with torch.no_grad():
                        nats += float(torch.nn.functional.cross_entropy(theirs(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
    assert 3 * 1500 < size <= 3 * 4096
    assert found["validation/bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_a_model_that_forgets_is_named_and_stops_when_told_to(lmworks: Lmworks, base: Path, chats: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, base, chats)
    ruin = ("--set", "tune.learning_rate=0.3", "--set", "train.validate_every=2 steps", "--set", "train.save_every=2 steps")
    stopped = lmworks("run", recipe, *ruin, "--set", "tune.forgetting.stop_bits_per_byte=0.2")
    assert stopped.code == 2
    line = " ".join(stopped.err.split())
    limit = "since tune began, which is more than tune.forgetting.stop_bits_per_byte (0.2); its checkpoints are kept"
    assert f"{limit}: lower tune.learning_rate (0.3)" in line
    run_dir = tmp_path / "run"
    assert not (run_dir / "evaluate").exists() and not (run_dir / "export").exists()

    done = lmworks("run", recipe, *ruin)
    assert done.code == 0, done.err
    assert "the model forgets; lower tune.learning_rate (0.3), train less" in " ".join(done.err.split())
    values = [line for line in read(run_dir / "tune") if RISE in line]
    assert values[-1][RISE] > 0.05 and not any(math.isnan(line[GENERAL]) for line in values)
    starts = {round(line[GENERAL] - line[RISE], 9) for line in values}
    assert len(starts) == 1, "a resumed stage compares with what it began with"
    events = [event["limit"] for event in read_ledger(run_dir / "ledger.jsonl") if event["event"] == "forgetting"]
    assert 0.2 in events and events[-1] == 0.05
    assert "Forgetting" in (run_dir / "report.html").read_text()


def test_a_careful_rate_is_not_warned_about(lmworks: Lmworks, base: Path, chats: Path, tmp_path: Path) -> None:
    done = lmworks("tune", write_recipe(tmp_path, base, chats), "--set", "tune.learning_rate=1e-6")
    assert done.code == 0, done.err
    assert "forgets" not in done.err
    assert all(abs(line[RISE]) < 0.01 for line in read(tmp_path / "run" / "tune") if RISE in line)
