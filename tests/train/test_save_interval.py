"""At most half an hour of work lies between two saves, and less where failures are frequent beside the time of a save."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.checkpoint import listing
from lmworks.recipe.schema import artifacts as derivation
from lmworks.recipe.schema.artifacts import lost_share, save_interval, seconds_between_failures
from tiny_run import BRIEF, Tiny


def test_the_rate_of_failures_is_that_of_llama_3() -> None:
    """419 in 54 days on 16,384 GPUs: one in 3.1 hours there."""
    assert seconds_between_failures(16_384) == pytest.approx(54 * 86_400 / 419)
    assert 3.0 < seconds_between_failures(16_384) / 3600 < 3.2


@pytest.mark.parametrize(("pause", "devices"), [(5.0, 8_192), (30.0, 16_384), (10.0, 100_000), (60.0, 2_000)])
def test_no_other_interval_costs_less(pause: float, devices: int) -> None:
    """By trying all, up to half an hour."""
    best = min(range(1, 1801), key=lambda interval: lost_share(interval, pause, devices))
    assert save_interval(pause, devices) == pytest.approx(best, abs=1)


def test_the_interval_is_at_most_half_an_hour_and_at_least_a_save() -> None:
    assert save_interval(None, 1) == save_interval(10.0, 1) == save_interval(1.0, 8) == 1800
    assert save_interval(0.0, 8_192) < 300
    assert save_interval(5.0, 100_000, written=900.0) == 900 and save_interval(3600.0, 8) == 3600


@pytest.mark.parametrize("key", [None, "0.001 s", "1 h"])
def test_a_run_saves_by_time(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str | None) -> None:
    """By steps only at the end; by time after every step, where half an hour is a millisecond, or the recipe says so."""
    monkeypatch.setattr(derivation, "MOST_LOST", 0.001)
    run = tiny.copy(tmp_path / "run")
    more = [] if key is None else [f"train.save_every_time={key}"]
    steps = ("train.save_every=100%", "train.validate_every=100%", "checkpoints.keep_last=1000", "checkpoints.asynchronous=false")
    run.walk(*BRIEF, *steps, *more, last="pretrain")
    saved = listing.directories(run.run_dir / "checkpoints")
    assert (len(saved) > 2) == (key != "1 h"), saved
