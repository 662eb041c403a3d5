"""The step `code`: code must parse and, optionally, Python must run in the sandbox."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from lmworks.corpus.document import Document, Drop, Outcome, PerDocument, Step
from lmworks.corpus.steps.base import Context, StepOptions
from lmworks.errors import UserError
from lmworks.recipe.schema.units import Bytes, Seconds

if TYPE_CHECKING:
    from lmworks.untrusted.sandbox import Limits, RunResult

_PYTHON = ("py", "pyi")


class Code(StepOptions):
    """Drop code that does not parse and, on request, Python that does not run."""

    renamed: ClassVar = {"errors": "max_error_fraction", "seconds": "timeout"}

    step: Literal["code"] = Field("code", description="which step this is")
    max_error_fraction: float = Field(
        0.05, ge=0, le=1, description="largest fraction of bytes inside syntax errors, which macros also cause; Python may have none"
    )
    unknown: Literal["keep", "drop"] = Field("keep", description="what to do with documents in a language without a parser")
    run: bool = Field(False, description="run Python documents in the sandbox and drop those that fail; slow")
    timeout: Seconds = Field(Seconds.parse("5 s"), description="time limit of a run")
    memory: Bytes = Field(Bytes.parse("512MB"), description="memory limit of a run")

    def make(self, context: Context) -> Step:
        """A step that checks documents of the domain code. With `run`, raises `UserError` if the sandbox does not work."""
        from lmworks.corpus.checks.parsing import KNOWN, parse_code, suffix
        from lmworks.untrusted.sandbox import Limits, run_python

        limits = Limits(seconds=float(self.timeout), memory=int(self.memory))
        if self.run and (trial := _trial(limits)).outcome != "passed":
            raise UserError(
                f"step code, run: true: the sandbox does not work here ({trial.detail}); leave run out, or use Linux 5.13 or newer"
            )

        def check(document: Document) -> Outcome:
            kind = suffix(str(document.facts.get("path", document.origin)))
            if document.domain != "code":
                return document
            if kind not in KNOWN:
                return document if self.unknown == "keep" else Drop("unknown_code", f".{kind}" if kind else "no suffix")
            share, error = parse_code(document.text, kind)
            facts: dict[str, Any] = {"code_errors": round(share, 6)}
            if share > (0.0 if kind in _PYTHON else self.max_error_fraction):
                return Drop("unparsable", error or f"{share:.1%} of .{kind}", facts)
            if self.run and kind == "py":
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
