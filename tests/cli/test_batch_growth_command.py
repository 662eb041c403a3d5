"""A batch that grows as the loss falls, at the command line: what commands say of it, and a run on one rank and then on two."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from command import Lmworks

from growing_run import GROWING, RAMP, grown
from lmworks.recipe.timeline import Growth
from lmworks.watch.batch_growth import read_growths
from tiny_run import Tiny, before_each_step, checkpoint, curve

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def options(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def test_commands_name_the_range_and_what_has_grown(tiny_copy: Tiny, lmworks: Lmworks) -> None:
    tiny_copy.walk(*GROWING, last="pretrain")
    sets = options(*GROWING, f"run_dir={tiny_copy.run_dir}")
    (first, _), (second, _) = grown(tiny_copy)
    now = f"it grew to 128 at step {first}, to 256 at step {second}; at least"
    for done in (lmworks("data", "plan", tiny_copy.run_dir), lmworks("show", tiny_copy.recipe, *sets)):
        assert done.code == 0 and now in " ".join(done.out.split()), done.err
    elsewhere = options(*GROWING, f"run_dir={tiny_copy.run_dir}-none")
    done = lmworks("show", tiny_copy.recipe, *elsewhere)
    assert "it has not grown yet; at least 14 steps, at most 47" in " ".join(done.out.split())
    done = lmworks("plan", tiny_copy.recipe, *elsewhere)
    assert done.code == 0 and "14 to 47" in done.out and "18 to 51" in done.out, done.err
    law = RAMP.replace("losses: [6.0, 5.6], ", "critical_batch_tokens: 1e6, critical_batch_exponent: 0.2, ")
    done = lmworks("show", tiny_copy.recipe, *elsewhere, "--set", f"train.phases.general.batch_ramp={law}")
    assert "6.005" in done.out and "arXiv:2001.08361" in done.out, "(1e6 / 128)^0.2"


@pytest.mark.slow
def test_from_the_command_line_interrupted_after_a_growth_and_resumed_on_two_ranks(
    tiny: Tiny, tiny_copy: Tiny, tmp_path: Path, lmworks: Lmworks
) -> None:
    """As one uninterrupted process: the same growths, steps and data; weights and losses but for the rounding of a sum over two ranks."""
    alone = tiny.copy(tmp_path / "alone")
    stable = (*GROWING, "optimizer.kind=adamw", "optimizer.eps=0.001", "optimizer.adam_learning_rate=null")

    def command(run: Tiny, *words: object) -> list[object]:
        return [*words, "--to", "pretrain", *options(*stable, f"run_dir={run.run_dir}")]

    done = lmworks(*command(alone, "run", tiny.recipe))
    assert done.code == 0, done.err
    ((first, _), _) = grown(alone)
    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == first + 1 else None)
        done = lmworks(*command(tiny_copy, "run", tiny.recipe))
    assert f"saved at step {first + 2}" in " ".join(done.err.split()) and grown(tiny_copy) == grown(alone)[:1]
    done = lmworks(*command(tiny_copy, "launch", "local", tiny.recipe, "--ranks", 2))
    assert done.code == 0, done.err
    assert grown(tiny_copy) == grown(alone) and len(grown(alone)) == 2
    assert read_growths(tiny_copy.run_dir) == tuple(Growth("general", step, tokens) for step, tokens in grown(alone))
    found, expected = (curve(run.run_dir) for run in (tiny_copy, alone))
    names = ("step", "train/batch_tokens", "train/tokens")
    assert [[line[name] for name in names] for line in found] == [[line[name] for name in names] for line in expected]
    assert [line["train/loss"] for line in found] == pytest.approx([line["train/loss"] for line in expected], rel=1e-3)
    weights, others = checkpoint(tiny_copy.run_dir), checkpoint(alone.run_dir)
    for name in (name for name in others if name.startswith("model/")):
        assert float((weights[name] - others[name]).abs().max()) <= 1e-3 * float(others[name].abs().max()), name
