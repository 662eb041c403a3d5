"""Collectives over the ranks that save and load together: gather, all_gather, broadcast, and functions that fail on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_Value = TypeVar("_Value")


class Communicator:
    """The ranks of a gloo process group (`None`: a single process). All ranks must make the same calls in the same order.

    Objects are pickled by torch, but only between the processes of one run.
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
        """The values of all ranks on rank 0, an empty list elsewhere."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, dst=self._first, group=self.group)
        return values or []

    def all_gather(self, value: _Value) -> list[_Value]:
        """The values of all ranks, on all ranks; meant for small objects."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: _Value, source: int = 0) -> _Value:
        """The value of rank `source`, on all ranks."""
        if self.group is None:
            return value
        import torch.distributed as dist

        values = [value if self.rank == source else None]
        dist.broadcast_object_list(values, src=dist.get_global_rank(self.group, source), group=self.group)
        found: Any = values[0]
        return found  # type: ignore[no-any-return]

    def all_reduce_max(self, values: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over all ranks, in place."""
        if self.group is not None:
            import torch.distributed as dist

            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def run_on_all(self, work: Callable[[], _Value]) -> _Value:
        """Run `work` on each rank. If it fails on any rank, the first failure is raised on all ranks."""
        value, failure = _attempt(work)
        failures = self.all_gather(failure)
        raise_first(failures)
        return value  # type: ignore[return-value]

    def run_and_gather(self, work: Callable[[], _Value]) -> list[_Value]:
        """Run `work` on each rank and gather the results on rank 0 (an empty list elsewhere). If it fails on any rank, the first failure is
        raised on all ranks."""
        value, failure = _attempt(work)
        found = self.gather((value, failure))
        raise_first([self.broadcast(next((one for _, one in found if one is not None), None))])
        return [value for value, _ in found]  # type: ignore[misc]


def raise_first(failures: Sequence[BaseException | None]) -> None:
    """Raise the first item that is an exception."""
    for failure in failures:
        if failure is not None:
            raise failure


def _attempt(work: Callable[[], _Value]) -> tuple[_Value | None, Exception | None]:
    try:
        return work(), None
    except Exception as failure:
        return None, failure.with_traceback(None)


def world_communicator() -> Communicator:
    """All ranks, for the main thread, whose collectives on the default process group are in the same order on all of them anyway."""
    import torch.distributed as dist

    return Communicator(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else Communicator()


def new_communicator(ranks: list[int] | None = None) -> Communicator:
    """A communicator over all ranks, or over `ranks`, with a gloo process group of its own: the threads that save must not interleave
    their messages with those of training.

    Its timeout is that of the default process group (`launch.timeout`), not torch's 30 minutes. All ranks call it; a rank outside of
    `ranks` gets a communicator that it must not use.
    """
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Communicator()
    assert dist.group.WORLD is not None
    # There is no public way to read what `set_timeout` has set.
    patience = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    group = dist.new_group(ranks, timeout=patience, backend="gloo")
    return Communicator(group) if ranks is None or dist.get_rank() in ranks else Communicator()
