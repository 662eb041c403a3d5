"""Measures the steps of the trainer of a stage: warm-up, timed steps, a validation and a save, and one step under the profiler of torch.

The warm-up is five steps: the first compiles and makes the pools of the allocator, and the next few still read batches that the
prefetching thread could not have ready. Twenty timed steps make the standard error of their median about 0.3 of the spread of one step,
which is 2% where steps vary by 6%, as on a machine that is not shared. The profiler slows a step down, so it runs in a step of its own; of
a step with many micro-batches it sees the last eight, since its record grows with every operator.
"""

from __future__ import annotations

import math
import os
import socket
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.metrics import system
from lmworks.optim.groups import local
from lmworks.profile.allocations import READY, allocations, exposed, gradient_events, peak, times_of
from lmworks.profile.rollouts import RolloutMemory
from lmworks.profile.spans import FORWARD, OPTIMIZER, PREFIX, SCORING, WHOLE, Spans, parts_of, replaced
from lmworks.profile.trace import events_of
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.indexed import token_dtype
from lmworks.train.observe.memory_kinds import Held, allocator_statistics, kept_bytes, process_bytes
from lmworks.train.observe.step_metrics import FlopsPerToken
from lmworks.train.trainer import Trainer
from lmworks.watch.heartbeat import Heartbeat

WARM_UP, TIMED = 5, 20  # steps
_MICRO_BATCHES = 8  # that the profiler records
_KERNELS = 12
_AROUND = (PREFIX, "gloo:", "nccl:", "c10d::", "FSDP::", "autograd::engine", "Optimizer.")  # what computes nothing itself
_AHEAD = 4  # batches that are held: that of the step, those that are ready, and the one that is being read


class _Finished(Exception):
    """All steps are measured."""


@dataclass
class Measured:
    """What one rank has measured. Times are in seconds, sizes in bytes; `steps` has the parts of each timed step, `data` sums over all its
    batches."""

    rank: int
    host: str
    device: str
    pipeline_stage: int = 0
    first_step: int = 0
    warm_up: int = 0
    length: int = 0
    rows: int = 0
    phase: str = ""
    phase_index: int = 0
    stage_steps: int = 0
    stage_tokens: int = 0
    tokens_per_step: float = 0.0
    micro_batches: int = 0
    micro_batch_size: int = 0
    flops_per_step: float = 0.0
    peak_flops: float = 0.0
    steps: list[dict[str, float]] = field(default_factory=list)
    validation: float | None = None
    save: float | None = None
    memory: dict[str, float] = field(default_factory=dict)
    memory_peak: float = 0.0
    allocator: dict[str, float] = field(default_factory=dict)
    data: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    kernels: list[dict[str, float | str]] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)


class StepClock(Heartbeat):
    """A heartbeat that tells a measurement when the main thread begins what."""

    def __init__(self) -> None:
        super().__init__(None)
        self.measurement: Measurement | None = None

    def beat(self, step: int, doing: str) -> None:
        if self.measurement is not None:
            self.measurement.begins(step, doing)


