"""Shared by several families: keys of config.json, the weight names of Llama, RoPE parameters, experts, sliding windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import family as keys
from lmworks.recipe.families.family import Family, Gguf, Names, NoClass
from lmworks.recipe.families.rope import read_rope, read_ropes, rope_parameters
from lmworks.recipe.schema.model import MOST_LAYERS, Model, Moe, Rope

_PARTS = ("gate", "up", "down")
_SLIDING, _FULL = "sliding_attention", "full_attention"

ENDS: Names = (
    ("embedding.weight", "model.embed_tokens.weight"), ("norm.weight", "model.norm.weight"), ("head.weight", "lm_head.weight"),
)  # fmt: skip
PRE_NORMS: Names = (
    ("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    ("layers.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
)
PROJECTIONS: Names = tuple(
    (f"layers.{{i}}.attention.{ours}.{kind}", f"model.layers.{{i}}.self_attn.{theirs}_proj.{kind}")
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")) for kind in ("weight", "bias")
)  # fmt: skip
QK_NORMS: Names = (
    ("layers.{i}.attention.query_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    ("layers.{i}.attention.key_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
)
JOINED_FFN: Names = (
    *((f"layers.{{i}}.ffn.{part}.weight", "model.layers.{i}.mlp.gate_up_proj.weight") for part in ("gate", "up")),
    ("layers.{i}.ffn.down.weight", "model.layers.{i}.mlp.down_proj.weight"),
)
FFN: Names = tuple((f"layers.{{i}}.ffn.{part}.weight", f"model.layers.{{i}}.mlp.{part}_proj.weight") for part in _PARTS)
EXPERTS: Names = (
    *((f"layers.{{i}}.ffn.experts.{part}", f"model.layers.{{i}}.mlp.experts.{{e}}.{part}_proj.weight") for part in _PARTS),
    ("layers.{i}.ffn.router.weight", "model.layers.{i}.mlp.gate.weight"),
)
SHARED_EXPERTS: Names = tuple(
    (f"layers.{{i}}.ffn.shared.{part}.weight", f"model.layers.{{i}}.mlp.shared_experts.{part}_proj.weight") for part in _PARTS
)
GATED_SHARED_EXPERT: Names = (
    *((f"layers.{{i}}.ffn.shared.{part}.weight", f"model.layers.{{i}}.mlp.shared_expert.{part}_proj.weight") for part in _PARTS),
    ("layers.{i}.ffn.shared_gate.weight", "model.layers.{i}.mlp.shared_expert_gate.weight"),
)
SELECTION_BIAS: Names = (("layers.{i}.ffn.router.bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"),)
MTP: Names = (
    ("mtp.{i}.embedding_norm.weight", "model.layers.{i}.enorm.weight"),
    ("mtp.{i}.hidden_norm.weight", "model.layers.{i}.hnorm.weight"),
    ("mtp.{i}.projection.weight", "model.layers.{i}.eh_proj.weight"),
    ("mtp.{i}.norm.weight", "model.layers.{i}.shared_head.norm.weight"),
)
LLAMA: Names = (*ENDS, *PRE_NORMS, *PROJECTIONS, *FFN)

LONGEST = 1 << 24
"""Positions: fp32, in which angles are computed, has no odd integers beyond it."""

DEFAULTS: keys.Defaults = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "hidden_act": "silu", "initializer_range": 0.02,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_dropout": 0.0,
}  # fmt: skip
"""What most classes have; a family adds its own keys and values."""
EXPERTS_DEFAULTS: keys.Defaults = {
    "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
EXPERTS_ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
EXPERTS_FIXED: dict[str, tuple[Any, ...]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
WINDOW: keys.Defaults = {
    "use_sliding_window": False, "sliding_window": keys.Null(int, 4096), "max_window_layers": 28, "layer_types": keys.Null(list),
}  # fmt: skip


def to_config(family: Family, model: Model, rope: Rope) -> dict[str, Any]:
    """The keys of config.json that all families share, without token ids."""
    config: dict[str, Any] = {
        "architectures": [family.name], "model_type": family.model_type, "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size, "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads, "head_dim": model.head_dim, "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps,
        "initializer_range": model.initializer_range, "max_position_embeddings": int(model.max_position_embeddings or 2048),
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_dropout": model.attention_dropout, "attention_bias": model.attention_bias, "mlp_bias": False, "use_cache": True,
        "rope_parameters": _rope_to_config(family, model, rope),
    }  # fmt: skip
    omitted = {*family.omits} if "mlp_bias" in family.defaults else {*family.omits, "mlp_bias"}
    return {key: value for key, value in config.items() if key not in omitted}


def from_config(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """Values of `Model` from the keys of config.json. A key that is not there has the default of the class in `transformers`.

    Raises `UserError` for unsupported options, values of another kind, and keys that are not known.
    """
    config = keys.one_name(config, family.aliases)
    found = keys.read(config, family.defaults, keys.FIXED | dict(family.fixed), family.ignored)
    if found.get("attention_bias") and not family.has("biases"):
        raise UserError(f"config.json has attention_bias, which in {family.name} includes an output bias; lmworks does not support that")
    heads, layers, context = found["num_attention_heads"], found["num_hidden_layers"], found["max_position_embeddings"]
    if heads <= 0 or (layers is not None and not 0 < layers <= MOST_LAYERS):  # divided by, and counted to, below
        raise UserError(
            f"config.json has num_attention_heads {heads} and num_hidden_layers {layers}; lmworks supports 1 to {MOST_LAYERS} layers"
        )
    if not 0 < context <= LONGEST:
        raise UserError(
            f"config.json has max_position_embeddings {context}; RoPE is computed in fp32, which holds positions from 1 to {LONGEST:,}"
        )
    return {
        "vocab_size": found["vocab_size"], "hidden_size": found["hidden_size"], "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if found["num_key_value_heads"] is None else found["num_key_value_heads"],
        "head_dim": found["hidden_size"] // heads if found.get("head_dim") is None else found["head_dim"],
        "intermediate_size": found.get("intermediate_size"),
        "attention_bias": "biases" in family.requires or found.get("attention_bias", False),
        "use_qk_norm": "QK norm" in family.requires or (family.has("QK norm") and found["use_qk_norm"]),
        "tie_word_embeddings": found["tie_word_embeddings"], "rms_norm_eps": found.get("rms_norm_eps"),
        "initializer_range": found["initializer_range"], "attention_dropout": found.get("attention_dropout") or 0.0,
        "max_position_embeddings": f"{context} tokens",
    } | _rope_from_config(family, config, context) | family.from_config(found)  # fmt: skip


def _rope_to_config(family: Family, model: Model, rope: Rope) -> dict[str, Any]:
    if family.sliding_rope_theta is None:
        return rope_parameters(family, model, rope)
    ropes = {_FULL: rope, _SLIDING: model.sliding_rope or rope}
    return {kind: rope_parameters(family, model, one) for kind, one in ropes.items()}


def _rope_from_config(family: Family, config: Mapping[str, Any], context: int) -> dict[str, Any]:
    if family.sliding_rope_theta is None:
        return {"rope": read_rope(family, config, context)}
    return dict(read_ropes(family, config, context))


def experts_to_config(moe: Moe) -> dict[str, Any]:
    """The keys of experts in DeepSeek-V3 and GLM."""
    return {
        "n_routed_experts": moe.n_routed_experts, "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "n_shared_experts": moe.n_shared_experts, "first_k_dense_replace": moe.first_k_dense_replace, "norm_topk_prob": moe.norm_topk_prob,
        "routed_scaling_factor": moe.routed_scaling_factor, "n_group": moe.n_group, "topk_group": moe.topk_group,
    }  # fmt: skip


def experts_from_config(config: dict[str, Any]) -> dict[str, Any]:
    """`moe`, and `mtp` if the config has it."""
    names = (
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "norm_topk_prob",
        "routed_scaling_factor", "n_group", "topk_group",
    )  # fmt: skip
    ahead = config["num_nextn_predict_layers"]
    return {"moe": {name: config[name] for name in names}} | ({"mtp": {"num_nextn_predict_layers": ahead}} if ahead else {})


def experts_from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """`moe` from the metadata of a GGUF file: experts as in DeepSeek-V3 and GLM."""
    moe = {
        "n_routed_experts": values["expert_count"], "num_experts_per_tok": values["expert_used_count"],
        "moe_intermediate_size": values["expert_feed_forward_length"], "n_shared_experts": values["expert_shared_count"],
        "first_k_dense_replace": values.get("leading_dense_block_count", 0), "norm_topk_prob": bool(values.get("expert_weights_norm")),
        "routed_scaling_factor": values.get("expert_weights_scale") or 1.0, "n_group": values.get("expert_group_count", 1),
        "topk_group": values.get("expert_group_used_count", 1),
    }  # fmt: skip
    return {"moe": moe}


def softmax_experts(count: int, selected: int, size: int, *, normalized: bool) -> dict[str, Any]:
    """`moe`, and the equal size of a dense layer, of a class with softmax gates and routed experts in all layers."""
    moe = {
        "n_routed_experts": count, "num_experts_per_tok": selected, "moe_intermediate_size": size, "n_shared_experts": 0,
        "first_k_dense_replace": 0, "scoring_func": "softmax", "norm_topk_prob": normalized, "balance": {"method": "aux"},
    }  # fmt: skip
    return {"moe": moe, "intermediate_size": size}


def qwen_experts_to_config(model: Model) -> dict[str, Any]:
    """The keys of experts in Qwen's classes, with those of a shared expert if there is one."""
    moe = model.moe
    assert moe is not None
    shared = {"shared_expert_intermediate_size": moe.n_shared_experts * moe.moe_intermediate_size} if moe.n_shared_experts else {}
    return {
        "num_experts": moe.n_routed_experts, "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob, "decoder_sparse_step": 1, "mlp_only_layers": list(range(moe.first_k_dense_replace)),
    } | shared  # fmt: skip


