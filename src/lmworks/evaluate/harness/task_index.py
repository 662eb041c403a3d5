"""Finds tasks of lm-evaluation-harness by name: its bundled ones, and those of a folder of the user's own, which is checked first.

A task of lm-evaluation-harness is YAML that may name Python functions (`!function`), which are executed when the task is loaded. The
bundled tasks are code of an installed package. A folder of the user's own is data: without `trusted`, its files may not name code. The
check and lm-evaluation-harness read these files with one and the same loader, which knows no tags and no second meaning of a key.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.tasks import TaskManager, _yaml_loader
from lm_eval.tasks._index import Entry, Kind, TaskIndex

from lmworks.errors import UserError
from lmworks.evaluate.harness import replaced
from lmworks.io.files import read_json, write_json
from lmworks.io.wheels import cache_directory
from lmworks.ui.terminal import console

_BUNDLED = Path(lm_eval.tasks.__file__).parent
_LONGEST = 1 << 24  # bytes of a task file
_READERS = ("arrow", "csv", "json", "parquet", "text")  # of `datasets`: those that only parse; others unpickle or run programs
_CODE = ("custom_dataset", "class", "process_docs", "process_results")
TRUST = "--trust-task-code"


def manager(include_path: Path | None, trusted: bool) -> TaskManager:
    """The tasks by name; those at `include_path` take precedence.

    Raises `UserError` for a folder that does not exist, or that names code without `trusted`.
    """
    if include_path is not None:
        if not include_path.is_dir():
            raise UserError(f"--include-path {include_path} is not a directory; give the folder with the YAML files of the tasks")
        if not trusted:
            _refuse_code(include_path)
    with loaders(trusted):
        found = TaskManager(include_path=None if include_path is None else str(include_path), include_defaults=False)
    for name, entry in _bundled().items():
        found.task_index.setdefault(name, entry)
    return found


def check_names(tasks: TaskManager, names: Iterable[str]) -> None:
    """Raise `UserError` for a name that is no task, group or tag, with the nearest that is."""
    for name in names:
        if name not in tasks.task_index:
            near = difflib.get_close_matches(name, tasks.task_index, 1)
            hint = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` lists those that are installed"
            raise UserError(f"--harness: lm-evaluation-harness has no task {name!r}; {hint}")


def _bundled() -> dict[str, Entry]:
    """The bundled tasks. Reading their 13,000 files takes a minute, so the result is kept for each version in each environment."""
    environment = hashlib.sha256(str(_BUNDLED).encode()).hexdigest()[:8]
    path = cache_directory().parent / "lm-eval" / f"tasks-{version('lm_eval')}-{environment}.json"
    known = read_json(path) if path.is_file() else None
    if not isinstance(known, dict):
        console.print("reading the task files of lm-evaluation-harness (once)", style="dim")
        index = TaskIndex.build([_BUNDLED])
        tasks = {
            name: [entry.kind.name, str(entry.yaml_path.relative_to(_BUNDLED)) if entry.yaml_path else None, sorted(entry.tags)]
            for name, entry in index.items()
        }
        known = {"tasks": tasks}
        write_json(path, known)
    return {
        name: Entry(name, Kind[kind], _BUNDLED / place if place else None, None, set(tags))
        for name, (kind, place, tags) in known["tasks"].items()
    }


class _Loader(yaml.SafeLoader):
    """Plain YAML without tags, and with no key twice, so that nothing can be read as something else."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        tag, mark = getattr(event, "tag", None), event.start_mark
        if tag is not None:
            what = f"names Python code ({getattr(event, 'value', '')})" if tag == "!function" else f"has the tag {tag}, which may be code"
            raise UserError(f"{mark.name}, line {mark.line + 1} {what}; if you trust this folder, allow it to run with {TRUST}")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen or not isinstance(key, yaml.ScalarNode):
                what = f"has the key {key.value!r} twice" if isinstance(key, yaml.ScalarNode) else "has a key that is no text"
                raise UserError(f"{key.start_mark.name}, line {key.start_mark.line + 1} {what}; name each key once")
            seen.add(key.value)
        return node


def loaders(trusted: bool) -> AbstractContextManager[Any]:
    """Let lm-evaluation-harness read task files that are not `trusted` with the loader of the check. It reads its bundled ones as ever."""
    original = _yaml_loader._make_loader

    def make(base_dir: Path, *, resolve_funcs: bool) -> type[Any]:
        bundled = Path(base_dir).resolve().is_relative_to(_BUNDLED.resolve())
        return original(base_dir, resolve_funcs=resolve_funcs) if trusted or bundled else _Loader

    return replaced(_yaml_loader, "_make_loader", make)


def _refuse_code(folder: Path) -> None:
    """Raise `UserError` for a YAML file below `folder`, or one that it includes, that names code or a reader that could run some."""
    pending, seen = sorted(folder.resolve().rglob("*.yaml")), set[Path]()
    while pending:
        path = pending.pop().resolve()
        if path in seen or path.is_relative_to(_BUNDLED):
            continue
        seen.add(path)
        task = _read(path)
        for key, value in _values(task):
            if key in _CODE and isinstance(value, str):
                raise UserError(f"{path}: {key} names Python code ({value}); if you trust this folder, allow it to run with {TRUST}")
            if key == "use_prompt" and not str(value).startswith("qa-basic:"):
                raise UserError(f"{path}: use_prompt reads templates from elsewhere; write the template into doc_to_text")
            if key == "hf_evaluate" and value:
                raise UserError(f"{path}: hf_evaluate runs the code of a metric; use a metric of lm-evaluation-harness itself")
            if key == "dataset_path" and "/" not in str(value) and value not in _READERS:  # at any depth: tasks may stand within groups
                raise UserError(f"{path}: dataset_path {value}: without {TRUST} the readers are {', '.join(_READERS)}")
        given = task.get("include") or []
        pending += [path.parent / str(one) for one in (given if isinstance(given, list) else [given])]


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LONGEST:
            raise UserError(f"{path} is larger than {_LONGEST >> 20} MB; it is no task file")
        with path.open("rb") as file:  # named, and decoded, as lm-evaluation-harness does
            task = yaml.load(file, Loader=_Loader)
    except UserError:
        raise
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as a task: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(task, dict):
        raise UserError(f"{path} is not a task: it must be a mapping with the key `task` or `group`")
    return task


def _values(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a tree with the key that it stands under."""
    pending, seen = [(key, node)], set[int]()
    while pending:
        key, node = pending.pop()
        if isinstance(node, dict | list):
            if id(node) in seen:  # YAML anchors can repeat a node, even inside itself
                continue
            seen.add(id(node))
            pending += [(str(name), value) for name, value in node.items()] if isinstance(node, dict) else [(key, one) for one in node]
        else:
            yield key, node
