"""Grouped-query attention with QK norm, partial RoPE, NoPE layers, sliding windows, sinks and an output gate.

Shapes: B batch, T time, S keys (T, or the cache's length), D hidden, H query heads, K key/value heads, C head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmworks.model.cache import LayerCache
from lmworks.model.documents import Visible, attend_blocks, causal
from lmworks.model.layers import Linear, RMSNorm, times
from lmworks.model.rope import rotate, rotate_
from lmworks.model.sinks import attend_sinks
from lmworks.recipe.schema.model import Model


class Attention(nn.Module):
    """MHA, GQA or MQA by the number of key/value heads; MLA is another class with this `forward`."""

    recurrent = False

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        assert config.hidden_size and config.num_attention_heads and config.num_key_value_heads and config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.uses_rope, self.slides = config.has_positions(layer), config.slides(layer)  # a phase may change both: `Transformer.configure`
        self.dropout = config.attention_dropout
        scalar = config.query_pre_attn_scalar or self.head_dim
        self.score_scale = (self.head_dim / scalar) ** 0.5  # of queries; the kernels divide scores by the root of head_dim
        self.key_factor = config.factors.key
        self.query = Linear(config.hidden_size, self.heads * self.head_dim, config.attention_bias)
        self.key = Linear(config.hidden_size, self.kv_heads * self.head_dim, config.attention_bias)
        self.value = Linear(config.hidden_size, self.kv_heads * self.head_dim, config.attention_bias)
        self.output = Linear(self.heads * self.head_dim, config.hidden_size, config.attention_output_bias)
        self.sinks = nn.Parameter(torch.empty(self.heads)) if config.attention_sinks else None
        gated = config.attn_output_gate
        self.gate = Linear(config.hidden_size, self.heads * self.head_dim, config.attention_bias) if gated else None
        normed = (self.heads, self.kv_heads) if config.qk_norm_over == "all_heads" else (1, 1)  # heads of one norm
        self.query_norm = RMSNorm(normed[0] * self.head_dim, config.rms_norm_eps) if config.use_qk_norm else None
        self.key_norm = RMSNorm(normed[1] * self.head_dim, config.rms_norm_eps) if config.use_qk_norm else None
        self.norm_blend: Tensor | None = None  # the share of the normed queries and keys, 0-d; None where it is 1
        self.joined: Linear | None = None  # query, key and value as one matrix (`lmworks.inference.model`)
        self.joined_norm: RMSNorm | None = None  # and the norms of the heads of queries and keys as one
        self.plain = False

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Visible | None, cache: LayerCache | None = None,
        logits: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """What is added to the residual stream (B, T, D). In training, without a cache, the largest score of each head (H,) is appended to
        `logits`."""
        B, T, _ = x_BTD.shape
        if self.joined is not None:
            query, entries = self._projected(self.joined, x_BTD, rope)
            mixed_BHTC = self._mix(query, entries, mask) if cache is None else cache.attend(self._mix, (query,), entries)
            return self._read_out(mixed_BHTC, x_BTD)
        query, key, value = self.query(x_BTD), times(self.key(x_BTD), self.key_factor), self.value(x_BTD)
        if self.query_norm is not None and self.key_norm is not None:
            plain = query, key
            query, key = (norm(x.view(B, T, -1, norm.size)) for norm, x in ((self.query_norm, query), (self.key_norm, key)))
            if self.norm_blend is not None:
                query, key = (_blended(x, normed, self.norm_blend) for x, normed in zip(plain, (query, key), strict=True))
        query, key, value = (x.view(B, T, -1, self.head_dim).transpose(1, 2) for x in (query, key, value))
        if self.uses_rope:
            query, key = rotate(query, *rope), rotate(key, *rope)
        query = times(query, self.score_scale)
        if cache is None:
            mixed_BHTC = self._attend(query, key, value, mask, logits)
        else:
            mixed_BHTC = cache.attend(self._mix, (query,), torch.cat((key, value), dim=1))
        return self._read_out(mixed_BHTC, x_BTD)

    def _read_out(self, mixed_BHTC: Tensor, x_BTD: Tensor) -> Tensor:
        """The projection of what the heads have read, times the sigmoid of the gate if there is one (Qiu et al. 2025, arXiv:2505.06708)."""
        mixed_BTX = mixed_BHTC.transpose(1, 2).reshape(*x_BTD.shape[:2], -1)
        return self.output(mixed_BTX if self.gate is None else mixed_BTX * self.gate(x_BTD).sigmoid())

    def _attend(
        self, query_BHTC: Tensor, key_BKSC: Tensor, value_BKSC: Tensor, mask: Visible | None, logits: list[Tensor] | None = None
    ) -> Tensor:  # fmt: skip
        dropout = self.dropout if self.training else 0.0
        if self.sinks is not None:
            return attend_sinks(query_BHTC, key_BKSC, value_BKSC, mask, dropout, self.sinks, self.plain)
        attend = attend_plain if self.plain else attend_fast
        return attend(query_BHTC, key_BKSC, value_BKSC, mask, dropout, logits)

    def _mix(self, query_BHTC: Tensor, entries_BESC: Tensor, mask: Visible | None) -> Tensor:
        """Attention over the keys, and the values behind them, of the entries of a cache."""
        key_BKSC, value_BKSC = entries_BESC.chunk(2, dim=1)
        return self._attend(query_BHTC, key_BKSC, value_BKSC, mask)

    def _projected(self, joined: Linear, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries, and keys and values as entries of a cache: views of one tensor, in which they are normed and rotated."""
        B, T, _ = x_BTD.shape
        joined_BTX = joined(x_BTD)
        all_BTXC = joined_BTX.view(B, T, -1, self.head_dim)
        normed = self.heads + self.kv_heads
        if self.key_factor != 1:
            all_BTXC[:, :, self.heads : normed].mul_(self.key_factor)
        if self.joined_norm is not None:
            self.joined_norm.apply_(all_BTXC[:, :, :normed])
        elif self.query_norm is not None and self.key_norm is not None:
            self.query_norm.apply_(joined_BTX[..., : self.query_norm.size])
            self.key_norm.apply_(joined_BTX[..., self.query_norm.size :][..., : self.key_norm.size])
        all_BXTC = all_BTXC.transpose(1, 2)
        if self.uses_rope:
            rotate_(all_BXTC[:, :normed], *rope)
        if self.score_scale != 1:
            all_BXTC[:, : self.heads].mul_(self.score_scale)
        return all_BXTC[:, : self.heads], all_BXTC[:, self.heads :]


