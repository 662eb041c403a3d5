"""Sinks of metrics that are stores of runs: Trackio and MLflow, each a local store in the run directory, without account and network."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lmworks.errors import UserError
from lmworks.io.files import write_text
from lmworks.ui.terminal import console


def import_package(module: str, setting: str, extra: str) -> ModuleType:
    """A package of an extra. Raises `UserError` that names the extra if it is not installed."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{setting} needs a package that is not installed: pip install 'lmworks[{extra}]'") from None


def _print_warning(*texts: object, **_: Any) -> None:
    """The `print` of Trackio, whose lines would stand among the output of the command: only its warnings are shown, on stderr."""
    if "warning" in (text := " ".join(map(str, texts))):
        console.print(text, style="yellow", markup=False)


_TRACKIO = ("trackio", "trackio.utils", "trackio.sqlite_storage")  # modules that keep the folder as it was when they were imported


class Trackio:
    """One Trackio run per run directory, whose name it has; a resumed run continues it. The database is in `run_dir/trackio`, unless the
    environment names another place. Steps that are run again replace the old ones in a local database; a server keeps both."""

    def __init__(self, run_dir: Path, project: str, resume_step: int) -> None:
        folder = run_dir.absolute() / "trackio"
        self._local = not any(os.environ.get(name) for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))
        trackio = import_package("trackio", "metrics.trackio_project", "trackio")
        for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
            vars(sys.modules[name])["print"] = _print_warning
        if self._local:
            folder.mkdir(parents=True, exist_ok=True)
            for name in _TRACKIO:
                vars(sys.modules[name])["TRACKIO_DIR"] = folder
        self._project, self._name, self._storage = project, run_dir.name, sys.modules["trackio.sqlite_storage"]
        self._finish = trackio.finish  # of the module: a run that is finished by itself is finished again at the end of the process
        self._open = partial(
            trackio.init, project=project, name=run_dir.name, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )
        self._drop_from(resume_step)
        self._run = self._open()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def rewind(self, step: int) -> None:
        """Later values of a step replace the old ones, which are deleted; Trackio itself would show both."""
        if self._local:
            self.close()
            self._drop_from(step)
            self._run = self._open()

    def _drop_from(self, step: int) -> None:
        path = Path(self._storage.SQLiteStorage.get_project_db_path(self._project))
        if self._local and path.exists():
            with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection, connection:
                connection.execute("DELETE FROM metrics WHERE run_name = ? AND step >= ?", (self._name, step))

    def flush(self) -> None:
        """Trackio writes on its own, twice a second."""

    def close(self) -> None:
        self._finish()


_NOT_IN_MLFLOW = re.compile(r"[^\w./ -]")
_MLFLOW_BATCH = 1000  # metrics that MLflow takes at a time


def mlflow_name(name: str) -> str:
    """The name of a metric in MLflow: `validation/docs/loss` becomes `validation/docs.loss`. Its store makes a folder of each part before
    a slash, and a metric may not have the name of such a folder. Characters that it refuses are their code: `c++` is `c_2b__2b_`."""
    group, slash, rest = name.partition("/")
    return _NOT_IN_MLFLOW.sub(lambda found: f"_{ord(found[0]):x}_", group + slash + rest.replace("/", "."))


class MLflow:
    """One MLflow run per run directory; its id is kept in `run_dir/mlflow_id`, so that a resumed run continues it. The store is the folder
    `run_dir/mlflow`, unless MLFLOW_TRACKING_URI names another. MLflow deletes no value: of a step that is run again it keeps both, the
    later one last."""

    def __init__(self, run_dir: Path, experiment: str) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # among the output of the command
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a database would need the packages of a server
            uri = (run_dir.absolute() / "mlflow").as_uri()
        import_package("mlflow", "metrics.mlflow_experiment", "mlflow")
        from mlflow import MlflowClient
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        self._metric, self._error = Metric, MlflowException
        path = run_dir / "mlflow_id"
        with self._explained():
            self._client = MlflowClient(tracking_uri=uri)
            known = path.read_text(encoding="utf-8").strip() if path.exists() else None
            if known is not None:
                with contextlib.suppress(MlflowException):  # deleted in MLflow
                    self._client.get_run(known)
                    self._id = known
            if getattr(self, "_id", None) is None:
                found = self._client.get_experiment_by_name(experiment)
                place = found.experiment_id if found is not None else self._client.create_experiment(experiment)
                self._id = self._client.create_run(place, run_name=run_dir.name).info.run_id
                write_text(path, self._id + "\n")
            self._client.update_run(self._id, status="RUNNING")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What MLflow raises, as the error of a sink that fails."""
        try:
            yield
        except self._error as error:
            raise OSError(" ".join(str(error).split())[:300]) from None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(mlflow_name(name), float(value), now, step) for name, value in values.items()]
        with self._explained():
            for first in range(0, len(metrics), _MLFLOW_BATCH):
                self._client.log_batch(self._id, metrics[first : first + _MLFLOW_BATCH])

    def rewind(self, step: int) -> None:
        """MLflow keeps all values of a step."""

    def flush(self) -> None:
        """Values are written at once."""

    def close(self) -> None:
        with self._explained():
            self._client.set_terminated(self._id)
