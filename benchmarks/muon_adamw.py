"""Muon against AdamW on the quickstart's model and data: validation loss for tokens.

    lmworks shards build recipes/quickstart.yaml
    python benchmarks/muon_adamw.py runs/quickstart --tokens 1200000

AdamW gets the whole budget and Muon 0.7 of it, each with its own complete schedule and each with the best rate of the same sweep.
Everything else is the same: first weights, batches, schedule, clipping, weight decay. With `--seeds`, the best of each sweep is run
again from other first weights on other batches. Prints a table row as each arm ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import lmworks  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)
import torch

from lmworks.optim import build_optimizer
from lmworks.progress import bar
from lmworks.recipe.load import load_resolved
from lmworks.recipe.recipe import Recipe
from lmworks.recipe.units import Tokens
from lmworks.shards.batch import Batches
from lmworks.train.pretrain import Pretraining, build_model
from lmworks.train.step import train_step
from lmworks.train.validation import validate

RATES = (0.001, 0.002, 0.004, 0.008)


def arm(recipe: Recipe, shards: Path, kind: str, rate: float, tokens: int, seed: int) -> float:
    """Train one arm on the first phase alone, print its row and return its validation loss."""
    phase = recipe.train.phases[0].model_copy(update={"tokens": Tokens(tokens)})
    recipe = recipe.model_copy(update={"seed": seed, "train": recipe.train.model_copy(update={"phases": [phase]})})
    options = recipe.optimizer.model_copy(update={"kind": kind, "learning_rate": rate, "adam_learning_rate": min(rate, 0.004)})
    course = Pretraining(recipe, Batches(recipe, shards))
    model = build_model(recipe)
    optimizer = build_optimizer(model, options)
    rows, stage = recipe.train.micro_batch or 1, course.stages[0]
    model.train()
    with bar(f"{kind} {rate:g} seed {seed}", course.tokens) as progress:
        for step in range(course.steps):
            batch = course.batch(step, 0, course.rows(step))
            result = train_step(
                model, optimizer, batch, micro_batch=rows, rate=course.rate(step), clip=options.clip, balance_rate=stage.balance_rate
            )
            progress.advance(batch.tokens.size)
            progress.note(f"loss {float(result.loss):.3f}")
    domains = course.batches.manifest.domains()
    held_out = {domain: course.batches.validation(domain, stage.sequence_length, rows, 32_768) for domain in domains}
    torch._dynamo.reset()
    found = validate(model, held_out)
    loss = found["validation/loss"]
    print(f"| {kind} | {rate:g} | {seed} | {tokens:,} | {loss:.4f} | {found['validation/bits_per_byte']:.4f} |", flush=True)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokens", type=int, default=1_200_000)
    parser.add_argument("--share", type=float, default=0.7, help="of the tokens that Muon gets")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, nargs="*", default=(), help="more seeds, for the best rates")
    arguments = parser.parse_args()
    recipe = load_resolved(arguments.run / "resolved.json")
    shards = arguments.run / "shards"
    budgets = {"adamw": arguments.tokens, "muon": int(arguments.tokens * arguments.share)}
    print("| optimizer | rate | seed | tokens | validation loss | bits per byte |\n|---|---|---|---|---|---|", flush=True)
    best = {
        kind: min((arm(recipe, shards, kind, rate, tokens, recipe.seed), rate) for rate in arguments.rates)
        for kind, tokens in budgets.items()
    }
    gaps = [best["adamw"][0] - best["muon"][0]]
    for seed in arguments.seeds:
        adamw, muon = (arm(recipe, shards, kind, best[kind][1], tokens, seed) for kind, tokens in budgets.items())
        gaps.append(adamw - muon)
    reached = min(gaps) >= 0
    print(json.dumps({"best": best, "nats below AdamW, by seed": gaps, "share of its tokens": arguments.share, "reached": reached}))
    sys.exit(not reached)


if __name__ == "__main__":
    main()
