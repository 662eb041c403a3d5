"""Steps of decoding on fake CUDA tensors, for `on_fake_cuda.py`."""

from __future__ import annotations

from typing import Any

import torch
from host_waits import HostWaits
from traced_steps import model_of, ranks_of, recipe_of

from lmworks.inference.batching import ContinuousBatch
from lmworks.inference.model import for_inference
from lmworks.inference.sampling import GenerateOptions
from lmworks.recipe.schema.layout import Layout

ROWS: list[dict[str, Any]] = [
    {"max_new_tokens": 3}, {"max_new_tokens": 5, "temperature": 1.0, "logprobs": 2},
    {"max_new_tokens": 9, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"max_new_tokens": 9, "temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.1, "logit_bias": ((5, 1.0),)},
    {"max_new_tokens": 9, "stop_ids": (3,), "min_tokens": 2},
]  # fmt: skip


class Half:
    """A grammar that allows the first ids."""

    def allowed(self) -> torch.Tensor:
        return torch.ones(20, dtype=torch.bool)

    def accept(self, token: int) -> int:
        return token


def steps(kinds: list[str]) -> dict[str, Any]:
    """The reports of all steps by the kind of model, from prompts of which some are read in pieces until the last row ends; and that of a
    step of four like rows (`plain`)."""
    return {kind: {"steps": _steps(kind), "plain": _plain(kind)} for kind in kinds}


def _batch(kind: str, **options: Any) -> ContinuousBatch:
    with ranks_of(Layout()) as ranks:
        return ContinuousBatch(for_inference(model_of(recipe_of(kind), ranks).parts[0]), **options)


def _steps(kind: str) -> list[dict[str, Any]]:
    batch, found = _batch(kind, max_rows=4, prefill_tokens=8), []
    for seed, row in enumerate(ROWS):
        batch.add([1, 2, 3 + seed] * (1 + seed), GenerateOptions(**row), seed, Half() if seed in (1, 4) else None)
    while batch.busy:
        with HostWaits() as seen:
            came = batch.step()
        found.append(seen.report() | {"tokens": len(came)})
    return found


def _plain(kind: str) -> dict[str, Any]:
    batch = _batch(kind)
    for seed in range(4):
        batch.add([1, 2, 3 + seed], GenerateOptions(max_new_tokens=9, temperature=1.0), seed)
    for _ in range(2):
        with HostWaits() as seen:
            batch.step()
    return seen.report()
