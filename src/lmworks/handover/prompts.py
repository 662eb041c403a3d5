"""Prompts for slime: JSONL rows {"prompt": [messages], "label": text, "metadata": {"rm_type": ...}}.

slime drops rows in silence: lines that are not JSON, and prompts longer than --rollout-max-prompt-len. A row without a label earns no
reward. All are refused here, with the numbers of the rows. Rows that hold an item of the evaluation are left out, as they are where
lmworks trains itself: the scores of the trained model would otherwise be those on texts that it has seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.data.decontamination import Contents, Decontamination

RM_TYPES = ("math", "dapo", "deepscaler", "f1", "gpqa", "ifbench", "remote_rm")
_ROLES = ("system", "user", "assistant", "tool")
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
    """Read and check prompts. A row has `prompt` (text or messages) or `messages`, whose last answer is the label, or `question` and
    `answer`; `label`, and `metadata`, which may name another `rm_type`.

    `decontamination` decides about rows that hold an item of the evaluation. Raises `UserError` with the numbers (from 1) of the rows that
    slime would drop or could not score.
    """
    if rm_type not in RM_TYPES:
        raise UserError(f"--rm-type {rm_type!r} is not known; slime has: {', '.join(RM_TYPES)}")
    rows: list[tuple[str, dict[str, Any], int]] = []
    for path in paths:
        bad: list[tuple[int, str]] = []
        try:
            lines = Path(path).read_bytes().split(b"\n")
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        if lines and not lines[-1]:
            lines.pop()
        for number, line in enumerate(lines, 1):
            try:
                row = _row(line, rm_type)
                length = len(tokenizer.encode_chat(row["prompt"], None, add_generation_prompt=True, thinking=None)[0])
                if length > max_tokens:
                    raise UserError(f"the prompt has {length} tokens, more than {max_tokens}")
            except UserError as error:
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


def _listed(bad: list[tuple[int, str]]) -> str:
    (first, why), others = bad[0], [str(number) for number, _ in bad[1:]]
    text = f"row {first}: {why}"
    if others:
        text += f"; also wrong: row{'s' if len(others) > 1 else ''} {', '.join(others[:_SHOWN])}"
        text += f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return f"{text}; correct or remove them: slime would drop them in silence or give them no reward"


def _row(line: bytes, rm_type: str) -> dict[str, Any]:
    try:
        given = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        raise UserError("it is not a line of JSON") from None
    if not isinstance(given, dict):
        raise UserError("it is not a JSON object")
    messages, label = _question(given)
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES or not isinstance(message.get("content"), str):
            raise UserError(f"a message must have a role of {', '.join(_ROLES)} and a text as content")
    if not messages or messages[-1]["role"] == "assistant" or not any(message["content"].strip() for message in messages):
        raise UserError("the prompt is empty, or ends with an answer")
    if isinstance(label, int | float) and not isinstance(label, bool):
        label = str(label)
    if not isinstance(label, str) or not label.strip():
        raise UserError("the label is missing or empty")
    metadata = given.get("metadata", {})
    if not isinstance(metadata, dict):
        raise UserError("metadata is not a JSON object")
    kind = metadata.get("rm_type", rm_type)
    if kind not in RM_TYPES:
        raise UserError(f"metadata.rm_type {kind!r} is not known; slime has: {', '.join(RM_TYPES)}")
    return {"prompt": messages, "label": label, "metadata": metadata | {"rm_type": kind}}


def _question(given: dict[str, Any]) -> tuple[list[Any], Any]:
    """The messages and the label of a row."""
    if isinstance(given.get("prompt"), list):
        return given["prompt"], given.get("label")
    for question, answer in (("prompt", "label"), ("question", "answer")):
        if isinstance(given.get(question), str):
            return [{"role": "user", "content": given[question]}], given.get(answer, given.get("label"))
    messages = given.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        return messages[:-1], given.get("label", messages[-1].get("content"))
    raise UserError("it has neither prompt, nor question, nor messages that end with an answer")
