"""The kernels of flash-linear-attention by Triton's interpreter, on a CPU, beside our chunks: largest differences as JSON."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor


def interpret() -> None:
    """What the interpreter lacks: a device to choose tile sizes by, and the methods of Triton's numbers in loops."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import _implicit_cvt

    Autotuner._bench = lambda self, *args, config, **meta: [1.0, 1.0, 1.0]
    for name in ("chunk_delta_h", "chunk_h"):
        module: Any = import_module(f"fla.ops.common.{name}")
        module.range = lambda *ends: map(_implicit_cvt, range(*map(int, ends)))


def furthest(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def compare(name: str, positions_BT: Tensor, with_state: bool) -> list[float]:
    """Of outputs, the last state, and the gradient of each input; relative to the largest."""
    from lmworks.model import delta_rule, linear_kernels, ssd

    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    (B, T), G, H, K, V = positions_BT.shape, 2, 4, 16, 16
    inputs = [drawn(B, T, G, K), torch.nn.functional.normalize(drawn(B, T, G, K), dim=-1), drawn(B, T, H, V), -drawn(B, T, H).abs()]
    inputs += [drawn(B, T, H).sigmoid()] if name == "delta_rule" else []
    state = drawn(B, H, K, V) if with_state else None
    leaves = [x.requires_grad_() for x in (*inputs, *(() if state is None else (state,)))]
    weights = drawn(B, T, H, V)
    ours = ssd.scan if name == "scan" else delta_rule.delta_rule
    results = []
    for run in (getattr(linear_kernels, name), ours):
        out, last = run(*inputs, positions_BT, state)
        gradients = torch.autograd.grad((out * weights).sum() + last.square().sum(), leaves)
        results.append((out, last, *gradients))
    return [furthest(found, expected) for found, expected in zip(*results, strict=True)]


if __name__ == "__main__":
    name, with_state = json.load(sys.stdin)
    interpret()
    lengths = (50, 20, 1, 1, 3, 75)  # borders within chunks of 64, two of them of documents of one token
    first = torch.cat([torch.arange(length) for length in lengths])
    print(json.dumps(compare(name, torch.stack((first, torch.arange(sum(lengths)) + 3 * with_state)), with_state)))
