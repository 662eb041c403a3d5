"""The document of an ablation, `OUT/ablation.json`, with all that the page shows; and its tables, for the terminal and in Markdown."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmworks import __version__
from lmworks.ablate.conclusions import Findings
from lmworks.ablate.cost import cost
from lmworks.ablate.measures import Measure
from lmworks.ablate.quality import quality
from lmworks.ablate.resolve import CONDITIONS, RESULTS, conditions
from lmworks.ablate.results import Results, aligned, spread
from lmworks.ablate.run_set import Arm
from lmworks.ablate.sample import what
from lmworks.ablate.verdict import Verdict, detectable_in_noise, judge
from lmworks.io.files import write_json
from lmworks.ui.amounts import compact, short_size, significant, span

SEED_VARIES = "the data order, the initial weights and dropout; corpus, tokenizer, shards and held-out text are the same for all seeds"
_MORE_SEEDS = (3, 5, 10)
_SAME_TIME = 0.1  # of the baseline's time, by which arms of equal time may differ
_SAME_TOKENS = 0.01  # of its tokens


def save(results: Results) -> dict[str, Any]:
    """Write `OUT/ablation.json`; returns it."""
    found = document(results)
    write_json(results.experiment.out / RESULTS, found)
    return found


def document(results: Results) -> dict[str, Any]:
    """The results as plain values."""
    experiment = results.experiment
    ablation, contrasts = experiment.ablation, results.contrasts()
    verdicts = judge([one for _, _, one in contrasts])
    return {
        "version": __version__, "written": time.time(), "name": ablation.name or experiment.path.stem, "kind": ablation.kind,
        "baseline": experiment.baseline.name, "seeds": experiment.seeds, "seed_varies": SEED_VARIES, "equal": ablation.equal,
        "started_at": experiment.started_at, CONDITIONS: conditions(experiment.baseline),
        "arms": {arm.name: _arm(results, arm) for arm in experiment.arms.values()},
        "measures": {measure.name: _measure(results, measure) for measure in experiment.measures},
        "verdicts": [
            *(_verdict(results, arm, measure, one) for (arm, measure, _), one in zip(contrasts, verdicts, strict=True)),
            *_diverged(results),
        ],
        "assumptions": list(_assumptions(results, {measure.name for _, measure, _ in contrasts})),
        "not_measured": list(_not_measured(results)),
        "conclusion": ablation.conclude(Findings(results)),
        "cost": cost(experiment, results.seconds, results.jobs).to_json(),
        "unfinished": [run.name for run in experiment.runs if run.directory not in results.readings],
    }  # fmt: skip


def _arm(results: Results, arm: Arm) -> dict[str, Any]:
    experiment = results.experiment
    return {
        "overrides": list(arm.overrides), "changes": [str(change) for change in arm.changes], "paired": experiment.is_paired(arm),
        "label": arm.label, "tokens": arm.tokens - experiment.started_at, "finished": [run.seed for run in results.finished(arm)],
        "diverged": {str(run.seed): why for run in results.finished(arm) if (why := results.readings[run.directory].diverged)},
    }  # fmt: skip


def _measure(results: Results, measure: Measure) -> dict[str, Any]:
    arms, seeds = results.complete(measure)
    values = {
        arm.name: {str(seed): results.value(measure, arm, seed) for seed in seeds_of_arm}
        for arm in results.experiment.arms.values() if (seeds_of_arm := results.seeds(measure, arm))
    }  # fmt: skip
    noise = {name: results.floor(measure, arms, seeds, name == "paired")[0].to_json() for name in ("paired", "unpaired")}
    found: dict[str, Any] = {
        "unit": measure.unit, "better": measure.better, "values": values, "noise": noise,
        "noise_floor": noise["paired" if results.by_pairs(measure, arms, seeds) else "unpaired"]["sd"],
        "curves": spread(results, measure), "quality": None,
        "items": results.item_count(measure), "chance": results.chance(measure), "sample": _sample(results, measure),
        "other_sample": [name for name in values if not results.same_sample(measure, results.experiment.arms[name])],
    }  # fmt: skip
    if arms and seeds and measure.better:
        good = any(results.above_chance(measure, arm, seeds) for arm in arms) if measure.has_chance else None
        is_paired = all(results.experiment.is_paired(arm) for arm in arms)
        curves, final = aligned(results, measure, arms, seeds), results.table(measure, arms, seeds)
        found["quality"] = quality(curves, measure.better == "lower", is_paired, good, final).to_json()
    return _finite(found)


def _sample(results: Results, measure: Measure) -> str | None:
    """What the baseline was measured on, as a hash; None where that is not known."""
    return min(results.samples(measure, results.experiment.baseline), default=None)


def _verdict(results: Results, arm: Arm, measure: Measure, verdict: Verdict) -> dict[str, Any]:
    one = verdict.contrast
    word: str = verdict.outcome
    if measure.better and word in ("higher", "lower") and not _is_at_chance(results, arm, measure):
        word = "better" if word == measure.better else "worse"
    per_seed = arm.tokens + results.experiment.baseline.tokens - 2 * results.experiment.started_at
    needed = verdict.seeds_needed
    record: dict[str, Any] = {
        "arm": arm.name, "measure": measure.name, "verdict": word, "difference": one.difference, "low": verdict.low, "high": verdict.high,
        "p": verdict.adjusted_p, "level": verdict.level, "paired": one.paired, "seeds": one.seeds,
        "over_seeds": results.shared(measure, arm), "noise": one.sd, "df": one.df,
        "assumes_floor": results.assumes_floor(measure), "from_items": math.sqrt(one.items),
        "detectable": verdict.detectable, "seeds_needed": needed,
        "tokens_needed": None if needed is None else needed * per_seed,
    }  # fmt: skip
    at_chance = bool(measure.better) and word in ("higher", "lower")
    return _finite(record | {"why": _at_chance(results, measure) if at_chance else _why(results, record, measure)})


_OF_A_TEST = ("difference", "low", "high", "p", "level", "noise", "df", "detectable", "seeds_needed", "tokens_needed")


def _diverged(results: Results) -> Iterator[dict[str, Any]]:
    """A record for each measure of the arms that have diverged with all seeds, of which nothing is tested."""
    for measure in results.experiment.measures:
        for arm in results.experiment.arms.values():
            if arm is results.experiment.baseline or not results.has_diverged(arm):
                continue
            ends = sorted(one for run in results.finished(arm) for name, one in results.readings[run.directory].values.items()
                          if name == measure.name)  # fmt: skip
            found = " to ".join(dict.fromkeys(significant(one, 3) for one in ends[:1] + ends[-1:]))
            why = f"it ends at {found} {measure.unit}".strip() if ends else ""
            yield {
                "arm": arm.name, "measure": measure.name, "verdict": "diverged", **dict.fromkeys(_OF_A_TEST), "paired": False, "seeds": 0,
                "over_seeds": [], "assumes_floor": False, "from_items": 0.0, "why": why,
            }  # fmt: skip


def _assumptions(results: Results, measures: set[str]) -> Iterator[str]:
    """What the verdicts on these measures rest on."""
    yield from _unequal_times(results)
    yield from _unequal_tokens(results)
    assumed = [measure.name for measure in results.experiment.measures if measure.name in measures and results.assumes_floor(measure)]
    if len(assumed) < len(measures):
        yield (
            "assumed: seeds are independent, and the value of a run is near normal over seeds. Arms need not vary alike: each difference "
            "is judged by the spread of its two arms (paired t test, or Welch's at its exact size)"
        )
    if assumed:
        yield (
            f"assumed for {', '.join(assumed)}: all arms vary over seeds as the runs of the ablation named in noise. With a baseline three "
            "times as noisy as its arms, 20% of ablations have a false verdict under this assumption"
        )


def _unequal_times(results: Results) -> Iterator[str]:
    """The arms that should have trained for as long as the baseline and have not, seed by seed, so that a load that comes and goes matters
    less."""
    if results.experiment.ablation.equal != "time":
        return
    base = {run.seed: results.seconds[run.directory] for run in results.regular(results.experiment.baseline)}
    for arm in results.experiment.arms.values():
        ratios = [results.seconds[run.directory] / base[run.seed] for run in results.regular(arm) if base.get(run.seed)]
        if ratios and abs((ratio := median(ratios)) - 1) > _SAME_TIME:
            yield (
                f"not at equal time: {arm.name} has trained for {ratio:.2f} of the baseline's time, because the speeds that its tokens "
                "follow from were measured in a few seconds, beside other programs or by chance; where its verdicts matter, repeat the "
                "ablation in another --out"
            )


def _unequal_tokens(results: Results) -> Iterator[str]:
    """The arms that should have trained on as many tokens as the baseline and have not."""
    experiment = results.experiment
    base = _trained(results, experiment.baseline)
    for arm in experiment.arms.values() if experiment.ablation.equal == "tokens" else ():
        if results.regular(arm) and abs((ratio := _trained(results, arm) / base) - 1) > _SAME_TOKENS:
            yield (
                f"not at equal tokens: {arm.name} has trained on {_trained(results, arm):,.0f} tokens, {ratio:.2f} of the baseline's, "
                "which its verdicts do not tell from what it changes. Phases have whole steps: choose a budget that is a multiple of the "
                "batches of all arms, or at least 100 of the largest. Early stopping too ends arms at different tokens"
            )


def _trained(results: Results, arm: Arm) -> float:
    """Tokens of a run of an arm: the median of what those have recorded that have not diverged, or else the planned ones."""
    recorded = [tokens for run in results.regular(arm) if (tokens := results.readings[run.directory].tokens)]
    return (median(recorded) if recorded else arm.tokens) - arm.started_at


def _is_at_chance(results: Results, arm: Arm, measure: Measure) -> bool:
    """Whether neither an arm nor the baseline is shown to be above chance, where a higher score is no better one."""
    seeds = results.shared(measure, arm)
    return measure.has_chance and not any(results.above_chance(measure, one, seeds) for one in (arm, results.experiment.baseline))


def _at_chance(results: Results, measure: Measure) -> str:
    chance = results.chance(measure)
    level = "an unknown chance level" if chance is None else f"chance ({significant(chance, 3)})"
    return f"neither of the two is shown to be above {level}, so this is neither better nor worse"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _why(results: Results, record: Mapping[str, Any], measure: Measure) -> str:
    """The verdict in words."""
    unit = f" {measure.unit}" if measure.unit else ""
    if record["verdict"] == "no verdict":
        return _without_floor(results, record)
    if record["verdict"] != "no difference shown":
        return ""
    text = f"80% power to find a difference of {significant(record['detectable'], 2)}{unit}"
    if record["seeds_needed"] is None:
        more = "more items" if record["from_items"] else "more than 1,000 seeds"
        return f"{text}; this one would take {more}"
    return f"{text}; this one would take {record['seeds_needed']} seeds, {compact(record['tokens_needed'])} tokens for both arms"


def _without_floor(results: Results, record: Mapping[str, Any]) -> str:
    if record["seeds"] > 1:
        return "all seeds have the same value, so there is no noise floor"
    tests = (len(results.experiment.arms) - 1) * len(results.experiment.measures)
    sizes = [(seeds, detectable_in_noise(seeds, tests)) for seeds in _MORE_SEEDS]
    found = ", ".join(f"{size:.1f} with {seeds} seeds" for seeds, size in sizes if size is not None)
    return (
        "one seed gives no noise floor; name an earlier ablation in noise, or take more seeds: a difference found with 80% power is, in "
        f"standard deviations over seeds, {found}"
    )


def _not_measured(results: Results) -> Iterator[str]:
    """Runs that have diverged, finished runs without a value of a measure, and arms that were measured on something else."""
    experiment = results.experiment
    for arm in experiment.arms.values():
        lost = [f"seed {run.seed} ({why})" for run in results.finished(arm) if (why := results.readings[run.directory].diverged)]
        if lost:
            yield f"{arm.name} diverged: {', '.join(lost)}; these runs are in no comparison, no noise floor and no quality of a measure"
    for measure in experiment.measures:
        for arm in experiment.arms.values():
            runs = [run for run in results.regular(arm) if measure.name not in results.readings[run.directory].values]
            if runs:
                seeds = ", ".join(str(run.seed) for run in runs)
                yield (
                    f"{measure.name} of {arm.name}, seed {seeds}: no finite value at the end (the run diverged, or does not write it), so "
                    f"{_left_out(results, measure, arm)}"
                )
            if not results.same_sample(measure, arm):
                yield (
                    f"{measure.name} of {arm.name} is not compared, because it was measured on other {what(measure)} than the baseline's: "
                    f"{_to_measure_alike(measure)}"
                )
        if experiment.earlier.get(measure.name) and not results.earlier(measure):
            yield f"{measure.name}: the noise floor of {experiment.ablation.noise} is of other {what(measure)}, so it is not assumed"


def _left_out(results: Results, measure: Measure, arm: Arm) -> str:
    """What it means that an arm has no value with some seeds."""
    base = results.experiment.baseline
    if arm is base:
        return "no arm is compared over them"
    if not (seeds := results.shared(measure, arm)):
        return "the arm is not compared"
    mean = float(results.table(measure, [base], seeds).mean())
    numbers = ", ".join(map(str, seeds))
    return f"this arm alone is compared without them: over seed {numbers}, where the baseline has a mean of {significant(mean, 4)}"


def _to_measure_alike(measure: Measure) -> str:
    if what(measure) == "text":
        return "compare held-out text instead, such as validation/bits_per_byte"
    if measure.has_items:
        return "let all arms ask the same items in the same form (evaluate, with set)"
    return (
        "its corpus holds out other documents. Give all arms one corpus (with set) and change the weights of its sources in "
        "train.phases.NAME.mixture, or compare a domain whose held-out text is the same (validation/DOMAIN/bits_per_byte), or a benchmark"
    )


Json = Mapping[str, Any]
_QUALITY = ["measure", "trust at this size", "monotonicity", "signal to noise", "to checkpoints", "ranks", "because"]
_STYLES = {"better": "green", "worse": "red", "diverged": "red", "no verdict": "dim"}


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


def signed(value: float | None) -> str:
    if value is None:
        return ""
    text = significant(value, 3)
    return text if text.startswith("−") or not value else f"+{text}"


def _verdicts(document: Json) -> Iterator[list[str]]:
    for one in document["verdicts"]:
        yield [one["arm"], one["measure"], signed(one["difference"]), interval(one), one["verdict"], one["why"]]


def _values(document: Json) -> Iterator[list[str]]:
    for name, measure in document["measures"].items():
        most = max(map(len, measure["values"].values()), default=0)
        other = measure.get("other_sample", ())
        means = [
            _mean(measure["values"].get(arm), most) + " (measured on other data)" * (arm in other)
            or "diverged" * bool(document["arms"][arm].get("diverged"))
            for arm in document["arms"]
        ]
        sd = measure["noise_floor"]
        yield [name, *means, "" if sd is None else significant(sd, 2)]


def _mean(values: Json | None, most: int) -> str:
    """The mean over the seeds of an arm, and which they are if other arms have more."""
    if not values:
        return ""
    over = f" (seed {', '.join(values)})" if len(values) < most else ""
    return significant(sum(values.values()) / len(values), 4) + over


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
