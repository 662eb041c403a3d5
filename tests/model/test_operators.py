"""Operators whose kernels are Python functions: what they promise the compiler, and that nothing imports it without need."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from lmworks.model import moe, states
from lmworks.model.chunked import attend_chunks, attend_chunks_backward, largest_logits
from lmworks.model.documents import attend_blocks, attend_blocks_backward
from lmworks.model.operators import operator, register_fake

TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")


def tensors(*shapes: tuple[int, ...], gradient: bool = False) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).requires_grad_(gradient) for shape in shapes]


def cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Each operator with arguments."""
    query, key, value = tensors((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 4), gradient=True)
    first, last = torch.zeros(2, 6, dtype=torch.int64), torch.arange(6).expand(2, 6).contiguous()
    with torch.no_grad():
        out, lse = attend_chunks(query, key, value, first, last, 0.3)
        blocks, kept = attend_blocks(query, key, value, None, 0.3, 4)
    x, weight, grad = tensors((32, 16), (2, 16, 16), (32, 16), gradient=True)
    ends = torch.tensor([16, 32], dtype=torch.int32)
    added, state, key_width = *tensors((3, 2, 4, 4), (2, 4, 4), gradient=True), (3, 2, 4, 4)
    factor = torch.rand(3, 2, requires_grad=True)
    delta = (*tensors(*[key_width] * 5, gradient=True), factor, state)
    with torch.no_grad():
        decayed, (mixed, delta_states) = states.decayed_states(added, factor, state), states.delta_states(*delta)
    return {
        "attend_chunks": (attend_chunks, (query, key, value, first, last, 0.3)),
        "attend_chunks_backward": (attend_chunks_backward, (out, query, key, value, first, last, out, lse, 0.3)),
        "largest_logits": (largest_logits, (query, key, first, last, 0.3)),
        "attend_blocks": (attend_blocks, (query, key, value, None, 0.3, 4)),
        "attend_blocks_backward": (attend_blocks_backward, (blocks, query, key, value, blocks, kept, 0.3, 4)),
        "grouped_mm": (moe.grouped_mm_cpu, (x, weight, ends)),
        "grouped_mm_backward": (moe.grouped_mm_cpu_backward, (grad, x, weight, ends)),
        "grouped_mm_bf16": (moe.grouped_mm_cpu, (*(one.bfloat16().detach().requires_grad_() for one in (x, weight)), ends)),
        "grouped_mm_backward_bf16": (moe.grouped_mm_cpu_backward, (grad.bfloat16(), x.bfloat16(), weight.bfloat16(), ends)),
        "decayed_states": (states.decayed_states, (added, factor, state)),
        "decayed_states_backward": (states._decayed_states_backward, (decayed, factor, decayed)),
        "delta_states": (states.delta_states, delta),
        "delta_states_backward": (states._delta_states_backward, (mixed, delta_states, *delta[:-1], delta_states)),
    }


@pytest.mark.parametrize("name", cases())
def test_it_is_what_its_registrations_say(name: str) -> None:
    """It changes no argument and returns none, its results have the shapes and strides of those without values, and it is differentiated by
    what is registered."""
    made, arguments = cases()[name]
    detached = tuple(one.detach().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one for one in arguments)
    assert set(torch.library.opcheck(made, detached, test_utils=TESTS).values()) == {"SUCCESS"}


def test_what_has_no_backward_pass_says_so() -> None:
    made, arguments = cases()["largest_logits"]
    with pytest.raises(RuntimeError, match="has no backward pass"):
        made(*arguments).sum().backward()


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x.tolist() and 2 * x  # a value, which cannot be traced


def test_the_compiler_does_not_trace_a_kernel() -> None:
    """Neither in a compiled function, nor below one that it gives up, whose calls it looks at one by one."""
    made = operator(_twice)
    register_fake(made)(torch.empty_like)
    x = torch.ones(3)
    seen: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        seen.append(graph)
        return graph.forward

    def traced(x: torch.Tensor) -> torch.Tensor:
        return made(x) + 1

    @torch._dynamo.disable(recursive=False)
    def given_up(x: torch.Tensor) -> torch.Tensor:
        return made(x)

    for function in (traced, lambda x: given_up(x) + 1):
        seen.clear()
        assert torch.equal(torch.compile(function, backend=backend)(x), function(x))
        assert not any("mul" in str(one.graph) for one in seen)
    assert torch.equal(made(x), 2 * x)


def test_training_without_the_compiler_does_not_import_it() -> None:
    """It takes longer to import than a small run to train."""
    code = """
    import sys, torch
    from lmworks.model.chunked import attend_chunks
    from parallel.parity import train

    train({}, "moe")
    query, first, last = torch.ones(1, 1, 2, 4, requires_grad=True), torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[0, 1]])
    attend_chunks(query, query, query, first, last, 1.0)[0].sum().backward()
    print("torch._dynamo" in sys.modules)
    """
    paths = ["tests", "tests/parallel"]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{textwrap.dedent(code)}"], capture_output=True, encoding="utf-8"
    )
    assert done.stdout.split() == ["False"], done.stderr
