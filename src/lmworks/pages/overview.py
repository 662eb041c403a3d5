"""The head of the run page: state and progress of a run, key numbers, cost, and the comparison of several runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence

from lmworks.io.run_layout import BASE, MODEL_STAGES
from lmworks.pages.curves import OVERALL
from lmworks.pages.run_records import Json, Run, Training
from lmworks.pages.tables import as_dict, references
from lmworks.pages.timeline import STAGE_WORDS
from lmworks.recipe.keys import flatten
from lmworks.recipe.parameters import parameters
from lmworks.recipe.schema.layout import Cluster
from lmworks.ui.amounts import compact, percent, short_size, significant, span

_LONGEST = 3e9  # seconds that a run may take
_DIFFERENCES = 60  # values of the recipe in a comparison


def heading(run: Run) -> Json:
    """Name, state and how far it is."""
    seconds = _stage_seconds(run)
    words = STAGE_WORDS if run.recipe is None or run.recipe.trains_base else {**STAGE_WORDS, BASE.stage: "Base model"}
    stages = [
        {"title": words[s["name"]], "state": s["state"], "time": span(seconds[s["name"]]) if s["name"] in seconds else ""}
        for s in run.stages
    ]
    active = _active(run)
    part = run.training[active]
    seen, planned = part.last("train/tokens") or 0.0, float(part.planned_tokens)
    share = min(seen / planned, 1.0) if planned else 0.0
    known = f"{compact(seen)} of {compact(planned)} tokens, step {part.step:,} of {part.planned_steps:,}" if planned else ""
    if part.step > part.planned_steps > 0:  # a phase was added by an lmworks whose ledger does not say so
        share, known = 1.0, f"{compact(seen)} tokens, step {part.step:,}"
    behind = [STAGE_WORDS[s["name"]].lower() for s in run.stages if s["state"] == "stale"]
    reason = run.reason
    if behind and run.state == "stopped":
        are = "is" if len(behind) == 1 else "are"
        reason = reason or f"{' and '.join(behind)} {are} of an earlier model; run the same command again to bring them up to date"
    left = (planned - seen) / part.tokens_per_second if part.tokens_per_second else 0.0
    eta = ""
    if run.state == "running" and 0 < share < 1 and 0 < left < _LONGEST:
        eta = f"{span(left)} to go, about {time.strftime('%d %b %H:%M', time.localtime(time.time() + left))}"
    return {
        "name": run.name,
        "state": run.state,
        "reason": reason,
        "stages": stages,
        "share": share,
        "progress": known,
        "eta": eta,
        "label": STAGE_WORDS[active],
        "about": _about(run),
    }


def _active(run: Run) -> str:
    """The stage that has trained last."""
    begun = [one for one in MODEL_STAGES if run.training[one.stage].series or run.training[one.stage].starts]
    return max(reversed(begun), key=lambda one: run.training[one.stage].newest, default=BASE).stage


def _stage_seconds(run: Run) -> dict[str, float]:
    """Time of each finished stage; of training all processes that took part, where the stage's own stamp knows only the last."""
    stamped = {s["name"]: float(s["seconds"]) for s in run.stages if isinstance(s["seconds"], int | float)}
    return {name: max(seconds, run.training[name].seconds if name in run.training else 0.0) for name, seconds in stamped.items()}


