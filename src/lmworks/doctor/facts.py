"""What the page says in words, figures and tables."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Sequence

from lmworks.doctor.curves import OVERALL
from lmworks.doctor.figures import compact, percent, significant, size, span
from lmworks.doctor.gather import Json, Run, Training
from lmworks.doctor.timeline import STAGE_WORDS
from lmworks.recipe.derivation.parameters import parameters
from lmworks.recipe.schema.cluster import Cluster
from lmworks.recipe.tree.paths import flatten

_LONGEST = 3e9  # seconds that a run may take
_SAMPLE_COLUMNS = 5
_SAMPLE_LENGTH = 700
_REASONS = 10
_DIFFERENCES = 60  # values of the recipe in a comparison


def heading(run: Run) -> Json:
    """Name, state and how far it is."""
    seconds = _stage_seconds(run)
    stages = [
        {"title": STAGE_WORDS[s["name"]], "state": s["state"], "time": span(seconds[s["name"]]) if s["name"] in seconds else ""}
        for s in run.stages
    ]
    active = "tune" if run.training["tune"].series or run.training["tune"].starts else "pretrain"
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


def _stage_seconds(run: Run) -> dict[str, float]:
    """Time of each finished stage; of training all processes that took part, where the stage's own stamp knows only the last."""
    stamped = {s["name"]: float(s["seconds"]) for s in run.stages if isinstance(s["seconds"], int | float)}
    return {name: max(seconds, run.training[name].seconds if name in run.training else 0.0) for name, seconds in stamped.items()}


def _about(run: Run) -> str:
    if run.recipe is None:
        return ""
    model = run.recipe.model
    kind = f"Mixture of {model.moe.n_routed_experts} experts, {model.moe.num_experts_per_tok} per token" if model.moe else "Dense decoder"
    phases = " then ".join(f"{phase.name} ({compact(int(phase.tokens))} tokens)" for phase in run.recipe.train.phases)
    shape = f"{model.num_hidden_layers} layers of width {model.hidden_size}; vocabulary {model.vocab_size or 0:,}"
    return f"{kind}; {shape}. Trained on {phases or 'nothing'}."


