"""The same model in Megatron-Core: the arguments (MODEL_ARGS) by which slime's Megatron builds it, and the names of its tensors, both ways.

Each argument has its reason. Megatron fuses query, key and value into one matrix, ordered by groups: the query heads of a group, then its
key, then its value; and gate and up into `linear_fc1`, gate first. Layers of multi-token prediction share the embedding and the head, of
which Hugging Face's format has copies. Names are without the prefix `module.` of wrappers. Source: Megatron-Core 0.16 and the converters
of slime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.recipe.schema.model import Model, Moe

CLASSES = ("Glm4MoeForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True)
class Argument:
    """One argument with its value (None for a switch) and its reason."""

    name: str
    value: str | None
    reason: str


def model_arguments(model: Model, family: str) -> list[Argument]:
    """The arguments for a model of one of `CLASSES`. Raises `UserError` for a model that slime's Megatron cannot build."""
    _refuse(model, family)
    assert model.num_attention_heads and model.num_key_value_heads
    found = [
        Argument("--num-layers", str(model.num_hidden_layers), "num_hidden_layers"),
        Argument("--hidden-size", str(model.hidden_size), "hidden_size"),
        Argument("--ffn-hidden-size", str(model.intermediate_size), "intermediate_size, of the dense layers"),
        Argument("--num-attention-heads", str(model.num_attention_heads), "num_attention_heads"),
        Argument("--group-query-attention", None, "key/value heads are stated on their own"),
        Argument("--num-query-groups", str(model.num_key_value_heads), "num_key_value_heads"),
        Argument("--kv-channels", str(model.head_dim), "head_dim, which need not be hidden_size over heads"),
        Argument("--vocab-size", str(model.vocab_size), "rows of the embedding; Megatron pads them, and slime removes the padding"),
        Argument("--max-position-embeddings", str(int(model.max_position_embeddings or 2048)), "max_position_embeddings"),
        Argument("--seq-length", str(min(int(model.max_position_embeddings or 2048), 4096)),
                 "a placeholder, since the length varies; slime's own of 4096 is refused for a shorter context"),
        Argument("--normalization", "RMSNorm", "the norm of all these classes"),
        Argument("--norm-epsilon", repr(model.rms_norm_eps), "rms_norm_eps: Megatron's default may be another"),
        Argument("--swiglu", None, "feed-forward layers with gates"),
        Argument("--disable-bias-linear", None, "no biases but those below"),
        Argument("--position-embedding-type", "rope", "rotary positions"),
        Argument("--rotary-base", str(int(model.rope.theta)), "rope_theta: it differs between models of one architecture"),
        Argument("--rotary-percent", repr(model.rope.partial_rotary_factor), "partial_rotary_factor"),
        Argument("--attention-dropout", "0", "the model has none; Megatron's default is 0.1"),
        Argument("--hidden-dropout", "0", "the model has none; Megatron's default is 0.1"),
        Argument("--attention-softmax-in-fp32", None, "as the model computes it"),
    ]  # fmt: skip
    if model.rope.scaling == "linear":
        found.append(Argument("--rotary-seq-len-interpolation-factor", str(int(model.rope.factor)), "rope_type linear"))
    if model.attention_bias:
        found.append(Argument("--add-qkv-bias", None, "attention_bias: on query, key and value alone"))
    if model.use_qk_norm:
        found.append(Argument("--qk-layernorm", None, "use_qk_norm: without it Megatron drops these weights"))
    if not model.tie_word_embeddings:
        found.append(Argument("--untie-embeddings-and-output-weights", None, "the head is a matrix of its own"))
    if model.moe is not None:
        found += _experts(model, model.moe)
    if model.mtp is not None:
        depth = model.mtp.num_nextn_predict_layers
        found.append(Argument("--mtp-num-layers", str(depth), "layers of multi-token prediction: without this they are lost in silence"))
    return found


