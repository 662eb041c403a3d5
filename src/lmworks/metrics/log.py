"""The log of metrics: JSONL always, other sinks on request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmworks import jsonl
from lmworks.files import explain_os_errors
from lmworks.metrics.names import describe
from lmworks.metrics.sinks import Sink, open_sinks
from lmworks.progress import console
from lmworks.recipe.schema.metrics import Metrics

FILE = "metrics.jsonl"


class MetricLog(jsonl.ClosesAtEnd):
    """Lines `{"step": s, "time": seconds since 1970, "train/loss": ...}` in `run_dir/metrics.jsonl`.

    `resume_step` is the first step that will be written: lines of it and of later steps, left by a run that got further than its
    last checkpoint, are cut, so that the curve has each step once. Only what is cut is read. Every line is with the operating
    system when `write` returns (a killed process loses none) and on the disk after `flush`; a line that cannot be written, as on a full
    disk, waits in memory, and `flush` raises if it still cannot. `heartbeats` is the folder of the ranks'
    heartbeats, which the Prometheus sink reads.
    """

    def __init__(self, run_dir: Path, options: Metrics, resume_step: int = 0, heartbeats: Path | None = None) -> None:
        self.path, self._waiting = Path(run_dir) / FILE, jsonl.Waiting()
        with explain_os_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = jsonl.open_append(self.path)
        self.dropped = jsonl.cut_tail(self._fd, lambda record: record["step"] >= resume_step)
        self._sinks: list[Sink] = open_sinks(Path(run_dir), options, resume_step, heartbeats)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step. Names are those of `metrics.names` (`KeyError` otherwise); steps never fall."""
        for name in values:
            describe(name)
        self._waiting.append(self._fd, {"step": step, "time": round(time.time(), 3), **values})
        self._on_sinks(lambda sink: sink.write(step, values))

    def rewind(self, resume_step: int) -> None:
        """Remove the lines of `resume_step` and later steps, which the resumed run writes again."""
        waiting = self._waiting.records
        self._waiting.records = [record for record in waiting if record["step"] < resume_step]
        self.dropped += len(waiting) - len(self._waiting.records)
        self.dropped += jsonl.cut_tail(self._fd, lambda record: record["step"] >= resume_step)
        self._on_sinks(lambda sink: sink.rewind(resume_step))

    def flush(self) -> None:
        """Sync everything written so far to disk; called with each checkpoint. Raises `UserError` or `OSError` if that is not possible."""
        with explain_os_errors(self.path):
            self._waiting.drain(self._fd)
            os.fsync(self._fd)
        self._on_sinks(lambda sink: sink.flush())

    def _on_sinks(self, call: Callable[[Sink], None]) -> None:
        """Call the sinks; one that fails, as on a full disk, gets no more metrics. `metrics.jsonl` has them all."""
        for sink in list(self._sinks):
            try:
                call(sink)
            except OSError as error:
                self._sinks.remove(sink)
                console.print(f"{type(sink).__name__} gets no more metrics until the run is started again: {error}", style="yellow")

    def close(self) -> None:
        """Flush and close."""
        if self._fd < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._fd)
            self._fd = -1
            self._on_sinks(lambda sink: sink.close())


class NoMetrics(MetricLog):
    """Discards all metrics: on ranks other than 0."""

    def __init__(self) -> None:
        self.dropped, self._fd, self._sinks = 0, -1, []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        return

    def rewind(self, resume_step: int) -> None:
        return

    def flush(self) -> None:
        return


def read(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics, oldest first, without an incomplete last line."""
    return jsonl.read(Path(run_dir) / FILE)
