"""Runs functions where torch has a CUDA device on which nothing is computed: `on_fake_cuda.py LIBRARY PLANTED`.

Each line of the input is `["MODULE:FUNCTION", ARGUMENTS]`, the arguments a JSON object. The function is called in a fork of this process,
within a `FakeTensorMode`, and what it returns is printed as a line of JSON; a line `end CODE` follows, with the exit code of the fork.
PLANTED are mistakes in the sources of this process, a list of module, text and the text in its place. The library must be loaded before
torch, so this is a process of its own.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent


def main() -> None:
    gc.disable()  # each call is a fork that ends; looking for garbage among the objects of all imports takes a fifth of it
    library, planted = sys.argv[1:]
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL).lmworks_install_fake_cuda()
    sys.path[:0] = [str(TESTS), *(str(folder) for folder in sorted(TESTS.iterdir()) if folder.is_dir())]
    _plant(json.loads(planted))
    _pretend()
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(FakeTensorMode):
        avoid_device_init = True  # constants are made on the CPU and copied by an operator, not put on a device that cannot hold them

    for line in sys.stdin:
        called, arguments = json.loads(line)
        module, _, name = called.partition(":")
        function = getattr(importlib.import_module(module), name)  # here: the next fork need not import it again
        if (fork := os.fork()) == 0:
            os._exit(_call(function, arguments, Mode(allow_non_fake_inputs=True)))
        print("end", os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)


def _call(function: Callable[..., Any], arguments: dict[str, Any], mode: AbstractContextManager[Any]) -> int:
    """Print what the function returns; the exit code."""
    try:
        with mode:
            result = function(**arguments)
        print(json.dumps(result), flush=True)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        return 1
    return 0


def _plant(mistakes: list[list[str]]) -> None:
    """Compile modules from changed sources, under the names and lines of their files."""
    compiled = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> Any:
        if not any(module == name for module, *_ in mistakes):
            return compiled(self, name)
        source = Path(self.path).read_text(encoding="utf-8")
        for module, old, new in mistakes:
            if module == name:
                assert source.count(old) == 1, f"{name} has {source.count(old)} times: {old}"
                source = source.replace(old, new)
        return compile(source, self.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def _pretend() -> None:
    """Answer what torch.cuda asks of a driver, as an H100 does, and stand in for kernels that are made at run time for a device."""
    import torch
    from torch.nn.attention import flex_attention as module

    answers: dict[str, Any] = {
        "_lazy_init": None, "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H100 80GB HBM3", "is_bf16_supported": True, "max_memory_allocated": 0, "memory_allocated": 0,
        "reset_peak_memory_stats": None, "empty_cache": None, "temperature": 40, "power_draw": 300_000, "utilization": 90,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)

    torch.cuda.Stream = lambda *_, **__: torch.Stream(device="cuda")  # type: ignore[assignment, misc]
    torch.cuda.Event = lambda *_, **__: torch.Event(device="cuda")  # type: ignore[assignment, misc]
    torch.cuda.current_stream = torch.accelerator.current_stream  # type: ignore[assignment]
    torch.cuda.synchronize = torch.accelerator.synchronize  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: stream or nullcontext()  # type: ignore[assignment, misc]

    def flex_attention(query: Any, key: Any, value: Any, block_mask: Any = None, enable_gqa: bool = False, **_: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=enable_gqa)

    module.flex_attention = flex_attention  # type: ignore[assignment]
    torch.compiler.set_stance("force_eager")  # layers are traced operator by operator


if __name__ == "__main__":
    main()
