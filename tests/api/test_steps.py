"""Training step by step: the bits of the command, judged as in a run, and checkpoints that the commands take and that it goes back to."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Lmworks

import lmworks
from lmworks.checkpoint import listing
from lmworks.model import Transformer
from lmworks.run.checkpoint_commands import rollback
from lmworks.shards.batch import Batch
from lmworks.train.own_loop import JudgedStep
from lmworks.watch.ledger import read_ledger
from lmworks.watch.policy import load_bad_batch
from tiny_run import STEPS, Tiny, before_each_step, checkpoint, same_bits

SHORT = {"train.phases.general.tokens": "1536 tokens", "train.phases.long.tokens": "512 tokens", "train.validate_every": "100%"}


def test_a_loop_of_ones_own_computes_the_bits_of_the_command(lmworks_command: Lmworks, tiny_copy: Tiny, tmp_path: Path) -> None:
    """Also over a border between phases, with a save and a new session in between; and `lmworks run` goes on from it."""
    reference = tiny_copy.copy(tmp_path / "reference")
    options = [word for key, value in SHORT.items() for word in ("--set", f"{key}={value}")]
    assert lmworks_command("pretrain", reference.recipe, "--set", f"run_dir={reference.run_dir}", *options).code == 0

    recipe = lmworks.load_recipe(tiny_copy.recipe, SHORT, run_dir=str(tiny_copy.run_dir))
    for last in (4, 9):
        with recipe.training_session() as session:
            assert session.step == (0 if last == 4 else 4) and session.steps == 10
            while session.step < last:
                loss = session.forward_backward(session.batch())
                assert loss == pytest.approx(session.optim_step().loss, rel=1e-6)
            assert session.save().name == f"step-{last:08d}"
    run = lmworks.open_run(tiny_copy.run_dir)
    theirs = lmworks.open_run(reference.run_dir).metrics()
    assert run.metrics()["train/loss"] == theirs["train/loss"][:9] and run.metrics()["step"] == list(range(1, 10))
    done = lmworks_command("pretrain", tiny_copy.recipe, "--set", f"run_dir={tiny_copy.run_dir}", *options)
    assert done.code == 0 and "pretrain resumes from step 9 of 10" in done.err, done.err
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(reference.run_dir)) == []
    assert json.loads(lmworks_command("ckpt", "verify", run.path, "--json").out)[-1]["good"]
    (tmp_path / "colors.jsonl").write_text('{"question": "what?", "choices": ["red", "green"], "answer": 1}\n' * 2, encoding="utf-8")
    (tmp_path / "colors.yaml").write_text("file: colors.jsonl\nchoices: choices\n", encoding="utf-8")
    task = ("--tasks", tmp_path / "colors.yaml", "--form", "cloze", "--out", tmp_path)
    scored = lmworks_command("evaluate", f"{run.path}@9", *task, "--json")
    assert scored.code == 0 and json.loads(scored.out)["models"]["run@9"]["scores"], scored.err
    assert run.model(9).generate("def", max_new_tokens=2).tokens


def test_own_batches_are_learned_and_sampled(tiny_copy: Tiny) -> None:
    recipe = lmworks.load_recipe(tiny_copy.recipe, SHORT, run_dir=str(tiny_copy.run_dir))
    with recipe.training_session() as session:
        ids = session.tokenizer.encode("def f(x): return x")
        masked = session.batch_of([ids, ids[:5]], [[0.0, *[1.0] * (len(ids) - 1)], [0.0, 0.0, 1.0, 1.0, 1.0]])
        assert masked.valid_tokens == len(ids) - 1 + 3 and masked.weights is None and masked.tokens.shape == (2, len(ids) - 1)
        assert masked.tokens[1].tolist() == [*ids[:4], *(ids[:4] * len(ids))[: len(ids) - 5]], "padding repeats its row"
        batch = session.batch_of([ids, ids[::-1]])
        before = session.model().log_likelihood(ids[:1], ids[1:])
        # two calls add up to one with both, each label with the same weight
        whole = session.forward_backward(batch)
        reference = [parameter.grad.clone() for parameter in _parameters(session)]
        session._gradients = None
        total = batch.valid_tokens
        parts = [session.forward_backward(one, total) * one.valid_tokens for one in (batch.rows(0, 1), batch.rows(1, 2))]
        assert sum(parts) / total == pytest.approx(whole, rel=1e-5)
        for one, other in zip(_parameters(session), reference, strict=True):
            assert torch.allclose(one.grad, other, rtol=1e-3, atol=1e-6)  # type: ignore[arg-type]
        session.optim_step(learning_rate=0.02)
        for _ in range(4):
            session.forward_backward(batch)
            session.optim_step(learning_rate=0.02)
        after = session.model().log_likelihood(ids[:1], ids[1:])
        assert after > before + 1
        weighted = session.batch_of([ids], [[0.0, *[-0.5] * (len(ids) - 1)]])
        for _ in range(3):  # the momentum of the steps before goes the other way
            session.forward_backward(weighted)
            session.optim_step(learning_rate=0.02)
        assert session.model().log_likelihood(ids[:1], ids[1:]) < after
        assert session.model().generate("def", max_new_tokens=3).tokens
        for call, said in (
            (session.optim_step, "there are no gradients; call forward_backward first"),
            (lambda: session.batch(99), "step 99 does not exist: the recipe has 10 steps"),
            (lambda: session.batch_of([[5]]), "at least two ids"),
            (lambda: session.batch_of([[5, 10**6]]), "each from 0 to 511"),
            (lambda: session.batch_of([[5, 6]], [[1.0]]), "a finite number for each id"),
            (lambda: recipe.run(quiet=True), "is in use by process"),
            (lambda: (session.forward_backward(batch), session.forward_backward(weighted)), "need one normalizer"),
            (lambda: session.optim_step(learning_rate=float("nan")), "learning_rate is a number from 0 on"),
        ):
            with pytest.raises(lmworks.UserError) as error:
                call()  # type: ignore[operator]
            assert said in str(error.value)
    with pytest.raises(lmworks.UserError, match="needs token budgets"):
        lmworks.load_recipe(tiny_copy.recipe, time="2min", run_dir=f"{tiny_copy.run_dir}-timed").training_session()


def _parameters(session: lmworks.TrainingSession) -> list[torch.nn.Parameter]:
    return [parameter for parameter in session._trainer.model.parameters() if parameter.grad is not None]


def test_weights_that_are_not_finite_are_not_saved(tiny_copy: Tiny) -> None:
    recipe = lmworks.load_recipe(tiny_copy.recipe, SHORT, run_dir=str(tiny_copy.run_dir))
    with recipe.training_session() as session:
        session.forward_backward(session.batch())
        session.optim_step()
        with torch.no_grad():
            next(session.model().module.parameters()).fill_(float("nan"))
        with pytest.raises(lmworks.UserError, match="after step 1 are not finite, and were not saved"):
            session.save()
    assert not list((tiny_copy.run_dir / "checkpoints").glob("step-00000001"))


# Wide enough for the noise of four short sequences, and far below what is planted.
SPIKE = {
    "stability.spike.window_steps": 8, "stability.spike.min_rise_nats": 3, "stability.spike.norm_factor": 1000,
    "stability.spike.action": "rollback",
}  # fmt: skip
HIGH, NAN = 50.0, float("nan")


class Spoiled:
    """Multiplies the losses of training by `factor`: those that are reported, or with NaN those that the gradients are of, too."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.factor, honest = 1.0, Transformer.loss

        def loss(model: Transformer, *inputs: torch.Tensor) -> Any:
            found = honest(model, *inputs)
            if self.factor == 1.0 or not torch.is_grad_enabled():
                return found
            head = found.head._replace(cross_entropy=found.head.cross_entropy * self.factor)
            return replace(found, head=head, total=found.total * (self.factor if math.isnan(self.factor) else 1.0))

        patch.setattr(Transformer, "loss", loss)

    def step(self, session: lmworks.TrainingSession, factor: float = 1.0, batch: Batch | None = None) -> JudgedStep:
        self.factor = factor
        session.forward_backward(session.batch() if batch is None else batch)
        self.factor = 1.0
        return session.optim_step()


