"""Every trained tensor of a model, by name and shape, from the config alone.

Dimensions: V vocabulary, D hidden, H heads, K key/value heads, d head, F dense hidden, E experts, X expert hidden.
Those of latent attention have the names of `model.mla`.
Linear weights are (out, in). The router's selection bias is a buffer that no gradient trains, so it is not listed.

`alignment_problems` has the alignment that the grouped matrix products of experts require; it is checked when a recipe is loaded, by the
plan and by the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lmworks.recipe.mixers import MIXERS
from lmworks.recipe.parameter import Component, Parameter
from lmworks.recipe.schema.model import Mla, Model

Kind = tuple[str, str]
"""The mixer of a layer, and its feed-forward block (`Model.feed_forward`). Layers of one kind have tensors of equal shapes."""


def kind(model: Model, layer: int) -> Kind:
    """The kind of a layer."""
    return model.mixer(layer), model.feed_forward(layer)


def layers_by_kind(model: Model) -> dict[Kind, tuple[int, int]]:
    """The first layer of each kind, and the number of layers of it."""
    found: dict[Kind, tuple[int, int]] = {}
    for layer in range(model.num_hidden_layers or 0):
        own = kind(model, layer)
        first, number = found.get(own, (layer, 0))
        found[own] = (first, number + 1)
    return found


def parameters(model: Model) -> Iterator[Parameter]:
    """All trained tensors of a resolved model, in the order of the forward pass, those of multi-token prediction last."""
    assert model.vocab_size and model.hidden_size and model.num_hidden_layers is not None, "the model is not resolved"
    yield Parameter("embedding.weight", (model.vocab_size, model.hidden_size), "embedding")
    for layer in range(model.num_hidden_layers):
        yield from layer_parameters(model, layer)
    yield Parameter("norm.weight", (model.hidden_size,), "norms")
    if not model.tie_word_embeddings:
        yield Parameter("head.weight", (model.vocab_size, model.hidden_size), "head")
    for depth in range(model.mtp.num_nextn_predict_layers if model.mtp else 0):
        yield from mtp_parameters(model, depth)


def mtp_parameters(model: Model, depth: int) -> Iterator[Parameter]:
    """The trained tensors of one layer of multi-token prediction; the embedding and the head it uses are the model's."""
    assert model.hidden_size and model.num_hidden_layers is not None
    D, layer, start = model.hidden_size, model.num_hidden_layers + depth, f"mtp.{depth}."
    yield Parameter(start + "embedding_norm.weight", (D,), "norms", layer, mtp=True)
    yield Parameter(start + "hidden_norm.weight", (D,), "norms", layer, mtp=True)
    yield Parameter(start + "projection.weight", (D, 2 * D), "mtp projection", layer, mtp=True)
    for parameter in layer_parameters(model, layer):
        yield replace(parameter, name=parameter.name.replace(f"layers.{layer}.", start + "block.", 1), mtp=True)
    yield Parameter(start + "norm.weight", (D,), "norms", layer, mtp=True)


def layer_parameters(model: Model, layer: int) -> Iterator[Parameter]:
    """The trained tensors of one layer."""
    start = f"layers.{layer}."
    mixer, feeds = kind(model, layer)
    if mixer != "none":
        yield from _normed(model, "attention", start, layer, _mixer(model, mixer, start, layer))
    if feeds != "none":
        yield from _normed(model, "ffn", start, layer, _feed_forward(model, feeds, start, layer))


def _normed(model: Model, block: str, start: str, layer: int, own: Iterator[Parameter]) -> Iterator[Parameter]:
    """The tensors of a block between its norms."""
    assert model.hidden_size, "the model is not resolved"
    yield Parameter(f"{start}{block}_norm.weight", (model.hidden_size,), "norms", layer)
    yield from own
    if model.norm_position == "both":
        yield Parameter(f"{start}{block}_out_norm.weight", (model.hidden_size,), "norms", layer)


def _mixer(model: Model, mixer: str, start: str, layer: int) -> Iterator[Parameter]:
    if mixer != "attention":
        return MIXERS[mixer].parameters(model, start, layer)
    return _latent_attention(model, model.mla, start, layer) if model.mla else attention_parameters(model, start, layer)


def _feed_forward(model: Model, feeds: str, start: str, layer: int) -> Iterator[Parameter]:
    D, gated = model.hidden_size, model.hidden_act != "relu2"
    assert D and model.intermediate_size
    if feeds == "mlp":
        yield from _dense(start + "ffn.", D, model.intermediate_size, gated, "dense ffn", layer)
        return
    moe = model.moe
    assert moe is not None
    E, X, W = moe.n_routed_experts, moe.moe_intermediate_size, moe.moe_latent_size or D
    yield Parameter(start + "ffn.router.weight", (E, D), "router", layer)
    share = moe.num_experts_per_tok / E
    if gated:
        yield Parameter(start + "ffn.experts.gate", (E, X, W), "experts", layer, share)
    yield Parameter(start + "ffn.experts.up", (E, X, W), "experts", layer, share)
    yield Parameter(start + "ffn.experts.down", (E, W, X), "experts", layer, share)
    if moe.moe_latent_size:
        yield Parameter(start + "ffn.latent_down.weight", (W, D), "latent projections", layer)
        yield Parameter(start + "ffn.latent_up.weight", (D, W), "latent projections", layer)
    if moe.add_bias:
        yield Parameter(start + "ffn.router.logit_bias", (E,), "router", layer)
        for name, size in (("gate", X), ("up", X), ("down", W)):
            yield Parameter(f"{start}ffn.experts.{name}_bias", (E, size), "experts", layer, share)
    if moe.n_shared_experts:
        yield from _dense(start + "ffn.shared.", D, moe.n_shared_experts * X, gated, "shared experts", layer)
    if moe.shared_expert_gate:
        yield Parameter(start + "ffn.shared_gate.weight", (1, D), "router", layer)


