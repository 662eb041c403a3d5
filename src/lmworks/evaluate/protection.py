"""Evaluation items to exclude from all training text, as far as their data can be read on this machine.

The items that a text was searched for are recorded as hashes in a file beside it, by which a score counts as clean or not.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lmworks.corpus.contamination import Decontaminator, Question
from lmworks.corpus.read import parts, read
from lmworks.corpus.transform.cleaning import clean
from lmworks.errors import Unavailable, UserError, all_refusals
from lmworks.evaluate.bits_per_byte import held_out
from lmworks.evaluate.generation import scoring
from lmworks.evaluate.sets import benchmarks
from lmworks.evaluate.sets.benchmarks import GENERATION, is_generated
from lmworks.io.files import atomic_path, read_json, sha256_file
from lmworks.io.run_layout import corpus_files
from lmworks.recipe.schema.evaluate import Protected
from lmworks.recipe.schema.recipe import Recipe

SEARCHED = "searched.npy"


def item_hashes(items: Iterable[Question]) -> np.ndarray:
    """(I,) unique uint64, ascending: hashes of question and answer of each item."""
    digests = [hashlib.blake2b(f"{one.text}\0{one.answer}".encode("utf-8", "surrogatepass"), digest_size=8).digest() for one in items]
    return np.unique(np.frombuffer(b"".join(digests), dtype="<u8"))


def save_searched(folder: Path, items: np.ndarray) -> None:
    """Write the record for the text in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / SEARCHED) as aside, open(aside, "wb") as handle:
        np.save(handle, items, allow_pickle=False)


def searched_items(folders: Sequence[Path]) -> np.ndarray:
    """The items that the text of every folder was searched for; empty if a folder has no record."""
    found: np.ndarray | None = None
    for folder in folders:
        path = folder / SEARCHED
        items = np.load(path, allow_pickle=False) if path.exists() else np.zeros(0, dtype=np.uint64)
        found = items if found is None else np.intersect1d(found, items)
    return np.zeros(0, dtype=np.uint64) if found is None else found


_WHOLE = 1 << 62
_LONGEST = 1 << 24


@dataclass(frozen=True)
class Protection:
    """`questions` of all sets that an evaluation uses; `unread` are the sets that could not be read, with the reason."""

    questions: list[Question]
    unread: dict[str, str]

    def decontaminator(self, ngram: int, corpus_dir: Path | None = None) -> Decontaminator:
        """A decontaminator of the questions, and of the held-out documents of a corpus if one is given."""
        decontaminator = Decontaminator(ngram)
        names, answers = [one.name for one in self.questions], [clean(one.answer) for one in self.questions]
        decontaminator.protect(names, [clean(one.text) for one in self.questions], answers, evaluation=True)
        if corpus_dir is not None and corpus_files(corpus_dir, "validation"):
            for domain, texts in held_out(corpus_dir).items():
                decontaminator.protect([f"{domain}/{number}" for number in range(len(texts))], texts, evaluation=False)
        return decontaminator

    def digest(self, corpus_dir: Path) -> str:
        """Hex SHA-256 of the texts that such a decontaminator protects."""
        held = sha256_file(corpus_dir / "manifest.json")
        return hashlib.sha256(item_hashes(self.questions).tobytes() + held.encode()).hexdigest()


def protection(recipe: Recipe) -> Protection:
    """Read them all. Raises `UserError` for local data or a task that cannot be read; only the package and the hub may be unavailable."""
    wanted = recipe.evaluate
    questions: list[Question] = []
    unread: dict[str, str] = {}
    for one in wanted.benchmarks:
        try:
            questions += GENERATION[one.name].questions(one) if is_generated(one) else benchmarks.questions(one)
        except Unavailable as reason:
            unread[one.name] = str(reason)
    questions += scoring.questions(wanted.tasks, wanted.task_items)
    for own in wanted.protect:
        questions += _questions(own)
    return Protection(questions, unread)


def refusals_of_own(recipe: Recipe) -> Iterator[UserError]:
    """Evaluation sets of the user's own that cannot be read or have no items; all of them are read."""
    return all_refusals(partial(deque, _questions(own), 0) for own in recipe.evaluate.protect)


def _questions(own: Protected) -> Iterator[Question]:
    source, found, answered = own.source, 0, False
    where = f"evaluate.protect.{own.name}"
    try:
        for part in parts(source, _WHOLE):
            for item in read(source, part, _LONGEST):
                if item.reason is not None:
                    raise UserError(f"{where}: {item.origin} is no item ({item.reason}): set its question, or take the row out")
                answer = str(item.facts.get(own.answer, "")) if own.answer else ""
                found, answered = found + 1, answered or bool(answer)
                place = item.origin.rpartition("/")[2]
                yield Question(f"{own.name}/{place}", item.text, answer)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text.removeprefix(f'source {own.name}: ')}") from None
    if not found:
        raise UserError(f"{where}: {own.path} has no items")
    if own.answer and not answered:
        raise UserError(f"{where}: no item has an answer at {own.answer!r}; set answer to the column that has it, or leave it out")


def doubt(name: str, asked: Sequence[Question], searched: Sequence[Path], recipe: Recipe, corpus_dir: Path) -> str | None:
    """Why a score on these items of the set `name` may be one on trained text; None if all that was trained on was searched for them.

    `searched` are the folders with the records of what each body of training text was searched for.
    """
    missed = int((~np.isin(item_hashes(asked), searched_items(searched))).sum())
    if not missed:
        return None
    decontaminator, path = recipe.corpus.decontaminate, corpus_dir / "report.json"
    if decontaminator is None or decontaminator.action == "report":
        return f"corpus.decontaminate is {'null' if decontaminator is None else 'set to report only'}"
    unread = read_json(path).get("unread", {}) if path.exists() else {}
    if name in unread:
        return f"{unread[name]}; once the set can be read, train again in another run_dir, so that all text is searched for it"
    return f"not all text trained on was searched for {missed} of its {len(asked)} items"
