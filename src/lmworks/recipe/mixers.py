"""What the recipe and the plan know of mixers other than attention: trained tensors, operations, activations.

A kind of layer is added in five places, each one line beside the file of the kind itself: its section, with its states, in
`schema.model.SECTIONS` and as a field of `Model`; its `Mixer` here in `MIXERS`; its module in `lmworks.model.mixers`; initial values that
are not normal in `lmworks.model.init`; and its sizes in `lmworks.preflight.small_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

from lmworks.recipe.parameter import Parameter
from lmworks.recipe.schema.model import Model


@dataclass(frozen=True)
class Mixer:
    """parameters: the trained tensors of a layer from (model, start of their names, layer)
    flops: operations of the forward pass per token beyond 2 per parameter
    saved: numbers per token that a layer saves for the backward pass: all, and those that are outputs of matrix products
    shards: the number that `layout.tp` must divide, by the name of its key; empty if the layer is not split
    """

    parameters: Callable[[Model, str, int], Iterator[Parameter]]
    flops: Callable[[Model], float]
    saved: Callable[[Model], tuple[float, float]]
    shards: Callable[[Model], dict[str, int]]


def _gated_delta_parameters(model: Model, start: str, layer: int) -> Iterator[Parameter]:
    sizes, D = model.gated_delta, model.hidden_size
    assert sizes is not None and D
    keys, values, H, W = sizes.key_size, sizes.value_size, sizes.num_value_heads, sizes.conv_kernel
    for name, rows in (("query", keys), ("key", keys), ("value", values), ("gate", values), ("beta", H), ("decay", H)):
        yield Parameter(f"{start}attention.{name}.weight", (rows, D), "attention", layer)
    for name, rows in (("query", keys), ("key", keys), ("value", values)):
        yield Parameter(f"{start}attention.{name}_conv.weight", (rows, 1, W), "attention", layer)
    yield Parameter(start + "attention.dt_bias", (H,), "attention", layer)
    yield Parameter(start + "attention.A_log", (H,), "attention", layer)
    yield Parameter(start + "attention.norm.weight", (sizes.value_head_dim,), "norms", layer)
    yield Parameter(start + "attention.output.weight", (D, values), "attention", layer)


def _gated_delta_flops(model: Model) -> float:
    """Of the recurrence: what the state predicts for the key, the update, and what the query reads; chunks compute more, in products."""
    sizes = model.gated_delta
    assert sizes is not None
    return 3 * 2.0 * sizes.num_value_heads * sizes.key_head_dim * sizes.value_head_dim


def _gated_delta_saved(model: Model) -> tuple[float, float]:
    """Inputs of the convolution and its outputs, of which fp32 copies are normed; gate; solutions of the chunk, decays and scores."""
    sizes = model.gated_delta
    assert sizes is not None
    keys, values, H = sizes.key_size, sizes.value_size, sizes.num_value_heads
    products = 2.0 * keys + 2 * values + 2 * H
    chunk, repeats = 64, sizes.num_value_heads / sizes.num_key_heads
    inside = 3 * H * chunk + 4 * repeats * keys + 6 * values
    return products + 4 * keys + 2 * values + inside, products


def _gated_delta_shards(model: Model) -> dict[str, int]:
    assert model.gated_delta is not None
    return {"gated_delta.num_key_heads": model.gated_delta.num_key_heads}


def _mamba_parameters(model: Model, start: str, layer: int) -> Iterator[Parameter]:
    mamba, D, start = model.mamba, model.hidden_size, start + "attention."
    assert mamba is not None and D
    yield Parameter(start + "input.weight", (mamba.inner_size + mamba.conv_size + mamba.num_heads, D), "attention", layer)
    yield Parameter(start + "conv.weight", (mamba.conv_size, 1, mamba.conv_kernel), "attention", layer)
    if mamba.conv_bias:
        yield Parameter(start + "conv.bias", (mamba.conv_size,), "attention", layer)
    for name in ("dt_bias", "A_log", "skip"):
        yield Parameter(start + name, (mamba.num_heads,), "attention", layer)
    if mamba.gate_norm != "none":
        yield Parameter(start + "gate_norm.weight", (mamba.inner_size,), "norms", layer)
    yield Parameter(start + "projection.weight", (D, mamba.inner_size), "attention", layer)


def _mamba_flops(model: Model) -> float:
    """Of the recurrence: the update of the state, and what C reads; chunks compute more, in products."""
    assert model.mamba is not None
    return 2 * 2.0 * model.mamba.inner_size * model.mamba.state_size


def _mamba_saved(model: Model) -> tuple[float, float]:
    """The projection, the convolution and SiLU; in fp32 (two numbers each) inputs times time steps and outputs; decays and scores of a
    chunk, once as decays and once weighted."""
    mamba = model.mamba
    assert mamba is not None
    products = float(mamba.inner_size + mamba.conv_size + mamba.num_heads)
    return products + 2 * mamba.conv_size + 10 * mamba.inner_size + 4 * mamba.num_heads * _CHUNK, products


def _hybrid_parameters(model: Model, start: str, layer: int) -> Iterator[Parameter]:
    from lmworks.recipe.parameters import attention_parameters

    yield from attention_parameters(model, start, layer)
    for parameter in _mamba_parameters(model, start, layer):
        yield replace(parameter, name=parameter.name.replace("attention.", "attention.mamba.", 1))


def _lightning_parameters(model: Model, start: str, layer: int) -> Iterator[Parameter]:
    D, size, start = model.hidden_size, (model.num_attention_heads or 0) * (model.head_dim or 0), start + "attention."
    assert D and size
    yield Parameter(start + "qkv.weight", (3 * size, D), "attention", layer)
    yield Parameter(start + "gate.weight", (size, D), "attention", layer)
    yield Parameter(start + "output_norm.weight", (size,), "norms", layer)
    yield Parameter(start + "projection.weight", (D, size), "attention", layer)


def _lightning_flops(model: Model) -> float:
    assert model.num_attention_heads and model.head_dim
    return 2 * 2.0 * model.num_attention_heads * model.head_dim**2


def _lightning_saved(model: Model) -> tuple[float, float]:
    """The projections, SiLU of queries, keys and values and their fp32 copies; outputs; decays and scores of a chunk."""
    heads, size = model.num_attention_heads or 0, (model.num_attention_heads or 0) * (model.head_dim or 0)
    return 4.0 * size + 3 * size * 3 + 6 * size + 4 * heads * _CHUNK, 4.0 * size


def _lightning_shards(model: Model) -> dict[str, int]:
    return {"num_attention_heads": model.num_attention_heads or 0}


def _whole(_: Model) -> dict[str, int]:
    """Not split over `tp`: one matrix gives all parts of all heads."""
    return {}


_CHUNK = 64  # tokens of a chunk; see lmworks.model.ssd
MIXERS: dict[str, Mixer] = {
    "gated_delta": Mixer(_gated_delta_parameters, _gated_delta_flops, _gated_delta_saved, _gated_delta_shards),
    "mamba": Mixer(_mamba_parameters, _mamba_flops, _mamba_saved, _whole),
    "hybrid": Mixer(_hybrid_parameters, _mamba_flops, _mamba_saved, _whole),
    "lightning": Mixer(_lightning_parameters, _lightning_flops, _lightning_saved, _lightning_shards),
}
"""By the names of `schema.model.SECTIONS`."""


def tp_problems(model: Model, tp: int) -> list[str]:
    """The reasons why the matrices of a model cannot be sharded over `tp` ranks; empty if they can."""
    sizes = {name: getattr(model, name) for name in ("num_attention_heads", "intermediate_size", "vocab_size")}
    if not model.mla:
        sizes["num_key_value_heads"] = model.num_key_value_heads
    if model.moe:
        sizes["moe.moe_intermediate_size"] = model.moe.moe_intermediate_size
    for mixer in model.mixers:
        sizes |= MIXERS[mixer].shards(model)
    found = [f"tp {tp} does not divide model.{name} {size}" for name, size in sizes.items() if (size or 0) % tp]
    if tp > 1 and (section := unsplit(model)) is not None:
        found.append(f"tp {tp} splits heads, and those of model.{section} are not split; set tp 1")
    return found


def unsplit(model: Model) -> str | None:
    """The section of layers whose heads are not split over the ranks of `tp`; None if there is none."""
    return next((section for section in sorted(model.mixers) if not MIXERS[section].shards(model)), None)


def state_bytes(model: Model, element: int = 2) -> float:
    """Bytes of the states of one row in all layers, at `element` bytes per number of the activations."""
    found = (state for layer in range(model.num_hidden_layers or 0) for state in model.states(layer))
    return float(sum(prod(state.shape) * (element if state.narrow else max(4, element)) for state in found))
