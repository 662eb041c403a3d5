"""Forgetting while a stage after pretraining trains: what general text costs, beside what it cost the weights that the stage began with.

The text is held-out text of the recipe's own corpus, or else the pages that come with lmworks (`text/general_text.py`). It is the same at
each validation, so that the difference has far less noise than either value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lmworks.errors import UserError
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.align import Dpo, Grpo
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import Tune
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.manifest import MANIFEST, Manifest
from lmworks.shards.validation import Validation
from lmworks.text.general_text import general_text
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.validation import validate
from lmworks.ui.terminal import console

GENERAL, RISE = "validation/general_bits_per_byte", "validation/forgetting"
_BYTES = 4096
"""Of each domain. Four thousand tokens in all cost as much as 1,400 tokens of training: 1% to 4% of a stage that validates ten times on
some hundred thousand tokens."""
_LENGTH = 512


class ForgettingMonitor:
    """Measures general text at each validation of a stage. Made while `model` has the weights that the stage begins with."""

    def __init__(
        self, recipe: Recipe, run_dir: Path, stage: str, model: ParallelModel, tokenizer: Tokenizer, report: Callable[..., None]
    ) -> None:  # fmt: skip
        """`report` writes an event of the ledger."""
        section: Tune | Dpo | Grpo = getattr(recipe, stage)
        self._options, self._stage, self._model, self._report = section.forgetting, stage, model, report
        self._advice = _advice(stage, section.learning_rate or 0.0, section.lora is not None)
        length = min(_LENGTH, int(recipe.model.max_position_embeddings or _LENGTH))
        rows = max(1, recipe.train.micro_batch_sequences or 1)
        self._text = _own_text(run_dir / "shards", length, rows) or shipped_text(tokenizer, length, rows)
        self._before = self._bits_per_byte()
        self._warned = False

    def measure(self) -> dict[str, float]:
        """The metrics `GENERAL` and `RISE`, both in bits per byte. Warns once above `warn_bits_per_byte`; raises
        `UserError` above `stop_bits_per_byte`."""
        now = self._bits_per_byte()
        rise = now - self._before
        said = f"general text costs {now:.3f} bits per byte, {rise:+.3f} since {self._stage} began"
        limit = self._options.stop_bits_per_byte
        if limit is not None and not rise <= limit:
            self._report("forgetting", stage=self._stage, bits_per_byte=now, rise=rise, limit=limit)
            raise UserError(
                f"{said}, which is more than {self._stage}.forgetting.stop_bits_per_byte ({limit:g}); its checkpoints are kept: "
                f"{self._advice}; or raise the limit"
            )
        if not self._warned and not rise <= self._options.warn_bits_per_byte:
            self._warned = True
            self._report("forgetting", stage=self._stage, bits_per_byte=now, rise=rise, limit=self._options.warn_bits_per_byte)
            if self._model.ranks.is_first:
                console.print(f"{said}: the model forgets; {self._advice}", style="yellow")
        return {GENERAL: now, RISE: rise}

    def _bits_per_byte(self) -> float:
        return validate(self._model, self._text)["validation/bits_per_byte"]


def _advice(stage: str, rate: float, lora: bool) -> str:
    remedies = [f"lower {stage}.learning_rate ({rate:.2g})", "train less"]
    remedies += [] if lora else [f"train adapters ({stage}.lora)"]
    remedies += ["mix in general text (tune.replay)"] if stage == "tune" else []
    return f"{', '.join(remedies[:-1])} or {remedies[-1]}"


def _own_text(shards: Path, length: int, rows: int) -> Mapping[str, Validation]:
    """Held-out text of the recipe's own corpus; empty where there is none."""
    if not (shards / MANIFEST).is_file():
        return {}
    manifest = Manifest.load(shards)
    return {domain: Validation(shards, manifest, domain, length, rows, _BYTES) for domain in manifest.domains()}


def shipped_text(tokenizer: Tokenizer, length: int, rows: int) -> dict[str, list[Batch]]:
    """The text that comes with lmworks: of each document the first tokens, at most `length` and `_BYTES` divided by the documents of its
    domain, one document per row."""
    found = {}
    for domain, documents in general_text().items():
        share = _BYTES // len(documents)
        encoded = [_begin(tokenizer, text, length + 1, share) for text in documents]
        found[domain] = [_batch(tokenizer, encoded[at : at + rows], length, rows) for at in range(0, len(encoded), rows)]
    return found


def _begin(tokenizer: Tokenizer, text: str, tokens: int, size: int) -> np.ndarray:
    ids = np.array(tokenizer.encode(text)[:tokens], np.int32)
    return ids[: max(2, int(np.searchsorted(np.cumsum(tokenizer.byte_lengths[ids]), size, side="right")))]


def _batch(tokenizer: Tokenizer, documents: Sequence[np.ndarray], length: int, rows: int) -> Batch:
    """One document per row; rows without a document have no labels. All batches have one shape, so that nothing is compiled twice."""
    tokens, labels = np.zeros((rows, length), np.int32), np.full((rows, length), IGNORE, np.int32)
    begins = []
    for row in range(rows):
        inputs = 0
        if row < len(documents):
            ids = documents[row]
            inputs = len(ids) - 1
            tokens[row, :inputs], labels[row, :inputs] = ids[:-1], ids[1:]
        begins += [row * length, *([row * length + inputs] if 0 < inputs < length else [])]
    sizes = np.where(labels == IGNORE, 0, tokenizer.byte_lengths[np.maximum(labels, 0)]).sum(axis=1, dtype=np.int64)
    return Batch(tokens, labels, np.array([*begins, tokens.size], np.int32), 0, 0, sizes)


