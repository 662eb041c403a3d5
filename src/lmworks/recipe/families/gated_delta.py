"""Shared by Qwen's classes with the gated delta rule (Qwen3-Next, Qwen3.5): names of tensors, keys of config.json, and llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Form, Gguf, Names, NoClass, Null
from lmworks.recipe.schema.model import Model

_FULL, _LINEAR, _INTERVAL = "full_attention", "linear_attention", 4
_OURS, _THEIRS, _ATTENTION = "layers.{i}.gated_delta.", "model.layers.{i}.linear_attn.", "model.layers.{i}.self_attn."

ATTENTION: Names = (
    ("layers.{i}.attention.query.weight", f"{_ATTENTION}q_proj.weight"),
    ("layers.{i}.attention.gate.weight", f"{_ATTENTION}q_proj.weight"),
    *((f"layers.{{i}}.attention.{ours}.weight", f"{_ATTENTION}{theirs}_proj.weight")
      for ours, theirs in (("key", "k"), ("value", "v"), ("output", "o"))),
    *common.QK_NORMS,
)  # fmt: skip
"""Of each head the rows of the query, then those of the gate."""
RECURRENCE: Names = (
    *((f"{_OURS}{part}_conv.weight", f"{_THEIRS}conv1d.weight") for part in ("query", "key", "value")),
    *((f"{_OURS}{name}", f"{_THEIRS}{name}") for name in ("dt_bias", "A_log", "norm.weight")),
    (f"{_OURS}output.weight", f"{_THEIRS}out_proj.weight"),
)  # fmt: skip

def heads(model: Model) -> int:
    """The query heads, by which a class has queries and gates in one matrix."""
    return model.num_attention_heads or 1


def key_heads(model: Model) -> int:
    """The key heads, by which Qwen3-Next has the parts of one matrix."""
    return model.gated_delta.num_key_heads if model.gated_delta else 1


GROUPS = {f"{_ATTENTION}q_proj.weight": heads}
DEFAULTS = common.DEFAULTS | {
    "head_dim": 256, "max_position_embeddings": 32768, "attention_bias": False, "layer_types": Null(list),
    "full_attention_interval": Extra(int), "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip


def layers_to_config(model: Model) -> dict[str, Any]:
    """The kinds of layers, and the sizes of those with the gated delta rule."""
    sizes = model.gated_delta
    assert sizes is not None
    return {
        "layer_types": [model.layer_type(layer) for layer in range(model.num_hidden_layers or 0)],
        # transformers goes by layer_types, and llama.cpp's converter by this alone
        **({"full_attention_interval": len(model.layer_types)} if _is_periodic(model) else {}),
        "linear_conv_kernel_dim": sizes.conv_kernel, "linear_key_head_dim": sizes.key_head_dim,
        "linear_value_head_dim": sizes.value_head_dim, "linear_num_key_heads": sizes.num_key_heads,
        "linear_num_value_heads": sizes.num_value_heads,
    }  # fmt: skip


def _is_periodic(model: Model) -> bool:
    """Whether each few layers the last one has full attention."""
    return model.layer_types == (_LINEAR,) * (len(model.layer_types) - 1) + (_FULL,)


def layers_from_config(config: dict[str, Any]) -> dict[str, Any]:
    """`layer_types` as the shortest repeating pattern, `gated_delta`, and what all attention of the class has."""
    layers, types = config["num_hidden_layers"], config["layer_types"]
    if types is None:
        interval = _INTERVAL if config["full_attention_interval"] is None else config["full_attention_interval"]
        if interval <= 0:
            raise UserError(f"config.json has full_attention_interval {interval}, which must be positive")
        types = [_LINEAR if (layer + 1) % interval else _FULL for layer in range(layers)]
    if len(types) != layers or any(one not in (_FULL, _LINEAR) for one in types):
        raise UserError(f"config.json has layer_types that are not {layers} of {_FULL} and {_LINEAR}; lmworks cannot read it")
    if _LINEAR not in types:
        raise UserError("config.json has no layer of linear_attention; lmworks reads this class only with the gated delta rule")
    sizes = {
        "num_key_heads": config["linear_num_key_heads"], "num_value_heads": config["linear_num_value_heads"],
        "key_head_dim": config["linear_key_head_dim"], "value_head_dim": config["linear_value_head_dim"],
        "conv_kernel": config["linear_conv_kernel_dim"],
    }  # fmt: skip
    return {"layer_types": common.repeating(types), "gated_delta": sizes, "use_qk_norm": True, "attn_output_gate": True}


def _columns(order: Callable[[Any, Model], Any]) -> Callable[[Any, Model], Any]:
    return lambda tensor, model: order(tensor.transpose(0, 1), model).transpose(0, 1)


def _tiled(tensor: Any, model: Model) -> Any:
    """Rows of value heads, those of a key head together, in the order of llama.cpp's Qwen3.5: the first of each key head, the second..."""
    return tensor.unflatten(0, (key_heads(model), _repeats(model), -1)).transpose(0, 1).flatten(0, 2)


def _grouped(tensor: Any, model: Model) -> Any:
    return tensor.unflatten(0, (_repeats(model), key_heads(model), -1)).transpose(0, 1).flatten(0, 2)


def _repeats(model: Model) -> int:
    return model.gated_delta.num_value_heads // model.gated_delta.num_key_heads if model.gated_delta else 1


