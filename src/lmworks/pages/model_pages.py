"""Pages about finished models: the comparison of several, and the quantized forms of one.

Each is one static HTML file without a script, from the document that `lmworks compare` or `lmworks quantize` makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmworks.io.files import write_text
from lmworks.pages.frame import page
from lmworks.ui.amounts import percent, short_size, significant

Json = Mapping[str, Any]


def write_comparison_page(path: Path, document: Json) -> None:
    """Write the page of a comparison, atomically."""
    write_text(path, render_comparison(document))


def render_comparison(document: Json) -> str:
    """The page as text."""
    first, *others = [model["name"] for model in document["models"]]
    return page(
        "comparison.html",
        first=first,
        others=others,
        models=document["models"],
        comparisons=[_comparison(one) for one in document["comparisons"]],
        failures=[(model, _failures(scores)) for model, scores in document["failures"].items() if scores],
        tests=document["tests"],
        how=document["how"],
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


_KL_FLOOR = 1e-6  # nats; the left end of the scale of KL divergences


def write_quantization_page(path: Path, document: Json) -> None:
    """Write the page, atomically."""
    write_text(path, render_quantization(document))


def render_quantization(document: Json) -> str:
    """The page as text."""
    results = document["results"]
    return page(
        "quantization.html",
        name=document["model"],
        dtype=document["dtype"],
        original=short_size(document["original_bytes"]),
        tiles=list(_tiles(document)),
        rows=list(_rows(results)),
        results=[_result(one) for one in results],
        settings=results[0]["made_from"] if results else {},
    )


def _tiles(document: Json) -> Iterator[tuple[str, str, str]]:
    results = document["results"]
    passed = [one for one in results if one["verdict"] == "passed"]
    yield "passed", f"{len(passed)}", f"of {len(results)} results"
    yield "original", short_size(document["original_bytes"]), document["dtype"]
    if passed:
        smallest = min(passed, key=lambda one: one["bytes"])
        yield "smallest that passed", short_size(smallest["bytes"]), smallest["scheme"]
        closest = min(passed, key=lambda one: one["agreement"]["kl_mean"])
        yield "closest to the original", significant(closest["agreement"]["kl_mean"], 2), f"nats per token, {closest['scheme']}"


def _rows(results: Sequence[Json]) -> Iterator[dict[str, Any]]:
    """One row per result; the divergences on one logarithmic scale, sizes on one linear scale."""
    known = [one["agreement"] for one in results if "kl_mean" in one["agreement"]]
    ends = [value for one in known for value in (one["kl_mean"], one["kl_p99"]) if math.isfinite(value)]
    low, high = _KL_FLOOR, max([10 * _KL_FLOOR, *ends])
    span = math.log10(high / low) * 1.05
    for one in results:
        found = one["agreement"]
        whole = max(one["original_bytes"], 1)
        row: dict[str, Any] = {
            "scheme": one["scheme"], "verdict": one["verdict"],
            "side": "above" if one["verdict"] == "passed" else "below",
            "size": short_size(one["bytes"]), "share": percent(one["bytes"] / whole), "width": min(100.0, 100 * one["bytes"] / whole),
            "prefill": _speed(one, "prefill"), "decode": _speed(one, "decode"), "measured": "kl_mean" in found,
        }  # fmt: skip
        if row["measured"]:
            start, end = (100 * _log(found[key], low) / span for key in ("kl_mean", "kl_p99"))
            bounds = found["perplexity_interval"]
            row |= {
                "kl": significant(found["kl_mean"], 2), "p99": significant(found["kl_p99"], 2), "left": start,
                "spread": max(0.0, end - start),
                "same": percent(found["same_choice"]), "ratio": significant(found["perplexity_ratio"], 5),
                "interval": f"{significant(bounds[0], 5)} to {significant(bounds[1], 5)}",
            }  # fmt: skip
        yield row


def _log(value: float, low: float) -> float:
    return math.log10(max(value, low) / low) if math.isfinite(value) else 100.0


def _speed(one: Json, kind: str) -> tuple[str, str]:
    """The speed, and its multiple of the original's."""
    speed = one["speed"]
    if kind not in speed:
        return "–", ""
    times = f"{significant(speed[kind] / speed['original'][kind], 2)} × original" if speed.get("original") else ""
    return f"{speed[kind]:,.0f}", times


def _result(one: Json) -> dict[str, Any]:
    tensors, found, calibration = one["tensors"], one["agreement"], one["calibration"]
    facts = [
        ("made by", one["made_by"]),
        ("logits by", one["scored_by"] or "not computed"),
        ("tensors", ", ".join(f"{count} {fate}" for fate, count in tensors["fates"].items()) + f" of {tensors['total']}"),
        ("types", ", ".join(f"{kind}: {count}" for kind, count in tensors["types"].items())),
        *((f"{role}", ", ".join(kinds)) for role, kinds in tensors["sensitive"].items()),
        ("chat template", one["template"]),
    ]
    if tensors["worst"]:
        facts.append(("largest error of a tensor", f"{percent(tensors['worst']['error'])} ({tensors['worst']['name']})"))
    if one["mtp"]:
        facts.append(("multi-token prediction", one["mtp"]))
    facts.append(("calibration", _calibration(calibration)))
    if "not_measured" in one["speed"]:
        facts.append(("speed", f"not measured: {one['speed']['not_measured']}"))
    elif one["speed"]:
        speed = one["speed"]
        facts.append(("speed", f"{speed['engine']}, {speed['threads']} threads, prompt of {speed['prompt']} tokens"))
    benchmarks = one["benchmarks"]
    if "not_measured" in benchmarks:
        facts.append(("benchmarks", f"not measured: {benchmarks['not_measured']}"))
    return {
        "scheme": one["scheme"], "about": one["about"], "verdict": one["verdict"], "failures": one["failures"],
        "warnings": one["warnings"], "facts": facts,
        "limits": [(name.replace("_", " "), significant(value)) for name, value in one["limits"].items()],
        "domains": [
            (domain, f"{values['tokens']:,}", significant(values["kl_mean"], 2), percent(values["same_choice"]))
            for domain, values in found.get("by_domain", {}).items()
        ],
        "scores": [_score(row) for row in benchmarks.get("scores", [])],
    }  # fmt: skip


def _calibration(calibration: Json) -> str:
    if not calibration.get("used"):
        return str(calibration.get("why", "none"))
    text = f"{calibration['tokens']:,} tokens"
    if experts := calibration.get("experts"):
        text += f"; tokens per expert: {experts['least']:,} to {experts['most']:,}, median {experts['median']:,}"
    return text


def _score(row: Json) -> dict[str, str]:
    low, high = (100 * end for end in row["interval"])
    return {
        "name": row["score"], "n": f"{row['n']:,}", "a": f"{100 * row['a']:.1f}", "b": f"{100 * row['b']:.1f}",
        "difference": f"{100 * row['difference']:+.1f}", "interval": f"{low:+.1f} to {high:+.1f}", "verdict": row["verdict"],
        "side": {"better": "above", "worse": "below"}.get(row["verdict"], "near"),
    }  # fmt: skip
