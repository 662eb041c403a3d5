"""Judges the run folders of `runs.py` with the doctor's rules, and publishes how often they are right.

    python benchmarks/doctor/matrix.py [--out runs/doctor] [--half tune|publish] [--page docs/doctor-measured.md] [--measured FILE]

Even seeds are for tuning rules, and so are those below the `first_seed` of a plant; odd ones from it on are published. A run counts as
named right if the first problem that the doctor names is the cause that was planted. Precision and recall of a cause have Wilson intervals
(95%).
`--confusions FILE` lists what was mistaken for what.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import baselines
from plants import CODES, FIRST_SEED, PLANTS
from runs import ROOT, read_results

Row = dict[str, Any]
HEALTHY, UNSURE = "healthy", "not sure"
_OWN_CORE = 0.7  # share of a core below which the machine was oversubscribed in truth: by the times of the process, not by the doctor
_BESIDE = {"S1", "S2", "S3-slow", "S3-start"}  # what a machine that is shared with other programs may show
_POINTS = 10  # of a run, at which the first step is looked for


def wilson(right: int, of: int) -> tuple[float, float, float]:
    """A proportion with its 95% Wilson interval; NaN without any."""
    if not of:
        return math.nan, 0.0, 1.0
    z, p = 1.959964, right / of
    middle = (p + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return p, max(0.0, middle - half), min(1.0, middle + half)


def judge(folder: Path) -> Row:
    """What the doctor says of a run: codes of problems, causes first, of the not sure, of notes; training causes; by part of the run."""
    from lmworks.watch.diagnosis import all_rules
    from lmworks.watch.evidence import stages_in
    from lmworks.watch.run_files import open_run

    stages = list(stages_in(open_run(folder)))
    whole = _diagnosed(stages)
    areas = {code: rule.area for code, rule in all_rules().items()}
    training = [code for code in whole["problems"] if areas[code] not in ("machine", "ranks", "checkpoints")]
    first = None
    if whole["problems"]:
        for point in range(1, _POINTS):
            if whole["problems"][0] in _diagnosed([_until(one, point / _POINTS) for one in stages])["problems"]:
                first = point / _POINTS
                break
        else:
            first = 1.0
    return whole | {"training": training, "first": first, "plain": _diagnosed(map(_without_details, stages))}


def _diagnosed(stages: Iterable[Any]) -> Row:
    from lmworks.watch.diagnosis import diagnose

    found = [diagnose(evidence) for evidence in stages]
    return {
        "problems": [one.code for each in reversed(found) for one in each.problems],  # the stage that ran last first
        "unsure": [one.code for each in found for one in each.unsure],
        "notes": [one.code for each in found for one in each.notes],
        "not_judged": sorted({code for each in found for code in each.not_judged}),
    }


def _until(evidence: Any, part: float) -> Any:
    """The evidence as it was after a part of the steps: later lines and events are taken away."""
    from copy import copy

    step = max(1, round(part * evidence.step))
    cut = copy(evidence)
    cut.__dict__.pop("_columns", None)
    cut.lines = [line for line in evidence.lines if not isinstance(line.get("step"), int) or line["step"] <= step]
    last = max((line["time"] for line in cut.lines if isinstance(line.get("time"), int | float)), default=math.inf)
    cut.events = [event for event in evidence.events if not isinstance(event.get("time"), int | float) or event["time"] <= last]
    return cut


_DETAILS = (
    "layers/", "optim/update_ratio", "optim/weight_norm", "optim/embedding_norm", "optim/head_norm", "optim/grad_rms/",
    "optim/unchanged_weights",
)  # fmt: skip
_EVENTS = {"spike", "bad_step", "rollback", "resume", "phase"}


def _without_details(evidence: Any) -> Any:
    """The evidence of a run with `metrics.detail_every` off: layers are measured in the steps 1, 10, 100 and after events."""
    from copy import copy

    after = {event["step"] + more for event in evidence.events if event["event"] in _EVENTS and isinstance(event.get("step"), int)
             for more in (1, 2)}  # fmt: skip
    kept = {1, 10, 100} | after
    cut = copy(evidence)
    cut.__dict__.pop("_columns", None)
    cut.lines = [
        line if line.get("step") in kept else {name: value for name, value in line.items() if not name.startswith(_DETAILS)}
        for line in evidence.lines
    ]
    return cut


def _judged(arguments: tuple[str, str]) -> Row:
    out, folder = arguments
    path = Path(out) / folder
    lines = baselines.read_lines(path)
    return judge(path) | {
        "folder": folder, "trainproof": baselines.trainproof(lines), "six_sigma": baselines.six_sigma(lines),
        "features": baselines.features(path),
    }  # fmt: skip


def _half_of(row: Row) -> str:
    return "publish" if row["seed"] % 2 and row["seed"] >= PLANTS[row["plant"]].first_seed else "tune"


def judge_all(out: Path, half: str, processes: int) -> list[Row]:
    """Records of the runs of a half (tune, publish or all) with what was said of them."""
    records = {
        folder: row for folder, row in read_results(out).items()
        if row["plant"] in PLANTS and not row["outcome"].startswith("failed") and half in ("all", _half_of(row))
        and (out / folder / "ledger.jsonl").exists()  # it may be made again at this moment
    }  # fmt: skip
    with ProcessPoolExecutor(processes) as pool:
        said = list(pool.map(_judged, [(str(out), folder) for folder in records], chunksize=4))
    return [_scored(records[one["folder"]] | one) for one in said]


def causes_of(code: str) -> set[str]:
    """The planted causes that a code of the doctor stands for."""
    return {cause for cause, codes in CODES.items() if code in codes}


def _scored(row: Row) -> Row:
    """With `named`: the cause that the doctor names first, as a plant's, or healthy, or not sure."""
    plant = PLANTS[row["plant"]]
    wanted = {plant.code, *plant.accepted} - {""}
    busy = row["cpu_share"] < _OWN_CORE and plant.scenario != "ranks"
    named = [(code, causes_of(code)) for code in row["problems"]]
    beside = _BESIDE - wanted if busy else set()
    named = [(code, causes) for code, causes in named if not causes or not causes <= beside]
    first = named[0] if named else None
    if first is None:
        unsure = [code for code in row["unsure"] if not causes_of(code) or not causes_of(code) <= beside]
        label = UNSURE if unsure else HEALTHY
    elif wanted & first[1]:
        label = plant.code
    else:
        label = min(first[1]) if first[1] else first[0]
    right = label == plant.code if plant.code else label in (HEALTHY, UNSURE)
    anywhere = bool(plant.code) and any(plant.code in causes for _, causes in named)
    return row | {"named": label, "right": right, "anywhere": anywhere, "codes": [code for code, _ in named]}


