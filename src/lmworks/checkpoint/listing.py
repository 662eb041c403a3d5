"""Read-only access to a directory of checkpoints, safe while a run writes into it; and the rule by which checkpoints are kept."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.checkpoint import manifest
from lmworks.errors import UserError
from lmworks.io.files import explain_damage
from lmworks.io.run_layout import checkpoint_name, step_in
from lmworks.recipe.changes import canonical
from lmworks.recipe.former import translated, with_defaults
from lmworks.recipe.keys import flatten
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from lmworks.recipe.schema.model import Lora, Model
from lmworks.recipe.schema.units import Duration
from lmworks.ui.terminal import bar


@dataclass(frozen=True)
class Saved:
    """The facts about a checkpoint that retention depends on. metric: lower is better. streak_began: the first of the bad steps or spikes
    in a row that it was saved after, None if the step before it was good."""

    path: Path
    step: int
    tokens: int
    metric: float | None
    permanent: bool
    streak_began: int | None = None


def keep(saved: list[Saved], options: Options, newest: int, total_tokens: int | None = None) -> dict[int, str]:
    """The steps to keep, each with the reason. `newest` is the step just saved, which always stays.

    keep_every keeps the first checkpoint in each interval, so that it also works when saves do not fall on its multiples. During bad steps
    or spikes in a row the last ones before the first of these stay too: a rollback leads there.
    """
    ordered = sorted(saved, key=lambda one: one.step)
    began = next((one.streak_began for one in ordered if one.step == newest), None)
    before = [] if began is None else [one for one in ordered if one.step <= began]
    reasons: dict[int, list[str]] = {}

    def add(one: Saved, reason: str) -> None:
        reasons.setdefault(one.step, []).append(reason)

    for one in ordered[-options.keep_last:]:
        add(one, "last")
    for one in before[-options.keep_last:]:
        add(one, "before bad steps")
    for one in ordered:
        if one.step == newest and one.step not in reasons:
            add(one, "newest")
        if one.permanent:
            add(one, "permanent")
    scored = [(one.metric, number) for number, one in enumerate(ordered) if one.metric is not None and math.isfinite(one.metric)]
    if options.keep_best and scored:
        add(ordered[min(scored)[1]], "best")
    if options.keep_every is not None:
        seen = {0}
        for one in ordered:
            interval = _interval_of(one, options.keep_every, total_tokens)
            if interval not in seen:
                seen.add(interval)
                add(one, "every")
    return {step: ", ".join(why) for step, why in reasons.items()}


def _interval_of(one: Saved, every: Duration, total_tokens: int | None) -> int:
    if every.unit == "steps":
        return one.step // max(1, int(every.value))
    if every.unit == "tokens":
        return one.tokens // max(1, int(every.value))
    if total_tokens is None:
        raise UserError(f"checkpoints.keep_every: {every.text()} of what? write it in steps or tokens")
    return one.tokens // max(1, every.tokens(step_tokens=1, phase_tokens=total_tokens))


META = "meta.json"
REFERENCE = "reference"  # key in a meta
name_of = checkpoint_name


def is_name(name: str) -> bool:
    """Whether a directory of this name holds a checkpoint."""
    return step_in(name) is not None


def aside_name(final: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return final.with_name(f".{final.name}.part")


def marker(final: Path) -> Path:
    """The marker of a checkpoint that is complete on the machines' own disks, and not yet in the run's directory."""
    return final.with_name(f".{final.name}.local")


def pending(directory: Path) -> list[Path]:
    """The paths of the checkpoints with a marker, by rising step."""
    names = [path.name[1:-len(".local")] for path in Path(directory).glob(".step-*.local")]
    return sorted((Path(directory) / name for name in names if is_name(name)), key=step_of)


def has_checkpoints(directory: Path) -> bool:
    """Whether a checkpoint was ever saved here: good or not, set aside, or still on the machines' own disks."""
    return any(Path(directory).glob("step-*")) or bool(pending(directory))


def free_name(path: Path, why: str) -> Path:
    """`step-00000100.WHY-1`, or -2 and so on: the name of a checkpoint that readers must ignore."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{why}-{number}")).exists():
        number += 1
    return aside


def content(directory: Path) -> str:
    """`content_of` the newest checkpoint; empty where there is none."""
    newest = directories(directory)[-1:]
    return content_of(newest[0]) if newest else ""


def content_of(path: Path) -> str:
    """A short hash of the tensors of a checkpoint, by its manifest or by the files that it names; empty where that cannot be read."""
    try:
        files = manifest.entries(path)
    except (OSError, ValueError):
        return ""
    tensors = {name: entry.blake3 for name, entry in files.items() if name.startswith(manifest.DATA)}
    if not tensors and (about := reference_of(path)) is not None:
        tensors = about["blake3"]
    return hashlib.sha256(canonical(tensors)).hexdigest()[:16] if tensors else ""


def reference_of(path: Path) -> dict[str, Any] | None:
    """What a checkpoint says of the files that have its weights (`lmworks.weights.reference`); None if it has its own."""
    try:
        about = read_meta(path)["meta"].get(REFERENCE)
    except (UserError, LookupError, AttributeError):
        return None
    return about if isinstance(about, dict) and isinstance(about.get("blake3"), dict) and "path" in about else None


def directories(directory: Path) -> list[Path]:
    """The checkpoints by rising step, good or not."""
    try:
        found = [path for path in Path(directory).iterdir() if is_name(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint's directory."""
    step = step_in(path.name)
    assert step is not None, path
    return step


