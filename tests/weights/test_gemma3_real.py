"""Gemma 3 270M as published in GGUF, read by lmworks and by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gemma3 import write_gguf
from lmworks.inference.model import for_inference
from lmworks.weights.open import open_model

TEXT = "The capital of France is Paris. The capital of Italy is"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gemma") / "gemma.gguf")


@pytest.mark.slow  # the same with random weights: test_sliding_rope, export/test_huggingface
@torch.no_grad()
def test_logits_and_tokens_are_those_of_transformers(gemma: Path) -> None:
    import transformers

    opened = open_model(gemma)
    ours = for_inference(opened.model, torch.float32, join=False)
    options = {"gguf_file": gemma.name}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(gemma.parent, dtype=torch.float32, **options).eval()
    ids = opened.tokenizer.encode(TEXT)
    assert ids == transformers.AutoTokenizer.from_pretrained(gemma.parent, **options)(TEXT)["input_ids"]
    assert opened.tokenizer.decode([int(ours(torch.tensor([ids]))[0, -1].argmax())]) == " Rome"
    beyond_the_window = torch.randint(1, 200_000, (1, 1200), generator=torch.Generator().manual_seed(0))
    for tokens in (torch.tensor([ids]), beyond_the_window):
        found, expected = ours(tokens), theirs(tokens).logits
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