def _experts(model: Model, moe: Moe) -> list[Argument]:
    dense, layers = moe.first_k_dense_replace, model.num_hidden_layers or 0
    found = [
        Argument("--num-experts", str(moe.n_routed_experts), "routed experts"),
        Argument("--moe-layer-freq", f"[0]*{dense}+[1]*{layers - dense}", "first_k_dense_replace: which layers have experts"),
        Argument("--moe-ffn-hidden-size", str(moe.moe_intermediate_size), "moe_intermediate_size"),
        Argument("--moe-router-topk", str(moe.num_experts_per_tok), "num_experts_per_tok"),
        Argument("--moe-router-score-function", moe.scoring_func, "gates of the router"),
        Argument("--moe-router-dtype", "fp32", "as it was trained: rounding sends tokens to other experts"),
        Argument("--moe-router-load-balancing-type", "seq_aux_loss", "with weight 0: no loss beside the policy's"),
        Argument("--moe-aux-loss-coeff", "0", "tuning changes the experts' loads little, and a loss would move the policy"),
        Argument("--moe-token-dispatcher-type", "alltoall", "tokens are sent to the ranks of their experts"),
        Argument("--moe-grouped-gemm", None, "the experts of a rank are one call"),
        Argument("--moe-permute-fusion", None, "fewer passes over the tokens"),
    ]
    if moe.n_shared_experts:
        width = moe.n_shared_experts * moe.moe_intermediate_size
        found.append(Argument("--moe-shared-expert-intermediate-size", str(width), "n_shared_experts times moe_intermediate_size"))
    if moe.scoring_func == "sigmoid":
        found += [
            Argument("--moe-router-pre-softmax", None, "gates are computed over all experts before the selection"),
            Argument("--moe-router-enable-expert-bias", None, "the selection bias decides which experts are selected"),
            Argument("--moe-router-bias-update-rate", "0", "the selection bias stays as it is, and equal to that of the rollouts"),
            Argument("--moe-router-topk-scaling-factor", f"{moe.routed_scaling_factor:g}", "routed_scaling_factor"),
        ]
    if moe.topk_group < moe.n_group:
        found += [
            Argument("--moe-router-num-groups", str(moe.n_group), "n_group"),
            Argument("--moe-router-group-topk", str(moe.topk_group), "topk_group"),
        ]
    return found


def _refuse(model: Model, family: str) -> None:
    if family not in CLASSES:
        raise UserError(f"slime's loader has no class that equals {family} here; it trains {', '.join(CLASSES)}")
    moe = model.moe
    for wrong, what in (
        (model.sliding_window is not None, "a sliding window"),
        (model.rope.scaling not in ("none", "linear"), f"rope scaling {model.rope.scaling}"),
        (model.rope.theta % 1 != 0, f"rope_theta {model.rope.theta}, no whole number"),
        (model.rope.scaling == "linear" and model.rope.factor % 1 != 0, f"a rope factor of {model.rope.factor}, no whole number"),
        (moe is not None and not moe.norm_topk_prob, "weights of experts that are not normalized"),
        (moe is not None and moe.num_experts_per_tok == 1, "one expert per token, whose weight Megatron does not normalize"),
    ):
        if wrong:
            raise UserError(f"the model has {what}, which slime's Megatron computes differently or not at all; it cannot be handed over")


@dataclass(frozen=True)
class Mapped:
    """One tensor of Megatron with the Hugging Face tensors that it consists of, in order: one (copy), gate and up (rows), or query, key and
    value (qkv)."""

    megatron: str
    huggingface: tuple[str, ...]
    kind: Literal["copy", "rows", "qkv"] = "copy"


