"""The declaration of a model family, the traits of a model by which its class is found, and the keys of its config.json.

A family says which keys a class reads, with the defaults of `transformers`, and which ones change no number. The lists are closed: a key
that is in none of them is refused, because a model with it may compute something else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmworks.errors import UserError
from lmworks.recipe.schema.model import Model, Rope


class Null(NamedTuple):
    """A key that may be null, and its default, which may be a text such as "auto" for a number."""

    kind: type
    default: Any = None


class Extra(NamedTuple):
    """A key that the class does not declare, but reads if it is there; it may not be null."""

    kind: type


class Number(NamedTuple):
    """A number whose default the class writes without a fraction."""

    default: int


Defaults = dict[str, Any]
"""Key -> the default of the class, whose type the value must have; or `Null`, `Extra` or `Number`."""

ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys of RoPE at the top, which `rope.py` reads."""

FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"), "mlp_bias": (False,), "is_encoder_decoder": (False,), "add_cross_attention": (False,),
    "pruned_heads": ({},), "rope_interleaved": (False,), "use_mrope": (False,),
}  # fmt: skip
"""The values that keys must have where they are written."""

_ANYTHING = frozenset({
    # of every class: names, types, what is returned, and tasks other than the next token
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "auto_map", "name_or_path", "tokenizer_class",
    "output_hidden_states", "output_attentions", "output_scores", "output_router_logits", "return_dict", "return_dict_in_generate",
    "use_return_dict", "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params", "prefix", "torchscript", "use_bfloat16", "tf_legacy_loss", "tie_encoder_decoder", "is_decoder",
    "cross_attention_hidden_size", "tie_last_hidden_states", "attn_implementation", "experts_implementation", "gradient_checkpointing",
    # of generation, which older versions kept here
    "use_cache", "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "epsilon_cutoff",
    "eta_cutoff", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "cache_implementation",
    # how a model was or is trained; weights are the same with any value
    "pretraining_tp", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux", "ep_size", "neftune_noise_alpha",
    # of other programs; a few thousand published configs have them
    "quantization_config",  # the reader of the weights looks at it
    "is_llama_config", "max_sequence_length", "model_max_length", "tokenizer_model_max_length", "tokenizer_padding_side",
    "use_flash_attn", "use_flash_attention", "use_flash_attention_2", "dual_chunk_attention_config", "pad_token", "bos_token",
    "eos_token", "unk_token", "add_bos_token", "add_eos_token",
})  # fmt: skip
_PREFIXES = ("_", "unsloth", "transformers.js", "trl_", "mtp_")  # the logits read no layer ahead
_SUFFIXES = ("_token_id", "_token_ids")


def changes_no_number(key: str) -> bool:
    """Whether a key of config.json has no influence on the logits of any class, whatever its value."""
    return key in _ANYTHING or key.startswith(_PREFIXES) or key.endswith(_SUFFIXES)


def read(config: Mapping[str, Any], defaults: Defaults, fixed: Mapping[str, tuple[Any, ...]], ignored: tuple[str, ...]) -> dict[str, Any]:
    """All keys of `defaults`, with the value of the config or the default of the class; keys of RoPE are left to `rope.py`.

    Raises `UserError` for a value of another kind, for one that `fixed` does not list, and for a key that nobody knows.
    """
    for key, value in config.items():
        allowed = fixed.get(key)
        if allowed is not None and not any(value is one or (type(value) is type(one) and value == one) for one in (*allowed, None)):
            one_of = " or ".join(json.dumps(one) for one in allowed) or "no value"
            raise UserError(f"config.json has {said(key, value)}; lmworks supports {one_of}")
        known = key in defaults or key in ROPE or allowed is not None or key in ignored or changes_no_number(key)
        if not known and value is not None:
            raise UserError(
                f"config.json has {said(key, value)}, a key that this class does not have in transformers and that lmworks does not know; "
                f"if the model computes the same without it, remove it"
            )
    return {key: _value(config, key, declared) for key, declared in defaults.items()}


