"""The engines by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmworks.deploy.engines import llama_cpp, lmworks, sglang, vllm
from lmworks.deploy.engines.common import Request
from lmworks.deploy.flags import Launch
from lmworks.errors import UserError


@dataclass(frozen=True)
class Engine:
    """`gguf`, `whole_cache` and `single` as in `sizing.fit`."""

    name: str
    launch: Callable[[Request], Launch]
    gguf: bool = False
    whole_cache: bool = False
    single: bool = False


ENGINES = {
    one.name: one
    for one in (
        Engine("vllm", vllm.launch), Engine("sglang", sglang.launch),
        Engine("llama.cpp", llama_cpp.launch, gguf=True, whole_cache=True), Engine("lmworks", lmworks.launch, single=True),
    )
}  # fmt: skip


def engine_of(name: str) -> Engine:
    """The engine of this name. Raises `UserError` for an unknown one."""
    if name not in ENGINES:
        raise UserError(f"--engine {name!r} is not known; it is one of: {', '.join(ENGINES)}")
    return ENGINES[name]