def tiles(run: Run, cluster: Cluster | None) -> list[tuple[str, str, str]]:
    """Key figures: label, value, what stands under it."""
    part = run.pretrain
    found: list[tuple[str, str, str]] = []
    if run.recipe is not None and run.recipe.model.hidden_size:
        tensors = [tensor for tensor in parameters(run.recipe.model) if not tensor.mtp]
        active = round(sum(tensor.size * tensor.active for tensor in tensors))
        total = sum(tensor.size for tensor in tensors)
        found.append(("Parameters", compact(total), f"{compact(active)} active per token" if active < total else "all active"))
    if (tokens := part.last("train/tokens")) is not None:
        planned = f" of {part.planned_steps:,}" if part.planned_steps > part.step else ""
        found.append(("Tokens", compact(tokens), f"in {part.step:,} steps{planned}"))
    if "train/loss" in part.series:
        means = part.series["train/loss"].means()
        lately = means[-max(1, len(means) // 50) :]
        under = f"from {significant(means[0][1], 3)}, nats per token"
        found.append(("Training loss", significant(sum(y for _, y in lately) / len(lately), 4), under))
    found += _bits_tile(run)
    if "perf/tokens_per_second" in part.series:
        found.append(("Tokens per second", compact(part.series["perf/tokens_per_second"].median()), "median"))
    if "perf/mfu" in part.series:
        found.append(("MFU", percent(part.series["perf/mfu"].median()), "median, of the measured peak"))
    if part.seconds:
        every = sum(_stage_seconds(run).values())
        under = f"{span(every)} for all stages" if run.state == "finished" and every else "pretraining, pauses left out"
        found.append(("Training time", span(part.seconds), under))
    found += _cost_tile(run, cluster)
    if "perf/memory" in part.series:
        found.append(("Memory", size(part.series["perf/memory"].high[1]), "peak"))
    if "experts/load_cv" in part.series:
        dead = part.last("experts/dead") or 0
        found.append(("Expert imbalance", percent(part.series["experts/load_cv"].last[1]), f"load variation, {dead:.0f} dead experts"))
    return found


def _cost_tile(run: Run, cluster: Cluster | None) -> list[tuple[str, str, str]]:
    """Device-hours of all training, and money and energy where the recipe or the cluster says what a device costs and draws."""
    trained = run.training.values()
    hours = sum(part.device_seconds for part in trained) / 3600
    cores = sum(part.core_seconds for part in trained) / 3600
    if not hours:
        return []
    metrics = run.recipe.metrics if run.recipe else None
    price = cluster.dollars_per_hour if cluster else metrics.dollars_per_hour if metrics else 0.0
    watts = cluster.watts if cluster and cluster.watts else metrics.watts if metrics else 0.0
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
    models = _dict(run.results.get("models"))
    measured = _dict(_dict(_dict(models.get("base")).get("bits_per_byte")).get(OVERALL)).get("bits_per_byte")
    if not isinstance(measured, int | float) or run.stale("evaluate"):
        value = run.pretrain.last("validation/bits_per_byte")
        under = "on a sample, during the run" + ("; the evaluation is of an earlier model" if run.stale("evaluate") else "")
        return [] if value is None else [("Held-out bits per byte", significant(value, 4), under)]
    value = measured
    xz = references(run).get("xz -9e", {}).get(OVERALL)
    under = f"{100 * (value / xz - 1):+.0f}% against xz −9e".replace("-", "−") if xz else "lower is better"
    return [("Held-out bits per byte", significant(value, 4), under)]


def sizes(run: Run) -> dict[str, int]:
    """Domain -> bytes of held-out text that the evaluation measured."""
    base = _dict(_dict(_dict(run.results.get("models")).get("base")).get("bits_per_byte"))
    return {str(domain): _bytes(measured) for domain, measured in base.items()}


def references(run: Run) -> dict[str, dict[str, float]]:
    """Reference -> domain -> bits per byte; empty before the evaluation has measured them."""
    marks = _dict(_dict(run.results.get("references")).get("bits_per_byte"))
    return {str(name): values for name, values in marks.items() if isinstance(values, dict)}


def samples(training: Training) -> list[Json]:
    """For each prompt, some completions from the first to the newest."""
    loss = training.series["train/loss"].outline() if "train/loss" in training.series else []
    found = []
    for prompt, kept in training.samples.items():
        count = min(len(kept), _SAMPLE_COLUMNS)
        chosen = [kept[round(n * (len(kept) - 1) / max(count - 1, 1))] for n in range(count)]
        columns = []
        for one in chosen:
            _, near = min(((abs(step - one["step"]), value) for step, value in loss), default=(0.0, None))
            under = f"loss {significant(near, 3)}" if near is not None else ""
            columns.append({"step": f"{one['step']:,}", "under": under, "text": str(one.get("completion", "")).strip()[:_SAMPLE_LENGTH]})
        found.append({"prompt": prompt.strip()[:_SAMPLE_LENGTH], "columns": columns})
    return found


def bits(run: Run) -> Json:
    """Bits per byte of the finished models and the references, per domain, with places on a common scale."""
    models = {str(name): _dict(_dict(model).get("bits_per_byte")) for name, model in _dict(run.results.get("models")).items()}
    marks = references(run)
    columns = [*(f"{name} model" for name in models), *marks]
    rows: list[Json] = []
    for domain in next(iter(models.values()), {}):
        values = [_dict(model.get(domain)).get("bits_per_byte") for model in models.values()] + [marks[name].get(domain) for name in marks]
        rows.append({"domain": domain, "values": [v if isinstance(v, int | float) else None for v in values]})
    known = [v for row in rows for v in row["values"] if v is not None]
    if not known:
        return {}
    top = max(known) * 1.04
    for row in rows:
        row["cells"] = [(f"{v:.3f}" if v is not None else "–", None if v is None else v / top) for v in row["values"]]
        row["whole"] = row["domain"] == OVERALL
    rows.sort(key=lambda row: bool(row["whole"]), reverse=True)
    return {"columns": columns, "rows": rows, "models": len(models), "how": _dict(_dict(run.results.get("references")).get("how"))}


def scores(run: Run) -> Json:
    """Benchmarks and tasks of each model, with interval, chance and verdict."""
    models = {str(name): _dict(model) for name, model in _dict(run.results.get("models")).items()}
    rows = []
    for kind, title in (("benchmarks", "benchmark"), ("tasks", "task")):
        for one in dict.fromkeys(name for model in models.values() for name in _dict(model.get(kind))):
            for name, model in models.items():
                score = _dict(_dict(model.get(kind)).get(one))
                interval = score.get("interval")
                if (
                    not score.get("n")
                    or not isinstance(score.get("score"), int | float)
                    or not isinstance(interval, list)
                    or len(interval) != 2
                ):
                    continue
                verdict = str(score.get("verdict", ""))
                side = next((side for side in ("above", "below") if verdict.startswith(side)), "near")
                rows.append(
                    {
                        "set": one,
                        "kind": title,
                        "model": name,
                        "n": score["n"],
                        "score": 100 * score["score"],
                        "low": 100 * interval[0],
                        "high": 100 * interval[1],
                        "baseline": 100 * float(score.get("baseline") or 0),
                        "verdict": verdict,
                        "side": side,
                    }
                )
    compared = [
        {
            "set": name,
            "difference": 100 * value["difference"],
            "low": 100 * value["interval"][0],
            "high": 100 * value["interval"][1],
            "verdict": value.get("verdict", ""),
        }
        for name, value in _dict(run.results.get("compared")).items()
        if isinstance(value, dict) and isinstance(value.get("difference"), int | float) and len(value.get("interval") or ()) == 2
    ]
    missing = sorted({str(model["benchmarks_unavailable"]) for model in models.values() if "benchmarks_unavailable" in model})
    doubts = {str(one): str(why) for one, why in _dict(run.results.get("not_clean")).items()}
    final = [{"model": name, "samples": [s for s in model.get("samples") or [] if isinstance(s, dict)]} for name, model in models.items()]
    return {"rows": rows, "compared": compared, "missing": missing, "doubts": doubts, "final": final} if models else {}


def corpus(run: Run) -> Json:
    """What became of the bytes of each source, and the reasons for what was dropped."""
    rows, reasons, sums = [], Counter[str](), Counter[str]()
    for source in map(_dict, run.corpus.get("sources") or []):
        came = _bytes(source.get("came"))
        passages = [_dict(step) for step in source.get("steps") or []]
        lost = [*_dict(source.get("quarantined")).items(), *(pair for one in passages for pair in _dict(one.get("dropped")).items())]
        for reason, count in lost:
            reasons[reason.replace("_", " ")] += _bytes(count)
        parts = {
            "train": _bytes(source.get("train")),
            "validation": _bytes(source.get("validation")),
            "dropped": sum(_bytes(count) for _, count in lost),
            "left aside": _bytes(source.get("not_drawn")),
        }
        sums.update(parts)
        sums["came"] += came
        rows.append(
            {
                "name": source.get("name", ""),
                "domain": source.get("domain", ""),
                "license": source.get("license", ""),
                "came": size(came),
                "documents": f"{_dict(source.get('came')).get('documents', 0):,}",
                "parts": _shares(parts, came),
            }
        )
    if not rows:
        return {}
    whole = {kind: sums[kind] for kind in ("train", "validation", "dropped", "left aside")}
    most = max(reasons.values(), default=1) or 1
    return {
        "rows": rows,
        "came": size(sums["came"]),
        "whole": _shares(whole, sums["came"]),
        "reasons": [(reason, size(count), count / most) for reason, count in reasons.most_common(_REASONS) if count],
        "missing": sorted(_dict(run.corpus.get("missing")).items()),
    }


def _shares(parts: dict[str, int], whole: int) -> list[tuple[str, str, float]]:
    return [(kind, size(count), count / max(whole, 1)) for kind, count in parts.items() if count]


def tokenizer(run: Run) -> list[Json]:
    """One row per source: bytes per token and tokens per word."""
    rows = [row for row in run.tokenizer.get("evaluation") or [] if isinstance(row, dict) and row.get("tokenizer") == "this"]
    most = max((row.get("bytes_per_token", 0) for row in rows), default=1) or 1
    return [
        {
            "source": row.get("source", ""),
            "domain": row.get("domain", ""),
            "bytes_per_token": significant(row.get("bytes_per_token", 0), 3),
            "share": row.get("bytes_per_token", 0) / most,
            "fertility": significant(row.get("fertility", 0), 3),
            "failures": row.get("round_trip_failures", 0),
        }
        for row in rows
    ]


def parity(run: Run) -> list[tuple[str, str]]:
    """What was exported, and how it compares with what was trained, in words."""
    known, compared, written = run.parity, _dict(run.parity.get("huggingface")), _dict(run.parity.get("bytes"))
    if not known:
        return []
    relative, limit, same = (_number(value) for value in (compared.get("relative"), known.get("tolerance"), compared.get("same_choice")))
    tokens, tensors = _number(compared.get("tokens")), _number(known.get("tensors"))
    found = [("Model", f"the {known.get('model', '')} model, weights in {known.get('dtype', '')}")]
    if compared:
        found.append(("For transformers, vLLM, SGLang", _exported(known.get("architecture"), written.get("huggingface"))))
        most = f", of which {significant(limit, 2)} is allowed" if limit else ""
        found.append(("Largest difference of a logit", f"{significant(relative, 3)} of the largest logit{most}"))
        found.append(("Same likeliest next token", f"{percent(same)} of {tokens:,.0f} held-out tokens"))
    if known.get("gguf_architecture"):
        found.append(("For llama.cpp", _exported(known["gguf_architecture"], written.get("gguf"))))
        found.append(("Tensors read back", f"{tensors:,.0f}, all equal bit for bit"))
    return found


def _exported(architecture: object, written: object) -> str:
    return str(architecture or "") + (f", {size(_number(written))}" if written else "")


def comparison(runs: Sequence[Run]) -> Json:
    """Runs side by side: what each has reached, and the recipe's values in which they differ."""
    if len(runs) < 2:
        return {}
    figures = [{label: value for label, value, _ in tiles(run, None)} | {"State": run.state} for run in runs]
    labels = [label for label in dict.fromkeys(name for one in figures for name in one) if any(label in one for one in figures)]
    trees = [{path: value for path, value in flatten(run.tree).items() if path not in ("name", "run_dir")} for run in runs]
    paths = dict.fromkeys(path for tree in trees for path in tree)
    other = [path for path in paths if any(tree.get(path, _ABSENT) != trees[0].get(path, _ABSENT) for tree in trees)]
    shown = [(path, [_value(tree.get(path, _ABSENT)) for tree in trees]) for path in other]
    return {
        "names": [run.name for run in runs],
        "figures": [(label, [one.get(label, "–") for one in figures]) for label in labels],
        "differences": shown[:_DIFFERENCES],
        "more": max(0, len(shown) - _DIFFERENCES),
    }


_ABSENT = object()


def _value(value: object) -> str:
    return "–" if value is _ABSENT else (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))[:80]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _bytes(count: object) -> int:
    value = _dict(count).get("bytes", 0)
    return int(value) if isinstance(value, int | float) else 0
