"""A gated short convolution, as in LFM2 (arXiv:2511.23404, section 2).

Three projections of a token give an input gate b, an output gate c and a value v. The causal depthwise convolution of b v sees the last few
tokens of the document, and the output is a projection of c times its result. There is no nonlinearity besides the two products.

Shapes: B batch, T time, D hidden, W width of the convolution.
"""

from __future__ import annotations

from torch import Tensor, nn

from lmworks.model.cache import LayerCache
from lmworks.model.documents import Documents
from lmworks.model.layers import Linear
from lmworks.model.short_conv import Filters, last_values
from lmworks.recipe.schema.model import Model


class GatedConv(nn.Module):
    """A gated short convolution in place of attention. The state of a row is the last W - 1 inputs of the convolution."""

    slides = False
    recurrent = True
    column = ("input_gate", "output_gate", "value")  # of tensor parallelism: split by channels, with `heads` below
    heads = ("input_conv",)

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        D = config.hidden_size
        assert config.short_conv and D
        self.width = config.short_conv.conv_kernel
        self.input_gate = Linear(D, D)
        self.output_gate = Linear(D, D)
        self.value = Linear(D, D)
        self.input_conv = Filters(D, self.width)
        self.output = Linear(D, D)
        self.plain = False

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], documents: Documents, cache: LayerCache | None = None) -> Tensor:
        inputs_BTD = self.input_gate(x_BTD) * self.value(x_BTD)
        (before,) = (None,) if cache is None else cache.states()
        mixed_BTD = self.input_conv(inputs_BTD, documents.positions_BT, before)
        if cache is not None:
            cache.keep_states((last_values(inputs_BTD, before, self.width, cache.counts()),))
        return self.output(self.output_gate(x_BTD) * mixed_BTD)
