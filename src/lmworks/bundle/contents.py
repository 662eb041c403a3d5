"""Which files of a run a bundle has, and in what form: an allowlist of names. Everything else stays where it is.

Never in it: texts of the corpus, conversations, samples, prompts, bad batches, token files, weights, the tokenizer, the recipe as written
(its comments are text), `sources.json` (names of the user's documents), credentials of URLs, memory snapshots.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmworks.bundle.log_lines import redact_log
from lmworks.bundle.redact import Redactor
from lmworks.io.files import read_at_most
from lmworks.io.jsonl import line as json_line
from lmworks.io.run_layout import MODEL_STAGES
from lmworks.watch import flight_recorder
from lmworks.watch.ledger import LEDGER
from lmworks.watch.probes import KEPT
from lmworks.watch.run_files import PREFLIGHT, RunFiles, read_document, read_lines

LOG_LINES = 1000
_LONGEST_LOG_LINE = 4000
_LARGEST_RECORD = 1 << 26  # bytes of a flight recorder's file
_MOST_LISTED = 5000
_STAGES = "|".join(re.escape(stage.folder) for stage in MODEL_STAGES if stage.folder)
_MANIFEST = re.compile(rf"(?:(?:{_STAGES})/)?checkpoints/[^/]+/manifest\.json")
_OF_CHECKPOINT = re.compile(rf"(?:(?:{_STAGES})/)?checkpoints/")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Content:
    """Files by a pattern of their names. `read` returns what is kept of one: an object, or lines; None to leave it out. `share`: the
    group that shares a limit of bytes. `suffix` is appended to the name."""

    pattern: str
    read: Callable[[RunFiles, str, Redactor], Any]
    share: str = "documents"
    suffix: str = ""

    def fits(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None


def _document(files: RunFiles, name: str, redactor: Redactor) -> Any:
    found = read_document(files, name)
    return redactor.value(found) if found else None


def _manifest(files: RunFiles, name: str, redactor: Redactor) -> Any:
    """The hashes of a checkpoint's files are kept as they are, since they identify damage and nothing else."""
    found = read_document(files, name)
    redacted = redactor.value(found)
    entries = found.get("files")
    if isinstance(entries, dict) and isinstance(redacted.get("files"), dict):
        for file, entry in entries.items():
            kept = redacted["files"].get(redactor.key(file))
            if isinstance(entry, dict) and isinstance(kept, dict) and _HASH.fullmatch(str(entry.get("blake3"))):
                kept["blake3"] = entry["blake3"]
    if _HASH.fullmatch(str(found.get("blake3"))):
        redacted["blake3"] = found["blake3"]
    return redacted or None


def _lines(files: RunFiles, name: str, redactor: Redactor) -> Any:
    found, _ = read_lines(files, name)
    return [redactor.value(one) for one in found] or None


def _log(files: RunFiles, name: str, redactor: Redactor) -> Any:
    return redact_log(_last_lines(files, name), redactor) or None


def _flight_record(files: RunFiles, name: str, redactor: Redactor) -> Any:
    """As JSON: a pickle is never passed on."""
    try:
        if not 0 < files.size(name) <= _LARGEST_RECORD:
            return None
        with files.open(name) as handle:
            tree = flight_recorder.plain_record(read_at_most(handle, _LARGEST_RECORD))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RecursionError, MemoryError, pickle.UnpicklingError):
        return None
    return redactor.value(json.loads(json.dumps(tree, default=lambda _: None, skipkeys=True)))


def _last_lines(files: RunFiles, name: str) -> Sequence[str]:
    length = LOG_LINES * _LONGEST_LOG_LINE // 4
    try:
        with files.open(name) as handle:
            size = files.size(name)
            handle.seek(max(0, size - length))
            text = handle.read(length).decode("utf-8", "replace")
    except OSError:
        return []
    lines = text.replace("\r", "\n").split("\n")[1 if size > length else 0 :]
    return [one[:_LONGEST_LOG_LINE] for one in lines if one.strip()][-LOG_LINES:]


HASHED = ("tokenizer/tokenizer.json",)
"""Files that a bundle does not have, and whose hashes it has: rules compare them with those that other files have recorded."""

