"""Monitors of a run: failed saves, slow ranks, data starvation, silent corruption.

- Failed saves: the run continues, retries before the next regular save, and ends after too many failures in a row.
- Slow ranks (stragglers): ranks that take longer for the same work. In a synchronous step all ranks wait for the slowest one, so their step
  times are equal. Each rank's own time is compared instead: the time between two collectives at step boundaries, and a fixed matrix
  multiplication.
- Data starvation: the device waits for batches.
- Silent corruption of arithmetic and of replicated tensors: recomputation, checksums, and a majority vote on which copy is right. The same
  computation, run again, must give the same results. Forward passes must give the same bits everywhere, and so must backward passes on
  CPUs. Kernels of GPUs may add up gradients in another order each time (FlashAttention's backward pass does): then a third run shows
  how far sound runs lie apart, and a corrupt one stands out.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lmworks.errors import UserError


class FailedSaves:
    """Counts failed saves in a row. `retry_at` is the step after which the next retry is due, None after a successful save."""

    def __init__(self, max_failures: int, every: int) -> None:
        self.max_failures, self.every = max_failures, every
        self.in_a_row = 0
        self.retry_at: int | None = None

    def failed(self, step: int, error: UserError) -> int:
        """Record a failed save that was noticed after `step` steps; returns the steps until the next retry. They are halved each time,
        since every step adds to what a crash would lose. Raises the error after the last retry."""
        self.in_a_row += 1
        if self.in_a_row >= self.max_failures:
            raise UserError(f"{error} (it failed {self.in_a_row} times in a row: stability.max_failed_saves)")
        interval = max(1, self.every >> self.in_a_row)
        self.retry_at = step + interval
        return interval

    def succeeded(self) -> None:
        self.in_a_row, self.retry_at = 0, None

    def retry_due(self, step: int) -> bool:
        """Whether a retry is due after `step` steps."""
        return self.retry_at is not None and step >= self.retry_at


_SIZE = 256


_HISTORY, _SHORTEST_HISTORY = 30, 5  # measurements of a rank that its next one is compared with


class SlowRanks:
    """Finds ranks whose own time exceeds median + `threshold` * MAD in `patience` measurements in a row; each once until it recovers.

    Median and MAD are those of all ranks. Of two ranks the slower one may be the normal one, so there they are those of the last
    measurements of each rank in which it was not slow: a rank is slow if it exceeds its own limit and the other one does not.
    """

    def __init__(self, threshold: float, patience: int = 3) -> None:
        self.threshold, self.patience = threshold, patience
        self._streaks: dict[int, int] = {}
        self._history = tuple(deque[float](maxlen=_HISTORY) for _ in range(2))

    def observe(self, seconds: Sequence[float], floor: float) -> list[int]:
        """Record one measurement: the own times of all ranks, and the smallest excess that counts. Returns the ranks to report now."""
        if len(seconds) < 2:
            return []
        slow = self._slower_than_before(seconds, floor) if len(seconds) == 2 else self._exceeding(seconds, seconds, floor)
        self._streaks = {rank: self._streaks.get(rank, 0) + 1 for rank in slow}
        return sorted(rank for rank, streak in self._streaks.items() if streak == self.patience)

    def _exceeding(self, seconds: Sequence[float], usual: Sequence[float], floor: float) -> set[int]:
        middle = median(usual)
        limit = middle + max(self.threshold * median(abs(value - middle) for value in usual), floor)
        return {rank for rank, value in enumerate(seconds) if value > limit}

    def _slower_than_before(self, seconds: Sequence[float], floor: float) -> set[int]:
        known = [len(past) >= _SHORTEST_HISTORY for past in self._history]
        slow = {rank for rank in (0, 1) if known[rank] and self._exceeding([seconds[rank]], self._history[rank], floor)}
        slow = slow if len(slow) == 1 else set()  # both: the step has changed, or the machine that they share
        for rank in {0, 1} - slow:
            self._history[rank].append(seconds[rank])
        return slow


def slowest_rank(arithmetic: Sequence[float], own: Sequence[float], step: float) -> tuple[int, float]:
    """The rank that holds up the others most, and by how much of a step it exceeds the median of all ranks (of two, the other one).

    arithmetic: seconds of each rank for the same computation; a rank that needs twice as long for it needs another step for each. own:
    seconds per step of each rank outside of collectives. step: seconds per step.
    """
    usual = median if len(own) > 2 else min
    burden = [step * (a / max(usual(arithmetic), 1e-9) - 1) + b for a, b in zip(arithmetic, own, strict=True)]
    rank = burden.index(max(burden))
    return rank, (burden[rank] - usual(burden)) / max(step, 1e-9)


def time_matmul(device: torch.device) -> float:
    """Seconds for a fixed computation (16 matrix multiplications of 256 x 256), the minimum of three runs."""
    square = torch.full((_SIZE, _SIZE), 1 / _SIZE, device=device)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        out = square
        for _ in range(16):
            out = out @ square
        out[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - began)
    return best


_WINDOW = 50


class Starvation:
    """Reports when waiting for batches took more than the fraction `share` of the time of the last `window` steps.

    It is reported once, and again only after the fraction has fallen below half of `share`.
    """

    def __init__(self, share: float, window: int = _WINDOW) -> None:
        self.share = share
        self._steps: deque[tuple[float, float]] = deque(maxlen=window)
        self._reported = False
        self.steps = 0

    def observe(self, waited: float, seconds: float) -> float | None:
        """Record the seconds that a step waited for its batch, and those of the whole step. Returns the fraction over the window if it is
        to be reported now. `steps` counts the steps that ended a starved window."""
        self._steps.append((waited, seconds))
        if len(self._steps) < (self._steps.maxlen or 0):
            return None
        found = sum(waited for waited, _ in self._steps) / max(sum(seconds for _, seconds in self._steps), 1e-9)
        starved = found > self.share
        self.steps += starved
        if self._reported or not starved:
            self._reported = self._reported and found > self.share / 2  # hysteresis: a fraction near the limit is not reported repeatedly
            return None
        self._reported = True
        return found


def advice(cached: bool) -> str:
    """What the user can change."""
    if cached:
        return "raise shards.cache.prefetch or shards.cache.max_bytes, or move the shards closer to the machine"
    return "put the shards on a faster disk, or reserve a CPU core for reading"


_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's elements, read as integers, with wrap-around; 0-d int64 on its device. Any single flipped bit changes it.

    It does not depend on the order of the summation.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    whole = flat.view(_VIEWS[flat.element_size()]) if flat.dtype != torch.bool else flat.view(torch.uint8)
    return whole.sum(dtype=torch.int64)


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The checksum of this rank's part of each tensor, by name, with a single device-to-host synchronization."""
    if not tensors:
        return {}
    sums = [checksum(tensor.to_local() if isinstance(tensor, DTensor) else tensor).cpu() for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True))


