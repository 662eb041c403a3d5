"""The step `math`: verifies arithmetic and answers; see `lmworks.corpus.checks.arithmetic`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lmworks.corpus.document import Document, Drop, Outcome, PerDocument, Step
from lmworks.corpus.steps.base import Context, StepOptions

_FACTS = ("math_checked", "math_wrong")


class Math(StepOptions):
    """Check the arithmetic in a text: `<<3*4=12>>`, chains such as `3 + 4 = 7`, and the boxed answer against the fact `answer`."""

    step: Literal["math"] = Field("math", description="which step this is")
    wrong: Literal["drop", "count"] = Field("drop", description="what to do with a document with a wrong result")
    chains: bool = Field(True, description="also check plain equations in running text")
    tolerance: float = Field(0.01, ge=0, description="largest relative difference of a rounded result")

    def make(self, context: Context) -> Step:
        """A step that verifies results; documents without any pass."""
        from lmworks.corpus.checks.arithmetic import checks

        def decide(document: Document) -> Outcome:
            answer = document.facts.get("answer")
            found = list(checks(document.text, None if answer is None else str(answer), self.chains, self.tolerance))
            wrong = [check.shown for check in found if not check.correct]
            facts: dict[str, Any] = dict(zip(_FACTS, (len(found), len(wrong)), strict=True))
            if wrong and self.wrong == "drop":
                return Drop("wrong_math", "; ".join(wrong)[:300], facts)
            return document.with_facts(**facts)

        return PerDocument("math", decide, makes=_FACTS, statistics=_FACTS)
