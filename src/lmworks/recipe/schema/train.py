"""Pretraining: its phases with their learning rate schedules, how a step is computed, and the optimizer."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import NO_EFFECT, RESUME_ONLY, Node, read_by
from lmworks.recipe.schema.layout import CHECKPOINT_NONE, ActivationCheckpointing, DeepSpeed
from lmworks.recipe.schema.model import MOST_LAYERS, Model, Rope
from lmworks.recipe.schema.units import Bytes, Duration, Seconds, Tokens

_OF_MODEL = read_by("pretrain", "tune", "dpo", "grpo", "evaluate", "export")  # whatever opens the model asks what its last phase changed
Milestone = Annotated[float, Field(gt=0, lt=1)]


class LrSchedule(Node):
    """The learning rate schedule of one phase, as a factor on the peak learning rate."""

    kind: Literal["constant", "linear", "cosine", "wsd", "multistep"] = Field("wsd", description="shape of the curve after the warm-up")
    warmup: Duration = Field(
        Duration.parse("2%"), description="linear warm-up, from the rate at the end of the phase before (0 at the start)"
    )
    decay: Duration = Field(Duration.parse("20%"), description="wsd: length of the decay at the end")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="final learning rate relative to the peak (linear, cosine, wsd)")
    milestone_fractions: tuple[Milestone, ...] = Field((0.8, 0.9), description="multistep: fractions of the phase at which the rate drops")
    gamma: float = Field(0.316, gt=0, lt=1, description="multistep: factor on the rate at each milestone")
    phases: int = Field(
        1, gt=0, description="phases that the schedule spans, this one and those after it, which have no schedule of their own; warmup, "
        "decay and milestones then refer to all of their tokens (GLM-4.5: one cosine over general and mid-training)"
    )

    @property
    def lengths(self) -> list[tuple[str, Duration]]:
        """The lengths of its parts, by their keys."""
        return [("warmup", self.warmup), *([("decay", self.decay)] if self.kind == "wsd" else [])]

    @model_validator(mode="after")
    def _rising(self) -> LrSchedule:
        if list(self.milestone_fractions) != sorted(set(self.milestone_fractions)):
            raise ValueError(f"milestone_fractions {list(self.milestone_fractions)} must rise")
        return self


class BatchRamp(Node):
    """A batch size that grows to `global_batch_tokens` within a phase: linearly at its start, or in steps as the training loss falls
    (MiniMax-01, arXiv:2501.08313)."""

    kind: Literal["linear", "loss"] = Field(
        "linear", description="linear: over the length `over`; loss: to each of `sizes` once the mean training loss is as low as that of "
        "`losses`; each growth is a line of the ledger"
    )
    start_tokens: Tokens = Field(description="tokens per step at the start")
    over: Duration | None = Field(None, description="linear: length of the ramp")
    sizes: tuple[Tokens, ...] = Field(
        (), description="loss: the tokens per step that follow start_tokens, multiples of it; the last is global_batch_tokens"
    )
    losses: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        None, description="loss: the mean training loss, in nats per token, at which each of `sizes` begins; from the critical batch size "
        "when omitted"
    )
    critical_batch_tokens: float = Field(
        2e8, gt=0, description="loss: B* of the critical batch size B* / L^(1 / critical_batch_exponent) at a loss of L (Kaplan et al. "
        "2020, arXiv:2001.08361, equation 1.4); a batch grows to a size when the critical batch size has reached it"
    )
    critical_batch_exponent: float = Field(0.21, gt=0, description="loss: the exponent of that law")
    window_steps: int = Field(100, gt=0, description="loss: steps over which the training loss is averaged")
    rescale: Literal["none", "sqrt", "linear"] = Field("sqrt", description="how the learning rate scales with the batch size")

    @model_validator(mode="after")
    def _of_one_kind(self) -> BatchRamp:
        of_loss = ("sizes", "losses", "critical_batch_tokens", "critical_batch_exponent", "window_steps")
        if self.kind == "linear":
            if self.over is None:
                raise ValueError("batch_ramp needs over, the length of the ramp")
            if given := [name for name in of_loss if name in self.model_fields_set and getattr(self, name) != _default(self, name)]:
                raise ValueError(f"batch_ramp.{given[0]} belongs to kind: loss; set kind, or leave it out")
            return self
        if self.over is not None:
            raise ValueError("batch_ramp.over belongs to kind: linear; with kind: loss give sizes, to which the batch grows")
        sizes = [self.start_tokens, *self.sizes]
        if not self.sizes or any(after <= before or after % self.start_tokens for before, after in pairwise(sizes)):
            raise ValueError(
                f"batch_ramp.sizes {[int(size) for size in self.sizes]} must rise above start_tokens {int(self.start_tokens)}, in "
                "multiples of it"
            )
        if self.losses is not None and (len(self.losses) != len(self.sizes) or list(self.losses) != sorted(set(self.losses))[::-1]):
            raise ValueError(f"batch_ramp.losses {list(self.losses)} must fall, one for each of the {len(self.sizes)} sizes")
        return self

    def loss_of(self, size: int) -> float:
        """The loss, in nats per token, at which the critical batch size is `size` tokens."""
        return float((self.critical_batch_tokens / size) ** self.critical_batch_exponent)

    @property
    def growths(self) -> list[tuple[int, float]]:
        """kind loss: pairs (tokens per step, the loss at which they begin), in order."""
        return [(int(size), self.loss_of(size)) for size in self.sizes] if self.losses is None else list(
            zip(map(int, self.sizes), self.losses, strict=True)
        )


def _default(node: Node, name: str) -> object:
    return type(node).model_fields[name].default


class RopeChange(Node):
    """A change of RoPE at the first step of a phase; keys that are omitted keep their value."""

    theta: float | None = Field(None, gt=1, description="new base of the frequencies (ABF)")
    partial_rotary_factor: float | None = Field(None, ge=0, le=1, description="new fraction of each head that is rotated; 0 means no RoPE")
    scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] | None = Field(None, description="new scaling method")
    factor: float | None = Field(None, ge=1, description="new scaling factor")
    original_max_position_embeddings: Tokens | None = Field(None, description="context length before the extension")

    def apply(self, rope: Rope) -> Rope:
        """The positions after the change."""
        changes = {key: value for key, value in self.model_dump().items() if value is not None}
        changes.pop("original_max_position_embeddings", None)
        if self.original_max_position_embeddings is not None:
            changes["original_max_position_embeddings"] = self.original_max_position_embeddings
        if self.scaling == "none":
            changes.setdefault("factor", 1.0)
        if self.scaling not in (None, "yarn"):
            changes["truncate"] = True  # as where nothing is rounded
        return Rope.model_validate(rope.model_copy(update=changes).__dict__)


class BalanceChange(Node):
    """A change of the balancing of experts at the first step of a phase; keys that are omitted keep their value."""

    method: Literal["bias", "aux", "sinkhorn", "none"] | None = Field(None, description="new model.moe.balance.method")
    bias_update: Literal["sign", "proportional"] | None = Field(None, description="new model.moe.balance.bias_update")
    bias_clamp: float | None = Field(None, gt=0, description="new model.moe.balance.bias_clamp")
    aux_loss_weight: float | None = Field(None, ge=0, description="new model.moe.balance.aux_loss_weight")
    sequence_aux_loss_weight: float | None = Field(None, ge=0, description="new model.moe.balance.sequence_aux_loss_weight")


def check_weights(where: str, mixture: dict[str, float]) -> None:
    total = sum(mixture.values())
    if not mixture or any(weight <= 0 for weight in mixture.values()):
        raise ValueError(f"{where}: mixture needs at least one source and positive weights")
    if abs(total - 1) > 1e-6:
        raise ValueError(f"{where}: mixture weights sum to {total:g}, not 1; scale them by {1 / total:.6g}")


class MixtureChange(Node):
    """Another mixture from a point within a phase on. For a run that has begun, use `lmworks data mixture` instead."""

    at: Duration = Field(description="from the start of the phase; the first whole step at or after it")
    mixture: dict[str, float] = Field(description="weight of each source from then on; they sum to one")

    @model_validator(mode="after")
    def _consistent(self) -> MixtureChange:
        check_weights("mixture_changes", self.mixture)
        return self


class EarlyStopping(Node):
    """Ends a stage before its budget is used up, once validation no longer improves. The last weights are saved, and later stages use
    them."""

    patience: int = Field(3, gt=0, description="consecutive validations without improvement after which the stage ends")
    min_delta: float = Field(0.0, ge=0, description="least improvement that counts, in the unit of the metric")
    metric: str | None = Field(
        None, pattern=r"^validation/.+",
        description="lower is better; validation/bits_per_byte when left out, or validation/loss where that is not measured",
    )  # fmt: skip


class Forgetting(Node):
    """What a stage after pretraining may cost general text, measured at each validation: held-out text of the recipe's corpus, or a few
    pages that come with lmworks."""

    warn_bits_per_byte: float = Field(0.05, ge=0, description="rise, in bits per byte since the stage began, above which the run warns")
    stop_bits_per_byte: float | None = Field(
        None, ge=0, description="rise above which the stage stops with an error; its checkpoints are kept"
    )


class Ewc(Node):
    """Elastic weight consolidation (Kirkpatrick et al. 2017, arXiv:1612.00796): weights that mattered to what was learned before are held
    where they were, by a penalty weight / 2 * sum of F (w - w0)^2. F, the diagonal of the Fisher information, is estimated when training
    on the new data begins."""

    weight: float = Field(
        gt=0, description="of the penalty; 1 is the rise of the earlier data's own loss, in nats per token, to second order"
    )
    sequences: int = Field(64, gt=0, description="of the earlier data that the Fisher information is estimated on")
    mixture: dict[str, float] = Field(
        default_factory=dict,
        description="weight of each source of the text that stands for the earlier data; weights sum to one. When empty, the phase before. "
        "Weights of start_from need it, since their own data is not known",
    )

    @model_validator(mode="after")
    def _sums_to_one(self) -> Ewc:
        if self.mixture:
            check_weights("ewc", self.mixture)
        return self


class Phase(Node):
    """One phase of pretraining, with a token budget, a mixture and a learning rate schedule of its own."""

    effect: ClassVar = read_by("pretrain")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="name of the phase; the data order depends on it")
    # The tokenizer's sample depends on the budgets too, but a longer run is no reason to retrain the tokenizer before the first step.
    tokens: Annotated[Tokens, read_by("pretrain", "evaluate", "export")] = Field(description="token budget")
    mixture: Annotated[dict[str, float], read_by("tokenizer", "pretrain")] = Field(description="weight of each source; weights sum to one")
    mixture_changes: list[MixtureChange] = Field(default_factory=list, description="changes of the mixture within the phase")
    sequence_length: Annotated[Tokens, read_by("pretrain", "evaluate", "export")] = Field(description="tokens per sequence")
    global_batch_tokens: Tokens = Field(description="tokens per optimizer step, over all ranks and accumulation")
    batch_ramp: BatchRamp | None = None
    learning_rate_scale: float = Field(1.0, gt=0, le=1000, description="peak rate of this phase relative to optimizer.learning_rate")
    lr_schedule: LrSchedule = LrSchedule()
    rope: Annotated[RopeChange | None, _OF_MODEL] = None
    sliding_window: Annotated[Tokens | Literal["full"] | None, _OF_MODEL] = Field(
        None, description="replaces model.sliding_window from this phase on; full: every layer sees everything"
    )
    no_rope_layer_interval: Annotated[int | None, _OF_MODEL] = Field(
        None, ge=0, le=MOST_LAYERS, description="replaces model.no_rope_layer_interval from this phase on"
    )
    mask_documents: bool = Field(
        True, description="attention ends at document borders, where positions begin again; false: a sequence is one document to it"
    )
    balance: Annotated[BalanceChange | None, _OF_MODEL] = None
    bias_update_rate: Annotated[float | None, _OF_MODEL] = Field(
        None, ge=0, description="replaces model.moe.balance.bias_update_rate from this phase on (GLM: 0.001, late in the run 0)"
    )
    needle: Annotated[bool, NO_EFFECT] = Field(
        False, description="validation also runs the needle-in-a-haystack test on held-out text (metrics needle/...)"
    )
    qk_norm_steps: Annotated[Duration | None, _OF_MODEL] = Field(
        None, description="adds the QK norm of model.use_qk_norm in this phase, and not before: queries and keys are blended from those "
        "without to those with it, linearly over this length from the first step of the phase, which computes as without"
    )
    mtp_loss_weight: Annotated[float | None, _OF_MODEL] = Field(
        None, gt=0, description="replaces model.mtp.loss_weight from this phase on (GLM: 0.3, later 0.1)"
    )
    ewc: Ewc | None = Field(None, description="elastic weight consolidation towards the weights of the phase before")
    save_every: Annotated[Duration | None, NO_EFFECT] = Field(
        None, description="replaces train.save_every in this phase; counted from its first step"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Phase:
        check_weights(f"phase {self.name}", self.mixture)
        if self.global_batch_tokens % self.sequence_length:
            raise ValueError(
                f"phase {self.name}: global_batch_tokens {self.global_batch_tokens} is not a multiple of sequence_length "
                f"{self.sequence_length}"
            )
        if self.tokens < self.global_batch_tokens:
            raise ValueError(
                f"phase {self.name}: the budget of {self.tokens} tokens is smaller than one step of {self.global_batch_tokens}; lower "
                f"global_batch_tokens or raise tokens"
            )
        start = self.batch_ramp.start_tokens if self.batch_ramp else None
        if start and (start % self.sequence_length or start > self.global_batch_tokens):
            raise ValueError(
                f"phase {self.name}: batch_ramp.start_tokens {start} must be a multiple of sequence_length and at most global_batch_tokens"
            )
        if self.loss_ramp is not None:
            self._check_loss_ramp(self.loss_ramp)
        return self

    @property
    def loss_ramp(self) -> BatchRamp | None:
        """The ramp of a batch that grows as the loss falls; None for other batches."""
        return self.batch_ramp if self.batch_ramp is not None and self.batch_ramp.kind == "loss" else None

    def _check_loss_ramp(self, ramp: BatchRamp) -> None:
        """Nothing that is counted in steps may be decided before they are known: tokens and percentages are not moved by a growth."""
        if ramp.sizes[-1] != self.global_batch_tokens:
            raise ValueError(
                f"phase {self.name}: the last of batch_ramp.sizes is {int(ramp.sizes[-1])}, and global_batch_tokens "
                f"{int(self.global_batch_tokens)}; make them equal"
            )
        if self.qk_norm_steps is not None:
            raise ValueError(
                f"phase {self.name}: qk_norm_steps are not known while the batch grows with the loss (batch_ramp.kind); add the norm in "
                "another phase"
            )
        lengths = [(f"lr_schedule.{name}", length) for name, length in self.lr_schedule.lengths]
        lengths += [("mixture_changes.at", change.at) for change in self.mixture_changes]
        if counted := [name for name, length in lengths if length.unit == "steps"]:
            raise ValueError(
                f"phase {self.name}: {counted[0]} is in steps, which are not known while the batch grows with the loss (batch_ramp.kind); "
                "give it in tokens or percent"
            )


    def changed(self, model: Model) -> Model:
        """The model of the phase before with the changes of this one. Raises `ValidationError` if they do not fit it."""
        changes: dict[str, Any] = {}
        if self.rope is not None:
            changes["rope"] = self.rope.apply(model.rope)
        if self.sliding_window == "full":
            types = tuple("full_attention" if kind == "sliding_attention" else kind for kind in model.layer_types)
            changes |= {"sliding_window": None, "layer_types": types if {*types} - {"full_attention"} else (), "sliding_rope": None}
        elif self.sliding_window is not None:
            changes["sliding_window"] = self.sliding_window
        if self.no_rope_layer_interval is not None:
            changes["no_rope_layer_interval"] = self.no_rope_layer_interval
        if self.qk_norm_steps is not None:
            changes["qk_norm_blend"] = 1.0
        if model.mtp is not None and self.mtp_loss_weight is not None:
            changes["mtp"] = model.mtp.model_copy(update={"loss_weight": self.mtp_loss_weight})
        if model.moe is not None:
            balance = {} if self.balance is None else {key: value for key, value in self.balance if value is not None}
            balance |= {} if self.bias_update_rate is None else {"bias_update_rate": self.bias_update_rate}
            changed = model.moe.balance.model_copy(update=balance)
            changes |= {"moe": model.moe.model_copy(update={"balance": changed})} if balance else {}
        return Model.model_validate(model.model_copy(update=changes).__dict__) if changes else model


class Train(Node):
    """Pretraining: the phases, and how a step is computed."""

    effect: ClassVar = read_by("pretrain")

    seed: Annotated[int | None, read_by("pretrain", "tune", "dpo", "grpo")] = Field(
        None,
        description="random seed of the data order, the initial weights and dropout; `seed` when omitted. Corpus, tokenizer and shards do "
        "not depend on it, so runs that differ in it share them",
    )
    init_seed: int | None = Field(None, description="random seed of the initial weights alone; train.seed when omitted")
    # the order of the phases
    phases: Annotated[list[Phase], read_by("pretrain", "evaluate", "export")] = Field(default_factory=list)
    micro_batch_sequences: Annotated[int | None, RESUME_ONLY] = Field(
        None, gt=0, description="sequences per forward pass on each rank; derived when omitted; changes speed and memory, never the batch"
    )
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], read_by("pretrain", "tune", "dpo", "grpo", "evaluate")] = Field(
        "auto",
        description="precision of the computation; auto: bf16 where the device multiplies it in hardware, else fp32. Weights and "
        "accumulated gradients stay fp32",
    )
    compile: Annotated[Literal["auto"] | bool, RESUME_ONLY] = Field(
        "auto",
        description="torch.compile the layers; auto: on GPUs. On CPUs that takes minutes of a short run, and eager code is nearly as fast",
    )
    deterministic: Annotated[bool, RESUME_ONLY] = Field(
        False,
        description="on GPUs, only kernels that repeat their bits, where PyTorch has them (it warns where not); slower. CPUs always repeat",
    )
    activation_checkpointing: Annotated[ActivationCheckpointing, RESUME_ONLY] = Field(
        ActivationCheckpointing(CHECKPOINT_NONE),
        description="what the backward pass recomputes: nothing, all but matrix products (selective), or whole layers (full); "
        "with a percentage, such as 50% or selective 50%, in that fraction of the layers, spread evenly",
    )
    deepspeed: Annotated[DeepSpeed | None, RESUME_ONLY] = None
    logit_chunk_tokens: Annotated[Tokens, RESUME_ONLY] = Field(
        Tokens.parse("1024 tokens"), description="tokens whose logits are computed at one time"
    )
    validate_every: Annotated[Duration, NO_EFFECT] = Field(Duration.parse("10%"), description="interval between validations")
    validation_bytes_per_domain: Annotated[Bytes, NO_EFFECT] = Field(
        Bytes.parse("65536 bytes"), gt=0, description="validation text per domain inside the run; the evaluation stage uses all of it"
    )
    sample_every: Annotated[Duration, NO_EFFECT] = Field(Duration.parse("25%"), description="interval between sample completions")
    log_every: Annotated[Duration, NO_EFFECT] = Field(Duration.parse("1 steps"), description="interval between metric lines")
    save_every: Annotated[Duration, NO_EFFECT] = Field(Duration.parse("10%"), description="interval between checkpoints")
    save_every_time: Annotated[Seconds | None, NO_EFFECT] = Field(
        None,
        description="also save after this time; when omitted, the time at which saves and expected failures cost least, and at most 30 min",
    )
    early_stopping: EarlyStopping | None = Field(
        None, description="end pretraining early, judged at each validation (train.validate_every)"
    )


Beta = Annotated[float, Field(ge=0, lt=1)]
MOST_RATE = 10.0  # a first update moves each weight by about the rate, and weights begin near 0.02


WeightKind = Literal["embedding", "head", "matrices", "experts", "router", "vectors"]
"""What a weight is. Vectors are norms, biases, gates and filters of convolutions; adapters are matrices, or experts."""


class Optimizer(Node):
    """Muon for hidden matrices and experts, AdamW for embeddings, head, norms and biases; or AdamW for all."""

    effect: ClassVar = read_by("pretrain", "tune", "dpo", "grpo")

    kind: Annotated[Literal["muon", "adamw"], read_by("pretrain", "tune", "dpo", "grpo", optimizer_state=True)] = Field(
        "muon", description="optimizer of the hidden matrices"
    )
    learning_rate: float | None = Field(
        None, gt=0, le=MOST_RATE, description="peak learning rate of the hidden matrices; derived from the model size when omitted"
    )
    adam_learning_rate: float | None = Field(
        None, gt=0, le=MOST_RATE, description="peak learning rate of what AdamW trains when kind is muon; derived when omitted"
    )
    update_scale: Literal["rms", "spectral"] = Field(
        "rms",
        description="scale of Muon updates. rms: that of AdamW (0.2 RMS, arXiv:2502.16982); spectral: sqrt(rows/cols), for rates near 0.02",
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="momentum of Muon")
    nesterov: bool = Field(True, description="Nesterov momentum in Muon")
    newton_schulz_steps: int = Field(5, gt=0, le=100, description="iterations of Muon's orthogonalization")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay rates of AdamW's first and second moments")
    eps: float = Field(1e-8, gt=0, le=1, description="added to the denominator of AdamW")
    weight_decay: float = Field(0.1, ge=0, le=10, description="decoupled weight decay; not applied to norms, biases and embeddings")
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are clipped to this global norm; 0 turns clipping off")
    qk_clip_threshold: float | None = Field(
        None, gt=0, description="QK-clip (Kimi K2, arXiv:2507.20534): after a step in which a score of attention was larger than this, the "
        "query and key weights of that head are scaled down to it (Kimi K2: 100); a threshold that is never reached only measures "
        "attention/logit_max"
    )  # fmt: skip
    lr_scales: dict[WeightKind, Annotated[float, Field(gt=0, le=100)]] = Field(
        default_factory=dict,
        description="factors on the peak learning rates of embedding, head, matrices, experts, router and vectors (norms, biases), such as "
        "{embedding: 4}; metrics show the rates without them",
    )  # fmt: skip
    layer_lr_decay: float = Field(
        1.0, gt=0, le=1, description="layer-wise learning rate decay: rate of each layer relative to the layer above it"
    )
    ema_decay: Annotated[float, read_by("pretrain", "tune", "dpo", "grpo", "evaluate", "export")] = Field(
        0.0, ge=0, lt=1, description="decay of an exponential moving average of the weights; 0 turns it off"
    )
