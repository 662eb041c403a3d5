"""A process group in which this is one rank of many, and the others are made up: nothing is sent, and collectives end at once.

What other ranks would send is made up too, so no number that is computed means anything; times, memory and groups do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmworks.parallel import collectives

_STD = 0.02  # of what other ranks send: about that of initial weights


@contextmanager
def made_up_ranks(rank: int, world: int) -> Iterator[None]:
    """Within the block, this process is `rank` of `world`, on torch's fake process group."""
    new_group = dist.new_group
    with patch.object(dist, "new_group", lambda *given, **options: new_group(*given, **options | {"backend": "fake"})):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def made_up_answers() -> Iterator[None]:
    """Within the block, what other ranks send lets a training step go through, and costs as little as what one kernel writes.

    The fake group alone copies what this rank has, once per rank. Weights gathered so would be equal in all rows: every token would choose
    the same experts.
    """
    exchange, exchange_all, counted = collectives.exchange, dist.all_to_all_single, torch.int64

    def exchanged(rows: torch.Tensor, received: list[int], sent: list[int], group: Any) -> torch.Tensor:
        """Numbers of rows come back as they were sent: nobody else tells any."""
        return rows.clone() if rows.dtype == counted and rows.ndim == 2 else exchange(rows, received, sent, group)

    def all_to_all_single(incoming: torch.Tensor, outgoing: torch.Tensor, received: list[int], sent: list[int], **options: Any) -> Any:
        """The fake group refuses a rank that receives and sends nothing, as a rank that owns no matrix does."""
        if not outgoing.numel():
            outgoing, sent = incoming.clone(), received
        return exchange_all(incoming, outgoing, received, sent, **options)

    def gathered(out: torch.Tensor, own: torch.Tensor, group: Any = None, async_op: bool = False) -> None:
        """Random numbers from others, beside this rank's own."""
        parts = out.view(-1).view(-1, own.numel()) if own.numel() else out
        if out.is_floating_point():
            out.normal_(0.0, _STD)
            parts[dist.get_rank(group)] = own.reshape(-1)
        else:
            parts.copy_(own.reshape(-1))

    # The two names of one collective: FSDP calls the one or the other, depending on the version of torch.
    gathers = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]
    with (
        patch.object(collectives, "exchange", exchanged), patch.object(dist, "all_to_all_single", all_to_all_single),
        patch.multiple(dist, **dict.fromkeys(gathers, gathered)),
    ):  # fmt: skip
        yield
