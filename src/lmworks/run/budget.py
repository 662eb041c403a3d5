"""Time as the budget: before the first training step, the time of a recipe becomes plain numbers, from the speed of this machine.

What a recipe says of tokens are then proportions: one factor on the budgets of all phases and of tuning fills the time that is left beside
what has been spent and what is to come (validations, evaluation, export). The numbers go into the ledger and into resolved.json, and a
run that has them keeps them, on whatever machine it goes on.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks import machine
from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.files import sha256_file
from lmworks.plan.flops import flops_per_token
from lmworks.plan.plan import days
from lmworks.recipe.loading.load import Numbers, Resolved
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Duration, Tokens
from lmworks.recipe.tree.fingerprint import as_tree
from lmworks.recipe.tree.paths import Keys, display, get
from lmworks.shards.order.timeline import PhaseSteps
from lmworks.watch.ledger import Ledger, read_ledger

if TYPE_CHECKING:
    from lmworks.parallel.mesh import Ranks
    from lmworks.train.calibrate import Speed

EVENT = "budget"
BEFORE = "data, start and measuring"
_LEDGER = "ledger.jsonl"
_SLACK = 0.03  # of the time: saves, metrics, the run page, and what else nobody predicts
_FEWEST = 20  # steps of a phase, and of tuning
_LEAST = 0.25  # share of the time that training gets before evaluation does
_FEW_ITEMS = 10  # questions per set and task, where time is short
_SIZES = [digits * 10**power for power in range(4, 11) for digits in range(10, 100)]  # 100k to 990B, two digits
# What the evaluation and the samplers generate: tokens of a reply, of a sample, of a sample on the way.
_REPLY, _SAMPLE, _ON_THE_WAY = 64, 48, 32
_WINDOWS = 1.2  # tokens scored for one of held-out text: windows overlap
# CPU seconds of what no model computes, on a core that goes through `_loop` in _LOOP seconds (measured on the quickstart).
_LOOP = 0.037
_CONVERSATION, _COMPRESSED_BYTE, _EVALUATION, _EXPORT = 0.0025, 2.5e-6, 3.0, 6.0


@dataclass(frozen=True)
class _Work:
    """What the stages after the data have to do whatever the budget is: tokens of a validation, tokens and bytes of all held-out text,
    tokens of an item by benchmark set; and how slow this machine is at what no model computes."""

    validation: int
    held_out: int
    held_out_bytes: int
    items: Mapping[str, float]
    slowness: float


def kept(resolved: Resolved, run_dir: Path) -> Resolved | None:
    """The recipe with the numbers that its run was given when it began, None if it has yet to be given some.

    A key that has been changed in the recipe since then is as it says there.
    """
    recipe = resolved.recipe
    if recipe.time is None:
        return resolved
    path = run_dir / _LEDGER
    events = [line for line in read_ledger(path) if line["event"] == EVENT] if path.exists() else []
    begun = listing.begun(run_dir / "checkpoints")
    if not events:
        return resolved if begun else None
    tree, numbers = as_tree(recipe), {tuple(number["keys"]): number for number in events[-1]["numbers"]}
    same = {keys: number for keys, number in numbers.items() if get(tree, keys) in (number["old"], number["new"])}
    if not begun and (len(same) < len(numbers) or events[-1]["seconds"] != recipe.time):
        return None
    return resolved.settled({keys: (number["new"], number["why"]) for keys, number in same.items()})


def measure(recipe: Recipe, run_dir: Path, ranks: Ranks | None) -> Speed:
    """The speed of the recipe's own steps, on its first batches of each length. All ranks together."""
    from lmworks.shards.format.manifest import check_vocabulary
    from lmworks.shards.read.batches import Batches
    from lmworks.train import calibrate
    from lmworks.train.step import micro_batch_of

    assert recipe.time is not None and recipe.model.vocab_size
    batches = Batches(_scaled(recipe, 0), run_dir / "shards")
    check_vocabulary(batches.manifest, recipe.model.vocab_size, sha256_file(run_dir / "tokenizer" / "tokenizer.json"))
    found = {}
    for index, phase in enumerate(batches.order.timeline.phases):
        length = phase.sequence_length
        if length not in found:
            rows = min(phase.full, 4 * micro_batch_of(recipe, length) * (1 if ranks is None else ranks.size("dp")))
            last = batches.order.timeline.first_step(index + 1) - 1  # behind any ramp
            found[length] = batches.batch(last, 0, min(rows, batches.order.sequences(last)[1]))
    if recipe.tune is not None and (length := int(recipe.tune.sequence_length)) not in found:
        rows = min(int(recipe.tune.global_batch_size) // length, 4 * micro_batch_of(recipe, length))
        found[length] = calibrate.random_batch(recipe, length, rows)
    patience = min(30.0, 0.01 * recipe.time)
    return calibrate.measure(recipe, list(found.values()), patience, lambda length: flops_per_token(recipe.model, length).total, ranks)


def settle(
    resolved: Resolved, run_dir: Path, spent: Callable[[], float], speed_of: Callable[[Recipe], Speed]
) -> tuple[Resolved, list[str]]:
    """Turn the time of a recipe whose shards are made into numbers, and write them into the ledger; the recipe with them, and lines that
    say what came out, the last ones what had to be given up.

    `spent` are the seconds of the command so far, `speed_of` measures. Raises `UserError` if the time is over already.
    """
    recipe = resolved.recipe
    assert recipe.time is not None
    whole = float(recipe.time)
    if spent() >= whole:
        raise UserError(
            f"time: {days(whole)} were over when the data were made, after {days(spent())}; run the same command again, whose time begins "
            f"anew with the data done, or give it more, such as --time {4 * spent():.0f}s"
        )
    work = _work(recipe, run_dir)
    speed = speed_of(recipe)
    numbers: dict[Keys, tuple[Any, str]] = {}
    if recipe.size == "auto":
        numbers = _size(resolved, whole * (1 - _SLACK) - spent(), speed, work)
        recipe = resolved.settled(numbers).recipe
        speed = speed_of(recipe)
    before = spent()
    left = whole * (1 - _SLACK) - before
    given_up = []
    for keys, value, text, least in _savings(recipe, whole):
        if _seconds(_scaled(recipe, 0), speed, work) + max(0.0, least - _training(_scaled(recipe, 0), speed)) <= left:
            break
        recipe = _with(recipe, keys, value)
        numbers[keys] = value, f"given up to stay within {days(whole)}"
        given_up.append(text)
    factor = _largest(lambda factor: _seconds(_scaled(recipe, factor), speed, work) <= left)
    readings = _readings(_scaled(recipe, factor), run_dir) / recipe.shards.max_epochs
    if readings > 1:
        factor *= 0.99 / readings
        given_up.append(f"a part of the time: no source is read more than {recipe.shards.max_epochs:g} times (shards.max_epochs)")
    recipe = _scaled(recipe, factor)
    planned = {BEFORE: before, **_predict(recipe, speed, work)}
    fixed = sum(planned.values()) - before - _training(recipe, speed)
    why = f"{days(whole)}: {_said(speed)}, {before:.0f} s before the first step, {fixed:.0f} s for what is not training; in whole steps"
    asked = resolved.settled(numbers).recipe
    for index, (phase, old) in enumerate(zip(recipe.train.phases, asked.train.phases, strict=True)):
        numbers["train", "phases", index, "tokens"] = _times(phase.tokens, old.tokens, why)
    if recipe.tune is not None and asked.tune is not None:
        numbers["tune", "tokens"] = _times(recipe.tune.tokens, asked.tune.tokens, why)
    if sum(planned.values()) > whole:
        given_up.append(f"the time itself: with {_FEWEST} steps a phase it takes about {days(sum(planned.values()))}")
    _record(resolved, run_dir, numbers, planned, given_up, why)
    lines = [why, "planned: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in planned.items())]
    return resolved.settled(numbers), lines + [f"given up: {', '.join(given_up)}"] * bool(given_up)


def _times(tokens: Tokens, old: Tokens, why: str) -> tuple[str, str]:
    return tokens.text(), f"{tokens / old:.3g} times {old.text()} for {why}"


def _record(resolved: Resolved, run_dir: Path, numbers: Numbers, planned: Mapping[str, float], given_up: list[str], why: str) -> None:
    tree = as_tree(resolved.recipe)
    listed = [
        {"key": display(tree, keys), "keys": list(keys), "old": get(tree, keys), "new": value, "why": reason}
        for keys, (value, reason) in numbers.items()
    ]
    with Ledger(run_dir / _LEDGER) as ledger:
        ledger.write(
            EVENT, seconds=float(resolved.recipe.time or 0), why=why, numbers=listed, given_up=given_up,
            planned={name: round(seconds, 1) for name, seconds in planned.items()},
        )  # fmt: skip


def _size(resolved: Resolved, left: float, speed: Speed, work: _Work) -> dict[Keys, tuple[Any, str]]:
    """The largest size whose own budget, 20 tokens per active parameter, fits into `left` seconds; contexts stay as they were, since the
    tokenizer has seen them."""
    phases = resolved.recipe.train.phases
    lengths: dict[Keys, tuple[Any, str]] = {
        ("train", "phases", index, "sequence_length"): (phase.sequence_length.text(), "as the tokenizer was trained for")
        for index, phase in enumerate(phases)
    }

    why = "the size for which the time is compute-optimal at the speed measured (arXiv:2203.15556)"

    def numbers(size: int) -> dict[Keys, tuple[Any, str]]:
        return {("size",): (_text(size), why), **lengths}

    def seconds(size: int) -> float:
        return _seconds(resolved.settled(numbers(size)).recipe, speed, work)

    return numbers(_SIZES[max(0, bisect_right(_SIZES, left, key=seconds) - 1)])


def _text(size: int) -> str:
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if size >= scale:
            return f"{size / scale:g}{unit}"
    return str(size)


def _savings(recipe: Recipe, whole: float) -> Iterator[tuple[Keys, Any, str, float]]:
    """What is given up where time is short, in this order: a key, its value, a text, and the seconds of training below which it goes."""
    wanted = recipe.evaluate
    if wanted.benchmarks and wanted.benchmark_items > _FEW_ITEMS:
        text = f"benchmark items ({wanted.benchmark_items} -> {_FEW_ITEMS} per set)"
        yield ("evaluate", "benchmark_items"), _FEW_ITEMS, text, _LEAST * whole
    if wanted.tasks and wanted.task_items > _FEW_ITEMS:
        yield ("evaluate", "task_items"), _FEW_ITEMS, f"questions ({wanted.task_items} -> {_FEW_ITEMS} per task)", _LEAST * whole
    if recipe.tune is not None:
        yield ("tune",), None, "tuning", 0.0


def _with(recipe: Recipe, keys: Keys, value: Any) -> Recipe:
    first, *rest = map(str, keys)
    node = value if not rest else getattr(recipe, first).model_copy(update={rest[0]: value})
    return recipe.model_copy(update={first: node})


def _scaled(recipe: Recipe, factor: float) -> Recipe:
    """The recipe with `factor` times its budgets, in whole steps, and no fewer than `_FEWEST` of a phase."""

    def budget(tokens: int, batch: int) -> Tokens:
        return Tokens(max(_FEWEST, int(factor * tokens / batch)) * batch)

    phases = [phase.model_copy(update={"tokens": budget(phase.tokens, phase.global_batch_size)}) for phase in recipe.train.phases]
    tune = recipe.tune and recipe.tune.model_copy(update={"tokens": budget(recipe.tune.tokens, recipe.tune.global_batch_size)})
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"phases": phases}), "tune": tune})


