"""Reinforcement learning with verifiable rewards: the trainer on its own answers, in groups for the same prompt.

The losses are functions of the log-probabilities of sampled tokens.
Shapes: B rows, T tokens, n answers in groups of G for the same prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmworks.inference.sampling import GenerateOptions
from lmworks.io.files import write_json
from lmworks.io.run_layout import of_stage
from lmworks.model.transfers import to_host
from lmworks.optim.optimizer import Ema
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.align import Grpo
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.shards.epochs import derive_key, permute
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.answers import AnswerCurriculum, PackedAnswers, differentiate, pack
from lmworks.train.prompts import Prompts, read_prompts
from lmworks.train.rewards import OUTCOMES
from lmworks.train.rollouts import Prompt, Rollout, RolloutChecks, Rollouts, differs
from lmworks.train.stage import StageSetup, TrainingContext, run_stage, weights_before
from lmworks.train.step import Update, micro_batch_of
from lmworks.watch.ledger import LEDGER, Ledger, NoLedger

_EPSILON = 1e-4  # added to the standard deviation of a group


@dataclass(frozen=True)
class Sampled:
    """Log-probabilities (B, T) of the sampled tokens before the update: by the training pass, by the rollout, and by the reference."""

    old_BT: Tensor
    rollout_BT: Tensor
    reference_BT: Tensor | None = None


@dataclass(frozen=True)
class Evaluated:
    """The loss, and of all tokens the share whose ratio is clipped and the mean divergence from the reference, None without one."""

    loss: Tensor
    clipped: Tensor
    divergence: Tensor | None


def advantages(options: Grpo, rewards_n: Tensor) -> Tensor:
    """Rewards minus the mean of their group, divided by its standard deviation except for dr_grpo; (n,)."""
    groups = rewards_n.double().view(-1, options.group_size)
    centered = groups - groups.mean(1, keepdim=True)
    if options.loss != "dr_grpo":
        centered = centered / (groups.std(1, keepdim=True) + _EPSILON)
    return centered.flatten()


def policy_loss(options: Grpo, packed: PackedAnswers, logp_BT: Tensor, sampled: Sampled, advantages_n: Tensor) -> Evaluated:
    """The clipped surrogate loss of PPO (arXiv:1707.06347) on the advantages of whole answers, and the divergence from the reference.

    The ratio is that of tokens, or for gspo the geometric mean over an answer. Truncated importance sampling multiplies the loss of a
    token by the ratio of its probabilities in training and rollout, at most `importance_cap`.
    """
    mask, lengths_n = packed.mask_BT, packed.lengths()
    log_ratio_BT = (logp_BT - sampled.old_BT) * mask
    if options.loss == "gspo":
        log_ratio_BT = packed.spread(packed.sums(log_ratio_BT) / lengths_n)
    ratio_BT, advantage_BT = log_ratio_BT.exp(), packed.spread(advantages_n)
    bounded_BT = ratio_BT.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss_BT = -torch.minimum(ratio_BT * advantage_BT, bounded_BT * advantage_BT)
    clipped = ((bounded_BT * advantage_BT < ratio_BT * advantage_BT) & mask).sum() / mask.sum()
    if options.importance_cap is not None:
        loss_BT = loss_BT * (sampled.old_BT - sampled.rollout_BT).exp().clamp(max=options.importance_cap)
    divergence = None
    if sampled.reference_BT is not None:
        away_BT = (sampled.reference_BT - logp_BT) * mask
        divergence_BT = away_BT.exp() - away_BT - 1  # k3 of Schulman 2020, never negative
        loss_BT = loss_BT + options.beta * divergence_BT
        divergence = divergence_BT.detach().sum() / mask.sum()
    return Evaluated(_reduced(options, packed, loss_BT, lengths_n), clipped.detach(), divergence)


def _reduced(options: Grpo, packed: PackedAnswers, loss_BT: Tensor, lengths_n: Tensor) -> Tensor:
    """One number: the mean over tokens (dapo), over answers of the sum by a constant length (dr_grpo), or of the mean."""
    sums_n = packed.sums(loss_BT)
    if options.loss == "dapo":
        return sums_n.sum() / lengths_n.sum()
    if options.loss == "dr_grpo":
        return sums_n.sum() / (packed.count * options.max_new_tokens)
    return (sums_n / lengths_n).mean()


Group = list[Rollout]


class PolicyGradient:
    """The objective of `grpo`."""

    def __init__(
        self, recipe: Recipe, model: ParallelModel, prompts: Prompts, rollouts: Rollouts, seed: int, checks: RolloutChecks
    ) -> None:  # fmt: skip
        assert recipe.grpo is not None
        self._checks = checks
        self._options, self._model, self._prompts, self.rollouts, self._seed = recipe.grpo, model, prompts, rollouts, seed
        self._length = int(self._options.sequence_length)
        self._micro_batch_size = micro_batch_of(recipe, self._length)
        # What is trained, as it is at the start: averages that are never updated, so that they can be swapped in.
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.reference = Ema(trained, 1.0) if self._options.beta else None
        self._metrics: dict[str, float] = {}

    def prompts_of(self, step: int, turn: int, count: int) -> list[Prompt]:
        """The prompts of a step, each epoch all of them in a keyed order; in later turns of dynamic sampling, other ones at random."""
        train = self._prompts.train
        if turn:
            places = np.arange(count) % len(train)
            numbers = permute(places, len(train), derive_key(self._seed, "grpo", f"again-{turn}", step)).tolist()
            return [train[number] for number in numbers]
        found = []
        for place in range(step * count, (step + 1) * count):
            epoch, index = divmod(place, len(train))
            found.append(train[int(permute(np.array([index]), len(train), derive_key(self._seed, "grpo", "prompts", epoch))[0])])
        return found

    def updates(self, step: int) -> Iterator[Update]:
        began = time.monotonic()
        groups, drawn = self._groups(step)
        self._metrics = {"perf/rollout_seconds": time.monotonic() - began, **self._checks.check(step, drawn)}
        self._metrics |= _rollout_metrics(drawn, len(groups))
        parts = np.array_split(np.arange(len(groups)), min(self._options.updates_per_rollout, len(groups)))
        scored = self._score([[groups[number] for number in part.tolist()] for part in parts], step)
        self._metrics |= _mismatch([(packed.mask_BT, sampled) for packed, sampled, _ in scored])
        evaluated: list[Evaluated] = []
        for number, (packed, sampled, advantages_n) in enumerate(scored):
            # nothing has changed since the first part was scored
            logp_BT = sampled.old_BT if number == 0 else -to_host(*self._nats([packed]))[0]

            def loss(logp_BT: Tensor, packed=packed, sampled=sampled, advantages_n=advantages_n) -> Tensor:  # type: ignore[no-untyped-def]
                evaluated.append(policy_loss(self._options, packed, logp_BT, sampled, advantages_n))
                return evaluated[-1].loss

            labels = float(packed.lengths().sum())
            batch, value = differentiate(packed, -logp_BT, loss, normalizer=labels)
            yield Update(batch, labels, value)
        self._metrics["grpo/clipped"] = float(torch.stack([one.clipped for one in evaluated]).mean())
        if self.reference is not None:
            self._metrics["grpo/divergence"] = float(np.mean([float(one.divergence) for one in evaluated if one.divergence is not None]))

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def validate(self) -> dict[str, float]:
        """The mean reward of one answer to each held-out prompt, drawn as in training, and the share that does not earn the full reward."""
        if not self._prompts.held_out:
            return {}
        groups = self.rollouts.draw(self._prompts.held_out, 1, f"{self._seed}/validation")
        rewards = np.array([group[0].reward.value for group in groups])
        return {"validation/reward": float(rewards.mean()), "validation/wrong": float((rewards < 1).mean())}

    def _groups(self, step: int) -> tuple[list[Group], list[Group]]:
        """The groups that are trained on, and all that were drawn. With dynamic sampling, groups whose rewards are equal are replaced by
        those of other prompts; if none has a difference, the first ones are kept, whose advantages are 0."""
        wanted = self._options.prompts_per_step
        kept: list[Group] = []
        drawn: list[Group] = []
        for turn in range(self._options.resample_rounds + 1):
            prompts = self.prompts_of(step, turn, wanted - len(kept))
            found = self.rollouts.draw(prompts, self._options.group_size, f"{self._seed}/{step}/{turn}")
            drawn += found
            kept += [group for group in found if not self._options.resample_rounds or differs(group)]
            if len(kept) == wanted:
                break
        return kept or drawn[:wanted], drawn

    def _score(self, parts: Sequence[list[Group]], step: int) -> list[tuple[PackedAnswers, Sampled, Tensor]]:
        """For each part of the groups its rows, the log-probabilities of their tokens before the update, and the advantages of the answers.
        The host waits once, for the scores of all."""
        answers = [[one for group in part for one in group] for part in parts]
        packed = [pack([one.answer for one in part], self._length, step) for part in answers]
        nats = self._nats(packed)
        if self.reference is not None:
            with self._model.ema_weights(self.reference):
                nats += self._nats(packed)
        logps = [-nats_BT for nats_BT in to_host(*nats)]
        references: Sequence[Tensor | None] = logps[len(packed) :] or [None] * len(packed)
        found = []
        for part, rows, old_BT, reference_BT in zip(answers, packed, logps, references, strict=False):
            sampled = Sampled(old_BT, rows.place([one.logprobs for one in part]), reference_BT)
            found.append((rows, sampled, advantages(self._options, torch.tensor([one.reward.value for one in part]))))
        return found

    def _nats(self, packed: Sequence[PackedAnswers]) -> list[Tensor]:
        """The cross-entropy of each label, on the device."""
        with self._model.exact_logprobs():
            return [self._model.token_cross_entropy_on_device(rows.batch, self._micro_batch_size) for rows in packed]


def _rollout_metrics(drawn: Sequence[Group], kept: int) -> dict[str, float]:
    answers = [one for group in drawn for one in group]
    rewards = np.array([one.reward.value for one in answers])
    shares = {outcome: float(np.mean([one.reward.outcome == outcome for one in answers])) for outcome in OUTCOMES}
    wrong = np.mean([one.reward.outcome == "judged" and one.reward.value < 1 for one in answers])
    return {
        "grpo/reward": float(rewards.mean()), "grpo/solved": float((rewards >= 1).mean()), "grpo/wrong": float(wrong),
        "grpo/empty": shares["empty"], "grpo/truncated": shares["truncated"], "grpo/unparsed": shares["unparsed"],
        "grpo/failed": shares["failed"], "grpo/answer_tokens": float(np.mean([len(one.logprobs) for one in answers])),
        "grpo/surprise": float(-np.mean(np.concatenate([one.logprobs for one in answers]))),
        "grpo/groups": float(len(drawn)), "grpo/equal_groups": float(np.mean([not differs(group) for group in drawn])),
        "grpo/trained_groups": float(kept),
    }  # fmt: skip


def _mismatch(parts: Sequence[tuple[Tensor, Sampled]]) -> dict[str, float]:
    """How far the ratio of training and rollout probability of the sampled tokens is from 1."""
    away = torch.cat([((sampled.old_BT - sampled.rollout_BT).exp() - 1).abs()[mask_BT] for mask_BT, sampled in parts])
    return {"grpo/mismatch_mean": float(away.mean()), "grpo/mismatch_max": float(away.max())}


def sampling_of(options: Grpo) -> GenerateOptions:
    """How the answers are drawn; the stop tokens are the tokenizer's."""
    return GenerateOptions(options.max_new_tokens, options.temperature, options.top_k, options.top_p, options.min_p)


