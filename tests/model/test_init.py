"""Initial weights: a function of the seed, the name and the place in the whole tensor alone."""

from __future__ import annotations

import pytest
import torch

from lmworks.model import init


@pytest.fixture
def threads():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(3, 70_000), (900, 130), (5, 7, 11, 13), (1, 1)])
def test_neither_cores_nor_blocks_nor_parts_change_a_bit(shape, threads, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    threads(1)
    whole = init.normal_part(3, "w", shape, (0,) * len(shape), shape)
    threads(3)
    assert torch.equal(whole, init.normal_part(3, "w", shape, (0,) * len(shape), shape))
    begins = tuple(size // 3 for size in shape)
    sizes = tuple(size - size // 3 - size // 4 for size in shape)
    part = init.normal_part(3, "w", shape, begins, sizes)
    assert torch.equal(part, whole[tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))])
    monkeypatch.setattr(init, "_BLOCK", 1000)
    assert torch.equal(whole, init.normal_part(3, "w", shape, (0,) * len(shape), shape))


def test_they_are_normal() -> None:
    drawn = init.normal(0, "w", 0, 1_000_000).double()
    assert abs(drawn.mean()) < 5e-3 and abs(drawn.std() - 1) < 5e-3 and drawn.isfinite().all()
    assert abs((drawn.abs() < 1).double().mean() - 0.6827) < 3e-3 and abs((drawn[1:] * drawn[:-1]).mean()) < 5e-3


def test_a_part_without_elements() -> None:
    assert init.normal_part(0, "w", (4, 8), (0, 8), (4, 0)).shape == (4, 0)
    assert init.normal_part(0, "w", (4, 8), (4, 0), (0, 8)).shape == (0, 8)
