"""Preference optimization with its pairs, and reinforcement learning from verifiable rewards with its prompts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import NO_EFFECT, Node, read_by
from lmworks.recipe.schema.model import Lora
from lmworks.recipe.schema.train import MOST_RATE, EarlyStopping, Forgetting, LrSchedule
from lmworks.recipe.schema.tune import GENERATED, LEARNING_RATE, TuningSet
from lmworks.recipe.schema.units import Duration, Seconds, Tokens


class PreferenceData(TuningSet):
    """One set of preference pairs."""

    kind: Literal["files", "tasks"] = Field(
        description="files: {prompt, chosen, rejected} per row, as texts or messages, OpenAI's {input, preferred_output, "
        "non_preferred_output}, or {prompt, completion, label} for loss kto; tasks: a right answer of reasoning-gym against a wrong one"
    )
    max_rows: int | None = Field(None, gt=0, description=f"maximum number of pairs, drawn evenly; all of files, {GENERATED} of tasks")

    @property
    def limit(self) -> int | None:
        """The maximum number of pairs; None for all."""
        return self.max_rows if self.max_rows is not None or self.kind == "files" else GENERATED


class Dpo(Node):
    """Direct preference optimization (arXiv:2305.18290) and its relatives, with loss on the last answer only. The reference is the model
    that the stage starts from."""

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
    validation_fraction: float = Field(0.05, ge=0, le=0.5, description="fraction of the pairs held out for validation; at most 500")
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


ROLLOUT_ROWS = 64  # answers that a rank draws at a time


class RewardTask(TuningSet):
    """One set of prompts, and the reward of their answers."""

    kind: Literal["tasks", "files"] = Field(
        description="tasks: questions of reasoning-gym; files: {prompt, answer, tests, ...} per row, prompt as text or messages"
    )
    max_rows: int | None = Field(None, gt=0, description=f"maximum number of prompts, drawn evenly; all of files, {GENERATED} of tasks")
    reward: Literal["verifier", "exact", "numeric", "math", "unit_tests", "python"] = Field(
        "verifier",
        description="verifier: reasoning-gym's marks; exact: 1 if the stated answer is the row's `answer` (or what its `solution` states); "
        "numeric: 1 if the final number is; math: 1 if the stated expression equals it; unit_tests: 1 if the answer's program passes the "
        "row's `tests`, in the sandbox; python: a function of your own",
    )
    file: str | None = Field(
        None,
        description="reward python: a file that defines reward(prompt, answer, row) -> float, or, as in TRL, "
        "reward(prompts, completions, **columns) -> list[float]",
    )
    timeout: Seconds = Field(
        Seconds.parse("5 s"), description="reward python and unit_tests: time limit of one answer, after which it earns 0"
    )

    @property
    def limit(self) -> int | None:
        """The maximum number of prompts; None for all."""
        return self.max_rows if self.max_rows is not None or self.kind == "files" else GENERATED

    @model_validator(mode="after")
    def _consistent(self) -> RewardTask:
        if (self.kind == "tasks") != (self.reward == "verifier") and self.reward != "python":
            raise ValueError(f"{self.name}: reward {self.reward} is not for kind {self.kind}: tasks have a verifier, files the others")
        if (self.reward == "python") != (self.file is not None):
            raise ValueError(f"{self.name}: reward python needs a file, and no other reward has one")
        return self


class Grpo(Node):
    """Group relative policy optimization (arXiv:2402.03300) and its corrections, with rewards that are plain functions of an answer."""

    effect: ClassVar = read_by("grpo")

    data: list[RewardTask] = Field(default_factory=list)
    loss: Literal["grpo", "dr_grpo", "dapo", "gspo"] = Field(
        "grpo",
        description="grpo: mean over answers of token means; dr_grpo (arXiv:2503.20783): without the division by standard deviation and "
        "length; dapo (arXiv:2503.14476): mean over tokens; gspo (arXiv:2507.18071): as grpo, with the ratio of whole answers",
    )
    group_size: int = Field(8, description="answers per prompt")
    prompts_per_step: int = Field(16, gt=0, description="prompts per step, over all ranks")
    steps: int = Field(100, gt=0, description="steps: rollouts, each with its updates")
    updates_per_rollout: int = Field(1, gt=0, description="optimizer updates per step, each on another part of its prompts")
    clip_low: float = Field(0.2, gt=0, description="lower bound of the probability ratio: 1 - this")
    clip_high: float = Field(0.2, gt=0, description="upper bound of the probability ratio: 1 + this (DAPO's clip-higher: 0.28)")
    beta: float = Field(0.0, ge=0, description="weight of the divergence from the model that the stage starts from (k3); 0: no reference")
    resample_rounds: int = Field(
        0, ge=0, description="dynamic sampling: groups with equal rewards are dropped, and up to so many times other prompts are drawn"
    )
    importance_cap: float | None = Field(
        2.0, gt=0, description="truncated importance sampling: cap of the ratio of training and rollout probability; null: off"
    )
    max_new_tokens: int = Field(128, gt=0, description="tokens of an answer; one that is cut there earns nothing")
    temperature: float = Field(1.0, gt=0, description="of the rollouts")
    top_k: int = Field(0, ge=0, description="rollouts draw from the most likely tokens only; 0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="rollouts draw from the smallest set of this probability; 1: off")
    min_p: float = Field(0.0, ge=0, lt=1, description="rollouts draw from tokens of this probability relative to the likeliest; 0: off")
    validation_prompts: int = Field(64, ge=0, description="held-out prompts, of each of which one answer is judged at every validation")
    sequence_length: Tokens = Field(Tokens.parse("512 tokens"), description="tokens per row; too long prompts are left out")
    learning_rate: float | None = Field(None, gt=0, le=MOST_RATE, description=LEARNING_RATE)
    lr_schedule: LrSchedule = LrSchedule(kind="constant", warmup=Duration.parse("2%"))
    early_stopping: EarlyStopping | None = Field(None, description="end the stage early; lower is better, so name validation/wrong")
    forgetting: Annotated[Forgetting, NO_EFFECT] = Forgetting()
    lora: Lora | None = Field(None, description="train low-rank adapters instead of the weights")

    @model_validator(mode="after")
    def _consistent(self) -> Grpo:
        if self.group_size < 2:
            raise ValueError(f"group_size {self.group_size}: an answer is compared with the others of its group; use 2 or more")
        if self.updates_per_rollout > self.prompts_per_step:
            raise ValueError(f"updates_per_rollout {self.updates_per_rollout} exceeds prompts_per_step {self.prompts_per_step}")
        return self