def _blended(plain: Tensor, normed: Tensor, share: Tensor) -> Tensor:
    """Between queries or keys and what their norm makes of them; at a share of 0 or 1 the bits of one of the two."""
    return plain * (1 - share) + normed.reshape(plain.shape) * share


def attend_fast(
    query_BHTC: Tensor, key_BKSC: Tensor, value_BKSC: Tensor, mask: Visible | None, dropout: float, logits: list[Tensor] | None = None
) -> Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(C)) v with the fastest kernel of this device; causal if no mask is given. The largest score of each head is
    appended to `logits`."""
    if mask is None and _makes_all_scores(query_BHTC, value_BKSC) and not dropout:
        mask = causal(query_BHTC, key_BKSC)
    if mask is not None and mask.kept_B1TS is None and not dropout:
        return mask.attend(query_BHTC, key_BKSC, value_BKSC, *(() if logits is None else (logits,)))
    if logits is not None:
        logits.append((mask or causal(query_BHTC, key_BKSC)).largest_logits(query_BHTC, key_BKSC))
    seen = None if mask is None else mask.dense()
    B, H, T, C = query_BHTC.shape
    S = key_BKSC.shape[2]
    if T == 1 and seen is not None and key_BKSC.shape[1] != H and not dropout:
        # the heads of a group as queries of one head, so that keys and values are read once
        grouped = query_BHTC.reshape(B, key_BKSC.shape[1], -1, C)
        bias = seen if mask is None or mask.bias_B1TS is None else mask.bias_B1TS
        return F.scaled_dot_product_attention(grouped, key_BKSC, value_BKSC, attn_mask=bias).reshape(B, H, 1, -1)
    blocked = T == S <= _LONGEST_BLOCKED and torch.is_grad_enabled()  # the fused kernel's forward is fast
    if query_BHTC.device.type == "cpu" and blocked and not dropout:
        window = T if mask is None or mask.window is None else mask.window
        return attend_blocks(query_BHTC, key_BKSC, value_BKSC, seen, query_BHTC.shape[-1] ** -0.5, window)[0]
    return F.scaled_dot_product_attention(
        query_BHTC, key_BKSC, value_BKSC, attn_mask=seen, dropout_p=dropout, is_causal=seen is None,
        enable_gqa=query_BHTC.shape[1] != key_BKSC.shape[1],
    )  # fmt: skip


def _makes_all_scores(query_BHTC: Tensor, value_BKSC: Tensor) -> bool:
    """Whether the fused CPU kernel cannot be used for a long row: it needs values as wide as keys, unlike those of MLA."""
    return query_BHTC.device.type == "cpu" and query_BHTC.shape[2] > _LONGEST_BLOCKED and query_BHTC.shape[3] != value_BKSC.shape[3]


_LONGEST_BLOCKED = 2048  # beyond, the kept probabilities (T * T / 2 per head) outgrow what the fused kernel recomputes


def attend_plain(
    query_BHTC: Tensor, key_BKSC: Tensor, value_BKSC: Tensor, mask: Visible | None, dropout: float, logits: list[Tensor] | None = None
) -> Tensor:  # fmt: skip
    """`attend_fast` in plain operations: the reference implementation for tests."""
    group = query_BHTC.shape[1] // key_BKSC.shape[1]
    key, value = key_BKSC.repeat_interleave(group, 1), value_BKSC.repeat_interleave(group, 1)
    scores = query_BHTC @ key.transpose(-1, -2) * query_BHTC.shape[-1] ** -0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril() if mask is None else mask.dense()
    if logits is not None:
        logits.append(scores.detach().masked_fill(~seen, float("-inf")).float().amax((0, 2, 3)))
    weights = scores.masked_fill(~seen, float("-inf")).float().softmax(-1).to(value.dtype)
    return F.dropout(weights, dropout) @ value
