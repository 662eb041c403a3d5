"""SmolLM3: every n-th layer has no position encoding (NoPE)."""

from __future__ import annotations

from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family, Gguf, NoClass
from lmworks.recipe.schema.model import Model, Rope


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    assert model.num_hidden_layers
    positions = [int(model.has_positions(layer)) for layer in range(model.num_hidden_layers)]
    every = model.no_rope_layer_interval or model.num_hidden_layers + 1
    return {"no_rope_layers": positions, "no_rope_layer_interval": every} | common.window_to_config(model)


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    layers, positions, nope_every = config["num_hidden_layers"], config.get("no_rope_layers"), 0
    if positions and 0 in positions:
        nope_every = positions.index(0) + 1
        if [int((layer + 1) % nope_every != 0) for layer in range(layers)] != list(positions):
            raise UserError("config.json has no_rope_layers that are not every n-th layer")
    return {"no_rope_layer_interval": nope_every} | common.window_from_config(config, _layers_without_positions)


def _layers_without_positions(config: dict[str, Any]) -> list[bool]:
    every = config.get("no_rope_layer_interval", 4)
    positions = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(config["num_hidden_layers"])]
    return [not rotates for rotates in positions]


def _gguf(model: Model) -> Gguf:
    known = common.gguf(model, "smollm3", interleaved_rope=True)
    if model.no_rope_layer_interval != 4:
        raise NoClass(
            f"one of {model.no_rope_layer_interval} layers has no positions (no_rope_layer_interval), and llama.cpp "
            f"supports only one of 4"
        )
    return known


FAMILY = Family(
    name="SmolLM3ForCausalLM", model_type="smollm3", about="dense, layers without positions, or a sliding window in some",
    names=common.LLAMA,
    allows=frozenset({"NoPE layers", "sliding window", "full-attention layers beside it"}),
    to_config=_to_config, from_config=_from_config,
    architectures=("smollm3",), gguf=_gguf, without_gguf="any interval but every 4th, sliding window",
)  # fmt: skip
