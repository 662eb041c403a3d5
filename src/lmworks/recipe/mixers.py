"""What the recipe and the plan know of mixers other than attention: trained tensors, operations, activations.

A kind of layer is added in five places, each one line beside the file of the kind itself: its section, with its states, in
`schema.model.SECTIONS` and as a field of `Model`; its `Mixer` here in `MIXERS`; its module in `lmworks.model.mixers`; initial values that
are not normal in `lmworks.model.init`; and its sizes in `lmworks.preflight.small_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from lmworks.recipe.parameter import Parameter
from lmworks.recipe.schema.model import Model


@dataclass(frozen=True)
class Mixer:
    """parameters: the trained tensors of a layer from (model, start of their names, layer)
    flops: operations of the forward pass per token beyond 2 per parameter
    saved: numbers per token that a layer saves for the backward pass: all, and those that are outputs of matrix products
    shards: the number that `layout.tp` must divide, by the name of its key
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
        yield Parameter(f"{start}attention.{name}_conv.weight", (rows, W), "attention", layer)
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


MIXERS: dict[str, Mixer] = {
    "gated_delta": Mixer(_gated_delta_parameters, _gated_delta_flops, _gated_delta_saved, _gated_delta_shards),
}
"""By the names of `schema.model.SECTIONS`."""


def state_bytes(model: Model, element: int = 2) -> float:
    """Bytes of the states of one row in all layers, at `element` bytes per number of the activations."""
    found = (state for layer in range(model.num_hidden_layers or 0) for state in model.states(layer))
    return float(sum(prod(state.shape) * (element if state.narrow else max(4, element)) for state in found))
