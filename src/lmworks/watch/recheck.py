"""Silent corruption of arithmetic: the same computation, run twice, must give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lmworks.watch.checksum import checksum, checksums


def compare_two_runs(run: Callable[[], Tensor], modules: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> list[str]:
    """Run forward and backward twice and compare the results of this rank bit for bit; returns what differed, in order of computation.

    run: runs forward and backward and returns the loss. It is called twice with the same random state, which is restored afterwards.
    modules: their outputs and the gradients of these are compared; both are local to this rank.
    parameters: their gradients are compared too, and discarded. Gradients that are summed over ranks show an error of any rank on all.
    """
    with _preserve_random_state():
        first = _run_with_checksums(run, modules, parameters)
    with _preserve_random_state():
        second = _run_with_checksums(run, modules, parameters)
    return [name for name in first if first[name] != second.get(name)]


def _run_with_checksums(run: Callable[[], Tensor], modules: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> dict[str, int]:
    sums: dict[str, Tensor] = {}

    def forward(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = next(tensors_in(output))
            sums[f"output of {name}"] = checksum(tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: sums.__setitem__(f"gradient of {name}", checksum(grad)))

        return hook

    handles = [module.register_forward_hook(forward(name)) for name, module in modules.items()]
    try:
        sums["loss"] = checksum(run())
    finally:
        for handle in handles:
            handle.remove()
    found = {name: int(value) for name, value in sums.items()}
    grads = {f"gradient of {name}": p.grad for name, p in parameters.items() if p.grad is not None}
    found |= checksums(grads)
    for parameter in parameters.values():
        parameter.grad = None
    return found


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in the output of a module, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Iterable):
        for one in output:
            yield from tensors_in(one)


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
