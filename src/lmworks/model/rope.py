"""Rotary position embeddings (RoPE) and their extension to longer contexts.

Shapes: B batch, T time, R rotated dimensions of a head (fraction * head_dim).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmworks.recipe.schema.model import Rope


def frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies (R/2,) in radians per token, and the factor on cos and sin (1 except for YaRN).

    Scaling: `linear` is position interpolation (Chen et al. 2023, arXiv:2306.15595); `ntk` raises the base so that the
    slowest frequency stretches by `factor`; `yarn` interpolates slow frequencies only (Peng et al. 2023, arXiv:2309.00071), and so does
    `llama3`, with a ramp over rotations (Llama 3.1, arXiv:2407.21783).
    A raised `theta` alone is ABF (Xiong et al. 2023, arXiv:2309.16039).
    """
    rotated = int(head_dim * rope.partial_rotary_factor)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / max(rotated, 1)
    if rope.scaling == "ntk":
        return (rope.theta * rope.factor ** (rotated / (rotated - 2))) ** -exponents, 1.0
    base = 1.0 / rope.theta**exponents
    if rope.scaling == "linear":
        return base / rope.factor, 1.0
    if rope.scaling == "yarn":
        assert rope.original_max_position_embeddings is not None  # checked in the recipe
        ramp = _yarn_ramp(rope, rotated, int(rope.original_max_position_embeddings))
        return base / rope.factor * ramp + base * (1 - ramp), 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    if rope.scaling == "llama3":
        assert rope.original_max_position_embeddings is not None
        rotations = int(rope.original_max_position_embeddings) * base / (2 * math.pi)
        kept = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return base / rope.factor * (1 - kept) + base * kept, 1.0
    return base, 1.0


def _yarn_ramp(rope: Rope, rotated: int, original_length: int) -> Tensor:
    """1 for frequencies that are fully interpolated, 0 for unchanged ones; (R/2,)."""

    def dimension(rotations: float) -> float:
        return rotated * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    low = max(math.floor(first) if rope.truncate else first, 0)
    high = min(math.ceil(last) if rope.truncate else last, rotated - 1)
    return ((torch.arange(rotated // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)


def cos_sin(positions_BT: Tensor, inverse_frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables (B, 1, T, R) for `rotate`, computed in fp32 and then cast."""
    angles = positions_BT[:, None, :, None].float() * inverse_frequencies
    half = (torch.stack((angles.cos(), angles.sin())) * scale).to(dtype)  # of the R dimensions, which have each angle twice
    cos, sin = torch.cat((half, half), dim=-1)
    return cos, sin


def rotate(x_BHTC: Tensor, cos_B1TR: Tensor, sin_B1TR: Tensor) -> Tensor:
    """Rotate the first R dimensions of each head, pairing dimension i with i + R/2; the others pass through."""
    rotated = cos_B1TR.shape[-1]
    turn, keep = x_BHTC[..., :rotated], x_BHTC[..., rotated:]
    first, second = turn.chunk(2, dim=-1)
    turned = turn * cos_B1TR + torch.cat((-second, first), dim=-1) * sin_B1TR
    return torch.cat((turned, keep), dim=-1) if keep.shape[-1] else turned


def rotate_(x_BHTC: Tensor, cos_B1TR: Tensor, sin_B1TR: Tensor) -> None:
    """`rotate` in place, in four operators, with a sine of `signed`: the same bits."""
    turn = x_BHTC[..., : cos_B1TR.shape[-1]]
    swapped = turn.roll(cos_B1TR.shape[-1] // 2, -1).mul_(sin_B1TR)
    turn.mul_(cos_B1TR).add_(swapped)


def signed(sin_B1TR: Tensor) -> Tensor:
    """The sines with the sign of what they are multiplied by in `rotate`."""
    first, second = sin_B1TR.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)
