"""Preference pairs to token files: read, rendered by the run's chat template, deduplicated, split.

Each pair is two consecutive documents with a mask of the last answer's tokens: the chosen and the rejected answer; for loss kto the answer
and, after the same prompt, the answer to another prompt, from which the loss estimates a divergence. Rows that cannot be used are counted
by reason.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.corpus.contamination import Decontaminator
from lmworks.errors import UserError
from lmworks.files import read_json, write_bytes, write_json
from lmworks.progress import bar
from lmworks.recipe.schema.dpo import Dpo, PreferenceData
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.align.answers import Answer
from lmworks.train.data.conversation_files import read_files
from lmworks.train.data.conversation_sets import TASK_SEEDS
from lmworks.train.data.decontamination import Contents, Decontamination
from lmworks.train.data.other_prompts import other_rows, prompt_key
from lmworks.train.data.preference_forms import NoPreference, Preference, convert

_MOST_HELD_OUT = 500
_EXAMPLES = 5
SPLITS = ("train", "validation")


@dataclass
class _Found:
    """Encoded pairs, and the rows that were left out, by reason."""

    pairs: list[tuple[Answer, Answer]] = field(default_factory=list)
    labels: list[bool] = field(default_factory=list)
    labeled: list[tuple[Preference, Answer]] = field(default_factory=list)  # for loss kto, until each has another prompt's answer
    left_out: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, str]] = field(default_factory=list)

    def omit(self, origin: str, reason: str) -> None:
        kind, _, detail = reason.partition(": ")
        self.left_out[kind] += 1
        if len(self.examples) < _EXAMPLES and kind not in {one["reason"] for one in self.examples}:
            self.examples.append({"reason": kind, "origin": origin, "detail": detail})

    def said(self) -> str:
        """Why nothing was found, in words."""
        if not self.left_out:
            return "it is empty"
        first = self.examples[0]
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.left_out.most_common())
        return f"left out: {reasons}; first: {first['origin']} {first['detail']}".rstrip()


def build_preferences(
    recipe: Recipe, tokenizer: Tokenizer, out_dir: Path, questions: Collection[str] = (), decontaminator: Decontaminator | None = None
) -> dict[str, Any]:
    """Write `out_dir`/{train,validation}.{bin,idx,mask}, with .labels.npy for loss kto, and manifest.json (returned).

    Left out and counted are rows that cannot be read, equal answers, empty ones, rows longer than sequence_length, repeated pairs, and
    contaminated rows (see `Decontamination`: `questions` are those of the evaluation). Raises `UserError` if a file or task does not exist,
    a data set yields nothing, all answers for loss kto are to one prompt, or decontamination is set to fail and finds an item.
    """
    options = recipe.dpo
    assert options is not None
    if not options.data:
        raise UserError("dpo.data is empty; list at least one set of preference pairs")
    shutil.rmtree(out_dir, ignore_errors=True)
    out_dir.mkdir(parents=True)
    sets: dict[str, tuple[_Found, Decontamination]] = {}
    with bar("preference pairs", total=sum(data.count for data in options.data)) as progress:
        for data in options.data:
            progress.note(data.name)
            where, generated = f"dpo.data.{data.name}", data.kind == "tasks"
            decontamination = Decontamination(where, recipe, questions, decontaminator, generated=generated)
            rows = decontamination.search(_rows(data, recipe, options), _contents)
            found = _encode(data, rows, options, tokenizer, progress.advance)
            if not found.pairs and not found.labeled:
                raise UserError(f"dpo.data.{data.name} yields no pair ({found.said()})")
            sets[data.name] = found, decontamination
    every = [found for found, _ in sets.values()]
    if options.loss == "kto":
        _add_others(every, tokenizer, recipe)
    counts = {
        name: {"pairs": len(found.pairs), "contaminated": decontamination.report(), "left_out": dict(found.left_out.most_common()),
               "examples": found.examples}
        for name, (found, decontamination) in sets.items()
    }  # fmt: skip
    pairs, labels = [pair for found in every for pair in found.pairs], [label for found in every for label in found.labels]
    manifest = {"loss_kto": options.loss == "kto", "data": counts, **_write(out_dir, pairs, labels, recipe, tokenizer)}
    write_json(out_dir / "manifest.json", manifest)
    return manifest


def read_preferences(directory: Path, split: str) -> tuple[list[tuple[Answer, Answer]], np.ndarray | None]:
    """The pairs of a split of a directory of `build_preferences`, and their labels (n,) bool for loss kto."""
    from lmworks.shards.format.indexed import IndexedFile

    if not read_json(directory / "manifest.json")[split]["pairs"]:
        return [], None
    file = IndexedFile(directory / split)
    starts = file.document_start(np.arange(file.documents + 1)).tolist()
    mask = file.mask
    assert mask is not None
    answers = [
        Answer(np.asarray(file.tokens[start:stop]).astype(np.int32), np.asarray(mask[start:stop]) != 0)
        for start, stop in pairwise(starts)
    ]
    path = directory / f"{split}.labels.npy"
    return list(zip(answers[0::2], answers[1::2], strict=True)), np.load(path, allow_pickle=False) if path.exists() else None


def encode_answer(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any = None) -> Answer:
    """A conversation whose last message is an answer, with only that answer's tokens learned. Raises `UserError` if it is malformed."""
    ids, spoken = tokenizer.encode_chat(messages, tools)
    learned = np.array(spoken, bool)
    silent = np.flatnonzero(~learned[: int(np.flatnonzero(learned)[-1])]) if learned.any() else np.empty(0, np.int64)
    if len(silent):
        learned[: silent[-1]] = False
    return Answer(np.array(ids, np.int32), learned)


