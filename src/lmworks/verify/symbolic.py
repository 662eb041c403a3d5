"""Whether two mathematical expressions are equal, by math-verify (LaTeX to sympy) in a process with limits.

A model may write anything: powers of powers, brackets a thousand deep, integrals. What takes more than `SECONDS` of processor time, the
memory or the length below counts as not equal. Only math-verify's reading of a whole expression is used, and not its search for one in a
text, which takes a part for the whole (9 for `9**9`, 1 for `1 1/2`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec

from lmworks.errors import UserError
from lmworks.untrusted.limited_process import CallFailed, LimitedProcess, ProcessDied

SECONDS = 2.0  # of processor time; the first comparison of a process takes 0.5, later ones 0.01 to 0.3
_MEMORY = 2 << 30
_LONGEST = 1000  # characters
_FUNCTIONS = re.compile(r"(?<![\\A-Za-z])(pi|infinity|infty|sin|cos|tan|cot|sec|csc|ln|log|exp|theta|alpha|beta|gamma)(?![A-Za-z])")


def check_installed(where: str) -> None:
    """Raise `UserError`, which names the recipe key `where`, if math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise UserError(f"{where} compares expressions by math-verify, which is not installed: pip install 'lmworks[eval]'")


def equal(given: str, right: str) -> bool:
    """Whether an expression equals the right one. Never raises on what they contain."""
    if max(len(given), len(right)) > _LONGEST:
        return False
    return _ask(given, right) == "equal"


def readable(expression: str) -> bool:
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
    return LimitedProcess("lmworks.verify.symbolic:make", SECONDS, _MEMORY, wall_seconds=30 * SECONDS)


def _latex(text: str) -> str:
    """The way in which people type mathematics as LaTeX."""
    text = text.strip().strip("$").strip().removesuffix(".").translate(_SYMBOLS)
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


def make() -> Callable[[bytes], bytes]:
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