def qwen_experts_from_config(config: dict[str, Any]) -> dict[str, Any]:
    """`moe` of Qwen's classes: softmax gates, the first layers possibly dense, and a shared expert with a gate where the class has one.

    The class may lack `norm_topk_prob`, which is then true, and the keys of dense layers. Raises `UserError` for layers and sizes that
    lmworks does not have.
    """
    if (step := config.get("decoder_sparse_step", 1)) != 1:
        raise UserError(f"config.json has decoder_sparse_step {step}; lmworks has experts in every layer after the first dense ones")
    dense = config.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise UserError(f"config.json has mlp_only_layers {dense}; in lmworks only the first layers can be dense beside experts")
    size, shared = config["moe_intermediate_size"], config.get("shared_expert_intermediate_size", 0)
    if size <= 0 or shared % size or ("shared_expert_intermediate_size" in config and not shared):
        raise UserError(
            f"config.json has shared_expert_intermediate_size {shared}, which must be a multiple of moe_intermediate_size {size} in lmworks"
        )
    moe = {
        "n_routed_experts": config["num_experts"], "num_experts_per_tok": config["num_experts_per_tok"], "moe_intermediate_size": size,
        "n_shared_experts": shared // size, "shared_expert_gate": shared > 0, "first_k_dense_replace": len(dense),
        "scoring_func": "softmax", "norm_topk_prob": config.get("norm_topk_prob", True), "balance": {"method": "aux"},
    }  # fmt: skip
    return {"moe": moe}


