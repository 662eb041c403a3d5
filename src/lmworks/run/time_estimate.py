"""Predicts the seconds that each stage after the data takes, from the measured speed of the recipe's own steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmworks.host import machine
from lmworks.plan.budget import scale_budgets
from lmworks.plan.counts import flops_per_token
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Duration
from lmworks.recipe.timeline import PhaseSteps

if TYPE_CHECKING:
    from lmworks.plan.stages import StageData
    from lmworks.recipe.schema.evaluate import Benchmark
    from lmworks.recipe.schema.tune import Tune
    from lmworks.shards.batches import Batches
    from lmworks.train.calibrate import Speed

FEW_ITEMS = 10  # questions per benchmark set and task where time is short
# Generated tokens: of a reply, of a sample in the evaluation, and of a sample during training.
_REPLY, _SAMPLE, _ON_THE_WAY = 64, 48, 32
_WINDOWS = 1.2  # tokens scored per token of held-out text, because windows overlap
# CPU seconds of everything but model computation, on a core that runs `_loop` in _LOOP seconds (measured on the quickstart).
_LOOP = 0.037
_CONVERSATION, _COMPRESSED_BYTE, _EVALUATION, _EXPORT = 0.001, 2.5e-6, 3.0, 6.0
_OWN_CONVERSATIONS = 2000  # assumed of a set without a count, which is not opened for an estimate


@dataclass(frozen=True)
class FixedWork:
    """Work of the stages after the data that does not depend on the budget: tokens of a validation, tokens and bytes of all held-out text,
    tokens per item by benchmark set, and what was read of the data of tuning, if it was. `slowness` scales the CPU time of everything that
    is not model computation."""

    validation: int
    held_out: int
    held_out_bytes: int
    items: Mapping[str, float]
    slowness: float
    tuning: StageData | None = None


def shortest_batches(recipe: Recipe, run_dir: Path) -> Batches:
    """The batches of a run with the fewest steps, to measure them. A change of the mixture or a ramp of the batch has a length of its own,
    which such a run may not reach the end of; without them its steps are those of most of a whole run."""
    from lmworks.shards.batches import Batches

    recipe = scale_budgets(recipe, 0)
    phases = [phase.model_copy(update={"mixture_changes": [], "batch_ramp": None}) for phase in recipe.train.phases]
    return Batches(recipe.model_copy(update={"train": recipe.train.model_copy(update={"phases": phases})}), run_dir / "shards")


def fixed_work(recipe: Recipe, run_dir: Path, tuning: StageData | None = None) -> FixedWork:
    from lmworks.tokenizer import load
    from lmworks.train.pretrain import held_out

    tokenizer = load(run_dir / "tokenizer")

    def length_of(text: str) -> int:
        return len(tokenizer.encode(text))

    batches = shortest_batches(recipe, run_dir)
    phases = recipe.train.phases
    length = int(phases[0].sequence_length)
    rows = max(1, (recipe.train.micro_batch_sequences or 1) * max(int(phase.sequence_length) for phase in phases) // length)
    pieces = held_out(batches, recipe, length, rows)
    splits = [source.validation for source in batches.manifest.sources if source.validation]
    return FixedWork(
        validation=sum(map(len, pieces.values())) * rows * length,
        held_out=sum(split.tokens for split in splits),
        held_out_bytes=sum(split.bytes for split in splits),
        items={name: mean for name, (mean, _) in tokens_per_item(recipe.evaluate.benchmarks, length_of, FEW_ITEMS).items()},
        slowness=1.0 if machine.speed() is not None else statistics.median(_loop() for _ in range(5)) / _LOOP,
        tuning=tuning,
    )


def tokens_per_item(benchmarks: Sequence[Benchmark], length: Callable[[str], int], most: int) -> dict[str, tuple[float, int]]:
    """Mean tokens per item of each benchmark set, with all choices, over at most `most` items (or as many as it asks for), and how many
    items that are; zeros for a set that is not available. `length` counts the tokens of a text."""
    from lmworks.errors import Unavailable
    from lmworks.evaluate.sets import benchmarks as loading
    from lmworks.evaluate.sets.benchmarks import is_generated
    from lmworks.evaluate.sets.items import ChoiceItem

    found = {}
    for one in benchmarks:
        asked = min(most, one.items or most)
        if is_generated(one):
            found[one.name] = _prompt_tokens(one, length), asked
            continue
        try:
            items = loading.load(one, asked, 0).items
        except Unavailable:
            items = []
        choices = [item for item in items if isinstance(item, ChoiceItem)]
        texts = [context + rest for item in choices for context, rest in zip(item.contexts, item.continuations, strict=True)]
        found[one.name] = sum(map(length, texts)) / max(1, len(items)), len(items)
    return found


def _prompt_tokens(benchmark: Benchmark, length: Callable[[str], int]) -> float:
    """Mean tokens of a prompt of a generation set; 0 if it cannot be measured here."""
    from lmworks.errors import Unavailable
    from lmworks.evaluate.generation.interface import Prompt
    from lmworks.evaluate.sets.benchmarks import GENERATION

    class Text:
        context: int | None = None

        def length(self, prompt: Prompt) -> int:
            return length(prompt.text)

    chosen = GENERATION[benchmark.name].open(benchmark)
    try:
        prompts = chosen.prompts(FEW_ITEMS, chosen.shots if benchmark.shots is None else benchmark.shots, Text())
    except Unavailable:
        return 0.0
    return sum(map(Text().length, prompts)) / len(prompts)


def _loop() -> float:
    """Seconds of a fixed amount of work in Python."""
    began = time.perf_counter()
    counts: dict[int, int] = {}
    for number in range(300_000):
        counts[number % 1000] = counts.get(number % 1000, 0) + len(str(number))
    return time.perf_counter() - began


def predict_seconds(recipe: Recipe, speed: Speed, work: FixedWork) -> dict[str, float]:
    """Predicted seconds of each stage after the data; without those of tuning if they depend on data that were not read."""
    from lmworks.evaluate.sets.benchmarks import GENERATION, is_generated
    from lmworks.train.calibrate import ROWS

    def forward(tokens: float, length: int) -> float:
        return tokens * flops_per_token(recipe.model, length).total / 3 / speed.forward

    def generate(tokens: int, length: int) -> float:
        return tokens * ROWS * flops_per_token(recipe.model, length).total / 3 / speed.decode

    def course(steps: int, tokens: int, validation: int, length: int) -> float:
        """Seconds of a trainer besides its steps: validation and samples."""
        validations, samples = train.validate_every.times(steps, tokens), train.sample_every.times(steps, tokens)
        return validations * forward(validation, length) + samples * generate(_ON_THE_WAY, length)

    train, tune, wanted = recipe.train, recipe.tune, recipe.evaluate
    phases = [PhaseSteps.of(phase) for phase in train.phases]
    steps, tokens = sum(phase.steps for phase in phases), sum(phase.tokens for phase in phases)
    found = {"pretrain": sum(_step_seconds(recipe, speed, phase.tokens, phase.sequence_length) for phase in phases)}
    found["pretrain"] += course(steps, tokens, work.validation, phases[0].sequence_length)
    if isinstance(wanted.every, Duration):
        items = sum(work.items[one.name] * min(one.items or wanted.every_items, wanted.every_items) for one in wanted.benchmarks)
        found["pretrain"] += wanted.every.times(steps, tokens) * forward(items, phases[0].sequence_length)
    if tune is not None and (known := tuning_steps(tune, work)) is not None:
        length, batch = int(tune.sequence_length), int(tune.global_batch_tokens)
        found["tune"] = _step_seconds(recipe, speed, known[1], length) + course(*known, 4 * batch, length)
        read, assumed = work.tuning, sum(data.limit or _OWN_CONVERSATIONS for data in tune.data)
        found["tune"] += work.slowness * _CONVERSATION * (assumed if read is None else read.examples + read.held_out)
    context, models = phases[-1].sequence_length, 1 if tune is None else 2
    scored = _WINDOWS * work.held_out + sum(work.items[one.name] * (one.items or wanted.benchmark_items) for one in wanted.benchmarks)
    replies = -(-len(wanted.tasks) * wanted.task_items // ROWS) * _REPLY
    for one in filter(is_generated, wanted.benchmarks):
        count = (one.items or wanted.benchmark_items) * one.samples * max(1, len(one.lengths))
        replies += -(-count // ROWS) * GENERATION[one.name].reply_tokens
    found["evaluate"] = models * (forward(scored, context) + generate(replies + _SAMPLE, phases[0].sequence_length))
    found["evaluate"] += work.slowness * (_EVALUATION + wanted.references * _COMPRESSED_BYTE * work.held_out_bytes)
    found["export"] = work.slowness * _EXPORT * bool(recipe.export.huggingface or recipe.export.gguf)
    return found


def total_seconds(recipe: Recipe, speed: Speed, work: FixedWork) -> float:
    return sum(predict_seconds(recipe, speed, work).values())


def tuning_steps(tune: Tune, work: FixedWork) -> tuple[int, int] | None:
    """Steps of tuning, and their tokens. Those of epochs follow from the data: None if these were not read."""
    if tune.epochs is None:
        return tune.planned_tokens // tune.global_batch_tokens, int(tune.planned_tokens)
    return None if work.tuning is None else (work.tuning.steps, work.tuning.read)


def training_seconds(recipe: Recipe, speed: Speed, work: FixedWork) -> float:
    """Seconds of the training steps alone, including tuning."""
    seconds = sum(_step_seconds(recipe, speed, int(phase.tokens), int(phase.sequence_length)) for phase in recipe.train.phases)
    tune = recipe.tune
    if tune is not None and (known := tuning_steps(tune, work)) is not None:
        seconds += _step_seconds(recipe, speed, known[1], int(tune.sequence_length))
    return seconds


def _step_seconds(recipe: Recipe, speed: Speed, tokens: int, length: int) -> float:
    return tokens * flops_per_token(recipe.model, length).total / speed.train[length]
