"""Preference pairs to token files: read, rendered by the run's chat template, deduplicated, split.

Each pair is two consecutive documents with a mask of the last answer's tokens: the chosen and the rejected answer; for loss kto the answer
and, after the same prompt, the answer to another prompt, from which the loss estimates a divergence. Rows that cannot be used are counted
by reason.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.corpus.contamination import Decontaminator
from lmworks.errors import UserError
from lmworks.io.files import read_json, write_bytes, write_json
from lmworks.recipe.schema.align import Dpo, PreferenceData
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer.messages import Message, normal
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.answers import Answer
from lmworks.train.data.decontamination import Contents, Decontamination
from lmworks.train.data.preference_forms import Preference, convert_preference, other_rows, prompt_key
from lmworks.train.data.row_columns import NoRow
from lmworks.train.data.row_files import read_files, skipped_files
from lmworks.train.data.sets import TASK_SEEDS, Drawn, LeftOut, report_set, require_sets
from lmworks.ui.terminal import bar

_MOST_HELD_OUT = 500
SPLITS = ("train", "validation")


@dataclass
class _Found:
    """Encoded pairs, and the rows that were left out, by reason."""

    pairs: list[tuple[Answer, Answer]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # what makes the prompt of each pair the same as another
    labels: list[bool] = field(default_factory=list)
    labeled: list[tuple[Preference, Answer]] = field(default_factory=list)  # for loss kto, until each has another prompt's answer
    cut: bool = False  # by the limit of the set
    lost: LeftOut = field(default_factory=LeftOut)
    drawn_from: int = 0


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
    require_sets(recipe, "dpo")
    tokenizer.fix_date()
    shutil.rmtree(out_dir, ignore_errors=True)
    out_dir.mkdir(parents=True)
    sets: dict[str, tuple[_Found, Decontamination]] = {}
    limits = [data.limit for data in options.data]
    with bar("preference pairs", total=None if None in limits else sum(filter(None, limits))) as progress:
        for data in options.data:
            progress.note(data.name)
            where, generated = f"dpo.data.{data.name}", data.kind == "tasks"
            decontamination = Decontamination(where, recipe, questions, decontaminator, generated=generated)
            lost = LeftOut()
            read = partial(_read, data, recipe, options, lost)
            drawn = Drawn(read, data.limit, recipe.seed, data.name)
            found = _encode(data, decontamination.search(drawn, _contents), options, tokenizer, progress.advance, lost)
            if not found.pairs and not found.labeled:
                raise UserError(f"dpo.data.{data.name} yields no pair ({lost.said()})")
            found.drawn_from = drawn.total
            sets[data.name] = found, decontamination
    every = [found for found, _ in sets.values()]
    if options.loss == "kto":
        _add_others(every, tokenizer, recipe)
    counts = {}
    for data in options.data:
        found, decontamination = sets[data.name]
        counts[data.name] = body = {
            "pairs": len(found.pairs), "rows": found.drawn_from, "drawn": data.kind == "files" and found.cut,
            "skipped_files": skipped_files(f"dpo.data.{data.name}", data.path) if data.kind == "files" else "",
            "contaminated": decontamination.report(), **found.lost.report(),
        }  # fmt: skip
        what = f"{body['pairs']:,} {'labeled answers' if options.loss == 'kto' else 'pairs'}"
        report_set(f"dpo.data.{data.name}: {what}", body, found.lost)
    together = _Found()
    for found in every:
        together.pairs += found.pairs
        together.prompts += found.prompts
        together.labels += found.labels
    manifest = {"loss_kto": options.loss == "kto", "data": counts, **_write(out_dir, together, recipe, tokenizer)}
    write_json(out_dir / "manifest.json", manifest)
    return manifest


def read_preferences(directory: Path, split: str) -> tuple[list[tuple[Answer, Answer]], np.ndarray | None]:
    """The pairs of a split of a directory of `build_preferences`, and their labels (n,) bool for loss kto."""
    from lmworks.shards.indexed import IndexedFile

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


def encode_answer(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: Any = None) -> Answer:
    """A conversation that ends with an answer, with only the tokens of what is to be learned of it (`Preference.conversation`); without
    flags, that is its last answer. Raises `UserError` if it is malformed."""
    found = [normal(number, message) for number, message in enumerate(messages, 1)]
    answers = [at for at, message in enumerate(found) if message["role"] == "assistant"]
    if all(found[at].learned for at in answers):
        found = [one.having(learned=False) if at in answers[:-1] else one for at, one in enumerate(found)]
    ids, spoken = tokenizer.encode_chat(found, tools)
    return Answer(np.array(ids, np.int32), np.array(spoken, bool))


def _rows(data: PreferenceData, recipe: Recipe, options: Dpo) -> Iterator[tuple[str, Preference | NoRow]]:
    labeled = options.loss == "kto"
    if data.kind == "tasks":
        yield from _task_rows(data, recipe)
        return
    for row in read_files(f"dpo.data.{data.name}", data.path):
        try:
            yield row.origin, convert_preference(row.value, row.origin, labeled, data) if row.fault is None else NoRow(row.fault)
        except NoRow as reason:
            yield row.origin, reason


def _read(data: PreferenceData, recipe: Recipe, options: Dpo, lost: LeftOut, first: bool) -> Iterator[Preference]:
    """The good rows; the others are counted the `first` time."""
    lost = lost if first else LeftOut()
    for origin, row in _rows(data, recipe, options):
        if isinstance(row, NoRow):
            lost.add(origin, str(row))
        else:
            yield row


def _task_rows(data: PreferenceData, recipe: Recipe) -> Iterator[tuple[str, Preference | NoRow]]:
    """Questions of reasoning-gym: its answer against that of another question of the same generator, which its verifier finds wrong."""
    from lmworks.corpus.read.conversations import create, generators_of

    key = f"dpo.data.{data.name}"
    generators, key = generators_of(data.tasks, recipe, key), f"{key}.tasks"
    assert data.limit is not None
    share = -(-data.limit // len(generators))
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
                yield origin, NoRow("task without a right and a wrong answer")
                continue
            answers = tuple([Message(role="assistant", content=text)] for text in (str(entry["answer"]), wrong))
            yield origin, Preference(origin, [Message(role="user", content=entry["question"])], answers)


def _contents(row: Preference) -> Contents:
    """The conversation of each answer, as it is trained on."""
    first, *others = [row.conversation(answer) for answer in row.answers]
    return Contents(row.origin, first, (others, row.tools))


def _encode(
    data: PreferenceData, rows: Iterator[tuple[Preference, str]], options: Dpo, tokenizer: Tokenizer, advance: Callable[[int], None],
    lost: LeftOut,
) -> _Found:  # fmt: skip
    found, seen = _Found(lost=lost), set()
    for row, contaminated in rows:
        if data.limit is not None and len(found.pairs) + len(found.labeled) >= data.limit:
            found.cut = True
            break
        if contaminated:
            lost.add(row.origin, contaminated)
            continue
        lost.noted.update(row.noted)
        singles = _singles(row) if options.loss == "kto" else [row]
        for one in singles:
            label = bytes([one.label is True])  # one answer may be good in one pair and bad in another
            try:
                answers = [encode_answer(tokenizer, one.conversation(answer), one.tools) for answer in one.answers]
            except UserError as error:
                lost.add(row.origin, f"malformed: {error}")
                continue
            reason = _unusable(answers, int(options.sequence_length), lost)
            digest = hashlib.blake2b(b"/".join([label, *(answer.ids.tobytes() for answer in answers)]), digest_size=16).digest()
            if reason is not None or digest in seen:
                lost.add(row.origin, reason or "repeated")
                continue
            seen.add(digest)
            lost.keep(row.origin)
            advance(1)
            if options.loss == "kto":
                found.labeled.append((one, answers[0]))
            else:
                found.pairs.append((answers[0], answers[1]))
                found.prompts.append(_key_of(one))
    return found


def _key_of(row: Preference) -> str:
    return hashlib.blake2b(prompt_key(row.prompt).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _singles(row: Preference) -> list[Preference]:
    """A labeled answer as it is; a pair as a good and a bad answer."""
    if row.label is not None:
        return [row]
    return [replace(row, answers=(answer,), label=label) for answer, label in zip(row.answers, (True, False), strict=True)]


def _unusable(answers: list[Answer], length: int, lost: LeftOut) -> str | None:
    if any(not answer.learned.any() for answer in answers):
        return "empty answer"
    if len(answers) == 2 and np.array_equal(answers[0].ids, answers[1].ids):
        return "equal answers"
    longest = max(answer.inputs for answer in answers)
    if longest <= length:
        return None
    lost.too_long(longest)
    return f"longer than sequence_length: {longest:,} tokens"


def _add_others(sets: list[_Found], tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Make pairs of the labeled answers of all sets: each with the answer to another prompt, put after its own prompt."""
    assert recipe.dpo is not None
    length = int(recipe.dpo.sequence_length)
    labeled = [(found, *one) for found in sets for one in found.labeled]
    prompts = [prompt_key(row.prompt) for _, row, _ in labeled]
    taken = other_rows(prompts, [answer.ids.tobytes() + bytes([row.label is True]) for _, row, answer in labeled], recipe.seed)
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
                found.prompts.append(_key_of(row))
                found.labels.append(bool(row.label))
                break
        else:
            found.lost.add(row.origin, "longer than sequence_length with the answer to another prompt")
    if not any(found.pairs for found in sets):
        raise UserError("dpo.data: no answer to another prompt fits into sequence_length after a prompt; raise dpo.sequence_length")


