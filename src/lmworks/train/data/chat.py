"""Conversations to token files for fine-tuning: read, cut to length, deduplicated, split, written with a mask of the assistant's tokens.

A body of data that has a bad row loses that row only; the manifest counts what was lost and why, with examples.
"""

from __future__ import annotations

import hashlib
import heapq
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lmworks import progress as progress_bars
from lmworks.corpus.contamination import Decontaminator
from lmworks.documents import corpus_files
from lmworks.errors import UserError
from lmworks.files import read_json, write_json
from lmworks.progress import Bar
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import ChatData
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.data.conversation_files import Row
from lmworks.train.data.conversation_masks import check_mask, fit, has_special_text
from lmworks.train.data.conversation_sets import digest, open_set
from lmworks.train.data.decontamination import Contents, Decontamination

_MOST_HELD_OUT = 500
_EXAMPLES = 5
_SPARE = 4  # rows held ready per conversation asked for, since some repeat or do not fit


@dataclass
class _Losses:
    """Omitted conversations, by reason."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, str]] = field(default_factory=list)

    def add(self, origin: str, reason: str, detail: str = "") -> None:
        self.counts[reason] += 1
        if len(self.examples) < _EXAMPLES and reason not in {example["reason"] for example in self.examples}:
            self.examples.append({"reason": reason, "origin": origin, "detail": detail})


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
    if not recipe.tune.data:
        raise UserError("tune.data is empty; list at least one body of conversations")
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
                bodies[data.name] = body = _write(data, rows, recipe, tokenizer, out_dir, held_out, decontamination, progress)
                progress_bars.console.print(described(data.name, body), style="dim", markup=False, highlight=False)
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
    noted = {"cut_at_a_turn": "cut at an answer", "open_answers": "answers without a stop token"}
    noted |= {"special_text": "with special tokens as text"}
    for key, what in noted.items():
        line += f"; {body[key]:,} {what}" if body[key] else ""
    left_out = [f"{number:,} {reason}" for reason, number in body["left_out"].items()]
    return line + (f"; left out: {', '.join(left_out)}" if left_out else "")


def _write(data: ChatData, rows: Iterator[Row], recipe: Recipe, tokenizer: Tokenizer, out_dir: Path, held_out: Collection[str],
           decontamination: Decontamination, progress: Bar) -> dict[str, Any]:
    from lmworks.shards.format.indexed import IndexedWriter, token_dtype

    assert recipe.tune is not None
    losses, limit, to_validation = _Losses(), data.limit, _chooser(recipe.tune.validation_fraction)
    chosen: Iterable[Row] = _good(rows, losses, held_out)
    if limit is not None:  # evenly drawn; without a limit rows are taken as they come, and none is held in memory
        keyed = ((digest(recipe.seed, data.name, number), number, row) for number, row in enumerate(chosen))
        chosen = [row for _, _, row in heapq.nsmallest(_SPARE * limit, keyed)]
    counts = {split: Counter(conversations=0, tokens=0, learned_tokens=0) for split in ("train", "validation")}
    kept, noted, forms = 0, Counter(cut_at_a_turn=0, answers=0, open_answers=0, special_text=0), Counter[str]()
    searched = decontamination.search(chosen, lambda row: Contents(row.origin, row.messages, row.tools))
    encoded = _encoded(searched, losses, tokenizer, int(recipe.tune.sequence_length) + 1, noted)
    with ExitStack() as stack:
        writers = {split: stack.enter_context(IndexedWriter(out_dir / split / data.name, token_dtype(tokenizer.vocab_size), mask=True))
                   for split in counts}
        for row, ids, mask in islice(encoded, limit):
            split = to_validation(kept)
            kept += 1
            forms.update([row.form] if row.form else [])
            progress.advance(1)
            writers[split].add(ids, mask)
            counts[split].update(conversations=1, tokens=len(ids), learned_tokens=int(mask.sum()))
    if not kept:
        raise UserError(f"tune.data.{data.name} yields no conversation ({_said(losses)})")
    progress.advance((limit or kept) - kept)
    return {"kind": data.kind, "forms": dict(forms.most_common()), **{split: dict(count) for split, count in counts.items()}, **noted,
            "contaminated": decontamination.report(), "left_out": dict(losses.counts.most_common()), "examples": losses.examples}


def _chooser(fraction: float) -> Callable[[int], str]:
    """The split of the conversation with a number: `fraction` of each beginning of a set is held out, but at least one and at most 500.
    The first goes to train, which may not be empty."""

    def held(count: int) -> int:
        return min(max(int(count * fraction), int(count > 1 and fraction > 0)), _MOST_HELD_OUT, max(count - 1, 0))

    return lambda number: "validation" if held(number + 1) > held(number) else "train"


def _encoded(rows: Iterable[tuple[Row, str]], losses: _Losses, tokenizer: Tokenizer, most: int, noted: Counter[str],
             ) -> Iterator[tuple[Row, np.ndarray, np.ndarray]]:
    """The conversations that can be trained on, each once, with ids and mask."""
    seen: set[bytes] = set()
    for row, contaminated in rows:
        if contaminated:
            reason, _, item = contaminated.partition(": ")
            losses.add(row.origin, reason, item)
            continue
        try:
            fitted = fit(row.messages, row.tools, tokenizer, most)
        except UserError as error:
            losses.add(row.origin, "malformed", str(error))
            continue
        if fitted is None:
            losses.add(row.origin, "no answer, or none within sequence_length")
            continue
        ids, mask, was_cut = fitted
        if (key := hashlib.blake2b(ids.tobytes(), digest_size=16).digest()) in seen:
            losses.add(row.origin, "repeated")
            continue
        seen.add(key)
        checked = check_mask(ids, mask, tokenizer.stop_ids)
        if checked.fault is not None:
            losses.add(row.origin, "wrong mask", checked.fault)
            continue
        noted.update(cut_at_a_turn=int(was_cut), answers=checked.answers, open_answers=checked.open_answers,
                     special_text=int(has_special_text(row.messages, tokenizer)))
        yield row, ids, mask


def _said(losses: _Losses) -> str:
    if not losses.counts:
        return "it is empty"
    reasons = ", ".join(f"{count} {reason}" for reason, count in losses.counts.most_common())
    most = losses.counts.most_common(1)[0][0]
    example = next((one for one in losses.examples if one["reason"] == most), losses.examples[0])
    return f"left out: {reasons}; first: {example['origin']} {example['detail']}".rstrip()


def _good(rows: Iterator[Row], losses: _Losses, held_out: Collection[str]) -> Iterator[Row]:
    for row in rows:
        if row.fault is not None:
            reason, _, detail = row.fault.partition(": ")
            losses.add(row.origin, reason, detail)
        elif row.origin in held_out:
            losses.add(row.origin, "held out of the corpus")
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
