"""How far a quantized model is from the original on held-out text: KL divergence, same first choice, perplexity.

Text for certificates is held out, text for calibration is not, and the two never share a document. Where the engine of a format is not
installed, our own model computes the logits with dequantized weights.

Shapes: T tokens of a window, V vocabulary entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.evaluate.bits_per_byte import held_out
from lmworks.evaluate.sets.sources import local_rows
from lmworks.evaluate.statistics import compare_bits, wilson
from lmworks.io.files import explain_damage
from lmworks.model import Transformer
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.ui.terminal import bar

_FEWEST = 8  # tokens of a window that is worth running
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of one document, and the domain of the document."""

    ids: tuple[int, ...]
    domain: str


@dataclass(frozen=True)
class Texts:
    """Windows to measure on and windows to calibrate with, and where each came from."""

    measured: list[Window]
    calibration: list[Window]
    measured_from: str
    calibration_from: str

    @property
    def longest(self) -> int:
        """Tokens of the longest window that is measured."""
        return max(len(window.ids) for window in self.measured)


def read_texts(
    run_dir: Path | None, held_out_file: Path | None, calibration_file: Path | None, tokenizer: Tokenizer, length: int, most: int
) -> Texts:
    """At most `most` tokens of each kind in windows of at most `length` tokens, taken from all domains in turn.

    A file is .txt or .md (one document), or has rows with a column `text`: .jsonl, compressed or not, or .parquet. Without files the
    validation text of the run is used: every second document for calibration. Raises `UserError` if there is no text.
    """
    if held_out_file is not None:
        documents, source = _file(held_out_file), str(held_out_file)
    elif run_dir is not None:
        documents, source = held_out(run_dir / "corpus"), f"validation text of {run_dir}"
    else:
        raise UserError("a Hugging Face directory has no held-out text: name some with --held-out FILE (.txt, .jsonl or .parquet)")
    if calibration_file is not None:
        measured, calibration, calibrated_from = documents, _file(calibration_file), str(calibration_file)
        if {text for part in measured.values() for text in part} & {text for part in calibration.values() for text in part}:
            raise UserError(f"{calibration_file} and {source} share a document; calibrate with other text than is measured")
    else:
        calibrated_from = f"every second document of {source}"
        measured = {domain: parts[::2] for domain, parts in documents.items()}
        calibration = {domain: parts[1::2] for domain, parts in documents.items() if len(parts) > 1}
    found = list(_windows(measured, tokenizer, length, most))
    if not found:
        raise UserError(f"{source} holds no text of at least {_FEWEST} tokens to measure on")
    return Texts(found, list(_windows(calibration, tokenizer, length, most)), source, calibrated_from)


def _windows(documents: Mapping[str, Sequence[str]], tokenizer: Tokenizer, length: int, most: int) -> Iterator[Window]:
    total = 0
    for turn in zip_longest(*(_of_domain(domain, parts, tokenizer, length) for domain, parts in documents.items())):
        for window in filter(None, turn):
            if total and most - total < _FEWEST:
                return
            ids = window.ids[: max(_FEWEST, most - total)]
            total += len(ids)
            yield Window(ids, window.domain)


def _of_domain(domain: str, parts: Sequence[str], tokenizer: Tokenizer, length: int) -> Iterator[Window]:
    for text in parts:
        ids = tokenizer.encode(text)
        for begin in range(0, len(ids), length):
            if len(ids) - begin >= _FEWEST:
                yield Window(tuple(ids[begin : begin + length]), domain)


def _file(path: Path) -> dict[str, list[str]]:
    """Domain -> documents of a file."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; name a .txt, .md, .jsonl or .parquet file with text")
    if path.stat().st_size > _MOST_BYTES:
        raise UserError(f"{path} is larger than 1 GiB; a few megabytes of text are enough")
    with explain_damage(path):
        if path.suffix.lower() in (".txt", ".md"):
            rows: Iterable[dict[str, Any]] = [{"text": path.read_text(encoding="utf-8-sig")}]
        else:
            rows = (row for _, row in local_rows(str(path)))
        found: dict[str, list[str]] = {}
        for number, row in enumerate(rows, 1):
            if not isinstance(row.get("text"), str):
                raise UserError(f"{path}: row {number} has no text under 'text'")
            if row["text"].strip():
                found.setdefault(str(row.get("domain") or "text"), []).append(row["text"])
    if not found:
        raise UserError(f"{path} holds no text")
    return found


_ROWS = 64  # rows of logits that are compared at a time, in fp64


class Scorer(Protocol):
    """Computes the logits of a quantized model. `name` says what computes them."""

    name: str

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits (T, V) of the token after each of `ids`, as fp32."""


