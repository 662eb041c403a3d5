"""Pages whose contents are hard to lay out: long names without a space, many languages, many phases and series, and next to nothing."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from pathlib import Path
from typing import Any

from page_runs import RESULTS, write_run, write_samples
from test_comparison_page import results

from lmworks.evaluate.comparison import compare
from lmworks.io.files import read_json, write_json
from lmworks.pages.ablation_page import render as render_ablation
from lmworks.pages.model_pages import render_comparison, render_quantization
from lmworks.pages.run_page import write_page
from lmworks.watch.ledger import Ledger

LONG = "a_name-that_goes-on/" + "without_any_space-" * 6 + "and_ends"
WORDS = (
    "השפה העברית נכתבת מימין לשמאל",
    "اللغة العربية تكتب من اليمين إلى اليسار",
    "日本語の長い名前は空白なしで書かれることがある",
    "ภาษาไทยเขียนติดกันโดยไม่มีช่องว่าง",
    "Donaudampfschifffahrtsgesellschaftskapitän",
    "हिन्दी में लिखा हुआ एक नाम",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈",
)
LAYERS = 40


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records), encoding="utf-8")


def hard_run(run: Path) -> Path:
    """Everything of `page_runs`, then: 9 phases and 40 layers, names in many scripts, losses of NaN, spikes, marks upon each other."""
    write_run(run)
    random.seed(4)
    steps, began = range(1, 3001), time.time()
    records = [
        {
            "step": step,
            "time": began + 2 * step,
            "train/tokens": 1_048_576 * step,
            "optim/learning_rate": 3e-4 * min(1, step / 200),
            "train/loss": None if step % 700 < 9 else 11 * math.exp(-step / 300) + 2 + 0.2 * random.random() + 30 * (step == 1234),
            "optim/grad_norm": 10 ** random.uniform(-3, 3),
            "perf/tokens_per_second": 1.2e6,
            "perf/mfu": 0.42,
            "perf/memory": 7e10,
            "system/memory": 9e11,
            "system/cpu": 50.0 + step % 50,
            "system/power": 690.0,
            "perf/save_seconds": 1e-5 * step,
            "experts/load_cv": 1e-7 * step,
            **{f"experts/load_cv/{layer}": random.random() for layer in range(LAYERS) if step % 20 == 0},
            **({f"validation/{word}/bits_per_byte": 3 - step / 3000 for word in WORDS} if step % 100 == 0 else {}),
        }
        for step in steps
    ]
    lines(run / "metrics.jsonl", records)
    lines(
        run / "dpo" / "metrics.jsonl",
        [
            {
                "step": step,
                "time": began + 1e4 + step,
                "dpo/reward_chosen": 0.1 * step,
                "dpo/reward_rejected": -0.1 * step,
                "dpo/margin": 0.2 * step,
                "dpo/accuracy": 0.5 + step / 100,
                "train/loss": 0.7 - step / 100,
            }
            for step in range(1, 40)
        ],
    )
    with Ledger(run / "ledger.jsonl") as ledger:
        ledger.write("save_failed", stage="pretrain", step=900, reason="[Errno 28] No space left on device", in_a_row=1)
        ledger.write("finding", stage="pretrain", step=905, code="bad-batch", sentence=LONG)
        for n, word in enumerate([*WORDS, LONG, "x"]):
            ledger.write("phase", stage="pretrain", phase=word, step=330 * n, sequence_length=2048)
        for step in (1234, 1235, 1240):
            ledger.write(
                "spike",
                stage="pretrain",
                step=step,
                loss=32.0,
                action="skip",
                loss_limit=4.0,
                grad_norm=1.0,
                grad_norm_limit=3.0,
                in_a_row=1,
                batch=None,
            )
            ledger.write("rollback", stage="pretrain", step=step, to_step=1100, skip=[1230, 1240], reason="2 spikes in a row")
            ledger.write("slow_rank", stage="pretrain", step=step, rank=1023, what="arithmetic", seconds=0.5, median=0.2)
            ledger.write("corruption", stage="pretrain", step=step, ranks=[3], certain=True, what="two results of one product differ")
        for step in range(100, 3000, 100):
            ledger.write("checkpoint", stage="pretrain", step=step, path=LONG, bytes=10**12, metric=2.5, seconds=61.0)
    write_samples(run / "samples.jsonl", " ".join(WORDS), LONG)
    tree = read_json(run / "resolved.json")
    write_json(run / "resolved.json", tree | {"name": LONG})
    found = json.loads(json.dumps(RESULTS))
    for model in found["models"].values():
        model["scores"] |= {f"{word}/{LONG}/cloze/5-shot": model["scores"]["arc-easy/cloze/0-shot"] for word in WORDS[:3]}
        model["bits_per_byte"] |= dict.fromkeys(WORDS, model["bits_per_byte"]["prose"])
    write_json(run / "evaluate" / "results.json", found)
    report = read_json(run / "corpus" / "report.json")
    report["sources"] = [report["sources"][0] | {"name": name, "domain": name, "license": LONG} for name in (*WORDS, LONG)]
    write_json(run / "corpus" / "report.json", report)
    return run


def small_run(run: Path, steps: int, *losses: float | None) -> Path:
    """A run of very few steps, with these losses in turn, None for one that is not finite; 3 without any."""
    losses = losses or (3.0,)
    write_run(run)
    records = [{"step": n, "time": 1.8e9 + n, "train/loss": losses[n % len(losses)], "train/tokens": 64 * n} for n in range(1, steps + 1)]
    lines(run / "metrics.jsonl", records)
    lines(run / "ledger.jsonl", [{"time": 1.8e9, "event": "start", "stage": "pretrain", "steps": 100, "tokens": 6400}])
    for name in ("evaluate", "export", "checkpoints"):
        shutil.rmtree(run / name)
    return run


def ablation() -> str:
    arms = ["baseline", "wide", LONG, *WORDS]
    curve = {"tokens": [1e6 * n for n in range(1, 60)], "mean": [2 + 9 / n for n in range(1, 60)]}
    curve |= {"low": [y - 0.1 for y in curve["mean"]], "high": [y + 0.1 for y in curve["mean"]]}
    quality = {
        "trust": False,
        "reasons": ["ranks at half of the budget say little of those at its end"],
        "monotonicity": 0.9,
        "signal_to_noise": 12.3,
        "signal_to_checkpoints": math.inf,
        "rank_halves": 0.5,
        "rank_seeds": None,
    }
    measures = {
        name: {
            "unit": "bits per byte",
            "better": "lower",
            "noise_floor": 0.012,
            "quality": quality,
            "curves": {arm: curve | {"mean": [y + 0.05 * n for y in curve["mean"]]} for n, arm in enumerate(arms)},
        }
        for name in ("validation/bits_per_byte", LONG)
    }
    why = "at 3 seeds, there is 80% power to find a difference of 0.031; 9 seeds would find one of 0.015"
    verdicts = [
        {"arm": arm, "measure": name, "verdict": word, "why": why, "difference": -0.01 * n, "low": -0.012 * n - 0.004, "high": 0.002}
        for name in measures
        for n, (arm, word) in enumerate(zip(arms[1:], ["better", "worse", "no difference shown"] * 4, strict=False))
    ]
    return render_ablation(
        {
            "name": LONG,
            "kind": "learning-rate",
            "baseline": "baseline",
            "seed_varies": "the data order",
            "seeds": [1, 2, 3],
            "unfinished": ["a"],
            "arms": {
                arm: {
                    "tokens": 6e7,
                    "changes": ["optimizer.learning_rate (0.01 -> 0.002)", f"{LONG} (a -> b)"] * bool(n),
                    "paired": n != 2,
                    "finished": [1, 2],
                }
                for n, arm in enumerate(arms)
            },
            "measures": measures,
            "verdicts": verdicts,
            "assumptions": [why],
            "not_measured": ["wild, seed 2: no finite value at the end"],
            "conclusion": {
                "title": "Learning rate",
                "text": f"the best is near 0.0102 for {LONG}",
                "measure": "validation/bits_per_byte",
                "what": "rate",
                "points": [[0.0025, 2.3], [0.005, 2.2], [0.01, 2.1], [0.02, 2.15], [0.04, 2.6]],
                "best": 0.0102,
                "low": 0.008,
                "high": 0.013,
            },
            "cost": {
                "runs": 30,
                "finished": 29,
                "tokens": 1e10,
                "flops": 1e18,
                "measured_hours": 3.2,
                "predicted_hours_of_finished": 2.9,
                "hours": 3.0,
                "basis": "a measured step",
                "disk": 10**9,
                "measured_disk": 2 * 10**9,
            },
        }
    )


def quantization() -> str:
    def one(scheme: str, verdict: str, size: int, kl: float) -> dict[str, Any]:
        domain = {"tokens": 12345, "kl_mean": kl, "same_choice": 0.93}
        score = {
            "score": f"{LONG}/cloze/0-shot",
            "n": 2376,
            "a": 0.45,
            "b": 0.44,
            "difference": -0.01,
            "interval": [-0.02, 0.004],
            "verdict": "no difference shown",
        }
        return {
            "scheme": scheme,
            "about": "4 bits in blocks of 32 with a scale of 16 bits",
            "verdict": verdict,
            "bytes": size,
            "original_bytes": 3 * 10**11,
            "failures": [f"tensor {LONG} is missing"] if verdict == "failed" else [],
            "warnings": ["expert 17 has read 3 tokens"],
            "scored_by": "llama.cpp",
            "limits": {"kl": 0.1, "same_choice": 0.9, "perplexity_ratio": 1.05, "error": 0.2},
            "made_by": "llama-quantize b7777",
            "template": "equal",
            "mtp": "",
            "agreement": {
                "kl_mean": kl,
                "kl_p99": 12 * kl,
                "same_choice": 0.93,
                "perplexity_ratio": 1.01234,
                "perplexity_interval": [1.005, 1.0213],
                "by_domain": dict.fromkeys(("prose", LONG, *WORDS), domain),
            },
            "benchmarks": {"scores": [score]},
            "calibration": {"used": False, "why": "not needed"},
            "speed": {
                "engine": "llama.cpp",
                "threads": 16,
                "prompt": 512,
                "prefill": 12345.6,
                "decode": 123.4,
                "original": {"prefill": 9876.5, "decode": 67.8},
            },
            "tensors": {
                "fates": {"quantized": 211, "kept": 62},
                "total": 273,
                "types": {"Q4_K": 180, "Q6_K": 31, "F32": 62},
                "sensitive": {"embedding": ["Q8_0"]},
                "worst": {"error": 0.09, "name": LONG},
            },
            "made_from": {"held_out": LONG, "tokens": 65536, "calibration": "none"},
        }

    schemes = [one("gguf-q4_k_m", "passed", 9 * 10**10, 0.021), one("compressed-tensors-w4a16-awq", "failed", 8 * 10**10, 0.4)]
    return render_quantization({"model": LONG, "dtype": "bf16", "original_bytes": 3 * 10**11, "results": schemes})


def comparison() -> str:
    models = [
        results(name, right, word)
        for name, right, word in (("one", "+" * 30, LONG), (LONG, "-" * 28 + "++", WORDS[0]), (WORDS[2], "+-" * 15, WORDS[2]))
    ]
    return render_comparison(compare(models, examples=2))


def write_pages(folder: Path, analysis: dict[str, Any]) -> dict[str, Path]:
    """All pages by name."""
    from lmworks.pages.corpus_page import render as render_corpus

    hard = hard_run(folder / "hard")
    usual = folder / "usual"
    write_run(usual)
    written = [json.loads(line) for line in (usual / "metrics.jsonl").read_text().splitlines()]
    lines(usual / "metrics.jsonl", [one | {"time": one["time"] + one["step"]} for one in written])  # a second for each step
    found = {"hard": write_page(hard), "usual": write_page(usual)}
    found["runs"] = write_page(usual, others=[hard, *(small_run(folder / f"run-{n}", 30 + n) for n in range(12))])
    empty = folder / "empty"
    empty.mkdir()
    (empty / "ledger.jsonl").touch()
    for name, run in (
        ("empty", empty),
        ("one-step", small_run(folder / "one", 1)),
        ("no-steps", small_run(folder / "none", 0)),
        ("nan", small_run(folder / "nan", 50, None)),
        ("gaps", small_run(folder / "gaps", 400, 3.0, None)),
    ):
        found[name] = write_page(run)
    texts = {
        "ablation": ablation(),
        "quantization": quantization(),
        "comparison": comparison(),
        "corpus": render_corpus(analysis | {"name": LONG}),
    }
    for name, text in texts.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(text, encoding="utf-8")
    return found
