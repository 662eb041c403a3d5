"""The architecture of the decoder, from a dense model of 1M parameters to a mixture of experts of 355B, and its low-rank adapters."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import NO_EFFECT, NOT_ARCHITECTURE, Node, StageName, read_by
from lmworks.recipe.schema.gated_delta import GatedDelta
from lmworks.recipe.schema.mixers import Lightning, Mamba, Multipliers, ShortConv
from lmworks.recipe.schema.states import State
from lmworks.recipe.schema.units import Tokens

_READERS: tuple[StageName, ...] = ("pretrain", "tune", "dpo", "grpo", "evaluate", "export")
_MAY_CHANGE = read_by(*_READERS)  # of a key by which no checkpoint is told apart (`lmworks.train.build.identity`)
# Plans and derivations loop over these numbers, so they are bounded whatever the recipe says. The largest models are far below.
_WIDEST, MOST_LAYERS, _MOST_PARTS = 1 << 20, 2000, 1 << 16
SECTIONS: dict[str, tuple[str, ...]] = {
    "gated_delta": ("linear_attention",), "lightning": ("linear_attention",), "mamba": ("linear_attention", "hybrid"),
    "short_conv": ("conv",),
}  # fmt: skip
"""Sections of `model` that describe a mixer other than attention -> the entries of `layer_types` that it serves."""
_SERVED_BY = {kind: [name for name in SECTIONS if kind in SECTIONS[name]] for kinds in SECTIONS.values() for kind in kinds}
_FEED_FORWARD = frozenset({"mlp", "moe"})  # entries of `layer_types` without a mixer
_MOST_ENTRIES = (1 << 31) - 1  # of a vocabulary: token ids are int32
ROUTER_EPS = 1e-20
"""What the classes of DeepSeek-V3 and GLM-4 add to the sum that normalizes the weights of a token's experts."""
_SLOWEST = 87.0  # -log of the smallest frequency of RoPE, a normal number of fp32


class Rope(Node):
    """Rotary positions (Su et al. 2021), and how their frequencies are extended to longer contexts."""

    theta: float = Field(
        10_000.0, gt=1, description="base of the RoPE frequencies; raising it extends the context (ABF; GLM: 10,000, then 1,000,000)"
    )
    partial_rotary_factor: float = Field(
        1.0, ge=0, le=1, description="fraction of each head that is rotated; GLM rotates half, 0 means no RoPE"
    )
    scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] = Field(
        "none", description="linear is position interpolation; llama3 interpolates slow frequencies as Llama 3.1 does"
    )
    factor: float = Field(1.0, ge=1, description="factor by which `scaling` extends the context")
    original_max_position_embeddings: Tokens | None = Field(None, description="context length before `scaling`")
    beta_fast: float = Field(32.0, gt=0, description="YaRN: rotations above which a frequency is unchanged")
    beta_slow: float = Field(1.0, gt=0, description="YaRN: rotations below which a frequency is fully interpolated")
    low_freq_factor: float = Field(
        1.0, gt=0, description="llama3: rotations within original_max_position_embeddings below which a frequency is fully interpolated"
    )
    high_freq_factor: float = Field(
        4.0, gt=0, description="llama3: rotations within original_max_position_embeddings above which a frequency is unchanged"
    )
    truncate: bool = Field(
        True, description="YaRN: the ramp between the two begins and ends at whole dimensions; gpt-oss does not round them"
    )

    @model_validator(mode="after")
    def _scaling_needs_length(self) -> Rope:
        if self.scaling in ("ntk", "yarn", "llama3") and self.original_max_position_embeddings is None:
            raise ValueError(f"rope.scaling {self.scaling} needs rope.original_max_position_embeddings, the context before the extension")
        if self.scaling == "none" and self.factor != 1:
            raise ValueError(f"rope.factor {self.factor:g} does nothing without rope.scaling; set scaling to linear, ntk, yarn or llama3")
        if not self.truncate and self.scaling != "yarn":
            raise ValueError(f"rope.truncate does nothing under rope.scaling {self.scaling}, which has no ramp; leave it out")
        if self.beta_fast < self.beta_slow:  # they are equal in Kimi-K2
            raise ValueError(f"rope.beta_fast {self.beta_fast:g} must not be below rope.beta_slow {self.beta_slow:g}")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"rope.high_freq_factor {self.high_freq_factor:g} must exceed rope.low_freq_factor {self.low_freq_factor:g}")
        return self


