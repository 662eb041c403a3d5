"""Ten failures that were reported in public, rebuilt from their reports alone: what `lmworks doctor` says about each.

Numbers are those of the reports, except where a comment says that they are assumed. Noise comes from seeded generators. Where a report
names no value, it is that of a healthy run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, exp, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmworks.checkpoint import listing
from lmworks.cli import main
from tiny_run import Tiny, before_each_step
from written_run import budget, healthy, write_run

Metrics = dict[str, list[Any]]
GIB = float(1 << 30)
TUNE = (
    "tune={data: [{name: sums, kind: files, path: chats.jsonl}], tokens: 64k, sequence_length: 16 tokens, global_batch_tokens: 1024 tokens}"
)

DPO = "dpo={data: [{name: pairs, kind: files, path: pairs.jsonl}], beta: 0.1, learning_rate: 5e-7}"
GRPO = "grpo={data: [{name: sums, kind: files, path: sums.jsonl, reward: numeric}], max_new_tokens: 256}"


@dataclass(frozen=True)
class Report:
    """A run as the report describes it, and the cause that was confirmed there; no code if nothing was wrong."""

    code: str
    source: str
    metrics: Callable[[], Metrics]
    every: int = 1
    stage: str = "pretrain"
    overrides: Sequence[str] = ()
    events: Sequence[Mapping[str, Any]] = field(default=())


def whole(steps: int, details: int = 0, overrides: Sequence[str] = (), seed: int = 1) -> Metrics:
    """All metrics of a healthy run on one CPU; `details`: the interval of the lines with details, as `metrics.detail_every`."""
    draw = np.random.default_rng(seed)
    metrics: Metrics = healthy(steps, overrides)
    at = np.arange(1, steps + 1)

    def noisy(value: Any, share: float) -> list[float]:
        return [float(one) for one in np.broadcast_to(value, steps) * np.exp(share * draw.standard_normal(steps))]

    metrics |= {
        "train/spikes": [0.0] * steps, "train/tokens": [1024.0 * step for step in at], "train/sequence_length": [64.0] * steps,
        "train/repeated_rows": [0.0] * steps, "train/effective_sources": [1.0] * steps,
        "train/perplexity": [exp(min(value, 50.0)) for value in metrics["train/loss"]],
        "train/source/text/loss": list(metrics["train/loss"]),
        "optim/grad_rms/embedding": noisy(2e-4, 0.2), "optim/grad_rms/head": noisy(4e-4, 0.2), "optim/grad_rms/matrices": noisy(3e-4, 0.2),
        "optim/grad_rms/vectors": noisy(5e-4, 0.2), "perf/step_seconds": noisy(9.0, 0.01), "perf/data_wait": noisy(0.01, 0.3),
        "perf/gap_seconds": noisy(0.02, 0.3), "perf/cpu_seconds": noisy(9.0, 0.02), "perf/tokens_per_second": noisy(113.0, 0.01),
        "perf/resident_memory": noisy(2 * GIB, 0.002), "perf/memory": [2.1 * GIB] * steps, "system/cpu": noisy(52.0, 0.02),
        "system/memory": noisy(6 * GIB, 0.002), "system/load": noisy(0.55, 0.1), "system/cpu_pressure": noisy(0.005, 0.3),
        "system/memory_pressure": [0.0] * steps, "system/io_pressure": noisy(0.002, 0.3), "system/throttled_seconds": [0.0] * steps,
        "system/oom_kills": [0.0] * steps,
    }  # fmt: skip
    interval = max(1, steps // 10)
    for name, level in (("validation/loss", 0.05), ("validation/prose/loss", 0.05)):
        metrics[name] = [float(metrics["train/loss"][step - 1] + level) if step % interval == 0 else ... for step in at]
    if details:
        shown = [step % details == 0 or step in (1, 10, 100) for step in at]
        for name, values in metrics.items():
            if ... in values and name.startswith(("layers/", "optim/")):
                known = [step for step, value in zip(at, values, strict=True) if value is not ...]
                filled = np.interp(at, known, [value for value in values if value is not ...])
                metrics[name] = [float(one) if keep else ... for one, keep in zip(filled, shown, strict=True)]
    return metrics


def curve(steps: int, first: float, last: float, noise: float, seed: int) -> np.ndarray:
    """A loss that falls from `first` towards `last`."""
    done = np.arange(1, steps + 1) / steps
    return last + (first - last) * np.exp(-8 * done) + noise * np.random.default_rng(seed).standard_normal(steps)


def put(metrics: Metrics, name: str, values: Any) -> None:
    """Replace a metric, and keep the lines that have it."""
    before = metrics.get(name, [0.0] * len(metrics["train/loss"]))
    values = np.broadcast_to(values, len(before))
    metrics[name] = [... if old is ... else float(new) for old, new in zip(before, values, strict=True)]


def losses(metrics: Metrics, loss: np.ndarray) -> None:
    for name in ("train/loss", "train/source/text/loss"):
        put(metrics, name, loss)
    put(metrics, "train/perplexity", np.exp(loss))
    for name in ("validation/loss", "validation/prose/loss"):
        put(metrics, name, loss + 0.02)


# 1. marin-community/marin#1368 and #1390 (32B): in the last 2,500 steps about 130 within spikes; the norm of the update doubles before loss
# and gradient norm rise, most in the lower layers; clipping and skipping do not help; the last spike goes from 1.96 to 2.02 and ends at
# 1.975. Attention was not normalized, and QK norm ended it. Assumed: the scores of attention, and four spikes before.
ATTENTION_STEPS = 2500
ATTENTION_SPIKES = (700, 1150, 1600, 1950, 2250)


def attention() -> Metrics:
    steps, at = ATTENTION_STEPS, np.arange(1, ATTENTION_STEPS + 1)
    metrics, draw = whole(steps, 10, ["optimizer.learning_rate=7e-4"]), np.random.default_rng(11)
    loss, norm, update = curve(steps, 2.6, 1.95, 0.008, 12), 0.25 * np.exp(0.1 * draw.standard_normal(steps)), np.full(steps, 1.0)
    for start in ATTENTION_SPIKES:
        since = at - start
        loss += 0.06 * np.where(since >= 0, np.exp(-np.maximum(since, 0) / 10), 0)
        update *= np.where((since >= -8) & (since < 18), 2.0, 1.0)
        norm *= np.where((since >= 0) & (since < 18), 6.0, 1.0)
    loss += np.where(at >= ATTENTION_SPIKES[-1], 0.015, 0.0)
    losses(metrics, loss)
    put(metrics, "optim/grad_norm", norm)
    put(metrics, "optim/clipped", norm > 1)
    ratio = 0.05 / (1 + 4 * at / steps) * update
    put(metrics, "optim/update_ratio", ratio)
    for layer, growth in ((0, 1.0), (1, 0.4)):
        put(metrics, f"layers/{layer}/attention_logit_max", (15 + 400 * growth * (at / steps) ** 2) * np.sqrt(update))
        metrics[f"layers/{layer}/update_ratio"] = list(metrics["optim/update_ratio"])
        put(metrics, f"layers/{layer}/update_ratio", ratio * (1 + growth * (update - 1)) / update)
    return metrics


# 7. allenai/OLMo#560: of two runs that differ in their seed, one has spikes, which recover quickly and do no harm.
def seed_spikes() -> Metrics:
    steps, at = 2000, np.arange(1, 2001)
    metrics, draw = whole(steps), np.random.default_rng(71)
    loss, norm = curve(steps, 6.9, 2.6, 0.02, 72), 0.4 * np.exp(0.15 * draw.standard_normal(steps))
    for start, height in ((620, 0.5), (1310, 0.3)):
        since = at - start
        loss += np.where(since >= 0, height * np.exp(-np.maximum(since, 0) / 30), 0)
        norm *= np.where(since >= 0, 1 + 4 * np.exp(-np.maximum(since, 0) / 10), 1)
    losses(metrics, loss)
    put(metrics, "optim/grad_norm", norm)
    put(metrics, "optim/clipped", norm > 1)
    return metrics


# 9. deepspeedai/DeepSpeed#697: the gradient overflows at every step, the loss scale goes down to 1 and stays there, and nothing is learned.
OVERFLOW_STEPS = 120


def overflow() -> Metrics:
    steps, at = OVERFLOW_STEPS, np.arange(1, OVERFLOW_STEPS + 1)
    metrics = whole(steps)
    losses(metrics, log(1000) + 0.01 * np.random.default_rng(91).standard_normal(steps))
    metrics["optim/grad_norm"] = [None] * steps
    metrics["optim/loss_scale"] = [max(1.0, 65536.0 / 2**step) for step in range(steps)]
    metrics["train/bad_steps"] = [float(step) for step in at]
    for group in ("embedding", "head", "matrices", "vectors"):
        metrics[f"optim/grad_rms/{group}"] = [None] * steps
    put(metrics, "optim/update_ratio", 0.0)
    put(metrics, "optim/unchanged_weights", 1.0)
    for name, norm in (("weight", 17.0), ("head", 5.0), ("embedding", 5.0)):
        put(metrics, f"optim/{name}_norm", norm)
    return metrics


# 22. paiml/entrenar#294, one step for 100: killed at 256, resumed from 250, and the loader starts again at the first shard, whose rows were
# trained on; perplexity 251 until new data come at 506, then 782; the gradient norm falls from 0.08-0.15 to 0.01-0.02; stopped at 620.
def restarted_loader() -> Metrics:
    steps, at = 620, np.arange(1, 621)
    metrics, draw = whole(1550), np.random.default_rng(221)
    metrics = {name: values[:steps] for name, values in metrics.items()}
    repeated = (at > 250) & (at <= 506)
    loss = curve(steps, 6.9, log(251) + 0.1, 0.03, 222) - np.where(repeated, 0.2, 0)
    loss += np.where(at > 506, (log(782) - log(251)) * (1 - np.exp(-(np.maximum(at, 506) - 506) / 40)), 0)
    losses(metrics, loss)
    put(metrics, "train/repeated_rows", repeated)
    put(metrics, "optim/grad_norm", np.where(at > 506, 0.014, 0.11) * np.exp(0.15 * draw.standard_normal(steps)))
    return metrics


# 27. huggingface/trl#6668: the sequences end before the answers, so every label is masked; loss 0.0, and the run ends as if all were well.
def masked() -> Metrics:
    steps = 60
    metrics = whole(steps)
    for name in ("train/loss", "train/source/text/loss", "train/valid_tokens", "optim/grad_norm", "optim/update_ratio"):
        put(metrics, name, 0.0)
    for group in ("embedding", "head", "matrices", "vectors"):
        put(metrics, f"optim/grad_rms/{group}", 0.0)
    put(metrics, "train/perplexity", 1.0)
    put(metrics, "optim/unchanged_weights", 1.0)
    put(metrics, "train/sequence_length", 16.0)
    for name, norm in (("weight", 40.0), ("head", 10.0), ("embedding", 15.0)):
        put(metrics, f"optim/{name}_norm", norm)
    del metrics["validation/loss"], metrics["validation/prose/loss"]
    metrics["validation/general_bits_per_byte"] = [1.2 if step % 20 == 0 else ... for step in range(1, steps + 1)]
    metrics["validation/forgetting"] = [0.0 if step % 20 == 0 else ... for step in range(1, steps + 1)]
    return metrics


# 33. eric-mitchell/direct-preference-optimization#8 and huggingface/trl#800: the rewards of chosen and rejected answers both fall, the
# latter more; normal while margin and held-out accuracy rise. Assumed: the sizes.
def falling_rewards() -> Metrics:
    steps, at = 200, np.arange(1, 201)
    metrics, draw = whole(steps), np.random.default_rng(331)
    done, noise = 1 - np.exp(-3 * at / steps), draw.standard_normal((3, steps))
    chosen, rejected = -1.0 * done + 0.08 * noise[0], -2.4 * done + 0.08 * noise[1]
    losses(metrics, np.log1p(np.exp(-(chosen - rejected))) + 0.08 * done)
    for name in [name for name in metrics if name.startswith(("validation/", "train/source/"))]:
        del metrics[name]
    metrics |= {"dpo/reward_chosen": list(map(float, chosen)), "dpo/reward_rejected": list(map(float, rejected))}
    metrics["dpo/margin"] = list(map(float, chosen - rejected))
    metrics["dpo/accuracy"] = list(map(float, np.clip(0.5 + 0.28 * done + 0.05 * noise[2], 0, 1)))
    for name, last in (("validation/reward_accuracy", 0.5 + 0.22 * done), ("validation/reward_margin", 1.2 * done),
                       ("validation/general_bits_per_byte", 1.2 + 0.01 * done), ("validation/forgetting", 0.01 * done)):  # fmt: skip
        metrics[name] = [float(value) if step % 20 == 0 else ... for step, value in zip(at, last, strict=True)]
    put(metrics, "optim/learning_rate", 5e-7)
    put(metrics, "optim/adam_learning_rate", 5e-7)
    put(metrics, "optim/update_ratio", 1e-5)
    put(metrics, "optim/weight_norm", 42.0)
    put(metrics, "optim/head_norm", 10.0)
    put(metrics, "optim/embedding_norm", 15.0)
    return metrics


# 36. greyhaven-ai/autocontext#1067: every answer is cut at 256 tokens, before its last line; reward, its deviation, loss, gradient norm 0.
def cut_answers() -> Metrics:
    steps = 40
    metrics = whole(steps)
    for name in [name for name in metrics if name.startswith(("validation/", "train/source/"))]:
        del metrics[name]
    for name in ("train/loss", "optim/grad_norm", "optim/update_ratio"):
        put(metrics, name, 0.0)
    put(metrics, "optim/unchanged_weights", 1.0)
    put(metrics, "optim/weight_norm", 42.0)
    values = {
        "reward": 0.0, "solved": 0.0, "wrong": 0.0, "empty": 0.0, "truncated": 1.0, "unparsed": 0.0, "failed": 0.0, "answer_tokens": 256.0,
        "groups": 16.0, "trained_groups": 0.0, "equal_groups": 1.0, "no_signal": 1.0, "clipped": 0.0, "mismatch_mean": 0.002,
        "mismatch_max": 0.03,
    }  # fmt: skip
    metrics |= {f"grpo/{name}": [value] * steps for name, value in values.items()}
    metrics["grpo/surprise"] = list(map(float, 0.6 + 0.02 * np.random.default_rng(361).standard_normal(steps)))
    metrics["perf/rollout_seconds"] = [30.0] * steps
    metrics["validation/reward"] = [0.0 if step % 10 == 0 else ... for step in range(1, steps + 1)]
    metrics["validation/wrong"] = [1.0 if step % 10 == 0 else ... for step in range(1, steps + 1)]
    return metrics


# 38. pytorch/torchtitan#1114 and #1246: 16 experts, one for each token, without balancing: all tokens go to one expert.
def unbalanced() -> Metrics:
    steps, experts, at = 400, 16, np.arange(1, 401)
    metrics, draw = whole(steps), np.random.default_rng(381)
    collapsed = 1 - np.exp(-at / 40)
    busiest = np.minimum(1.6 + (experts - 1.6) * collapsed * np.exp(0.02 * draw.standard_normal(steps)), experts)
    spread = sqrt(experts - 1) * np.minimum(0.1 + 0.9 * collapsed, 1)
    idle = np.floor((experts - 1) * np.clip(1.1 * collapsed, 0, 1))
    for name, values in (("load_cv", spread), ("load_max", busiest), ("load_min", 0.3 * np.exp(-at / 5))):
        metrics[f"experts/{name}"] = list(map(float, values))
        metrics |= {f"experts/{name}/{layer}": list(map(float, values)) for layer in range(2)}
    metrics["experts/dead"] = list(map(float, 2 * idle))
    metrics |= {f"experts/dead/{layer}": list(map(float, idle)) for layer in range(2)}
    for name in ("overflow", "overflow/0", "overflow/1", "bias_max", "bias_max/0", "bias_max/1"):
        metrics[f"experts/{name}"] = [0.0] * steps
    metrics["train/auxiliary_loss"] = list(map(float, 1 + 15 * collapsed))
    return metrics


# 41. marin-community/marin#9205: 16.7 seconds a step; every 261 to 278 steps a full garbage collection of 1.25 to 1.5 seconds, outside of
# the step's timer, with as much processor time. 11 racks of 64 GPUs with a process each (marin#8209, #8870), at moments of their own.
def collections() -> Metrics:
    steps = 2600
    metrics, draw = whole(steps), np.random.default_rng(411)
    seconds = 16.715 * np.exp(0.003 * draw.standard_normal(steps))
    gap = 0.02 * np.exp(0.3 * draw.standard_normal(steps))
    step = 150
    while step < steps:
        gap[step] += draw.uniform(1.25, 1.5)
        step += int(draw.integers(261, 279))
    put(metrics, "perf/step_seconds", seconds)
    put(metrics, "perf/gap_seconds", gap)
    put(metrics, "perf/cpu_seconds", seconds + gap)
    put(metrics, "perf/tokens_per_second", 1024 / (seconds + gap))
    put(metrics, "time", 1e9 + np.cumsum(seconds + gap))
    return metrics


REPORTS = {
    "1 attention": Report(
        "attention-logits-growing", "marin#1368", attention,
        overrides=["optimizer.learning_rate=7e-4", "metrics.detail_every=10 steps", "model.use_qk_norm=false"],
    ),
    "7 one seed spikes": Report("", "OLMo#560", seed_spikes),
    "9 overflow at each step": Report(
        "fp16-overflow", "DeepSpeed#697", overflow, overrides=["train.precision=fp16"],
        events=[{"event": "bad_step", "step": step, "loss": "6.91", "grad_norm": "inf", "in_a_row": step, "batch": None}
                for step in range(1, OVERFLOW_STEPS + 1)],
    ),
    "22 loader restarted": Report(
        "data-position-lost", "entrenar#294", restarted_loader,
        events=[
            {"event": "resume", "step": 251, "tokens": 256_000, "steps": 1550, "planned_tokens": 1_587_200, "device": "cpu", "ranks": 1},
            {"event": "resumed_step", "step": 251, "loss": 5.42, "saved_loss": 5.66, "learning_rate": 0.01, "saved_learning_rate": 0.01,
             "rows": "00c1d2e3f4a5b697", "saved_rows": "5e0f9a8b7c6d1324", "repeated": 1.0},
        ],
    ),
    "27 labels masked": Report(
        "labels-all-masked", "trl#6668", masked, stage="tune", overrides=[TUNE], events=[{"event": "finish", "step": 60}]
    ),
    "33 chosen reward falls": Report("", "direct-preference-optimization#8", falling_rewards, stage="dpo", overrides=[DPO]),
    "36 answers cut": Report("answers-cut", "autocontext#1067", cut_answers, stage="grpo", overrides=[GRPO]),
    "38 no balancing": Report(
        "experts-collapsed", "torchtitan#1246", unbalanced,
        overrides=["model.moe={n_routed_experts: 16, num_experts_per_tok: 1, moe_intermediate_size: 64, balance: {method: none}}"],
    ),
    "41 garbage collection": Report(
        "periodic-pause", "marin#9205", collections, events=[{"event": "resume", "step": 0, "device": "cuda", "ranks": 704}]
    ),
}  # fmt: skip


def named(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The codes that `lmworks doctor` names, of all stages, in its order; of what it is not sure with a question mark, after them."""
    monkeypatch.setattr("sys.argv", ["lmworks", "doctor", str(run), "--json"])
    capsys.readouterr()
    with suppress(SystemExit):
        main.main()
    stages = json.loads(capsys.readouterr().out)["stages"]
    sure = [one["code"] for stage in stages for one in stage["problems"]]
    return sure + [f"{one['code']}?" for stage in stages for one in stage["unsure"]]


