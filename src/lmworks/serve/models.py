"""The models of one server: the first is loaded at the start, any other at its first request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lmworks.errors import UserError
from lmworks.model.sampling import SAMPLING
from lmworks.serve.engine import Engine
from lmworks.serve.requests import EngineStats


class Busy(UserError):
    """The queue is full."""

    def __init__(self, waiting: int, requested: int, limit: int) -> None:
        super().__init__(f"{waiting} of at most {limit} answers are waiting, and this request asks for {requested} more; try again later")


@dataclass(frozen=True)
class LazyModel:
    """A model that is not loaded yet; `load` loads it."""

    context: int
    tuned: bool
    load: Callable[[], Engine]
    sampling: Mapping[str, float] = field(default_factory=lambda: dict(SAMPLING))


class Models:
    """Engines by name. `lazy` are models that are loaded at their first request.

    The number of answers in flight, which bounds the memory of the KV caches, is divided among the loaded models.
    """

    def __init__(self, first: Engine, lazy: Mapping[str, LazyModel] | None = None) -> None:
        self.first, self._loaded, self._lazy = first, {first.name: first}, dict(lazy or {})
        self._rows = first.max_rows
        self._loading = asyncio.Lock()

    @property
    def known(self) -> dict[str, Engine | LazyModel]:
        """All models, loaded or not; the first model comes first."""
        return {**self._loaded, **self._lazy}

    async def engine(self, name: str | None) -> Engine:
        """The engine of this name (of the first model for None); loads it if necessary. Raises `UserError` if it cannot be loaded."""
        name = self.first.name if name is None else name
        if name not in self._loaded:
            async with self._loading:
                if name not in self._loaded:  # another request may have loaded it
                    self._add(await asyncio.to_thread(self._lazy[name].load))
        return self._loaded[name]

    def _add(self, engine: Engine) -> None:
        del self._lazy[engine.name]
        self._loaded[engine.name] = engine
        for each in self._loaded.values():
            each.max_rows = max(1, self._rows // len(self._loaded))

    def require_capacity(self, limit: int, requested: int) -> None:
        """Raise `Busy` if `requested` more answers would exceed `limit` waiting answers, over all models."""
        waiting = sum(engine.waiting for engine in self._loaded.values())
        if waiting + requested > limit:
            raise Busy(waiting, requested, limit)

    @property
    def alive(self) -> bool:
        """Whether all loaded engines can still take requests."""
        return all(engine.alive for engine in self._loaded.values())

    def stats(self) -> EngineStats:
        """The sums over all engines."""
        stats = [engine.stats() for engine in self._loaded.values()]
        return EngineStats(
            sum(one.running for one in stats), sum(one.waiting for one in stats),
            sum(one.prompt_tokens for one in stats), sum(one.generated_tokens for one in stats),
            sum(one.hit_tokens for one in stats),
        )  # fmt: skip

    def close(self) -> None:
        """Close all engines."""
        for engine in self._loaded.values():
            engine.close()