def _decay(tensor: Any, _: Model) -> Any:
    return -tensor.exp()


def _log_decay(tensor: Any, _: Model) -> Any:
    return (-tensor).log()


def _filters(tensor: Any, _: Model) -> Any:
    return tensor.squeeze(1)


def _depthwise(tensor: Any, _: Model) -> Any:
    return tensor.unsqueeze(1)


def _both(first: Callable[[Any, Model], Any], second: Callable[[Any, Model], Any]) -> Callable[[Any, Model], Any]:
    return lambda tensor, model: second(first(tensor, model), model)


_FORMS = {
    f"{_OURS}A_log": Form(_decay, _log_decay),
    **{f"{_OURS}{part}_conv.weight": Form(_filters, _depthwise) for part in ("query", "key", "value")},
}
_TILED = _FORMS | {
    **{f"{_OURS}{part}.weight": Form(_tiled, _grouped) for part in ("value", "gate", "beta", "decay")},
    f"{_OURS}dt_bias": Form(_tiled, _grouped), f"{_OURS}A_log": Form(_both(_decay, _tiled), _both(_grouped, _log_decay)),
    f"{_OURS}value_conv.weight": Form(_both(_filters, _tiled), _both(_grouped, _depthwise)),
    f"{_OURS}output.weight": Form(_columns(_tiled), _columns(_grouped)),
}  # fmt: skip
_GGUF_NAMES: Names = (
    (f"{_OURS}A_log", "blk.{i}.ssm_a"), (f"{_OURS}dt_bias", "blk.{i}.ssm_dt.bias"),
    *((f"{_OURS}{part}.weight", "blk.{i}.attn_qkv.weight") for part in ("query", "key", "value")),
    (f"{_OURS}gate.weight", "blk.{i}.attn_gate.weight"),
)  # fmt: skip
NOT_IN_GGUF = "other orders of layers, keys and values of different widths, rms_norm_eps other than 1e-6"
_EPS = 1e-6  # of the lengths of queries and keys in the class, for which llama.cpp has that of the norms


def recurrent_gguf(model: Model, architecture: str, *, tiled: bool) -> Gguf:
    """An architecture of llama.cpp with the gated delta rule. Raises `NoClass` for what it does not have."""
    sizes, layers = model.gated_delta, model.num_hidden_layers
    assert sizes is not None and layers and model.head_dim
    if sizes.key_head_dim != sizes.value_head_dim:
        raise NoClass("its keys and values have different widths (gated_delta.value_head_dim), and llama.cpp has one for both")
    if model.rms_norm_eps != _EPS:
        raise NoClass(f"rms_norm_eps is not {_EPS:g}, and llama.cpp takes it for the lengths of queries and keys too")
    if not _is_periodic(model):
        raise NoClass("its layers of full attention are not each few layers (layer_types), as llama.cpp has them")
    metadata: dict[str, Any] = {
        "conv_kernel": sizes.conv_kernel, "state_size": sizes.key_head_dim, "group_count": sizes.num_key_heads,
        "time_step_rank": sizes.num_value_heads, "inner_size": sizes.value_size, "full_attention_interval": len(model.layer_types),
        "recurrent_layers": [model.layer_type(layer) == _LINEAR for layer in range(layers)],
    }  # fmt: skip
    if tiled:  # text has one position where images have three: any sections will do that cover all frequencies
        pairs = int(model.head_dim * model.rope.partial_rotary_factor) // 2
        metadata["dimension_sections"] = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    if (moe := model.moe) is not None:
        if moe.first_k_dense_replace or not moe.norm_topk_prob:
            raise NoClass("its first layers are dense, or the weights of its experts are not normalized, unlike those of llama.cpp's class")
        metadata |= {
            "expert_count": moe.n_routed_experts, "expert_used_count": moe.num_experts_per_tok,
            "expert_feed_forward_length": moe.moe_intermediate_size,
            "expert_shared_feed_forward_length": moe.n_shared_experts * moe.moe_intermediate_size,
        }  # fmt: skip
    found = common.gguf(model, architecture, metadata=metadata)
    return replace(found, names=_GGUF_NAMES, forms=_TILED if tiled else _FORMS)


def recurrent_from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `Model` from the metadata of such a file."""
    layers, interval = values["block_count"], values.get("full_attention_interval", _INTERVAL)
    recurrent = values.get("attention.recurrent_layers", [(layer + 1) % interval != 0 for layer in range(layers)])
    config = {
        "num_hidden_layers": layers, "layer_types": [_LINEAR if one else _FULL for one in recurrent],
        "linear_num_key_heads": values["ssm.group_count"], "linear_num_value_heads": values["ssm.time_step_rank"],
        "linear_key_head_dim": values["ssm.state_size"], "linear_value_head_dim": values["ssm.state_size"],
        "linear_conv_kernel_dim": values["ssm.conv_kernel"],
    }  # fmt: skip
    found = layers_from_config(config)
    if "expert_count" in values:
        found |= common.qwen_experts_from_config({
            "num_experts": values["expert_count"], "num_experts_per_tok": values["expert_used_count"],
            "moe_intermediate_size": values["expert_feed_forward_length"],
            "shared_expert_intermediate_size": values["expert_shared_feed_forward_length"],
        })  # fmt: skip
    return found