@pytest.mark.parametrize("name", REPORTS)
def test_the_cause_of_a_public_report_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = REPORTS[name]
    metrics = report.metrics()
    steps = len(metrics["train/loss"])
    planned = 1550 if name.startswith("22") else steps
    at = [step for step in range(1, steps + 1) if step % report.every == 0]
    lines = {key: [values[step - 1] for step in at] for key, values in metrics.items()}
    run = write_run(tmp_path / "run", lines, report.events, report.stage, [budget(planned), *report.overrides], at)
    found = named(run, monkeypatch, capsys)
    assert found[:1] == ([report.code] if report.code else []), found


# 47. facebookresearch/metaseq#53, vllm-project/speculators#739: a save was interrupted, and the half-written checkpoint is the newest.
@pytest.mark.slow
def test_a_half_written_save_is_named(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(step: int) -> None:
        if step == 14:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        before_each_step(patch, stop)
        with pytest.raises(KeyboardInterrupt):
            tiny_copy.walk(last="pretrain")
    newest = listing.directories(tiny_copy.run_dir / "checkpoints")[-1]
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[: ceil(len(content) / 2)])
    tiny_copy.walk(last="pretrain")
    assert named(tiny_copy.run_dir, monkeypatch, capsys)[:1] == ["damaged-checkpoint"]
