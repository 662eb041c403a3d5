"""The table of conventions beside derived rates is what the laws derive."""

from __future__ import annotations

import re
from pathlib import Path

from lmworks.recipe.scaling_laws import batch_tokens, parse_size, peak_learning_rate
from lmworks.ui.amounts import amount

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sizing.md"


def test_derived_rates_and_batches_are_those_of_the_laws() -> None:
    table = PAGE.read_text(encoding="utf-8").split("<!-- conventions -->")[1].split("<!-- end of conventions -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    assert len(rows) == 5
    for size, tokens, _, rate, _, batch in rows:
        parameters, budget = (parse_size(re.sub(r" .*", "", text)) for text in (size, tokens))
        assert f"{peak_learning_rate(parameters, budget):.3g}" == rate
        assert amount(batch_tokens(budget, 2048)) == batch