def feed_forward_kinds(layers: int, dense: int) -> list[str]:
    """`mlp_layer_types` of a model whose first `dense` layers are dense."""
    return ["dense" if layer < dense else "sparse" for layer in range(layers)]


def first_dense(config: dict[str, Any], default: int) -> int:
    """The number of first layers that are dense by `mlp_layer_types`, or `default`. Raises `UserError` for layers in another order."""
    layers, types = config["num_hidden_layers"], config["mlp_layer_types"]
    if types is None:
        return default
    if types != feed_forward_kinds(layers, dense := types.count("dense")):
        raise UserError(f"config.json has {keys.said('mlp_layer_types', types)}, which are not {layers}, first dense and then sparse")
    return dense


def softmax_experts_metadata(model: Model) -> dict[str, Any]:
    """The metadata of experts in llama.cpp, where their size is that of the feed-forward layer."""
    assert model.moe is not None
    return {
        "feed_forward_length": model.moe.moe_intermediate_size, "expert_count": model.moe.n_routed_experts,
        "expert_used_count": model.moe.num_experts_per_tok,
    }  # fmt: skip


def first_layers_dense(moe: Moe) -> str | None:
    """Why a class with experts in all layers does not express the model, or None."""
    return f"its first layers are dense (moe.first_k_dense_replace {moe.first_k_dense_replace})" if moe.first_k_dense_replace else None


def window_to_config(model: Model, _: Rope | None = None) -> dict[str, Any]:
    """The keys of a sliding window and of the layers that have it."""
    return {
        "use_sliding_window": bool(model.sliding_window), "sliding_window": int(model.sliding_window) if model.sliding_window else None,
        "layer_types": [_SLIDING if model.slides(layer) else _FULL for layer in range(model.num_hidden_layers or 0)],
    }  # fmt: skip


def window_from_config(config: dict[str, Any], default: list[bool]) -> dict[str, Any]:
    """`sliding_window`, and `layer_types` as the shortest repeating pattern; `default` tells which layers have the window if there is one
    and the config does not list them.
    """
    window, layers, types = window_of_all_layers(config), config["num_hidden_layers"], config["layer_types"]
    if types is None:
        types = [_SLIDING if slides and window else _FULL for slides in default]
    if len(types) != layers or any(one not in (_SLIDING, _FULL) for one in types):
        raise UserError(f"config.json has layer_types that are not {layers} of {_SLIDING} and {_FULL}; lmworks cannot read it")
    if _SLIDING not in types:
        return {}
    if not window:
        raise UserError(f"config.json has layer_types with {_SLIDING}, but no window: set use_sliding_window and sliding_window")
    return window | {"layer_types": repeating(types) if _FULL in types else ()}


