"""The kinds of comparison of an answer with the right one, and the reading of right answers.

| kind      | the answer                      | is right if                                                                                |
|-----------|---------------------------------|--------------------------------------------------------------------------------------------|
| `exact`   | the stated text                 | it is the same text, except for case, white space, quotes, and punctuation at its end      |
| `numeric` | the stated, or the last, number | it is the same number (`numbers.py`); units are not compared, `50%` is `50` and also `0.5` |
| `math`    | the stated expression           | it is the same text or number, or math-verify finds it equal                              |

A right answer is read as a reply is: worked solutions end in `#### 72`, a box or "the answer is". Without such a mark it has to be the
answer itself.

Expressions are compared by math-verify (LaTeX to sympy) in a process with limits, because a model may write anything: powers of powers,
brackets a thousand deep, integrals. An expression that takes more than `SECONDS` of processor time, the memory or the length below counts
as not equal. Only math-verify's reading of a whole expression is used, and not its search for one in a text, which takes a part for the
whole (9 for `9**9`, 1 for `1 1/2`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

from lmworks.errors import UserError
from lmworks.untrusted.limited_process import CallFailed, LimitedProcess, ProcessDied
from lmworks.verify.marks import stated, statements, without_thoughts
from lmworks.verify.numbers import final_number, number

SECONDS = 2.0  # of processor time; the first comparison of a process takes 0.5, later ones 0.01 to 0.3
_MEMORY = 2 << 30
_LONGEST = 1000  # characters
_NAMES = (
    "pi", "infinity", "infty", "theta", "alpha", "beta", "gamma", "ln", "log", "exp", "sin", "cos", "tan", "cot", "sec", "csc",
    "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc",
    "arsinh", "arcosh", "artanh", "arcsinh", "arccosh", "arctanh",
)  # fmt: skip
_FUNCTIONS = re.compile(rf"(?<![\\A-Za-z])({'|'.join(_NAMES)})(?![A-Za-z])")
_MATRIX = re.compile(r"\\(begin|end) ?\{(?:small)?([pbvBV]?matrix|array)\}(?: ?\{([lcr| ]{1,40})\})?")  # with the columns of an array


def check_installed(where: str) -> None:
    """Raise `UserError`, which names the recipe key `where`, if math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise UserError(f"{where} compares expressions by math-verify, which is not installed: pip install 'lmworks[eval]'")


def equal_expressions(given: str, right: str) -> bool:
    """Whether an expression equals the right one. Never raises on what they contain."""
    if max(len(given), len(right)) > _LONGEST:
        return False
    return _ask(given, right) == "equal"


def is_readable(expression: str) -> bool:
    """Whether an expression can be read."""
    return len(expression) <= _LONGEST and _ask(expression, expression) in ("equal", "different")


@lru_cache(maxsize=4096)
def _ask(given: str, right: str) -> str:
    try:
        return _process()(json.dumps([_latex(given), _latex(right)]).encode()).decode()
    except (ProcessDied, CallFailed):
        return "unreadable"


@lru_cache(maxsize=1)
def _process() -> LimitedProcess:
    check_installed("this")
    return LimitedProcess("lmworks.verify.answers:make_comparison", SECONDS, _MEMORY, wall_seconds=30 * SECONDS)


def _latex(text: str) -> str:
    """The way in which people type mathematics as LaTeX."""
    text = text.strip().strip("$").strip().removesuffix(".").translate(_SYMBOLS)
    text = _MATRIX.sub(lambda found: f"\\{found[1]}{{{found[2]}}}" + (f"{{{found[3].replace('|', '')}}}" if found[3] else ""), text)
    text = re.sub(r"\\operatorname ?\{([a-z]{1,10})\}", r" \1 ", text)
    text = re.sub(r"√ ?\(([^()]*)\)|√ ?([A-Za-z0-9]+)", lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\*\* ?(\w+|\([^()]*\))", r"^{\1}", text)
    text = re.sub(r"\^ ?([0-9]{2,})", r"^{\1}", text)
    text = _FUNCTIONS.sub(lambda found: f"\\{'infty' if found[1] == 'infinity' else found[1]} ", text)
    text = re.sub(r"\\le(?=[(\[])|\\right(?=[)\]])|\\left(?=[(\[])", "", text)  # sizes of brackets, also as some published rows cut them
    text = text.replace("\\iny", "\\infty").replace("{}", "")
    return re.sub(r"(?<=[)\]]) ?U ?(?=[(\[])", r"\\cup", text)


_SYMBOLS = str.maketrans({
    "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "−": "-", "–": "-", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "θ": r"\theta ", "²": "^{2}", "³": "^{3}", "°": r"^{\circ}",
})  # fmt: skip


def make_comparison() -> Callable[[bytes], bytes]:
    """The function of the separate process: a JSON list of both expressions to `equal`, `different` or `unreadable`."""
    import logging
    from dataclasses import replace

    from latex2sympy2_extended.latex2sympy2 import normalize_latex
    from math_verify import LatexExtractionConfig, verify
    from math_verify.parser import parse_latex_cached

    logging.disable(logging.CRITICAL)
    config = replace(LatexExtractionConfig().normalization_config, boxed="none")

    def call(data: bytes) -> bytes:
        given, right = json.loads(data)
        try:
            read = [parse_latex_cached(normalize_latex(one, config)) for one in (given, right)]
        except Exception:  # its grammar raises plain exceptions
            return b"unreadable"
        if any(one is None for one in read):
            return b"unreadable"
        return b"equal" if verify(read[1], read[0], timeout_seconds=None) else b"different"

    return call


Kind = Literal["exact", "numeric", "math"]
Verdict = Literal["right", "wrong", "unparsed"]

_LONGEST_TEXT = 300  # characters of a right answer without a mark; longer ones are worked solutions
_SENTENCE = re.compile(r"(?<!\\)[.!?](?:\s|$)")
_WRAPPER = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf|operatorname)\s?\{([^{}]*)\}")
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z])[^\W\d_]{4,}")
_BASE = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]{1,2})\}?")
_FORMULA = re.compile(r"\$\$([^$]{1,400})\$\$|\$([^$\n]{1,400})\$|\\\(([^\n]{1,400}?)\\\)|\\\[(.{1,400}?)\\\]", re.DOTALL)
_NO_WORDS = {*_NAMES, "sqrt", "frac"}


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
    readable = number(found) or _is_text(found) or _BASE.fullmatch(_bare(found)) or _MATRIX.search(found) or is_readable(found)
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
    return bool(one) and equal_expressions(given, right)


def _verdict(right: bool) -> Verdict:
    return "right" if right else "wrong"


def _bare(text: str) -> str:
    """Without white space, dollar signs, sizes of brackets, wrappers of text, and a full stop at the end."""
    text = _WRAPPER.sub(r"\1", text.strip().strip("$").strip()).removesuffix(".")
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    # the break of a matrix row (two backslashes) comes first: its second one is no space
    return re.sub(r"(\\\\)|\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|[\s$]", r"\1", text)


def _is_text(text: str) -> bool:
    """Whether an answer is words and no expression: `Evelyn`, `\\text{east}`, `(C)`. Letters in words do not commute."""
    if re.search(r"\\(?:text|mbox)", text) and not re.search(r"[0-9]", text):
        return True
    plain = _MATRIX.sub("", _WRAPPER.sub("", text))
    words = [word for word in _WORD.findall(plain) if word.casefold() not in _NO_WORDS]
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