def _rows(data: PreferenceData, recipe: Recipe, options: Dpo) -> Iterator[tuple[str, Preference | NoPreference]]:
    labeled = options.loss == "kto"
    if data.kind == "tasks":
        yield from _task_rows(data, recipe)
        return
    for row in read_files(f"dpo.data.{data.name}", data.path):
        try:
            yield row.origin, convert(row.value, row.origin, labeled) if row.fault is None else NoPreference(row.fault)
        except NoPreference as reason:
            yield row.origin, reason


def _task_rows(data: PreferenceData, recipe: Recipe) -> Iterator[tuple[str, Preference | NoPreference]]:
    """Questions of reasoning-gym: its answer against that of another question of the same generator, which its verifier finds wrong."""
    from lmworks.corpus.generated_questions import create

    generators, key = data.tasks or recipe.evaluate.tasks, f"dpo.data.{data.name}.tasks"
    if not generators:
        raise UserError(f"dpo.data.{data.name}: kind tasks needs tasks, a list of reasoning-gym generators, here or in evaluate")
    share = -(-data.count // len(generators))
    for generator in generators:
        seed = int.from_bytes(hashlib.blake2b(f"{recipe.seed}/dpo/{generator.name}".encode(), digest_size=8).digest())
        start = TASK_SEEDS.start + seed % (len(TASK_SEEDS) - share)
        items = create(generator, start, share, key)
        entries = [items[number] for number in range(share)]
        for number, entry in enumerate(entries):
            origin = f"{generator.name}/{start + number}"
            others = (entries[(number + further) % share]["answer"] for further in range(1, min(share, 20)))
            wrong = next((str(one) for one in others if one is not None and items.score_answer(str(one), entry) < 1), None)
            if entry.get("answer") is None or wrong is None:
                yield origin, NoPreference("task without a right and a wrong answer")
                continue
            answers = tuple({"role": "assistant", "content": text} for text in (str(entry["answer"]), wrong))
            yield origin, Preference(origin, [{"role": "user", "content": entry["question"]}], answers)


def _contents(found: tuple[str, Preference | NoPreference]) -> Contents | None:
    """The conversation of each answer, as it is trained on."""
    origin, row = found
    if isinstance(row, NoPreference):
        return None
    first, *others = [row.conversation(answer) for answer in row.answers]
    return Contents(origin, first, (others, row.tools))


def _encode(
    data: PreferenceData, rows: Iterator[tuple[tuple[str, Preference | NoPreference], str]], options: Dpo, tokenizer: Tokenizer,
    advance: Callable[[int], None],
) -> _Found:  # fmt: skip
    found, seen = _Found(), set()
    for (origin, row), contaminated in rows:
        if contaminated or isinstance(row, NoPreference):
            found.omit(origin, contaminated or str(row))
            continue
        singles = _singles(row) if options.loss == "kto" else [row]
        for one in singles:
            try:
                answers = [encode_answer(tokenizer, one.conversation(answer), one.tools) for answer in one.answers]
            except UserError as error:
                found.omit(origin, f"malformed: {error}")
                continue
            reason = _unusable(answers, int(options.sequence_length))
            digest = hashlib.blake2b(b"/".join(answer.ids.tobytes() for answer in answers), digest_size=16).digest()
            if reason is not None or digest in seen:
                found.omit(origin, reason or "repeated")
                continue
            seen.add(digest)
            advance(1)
            if options.loss == "kto":
                found.labeled.append((one, answers[0]))
            else:
                found.pairs.append((answers[0], answers[1]))
        if len(found.pairs) + len(found.labeled) >= data.count:
            break
    return found


def _singles(row: Preference) -> list[Preference]:
    """A labeled answer as it is; a pair as a good and a bad answer."""
    if row.label is not None:
        return [row]
    return [replace(row, answers=(answer,), label=label) for answer, label in zip(row.answers, (True, False), strict=True)]


def _unusable(answers: list[Answer], length: int) -> str | None:
    if any(not answer.learned.any() for answer in answers):
        return "empty answer"
    if len(answers) == 2 and np.array_equal(answers[0].ids, answers[1].ids):
        return "equal answers"
    longest = max(answer.inputs for answer in answers)
    return f"longer than sequence_length: {longest:,} tokens" if longest > length else None


def _add_others(sets: list[_Found], tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Make pairs of the labeled answers of all sets: each with the answer to another prompt, put after its own prompt."""
    assert recipe.dpo is not None
    length = int(recipe.dpo.sequence_length)
    labeled = [(found, *one) for found in sets for one in found.labeled]
    prompts = [prompt_key(row.prompt) for _, row, _ in labeled]
    taken = other_rows(prompts, [answer.ids.tobytes() for _, _, answer in labeled], recipe.seed)
    if taken is None:
        raise UserError(
            f"dpo.data: loss kto compares with answers to other prompts, and all {len(labeled):,} answers are to one prompt; add answers "
            "to another one, or use loss sigmoid on pairs"
        )
    by_length = sorted(range(len(labeled)), key=lambda number: (int(labeled[number][2].learned.sum()), labeled[number][2].ids.tobytes()))
    shortest = by_length[0]
    of_others = next(number for number in by_length if prompts[number] != prompts[shortest])
    for number, (found, row, answer) in enumerate(labeled):
        for other in (taken[number], shortest if prompts[shortest] != prompts[number] else of_others):
            mixed = encode_answer(tokenizer, row.conversation(labeled[other][1].answers[0]), row.tools)
            if mixed.inputs <= length:
                found.pairs.append((answer, mixed))
                found.labels.append(bool(row.label))
                break
        else:
            found.omit(row.origin, "longer than sequence_length with the answer to another prompt")
    if not any(found.pairs for found in sets):
        raise UserError("dpo.data: no answer to another prompt fits into sequence_length after a prompt; raise dpo.sequence_length")


def _write(
    out_dir: Path, pairs: list[tuple[Answer, Answer]], labels: list[bool], recipe: Recipe, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Write the splits, in a random order that depends on the seed; returns their counts."""
    import io

    from lmworks.shards.format.indexed import IndexedWriter, token_dtype

    assert recipe.dpo is not None
    order = np.random.default_rng(recipe.seed).permutation(len(pairs))
    held_out = min(round(len(pairs) * recipe.dpo.held_out_fraction), _MOST_HELD_OUT, len(pairs) - 1)
    counts: dict[str, Any] = {}
    for split, chosen in zip(SPLITS, (order[held_out:], order[:held_out]), strict=True):
        tokens = learned = 0
        if len(chosen):
            with IndexedWriter(out_dir / split, token_dtype(tokenizer.vocab_size), mask=True) as writer:
                for number in chosen.tolist():
                    for answer in pairs[number]:
                        writer.add(answer.ids, answer.learned)
                        tokens, learned = tokens + len(answer.ids), learned + int(answer.learned.sum())
            if labels:
                stream = io.BytesIO()
                np.save(stream, np.array(labels)[chosen])
                write_bytes(out_dir / f"{split}.labels.npy", stream.getvalue())
        counts[split] = {"pairs": len(chosen), "tokens": tokens, "learned_tokens": learned}
    return counts
