"""A run directory with every kind of record, written with the classes that a run writes with."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from unittest.mock import patch

from lmworks.io import jsonl
from lmworks.io.files import write_json
from lmworks.metrics.log import MetricLog
from lmworks.recipe.changes import as_tree
from lmworks.recipe.schema.artifacts import Metrics
from lmworks.recipe.schema.model import Model, Moe
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase, Train
from lmworks.watch.ledger import Ledger

STEPS = 60
HOSTILE = "<!-- <script </script x </script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>&amp; {{ 7 * 7 }}"


def recipe() -> Recipe:
    phases = [
        Phase(name=name, tokens=f"{tokens} tokens", mixture={"a": 1.0}, sequence_length="32 tokens", global_batch_tokens="64 tokens")
        for name, tokens in (("general", 2560), ("anneal", 1280))
    ]
    moe = Moe(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1)
    model = Model(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        moe=moe,
    )
    return Recipe(name="trial", model=model, train=Train(phases=phases))


def write_metrics(folder: Path, first: int, last: int) -> None:
    with MetricLog(folder, Metrics(), resume_step=first) as log:
        for step in range(first, last + 1):
            values = {
                "train/loss": math.nan if step == 20 else 2 + 6 * math.exp(-step / 20),
                "train/tokens": 64 * step,
                "train/phase": int(step > 40),
                "train/z_loss": 1.5,
                "optim/learning_rate": 0.001,
                "optim/adam_learning_rate": 0.001,
                "optim/grad_norm": 1 + 1 / step,
                "perf/tokens_per_second": 1500.0,
                "perf/mfu": 0.31,
                "perf/data_wait": 0.0,
                "perf/memory": 2.5e9,
                "experts/load_cv": 1 / step,
                "experts/load_max": 1.5,
                "experts/load_min": 0.5,
                "experts/dead": 0,
                "experts/bias_max": 0.001 * step,
            }
            values |= {f"experts/load_cv/{layer}": layer / step for layer in (1, 2)}
            if step % 20 == 0:
                values |= {
                    "validation/bits_per_byte": 2.0 + 10 / step,
                    "validation/prose/bits_per_byte": 1.9 + 10 / step,
                    "perf/validation_seconds": 1.0,
                }
            log.write(step, values)


def write_training(run: Path) -> None:
    """Each record a second after the one before: a machine writes all of them within a millisecond, which would be no time at all."""
    seconds = itertools.count(time.time() - 120)
    with patch.object(time, "time", lambda: next(seconds)), Ledger(run / "ledger.jsonl") as ledger:
        ledger.write("start", stage="pretrain", steps=STEPS, tokens=64 * STEPS)
        ledger.write("phase", stage="pretrain", phase="general", step=0, sequence_length=32)
        write_metrics(run, 1, 30)
        ledger.write("bad_step", step=19, loss="nan", grad_norm="1.0", in_a_row=1, batch=None)
        ledger.write("checkpoint", stage="pretrain", step=30, seconds=0.01, finished=False)
        ledger.write("checkpoint", step=30, path=str(run / "checkpoints/step-00000030"), bytes=1000, metric=2.5, seconds=0.5)
        change = {"key": "train.save_every", "old": "10%", "new": "5%"}
        ledger.write("recipe_changed", allowed=[], harmless=[change])
        ledger.write("resume", stage="pretrain", step=30, tokens=1920)
        write_metrics(run, 31, STEPS)
        ledger.write("phase", stage="pretrain", phase="anneal", step=40, sequence_length=32)
        ledger.write("finish", stage="pretrain", step=STEPS, tokens=64 * STEPS)


def write_samples(path: Path, prompt: str, completion: str) -> None:
    path.write_bytes(
        b"".join(jsonl.line({"step": step, "prompt": prompt, "completion": f"{completion} {step}"}) for step in range(10, 61, 10))
    )


def score(value: float, low: float, high: float, verdict: str) -> dict[str, object]:
    return {"score": value, "interval": [low, high], "n": 50, "correct": 20, "chance": 0.25, "baseline": 0.3, "verdict": verdict}


RESULTS = {
    "models": {
        name: {
            "bits_per_byte": {
                domain: {"bits_per_byte": value, "bytes": 1000, "tokens": 300, "documents": 3} for domain in ("prose", "overall")
            },
            "scores": {
                "arc-easy/cloze/0-shot": score(0.4, 0.35, 0.5, "above chance") | {"form": "cloze"},
                "letter_counting/generate/0-shot": score(0.3, 0.2, 0.4, "at chance") | {"form": "generate"},
            },
            "unavailable": {},
            "samples": [{"prompt": "Hello", "completion": f"{name} says hello"}],
        }
        for name, value in (("base", 1.8), ("tuned", 1.9))
    },
    "references": {
        "bits_per_byte": {"xz -9e": {"prose": 2.4, "overall": 2.3}, "byte unigram": {"prose": 4.4, "overall": 4.5}},
        "how": {"xz -9e": "one stream"},
        "missing": {},
    },
    "compared": {"arc_easy": {"difference": -0.02, "interval": [-0.1, 0.05], "n": 50, "verdict": "no difference shown"}},
}


def write_run(run: Path) -> None:
    """Everything."""
    run.mkdir()
    write_json(run / "resolved.json", as_tree(recipe()))
    write_training(run)
    write_samples(run / "samples.jsonl", "On July 4, 1776,", "the people")
    count = {"documents": 10, "bytes": 1000}
    source = {
        "name": "a",
        "domain": "prose",
        "language": "en",
        "license": "MIT",
        "came": count,
        "quarantined": {},
        "train": {"documents": 5, "bytes": 500},
        "not_drawn": {"documents": 3, "bytes": 300},
        "steps": [{"step": "rules", "came": count, "dropped": {"word_count": {"documents": 1, "bytes": 120}}, "edited": 0}],
        "validation": {"documents": 1, "bytes": 80},
    }
    write_json(run / "corpus" / "report.json", {"sources": [source], "missing": {"b": "no network"}})
    row = {"tokenizer": "this", "source": "a", "domain": "prose", "bytes_per_token": 3.4, "fertility": 1.5, "round_trip_failures": 0}
    write_json(run / "tokenizer" / "report.json", {"evaluation": [row]})
    write_json(run / "evaluate" / "results.json", RESULTS)
    write_json(run / "export" / "parity.json", {"huggingface": {"tokens": 128, "relative": 1.5e-6}})
    for folder in ("corpus", "tokenizer", "shards", "checkpoints", "evaluate", "export"):
        write_json(run / folder / "stage.json", {"stage": folder, "done": True, "seconds": 12.5})
