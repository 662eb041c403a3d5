"""What all engines are asked, and reasons that they share."""

from __future__ import annotations

from dataclasses import dataclass

from lmworks.deploy.flags import Flag
from lmworks.deploy.hardware import GB, Hardware
from lmworks.deploy.sizing import Fit, Scenario
from lmworks.deploy.source import Source

UNTRIED = "lmworks has not run it on GPUs."
"""In container files: what their authors could not try."""


@dataclass(frozen=True)
class Request:
    """A model, where it shall run, what for, and how it fits there."""

    source: Source
    hardware: Hardware
    scenario: Scenario
    fit: Fit
    host: str
    port: int

    @property
    def context_reason(self) -> str:
        fit, source = self.fit, self.source
        if fit.context == source.context:
            return "the model's whole context"
        cache = fit.kv_token * fit.context / GB
        return f"of the {source.context:,} tokens of the model; {cache:.2f} GB of KV cache per sequence and device"

    @property
    def sequences_reason(self) -> str:
        fit = self.fit
        return (
            f"sequences at once and replica: {fit.cache / GB:.1f} GB of KV cache, {fit.kv_token / 1e3:.1f} kB per token; "
            f"at most what {self.scenario.name} asks"
        )

    @property
    def no_speculation_reason(self) -> str:
        if self.source.model.mtp is None:
            return "no speculative decoding: the model has no layers of multi-token prediction"
        if not self.source.mtp:
            return "no speculative decoding: the config states layers of multi-token prediction, but their weights are missing"
        if not self.scenario.speculate:
            return "no speculative decoding: with many sequences at once, verifying drafts takes the compute of other sequences"
        return "no speculative decoding: this engine does not use layers of multi-token prediction"


def dtype_of(source: Source) -> tuple[str, str]:
    """The type in which the model computes, and why."""
    if source.dtype == "float32":
        return "float32", "the type of the files; the engine's default would round them to 16 bits"
    return source.dtype if source.dtype in ("bfloat16", "float16") else "auto", "the type of the files"


def parallel_reason(request: Request) -> str:
    """Why the model is divided as it is."""
    fit = request.fit
    size = f"{fit.weights / GB:.1f} GB of weights and {fit.cache / GB:.1f} GB of KV cache per GPU"
    if request.scenario.widest:
        return f"all GPUs work on each token, which shortens the wait: {size}"
    return f"as few GPUs per replica as leave room for {request.scenario.room} full sequences: {size}"


def quantized(source: Source, hardware: Hardware) -> list[Flag]:
    """A note on the number format of the weights."""
    if not source.quantization:
        return [Flag("quantization", None, "the weights are not quantized", note=True)]
    slow = source.bits == 8 and not hardware.fp8 and not hardware.on_cpu
    more = "; this GPU does not multiply FP8, so FP8 weights save memory and no time" if slow else ""
    return [Flag("quantization", None, f"read from config.json: weights of {source.bits} bits{more}", note=True)]