def _write(out_dir: Path, found: _Found, recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the splits, in a random order that depends on the seed; returns their counts. All pairs of a prompt are in one split."""
    import io

    from lmworks.shards.indexed import IndexedWriter, token_dtype

    assert recipe.dpo is not None
    pairs = found.pairs
    of_prompts: dict[str, list[int]] = {}
    for number in np.random.default_rng(recipe.seed).permutation(len(pairs)).tolist():
        of_prompts.setdefault(found.prompts[number], []).append(number)
    most = min(round(len(pairs) * recipe.dpo.validation_fraction), _MOST_HELD_OUT, len(pairs) - 1)
    most = max(most, min(map(len, of_prompts.values()))) if most and len(of_prompts) > 1 else 0  # at least one prompt
    train: list[int] = []
    held_out: list[int] = []
    for group in of_prompts.values():
        (held_out if len(held_out) + len(group) <= most else train).extend(group)
    counts: dict[str, Any] = {}
    for split, chosen in zip(SPLITS, (train, held_out), strict=True):
        tokens = learned = 0
        if len(chosen):
            with IndexedWriter(out_dir / split, token_dtype(tokenizer.vocab_size), mask=True) as writer:
                for number in chosen:
                    for answer in pairs[number]:
                        writer.add(answer.ids, answer.learned)
                        tokens, learned = tokens + len(answer.ids), learned + int(answer.learned.sum())
            if found.labels:
                stream = io.BytesIO()
                np.save(stream, np.array(found.labels)[chosen])
                write_bytes(out_dir / f"{split}.labels.npy", stream.getvalue())
        counts[split] = {"pairs": len(chosen), "tokens": tokens, "learned_tokens": learned}
    return counts
