"""The tables of the run page: scores, samples, corpus, tokenizer and export, as plain values for the template."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from lmworks.io.run_layout import BASE, MODEL_STAGES
from lmworks.pages.curves import OVERALL
from lmworks.pages.run_records import Json, Run, Training
from lmworks.ui.amounts import compact, percent, short_size, significant, span

_SAMPLE_COLUMNS = 5
_SAMPLE_LENGTH = 700
_REASONS = 10


def sizes(run: Run) -> dict[str, int]:
    """Domain -> bytes of held-out text that the evaluation measured."""
    base = as_dict(as_dict(as_dict(run.results.get("models")).get("base")).get("bits_per_byte"))
    return {str(domain): _bytes(measured) for domain, measured in base.items()}


def references(run: Run) -> dict[str, dict[str, float]]:
    """Reference -> domain -> bits per byte; empty before the evaluation has measured them."""
    marks = as_dict(as_dict(run.results.get("references")).get("bits_per_byte"))
    return {str(name): values for name, values in marks.items() if isinstance(values, dict)}


def samples(training: Training) -> list[Json]:
    """For each prompt, some completions from the first to the newest."""
    loss = training.series["train/loss"].means() if "train/loss" in training.series else []
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


_PREDICTED: dict[str, tuple[str, Callable[[float], str]]] = {
    "perf/tokens_per_second": ("tokens per second", compact),
    "seconds": ("time", span),
    "perf/memory": ("peak memory", short_size),
    "checkpoint_bytes": ("one checkpoint", short_size),
}


def predictions(run: Run) -> Json:
    """What was predicted of each stage before its first step, beside what has been measured so far."""
    rows, sources = [], []
    for stage in MODEL_STAGES:
        part = run.training[stage.stage]
        figures, measured = as_dict(part.prediction.get("figures")), part.measured()
        for name, found in part.scored.items():
            if isinstance(value := as_dict(found).get("measured"), int | float):
                measured[name] = float(value)
        label = "" if stage is BASE else f"{stage.title}: "
        for name, (title, text) in _PREDICTED.items():
            predicted, found = as_number(figures.get(name)), measured.get(name, 0.0)
            if stage is not BASE and name == "seconds" and name not in part.scored:
                found = 0.0  # that of the training alone is not what was predicted
            if predicted > 0:
                error = f"{100 * (predicted / found - 1):+.0f}%" if found > 0 else ""
                rows.append((label + title, text(predicted), text(found) if found > 0 else "not yet", error))
        if source := str(part.prediction.get("source", "")):
            sources.append(source)
    return {"rows": rows, "source": "; ".join(dict.fromkeys(sources))} if rows else {}


def bits(run: Run) -> Json:
    """Bits per byte of the finished models and the references, per domain, with places on a common scale."""
    models = {str(name): as_dict(as_dict(model).get("bits_per_byte")) for name, model in as_dict(run.results.get("models")).items()}
    marks = references(run)
    columns = [*(f"{name} model" for name in models), *marks]
    rows: list[Json] = []
    for domain in next(iter(models.values()), {}):
        values = [as_dict(model.get(domain)).get("bits_per_byte") for model in models.values()]
        values += [marks[name].get(domain) for name in marks]
        rows.append({"domain": domain, "values": [v if isinstance(v, int | float) else None for v in values]})
    known = [v for row in rows for v in row["values"] if v is not None]
    if not known:
        return {}
    top = max(known) * 1.04
    for row in rows:
        row["cells"] = [(f"{v:.3f}" if v is not None else "–", None if v is None else v / top) for v in row["values"]]
        row["whole"] = row["domain"] == OVERALL
    rows.sort(key=lambda row: bool(row["whole"]), reverse=True)
    how = as_dict(as_dict(run.results.get("references")).get("how"))
    return {"columns": columns, "rows": rows, "models": len(models), "how": how}


def scores(run: Run) -> Json:
    """The scores of each model, with interval, chance and verdict."""
    models = {str(name): as_dict(model) for name, model in as_dict(run.results.get("models")).items()}
    rows = []
    for one in dict.fromkeys(name for model in models.values() for name in as_dict(model.get("scores"))):
        for name, model in models.items():
            score = as_dict(as_dict(model.get("scores")).get(one))
            interval = score.get("interval")
            measured = score.get("n") and isinstance(score.get("score"), int | float)
            if not measured or not isinstance(interval, list) or len(interval) != 2:
                continue
            verdict = str(score.get("verdict", ""))
            side = next((side for side in ("above", "below") if verdict.startswith(side)), "near")
            rows.append(
                {
                    "set": one,
                    "kind": str(score.get("form", "")),
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
        for name, value in as_dict(run.results.get("compared")).items()
        if isinstance(value, dict) and isinstance(value.get("difference"), int | float) and len(value.get("interval") or ()) == 2
    ]
    since = [as_dict(run.results.get(key)).get("summary") for key in ("forgetting", "forgetting_since_start")]
    forgotten = [line for line in since if line]
    missing = sorted({f"{one}: {why}" for model in models.values() for one, why in as_dict(model.get("unavailable")).items()})
    doubts = {str(one): str(why) for one, why in as_dict(run.results.get("not_clean")).items()}
    final = [{"model": name, "samples": [s for s in model.get("samples") or [] if isinstance(s, dict)]} for name, model in models.items()]
    found = {"rows": rows, "compared": compared, "forgotten": forgotten, "missing": missing, "doubts": doubts, "final": final}
    return found if models else {}


def corpus(run: Run) -> Json:
    """What became of the bytes of each source, and the reasons for what was dropped."""
    rows, reasons, sums = [], Counter[str](), Counter[str]()
    for source in map(as_dict, run.corpus.get("sources") or []):
        came = _bytes(source.get("came"))
        passages = [as_dict(step) for step in source.get("steps") or []]
        lost = [*as_dict(source.get("quarantined")).items(), *(pair for one in passages for pair in as_dict(one.get("dropped")).items())]
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
                "came": short_size(came),
                "documents": f"{as_dict(source.get('came')).get('documents', 0):,}",
                "parts": _shares(parts, came),
            }
        )
    if not rows:
        return {}
    whole = {kind: sums[kind] for kind in ("train", "validation", "dropped", "left aside")}
    most = max(reasons.values(), default=1) or 1
    return {
        "rows": rows,
        "came": short_size(sums["came"]),
        "whole": _shares(whole, sums["came"]),
        "reasons": [(reason, short_size(count), count / most) for reason, count in reasons.most_common(_REASONS) if count],
        "missing": sorted(as_dict(run.corpus.get("missing")).items()),
    }


def _shares(parts: dict[str, int], whole: int) -> list[tuple[str, str, float]]:
    return [(kind, short_size(count), count / max(whole, 1)) for kind, count in parts.items() if count]


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
    known, compared, written = run.parity, as_dict(run.parity.get("huggingface")), as_dict(run.parity.get("bytes"))
    if not known:
        return []
    relative, limit, rounded, same = (as_number(compared.get(name)) for name in ("relative", "bound", "fp32", "same_choice"))
    tokens, tensors = as_number(compared.get("tokens")), as_number(known.get("tensors"))
    found = [("Model", f"the {known.get('model', '')} model, weights in {known.get('dtype', '')}")]
    if compared:
        found.append(("For transformers, vLLM, SGLang", _exported(known.get("architecture"), written.get("huggingface"))))
        most = f", of which {significant(limit, 2)} is allowed" if limit else ""
        found.append(("Largest difference of a logit in fp64", f"{significant(relative, 3)} of the largest logit{most}"))
        found += [("The same in fp32", f"{significant(rounded, 3)}, from rounding")] if rounded else []
        found.append(("Same likeliest next token", f"{percent(same)} of {tokens:,.0f} tokens"))
    if known.get("gguf_architecture"):
        found.append(("For llama.cpp", _exported(known["gguf_architecture"], written.get("gguf"))))
        found.append(("Tensors read back", f"{tensors:,.0f}, all equal bit for bit"))
    return found


def _exported(architecture: object, written: object) -> str:
    return str(architecture or "") + (f", {short_size(as_number(written))}" if written else "")


def as_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def as_dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _bytes(count: object) -> int:
    value = as_dict(count).get("bytes", 0)
    return int(value) if isinstance(value, int | float) else 0
