"""Exact parameter counts and floating-point operations of training, from the config alone; the counts equal those of the built model.

Forward: 2 per active parameter and token; forward and backward: 6 (Kaplan et al., arXiv:2001.08361). The embedding
look-up multiplies nothing and is not counted; the head is. Attention adds 2 H (d + v) per pair of query and key in the forward
(scores of d dimensions, values of v) and three times that with the backward; a causal query sees (L + 1) / 2 keys on average,
fewer under a window. A linear layer adds the operations of its recurrence, whatever the length.
Each layer of multi-token prediction is one layer more, and once more through the head. Documents
shorter than the sequence cost less than this; activation checkpointing costs more, but that is not useful work. A plan counts the forward
pass in which a step of several micro-batches counts the loads of experts for `moe.balance.method` aux.

From both follows the best vocabulary size of a planned model: the cost of an entry against the tokens that it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from lmworks.recipe.mixers import MIXERS
from lmworks.recipe.parameter import Component, Parameter
from lmworks.recipe.parameters import counted_parameters, parameters
from lmworks.recipe.schema.model import Lora, Model, target_matches

if TYPE_CHECKING:
    from rich.table import Table


_TARGETS: dict[Component, tuple[str, ...]] = {
    "attention": ("attention", "all-linear"), "dense ffn": ("mlp", "all-linear"), "shared experts": ("mlp", "all-linear"),
    "experts": ("experts",),
}  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Parameters of a model. `active` is the number that one token uses, with the whole embedding.

    `mtp` and `mtp_active` are those of multi-token prediction, which exists only in training; no other count here includes them.
    """

    total: int
    active: int
    embedding: int
    tied: bool
    components: dict[str, int]
    active_components: dict[str, int]
    mtp: int = 0
    mtp_active: int = 0

    @property
    def trained(self) -> int:
        """All parameters in training."""
        return self.total + self.mtp

    @property
    def active_computed(self) -> int:
        """Active parameters in matrix multiplications: without the embedding look-up, but with the head, even if it is tied."""
        return self.active if self.tied else self.active - self.embedding


def count_by_component(model: Model) -> Counts:
    """Count a resolved model, total and active, by component."""
    components: dict[str, int] = {}
    active: dict[str, float] = {}
    mtp, mtp_active = 0, 0.0
    for parameter, number in counted_parameters(model):
        size = number * parameter.size
        if parameter.mtp:
            mtp += size
            mtp_active += size * parameter.active
            continue
        components[parameter.component] = components.get(parameter.component, 0) + size
        active[parameter.component] = active.get(parameter.component, 0) + size * parameter.active
    rounded = {name: round(value) for name, value in active.items()}
    return Counts(
        sum(components.values()), sum(rounded.values()), components["embedding"], model.tie_word_embeddings, components, rounded,
        mtp, round(mtp_active),
    )  # fmt: skip


def adapter_size(parameter: Parameter, lora: Lora) -> int:
    """Parameters of the low-rank adapter of one tensor, or of a stack of them; 0 if it has none."""
    groups, name = _TARGETS.get(parameter.component, ()), parameter.name.removesuffix(".weight")
    if not groups or not parameter.is_matrix or parameter.mtp:
        return 0
    if not any(target_matches(target, name, groups) for target in lora.targets):
        return 0
    *stack, rows, columns = parameter.shape
    return prod(stack) * lora.rank * (rows + columns)


def count_adapters(model: Model, lora: Lora) -> int:
    """Parameters of all low-rank adapters."""
    return sum(adapter_size(parameter, lora) for parameter in parameters(model))


# operations per parameter and token: of weights that are trained, of those that only pass gradients on, and of a forward pass alone
TRAINED, FROZEN, FORWARD = 6.0, 4.0, 2.0


@dataclass(frozen=True)
class Flops:
    """Operations of training per token."""

    parameters: float
    attention: float
    mtp: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.attention + self.mtp


def keys_seen(model: Model, layer: int, length: int) -> float:
    """Average number of keys a query of `layer` attends to in a causal sequence of `length`; none without attention."""
    if not model.attends(layer):
        return 0.0
    window = model.sliding_window if model.slides(layer) else None
    if window is None or window >= length:
        return (length + 1) / 2
    return (window * (window + 1) / 2 + (length - window) * window) / length