def grpo(context: TrainingContext) -> None:
    """Train the model of the stage before on its own answers. Reads `tokenizer/` and its final checkpoint; writes `grpo/`.

    Raises `Interrupted` when asked to stop, and `UserError`.
    """
    recipe, run_dir, stage = context.recipe, context.run_dir, of_stage("grpo")
    options = recipe.grpo
    assert options is not None
    folder, length = run_dir / "grpo", int(options.sequence_length)
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    prompts = read_prompts(recipe, tokenizer, *context.protect("grpo"))
    base = weights_before(context, stage, options.lora)

    def record() -> None:
        folder.mkdir(exist_ok=True)
        write_json(folder / "prompts.json", {"train": len(prompts.train), "held_out": len(prompts.held_out), "data": prompts.sets})

    context.ranks.first(record)

    def setup(model: ParallelModel) -> StageSetup:
        model.set_sampling(sampling_of(options))
        rollouts = Rollouts(model, tokenizer, prompts.judges, sampling_of(options), base.communicator)
        objective = PolicyGradient(recipe, model, prompts, rollouts, recipe.training_seed, checks)
        answers = options.prompts_per_step * options.group_size

        def batch(step: int) -> Batch:
            """The prompts of a step, one row for each answer: what is trained on is known only once it has been drawn."""
            tokens = np.zeros((answers, length), np.int32)
            for number, prompt in enumerate(objective.prompts_of(step, 0, options.prompts_per_step)):
                rows = slice(number * options.group_size, (number + 1) * options.group_size)
                tokens[rows, : len(prompt.ids)] = prompt.ids
            starts = np.arange(answers + 1, dtype=np.int32) * length
            return Batch(tokens, np.full_like(tokens, -100), starts, 0, step)

        curriculum = AnswerCurriculum("grpo", recipe, options, [answers] * options.steps, batch)
        return StageSetup(curriculum, lambda step: objective.validate(), objective, options.early_stopping)

    first = base.model.ranks.is_first
    with Ledger(run_dir / LEDGER, patient=True) if first else NoLedger() as ledger:
        checks = RolloutChecks(options, ledger.write, first)
        run_stage(context, stage, base, setup, tokenizer)
