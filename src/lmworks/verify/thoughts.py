"""The part of a reply after its thoughts. What stands in the thoughts is no answer."""

from __future__ import annotations

import re

_MARK = re.compile(
    r"<(?P<a>/?)(?:think|thinking|thoughts?|reasoning|seed:think)>|\[(?P<b>/?)THINK\]|◁(?P<c>/?)think▷"
    r"|<\|(?P<d>begin|end)_of_thought\|>|<\|START_THINKING\|>|(?P<e><\|END_THINKING\|>)",
    re.IGNORECASE,
)
_FINAL = "<|channel|>final<|message|>"  # of OpenAI's harmony form
_AT_END = 64  # characters of a prompt in which its template may have opened the thoughts


def without_thoughts(reply: str, thinking: bool = False) -> str:
    """A reply without its thoughts, in any of the published forms of markup; thoughts that are not closed hide the rest.

    `thinking`: the prompt has already opened them (`opens_thoughts`). A closing mark alone means the same: all before it is thought.
    """
    kept: list[str] = []
    depth, at = int(thinking), 0
    for mark in _MARK.finditer(reply):
        closes = any(mark[name] for name in "abc") or mark["d"] in ("end", "END") or mark["e"] is not None
        if not depth:
            kept.append(reply[at : mark.start()])
        if closes and not depth:
            kept.clear()
        depth, at = max(depth - 1, 0) if closes else depth + 1, mark.end()
    if not depth:
        kept.append(reply[at:])
    text = "".join(kept)
    return text.rpartition(_FINAL)[2].strip()


def opens_thoughts(prompt: str) -> bool:
    """Whether the template has opened the thoughts at the end of a prompt, so that the reply begins in them."""
    end = prompt[-_AT_END:].rstrip()
    marks = list(_MARK.finditer(end))
    return bool(marks) and marks[-1].end() == len(end) and "/" not in marks[-1][0] and "end" not in marks[-1][0].lower()
