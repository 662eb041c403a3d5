"""Shared by classes with Mamba-2: names of tensors, sizes from config.json, and llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import common
from lmworks.recipe.families.family import Form, Gguf, Names, NoClass, said
from lmworks.recipe.schema.model import Model

PARTS = (("input.weight", "in_proj.weight"), ("projection.weight", "out_proj.weight"), ("dt_bias", "dt_bias"), ("A_log", "A_log"),
         ("skip", "D"), ("conv.bias", "conv1d.bias"), ("conv.weight", "conv1d.weight"), ("gate_norm.weight", "norm.weight"))  # fmt: skip
"""Our names within Mamba-2, and those of the classes."""
FULL, LINEAR = "full_attention", "linear_attention"
OLDER = {"attention": FULL, "mamba": LINEAR}
"""Kinds of layers in config.json as published, which llama.cpp's converter knows -> those of newer versions of `transformers`."""

_OURS = "layers.{i}.mamba."
NO_LIMIT = (None, (0.0, math.inf), [0.0, math.inf], [0.0, {"__float__": "Infinity"}], [0.0, "inf"])
"""Time steps without limits, as JSON may say it, which has no infinity."""


def names(start: str) -> Names:
    """The names of the tensors of a layer with Mamba-2 in place of attention; `start` is that of the class."""
    return tuple((_OURS + ours, start + theirs) for ours, theirs in PARTS)


def refuse_limits(limit: Any) -> None:
    """Raise `UserError` for a time step with limits."""
    if limit not in NO_LIMIT:
        raise UserError(f"config.json has {said('time_step_limit', limit)}; lmworks supports time steps without limits")


def layer_types(types: Any, layers: int, known: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of all layers of a config.json, by their newer names. Raises `UserError` for others."""
    found = [OLDER.get(one, one) for one in types if isinstance(one, str)] if isinstance(types, list) else []
    if len(found) != layers or any(one not in known for one in found):
        raise UserError(f"config.json has layer_types that are not {layers} of {' and '.join(known)}; lmworks cannot read it")
    return tuple(found)


def inner_width_differs(model: Model) -> str | None:
    """Why a class whose inner width is `mamba_expand` times the width does not express the model, or None."""
    mamba = model.mamba
    assert mamba and model.hidden_size
    if mamba.inner_size % model.hidden_size:
        return f"the inner width of Mamba-2 (num_heads x head_dim {mamba.inner_size}) is no multiple of hidden_size {model.hidden_size}"
    return None


def gated_norm_differs(model: Model) -> str | None:
    """Why a class with a norm on the product with the gate, over the groups of B and C, does not express the model, or None."""
    mamba = model.mamba
    assert mamba
    if mamba.gate_norm != "after_gate":
        return f"its Mamba-2 has no norm on the product with the gate (mamba.gate_norm {mamba.gate_norm})"
    if mamba.norm_groups != mamba.n_groups:
        return f"its gated norm has {mamba.norm_groups} groups and not those of B and C, {mamba.n_groups} (mamba.norm_groups)"
    return None


def _negative_decay(tensor: Any, _: Model) -> Any:
    return -tensor.exp().unsqueeze(1)


def _log_decay(tensor: Any, _: Model) -> Any:
    return (-tensor.squeeze(1)).log()


def _grouped(tensor: Any, model: Model) -> Any:
    assert model.mamba
    return tensor.unflatten(0, (model.mamba.n_groups, -1))


_FORMS = {
    _OURS + "A_log": Form(_negative_decay, _log_decay),
    _OURS + "skip": Form(lambda tensor, _: tensor.unsqueeze(1), lambda tensor, _: tensor.squeeze(1)),
    _OURS + "conv.weight": Form(lambda tensor, _: tensor.squeeze(1), lambda tensor, _: tensor.unsqueeze(1)),
    _OURS + "gate_norm.weight": Form(_grouped, lambda tensor, _: tensor.flatten()),
}  # fmt: skip
_GGUF_NAMES: Names = (
    (_OURS + "input.weight", "blk.{i}.ssm_in.weight"), (_OURS + "projection.weight", "blk.{i}.ssm_out.weight"),
    (_OURS + "dt_bias", "blk.{i}.ssm_dt.bias"), (_OURS + "A_log", "blk.{i}.ssm_a"), (_OURS + "skip", "blk.{i}.ssm_d"),
    (_OURS + "conv.bias", "blk.{i}.ssm_conv1d.bias"), (_OURS + "conv.weight", "blk.{i}.ssm_conv1d.weight"),
    (_OURS + "gate_norm.weight", "blk.{i}.ssm_norm.weight"),
)  # fmt: skip


def gguf(model: Model, architecture: str, metadata: Mapping[str, Any], further: Names = (), *, interleaved_rope: bool = False) -> Gguf:
    """An architecture of llama.cpp with Mamba-2 in some layers and attention in others. Raises `NoClass` without a layer of attention
    and without a bias of the convolution."""
    mamba, layers = model.mamba, model.num_hidden_layers or 0
    assert mamba and model.hidden_size
    if not any(model.attends(layer) for layer in range(layers)):
        raise NoClass("no layer has attention (layer_types), whose heads llama.cpp wants to know")
    if not mamba.conv_bias:
        raise NoClass("the convolution of its Mamba-2 has no bias (mamba.conv_bias), and llama.cpp's has one")
    sizes = {
        "conv_kernel": mamba.conv_kernel, "state_size": mamba.state_size, "group_count": mamba.n_groups, "inner_size": mamba.inner_size,
        "time_step_rank": mamba.num_heads,
        "head_count_kv": [model.num_key_value_heads if model.attends(layer) else 0 for layer in range(layers)],
    }  # fmt: skip
    found = common.gguf(model, architecture, interleaved_rope=interleaved_rope, metadata=sizes | dict(metadata))
    return Gguf(found.architecture, found.interleaved_rope, found.metadata, (*_GGUF_NAMES, *further), _FORMS)


def from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """`layer_types` and `mamba` from the metadata of such a file."""
    heads = values.get("attention.head_count_kv")
    types = [FULL if one else LINEAR for one in (heads if isinstance(heads, list) else [heads])]
    count, inner, groups = values["ssm.time_step_rank"], values["ssm.inner_size"], values["ssm.group_count"]
    mamba = {
        "num_heads": count, "head_dim": inner // count, "n_groups": groups, "norm_groups": groups, "state_size": values["ssm.state_size"],
        "conv_kernel": values["ssm.conv_kernel"], "conv_bias": True,
    }  # fmt: skip
    return {"layer_types": common.repeating(types), "mamba": mamba}
