"""Makes one quantized form and collects the evidence about it, by the engine that it is for where that runs here.

Evidence is its agreement with the original, benchmark scores of both over the same items, speed, and the number of calibration tokens that
each expert was routed.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmworks.errors import UserError
from lmworks.evaluate import results_folder
from lmworks.evaluate.comparison import NothingInCommon, compare
from lmworks.evaluate.evaluate import evaluate_model
from lmworks.evaluate.results import Results, read_results
from lmworks.host import machine
from lmworks.model import Transformer
from lmworks.model.router import Router, Routing
from lmworks.quantize import compressed, gguf
from lmworks.quantize.agreement import Agreement, OwnScorer, Scorer, Texts, Window, measure_agreement
from lmworks.quantize.certificate import Evidence, TensorRecord, not_measured
from lmworks.quantize.child import Crashed, Killed
from lmworks.quantize.source import Scheme, Source
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.ui.terminal import bar
from lmworks.weights.huggingface import files_of


@torch.no_grad()
def expert_tokens(model: Transformer, windows: Sequence[Window], limit: int) -> dict[str, Any] | None:
    """Tokens per expert over all layers: count of experts, least, median, most, and how many have fewer than `limit`; `fewest` names the
    layers and experts with the fewest. None for a dense model."""
    routers = [(name, module) for name, module in model.named_modules() if isinstance(module, Router) and not name.startswith("mtp.")]
    if not routers:
        return None
    counts: dict[str, Tensor] = {}

    def observe(name: str) -> Any:
        def hook(_: nn.Module, __: Any, routing: Routing) -> None:
            counts[name] = counts.get(name, torch.zeros_like(routing.counts)) + routing.counts

        return hook

    handles = [module.register_forward_hook(observe(name)) for name, module in routers]
    try:
        with bar("calibration: experts", sum(len(window.ids) for window in windows)) as progress:
            for window in windows:
                model.hidden(torch.tensor(window.ids)[None])
                progress.advance(len(window.ids))
    finally:
        for handle in handles:
            handle.remove()
    each = [(int(count), name.removesuffix(".ffn.router"), expert) for name, found in counts.items() for expert, count in enumerate(found)]
    values = [count for count, _, _ in each]
    return {
        "count": len(values), "least": min(values), "median": int(statistics.median(values)), "most": max(values), "limit": limit,
        "under_limit": sum(value < limit for value in values),
        "fewest": [{"layer": name, "expert": expert, "tokens": count} for count, name, expert in sorted(each)[:5]],
    }  # fmt: skip


HOW = "our model with dequantized weights; differences with 95% intervals by paired bootstrap, p corrected by Holm"


class Comparison:
    """Scores models on `benchmarks`; the original is scored once, when it is first needed."""

    def __init__(self, source: Source, benchmarks: Sequence[Benchmark], items: int) -> None:
        self.source, self.benchmarks, self.items = source, benchmarks, items
        self._original: Results | None = None

    def against(self, model: Transformer, name: str) -> dict[str, Any]:
        """The differences of `model` from the original, or why there are none. Raises `UserError` for sets that do not exist."""
        if not self.benchmarks:
            return not_measured("no benchmark sets were named (--tasks)")
        if self._original is None:
            self._original = self._scored(self.source.model, "original")
        try:
            document = compare([self._original, self._scored(model, name)], examples=0)
        except NothingInCommon as error:
            return not_measured(str(error))
        found = document["comparisons"][0]
        keys = ("score", "a", "b", "difference", "interval", "adjusted_p", "verdict", "n", "lost", "gained")
        rows = [{key: row[key] for key in keys if key in row} for row in found["scores"]]
        return {"how": HOW, "scores": rows, "not_comparable": found["not_comparable"]}

    def _scored(self, model: Transformer, name: str) -> Results:
        opened = replace(self.source.opened, model=model, name=name)
        with tempfile.TemporaryDirectory() as folder:
            results_folder.add(Path(folder), evaluate_model(opened, self.benchmarks, self.items))
            return read_results(Path(folder), name, name)


_PROMPT, _FOLLOWING, _REPEATS = 256, 32, 3  # tokens and repeats of the measurement of speed


@dataclass(frozen=True)
class Job:
    """What a scheme is applied to. `python` has the scheme's library, if one is needed or there, and `vllm` has vLLM; `working` holds
    unfinished files that all schemes share, `folder` becomes the result."""

    source: Source
    texts: Texts
    comparison: Comparison
    python: Path | None
    vllm: Path | None
    working: Path
    folder: Path


def gguf_evidence(scheme: Scheme, job: Job) -> Evidence:
    """Quantize to GGUF. Logits and speed are llama.cpp's where its library is installed, else logits are those of dequantized weights."""
    original, target = job.working / "original.gguf", job.folder / "model.gguf"
    if not original.exists():
        gguf.write_original(job.source, original)
    made_by = gguf.quantize(scheme, original, target, job.python)
    records = gguf.account(scheme, job.source, original, target)
    evidence = Evidence(
        made_by, "", target.stat().st_size, original.stat().st_size, records, None, gguf.check_fields(job.source, original, target),
        calibration={"used": False, "why": "the scheme needs no calibration"}, mtp=gguf.mtp(job.source.model),
        notes=gguf.notes_of(job.source),
    )  # fmt: skip
    if _is_lost(records, evidence):
        return evidence
    ours = gguf.dequantized(job.source, target)
    if job.python is None:
        _score(evidence, OwnScorer(ours), scheme, job)
        evidence.speed = not_measured("llama.cpp is not installed: pip install 'lmworks[llama]'")
    else:
        try:
            with gguf.llama_scorer(
                job.python, target, job.source.model.config.vocab_size or 0, job.texts.longest, job.working
            ) as scorer:  # fmt: skip
                _score(evidence, scorer, scheme, job)
            evidence.speed = _speed("llama.cpp on the CPU", gguf.measure_speed, job.python, job, original, target)
        except Killed as error:
            raise UserError(f"{scheme.name}: {error}; free some, and quantize again") from None
        except Crashed as error:
            evidence.structure.append(f"llama.cpp does not run it: {error}")
            evidence.speed = not_measured("llama.cpp does not run it")
    evidence.benchmarks = job.comparison.against(ours, scheme.name)
    return evidence


