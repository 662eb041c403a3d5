"""The quantized forms of a model as a page: one static HTML file without a script, from the document that `lmworks quantize` makes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmworks import __version__
from lmworks.doctor.formatting import percent, significant, size
from lmworks.doctor.templates import source, template
from lmworks.files import write_text

Json = Mapping[str, Any]
_KL_FLOOR = 1e-6  # nats; the left end of the scale of KL divergences


def write_quantization_page(path: Path, document: Json) -> None:
    """Write the page, atomically."""
    write_text(path, render(document).encode("utf-8", "replace").decode())


def render(document: Json) -> str:
    """The page as text."""
    results = document["results"]
    return template("quantization.html").render(
        name=document["model"],
        dtype=document["dtype"],
        original=size(document["original_bytes"]),
        tiles=list(_tiles(document)),
        rows=list(_rows(results)),
        results=[_result(one) for one in results],
        settings=results[0]["made_from"] if results else {},
        style=source("page.css", "comparison.css", "quantization.css"),
        written=time.strftime("%d %B %Y, %H:%M", time.localtime()),
        version=__version__,
    )


def _tiles(document: Json) -> Iterator[tuple[str, str, str]]:
    results = document["results"]
    passed = [one for one in results if one["verdict"] == "passed"]
    yield "passed", f"{len(passed)}", f"of {len(results)} results"
    yield "original", size(document["original_bytes"]), document["dtype"]
    if passed:
        smallest = min(passed, key=lambda one: one["bytes"])
        yield "smallest that passed", size(smallest["bytes"]), smallest["scheme"]
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
            "size": size(one["bytes"]), "share": percent(one["bytes"] / whole), "width": min(100.0, 100 * one["bytes"] / whole),
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
