"""The ablation page: one static HTML file that shows the `ablation.json` of an ablation. No script, nothing loaded."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks import __version__
from lmworks.io.files import explain_damage, read_json, write_text
from lmworks.pages.charts import Axis, dots, path
from lmworks.pages.tables import source, template
from lmworks.ui.amounts import compact, short_size, significant, span

FILE = "ablation.html"
Json = Mapping[str, Any]
_TONES = 7
_SETTLED = 0.25  # of the curve: what lies above it later sets the top of the axis
_SIDES = {"better": "above", "worse": "below", "higher": "above", "lower": "below"}


def write_ablation_page(out: Path) -> Path:
    """Write `out/ablation.html` from `out/ablation.json`; returns its path."""
    source = out / "ablation.json"
    document = read_json(source)
    with explain_damage(source, "delete it and run the same lmworks ablate command again"):
        text = render(document)
    write_text(out / FILE, text)
    return out / FILE


def render(document: Json) -> str:
    """The page as text."""
    tones = {name: f"c{index % _TONES}" for index, name in enumerate(document["arms"])}
    return template("ablation.html").render(
        name=document["name"],
        kind=document["kind"],
        state=_state(document),
        about=f"Every arm is compared with {document['baseline']}. Seeds vary {document['seed_varies']}.",
        tiles=_tiles(document),
        arms=[_arm(name, arm, document, tones[name]) for name, arm in document["arms"].items()],
        groups=list(_verdicts(document)),
        assumptions=document.get("assumptions", []),
        missing=document["not_measured"],
        charts=list(_charts(document, tones)),
        conclusion=_conclusion(document["conclusion"]),
        quality=list(_quality(document)),
        cost=list(_cost(document["cost"])),
        style=source("page.css", "corpus.css", "ablation.css"),
        written=time.strftime("%d %B %Y, %H:%M", time.localtime()),
        version=__version__,
    )


def _state(document: Json) -> tuple[str, str]:
    cost = document["cost"]
    if not document["unfinished"]:
        return "finished", f"finished: {cost['runs']} runs"
    return "running", f"{cost['finished']} of {cost['runs']} runs have finished"


def _tiles(document: Json) -> list[tuple[str, str, str]]:
    words = [one["verdict"] for one in document["verdicts"]]
    cost, trusted = document["cost"], [one["quality"]["trust"] for one in document["measures"].values() if one["quality"]]
    shown = sum(word in _SIDES for word in words)
    return [
        ("differences shown", f"{shown}", f"of {len(words)} tested; at most 5% of ablations show one by chance"),
        ("arms", f"{len(document['arms'])}", f"{len(document['seeds'])} seeds each"),
        ("measures to trust", f"{sum(trusted)}", f"of {len(trusted)} at this size"),
        ("training tokens", compact(cost["tokens"]), f"{cost['flops']:.3g} FLOPs"),
        ("training time", span(3600 * cost["measured_hours"]), _beside(cost)),
    ]


def _beside(cost: Json) -> str:
    predicted = cost["predicted_hours_of_finished"]
    return "" if predicted is None else f"predicted: {span(3600 * predicted)}"


def _arm(name: str, arm: Json, document: Json, tone: str) -> dict[str, Any]:
    return {
        "name": name, "tone": tone, "baseline": name == document["baseline"], "tokens": compact(arm["tokens"]),
        "changes": arm["changes"], "paired": arm["paired"], "finished": len(arm["finished"]), "seeds": len(document["seeds"]),
    }  # fmt: skip


def _verdicts(document: Json) -> Iterator[dict[str, Any]]:
    """One group per measure, with the intervals of its arms on one scale."""
    for name, measure in document["measures"].items():
        rows = [one for one in document["verdicts"] if one["measure"] == name]
        if not rows:
            continue
        ends = [value for one in rows for value in (one["low"], one["high"], one["difference"]) if value is not None]
        low, high = min([0.0, *ends]), max([0.0, *ends])
        room = 0.04 * (high - low) or 1.0
        x = Axis(low - room, high + room)
        yield {
            "measure": name, "unit": measure["unit"], "better": measure["better"],
            "rows": [_verdict(one, x) for one in rows],
        }  # fmt: skip


def _verdict(one: Json, x: Axis) -> dict[str, Any]:
    known = one["low"] is not None
    low, high = (x.place(one[side]) if known else x.place(one["difference"]) for side in ("low", "high"))
    return {
        "arm": one["arm"], "verdict": one["verdict"], "why": one["why"], "side": _SIDES.get(one["verdict"], ""),
        "difference": _signed(one["difference"]), "interval": f"{_signed(one['low'])} to {_signed(one['high'])}" if known else "",
        "left": low, "width": high - low, "dot": x.place(one["difference"]), "zero": x.place(0.0),
    }  # fmt: skip


def _signed(value: float) -> str:
    text = significant(value, 3)
    return text if text.startswith("−") or not value else f"+{text}"


@dataclass(frozen=True)
class _Line:
    name: str
    tone: str
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def _charts(document: Json, tones: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The curves of each measure, with the extremes over seeds as a band."""
    for name, measure in document["measures"].items():
        lines = [
            _Line(arm, tones[arm], c["tokens"], c["mean"], c["low"], c["high"])
            for arm, c in measure["curves"].items()
            if len(c["tokens"]) > 1
        ]
        if not lines:
            continue
        x = Axis(min(line.x[0] for line in lines), max(line.x[-1] for line in lines))
        late = [v for line in lines for v in (*line.low[int(_SETTLED * len(line.low)) :], *line.high[int(_SETTLED * len(line.high)) :])]
        room = 0.06 * (max(late) - min(late)) or 0.05 * abs(max(late)) or 1.0
        y = Axis(min(late) - room, max(late) + room)
        ends = "; ".join(f"{line.name} ends at {significant(line.mean[-1])}" for line in lines)
        yield {
            "id": name.replace("/", "-"), "title": name, "unit": measure["unit"], "spoken": f"{name}: {ends}.",
            "ticks": [(x.place(tick), compact(tick)) for tick in x.ticks(5)],
            "y_ticks": [(y.place(tick), significant(tick)) for tick in y.ticks(4)],
            "bands": [(line.tone, _band(line, x, y)) for line in lines],
            "paths": [(line.tone, path(list(zip(line.x, line.mean, strict=True)), x, y)) for line in lines],
            "legend": [(line.name, line.tone, significant(line.mean[-1])) for line in lines],
        }  # fmt: skip


