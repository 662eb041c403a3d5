"""Silent corruption of arithmetic: the same computation, run twice, must give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lmworks.watch.checksum import checksum, checksums


def compare_two_runs(run: Callable[[], Tensor], modules: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> list[str]:
    """Run forward and backward twice and compare, bit for bit, what this rank computed; returns what differed, in the order of the work.

    run: goes forward and backward and returns the loss; it is called twice with the same random state, which is put back afterwards.
    modules: their outputs, and the gradients that reach these, are compared: both belong to this rank alone.
    parameters: their gradients are compared too, and dropped; where they are summed over ranks, an error of one shows on all.
    """
    with _random_state_kept():
        first = _once(run, modules, parameters)
    with _random_state_kept():
        second = _once(run, modules, parameters)
    return [name for name in first if first[name] != second.get(name)]


def _once(run: Callable[[], Tensor], modules: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> dict[str, int]:
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
    """The tensors of what a module returned, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Iterable):
        for one in output:
            yield from tensors_in(one)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