def mapping(model: Model, *, transformer_engine: bool = True) -> list[Mapped]:
    """All tensors of a model in one of the classes that slime trains. With `transformer_engine`, as slime builds the model, norms are fused
    into the linear layer after them, and the experts of a layer are one module; otherwise the names of Megatron's own layers."""
    assert model.num_hidden_layers is not None
    found = [Mapped("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
             Mapped("decoder.final_layernorm.weight", ("model.norm.weight",))]  # fmt: skip
    if not model.tie_word_embeddings:
        found.append(Mapped("output_layer.weight", ("lm_head.weight",)))
    for layer in range(model.num_hidden_layers):
        found += _layer(model, layer, f"decoder.layers.{layer}.", transformer_engine)
    for depth in range(model.mtp.num_nextn_predict_layers if model.mtp else 0):
        layer = model.num_hidden_layers + depth
        ours, theirs = f"mtp.layers.{depth}.", f"model.layers.{layer}."
        found += [Mapped(f"{ours}{name}.weight", (f"{theirs}{name}.weight",)) for name in ("enorm", "hnorm", "eh_proj")]
        found += _layer(model, layer, f"{ours}transformer_layer.", transformer_engine)
        found.append(Mapped(f"{ours}final_layernorm.weight", (f"{theirs}shared_head.norm.weight",)))
    return found


def copies(model: Model) -> dict[str, str]:
    """Tensors of the Hugging Face directory that Megatron lacks because they are copies: name -> name of the original."""
    assert model.num_hidden_layers is not None
    layers = range(model.num_hidden_layers, model.num_hidden_layers + (model.mtp.num_nextn_predict_layers if model.mtp else 0))
    head = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
    found = {f"model.layers.{layer}.embed_tokens.weight": "model.embed_tokens.weight" for layer in layers}
    return found | {f"model.layers.{layer}.shared_head.head.weight": head for layer in layers}


def _layer(model: Model, layer: int, ours: str, fused: bool) -> Iterator[Mapped]:
    theirs = f"model.layers.{layer}."
    attention = f"{ours}self_attention."
    experts = model.feed_forward(layer) == "moe"
    yield Mapped(
        f"{attention}linear_qkv.layer_norm_weight" if fused else f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",)
    )
    for kind in ("weight", "bias") if model.attention_bias else ("weight",):
        yield Mapped(f"{attention}linear_qkv.{kind}", tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv"), "qkv")
    if model.use_qk_norm:
        for part in "qk":
            yield Mapped(f"{attention}{part}_layernorm.weight", (f"{theirs}self_attn.{part}_norm.weight",))
    yield Mapped(f"{attention}linear_proj.weight", (f"{theirs}self_attn.o_proj.weight",))
    norm = "mlp.linear_fc1.layer_norm_weight" if fused and not experts else "pre_mlp_layernorm.weight"
    yield Mapped(ours + norm, (f"{theirs}post_attention_layernorm.weight",))
    if not experts:
        yield from _swiglu(f"{ours}mlp.linear_fc{{}}.weight", f"{theirs}mlp.")
        return
    assert model.moe is not None
    yield Mapped(f"{ours}mlp.router.weight", (f"{theirs}mlp.gate.weight",))
    if model.moe.scoring_func == "sigmoid":
        yield Mapped(f"{ours}mlp.router.expert_bias", (f"{theirs}mlp.gate.e_score_correction_bias",))
    for expert in range(model.moe.n_routed_experts):
        name = f"linear_fc{{}}.weight{expert}" if fused else f"local_experts.{expert}.linear_fc{{}}.weight"
        yield from _swiglu(f"{ours}mlp.experts.{name}", f"{theirs}mlp.experts.{expert}.")
    if model.moe.n_shared_experts:
        yield from _swiglu(f"{ours}mlp.shared_experts.linear_fc{{}}.weight", f"{theirs}mlp.shared_experts.")


def _swiglu(ours: str, theirs: str) -> Iterator[Mapped]:
    yield Mapped(ours.format(1), (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"), "rows")
    yield Mapped(ours.format(2), (f"{theirs}down_proj.weight",))


def to_megatron(one: Mapped, tensors: Mapping[str, Tensor], model: Model) -> Tensor:
    """The tensor of Megatron. Shapes: query (heads x d, D), key and value (groups x d, D); result ((heads + 2 groups) x d, D)."""
    parts = [tensors[name] for name in one.huggingface]
    if one.kind == "copy":
        return parts[0]
    if one.kind == "rows":
        return torch.cat(parts)
    groups = model.num_key_value_heads
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def from_megatron(one: Mapped, tensor: Tensor, model: Model) -> dict[str, Tensor]:
    """The Hugging Face tensors, by name; the inverse of `to_megatron`."""
    if one.kind == "copy":
        return {one.huggingface[0]: tensor}
    if one.kind == "rows":
        return dict(zip(one.huggingface, tensor.chunk(2), strict=True))
    heads, groups, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    assert heads and groups and dim
    rows = tensor.unflatten(0, (groups, -1)).split([heads // groups * dim, dim, dim], dim=1)
    return {name: part.flatten(0, 1) for name, part in zip(one.huggingface, rows, strict=True)}


def require_bijection(names: Mapping[str, tuple[int, ...]], model: Model) -> int:
    """Check that every tensor of a Hugging Face directory (name -> shape) has exactly one place in Megatron, and that nothing is missing.

    Returns the number of tensors of Megatron. Raises `UserError` with the first name that has no counterpart.
    """
    pairs = mapping(model)
    used = [name for one in pairs for name in one.huggingface]
    assert len(used) == len(set(used)) and len({one.megatron for one in pairs}) == len(pairs), "the table names a tensor twice"
    known = {*used, *copies(model)}
    for what, odd in (("no counterpart in Megatron", names.keys() - known), ("no tensor in the directory", set(used) - names.keys())):
        if odd:
            raise UserError(f"{min(odd)} has {what} ({len(odd)} such tensors); the model cannot be handed over")
    for one in pairs:
        if one.kind == "qkv" and len({names[name][1:] for name in one.huggingface}) > 1:
            raise UserError(f"{one.huggingface[0]} and its key and value have different widths; the model cannot be handed over")
    return len(pairs)
