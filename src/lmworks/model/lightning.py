"""Lightning attention (MiniMax-01, arXiv:2501.08313, section 2.2): linear attention with a constant decay per head.

Queries, keys and values are SiLU of one projection, the outputs o_t = sum over s <= t of decay^(t - s) (q_t k_s) v_s have an RMS norm over
all heads, and a sigmoid gate multiplies them. The decay of head h of H (from 1) is exp(-2^(-8 h / H) (1 - layer / (layers - 1))), as the
slopes of ALiBi, slower in later layers.

Shapes: B batch, T time, D hidden, H heads, C head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmworks.model.cache import LayerCache
from lmworks.model.documents import Documents
from lmworks.model.layers import Linear, RMSNorm
from lmworks.model.ssd import scan, scan_plain
from lmworks.recipe.schema.model import Model


class Lightning(nn.Module):
    """Lightning attention in place of softmax attention. The state of a row is one C x C matrix per head, in fp32."""

    slides = False
    recurrent = True
    log_decay_H: Tensor

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        assert config.lightning and config.hidden_size and config.num_attention_heads and config.head_dim and config.num_hidden_layers
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.own = slice(None)  # the heads of this rank
        size = self.heads * self.head_dim
        self._slowing = 1 - layer / (config.num_hidden_layers - 1 + 1e-5) + 1e-5  # the published constants: no head's decay is ever 1
        self.qkv = Linear(config.hidden_size, 3 * size)  # of each head its query, key and value
        self.gate = Linear(config.hidden_size, size)
        self.output_norm = RMSNorm(size, config.lightning.rms_norm_eps)
        self.projection = Linear(size, config.hidden_size)
        self.plain = False
        self.configure(self.qkv.weight.device)

    def configure(self, device: torch.device) -> None:
        """Compute the constants, which are a buffer so that layers share their compiled code; in fp64, so that they are rounded once."""
        numbers_H = torch.arange(1, self.heads + 1, device=device, dtype=torch.float64)
        self.register_buffer("log_decay_H", -self._slowing * torch.exp2(-8 / self.heads * numbers_H)[self.own], persistent=False)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], documents: Documents, cache: LayerCache | None = None) -> Tensor:
        B, T, _ = x_BTD.shape
        query, key, value = F.silu(self.qkv(x_BTD)).view(B, T, -1, 3 * self.head_dim).split(self.head_dim, dim=-1)
        log_decay_BTH = self.log_decay_H.to(torch.float64 if x_BTD.dtype == torch.float64 else torch.float32).expand(B, T, -1)
        if cache is not None and (counts_BT := cache.counted()) is not None:  # padding changes no state
            value, log_decay_BTH = value * counts_BT[..., None, None], log_decay_BTH * counts_BT[..., None]
        run = scan_plain if self.plain else scan
        (before,) = (None,) if cache is None else cache.states()
        out_BTHC, state = run(query, key, value, log_decay_BTH, documents.positions_BT, before)
        if cache is not None:
            cache.keep_states((state,))
        return self.projection(self.gate(x_BTD).sigmoid() * self.output_norm(out_BTHC.flatten(-2).to(x_BTD.dtype)))
