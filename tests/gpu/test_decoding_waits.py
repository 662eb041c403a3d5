"""What makes the host wait for the device in a step of decoding: the results of the step, once. Traced on fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from fake_cuda import FakeCuda

# Operators on the device of a step of four rows with two layers, and MiB that they read and write. Both may only fall.
MOST = {"dense": (160, 0.28), "moe": (189, 0.307), "mla": (252, 0.313), "tied": (168, 0.279), "conv": (175, 0.226)}
RESULTS = "inference/sampling.py"


_SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("dense", "mla", "conv")]
KINDS = ["moe", "tied", *_SLOW]  # tied: with a window, shorter than some rows


@pytest.fixture(scope="module")
def found(fake_cuda: FakeCuda) -> Callable[[str], dict[str, Any]]:
    """The reports of a kind of model."""
    return cache(lambda kind: fake_cuda.run("traced_decoding:steps", kinds=[kind])[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_decoding_waits_once(found: Callable[[str], dict[str, Any]], kind: str) -> None:
    """Rows of all kinds of options join, are read in pieces, and leave."""
    reports = found(kind)["steps"]
    assert len(reports) > 9
    for report in reports:
        assert list(report["waits"].values()) == [1] * bool(report["tokens"]), report["waits"]
        assert all(place.startswith(RESULTS) for place in report["waits"])
        assert "pageable" not in report["to_device"]


@pytest.mark.parametrize("kind", KINDS)
def test_operators_of_a_step_of_decoding(found: Callable[[str], dict[str, Any]], kind: str) -> None:
    report, (operators, mebibytes) = found(kind)["plain"], MOST[kind]
    assert report["operators"] <= operators and report["bytes"] <= mebibytes * 2**20


def test_a_wait_that_is_planted_is_named(fake_cuda: FakeCuda) -> None:
    planted = [
        ("lmworks.inference.sampling", "rivals = [", "chosen_B1.max().item(); rivals = ["),
        ("lmworks.inference.batching", "cache.finish(counts)", "hidden_BTD.sum().tolist(); cache.finish(counts)"),
    ]
    reports = fake_cuda.run("traced_decoding:steps", planted, kinds=["dense"])["dense"]["steps"]
    places = {place.partition(":")[0] + place[place.index(" ") :] for report in reports for place in report["waits"]}
    assert places == {"inference/batching.py tolist", "inference/sampling.py item", "inference/sampling.py tolist"}