class Balance(Node):
    """Expert load balancing; auxiliary-loss-free by default (Wang et al. 2024, arXiv:2408.15664)."""

    method: Literal["bias", "aux", "sinkhorn", "none"] = Field(
        "bias",
        description="bias: a selection bias per expert, without an auxiliary loss. aux: a loss over the whole step, for "
        "classes without such a bias (Mixtral, Qwen3-MoE); a step of several micro-batches first counts their loads in a forward pass of "
        "its own. sinkhorn: tokens of each sequence are assigned evenly in training, for comparison",
    )
    bias_update: Literal["sign", "proportional"] = Field(
        "sign", description="update of the bias: the sign of the load error, or the error itself"
    )
    bias_update_rate: float = Field(0.001, ge=0, description="size of the bias update per optimizer step")
    bias_clamp: float = Field(1.0, gt=0, description="the bias is clamped to plus and minus this value")
    aux_loss_weight: float = Field(0.01, ge=0, description="weight of the auxiliary loss over the whole step when method is aux")
    sequence_aux_loss_weight: float = Field(1e-4, ge=0, description="weight of the sequence-level auxiliary loss; 0 turns it off")

    @property
    def has_step_loss(self) -> bool:
        """Whether the loss has an auxiliary loss over the whole step."""
        return self.method == "aux" and self.aux_loss_weight > 0


class Moe(Node):
    """Mixture of experts: sigmoid router scores, selection bias, shared experts."""

    n_routed_experts: int = Field(gt=0, le=_MOST_PARTS, description="routed experts per layer")
    num_experts_per_tok: int = Field(gt=0, le=_MOST_PARTS, description="routed experts per token")
    moe_intermediate_size: int = Field(gt=0, le=_WIDEST, description="intermediate size of one expert")
    moe_latent_size: int | None = Field(
        None, gt=0, le=_WIDEST, description="width at which routed experts read and write tokens, between two projections of the layer; "
        "hidden_size when omitted (Nemotron 3 Super: 1024)"
    )  # fmt: skip
    n_shared_experts: int = Field(
        1,
        ge=0,
        le=_MOST_PARTS,
        description="shared experts, which process every token; together they are n_shared_experts * moe_intermediate_size wide",
    )
    shared_expert_gate: bool = Field(
        False, description="multiply the output of the shared experts by the sigmoid of a projection of the token to one number (Qwen)"
    )
    first_k_dense_replace: int = Field(1, ge=0, le=MOST_LAYERS, description="number of first layers that are dense")
    scoring_func: Literal["sigmoid", "softmax"] = Field("sigmoid", description="function that turns router logits into expert weights")
    norm_topk_prob: bool = Field(True, description="normalize the weights of the selected experts to a sum of 1")
    add_bias: bool = Field(False, description="biases on the logits of the router and on the projections of the routed experts (gpt-oss)")
    swiglu_limit: float | None = Field(
        None, gt=0, description="routed experts clamp their gates to at most this value, and the other factor to plus and minus it "
        "(gpt-oss: 7); no clamp when omitted. Needs swiglu_alpha"
    )  # fmt: skip
    swiglu_alpha: float | None = Field(
        None, gt=0, description="routed experts compute (up + 1) * gate * sigmoid(swiglu_alpha * gate) (gpt-oss: 1.702) instead of "
        "up * silu(gate). Needs swiglu_limit"
    )  # fmt: skip
    routed_scaling_factor: float = Field(1.0, gt=0, description="factor on the routed output (GLM-4.6: 2.5)")
    n_group: int = Field(1, gt=0, le=_MOST_PARTS, description="expert groups for group-limited routing")
    topk_group: int = Field(1, gt=0, le=_MOST_PARTS, description="expert groups selected per token")
    capacity_factor: Annotated[float, NO_EFFECT, NOT_ARCHITECTURE] = Field(
        1.25, gt=0, description="only for the overflow metric; tokens are never dropped"
    )
    temperature: Annotated[float, _MAY_CHANGE, NOT_ARCHITECTURE] = Field(
        1.0, gt=0, description="router temperature at the start; falls linearly to 1 over temperature_steps"
    )
    temperature_steps: Annotated[int, _MAY_CHANGE, NOT_ARCHITECTURE] = Field(
        0, ge=0, description="optimizer steps until the router temperature is 1"
    )
    balance: Annotated[Balance, _MAY_CHANGE, NOT_ARCHITECTURE] = Balance()

    @model_validator(mode="after")
    def _consistent(self) -> Moe:
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(f"moe.num_experts_per_tok {self.num_experts_per_tok} exceeds moe.n_routed_experts {self.n_routed_experts}")
        if self.shared_expert_gate and not self.n_shared_experts:
            raise ValueError("moe.shared_expert_gate has nothing to multiply; set moe.n_shared_experts or leave it out")
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"moe.n_group {self.n_group} must divide moe.n_routed_experts {self.n_routed_experts} and be at least "
                f"moe.topk_group {self.topk_group}"
            )
        if (self.swiglu_limit is None) != (self.swiglu_alpha is None):
            given, other = ("swiglu_alpha", "swiglu_limit") if self.swiglu_limit is None else ("swiglu_limit", "swiglu_alpha")
            raise ValueError(f"moe.{given} needs moe.{other}, as gpt-oss has both; set both or neither")
        return self


