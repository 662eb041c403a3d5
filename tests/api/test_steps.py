"""Training step by step: the bits of the command, and a checkpoint that the commands take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import Lmworks

import lmworks
from tiny_run import Tiny, checkpoint, same_bits

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
