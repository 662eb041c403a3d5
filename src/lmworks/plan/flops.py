"""Floating-point operations of training, from the config.

Forward: 2 per active parameter and token; forward and backward: 6 (Kaplan et al., arXiv:2001.08361). The embedding
look-up multiplies nothing and is not counted; the head is. Attention adds 2 H (d + v) per pair of query and key in the forward
(scores of d dimensions, values of v) and three times that with the backward; a causal query sees (L + 1) / 2 keys on average,
fewer under a window. Each layer of multi-token prediction is one layer more, and once more through the head. Documents
shorter than the sequence cost less than this; activation checkpointing costs more, but that is not useful work.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmworks.plan.counts import count_by_component
from lmworks.recipe.schema.model import Model

TRAINED, FROZEN = 6.0, 4.0  # operations per parameter and token: of weights that are trained, and of those that only pass gradients on


@dataclass(frozen=True)
class Flops:
    """Forward and backward operations per token."""

    parameters: float
    attention: float
    mtp: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.attention + self.mtp


def keys_seen(model: Model, layer: int, length: int) -> float:
    """Average number of keys a query of `layer` attends to in a causal sequence of `length`."""
    window = model.sliding_window if model.slides(layer) else None
    if window is None or window >= length:
        return (length + 1) / 2
    return (window * (window + 1) / 2 + (length - window) * window) / length


def flops_per_token(model: Model, length: int, frozen: bool = False) -> Flops:
    """Training operations per token at sequence length `length`; with `frozen` weights, whose gradients nobody computes, 4 per parameter
    instead of 6. Low-rank adapters are not counted: they add rank / width."""
    each = FROZEN if frozen else TRAINED
    assert model.num_attention_heads and model.head_dim and model.num_hidden_layers
    counts, ahead = count_by_component(model), model.mtp.num_nextn_predict_layers if model.mtp else 0
    per_pair = 3 * 2.0 * model.num_attention_heads * (model.head_dim + (model.mla.v_head_dim if model.mla else model.head_dim))
    pairs = [keys_seen(model, layer, length) for layer in range(model.num_hidden_layers + ahead)]
    again = ahead * counts.embedding  # one more pass through the head, which is as large as the embedding
    mtp = each * (counts.mtp_active + again) + per_pair * sum(pairs[model.num_hidden_layers :])
    return Flops(each * counts.active_computed, per_pair * sum(pairs[: model.num_hidden_layers]), mtp)


def training_flops(active: float, tokens: float) -> float:
    """The rule of thumb 6 N D, without attention."""
    return 6.0 * active * tokens


def mfu(tokens_per_second: float, flops_per_token: float, devices: int, tflops: float) -> float:
    """Model FLOPs utilization: the fraction of the devices' dense peak (PaLM, arXiv:2204.02311)."""
    return tokens_per_second * flops_per_token / (devices * tflops * 1e12)
