"""Muon against AdamW on the quickstart's model and data, at its whole budget: held-out loss on equal tokens and on equal time.

    lmworks shards build recipes/quickstart.yaml
    python benchmarks/muon_adamw.py runs/quickstart --results muon.jsonl

The learning rate of each optimizer is doubled and halved until the best one has a worse one on both sides. The best is then run with other
seeds (other initial weights, other batches). For equal time, AdamW gets more tokens, in the ratio of the step times that were measured
side by side at the start. The phases keep their proportions and schedules; clipping and weight decay are the recipe's. Each run is a line
of the results file, and a run that is in the file is not repeated. Prints the table at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lmworks  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)
import torch

from lmworks.optim import build_optimizer
from lmworks.recipe.load import load_resolved
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Tokens
from lmworks.shards.batches import Batches
from lmworks.train.build import build_model
from lmworks.train.curriculum import PretrainingCurriculum
from lmworks.train.step import micro_batch_of, train_step
from lmworks.train.validation import validate
from lmworks.ui.terminal import bar

START = {"muon": 0.008, "adamw": 0.002}


@dataclass(frozen=True)
class Arm:
    kind: str
    rate: float
    seed: int
    tokens: int


def arm_recipe(run: Path, arm: Arm) -> Recipe:
    """The run's recipe with the arm's optimizer, seed and tokens, on one thread."""
    recipe = load_resolved(run / "resolved.json")
    scale = arm.tokens / sum(int(phase.tokens) for phase in recipe.train.phases)
    phases = [phase.model_copy(update={"tokens": Tokens(int(phase.tokens * scale))}) for phase in recipe.train.phases]
    # Under Muon the embeddings and the head have AdamW's update, at the same rate, but at most the recipe's.
    most = recipe.optimizer.adam_learning_rate or arm.rate
    adam = min(arm.rate, most) if arm.kind == "muon" else arm.rate
    options = recipe.optimizer.model_copy(update={"kind": arm.kind, "learning_rate": arm.rate, "adam_learning_rate": adam})
    train = recipe.train.model_copy(update={"phases": phases})
    return recipe.model_copy(update={"seed": arm.seed, "threads": 1, "train": train, "optimizer": options})


class Training:
    """One arm: its model, optimizer and batches."""

    def __init__(self, run: Path, arm: Arm) -> None:
        self.recipe = arm_recipe(run, arm)
        self.curriculum = PretrainingCurriculum(self.recipe, Batches(self.recipe, run / "shards"))
        self.model = build_model(self.recipe)
        self.optimizer = build_optimizer(self.model, self.recipe.optimizer)
        self.model.train()

    def step(self, step: int) -> float:
        """One training step. Returns its loss."""
        phase = self.curriculum.phase(step)
        if step == phase.first_step and phase.model is not None:
            self.model.configure(phase.model)
        batch = self.curriculum.batch(step, 0, self.curriculum.sequences(step))
        rows, lr_factor = micro_batch_of(self.recipe, phase.sequence_length), self.curriculum.lr_factor(step)
        return float(train_step(
            self.model, self.optimizer, batch, micro_batch_size=rows, lr_factor=lr_factor,
            max_grad_norm=self.recipe.optimizer.max_grad_norm, bias_update_rate=phase.bias_update_rate,
        ).loss)  # fmt: skip

    def held_out(self) -> dict[str, float]:
        phase, batches = self.curriculum.phases[-1], self.curriculum.batches
        rows = micro_batch_of(self.recipe, phase.sequence_length)
        parts = {domain: batches.validation(domain, phase.sequence_length, rows, 65_536) for domain in batches.manifest.domains()}
        return validate(self.model, parts)


def train(run: Path, arm: Arm) -> dict[str, float | int | str]:
    """A whole run of one arm: the row of the results file."""
    training = Training(run, arm)
    with bar(f"{arm.kind} {arm.rate:g} seed {arm.seed}", training.curriculum.steps) as progress:
        for step in range(training.curriculum.steps):
            loss = training.step(step)
            progress.advance(1)
            progress.note(f"loss {loss:.3f}")
    found = training.held_out()
    return asdict(arm) | {"loss": found["validation/loss"], "bits_per_byte": found["validation/bits_per_byte"]}


def time_ratio(run: Path, tokens: int, steps: int = 12) -> float:
    """A step of Muon in steps of AdamW: the median over pairs of steps that follow one another."""
    muon, adamw = (Training(run, Arm(kind, START[kind], 1, tokens)) for kind in ("muon", "adamw"))
    ratios = []
    for step in range(steps + 2):
        seconds = []
        for training in (muon, adamw):
            start = time.thread_time()  # of one thread: what neighbours take does not count
            training.step(step)
            seconds.append(time.thread_time() - start)
        if step >= 2:
            ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


class Results:
    """Runs of arms, two at once; those that the file knows are read from it."""

    def __init__(self, run: Path, path: Path, processes: int) -> None:
        self._run, self._path = run, path
        self._pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows = {Arm(row["kind"], row["rate"], row["seed"], row["tokens"]): row for row in map(json.loads, lines)}

    def all(self, arms: list[Arm]) -> list[dict[str, float]]:
        new = [arm for arm in arms if arm not in self.rows]
        waiting: dict[Arm, Future[dict[str, Any]]] = {arm: self._pool.submit(train, self._run, arm) for arm in new}
        for arm, future in waiting.items():
            self.rows[arm] = future.result()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.rows[arm]) + "\n")
        return [self.rows[arm] for arm in arms]

    def best(self, kind: str, tokens: int, seed: int) -> float:
        """The rate with the lowest loss, once both its half and its double were tried."""
        tried = {START[kind] * factor for factor in (0.5, 1, 2)}
        while True:
            losses = {row["rate"]: row["loss"] for row in self.all([Arm(kind, rate, seed, tokens) for rate in sorted(tried)])}
            best = min(losses, key=lambda rate: losses[rate])
            if {best / 2, best * 2} <= tried:
                return best
            tried |= {best / 2, best * 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--results", type=Path, required=True, help="a file of JSON lines, continued where it ended")
    parser.add_argument("--tokens", type=int, help="of each run; the recipe's budget otherwise")
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3))
    parser.add_argument("--processes", type=int, default=2, help="runs at once, each on one thread")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_resolved(arguments.run / "resolved.json")
    tokens = arguments.tokens or sum(int(phase.tokens) for phase in recipe.train.phases)
    ratio = time_ratio(arguments.run, tokens)
    print(f"a step of Muon takes {ratio:.3f} steps of AdamW", flush=True)
    results = Results(arguments.run, arguments.results, arguments.processes)
    first, *others = arguments.seeds
    best = {kind: results.best(kind, tokens, first) for kind in START}
    longer = int(tokens * round(ratio, 2))
    results.all([Arm(kind, best[kind], seed, tokens) for kind in START for seed in others])
    results.all([Arm("adamw", best["adamw"], seed, longer) for seed in arguments.seeds])
    print("| optimizer | rate | seed | tokens | held-out loss | bits per byte |\n|---|---|---|---|---|---|")
    for arm, row in sorted(results.rows.items(), key=lambda item: (item[0].kind, item[0].tokens, item[0].rate, item[0].seed)):
        print(f"| {arm.kind} | {arm.rate:g} | {arm.seed} | {arm.tokens:,} | {row['loss']:.4f} | {row['bits_per_byte']:.4f} |")


if __name__ == "__main__":
    main()