def _value(config: Mapping[str, Any], key: str, declared: Any) -> Any:
    if isinstance(declared, Number):
        return of_kind(key, config.get(key, declared.default), float)
    nullable = isinstance(declared, Null)
    kind = declared.kind if isinstance(declared, (Null, Extra)) else type(declared)
    if key not in config:
        return declared.default if nullable else None if isinstance(declared, Extra) else declared
    value = config[key]
    if isinstance(declared, Null) and isinstance(declared.default, str) and value == declared.default:
        return value
    return None if value is None and nullable else of_kind(key, value, kind)


def of_kind(key: str, value: Any, kind: type) -> Any:
    """The value, if it is of this kind; `UserError` otherwise. A float may be written without a fraction; infinity is no number."""
    if kind is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    else:
        fits = type(value) is kind
    if not fits:
        names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", list: "a list", dict: "an object"}
        raise UserError(f"config.json has {said(key, value)}, which must be {names[kind]}")
    return float(value) if kind is float else value


def one_name(config: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The config with one name for each key, where `transformers` takes two. Raises `UserError` if both are there and differ."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = aliases.get(key, key)
        if name in found and found[name] != value:
            other = next(one for one in config if one != key and aliases.get(one, one) == name)
            raise UserError(f"config.json has {said(other, config[other])} and {said(key, value)}, two names of the same; keep one")
        found[name] = value
    return found


def said(key: str, value: Any) -> str:
    """Key and value, in a message."""
    text = json.dumps(value, ensure_ascii=True)
    return f"{key} {text if len(text) <= 80 else text[:77] + '...'}"


class NoClass(UserError):
    """No class expresses the model; `reason` states the property that none has."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no Hugging Face class expresses this model: {reason}; change the model, or set export.huggingface=false")
        self.reason = reason


class Trait(NamedTuple):
    """A property that a model has or lacks, and that a class always has, may have, or never has. `present` and `absent` describe it in
    messages."""

    found: Callable[[Model], bool]
    present: str
    absent: str


TRAITS: dict[str, Trait] = {
    "experts": Trait(lambda model: model.moe is not None, "it has experts (moe)", "it is dense (moe)"),
    "shared experts": Trait(
        lambda model: model.moe is not None and model.moe.n_shared_experts > 0,
        "it has shared experts (moe.n_shared_experts)", "it has no shared expert (moe.n_shared_experts)",
    ),
    "softmax gates": Trait(
        lambda model: model.moe is not None and model.moe.scoring_func == "softmax",
        "its gates are softmax (moe.scoring_func)", "its gates are sigmoid (moe.scoring_func)",
    ),
    "selection bias": Trait(
        lambda model: model.moe is not None and model.moe.balance.method == "bias",
        "a bias selects its experts (moe.balance.method)", "no bias selects its experts (moe.balance.method)",
    ),
    "expert groups": Trait(
        lambda model: model.moe is not None and model.moe.topk_group < model.moe.n_group,
        "it routes within groups of experts (moe.n_group)", "it routes to all experts (moe.n_group)",
    ),
    "routed scale": Trait(
        lambda model: model.moe is not None and model.moe.routed_scaling_factor != 1,
        "its routed output is scaled (moe.routed_scaling_factor)", "its routed output is not scaled (moe.routed_scaling_factor)",
    ),
    "latent experts": Trait(
        lambda model: model.moe is not None and model.moe.moe_latent_size is not None,
        "its experts work at a width of their own (moe.moe_latent_size)", "its experts work at hidden_size (moe.moe_latent_size)",
    ),
    "MLA": Trait(lambda model: model.mla is not None, "it has latent attention (mla)", "it has no latent attention (mla)"),
    "QK norm": Trait(
        lambda model: model.use_qk_norm and model.qk_norm_over == "head",
        "queries and keys are normalized per head (use_qk_norm)", "queries and keys are not normalized per head (use_qk_norm)",
    ),
    "QK norm over all heads": Trait(
        lambda model: model.use_qk_norm and model.qk_norm_over == "all_heads",
        "queries and keys are normalized over all heads (qk_norm_over)",
        "queries and keys are not normalized over all heads (qk_norm_over)",
    ),
    "blended QK norm": Trait(
        lambda model: model.use_qk_norm and model.qk_norm_blend < 1,
        "its QK norm is only partly blended in (qk_norm_blend); train to the end of train.phases.qk_norm_steps", "its QK norm is whole",
    ),
    "post-norm": Trait(
        lambda model: model.norm_position == "post", "its layers are post-norm (norm_position)", "its layers are pre-norm (norm_position)",
    ),
    "norms on both sides": Trait(
        lambda model: model.norm_position == "both", "its layers have norms on both sides (norm_position)",
        "its layers have no norms on both sides (norm_position)",
    ),
    "GELU": Trait(
        lambda model: model.hidden_act == "gelu_tanh",
        "its feed-forward has gelu_tanh (hidden_act)", "its feed-forward has silu (hidden_act)",
    ),
    "squared ReLU": Trait(
        lambda model: model.hidden_act == "relu2", "its feed-forward has relu2 without a gate (hidden_act)",
        "its feed-forward has a gate (hidden_act)",
    ),
    "layers of one block": Trait(
        lambda model: model.single_blocks, "its layers are one block each (mlp or moe in layer_types)",
        "its layers are two blocks each (layer_types)",
    ),
    "scaled embeddings": Trait(
        lambda model: model.scale_embeddings, "its embeddings are scaled (scale_embeddings)",
        "its embeddings are not scaled (scale_embeddings)",
    ),
    "score scale": Trait(
        lambda model: model.query_pre_attn_scalar is not None, "its scores have a scale of their own (query_pre_attn_scalar)",
        "its scores are scaled by head_dim (query_pre_attn_scalar)",
    ),
    "RoPE of sliding layers": Trait(
        lambda model: model.sliding_rope is not None, "its sliding layers have a RoPE of their own (sliding_rope)",
        "its sliding layers have the RoPE of the others (sliding_rope)",
    ),
    "Mamba-2 beside attention": Trait(
        lambda model: "hybrid" in model.layer_types, "it has layers of attention and Mamba-2 side by side (hybrid in layer_types)",
        "it has no layers of attention and Mamba-2 side by side (hybrid in layer_types)",
    ),
    "Mamba-2": Trait(
        lambda model: model.mamba is not None and "linear_attention" in model.layer_types,
        "it has layers of Mamba-2 (linear_attention in layer_types)", "it has no layer of Mamba-2 (linear_attention in layer_types)",
    ),
    "smallest time step": Trait(
        lambda model: model.mamba is not None and model.mamba.min_time_step > 0,
        "its time steps have a smallest value (mamba.min_time_step)", "its time steps have no smallest value (mamba.min_time_step)",
    ),
    "lightning attention": Trait(
        lambda model: model.lightning is not None, "it has lightning attention (lightning)", "it has no lightning attention (lightning)",
    ),
    "norms on the stream": Trait(
        lambda model: model.norm_position == "stream", "its norms are on the residual stream (norm_position)",
        "its norms are not on the residual stream (norm_position)",
    ),
    "constant factors": Trait(
        lambda model: model.multipliers is not None, "it has constant factors (multipliers)", "it has no constant factors (multipliers)",
    ),
    "output bias": Trait(
        lambda model: model.attention_output_bias, "the output of its attention has a bias (attention_output_bias)",
        "the output of its attention has no bias (attention_output_bias)",
    ),
    "attention sinks": Trait(
        lambda model: model.attention_sinks, "it has attention sinks (attention_sinks)", "it has no attention sinks (attention_sinks)",
    ),
    "biases of experts": Trait(
        lambda model: model.moe is not None and model.moe.add_bias, "its router and experts have biases (moe.add_bias)",
        "its router and experts have no biases (moe.add_bias)",
    ),
    "clamped SwiGLU": Trait(
        lambda model: model.moe is not None and model.moe.swiglu_limit is not None,
        "its experts have a clamped SwiGLU (moe.swiglu_limit)", "its experts have no clamped SwiGLU (moe.swiglu_limit)",
    ),
    "biases": Trait(lambda model: model.attention_bias, "it has biases (attention_bias)", "it has no biases (attention_bias)"),
    "partial RoPE": Trait(
        lambda model: 0 < model.rope.partial_rotary_factor < 1,
        "it rotates only a part of each head (rope.partial_rotary_factor)", "it rotates whole heads (rope.partial_rotary_factor)",
    ),
    "NoPE layers": Trait(
        lambda model: model.no_rope_layer_interval > 0, "it has layers without positions (no_rope_layer_interval)",
            "all its layers have positions (no_rope_layer_interval)"
    ),
    "sliding window": Trait(lambda model: bool(model.sliding_window), "it has a sliding window", "it has no sliding window"),
    "full-attention layers beside it": Trait(
        lambda model: bool(model.sliding_window) and "full_attention" in model.layer_types,
        "only some of its layers have the window (layer_types)",
        "all its layers have the window (layer_types)",
    ),
    "gated delta rule": Trait(
        lambda model: model.gated_delta is not None, "it has layers with the gated delta rule (gated_delta)",
        "it has no layer with the gated delta rule (gated_delta)",
    ),
    "short convolutions": Trait(
        lambda model: model.short_conv is not None, "it has layers of short convolutions (short_conv)",
        "it has no layer of short convolutions (short_conv)",
    ),
    "output gate": Trait(
        lambda model: model.attn_output_gate, "the output of its attention has a gate (attn_output_gate)",
        "the output of its attention has no gate (attn_output_gate)",
    ),
    "gate of shared experts": Trait(
        lambda model: model.moe is not None and model.moe.shared_expert_gate,
        "its shared experts have a gate (moe.shared_expert_gate)", "its shared experts have no gate (moe.shared_expert_gate)",
    ),
    "logit soft-cap": Trait(lambda model: model.final_logit_softcapping > 0, "final_logit_softcapping is on",
        "final_logit_softcapping is off"),
    "no RoPE": Trait(lambda model: model.rope.partial_rotary_factor == 0, "it has no RoPE at all (rope.partial_rotary_factor 0)",
        "it has RoPE"),
}  # fmt: skip

Names = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Gguf:
    """A model in llama.cpp: the name of the architecture, and its metadata beyond those of every model.

    `metadata`: values by the names of GGUFWriter's methods, without `add_`. `interleaved_rope`: llama.cpp rotates neighboring dimensions
    (2i, 2i + 1) instead of halves (i, i + R/2), so rows of query and key are reordered. `names`: pairs of our name, as in `Family.names`,
    and llama.cpp's, of tensors that are not those of the Hugging Face class under another name. `forms`: our names of tensors that
    llama.cpp has with other values or in another order. `names_of`: the architecture that has the same names of tensors, for one that the
    package `gguf` may not know.
    """

    architecture: str
    interleaved_rope: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    names: Names = ()
    forms: Mapping[str, Form] = field(default_factory=dict)
    names_of: str = ""


class Form(NamedTuple):
    """A tensor in another form: a function of ours and of the model, and its inverse. Both take tensors on any device."""

    to: Callable[[Any, Model], Any]
    back: Callable[[Any, Model], Any]


def _no_keys(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """A class of `transformers`.

    name, model_type: as in config.json; `model_types` are those of other programs for the same class
    about: the models of this class, in a few words
    names: pairs of our tensor name and Hugging Face's; `{i}` is a layer, `{e}` an expert of a stacked tensor. Several of ours with one name
        of theirs are its rows, in this order. In a layer of another kind than attention, ours has the section of the kind, such as
        `layers.{i}.gated_delta.query.weight`
    groups: names of theirs whose rows are in groups, each with a part of each of ours -> the number of groups of a model
    requires, allows: traits that models of the class always have and may have; they have no others
    differs: why a model with matching traits is still not of this class, or None
    defaults: every key of config.json that the class reads and that may change a number, with the default of the class; those of RoPE are
        `rope_theta` and `partial_rotary_factor` below
    rope_without: the rope_parameters of a config.json without any
    sliding_rope_theta: the default base of sliding layers, for classes whose rope_parameters name kinds of layers; None for the others
    rope_types: the types of RoPE that the class has; empty if it has all of `transformers`
    rope_ignored: keys of rope_parameters that change no number for text
    interleaved_rope: whether the class rotates neighboring dimensions (2i, 2i + 1) of a head; here they are halves, (i, i + R/2)
    fixed: the only values that lmworks supports of a key, where it is written; besides `keys.FIXED`
    ignored: keys that published models have and the class does not read; besides those that no class reads (`keys.changes_no_number`)
    aliases: second names that the class takes for a key -> the name in `defaults`
    to_config: keys of config.json beyond those of every model (`common.to_config`), from a model and the RoPE of the last phase
    omits: keys of `common.to_config` that the class does not have
    from_config: values of `Model` beyond those of every model (`common.from_config`), from all keys of `defaults`; raises `UserError` for
        unsupported options
    norms_plus_one: whether the class multiplies by 1 + the weight of a norm, except of the gated norm of a recurrence; ours are the factors
        themselves
    zero: our tensors that do not exist in the class and must be zero
    derived: tensors of the class that follow from its config, so that they are neither read nor written
    stacked: tensors of the class that hold all experts of a layer -> the names in `names` of what an expert has in them: transposed, and
        along the last dimension in turn (`lmworks.weights.stacked`); with `stacked_rows` not transposed, and one after the other
    prefixes: beginnings of names of tensors -> the class's own, in files of a class of which this is the language model
    modules: beginnings of names of tensors in files -> those of the modules of the class, by which PEFT names them, where they differ
    wrapper: that class, with its model_type; its config.json has the keys of the language model in `text_config`
    unread: beginnings of the names of tensors that published models have and lmworks does not read
    mtp: whether the class supports multi-token prediction with experts, as in the published models
    written_as: the class that its models are written as, if that is another one, which computes the same
    architectures: the names of its architectures in llama.cpp; `gguf` returns the one for a model, or raises `NoClass` with the reason
    without_gguf: the models that llama.cpp does not support, in a few words
    from_gguf: values of `Model` from the metadata of a GGUF file beyond those of every model (`lmworks.recipe.gguf_model`)
    """

    name: str
    model_type: str
    about: str
    names: Names
    defaults: Defaults = field(hash=False)
    gguf: Callable[[Model], Gguf]
    architectures: tuple[str, ...] = ()
    requires: frozenset[str] = frozenset()
    allows: frozenset[str] = frozenset()
    differs: Callable[[Model], str | None] = lambda _: None
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    rope_without: Mapping[str, Any] = field(default_factory=dict, hash=False)
    sliding_rope_theta: float | None = None
    rope_types: tuple[str, ...] = ()
    rope_ignored: tuple[str, ...] = ()
    interleaved_rope: bool = False
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict, hash=False)
    model_types: tuple[str, ...] = ()
    to_config: Callable[[Model, Rope], dict[str, Any]] = _no_keys
    omits: tuple[str, ...] = ()
    from_config: Callable[[dict[str, Any]], dict[str, Any]] = _no_keys
    norms_plus_one: bool = False
    zero: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    stacked_rows: bool = False
    prefixes: Mapping[str, str] = field(default_factory=dict, hash=False)
    modules: Mapping[str, str] = field(default_factory=dict, hash=False)
    wrapper: tuple[str, str] | None = None
    unread: tuple[str, ...] = ()
    groups: Mapping[str, Callable[[Model], int]] = field(default_factory=dict, hash=False)
    mtp: bool = False
    written_as: str = ""
    without_gguf: str = ""
    from_gguf: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_keys

    def __post_init__(self) -> None:
        assert (self.requires | self.allows) <= TRAITS.keys() and not self.requires & self.allows

    def has(self, trait: str) -> bool:
        """Whether a model of this class can have the trait."""
        return trait in self.requires or trait in self.allows

    def why_not(self, model: Model) -> list[str]:
        """The reasons why a model is not of this class; empty if it is."""
        reasons = []
        for name, trait in TRAITS.items():
            found = trait.found(model)
            if found and not self.has(name):
                reasons.append(trait.present)
            elif not found and name in self.requires:
                reasons.append(trait.absent)
        further = None if reasons else self.differs(model)
        return [further] if further else reasons
