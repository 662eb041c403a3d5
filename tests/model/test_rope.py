"""Positions and their extensions against the implementations in transformers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lmworks.model.rope import cos_sin, frequencies
from lmworks.recipe.schema.model import Rope
from lmworks.recipe.schema.train import RopeChange

DIM, ORIGINAL = 64, 128
START = Rope(theta=10_000.0)
CHANGES = {
    "none": RopeChange(),
    "abf": RopeChange(theta=1_000_000.0),
    "linear": RopeChange(scaling="linear", factor=8),
    "ntk": RopeChange(scaling="ntk", factor=8, original_max_position_embeddings="128 tokens"),
    "yarn": RopeChange(scaling="yarn", factor=8, original_max_position_embeddings="128 tokens"),
    "yarn-abf": RopeChange(theta=500_000.0, scaling="yarn", factor=32, original_max_position_embeddings="128 tokens"),
    "llama3": RopeChange(scaling="llama3", factor=8, original_max_position_embeddings="128 tokens"),
    "llama3-abf": RopeChange(theta=500_000.0, scaling="llama3", factor=32, original_max_position_embeddings="128 tokens"),
}
NAMES = {"none": "default", "linear": "linear", "ntk": "dynamic", "yarn": "yarn", "llama3": "llama3"}


def theirs(rope: Rope) -> LlamaConfig:
    # dynamic NTK of factor 1 at `factor` times the length is NTK of that factor
    factor = 1.0 if rope.scaling == "ntk" else rope.factor
    parameters = {
        "rope_type": NAMES[rope.scaling],
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.partial_rotary_factor,
        "factor": factor,
    }
    if rope.scaling in ("yarn", "llama3"):
        parameters["original_max_position_embeddings"] = ORIGINAL
    if rope.scaling == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, head_dim=DIM, max_position_embeddings=ORIGINAL, rope_parameters=parameters
    )


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", CHANGES)
def test_frequencies_equal_transformers(name: str, fraction: float) -> None:
    """Tolerance 1e-5: fp32 powers, taken in another order."""
    factors = {"low_freq_factor": 0.5, "high_freq_factor": 6.0}  # not the defaults
    rope = CHANGES[name].apply(START.model_copy(update={"partial_rotary_factor": fraction, **factors}))
    found, scale = frequencies(rope, DIM)
    config = theirs(rope)
    if rope.scaling == "none":
        expected = 1.0 / rope.theta ** (torch.arange(0, int(DIM * fraction), 2) / int(DIM * fraction))
        factor = 1.0
    else:
        length = int(ORIGINAL * rope.factor) if rope.scaling == "ntk" else None
        expected, factor = ROPE_INIT_FUNCTIONS[NAMES[rope.scaling]](config, torch.device("cpu"), seq_len=length)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert scale == pytest.approx(factor)
    if rope.scaling == "yarn":
        assert scale == pytest.approx(0.1 * math.log(rope.factor) + 1)
    if name != "none":
        assert (found - frequencies(START.model_copy(update={"partial_rotary_factor": fraction}), DIM)[0]).abs().max() > 1e-4


def test_yarn_of_gpt_oss_rounds_no_dimension() -> None:
    """Its published numbers, with which the ramp goes from dimension 8.1 to 17.4; rounding would move a frequency by 4 in 100."""
    rope = Rope(theta=150_000.0, scaling="yarn", factor=32, original_max_position_embeddings="4096 tokens", truncate=False)
    config = GptOssConfig()
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    found, scale = frequencies(rope, config.head_dim)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert scale == pytest.approx(factor)
    rounded, _ = frequencies(rope.model_copy(update={"truncate": True}), config.head_dim)
    assert float((rounded / found - 1).abs().max()) > 0.03
    assert RopeChange(scaling="none").apply(rope) == Rope(theta=150_000.0, original_max_position_embeddings="4096 tokens")


@pytest.mark.parametrize("name", ["none", "abf", "linear", "yarn", "yarn-abf", "llama3", "llama3-abf"])
def test_tables_equal_transformers(name: str) -> None:
    """At the first, the last original and far positions. Angles of 900 radians in fp32 are good to 6e-5."""
    rope = CHANGES[name].apply(START)
    positions = torch.tensor([[0, 1, 77, 127, 500, 1023]])
    inverse, scale = frequencies(rope, DIM)
    found = cos_sin(positions, inverse, scale, torch.float32)
    expected = LlamaRotaryEmbedding(theirs(rope))(torch.zeros(1, 1, DIM), positions)
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:, 0], other, rtol=0, atol=2e-4)