def read_meta(path: Path) -> dict[str, Any]:
    """The meta.json of a checkpoint: step, metric, permanent, identity, meta (of the caller), recipe (resolved), values.

    Raises `UserError` if it is missing or any other document.
    """
    try:
        data = manifest.read_document(path / META)
    except OSError as error:
        raise UserError(f"{path / META} cannot be read ({error.strerror}); use another checkpoint of its run") from None
    with explain_damage(path / META, "use another checkpoint of its run"):
        return parse_meta(data)


def parse_meta(data: bytes) -> dict[str, Any]:
    """`read_meta` of the bytes of the document. Raises `ValueError` for any other one."""
    try:
        document = dict(json.loads(data))
        tokens, metric = document["meta"].get("tokens", 0), document["metric"]
        counts = (document["step"], tokens, _streak_began(document) or 0)
        numbers = all(isinstance(one, int) for one in counts) and isinstance(metric, float | int | None)
        maps = isinstance(document["identity"], dict) and isinstance(document["values"], dict)
        right = numbers and maps and isinstance(document["permanent"], bool)
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        right = False
    if not right:
        raise ValueError(f"{META} does not match what was written")
    return document


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """In which keys two identities of checkpoints differ, which earlier versions may have stored: keys that came later have their defaults.

    An identity has nodes of the recipe by name: "model", and "lora" of adapters; and other values.
    """
    nodes = {"model": Model, "lora": Lora}
    one, other = ({key: translated(value, nodes.get(key)) for key, value in identity.items()} for identity in (here, there))
    for key, node in nodes.items():
        if key in one and key in other:
            one[key], other[key] = with_defaults(one[key], other[key], node), with_defaults(other[key], one[key], node)
    flat = [flatten(json.loads(json.dumps(identity))) for identity in (one, other)]
    keys = [*flat[0], *(key for key in flat[1] if key not in flat[0])]
    return [f"{key} is {flat[1].get(key)!r} there and {flat[0].get(key)!r} here" for key in keys if flat[0].get(key) != flat[1].get(key)]


def _streak_began(document: dict[str, Any]) -> int | None:
    """`Saved.streak_began`, which `Policy.state` writes."""
    began: int | None = document["meta"].get("stability", {}).get("streak_began")
    return began


def saved(directory: Path) -> list[Saved]:
    """The facts that retention needs. Checkpoints whose meta.json cannot be read are omitted, and so are never pruned."""
    found = []
    for path in directories(directory):
        try:
            document = read_meta(path)
            tokens, began = int(document["meta"].get("tokens", 0)), _streak_began(document)
            found.append(Saved(path, document["step"], tokens, document["metric"], document["permanent"], began))
        except (OSError, ValueError, KeyError):
            continue
    return found


def list_checkpoints(directory: Path) -> list[dict[str, Any]]:
    """One row per checkpoint, oldest first: path, step, tokens, phase, metric, permanent, time, bytes, files; `problem` where its
    manifest or document cannot be read. Nothing is hashed: see `verify`. One that the run prunes meanwhile is left out."""
    rows = [describe(path) for path in directories(directory)]
    return [row for row in rows if row["problem"] is None or Path(row["path"]).exists()]


def describe(path: Path) -> dict[str, Any]:
    """The row of one checkpoint in `list_checkpoints`."""
    row: dict[str, Any] = {"path": str(path), "step": step_of(path), "problem": None}
    try:
        document, files = read_meta(path), manifest.entries(path)
        row |= {key: document[key] for key in ("metric", "permanent")}
        row |= {key: document["meta"].get(key) for key in ("tokens", "phase")}
        row |= {"bytes": sum(entry.bytes for entry in files.values()), "files": len(files)}
        row["time"] = (path / manifest.NAME).stat().st_mtime
    except (OSError, ValueError, KeyError) as error:
        row["problem"] = str(error) or repr(error)
    return row


def verify(directory: Path) -> list[dict[str, Any]]:
    """One row per checkpoint, oldest first: path, step, good, problem (None if good). Reads and hashes every byte, and checks that
    the slices of each tensor add up to it. One that the run prunes meanwhile has no row."""
    found, rows = directories(directory), []
    if not found:
        return []
    with bar(f"verifying {directory.parent.name}/{directory.name}", sum(_bytes(path) for path in found)) as progress:
        for path in found:
            reason = manifest.problem(path, advance=progress.advance) or _incomplete(path)
            if reason is not None and not path.exists():  # a checkpoint is renamed before its files are removed
                continue
            rows.append({"path": str(path), "step": step_of(path), "good": reason is None, "problem": reason})
    return rows


def _bytes(path: Path) -> int:
    try:
        return sum(entry.bytes for entry in manifest.entries(path).values())
    except (OSError, ValueError):
        return 0


def _incomplete(path: Path) -> str | None:
    from lmworks.checkpoint.tensor_files import incomplete_tensors, read_table

    try:
        names = incomplete_tensors(read_table(path))
    except (OSError, ValueError) as error:
        return str(error)
    return f"slices of {len(names)} tensors were never saved, the first is {names[0]}" if names else None


_LISTINGS = 10  # of a directory in which a run saves and prunes


def newest_good(directory: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint that verifies, and the newer ones that were refused, with the reason; nothing is renamed. Where the run prunes
    one meanwhile, it has saved another, and the directory is listed again."""
    refused: list[tuple[Path, str]] = []
    for _ in range(_LISTINGS):
        refused.clear()
        for path in reversed(directories(directory)):
            reason = manifest.problem(path)
            if reason is None:
                return path, refused
            if not path.exists():
                break
            refused.append((path, reason))
        else:
            break
    return None, refused
