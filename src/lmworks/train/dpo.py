"""Preference optimization: the trainer on pairs of answers, with the reference scores of the weights that it starts from.

The losses are functions of the summed log-probabilities of the answers.
Shapes: P pairs; column 0 is the chosen answer and column 1 the rejected one, or for kto the answer and another row's answer.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.io.files import sha256_file
from lmworks.io.run_layout import of_stage
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.align import Dpo
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.timeline import places_of, steps_of
from lmworks.shards.epochs import derive_key, permute
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.answers import Answer, AnswerCurriculum, PackedAnswers, differentiate, pack, reference_scores, rows_of
from lmworks.train.data.preferences import build_preferences, read_preferences
from lmworks.train.stage import BaseWeights, StageSetup, TrainingContext, require_held_out, run_stage, weights_before
from lmworks.train.step import Update, micro_batch_of
from lmworks.watch.ledger import LEDGER, Ledger


@dataclass(frozen=True)
class Scored:
    """The mean loss, and the rewards of chosen and rejected answers, which are what the metrics are made of. `accuracy`: share of pairs
    whose chosen answer has the larger reward; a tie, or what rounding may have made of one, counts as half. `divergence`: kto's estimate,
    else None."""

    loss: Tensor
    chosen: Tensor
    rejected: Tensor
    accuracy: Tensor
    divergence: Tensor | None = None


def needs_reference(options: Dpo) -> bool:
    """Whether the loss compares with the model that the stage starts from."""
    return options.loss != "simpo"


def preference_loss(
    options: Dpo, logp_P2: Tensor, reference_P2: Tensor | None, lengths_P2: Tensor, labels_P: Tensor | None = None, eps: float = 0.0
) -> Scored:
    """The mean loss over the pairs. `logp_P2` and `reference_P2` are summed over each answer's tokens, of which there are `lengths_P2`;
    `labels_P` (bool) says for kto which answers are good. `eps` is that of the type in which the scores were computed."""
    tolerance_P = options.beta * _rounding(logp_P2, lengths_P2, eps)
    match options.loss:
        case "kto":
            assert reference_P2 is not None and labels_P is not None
            return _kto(options, logp_P2, reference_P2, labels_P, tolerance_P)
        case "simpo":
            tolerance_P = torch.zeros_like(tolerance_P)  # there is no reference, from which all pairs begin with a difference of 0
            rewards_P2 = options.beta * logp_P2 / lengths_P2
            losses = _sigmoid(rewards_P2[:, 0] - rewards_P2[:, 1] - options.simpo_gamma, options.label_smoothing)
        case "ipo":
            assert reference_P2 is not None
            ratio_P2 = logp_P2 - reference_P2
            mean_P2 = ratio_P2 / lengths_P2  # per token, as the authors do it: otherwise the loss grows with the square of the length
            losses = (mean_P2[:, 0] - mean_P2[:, 1] - 1 / (2 * options.beta)).square()
            rewards_P2 = options.beta * ratio_P2
        case _:
            assert reference_P2 is not None
            rewards_P2 = options.beta * (logp_P2 - reference_P2)
            losses = _sigmoid(rewards_P2[:, 0] - rewards_P2[:, 1], options.label_smoothing)
    chosen, rejected = rewards_P2.detach().unbind(1)
    return Scored(losses.mean(), chosen, rejected, _above(chosen - rejected, tolerance_P))


def _sigmoid(margin_P: Tensor, smoothing: float) -> Tensor:
    """-log sigmoid; with smoothing the expected loss if a pair is the wrong way round with that probability (conservative DPO)."""
    if not smoothing:
        return -F.logsigmoid(margin_P)
    return -F.logsigmoid(margin_P) * (1 - smoothing) - F.logsigmoid(-margin_P) * smoothing


def _kto(options: Dpo, logp_P2: Tensor, reference_P2: Tensor, labels_P: Tensor, tolerance_P: Tensor) -> Scored:
    """Equations 7 and 8 of KTO: the reference point is a divergence estimated from answers to other prompts, without a gradient."""
    ratio_P2 = logp_P2 - reference_P2
    divergence = ratio_P2[:, 1].detach().mean().clamp(min=0)
    margin_P = options.beta * (ratio_P2[:, 0] - divergence)
    losses = torch.where(
        labels_P, options.desirable_weight * (1 - margin_P.sigmoid()), options.undesirable_weight * (1 - (-margin_P).sigmoid())
    )
    rewards_P, sign_P = (options.beta * ratio_P2[:, 0]).detach(), torch.where(labels_P, 1.0, -1.0)
    return Scored(losses.mean(), rewards_P[labels_P], rewards_P[~labels_P], _above(sign_P * margin_P.detach(), tolerance_P), divergence)


def _above(margin_P: Tensor, tolerance_P: Tensor) -> Tensor:
    return torch.where(margin_P.abs() > tolerance_P, (margin_P.sign() + 1) / 2, 0.5).mean()


def _rounding(logp_P2: Tensor, lengths_P2: Tensor, eps: float) -> Tensor:
    """What rounding may make of a difference of 0 between the scores of a pair and those of the reference. The scores of tokens are rounded
    in proportion to their size, and in a sum such errors grow with the root of their number: four times their standard deviation. Equal
    weights would seem to prefer the one or the other answer otherwise, and other ones on another layout."""
    return 4 * eps * (logp_P2.detach().square() / lengths_P2).sum(1).sqrt()


class Pairs:
    """Pairs of a split with their reference scores and labels; the pairs of a step are a function of its number."""

    def __init__(
        self, pairs: list[tuple[Answer, Answer]], reference_P2: Tensor | None, labels_P: np.ndarray | None, per_step: int, epochs: float,
        seed: int,
    ) -> None:  # fmt: skip
        self.pairs, self.reference_P2, self._per_step, self._epochs, self._seed = pairs, reference_P2, per_step, epochs, seed
        self.labels_P = None if labels_P is None else torch.from_numpy(labels_P)
        self.steps = steps_of(len(pairs), per_step, epochs)

    def numbers(self, step: int) -> list[int]:
        """The pairs of a step: each epoch has all of them once, in a keyed order of its own. The last step has those that are left."""
        places = np.array(places_of(step, len(self.pairs), self._per_step, self._epochs))
        found = []
        for epoch in sorted(set((places // len(self.pairs)).tolist())):
            of_epoch = places[places // len(self.pairs) == epoch] % len(self.pairs)
            found += permute(of_epoch, len(self.pairs), derive_key(self._seed, "dpo", "pairs", epoch)).tolist()
        return found

    def answers(self, numbers: list[int]) -> list[Answer]:
        """Both answers of each pair."""
        return [answer for number in numbers for answer in self.pairs[number]]


def rows_by_step(train: Pairs, length: int) -> list[int]:
    """The rows of each step, in which its answers are packed."""
    return [int(rows_of(train.answers(train.numbers(step)), length).max()) + 1 for step in range(train.steps)]


class Preference:
    """The objective of `dpo`."""

    def __init__(
        self, options: Dpo, model: ParallelModel, train: Pairs, held_out: Pairs | None, length: int, micro_batch_size: int
    ) -> None:  # fmt: skip
        self._options, self._model, self._train, self._held_out = options, model, train, held_out
        self._length, self._micro_batch_size = length, micro_batch_size
        self._metrics: dict[str, float] = {}

    def packed(self, step: int) -> PackedAnswers:
        """The rows of a step."""
        return pack(self._train.answers(self._train.numbers(step)), self._length, step)

    def updates(self, step: int) -> Iterator[Update]:
        numbers, packed = self._train.numbers(step), self.packed(step)
        nats_BT = self._model.token_cross_entropy(packed.batch, self._micro_batch_size)
        scored: list[Scored] = []

        def loss(logp_BT: Tensor) -> Tensor:
            scored.append(self._score(packed, logp_BT, self._train, numbers))
            return scored[-1].loss

        batch, value = differentiate(packed, nats_BT, loss, normalizer=len(numbers))
        self._metrics = _metrics(scored[0])
        yield Update(batch, len(numbers), value)

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def validate(self) -> dict[str, float]:
        """The loss, the reward accuracy and the margin on the held-out pairs."""
        if self._held_out is None:
            return {}
        pairs, numbers = self._held_out, list(range(len(self._held_out.pairs)))
        packed = pack(pairs.answers(numbers), self._length, 0)
        nats_BT = self._model.token_cross_entropy(packed.batch, self._micro_batch_size)
        scored = self._score(packed, -nats_BT.double(), pairs, numbers)
        values = _metrics(scored)
        named = {"accuracy": "reward_accuracy", "margin": "reward_margin"}
        return {"validation/loss": float(scored.loss)} | {f"validation/{name}": values[f"dpo/{key}"] for key, name in named.items()}

    def _score(self, packed: PackedAnswers, logp_BT: Tensor, pairs: Pairs, numbers: list[int]) -> Scored:
        reference_P2 = None if pairs.reference_P2 is None else pairs.reference_P2[numbers]
        labels_P = None if pairs.labels_P is None else pairs.labels_P[numbers]
        # of the type in which cross-entropies are computed: the rounding of bf16 activations would hide decisions for long
        eps = torch.finfo(torch.promote_types(self._model.compute_dtype, torch.float32)).eps
        return preference_loss(self._options, packed.sums(logp_BT).view(-1, 2), reference_P2, packed.lengths().view(-1, 2), labels_P, eps)


def _metrics(scored: Scored) -> dict[str, float]:
    chosen, rejected = (float(rewards.mean()) if len(rewards) else 0.0 for rewards in (scored.chosen, scored.rejected))
    values = {
        "dpo/reward_chosen": chosen, "dpo/reward_rejected": rejected, "dpo/margin": chosen - rejected,
        "dpo/accuracy": float(scored.accuracy),
    }  # fmt: skip
    return values if scored.divergence is None else values | {"dpo/divergence": float(scored.divergence)}


def dpo(context: TrainingContext) -> None:
    """Train the model of the stage before on preferences. Reads `tokenizer/` and its final checkpoint; writes `dpo/`.

    Raises `Interrupted` when asked to stop, and `UserError`.
    """
    recipe, run_dir, stage = context.recipe, context.run_dir, of_stage("dpo")
    options = recipe.dpo
    assert options is not None
    folder, length = run_dir / "dpo", int(options.sequence_length)
    tokenizer = load_tokenizer(run_dir / "tokenizer")

    def make_data() -> None:
        if not (folder / "data" / "manifest.json").exists():
            build_preferences(recipe, tokenizer, folder / "data", *context.protect("dpo"))

    context.ranks.first(make_data)
    base = weights_before(context, stage, options.lora)

    def setup(model: ParallelModel) -> StageSetup:
        micro_batch_size = micro_batch_of(recipe, length, model.pipeline is not None)
        train, held_out = (_pairs(recipe, folder, split, model, base, micro_batch_size) for split in ("train", "validation"))
        assert train is not None
        require_held_out(recipe, 0 if held_out is None else len(held_out.pairs))
        objective = Preference(options, model, train, held_out, length, micro_batch_size)
        rows = rows_by_step(train, length)
        packed = lru_cache(maxsize=2)(lambda step: objective.packed(step).batch)
        curriculum = AnswerCurriculum("dpo", recipe, options, rows, packed)
        return StageSetup(curriculum, lambda step: objective.validate(), objective, options.early_stopping)

    run_stage(context, stage, base, setup, tokenizer)


def _pairs(recipe: Recipe, folder: Path, split: str, model: ParallelModel, base: BaseWeights, micro_batch_size: int) -> Pairs | None:
    """The pairs of a split with their reference scores, which are computed where they are missing; None without pairs."""
    options = recipe.dpo
    assert options is not None
    pairs, labels_P = read_preferences(folder / "data", split)
    if not pairs:
        return None
    reference_P2 = None
    if needs_reference(options):
        answers = [answer for pair in pairs for answer in pair]
        key = "/".join((
            sha256_file(folder / "data" / f"{split}.bin"), sha256_file(folder / "data" / f"{split}.mask"),
            base.content(), str(model.compute_dtype), str(int(options.sequence_length)),
        ))  # fmt: skip
        began = time.monotonic()
        reference_P2 = reference_scores(
            model, answers, folder / "reference" / split, hashlib.sha256(key.encode()).hexdigest(), base.communicator,
            length=int(options.sequence_length), micro_batch_size=micro_batch_size,
        ).view(-1, 2)  # fmt: skip
        if base.communicator.is_first:
            with Ledger(folder.parent / LEDGER) as ledger:
                ledger.write("reference_scores", stage="dpo", split=split, pairs=len(pairs), seconds=round(time.monotonic() - began, 3))
    return Pairs(pairs, reference_P2, labels_P, options.pairs_per_step, options.epochs, recipe.training_seed)
