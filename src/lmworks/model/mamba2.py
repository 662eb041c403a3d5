"""The Mamba-2 layer (Dao & Gu 2024, arXiv:2405.21060, section 7): a state space with one decay per head, after a short convolution.

One projection gives the gate z, the input x, B, C and the time step dt of each head; x, B and C go through a causal convolution and SiLU;
h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t^T and y_t = C_t h_t + D x_t, with dt_t = softplus(dt + bias) and A = -exp(log A) (`ssd.scan`).
The gate multiplies y by SiLU(z), without a norm (Falcon-H1), or with an RMS norm after it or before it.

Shapes: B batch, T time, D hidden, H heads, P head dimension, G groups that share B and C, N state size, W width of the convolution,
X = H P + 2 G N channels of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmworks.host.devices import at_least_fp32
from lmworks.model.attention import Attention
from lmworks.model.cache import LayerCache
from lmworks.model.documents import Documents
from lmworks.model.layers import Linear, softplus, times
from lmworks.model.short_conv import Filters, last_values
from lmworks.model.ssd import scan, scan_plain
from lmworks.recipe.schema.model import Model


class GatedNorm(nn.Module):
    """RMS norm of y SiLU(z), or RMS norm of y times SiLU(z), over equal groups of the last dimension."""

    def __init__(self, size: int, groups: int, eps: float, gate_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.groups, self.eps, self.gate_first = groups, eps, gate_first

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """In the type of `y`, which is fp32 after a scan."""
        factor = F.silu(gate.to(y.dtype))
        y = y * factor if self.gate_first else y
        y = self.normalize(y) * self.weight.to(y.dtype)
        return y if self.gate_first else y * factor

    def normalize(self, y: Tensor) -> Tensor:
        """Each group divided by its root mean square."""
        grouped = y.unflatten(-1, (self.groups, -1))
        return F.rms_norm(grouped, grouped.shape[-1:], None, self.eps).flatten(-2)


class Mamba2(nn.Module):
    """Mamba-2 in place of attention, or beside it. The states of a row are the last W - 1 inputs of the convolution, and h in fp32."""

    slides = False
    recurrent = True

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        assert model.mamba and model.hidden_size
        self.config = config = model.mamba  # on ranks of tensor parallelism with the sizes of one of them
        inner = config.inner_size
        self.input = Linear(model.hidden_size, inner + config.conv_size + config.num_heads)
        self.conv = Filters(config.conv_size, config.conv_kernel, config.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads))
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.skip = nn.Parameter(torch.empty(config.num_heads))
        self.gate_norm: GatedNorm | None = None
        if config.gate_norm != "none":
            self.gate_norm = GatedNorm(inner, config.norm_groups, model.rms_norm_eps, config.gate_norm == "after_gate")
        self.projection = Linear(inner, model.hidden_size)
        given = model.multipliers
        self.factors = [] if given is None else [given.mamba_in * factor for factor in given.mamba_parts]  # of the parts of the projection
        self.plain = False

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], documents: Documents, cache: LayerCache | None = None) -> Tensor:
        config, (B, T, _), positions_BT = self.config, x_BTD.shape, documents.positions_BT
        H, P, G, N = config.num_heads, config.head_dim, config.n_groups, config.state_size
        parts = self.input(x_BTD)
        if self.factors:
            sizes = (config.inner_size, config.inner_size, G * N, G * N, H)
            parts = parts * torch.cat([parts.new_full((size,), factor) for size, factor in zip(sizes, self.factors, strict=True)])
        gate_BTX, inputs_BTX, dt_BTH = parts.split([config.inner_size, config.conv_size, H], dim=-1)
        inputs_before, state_before = (None, None) if cache is None else cache.states()
        mixed_BTX = F.silu(self.conv(inputs_BTX, positions_BT, inputs_before))
        x_BTX, key_BTX, query_BTX = mixed_BTX.split([config.inner_size, G * N, G * N], dim=-1)
        x_BTHP = at_least_fp32(x_BTX.view(B, T, H, P))
        dt_BTH = softplus(at_least_fp32(dt_BTH) + self.dt_bias)
        dt_BTH = dt_BTH.clamp_min(config.min_time_step) if config.min_time_step else dt_BTH
        value_BTHP, log_decay_BTH = x_BTHP * dt_BTH[..., None], -dt_BTH * self.A_log.exp()
        if cache is not None and (counts_BT := cache.counted()) is not None:  # padding changes no state
            value_BTHP, log_decay_BTH = value_BTHP * counts_BT[..., None, None], log_decay_BTH * counts_BT[..., None]
        run = scan_plain if self.plain else scan
        y_BTHP, state = run(
            query_BTX.view(B, T, G, N), key_BTX.view(B, T, G, N), value_BTHP, log_decay_BTH, positions_BT, state_before
        )
        if cache is not None:
            cache.keep_states((last_values(inputs_BTX, inputs_before, config.conv_kernel, cache.counts()), state))
        y_BTX = torch.addcmul(y_BTHP, x_BTHP, self.skip[:, None]).flatten(-2)
        y_BTX = y_BTX * F.silu(gate_BTX.to(y_BTX.dtype)) if self.gate_norm is None else self.gate_norm(y_BTX, gate_BTX)
        return self.projection(y_BTX.to(x_BTD.dtype))


class Hybrid(Attention):
    """Attention and Mamba-2 side by side: the sum of what both read out of the same input (Falcon-H1, arXiv:2507.22448, section 3.1)."""

    recurrent = True

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__(model, layer)
        self.mamba = Mamba2(model, layer)
        self.factors = model.factors

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], documents: Any, cache: LayerCache | None = None,
        logits: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        mask = documents.window_mask if self.slides else documents.mask
        attended_BTD = super().forward(times(x_BTD, self.factors.attention_in), rope, mask, cache, logits)
        mixed_BTD = self.mamba(x_BTD, rope, documents, cache)
        return times(attended_BTD, self.factors.attention_out) + times(mixed_BTD, self.factors.mamba_out)
