"""Gemma 3 270M as published in GGUF, read by lmworks and by transformers."""

from __future__ import annotations

from itertools import pairwise
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
    cache, starts = ours.cache(1, 1200), [0, 300, 900, *range(1180, 1201)]  # pieces within and beyond the window, then single tokens
    for start, end in pairwise(starts):
        found = ours(tokens[:, start:end], cache=cache)
        cache.finish(end - start)
        assert float((found - expected[:, start:end]).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.slow  # the same with random weights: model/test_transformer, export/test_huggingface
def test_gradients_beyond_the_window_are_those_of_transformers(gemma: Path) -> None:
    """A row of 900 tokens, of which 15 of 18 layers see 512: in training, each block of queries multiplies the keys of its window."""
    import transformers

    opened = open_model(gemma)
    ours = opened.model.train().requires_grad_(True)
    ours.compute_dtype = torch.float32
    theirs = transformers.AutoModelForCausalLM.from_pretrained(gemma.parent, dtype=torch.float32, gguf_file=gemma.name)
    page = (Path(__file__).parents[2] / "docs" / "decisions.md").read_text(encoding="utf-8")
    ids = torch.tensor([opened.tokenizer.encode(page)[:901]])
    loss, their_loss = ours.loss(ids[:, :-1], ids[:, 1:]).total / 900, theirs(ids, labels=ids).loss
    loss.backward()
    their_loss.backward()
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), rel=1e-5)
    gradients, expected = ({name: one.grad for name, one in model.named_parameters()} for model in (ours, theirs))
    for layer in range(18):
        for part, name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")):
            found, their = gradients[f"layers.{layer}.attention.{part}.weight"], expected[f"model.layers.{layer}.self_attn.{name}.weight"]
            assert found is not None and their is not None
            assert float((found - their).abs().max() / their.abs().max()) < 1e-4, (layer, part)  # measured: 2.5e-5
