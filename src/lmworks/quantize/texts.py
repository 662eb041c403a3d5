"""Held-out text for certificates and text for calibration, as token ids; the two never share a document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from lmworks.errors import UserError
from lmworks.evaluate.heldout import held_out
from lmworks.files import explain_damage
from lmworks.tokenizer.tokenizer import Tokenizer

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

    A file is .txt or .md (one document), .jsonl or .parquet (with a column `text`). Without files the validation text of the run is used:
    every second document for calibration. Raises `UserError` if there is no text.
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
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows = pq.read_table(path).to_pylist()
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        elif path.suffix in (".txt", ".md"):
            rows = [{"text": part} for part in path.read_text(encoding="utf-8").split("\n\n\n")]
        else:
            raise UserError(f"{path}: text is read from .txt, .md, .jsonl and .parquet files")
        found: dict[str, list[str]] = {}
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise UserError(f"{path}: row {number} has no text under 'text'")
            if row["text"].strip():
                found.setdefault(str(row.get("domain") or "text"), []).append(row["text"])
    if not found:
        raise UserError(f"{path} holds no text")
    return found