def repeating(types: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that gives the kinds of all layers when it repeats."""
    layers = range(len(types))
    size = next(size for size in range(1, len(types) + 1) if all(types[layer] == types[layer % size] for layer in layers))
    return tuple(types[:size])


def sliding_from_config(config: dict[str, Any], default: list[bool]) -> dict[str, Any]:
    """As `window_from_config`, for a class whose sliding layers have a RoPE of their own: without a window there is none."""
    return window_from_config(config, default) or {"sliding_rope": None}


def slides_of_pattern(pattern: Any, layers: int) -> list[bool] | None:
    """Which layers have the window by llama.cpp's pattern: a truth value per layer, or the n of every n-th layer, which has none; or one
    truth value, if all are alike. None for anything else."""
    if isinstance(pattern, bool):
        return [pattern] * layers
    if isinstance(pattern, int) and pattern > 0:
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    known = isinstance(pattern, list) and len(pattern) == layers and all(isinstance(one, bool) for one in pattern)
    return pattern if known else None


def refuse_other_sliding_rope(model: Model, architecture: str) -> None:
    """Raise `NoClass` if the sliding layers have not the RoPE that they have in llama.cpp: the theta of the others, and no scaling."""
    if (model.sliding_rope or model.rope) != Rope(theta=model.rope.theta):
        raise NoClass(
            f"its sliding layers have not the plain RoPE with the theta of the others that llama.cpp has for {architecture} (sliding_rope)"
        )
    if model.rope.scaling == "ntk":
        raise NoClass(
            f"it has rope.scaling ntk, which is written as a larger theta, and llama.cpp's {architecture} has one theta for all layers"
        )


def sliding_metadata(model: Model) -> dict[str, Any]:
    """The metadata of sliding layers in llama.cpp, as its converter writes them; their theta is that of the others."""
    slides = [model.slides(layer) for layer in range(model.num_hidden_layers or 0)]
    return {"sliding_window": int(model.sliding_window or 0), "sliding_window_pattern": slides, "freq_base_swa": model.rope.theta}


def sliding_from_gguf(values: Mapping[str, Any], slides: list[bool]) -> dict[str, Any]:
    """The window, the layers that have it, and their RoPE, from the metadata of a GGUF file."""
    if not (size := values.get("attention.sliding_window", 0)):
        raise NoClass("it has no sliding window")
    window = window_from_config({"sliding_window": size, "num_hidden_layers": len(slides), "layer_types": None}, slides)
    return window | {"sliding_rope": {"theta": values.get("rope.freq_base", 10_000.0)}}


def window_of_all_layers(config: dict[str, Any]) -> dict[str, Any]:
    """`sliding_window` of all layers, if there is one; classes without `use_sliding_window` have one unless it is null."""
    size = config["sliding_window"] if config.get("use_sliding_window", True) else None
    if size is not None and size <= 0:
        raise UserError(f"config.json has sliding_window {size}, which must be positive; null means none")
    return {"sliding_window": f"{size} tokens"} if size is not None else {}


def upper_layers_slide(config: dict[str, Any]) -> list[bool]:
    """Qwen's rule for a config.json without layer_types: layers from `max_window_layers` on have the window."""
    return [layer >= config["max_window_layers"] for layer in range(config["num_hidden_layers"])]


_NEED_A_HEAD = ("olmo2", "olmoe", "gpt-oss", "minimax-m2", "qwen2moe", "mellum")  # all others take the embedding where a file has none


def gguf(
    model: Model, architecture: str, *, interleaved_rope: bool = False, metadata: dict[str, Any] | None = None, window: bool = False
) -> Gguf:
    """An architecture of llama.cpp, which has a sliding window only with `window`. Raises `NoClass` for options that llama.cpp ignores."""
    if model.sliding_window and not window:
        raise NoClass("it has a sliding window, which llama.cpp ignores for this architecture")
    if not model.rope.truncate:
        raise NoClass("its YaRN does not round (rope.truncate false), and llama.cpp rounds; set rope.truncate true for what it computes")
    if model.rope.scaling == "llama3" and architecture != "llama":
        raise NoClass(f"it has rope.scaling llama3, which llama.cpp supports for its architecture llama and not for {architecture}")
    if model.tie_word_embeddings and architecture in _NEED_A_HEAD:
        raise NoClass(f"its head is its embedding (tie_word_embeddings), and llama.cpp's {architecture} needs a head of its own")
    return Gguf(architecture, interleaved_rope, metadata or {})
