"""The declaration of a model family, and the traits of a model by which its class is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmworks.errors import UserError
from lmworks.recipe.families.keys import Defaults
from lmworks.recipe.schema.model import Model, Rope


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
    "post-norm": Trait(
        lambda model: model.norm_position == "post", "its layers are post-norm (norm_position)", "its layers are pre-norm (norm_position)",
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
        lambda model: "full_attention" in model.layer_types, "only some of its layers have the window (layer_types)",
        "all its layers have the window (layer_types)",
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
    (2i, 2i + 1) instead of halves (i, i + R/2), so rows of query and key are reordered.
    """

    architecture: str
    interleaved_rope: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


def _no_keys(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """A class of `transformers`.

    name, model_type: as in config.json; `model_types` are those of other programs for the same class
    about: the models of this class, in a few words
    names: pairs of our tensor name and Hugging Face's; `{i}` is a layer, `{e}` an expert of a stacked tensor
    requires, allows: traits that models of the class always have and may have; they have no others
    differs: why a model with matching traits is still not of this class, or None
    defaults: every key of config.json that the class reads and that may change a number, with the default of the class; those of RoPE are
        `rope_theta` and `partial_rotary_factor` below
    fixed: the only values that lmworks supports of a key, where it is written; besides `keys.FIXED`
    ignored: keys that published models have and the class does not read; besides those that no class reads (`keys.changes_no_number`)
    aliases: second names that the class takes for a key -> the name in `defaults`
    to_config: keys of config.json beyond those of every model (`common.to_config`), from a model and the RoPE of the last phase
    omits: keys of `common.to_config` that the class does not have
    from_config: values of `Model` beyond those of every model (`common.from_config`), from all keys of `defaults`; raises `UserError` for
        unsupported options
    zero: our tensors that do not exist in the class and must be zero
    mtp: whether the class supports multi-token prediction with experts, as in the published models
    architectures: the names of its architectures in llama.cpp; `gguf` returns the one for a model, or raises `NoClass` with the reason
    without_gguf: the models that llama.cpp does not support, in a few words
    from_gguf: values of `Model` from the metadata of a GGUF file beyond those of every model (`lmworks.recipe.gguf.metadata`)
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
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict, hash=False)
    model_types: tuple[str, ...] = ()
    to_config: Callable[[Model, Rope], dict[str, Any]] = _no_keys
    omits: tuple[str, ...] = ()
    from_config: Callable[[dict[str, Any]], dict[str, Any]] = _no_keys
    zero: tuple[str, ...] = ()
    mtp: bool = False
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
