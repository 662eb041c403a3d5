"""Documents through the steps of a recipe, with everything counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from lmworks.corpus.document import Batch, Document, Drop, Outcome, Step
from lmworks.corpus.engine.counts import Passage, Samples, count
from lmworks.corpus.engine.decisions import Decisions
from lmworks.errors import UserError


class Passing:
    """The steps for one part, what came to each and what left it."""

    def __init__(self, steps: Sequence[Step], decisions: Decisions, rejected: Samples) -> None:
        self._steps, self._decisions, self._rejected = steps, decisions, rejected
        self.passages = [Passage(step.name) for step in steps]

    def through(self, batch: Batch) -> tuple[Batch, list[int]]:
        """(what is left of the batch, the sizes in bytes of its texts)."""
        sizes = [_size(document.text) for document in batch.documents]
        for step, passage in zip(self._steps, self.passages, strict=True):
            if len(batch):
                batch, sizes = self._one(step, passage, batch, sizes)
        for document in batch.documents:
            self._decisions.keep(document.id, document.language)
        return batch, sizes

    def _one(self, step: Step, passage: Passage, batch: Batch, before: list[int]) -> tuple[Batch, list[int]]:
        kept: list[Document] = []
        sizes: list[int] = []
        for document, outcome, size in zip(batch.documents, _outcomes(step, batch), before, strict=True):
            passage.came.add(size)
            same = outcome is document or (isinstance(outcome, Document) and outcome.text is document.text)
            after = size if same else 0
            if not same and isinstance(outcome, Document):
                outcome, after = _sound(outcome)
            self._decisions.measure(document.id, outcome.facts, step.statistics)
            if isinstance(outcome, Drop):
                count(passage.dropped, outcome.reason, size)
                self._decisions.drop(document.id, step.name, outcome.reason, outcome.detail)
                more = {"step": step.name, "detail": outcome.detail}
                self._rejected.add(document.source, outcome.reason, document.id, document.origin, document.text, **more)
            else:
                kept.append(outcome)
                sizes.append(after)
                passage.edited += after - size
        unchanged = len(kept) == len(batch) and all(new is old for new, old in zip(kept, batch.documents, strict=True))
        return batch if unchanged else Batch(kept), sizes


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _sound(document: Document) -> tuple[Outcome, int]:
    """A document whose text a step has changed, and its size; or why it is none any more."""
    try:
        size = _size(document.text)
    except UnicodeEncodeError:
        return Drop("bad_utf8", "half of a surrogate pair"), 0
    return (document, size) if document.text and not document.text.isspace() else (Drop("empty_text"), 0)


def _outcomes(step: Step, batch: Batch) -> Sequence[Outcome]:
    try:
        outcomes = step(batch)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        _blame(step, batch, error)
    if len(outcomes) != len(batch):
        raise UserError(f"step {step.name} gave {len(outcomes)} outcomes for {len(batch)} documents; it must give one for each")
    return outcomes


def _blame(step: Step, batch: Batch, error: Exception) -> NoReturn:
    """Say which document a step has failed on."""
    name = f"documents {batch.documents[0].id} to {batch.documents[-1].id}"
    for document in batch.documents:
        try:
            step(Batch([document]))
        except Exception as alone:
            name, error = f"document {document.id} ({document.origin})", alone
            break
    what = " ".join(f"{type(error).__name__}: {error}".split())
    raise UserError(f"step {step.name} failed on {name}: {what}; mend the step or take it out of corpus.steps") from error
