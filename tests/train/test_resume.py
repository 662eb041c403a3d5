"""Promise 3: a run that was killed goes on bit for bit, and its curve has every step once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kills import train_under_fire

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.io import jsonl
from lmworks.model import Transformer
from lmworks.parallel import parallelize
from lmworks.ui.terminal import Interrupted
from lmworks.watch.ledger import read_ledger
from tiny_run import FIRST, STEPS, Tiny, before_each_step, checkpoint, curve, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# So that a random number too many or too few shows, and a sample that is written twice.
OPTIONS = ("model.residual_dropout=0.1", "train.sample_every=7 steps")


def require_equal(run: Tiny, undisturbed: Tiny, steps: int = STEPS) -> None:
    """All tensors of the last checkpoint, and all lines of the curve."""
    assert same_bits(checkpoint(run.run_dir), checkpoint(undisturbed.run_dir)) == []
    lines = curve(run.run_dir)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert lines == curve(undisturbed.run_dir)
    assert all({"train/loss", "optim/grad_norm", "optim/learning_rate"} <= line.keys() for line in lines)
    samples, expected = ([*jsonl.read(one.run_dir / "samples.jsonl")] for one in (run, undisturbed))
    assert samples == expected and any(record["completion"] for record in samples)


@pytest.fixture(scope="module")
def undisturbed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    run = tiny.copy(tmp_path_factory.mktemp("undisturbed") / "run")
    run.pretrain(*OPTIONS)
    return run


def stop_in(patch: pytest.MonkeyPatch, step: int) -> None:
    """Send this process a SIGINT in a step, as Ctrl-C would."""
    before_each_step(patch, lambda now: os.kill(os.getpid(), signal.SIGINT) if now == step else None)


def test_kills(tiny_copy: Tiny, undisturbed: Tiny) -> None:
    campaign = train_under_fire(tiny_copy, [*OPTIONS, "train.save_every=2 steps"], kills=3, seed=21)  # in steps, in a save, at once
    assert campaign.kills == 3
    require_equal(tiny_copy, undisturbed)
    events = [event["event"] for event in read_ledger(tiny_copy.run_dir / "ledger.jsonl")]
    assert "resume" in events and events[-1] == "finish"


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_fifty_kills(tiny: Tiny, tmp_path: Path, compiled: bool) -> None:
    """Long enough for 50 lives; dropout makes the random state matter. Compiled code with fewer, since it compiles in each life, and
    with the ramp left out, since each shape takes its minute."""
    kills = 8 if compiled else 50
    compiling = f"train.compile={str(compiled).lower()}"
    options = ["shards.max_epochs=400", "model.residual_dropout=0.1", "train.save_every=1 steps", "train.precision=bf16",
               "train.phases.general.tokens=40000 tokens", "train.phases.long.tokens=20000 tokens", compiling]  # fmt: skip
    options += ["train.phases.general.batch_ramp=null"] if compiled else []
    reference = tiny.copy(tmp_path / "reference")
    reference.pretrain(*options)
    run = tiny.copy(tmp_path / "run")
    campaign = train_under_fire(run, options, kills, seed=11)
    print(campaign)
    assert campaign.kills == kills
    assert campaign.before_the_first_step > 0
    assert compiled or campaign.in_saves > 5
    require_equal(run, reference, steps=len(curve(reference.run_dir)))
    assert len(curve(reference.run_dir)) > 200


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """torch.compile that traces every shape, and counts the same, but leaves the translation to machine code out."""
    import torch._dynamo

    honest = Transformer.compile
    monkeypatch.setattr(Transformer, "compile", lambda self, **options: honest(self, backend="eager", **options))
    torch._dynamo.reset()
    # what the trainer sets is put back with them
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256, fail_on_recompile_limit_hit=False):
        yield (
            "train.compile=true", "train.precision=bf16", "model.num_hidden_layers=2", "train.micro_batch_sequences=64",
                "train.phases.general.global_batch_tokens=384 tokens",
            "train.phases.general.batch_ramp={start_tokens: 128 tokens, over: 9 steps}", "train.validate_every=100%",
            "train.sample_every=100%",
        )  # fmt: skip
    torch._dynamo.reset()


def test_no_shape_is_left_to_eager_code(tiny_copy: Tiny, tracing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which shapes those were would depend on where the run was resumed, and with it the bits of the weights."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    monkeypatch.setattr(parallelize, "_SHAPES", 2)
    with pytest.raises(FailOnRecompileLimitHit):
        tiny_copy.pretrain(*tracing)
    assert 0 < len(curve(tiny_copy.run_dir)) < 6


@pytest.mark.slow
def test_every_shape_is_compiled(tiny_copy: Tiny, tracing: tuple[str, ...]) -> None:
    """A dense and a sparse layer for each of 10 shapes, where torch's own limit is 8."""
    from torch._dynamo.utils import counters

    counters.clear()
    tiny_copy.pretrain(*tracing, "train.phases.general.tokens=5000 tokens")
    shapes = {(line["train/batch_tokens"], line["train/sequence_length"]) for line in curve(tiny_copy.run_dir)}
    assert len(shapes) > 8
    assert counters["stats"]["unique_graphs"] >= 2 * len(shapes)
    assert not counters["graph_break"]


