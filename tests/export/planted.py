"""Mistakes in the last layer of a model of transformers, planted after it was loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _norm_element(theirs: Any) -> None:
    _last(theirs).post_attention_layernorm.weight[3] *= 1.01


def _norm_bit(theirs: Any) -> None:
    weight = _last(theirs).post_attention_layernorm.weight
    weight[3] = torch.nextafter(weight[3], weight[3] + 1)


def _eps(theirs: Any) -> None:
    norm = _last(theirs).input_layernorm
    norm.variance_epsilon *= 0.1 if norm.variance_epsilon == 1e-5 else 10


def _queries_for_keys(theirs: Any) -> None:
    """As many heads of the queries as there are of keys."""
    attention = _last(theirs).self_attn
    query, key = attention.q_proj.weight, attention.k_proj.weight
    kept = query[: len(key)].clone()
    query[: len(key)] = key
    key.copy_(kept)


def _head_order(theirs: Any) -> None:
    attention = _last(theirs).self_attn
    heads = attention.q_proj.weight.unflatten(0, (-1, attention.head_dim))
    heads[:2] = heads[:2].flip(0).clone()


def _theta(theirs: Any) -> None:
    dim, rotated = _last(theirs).self_attn.head_dim, 2 * theirs.model.rotary_emb.inv_freq.numel()

    def rotate_otherwise(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        assert rotated <= dim
        cos, _sin = kwargs["position_embeddings"]
        theta = 10_000.0 if theirs.config.rope_parameters["rope_theta"] == 100_000 else 100_000.0
        inverse = 1.0 / theta ** (torch.arange(0, rotated, 2).double() / rotated)
        angles = torch.arange(cos.shape[-2]).double()[:, None] * inverse
        angles = torch.cat((angles, angles), -1)[None]
        return args, kwargs | {"position_embeddings": (angles.cos().to(cos.dtype), angles.sin().to(cos.dtype))}

    _last(theirs).self_attn.register_forward_pre_hook(rotate_otherwise, with_kwargs=True)


def _no_bias(theirs: Any) -> None:
    _last(theirs).self_attn.k_proj.bias.zero_()


def _value_bias_element(theirs: Any) -> None:
    _last(theirs).self_attn.v_proj.bias[0] += 1e-4


def _query_norm(theirs: Any) -> None:
    _last(theirs).self_attn.q_norm.weight[0] *= 1.01


def _no_query_norm(theirs: Any) -> None:
    _last(theirs).self_attn.q_norm = torch.nn.Identity()


def _expert_row(theirs: Any) -> None:
    _last(theirs).mlp.experts.down_proj[5, 7] *= 1.01


def _experts_swapped(theirs: Any) -> None:
    down = _last(theirs).mlp.experts.down_proj
    down[:2] = down[:2].flip(0).clone()


def _gate_and_up_swapped(theirs: Any) -> None:
    both = _last(theirs).mlp.experts.gate_up_proj
    both.copy_(both.roll(both.shape[1] // 2, 1))


def _scaling_factor(theirs: Any) -> None:
    mlp = _last(theirs).mlp
    for holder in (mlp, getattr(mlp, "gate", None)):
        if hasattr(holder, "routed_scaling_factor"):
            holder.routed_scaling_factor *= 1.001


def _gate_row(theirs: Any) -> None:
    mlp = _last(theirs).mlp
    mlp.gate_proj.weight[1, 1] *= 1.01


def _score_scale(theirs: Any) -> None:
    _last(theirs).self_attn.scaling *= 1.0001


def _head_row(theirs: Any) -> None:
    theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.clone())
    theirs.lm_head.weight[9, 2] += 1e-4


def _untied(theirs: Any) -> None:
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.lm_head.weight))


def _last(theirs: Any) -> Any:
    return theirs.model.layers[-1]


DENSE: dict[str, Callable[[Any], None]] = {
    "Q and K swapped": _queries_for_keys, "order of heads": _head_order, "theta": _theta, "eps": _eps, "norm element 1%": _norm_element,
    "norm element by one bit": _norm_bit, "one weight of the feed-forward 1%": _gate_row, "scale of scores 0.01%": _score_scale,
    "one weight of the head": _head_row, "tied": _untied,
}  # fmt: skip
SPARSE: dict[str, Callable[[Any], None]] = {
    "Q and K swapped": _queries_for_keys, "theta": _theta, "eps": _eps, "norm element 1%": _norm_element, "bias missing": _no_bias,
    "element of a bias": _value_bias_element, "element of the query norm": _query_norm, "query norm missing": _no_query_norm,
    "row of an expert": _expert_row, "experts swapped": _experts_swapped, "gate and up swapped": _gate_and_up_swapped,
    "scaling factor": _scaling_factor,
}  # fmt: skip
