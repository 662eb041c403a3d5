"""Measures the speed of a recipe's training step on this machine, for `lmworks plan --calibrate` and `time`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lmworks.host import machine
from lmworks.host.machine import keep_freed_memory
from lmworks.inference.generate import GenerateOptions, generate
from lmworks.metrics import system
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.train.build import build_model, with_optimizer
from lmworks.train.step import micro_batch_of, train_step
from lmworks.ui import terminal

_SECONDS = 30.0
ROWS = 32  # rows that are generated together, as in the evaluation
_PROMPT, _NEW = 64, 8  # tokens of a prompt; tokens generated
_AS_FAST = 0.97  # of the best speed: less than this is not noise


@dataclass(frozen=True)
class Speed:
    """Measured model FLOP/s of all ranks together: of training by sequence length, of a forward pass alone, and of generating one token for
    each of `ROWS` rows. `steps`: number of timed training steps; `tokens`: their tokens per second, by sequence length."""

    train: dict[int, float]
    forward: float
    decode: float
    steps: int = 0
    tokens: dict[int, float] = field(default_factory=dict)


def calibrate(recipe: Recipe, flops_per_token: Callable[[int, int], float]) -> tuple[float, str]:
    """Measure the MFU of a step of the first phase on random tokens, with the real model, optimizer and micro-batch size; returns it and
    how it was measured. `flops_per_token` is asked with the sequence length and the number of micro-batches.

    Takes about half a minute after compilation. MFU refers to the measured peak of this machine, so it applies only to clusters of the
    same devices.
    """
    batch = _first_batch(recipe)
    rows, length = batch.tokens.shape
    flops = flops_per_token(length, -(-rows // (recipe.train.micro_batch_sequences or 1))) * batch.tokens.size
    peak = system.measure_peak()
    with terminal.bar("calibrate", _SECONDS) as bar:
        seconds = _Model(recipe, None).step_seconds(batch, _SECONDS, bar)
    median = statistics.median(seconds)
    steps = f"median of {len(seconds)} steps of {batch.tokens.size:,} tokens, {median:.2f} s each"
    how = f"measured here: {steps}, peak {peak / 1e12:.2f} TFLOP/s"
    return system.mfu(flops, median, peak), how


def _first_batch(recipe: Recipe) -> Batch:
    """A batch of random tokens in the shape of the first phase, of at most four micro-batches."""
    phase, micro_batch_size = recipe.train.phases[0], recipe.train.micro_batch_sequences or 1
    length, rows = int(phase.sequence_length), int(phase.global_batch_tokens // phase.sequence_length)
    return random_batch(recipe, length, min(rows, 4 * micro_batch_size))


def random_batch(recipe: Recipe, length: int, rows: int) -> Batch:
    """A batch of random tokens, one document per sequence."""
    assert recipe.model.vocab_size
    tokens = np.random.default_rng(recipe.seed).integers(0, recipe.model.vocab_size, (rows, length + 1), dtype=np.int32)
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(0, rows * length + 1, length, dtype=np.int32), 0, 0)


def measure(
    recipe: Recipe, batches: Sequence[Batch], patience: float, flops_per_token: Callable[[int], float], ranks: Ranks | None = None
) -> Speed:
    """Train, score and generate for some seconds, `patience` for each of the batches, of which each has a length of its own.

    All ranks call this together, each with the whole batches. What is compiled here is not compiled again by the trainer of this
    process. Where the machine's speed was said (`LMWORKS_MACHINE`), nothing is measured.
    """
    if (said := machine.speed()) is not None:
        lengths = [batch.tokens.shape[1] for batch in batches]
        flops = float(max(1, said))
        return Speed(dict.fromkeys(lengths, flops), flops, flops)
    train: dict[int, float] = {}
    tokens: dict[int, float] = {}
    steps = 0
    with terminal.bar("measure this machine", patience * len(batches)) as bar:
        model = _Model(recipe, ranks)
        for batch in batches:
            length = batch.tokens.shape[1]
            seconds = model.step_seconds(batch, patience, bar)
            tokens[length] = batch.tokens.size / statistics.median(seconds)
            train[length] = flops_per_token(length) * tokens[length]
            steps += len(seconds)
        batch = batches[0]
        flops = flops_per_token(batch.tokens.shape[1]) / 3
        return Speed(
            train, flops * batch.tokens.size / model.forward_seconds(batch), flops * ROWS / model.decode_seconds(batch), steps, tokens
        )


def speed_by_threads(recipe: Recipe, patience: float) -> dict[int, float]:
    """Measured tokens/s of a step of the first phase on this CPU, on random tokens, by number of threads: with all threads of the recipe,
    with half of them, and so on until fewer threads are slower. Takes about `patience` seconds for each number."""
    found: dict[int, float] = {}
    threads, batch = recipe.threads or 1, _first_batch(recipe)
    with terminal.bar("choose the number of threads", patience * threads.bit_length()) as bar:
        model = _Model(recipe, None)
        while threads and (not found or min(found.values()) >= _AS_FAST * max(found.values())):
            torch.set_num_threads(threads)
            found[threads] = batch.tokens.size / statistics.median(model.step_seconds(batch, patience, bar))
            threads //= 2
    return found


def fewest_threads(speeds: Mapping[int, float]) -> int:
    """The smallest number of threads that is as fast as the best: threads that gain nothing wait for each other on a busy machine."""
    return min(threads for threads, speed in speeds.items() if speed >= _AS_FAST * max(speeds.values()))


class _Model:
    """The recipe's model and optimizer at their start, to be timed."""

    def __init__(self, recipe: Recipe, ranks: Ranks | None) -> None:
        self._recipe = recipe
        self._model: ParallelModel
        self._model, self._optimizer = with_optimizer(recipe, build_model(recipe, ranks))

    def step_seconds(self, batch: Batch, patience: float, bar: terminal.Bar) -> list[float]:
        """Seconds of training steps on one batch, without the first two, which compile."""
        model, rows = self._model, len(batch.tokens)
        micro_batch_size = micro_batch_of(self._recipe, batch.tokens.shape[1], model.pipeline is not None)
        own = batch.rows(*model.rank_sequences(rows))
        if model.device.type == "cpu":
            keep_freed_memory()  # as the trainer does
        model.train()

        def step() -> float:
            began = time.monotonic()
            result = train_step(
                model, self._optimizer, own, sequences=rows, valid_tokens=batch.valid_tokens,
                micro_batch_size=micro_batch_size, lr_factor=1.0,
                max_grad_norm=self._recipe.optimizer.max_grad_norm, bias_update_rate=0.001,
            )  # fmt: skip
            float(result.loss)  # waits for the device
            return model.ranks.all_reduce_max(time.monotonic() - began)

        step()
        step()
        seconds = [step()]
        while sum(seconds) < patience and len(seconds) < 100:
            bar.advance(seconds[-1])
            seconds.append(step())
        return seconds

    def forward_seconds(self, batch: Batch) -> float:
        """Of scoring a batch, as validation does."""
        self._model.eval()
        self._model.summed_cross_entropy(batch)
        began = time.monotonic()
        self._model.summed_cross_entropy(batch)
        return self._model.ranks.all_reduce_max(time.monotonic() - began)

    def decode_seconds(self, batch: Batch) -> float:
        """Of one token for each of some rows; as good as none where no rank has all layers, and nothing is generated during the run."""
        if self._model.whole is None:
            return 1e-9
        length = min(_PROMPT, int(self._recipe.model.max_position_embeddings or _PROMPT + _NEW) - _NEW)
        prompts = [row[: max(1, length)].tolist() for row in np.resize(batch.tokens, (ROWS, batch.tokens.shape[1]))]
        times = []
        for new in (1, 1 + _NEW):  # the difference is without the prompt
            began = time.monotonic()
            generate(self._model.whole, prompts, GenerateOptions(max_new_tokens=new))
            times.append(time.monotonic() - began)
        return max(1e-9, times[1] - times[0]) / _NEW