# Tables.


def rates(rows: Sequence[Row], cause: str) -> Row:
    """Precision over all runs in which the cause was named, recall over the runs in which it was planted, and both as F1."""
    planted = [row for row in rows if row["code"] == cause and "+" not in row["plant"]]
    named = [row for row in rows if row["named"] == cause]
    hits = sum(row["named"] == cause for row in planted)
    precision, recall = wilson(sum(row["code"] == cause for row in named), len(named)), wilson(hits, len(planted))
    both = 0.0 if not hits else 2 * precision[0] * recall[0] / (precision[0] + recall[0])
    return {"precision": precision, "recall": recall, "f1": both, "runs": len(planted), "named": len(named)}


def tables(rows: Sequence[Row]) -> Row:
    """All figures of the page."""
    clear = [row for row in rows if row["dose"] == "clear" and "+" not in row["plant"]]
    causes = sorted({plant.code for plant in PLANTS.values() if plant.code and any(row["code"] == plant.code for row in clear)})
    starred = {plant.code for plant in PLANTS.values() if plant.starred}
    per = {cause: rates(clear, cause) for cause in causes}
    plain = [_scored(row | row["plain"]) for row in clear]
    silent = [row for row in rows if not row["code"]]
    pairs = [row for row in rows if "+" in row["plant"]]
    mean = lambda values: sum(values) / len(values) if values else math.nan  # noqa: E731
    return {
        "runs": len(rows), "causes": per,
        "macro_f1": mean([per[cause]["f1"] for cause in causes]),
        "macro_f1_plain": mean([rates(plain, cause)["f1"] for cause in causes]),
        "macro_f1_starred": mean([per[cause]["f1"] for cause in causes if cause in starred]),
        "by_dose": {
            cause: {
                dose: wilson(sum(row["named"] == cause for row in found), len(found))
                for dose in ("weak", "clear", "strong")
                if (found := [row for row in rows if row["code"] == cause and row["dose"] == dose and "+" not in row["plant"]])
            }
            for cause in causes
        },
        "first_step": {
            cause: [row["first"] for row in clear if row["named"] == cause == row["code"] and row["first"] is not None] for cause in causes
        },
        "abstained": {cause: sum(row["named"] == UNSURE for row in clear if row["code"] == cause) for cause in causes},
        "silent": {
            "runs": len(silent), "named": Counter(row["named"] for row in silent if not row["right"]),
            "training_causes": sum(bool(row["training"]) for row in silent),
            "rate": wilson(sum(bool(row["training"]) for row in silent), len(silent)),
            "which": sorted(f"{row['folder']}: {', '.join(row['training'])}" for row in silent if row["training"]),
        },
        "pairs": {
            plant: {"runs": len(found), "primary": sum(row["named"] == row["code"] for row in found),
                    "either": sum(row["right"] or row["anywhere"] for row in found)}
            for plant in sorted({row["plant"] for row in pairs}) if (found := [row for row in pairs if row["plant"] == plant])
        },
        "confusions": {cause: Counter(row["named"] for row in clear if row["code"] == cause and row["named"] != cause) for cause in causes},
    }  # fmt: skip