def _weights(session: lmworks.TrainingSession) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in session.model().module.state_dict().items()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def _events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in read_ledger(run_dir / "ledger.jsonl") if line["event"] == name]


def test_a_loop_that_acts_as_the_policies_say_computes_the_bits_of_the_run(tiny_copy: Tiny, tmp_path: Path) -> None:
    """A spike in step 10 leads both back to the checkpoint of step 8, without the data since; both validate after steps 8, 16 and 21."""
    reference = tiny_copy.copy(tmp_path / "reference")
    with pytest.MonkeyPatch.context() as patch:
        spoiled = Spoiled(patch)
        before_each_step(patch, lambda step: setattr(spoiled, "factor", HIGH if step == 10 else 1.0))
        reference.pretrain(*(f"{key}={value}" for key, value in SPIKE.items()))
    recipe = lmworks.load_recipe(tiny_copy.recipe, SPIKE, run_dir=str(tiny_copy.run_dir))
    with pytest.MonkeyPatch.context() as patch, recipe.training_session() as session:
        spoiled = Spoiled(patch)
        while session.step < session.steps:
            done = spoiled.step(session, HIGH if session.step == 10 else 1.0)
            assert done.applied == (not done.bad)
            if done.rollback:
                assert re.fullmatch(r"the loss of \d+\.?\d* is not below \d\.\d+ \(stability\.spike\)", done.bad)
                assert session.step == 11 and session.restore().name == "step-00000008" and session.step == 11
                continue
            if session.step % 8 == 0 or session.step == session.steps:
                values = session.validate()
                assert {"validation/bits_per_byte", "validation/code/bits_per_byte", "validation/docs/loss"} <= values.keys()
            if session.step % 4 == 0 or session.step == session.steps:
                session.save()
    assert len(_events(tiny_copy.run_dir, "rollback")) == 1
    strip = {"time": None}
    assert _events(tiny_copy.run_dir, "rollback")[0] | strip == _events(reference.run_dir, "rollback")[0] | strip
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(reference.run_dir)) == []
    ours, theirs = (lmworks.open_run(run.run_dir).metrics() for run in (tiny_copy, reference))
    assert ours["step"] == theirs["step"] == [*range(1, 9), *range(12, STEPS + 1)]
    for name in ("train/loss", "optim/learning_rate", "validation/bits_per_byte", "validation/code/bits_per_byte"):
        assert ours[name] == theirs[name], name
    metas = [listing.read_meta(listing.directories(run.run_dir / "checkpoints")[-1]) for run in (tiny_copy, reference)]
    assert metas[0]["metric"] == metas[1]["metric"] == ours["validation/bits_per_byte"][-1]
    assert metas[0]["meta"]["stability"] == metas[1]["meta"]["stability"]