def tiles(run: Run, cluster: Cluster | None) -> list[tuple[str, str, str]]:
    """Key figures: label, value, the text below it. They are those of pretraining; where there was none, of the stage that trained last."""
    stage = BASE.stage if run.pretrain.series else _active(run)
    part = run.training[stage]
    found: list[tuple[str, str, str]] = []
    if run.recipe is not None and run.recipe.model.open_size is None:
        tensors = [tensor for tensor in parameters(run.recipe.model) if not tensor.mtp]
        active = round(sum(tensor.size * tensor.active for tensor in tensors))
        total = sum(tensor.size for tensor in tensors)
        found.append(("Parameters", compact(total), f"{compact(active)} active per token" if active < total else "all active"))
    if (tokens := part.last("train/tokens")) is not None:
        planned = f" of {part.planned_steps:,}" if part.planned_steps > part.step else ""
        found.append(("Tokens", compact(tokens), f"in {part.step:,} steps{planned}"))
    if "train/loss" in part.series:
        found.append(_loss_tile(part))
    found += _bits_tile(run)
    if speed := part.series.get("perf/tokens_per_second"):
        found.append(("Tokens per second", compact(speed.median()), "median"))
    if mfu := part.series.get("perf/mfu"):
        found.append(("MFU", percent(mfu.median()), "median; fraction of the measured matrix-multiply peak"))
    if part.seconds:
        every = sum(_stage_seconds(run).values())
        under = f"{span(every)} for all stages" if run.state == "finished" and every else f"{STAGE_WORDS[stage].lower()}, pauses left out"
        found.append(("Training time", span(part.seconds), under))
    found += _cost_tile(run, cluster)
    if memory := part.series.get("perf/memory"):
        found.append(("Memory", short_size(memory.high[1]), "peak"))
    if (imbalance := part.last("experts/load_cv")) is not None:
        dead = part.last("experts/dead") or 0
        found.append(("Expert imbalance", percent(imbalance), f"load variation, {dead:.0f} dead experts"))
    return found