def compare(rows: Sequence[Row], fitted_on: Sequence[Row]) -> Row:
    """The baselines on the same runs: how many faulty runs they report, how many healthy ones, and the tree's macro-F1."""
    clear = [row for row in rows if row["dose"] == "clear" and "+" not in row["plant"]]
    faulty, silent = [row for row in clear if row["code"]], [row for row in rows if not row["code"]]
    found: Row = {}
    for name, tells in (
        ("the doctor", lambda row: row["named"] not in (HEALTHY, UNSURE)),
        ("trainproof, FAIL", lambda row: row["trainproof"].startswith("FAIL")),
        ("trainproof, FAIL or WARN", lambda row: not row["trainproof"].startswith(("PASS", "NOT"))),
        ("6 sigma over 128 steps", lambda row: row["six_sigma"]),
    ):
        found[name] = {"detected": wilson(sum(map(tells, faulty)), len(faulty)), "false": wilson(sum(map(tells, silent)), len(silent))}
    if fitted_on and len({row["code"] for row in fitted_on}) > 1:
        tree = baselines.fit_tree([row["features"] for row in fitted_on], [row["code"] or HEALTHY for row in fitted_on])
        said = tree.predict([row["features"] for row in rows])
        twin = [row | {"named": cause} for row, cause in zip(rows, said, strict=True)]
        chosen = [row for row in twin if row["dose"] == "clear" and "+" not in row["plant"]]
        causes = sorted({row["code"] for row in chosen if row["code"]})
        found[f"a tree of {baselines.LEAVES} leaves"] = {
            "detected": wilson(sum(row["named"] != HEALTHY for row in chosen if row["code"]), len(faulty)),
            "false": wilson(sum(row["named"] != HEALTHY for row in twin if not row["code"]), len(silent)),
            "macro_f1": sum(rates(chosen, cause)["f1"] for cause in causes) / max(1, len(causes)),
        }  # fmt: skip
    return found


# Output.


def _rate(value: Sequence[float]) -> str:
    return "-" if math.isnan(value[0]) else f"{value[0]:.2f} ({value[1]:.2f} to {value[2]:.2f})"


