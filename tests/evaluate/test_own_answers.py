"""The answers that a model gave before it was tuned: whose they are, and what they cost."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from lmworks.evaluate import answers
from lmworks.evaluate.answers import answer_bits, own_answer_bits
from lmworks.evaluate.bits_per_byte import DocumentBits
from lmworks.evaluate.logprobs import BatchedLogProbs, PlainLogProbs
from lmworks.evaluate.records import START
from lmworks.io import jsonl
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import load
from lmworks.train.data.chat import build_chat_data
from lmworks.weights.open import OpenModel
from saved_run import save_run
from small_config import small_config
from tiny_run import Tiny


def test_conversations_that_are_left_out_are_counted(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The bits of the others alone would look like those of all."""
    tokenizer, model = load(tiny.run_dir / "tokenizer"), save_run(tiny, tmp_path / "run")["tuned"]
    asked = [f"What is {n}? " * (1 if n % 3 else 20) for n in range(40)]
    rows = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "It is."}]} for text in asked]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"name": "mine", "kind": "files", "path": str(tmp_path / "chats.jsonl")}
    tune = {"data": [data], "sequence_length": "512 tokens", "validation_fraction": 0.5}
    build_chat_data(Recipe.model_validate({"name": "t", "tune": tune}), tokenizer, tmp_path / "data")
    every = answer_bits(tmp_path / "data", tokenizer, PlainLogProbs(model), 512, "answers")
    assert "left out" not in capfd.readouterr().err
    fitting = answer_bits(tmp_path / "data", tokenizer, PlainLogProbs(model), 48, "answers")
    long = len(every) - len(fitting)
    said = f"{long} of {len(every)} conversations are left out: {long} are longer than the context of 48 tokens, 0 have no answer with text"
    assert 0 < long < len(every)
    assert said in " ".join(capfd.readouterr().err.split())


def test_answers_of_the_present_base_model_are_measured_in_bits(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For it and later models, but not for the model that it began as, which is measured after it, and not where it cannot chat."""
    monkeypatch.setattr(answers, "TOKENS", 4)
    tokenizer = load(tiny.run_dir / "tokenizer")
    model = initialize(Transformer(Model(**small_config(vocab_size=tokenizer.vocab_size))), seed=0).eval()

    def measured(name: str, chat: bool = True) -> list[DocumentBits]:
        return own_answer_bits(OpenModel(model, tokenizer, 256, chat, name), BatchedLogProbs(model, 256), tmp_path)

    base, row = measured("base"), jsonl.read(tmp_path / "answers-before.jsonl")[0]
    ids, first = row["prompt"] + row["answer"], len(row["prompt"])
    with torch.no_grad():
        logprobs = model(torch.tensor([ids]))[0].double().log_softmax(-1)
    assert base[0].bits == pytest.approx(-sum(float(logprobs[at - 1, ids[at]]) for at in range(first, len(ids))) / math.log(2), rel=1e-5)
    assert measured("tuned") == base and measured(START) == []
    assert measured("base", chat=False) == measured("tuned") == [], "what an earlier base model said is gone"
