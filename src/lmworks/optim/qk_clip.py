"""QK-clip: the scores of attention are bounded by scaling the weights of queries and keys (Kimi K2, arXiv:2507.20534, section 2.1).

After an update, each head whose largest score S of the step exceeded the threshold has its scores multiplied by gamma = threshold / S.
A score is bilinear in the head's query and key, so any split gamma^a on queries and gamma^(1 - a) on keys does that exactly. Only what is
the head's own is scaled, so that no other head changes:

| attention     | queries                                   | keys                                         |
| MHA           | gamma^(1/2)                               | gamma^(1/2)                                  |
| GQA and MQA   | gamma                                     | untouched: several heads share the key       |
| latent (MLA)  | without positions gamma^(1/2), rotated gamma | without positions gamma^(1/2); the rotated key is shared: untouched |

Biases are scaled with their weights. Momentum and second moments stay as they are, as in the paper.

Shapes: A layers of attention, H heads, R rows of a matrix that this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lmworks.optim.groups import local, part_of
from lmworks.recipe.schema.model import Model


@dataclass(frozen=True)
class _Rows:
    """The rows of a parameter on this rank: row r is multiplied by the factor of head `heads_R[r]`, to the power of `powers_R[r]`."""

    parameter: Tensor
    layer: int  # among the layers of attention
    heads_R: Tensor
    powers_R: Tensor


class QkClip:
    """Scales the query and key weights of heads with scores above `threshold`. It has no state."""

    def __init__(self, parameters: Mapping[str, Tensor], config: Model, threshold: float) -> None:
        """`parameters`: by name, on their device, sharded by rows or not; those of other pipeline stages are absent."""
        self.threshold, self._rows = threshold, []
        for layer, prefix in enumerate(_prefixes(config)):
            for name, powers_HC in _powers(config).items():
                for kind in ("weight", "bias"):
                    if (parameter := parameters.get(f"{prefix}.attention.{name}.{kind}")) is not None:
                        self._rows.append(_rows_of(parameter, layer, powers_HC))

    @torch.no_grad()
    def step(self, logits_AH: Tensor, apply: Tensor | None = None) -> None:
        """Scale the weights after an update, from the largest score of each head in the step, over all ranks. `apply` (0-d bool) False
        leaves them unchanged, without a wait of the host."""
        if logits_AH.device.type == "cpu" and not bool((logits_AH > self.threshold).any()):
            return
        clipped_AH = logits_AH > self.threshold
        factors_AH = torch.where(clipped_AH if apply is None else clipped_AH & apply, self.threshold / logits_AH, 1.0)
        for rows in self._rows:
            factor_R = factors_AH[rows.layer][rows.heads_R] ** rows.powers_R
            weight = local(rows.parameter)
            weight.mul_(factor_R.view(-1, *(1,) * (weight.ndim - 1)))


def _prefixes(config: Model) -> Iterator[str]:
    """The blocks with attention, by name."""
    layers = config.num_hidden_layers or 0
    for layer in config.attention_layers:
        yield f"layers.{layer}" if layer < layers else f"mtp.{layer - layers}.block"


def _powers(config: Model) -> dict[str, Tensor]:
    """The powers of a head's factor for the rows of its matrices, by the names of the matrices: (H, rows of a head)."""
    heads, head_dim, mla = config.num_attention_heads, config.head_dim, config.mla
    assert heads and head_dim and config.num_key_value_heads
    if mla is not None:
        query = torch.tensor([0.5] * mla.qk_nope_head_dim + [1.0] * mla.qk_rope_head_dim).expand(heads, -1)
        key = torch.tensor([0.5] * mla.qk_nope_head_dim + [0.0] * mla.v_head_dim).expand(heads, -1)
        return {"query_up" if mla.q_lora_rank else "query": query, "kv_up": key}
    if config.num_key_value_heads == heads:
        return {name: torch.full((heads, head_dim), 0.5) for name in ("query", "key")}
    return {"query": torch.ones(heads, head_dim)}


def _rows_of(parameter: Tensor, layer: int, powers_HC: Tensor) -> _Rows:
    heads_HC = torch.arange(len(powers_HC))[:, None].expand_as(powers_HC)

    def here(rows_HC: Tensor) -> Tensor:
        """What this rank holds of a number of each row of the whole matrix."""
        whole = rows_HC.reshape(-1, *(1,) * (parameter.ndim - 1)).expand(parameter.shape)
        held = part_of(whole, parameter)
        return (held if parameter.ndim == 1 else held[:, 0]).to(local(parameter).device, copy=True)

    return _Rows(parameter, layer, here(heads_HC), here(powers_HC))
