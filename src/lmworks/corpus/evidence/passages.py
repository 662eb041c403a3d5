"""Which protected text a document of the corpus holds."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow.compute as pc

from lmworks.corpus.engine.fates import staged
from lmworks.corpus.engine.gate import verdicts
from lmworks.corpus.engine.job import Piece
from lmworks.corpus.engine.tables import row_groups
from lmworks.corpus.evidence.opened import Prepared
from lmworks.corpus.items import EXCERPT


@dataclass(frozen=True)
class Passage:
    """Words of a document that stand in the protected text `against`."""

    against: str
    passage: str


def passages(corpus: Prepared, piece: Piece, identity: str, text: str) -> list[Passage]:
    """The passages for which a document of this text was, or could have been, dropped, longest first.

    They are looked for again where the staged files are kept; else those that the report has are all there are.
    """
    if not staged(corpus.job, piece).is_file():
        told = [one for one in corpus.report["contamination"] if one["id"] == identity]
        return [Passage(one["against"], one["passage"]) for one in told]
    for first, rows in row_groups(staged(corpus.job, piece), ("id",)):
        place = pc.index(rows["id"], identity).as_py()
        if place >= 0:
            matches = verdicts(corpus.job, piece).get(first + place, [])
            return [Passage(match.against, text[match.start : match.end][:EXCERPT]) for match in matches]
    return []