def _band(line: _Line, x: Axis, y: Axis) -> str:
    there = list(zip(line.x, line.low, strict=True))
    back = list(zip(line.x, line.high, strict=True))[::-1]
    return path([*there, *back], x, y) + "Z"


def _conclusion(found: Json | None) -> dict[str, Any] | None:
    """What the kind of the ablation has found, with its points drawn."""
    if found is None:
        return None
    points = [(float(a), float(b)) for a, b in found["points"]]
    x = Axis(min(a for a, _ in points) / 1.2, max(a for a, _ in points) * 1.2, log=True)
    values = [b for _, b in points]
    room = 0.1 * (max(values) - min(values)) or 1.0
    y = Axis(min(values) - room, max(values) + room)
    marks = [found.get("best"), found.get("critical")]
    ends = found.get("low"), found.get("high")
    bounds = [(x.place(max(ends[0], x.low)), x.place(min(ends[1], x.high)))] if ends[0] and ends[1] else []
    return {
        "title": found["title"], "text": found["text"], "measure": found["measure"], "what": found["what"],
        "line": path(points, x, y), "dots": dots(points, x, y),
        "ticks": [(x.place(a), compact(a)) for a, _ in points], "y_ticks": [(y.place(tick), significant(tick)) for tick in y.ticks(4)],
        "marks": [x.place(mark) for mark in marks if mark and x.low <= mark <= x.high],
        "bounds": bounds,
    }  # fmt: skip


def _quality(document: Json) -> Iterator[dict[str, Any]]:
    for name, measure in document["measures"].items():
        one = measure["quality"]
        if one:
            sd = measure["noise_floor"]
            figures = [one["monotonicity"], one["signal_to_noise"], one["signal_to_checkpoints"], one["rank_halves"], one["rank_seeds"]]
            yield {
                "measure": name, "trust": one["trust"], "reasons": one["reasons"], "noise": "–" if sd is None else significant(sd, 2),
                "figures": ["–" if value is None or not math.isfinite(value) else significant(value, 2) for value in figures],
            }  # fmt: skip


def _cost(cost: Json) -> Iterator[tuple[str, str, str]]:
    yield "runs", f"{cost['runs']}", f"{cost['finished']} finished"
    yield "training tokens", compact(cost["tokens"]), ""
    yield "operations", f"{cost['flops']:.3g} FLOPs", ""
    if cost["hours"] is not None:
        yield "wall time of all runs", f"{span(3600 * cost['hours'])}, from {cost['basis']}", ""
    predicted = cost["predicted_hours_of_finished"]
    yield "training time of the finished runs", "–" if predicted is None else span(3600 * predicted), span(3600 * cost["measured_hours"])
    yield "disk", short_size(cost["disk"]), short_size(cost["measured_disk"])
