"""The protected text that a document of the corpus contains.

The lines of a text that a step changed, in a short form.

`lmworks corpus trace`: follow one document from its row in the source through every decision, by applying each step again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

import pyarrow.compute as pc

from lmworks.corpus.analysis.prepared import SPLITS, KeptDocument, PreparedCorpus, read_documents, source_changed_error
from lmworks.corpus.document import Batch, Document, Drop, Fact, Step, Variants, split_id
from lmworks.corpus.engine.decontamination_pass import contaminated_documents
from lmworks.corpus.engine.dedup_decisions import REPEATED
from lmworks.corpus.engine.duplicates_pass import REASONS
from lmworks.corpus.engine.job import Piece
from lmworks.corpus.engine.reading_pass import BATCH_CHARACTERS, steps_of
from lmworks.corpus.engine.step_runner import drop_with_original, make_variants
from lmworks.corpus.read.part import EXCERPT, Item
from lmworks.ui.terminal import bar


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


MAX_LINES = 3000  # longer texts take too long to compare line by line
_AROUND = 60


def changed_lines(before: str, after: str, most: int = 12) -> list[str]:
    """Removed lines (`- `), added lines (`+ `) and changed lines (both); of each, an excerpt around the first difference. At most `most`
    lines.
    """
    old, new = before.split("\n"), after.split("\n")
    head = _common_prefix(old, new)
    tail = _common_prefix(old[head:][::-1], new[head:][::-1])
    old, new = old[head : len(old) - tail], new[head : len(new) - tail]
    if len(old) + len(new) > MAX_LINES:
        return [f"{len(old):,} lines were replaced by {len(new):,}, from line {head + 1:,} on"]
    shown: list[str] = []
    for kind, first, last, begin, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            shown += _diff_lines(old[first:last], new[begin:end])
    more = len(shown) - most
    return shown if more <= 0 else [*shown[:most], f"... and {more:,} more lines"]


def _diff_lines(old: list[str], new: list[str]) -> list[str]:
    found = []
    for place in range(max(len(old), len(new))):
        gone, come = old[place] if place < len(old) else None, new[place] if place < len(new) else None
        at = 0
        if gone is not None and come is not None:
            at = _common_prefix(gone, come)
        found += [f"{sign} {_excerpt(line, at)}" for sign, line in (("-", gone), ("+", come)) if line is not None]
    return found


def _common_prefix(old: Sequence[str], new: Sequence[str]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


def _excerpt(line: str, at: int) -> str:
    if not line:
        return "(empty line)"
    start, stop = max(0, at - _AROUND // 2), at + _AROUND
    return ("..." if start else "") + line[start:stop] + ("..." if stop < len(line) else "")


@dataclass(frozen=True)
class TraceEvent:
    """One stage or step in the history of a document: the `outcome` in a few words, facts that are new or changed, and changed lines of
    text.
    """

    stage: str
    outcome: str
    facts: Mapping[str, Fact] = field(default_factory=dict)
    changed: Sequence[str] = ()


@dataclass(frozen=True)
class Trace:
    """The history of a document. `decision` is the row that was recorded when the corpus was made, `text` the beginning of the last text.

    `agrees` is false if the decision is no longer reproducible: the source, a file that a step reads, or lmworks itself has changed since.
    """

    id: str
    origin: str
    source: str
    domain: str
    decision: dict[str, Any]
    moments: list[TraceEvent]
    text: str
    kept: str | None
    agrees: bool


def trace(corpus: PreparedCorpus, identity: str) -> Trace:
    """Trace a document. Raises UserError for an unknown id, and for a source that has changed or cannot be read again.

    The steps are first applied to the document alone. If the outcome differs from the recorded one, they are applied to all earlier
    documents of its part, because some steps (`lines`) depend on those.
    """
    piece = corpus.piece_of(identity)
    decision = read_documents(corpus, [identity])[0].decision
    _, _, number, _ = split_id(identity)
    item = next(item for place, item in enumerate(corpus.items(piece)) if place == number)
    if item.origin != decision["origin"]:
        raise source_changed_error(piece.source)
    original = read_documents(corpus, [decision["variant_of"]])[0].decision if decision["variant_of"] else decision
    moments = [TraceEvent("read", _read(original, item), item.facts)]
    kept = corpus.find_kept(identity) if decision["fate"] in SPLITS else None
    final = _text_after_steps(corpus, piece, identity, kept)
    if decision["fate"] in ("quarantine", "max_bytes"):
        agrees, text = (decision["fate"] == "quarantine") == (item.reason is not None), item.text
        moments.append(TraceEvent(decision["fate"], f"dropped: {decision['reason']}"))
    elif item.reason is not None:
        agrees, text = False, item.text
    else:
        document = _document(piece, decision["variant_of"] or identity, item)
        steps = steps_of(corpus.job, piece)
        replay = _Replay(decision, final)
        if not replay.run(steps, [[document]]):
            replay = _Replay(decision, final)
            replay.run(steps_of(corpus.job, piece), _batches(corpus, piece, number))
        agrees, text = replay.agrees, replay.text
        moments += [*replay.moments, *_events_after_steps(corpus, piece, decision, kept, text)]
    place = f"{kept.path.relative_to(corpus.out)}:{kept.row}" if kept else None
    shown = kept.columns["text"] if kept else text
    return Trace(identity, item.origin, piece.source.name, piece.source.domain, decision, moments, shown[:EXCERPT], place, agrees)


def _text_after_steps(corpus: PreparedCorpus, piece: Piece, identity: str, kept: KeptDocument | None) -> str | None:
    """The text after the steps, if it is known: where passages are cut afterwards, the kept text is not it."""
    staged = corpus.staged(piece, identity)
    if staged:
        return staged[1]
    return kept.columns["text"] if kept and not corpus.job.recipe.corpus.dedup.substring else None


def _read(decision: Mapping[str, Any], item: Item) -> str:
    return f"{decision['bytes']:,} bytes" + (f", no document: {item.reason}" if item.reason else "")


def _document(piece: Piece, identity: str, item: Item) -> Document:
    source = piece.source
    return Document(identity, item.text, item.origin, source.name, source.domain, item.language or source.language, item.facts)


def _batches(corpus: PreparedCorpus, piece: Piece, number: int) -> Iterator[list[Document]]:
    """The documents of a part that entered the steps, up to this one."""
    entered: list[bool] = []
    for _, rows in corpus.decisions(piece, ("fate", "variant_of")):
        rows = rows.filter(pc.equal(rows["variant_of"], ""))
        entered += [fate not in ("quarantine", "max_bytes") for fate in rows["fate"].to_pylist()]
    batch: list[Document] = []
    characters = 0
    with bar(f"replay {piece}", number + 1) as progress:
        for place, item in enumerate(corpus.items(piece)):
            if entered[place] and item.reason is None:
                batch.append(_document(piece, f"{piece.source.name}/{piece.number}/{place}", item))
                characters += len(item.text)
            if characters >= BATCH_CHARACTERS or place == number:
                progress.advance(len(batch))
                yield batch
                batch, characters = [], 0
            if place == number:
                return


class _Replay:
    """Applies the steps to batches of documents and records what happens to one of them."""

    def __init__(self, decision: Mapping[str, Any], final: str | None) -> None:
        self._decision, self._text_after_steps = decision, final
        self._identity = decision["variant_of"] or decision["id"]  # replaced by the id of the variant at the step that makes it
        self._numbers: dict[str, int] = {}
        self.moments: list[TraceEvent] = []
        self.text = ""
        self._dropped: tuple[str, str] | None = None
        self._measured: dict[str, Fact] = {}

    def run(self, steps: Sequence[Step], batches: Iterable[list[Document]]) -> bool:
        """Apply the steps to batches; the last batch contains the document. Returns whether the outcome equals the recorded one."""
        for batch in batches:
            self.moments = []
            for step in steps:
                batch = self._apply_step(step, batch) if batch else batch
            self.text = next((document.text for document in batch if document.id == self._identity), self.text)
        return self.agrees

    def _apply_step(self, step: Step, batch: list[Document]) -> list[Document]:
        left = []
        gone: dict[str, Drop] = {}
        for document, found in zip(batch, step(Batch(batch)), strict=True):
            made = found.made if isinstance(found, Variants) else ()
            outcome = _checked(document, found.document if isinstance(found, Variants) else found)
            original = str(document.facts.get("variant_of", ""))
            if isinstance(outcome, Document) and original in gone:
                outcome = drop_with_original(gone[original])
            if isinstance(outcome, Drop):
                gone[document.id] = outcome
            if document.id == self._identity:
                self._record(step, document, outcome)
            if not isinstance(outcome, Document):
                continue
            left.append(outcome)
            for variant, one in make_variants(self._numbers, step, outcome, made):
                one = _checked(outcome, one)
                if variant.id == self._decision["id"]:
                    self._identity = variant.id
                    self.moments.pop()  # the event that says that the original is unchanged
                    self._record(step, outcome, one, f"variant {variant.id} made of it")
                left += [one] if isinstance(one, Document) else []
        return sorted(left, key=lambda document: split_id(document.id))

    def _record(self, step: Step, before: Document, after: Document | Drop, made: str = "") -> None:
        self._measured |= {name: after.facts[name] for name in step.statistics if name in after.facts}
        new = {name: value for name, value in after.facts.items() if before.facts.get(name) != value}
        self.text = before.text
        if isinstance(after, Drop):
            self._dropped = step.name, after.reason
            detail = f" ({after.detail})" if after.detail else ""
            self.moments.append(TraceEvent(step.name, f"dropped: {after.reason}{detail}", new))
            return
        if after.language != before.language:
            new["language"] = after.language
        self.text = after.text
        outcome = made or "unchanged"
        if after.text != before.text:
            outcome = f"{made or 'changed'}: {len(before.text.encode()):,} to {len(after.text.encode()):,} bytes"
        changed = changed_lines(before.text, after.text) if after.text != before.text else ()
        self.moments.append(TraceEvent(step.name, outcome, new, changed))

    @property
    def agrees(self) -> bool:
        """Whether outcome and measured statistics equal those that were recorded when the corpus was made."""
        numbers = {name: value for name, value in self._measured.items() if isinstance(value, int | float) and math.isfinite(value)}
        if any(self._decision.get(name) != value for name, value in numbers.items()):
            return False
        fate, reason = self._decision["fate"], self._decision["reason"]
        if self._dropped:
            return self._dropped == (fate, reason)
        return fate in (*SPLITS, "dedup", "decontaminate") and self._text_after_steps in (None, self.text)


def _checked(before: Document, outcome: Document | Drop) -> Document | Drop:
    empty = isinstance(outcome, Document) and outcome.text is not before.text and not outcome.text.strip()
    return Drop("empty_text") if empty else outcome


def _events_after_steps(
    corpus: PreparedCorpus, piece: Piece, decision: Mapping[str, Any], kept: KeptDocument | None, text: str
) -> Iterator[TraceEvent]:
    """The events after the steps."""
    fate, reason = decision["fate"], decision["reason"]
    if fate not in (*SPLITS, "dedup", "decontaminate"):
        return
    if reason in REASONS[1:]:
        copied = read_documents(corpus, [decision["copy_of"]])[0].decision
        where = f"{copied['id']} ({copied['origin']}), whose fate is {copied['fate']}"
        yield TraceEvent("dedup", f"dropped: {reason} of {where}")
        return
    if fate == "dedup" and reason == REPEATED:
        cut = corpus.cut(piece, decision["id"])
        left = f", {cut[1]:.0%} of its words did not occur earlier" if cut else ""
        yield TraceEvent("dedup", f"dropped: {reason}{left}", changed=changed_lines(text, cut[0]) if cut else ())
        return
    yield TraceEvent("dedup", "no copy of an earlier document")
    if kept and kept.columns["text"] != text:
        yield TraceEvent("substring", "passages cut", changed=changed_lines(text, kept.columns["text"]))
    if fate == "validation":
        yield TraceEvent("hold out", "held out for validation")
    elif corpus.job.recipe.corpus.decontaminate:
        found = contaminated_passages(corpus, piece, decision["id"])
        verb = "dropped" if fate == "decontaminate" else "kept, but contains protected text" if found else "no protected text"
        yield TraceEvent("decontaminate", verb, changed=[f'{one.against}: "{one.passage}"' for one in found])
    if kept:
        yield TraceEvent("write", f"{kept.path.relative_to(corpus.out)}, row {kept.row:,}")
