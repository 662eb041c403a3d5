"""Pretraining: its phases with their learning rate schedules, and how a step is computed."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.activation_checkpointing import NONE, ActivationCheckpointing
from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.deepspeed import DeepSpeed
from lmworks.recipe.schema.effect import NO_EFFECT, RESUME_ONLY, read_by
from lmworks.recipe.schema.model import Rope
from lmworks.recipe.schema.units import Duration, Seconds, Tokens


class LrSchedule(Node):
    """The learning rate over one phase, as a share of the peak."""

    renamed: ClassVar = {"final": "min_lr_ratio", "drops": "milestones", "drop_factor": "gamma"}

    kind: Literal["constant", "linear", "cosine", "wsd", "multistep"] = Field("wsd", description="shape of the curve after the warm-up")
    warmup: Duration = Field(Duration.parse("2%"), description="linear, from where the phase before ended (0 at the start)")
    decay: Duration = Field(Duration.parse("20%"), description="wsd: length of the last part")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="share of the peak at the end (linear, cosine, wsd)")
    milestones: tuple[float, ...] = Field((0.8, 0.9), description="multistep: positions of the drops in the phase")
    gamma: float = Field(0.316, gt=0, lt=1, description="multistep: the rate after a drop relative to before it")


class BatchRamp(Node):
    """A batch that grows linearly at the start of a phase."""

    start: Tokens = Field(description="tokens per step at first")
    over: Duration = Field(description="length of the growth")
    rescale: Literal["none", "sqrt", "linear"] = Field("sqrt", description="how the rate follows the batch")


class RopeChange(Node):
    """A change of positions at a phase's first step; what is left out stays as it was."""

    renamed: ClassVar = {"original_length": "original_max_position_embeddings"}

    theta: float | None = Field(None, gt=0, description="new base of the frequencies (ABF)")
    scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] | None = Field(None, description="new kind of extension")
    factor: float | None = Field(None, ge=1, description="new extension factor")
    original_max_position_embeddings: Tokens | None = Field(None, description="context before the extension")

    def apply(self, rope: Rope) -> Rope:
        """The positions after the change."""
        changes = {key: value for key, value in self.model_dump().items() if value is not None}
        changes.pop("original_max_position_embeddings", None)
        if self.original_max_position_embeddings is not None:
            changes["original_max_position_embeddings"] = self.original_max_position_embeddings
        if self.scaling == "none":
            changes.setdefault("factor", 1.0)
        return Rope.model_validate(rope.model_copy(update=changes).__dict__)


def _check_weights(where: str, mixture: dict[str, float]) -> None:
    total = sum(mixture.values())
    if not mixture or any(weight <= 0 for weight in mixture.values()):
        raise ValueError(f"{where}: mixture needs at least one source and positive weights")
    if abs(total - 1) > 1e-6:
        raise ValueError(f"{where}: mixture weights sum to {total:g}, not 1; scale them by {1 / total:.6g}")


class MixtureChange(Node):
    """Another mixture from a moment inside a phase on. For a run that has begun, use `lmworks data mixture` instead."""

    at: Duration = Field(description="from the start of the phase; the first whole step at or after it")
    mixture: dict[str, float] = Field(description="weight of each source from then on; they sum to one")

    @model_validator(mode="after")
    def _consistent(self) -> MixtureChange:
        _check_weights("mixture_changes", self.mixture)
        return self


class EarlyStopping(Node):
    """The end of a stage before its budget is used up, once validation no longer improves. The last weights are saved and go on to the
    stages that follow."""

    patience: int = Field(3, gt=0, description="validations in a row without an improvement after which the stage ends")
    min_delta: float = Field(0.0, ge=0, description="least improvement that counts, in the unit of the metric")
    metric: str | None = Field(
        None, pattern=r"^validation/.+",
        description="lower is better; validation/bits_per_byte when left out, or validation/loss where that is not measured",
    )  # fmt: skip


class Ewc(Node):
    """Elastic weight consolidation (Kirkpatrick et al. 2017, arXiv:1612.00796): weights that mattered to what was learned before are held
    where they were, by a penalty weight / 2 * sum of F (w - w0)^2. F, the diagonal of the Fisher information, is estimated when training
    on the new data begins."""

    weight: float = Field(
        gt=0, description="of the penalty; 1 is the rise of the earlier data's own loss, in nats per token, to second order"
    )
    sequences: int = Field(64, gt=0, description="of the earlier data that the Fisher information is estimated on")