class Mla(Node):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values are projected from one latent per token."""

    q_lora_rank: int | None = Field(
        None, gt=0, le=_WIDEST, description="rank of the query latent (DeepSeek-V3: 1536); queries have no latent when omitted"
    )
    kv_lora_rank: int = Field(
        512, gt=0, le=_WIDEST, description="rank of the latent that keys and values share; the KV cache holds it and the rotated key"
    )
    qk_rope_head_dim: int = Field(
        64, gt=0, le=_WIDEST, multiple_of=2, description="rotated dimensions of a head; all heads share their key"
    )
    qk_nope_head_dim: int = Field(128, gt=0, le=_WIDEST, description="dimensions of a head's query and key without positions")
    v_head_dim: int = Field(128, gt=0, le=_WIDEST, description="width of a head's value")
    rms_norm_eps: float = Field(
        1e-6,
        gt=0,
        description="added to the mean square in the norms of the latents; DeepSeek's classes fix it at 1e-6, whatever rms_norm_eps says",
    )


class Mtp(Node):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): layers that each predict one token further ahead."""

    num_nextn_predict_layers: int = Field(1, gt=0, le=MOST_LAYERS, description="number of these layers (GLM-4.x and DeepSeek-V3: 1)")
    loss_weight: Annotated[float, _MAY_CHANGE] = Field(
        0.3, gt=0, description="weight of their mean loss; a phase may change it (GLM: 0.3, later 0.1)"
    )