def _readings(recipe: Recipe, run_dir: Path) -> float:
    """How often a phase would read the source that it reads most often."""
    from lmworks.shards.read.batches import Batches

    endless = recipe.model_copy(update={"shards": recipe.shards.model_copy(update={"max_epochs": float("inf")})})
    return max(share.epochs for share in Batches(endless, run_dir / "shards").order.shares())


def _largest(fits: Callable[[float], bool]) -> float:
    """The largest factor that fits; 0 if none does."""
    high = 1.0
    while fits(high) and high < 1e12:
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _seconds(recipe: Recipe, speed: Speed, work: _Work) -> float:
    return sum(_predict(recipe, speed, work).values())


def _step_seconds(recipe: Recipe, speed: Speed, tokens: int, length: int) -> float:
    return tokens * flops_per_token(recipe.model, length).total / speed.train[length]


def _training(recipe: Recipe, speed: Speed) -> float:
    """Seconds of the training steps alone, tuning included."""
    seconds = sum(_step_seconds(recipe, speed, int(phase.tokens), int(phase.sequence_length)) for phase in recipe.train.phases)
    tune = recipe.tune
    return seconds + (_step_seconds(recipe, speed, int(tune.tokens), int(tune.sequence_length)) if tune else 0.0)


def _predict(recipe: Recipe, speed: Speed, work: _Work) -> dict[str, float]:
    """Seconds of each stage after the data."""
    from lmworks.train.calibrate import ROWS
    from lmworks.train.curriculum import interval_in_steps

    def forward(tokens: float, length: int) -> float:
        return tokens * flops_per_token(recipe.model, length).total / 3 / speed.forward

    def generate(tokens: int, length: int) -> float:
        return tokens * ROWS * flops_per_token(recipe.model, length).total / 3 / speed.decode

    def course(steps: int, tokens: int, validation: int, length: int) -> float:
        """What a trainer does beside its steps."""

        def times(every: Duration) -> int:
            return -(-steps // interval_in_steps(every, steps, tokens))  # the last step is one of them

        return times(train.validate_every) * forward(validation, length) + times(train.sample_every) * generate(_ON_THE_WAY, length)

    train, tune, wanted = recipe.train, recipe.tune, recipe.evaluate
    phases = [PhaseSteps.of(phase) for phase in train.phases]
    steps, tokens = sum(phase.steps for phase in phases), sum(phase.tokens for phase in phases)
    found = {"pretrain": sum(_step_seconds(recipe, speed, phase.tokens, phase.sequence_length) for phase in phases)}
    found["pretrain"] += course(steps, tokens, work.validation, phases[0].sequence_length)
    if tune is not None:
        length, batch = int(tune.sequence_length), int(tune.global_batch_size)
        found["tune"] = _step_seconds(recipe, speed, int(tune.tokens), length)
        found["tune"] += course(tune.tokens // batch, tune.tokens, 4 * batch, length)
        found["tune"] += work.slowness * _CONVERSATION * sum(data.count for data in tune.data)
    context, models = phases[-1].sequence_length, 1 if tune is None else 2
    scored = _WINDOWS * work.held_out + sum(work.items[one] * wanted.benchmark_items for one in wanted.benchmarks)
    replies = -(-len(wanted.tasks) * wanted.task_items // ROWS) * _REPLY
    found["evaluate"] = models * (forward(scored, context) + generate(replies + _SAMPLE, phases[0].sequence_length))
    found["evaluate"] += work.slowness * (_EVALUATION + wanted.references * _COMPRESSED_BYTE * work.held_out_bytes)
    found["export"] = work.slowness * _EXPORT * (recipe.export.huggingface or recipe.export.gguf)
    return found


def _work(recipe: Recipe, run_dir: Path) -> _Work:
    from lmworks.shards.read.batches import Batches
    from lmworks.train.pretrain import held_out

    batches = Batches(_scaled(recipe, 0), run_dir / "shards")
    phases = recipe.train.phases
    length = int(phases[0].sequence_length)
    rows = max(1, (recipe.train.micro_batch_size or 1) * max(int(phase.sequence_length) for phase in phases) // length)
    pieces = held_out(batches, recipe, length, rows)
    splits = [source.validation for source in batches.manifest.sources if source.validation]
    return _Work(
        validation=sum(map(len, pieces.values())) * rows * length,
        held_out=sum(split.tokens for split in splits),
        held_out_bytes=sum(split.bytes for split in splits),
        items=_items(recipe, run_dir),
        slowness=1.0 if machine.speed() is not None else statistics.median(_loop() for _ in range(5)) / _LOOP,
    )


def _items(recipe: Recipe, run_dir: Path) -> dict[str, float]:
    """Tokens of an item of each benchmark set, all its choices, from the first ones; none where the sets cannot be had."""
    from lmworks.corpus.readers.items import Unavailable
    from lmworks.evaluate import benchmarks
    from lmworks.tokenizer import load

    found = {}
    tokenizer = load(run_dir / "tokenizer")
    for name in recipe.evaluate.benchmarks:
        try:
            items = benchmarks.load(name, _FEW_ITEMS)
        except Unavailable:
            items = []
        texts = [context + rest for item in items for context, rest in zip(item.contexts, item.continuations, strict=True)]
        found[name] = sum(len(tokenizer.encode(text)) for text in texts) / max(1, len(items))
    return found


def _loop() -> float:
    """Seconds of some work in Python."""
    began = time.perf_counter()
    counts: dict[int, int] = {}
    for number in range(300_000):
        counts[number % 1000] = counts.get(number % 1000, 0) + len(str(number))
    return time.perf_counter() - began


def _said(speed: Speed) -> str:
    if not speed.steps:
        return f"{speed.forward:.3g} FLOP/s, as LMWORKS_MACHINE says"
    by_length = " and ".join(f"{tokens:,.0f}" for tokens in speed.tokens.values())
    lengths = " and ".join(f"{length:,}" for length in speed.tokens)
    return f"{by_length} tokens/s measured in {speed.steps} steps (sequences of {lengths})"


def compared(run_dir: Path, actual: Mapping[str, float | None]) -> dict[str, tuple[float, float | None]]:
    """By stage, the seconds that were planned and those that it took; empty for a run without `time`."""
    path = run_dir / _LEDGER
    events = [line for line in read_ledger(path) if line["event"] == EVENT] if path.exists() else []
    planned = events[-1]["planned"] if events else {}
    return {name: (seconds, seconds if name == BEFORE else actual.get(name)) for name, seconds in planned.items()}
