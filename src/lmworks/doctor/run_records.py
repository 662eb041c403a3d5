"""The records of a run, as the run page shows them; `read_run` reads them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmworks.doctor.series import Series
from lmworks.recipe.schema.recipe import Recipe

Json = dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step of a training stage."""

    kind: str
    step: int
    text: str


@dataclass(frozen=True)
class Start:
    """A start or resume of training at `time`, on `ranks` ranks, each with a GPU or, if `cores` is above 0, that many CPU cores."""

    time: float
    ranks: int = 1
    cores: int = 0


@dataclass
class Training:
    """The records of a training stage (pretraining or tuning)."""

    series: dict[str, Series] = field(default_factory=dict)
    samples: dict[str, list[Json]] = field(default_factory=dict)  # prompt -> lines, oldest first
    marks: list[Mark] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    starts: list[Start] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)
    planned_steps: int = 0
    planned_tokens: int = 0
    seconds: float = 0.0  # of training, without pauses between processes
    elapsed: Series = field(default_factory=Series)  # these seconds, by step
    device_seconds: float = 0.0  # summed over ranks
    core_seconds: float = 0.0  # summed over CPU cores; 0 on GPUs
    prediction: Json = field(default_factory=dict)  # the newest, from before the first step
    tokens_per_second: float = 0.0  # recent wall-clock speed, including saves and validation
    done: bool = False

    def measured(self) -> dict[str, float]:
        """What a prediction is compared with, as far as it is known: the time only of finished training."""
        speed, memory = self.series.get("perf/tokens_per_second"), self.series.get("perf/memory")
        found = {"perf/tokens_per_second": speed and speed.median(), "perf/memory": memory and memory.high[1]}
        return {name: value for name, value in found.items() if value} | ({"seconds": self.seconds} if self.done else {})

    def last(self, name: str) -> float | None:
        return self.series[name].last[1] if name in self.series else None

    @property
    def step(self) -> int:
        return int(max((series.last[0] for series in self.series.values()), default=0))


@dataclass
class Run:
    """A run in its current state. Missing parts are empty."""

    directory: Path
    name: str
    recipe: Recipe | None
    tree: Json
    training: dict[str, Training]  # pretrain, tune
    events: list[Json]
    events_omitted: int
    corpus: Json
    tokenizer: Json
    results: Json
    parity: Json
    stages: list[Json]  # name, state (done | stale: of an earlier model | begun | open), seconds
    state: str
    reason: str

    @property
    def pretrain(self) -> Training:
        return self.training["pretrain"]

    def stale(self, stage: str) -> bool:
        """Whether the stage was done with an earlier model."""
        return any(one["name"] == stage and one["state"] == "stale" for one in self.stages)