def _loss_tile(part: Training) -> tuple[str, str, str]:
    series = part.series["train/loss"]
    label, unit = ("Objective", "what the stage minimizes") if part.has_objective else ("Training loss", "nats per token")
    lately = series.buckets[-max(1, len(series.buckets) // 50) :]
    if not lately:
        return label, "not finite", f"since step {series.reach[0]:,.0f}; {unit}"
    first, mean = significant(series.first[1], 3), significant(sum(one.sum_y for one in lately) / sum(one.count for one in lately), 4)
    if series.gap is not None:
        return label, "not finite", f"since step {series.gap[0]:,.0f}; before that {first} to {mean}; {unit}"
    return label, mean, f"mean of the last 2% of steps, from {first}; {unit}"


def _cost_tile(run: Run, cluster: Cluster | None) -> list[tuple[str, str, str]]:
    """Device-hours of all training, and money and energy where the recipe or the cluster says what a device costs and draws."""
    trained = run.training.values()
    hours = sum(part.device_seconds for part in trained) / 3600
    cores = sum(part.core_seconds for part in trained) / 3600
    if not hours:
        return []
    metrics = run.recipe.metrics if run.recipe else None
    price = cluster.dollars_per_device_hour if cluster else metrics.dollars_per_device_hour if metrics else 0.0
    watts = cluster.watts_per_device if cluster and cluster.watts_per_device else metrics.watts_per_device if metrics else 0.0
    drawn = run.pretrain.series.get("system/power")
    device = "core" if cores else "GPU"
    spent = cores or hours
    value = f"{significant(spent, 3)} {device}-hours" if spent >= 1 else f"{significant(60 * spent, 3)} {device}-minutes"
    under = [f"{significant(cores / hours, 3)} cores of each rank"] if cores > hours else []
    if drawn:
        mean = sum(y for _, y in drawn.means()) / len(drawn.means())
        under.append(f"{_energy(mean * hours)} drawn by the devices, as measured on the first")
    elif watts:
        under.append(f"{_energy(watts * hours)} at {watts:g} W per device")
    if price:
        under.insert(0, f"{value} at ${price:g} per device and hour" + (f" ({cluster.name})" if cluster else ""))
        value = f"${price * hours:,.2f}"
    return [("Cost of training", value, "; ".join(under) or "of pretraining and tuning")]


def _energy(watt_hours: float) -> str:
    return f"{significant(watt_hours / 1000, 3)} kWh" if watt_hours >= 100 else f"{significant(watt_hours, 3)} Wh"


def _bits_tile(run: Run) -> list[tuple[str, str, str]]:
    models = as_dict(run.results.get("models"))
    measured = as_dict(as_dict(as_dict(models.get("base")).get("bits_per_byte")).get(OVERALL)).get("bits_per_byte")
    if not isinstance(measured, int | float) or run.stale("evaluate"):
        value = run.pretrain.last("validation/bits_per_byte")
        under = "on a sample, during the run" + ("; the evaluation is of an earlier model" if run.stale("evaluate") else "")
        return [] if value is None else [("Held-out bits per byte", significant(value, 4), under)]
    value = measured
    xz = references(run).get("xz -9e", {}).get(OVERALL)
    under = f"{100 * (value / xz - 1):+.0f}% against xz −9e".replace("-", "−") if xz else "lower is better"
    return [("Held-out bits per byte", significant(value, 4), under)]


def comparison(runs: Sequence[Run], cluster: Cluster | None) -> Json:
    """Runs side by side: what each has reached, at the price of the cluster, and the recipe's values in which they differ."""
    if len(runs) < 2:
        return {}
    figures = [{label: value for label, value, _ in tiles(run, cluster)} | {"State": run.state} for run in runs]
    labels = [label for label in dict.fromkeys(name for one in figures for name in one) if any(label in one for one in figures)]
    trees = [{path: value for path, value in flatten(run.tree).items() if path not in ("name", "run_dir")} for run in runs]
    paths = dict.fromkeys(path for tree in trees for path in tree)
    maps = {path[: dot.start()] for path in paths for dot in re.finditer(r"\.", path)}
    rows = [(path, [_at(tree, path) for tree in trees]) for path in paths if path not in maps]
    shown = [(path, [_value(one) for one in values]) for path, values in rows if any(one != values[0] for one in values)]
    return {
        "names": [run.name for run in runs],
        "figures": [(label, [one.get(label, "–") for one in figures]) for label in labels],
        "differences": shown[:_DIFFERENCES],
        "more": max(0, len(shown) - _DIFFERENCES),
    }


_ABSENT = object()


def _at(tree: Mapping[str, object], path: str) -> object:
    """The value of a path, or of the node above it that is a leaf in this tree, such as null where another run has a map."""
    while path not in tree and path:
        path = path.rpartition(".")[0]
    return tree.get(path, _ABSENT)


def _value(value: object) -> str:
    return "–" if value is _ABSENT else (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))[:80]


def _about(run: Run) -> str:
    if run.recipe is None:
        return ""
    model = run.recipe.model
    kind = f"Mixture of {model.moe.n_routed_experts} experts, {model.moe.num_experts_per_tok} per token" if model.moe else "Dense decoder"
    phases = " then ".join(f"{phase.name} ({compact(int(phase.tokens))} tokens)" for phase in run.recipe.train.phases)
    shape = f"{model.num_hidden_layers} layers of width {model.hidden_size}; vocabulary {model.vocab_size or 0:,}"
    if run.recipe.start_from is None:
        return f"{kind}; {shape}. Trained on {phases or 'nothing'}."
    start = re.sub(r"#sha256=([0-9a-f]{8})[0-9a-f]+$", r"#sha256=\1…", run.recipe.start_from)
    further = f" Pretrained further on {phases}." if phases else ""
    return f"{kind}; {shape}. Started from {start}{_first_loss(run)}.{further}"


def _first_loss(run: Run) -> str:
    """The first loss of the base model, beside that of the other library."""
    for event in run.events:
        about = event if event.get("event") == "start_from" else event.get("start_from")
        found = about.get("first_loss") if isinstance(about, dict) else None
        if not isinstance(found, dict) or not isinstance(found.get("loss"), float):
            continue
        theirs = found.get("transformers")
        other = f"{theirs:.4f} in transformers" if isinstance(theirs, float) else f"not compared: {found.get('not_compared')}"
        return f" (first loss {found['loss']:.4f}, {other})"
    return ""
