"""From the options of a step to the function that processes documents: `make_step`.

Numpy, parsers and models are imported by the functions that need them, so that a step that is not used costs nothing.

The step `python` is a function of the user's own, in a file named in the recipe:

    from lmworks.corpus.document import Document, Drop, step

    @step(makes=["digits"], statistics=["digits"])
    def few_digits(document: Document, most: float = 0.3) -> Document | Drop:
        share = sum(map(str.isdigit, document.text)) / max(len(document.text), 1)
        return Drop("digits", f"{share:.0%}") if share > most else document.with_facts(digits=share)
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.corpus.document import Context, Document, Drop, Outcome, PerDocument, Step, Variants
from lmworks.corpus.transform.filter_steps import language_step, lines_step, quality_step, repeats_step, rules_step
from lmworks.corpus.transform.rewrite import rewrite_step
from lmworks.errors import UserError
from lmworks.io.urls import reveal
from lmworks.recipe.schema.steps import (
    Clean,
    Code,
    Language,
    Lines,
    Math,
    Pii,
    Python,
    Quality,
    Repeats,
    Rewrite,
    Rules,
    StepOptions,
)

if TYPE_CHECKING:
    from lmworks.untrusted.sandbox import Limits, RunResult


def make_step(options: StepOptions, context: Context) -> Step:
    """The step for the documents of one source. Raises `UserError` for options that are invalid on this machine or for this source."""
    return _MAKERS[type(options)](options, context)


def _clean(options: Clean, context: Context) -> Step:
    from lmworks.corpus.transform.cleaning import clean

    def clean_text(document: Document) -> Document:
        if options.exact_code and document.domain == "code":
            return document
        return document.with_text(clean(document.text, options.mojibake))

    return PerDocument("clean", clean_text)


def _pii(options: Pii, context: Context) -> Step:
    """A step that masks personal data; the facts are `pii` and `pii_KIND`."""
    from lmworks.corpus.transform.pii import mask

    names = ("pii", *(f"pii_{kind}" for kind in options.kinds))

    def masked(document: Document) -> Document:
        text, counts = mask(document.text, options.kinds, options.replace == "made_up")
        facts: dict[str, Any] = {"pii": sum(counts.values()), **{f"pii_{kind}": count for kind, count in counts.items()}}
        return document.with_text(text).with_facts(**facts)

    return PerDocument("pii", masked, makes=names, statistics=names)


_PYTHON = ("py", "pyi")


def _code(options: Code, context: Context) -> Step:
    """A step that checks documents of the domain code. With `run`, raises `UserError` if the sandbox does not work."""
    from lmworks.corpus.transform.checks import KNOWN, parse_code, suffix
    from lmworks.untrusted.sandbox import Limits, run_python

    limits = Limits(seconds=float(options.timeout), memory=int(options.memory))
    if options.run and (trial := _trial(limits)).outcome != "passed":
        raise UserError(
            f"step code, run: true: the sandbox does not work here ({trial.detail}); leave run out, or use Linux 5.13 or newer"
        )

    def check(document: Document) -> Outcome:
        kind = suffix(str(document.facts.get("path", document.origin)))
        if document.domain != "code":
            return document
        if kind not in KNOWN:
            return document if options.unknown == "keep" else Drop("unknown_code", f".{kind}" if kind else "no suffix")
        share, error = parse_code(document.text, kind)
        facts: dict[str, Any] = {"code_errors": round(share, 6)}
        if share > (0.0 if kind in _PYTHON else options.max_error_fraction):
            return Drop("unparsable", error or f"{share:.1%} of .{kind}", facts)
        if options.run and kind == "py":
            ran = run_python(document.text, limits)
            if ran.outcome != "passed":
                return Drop(f"run_{ran.outcome}", ran.detail, facts)
        return document.with_facts(**facts)

    return PerDocument("code", check, makes=("code_errors",), statistics=("code_errors",))


@lru_cache(maxsize=8)
def _trial(limits: Limits) -> RunResult:
    """The result of an empty program: whether the sandbox works within the limits."""
    from lmworks.untrusted.sandbox import run_python

    return run_python("pass", limits)


_FACTS = ("math_checked", "math_wrong")


def _math(options: Math, context: Context) -> Step:
    """A step that verifies results; documents without any pass."""
    from lmworks.corpus.transform.checks import checks

    def decide(document: Document) -> Outcome:
        answer = document.facts.get("answer")
        found = list(checks(document.text, None if answer is None else str(answer), options.chains, options.relative_tolerance))
        wrong = [check.shown for check in found if not check.correct]
        facts: dict[str, Any] = dict(zip(_FACTS, (len(found), len(wrong)), strict=True))
        if wrong and options.wrong == "drop":
            return Drop("wrong_math", "; ".join(wrong)[:300], facts)
        return document.with_facts(**facts)

    return PerDocument("math", decide, makes=_FACTS, statistics=_FACTS)


def _python(options: Python, context: Context) -> Step:
    """Import the file and bind the options. Raises `UserError` for a missing file or function and for options it does not take."""
    path = context.folder / options.file
    function, given = _function(path, options.function), reveal(options.options)
    try:
        inspect.signature(function).bind(None, **given)
    except TypeError as error:
        raise UserError(f"step {options.function} of {path}: {error}; see its arguments after the first") from None
    bound = functools.partial(function, **given)
    declared = getattr(function, "declared", {})

    def checked(document: Document) -> Outcome:
        try:
            outcome = bound(document)
        except UserError:
            raise
        except Exception as error:
            where = f"document {document.id} ({document.origin})"
            raise UserError(f"step {options.function} of {path} failed on {where}: {_one_line(error)}") from error
        if not isinstance(outcome, (Document, Drop, Variants)):
            what = f"returned {type(outcome).__name__} for {document.id}"
            allowed = "a Document, Drop(reason) or Variants(document, [...])"
            raise UserError(f"step {options.function} of {path} {what}; it must return {allowed}")
        return outcome

    return PerDocument(options.name or options.function, checked, **declared)


def _function(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"lmworks_user_step_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"{path} is not a Python file; corpus.steps names it as the file of the step {name!r}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path}, the file of the step {name!r}, cannot be imported: {_one_line(error)}") from error
    if not callable(getattr(module, name, None)):
        raise UserError(f"{path} has no function {name!r}")
    return getattr(module, name)


def _one_line(error: Exception) -> str:
    """The error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


_MAKERS: dict[type[StepOptions], Callable[[Any, Context], Step]] = {
    Clean: _clean,
    Code: _code,
    Language: language_step,
    Lines: lines_step,
    Math: _math,
    Pii: _pii,
    Python: _python,
    Quality: quality_step,
    Repeats: repeats_step,
    Rewrite: rewrite_step,
    Rules: rules_step,
}
