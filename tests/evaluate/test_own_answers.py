"""The answers that a model gave before it was tuned: whose they are, and what they cost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lmworks.evaluate import answers
from lmworks.evaluate.answers import own_answer_bits
from lmworks.evaluate.bits_per_byte import DocumentBits
from lmworks.evaluate.logprobs import BatchedLogProbs
from lmworks.evaluate.records import START
from lmworks.io import jsonl
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.model import Model
from lmworks.tokenizer import load
from lmworks.weights.open import OpenModel
from small_config import small_config
from tiny_run import Tiny


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
