"""SmolLM3: every n-th layer has no position encoding (NoPE)."""

from __future__ import annotations

from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Family, Gguf, NoClass, Null
from lmworks.recipe.schema.model import Model, Rope


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    assert model.num_hidden_layers
    positions = [int(model.has_positions(layer)) for layer in range(model.num_hidden_layers)]
    every = model.no_rope_layer_interval or model.num_hidden_layers + 1
    return {"no_rope_layers": positions, "no_rope_layer_interval": every} | common.window_to_config(model)


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    layers, every, positions = config["num_hidden_layers"], config["no_rope_layer_interval"], config["no_rope_layers"]
    if positions is None:
        if every <= 0:
            raise UserError(f"config.json has no_rope_layer_interval {every}, which must be positive")
    else:
        if len(positions) < layers or any(type(one) is not int or one not in (0, 1) for one in positions):
            raise UserError(f"config.json has no_rope_layers that are not {layers} of 0 and 1; lmworks cannot read it")
        every = positions.index(0) + 1 if 0 in positions[:layers] else 0
    rotates = [not every or (layer + 1) % every != 0 for layer in range(layers)]
    if positions is not None and [bool(one) for one in positions[:layers]] != rotates:
        raise UserError("config.json has no_rope_layers that are not every n-th layer")
    return {"no_rope_layer_interval": every} | common.window_from_config(config, [not one for one in rotates])


def _gguf(model: Model) -> Gguf:
    known = common.gguf(model, "smollm3", interleaved_rope=True)
    if model.no_rope_layer_interval != 4:
        raise NoClass(
            f"one of {model.no_rope_layer_interval} layers has no positions (no_rope_layer_interval), and llama.cpp supports only one of 4"
        )
    return known


FAMILY = Family(
    name="SmolLM3ForCausalLM", model_type="smollm3", about="dense, layers without positions, or a sliding window in some",
    names=common.LLAMA, rope_theta=2_000_000.0,
    defaults=common.DEFAULTS | {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": Null(int, 4), "head_dim": Extra(int), "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "sliding_window": Null(int), "layer_types": Null(list),
        "no_rope_layers": Null(list), "no_rope_layer_interval": 4,
    },
    ignored=("max_window_layers",),
    allows=frozenset({"NoPE layers", "sliding window", "full-attention layers beside it"}),
    to_config=_to_config, from_config=_from_config,
    architectures=("smollm3",), gguf=_gguf, from_gguf=lambda _: {"no_rope_layer_interval": 4},
    without_gguf="any interval but every 4th, sliding window",
)  # fmt: skip