def attention_parameters(model: Model, start: str, layer: int) -> Iterator[Parameter]:
    """The trained tensors of softmax attention, MHA, GQA or MQA."""
    D, H, K, d = model.hidden_size, model.num_attention_heads, model.num_key_value_heads, model.head_dim
    assert D and H and K and d, "the model is not resolved"
    gate = (("gate", H * d),) if model.attn_output_gate else ()
    for name, rows in (("query", H * d), ("key", K * d), ("value", K * d), *gate):
        yield Parameter(f"{start}attention.{name}.weight", (rows, D), "attention", layer)
        if model.attention_bias:
            yield Parameter(f"{start}attention.{name}.bias", (rows,), "attention", layer)
    yield Parameter(start + "attention.output.weight", (D, H * d), "attention", layer)
    if model.attention_output_bias:
        yield Parameter(start + "attention.output.bias", (D,), "attention", layer)
    if model.attention_sinks:
        yield Parameter(start + "attention.sinks", (H,), "attention", layer)
    if model.use_qk_norm:
        whole = model.qk_norm_over == "all_heads"
        yield Parameter(start + "attention.query_norm.weight", (H * d if whole else d,), "norms", layer)
        yield Parameter(start + "attention.key_norm.weight", (K * d if whole else d,), "norms", layer)


def _latent_attention(model: Model, mla: Mla, start: str, layer: int) -> Iterator[Parameter]:
    D, H, d = model.hidden_size, model.num_attention_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    assert D and H, "the model is not resolved"
    if mla.q_lora_rank:
        yield Parameter(start + "attention.query_down.weight", (mla.q_lora_rank, D), "attention", layer)
        yield Parameter(start + "attention.query_latent_norm.weight", (mla.q_lora_rank,), "norms", layer)
        yield Parameter(start + "attention.query_up.weight", (H * d, mla.q_lora_rank), "attention", layer)
    else:
        yield Parameter(start + "attention.query.weight", (H * d, D), "attention", layer)
    yield Parameter(start + "attention.kv_down.weight", (mla.kv_lora_rank + mla.qk_rope_head_dim, D), "attention", layer)
    yield Parameter(start + "attention.kv_latent_norm.weight", (mla.kv_lora_rank,), "norms", layer)
    yield Parameter(start + "attention.kv_up.weight", (H * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank), "attention", layer)
    yield Parameter(start + "attention.output.weight", (D, H * mla.v_head_dim), "attention", layer)


def _dense(start: str, D: int, F: int, gated: bool, component: Component, layer: int) -> Iterator[Parameter]:
    if gated:
        yield Parameter(start + "gate.weight", (F, D), component, layer)
    yield Parameter(start + "up.weight", (F, D), component, layer)
    yield Parameter(start + "down.weight", (D, F), component, layer)


def counted_parameters(model: Model) -> Iterator[tuple[Parameter, int]]:
    """`parameters` without repetition: those of the first layer of each kind, with the number of layers of it, and all others with 1."""
    assert model.num_hidden_layers
    outside = list(parameters(model.model_copy(update={"num_hidden_layers": 0, "mtp": None})))
    yield outside[0], 1  # the embedding
    for layer, number in layers_by_kind(model).values():
        yield from ((parameter, number) for parameter in layer_parameters(model, layer))
    yield from ((parameter, 1) for parameter in outside[1:])
    for depth in range(model.mtp.num_nextn_predict_layers if model.mtp else 0):
        yield from ((parameter, 1) for parameter in mtp_parameters(model, depth))


def count_parameters(model: Model) -> int:
    """Trained parameters; tied embeddings count once. Multi-token prediction is left out: what it adds is not there in use."""
    return sum(number * p.size for p, number in counted_parameters(model) if not p.mtp)


def count_active_parameters(model: Model) -> int:
    """Parameters that one token uses, the embedding matrix included, multi-token prediction left out."""
    return round(sum(number * p.size * p.active for p, number in counted_parameters(model) if not p.mtp))


_ALIGNMENT = 16  # bytes: every row of an operand must be a multiple


def alignment_problems(model: Model, tp: int, element: int) -> Iterator[str]:
    """The reasons why grouped products of `element`-byte numbers cannot run with experts sharded over `tp` ranks; none if they can."""
    if model.moe is None:
        return
    step = _ALIGNMENT // element
    assert model.hidden_size
    latent = model.moe.moe_latent_size
    name, width = ("moe.moe_latent_size", latent) if latent else ("hidden_size", model.hidden_size)
    if width % step:
        yield f"model.{name} {width} is not a multiple of {step}, which {_alignment_reason(element)}"
    own, rest = divmod(model.moe.moe_intermediate_size, tp)
    if own % step and not rest:
        size = f"model.moe.moe_intermediate_size {model.moe.moe_intermediate_size}" + (f" / tp {tp} = {own}" if tp > 1 else "")
        yield f"{size} is not a multiple of {step}, which {_alignment_reason(element)}; set {-(-own // step) * step * tp}"


def _alignment_reason(element: int) -> str:
    return f"grouped products of {8 * element}-bit numbers require"
