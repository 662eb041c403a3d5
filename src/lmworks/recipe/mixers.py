"""What the recipe and the plan know of mixers other than attention: trained tensors, operations, activations.

A kind of layer is added in five places, each one line beside the file of the kind itself: its section, with its states, in
`schema.model.SECTIONS` and as a field of `Model`; its `Mixer` here in `MIXERS`; its module in `lmworks.model.mixers`; initial values that
are not normal in `lmworks.model.init`; and its sizes in `lmworks.preflight.small_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from lmworks.recipe.parameter import Parameter
from lmworks.recipe.schema.model import Model


@dataclass(frozen=True)
class Mixer:
    """parameters: the trained tensors of a layer from (model, start of their names, layer)
    flops: operations of the forward pass per token beyond 2 per parameter
    saved: numbers per token that a layer saves for the backward pass on a rank of `tp`, compiled or eager: all, and those that are outputs
        of matrix products
    problems: the reasons why its heads cannot be split over `tp` ranks
    """

    parameters: Callable[[Model, str, int], Iterator[Parameter]]
    flops: Callable[[Model], float]
    saved: Callable[[Model, int, bool], tuple[float, float]]
    problems: Callable[[Model, int], Iterator[str]]


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


def _gated_delta_saved(model: Model, tp: int, eager: bool) -> tuple[float, float]:
    """Inputs of the convolution and its outputs, of which fp32 copies are normed; gate; solutions of the chunk, decays and scores."""
    sizes = model.gated_delta
    assert sizes is not None
    keys, values, H = sizes.key_size, sizes.value_size, sizes.num_value_heads
    products = 2.0 * keys + 2 * values + 2 * H
    chunk, repeats = 64, sizes.num_value_heads / sizes.num_key_heads
    inside = 3 * H * chunk + 4 * repeats * keys + 6 * values
    return (products + 4 * keys + 2 * values + inside) / tp, products / tp


def _gated_delta_problems(model: Model, tp: int) -> Iterator[str]:
    assert model.gated_delta is not None
    return _undivided(tp, {"gated_delta.num_key_heads": model.gated_delta.num_key_heads})


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


def _mamba_saved(model: Model, tp: int, eager: bool) -> tuple[float, float]:
    """The projection, the convolution and SiLU; in fp32 (two numbers each) inputs times time steps and outputs; decays and scores of a
    chunk, once as decays and once weighted."""
    assert model.mamba is not None
    mamba = model.mamba.of_rank(tp)
    products = float(mamba.inner_size + mamba.conv_size + mamba.num_heads)
    return products + 2 * mamba.conv_size + 10 * mamba.inner_size + 4 * mamba.num_heads * _CHUNK, products


def _mamba_problems(model: Model, tp: int) -> Iterator[str]:
    """A rank has whole groups, or is one of several ranks of a group. It stores an equal share of the rows of the joined projection."""
    mamba = model.mamba
    assert mamba is not None
    yield from _undivided(tp, {"mamba.num_heads": mamba.num_heads})
    if mamba.norm_groups > 1:  # one group is summed over all ranks
        yield from _undivided(tp, {"mamba.norm_groups": mamba.norm_groups})
    if mamba.n_groups % tp and tp % mamba.n_groups:
        yield f"tp {tp} neither divides model.mamba.n_groups {mamba.n_groups} nor is a multiple of it"
    elif (rows := 2 * mamba.n_groups * mamba.state_size) % tp:
        yield f"tp {tp} does not divide the {rows} rows of B and C, 2 * model.mamba.n_groups * state_size"


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


def _lightning_saved(model: Model, tp: int, eager: bool) -> tuple[float, float]:
    """The projections, SiLU of queries, keys and values and their fp32 copies; outputs; decays and scores of a chunk."""
    heads, size = model.num_attention_heads or 0, (model.num_attention_heads or 0) * (model.head_dim or 0)
    return (4.0 * size + 3 * size * 3 + 6 * size + 4 * heads * _CHUNK) / tp, 4.0 * size / tp


def _lightning_problems(model: Model, tp: int) -> Iterator[str]:
    return _undivided(tp, {"num_attention_heads": model.num_attention_heads})


def _short_conv_parameters(model: Model, start: str, layer: int) -> Iterator[Parameter]:
    D, start = model.hidden_size, start + "attention."
    assert model.short_conv and D
    for name in ("input_gate", "output_gate", "value"):
        yield Parameter(f"{start}{name}.weight", (D, D), "attention", layer)
    yield Parameter(start + "input_conv.weight", (D, 1, model.short_conv.conv_kernel), "attention", layer)
    yield Parameter(start + "output.weight", (D, D), "attention", layer)


def _short_conv_flops(model: Model) -> float:
    """Of the two gates; the convolution has 2 per parameter."""
    return 2.0 * (model.hidden_size or 0)


def _short_conv_saved(model: Model, tp: int, eager: bool) -> tuple[float, float]:
    """The projections, and the output of the convolution before and after its gate; eager also its input, once more with what is before
    the rows, and a filter for each earlier token. A compiler computes these again."""
    assert model.short_conv
    channels = (model.hidden_size or 0) / tp
    return (5 + (1 + model.short_conv.conv_kernel) * eager) * channels, 3 * channels


def _short_conv_problems(model: Model, tp: int) -> Iterator[str]:
    return _undivided(tp, {"hidden_size": model.hidden_size})


def _undivided(tp: int, sizes: Mapping[str, int | None]) -> Iterator[str]:
    """The sizes, by the names of their keys, that `tp` does not divide."""
    return (f"tp {tp} does not divide model.{name} {size}" for name, size in sizes.items() if (size or 0) % tp)


_CHUNK = 64  # tokens of a chunk; see lmworks.model.ssd
MIXERS: dict[str, Mixer] = {
    "gated_delta": Mixer(_gated_delta_parameters, _gated_delta_flops, _gated_delta_saved, _gated_delta_problems),
    "mamba": Mixer(_mamba_parameters, _mamba_flops, _mamba_saved, _mamba_problems),
    "hybrid": Mixer(_hybrid_parameters, _mamba_flops, _mamba_saved, _mamba_problems),
    "lightning": Mixer(_lightning_parameters, _lightning_flops, _lightning_saved, _lightning_problems),
    "short_conv": Mixer(_short_conv_parameters, _short_conv_flops, _short_conv_saved, _short_conv_problems),
}
"""By the names of `schema.model.SECTIONS`."""


def tp_problems(model: Model, tp: int) -> list[str]:
    """The reasons why the matrices of a model cannot be sharded over `tp` ranks; empty if they can."""
    sizes = {"intermediate_size": model.intermediate_size, "vocab_size": model.vocab_size}
    if model.attention_layers:
        sizes["num_attention_heads"] = model.num_attention_heads
    if model.attention_layers and not model.mla:
        sizes["num_key_value_heads"] = model.num_key_value_heads
    if model.moe:
        sizes["moe.moe_intermediate_size"] = model.moe.moe_intermediate_size
    of_mixers = (problem for mixer in sorted(model.mixers) for problem in MIXERS[mixer].problems(model, tp))
    return list(dict.fromkeys((*_undivided(tp, sizes), *of_mixers)))  # lightning attention has the heads of attention


def cp_problems(model: Model, cp: int) -> Iterator[str]:
    """The reasons why `cp` ranks cannot each compute a part of a sequence; none if they can."""
    if cp == 1:
        return
    if model.attention_dropout:
        yield "model.attention_dropout cannot be combined with layout.cp above 1; set it to 0"
    for mixer in sorted(model.mixers):
        yield f"the states of model.{mixer} are passed from no rank to the next; set layout.cp to 1"
    if model.moe and model.moe.balance.method == "sinkhorn":
        yield "balance.method sinkhorn needs whole sequences; choose bias, or set layout.cp to 1"


def state_bytes(model: Model, element: int = 2) -> float:
    """Bytes of the states of one row in all layers, at `element` bytes per number of the activations."""
    found = (state for layer in range(model.num_hidden_layers or 0) for state in model.states(layer))
    return float(sum(prod(state.shape) * (element if state.narrow else max(4, element)) for state in found))