_STAGE = rf"(?:(?:{_STAGES})/)?"
CONTENTS = (
    Content(r"resolved\.json|origins\.json", _document),
    Content(re.escape(LEDGER), _lines, "ledger"),
    Content(rf"{_STAGE}metrics\.jsonl", _lines, "metrics"),
    Content(r"follow\.jsonl", _lines, "metrics"),
    Content(rf"{_STAGE}{re.escape(KEPT)}", _document),
    Content(r"lock", _document),
    Content(r"launch/(?:outcome|hosts)\.json", _document),
    Content(r"launch/heartbeats/\d+\.json", _document, "ranks"),
    Content(r"launch/exits/[^/]+\.jsonl", _lines, "ranks"),
    Content(r"launch/logs/[^/]+\.log", _log, "logs"),
    Content(r"launch/(?:flight_recorder|last_failure)/rank_\d+", _flight_record, "ranks", ".json"),
    Content(_MANIFEST.pattern, _manifest, "checkpoints"),
    Content(rf"{_STAGE}checkpoints/[^/]+/meta\.json", _document, "checkpoints"),
    Content(rf"(?:corpus|tokenizer|shards|{_STAGES}|evaluate|export|{_STAGE}checkpoints)/stage\.json", _document),
    Content(r"(?:corpus|tokenizer)/report\.json|corpus/manifest\.json|shards/(?:manifest|report)\.json", _document),
    Content(rf"(?:{_STAGES})/data/(?:manifest|prompts)\.json", _document),
    Content(r"evaluate/results\.json|export/parity\.json|oom/[^/]+\.json", _document),
    Content(re.escape(PREFLIGHT), _document),
)


def names_of(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The names that a recipe gives, with their kinds, so that they have the same pseudonyms in metrics, events and paths."""
    if isinstance(name := tree.get("name"), str):
        yield name, "run"
    data = ((f"{stage.folder}.data", "source") for stage in MODEL_STAGES[1:])
    for place, kind in (("corpus.sources", "source"), ("train.phases", "phase"), *data):
        section, _, key = place.partition(".")
        items = tree.get(section)
        found = items.get(key) if isinstance(items, dict) else None
        for item in found if isinstance(found, list) else ():
            if isinstance(item, dict):
                if isinstance(item.get("name"), str):
                    yield item["name"], kind
                if isinstance(item.get("domain"), str):
                    yield item["domain"], "domain"


def hosts_of(files: RunFiles) -> Iterator[tuple[str, str]]:
    """The hosts that the launcher and the heartbeats name."""
    holder = read_document(files, "lock").get("host")
    if isinstance(holder, str):
        yield holder, "host"
    table = read_document(files, "launch/hosts.json").get("hosts")
    for one in table if isinstance(table, list) else ():
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            yield one["name"], "host"
    for name in files.names():
        if re.fullmatch(r"launch/heartbeats/\d+\.json", name):
            beat = read_document(files, name)
            yield from ((beat[key], "host") for key in ("host", "machine") if isinstance(beat.get(key), str))


def listing(files: RunFiles, redactor: Redactor) -> dict[str, Any]:
    """The files of the run by their redacted names with their sizes: all of checkpoints, of others at most `_MOST_LISTED`; and totals of
    the folders at its top."""
    others = 0
    found: dict[str, int] = {}
    folders: dict[str, dict[str, int]] = {}
    for name in files.names():
        size = files.size(name)
        top = name.partition("/")[0] if "/" in name else "."
        total = folders.setdefault(redactor.member(top), {"files": 0, "bytes": 0})
        total["files"] += 1
        total["bytes"] += max(size, 0)
        of_checkpoint = _OF_CHECKPOINT.match(name) is not None
        others += not of_checkpoint
        if of_checkpoint or others <= _MOST_LISTED:
            found[redactor.member(name)] = size
    return {"files": found, "folders": folders}


def as_bytes(content: Any, kept: Sequence[Any] | None = None) -> bytes:
    """The bytes of what was read: an object as JSON, lines as JSON lines, or as text if they are text."""
    if isinstance(content, list):
        lines = content if kept is None else kept
        if all(isinstance(one, str) for one in lines):
            return "".join(f"{one}\n" for one in lines).encode("utf-8", "replace")
        return b"".join(json_line(one) for one in lines)
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def thinned(lines: Sequence[Any], count: int) -> list[Any]:
    """`count` of the lines: the first quarter of them from the beginning, the second half from the end, the rest evenly between."""
    if count >= len(lines):
        return list(lines)
    head, tail = count // 4, count - count // 2
    between = count - head - tail
    span = (len(lines) - head - tail) / max(between, 1)
    middle = [lines[head + int(number * span)] for number in range(between)]
    return [*lines[:head], *middle, *lines[len(lines) - tail :]]


def environment_names() -> Sequence[str]:
    """The variables of this process that a bundle may have."""
    return sorted(name for name in os.environ if _VARIABLES.fullmatch(name))


_VARIABLES = re.compile(
    r"(?:NCCL|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|OMP|MKL|KMP|GOMP|GLOO|UCX|FI|ROCM|HIP|HSA)_[A-Z0-9_]+|HF_HUB_OFFLINE|PYTHON(?:HASHSEED|UNBUFFERED)|"
    r"LMWORKS_(?:MACHINE|HOST)|SLURM_(?:JOB_NUM_NODES|NNODES|NTASKS|CPUS_PER_TASK|GPUS_ON_NODE|RESTART_COUNT)|RANK|WORLD_SIZE|LOCAL_RANK"
)
