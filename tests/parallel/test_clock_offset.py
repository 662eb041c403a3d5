"""The offset of two clocks, of which one is set while they are compared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lmworks.parallel import bandwidth

AHEAD, WAY = 5.0, 0.002  # seconds: of the peer's clock, and of a message


@pytest.mark.parametrize("by", [-3600.0, 3600.0, 0.0])
def test_a_clock_that_is_set_within_a_round_trip(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """The true offset is within the error, which is half of a round trip."""
    clock = {"real": 1000.0, "set": 0.0}
    calls: list[str] = []

    def send(stamp: torch.Tensor, peer: int) -> None:
        clock["real"] += WAY
        calls.append("send")
        if len(calls) == 1:
            clock["set"] = by

    def recv(stamp: torch.Tensor, peer: int) -> None:
        stamp[0] = clock["real"] + AHEAD
        clock["real"] += WAY

    fake = SimpleNamespace(time=lambda: clock["real"] + clock["set"], perf_counter=lambda: clock["real"])
    monkeypatch.setattr(bandwidth, "time", fake)
    monkeypatch.setattr(bandwidth, "dist", SimpleNamespace(send=send, recv=recv))
    offset, error = bandwidth.clock_offset(1, first=True)
    assert error == pytest.approx(WAY) and abs(offset - (AHEAD - by)) <= error + 1e-9
