"""Lists what makes the host wait for the device, by file and line, while code runs on fake CUDA tensors."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lmworks

_SOURCES = str(Path(lmworks.__file__).parent) + "/"
_aten = torch.ops.aten
# Operators whose result has a shape that only the device knows.
_DATA_DEPENDENT = {"nonzero", "masked_select", "repeat_interleave", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
_tolist = FakeTensor.tolist
_LIBRARY = ctypes.CDLL(None)  # what is loaded in this process: `on_fake_cuda.py` has loaded fake_cuda.cpp


@dataclass(frozen=True)
class Copy:
    """A copy from the host to the device. `pinned`: from page-locked memory. Only a copy that is both `pinned` and `non_blocking` is one
    that the host does not wait for."""

    where: str
    pinned: bool
    non_blocking: bool
    bytes: int


class HostWaits:
    """Within the block, records each wait of the host, each copy to the device, and the operators on the device.

    Tensors that the host makes in the block have values; what it asks of the device is answered: `boolean`, `integer` and 1.0, and a
    mask chooses all elements. `waits` are the numbers of waits by
    "FILE:LINE KIND", with the file below src/lmworks and the line of the innermost frame there; in a backward pass without such a frame,
    the name of the autograd node.
    `operators` counts the calls of operators that compute something on the device, and `bytes` what they read and write.
    """

    def __init__(self, integer: int = 1, boolean: bool = False) -> None:
        self.integer, self.boolean = integer, boolean
        self.waits: Counter[str] = Counter()
        self.copies: list[Copy] = []
        self.shared = 0  # tensors whose memory a second stream uses
        self._stream_waits = _LIBRARY.lmworks_stream_waits()
        self.operators: Counter[str] = Counter()
        self.bytes = 0
        self._modes = (_Operators(self), _Indices(self))
        self._report = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda what: self.wait(f"{what.decode()} synchronized"))

    def __enter__(self) -> HostWaits:
        FakeTensor.tolist = self._tolist  # type: ignore[method-assign, assignment]
        _LIBRARY.lmworks_report_waits(self._report)
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)
        _LIBRARY.lmworks_report_waits(None)
        FakeTensor.tolist = _tolist  # type: ignore[method-assign]

    @property
    def _tolist(self) -> Callable[[FakeTensor], Any]:
        """`tolist` reads all values at once: one wait."""

        def tolist(tensor: FakeTensor) -> Any:
            if _on_device(tensor):
                self.wait("tolist")
            return _filled(tensor.shape, self.answer(tensor.dtype))

        return tolist

    def wait(self, kind: str) -> None:
        self.waits[f"{where()} {kind}"] += 1

    def answer(self, dtype: torch.dtype) -> bool | int | float:
        """The value of an element that is asked for."""
        if dtype == torch.bool:
            return self.boolean
        return 1.0 if dtype.is_floating_point else self.integer

    def report(self) -> dict[str, Any]:
        """What was found, as JSON. `to_device` are the copies by the memory that they read."""
        kinds: dict[str, int] = defaultdict(int)
        for copy in self.copies:
            kinds["pinned" if copy.pinned else "pageable"] += 1
        return {
            "waits": dict(sorted(self.waits.items())), "operators": self.operators.total(), "bytes": self.bytes,
            "stream_waits": _LIBRARY.lmworks_stream_waits() - self._stream_waits, "shared": self.shared, "to_device": dict(kinds),
            "pageable": dict(Counter(copy.where for copy in self.copies if not copy.pinned)),
        }  # fmt: skip


def where() -> str:
    """The innermost line of lmworks in the stack, as "FILE:LINE"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_SOURCES):
            return f"{name.removeprefix(_SOURCES)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    node = torch._C._current_autograd_node()
    return "elsewhere" if node is None else f"backward of {node.name()}"


