"""MiniMax-01 (arXiv:2501.08313): lightning and full attention, norms on the residual stream, factors of DeepNorm, experts as in Mixtral."""

from __future__ import annotations

from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family, Gguf, Names, NoClass, Null, Number
from lmworks.recipe.schema.mixers import Lightning, Multipliers
from lmworks.recipe.schema.model import Model, Rope

_FULL, _LINEAR = "full_attention", "linear_attention"
_PLACES = {
    "full_attn_alpha_factor": "attention_stream", "full_attn_beta_factor": "attention_out",
    "linear_attn_alpha_factor": "lightning_stream", "linear_attn_beta_factor": "lightning_out",
    "mlp_alpha_factor": "ffn_stream", "mlp_beta_factor": "ffn_out",
}  # fmt: skip
_LAYER = "model.layers.{i}."
_NAMES: Names = (
    *common.ENDS, *common.PRE_NORMS, *common.PROJECTIONS,
    *((f"layers.{{i}}.lightning.{ours}.weight", f"{_LAYER}self_attn.{theirs}.weight")
      for ours, theirs in (("qkv", "qkv_proj"), ("gate", "output_gate"), ("output_norm", "norm"), ("projection", "out_proj"))),
    *((f"layers.{{i}}.ffn.experts.{ours}", f"{_LAYER}block_sparse_moe.experts.{{e}}.{theirs}.weight")
      for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))),
    ("layers.{i}.ffn.router.weight", _LAYER + "block_sparse_moe.gate.weight"),
)  # fmt: skip


def _differs(model: Model) -> str | None:
    assert model.moe and model.lightning
    for name in model.multipliers.changed() if model.multipliers else ():
        if name not in _PLACES.values():
            return f"it has a factor that MiniMax-01 has not (multipliers.{name})"
    for found, text in (
        (model.norm_position != "stream", "its norms are not on the residual stream (norm_position)"),
        (model.lightning.rms_norm_eps != Lightning().rms_norm_eps, "its lightning attention has another eps (lightning.rms_norm_eps)"),
        (model.moe.first_k_dense_replace > 0, "its first layers are dense (moe.first_k_dense_replace)"),
        (not model.moe.norm_topk_prob, "the weights of its experts are not normalized (moe.norm_topk_prob)"),
        (model.moe.moe_intermediate_size != model.intermediate_size, "moe.moe_intermediate_size is not intermediate_size"),
    ):
        if found:
            return text
    return None


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    moe, given = model.moe, model.factors
    assert moe is not None
    return {
        "num_local_experts": moe.n_routed_experts, "num_experts_per_tok": moe.num_experts_per_tok, "block_size": 256,
        "sliding_window": None, "router_jitter_noise": 0.0,
        "layer_types": [model.layer_type(layer) for layer in range(model.num_hidden_layers or 0)],
        **{theirs: getattr(given, ours) for theirs, ours in _PLACES.items()},
    }  # fmt: skip


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    layers, types = config["num_hidden_layers"], config["layer_types"]
    types = [_LINEAR if layer % 2 else _FULL for layer in range(layers)] if types is None else types
    if len(types) != layers or any(one not in (_FULL, _LINEAR) for one in types):
        raise UserError(f"config.json has layer_types that are not {layers} of {_FULL} and {_LINEAR}; lmworks cannot read it")
    if _LINEAR not in types:
        raise UserError("config.json has no layer of linear_attention; lmworks reads this class only with lightning attention")
    given = Multipliers.model_validate({ours: config[theirs] for theirs, ours in _PLACES.items()})
    moe = {
        "n_routed_experts": config["num_local_experts"], "num_experts_per_tok": config["num_experts_per_tok"],
        "moe_intermediate_size": config["intermediate_size"], "n_shared_experts": 0, "first_k_dense_replace": 0,
        "scoring_func": "softmax", "norm_topk_prob": True, "balance": {"method": "aux"},
    }  # fmt: skip
    return {
        "layer_types": common.repeating(types), "lightning": {}, "norm_position": "stream", "moe": moe,
        "multipliers": None if given == Multipliers() else given,
    }  # fmt: skip


def _gguf(_: Model) -> Gguf:
    raise NoClass("llama.cpp has no architecture with lightning attention")


FAMILY = Family(
    name="MiniMaxForCausalLM", model_type="minimax", about="hybrid: lightning and full attention, experts (softmax gates), factors",
    names=_NAMES, zero=("layers.{i}.ffn.router.bias",),
    derived=tuple(f"{_LAYER}self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),
    defaults=common.DEFAULTS | {
        "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": Null(int),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": Null(list),
        "block_size": 256, "sliding_window": Null(int), "router_jitter_noise": 0.0,
        **dict.fromkeys(_PLACES, Number(1)),
    },
    aliases={"num_experts": "num_local_experts"}, omits=("attention_bias", "mlp_bias"), rope_theta=1_000_000.0,
    fixed={"sliding_window": (), "router_jitter_noise": (0.0,), "attention_bias": (False,)},
    requires=frozenset({"experts", "softmax gates", "lightning attention", "norms on the stream"}), allows=frozenset({"constant factors"}),
    differs=_differs, to_config=_to_config, from_config=_from_config, gguf=_gguf, without_gguf="all: llama.cpp has no lightning attention",
)  # fmt: skip
