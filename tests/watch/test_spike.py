"""Spikes are found, and noise, falling curves and phase boundaries are none."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from curves import Curve, falling

from lmworks.recipe.schema.launch import Spike
from lmworks.watch.policy import Limits, Spikes, upper_limit

DEFAULT = Spike()


def judged(curve: Curve, options: Spike = DEFAULT) -> list[int]:
    """The steps that are called spikes."""
    spikes, found = Spikes(options), []
    for step, (loss, norm, since) in enumerate(zip(curve.losses.tolist(), curve.norms.tolist(), curve.since.tolist(), strict=True)):
        if spikes.observe(step, loss, norm, spikes.limits(step, since)):
            found.append(step)
    return found


def test_no_false_alarm_on_fifty_curves():
    alarms = {seed: judged(falling(seed)) for seed in range(50)}
    assert not any(alarms.values()), alarms


def test_every_planted_spike_is_found():
    """Of the loss, of the norm, and of both; a tenth more than the threshold above what the curve has lately been."""
    draw, planted = np.random.default_rng(3), 0
    for seed in range(50):
        curve = falling(seed)
        window = DEFAULT.window_steps
        quiet = [step for step in range(len(curve.losses)) if step > curve.since[step] + window and step >= window]
        places = sorted(draw.choice(quiet, size=6, replace=False).tolist())
        clean = curve.losses.copy(), curve.norms.copy()
        for number, step in enumerate(places):
            lately = slice(step - window, step)
            if number % 3 != 1:
                curve.losses[step] = upper_limit(clean[0][lately].tolist(), 1.1 * DEFAULT.threshold_mads, 1.1 * DEFAULT.min_rise_nats)
            if number % 3 != 0:
                floor = math.log(DEFAULT.norm_factor)
                curve.norms[step] = math.exp(upper_limit(np.log(clean[1][lately]).tolist(), 1.1 * DEFAULT.threshold_mads, floor))
        found = judged(curve)
        assert found == places, (seed, found, places)
        planted += len(places)
    assert planted == 300


def test_nothing_is_judged_in_the_warm_up_nor_just_after_a_boundary():
    options = Spike(window_steps=32)
    spikes = Spikes(options)
    for step in range(200):
        since = 20 if step < 100 else 130
        limits = spikes.limits(step, since)
        early = step < 20 + 8 or 100 <= step < 130 + 8
        assert (limits == Limits()) is early, step
        assert not spikes.observe(step, 2.0 + (5 if step == 110 else 0), 1.0, limits)


def test_spikes_do_not_widen_what_follows():
    spikes = Spikes(Spike(window_steps=32))
    for step in range(40):
        spikes.observe(step, 2.0 + 0.01 * (step % 3), 1.0, spikes.limits(step, 0))
    before = spikes.limits(40, 0)
    assert [spikes.observe(step, 9.0, 1.0, spikes.limits(step, 0)) for step in range(40, 50)] == [True] * 10
    assert spikes.in_a_row == 10
    assert spikes.limits(50, 0) == before
    spikes.forget(0)
    assert spikes.limits(51, 0) == Limits()


def test_a_resumed_run_judges_as_an_undisturbed_one():
    curve = falling(7, 600)
    curve.losses[[450, 451, 520]] += 5
    one, other, verdicts = Spikes(DEFAULT), Spikes(DEFAULT), ([], [])
    for step in range(600):
        if step % 37 == 0:
            again = Spikes(DEFAULT)
            again.load(json.loads(json.dumps(other.state())))
            other = again
        for spikes, into in zip((one, other), verdicts, strict=True):
            limits = spikes.limits(step, int(curve.since[step]))
            into.append((limits, spikes.observe(step, float(curve.losses[step]), float(curve.norms[step]), limits)))
    assert verdicts[0] == verdicts[1]
    assert [step for step, (_, spike) in enumerate(verdicts[0]) if spike] == [450, 451, 520]


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 900.0], [3.0] * 7])
def test_the_limit_is_above_the_median(values):
    assert upper_limit(values, 10.0, 0.5) >= np.median(values) + 0.5


def test_off_is_off():
    spikes = Spikes(None)
    assert all(spikes.limits(step, 0) == Limits() and not spikes.observe(step, 10.0**step, 1.0, Limits()) for step in range(300))
