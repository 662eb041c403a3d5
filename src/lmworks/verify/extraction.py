"""The answer that a reply states."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_STATED = re.compile(r"\b(?:answer|result)\s{0,20}(?:is\s{0,20}:|is\b|=|:)", re.IGNORECASE)


def extract(reply: str) -> str:
    """The answer that a reply states: generous in form, but one answer only, found without looking at the right one.

    In this order: the last `<answer>` tag, the last `\\boxed{}`, what follows the last "answer is" (or "answer:", "result =") on
    its line, else the whole reply. Thinking is left out first. From a single line surrounding quotes and markdown stars go. It takes time
    linear in the reply.
    """
    reply = re.sub(r"<think>.*?(</think>|$)", "", reply, flags=re.DOTALL).strip()
    reply = next((found for find in (_tagged, _stated) if (found := find(reply)) is not None), reply)
    if "\n" not in reply:
        reply = reply.strip("*` ")
        if len(reply) > 1 and reply[0] == reply[-1] and reply[0] in "\"'":
            reply = reply[1:-1]
    return reply.strip()


def _tagged(reply: str) -> str | None:
    found = _TAGGED.findall(reply) or _BOXED.findall(reply)
    return found[-1].strip() if found else None


def _stated(reply: str) -> str | None:
    for mark in reversed(list(_STATED.finditer(reply))):
        rest = reply[mark.end() :].lstrip()
        if rest:
            return rest.partition("\n")[0].strip()
    return None