def compressed_evidence(scheme: Scheme, job: Job) -> Evidence:
    """Quantize to compressed-tensors. Logits and speed are vLLM's where it is installed and runs the result; else logits are those of
    transformers if it loads every tensor, else those of dequantized weights."""
    assert job.python is not None
    source, target = job.source, job.folder
    original = source.directory or job.working / "huggingface"
    if not original.exists():
        source.write_huggingface(original)
    made_by = compressed.quantize(scheme, source, original, target, job.python, job.texts.calibration)
    records = compressed.account(scheme, original, target)
    sizes = [sum(file.stat().st_size for file in files_of(path)) for path in (target, original)]
    evidence = Evidence(
        made_by, "", sizes[0], sizes[1], records, None, compressed.check_files(original, target), calibration=_calibration(scheme, job),
        speed=not_measured("vLLM, the engine of this format, was not asked: it is not installed"), mtp=_mtp(source, records),
    )  # fmt: skip
    if _is_lost(records, evidence):
        return evidence
    ours, vocabulary = compressed.dequantized(source, target, job.working), source.model.config.vocab_size or 0
    if job.vllm is not None:
        try:
            with compressed.vllm_scorer(job.vllm, target, vocabulary, job.texts.longest, job.working) as scorer:
                _score(evidence, scorer, scheme, job)
            evidence.speed = _speed("vLLM", compressed.measure_speed, job.vllm, job, original, target)
        except Crashed as error:
            evidence.notes.append(f"vLLM does not run it on this machine: {error}")
            evidence.speed = not_measured("vLLM does not run it on this machine")
    if evidence.agreement is None:
        try:
            with compressed.transformers_scorer(job.python, target, vocabulary, job.working) as scorer:
                _score(evidence, scorer, scheme, job)
        except Crashed as error:
            evidence.notes.append(f"not asked in transformers: {error}")
            _score(evidence, OwnScorer(ours), scheme, job)
    evidence.benchmarks = job.comparison.against(ours, scheme.name)
    return evidence


def _is_lost(records: list[TensorRecord], evidence: Evidence) -> bool:
    """Whether a tensor is missing, so that nothing can be computed."""
    if not any(one.fate == "missing" for one in records):
        return False
    evidence.speed = evidence.benchmarks = not_measured("a tensor is missing")
    return True


def _score(evidence: Evidence, scorer: Scorer, scheme: Scheme, job: Job) -> None:
    evidence.agreement = _agreement(job, scorer, scheme)
    evidence.scored_by = scorer.name


def _agreement(job: Job, scorer: Scorer, scheme: Scheme) -> Agreement:
    return measure_agreement(job.source.model, scorer, job.texts.measured, f"{scheme.name}: compare")


def _speed(engine: str, measure: Callable[..., dict[str, float]], python: Path, job: Job, original: Path, target: Path) -> dict[str, Any]:
    """Tokens per second of the result beside the original's, as medians of some repeats."""
    ids = [token for window in job.texts.measured for token in window.ids]
    most = min(_PROMPT, max(2, job.source.opened.context - _FOLLOWING - 1))
    prompt, following = ids[:most], (ids * _FOLLOWING)[most : most + _FOLLOWING]
    measured, reference = (measure(python, path, prompt, following, _REPEATS) for path in (target, original))
    return {
        "engine": engine, "threads": machine.threads(), "prompt": len(prompt), "new_tokens": len(following), **measured,
        "original": reference,
    }  # fmt: skip


def _calibration(scheme: Scheme, job: Job) -> dict[str, Any]:
    if not scheme.calibrated:
        return {"used": False, "why": "the scheme needs no calibration"}
    windows = job.texts.calibration
    found: dict[str, Any] = {"used": True, "from": job.texts.calibration_from, "tokens": sum(len(one.ids) for one in windows)}
    if (experts := expert_tokens(job.source.model, windows, scheme.limits.expert_tokens)) is not None:
        found["experts"] = experts | {"how": "tokens that the router sends to the expert; in calibration every expert sees all tokens"}
    return found


def _mtp(source: Source, records: list[TensorRecord]) -> str:
    if source.model.config.mtp is None:
        return ""
    first = source.model.config.num_hidden_layers or 0
    own = [one for one in records if one.name.startswith(f"model.layers.{first}.")]
    if not own:
        return "the original has none"
    return "kept as they are" if all(one.fate == "kept" for one in own) else "not all kept"
