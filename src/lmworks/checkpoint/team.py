"""The processes that save and load together, and how they agree: gathering to the first, a word from the first, and failing together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_Value = TypeVar("_Value")


class Team:
    """Ranks of a gloo group of their own (`None`: one process alone). All must make the same calls in the same order.

    What is sent is pickled by torch, but only between the processes of one run.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group, self.rank, self.size, self._first = group, 0, 1, 0
        if group is not None:
            import torch.distributed as dist

            self.rank, self.size, self._first = dist.get_rank(group), dist.get_world_size(group), dist.get_global_rank(group, 0)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: _Value) -> list[_Value]:
        """Everybody's value, at the first; nothing elsewhere."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, dst=self._first, group=self.group)
        return values or []

    def all(self, value: _Value) -> list[_Value]:
        """Everybody's value, everywhere; for small ones."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, value: _Value, first: int = 0) -> _Value:
        """The value of the first (or of another member), everywhere."""
        if self.group is None:
            return value
        import torch.distributed as dist

        values = [value if self.rank == first else None]
        dist.broadcast_object_list(values, src=dist.get_global_rank(self.group, first), group=self.group)
        found: Any = values[0]
        return found  # type: ignore[no-any-return]

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The elementwise largest, everywhere, in place."""
        if self.group is not None:
            import torch.distributed as dist

            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def together(self, work: Callable[[], _Value]) -> _Value:
        """Do `work` everywhere; if it fails on one, the first failure is raised on all."""
        value, failure = _attempt(work)
        failures = self.all(failure)
        raise_first(failures)
        return value  # type: ignore[return-value]

    def collect(self, work: Callable[[], _Value]) -> list[_Value]:
        """What `work` returns on each, at the first; nothing elsewhere. If it fails on one, the first failure is raised on all."""
        value, failure = _attempt(work)
        found = self.gather((value, failure))
        raise_first([self.agree(next((one for _, one in found if one is not None), None))])
        return [value for value, _ in found]  # type: ignore[misc]


def raise_first(failures: Sequence[BaseException | None]) -> None:
    """Raise the first that is an exception."""
    for failure in failures:
        if failure is not None:
            raise failure


def _attempt(work: Callable[[], _Value]) -> tuple[_Value | None, Exception | None]:
    try:
        return work(), None
    except Exception as failure:
        return None, failure.with_traceback(None)


def new_team(ranks: list[int] | None = None) -> Team:
    """A team of all ranks, or of some: a gloo group of its own, since threads that save must not mix their messages with training's.

    Its members wait for each other as long as all ranks do (`launch.timeout`); torch would have them wait half an hour for one that is
    frozen. Called by all ranks alike; those that are not in it get a team that they must not use.
    """
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Team()
    assert dist.group.WORLD is not None
    # There is no public way to read what `set_timeout` has set.
    patience = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    group = dist.new_group(ranks, timeout=patience, backend="gloo")
    return Team(group) if ranks is None or dist.get_rank() in ranks else Team()
