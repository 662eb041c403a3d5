"""Faults that no recipe can ask for, planted in the process of a run: bad rows, another order, an operator that explodes, a flipped bit,
slow storage, a full disk, a signal. Each function changes the modules of its own process, which makes one run and ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmworks.shards.batch import Batch
from lmworks.shards.batches import Batches
from lmworks.shards.order import LocatedSequences, Order

now = {"step": 0}  # the step that the trainer computes


def before_each_step(act: Callable[[int, Any], None], options: Callable[[int, dict[str, Any]], dict[str, Any]] | None = None) -> None:
    """Call `act(step, model)` whenever the trainer begins a step; `options` may change what the step is told."""
    from lmworks.train import trainer

    honest = trainer.train_step

    def observed(model: Any, optimizer: Any, batch: Batch, **given: Any) -> Any:
        now["step"] = batch.step
        act(batch.step, model)
        return honest(model, optimizer, batch, **(options(batch.step, given) if options else given))

    trainer.train_step = observed


def change_rows(change: Callable[[Batches, Batch], Batch]) -> None:
    """Train on `change(batch)` instead of the batch of each step."""
    honest = Batches.batch

    def changed(self: Batches, step: int, start: int = 0, stop: int | None = None) -> Batch:
        return change(self, honest(self, step, start, stop))

    Batches.batch = changed  # type: ignore[method-assign]


def bad_rows(first: int, steps: int, share: float) -> None:
    """Random tokens in a share of the rows of some steps, the same whenever a step is read."""

    def change(batches: Batches, batch: Batch) -> Batch:
        if not first <= batch.step < first + steps:
            return batch
        draw = np.random.default_rng(batch.step)
        tokens, labels = batch.tokens.copy(), batch.labels.copy()
        rows = max(1, round(share * len(tokens)))
        found = draw.integers(70, batches.manifest.vocab_size, (rows, tokens.shape[1] + 1), dtype=np.int32)
        tokens[:rows], labels[:rows] = found[:, :-1], found[:, 1:]
        return replace(batch, tokens=tokens, labels=labels)

    change_rows(change)


def mixed_tokens(share: float) -> None:
    """The tokens of a share of the rows in another order, as if they were read with the wrong tokenizer or at the wrong byte."""

    def change(batches: Batches, batch: Batch) -> Batch:
        tokens, labels = batch.tokens.copy(), batch.labels.copy()
        for row in range(round(share * len(tokens))):
            order = np.random.default_rng([batch.step, row]).permutation(tokens.shape[1])
            tokens[row] = tokens[row][order]
            labels[row, :-1], labels[row, -1] = tokens[row, 1:], tokens[row, 0]
        return replace(batch, tokens=tokens, labels=labels)

    change_rows(change)


def sorted_order(block: float) -> None:
    """Within blocks of this share of a phase, sequences in the order of their source and place instead of a random one."""
    honest, orders = Order.locate, {}

    def locate(self: Order, phase: int, g: np.ndarray) -> LocatedSequences:
        if phase not in orders:
            count = self.timeline.phases[phase].sequences
            every = honest(self, phase, np.arange(count))
            size = max(1, round(block * count))
            orders[phase] = np.lexsort((every.start, every.source, np.arange(count) // size))
        return honest(self, phase, orders[phase][g])

    Order.locate = locate  # type: ignore[method-assign]


def rows_again(offset: int) -> None:
    """Every step reads the rows of the step so many before it: a loader that began anew."""
    honest = Batches.batch

    def again(self: Batches, step: int, start: int = 0, stop: int | None = None) -> Batch:
        return replace(honest(self, step - offset if step >= offset else step, start, stop), step=step)

    Batches.batch = again  # type: ignore[method-assign]


def slow_data(factor: float, share: float = 1.0) -> None:
    """Reading a batch takes `factor` times as long as the rest of a step, in a share of the steps."""
    from lmworks.train import trainer

    honest, began, own = trainer.Trainer._train_step, [0.0], [0.02]

    def timed(self: Any, *given: Any) -> Any:
        began[0] = time.monotonic()
        return honest(self, *given)

    observe = trainer.Trainer._observe

    def observed(self: Any, *given: Any) -> Any:
        found = observe(self, *given)
        own[0] += 0.3 * (time.monotonic() - began[0] - own[0])
        return found

    trainer.Trainer._train_step, trainer.Trainer._observe = timed, observed  # type: ignore[method-assign, assignment]

    def change(batches: Batches, batch: Batch) -> Batch:
        if (batch.step * 0.6180339887) % 1 < share:
            time.sleep(factor * own[0])
        return batch

    change_rows(change)


def exploding(factor: float, first: int, every: int = 1) -> None:
    """The output of the feed-forward block of the last layer times `factor`, from a step on."""
    from lmworks.model.layers import SwiGLU

    honest, last = SwiGLU.forward, []

    def forward(self: SwiGLU, x: torch.Tensor) -> torch.Tensor:
        if self not in last:
            last.append(self)
        out = honest(self, x)
        return out * factor if now["step"] >= first and now["step"] % every == 0 and self is last[-1] else out

    SwiGLU.forward = forward  # type: ignore[method-assign]
    before_each_step(lambda step, model: None)


def flipped_bit(first: int, bit: int, every: int = 10**9) -> None:
    """A bit of an element of the hidden state flips in some forward passes, at one place of the machine: the same pass differs twice."""
    from lmworks.model.layers import SwiGLU

    honest, calls = SwiGLU.forward, [0]

    def forward(self: SwiGLU, x: torch.Tensor) -> torch.Tensor:
        out = honest(self, x)
        calls[0] += 1
        if now["step"] >= first and calls[0] % every == 0:
            mask = torch.zeros_like(out, dtype=torch.int32)
            mask.view(-1)[17] = 1 << bit
            return out + ((out.detach().view(torch.int32) ^ mask).view(torch.float32) - out.detach())
        return out

    SwiGLU.forward = forward  # type: ignore[method-assign]
    before_each_step(lambda step, model: None)


def one_large_step(at: int, factor: float) -> None:
    """One step at a rate of `factor` times the planned one: a spike from which the run recovers."""

    def options(step: int, given: dict[str, Any]) -> dict[str, Any]:
        return given | {"lr_factor": given["lr_factor"] * factor} if step == at else given

    before_each_step(lambda step, model: None, options)


def slow_start(seconds: float) -> None:
    """The first step takes so much longer, as where kernels are compiled."""
    before_each_step(lambda step, model: time.sleep(seconds) if step == 0 else None)


def slow_steps(seconds: float, first: int = 0) -> None:
    """The arithmetic of every step takes so much longer."""
    before_each_step(lambda step, model: time.sleep(seconds) if step >= first else None)


def signal_at(step: int, number: int) -> None:
    """This process gets a signal when a step begins."""
    before_each_step(lambda at, model: os.kill(os.getpid(), number) if at == step else None)


def interrupted_at(step: int) -> None:
    signal_at(step, signal.SIGINT)


def slow_saves(seconds: float) -> None:
    """Writing a checkpoint takes so much longer."""
    from lmworks.checkpoint import save

    honest = save._finish

    def slow(aside: Path, final: Path, metadata: dict[str, bytes]) -> None:
        time.sleep(seconds)
        honest(aside, final, metadata)

    save._finish = slow


def full_disk(after: int) -> None:
    """No space is left for checkpoints after so many saves."""
    from lmworks.checkpoint import save

    honest, saves = save.create_directory, [0]

    def create(aside: Path, needed: int, inside: Path) -> None:
        saves[0] += 1
        if saves[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(aside))
        honest(aside, needed, inside)

    save.create_directory = create


def load_beside(processes: int) -> None:
    """Other programs on the same cores; they end with this process."""
    spin = "import os,time\nparent=os.getppid()\nwhile os.getppid()==parent:\n t=time.time()\n while time.time()-t<0.2: pass"
    for _ in range(processes):
        subprocess.Popen([sys.executable, "-S", "-c", spin], stdin=subprocess.DEVNULL)


def memory_grows(bytes_per_step: int) -> None:
    """The process keeps so many more bytes with every step."""
    kept: list[bytearray] = []
    before_each_step(lambda step, model: kept.append(bytearray(os.urandom(1)) * bytes_per_step))


def scaled_loss(every: int, factor: float) -> None:
    """The gradients of some steps are so many times larger, as rows of another kind give them, and the update is as large as they ask."""
    from lmworks.train import step as steps

    honest = steps.accumulate_gradients

    def scaled(model: Any, *arguments: Any, **given: Any) -> Any:
        found = honest(model, *arguments, **given)
        if now["step"] % every == every - 1:
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], factor)
        return found

    steps.accumulate_gradients = scaled
    before_each_step(lambda step, model: None)


def rich_experts() -> None:
    """The selection bias of the experts moves the wrong way, as where a sign is lost: who has much gets more."""
    from lmworks.model import balance

    honest = balance.load_error
    balance.load_error = lambda counts: -honest(counts)  # type: ignore[assignment]


def quota(share: float) -> None:
    """This process gets so much of a core, by the quota of a control group of its own where the system allows one, else by pauses."""
    folder = Path(f"/sys/fs/cgroup/cpu/lmworks-doctor-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "cpu.cfs_period_us").write_text("20000")
        (folder / "cpu.cfs_quota_us").write_text(str(int(20000 * share)))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        raise SystemExit("S2 and N6 need a control group of their own: run as root with cgroups that can be written") from None


def memory_limit(limit: int) -> None:
    """This process and those that it starts are a control group that may have so many bytes; the kernel kills the largest one beyond."""
    folder = Path(f"/sys/fs/cgroup/memory/lmworks-doctor-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        raise SystemExit("S3-oom needs a control group of its own: run as root with cgroups that can be written") from None
