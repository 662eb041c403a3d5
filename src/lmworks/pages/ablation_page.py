"""The ablation page: one static HTML file that shows the `ablation.json` of an ablation. Nothing is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lmworks.io.files import explain_damage, read_json, write_text
from lmworks.pages.charts import Chart, Line, places
from lmworks.pages.frame import page
from lmworks.pages.run_records import Mark
from lmworks.ui.amounts import compact, short_size, significant, span

FILE = "ablation.html"
Json = Mapping[str, Any]
_TONES = 7
_SETTLED = 0.25  # of the curve: what lies above it later sets the top of the axis
_SIDES = {"better": "above", "worse": "below", "higher": "above", "lower": "below", "diverged": "below"}


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
    charts, conclusion = list(_charts(document, tones)), document["conclusion"]
    return page(
        "ablation.html",
        [*charts, *([found] if (found := _found(conclusion)) else [])],
        name=document["name"],
        kind=document["kind"],
        state=_state(document),
        about=f"Every arm is compared with {document['baseline']}. Seeds vary {document['seed_varies']}.",
        tiles=_tiles(document),
        arms=[_arm(name, arm, document, tones[name]) for name, arm in document["arms"].items()],
        groups=list(_verdicts(document)),
        assumptions=document.get("assumptions", []),
        missing=document["not_measured"],
        curves=charts,
        conclusion=conclusion,
        found=found,
        quality=list(_quality(document)),
        cost=list(_cost(document["cost"])),
    )


def _state(document: Json) -> tuple[str, str]:
    cost = document["cost"]
    if not document["unfinished"]:
        return "finished", f"finished: {cost['runs']} runs"
    return "running", f"{cost['finished']} of {cost['runs']} runs have finished"


def _tiles(document: Json) -> list[tuple[str, str, str]]:
    words = [one["verdict"] for one in document["verdicts"] if one["difference"] is not None]
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
        place = places([0.0, *ends], 0.04)
        yield {
            "measure": name, "unit": measure["unit"], "better": measure["better"],
            "rows": [_verdict(one, place) for one in rows],
        }  # fmt: skip


def _verdict(one: Json, place: Callable[[float], float]) -> dict[str, Any]:
    known = one["low"] is not None
    difference = one["difference"] or 0.0  # None of an arm that has diverged
    low, high = (place(one[side]) if known else place(difference) for side in ("low", "high"))
    return {
        "arm": one["arm"], "verdict": one["verdict"], "why": one["why"], "side": _SIDES.get(one["verdict"], ""),
        "difference": "" if one["difference"] is None else _signed(one["difference"]),
        "interval": f"{_signed(one['low'])} to {_signed(one['high'])}" if known else "",
        "left": low, "width": high - low, "dot": place(difference), "zero": place(0.0),
    }  # fmt: skip


def _signed(value: float) -> str:
    text = significant(value, 3)
    return text if text.startswith("−") or not value else f"+{text}"


def _charts(document: Json, tones: Mapping[str, str]) -> Iterator[Chart]:
    """The curves of each measure, with the extremes over seeds as a band."""
    for name, measure in document["measures"].items():
        curves = {arm: c for arm, c in measure["curves"].items() if len(c["tokens"]) > 1}
        if not curves:
            continue
        lines = [
            Line(arm, list(zip(c["tokens"], c["mean"], strict=True)), tones[arm], list(zip(c["low"], c["high"], strict=True)))
            for arm, c in curves.items()
        ]
        across = [at for c in curves.values() for at in (c["tokens"][0], c["tokens"][-1])]
        late = [value for c in curves.values() for side in ("low", "high") for value in c[side][int(_SETTLED * len(c[side])) :]]
        top = max(late) + 0.06 * (max(late) - min(late))
        yield Chart(
            f"curve-{name}", name, "", lines, (min(across), max(across)), measure["unit"], group="arms", across="tokens", top=top
        )  # fmt: skip


def _found(conclusion: Json | None) -> Chart | None:
    """The points on which the kind of the ablation bases its conclusion; the interval of what it found is shaded."""
    if conclusion is None:
        return None
    points = [(float(a), float(b)) for a, b in conclusion["points"]]
    found = [at for name in ("best", "critical") if (at := conclusion.get(name))]  # it may lie beyond the points
    across = [*(a for a, _ in points), *found]
    low, high = min(across) / 1.2, max(across) * 1.2
    marks = [Mark("best", at, conclusion["text"]) for at in found]
    ends = max(conclusion.get("low") or high, low), min(conclusion.get("high") or low, high)
    shade = ends if ends[0] < ends[1] else None
    return Chart(
        "conclusion-points", conclusion["measure"], "", [Line("mean of the runs", points, "c0")], (low, high), group="conclusion",
        across=conclusion["what"], log_x=True, marks=marks, shade=shade, wide=True,
    )  # fmt: skip


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
