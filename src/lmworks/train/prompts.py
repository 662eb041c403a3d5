"""The prompts of reinforcement learning, rendered by the run's chat template, with their reward functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lmworks.corpus.contamination import Decontaminator
from lmworks.errors import UserError, all_refusals, raise_first
from lmworks.recipe.schema.align import RewardTask
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer.messages import Message
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.data.decontamination import Contents, Decontamination
from lmworks.train.data.forms import PromptRow, convert_prompt
from lmworks.train.data.row_columns import NoRow, described_columns
from lmworks.train.data.row_files import read_files, skipped_files
from lmworks.train.data.sets import TASK_SEEDS, Drawn, LeftOut, report_set, require_sets
from lmworks.train.rewards import AnswerCheck, Judge, Reward, answer_check, answer_of, check_file, make_judge, score
from lmworks.train.rollouts import Prompt
from lmworks.train.unit_tests import runnable_tests


@dataclass(frozen=True)
class Prompts:
    """The prompts to train on and those held out, in a random order that depends on the seed, their reward functions, and by data set the
    number of prompts and the rows that were left out, by reason."""

    train: list[Prompt]
    held_out: list[Prompt]
    judges: list[Judge]
    sets: dict[str, Any]


def refusals(recipe: Recipe) -> Iterator[UserError]:
    """Rewards and layouts that cannot work, and right answers that cannot be read, before anything is trained."""
    options = recipe.grpo
    assert options is not None
    yield from all_refusals([partial(require_sets, recipe, "grpo")])
    if recipe.layout.pp > 1:
        yield UserError(f"grpo generates with the weights that it trains; layout.pp {recipe.layout.pp} cannot: use tp, cp or dp_shard")
    if recipe.train.deepspeed is not None:
        yield UserError("grpo generates with the weights that it trains; train.deepspeed cannot: leave it out and set layout.zero")
    if recipe.layout.tp > 1 and (options.top_k, options.top_p, options.min_p) != (0, 1.0, 0.0):
        yield UserError("grpo: with layout.tp no rank has all logits, on which top_k, top_p and min_p are replayed: leave these out")
    yield from all_refusals(partial(_check_set, data, recipe) for data in options.data)


def _check_set(data: RewardTask, recipe: Recipe) -> None:
    key = f"grpo.data.{data.name}"
    if data.reward == "python":
        check_file(data, key)
    if data.reward == "unit_tests":
        make_judge(data, key, {})
    if data.kind == "tasks":
        _data_sets(data, recipe, 1)
    elif (answers := answer_check(data, key)) is not None:
        for _ in _rows(data, recipe, {}, answers):  # all: which of them `count` draws depends on all
            pass
        answers.finish()


def read_prompts(
    recipe: Recipe, tokenizer: Tokenizer, questions: Collection[str] = (), decontaminator: Decontaminator | None = None
) -> Prompts:
    """All prompts of the recipe. Left out and counted are rows that cannot be read, repeated prompts, those without room for an answer, and
    contaminated rows (see `Decontamination`: `questions` are those of the evaluation).

    Raises `UserError` if a data set yields nothing, a reward cannot run here, or decontamination is set to fail and finds an item.
    """
    options = recipe.grpo
    assert options is not None
    raise_first(refusals(recipe))
    tokenizer.fix_date()
    judges: list[Judge] = []
    found: list[Prompt] = []
    sets: dict[str, Any] = {}
    context = int(recipe.model.max_position_embeddings) if recipe.model.max_position_embeddings else int(options.sequence_length)
    most = min(int(options.sequence_length), context) - options.max_new_tokens
    for number, data in enumerate(options.data):
        verifiers: dict[str, Any] = {}
        lost, before, seen, cut = LeftOut(), len(found), set(), False
        key = f"grpo.data.{data.name}"
        decontamination = Decontamination(key, recipe, questions, decontaminator, generated=data.kind == "tasks")
        answers = answer_check(data, key)
        read = partial(_read, data, recipe, verifiers, answers, lost)
        drawn = Drawn(read, data.limit, recipe.seed, data.name)
        for row, contaminated in decontamination.search(drawn, _contents):
            if cut := len(found) - before == data.limit:
                break
            prompt, reason = _encode(row, tokenizer, most, number, lost) if not contaminated else (None, contaminated)
            if prompt is None or prompt.ids in seen:
                lost.add(row.origin, "repeated" if prompt else reason)
            else:
                seen.add(prompt.ids)
                lost.keep(row.origin)
                lost.noted.update(row.noted)
                found.append(prompt)
        if answers is not None:
            answers.finish()
        if len(found) == before:
            raise UserError(f"{key} yields no prompt ({lost.said()})")
        judges.append(make_judge(data, key, verifiers))
        sets[data.name] = body = {
            "prompts": len(found) - before, "rows": drawn.total, "drawn": data.kind == "files" and cut,
            "skipped_files": skipped_files(key, data.path) if data.kind == "files" else "",
            "contaminated": decontamination.report(), **lost.report(),
        }  # fmt: skip
        report_set(f"{key}: {body['prompts']:,} prompts", body, lost)
    order = np.random.default_rng(recipe.seed).permutation(len(found)).tolist()
    held_out = min(options.validation_prompts, len(found) // 2)
    return Prompts([found[i] for i in order[held_out:]], [found[i] for i in order[:held_out]], judges, sets)


def try_rewards(recipe: Recipe) -> Iterator[tuple[str, Reward]]:
    """The reward of a made-up reply to the first prompt of every set that has one. Raises `UserError` if a reward cannot run here."""
    assert recipe.grpo is not None
    for data in recipe.grpo.data:
        verifiers: dict[str, Any] = {}
        key = f"grpo.data.{data.name}"
        first = next((row for row in _rows(data, recipe, verifiers, answer_check(data, key)) if isinstance(row, PromptRow)), None)
        if first is not None:
            yield data.name, score(make_judge(data, key, verifiers), "The answer is 42.", first.row, truncated=False)


def _encode(row: PromptRow, tokenizer: Tokenizer, most: int, judge: int, lost: LeftOut) -> tuple[Prompt | None, str]:
    """A row as a prompt, or why it is none."""
    try:
        ids, _ = tokenizer.encode_chat(row.messages, row.tools, add_generation_prompt=True)
    except UserError as error:
        return None, f"malformed: {error}"
    if len(ids) > most:
        lost.too_long(len(ids))
        return None, "no room for an answer in sequence_length and the model's context"
    return Prompt(tuple(ids), row.row, judge), ""


def _contents(row: PromptRow) -> Contents:
    """The prompt and all other columns: a reward may use each of them."""
    asked, answer = {"role": "user", "content": row.row.get("question")}, str(row.row.get("answer", ""))
    return Contents(row.origin, [*row.messages, asked], (answer, row.row))


def _read(
    data: RewardTask, recipe: Recipe, verifiers: dict[str, Any], answers: AnswerCheck | None, lost: LeftOut, first: bool
) -> Iterator[PromptRow]:
    """The good rows; the others are counted the `first` time."""
    if not first:
        lost, answers = LeftOut(), answer_check(data, f"grpo.data.{data.name}")
    for row in _rows(data, recipe, verifiers, answers):
        if isinstance(row, tuple):
            lost.add(*row)
        else:
            yield row


def _rows(
    data: RewardTask, recipe: Recipe, verifiers: dict[str, Any], answers: AnswerCheck | None
) -> Iterator[PromptRow | tuple[str, str]]:
    """Each row, or its origin with the reason why it is none."""
    if data.kind == "files":
        for raw in read_files(f"grpo.data.{data.name}", data.path):
            try:
                found = convert_prompt(raw.value, raw.origin, data) if raw.fault is None else None
            except NoRow as reason:
                yield raw.origin, str(reason)
                continue
            if found is None:
                yield raw.origin, str(raw.fault)
            elif data.reward == "unit_tests" and found.row.get("tests") is None:
                yield raw.origin, f"no tests: {described_columns(found.row, data)}"
            elif data.reward == "unit_tests" and (fault := _fault_of_tests(found.row)):
                yield raw.origin, fault
            elif data.reward == "python" and (columns := _no_json(found.row)):
                yield raw.origin, f"columns that a reward cannot be given: {columns}"
            elif answers is not None and answer_of(found.row) is None:
                yield raw.origin, f"no answer: {described_columns(found.row, data)}"
            elif answers is not None and not answers.readable(raw.origin, found.row):
                yield raw.origin, "unreadable answer"
            else:
                yield found
        return
    assert data.limit is not None
    sets = _data_sets(data, recipe, -(-data.limit // max(1, len(data.tasks or recipe.evaluate.tasks))))
    for name, items in sets.items():
        verifiers[name] = items
        for number in range(len(items)):
            origin = f"{name}/{number}"
            try:
                entry = items[number]
            except Exception:  # a generator may fail on a seed; that is one item less
                yield origin, "generator failed"
                continue
            row = {"prompt": entry["question"], "question": entry["question"], "generator": name, "entry": entry}
            yield PromptRow(origin, [Message(role="user", content=entry["question"])], None, row)


def _fault_of_tests(row: dict[str, Any]) -> str:
    """Why the tests of a row judge no program; empty if they may."""
    try:
        runnable_tests(row)
    except NoRow as reason:
        return str(reason)
    return ""


def _no_json(row: dict[str, Any]) -> str:
    """The columns of a row that are no JSON, as the bytes of a table, in words."""
    found = []
    for name, value in row.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            found.append(f"{name} ({error})")
    return ", ".join(found)


def _data_sets(data: RewardTask, recipe: Recipe, count: int) -> dict[str, Any]:
    """reasoning-gym's data sets of a task by name, of `count` items each, whose seeds are not those of the evaluation."""
    from lmworks.corpus.read.conversations import create, generators_of

    key = f"grpo.data.{data.name}"
    generators, key = generators_of(data.tasks, recipe, key), f"{key}.tasks"
    found = {}
    for generator in generators:
        seed = int.from_bytes(hashlib.blake2b(f"{recipe.seed}/grpo/{generator.name}".encode(), digest_size=8).digest())
        start = TASK_SEEDS.start + seed % (len(TASK_SEEDS) - min(count, len(TASK_SEEDS) // 2))
        found[generator.name] = create(generator, start, count, key)
    return found
