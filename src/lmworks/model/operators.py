"""Operators for the compiler whose kernels are Python functions.

`torch.library.custom_op` makes the same, and imports the compiler when an operator is first called: over a second of every process that
trains or generates without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_NAMESPACE = "lmworks"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def operator(kernel: Callable[..., Any]) -> Any:
    """Decorator: the function becomes the kernel, on all devices, of the operator `torch.ops.lmworks.NAME`, which is returned.

    The types of its arguments and results are those of the function's signature. It must return new tensors and change no argument.
    Without `register_autograd`, a backward pass through it is an error.
    """
    name = kernel.__name__.lstrip("_")
    _library.define(name + torch.library.infer_schema(kernel, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _hidden_from_compiler(kernel), "CompositeExplicitAutograd")
    made = getattr(getattr(torch.ops, _NAMESPACE), name).default
    _derivatives[made] = _Derivative()
    torch.library.register_autograd(made, _derivatives[made].differentiate, setup_context=_derivatives[made].keep, lib=_library)
    return made


def register_fake(made: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of the function that returns results without values, as `torch.library.register_fake`."""
    return lambda function: torch.library.register_fake(made, function, lib=_library)


def register_autograd(made: Any, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
    """How an operator is differentiated, as `torch.library.register_autograd`."""
    _derivatives[made].backward, _derivatives[made].setup_context = backward, setup_context


class _Derivative:
    """torch asks for it when a class of autograd functions is made, which is before the functions are known that need the operator."""

    backward: Callable[..., Any] | None = None
    setup_context: Callable[..., None] | None = None

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if self.setup_context is not None:
            self.setup_context(ctx, inputs, output)

    def differentiate(self, ctx: Any, *grads: Any) -> Any:
        if self.backward is None:
            raise RuntimeError("this operator has no backward pass")
        return self.backward(ctx, *grads)


_derivatives: dict[Any, _Derivative] = {}


def _hidden_from_compiler(kernel: Callable[..., Any]) -> Callable[..., Any]:
    disabled: list[Callable[..., Any]] = []

    def run(*inputs: Any) -> Any:
        compiler: Any = sys.modules.get("torch._dynamo")
        if compiler is None:  # then nothing traces the kernel
            return kernel(*inputs)
        if not disabled:
            disabled.append(compiler.disable(kernel))
        return disabled[0](*inputs)

    return run