def page(found: Row, others: Row, half: str) -> str:
    """The tables as Markdown."""
    about: dict[str, str] = {}
    for plant in PLANTS.values():
        about.setdefault(plant.code, plant.about)
    silent = found["silent"]
    lines = [
        "# How often the doctor is right",
        "",
        "This page shows the error rates of `lmworks doctor`, on small runs with a planted cause and on healthy ones that look odd.",
        "`make doctor` makes the runs and this page. Rules were tuned on other seeds; these are the runs of the "
        + {"publish": f"odd seeds from {FIRST_SEED + 1} on (of some plants later), which nobody had looked at.",
           "tune": "seeds that rules were tuned on, which say how well they fit, not how well they do.", "all": "all seeds."}[half],
        "",
        f"- Runs: {found['runs']:,}. Macro-F1 at the clear dose: {found['macro_f1']:.3f} over {len(found['causes'])} causes, "
        f"{found['macro_f1_starred']:.3f} over those that users meet most.",
        "- Layers are measured each tenth of these runs (`metrics.detail_every`). With the few steps in which they always are, macro-F1 is "
        f"{found['macro_f1_plain']:.3f}.",
        f"- A training cause was named in {silent['training_causes']} of {silent['runs']} healthy runs: {_rate(silent['rate'])}.",
        "",
        "## Precision and recall at the clear dose",
        "",
        "Intervals are Wilson's, 95%. \"First\" is the part of the run after which the cause could be named, the median over runs.",
        "",
        "| plant | cause | precision | recall | F1 | runs | not sure | first | mistaken for |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for cause, row in found["causes"].items():
        firsts = sorted(found["first_step"][cause])
        first = f"{100 * firsts[len(firsts) // 2]:.0f}%" if firsts else "-"
        mistaken = ", ".join(f"{name} {count}" for name, count in found["confusions"][cause].most_common(3))
        lines.append(
            f"| {cause} | {about[cause]} | {_rate(row['precision'])} | {_rate(row['recall'])} | {row['f1']:.2f} | {row['runs']} | "
            f"{found['abstained'][cause]} | {first} | {mistaken} |"
        )
    lines += ["", "## Detection against dose", "", "| plant | weak | clear | strong |", "|---|---|---|---|"]
    for cause, doses in found["by_dose"].items():
        lines.append(
            f"| {cause} | " + " | ".join(_rate(doses[dose]) if dose in doses else "-" for dose in ("weak", "clear", "strong")) + " |"
        )
    if found["pairs"]:
        lines += ["", "## Two faults at once", "", "| plants | runs | the primary one first | one of both |", "|---|---|---|---|"]
        lines += [f"| {name} | {row['runs']} | {row['primary']} | {row['either']} |" for name, row in found["pairs"].items()]
    lines += [
        "",
        "## Others on the same runs",
        "",
        "| judge | reports of faulty runs | reports of healthy runs | macro-F1 |",
        "|---|---|---|---|",
    ]
    for name, row in others.items():
        f1 = found["macro_f1"] if name == "the doctor" else row.get("macro_f1", math.nan)
        lines.append(f"| {name} | {_rate(row['detected'])} | {_rate(row['false'])} | {'-' if math.isnan(f1) else f'{f1:.2f}'} |")
    return "\n".join([*lines, ""])


def measured(rows: Sequence[Row]) -> Row:
    """Precision and recall by code of a rule, for the doctor's own report."""
    clear = [row for row in rows if row["dose"] == "clear" and "+" not in row["plant"]]
    found = {}
    for cause, codes in CODES.items():
        row = rates(clear, cause)
        if row["runs"]:
            for code in codes:
                figures = {
                    name: [round(value, 4) for value in row[name]] for name in ("precision", "recall") if not math.isnan(row[name][0])
                }
                if len(figures) == 2:
                    found[code] = figures | {"runs": len(clear)}
    return {"rules": dict(sorted(found.items()))}


def confusions(rows: Sequence[Row]) -> str:
    """For those who mend rules: each run that was not named right, with what was said."""
    wrong: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if not row["right"]:
            wrong[row["code"] or HEALTHY, row["plant"]].append(row)
    lines = []
    for (cause, plant), found in sorted(wrong.items()):
        lines += ["", f"## {plant} ({cause}): {len(found)} of {sum(row['plant'] == plant for row in rows)} wrong"]
        lines += [
            f"- {row['folder']}: problems {row['codes'] or '-'}, not sure {row['unsure'] or '-'}, notes {row['notes'] or '-'}"
            + (f", could not judge {wanted}" if (wanted := sorted(set(CODES.get(row["code"], ())) & set(row["not_judged"]))) else "")
            for row in found
        ]  # fmt: skip
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/doctor"))
    parser.add_argument("--half", choices=("tune", "publish", "all"), default="publish")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--page", type=Path)
    parser.add_argument("--measured", type=Path, help="where lmworks doctor reads its rates: src/lmworks/doctor/measured.json")
    parser.add_argument("--confusions", type=Path)
    options = parser.parse_args(arguments)
    out = options.out.absolute()
    rows = judge_all(out, options.half, options.processes)
    tuned = rows if options.half == "tune" else judge_all(out, "tune", options.processes)
    found, others = tables(rows), compare(rows, tuned)
    text = page(found, others, options.half)
    (out / f"matrix-{options.half}.json").write_text(json.dumps(found | {"others": others}, indent=1, default=str), encoding="utf-8")
    (out / f"matrix-{options.half}.md").write_text(text, encoding="utf-8")
    if options.page:
        (ROOT / options.page).write_text(text, encoding="utf-8")
    if options.measured:
        (ROOT / options.measured).write_text(json.dumps(measured(rows), indent=1) + "\n", encoding="utf-8")
    if options.confusions:
        options.confusions.write_text(confusions(rows) + "\n", encoding="utf-8")
    print(
        f"{found['runs']} runs: macro-F1 {found['macro_f1']:.3f}, starred {found['macro_f1_starred']:.3f}; a training cause in "
        f"{found['silent']['training_causes']} of {found['silent']['runs']} healthy runs"
    )


if __name__ == "__main__":
    main()
