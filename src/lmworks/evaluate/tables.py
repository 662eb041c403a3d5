"""The results as tables for a terminal, the models side by side. Scores at chance are printed as such."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmworks.evaluate.forgetting import sentence
from lmworks.evaluate.references import OVERALL


def printable(results: dict[str, Any]) -> Group:
    """All that a terminal should show of `results.json`."""
    return Group(*bits(results), *scores(results), *forgotten(results), samples_table(results))


def forgotten(results: dict[str, Any]) -> list[RenderableType]:
    """What the newest model has forgotten of the base model and of `start_from`, before an empty line; nothing where there is neither."""
    found = [Text(sentence(results[key])) for key in ("forgetting", "forgetting_since_start") if key in results]
    return [*found, ""] if found else []


def bits(results: dict[str, Any]) -> list[RenderableType]:
    """The table of bits per byte before an empty line; nothing where there was no held-out text."""
    measured = any(model["bits_per_byte"] for model in results["models"].values())
    return [bits_table(results), ""] if measured else []


def scores(results: dict[str, Any]) -> list[RenderableType]:
    """The table of scores before an empty line; nothing where no benchmark or task was asked for."""
    asked = any(model["scores"] or model["unavailable"] for model in results["models"].values())
    return [scores_table(results), ""] if asked else []


def samples_table(results: dict[str, Any]) -> Table:
    """Completions of the newest model, as it wrote them."""
    name, model = list(results["models"].items())[-1]
    table = Table(title=f"What the {name} model writes", show_lines=True)
    table.add_column("prompt", max_width=40)
    table.add_column("completion")
    for sample in model["samples"]:
        table.add_row(Text(sample["prompt"].rstrip()), Text(sample["completion"].strip()))  # Text: a model may write rich markup
    return table


def bits_table(results: dict[str, Any]) -> Table:
    """Bits per byte: domains down, models and references across."""
    models = results["models"]
    marks = results.get("references", {}).get("bits_per_byte", {})
    table = Table(title="Held-out bits per byte (lower is better)")
    table.add_column("domain")
    table.add_column("bytes", justify="right")
    for name in [*models, *marks]:
        table.add_column(name, justify="right")
    against_xz = "xz -9e" in marks and bool(models)
    if against_xz:
        table.add_column(f"{next(iter(models))} against xz", justify="right")
    domains = next(iter(models.values()))["bits_per_byte"] if models else {}
    for domain, sizes in domains.items():
        ours = [model["bits_per_byte"][domain]["bits_per_byte"] for model in models.values()]
        theirs = [f"{mark[domain]:.3f}" if domain in mark else "-" for mark in marks.values()]
        row = [domain, f"{sizes['bytes']:,}", *(f"{value:.3f}" for value in ours), *theirs]
        if against_xz:
            mark = marks["xz -9e"].get(domain)
            row.append("-" if mark is None else f"{100 * (ours[0] / mark - 1):+.0f}%")
        table.add_row(*row, style="bold" if domain == OVERALL else None)
    if marks:
        table.caption = "; ".join(f"{name}: {how}" for name, how in results["references"]["how"].items() if name in marks)
        table.caption += "".join(f"; {name}: {why}" for name, why in results["references"]["missing"].items())
    return table


def scores_table(results: dict[str, Any]) -> Table:
    """Every score with 95% interval and verdict, beside items, chance and baseline. Sets come together, their sum last."""
    models = results["models"]
    table = Table(title="Scores in % [95% interval]")
    for heading in ("score", "items", "chance", "baseline"):
        table.add_column(heading, justify="left" if heading == "score" else "right")
    for name in models:
        table.add_column(name)
    if "compared" in results:
        table.add_column(f"{list(models)[-1]} - {next(iter(models))}")
    names = list(dict.fromkeys(one for model in models.values() for one in model["scores"]))
    for one in names:
        scores = [model["scores"].get(one) for model in models.values()]
        known = next(score for score in scores if score)
        chance = f"{100 * known['chance']:.0f}" if known["chance"] else "-"
        row = [one, str(known["n"]), chance, f"{100 * known['baseline']:.0f}", *(_score(score) for score in scores)]
        if "compared" in results:
            row.append(_difference(results["compared"].get(one)))
        table.add_row(*row)
    missing = {f"{one}: {why}" for model in models.values() for one, why in model["unavailable"].items()}
    unmeasured = [f"not measured: {reason}" for reason in sorted(missing)]
    reasons = [f"form of the {name} model: {reason}" for name, model in models.items() for reason in reasons_of(model)]
    doubts = [f"not clean: {one}: {why}" for one, why in results.get("not_clean", {}).items()]
    table.caption = "; ".join(["baseline: the best answer that ignores the question", *reasons, *unmeasured, *doubts])
    return table


def reasons_of(model: dict[str, Any]) -> list[str]:
    """Why a model was scored in the forms that were chosen for it."""
    return list(dict.fromkeys(score["reason"] for score in model["scores"].values() if score.get("chosen")))


def _score(score: dict[str, Any] | None) -> str:
    if score is None or not score["n"]:
        return "not measured"
    low, high = score["interval"]
    return f"{100 * score['score']:5.1f} [{100 * low:.0f}, {100 * high:.0f}] {score['verdict']}"


def _difference(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return ""
    low, high = difference["interval"]
    return f"{100 * difference['difference']:+.1f} [{100 * low:+.0f}, {100 * high:+.0f}] {difference['verdict']}"
