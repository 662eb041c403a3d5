"""The results as tables: for the terminal, and as Markdown to paste."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmworks.ui.amounts import compact, short_size, significant, span

Json = Mapping[str, Any]
_QUALITY = ["measure", "trust at this size", "monotonicity", "signal to noise", "to checkpoints", "ranks", "because"]
_STYLES = {"better": "green", "worse": "red", "no verdict": "dim"}


def printable(document: Json) -> RenderableType:
    """All tables, for a terminal."""
    parts: list[RenderableType] = [_table(title, headings, rows) for title, headings, rows in _tables(document)]
    return Group(*(part for one in parts for part in ("", one)), *(Text(line, style="dim") for line in notes(document)))


def markdown(document: Json) -> str:
    """The same tables as Markdown."""
    lines: list[str] = []
    for title, headings, rows in _tables(document):
        lines += [f"**{title}**", "", _row(headings), _row(["---"] * len(headings)), *map(_row, rows), ""]
    return "\n".join([*lines, *(f"- {line}" for line in notes(document))])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _tables(document: Json) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    yield "Verdicts", ["arm", "measure", "difference", "interval", "verdict", ""], list(_verdicts(document))
    yield "Values: mean over seeds", ["measure", *document["arms"], "noise floor"], list(_values(document))
    yield "Measures as early signals", _QUALITY, list(_quality(document))
    yield "Cost", ["", "predicted", "measured"], list(cost_rows(document))


def notes(document: Json) -> list[str]:
    """What is to be said besides the tables."""
    seeds = len(document["seeds"])
    found = [
        f"baseline {document['baseline']}; {seeds} seed{'s' * (seeds > 1)}, which vary {document['seed_varies']}",
        "verdicts: Holm's correction over all arms and measures, family-wise error rate 5%",
        *document["assumptions"],
    ]
    unpaired = [name for name, arm in document["arms"].items() if not arm["paired"]]
    if unpaired:
        found.append(f"not paired by seed, because the data order differs from the baseline's: {', '.join(unpaired)}")
    if any(one["seeds"] > 1 and not one["paired"] and document["arms"][one["arm"]]["paired"] for one in document["verdicts"]):
        found.append("not paired by seed, because so few seeds and arms leave too few degrees of freedom: the intervals would be wider")
    if document["conclusion"]:
        found.append(document["conclusion"]["text"])
    found += document["not_measured"]
    if document["unfinished"]:
        found.append(f"not finished: {', '.join(document['unfinished'][:8])}{' and more' * (len(document['unfinished']) > 8)}")
    return found


def interval(record: Json) -> str:
    return "" if record["low"] is None else f"{signed(record['low'])} to {signed(record['high'])}"


def signed(value: float) -> str:
    text = significant(value, 3)
    return text if text.startswith("−") or not value else f"+{text}"


def _verdicts(document: Json) -> Iterator[list[str]]:
    for one in document["verdicts"]:
        yield [one["arm"], one["measure"], signed(one["difference"]), interval(one), one["verdict"], one["why"]]


def _values(document: Json) -> Iterator[list[str]]:
    for name, measure in document["measures"].items():
        means = [_mean(measure["values"].get(arm)) for arm in document["arms"]]
        sd = measure["noise_floor"]
        yield [name, *means, "" if sd is None else significant(sd, 2)]


def _mean(values: Json | None) -> str:
    return significant(sum(values.values()) / len(values), 4) if values else ""


def _quality(document: Json) -> Iterator[list[str]]:
    for name, measure in document["measures"].items():
        if (found := measure["quality"]) is not None:
            ranks = [_figure(found["rank_halves"]), _figure(found["rank_seeds"])]
            yield [
                name, "yes" if found["trust"] else "no", _figure(found["monotonicity"]), _figure(found["signal_to_noise"]),
                _figure(found["signal_to_checkpoints"]), " / ".join(ranks) if any(ranks) else "", "; ".join(found["reasons"]),
            ]  # fmt: skip


def _figure(value: float | None) -> str:
    return "" if value is None else significant(value, 2)


def cost_rows(document: Json) -> Iterator[list[str]]:
    """Label, predicted, measured."""
    cost = document["cost"]
    yield ["runs", f"{cost['runs']}", f"{cost['finished']}"]
    yield ["training tokens", compact(cost["tokens"]), ""]
    yield ["operations", f"{cost['flops']:.3g} FLOPs", ""]
    hours = "" if cost["hours"] is None else f"{span(3600 * cost['hours'])} in all, from {cost['basis']}"
    yield ["wall time", hours, ""]
    if cost["finished"]:
        predicted = cost["predicted_hours_of_finished"]
        yield [
            "training time of the finished runs",
            "" if predicted is None else span(3600 * predicted),
            span(3600 * cost["measured_hours"]),
        ]
    yield ["disk", short_size(cost["disk"]), short_size(cost["measured_disk"])]


def cost_text(cost: Json) -> str:
    """The cost in one line, before the runs."""
    hours = "" if cost["hours"] is None else f", about {span(3600 * cost['hours'])} (from {cost['basis']})"
    return f"{cost['runs']} runs, {compact(cost['tokens'])} tokens, {cost['flops']:.3g} FLOPs{hours}, {short_size(cost['disk'])} of disk"


def _table(title: str, headings: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table