class _Operators(TorchDispatchMode):
    """The dispatch of all operators, those of the backward pass included."""

    supports_higher_order_operators = True

    def __init__(self, found: HostWaits) -> None:
        super().__init__()
        self._found = found
        self._pinned: dict[int, Any] = {}  # storages by their identity; they are kept so that it is not used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not hasattr(func, "_schema") or func.namespace == "prim":
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name not in ("is_pinned", "_pin_memory") and _is_of_the_host(args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor) and args[0].constant is None:
            if _on_device(args[0]):
                self._found.wait("item")
            return self._found.answer(args[0].dtype)
        if name == "is_pinned":
            return self._is_pinned(args[0])
        if name == "_pin_memory":
            copied = _aten.clone.default(args[0])
            self._pinned[copied.untyped_storage()._cdata] = copied.untyped_storage()
            return copied
        if name == "record_stream":
            self._found.shared += 1
            return None
        if name in _DATA_DEPENDENT and kwargs.get("output_size") is None and _on_device(args[0]):
            self._found.wait(name)
            return self._chosen(name, *args)
        if name in _INDEXED and any(map(_is_mask, args[1])):
            self._found.wait("boolean index")
            args = (args[0], [part for index in args[1] for part in _as_places(index)], *args[2:])
        if name in ("_to_copy", "copy_", "copy") and self._copied(name, args, kwargs):
            return self._on_host(name, args, kwargs)
        result = func(*args, **kwargs)
        if not getattr(func, "is_view", False) and name not in ("detach", "alias"):
            on_device = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor) and _on_device(leaf)]
            if on_device:
                self._found.operators[name] += 1
                self._found.bytes += sum(tensor.numel() * tensor.itemsize for tensor in on_device)
        return result

    def _chosen(self, name: str, tensor: Tensor, *rest: Any) -> Tensor:
        """The result of an operator whose shape only the device knows."""
        if name == "nonzero":
            return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)
        if name in ("masked_select", "repeat_interleave"):
            return tensor.new_empty(tensor.numel())
        raise NotImplementedError(f"{where()}: the shape of the result of {name} is known on the device only")

    def _copied(self, name: str, args: Any, kwargs: Any) -> bool:
        """Record a copy between host and device; whether it was one to the host."""
        source, non_blocking = args[0], kwargs.get("non_blocking", False)
        if name == "_to_copy":
            target = torch.device(kwargs.get("device") or source.device)
        else:
            target, source, non_blocking = args[0].device, args[1], non_blocking or args[2:] == (True,)
        if _on_device(source) and target.type == "cpu":
            # A copy that does not block is waited for later, by an event.
            if not non_blocking:
                self._found.wait("copy to the host")
            return True
        if source.device.type == "cpu" and target.type == "cuda" and source.numel():
            copy = Copy(where(), self._is_pinned(source), non_blocking, source.numel() * source.itemsize)
            self._found.copies.append(copy)
            if not non_blocking:
                self._found.wait("copy to the device")
        return False

    def _on_host(self, name: str, args: Any, kwargs: Any) -> Tensor:
        """What a copy to the host gives."""
        source, dtype = args[0 if name == "_to_copy" else 1], kwargs.get("dtype") or args[0].dtype
        with unset_fake_temporarily():
            answers = torch.full(source.shape, self._found.answer(dtype), dtype=dtype)
            return answers if name == "_to_copy" else args[0].copy_(answers)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned


class _Indices(TorchFunctionMode):
    """An index by a list, an array or a tensor of the host is copied to the device, which the dispatch of operators does not show."""

    def __init__(self, found: HostWaits) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and _on_device(args[0]):
            args = (args[0], self._index(args[1], args[0].device), *args[2:])
        return func(*args, **(kwargs or {}))


    def _index(self, index: Any, device: torch.device) -> Any:
        """The index with its parts as they are on the device."""
        if isinstance(index, tuple):
            return tuple(self._index(part, device) for part in index)
        if isinstance(index, list | np.ndarray | range) or (isinstance(index, Tensor) and index.ndim and not _on_device(index)):
            self._found.wait("index from the host")
            return torch.as_tensor(index).to(device, non_blocking=True)
        return index


def _on_device(tensor: Tensor) -> bool:
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "cuda"


def _is_of_the_host(args: Any, kwargs: Any) -> bool:
    """Whether nothing is computed on a device, out of nothing that is."""
    leaves = tree_leaves((args, kwargs))
    return not any(isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.type != "cpu") for leaf in leaves)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8) and _on_device(index)


def _as_places(index: Tensor | None) -> list[Tensor | None]:
    """A mask as the places that it chooses, one index per dimension."""
    if index is None or not _is_mask(index):
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]


def _filled(shape: Any, value: Any) -> Any:
    return [_filled(shape[1:], value) for _ in range(shape[0])] if len(shape) else value
