"""Reads the YAML file of a task of the user's own."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.recipe.schema.own_task import OwnTask

_LARGEST = 1 << 16  # bytes of the YAML file


def load_task(path: str) -> OwnTask:
    """Read the YAML file. Raises `UserError` that names the file and the key."""
    place = Path(path).expanduser()
    try:
        with open(place, encoding="utf-8") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise UserError(f"{path} is larger than {_LARGEST:,} bytes; a task is a few lines of YAML beside its data file")
        tree = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"the task {path} cannot be read: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(tree, dict):
        raise UserError(f"the task {path} is no map of keys; it needs at least `file`")
    try:
        return OwnTask(**{str(key): value for key, value in tree.items()})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        known = f"; its keys are {', '.join(OwnTask.model_fields)}" if first["type"] == "extra_forbidden" else ""
        raise UserError(f"the task {path}: {key}: {first['msg'].removeprefix('Value error, ')}{known}") from None


def data_path(path: str, name: str) -> str:
    """A path that a task file names, relative to it."""
    return str(Path(path).expanduser().parent / name)


def local_paths(benchmark: Benchmark) -> list[str]:
    """The files, directories and globs on which a benchmark depends. Raises `UserError` for a task file that cannot be read."""
    if benchmark.file is None:
        return [benchmark.path] if benchmark.path is not None else []
    task = load_task(benchmark.file)
    return [benchmark.file, *(data_path(benchmark.file, name) for name in (task.file, task.examples) if name is not None)]
