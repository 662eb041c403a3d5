"""The quantization schemes, and the limits within which a result counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from lmworks.errors import UserError


@dataclass(frozen=True)
class Limits:
    """What a result must keep to, against the original on held-out text.

    kl: largest mean KL divergence of the next-token distribution, in nats
    same_choice: least share of tokens at which both models rank the same token first
    perplexity_ratio: largest ratio of perplexities
    error: largest root-mean-square error of one quantized tensor, relative to the root mean square of its values
    expert_tokens: least calibration tokens per expert without a warning
    """

    kl: float
    same_choice: float
    perplexity_ratio: float
    error: float
    expert_tokens: int = 128


@dataclass(frozen=True)
class Scheme:
    """A way to store weights. `about` describes it in a few words; `format` is the file format; `kind` is its name in the library that
    makes it; `calibrated` says whether the library runs text through the model."""

    name: str
    about: str
    format: Literal["gguf", "compressed-tensors"]
    kind: str
    limits: Limits
    calibrated: bool = False


SCHEMES = {
    one.name: one
    for one in (
        Scheme("gguf-q8_0", "8.5 bits per weight", "gguf", "Q8_0", Limits(0.005, 0.97, 1.01, 0.02)),
        Scheme("gguf-q6_k", "6.6 bits per weight", "gguf", "Q6_K", Limits(0.01, 0.95, 1.02, 0.04)),
        Scheme("gguf-q5_k_m", "5 to 6.6 bits per weight", "gguf", "Q5_K_M", Limits(0.025, 0.92, 1.03, 0.08)),
        Scheme("gguf-q4_k_m", "4 to 6.6 bits per weight", "gguf", "Q4_K_M", Limits(0.06, 0.87, 1.07, 0.15)),
        Scheme("fp8", "FP8 (E4M3), a scale per row and per token", "compressed-tensors", "fp8", Limits(0.03, 0.92, 1.03, 0.06)),
        Scheme("int8", "INT8, a scale per row and per token", "compressed-tensors", "int8", Limits(0.03, 0.92, 1.03, 0.03)),
        Scheme("gptq", "INT4, groups of 32 to 128, GPTQ", "compressed-tensors", "gptq", Limits(0.1, 0.85, 1.1, 0.25), calibrated=True),
        Scheme("awq", "INT4, groups of 32 to 128, AWQ", "compressed-tensors", "awq", Limits(0.1, 0.85, 1.1, 0.25), calibrated=True),
    )
}  # fmt: skip


def chosen(text: str) -> list[Scheme]:
    """The schemes of `--to`. Raises `UserError` for an unknown one."""
    names = list(dict.fromkeys(filter(None, (part.strip().lower() for part in text.split(",")))))
    if unknown := next((name for name in names if name not in SCHEMES), None):
        raise UserError(f"--to {unknown}: no such scheme; the schemes are {', '.join(SCHEMES)}")
    if not names:
        raise UserError(f"--to names no scheme; the schemes are {', '.join(SCHEMES)}")
    return [SCHEMES[name] for name in names]


def with_limits(scheme: Scheme, given: Sequence[str]) -> Scheme:
    """The scheme with the limits of `--limit NAME=VALUE`. Raises `UserError`."""
    known = {one.name: one.type for one in fields(Limits)}
    changed: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            changed[name] = int(value) if known[name] == "int" else float(value)
        except (KeyError, ValueError):
            raise UserError(f"--limit {text}: write NAME=NUMBER with one of the names {', '.join(known)}") from None
    return replace(scheme, limits=replace(scheme.limits, **changed))
