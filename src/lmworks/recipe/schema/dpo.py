"""Preference optimization and its pairs."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import NO_EFFECT, read_by
from lmworks.recipe.schema.lora import Lora
from lmworks.recipe.schema.optimizer import MOST_RATE
from lmworks.recipe.schema.train import EarlyStopping, Forgetting, LrSchedule
from lmworks.recipe.schema.tuning_set import GENERATED, LEARNING_RATE, NO_SCALE, TuningSet
from lmworks.recipe.schema.units import Duration, Tokens


class PreferenceData(TuningSet):
    """One set of preference pairs."""

    kind: Literal["files", "tasks"] = Field(
        description="files: {prompt, chosen, rejected} per row, as texts or messages, OpenAI's {input, preferred_output, "
        "non_preferred_output}, or {prompt, completion, label} for loss kto; tasks: a right answer of reasoning-gym against a wrong one"
    )
    count: int | None = Field(None, gt=0, description=f"maximum number of pairs, drawn evenly; all of files, {GENERATED} of tasks")

    @property
    def limit(self) -> int | None:
        """The maximum number of pairs; None for all."""
        return self.count if self.count is not None or self.kind == "files" else GENERATED


class Dpo(Node):
    """Direct preference optimization (arXiv:2305.18290) and its relatives, with loss on the last answer only. The reference is the model
    that the stage starts from."""

    removed: ClassVar = NO_SCALE
    effect: ClassVar = read_by("dpo")

    data: list[PreferenceData] = Field(default_factory=list)
    loss: Literal["sigmoid", "ipo", "simpo", "kto"] = Field(
        "sigmoid",
        description="sigmoid: DPO; ipo (arXiv:2310.12036), by mean log-probabilities; simpo (arXiv:2405.14734), without a reference; kto "
        "(arXiv:2402.01306), on answers that are labeled good or bad",
    )
    beta: float = Field(0.1, gt=0, description="scale of the rewards; for ipo, tau: the wanted difference is 1 / (2 beta)")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="sigmoid and simpo: probability that a pair is the wrong way round")
    simpo_gamma: float = Field(0.5, ge=0, description="simpo: target margin of the rewards")
    desirable_weight: float = Field(1.0, gt=0, description="kto: weight of the losses of good answers")
    undesirable_weight: float = Field(1.0, gt=0, description="kto: weight of the losses of bad answers")
    epochs: float = Field(1.0, gt=0, description="passes over the pairs")
    pairs_per_step: int = Field(32, gt=1, description="pairs, or labeled answers for loss kto, per optimizer step, over all ranks")
    held_out_fraction: float = Field(0.05, ge=0, le=0.5, description="share of pairs held out for validation; at most 500")
    sequence_length: Tokens = Field(Tokens.parse("512 tokens"), description="tokens per row; longer conversations are left out")
    learning_rate: float | None = Field(None, gt=0, le=MOST_RATE, description=LEARNING_RATE)
    lr_schedule: LrSchedule = LrSchedule(kind="linear", warmup=Duration.parse("10%"), min_lr_ratio=0.0)
    early_stopping: EarlyStopping | None = Field(None, description="end the stage early; requires held-out pairs")
    forgetting: Annotated[Forgetting, NO_EFFECT] = Forgetting()
    lora: Lora | None = Field(None, description="train low-rank adapters instead of the weights")

    @model_validator(mode="after")
    def _consistent(self) -> Dpo:
        if self.label_smoothing and self.loss not in ("sigmoid", "simpo"):
            raise ValueError(f"label_smoothing is an option of loss sigmoid and simpo, not of {self.loss}; set it to 0")
        return self
