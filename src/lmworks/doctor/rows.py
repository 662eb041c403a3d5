"""`lmworks doctor --find-rows STEP`: the sequences of a step that a NaN or a spike began with, and the documents that they come from.

`lmworks doctor --experts FILE`: which experts of a model a text uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmworks.doctor.recompute import Recomputation
from lmworks.errors import UserError
from lmworks.run.replay import bad_batches, load_bad
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.lineage import SequenceDocuments
from lmworks.tokenizer import load as load_tokenizer

_GRADIENTS = 16  # sequences, those with the largest loss, of which the gradient is computed
_MOST_TEXT = 1 << 24  # bytes of a text for `expert_use`


@dataclass(frozen=True)
class Row:
    """A sequence of a step: its loss (nats per valid token) and the gradient norm of its mean loss, each also as a multiple of the median
    of the step; the share of its most frequent token; its source, empty if it is not known; and its documents, None in tuning and
    for a saved batch of another order."""

    sequence: int
    loss: float
    loss_over_median: float
    grad_norm: float
    repeated: float
    source: str
    documents: SequenceDocuments | None


def find_rows(run: Recomputation, step: int) -> list[Row]:
    """The sequences of a step, those first whose loss or gradient is not finite, then by their loss. Raises `UserError` for a step that the
    run does not have."""
    if not 0 <= step < run.batches.steps:
        raise UserError(f"{run.stage.stage} has the steps 0 to {run.batches.steps - 1:,}; there is no step {step:,}")
    kept = bad_batches(run.run_dir, run.stage.model)
    batch, documents = run.batch(step), run.documents(step)
    sources = run.sources_of(batch)
    saved = load_bad(kept[step], step, run.recipe) if step in kept else None
    own = saved is None or np.array_equal(saved.tokens, batch.tokens)  # a batch of a rank, or of data that was changed since
    batch = batch if saved is None else saved
    losses = run.row_losses(batch, step)
    middle = float(np.nanmedian(losses[np.isfinite(losses)])) if np.isfinite(losses).any() else math.nan
    order = sorted(range(len(losses)), key=lambda row: -math.inf if not math.isfinite(losses[row]) else -losses[row])
    rows = []
    for place, row in enumerate(order):
        one = batch.rows(row, row + 1)
        norm = run.repeat(step, one)[1] if place < _GRADIENTS else math.nan
        repeated = float(np.bincount(one.tokens.ravel()).max() / one.tokens.size)
        source, found = (sources[row], documents[row] if documents else None) if own else ("", None)
        rows.append(Row(row, float(losses[row]), float(losses[row] / middle), norm, repeated, source, found))
    return sorted(rows, key=lambda found: (math.isfinite(found.loss) and not math.isinf(found.grad_norm), -found.loss))


def expert_use(run: Recomputation, path: Path) -> dict[str, Any]:
    """How the tokens of a text are divided over the experts of the newest checkpoint: for each MoE layer the share of each expert, the
    effective number of experts (exp of the entropy of the shares), and the experts that get no token.

    Raises `UserError` for a dense model, and for a file that is no text.
    """
    _, model, checkpoint = run.model()
    moe = model.config.moe
    if moe is None:
        raise UserError(f"{checkpoint} is a dense model; only a mixture of experts has experts to look at")
    try:
        if path.stat().st_size > _MOST_TEXT:
            raise UserError(f"{path} is larger than {_MOST_TEXT >> 20} MiB; take a part of it")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {error}") from None
    ids = load_tokenizer(run.run_dir / "tokenizer").encode(text)
    length = int(run.recipe.train.phases[-1].sequence_length)
    if not ids:
        raise UserError(f"{path} has no text")
    whole = len(ids) // length * length
    pieces = [np.array(ids[start : min(start + 8 * length, whole)], np.int32).reshape(-1, length) for start in range(0, whole, 8 * length)]
    pieces += [np.array(ids[whole:], np.int32)[None]] if len(ids) > whole else []
    counts = torch.zeros(model.num_moe_layers, moe.n_routed_experts, dtype=torch.float64)
    (part,) = model.parts
    model.eval()
    with torch.no_grad():
        for piece in pieces:
            begins = np.arange(0, piece.size + 1, piece.shape[1], dtype=np.int32)
            found = part.loss(*model._inputs(Batch(piece, np.full_like(piece, IGNORE), begins, 0, 0)))
            assert found.layers.counts is not None
            counts += found.layers.counts[: len(counts)].double().cpu()
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
    entropy = -(shares * shares.clamp_min(1e-30).log()).sum(1)
    layers = [
        {"layer": model.config.sparse_layers[index], "shares": [round(value, 6) for value in row.tolist()],
         "effective": float(entropy[index].exp()), "unused": [expert for expert, value in enumerate(row.tolist()) if not value]}
        for index, row in enumerate(shares)
    ]  # fmt: skip
    return {"checkpoint": str(checkpoint), "tokens": len(ids), "experts": moe.n_routed_experts, "layers": layers}
