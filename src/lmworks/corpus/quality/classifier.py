"""A linear classifier on hashed n-grams, as fastText (Joulin et al. 2016) and DCLM (Li et al. 2024) use for web text.

The evidence of a document is the mean weight of its word n-grams, so it does not depend on the length. A curve fitted on separate
calibration documents maps it to the probability that the document is good. The words are those of `lmworks.corpus.units`, which a batch
hashes once for all steps, so that a document costs one look-up per n-gram.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.corpus.units import Units, ngrams_of
from lmworks.errors import UserError
from lmworks.files import atomic_path, open_regular

_FORMAT = "lmworks quality classifier 1"


def grams(units: Units, longest: int, bits: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each length up to `longest`: (bucket of each n-gram, its document), both (G,), within documents only."""
    owners = np.repeat(np.arange(units.documents), np.diff(units.bounds))
    for n, hashes in ngrams_of(units.hashes, range(1, longest + 1)):
        inside = owners[: len(hashes)] == owners[n - 1 :]
        yield (hashes[inside] >> np.uint64(64 - bits)).astype(np.int64), owners[: len(hashes)][inside]


@dataclass(frozen=True)
class Curve:
    """Maps evidence to a probability: a logistic curve (Platt 1999), corrected by piecewise linear interpolation through (`xs`, `ys`).

    The logistic curve alone is overconfident at both ends. The corrected curve is strictly increasing, so the ranking does not change.
    """

    scale: float
    offset: float
    xs: tuple[float, ...] = (0.0, 1.0)
    ys: tuple[float, ...] = (0.0, 1.0)

    def __call__(self, evidence: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            logistic = 1 / (1 + np.exp(-(self.scale * evidence + self.offset)))
        return np.interp(logistic, self.xs, self.ys)


@dataclass(frozen=True)
class Classifier:
    """`weights` by bucket, (2**bits,) float32, of n-grams of up to `ngram` words; `report` has the metrics on the test split."""

    weights: np.ndarray
    ngram: int
    curve: Curve
    report: dict[str, Any]

    @property
    def bits(self) -> int:
        return len(self.weights).bit_length() - 1

    def evidence(self, units: Units) -> np.ndarray:
        """Mean weight of the n-grams of each document, (D,) float64; 0 for one without words."""
        total, count = np.zeros(units.documents), np.zeros(units.documents)
        for buckets, owners in grams(units, self.ngram, self.bits):
            total += np.bincount(owners, self.weights[buckets], units.documents)
            count += np.bincount(owners, minlength=units.documents)
        return total / np.maximum(count, 1)

    def scores(self, units: Units) -> np.ndarray:
        """Probability that each document is good, (D,) float64; 0 for one without words."""
        return np.where(np.diff(units.bounds) > 0, self.curve(self.evidence(units)), 0.0)

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of everything that determines a score."""
        facts = json.dumps([self.ngram, asdict(self.curve)])
        return hashlib.sha256(facts.encode() + np.ascontiguousarray(self.weights, "<f4").tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically."""
        from safetensors.numpy import save_file

        about = {"ngram": self.ngram, "curve": asdict(self.curve), "fingerprint": self.fingerprint, "report": self.report}
        with atomic_path(path) as aside:
            save_file({"weights": self.weights}, aside, {"format": _FORMAT, "classifier": json.dumps(about)})

    @classmethod
    def load(cls, path: Path) -> Classifier:
        """Read a classifier file. `UserError` if it is missing, not a classifier, or altered."""
        from safetensors import SafetensorError, safe_open

        again = "make it with: lmworks corpus classifier train"
        try:
            open_regular(path).close()  # a pipe would be waited for
            with safe_open(path, "np") as file:
                about, weights = file.metadata() or {}, file.get_tensor("weights") if "weights" in file.keys() else None  # noqa: SIM118
        except FileNotFoundError:
            raise UserError(f"there is no classifier at {path}; {again}") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a safetensors file ({error}); {again}") from None
        if about.get("format") != _FORMAT or weights is None:
            raise UserError(f"{path} is not a quality classifier; {again}")
        facts = json.loads(about["classifier"])
        curve = facts["curve"]
        curve = Curve(curve["scale"], curve["offset"], tuple(curve["xs"]), tuple(curve["ys"]))
        found = cls(weights, facts["ngram"], curve, facts["report"])
        if found.fingerprint != facts["fingerprint"]:
            raise UserError(f"{path} has been altered (its fingerprint differs); copy it again, or {again}")
        return found
