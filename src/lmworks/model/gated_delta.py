"""A layer with the gated delta rule, as in Qwen3-Next and Qwen3.5 (arXiv:2412.06464, section 3.4).

Queries, keys and values go through a causal convolution and SiLU; queries and keys are normalized to length 1 per head. The decay of a head
is exp(-exp(A) softplus(a + bias)) and its degree of correction sigmoid(b), with a and b projected from the token. Each head's output is
normalized, multiplied by SiLU of a gate, and projected.

Shapes: B batch, T time, D hidden, G key heads, H value heads, K width of a key, V width of a value, W width of the convolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmworks.host.devices import at_least_fp32
from lmworks.model.cache import LayerCache
from lmworks.model.delta_rule import delta_rule, delta_rule_plain
from lmworks.model.documents import Documents
from lmworks.model.layers import Linear, RMSNorm, softplus
from lmworks.model.short_conv import Filters, last_values, short_conv
from lmworks.recipe.schema.model import Model

_EPS = 1e-6  # added to the squared length of queries and keys, as in flash-linear-attention


class GatedDeltaNet(nn.Module):
    """The gated delta rule in place of attention. The states of a row are the last W - 1 inputs of the convolution, and H matrices (K, V)
    in fp32."""

    slides = False
    recurrent = True
    column = ("query", "key", "value", "gate", "beta", "decay")  # of tensor parallelism: split by heads, with `heads` below
    heads = ("query_conv", "key_conv", "value_conv")

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        sizes, D = config.gated_delta, config.hidden_size
        assert sizes is not None and D
        self.key_head_dim, self.value_head_dim, self.width = sizes.key_head_dim, sizes.value_head_dim, sizes.conv_kernel
        self.query = Linear(D, sizes.key_size)
        self.key = Linear(D, sizes.key_size)
        self.value = Linear(D, sizes.value_size)
        self.gate = Linear(D, sizes.value_size)
        self.beta = Linear(D, sizes.num_value_heads)
        self.decay = Linear(D, sizes.num_value_heads)
        self.query_conv = Filters(sizes.key_size, sizes.conv_kernel)
        self.key_conv = Filters(sizes.key_size, sizes.conv_kernel)
        self.value_conv = Filters(sizes.value_size, sizes.conv_kernel)
        self.dt_bias = nn.Parameter(torch.empty(sizes.num_value_heads))
        self.A_log = nn.Parameter(torch.empty(sizes.num_value_heads))
        self.norm = RMSNorm(sizes.value_head_dim, config.rms_norm_eps)
        self.output = Linear(sizes.value_size, D)
        self.plain = False

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], documents: Documents, cache: LayerCache | None = None) -> Tensor:
        B, T, _ = x_BTD.shape
        positions_BT = documents.positions_BT
        inputs_before, state_before = (None, None) if cache is None else cache.states()
        inputs_BTX = torch.cat((self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)), dim=-1)
        filters_XW = torch.cat([part.weight[:, 0] for part in (self.query_conv, self.key_conv, self.value_conv)])
        mixed_BTX = F.silu(short_conv(inputs_BTX, filters_XW, positions_BT, inputs_before))
        keys = self.query_conv.weight.shape[0]
        query, key, value = mixed_BTX.split((keys, keys, mixed_BTX.shape[-1] - 2 * keys), dim=-1)
        query_BTGK, key_BTGK = (_unit(x.reshape(B, T, -1, self.key_head_dim)) for x in (query, key))
        beta_BTH = at_least_fp32(self.beta(x_BTD)).sigmoid()
        log_decay_BTH = -at_least_fp32(self.A_log).exp() * softplus(at_least_fp32(self.decay(x_BTD)) + at_least_fp32(self.dt_bias))
        if cache is not None and (counted_BT := cache.counted()) is not None:  # padding changes no state
            beta_BTH, log_decay_BTH = beta_BTH * counted_BT[..., None], log_decay_BTH * counted_BT[..., None]
        rule = delta_rule_plain if self.plain else delta_rule
        out_BTHV, state = rule(
            query_BTGK * self.key_head_dim**-0.5, key_BTGK, value.reshape(B, T, -1, self.value_head_dim), log_decay_BTH, beta_BTH,
            positions_BT, state_before,
        )  # fmt: skip
        if cache is not None:
            cache.keep_states((last_values(inputs_BTX, inputs_before, self.width, cache.counts()), state))
        gate_BTHV = self.gate(x_BTD).view(B, T, -1, self.value_head_dim)
        out_BTHV = self.norm(out_BTHV.to(x_BTD.dtype)) * F.silu(at_least_fp32(gate_BTHV))
        return self.output(out_BTHV.to(x_BTD.dtype).flatten(2))


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1, in at least fp32."""
    wide = at_least_fp32(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPS)
