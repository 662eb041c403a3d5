"""Comparisons and failures as tables for a terminal. Questions and answers come from anywhere, so they are `Text`."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmworks.evaluate.compare.results import KINDS

Json = dict[str, Any]
_WORST = 10


def printable(document: Json) -> Group:
    """All that a terminal should show of a comparison."""
    parts: list[RenderableType] = []
    for model in document["models"]:
        parts += [Text(f"{model['name']}: {note}", style="yellow") for note in model["notes"]]
    for comparison in document["comparisons"]:
        parts += [_scores(comparison), *_bits(comparison), *_not_comparable(comparison), *_changed(comparison), ""]
    if any(document["failures"].values()):
        parts.append(failure_kinds(document["failures"]))
    how = document["how"]
    parts.append(Text(f"{document['tests']} tests, p after Holm's correction. Interval: {how['interval']}.", style="dim"))
    return Group(*parts)


def _scores(comparison: Json) -> Table:
    a, b = comparison["a"], comparison["b"]
    table = Table(title=Text(f"{b} against {a}: scores in %"))
    table.add_column("score", overflow="fold")
    for heading in ("items", a, b, "difference [95%]", "p", "detectable", "lost", "gained"):
        table.add_column(Text(heading), justify="right")
    table.add_column("verdict")
    rows = [(row["score"], row) for row in comparison["scores"]]
    if comparison["pooled"]:
        rows.append((f"mean of {comparison['pooled']['scores']} scores", comparison["pooled"]))
    for name, row in rows:
        changed = [str(row[key]) if key in row else "" for key in ("lost", "gained")]
        note = ", unpaired" if row["kind"] == "unpaired" else ""
        figures = [f"{100 * row['a']:.1f}", f"{100 * row['b']:.1f}", _difference(row, 100), _p(row["adjusted_p"])]
        detectable = f"{100 * row['minimum_detectable']:.1f}"
        table.add_row(Text(name), f"{row['n']:,}", *figures, detectable, *changed, row["verdict"] + note, style=_STYLES[row["verdict"]])
    table.caption = "detectable: the smallest difference that so many items would probably have shown"
    return table


_STYLES = {"better": "green", "worse": "red", "no difference shown": ""}


def _difference(row: Json, scale: float, digits: int = 1) -> str:
    low, high = row["interval"]
    return f"{scale * row['difference']:+.{digits}f} [{scale * low:+.{digits}f}, {scale * high:+.{digits}f}]"


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "<0.001"


def _bits(comparison: Json) -> list[RenderableType]:
    if not comparison["bits_per_byte"]:
        return []
    a, b = comparison["a"], comparison["b"]
    table = Table(title=Text(f"{b} against {a}: held-out bits per byte (lower is better)"))
    table.add_column("domain")
    for heading in ("documents", a, b, "difference [95%]", "p", "detectable"):
        table.add_column(Text(heading), justify="right")
    table.add_column("verdict")
    for row in comparison["bits_per_byte"]:
        figures = [f"{row['a']:.4f}", f"{row['b']:.4f}", _difference(row, 1, 4), _p(row["adjusted_p"]), f"{row['minimum_detectable']:.4f}"]
        table.add_row(Text(row["domain"]), f"{row['n']:,}", *figures, row["verdict"], style=_STYLES[row["verdict"]])
    return [table]


def _not_comparable(comparison: Json) -> list[RenderableType]:
    return [Text(f"not comparable: {one['score']}: {one['reason']}", style="dim") for one in comparison["not_comparable"]]


def _changed(comparison: Json) -> list[RenderableType]:
    """Items that one of the two answered correctly and the other did not."""
    parts: list[RenderableType] = []
    for row in comparison["scores"]:
        lost = [one for one in row.get("by_subject", ()) if one["lost"] > one["gained"]]
        if lost:
            worst = ", ".join(f"{one['subject']} ({one['lost']} lost, {one['gained']} gained of {one['n']})" for one in lost[:3])
            parts.append(Text(f"{row['score']}: most is lost in {worst}"))
        for kind, what in (("lost", "forgotten"), ("gained", "learned")):
            for one in row.get("examples", {}).get(kind, ()):
                parts.append(_example(f"{what}: {row['score']} {one['id']}", one, (("a", comparison["a"]), ("b", comparison["b"]))))
    return parts


def _example(title: str, one: Json, answers: tuple[tuple[str, str], ...]) -> Text:
    text = Text(f"\n{title}\n", style="bold")
    if one["question"]:
        text.append(f"{one['question'].strip()}\n", style="not bold")
    if one["right"]:
        text.append(f"  right answer: {one['right']}\n", style="not bold")
    for key, name in answers:
        text.append(f"  {name}: {one[key] or '(nothing)'}\n", style="not bold")
    text.rstrip()
    return text


def failure_kinds(of_models: dict[str, dict[str, Json]]) -> Table:
    """Models and scores down, kinds of failures across, in % of the items."""
    table = Table(title="Failures in % of the items")
    for heading in ("model", "score"):
        table.add_column(heading, overflow="fold")
    for heading in ("items", "failed", *KINDS):
        table.add_column(heading, justify="right")
    for model, scores in of_models.items():
        for name, found in scores.items():
            table.add_row(Text(model), Text(name), f"{found['n']:,}", *_shares(found))
        table.add_section()
    return table


def _shares(found: Json) -> list[str]:
    counts = [found["failed"], *(found["kinds"].get(kind, 0) for kind in KINDS)]
    return [f"{100 * count / found['n']:.1f}" if count else "-" for count in counts]


def failure_tables(name: str, scores: dict[str, Json]) -> Group:
    """The failures of one model: by kind; per score by subject and by length of the prompt; and examples."""
    parts: list[RenderableType] = [failure_kinds({name: scores})]
    for score, found in scores.items():
        subjects = sorted(found["by_subject"], key=lambda row: -row["failed"] / row["n"])[:_WORST]
        lengths = [{"subject": f"{row['tokens'][0]:,} to {row['tokens'][1]:,} tokens", **row} for row in found["by_length"]]
        for title, rows in (("worst subjects", subjects), ("by length of the prompt", lengths)):
            if rows:
                table = Table(title=Text(f"{score}: {title}, failures in %"))
                table.add_column(title, overflow="fold")
                for heading in ("items", "failed", *KINDS):
                    table.add_column(heading, justify="right")
                for row in rows:
                    table.add_row(Text(row["subject"]), f"{row['n']:,}", *_shares(row))
                parts.append(table)
        for kind, examples in found["examples"].items():
            parts += [_example(f"{kind}: {score} {one['id']}", one, (("answer", "answer"),)) for one in examples]
    return Group(*parts)