class Model(Node):
    """A decoder-only transformer. Shapes follow the usual names; see `lmworks.model`."""

    effect: ClassVar = read_by(*_READERS, frozen=True)

    preset: Annotated[str | None, NO_EFFECT, NOT_ARCHITECTURE] = Field(
        None, description="model preset: the name of a file in recipes/models, or the path of a config.json"
    )
    vocab_size: int | None = Field(
        None, gt=0, le=_MOST_ENTRIES, description="vocabulary size, the rows of the embedding; that of the tokenizer when omitted"
    )
    hidden_size: int | None = Field(None, gt=0, le=_WIDEST, description="width of the residual stream")
    num_hidden_layers: int | None = Field(None, gt=0, le=MOST_LAYERS, description="transformer layers")
    num_attention_heads: int | None = Field(None, gt=0, le=_MOST_PARTS, description="query heads")
    num_key_value_heads: int | None = Field(None, gt=0, le=_MOST_PARTS, description="key/value heads; fewer than heads is GQA, 1 is MQA")
    head_dim: int | None = Field(None, gt=0, le=_WIDEST, description="width of one head; derived from hidden_size and num_attention_heads")
    intermediate_size: int | None = Field(None, gt=0, le=_WIDEST, description="intermediate size of the dense SwiGLU layers")
    attention_bias: bool = Field(False, description="biases on the query, key and value projections (never on the output)")
    attention_output_bias: bool = Field(False, description="a bias on the output projection of attention (gpt-oss)")
    attention_sinks: bool = Field(
        False, description="a learned logit per head that takes part in the softmax of attention without a key and a value, so that a head "
        "may attend to nothing (gpt-oss)"
    )
    attn_output_gate: bool = Field(
        False, description="multiply what each head reads by the sigmoid of a gate that is projected from the token, before the output "
        "projection (Qwen3-Next; arXiv:2505.06708)",
    )  # fmt: skip
    use_qk_norm: bool = Field(False, description="RMSNorm on queries and keys, before RoPE")
    qk_norm_over: Literal["head", "all_heads"] = Field(
        "head",
        description="what the norm of use_qk_norm spans: each head, with one weight for all (Qwen3, GLM), or all heads at once (OLMo 2)",
    )
    qk_norm_blend: float = Field(
        1.0, ge=0, le=1, description="share of the normed in the queries and keys under use_qk_norm; the rest is as without the norm. Set "
        "by train.phases.qk_norm_steps, and 1 after it"
    )  # fmt: skip
    norm_position: Literal["pre", "post", "both", "stream"] = Field(
        "pre",
        description="where a layer has its norms: pre, on what attention and feed-forward read; post, on what they add to the "
        "residual stream (OLMo 2); both, four norms a layer (Gemma 2 and 3, GLM-4); stream, on the residual stream itself (MiniMax-01)",
    )
    hidden_act: Literal["silu", "gelu_tanh", "relu2"] = Field(
        "silu", description="activation in feed-forward layers: silu of the gate is SwiGLU; gelu_tanh of the gate is GEGLU with the tanh "
        "form (Gemma); relu2 is the square of ReLU, and there is no gate (Nemotron-H)"
    )  # fmt: skip
    scale_embeddings: bool = Field(
        False, description="multiply embeddings by the square root of hidden_size, rounded to the type of the activations (Gemma)"
    )
    query_pre_attn_scalar: int | None = Field(
        None, gt=0, le=_WIDEST, description="scores are divided by its square root; head_dim when omitted (Gemma 3 27B: 168)"
    )
    mla: Mla | None = None
    rope: Annotated[Rope, _MAY_CHANGE] = Rope()
    sliding_rope: Rope | None = Field(
        None, description="RoPE of the sliding layers; that of `rope` when omitted. Phases that change `rope` leave it (Gemma 3, OLMo 3)"
    )
    no_rope_layer_interval: int = Field(0, ge=0, le=MOST_LAYERS, description="every n-th layer has no RoPE (SmolLM3: 4); 0 means none")
    sliding_window: Tokens | None = Field(
        None, description="window size of the sliding attention layers; full attention everywhere when omitted"
    )
    layer_types: tuple[Literal["sliding_attention", "full_attention", "linear_attention", "conv", "hybrid", "mlp", "moe"], ...] = Field(
        (),
        description="kinds of the layers, one entry per layer, or fewer, which repeat; when omitted, all layers slide if there is a "
        "sliding window, and otherwise see everything. linear_attention needs gated_delta, mamba or lightning; conv needs short_conv; "
        "hybrid is attention and mamba side by side. mlp and moe are feed-forward blocks alone, dense and with experts; where a model has "
        "them, its other layers have no feed-forward block (Nemotron-H)",
    )
    gated_delta: GatedDelta | None = None
    mamba: Mamba | None = None
    lightning: Lightning | None = None
    short_conv: ShortConv | None = None
    multipliers: Multipliers | None = None
    moe: Moe | None = None
    mtp: Mtp | None = None
    tie_word_embeddings: bool = Field(False, description="the output head is the embedding matrix")
    rms_norm_eps: float = Field(1e-5, gt=0, description="epsilon of RMSNorm, added to the mean square")
    initializer_range: Annotated[float, read_by("pretrain", "export"), NOT_ARCHITECTURE] = Field(
        0.02, gt=0, le=10, description="standard deviation of the initial weights"
    )
    final_logit_softcapping: float = Field(0.0, ge=0, le=1e6, description="tanh cap on the logits; 0 turns it off")
    z_loss_weight: Annotated[float, _MAY_CHANGE, NOT_ARCHITECTURE] = Field(
        0.0, ge=0, description="weight of the squared log-partition term (GLM: 1e-4)"
    )
    residual_dropout: Annotated[float, _MAY_CHANGE, NOT_ARCHITECTURE] = Field(
        0.0, ge=0, lt=1, description="dropout rate of residual updates"
    )
    attention_dropout: Annotated[float, _MAY_CHANGE, NOT_ARCHITECTURE] = Field(
        0.0, ge=0, lt=1, description="dropout rate of attention weights"
    )
    max_position_embeddings: Annotated[Tokens | None, read_by("evaluate", "export"), NOT_ARCHITECTURE] = Field(
        None, description="context length that config.json states: that of the weights of start_from, or the longest sequence_length"
    )

    @property
    def open_size(self) -> str | None:
        """The first size that is not known; None if this describes a whole model. All are known after derivation, but in a recipe for a
        corpus alone."""
        sizes = (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
        )  # fmt: skip
        return next((name for name in sizes if getattr(self, name) is None), None)

    @model_validator(mode="after")
    def _heads_divide(self) -> Model:
        if self.num_attention_heads and self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model.num_key_value_heads {self.num_key_value_heads} must divide model.num_attention_heads {self.num_attention_heads}"
            )
        return self

    @model_validator(mode="after")
    def _rope_has_frequencies(self) -> Model:
        share = self.rope.partial_rotary_factor
        if not share or not (self.mla or self.head_dim):
            return self
        rotated = self.mla.qk_rope_head_dim if self.mla else int((self.head_dim or 0) * share)
        if rotated % 2:
            raise ValueError(f"model.rope.partial_rotary_factor {share} of head_dim {self.head_dim} must be an even number of dimensions")
        if not rotated:
            raise ValueError(
                f"model.rope.partial_rotary_factor {share:g} rotates none of the {self.head_dim} dimensions of a head; raise it to at "
                f"least {2 / (self.head_dim or 1):.2g}, or set it to 0 for no positions"
            )
        for name, rope in (("rope", self.rope), ("sliding_rope", self.sliding_rope or self.rope)):
            if rope.scaling == "ntk" and rotated == 2:
                raise ValueError(
                    f"{name}.scaling ntk stretches the slowest of several frequencies, and 2 rotated dimensions have one; use linear"
                )
            slowest = math.log(rope.theta) * (rotated - 2) / rotated + math.log(rope.factor)
            if slowest > _SLOWEST:
                raise ValueError(
                    f"{name}.theta {rope.theta:g} and {name}.factor {rope.factor:g} make the slowest frequency "
                    f"1e-{slowest / math.log(10):.0f}, less than fp32 can hold; lower them"
                )
        return self

    @model_validator(mode="after")
    def _sliding_rope_has_layers(self) -> Model:
        if self.sliding_rope is None:
            return self
        if self.sliding_window is None:
            raise ValueError(
                "model.sliding_rope is that of sliding layers, but there is no window; set model.sliding_window or leave it out"
            )
        if self.sliding_rope.partial_rotary_factor != self.rope.partial_rotary_factor:
            raise ValueError(
                f"model.sliding_rope.partial_rotary_factor {self.sliding_rope.partial_rotary_factor:g} must equal that of model.rope, "
                f"{self.rope.partial_rotary_factor:g}"
            )
        return self

    @model_validator(mode="after")
    def _experts_have_the_activation(self) -> Model:
        if self.moe is not None and self.hidden_act == "gelu_tanh":
            raise ValueError("model.hidden_act gelu_tanh does not combine with model.moe, whose experts have silu or relu2; leave it out")
        if self.moe is not None and self.hidden_act == "relu2":
            for name, given in (("add_bias", self.moe.add_bias), ("swiglu_limit", self.moe.swiglu_limit)):
                if given:
                    raise ValueError(f"model.moe.{name} is of experts with a gate, and those of model.hidden_act relu2 have none")
        return self

    @model_validator(mode="after")
    def _layers_of_one_block(self) -> Model:
        if not self.single_blocks:
            return self
        if ("moe" in self.layer_types) != (self.moe is not None):
            text = "has moe, which needs model.moe" if self.moe is None else "has mlp and no moe, so that model.moe is of no layer"
            raise ValueError(f"model.layer_types {text}; add it, or leave the other out")
        if self.moe is not None and self.moe.first_k_dense_replace:
            raise ValueError("model.layer_types says which layers have experts; set model.moe.first_k_dense_replace to 0")
        if self.mtp is not None:
            raise ValueError("model.mtp does not combine with layers of one block (mlp and moe in model.layer_types); leave it out")
        return self

    @model_validator(mode="after")
    def _blend_has_a_norm(self) -> Model:
        if self.qk_norm_blend != 1 and not self.use_qk_norm:
            raise ValueError("model.qk_norm_blend is the share of a norm that is not there; set model.use_qk_norm or leave it out")
        return self

    @model_validator(mode="after")
    def _norm_over_heads_is_a_norm(self) -> Model:
        if self.qk_norm_over != "head" and not self.use_qk_norm:
            raise ValueError(
                f"model.qk_norm_over {self.qk_norm_over} does nothing without model.use_qk_norm; set use_qk_norm or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _layer_types_have_a_window(self) -> Model:
        types = self.layer_types
        if self.sliding_window is None and "sliding_attention" in types:
            raise ValueError("model.layer_types says which layers slide, but there is no window; set model.sliding_window or leave it out")
        if types and set(types) <= {"full_attention"}:
            raise ValueError("model.layer_types has no layer that slides; leave it and model.sliding_window out")
        if types and self.sliding_window and "sliding_attention" not in types:
            raise ValueError("model.layer_types has no layer that slides; leave model.sliding_window out")
        if self.num_hidden_layers and len(types) > self.num_hidden_layers:
            raise ValueError(f"model.layer_types has {len(types)} entries for {self.num_hidden_layers} layers; write at most one per layer")
        return self

    @model_validator(mode="after")
    def _layer_types_have_a_section(self) -> Model:
        present = [section for section in SECTIONS if getattr(self, section) is not None]
        for kind, served_by in _SERVED_BY.items():
            found = [section for section in present if section in served_by]
            if kind in self.layer_types and len(found) != 1:
                raise ValueError(f"model.layer_types has {kind}, which needs exactly one of model.{', model.'.join(served_by)}")
        for section in present:
            if not set(SECTIONS[section]) & set(self.layer_types):
                raise ValueError(f"model.{section} is of no layer; add {SECTIONS[section][0]} to model.layer_types, or leave it out")
        if present and self.mtp is not None:
            raise ValueError(f"model.mtp does not combine with model.{present[0]}; leave it out")
        return self

    @model_validator(mode="after")
    def _latent_attention_stands_alone(self) -> Model:
        mla = self.mla
        if mla is None:
            return self
        for name, clash, why in (
            ("attention_bias", self.attention_bias, "its projections have no biases"),
            ("attention_output_bias", self.attention_output_bias, "its projections have no biases"),
            ("attention_sinks", self.attention_sinks, "all its scores have a key"),
            ("use_qk_norm", self.use_qk_norm, "the latents are normed instead"),
            ("attn_output_gate", self.attn_output_gate, "its output has no gate"),
            ("query_pre_attn_scalar", self.query_pre_attn_scalar, "its scores are divided by the root of head_dim"),
            ("no_rope_layer_interval", self.no_rope_layer_interval, "every layer rotates mla.qk_rope_head_dim dimensions"),
            ("sliding_window", self.sliding_window, "every layer sees everything"),
            ("rope.partial_rotary_factor", self.rope.partial_rotary_factor != 1, "mla.qk_rope_head_dim says how much of a head is rotated"),
            (
                "num_key_value_heads",
                self.num_key_value_heads not in (None, self.num_attention_heads),
                "every head has a key of its own out of the latent",
            ),
            (
                "head_dim",
                self.head_dim not in (None, mla.qk_nope_head_dim + mla.qk_rope_head_dim),
                "it is mla.qk_nope_head_dim + mla.qk_rope_head_dim",
            ),
        ):
            if clash:
                raise ValueError(f"model.{name} does not combine with model.mla: {why}; leave it out")
        return self

    @model_validator(mode="after")
    def _factors_have_something_to_multiply(self) -> Model:
        given = self.multipliers
        if given is None:
            return self
        if self.mla is not None or self.mtp is not None:
            raise ValueError("model.multipliers does not combine with model.mla and model.mtp, which have no such factors; leave it out")
        if (self.moe is not None or self.hidden_act == "relu2") and given.gate != 1:
            beside = "model.moe" if self.moe is not None else "model.hidden_act relu2, which has no gate"
            raise ValueError(f"model.multipliers.gate is a factor of dense feed-forward blocks; leave it out beside {beside}")
        for section in ("mamba", "lightning"):
            own = [name for name in given.changed() if name.startswith(section)]
            if getattr(self, section) is None and own:
                raise ValueError(f"model.multipliers.{own[0]} has nothing to multiply without model.{section}; leave it out")
        if "hybrid" not in self.layer_types and given.attention_in != 1:
            raise ValueError("model.multipliers.attention_in is a factor of hybrid layers; leave it out, or add hybrid to layer_types")
        return self

    @property
    def factors(self) -> Multipliers:
        """`multipliers`, all 1 without them."""
        return self.multipliers or Multipliers()

    def has_positions(self, layer: int) -> bool:
        """Whether the layer (counted from 0) has RoPE: not with partial_rotary_factor 0, nor every `no_rope_layer_interval`-th layer."""
        return self.rope.partial_rotary_factor > 0 and not (self.no_rope_layer_interval and (layer + 1) % self.no_rope_layer_interval == 0)

    def layer_type(self, layer: int) -> str:
        """The kind of the layer (counted from 0); `layer_types` repeat, also over the layers of multi-token prediction."""
        if types := self.layer_types:
            return types[layer % len(types)]
        return "sliding_attention" if self.sliding_window else "full_attention"

    def slides(self, layer: int) -> bool:
        """Whether the layer sees only a window."""
        return bool(self.sliding_window) and self.layer_type(layer) == "sliding_attention"

    def cached_tokens(self, layer: int, length: int) -> int:
        """Of how many of `length` tokens, the last ones, the layer's cache must hold keys and values while a model generates."""
        return min(length, int(self.sliding_window)) if self.sliding_window and self.slides(layer) else length

    @property
    def single_blocks(self) -> bool:
        """Whether each layer is one block, a mixer or a feed-forward block, and not a mixer before a feed-forward block."""
        return not _FEED_FORWARD.isdisjoint(self.layer_types)

    def feed_forward(self, layer: int) -> str:
        """The feed-forward block of the layer: "mlp" if it is dense, "moe" with experts, or "none"."""
        if self.single_blocks:
            kind = self.layer_type(layer)
            return kind if kind in _FEED_FORWARD else "none"
        return "moe" if self.moe is not None and layer >= self.moe.first_k_dense_replace else "mlp"

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers with experts; layers of multi-token prediction continue the numbers."""
        return tuple(layer for layer in range(self._numbered_layers) if self.feed_forward(layer) == "moe")

    def mixer(self, layer: int) -> str:
        """What mixes the tokens in the layer: the name of one of `SECTIONS`, "hybrid", "attention", or "none"."""
        kind = self.layer_type(layer)
        if kind == "hybrid":
            return kind
        if kind in _FEED_FORWARD:
            return "none"
        return next((name for name in _SERVED_BY.get(kind, ()) if getattr(self, name) is not None), "attention")

    def attends(self, layer: int) -> bool:
        """Whether the layer has keys and values, or latents, of each token."""
        mixer = self.mixer(layer)
        return mixer in ("attention", "hybrid") or (mixer != "none" and bool(getattr(self, mixer).attends))

    @property
    def router_eps(self) -> float:
        """What is added to the sum that normalizes the weights of a token's experts: `ROUTER_EPS`, but in the class of LFM2-MoE, the only
        one with experts beside convolutions."""
        return ROUTER_EPS if self.short_conv is None else 1e-6

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers whose heads have a softmax over scores of queries and keys; layers of multi-token prediction continue the numbers."""
        return tuple(layer for layer in range(self._numbered_layers) if self.mixer(layer) in ("attention", "hybrid"))

    @property
    def _numbered_layers(self) -> int:
        return (self.num_hidden_layers or 0) + (self.mtp.num_nextn_predict_layers if self.mtp else 0)

    def states(self, layer: int, tp: int = 1) -> tuple[State, ...]:
        """The states of the layer, with heads or channels split over `tp` ranks; none of attention."""
        mixer = self.mixer(layer)
        return () if mixer in ("attention", "none") else getattr(self, "mamba" if mixer == "hybrid" else mixer).states(self, tp)

    @property
    def mixers(self) -> frozenset[str]:
        """The sections of `SECTIONS` that the model has."""
        return frozenset(name for name in SECTIONS if getattr(self, name) is not None)


class Lora(Node):
    """Trains low-rank adapters instead of the weights (LoRA, arXiv:2106.09685): y = W x + scale B A x with W frozen."""

    rank: int = Field(16, gt=0, description="rank of the adapters: rows of A and columns of B")
    alpha: float = Field(32.0, gt=0, description="scale times the rank")
    rslora: bool = Field(False, description="scale is alpha / sqrt(rank) (arXiv:2312.03732) instead of alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of the adapters")
    targets: tuple[str, ...] = Field(
        ("all-linear",), min_length=1,
        description="which matrices have adapters: attention, mlp (dense and shared experts), experts (routed ones), all-linear (attention "
        "and mlp), or ends of names of modules, such as query or layers.3.ffn.down",
    )  # fmt: skip
    init_from: str | None = Field(
        None, description="a PEFT adapter of this base model to continue from: a directory with adapter_config.json and "
        "adapter_model.safetensors"
    )  # fmt: skip

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def side_by_side(self, count: int) -> Lora:
        """Of `count` such adapters as one, which adds what they add together."""
        return self.model_copy(update={"rank": self.rank * count, "alpha": self.alpha * (count**0.5 if self.rslora else count)})


LORA_GROUPS = ("attention", "mlp", "experts", "all-linear")
"""The targets that stand for several matrices."""


def target_matches(target: str, name: str, groups: tuple[str, ...]) -> bool:
    """Whether a target means the matrix `name`, which belongs to these of `GROUPS`.

    Ends of names mean whole parts, and not the experts unless they are named, whose projections have the names of others.
    """
    if target in LORA_GROUPS:
        return target in groups
    return f".{name}".endswith(f".{target}") and ("experts" not in groups or "experts" in target)


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter, by its name."""
    return name.endswith(("lora.A", "lora.B"))


def is_convolution(name: str) -> bool:
    """Whether a parameter is the weight of a depthwise convolution, by its name."""
    return name.endswith("conv.weight")


def matrix_of_adapter(name: str) -> str:
    """The name of the matrix that a parameter of an adapter belongs to."""
    place = name[: -len("lora.A")]
    return place.removesuffix("_") if place.endswith("_") else f"{place}weight"
