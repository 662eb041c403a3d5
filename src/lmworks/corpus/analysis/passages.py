"""The protected text that a document of the corpus contains."""

from __future__ import annotations

from dataclasses import dataclass

from lmworks.corpus.analysis.prepared import PreparedCorpus
from lmworks.corpus.engine.job import Piece
from lmworks.corpus.engine.passes.decontamination import contaminated_documents
from lmworks.corpus.readers.items import EXCERPT


@dataclass(frozen=True)
class Passage:
    """A passage of a document that also occurs in the protected text `against`."""

    against: str
    passage: str


def contaminated_passages(corpus: PreparedCorpus, piece: Piece, identity: str) -> list[Passage]:
    """The passages for which a document was dropped, or could have been, longest first.

    They are computed again if staged files are kept; otherwise only the passages listed in the report are known.
    """
    found = corpus.staged(piece, identity)
    if found is None:
        reported = [one for one in corpus.report["contamination"] if one["id"] == identity]
        return [Passage(one["against"], one["passage"]) for one in reported]
    row, text = found
    text = cut[0] if (cut := corpus.cut(piece, identity)) else text  # the text that was scanned
    matches = contaminated_documents(corpus.job, piece).get(row, [])
    return [Passage(match.against, text[match.start : match.end][:EXCERPT]) for match in matches]
