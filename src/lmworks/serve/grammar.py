"""Restricts answers to a grammar with llguidance, and sees to it that they are complete within their limit of tokens.

Grammars come from clients. llguidance counts its work (`_LIMITS`), but some expressions take gigabytes and minutes before its first count,
and cannot be stopped. So a grammar is first tried in a process with limits (`grammar_trial`), and compiled here if that ended well.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lmworks.errors import UserError, one_line
from lmworks.serve.grammar_trial import GrammarError, Trial
from lmworks.tokenizer.special import CALL_END, VALUE_END

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor

    from lmworks.serve.vocabulary import Vocabulary

_LIMITS = {
    "max_items_in_row": 2000, "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000,
    "max_lexer_states": 20_000, "max_grammar_size": 200_000, "verbose_errors": False,
}  # fmt: skip
PLAIN, THINKING, OPENED = "start: answer\n", "start: thought? answer\n", "start: opened answer\n"
"""The first rule of a grammar of answers, of one that lets thoughts come first, and of one behind a prompt that has opened them."""
_LONGEST = 2048  # tokens of the shortest answer that are searched
_GROWTH = 64  # tokens, at least, by which a token may lengthen the way to an end, as one that opens an object with required keys
_SEARCHED, _SEARCHES = 32, 4 * _LONGEST
"""Tokens of a search that each token of an answer allows, and the most that are saved up. A token of a search takes some 0.1 ms, so that 32
answers that search all the time add 0.1 s to a step."""


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar of a vocabulary, with a short way from its start to an end (None if none of `_LONGEST` tokens was found), and
    one from inside of thoughts. Each answer has a state of its own: `answer`."""

    vocabulary: Vocabulary
    matcher: LLMatcher
    path: list[int] | None
    from_thoughts: list[int] | None = None

    def answer(self, limit: int) -> GrammarState:
        """The state at the start of an answer of at most `limit` tokens. Raises `GrammarError` if no answer is known to be that short."""
        if self.path is None or len(self.path) > limit:
            raise GrammarError(
                f"no answer of at most {limit} tokens was found that the grammar allows; raise max_tokens or allow shorter answers"
            )
        return GrammarState(self.vocabulary, self.matcher.deep_copy(), limit, self.path, self.from_thoughts)


def compile_grammar(vocabulary: Vocabulary, lark: str, thoughts_end: str = "") -> Grammar:
    """Try a grammar in llguidance's form of Lark, and compile it. One that begins with `THINKING` or `OPENED` has thoughts up to
    `thoughts_end`, marks and text behind which the answer begins. Raises `GrammarError` with the reason, and `UserError` without the extra
    `serve`."""
    if not find_spec("llguidance"):
        raise UserError("grammars, JSON schemas and required tools need llguidance: pip install 'lmworks[serve]'")
    try:
        lark.encode()
    except UnicodeEncodeError:
        raise GrammarError("it contains half of a surrogate pair, which is not text") from None
    _trial(vocabulary)(lark)
    return compile_here(vocabulary, lark, thoughts_end)


def compile_here(vocabulary: Vocabulary, lark: str, thoughts_end: str = "") -> Grammar:
    """Compile a grammar in this process. Raises `GrammarError` with the reason."""
    matcher = _matcher(vocabulary, lark)
    # thoughts are never the shortest way, but a search would enter them and write on
    first = next((one for one in (THINKING, OPENED) if lark.startswith(one)), PLAIN)
    plain = matcher if first == PLAIN else _matcher(vocabulary, PLAIN + lark.removeprefix(first))
    path = _completion(vocabulary, plain, _LONGEST, False, False)
    if path is None or not thoughts_end:
        return Grammar(vocabulary, matcher, path)
    parts = split_marks(vocabulary, thoughts_end)
    end = [one for part in parts for one in (_wrapped(vocabulary)(part) if isinstance(part, str) else [part])]
    return Grammar(vocabulary, matcher, [*end, *path] if first == OPENED else path, [*end, *path])