class Phase(Node):
    """One stretch of pretraining."""

    renamed: ClassVar = {
        "batch": "global_batch_size", "ramp": "batch_ramp", "schedule": "lr_schedule", "balance_rate": "bias_update_rate",
        "mtp_weight": "mtp_loss_weight",
    }  # fmt: skip
    effect: ClassVar = read_by("pretrain")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="of the phase; the data order is drawn from it")
    # The tokenizer's sample depends on the budgets too, but a longer run is no reason to retrain the tokenizer before the first step.
    tokens: Annotated[Tokens, read_by("pretrain", "export")] = Field(description="budget")
    mixture: Annotated[dict[str, float], read_by("tokenizer", "pretrain")] = Field(description="weight of each source; they sum to one")
    mixture_changes: list[MixtureChange] = Field(default_factory=list, description="other mixtures from given moments of the phase on")
    sequence_length: Annotated[Tokens, read_by("pretrain", "evaluate", "export")] = Field(description="context trained on")
    global_batch_size: Tokens = Field(description="tokens per optimizer step, over all ranks and accumulation")
    batch_ramp: BatchRamp | None = None
    learning_rate_scale: float = Field(1.0, gt=0, description="this phase's peak relative to optimizer.learning_rate")
    lr_schedule: LrSchedule = LrSchedule()
    rope: Annotated[RopeChange | None, read_by("pretrain", "tune", "evaluate", "export")] = None
    bias_update_rate: float | None = Field(
        None, ge=0, description="replaces model.moe.balance.bias_update_rate from this phase on (GLM: 0.001, late in the run 0)"
    )
    needle: Annotated[bool, NO_EFFECT] = Field(
        False, description="validation also hides facts in held-out text and asks for them (metrics needle/...)"
    )
    mtp_loss_weight: Annotated[float | None, read_by("pretrain", "tune")] = Field(
        None, gt=0, description="replaces model.mtp.loss_weight from this phase on (GLM: 0.3, later 0.1)"
    )
    ewc: Ewc | None = Field(None, description="hold on to what the phase before has taught")
    save_every: Annotated[Duration | None, NO_EFFECT] = Field(
        None, description="replaces train.save_every in this phase; counted from its first step"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Phase:
        _check_weights(f"phase {self.name}", self.mixture)
        if self.global_batch_size % self.sequence_length:
            raise ValueError(
                f"phase {self.name}: batch {self.global_batch_size} is not a multiple of sequence_length {self.sequence_length}"
            )
        if self.tokens < self.global_batch_size:
            raise ValueError(
                f"phase {self.name}: the budget of {self.tokens} tokens is smaller than one step of {self.global_batch_size}; lower "
                f"batch or raise it"
            )
        if self.batch_ramp and (self.batch_ramp.start % self.sequence_length or self.batch_ramp.start > self.global_batch_size):
            raise ValueError(
                f"phase {self.name}: batch_ramp.start {self.batch_ramp.start} must be a multiple of sequence_length and at most batch"
            )
        return self


class Train(Node):
    """Pretraining: the phases, and how a step is computed."""

    renamed: ClassVar = {
        "micro_batch": "micro_batch_size", "head_chunk": "logit_chunk_size", "seconds_between_saves": "save_every_seconds",
    }  # fmt: skip
    effect: ClassVar = read_by("pretrain")

    init_from: Annotated[str | None, read_by("pretrain", "export", frozen=True)] = Field(
        None,
        description="weights to begin with instead of random ones: of a Hugging Face folder, a run, or one of its checkpoints, "
        "relative to the working directory; the shape of the model and the tokenizer come along, optimizer and schedule begin anew",
    )
    # the order of the phases
    phases: Annotated[list[Phase], read_by("pretrain", "evaluate", "export")] = Field(default_factory=list)
    micro_batch_size: Annotated[int | None, RESUME_ONLY] = Field(
        None, gt=0, description="sequences per forward and rank; derived; changes speed and memory, never the batch"
    )
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], read_by("pretrain", "tune", "evaluate")] = Field(
        "auto",
        description="of the computation; auto: bf16 where the device multiplies it in hardware, else fp32. Weights and accumulated "
        "gradients stay fp32",
    )
    compile: Annotated[Literal["auto"] | bool, RESUME_ONLY] = Field(
        "auto",
        description="torch.compile the layers; auto: on GPUs. On CPUs that takes minutes of a short run, and eager code is nearly as fast",
    )
    activation_checkpointing: Annotated[ActivationCheckpointing, RESUME_ONLY] = Field(
        ActivationCheckpointing(NONE),
        description="what the backward recomputes: nothing, all but matrix products (selective), or whole layers (full); "
        "with a share, such as 50% or selective 50%, in so many of the layers, spread evenly",
    )
    deepspeed: Annotated[DeepSpeed | None, RESUME_ONLY] = None
    logit_chunk_size: Annotated[Tokens, RESUME_ONLY] = Field(
        Tokens.parse("1024 tokens"), description="tokens whose logits exist at one time"
    )
    validate_every: Annotated[Duration, NO_EFFECT] = Field(Duration.parse("10%"), description="distance between validations")
    validate_bytes_per_domain: Annotated[int, NO_EFFECT] = Field(
        65_536, gt=0, description="validation text per domain inside the run; the evaluation stage uses all of it"
    )
    sample_every: Annotated[Duration, NO_EFFECT] = Field(Duration.parse("25%"), description="distance between sample completions")
    log_every: Annotated[Duration, NO_EFFECT] = Field(Duration.parse("1 steps"), description="distance between metric lines")
    save_every: Annotated[Duration, NO_EFFECT] = Field(Duration.parse("10%"), description="distance between checkpoints")
    save_every_seconds: Annotated[Seconds | None, NO_EFFECT] = Field(None, description="also save when this long has passed")
    early_stopping: EarlyStopping | None = Field(None, description="end pretraining early; validations come every train.validate_every")