class Measurement:
    """Runs the trainer of a stage for as many steps as are measured, from the first step of `phase` (a number) on, or from its own."""

    def __init__(
        self, clock: StepClock, held: Held, flops_per_token: FlopsPerToken, *, warm_up: int, timed: int, phase: int | None,
        trace_events: int,
    ) -> None:  # fmt: skip
        self._clock, self._held, self._phase, self._flops_per_token = clock, held, phase, flops_per_token
        self._warm_up, self._timed, self._trace_events = warm_up, timed, trace_events
        self.found: Measured | None = None
        self._profiler: Any = None
        self._started = False
        self._around = ExitStack()  # around the profiler
        self._gradients: list[set[int]] = []  # addresses, of each update that the profiler sees
        self._parts: dict[str, float] = {}
        self._step = self._micro = 0
        self._micro_of_step = 1
        self._most_rows = 0  # of a micro-batch of the step
        self._training = False  # not scoring
        self._began = self._updated = self._ended = 0.0

    def run(self, trainer: Trainer) -> None:
        """In place of `Trainer.run`."""
        self._trainer, curriculum = trainer, trainer.curriculum
        if self._phase is not None:
            trainer.step = bisect_left(range(curriculum.steps), self._phase, key=lambda step: curriculum.phase(step).index)
        wanted = self._warm_up + self._timed + 1
        phase = curriculum.phase(min(trainer.step, curriculum.steps - 1))
        stop = bisect_right(range(curriculum.steps), phase.index, key=lambda step: curriculum.phase(step).index)
        trainer.step = self._first = max(phase.first_step, min(trainer.step, stop - wanted))
        there = stop - self._first
        if there < wanted:  # a short stage: the profiler and at least one timed step come first
            self._warm_up = max(0, min(self._warm_up, there - 2))
            self._timed = max(1, there - self._warm_up - 1)
        if there < 2:
            raise UserError(f"{phase.name} has one step; a profile needs two, one that is timed and one under the profiler")
        self._last = self._first + self._warm_up + self._timed  # the step under the profiler
        trainer.measure_at(self._last)
        self._clock.measurement = self
        self.found = self._describe(trainer)
        self._spans = Spans(trainer.model.device)
        with self._instruments(), self._around:
            try:
                trainer.run()
                self._end()
            except _Finished:
                pass

    def _describe(self, trainer: Trainer) -> Measured:
        phase, model = trainer.curriculum.phase(self._first), trainer.model
        rank, stage = model.ranks.global_rank, model.ranks.rank("pp")
        found = Measured(rank, socket.gethostname(), _device_name(model.device), stage, self._first, self._warm_up)
        found.length, found.rows = phase.sequence_length, trainer.curriculum.sequences(self._last)
        found.phase, found.phase_index = phase.name, phase.index
        found.stage_steps, found.stage_tokens = trainer.curriculum.steps, trainer.curriculum.tokens
        found.peak_flops = system.measure_peak()
        return found

    @contextmanager
    def _instruments(self) -> Iterator[None]:
        trainer, model = self._trainer, self._trainer.model
        with ExitStack() as stack:
            for owner, method, part in parts_of(trainer):
                stack.enter_context(replaced(owner, **{method: self._spans.timed(part, getattr(owner, method))}))
            stack.enter_context(replaced(model, forward_backward=self._forward_backward(model.forward_backward)))
            stack.enter_context(replaced(trainer.optimizer, step=self._before_update(trainer.optimizer.step)))
            stack.enter_context(replaced(trainer.curriculum, batch=self._reading(trainer.curriculum.batch)))
            stack.enter_context(replaced(trainer._validator, run=self._validating(trainer._validator.run)))
            stack.enter_context(replaced(trainer._metrics, add_step=self._after_step(trainer._metrics.add_step)))
            if model.pipeline is None:
                for one in model.parts:
                    stack.enter_context(replaced(one, loss=self._counting(one.loss)))
            else:
                stack.enter_context(replaced(model.pipeline, forward_backward=self._pipelined(model.pipeline.forward_backward)))
            self._rollouts = stack.enter_context(RolloutMemory.of(trainer))
            yield

    # What happens in a step, in its order

    def begins(self, step: int, doing: str) -> None:
        """The main thread is at `step` and begins something."""
        now = time.perf_counter()
        if doing == "data":
            self._close(now)
            if step > self._last:
                self._end()
                raise _Finished
            if step == min(self._first + 1, self._first + self._warm_up):
                system.reset_memory_peak()
            self._step, self._began, self._parts, self._updated, self._micro, self._most_rows = step, now, {}, now, 0, 0
            self._spans.collect()
        elif doing == "update":
            self._updated = now

    def _counting(self, loss: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self._micro += self._training
            if self._training and self._micro > self._micro_of_step - _MICRO_BATCHES:
                self._start_profiler()
            return loss(*args, **options)

        return call

    def _forward_backward(self, function: Any) -> Any:
        def call(batch: Batch, *args: Any, **options: Any) -> Any:
            micro_batch_size = int(args[1])
            self._micro_of_step, self._micro = max(1, math.ceil(len(batch.tokens) / micro_batch_size)), 0
            assert self.found is not None
            self._most_rows = max(self._most_rows, min(micro_batch_size, max(1, len(batch.tokens))))
            self.found.micro_batches, self.found.micro_batch_size = self._micro_of_step, self._most_rows
            if self._first + self._warm_up <= self._step:
                self._count(batch)
            if self._trainer.model.pipeline is not None or self._micro_of_step <= _MICRO_BATCHES:
                self._start_profiler()
            self._training = True
            try:
                with self._spans.span(WHOLE):
                    return function(batch, *args, **options)
            finally:
                self._training = False

        return call

    def _pipelined(self, function: Any) -> Any:
        """A pipeline divides the rows of a step into micro-batches of one size, which need not be that of the recipe."""

        def call(inputs: Any, *args: Any) -> Any:
            assert self.found is not None
            self.found.micro_batches, self.found.micro_batch_size = len(inputs), len(inputs[0][0])
            return function(inputs, *args)

        return call

    def _before_update(self, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if self._step == self._last:
                assert self.found is not None
                grads = [local(p.grad) for p in self._trainer.model.parameters() if p.grad is not None]
                with record_function(PREFIX + READY):
                    self._gradients.append({grad.untyped_storage().data_ptr() for grad in grads})
                self.found.memory = kept_bytes(self._held) | {"rollouts": self._rollouts.bytes}
            return function(*args, **options)

        return call

    def _after_step(self, add_step: Any) -> Any:
        def call(**given: Any) -> None:
            add_step(**given)
            assert self.found is not None
            spans = self._spans.collect()
            collectives = max(0.0, self._updated - self._began - given["own"]) if self._trainer.model.ranks.distributed else 0.0
            self._parts = {"step": given["seconds"], "data": given["data_wait"], "collectives": collectives, "own": given["own"]}
            self._parts["forward"] = spans.get(FORWARD, 0.0)
            self._parts["backward"] = max(0.0, spans.get(WHOLE, 0.0) - spans.get(FORWARD, 0.0))
            self._parts["optimizer"], self._parts["scoring"] = spans.get(OPTIMIZER, 0.0), spans.get(SCORING, 0.0)
            objective = self._trainer.objective
            self._parts["rollouts"] = 0.0 if objective is None else objective.metrics().get("perf/rollout_seconds", 0.0)
            self.found.tokens_per_step = float(given["tokens"])
            config, length = self._trainer.model.config, given["sequence_length"]
            per_token = self._flops_per_token(config, length, self._trainer.model.has_adapters)
            self.found.flops_per_step = per_token * given["tokens"]
            self._ended = time.perf_counter()
            if self._step == self._last - 1:
                self._read_memory()
            if self._step == self._last:
                self._stop_profiler()

        return call

    def _close(self, now: float) -> None:
        """End the step that has gone before; what it does after its update is a validation and a save in the last, else a gap."""
        parts = self._parts
        if not parts or self.found is None or not self._first + self._warm_up <= self._step < self._last:
            return
        clock = self._trainer._metrics.clock
        after = now - self._ended
        if self._step == self._last - 1:
            self.found.save = clock.save
            after = 0.0
        known = sum(parts[name] for name in ("data", "collectives", "forward", "backward", "scoring", "rollouts", "optimizer"))
        parts["gap"] = max(0.0, parts["step"] - known) + after
        parts["wall"] = parts["step"] + after
        self.found.steps.append(parts)

    def _validating(self, function: Any) -> Any:
        def call(*args: Any) -> dict[str, float]:
            values: dict[str, float] = function(*args)
            assert self.found is not None
            self.found.validation = values["perf/validation_seconds"]
            return values

        return call

    def _reading(self, function: Any) -> Any:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            batch = function(*args)
            data = self.found.data if self.found is not None else {}
            data["reads"] = data.get("reads", 0.0) + 1
            data["read_seconds"] = data.get("read_seconds", 0.0) + time.perf_counter() - began
            vocabulary = int(self._trainer.recipe.model.vocab_size or 0)
            data["read_bytes"] = data.get("read_bytes", 0.0) + batch.tokens.size * token_dtype(vocabulary).itemsize
            return batch

        return call

    def _count(self, batch: Batch) -> None:
        assert self.found is not None
        data = self.found.data
        learned = np.add.reduceat((batch.labels != IGNORE).ravel(), batch.cu_seqlens[:-1], dtype=np.int64)
        at_end = batch.cu_seqlens[1:] % batch.tokens.shape[1] == 0
        padding = int(np.diff(batch.cu_seqlens)[at_end & (learned == 0)].sum())  # a document of its own at the end of a row
        arrays = [batch.tokens, batch.labels, batch.cu_seqlens, batch.weights]
        for name, value in (
            ("tokens", batch.tokens.size), ("padding", padding), ("without_loss", int((batch.labels == IGNORE).sum()) - padding),
            ("documents", len(batch.cu_seqlens) - 1), ("rows", len(batch.tokens)),
        ):  # fmt: skip
            data[name] = data.get(name, 0.0) + value
        data["batch_bytes"] = max(data.get("batch_bytes", 0.0), float(sum(one.nbytes for one in arrays if one is not None)))

    def _read_memory(self) -> None:
        assert self.found is not None
        device = self._trainer.model.device
        self.found.allocator = allocator_statistics(device)
        self.found.memory_peak = self.found.allocator.get("peak_reserved", process_bytes("VmHWM"))

    # The profiler

    def _start_profiler(self) -> None:
        """Start it in the last step, if it has not run yet."""
        if self._step != self._last or self._started:
            return
        self._started = True
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._trainer.model.device.type == "cuda" else [])]
        self._profiler = profile(activities=activities, profile_memory=True)
        self._around.enter_context(_without_stderr())
        self._profiler.__enter__()

    def _stop_profiler(self) -> None:
        if self._profiler is None or self.found is None:
            return
        self._profiler.__exit__(None, None, None)
        self._around.close()
        model, found = self._trainer.model, self.found
        tree = self._profiler.profiler.kineto_results.experimental_event_tree()
        width = torch.empty((), dtype=model.compute_dtype).element_size()
        copies = {p.numel() * width for p in model.parameters()} if width < 4 else set()
        events = allocations(tree, model.device.type)
        gradients = gradient_events(events, list(zip(times_of(tree, READY), self._gradients, strict=True)))
        for kind, size in peak(events, gradients, copies).items():
            found.memory[kind] = found.memory.get(kind, 0.0) + size
        found.exposed = exposed(tree) if model.ranks.distributed else {}
        found.kernels = _kernels(self._profiler, model.device.type)
        found.trace = events_of(self._profiler, found.rank, self._trace_events)
        self._profiler = None

    def _end(self) -> None:
        assert self.found is not None
        found = self.found
        found.memory["batches"] = _AHEAD * found.data.get("batch_bytes", 0.0)
        on_gpu = self._trainer.model.device.type == "cuda"
        found.memory["runtime"] = 0.0 if on_gpu else self._held.before["VmRSS"]
        if on_gpu:
            free, total = torch.cuda.mem_get_info(self._trainer.model.device)
            found.memory["runtime"] = float(total - free - torch.cuda.memory_reserved(self._trainer.model.device))
            found.memory["caching allocator"] = found.allocator.get("peak_reserved", 0.0) - found.allocator.get("peak_allocated", 0.0)


@contextmanager
def _without_stderr() -> Iterator[None]:
    """The profiler's libraries write to stderr that they begin and end, and which memory they do not know."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} of {machine.cores()} threads"


def _kernels(profiler: Any, device: str) -> list[dict[str, float | str]]:
    """The operators (on a GPU the kernels) that took most time of their own, with their share of all."""
    key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    averages = [one for one in profiler.key_averages() if not one.key.startswith(_AROUND)]
    total = sum(getattr(one, key) for one in averages) or 1.0
    ordered = sorted(averages, key=lambda one: -getattr(one, key))[:_KERNELS]
    return [
        {"name": str(one.key)[:120], "seconds": getattr(one, key) / 1e6, "share": getattr(one, key) / total, "calls": float(one.count)}
        for one in ordered
        if getattr(one, key)
    ]