@dataclass(frozen=True)
class Deviation:
    """A rank whose copy of a tensor differs from that of the other ranks. `certain`: the majority of copies is equal and differs from
    it. In a tie, as between two ranks, every holder is listed and none is certain."""

    rank: int
    tensor: str
    certain: bool


def vote(by_rank: Sequence[Mapping[tuple[str, str], int]]) -> list[Deviation]:
    """Compare the copies. `by_rank` has, for each rank, checksums by (tensor, part); parts that only one rank holds are not compared."""
    copies: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for rank, sums in enumerate(by_rank):
        for key, value in sums.items():
            copies[key].append((rank, value))
    found = []
    for (name, _), held in copies.items():
        counts = Counter(value for _, value in held).most_common()
        if len(counts) == 1:
            continue
        certain = counts[0][1] > counts[1][1]
        found += [Deviation(rank, name, certain) for rank, value in held if not certain or value != counts[0][0]]
    return sorted(found, key=lambda one: (not one.certain, one.rank, one.tensor))


_SEGMENTS = 64  # sums that stand for a gradient
_SPREAD = 10.0
"""The largest distance of three runs over the smallest, above which one of them may be corrupt.

For three sound runs with independent normal differences the ratio was below 1.8 in 100,000 draws; below 6.7 with differences in 8 of the 64
sums alone; with 4, above 10 once in 1,800 draws. So the largest distance must also exceed what rounding can do.
"""


@dataclass(frozen=True)
class Traced:
    """What a run has computed on this rank, by name in order of computation: checksums; and of each gradient its norm, then its sums over
    segments (fp64)."""

    bits: dict[str, int]
    gradients: dict[str, Tensor]


def trace(run: Callable[[], Tensor], modules: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> Traced:
    """Run forward and backward, with the random state of now, which is restored afterwards.

    run: returns the loss. modules: their outputs and the gradients of these are traced; both are local to this rank.
    parameters: their gradients are traced too, and discarded. Gradients that are summed over ranks show an error of any rank on all.
    """
    sums: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}

    def keep(name: str, grad: Tensor) -> None:
        sums[name], gradients[name] = checksum(grad), _norm_and_segments(grad)

    def forward(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = next(tensors_in(output))
            sums[f"output of {name}"] = checksum(tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: keep(f"gradient of {name}", grad))

        return hook

    handles = [module.register_forward_hook(forward(name)) for name, module in modules.items()]
    try:
        with _preserve_random_state():
            sums["loss"] = checksum(run())
    finally:
        for handle in handles:
            handle.remove()
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            keep(f"gradient of {name}", parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad)
        parameter.grad = None
    values = torch.stack([one.cpu() for one in sums.values()]).tolist()
    return Traced(dict(zip(sums, values, strict=True)), {name: one.cpu() for name, one in gradients.items()})


def differing(first: Traced, second: Traced) -> list[str]:
    """The names of what has other bits in the second run."""
    return [name for name in first.bits if first.bits[name] != second.bits.get(name)]


def outlying(runs: Sequence[Traced], eps: float) -> list[str]:
    """The names of gradients that one of three runs computed differently from the other two, beyond what these differ by and what rounding
    to `eps` can change; and of all other results whose bits differ."""
    first, *others = runs
    changed = {name for other in others for name in differing(first, other)}
    found = []
    for name in first.bits:
        if name in changed:
            if name not in first.gradients:
                found.append(name)
                continue
            norm = min(float(run.gradients[name][0]) for run in runs)
            a, b, c = (run.gradients[name][1:] for run in runs)
            apart = torch.stack([(a - b).norm(), (a - c).norm(), (b - c).norm()])
            if not bool(apart.max() <= max(_SPREAD * float(apart.min()), eps * norm)):  # nan is an outlier, too
                found.append(name)
    return found


def _norm_and_segments(grad: Tensor) -> Tensor:
    flat = grad.detach().reshape(-1)
    whole = flat.numel() // _SEGMENTS * _SEGMENTS
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64) if flat.numel() else flat.new_zeros((), dtype=torch.float64)
    return torch.cat((norm[None], flat[:whole].view(_SEGMENTS, -1).sum(1, dtype=torch.float64), flat[whole:].double()))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in the output of a module, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Iterable):
        for one in output:
            yield from tensors_in(one)


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
