"""Conversations to token files for fine-tuning: read, cut to length, deduplicated, split, written with a mask of the assistant's tokens.

A body of data that has a bad row loses that row only; the manifest counts what was lost and why, with examples. `conversations` shows the
written ones as text, with what is trained marked.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.corpus.contamination import Decontaminator
from lmworks.errors import UserError
from lmworks.io.files import read_json, write_json
from lmworks.io.run_layout import corpus_files
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import ChatData
from lmworks.shards.indexed import IndexedFile
from lmworks.tokenizer.messages import Message, normal
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.data.decontamination import Contents, Decontamination
from lmworks.train.data.masks import Fitted, check_mask, examples, fit, has_special_text, pieces_of_text
from lmworks.train.data.row_columns import NoRow
from lmworks.train.data.row_files import skipped_files
from lmworks.train.data.sets import Drawn, LeftOut, Row, open_set, require_sets
from lmworks.ui import terminal as progress_bars
from lmworks.ui.terminal import Bar

_MOST_HELD_OUT = 500
_CUT_TURN, _CUT_ANSWER = "cut at an answer", "with an answer that is cut at sequence_length"
_PIECES = "of text without a template in pieces of sequence_length"
_OPEN, _SPECIAL = "answers without a stop token", "with special tokens as text"


def build_chat_data(recipe: Recipe, tokenizer: Tokenizer, out_dir: Path, corpus_dir: Path | None = None,
                    exclude_questions: Collection[str] = (), decontaminator: Decontaminator | None = None) -> dict[str, Any]:
    """Write `out_dir`/{train,validation}/NAME.{bin,idx,mask} for each of `recipe.tune.data`, and manifest.json (returned).

    A conversation has at most sequence_length + 1 tokens (inputs and labels of one sequence); a longer one is cut after an answer that
    fits, or dropped. Left out are repeated conversations, contaminated ones (see `Decontamination`: `exclude_questions` are those of the
    evaluation), those whose mask is wrong (`check_mask`), and those whose document the corpus holds out (`corpus_dir`/validation).
    `tune.validation_fraction` of them, at most 500 per set, go to validation. The result depends on the arguments only. Raises UserError
    if a file or task does not exist, a dataset yields nothing, or decontamination is set to fail and finds an item.
    """
    assert recipe.tune is not None, "the recipe has a tune section"
    require_sets(recipe, "tune")
    tokenizer.fix_date()
    out_dir = Path(out_dir)
    for split in ("train", "validation"):
        shutil.rmtree(out_dir / split, ignore_errors=True)
        (out_dir / split).mkdir(parents=True)
    held_out = _held_out_origins(corpus_dir)
    bodies: dict[str, Any] = {}
    unavailable: dict[str, str] = {}
    limits = [data.limit for data in recipe.tune.data]
    with progress_bars.bar("tuning data", total=None if None in limits else sum(filter(None, limits))) as progress:
        for data in recipe.tune.data:
            progress.note(data.name)
            rows = open_set(data, recipe)
            if isinstance(rows, str):
                unavailable[data.name] = rows
                progress.advance(data.limit or 0)
            else:
                where, generated = f"tune.data.{data.name}", data.kind == "tasks"
                decontamination = Decontamination(where, recipe, exclude_questions, decontaminator, generated=generated)
                bodies[data.name] = _write(data, rows, recipe, tokenizer, out_dir, held_out, decontamination, progress)
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


def described(name: str, body: dict[str, Any]) -> str:
    """One line about a set in the manifest: its form, conversations, tokens, what is trained, and what was cut and left out."""
    splits = [body["train"], body["validation"]]
    count, tokens, trained = (sum(split[key] for split in splits) for key in ("conversations", "tokens", "learned_tokens"))
    forms = ", ".join(body["forms"]) or body["kind"]
    line = f"{name} ({forms}): {count:,} conversations, {body['validation']['conversations']:,} of them held out; {tokens:,} tokens, "
    line += f"{100 * trained / max(tokens, 1):.0f}% trained"
    line += f"; drawn evenly from {body['rows']:,} rows, by count" if body["drawn"] else ""
    found = LeftOut(Counter(body["left_out"]), noted=Counter(body["noted"]), longest=body.get("sequence_length_for_all", 0))
    return line + found.ending() + (f"; {body['skipped_files']}" if body["skipped_files"] else "")


def _write(data: ChatData, rows: Iterator[Row], recipe: Recipe, tokenizer: Tokenizer, out_dir: Path, held_out: Collection[str],
           decontamination: Decontamination, progress: Bar) -> dict[str, Any]:
    from lmworks.shards.indexed import IndexedWriter, token_dtype

    assert recipe.tune is not None
    left_out, limit, to_validation = LeftOut(), data.limit, _chooser(recipe.tune.validation_fraction)

    def read(first: bool) -> Iterator[Row]:
        again = rows if first else open_set(data, recipe)
        return _good(iter(()) if isinstance(again, str) else again, left_out if first else LeftOut(), held_out)

    chosen = Drawn(read, limit, recipe.seed, data.name)
    counts = {split: Counter(conversations=0, tokens=0, learned_tokens=0, ended=0, whole=0) for split in ("train", "validation")}
    kept, answers, forms, stops = 0, 0, Counter[str](), list(tokenizer.stop_ids)
    searched = decontamination.search(chosen, lambda row: Contents(row.origin, row.messages, (row.tools, row.segments)))
    encoded = _encoded(searched, left_out, tokenizer, int(recipe.tune.sequence_length) + 1, data)
    last: Row | None = None
    split = ""
    with ExitStack() as stack:
        writers = {split: stack.enter_context(IndexedWriter(out_dir / split / data.name, token_dtype(tokenizer.vocab_size), mask=True))
                   for split in counts}
        for row, ids, mask, said in encoded:
            if row is not last:  # all sequences of a row are on one side: none is validated on what another trains
                last, split, kept = row, to_validation(kept), kept + 1
                left_out.keep(row.origin)
                forms.update([row.form] if row.form else [])
                progress.advance(1)
            answers += said
            writers[split].add(ids, mask)
            counts[split].update(
                conversations=1, tokens=len(ids), learned_tokens=int(mask.sum()), whole=int(mask[1:].all()),
                ended=int(bool(np.isin(ids[mask], stops).any())),
            )  # fmt: skip
    if not kept:
        raise UserError(f"tune.data.{data.name} yields no conversation ({left_out.said()})")
    progress.advance((limit or kept) - kept)
    body = {"kind": data.kind, "forms": dict(forms.most_common()), **{split: dict(count) for split, count in counts.items()},
            "answers": answers, "rows": chosen.total, "drawn": limit is not None and data.kind != "tasks" and chosen.total > kept == limit,
            "skipped_files": skipped_files(f"tune.data.{data.name}", data.path) if data.kind == "files" else "",
            "contaminated": decontamination.report(), **left_out.report()}
    progress_bars.console.print(described(data.name, body), style="dim", markup=False, highlight=False)
    for line in left_out.lost_files():
        progress_bars.console.print(f"tune.data.{data.name}: {line}", style="yellow", markup=False, highlight=False)
    return body


def _chooser(fraction: float) -> Callable[[int], str]:
    """The split of the conversation with a number: `fraction` of each beginning of a set is held out, but at least one and at most 500.
    The first goes to train, which may not be empty."""

    def held(count: int) -> int:
        return min(max(int(count * fraction), int(count > 1 and fraction > 0)), _MOST_HELD_OUT, max(count - 1, 0))

    return lambda number: "validation" if held(number + 1) > held(number) else "train"


def _encoded(rows: Iterable[tuple[Row, str]], left_out: LeftOut, tokenizer: Tokenizer, most: int, data: ChatData,
             ) -> Iterator[tuple[Row, np.ndarray, np.ndarray, int]]:
    """The sequences of the conversations that can be trained on, up to the limit of the set, each once, with ids, mask and the number of
    their trained answers."""
    seen: set[bytes] = set()
    kept = 0
    for row, contaminated in rows:
        if contaminated:
            left_out.add(row.origin, contaminated)
            continue
        left_out.noted.update(row.noted)
        any_kept = False
        try:
            for number, (messages, fitted) in enumerate(_fitted(row, data, tokenizer, most, left_out.noted)):
                if fitted is None or fitted.cut:
                    left_out.too_long((len(tokenizer.encode_chat(messages, row.tools)[0]) if fitted is None else fitted.tokens) - 1)
                if fitted is None:
                    left_out.add(row.origin, "with a question that leaves no room for an answer within sequence_length")
                    continue
                if row.segments and number == 1:
                    left_out.noted[_PIECES] += 1
                    left_out.too_long(fitted.tokens - 1)
                place = f"{number}/{row.segments}".encode() if row.segments else b""  # pieces of one text may be equal
                if (key := hashlib.blake2b(fitted.ids.tobytes() + fitted.mask.tobytes() + place, digest_size=16).digest()) in seen:
                    left_out.add(row.origin, "repeated")
                    continue
                seen.add(key)
                checked = check_mask(
                    fitted.ids, fitted.mask, tokenizer.stop_ids, fitted.cut != "answer" and not row.segments, fitted.spoken
                )
                if checked.fault is not None:
                    left_out.add(row.origin, f"wrong mask: {checked.fault}")
                    continue
                left_out.noted.update({
                    _CUT_TURN: int(fitted.cut == "turn"), _CUT_ANSWER: int(fitted.cut == "answer"),
                    _OPEN: 0 if row.segments else checked.open_answers,
                    _SPECIAL: int(has_special_text(row.messages, tokenizer)),
                })  # fmt: skip
                any_kept = True
                yield row, fitted.ids, fitted.mask, checked.answers
        except UserError as error:
            left_out.add(row.origin, f"malformed: {error}")
        except NoRow as reason:
            left_out.add(row.origin, str(reason))
        kept += any_kept
        if kept == data.limit:
            return


def _fitted(row: Row, data: ChatData, tokenizer: Tokenizer, most: int, noted: Counter[str]) -> Iterator[tuple[Any, Fitted | None]]:
    """The sequences that are made of a row: one, or one for each answer or piece of text."""
    if row.segments:
        yield from ((None, piece) for piece in pieces_of_text(row.segments, tokenizer, most, whole=row.form == "text"))
        return
    for messages in examples(_normal(row), row.tools, data, tokenizer, noted):
        yield messages, fit(messages, row.tools, tokenizer, most)


def _normal(row: Row) -> list[Message]:
    return [normal(number, message) for number, message in enumerate(row.messages, 1)]


def _good(rows: Iterator[Row], left_out: LeftOut, held_out: Collection[str]) -> Iterator[Row]:
    for row in rows:
        if row.fault is not None:
            left_out.add(row.origin, row.fault)
        elif row.origin in held_out:
            left_out.add(row.origin, "held out of the corpus")
        else:
            yield row


def _held_out_origins(corpus_dir: Path | None) -> set[str]:
    """Origins of the corpus's validation documents, whole and the part behind the last colon, which is the row in its file."""
    import pyarrow.parquet as pq

    found: set[str] = set()
    parts = corpus_files(corpus_dir, "validation").values() if corpus_dir else ()
    for path in (path for files in parts for path in files):
        for origin in pq.read_table(path, columns=["origin"]).column("origin").to_pylist():
            found |= {origin, origin.rpartition(":")[2]}
    return found


