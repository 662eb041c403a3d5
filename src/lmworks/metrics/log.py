"""The log of metrics: JSONL always, and on request other sinks: TensorBoard, Weights & Biases, Trackio, MLflow, Prometheus."""

from __future__ import annotations

import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lmworks.errors import UserError, all_refusals
from lmworks.host import machine
from lmworks.io import jsonl
from lmworks.io.files import explain_os_errors, write_text
from lmworks.metrics.names import ELAPSED, describe
from lmworks.metrics.trackers import MLflow, Trackio, import_package
from lmworks.recipe.schema.artifacts import Metrics
from lmworks.ui.terminal import console
from lmworks.watch.heartbeat import Beat, read_beats, shared_interval


class Sink(Protocol):
    """A destination for metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def open_sinks(run_dir: Path, options: Metrics, resume_step: int, heartbeats: Path | None = None) -> list[Sink]:
    """The sinks that the recipe asks for; `UserError` names the extra that one of them needs. `heartbeats`: their folder."""
    for setting, (module, extra) in _PACKAGES.items():
        if getattr(options, setting):
            import_package(module, f"metrics.{setting}", extra)
    sinks: list[Sink] = []
    if options.tensorboard:
        sinks.append(TensorBoard(run_dir, resume_step))
    if options.wandb_project:
        sinks.append(InBackground("W&B", partial(WeightsAndBiases, run_dir, options.wandb_project)))
    if options.trackio_project:
        sinks.append(InBackground("Trackio", partial(Trackio, run_dir, options.trackio_project, resume_step)))
    if options.mlflow_experiment:
        sinks.append(InBackground("MLflow", partial(MLflow, run_dir, options.mlflow_experiment)))
    if options.prometheus_port:
        sinks.append(Prometheus(options.prometheus_port, run_dir, heartbeats))
    return sinks


def refusals(options: Metrics) -> Iterator[UserError]:
    """The packages that sinks need and that are not installed, and the port of Prometheus if it is taken."""
    import socket

    yield from all_refusals(
        partial(import_package, module, f"metrics.{setting}", extra)
        for setting, (module, extra) in _PACKAGES.items()
        if getattr(options, setting)
    )
    if options.prometheus_port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", options.prometheus_port))
            except OSError as error:
                yield _taken(options.prometheus_port, error)


_PACKAGES = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard"), "wandb_project": ("wandb", "wandb"),
    "trackio_project": ("trackio", "trackio"), "mlflow_experiment": ("mlflow", "mlflow"),
    "prometheus_port": ("prometheus_client", "prometheus"),
}  # fmt: skip


def _taken(port: int, error: OSError) -> UserError:
    return UserError(f"metrics.prometheus_port: cannot listen on port {port} ({error.strerror}); choose another")


_MOST_WAITING = 10_000
_LONGEST_END = 60.0


class InBackground:
    """A sink that may wait for a server: a thread of its own opens it and makes the calls, in their order, so that training never waits.

    What the thread has raised is raised by the next call, and so is an `OSError` when too many calls wait for a sink that hangs. `close`
    waits for what is left, but no longer than a minute.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self.name, self._open_sink = name, open_sink
        self._calls = queue.Queue[Callable[[Sink], None] | None](_MOST_WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"metrics to {name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            sink = self._open_sink()
            while (call := self._calls.get()) is not None:
                call(sink)
            sink.close()
        except Exception as error:
            self._error = error

    def _add(self, call: Callable[[Sink], None] | None) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise OSError(f"it does not answer, and {_MOST_WAITING:,} steps wait for it") from None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        kept = dict(values)
        self._add(lambda sink: sink.write(step, kept))

    def rewind(self, step: int) -> None:
        self._add(lambda sink: sink.rewind(step))

    def flush(self) -> None:
        self._add(lambda sink: sink.flush())

    def close(self) -> None:
        self._add(None)
        self._thread.join(_LONGEST_END)
        if self._thread.is_alive():
            raise OSError(f"it did not take the last metrics within {_LONGEST_END:.0f} s")
        if self._error is not None:
            raise self._error


class TensorBoard:
    """Event files in `run_dir/tensorboard`; steps that are run again replace the old ones."""

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        tensorboard = import_package("torch.utils.tensorboard", "metrics.tensorboard", "tensorboard")
        self._open = lambda step: tensorboard.SummaryWriter(str(run_dir / "tensorboard"), purge_step=step or None, flush_secs=1)
        self._writer = self._open(resume_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per run directory; its id is kept in `run_dir/wandb_id`, so that a resumed run continues it."""

    def __init__(self, run_dir: Path, project: str) -> None:
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{_LONGEST_END:.0f}")  # otherwise it waits for a network without end
        wandb = import_package("wandb", "metrics.wandb_project", "wandb")
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):  # at a terminal it would ask, and wait for the answer
            raise OSError("there is no API key: run wandb login, or set WANDB_MODE=offline")
        path = run_dir / "wandb_id"
        known = path.read_text(encoding="utf-8").strip() if path.exists() else None
        self._run: Any = wandb.init(project=project, name=run_dir.name, dir=str(run_dir), id=known, resume="allow")
        # W&B refuses to write a step twice; with a step of our own the later value is the one that is shown.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        write_text(path, self._run.id + "\n")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def rewind(self, step: int) -> None:
        """Later values of a step replace the old ones."""

    def flush(self) -> None:
        """W&B sends on its own."""

    def close(self) -> None:
        self._run.finish()


def prometheus_name(name: str) -> str:
    """The name of a metric in Prometheus: `train/loss` becomes `lmworks_train_loss`."""
    return "lmworks_" + re.sub(r"[^a-zA-Z0-9]", "_", name)


class Prometheus:
    """The newest value of each metric at http://127.0.0.1:PORT/metrics, as `lmworks_train_loss` and so on; and what is measured when
    somebody asks, so that it is right while training stands still: free disk space of the run directory, and for how long each rank has
    given no sign of life."""

    def __init__(self, port: int, run_dir: Path, heartbeats: Path | None = None) -> None:
        client = import_package("prometheus_client", "metrics.prometheus_port", "prometheus")
        family = import_package("prometheus_client.core", "metrics.prometheus_port", "prometheus").GaugeMetricFamily
        registry, self._newest = client.CollectorRegistry(), _Newest(family)
        registry.register(self._newest)
        registry.register(_Live(family, run_dir, heartbeats))
        try:
            self._server, self._thread = client.start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise _taken(port, error) from None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._newest.set({"step": step, **values})

    def rewind(self, step: int) -> None:
        """Only the newest values are shown."""

    def flush(self) -> None:
        """Does nothing: values are visible as soon as they are set."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Newest:
    """The newest values: a collector of prometheus_client. Metrics that have one name there, as those of the sources `web-high` and
    `web_high`, or of two domains without Latin letters, are told apart by the label `metric`, which has our name."""

    def __init__(self, family: Any) -> None:
        self._family, self._lock, self._values = family, threading.Lock(), dict[str, dict[str, float]]()

    def set(self, values: Mapping[str, float]) -> None:
        with self._lock:
            for name, value in values.items():
                self._values.setdefault(prometheus_name(name), {})[name] = value

    def collect(self) -> Iterator[Any]:
        with self._lock:
            found = {shown: dict(values) for shown, values in self._values.items()}
        for shown, values in found.items():
            family = self._family(shown, _help(next(iter(values))), labels=["metric"] if len(values) > 1 else [])
            for name, value in values.items():
                family.add_metric([name] if len(values) > 1 else [], float(value))
            yield family


def _help(name: str) -> str:
    if name == "step":
        return "the step of the other values"
    metric = describe(name)
    return metric.meaning + (f" [{metric.unit}]" if metric.unit else "")


class _Live:
    """Values that are measured at every scrape: a collector of prometheus_client. The heartbeats, a file of each rank on a shared file
    system, are read no more often than ranks write them, however many ask."""

    def __init__(self, family: Any, run_dir: Path, heartbeats: Path | None) -> None:
        self._family, self._run_dir, self._heartbeats = family, run_dir, heartbeats
        self._lock, self._beats, self._read_again = threading.Lock(), list[Beat](), 0.0

    def collect(self) -> Iterator[Any]:
        gauge = self._family
        yield gauge("lmworks_disk_free_bytes", "free space of the run directory's file system", machine.free_disk(self._run_dir))
        silent = gauge("lmworks_rank_silent_seconds", "time since a rank last showed that its process is alive", labels=["rank", "host"])
        beats = self._known() if self._heartbeats is not None else []
        for beat in beats:
            if beat.state != "left":
                silent.add_metric([str(beat.rank), beat.host], max(0.0, time.time() - beat.seen))
        if not beats:  # the only rank is this process, which answers
            silent.add_metric(["0", socket.gethostname()], 0.0)
        yield silent

    def _known(self) -> list[Beat]:
        with self._lock:
            if time.monotonic() >= self._read_again:
                assert self._heartbeats is not None
                self._beats = read_beats(self._heartbeats)
                self._read_again = time.monotonic() + shared_interval(len(self._beats))
            return self._beats


FILE = "metrics.jsonl"


class MetricLog(jsonl.ClosesAtEnd):
    """Lines `{"step": s, "time": seconds since 1970, "perf/elapsed_seconds": ..., "train/loss": ...}` in `run_dir/metrics.jsonl`.

    The elapsed seconds begin at 0 in each process; all durations are their differences, since the clock of `time` may be set.

    `resume_step` is the first step that will be written: lines of it and of later steps, left by a run that got further than its
    last checkpoint, are cut, so that the curve has each step once. Only what is cut is read. Every line is with the operating
    system when `write` returns (a killed process loses none) and on the disk after `flush`; a line that cannot be written, as on a full
    disk, waits in memory, and `flush` raises if it still cannot. `heartbeats` is the folder of the ranks'
    heartbeats, which the Prometheus sink reads.
    """

    def __init__(self, run_dir: Path, options: Metrics, resume_step: int = 0, heartbeats: Path | None = None) -> None:
        self.path, self._waiting, self._began = Path(run_dir) / FILE, jsonl.Waiting(), time.monotonic()
        with explain_os_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = jsonl.open_append(self.path)
        self.dropped = jsonl.cut_tail(self._fd, lambda record: record["step"] >= resume_step)
        self._sinks: list[Sink] = open_sinks(Path(run_dir), options, resume_step, heartbeats)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step. Names are those of `metrics.names` (`KeyError` otherwise); steps never fall."""
        for name in values:
            describe(name)
        elapsed = round(time.monotonic() - self._began, 3)
        self._waiting.append(self._fd, {"step": step, "time": round(time.time(), 3), ELAPSED: elapsed, **values})
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
        """Call the sinks; one that fails, as on a full disk, gets no more metrics: whatever it raises, training goes on, and
        `metrics.jsonl` has them all."""
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._sinks.remove(sink)
                why = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                name = sink.name if isinstance(sink, InBackground) else type(sink).__name__
                text = f"{name} gets no more metrics until the run is started again: {why}"
                console.print(text, style="yellow", markup=False)

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
