"""Reads the recorded facts of a program (`record.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


@dataclass
class Facts:
    """options: name -> type of its value, or "switch". choices: option -> its values, where there is a list. metrics: name -> kind."""

    options: dict[str, str] = field(default_factory=dict)
    choices: dict[str, set[str]] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    env: set[str] = field(default_factory=set)

    def wrong(self, name: str, value: str | None) -> str | None:
        """Why the program would not take `name` with `value` (None for a switch), or None."""
        kind = self.options.get(name)
        if kind is None:
            return f"{name} is no option"
        if (kind == "switch") != (value is None):
            return f"{name} {value}: {name} is of type {kind}"
        if value is None:
            return None
        if kind in ("int", "float"):
            try:
                {"int": int, "float": float}[kind](value)
            except ValueError:
                return f"{name} {value}: no {kind}"
        known = self.choices.get(name)
        return f"{name} {value}: none of {sorted(known)}" if known and value not in known else None


@cache
def facts(version: str) -> Facts:
    """The facts in VERSION.txt."""
    found = Facts()
    for line in (HERE / f"{version}.txt").read_text(encoding="utf-8").splitlines():
        match line.split("\t"):
            case ["option", name, kind]:
                found.options[name] = kind
            case ["choice", name, value]:
                found.choices.setdefault(name, set()).add(value)
            case ["metric", name, kind]:
                found.metrics[name] = kind
            case ["env", name]:
                found.env.add(name)
            case _:
                raise AssertionError(line)
    return found