def test_a_session_goes_back_to_a_saved_state(lmworks_command: Lmworks, tiny_copy: Tiny) -> None:
    recipe = lmworks.load_recipe(tiny_copy.recipe, SHORT, run_dir=str(tiny_copy.run_dir))
    with pytest.MonkeyPatch.context() as patch, recipe.training_session() as session:
        spoiled = Spoiled(patch)
        with pytest.raises(lmworks.UserError, match="there is no good checkpoint: nothing was saved yet; call save first"):
            session.restore()
        losses = [spoiled.step(session).loss for _ in range(4)]
        saved, weights = session.save(), _weights(session)
        losses += [spoiled.step(session).loss for _ in range(3)]
        session.forward_backward(session.batch())
        assert session.restore(4) == saved and session.step == 4 and _same(weights, _weights(session))
        with pytest.raises(lmworks.UserError, match="there are no gradients"):
            session.optim_step()  # what was accumulated before is dropped
        assert lmworks.open_run(tiny_copy.run_dir).metrics()["step"] == [1, 2, 3, 4]
        assert [spoiled.step(session).loss for _ in range(3)] == losses[4:], "the same batches, and the same state of the optimizer"
        session.save()
        with pytest.raises(lmworks.UserError, match="there is no good checkpoint of step 5: the newest are 4, 7"):
            session.restore(5)
        assert session.restore(4, skip=True) == saved and session.step == 7, "the batches since are left out"
        assert not (tiny_copy.run_dir / "checkpoints" / "step-00000007").exists(), "its steps are no part of this course"
        spoiled.step(session)
        assert session.step == 8 and session.restore() == saved and session.step == 7
        assert [(one["step"], one["to_step"], one["skip"], one["reason"]) for one in _events(tiny_copy.run_dir, "rollback")] == [
            (7, 4, None, ""), (7, 4, [4, 7], ""), (8, 4, None, ""),
        ]  # fmt: skip
        batch = lmworks.open_run(tiny_copy.run_dir).batch(5)
        assert batch.left_out
    options = [word for key, value in SHORT.items() for word in ("--set", f"{key}={value}")]
    done = lmworks_command("pretrain", tiny_copy.recipe, "--set", f"run_dir={tiny_copy.run_dir}", *options)
    assert done.code == 0 and "pretrain resumes from step 7 of 10" in done.err, done.err


