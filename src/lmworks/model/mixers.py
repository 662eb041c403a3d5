"""What mixes the tokens in a layer: attention, or a recurrence over states of constant size.

All have one interface: `forward(x_BTD, rope, mask, cache)`, `slides`, and `recurrent`. A recurrent mixer gets the `Documents` in place of a
mask, and keeps its states in the cache (`LayerCache.states`). Nothing of a document may reach the next one.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lmworks.model.attention import Attention
from lmworks.model.gated_conv import GatedConv
from lmworks.model.gated_delta import GatedDeltaNet
from lmworks.model.lightning import Lightning
from lmworks.model.mamba2 import Hybrid, Mamba2
from lmworks.model.mla import LatentAttention
from lmworks.recipe.schema.model import Model

_MODULES: dict[str, Callable[[Model, int], nn.Module]] = {
    "gated_delta": GatedDeltaNet, "hybrid": Hybrid, "lightning": Lightning, "mamba": Mamba2, "short_conv": GatedConv,
}  # fmt: skip
"""By the names of `lmworks.recipe.schema.model.SECTIONS`; made from the model and the number of the layer."""


def mixer(config: Model, layer: int) -> nn.Module:
    """The mixer of a layer."""
    if (name := config.mixer(layer)) != "attention":
        return _MODULES[name](config, layer)
    return LatentAttention(config) if config.mla else Attention(config, layer)
