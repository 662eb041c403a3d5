"""Runs any model in fp64, whatever type its code names: where two implementations differ by more than rounding, it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})
_TAKES = frozenset({"__getitem__", "unbind", "chunk", "split", "index_select", "select", "narrow"})
# move values or make constants; nothing is rounded
_EXACT = frozenset({
    "_to_copy", "clone", "copy_", "detach", "alias", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "zeros",
    "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full", "scalar_tensor", "fill_", "zero_",
    "embedding", "index_select", "gather", "cat", "stack", "_local_scalar_dense", "constant_pad_nd",
})  # fmt: skip


@contextmanager
def in_float64() -> Iterator[set[str]]:
    """Within it every floating-point operation is done in fp64, on weights of any type, which stay as they are: they are widened where they
    are used, a tensor at a time, so that a model is not in memory twice.

    Casts to narrower types in the code of the model (`x.float()`, `softmax(dtype=torch.float32)`) become casts to fp64; transformers has
    them in norms, routers, softmax and rotary tables. Yields the names of operations that computed in a narrower type all the same, because
    they could not be seen from here: empty in all classes that lmworks exports.
    """
    narrow: set[str] = set()
    with torch.no_grad(), _Watch(narrow), _Widen():
        yield narrow


class _Widen(TorchFunctionMode):
    """Widens floating-point tensors and types among the arguments of each function."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("__get__", "size", "dim", "numel", "stride", "is_contiguous"):  # about a tensor, not its values
            return func(*args, **kwargs)
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        # what is changed in place cannot be replaced; of an embedding or of a stack of experts, only the part that is taken is widened
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        kept = 2 if func is F.embedding else 1 if in_place or name in _TAKES else 0
        return _wide(func(*args[:kept], *map(_wide, args[kept:]), **{key: _wide(value) for key, value in kwargs.items()}))


class _Watch(TorchDispatchMode):
    """Notes the operations that compute in a type narrower than fp64."""

    def __init__(self, narrow: set[str]) -> None:
        super().__init__()
        self.narrow = narrow

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        name = func.overloadpacket.__name__
        parts = out if isinstance(out, list | tuple) else (out,)
        if not is_view and name not in _EXACT and any(isinstance(one, Tensor) and one.dtype in _NARROW for one in parts):
            self.narrow.add(name)
        return out


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype in _NARROW else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    if type(value) in (list, tuple):
        return type(value)(_wide(one) for one in value)
    return value