@pytest.mark.parametrize("step", [FIRST - 1, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, FIRST + 5, STEPS - 1))])
def test_ctrl_c_saves_and_the_rest_is_the_same(tiny_copy: Tiny, undisturbed: Tiny, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """In the ramp, at the border of the phases, in the second phase, and in the very last step, after which nothing else may begin."""
    with monkeypatch.context() as patch:
        stop_in(patch, step)
        with pytest.raises(Interrupted, match=rf"stopped by SIGINT and saved at step {step + 1}; resume with: lmworks run tiny.yaml"):
            tiny_copy.pretrain(*OPTIONS)
    assert listing.directories(tiny_copy.run_dir / "checkpoints")[-1].name == f"step-{step + 1:08d}"
    assert [line["step"] for line in curve(tiny_copy.run_dir)] == list(range(1, step + 2))
    tiny_copy.pretrain(*OPTIONS)
    require_equal(tiny_copy, undisturbed)


@pytest.mark.parametrize("damage", ["flipped", *(pytest.param(damage, marks=pytest.mark.slow) for damage in ("cut", "gone"))])
def test_a_damaged_checkpoint_is_passed_over_aloud(
    tiny_copy: Tiny, undisturbed: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    with monkeypatch.context() as patch:
        stop_in(patch, 13)
        with pytest.raises(Interrupted):
            tiny_copy.pretrain(*OPTIONS)
    newest, before = listing.directories(tiny_copy.run_dir / "checkpoints")[:-3:-1]
    harm(newest, damage)
    until = jsonl.read(tiny_copy.run_dir / "metrics.jsonl")[-1]["time"]
    capsys.readouterr()
    tiny_copy.pretrain(*OPTIONS)
    said = capsys.readouterr().err.replace("\n", "")
    assert f"{newest} is not used: data-00000-00000.bin " in said
    assert f"pretrain resumes from step {listing.step_of(before)} of {STEPS}" in said
    ledger = read_ledger(tiny_copy.run_dir / "ledger.jsonl")
    (refused,) = [event for event in ledger if event["event"] == "checkpoint_refused"]
    assert refused["path"] == str(newest) and (newest.parent / f"{newest.name}.bad-1").is_dir()
    resumed = [(event["step"], event["trained_until"]) for event in ledger if event["event"] == "resume"]
    assert resumed == [(listing.step_of(before), until)], "the time of lines that are cut, whose cost was paid"
    require_equal(tiny_copy, undisturbed)


def harm(path: Path, damage: str) -> None:
    data = path / "data-00000-00000.bin"
    content = bytearray(data.read_bytes())
    if damage == "gone":
        data.unlink()
        return
    content[len(content) // 2] ^= 1
    data.write_bytes(content if damage == "flipped" else content[:-1])


def test_with_no_good_checkpoint_nothing_is_started_over(tiny_copy: Tiny, undisturbed: Tiny) -> None:
    """Not in this try, and not in the next, which finds the bad ones set aside."""
    run = undisturbed.copy(tiny_copy.run_dir.parent / "other")
    found = listing.directories(run.run_dir / "checkpoints")
    for path in found:
        harm(path, "flipped")
    lines = curve(run.run_dir)
    said = rf"no checkpoint in .*/checkpoints is good, and {len(found)} were set aside as damaged"
    with pytest.raises(UserError, match=said + r" \(the newest: data-.*its hash differs\)\): step-.*; restore one from a copy, or delete"):
        run.pretrain(*OPTIONS)
    with pytest.raises(UserError, match=said + r": step-.*; restore one from a copy, or delete that folder to train from the start"):
        run.pretrain(*OPTIONS)
    assert curve(run.run_dir) == lines