@dataclass(frozen=True)
class Agreement:
    """The quantized model against the original.

    kl_mean, kl_p99, kl_max: KL divergence of the quantized distribution from the original's, in nats per token
    same_choice: share of tokens at which both rank the same token first, with a 95% interval (Wilson)
    perplexity_ratio: of the quantized model to the original, with a 95% interval (paired bootstrap of windows)
    by_domain: domain -> tokens, kl_mean and same_choice
    """

    tokens: int
    windows: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    same_choice: float
    same_choice_interval: tuple[float, float]
    perplexity: float
    original_perplexity: float
    perplexity_ratio: float
    perplexity_interval: tuple[float, float]
    by_domain: dict[str, dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def measure_agreement(original: Transformer, scorer: Scorer, windows: Sequence[Window], label: str) -> Agreement:
    """Compare the logits of both models for every token of `windows`."""
    kl: list[np.ndarray] = []
    same: list[np.ndarray] = []
    losses: list[tuple[float, float, int]] = []
    with bar(label, sum(len(window.ids) for window in windows)) as progress:
        for window in windows:
            ids = torch.tensor(window.ids)
            ours_TV, theirs_TV = original(ids[None])[0].float(), scorer.logits(window.ids)
            nats, equal, loss = _compare(ours_TV, theirs_TV, ids)
            kl.append(nats)
            same.append(equal)
            losses.append((*loss, len(ids) - 1))
            progress.advance(len(ids))
    return _summary(windows, kl, same, losses)


def _compare(ours_TV: Tensor, theirs_TV: Tensor, ids: Tensor) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """KL (T,), same first choice (T,), and the summed losses of both on the next tokens. What is not finite is a KL of infinity."""
    nats, equal, sums = [], [], [0.0, 0.0]
    for begin in range(0, len(ids), _ROWS):
        rows = slice(begin, begin + _ROWS)
        p, q = (logits[rows].double().log_softmax(-1) for logits in (ours_TV, theirs_TV))
        nats.append(torch.nan_to_num((p.exp() * (p - q)).sum(-1), nan=math.inf).clamp(min=0.0).numpy())
        equal.append((p.argmax(-1) == q.argmax(-1)).numpy())
        following = ids[begin + 1 : begin + _ROWS + 1]
        for side, logprobs in enumerate((p, q)):
            sums[side] -= float(logprobs[: len(following)].gather(1, following[:, None]).sum())
    return np.concatenate(nats), np.concatenate(equal), (sums[0], sums[1])


def _summary(
    windows: Sequence[Window], kl: list[np.ndarray], same: list[np.ndarray], losses: list[tuple[float, float, int]]
) -> Agreement:  # fmt: skip
    whole, equal = np.concatenate(kl), np.concatenate(same)
    ours, theirs, counts = (np.array(column, dtype=np.float64) for column in zip(*losses, strict=True))
    total = counts.sum()
    finite = bool(np.isfinite(theirs).all())
    difference = compare_bits(ours.tolist(), theirs.tolist(), [int(count) for count in counts]) if finite else None
    ratio = _power(difference.value) if difference else math.inf
    interval = (_power(difference.low), _power(difference.high)) if difference else (math.inf, math.inf)
    domains: dict[str, list[int]] = {}
    for index, window in enumerate(windows):
        domains.setdefault(window.domain, []).append(index)
    by_domain = {
        domain: {
            "tokens": sum(len(kl[i]) for i in indices),
            "kl_mean": float(np.concatenate([kl[i] for i in indices]).mean()),
            "same_choice": float(np.concatenate([same[i] for i in indices]).mean()),
        }
        for domain, indices in domains.items()
    }
    return Agreement(
        len(whole), len(windows), float(whole.mean()), float(np.quantile(whole, 0.99, method="higher")), float(whole.max()),
        float(equal.mean()), wilson(int(equal.sum()), len(equal)), _power(theirs.sum() / total), _power(ours.sum() / total), ratio,
        interval, by_domain,
    )  # fmt: skip


def _power(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


class OwnScorer:
    """Logits of our model, in fp32. They show what the rounding of weights costs, not what an engine adds to it."""

    name = "lmworks with dequantized weights, fp32"

    def __init__(self, model: Transformer) -> None:
        self.model = model

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits (T, V)."""
        return self.model(torch.tensor(ids)[None])[0].float()
