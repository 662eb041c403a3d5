"""The step `code`: code must parse, and Python may be asked to run in the sandbox."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from lmworks.corpus.checks.parsing import KNOWN, parsed, suffix
from lmworks.corpus.document import Document, Drop, Outcome, PerDocument, Step
from lmworks.corpus.steps import Context
from lmworks.errors import UserError
from lmworks.recipe.schema.text_steps import Code
from lmworks.untrusted.sandbox import Limits, RunResult, run_python

_PYTHON = ("py", "pyi")


@lru_cache(maxsize=8)
def _trial(limits: Limits) -> RunResult:
    """A program that does nothing: does it run within the limits?"""
    return run_python("pass", limits)


def make(node: Code, context: Context) -> Step:
    """Judge documents of the domain code; others pass. With `run`, raises `UserError` where the machine cannot confine a program."""
    limits = Limits(seconds=float(node.timeout), memory=int(node.memory))
    if node.run and (trial := _trial(limits)).outcome != "passed":
        raise UserError(f"step code, run: true: the sandbox does not work here ({trial.detail}); leave run out, or use Linux 5.13 or newer")

    def judge(document: Document) -> Outcome:
        kind = suffix(str(document.facts.get("path", document.origin)))
        if document.domain != "code":
            return document
        if kind not in KNOWN:
            return document if node.unknown == "keep" else Drop("unknown_code", f".{kind}" if kind else "no suffix")
        share, error = parsed(document.text, kind)
        facts: dict[str, Any] = {"code_errors": round(share, 6)}
        if share > (0.0 if kind in _PYTHON else node.max_error_fraction):
            return Drop("unparsable", error or f"{share:.1%} of .{kind}", facts)
        if node.run and kind == "py":
            ran = run_python(document.text, limits)
            if ran.outcome != "passed":
                return Drop(f"run_{ran.outcome}", ran.detail, facts)
        return document.with_facts(**facts)

    return PerDocument("code", judge, makes=("code_errors",), statistics=("code_errors",))