@dataclass(frozen=True)
class Shown:
    """One conversation: pieces of text, each with whether the loss is on its tokens."""

    name: str
    number: int
    tokens: int
    trained: int
    pieces: tuple[tuple[str, bool], ...]


def conversations(data: Path, open_tokenizer: Callable[[], Tokenizer], name: str | None = None, count: int = 3) -> Iterator[Shown]:
    """The first `count` training conversations of each set, or of the set `name`. Raises `UserError` if there are none."""
    if not (data / "manifest.json").is_file():
        raise UserError(f"{data} has no conversations yet; they are read when tuning begins: lmworks tune RECIPE")
    prefixes, _ = chat_shards(data)
    if name is not None and name not in prefixes:
        raise UserError(f"there is no set {name!r} of conversations; there are: {', '.join(prefixes)}")
    tokenizer = open_tokenizer()
    for one in prefixes if name is None else [name]:
        file = IndexedFile(prefixes[one])
        starts = file.document_start(np.arange(min(count, file.documents) + 1))
        for number in range(len(starts) - 1):
            start, stop = int(starts[number]), int(starts[number + 1])
            assert file.mask is not None
            ids, mask = file.read(start, stop).tolist(), file.mask[start:stop].astype(bool).tolist()
            runs = groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
            spans = [(trained, [token for token, _ in pairs]) for trained, pairs in runs]
            pieces = tuple((tokenizer.decode(tokens), trained) for trained, tokens in spans)
            yield Shown(one, number, len(ids), sum(mask), pieces)
