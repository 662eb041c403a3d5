"""Results, comparisons and failures as tables for a terminal, the models side by side. Scores at chance are printed as such.

Questions and answers are untrusted text, so they are `Text` and never markup.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmworks.evaluate.bits_per_byte import OVERALL
from lmworks.evaluate.records import sentence
from lmworks.evaluate.results import KINDS


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
    cut = [
        f"{name}, {one}: {score['truncated']:,} of {score['n']:,} items are longer than the context of the model, so they lose their "
        "beginnings"
        for name, model in models.items() for one, score in model["scores"].items()
        if score.get("form") in ("cloze", "letters") and score.get("truncated")
    ]  # fmt: skip
    doubts = [f"not clean: {one}: {why}" for one, why in results.get("not_clean", {}).items()]
    table.caption = "; ".join(["baseline: the best answer that ignores the question", *reasons, *cut, *unmeasured, *doubts])
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


Json = dict[str, Any]
_WORST = 10


def printable_comparison(document: Json) -> Group:
    """All that a terminal should show of a comparison."""
    parts: list[RenderableType] = []
    for model in document["models"]:
        parts += [Text(f"{model['name']}: {note}", style="yellow") for note in model["notes"]]
    for comparison in document["comparisons"]:
        parts += [_compared_scores(comparison), *_compared_bits(comparison), *_not_comparable(comparison), *_changed(comparison), ""]
    if any(document["failures"].values()):
        parts.append(failure_kinds(document["failures"]))
    how = document["how"]
    parts.append(Text(f"{document['tests']} tests, p after Holm's correction. Interval: {how['interval']}.", style="dim"))
    return Group(*parts)


def _compared_scores(comparison: Json) -> Table:
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
        figures = [f"{100 * row['a']:.1f}", f"{100 * row['b']:.1f}", _scaled_difference(row, 100), _p(row["adjusted_p"])]
        detectable = f"{100 * row['minimum_detectable']:.1f}"
        table.add_row(Text(name), f"{row['n']:,}", *figures, detectable, *changed, row["verdict"] + note, style=_STYLES[row["verdict"]])
    table.caption = "detectable: the smallest difference that so many items would probably have shown"
    return table


_STYLES = {"better": "green", "worse": "red", "no difference shown": ""}


def _scaled_difference(row: Json, scale: float, digits: int = 1) -> str:
    low, high = row["interval"]
    return f"{scale * row['difference']:+.{digits}f} [{scale * low:+.{digits}f}, {scale * high:+.{digits}f}]"


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "<0.001"


def _compared_bits(comparison: Json) -> list[RenderableType]:
    if not comparison["bits_per_byte"]:
        return []
    a, b = comparison["a"], comparison["b"]
    table = Table(title=Text(f"{b} against {a}: held-out bits per byte (lower is better)"))
    table.add_column("domain")
    for heading in ("documents", a, b, "difference [95%]", "p", "detectable"):
        table.add_column(Text(heading), justify="right")
    table.add_column("verdict")
    for row in comparison["bits_per_byte"]:
        figures = [
            f"{row['a']:.4f}",
            f"{row['b']:.4f}",
            _scaled_difference(row, 1, 4),
            _p(row["adjusted_p"]),
            f"{row['minimum_detectable']:.4f}",
        ]
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
