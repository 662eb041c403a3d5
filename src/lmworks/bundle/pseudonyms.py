"""Pseudonyms: the same name for the same thing everywhere in a bundle, numbered by kind in the order of their first use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Kind = Literal["run", "source", "domain", "phase", "host", "user", "address", "path", "bucket", "email", "hash", "name"]


class Pseudonyms:
    """`of` gives the pseudonym of a text. What it stands for is in `table`, which never becomes part of a bundle."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def of(self, text: str, kind: Kind) -> str:
        """`kind` counts at the first use of a text only."""
        if text not in self._known:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._known[text] = f"{kind}-{self._counts[kind]}"
        return self._known[text]

    def known(self, text: str) -> str | None:
        """The pseudonym that a text has; None without one."""
        return self._known.get(text)

    @property
    def table(self) -> Mapping[str, str]:
        """Pseudonym to text."""
        return {pseudonym: text for text, pseudonym in self._known.items()}

    @property
    def counts(self) -> Mapping[str, int]:
        """How many there are of each kind."""
        return dict(sorted(self._counts.items()))
