"""What the files of a survey are good for: documents, conversations, preferences, answers with labels, or prompts with right answers.

The readers and converters of the stages decide, on a sample: a row means what the stage would make of it. A source of documents gets the
first domain whose rules keep most of the sample, and the language that most of its documents have.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Literal

from lmworks.corpus import read
from lmworks.corpus.document import Batch, Context, Document, Drop
from lmworks.corpus.read import parquet
from lmworks.corpus.read.huggingface import open_dataset
from lmworks.corpus.read.listing import File, has_extension
from lmworks.corpus.read.opening import COMPRESSED
from lmworks.corpus.read.part import Item, damage_errors
from lmworks.corpus.transform.filter_steps import identifier
from lmworks.corpus.transform.rule_measures import STOP_WORDS
from lmworks.corpus.transform.steps import make_step
from lmworks.errors import UserError
from lmworks.init.survey import MOST_LISTED, ROWS, Files, Survey
from lmworks.recipe.schema.corpus import Corpus, Source
from lmworks.recipe.schema.steps import Rules
from lmworks.text.letters import spaceless_language
from lmworks.train.data.forms import convert_conversation, convert_prompt, detect
from lmworks.train.data.preference_forms import convert_preference
from lmworks.train.data.row_columns import NoRow, described_columns
from lmworks.train.data.row_files import TOO_LONG, read_files
from lmworks.train.rewards import right_answer_of
from lmworks.train.unit_tests import runnable_tests
from lmworks.verify.marks import statements

Use = Literal["documents", "conversations", "preferences", "labels", "rewards"]
ROWS_READ, FILES_READ, BYTES_READ = 20, 32, 1 << 19
"""Rows of a file, files of a folder, and bytes of text of a source that are read."""
_ITEMS = 200  # documents of a file
_SKIPPED = 1 << 28  # bytes of a file of lines up to which lines that are too long are read over
_KEPT = 0.8  # share of the sampled text that the rules of a domain keep where the domain fits
_TEXT = ("text", "content", "body", "document", "article", "raw_content", "markdown", "html", "abstract", "description")
_DOMAINS: dict[str, tuple[str, ...]] = {
    "text": ("prose", "other"), "markdown": ("docs", "prose", "other"), "html": ("web", "prose", "other"), "warc": ("web", "other"),
    "latex": ("math", "docs", "other"), "notebook": ("docs", "other"), "code": ("code",), "jsonl": ("prose", "other"),
    "parquet": ("prose", "other"), "huggingface": ("prose", "other"),
}  # fmt: skip
_COMPRESSION = 3  # of JSON by gzip and zstd, about
_LIMIT = int(Corpus.model_fields["max_document_bytes"].default)


@dataclass
class Found:
    """A source or a set of the recipe: what it is used for, the reader (`kind`), the path, and what is known of it.

    `about` is the text column, the form of the rows, or the reward; `rows` and `text_bytes` are estimates; `lengths` are the bytes of text
    of sampled documents or rows, `texts` some of them; `why` says how this was decided, `notes` what to know.
    """

    use: Use
    kind: str
    path: str
    files: int
    bytes: int
    about: str = ""
    rows: int = 0
    text_bytes: int = 0
    name: str = ""
    language: str = "en"
    domain: str = "other"
    rules: str | None = None
    document_format: str | None = None
    why: str = ""
    notes: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    worked: bool = False

    def scale(self, read_bytes: int) -> None:
        """Estimate rows and text from the sample, which has so many bytes of input; they are exact where everything was read."""
        factor = self.bytes / max(1, read_bytes)
        self.rows = max(len(self.lengths), round(len(self.lengths) * factor))
        self.text_bytes = round(sum(self.lengths) * factor)


def understand(survey: Survey) -> list[Found]:
    """All that can be used. What is not understood is counted in the survey."""
    found: list[Found] = []
    for files in (part for whole in survey.files for part in whole.apart()):
        made = _rows(files, survey) if files.kind == ROWS else _documents(files, survey)
        for one in made if files.path is None else ():
            one.notes.append(f"move {files.beside[0]} and the like elsewhere: they are no training data, and are read with these")
        found += made
    for folder in survey.datasets:
        found += _rows(Files("huggingface", folder, True, 1, 0, [(folder, 0)]), survey)
    taken = set[str]()
    for one in found:
        plain = re.sub(r"[^a-z0-9]+", "-", os.path.basename(one.path.rstrip("/*")).lower().split(".")[0]).strip("-")[:40] or one.use
        names = chain((plain, f"{plain}-{one.kind}"), (f"{plain}-{number}" for number in count(2)))
        one.name = next(name for name in names if name not in taken)
        taken.add(one.name)
    return found


def _documents(files: Files, survey: Survey) -> list[Found]:
    found = Found("documents", files.kind, files.path or files.everything, files.count, files.bytes)
    sample = [File(path, size) for path, size in files.sample[:FILES_READ]]
    size = _read(found, sample)
    if not found.lengths and files.kind == "text" and "enormous" in "".join(found.notes):
        found.document_format, found.notes = "lines", ["a document per line, since whole files are longer than a document may be"]
        size = _read(found, sample[:1])
    if not found.lengths:
        survey.leave_out(f"{files.kind} files without a readable document ({'; '.join(found.notes) or 'empty'})", files.folder, files.count)
        return []
    found.scale(size)
    _judge(found)
    return [found]


def _read(found: Found, files: list[File]) -> int:
    """Read a sample with the reader of the corpus; returns the bytes of input read."""
    source = Source(name="sample", kind=found.kind, path=found.path, document_format=found.document_format, license="-")
    reasons: Counter[str] = Counter()
    size = 0
    for file in files:
        span = None if found.document_format is None else (0, min(file.size, BYTES_READ))
        before = sum(found.lengths)
        try:
            items = list(_before_the_rest(islice(read.read(source, read.Part((file,), file.size, span), _LIMIT), _ITEMS), file, span))
            size += file.size if len(items) < _ITEMS and span is None else sum(item.consumed for item in items)
            for item in items:
                if item.reason is not None:
                    reasons[item.reason] += 1
                    continue
                found.lengths.append(len(item.text.encode()))
                if sum(map(len, found.texts)) < BYTES_READ:
                    found.texts.append(item.text)
        except UserError as error:
            found.notes.append(str(error))
            break
        if sum(found.lengths) > 4 * BYTES_READ or (sum(found.lengths) == before and sum(reasons.values()) > _ITEMS):
            break
    if reasons:
        found.notes.append("in the sample: " + ", ".join(f"{count} {reason}" for reason, count in reasons.most_common()))
    return size


def _before_the_rest(items: Iterator[Item], file: File, span: tuple[int, int] | None) -> Iterator[Item]:
    """The items, without what follows a line that is too long in a large file: the reader would look for the end of this line first."""
    for item in items:
        yield item
        if span is not None and item.reason == "enormous" and _is_long(file.path, file.size):
            return


def _is_long(path: str, size: int) -> bool:
    """Whether the end of a line that is too long may be far."""
    return size > _SKIPPED or path.lower().endswith(COMPRESSED)


def _judge(found: Found) -> None:
    """Choose language and domain by the sample."""
    if found.kind == "code":
        found.language, found.domain = "code", "code"
        return
    languages = Counter(filter(None, map(language_of, found.texts[:50])))
    if languages:
        found.language = languages.most_common(1)[0][0]
        others = [name for name, count in languages.items() if name != found.language and count > 0.1 * languages.total()]
        if others:
            found.notes.append(
                f"also {', '.join(others)}: the rules of {found.language} may drop it; put each language into a folder of its own"
            )
    shares = {domain: _kept(found, domain) for domain in _DOMAINS[found.kind]}
    found.domain = next((domain for domain, share in shares.items() if share >= _KEPT), max(shares, key=shares.__getitem__))
    found.why = f"text in the column {found.about}; " * bool(found.about)
    found.why += ", ".join(f"the rules of {domain} keep {share:.0%} of the sample" for domain, share in shares.items())
    if shares[found.domain] < 0.5:
        found.rules = "none"
        found.notes.append("no rules, since those of every domain drop most of the sample; docs/rules.md lists them")


def _kept(found: Found, domain: str) -> float:
    """The share of the sampled text that the rules of a domain keep."""
    source = Source(name="sample", kind="text", path="-", domain=domain, language=found.language, license="-")
    documents = [Document(f"sample/0/{n}", text, "", "sample", domain, found.language) for n, text in enumerate(found.texts)]
    outcomes = make_step(Rules(), Context(source, 1, Path()))(Batch(documents))
    kept = sum(len(one.text) for one, outcome in zip(documents, outcomes, strict=True) if not isinstance(outcome, Drop))
    return kept / max(1, sum(len(one.text) for one in documents))


def language_of(text: str) -> str:
    """The language of a text, by the model of the step `language` if it is installed, else by the commonest words; empty if not known."""
    with suppress(UserError):
        language, score = identifier()(text)
        return language if score >= 0.5 else ""
    if (spaceless := spaceless_language(text[:2000])) and sum(not char.isascii() for char in text[:2000]) > 0.3 * len(text[:2000]):
        return spaceless
    words = Counter(re.findall(r"\w+", text[:20_000].lower()))
    shares = {language: sum(words[word] for word in known) / len(known) ** 0.5 for language, known in STOP_WORDS.items()}
    best = max(shares, key=shares.__getitem__)
    return best if shares[best] > 0.01 * words.total() else ""


@dataclass
class _Meaning:
    """What one row is: its use, and a text column, a form or a reward; the bytes of its text. `worked`: its answer is a whole solution."""

    use: Use | None
    about: str
    size: int = 0
    text: str = ""
    worked: bool = False
    raw: int = 0  # bytes of the row as JSON; 0 if it cannot be read


_Sampled = tuple[str, int, list[_Meaning]]  # a file: path, bytes, what each of its first rows is


def _rows(files: Files, survey: Survey) -> list[Found]:
    """Sets and sources of files of rows: one for the folder where all sampled files mean the same, else one for each file."""
    by_meaning: dict[tuple[Use, str], list[_Sampled]] = {}
    whole = files.count <= MOST_LISTED
    for path, size in files.sample[:FILES_READ]:
        meanings = list(_sampled(path, size))
        counts = Counter((one.use, one.about) for one in meanings)
        (use, about), count = counts.most_common(1)[0] if counts else ((None, "it has no rows"), 0)
        if use is None:
            survey.leave_out(f"files of rows that no stage understands ({about})", path)
        else:
            by_meaning.setdefault((use, about), []).append((path, size, meanings))
            if count < len(meanings):
                survey.leave_out("rows of another form than most of their file, of those sampled", path, len(meanings) - count)
    for key in [key for key, group in by_meaning.items() if key[0] == "documents" and key[1] not in _TEXT and _is_one_row(group)]:
        survey.leave_out("JSON files with one object, whose longest text is no document", by_meaning.pop(key)[0][0])
    if not by_meaning:
        return []
    if len(by_meaning) == 1:  # files that are not understood are left out and counted by the stage, too
        ((use, about), group) = next(iter(by_meaning.items()))
        return _sets(use, about, group, files.path or files.everything, files)
    if whole:
        return [
            one
            for (use, about), group in by_meaning.items()
            for path, size, meanings in group
            for one in _sets(use, about, [(path, size, meanings)], path, Files(ROWS, path, False, 1, size, [(path, size)]))
        ]
    (use, about), group = max(by_meaning.items(), key=lambda pair: len(pair[1]))
    found = _sets(use, about, group, files.path or files.everything, files)
    for one in found:
        one.notes.append(
            f"{len(files.sample[:FILES_READ]) - len(group)} of {len(files.sample[:FILES_READ])} sampled files are something else; "
            "put files of each kind into a folder of their own"
        )
    return found


def _is_one_row(group: list[_Sampled]) -> bool:
    """Whether these files have one row together, which does not show what its columns mean."""
    return sum(len(rows) for _, _, rows in group) == 1


def _sets(use: Use, about: str, group: list[_Sampled], path: str, files: Files) -> list[Found]:
    """The sets for the sampled files that mostly mean the same; documents have one source for JSON and one for parquet.

    Rows are estimated: all rows of a file times the share of its sampled rows that mean this.
    """
    endings = {"parquet" if has_extension(name, parquet.SUFFIXES) else "jsonl" for name, _, _ in group}
    kinds = ["huggingface"] if files.kind == "huggingface" else sorted(endings) if use == "documents" else ["files"]
    looked_at = len(files.sample[:FILES_READ])
    result = []
    for kind in kinds:
        mine = [one for one in group if kind in ("files", "huggingface") or has_extension(one[0], parquet.SUFFIXES) == (kind == "parquet")]
        found = Found(use, kind, path, round(files.count * len(mine) / looked_at), round(files.bytes * len(mine) / looked_at), about)
        rows = 0.0
        for name, size, sampled in mine:
            meant = [one for one in sampled if (one.use, one.about) == (use, about)]
            rows += _count(name, size, [one.raw for one in sampled]) * len(meant) / len(sampled)
            found.lengths += [one.size for one in meant]
            found.texts += [one.text for one in meant if one.text]
            found.worked |= any(one.worked for one in meant)
        found.rows = round(rows * files.count / looked_at)
        found.text_bytes = round(found.rows * sum(found.lengths) / max(1, len(found.lengths)))
        found.why = f"rows of the form {about}" if use == "conversations" else about
        if use == "documents":
            _judge(found)
        result.append(found)
    return result


def _count(path: str, size: int, raw: list[int]) -> float:
    """All rows of a file, whatever they mean: as parquet or a dataset states, counted if short, else by the size of those that were read.

    `raw` are the bytes of the sampled rows as JSON, 0 for one that cannot be read.
    """
    if has_extension(path, parquet.SUFFIXES) and not path.lower().endswith(COMPRESSED):
        import pyarrow.parquet as pq

        with suppress(*damage_errors()):
            return float(pq.read_metadata(path).num_rows)
    if len(raw) < ROWS_READ:
        return float(len(raw))
    with suppress(UserError, OSError):  # it may have changed meanwhile
        if os.path.isdir(path):
            return float(len(open_dataset(path, "train")))
        if size <= BYTES_READ * 4 and not path.lower().endswith(COMPRESSED):
            return float(sum(1 for _ in read_files("init", path)))
    known = [one for one in raw if one]
    return max(len(raw), (_COMPRESSION if path.lower().endswith(COMPRESSED) else 1) * size * len(known) / max(1, sum(known)))


def _sampled(path: str, size: int) -> Iterator[_Meaning]:
    """What the first rows of a file are: those before one that is too long in a large file, since its end may be far."""
    try:
        for row in islice(read_files("init", path), ROWS_READ):
            if row.fault is not None:
                reason = row.fault.partition(":")[0]
                yield _Meaning(None, reason)
                if reason == TOO_LONG and _is_long(path, size):
                    return
                continue
            found = meaning(row.value)
            found.raw = len(json.dumps(row.value, ensure_ascii=False, default=str).encode("utf-8", "replace")) + 1
            yield found
    except (UserError, OSError) as error:
        reason = str(error)
        yield _Meaning(None, "its files are missing, or are no files" if reason.startswith("init.path") else reason.partition(":")[0])


def meaning(row: Any) -> _Meaning:
    """What a row is. Preferences first, since these have columns of conversations too; a right answer before the conversation it ends."""
    for labeled in (False, True):
        with suppress(NoRow):
            pair = convert_preference(row, "init:1", labeled)
            use: Use = "preferences" if pair.label is None else "labels"
            about = "pairs of a chosen and a rejected answer" if use == "preferences" else "answers with a label, good or bad"
            return _Meaning(use, about, _size(pair.conversation(max(pair.answers, key=_size))))
    with suppress(NoRow):
        prompt = convert_prompt(row, "init:1")
        if (reward := _reward(prompt.row, row)) is not None:
            written = str(prompt.row.get("answer", prompt.row.get("solution", "")))
            return _Meaning(
                "rewards", reward, _size(prompt.messages), worked=next(statements(written), None) is not None and len(written) > 80
            )
    if isinstance(row, Mapping) and detect(row) not in (None, "text"):
        try:
            found = convert_conversation(row)
            said = _size(found.messages) if found.messages else sum(len(text) for text, _ in found.segments)
            return _Meaning("conversations", found.form, said)
        except NoRow as reason:
            return _Meaning(None, str(reason).partition(":")[0])
    if isinstance(row, Mapping) and (column := _text_column(row)) is not None:
        return _Meaning("documents", column, len(row[column].encode("utf-8", "replace")), row[column])
    return _Meaning(None, described_columns(row)[:200] if isinstance(row, Mapping) else f"not objects but {type(row).__name__}")


def _reward(found: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
    """The reward for a row with a right answer; None for an answer that is to be imitated."""
    if found.get("tests") is not None:
        with suppress(NoRow):
            runnable_tests(found)
            return "unit_tests"
    if right_answer_of(found, "numeric") is not None:
        return "numeric"
    if any("\\boxed" in str(found.get(name, "")) for name in ("answer", "solution")):
        return "math"
    stated = {"ground_truth", "final_answer", "reference_answer", "reward_model"} & row.keys()
    return "exact" if stated and right_answer_of(found, "exact") is not None else None


def _text_column(row: Mapping[str, Any]) -> str | None:
    """The column with the text of a document: a usual name, or the longest text where it is most of the row and a paragraph at least."""
    texts = {name: value for name, value in row.items() if isinstance(name, str) and isinstance(value, str) and value.strip()}
    if usual := next((name for name in _TEXT if name in texts), None):
        return usual
    longest = max(texts, key=lambda name: len(texts[name]), default=None)
    enough = longest is not None and len(texts[longest]) >= max(200, 0.5 * sum(map(len, texts.values())))
    return longest if enough and longest is not None and not set("{}.") & set(longest) else None


def _size(messages: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the text of messages, calls and thoughts included."""
    return sum(len(json.dumps(dict(one), ensure_ascii=False, default=str).encode("utf-8", "replace")) - 30 for one in messages)
