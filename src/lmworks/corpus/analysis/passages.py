"""The protected text that a document of the corpus contains."""

from __future__ import annotations

from dataclasses import dataclass

from lmworks.corpus.analysis.prepared import Prepared
from lmworks.corpus.engine.job import Piece
from lmworks.corpus.engine.passes.decontamination import verdicts
from lmworks.corpus.readers.items import EXCERPT


@dataclass(frozen=True)
class Passage:
    """A passage of a document that also occurs in the protected text `against`."""

    against: str
    passage: str


def passages(corpus: Prepared, piece: Piece, identity: str) -> list[Passage]:
    """The passages for which a document was dropped, or could have been, longest first.

    They are computed again if staged files are kept; otherwise only the passages listed in the report are known.
    """
    found = corpus.staged(piece, identity)
    if found is None:
        told = [one for one in corpus.report["contamination"] if one["id"] == identity]
        return [Passage(one["against"], one["passage"]) for one in told]
    row, text = found
    text = cut[0] if (cut := corpus.cut(piece, identity)) else text  # the text that was scanned
    return [Passage(match.against, text[match.start : match.end][:EXCERPT]) for match in verdicts(corpus.job, piece).get(row, [])]
