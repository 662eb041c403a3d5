"""The small files of a run that are stored beside the copies of its checkpoints, so that the run can resume on another machine.

They are one object, `run.gz`. An object in a bucket is replaced atomically, so its files are always consistent with each other.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lmworks.errors import UserError
from lmworks.io import urls
from lmworks.io.run_layout import MODEL_STAGES

BUNDLE = "run.gz"
_TOKENIZER = ("tokenizer", "tokenizer/additional_chat_templates")
_FOLDERS = ("", *_TOKENIZER, *(name for stage in MODEL_STAGES for name in (stage.folder, stage.checkpoints)))
_NAME = re.compile(r"[^./\\\0-\x1f][^/\\\0-\x1f]{0,199}\.(?:json|jsonl|yaml|yml|npy|txt|md|jinja|model)")  # data, and nothing that runs
_NAMED = ("wandb_id",)  # plain text without an ending, by which a resumed run goes on in W&B
_LEFT_OUT = (urls.NAME,)
_LONGEST_LINE = 10_000
_RATIO, _LEAST = 100, 1 << 26  # the files may have so many times the bytes of the bundle (metrics and ledgers: 5 to 20), or 64 MiB

RunFiles = Callable[[], Mapping[str, Path]]


def no_run_files() -> dict[str, Path]:
    """No files: for checkpoints that belong to no run."""
    return {}


def run_files_of(run_dir: Path, checkpoints: Path) -> dict[str, Path]:
    """The files directly in `run_dir` and in the folders down to `checkpoints`, and the tokenizer, by their names below `run_dir`."""
    folders = [checkpoints, *checkpoints.parents][: len(checkpoints.relative_to(run_dir).parts) + 1]
    folders += [run_dir / name for name in _TOKENIZER]
    found = {str(path.relative_to(run_dir)): path for folder in folders for path in _files(folder)}
    return {name: path for name, path in sorted(found.items()) if _belongs(name)}


def _belongs(name: str) -> bool:
    """Whether a bundle may contain a file of this name: data of a run, in one of the folders where a run keeps its small files."""
    folder, _, plain = name.rpartition("/")
    return folder in _FOLDERS and (plain in _NAMED or _NAME.fullmatch(plain) is not None) and plain not in _LEFT_OUT


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
            yield path


@contextmanager
def pack(files: Mapping[str, Path]) -> Iterator[Path]:
    """A temporary file that contains `files`: for each a line of JSON with its name and size, then that many bytes."""
    with tempfile.NamedTemporaryFile(prefix="lmworks-run-") as target:
        with gzip.GzipFile(fileobj=target, mode="wb", compresslevel=3, mtime=0) as packed:
            for name, path in files.items():
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    packed.write(json.dumps({"name": name, "bytes": size}).encode() + b"\n")
                    _copy(file, packed, size)
        target.flush()
        yield Path(target.name)


def unpack(packed: Path, to: Path) -> None:
    """Write the files below `to`, and sync them. Raises `UserError` if the bundle is damaged, or has what no run puts into it."""
    left = max(_LEAST, _RATIO * packed.stat().st_size)
    try:
        with gzip.open(packed, "rb") as stream:
            while line := stream.readline(_LONGEST_LINE):
                entry = json.loads(line)
                name, size = entry["name"], entry["bytes"]
                if not isinstance(name, str) or not _belongs(name) or type(size) is not int or size < 0:
                    raise ValueError("a name or size in it is not one of a run")
                left -= size
                if left < 0:
                    raise ValueError(f"its files have more than {_RATIO} times its size")
                path = to / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "xb") as file:
                    _copy(stream, file, size)
                    file.flush()
                    os.fsync(file.fileno())
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError, zlib.error) as error:
        raise UserError(f"{BUNDLE} of the copy is damaged ({error})") from None


def _copy(source: IO[bytes] | gzip.GzipFile, target: IO[bytes] | gzip.GzipFile, size: int) -> None:
    while size:
        block = source.read(min(size, 1 << 20))
        if not block:
            raise EOFError("it is truncated")
        target.write(block)
        size -= len(block)
