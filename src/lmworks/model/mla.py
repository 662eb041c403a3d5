"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values are expanded from one small latent per token.

Shapes: B batch, T time, S keys (T, or the cache's length), D hidden, H heads, L latent of keys and values, R rotated dimensions of a head,
X = L + R, N dimensions without positions, V value dimensions, C = N + R.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmworks.model.attention import attend_fast, attend_plain
from lmworks.model.cache import LayerCache
from lmworks.model.documents import Visible
from lmworks.model.layers import Linear, RMSNorm
from lmworks.model.rope import rotate
from lmworks.recipe.schema.model import Model


class LatentAttention(nn.Module):
    """Latent attention with the interface of `Attention`. The cache stores the normed latent and the rotated key that all heads share."""

    slides = recurrent = False

    def __init__(self, config: Model) -> None:
        super().__init__()
        mla = config.mla
        assert mla is not None and config.hidden_size and config.num_attention_heads
        D, H, C = config.hidden_size, config.num_attention_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
        self.query = None if mla.q_lora_rank else Linear(D, H * C)
        self.query_down = Linear(D, mla.q_lora_rank) if mla.q_lora_rank else None
        self.query_latent_norm = RMSNorm(mla.q_lora_rank, mla.rms_norm_eps) if mla.q_lora_rank else None
        self.query_up = Linear(mla.q_lora_rank, H * C) if mla.q_lora_rank else None
        self.kv_down = Linear(D, mla.kv_lora_rank + mla.qk_rope_head_dim)
        self.kv_latent_norm = RMSNorm(mla.kv_lora_rank, mla.rms_norm_eps)
        self.kv_up = Linear(mla.kv_lora_rank, H * (mla.qk_nope_head_dim + mla.v_head_dim))
        self.output = Linear(H * mla.v_head_dim, D)
        self.mla = mla
        self.dropout = config.attention_dropout
        self.score_scale = 1.0  # YaRN's factor, besides 1 / sqrt(C), on the whole score; `Attention` has it in the rotation
        self.plain = False

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Visible | None, cache: LayerCache | None = None,
        logits: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        query_BHTC = self._queries(x_BTD)
        if self.score_scale != 1:
            query_BHTC = query_BHTC * self.score_scale
        nope_BHTN, unrotated = query_BHTC.split((self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim), dim=-1)
        rotated_BHTR = rotate(unrotated, *rope)
        latent, key = self.kv_down(x_BTD)[:, None].split((self.mla.kv_lora_rank, self.mla.qk_rope_head_dim), dim=-1)
        latent_B1SL, key_B1SR = self.kv_latent_norm(latent), rotate(key, *rope)
        # For a single query, projecting the query into the latent space is cheaper than expanding all latents.
        one = rotated_BHTR.shape[2] == 1 and not self.plain and logits is None
        if cache is None and not one:
            mixed_BHTV = self._mix(nope_BHTN, rotated_BHTR, latent_B1SL, key_B1SR, mask, logits)
        else:
            mix, entries_B1SX = self._mix_latents if one else self._mix_entries, torch.cat((latent_B1SL, key_B1SR), dim=-1)
            queries = (nope_BHTN, rotated_BHTR)
            mixed_BHTV = mix(*queries, entries_B1SX, mask) if cache is None else cache.attend(mix, queries, entries_B1SX)
        return self.output(mixed_BHTV.transpose(1, 2).flatten(2))

    def _queries(self, x_BTD: Tensor) -> Tensor:
        """The queries (B, H, T, C); H is the number of heads on this rank."""
        if self.query is not None:
            query = self.query(x_BTD)
        else:
            assert self.query_down is not None and self.query_latent_norm is not None and self.query_up is not None
            query = self.query_up(self.query_latent_norm(self.query_down(x_BTD)))
        return query.view(*query.shape[:2], -1, self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim).transpose(1, 2)

    def _mix(
        self, nope_BHTN: Tensor, rotated_BHTR: Tensor, latent_B1SL: Tensor, key_B1SR: Tensor, mask: Visible | None,
        logits: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention with keys and values expanded; (B, H, T, V)."""
        B, H, S = latent_B1SL.shape[0], nope_BHTN.shape[1], latent_B1SL.shape[2]
        expanded = self.kv_up(latent_B1SL[:, 0]).view(B, S, H, -1).transpose(1, 2)
        key_BHSN, value_BHSV = expanded.split((self.mla.qk_nope_head_dim, self.mla.v_head_dim), dim=-1)
        query_BHTC = torch.cat((nope_BHTN, rotated_BHTR), dim=-1)
        key_BHSC = torch.cat((key_BHSN, key_B1SR.expand(-1, H, -1, -1)), dim=-1)
        attend = attend_plain if self.plain else attend_fast
        return attend(query_BHTC, key_BHSC, value_BHSV, mask, self.dropout if self.training else 0.0, logits)

    def _mix_entries(self, nope_BHTN: Tensor, rotated_BHTR: Tensor, entries_B1SX: Tensor, mask: Visible | None) -> Tensor:
        """The same over the entries of a cache."""
        latent_B1SL, key_B1SR = entries_B1SX.split((self.mla.kv_lora_rank, self.mla.qk_rope_head_dim), dim=-1)
        return self._mix(nope_BHTN, rotated_BHTR, latent_B1SL, key_B1SR, mask)

    def _mix_latents(self, nope_BHTN: Tensor, rotated_BHTR: Tensor, entries_B1SX: Tensor, mask: Visible | None) -> Tensor:
        """The same without expansion: q (U l) = (q U) l, so that all heads attend to the latents directly."""
        up_HXL = self.kv_up.matrix().to(nope_BHTN.dtype).view(-1, self.mla.qk_nope_head_dim + self.mla.v_head_dim, self.mla.kv_lora_rank)
        key_up_HNL, value_up_HVL = up_HXL.split((self.mla.qk_nope_head_dim, self.mla.v_head_dim), dim=1)
        query = torch.cat((nope_BHTN @ key_up_HNL, rotated_BHTR), dim=-1)
        # scores must be scaled as for heads of C dimensions, but attention divides by the root of the size that it is given
        query = query * (query.shape[-1] / (self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim)) ** 0.5
        dropout = self.dropout if self.training else 0.0
        mixed_BHTL = attend_fast(query, entries_B1SX, entries_B1SX[..., : self.mla.kv_lora_rank], mask, dropout)
        return mixed_BHTL @ value_up_HVL.mT
