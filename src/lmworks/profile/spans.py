"""Times of the parts of a step, taken around the calls of the trainer's own model and optimizer: by the clock of the host on a CPU, by
events of the stream on a GPU, so that no step waits for them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import record_function

from lmworks.train.trainer import Trainer

PREFIX = "lmworks: "  # of the names of parts in a trace
FORWARD, WHOLE, OPTIMIZER, SCORING = "forward", "forward and backward", "optimizer", "scoring"


class Spans:
    """Times between marks, by name of the part."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._open: list[tuple[str, Any, Any]] = []
        self._scoring = False

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """The time of the block counts as `name`; the forward passes of scoring count as scoring."""
        if self._scoring:
            yield
            return
        began, self._scoring = self._mark(), name == SCORING
        with record_function(PREFIX + name):
            try:
                yield
            finally:
                self._scoring = False
                self._open.append((name, began, self._mark()))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls count as `name`."""

        def call(*args: Any, **options: Any) -> Any:
            with self.span(name):
                return function(*args, **options)

        return call

    def collect(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        found: dict[str, float] = defaultdict(float)
        for name, began, ended in self._open:
            if self._cuda:
                ended.synchronize()
                found[name] += began.elapsed_time(ended) / 1e3
            else:
                found[name] += ended - began
        self._open.clear()
        return dict(found)


@contextmanager
def replaced(owner: Any, **members: Any) -> Iterator[None]:
    """Within the block an object has these members in place of its own."""
    missing = object()
    before = {name: vars(owner).get(name, missing) for name in members}
    for name, member in members.items():
        object.__setattr__(owner, name, member)
    try:
        yield
    finally:
        for name, member in before.items():
            if member is missing:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, member)


def parts_of(trainer: Trainer) -> list[tuple[Any, str, str]]:
    """What is timed: owner, name of the method, name of the part. The forward pass of a pipeline is that of its stages."""
    model, optimizer = trainer.model, trainer.optimizer
    found: list[tuple[Any, str, str]] = [
        (model, "clip_gradients", OPTIMIZER),
        (optimizer, "step", OPTIMIZER),
        (model, "update_biases", OPTIMIZER),
    ]
    if trainer.objective is not None:
        found.append((model, "token_cross_entropy_on_device", SCORING))
    if model.pipeline is not None:
        return [*found, (model.pipeline, "forward_stage", FORWARD)]
    return found + [(part, "loss", FORWARD) for part in model.parts]