def test_a_resumed_session_measures_with_the_positions_that_the_weights_were_trained_with(tiny_copy: Tiny) -> None:
    """Those of the phase `long`, before its first step in this process, and after the border as at it."""
    recipe = lmworks.load_recipe(tiny_copy.recipe, SHORT, run_dir=str(tiny_copy.run_dir))
    with pytest.MonkeyPatch.context() as patch, recipe.training_session() as session:
        spoiled = Spoiled(patch)
        while session.step < 8:
            spoiled.step(session)
        session.save()
        at_border = session.validate()["validation/bits_per_byte"]
        spoiled.step(session)
        session.save()
        measured, ids = session.validate()["validation/bits_per_byte"], list(range(5, 40))
        session.restore(8)
        assert session.validate()["validation/bits_per_byte"] == at_border
        spoiled.step(session)
        session.save()
    with recipe.training_session() as session:
        assert session.model().token_logprobs(ids)[1:] == lmworks.load_model(f"{tiny_copy.run_dir}@9").token_logprobs(ids)[1:]
        assert session.validate()["validation/bits_per_byte"] == measured
        session.forward_backward(session.batch())
        with pytest.raises(lmworks.UserError, match="a step has begun; call optim_step before validate"):
            session.validate()


def test_validations_of_a_session_count_for_early_stopping_once(tiny_copy: Tiny) -> None:
    stopping = {"train.early_stopping": {"patience": 1}}
    recipe = lmworks.load_recipe(tiny_copy.recipe, SHORT | stopping, run_dir=str(tiny_copy.run_dir))
    with pytest.MonkeyPatch.context() as patch, recipe.training_session() as session:
        spoiled = Spoiled(patch)
        spoiled.step(session)
        assert session.validate()["validation/loss"] == session.validate()["validation/loss"] and not session.stops
        session.forward_backward(session.batch())
        session.optim_step(learning_rate=2.0)  # which makes it worse
        session.validate()
        assert session.stops


