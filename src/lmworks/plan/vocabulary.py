"""The best vocabulary size of a planned model: the cost of an entry against the tokens that it saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmworks.plan.counts import count_by_component
from lmworks.plan.flops import flops_per_token
from lmworks.recipe.schema.model import Model

if TYPE_CHECKING:
    from rich.table import Table

_TOLERANCE = 0.01  # costs this close count as equal; the smaller vocabulary then has fewer rarely seen entries


def compare_sizes(model: Model, length: int, measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Extend the rows of `tokenizer.sizes.at_sizes` with the costs of each size for `model` at sequence length `length`.

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
