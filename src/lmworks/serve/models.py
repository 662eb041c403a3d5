"""The models of one server: the first is there from the beginning, any other is opened at its first request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmworks.errors import UserError
from lmworks.serve.engine import Engine, EngineStats


class Busy(UserError):
    """More answers would wait than may."""

    def __init__(self, waiting: int, wanted: int, most: int) -> None:
        super().__init__(f"{waiting} answers are waiting already, of at most {most}, and this request asks for {wanted}; try again later")


@dataclass(frozen=True)
class Closed:
    """A model that is not open yet: what is known of it, and what opens it."""

    context: int
    tuned: bool
    open: Callable[[], Engine]


class Models:
    """Engines by name. `closed` are those to be opened at their first request.

    What one engine may have in flight at a time, and with it the memory for keys and values, is divided among those that are open.
    """

    def __init__(self, first: Engine, closed: Mapping[str, Closed] | None = None) -> None:
        self.first, self._open, self._closed = first, {first.name: first}, dict(closed or {})
        self._groups = first.max_groups
        self._opening = asyncio.Lock()

    @property
    def known(self) -> dict[str, Engine | Closed]:
        """All of them, open or not; the first one leads."""
        return {**self._open, **self._closed}

    async def engine(self, name: str | None) -> Engine:
        """The engine of this name, the first for None; opens it where it is not. Raises `UserError` if that cannot be done."""
        name = self.first.name if name is None else name
        if name not in self._open:
            async with self._opening:
                if name not in self._open:  # still, behind those who asked before
                    self._add(await asyncio.to_thread(self._closed[name].open))
        return self._open[name]

    def _add(self, engine: Engine) -> None:
        del self._closed[engine.name]
        self._open[engine.name] = engine
        for each in self._open.values():
            each.max_groups = max(1, self._groups // len(self._open))

    def refuse_over(self, most: int, wanted: int) -> None:
        """Raise `Busy` if more than `most` answers would wait with `wanted` more, whichever model they wait for."""
        waiting = sum(engine.waiting for engine in self._open.values())
        if waiting + wanted > most:
            raise Busy(waiting, wanted, most)

    @property
    def alive(self) -> bool:
        """Whether all that are open can still take requests."""
        return all(engine.alive for engine in self._open.values())

    def stats(self) -> EngineStats:
        """Those of all engines together."""
        found = [engine.stats() for engine in self._open.values()]
        return EngineStats(
            sum(one.running for one in found), sum(one.waiting for one in found),
            sum(one.prompt_tokens for one in found), sum(one.generated_tokens for one in found),
        )  # fmt: skip

    def close(self) -> None:
        """Close all engines."""
        for engine in self._open.values():
            engine.close()
