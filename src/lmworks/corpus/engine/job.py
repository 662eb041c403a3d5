"""A job: the corpus of a recipe, cut into parts, with the paths of its files, and the passes over them, each of which consists of tasks.

Any process on any machine can load a job from its file. Markers are small files that record that a task is finished, with a hash of its
inputs, so that a task is run once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from lmworks import __version__
from lmworks.corpus.dedup.near import Sketching
from lmworks.corpus.dedup.signatures import sketching_of
from lmworks.corpus.read import Part
from lmworks.errors import UserError
from lmworks.io import urls
from lmworks.io.files import read_json, sha256_file, write_json, write_text
from lmworks.recipe.changes import as_tree, canonical
from lmworks.recipe.former import translated
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.recipe import Recipe


def digest(value: Any) -> str:
    """Hex SHA-256 of a JSON value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def is_finished(path: Path, inputs: str) -> bool:
    """Whether the marker records that the task was finished with these inputs."""
    try:
        return bool(json.loads(path.read_bytes())["inputs"] == inputs)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def mark_finished(path: Path, inputs: str) -> None:
    """Write the marker. All files of the task are on disk before this."""
    write_text(path, json.dumps({"inputs": inputs}) + "\n")


def file_digest(path: Path) -> str:
    """Hash of a file that an earlier pass writes; empty if it does not exist yet."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ""
    return _file_digest(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _file_digest(path: Path, size: int, changed: int) -> str:
    return sha256_file(path)


_UNUSED_BY_READING = ("license", "optional", "buckets", "bucket_by", "dedup", "fim")  # keys that do not affect reading and the steps


@dataclass(frozen=True)
class Piece:
    """A part of a source with its number: the unit of most tasks."""

    source: Source
    number: int
    part: Part

    @property
    def bytes(self) -> int:
        """Input bytes, for progress."""
        return self.part.size

    def __str__(self) -> str:
        return f"{self.source.name}/{self.number:05d}"


@dataclass(frozen=True)
class Job:
    """A corpus job: `recipe` is in the folder `folder`, the corpus in `out`, its unfinished files in `out`/staging.

    `parts` are those of each available source; `code` are hashes of the files that steps name; `evaluation` is the hash of the evaluation
    texts.
    """

    recipe: Recipe
    folder: Path
    out: Path
    parts: Mapping[str, Sequence[Part]]
    code: Mapping[str, str]
    evaluation: str

    @property
    def staging(self) -> Path:
        return self.out / "staging"

    @cached_property
    def sources(self) -> list[Source]:
        """The available sources, in the order of the recipe."""
        return [source for source in self.recipe.corpus.sources if source.name in self.parts]

    @cached_property
    def pieces(self) -> list[Piece]:
        """All parts of all sources, in order."""
        return [Piece(source, number, part) for source in self.sources for number, part in enumerate(self.parts[source.name])]

    def of(self, source: Source) -> list[Piece]:
        """The parts of one source."""
        return [piece for piece in self.pieces if piece.source.name == source.name]

    @cached_property
    def sketching(self) -> Sketching | None:
        """How documents are sketched to find near-duplicates."""
        return sketching_of(self.recipe.corpus.dedup, self.recipe.corpus.sources)

    def path(self, pass_name: str, task: object, ending: str) -> Path:
        """A file of a task: staging/PASS/TASK.ENDING."""
        return self.staging / pass_name / f"{task}{ending}"

    @cached_property
    def _reading(self) -> dict[str, Any]:
        corpus = self.recipe.corpus
        return {
            "version": __version__,
            "seed": self.recipe.seed,
            "steps": [as_tree(node) for node in corpus.steps],
            "code": dict(self.code),
            "max_document_bytes": int(corpus.max_document_bytes),
            "sketching": asdict(self.sketching) if self.sketching else None,
            "embedding": [semantic.model, semantic.dimensions] if (semantic := corpus.dedup.semantic) else None,
        }

    @cached_property
    def _source_digests(self) -> dict[str, str]:
        trees = {source.name: as_tree(source) for source in self.sources}
        return {name: digest({key: tree[key] for key in tree if key not in _UNUSED_BY_READING}) for name, tree in trees.items()}

    @cached_property
    def _reading_digest(self) -> str:
        return digest(self._reading)

    def reading_of(self, piece: Piece) -> str:
        """Hash of all inputs of reading this part, except for the draw of `max_bytes`."""
        return digest([self._reading_digest, self._source_digests[piece.source.name], piece.number, piece.part.as_json()])

    def save(self) -> None:
        """Write staging/job.json, from which `load` restores the job elsewhere."""
        parts = {name: [part.as_json() for part in found] for name, found in self.parts.items()}
        value = {
            "recipe": as_tree(self.recipe),
            "folder": str(self.folder.resolve()),
            "directory": os.getcwd(),
            "parts": parts,
            "code": dict(self.code),
            "evaluation": self.evaluation,
        }
        urls.save(self.staging, value)
        write_json(self.staging / "job.json", value)

    @classmethod
    def load(cls, out: Path) -> Job:
        """The job saved in the corpus directory `out`. Changes to the directory in which it was created, since its paths are relative to
        that.
        """
        value = read_json(out / "staging" / "job.json")
        urls.load(out / "staging")
        out = out.resolve()
        os.chdir(value["directory"])
        parts = {name: [Part.from_json(part) for part in found] for name, found in value["parts"].items()}
        recipe = Recipe.model_validate(translated(value["recipe"]))
        return cls(recipe, Path(value["folder"]), out, parts, value["code"], value["evaluation"])


def hash_referenced_files(recipe: Recipe, folder: Path) -> dict[str, str]:
    """Hash of each file, and of the contents of each folder, that a step or an embedding names: if one changes, the step has changed."""
    found = {}
    for node in (*recipe.corpus.steps, *filter(None, [recipe.corpus.dedup.semantic])):
        for value in _strings({key: value for key, value in as_tree(node).items() if key not in getattr(node, "growing", ())}):
            path = folder / value
            try:
                if path.is_file():
                    found[value] = sha256_file(path)
                elif "/" in value and path.is_dir():
                    names = sorted(str(one.relative_to(path)) for one in path.rglob("*") if one.is_file())
                    found[value] = digest([[name, sha256_file(path / name)] for name in names])
            except (OSError, ValueError):  # the value is not a path
                continue
    return found


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) and value else []


Advance = Callable[[int, int], None]
"""Called with the numbers of input bytes and documents processed since the last call."""


@dataclass(frozen=True)
class Pass:
    """A pass of the job. A map has a task for each of `tasks`; a reduction has a single task that reads the results of all parts.

    `inputs` is a JSON value that determines what the task writes. `work` writes it, each file atomically.
    """

    name: str
    label: str
    tasks: Callable[[Job], Sequence[Any]]
    inputs: Callable[[Job, Any], Any]
    work: Callable[[Job, Any, Advance], None]

    def marker(self, job: Job, task: object) -> Path:
        return job.path(self.name, task, ".json")

    def is_done(self, job: Job, task: object) -> bool:
        """Whether the task was finished with its current inputs."""
        return is_finished(self.marker(job, task), self.inputs_digest(job, task))

    def inputs_digest(self, job: Job, task: object) -> str:
        return digest([self.name, self.inputs(job, task)])

    def run(self, job: Job, task: object, advance: Advance) -> None:
        """Run the task, unless it is finished."""
        inputs = self.inputs_digest(job, task)
        marker = self.marker(job, task)
        if not is_finished(marker, inputs):
            marker.unlink(missing_ok=True)  # it describes files that will be replaced
            self.work(job, task, advance)
            mark_finished(marker, inputs)

    def describe(self, task: object) -> str:
        """The pass and the task, for messages."""
        return f"{self.label} {task.source.name} part {task.number}" if isinstance(task, Piece) else f"{self.label} {task or ''}".rstrip()


def reduction(job: Job) -> Sequence[str]:
    """The tasks of a pass with a single task."""
    return ("all",)


def pieces(job: Job) -> Sequence[Piece]:
    """The tasks of a pass with one task per part."""
    return job.pieces


def only_if(condition: Callable[[Job], object], tasks: Callable[[Job], Sequence[Any]]) -> Callable[[Job], Sequence[Any]]:
    """The tasks of a pass if `condition` holds for the job; otherwise none."""
    return lambda job: tasks(job) if condition(job) else ()


def task_bytes(task: object) -> int:
    """Input bytes of a task, for progress."""
    return task.bytes if isinstance(task, Piece) else 0


def pass_named(passes: Sequence[Pass], name: str) -> Pass:
    """The pass of this name."""
    for pass_ in passes:
        if pass_.name == name:
            return pass_
    raise UserError(f"a corpus job has no pass {name!r}; it has: {', '.join(pass_.name for pass_ in passes)}")