def split_marks(vocabulary: Vocabulary, text: str) -> list[int | str]:
    """Text of a template as the tokens of its marks, and the text between them."""
    marks = sorted((name for name in vocabulary.special if name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return [vocabulary.special.get(part, part) for part in parts if part]


def _matcher(vocabulary: Vocabulary, lark: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
    matcher = LLMatcher(_tokenizer(vocabulary), LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(_reason(matcher))
    return matcher


@lru_cache(4)
def _trial(vocabulary: Vocabulary) -> Trial:
    return Trial(vocabulary)


def _reason(matcher: LLMatcher) -> str:
    lines = [line for line in matcher.get_error().splitlines() if line.strip()]
    if not lines or "panic" in lines[0].lower():  # of llguidance's own code, whose text says nothing to a client
        return "it is too complex"
    return one_line(lines[0])[:300]


class _Wrapped:
    """What llguidance asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id, self.bos_token_id = vocabulary.eos_id, None
        self.tokens = [vocabulary.token_bytes(token) for token in range(vocabulary.size)]
        self.special_token_ids = sorted(vocabulary.special.values())
        self._encode = vocabulary.encode
        self._special = frozenset(self.special_token_ids)
        self._ids = {piece: token for token, piece in enumerate(self.tokens) if piece and token not in self._special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Ids of text whose bytes are exactly `text`. Encoding may put a BOS token and a space before it, which do not belong into an
        answer, and makes marks of thoughts and calls of the text that looks like them."""
        ids, wanted = self._encode(text), text.encode()
        for first in range(3):
            if b"".join(self.tokens[token] for token in ids[first:]) == wanted and self._special.isdisjoint(ids[first:]):
                return ids[first:]
        return self._greedy(wanted)

    def _greedy(self, text: bytes) -> list[int]:
        """The longest tokens from left to right, for a tokenizer that joins its space with the first word or normalizes text."""
        ids, at = list[int](), 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((size for size in sizes if text[at : at + size] in self._ids), 0)
            if not size:  # a vocabulary without this byte
                break
            ids.append(self._ids[text[at : at + size]])
            at += size
        return ids


@lru_cache(4)
def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_wrapped(vocabulary)))


_wrapped = lru_cache(4)(_Wrapped)


@dataclass(frozen=True)
class _Closers:
    """Tokens by which an answer is completed soon, the better ones first: those that close markup, `within` a JSON string, and `outside`.

    A string is closed at once, or filled with what is used least so far, so that a pattern comes to its end; outside of strings, brackets
    are closed before anything is opened.
    """

    markup: list[int]
    within: list[int]
    outside: list[int]
    first: frozenset[int]  # ids that are taken wherever they are the best

    def pick(self, mask: bytes, in_string: bool, used: Counter[int]) -> int | None:
        """The best allowed token; None if nothing is allowed."""
        for ids in (self.markup, self.within if in_string else self.outside):
            found = [token for token in ids if mask[token]]
            if found:
                return found[0] if found[0] in self.first else min(found, key=lambda token: used[token])
        return min((token for token, allowed in enumerate(mask) if allowed), key=lambda token: used[token], default=None)


@lru_cache(4)
def _closers(vocabulary: Vocabulary) -> _Closers:
    single = {vocabulary.token_bytes(token): token for token in reversed(range(vocabulary.size)) if len(vocabulary.token_bytes(token)) == 1}
    markup = [vocabulary.special[name] for name in (VALUE_END, CALL_END) if name in vocabulary.special]
    letters = [bytes([code]) for code in (*range(48, 58), *range(97, 123), *range(65, 91), *range(32, 48), *range(58, 65), *range(91, 97))]
    closing = [piece for piece in (b"}", b"]", b'"', b"0") if piece in single]

    def ids(pieces: list[bytes]) -> list[int]:
        return [single[piece] for piece in dict.fromkeys(pieces) if piece in single]

    first = frozenset([*markup, *(single[piece] for piece in closing)])
    return _Closers(markup, ids([b'"', *letters]), ids([*closing, *letters, b"{"]), first)


class GrammarState:
    """The state of one answer: what may follow, and the path on which it can be completed in time.

    Close to its limit the answer is led along a short path to its end: a token after which no completion fits any more is replaced by the
    next of the path. `error` is set when the grammar gives up, at a limit of its work.
    """

    def __init__(
        self, vocabulary: Vocabulary, matcher: LLMatcher, limit: int, path: list[int], from_thoughts: list[int] | None = None
    ) -> None:
        """`path` is a way from the start to an end, of at most `limit` tokens; `from_thoughts` one from inside of thoughts."""
        self._vocabulary, self._matcher, self._left, self.path = vocabulary, matcher, limit, path
        self._from_thoughts = from_thoughts
        self._in_string = self._escaped = False
        self._searches = _SEARCHES
        self.error: str | None = None

    def allowed(self) -> Tensor:
        """Which ids may come next: (vocabulary,) of bool. Where the end of the text is allowed, every stop token is."""
        import torch

        mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) != 0
        if self._matcher.is_error():
            self.error = _reason(self._matcher)
            mask = torch.zeros(self._vocabulary.size, dtype=torch.bool)
            mask[self._vocabulary.eos_id] = True
        if mask[self._vocabulary.eos_id]:
            mask[list(self._vocabulary.stop_ids)] = True
        return mask

    def accept(self, token: int) -> int:
        """Advance by the chosen token; returns the token that is to stand in its place, usually the same."""
        self._left -= 1
        self._searches = min(self._searches + _SEARCHED, _SEARCHES)
        if token in self._vocabulary.stop_ids or self.error:
            return token
        if self.path and token == self.path[0]:
            self._advance(token)
            self.path = self.path[1:]
            return token
        before = (self._matcher.deep_copy(), self._in_string, self._escaped)
        self._advance(token)
        path = self._way()
        if path is None:
            self._matcher, self._in_string, self._escaped = before
            if not self.path:
                return self._vocabulary.eos_id
            token, path = self.path[0], self.path[1:]
            self._advance(token)
        self.path = path
        return token

    def _way(self) -> list[int] | None:
        """A way to an end of at most `_left` tokens after a token that left the path; None if none is known.

        Most tokens leave the rest of the path valid, with or without its first token, and to try that takes a thousandth of a search. A
        search takes what its tokens cost from an allowance, because all answers of the server wait for it.
        """
        paths = [self.path[1:], self.path]
        if self._from_thoughts is not None:  # behind the rest of a mark that is text
            paths += [self._from_thoughts, [*self._matcher.compute_ff_tokens(), *self._from_thoughts]]
        for path in paths:
            if len(path) <= self._left and self._ends(path):
                return path
        most = min(self._left, len(self.path) + max(_GROWTH, len(self.path)), self._searches)
        if most < len(self.path):
            return None
        self._searches -= most
        return _completion(self._vocabulary, self._matcher, most, self._in_string, self._escaped)

    def _ends(self, path: list[int]) -> bool:
        matcher = self._matcher.deep_copy()
        return matcher.try_consume_tokens(path) == len(path) and matcher.is_accepting()

    def _advance(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._in_string, self._escaped = _scan(self._vocabulary, token, self._in_string, self._escaped)


def _completion(vocabulary: Vocabulary, matcher: LLMatcher, most: int, in_string: bool, escaped: bool) -> list[int] | None:
    """A short way to an allowed end, of at most so many tokens; None if none is found."""
    matcher = matcher.deep_copy()
    path: list[int] = []
    used: Counter[int] = Counter()
    while not matcher.is_accepting():
        if len(path) >= most or matcher.is_error():
            return None
        following = matcher.compute_ff_tokens()  # those without an alternative
        following = following[: matcher.try_consume_tokens(following)] if following else []
        if not following:
            token = _closers(vocabulary).pick(matcher.compute_logit_bias(), in_string, used)
            if token is None or not matcher.consume_token(token):
                return None
            used[token] += 1
            following = [token]
        for token in following:
            in_string, escaped = _scan(vocabulary, token, in_string, escaped)
        path += following
    return path if len(path) <= most else None


def _scan(vocabulary: Vocabulary, token: int, in_string: bool, escaped: bool) -> tuple[bool, bool]:
    """Whether a JSON string is open after the token, and a backslash before the next character."""
    if token in vocabulary.special_ids:
        return False, False
    for byte in vocabulary.token_bytes(token):
        if escaped:
            escaped = False
        elif in_string and byte == 0x5C:
            escaped = True
        elif byte == 0x22:
            in_string = not in_string
    return in_string, escaped