def flops_per_token(model: Model, length: int, frozen: bool = False, micro_batches: int = 1) -> Flops:
    """Training operations per token at sequence length `length`; with `frozen` weights, whose gradients nobody computes, 4 per parameter
    instead of 6. Low-rank adapters are not counted: they add rank / width.

    `micro_batches` of a rank in a step: with several, the forward pass that counts the loads for an auxiliary loss is counted too. For the
    MFU of a run, which is of the operations of the model, it is 1."""
    counted = model.moe is not None and model.moe.balance.has_step_loss and micro_batches > 1
    each = (FROZEN if frozen else TRAINED) + FORWARD * counted
    assert model.num_attention_heads and model.head_dim and model.num_hidden_layers
    counts, ahead = count_by_component(model), model.mtp.num_nextn_predict_layers if model.mtp else 0
    per_pair = (3 + counted) * 2.0 * model.num_attention_heads * (model.head_dim + (model.mla.v_head_dim if model.mla else model.head_dim))
    pairs = [keys_seen(model, layer, length) for layer in range(model.num_hidden_layers + ahead)]
    again = ahead * counts.embedding  # one more pass through the head, which is as large as the embedding
    mtp = each * (counts.mtp_active + again) + per_pair * sum(pairs[model.num_hidden_layers :])
    of_layers = (model.mixer(layer) for layer in range(model.num_hidden_layers))
    recurrent = (3 + counted) * sum(MIXERS[mixer].flops(model) for mixer in of_layers if mixer in MIXERS)
    return Flops(each * counts.active_computed, per_pair * sum(pairs[: model.num_hidden_layers]) + recurrent, mtp)


def training_flops(active: float, tokens: float) -> float:
    """The rule of thumb 6 N D, without attention."""
    return 6.0 * active * tokens


def mfu(tokens_per_second: float, flops_per_token: float, devices: int, tflops: float) -> float:
    """Model FLOPs utilization: the fraction of the devices' dense peak (PaLM, arXiv:2204.02311)."""
    return tokens_per_second * flops_per_token / (devices * tflops * 1e12)


_TOLERANCE = 0.01  # costs this close count as equal; the smaller vocabulary then has fewer rarely seen entries


def compare_vocabularies(model: Model, length: int, measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Extend the rows of `tokenizer.train.at_sizes` with the costs of each size for `model` at sequence length `length`.

    Adds `parameters`, `embedding_share` and `active_share` (embedding and head among all, and among active parameters), `head_share`
    (of the training FLOPs), `flops_per_byte` of training text, and `recommended`: the smallest size whose FLOPs per byte of text are
    within 1% of the minimum. A larger vocabulary makes fewer tokens of a text, but each token costs a larger head. The head dominates the
    cost of a small model and is negligible in a large one (arXiv:2407.13623 finds the same with losses instead of costs).
    """
    rows = []
    for size in measured:
        cut = model.model_copy(update={"vocab_size": size["entries"]})
        counts, flops = count_by_component(cut), flops_per_token(cut, length)
        ends = counts.embedding * (1 if counts.tied else 2)
        rows.append({
            **size, "parameters": counts.total, "embedding_share": ends / counts.total, "active_share": ends / counts.active,
            "head_share": 6.0 * counts.embedding / flops.total, "flops_per_byte": flops.total * size["tokens_per_byte"],
        })
    least = min(row["flops_per_byte"] for row in rows)
    chosen = min((row for row in rows if row["flops_per_byte"] <= least * (1 + _TOLERANCE)), key=lambda row: int(row["entries"]))
    return [row | {"recommended": row is chosen} for row in rows]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of `compare_sizes` as a table for the terminal, with the reason for the recommendation."""
    from rich.table import Table

    least = min(row["flops_per_byte"] for row in rows)
    chosen = next(row for row in rows if row["recommended"])
    why = (f"{chosen['entries']:,} entries: the smallest vocabulary within {100 * _TOLERANCE:.0f}% of the fewest FLOPs per byte of text; "
           f"embedding and head are {100 * chosen['embedding_share']:.1f}% of the parameters")
    shown = Table(title="Vocabulary sizes for this model", title_justify="left", caption=why, caption_justify="left")
    for column in ("entries", "bytes/token", "tokens/word", "parameters", "embedding", "of active", "head's FLOPs", "FLOPs per byte"):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(
            f"{row['entries']:,}{' *' if row['recommended'] else ''}", f"{row['bytes_per_token']:.2f}", f"{row['fertility']:.2f}",
            f"{row['parameters'] / 1e6:,.1f}M", f"{100 * row['embedding_share']:.1f}%", f"{100 * row['active_share']:.1f}%",
            f"{100 * row['head_share']:.1f}%", f"{row['flops_per_byte'] / least:.3f}",
        )  # fmt: skip
    return shown
