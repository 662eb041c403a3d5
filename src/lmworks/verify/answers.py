"""The kinds of comparison of an answer with the right one, and the reading of right answers.

| kind      | the answer                      | is right if                                                                                |
|-----------|---------------------------------|--------------------------------------------------------------------------------------------|
| `exact`   | the stated text                 | it is the same text, except for case, white space, quotes, and punctuation at its end      |
| `numeric` | the stated, or the last, number | it is the same number (`numbers.py`); units are not compared, `50%` is `50` and also `0.5` |
| `math`    | the stated expression           | it is the same text or number, or math-verify finds it equal (`symbolic.py`)               |

A right answer is read as a reply is: worked solutions end in `#### 72`, a box or "the answer is". Without such a mark it has to be the
answer itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from lmworks.verify import symbolic
from lmworks.verify.marks import stated, statements
from lmworks.verify.numbers import final_number, number
from lmworks.verify.thoughts import without_thoughts

Kind = Literal["exact", "numeric", "math"]
Verdict = Literal["right", "wrong", "unparsed"]

_LONGEST_TEXT = 300  # characters of a right answer without a mark; longer ones are worked solutions
_SENTENCE = re.compile(r"(?<!\\)[.!?](?:\s|$)")
_WRAPPER = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf|operatorname)\s?\{([^{}]*)\}")
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z])[^\W\d_]{4,}")
_BASE = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]{1,2})\}?")
_FORMULA = re.compile(r"\$\$([^$]{1,400})\$\$|\$([^$\n]{1,400})\$|\\\(([^\n]{1,400}?)\\\)|\\\[(.{1,400}?)\\\]", re.DOTALL)
_FUNCTION_NAMES = {"sqrt", "sinh", "cosh", "tanh", "infinity", "infty", "theta", "alpha", "beta", "gamma", "sin", "cos", "frac"}


@dataclass(frozen=True)
class RightAnswer:
    """The right answer of a row, as it is compared."""

    text: str
    kind: Kind

    def judge(self, reply: str, thinking: bool = False) -> Verdict:
        """The verdict on a reply. unparsed: it states nothing of this kind. `thinking`: its prompt has opened the thoughts."""
        if self.kind == "numeric":
            found = final_number(reply, thinking)
            return "unparsed" if found is None else _verdict((right := number(self.text)) is not None and found.equals(right))
        given = stated(reply, thinking)
        if not given:
            return "unparsed"
        if self.kind == "exact":
            return _verdict(normal(self.text) in {normal(given), normal(first_sentence(given))})
        mark = next(statements(reply, thinking), None)
        if mark is None:
            if same_expression(given, self.text):  # the reply is nothing but the answer
                return "right"
            last = _last_expression(without_thoughts(reply, thinking))
            return "unparsed" if last is None else _verdict(same_expression(last, self.text))
        before = _before_prose(given) if mark.mark == "said" else given
        return _verdict(same_expression(given, self.text) or (before != given and same_expression(before, self.text)))


def right_answer(written: object, kind: Kind) -> RightAnswer | None:
    """The right answer of a row, from its column; None if none can be read in it."""
    text = str(written).strip() if isinstance(written, (str, int, float)) and not isinstance(written, bool) else ""
    found = stated(text)
    mark = next(statements(text), None)
    if kind == "numeric":
        return RightAnswer(found, kind) if number(found) else None
    if not found or (mark is None and ("\n" in found or len(found) > _LONGEST_TEXT)):
        return None
    if kind == "exact":
        return RightAnswer(found, kind) if normal(found) else None
    found = _before_prose(found) if mark and mark.mark == "said" else found
    readable = number(found) or _is_text(found) or _BASE.fullmatch(_bare(found)) or symbolic.readable(found)
    return RightAnswer(found, kind) if readable else None


def normal(text: str) -> str:
    """A text without case, repeated white space, quotes and emphasis around it, and punctuation at its end: `"Paris."` is `paris`."""
    text = " ".join(text.casefold().split())
    while (shorter := text.strip("\"'“”‘’`* ").rstrip(".!?,;:。！？")) != text:
        text = shorter
    return text


def first_sentence(text: str) -> str:
    """The first sentence of a text: what is added behind an answer is no part of it."""
    end = _SENTENCE.search(text)
    return text[: end.start()] if end else text


def same_expression(given: str, right: str) -> bool:
    """Whether two mathematical answers are the same: as texts, as numbers, or as expressions."""
    one, other = _bare(given), _bare(right)
    if one and one == other:
        return True
    if (first := number(given)) and (second := number(right)):
        return first.equals(second)
    if _is_text(given) or _is_text(right):
        return bool(one) and normal(one).strip("()") == normal(other).strip("()")
    based = [_BASE.fullmatch(side) for side in (one, other)]
    if all(based):
        return len({(side[1], side[2]) for side in based if side}) == 1
    return bool(one) and symbolic.equal(given, right)


def _verdict(right: bool) -> Verdict:
    return "right" if right else "wrong"


def _bare(text: str) -> str:
    """Without white space, dollar signs, sizes of brackets, wrappers of text, and a full stop at the end."""
    text = _WRAPPER.sub(r"\1", text.strip().strip("$").strip()).removesuffix(".").replace("\\left", "").replace("\\right", "")
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    return re.sub(r"\\[!,;: ]|[\s$]", "", text)


def _is_text(text: str) -> bool:
    """Whether an answer is words and no expression: `Evelyn`, `\\text{east}`, `(C)`. Letters in words do not commute."""
    if re.search(r"\\(?:text|mbox)", text) and not re.search(r"[0-9]", text):
        return True
    plain = _WRAPPER.sub("", text)
    words = [word for word in _WORD.findall(plain) if word.casefold() not in _FUNCTION_NAMES]
    return bool(words) or bool(re.fullmatch(r"\(?[A-Z]\)?", plain.strip()))


def _before_prose(text: str) -> str:
    """A formula between dollar signs, or up to the end of the sentence, where a statement goes on in words: `$x^2$ square meters`."""
    if found := re.match(r"\$([^$]{1,400})\$", text):
        return found[1]
    return first_sentence(text).strip() if _SENTENCE.search(text) and not re.match(r"[0-9.]*$", text) else text


def _last_expression(text: str) -> str | None:
    """The last formula, or the last number, of a reply that marks no answer."""
    formulas = _FORMULA.findall(text[-20_000:])
    if formulas:
        last = next(part for part in formulas[-1] if part)
        return last.rpartition("=")[2].strip() if last.count("=") else last
    found = final_number(text)
    return found.text if found else None
