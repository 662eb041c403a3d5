"""Passes over rows, cut into steps: one rule for every stage that reads its rows a number of times (`tune`, `dpo`), and for plans.

All rows are read. The last step takes those that are left, which may be fewer than the others have; its loss is the mean over what it
reads. So each row is trained `epochs` times: with a fraction of a pass, `floor(epochs)` times, and the first rows of the last pass's order
once more. A step never ends with an epoch: it goes on with the rows of the next one.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil


def rows_read(rows: int, epochs: float) -> int:
    """Rows that are read in `epochs` passes over `rows` of them, rounded up to a whole row: 95 of 63 rows in 1.5 passes."""
    return ceil(Fraction(str(epochs)) * rows)  # 0.1 is a tenth, not the nearest binary fraction


def steps_of(rows: int, rows_per_step: int, epochs: float) -> int:
    """Steps that read these rows, the last of which may have fewer rows."""
    return -(-rows_read(rows, epochs) // rows_per_step)


def places_of(step: int, rows: int, rows_per_step: int, epochs: float) -> range:
    """The places of a step in the passes: place p is row p % rows of the order of pass p // rows."""
    return range(step * rows_per_step, min((step + 1) * rows_per_step, rows_read(rows, epochs)))
