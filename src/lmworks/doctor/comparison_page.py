"""The comparison of models as a page: one static HTML file without a script, from the document that `lmworks compare` makes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmworks import __version__
from lmworks.doctor.templates import source, template
from lmworks.files import write_text

Json = Mapping[str, Any]


def write_comparison_page(path: Path, document: Json) -> None:
    """Write the page of a comparison, atomically."""
    write_text(path, render(document).encode("utf-8", "replace").decode())


def render(document: Json) -> str:
    """The page as text."""
    first, *others = [model["name"] for model in document["models"]]
    return template("comparison.html").render(
        first=first,
        others=others,
        models=document["models"],
        comparisons=[_comparison(one) for one in document["comparisons"]],
        failures=[(model, _failures(scores)) for model, scores in document["failures"].items() if scores],
        tests=document["tests"],
        how=document["how"],
        style=source("page.css", "comparison.css"),
        written=time.strftime("%d %B %Y, %H:%M", time.localtime()),
        version=__version__,
    )


def _comparison(one: Json) -> dict[str, Any]:
    rows = [_row(row["score"], row, 100, 1) for row in one["scores"]]
    if one["pooled"]:
        rows.append(_row(f"mean of {one['pooled']['scores']} scores", one["pooled"], 100, 1))
    bits = [_row(row["domain"], row, 1, 4) for row in one["bits_per_byte"]]
    for part in (rows, bits):
        _place(part)
    changed = [row for row in one["scores"] if row.get("lost") or row.get("gained")]
    return {"a": one["a"], "b": one["b"], "rows": rows, "bits": bits, "not_comparable": one["not_comparable"], "changed": changed}


def _row(name: str, row: Json, scale: float, digits: int) -> dict[str, Any]:
    values = {key: scale * row[key] for key in ("a", "b", "difference", "minimum_detectable")}
    low, high = (scale * end for end in row["interval"])
    side = {"better": "above", "worse": "below"}.get(row["verdict"], "near")
    text = {key: f"{value:.{digits}f}" for key, value in values.items() if key != "difference"}
    return {
        "name": name, "n": f"{row['n']:,}", **text, "difference": f"{values['difference']:+.{digits}f}", "value": values["difference"],
        "low": low, "high": high, "interval": f"{low:+.{digits}f} to {high:+.{digits}f}", "verdict": row["verdict"], "side": side,
        "p": f"{row['adjusted_p']:.3f}" if row["adjusted_p"] >= 0.001 else "<0.001", "kind": row["kind"],
        "lost": row.get("lost", ""), "gained": row.get("gained", ""),
    }  # fmt: skip


def _place(rows: list[dict[str, Any]]) -> None:
    """Places on one scale in %, 0 in the middle."""
    reach = max((abs(end) for row in rows for end in (row["low"], row["high"])), default=0.0) or 1.0
    for row in rows:
        left, dot, right = (50 + 50 * row[key] / reach for key in ("low", "value", "high"))
        row |= {"left": left, "width": right - left, "dot": dot}


def _failures(scores: Json) -> list[dict[str, Any]]:
    kinds = list(dict.fromkeys(kind for found in scores.values() for kind in found["kinds"]))
    return [
        {
            "score": name,
            "kinds": kinds,
            "whole": _counts("all items", found, kinds),
            "parts": [
                *(_counts(row["subject"], row, kinds) for row in sorted(found["by_subject"], key=lambda row: -row["failed"] / row["n"])),
                *(_counts(f"{row['tokens'][0]:,} to {row['tokens'][1]:,} tokens", row, kinds) for row in found["by_length"]),
            ],
            "examples": found["examples"],
        }
        for name, found in scores.items()
    ]


def _counts(name: str, row: Json, kinds: list[str]) -> dict[str, Any]:
    shares = [100 * row["kinds"].get(kind, 0) / row["n"] for kind in kinds]
    return {"name": name, "n": f"{row['n']:,}", "failed": 100 * row["failed"] / row["n"], "shares": shares}
