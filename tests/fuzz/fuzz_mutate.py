"""Inputs made wrong: changes of trees, texts and bytes, each a function of the random numbers that it draws."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

NUMBERS: list[Any] = [
    0, -1, 1, 2, 3, 7, 63, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**18, 10**30, 10**400, 0.0, -0.0, 1e-300, 5e-324, 1e308, -1e308, 0.1,
    1.5,
    float("inf"), float("-inf"), float("nan"), True, False,
]  # fmt: skip
TEXTS = [
    "", " ", "\0", "a\0b", "\x1b[2J\x1b]0;title\x07", "\r\n", "\u2028", "\ufeff", "\ud800", "\udfff x", "é" * 300, "x" * 70_000,
    "../../../outside",
    "/dev/zero", "/etc/passwd", "~", "~nobody", "{x}", "%s%n", "[/x]", "[bold]", "<script>", "{{ 7 * 7 }}", "1e400000000", "nan", "inf",
    "-1",
    "1e999 tokens", "1e400000000 tokens", "0 tokens", "999999T", "1.5 tokens", "1e-9T", "10%", "1e300%", "0%", "0 s", "9e99 days",
    "1e400000000 s",
    "12 steps", "9999999999999999999999 steps", "1Ki", "0B", "\u0663 tokens", "auto", "null", "https://user:pass@host:99999/x",
    "http://[", "s3://",
    "file:///etc/passwd", "*" * 50, "a.b.c", "..", ".", "-", "\u202e", "<|user|>", "9" * 5000, "(" * 300, "$(touch outside)", "`id`",
    "0" * 64,
]  # fmt: skip


def scalar(draw: Random) -> Any:
    """A value that some code did not think of."""
    match draw.randrange(6):
        case 0 | 1:
            return draw.choice(NUMBERS)
        case 2 | 3:
            return draw.choice(TEXTS)
        case 4:
            return draw.choice([None, [], {}, [[]], [{}], [None], {"": ""}, {"name": None}, [0, "a"], {"a": {"b": {"c": 1}}}])
        case _:
            return nested(draw.choice([3, 70, 400]), draw.choice([True, False]))


def nested(depth: int, lists: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all that is in a tree, itself first."""
    found, todo = [], [(value, above)]
    while todo:
        one, path = todo.pop()
        found.append(path)
        if isinstance(one, dict):
            todo += [(item, (*path, key)) for key, item in one.items()]
        elif isinstance(one, list):
            todo += [(item, (*path, number)) for number, item in enumerate(one)]
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def tree(value: Any, draw: Random, most: int = 3) -> Any:
    """A copy of a tree of maps and lists with up to so many changes."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, most)):
        known = places(value)
        path = draw.choice(known)
        if not path:
            if draw.random() < 0.03:
                return scalar(draw)
            continue
        holder, key, old = at(value, path[:-1]), path[-1], at(value, path)
        match draw.randrange(10):
            case 0 | 1 | 2:
                holder[key] = scalar(draw)
            case 3:
                del holder[key]
            case 4:
                holder[key] = draw.choice([[old], {"value": old}, [old, old], str(old), None])
            case 5:
                other = draw.choice(known)
                holder[key] = copy.deepcopy(at(value, other))
            case 6 if isinstance(holder, dict):
                holder[draw.choice([*TEXTS, str(key) + "s", str(key).upper()])] = holder.pop(key)
            case 7 if isinstance(old, str):
                holder[key] = text(old, draw)
            case 8 if isinstance(old, (int, float)):
                holder[key] = draw.choice([-old, old * 2, old + 1, old * 10**9, old / 3 if abs(old) < 1e300 else 0, str(old), [old]])
            case _:
                holder[key] = draw.choice(NUMBERS)
    return value


def text(value: str, draw: Random, most: int = 3) -> str:
    """A text with up to so many changes."""
    for _ in range(draw.randint(1, most)):
        start = draw.randrange(len(value) + 1)
        stop = min(len(value), start + draw.choice([0, 1, 1, 3, 20]))
        match draw.randrange(6):
            case 0:
                value = value[:start] + value[stop:]
            case 1:
                value = value[:start] + draw.choice(TEXTS) + value[stop:]
            case 2:
                value = value[:start] + value[start:stop] * draw.choice([2, 50]) + value[stop:]
            case 3:
                value = value[:start] + draw.choice("[{(:,-\"'#&*!|>%@`\n\t 0") * draw.choice([1, 1, 2, 500]) + value[stop:]
            case 4:
                value = (
                    value[:start]
                    + chr(draw.choice([draw.randrange(128), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)]))
                    + value[stop:]
                )
            case _:
                value = value[:start] + str(draw.choice(NUMBERS)) + value[stop:]
    return value


def data(value: bytes, draw: Random, most: int = 4) -> bytes:
    """Bytes with up to so many changes; sometimes cut off, empty or longer."""
    changed = bytearray(value)
    for _ in range(draw.randint(1, most)):
        start = draw.randrange(len(changed) + 1) if draw.random() < 0.5 else min(draw.randrange(64), len(changed))  # heads matter most
        match draw.randrange(7):
            case 0:
                changed[start : start + 1] = bytes([draw.randrange(256)])
            case 1:
                del changed[start : start + draw.randint(1, 20)]
            case 2:
                changed[start:start] = draw.randbytes(draw.randint(1, 20))
            case 3:
                changed[start : start + 8] = draw.choice([bytes(8), b"\xff" * 8, b"\xff" * 7 + b"\x7f", (1 << 40).to_bytes(8, "little")])
            case 4:
                del changed[start:]
            case 5:
                changed += changed[start : start + 1000]
            case _ if changed:
                where = min(start, len(changed) - 1)
                changed[where] ^= 1 << draw.randrange(8)
    return bytes(changed)


def spoiled_json(value: Any, draw: Random) -> bytes:
    """A tree as JSON, changed as a tree, as a text, or both; what JSON cannot say is said as Python does."""
    written = json.dumps(tree(value, draw) if draw.random() < 0.85 else value, ensure_ascii=draw.random() < 0.5)
    if draw.random() < 0.2:
        written = text(written, draw)
    return written.encode("utf-8", draw.choice(["surrogatepass", "replace"]))