def test_steps_that_are_not_finite_change_nothing_and_say_so(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"stability.max_bad_steps": 2}
    recipe = lmworks.load_recipe(tiny_copy.recipe, SHORT | limits, run_dir=str(tiny_copy.run_dir))
    spoiled = Spoiled(monkeypatch)
    with recipe.training_session() as session:
        assert spoiled.step(session).bad == ""
        weights, good, bad = _weights(session), session.batch(), session.batch(3)
        session.forward_backward(good, good.valid_tokens + bad.valid_tokens)
        spoiled.factor = NAN
        session.forward_backward(bad, good.valid_tokens + bad.valid_tokens)
        spoiled.factor = 1.0
        done = session.optim_step()
        assert (done.bad, done.applied, done.rollback) == ("the loss was not finite", False, False)
        assert _same(weights, _weights(session)) and session.step == 2
        kept = load_bad_batch(tiny_copy.run_dir / "bad_batches" / "step-00000001.npz")
        assert kept["tokens"].tolist() == bad.tokens.tolist(), "of the batches of a step the one that was not finite"
        with pytest.raises(lmworks.UserError, match=r"stopped at step 3: the loss was not finite in 2 steps in a row \(stability.max_bad"):
            spoiled.step(session, NAN)
        assert spoiled.step(session).bad == "" and not _same(weights, _weights(session))
        session.save()
        assert not spoiled.step(session, NAN).rollback and spoiled.step(session, NAN).rollback
        first = session.step
        assert session.restore().name == "step-00000003" and session.step == first == 5, "without the data of the bad steps"


def test_spikes_that_the_loop_goes_on_from_are_the_new_level(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = lmworks.load_recipe(tiny_copy.recipe, SPIKE, run_dir=str(tiny_copy.run_dir))
    spoiled = Spoiled(monkeypatch)
    with recipe.training_session() as session:
        for _ in range(8):
            assert not spoiled.step(session).bad
        ids = session.tokenizer.encode("def f(x): return x")
        weighted = session.batch_of([ids], [[0.0, *[0.5] * (len(ids) - 1)]])
        assert not spoiled.step(session, HIGH, weighted).bad, "a policy gradient has no loss to compare"
        done = spoiled.step(session, HIGH)
        assert done.bad and not done.applied and not done.rollback, "nothing was saved: a run would go on, too"
        assert not spoiled.step(session, HIGH).bad
    _reset(tiny_copy)
    with recipe.training_session() as session:
        for _ in range(8):
            spoiled.step(session)
        session.save()
        assert spoiled.step(session, HIGH).rollback
        assert not spoiled.step(session, HIGH).bad and len(_events(tiny_copy.run_dir, "spike_accepted")) == 2
    _reset(tiny_copy)
    reduced = lmworks.load_recipe(tiny_copy.recipe, SPIKE | {"stability.spike.action": "reduce_lr"}, run_dir=str(tiny_copy.run_dir))
    with reduced.training_session() as session:
        for _ in range(8):
            spoiled.step(session)
        assert spoiled.step(session, HIGH).bad
        spoiled.step(session)
        scheduled = 0.01 * session._trainer.curriculum.lr_factor(9)
        assert lmworks.open_run(tiny_copy.run_dir).metrics()["optim/learning_rate"][9] == pytest.approx(0.3 * scheduled)


def _reset(run: Tiny) -> None:
    """Begin again from random weights."""
    shutil.rmtree(run.run_dir / "checkpoints")


def test_a_session_leaves_out_what_a_rollback_skips(tiny_copy: Tiny) -> None:
    """Steps that are still ahead, as after `lmworks ckpt rollback --skip-steps`."""
    recipe = lmworks.load_recipe(tiny_copy.recipe, SHORT, run_dir=str(tiny_copy.run_dir))
    with pytest.MonkeyPatch.context() as patch, recipe.training_session() as session:
        for _ in range(2):
            Spoiled(patch).step(session)
        session.save()
    rollback(tiny_copy.run_dir, "base", 2, (3, 6))
    with pytest.MonkeyPatch.context() as patch, recipe.training_session() as session:
        Spoiled(patch).step(session)
        assert session.step == 6
