"""The answer that a reply states."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_STATED = re.compile(r".*\b(?:answer|result)\s*(?:is\s*:|is\b|=|:)\s*(.+)", re.IGNORECASE)


def extract(reply: str) -> str:
    """The answer that a reply states: generous in form, but one answer only, found without looking at the right one.

    In this order: the last `<answer>` tag, the last `\\boxed{}`, what follows the last "answer is" (or "answer:", "result =") on
    its line, else the whole reply. Thinking is left out first. From a single line surrounding quotes and markdown stars go.
    """
    reply = re.sub(r"<think>.*?(</think>|$)", "", reply, flags=re.DOTALL).strip()
    for pattern in (_TAGGED, _BOXED, _STATED):
        found = pattern.findall(reply)
        if found:
            reply = found[-1].strip()
            break
    if "\n" not in reply:
        reply = reply.strip("*` ")
        if len(reply) > 1 and reply[0] == reply[-1] and reply[0] in "\"'":
            reply = reply[1:-1]
    return reply.strip()
