"""Prompts for slime: JSONL rows {"prompt": [messages], "label": text, "metadata": {"rm_type": ...}}.

slime drops rows in silence: lines that are not JSON, and prompts longer than --rollout-max-prompt-len. A row without a label earns no
reward. All are refused here, with the numbers of the rows. Rows that hold an item of the evaluation are left out, as they are where
lmworks trains itself: the scores of the trained model would otherwise be those on texts that it has seen.

The command names JSONL files, or recipes, whose tune.data names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.data.decontamination import Contents, Decontamination
from lmworks.train.data.forms import convert_prompt
from lmworks.train.data.row_columns import NoRow
from lmworks.train.data.row_files import RawRow, read_files


def prompt_files(given: Sequence[str]) -> list[Path]:
    """The JSONL files; a recipe stands for the JSONL files in its `tune.data`. Raises `UserError` for a recipe without any."""
    from lmworks.recipe.load import load_recipe

    found: list[Path] = []
    for name in given:
        if not name.endswith((".yaml", ".yml")):
            found.append(Path(name))
            continue
        recipe = load_recipe(name, []).recipe
        files: list[Path] = []
        for source in recipe.tune.data if recipe.tune else ():
            if source.kind == "files" and source.path:
                path = Path(source.path)
                files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{name} has no tune.data of kind files; give a JSONL file with prompts and labels")
        found += files
    return found


RM_TYPES = ("math", "dapo", "deepscaler", "f1", "gpqa", "ifbench", "remote_rm")
_SHOWN = 5


@dataclass(frozen=True)
class Prompts:
    """Checked rows, the length of the longest prompt in tokens, and how many rows held an item of the evaluation; None if no search was
    made."""

    rows: list[dict[str, Any]]
    longest: int
    contaminated: int | None = None


def read_prompts(
    paths: Sequence[Path], tokenizer: Tokenizer, rm_type: str, max_tokens: int, decontamination: Decontamination | None = None
) -> Prompts:
    """Read and check prompts: rows in the files and forms of `grpo.data` (`lmworks.train.data.forms`). The label is `label`, or the
    row's answer; `metadata` may name another `rm_type`.

    `decontamination` decides about rows that hold an item of the evaluation. Raises `UserError` with the numbers (from 1) of the rows that
    slime would drop or could not score.
    """
    if rm_type not in RM_TYPES:
        raise UserError(f"--rm-type {rm_type!r} is not known; slime has: {', '.join(RM_TYPES)}")
    rows: list[tuple[str, dict[str, Any], int]] = []
    for path in paths:
        bad: list[tuple[str, str]] = []
        if not Path(path).is_file():
            raise UserError(f"{path} cannot be read: it is no file")
        for raw in read_files("--prompts", str(path)):
            number = raw.origin.rpartition(":")[2]
            try:
                row = _row(raw, rm_type)
                length = len(tokenizer.encode_chat(row["prompt"], None, add_generation_prompt=True, thinking=None)[0])
                if length > max_tokens:
                    raise UserError(f"the prompt has {length} tokens, more than {max_tokens}")
            except (UserError, NoRow) as error:
                bad.append((number, str(error)))
                continue
            rows.append((f"{path}, row {number}", row, length))
        if bad:
            raise UserError(f"{path}: {_listed(bad)}")
    if not rows:
        raise UserError(f"{', '.join(map(str, paths))}: there is no row")
    kept = rows if decontamination is None else [one for one, reason in decontamination.search(rows, _contents) if not reason]
    contaminated = None if decontamination is None else decontamination.report()
    if not kept:
        raise UserError(f"{', '.join(map(str, paths))}: all {len(rows)} rows hold an item of the evaluation; give other prompts")
    return Prompts([row for _, row, _ in kept], max(length for _, _, length in kept), contaminated)


def _contents(found: tuple[str, dict[str, Any], int]) -> Contents:
    origin, row, _ = found
    return Contents(origin, row["prompt"], (row["label"], row["metadata"]))


def _listed(bad: list[tuple[str, str]]) -> str:
    (first, why), others = bad[0], [number for number, _ in bad[1:]]
    text = f"row {first}: {why}"
    if others:
        text += f"; also wrong: row{'s' if len(others) > 1 else ''} {', '.join(others[:_SHOWN])}"
        text += f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return f"{text}; correct or remove them: slime would drop them in silence or give them no reward"


def _row(raw: RawRow, rm_type: str) -> dict[str, Any]:
    if raw.fault is not None:
        raise NoRow(raw.fault)
    asked = convert_prompt(raw.value, raw.origin)
    if asked.tools:
        raise NoRow("tools: slime renders the prompt without them")
    messages = [one.saying(content="".join(part["text"] for part in one["content"])) if isinstance(one["content"], list) else one
                for one in asked.messages]  # fmt: skip
    if messages[-1]["role"] == "assistant":
        raise NoRow("the prompt ends with an answer")
    label = asked.row.get("label", asked.row.get("answer"))
    if isinstance(label, int | float) and not isinstance(label, bool):
        label = str(label)
    if not isinstance(label, str) or not label.strip():
        raise NoRow("the label is missing or empty")
    metadata = asked.row.get("metadata", {})
    if not isinstance(metadata, dict):
        raise NoRow("metadata is not a JSON object")
    kind = metadata.get("rm_type", rm_type)
    if kind not in RM_TYPES:
        raise NoRow(f"metadata.rm_type {kind!r} is not known; slime has: {', '.join(RM_TYPES)}")
    return {"prompt": [dict(message) for message in messages], "label": label, "metadata": metadata | {"rm_type": kind}}
