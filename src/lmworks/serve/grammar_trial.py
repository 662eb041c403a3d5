"""Tries a client's grammar in a process with limits on processor time, wall time and memory, before the server compiles it."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError
from lmworks.untrusted.limited_process import CallFailed, LimitedProcess, ProcessDied

if TYPE_CHECKING:
    from lmworks.serve.vocabulary import Vocabulary

_SECONDS, _WALL, _MEMORY = 4.0, 12.0, 2 << 30
"""Processor time, wall time and address space of a trial."""
_STEPS = 64  # of a walk through the grammar, in which automata are made on the way
_REMEMBERED = 1024  # grammars of which it is known whether they compile
_UNKNOWN = "no vocabulary"


class GrammarError(UserError):
    """A grammar that cannot be compiled or cannot be met."""


class Trial:
    """Compiles grammars of a vocabulary, and walks a little way into each, in a process of its own. It starts with the first call."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process = LimitedProcess(f"{__name__}:make", _SECONDS, _MEMORY, _WALL)
        self._found: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = Lock()

    def __call__(self, lark: str) -> None:
        """Raises `GrammarError` for a grammar that takes too much of something, or that cannot be compiled."""
        key = hashlib.blake2b(lark.encode(), digest_size=16).digest()
        with self._lock:  # requests with the same grammar wait for one trial
            wrong = self._found[key] if key in self._found else self._try(lark)
            self._found[key] = wrong
            self._found.move_to_end(key)
            if len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)
        if wrong is not None:
            raise GrammarError(wrong)

    def _try(self, lark: str) -> str | None:
        """What is wrong with a grammar."""
        try:
            found: str | None = json.loads(self._ask(lark.encode()))
        except ProcessDied as error:
            what = f"more than {_SECONDS:g} s" if error.hangs else f"more memory than {_MEMORY >> 30} GiB"
            return f"it is too complex: to compile it takes {what}; use fewer or simpler patterns"
        except CallFailed:
            return "it is too complex"
        return found

    def _ask(self, lark: bytes) -> bytes:
        try:
            return self._process(b"G" + lark)
        except CallFailed as error:  # a new process, also after one that died
            if _UNKNOWN not in str(error):
                raise
        self._process(b"V" + self._described().encode())
        return self._process(b"G" + lark)

    def _described(self) -> str:
        given = self._vocabulary
        pieces = [given.token_bytes(token).decode("latin-1") for token in range(given.size)]
        return json.dumps({"pieces": pieces, "special": given.special, "eos": given.eos_id, "stops": given.stop_ids})


class _Plain:
    """What a grammar asks of a vocabulary, in the process of the trial."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._pieces = [piece.encode("latin-1") for piece in given["pieces"]]
        self.size, self.special, self.eos_id, self.stop_ids = len(self._pieces), given["special"], given["eos"], given["stops"]
        self.special_ids = frozenset(self.special.values())

    def encode(self, text: str) -> list[int]:
        return []  # the grammar then takes the longest tokens

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token]


def make() -> Callable[[bytes], bytes]:
    """The function of the process: a vocabulary (V), then grammars (G); it returns what is wrong with one, as JSON."""
    from lmworks.serve import grammar

    known: list[Any] = []

    def answer(data: bytes) -> bytes:
        if data[:1] == b"V":
            known[:] = [_Plain(json.loads(data[1:]))]
            grammar.compile_here(known[0], 'start: "a"')  # the tokens are sorted once
            return b""
        if not known:
            raise LookupError(_UNKNOWN)
        try:
            _walk(grammar.compile_here(known[0], data[1:].decode()))
        except GrammarError as error:
            return json.dumps(str(error)).encode()
        return b"null"

    return answer


def _walk(grammar: Any) -> None:
    """Go on with tokens from all over the vocabulary."""
    matcher = grammar.matcher.deep_copy()
    for step in range(_STEPS):
        mask = matcher.compute_logit_bias()
        at = mask.find(b"\xc8", step * 977 % len(mask))
        token = at if at >= 0 else mask.find(b"\xc8")
        if token < 0 or not matcher.consume_token(token):
            return
