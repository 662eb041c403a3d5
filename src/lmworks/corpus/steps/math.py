"""The step `math`: arithmetic and answers that can be checked; see `lmworks.corpus.checks.arithmetic`."""

from __future__ import annotations

from typing import Any

from lmworks.corpus.checks.arithmetic import checks
from lmworks.corpus.document import Document, Drop, Outcome, PerDocument, Step
from lmworks.corpus.steps import Context
from lmworks.recipe.schema.text_steps import Math

_FACTS = ("math_checked", "math_wrong")


def make(node: Math, context: Context) -> Step:
    """Check what can be checked; documents without any of it pass."""

    def judge(document: Document) -> Outcome:
        answer = document.facts.get("answer")
        found = list(checks(document.text, None if answer is None else str(answer), node.chains, node.tolerance))
        wrong = [check.shown for check in found if not check.right]
        facts: dict[str, Any] = dict(zip(_FACTS, (len(found), len(wrong)), strict=True))
        if wrong and node.wrong == "drop":
            return Drop("wrong_math", "; ".join(wrong)[:300], facts)
        return document.with_facts(**facts)

    return PerDocument("math", judge, makes=_FACTS, statistics=_FACTS)
