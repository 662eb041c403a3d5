"""The forms in which preferences are published, converted to messages: one row of a file at a time.

| form       | columns                                                                                                              |
|------------|----------------------------------------------------------------------------------------------------------------------|
| explicit   | a question (`ASKED`) or `messages`/`conversations`, with `chosen` and `rejected`: texts, messages or lists of them    |
| implicit   | `chosen` and `rejected`: two conversations, whose common beginning is the prompt; also beside a `prompt`              |
| openai     | `input` with `messages`, `preferred_output`, `non_preferred_output`                                                  |
| labeled    | a question and an answer, or `messages` that end with one, and `label` or `kto_tag`; for loss kto                    |

`system` and `tools` may stand in the row. `chosen_response` and `rejected_response` are other names. Dialogues may be Anthropic's text of
`Human:` and `Assistant:`. A prompt that `chosen` and `rejected` repeat is taken once; an answer at the end of `messages` is no part of it.

From answers to other prompts (`other_rows`) KTO estimates its reference point (arXiv:2402.01306, section 4.2). The estimate is the mean of
log-probability ratios of answers that have nothing to do with their prompts. Peers take the answer of the row before in the batch, which is
the other answer to the same prompt wherever files list them together.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmworks.recipe.schema.tune import TuningSet
from lmworks.tokenizer.messages import Message
from lmworks.train.data.row_columns import (
    ASKED,
    CHOSEN,
    REJECTED,
    SAID,
    NoRow,
    Row,
    answer_to,
    asked_columns,
    asked_in,
    described_columns,
    dialogue,
    first_of,
    flag,
    history_in,
    is_dialogue,
    is_named,
    list_in,
    messages_of,
    note_unused,
    refuse_lone_surrogates,
    refuse_media,
    renamed,
    tools_in,
    with_system,
    with_values,
)

Messages = list[Message]
_LABELS = ("label", "kto_tag")
_WANTED = "a prompt with chosen and rejected"


@dataclass(frozen=True)
class Preference:
    """A prompt and its answers: a chosen and a rejected one, or a single one with a `label`. An answer is one message of the assistant, or
    several with the results of tools between them."""

    origin: str
    prompt: Messages
    answers: tuple[Messages, ...]
    tools: Any = None
    label: bool | None = None
    noted: Counter[str] = field(default_factory=Counter)

    def conversation(self, answer: Messages) -> Messages:
        """The prompt with an answer at its end. Only the answer is trained."""
        return [*(one.having(learned=False) if one["role"] == "assistant" else one for one in self.prompt), *answer]


def convert_preference(given: Any, origin: str, labeled: bool, data: TuningSet | None = None) -> Preference:
    """A row as a preference, or, if they are asked for, as a labeled answer. Raises `NoRow`."""
    row = with_values(renamed(given, data))
    refuse_media(row)
    chosen, rejected = first_of(row, CHOSEN), first_of(row, REJECTED)
    noted: Counter[str] = Counter()
    if {"input", "preferred_output", "non_preferred_output"} <= row.keys():
        inner = row["input"] if isinstance(row["input"], Mapping) else {}
        row = {**inner, **{name: value for name, value in row.items() if name != "input"}}
        found = _pair(row, origin, row["preferred_output"], row["non_preferred_output"], noted)
    elif chosen and rejected:
        found = _pair(row, origin, row[chosen], row[rejected], noted)
    elif (name := next((name for name in _LABELS if name in row), None)) and (list_in(row) is not None or first_of(row, SAID)):
        found = _labeled(row, origin, name, noted)
        if not labeled:
            raise NoRow("a labeled answer: these are for dpo.loss kto")
    else:
        if "completions" in row:
            raise NoRow(f"no known form: {described_columns(row, data)}; stepwise supervision has no loss here")
        raise NoRow(f"no known form: {described_columns(row, data)}, not {'prompt, completion and label' if labeled else _WANTED}")
    refuse_lone_surrogates([found.prompt, found.answers, found.tools])
    return found


def _pair(row: Row, origin: str, chosen: Any, rejected: Any, noted: Counter[str]) -> Preference:
    said = [_answer(answer_to(asked_in(row), one, told)) for one, told in zip((chosen, rejected), (noted, Counter[str]()), strict=True)]
    prompt, asked, columns = _prompt(row, said)
    counters = (noted, Counter[str]())  # what is told of both is counted once
    wholes = [with_system(row, _whole(prompt, asked, one, told), told) for one, told in zip(said, counters, strict=True)]
    note_unused(row, columns, [message for one in wholes for message in one], noted, answers=False)
    first, second = wholes
    common = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if _differ(a, b)), min(len(first), len(second)))
    if common == min(len(first), len(second)):  # equal, or one goes on
        common = max(0, min(len(first), len(second)) - 1)
    if any(common >= len(one) or one[common]["role"] != "assistant" for one in wholes):
        raise NoRow("different prompts: the two conversations differ before an answer")
    answers = tuple(_checked_answer(one[common:]) for one in wholes)
    return Preference(origin, _checked_prompt(first[:common]), answers, tools_in(row), noted=noted)


def _labeled(row: Row, origin: str, name: str, noted: Counter[str]) -> Preference:
    label = flag(row.get(name))
    if label is None:
        raise NoRow(f"no label: {name} is {row.get(name)!r}, not true or false")
    said, columns = first_of(row, SAID), list[str]()
    if (turns := list_in(row)) is not None and said is None:
        whole, size = messages_of(turns, "user"), 1
    else:
        answer = _answer(answer_to(asked_in(row), row[said or ""], noted))
        prompt, asked, columns = _prompt(row, [answer])
        whole = _whole(prompt, asked, answer, noted)
        size = next((at for at, one in enumerate(reversed(answer)) if one["role"] == "user"), len(answer))
    whole = with_system(row, whole, noted)
    note_unused(row, [*columns, said], whole, noted, answers=True)
    parts = _checked_prompt(whole[:-size]), (_checked_answer(whole[-size:]),)
    return Preference(origin, *parts, tools_in(row), label, noted)


def _prompt(row: Row, answers: Sequence[Messages]) -> tuple[Messages, bool, list[str]]:
    """The messages before the `answers` that the row states, whether it states them as messages, and in which columns of a question."""
    columns = asked_columns(row)
    turns = None if any(is_named(row, name) for name in ASKED) else list_in(row)
    if turns is not None:
        listed = _before(messages_of(turns, "user"), answers)
        if listed and listed[-1]["role"] != "assistant":
            return listed, True, []
        if not columns:
            return _checked_end(listed, answers), True, []
    asked = asked_in(row)
    return [*history_in(row), *messages_of(asked, "user")], not isinstance(asked, str) or is_dialogue(asked), columns


def _before(messages: Messages, answers: Sequence[Messages]) -> Messages:
    """Messages without one of the answers at their end: a row may have a whole conversation beside its answers."""

    def shared(answer: Messages) -> int:
        pairs = enumerate(zip(reversed(messages), reversed(answer), strict=False))
        return next((at for at, (one, other) in pairs if one["role"] == "user" or not _same(one, other)), min(len(messages), len(answer)))

    return messages[: len(messages) - max(map(shared, answers))]


def _checked_end(prompt: Messages, answers: Sequence[Messages]) -> Messages:
    if prompt and all(answer[0]["role"] == "assistant" for answer in answers):
        raise NoRow("different prompts: the messages end with an answer that is none of those beside them")
    return prompt


def _answer(value: Any) -> Messages:
    found = messages_of(value, "assistant")
    if isinstance(value, str) and not dialogue(value, whole=True):
        return found
    if not found:
        raise NoRow("empty answer")
    return found


def _whole(prompt: Messages, listed: bool, said: Messages, noted: Counter[str]) -> Messages:
    """The conversation of an answer. One that repeats the prompt is taken as it is."""
    if said[0]["role"] in ("assistant", "tool") or not prompt:
        return [*prompt, *said]
    system = [one for one in prompt[:1] if one["role"] == "system"]
    rest = prompt[len(system) :]
    if _begins(said, prompt):
        return said
    if _begins(said, rest):
        return [*system, *said]
    if listed and prompt[-1]["role"] in ("assistant", "system"):
        return [*prompt, *said]  # it goes on with another question
    asked = {str(one["content"]).strip() for one in said if one["role"] == "user"}
    if not listed and str(rest[-1]["content"]).strip() in asked:
        return [*system, *said]
    if listed:
        raise NoRow("different prompts: the conversations of chosen and rejected do not begin with the prompt")
    noted["with a prompt that is not a turn of its conversations, which are used"] += 1
    return said


def _begins(whole: Messages, beginning: Sequence[Message]) -> bool:
    return len(whole) > len(beginning) and all(
        _same(one, other) for one, other in zip(whole, beginning, strict=False)
    )


def _same(one: Message, other: Message) -> bool:
    return all(str(one.get(name)).strip() == str(other.get(name)).strip() for name in ("role", "content", "tool_calls"))


def _differ(one: Message, other: Message) -> bool:
    """Whether two messages say different things, whatever else their rows tell of them, as identifiers and times."""
    return not _same(one, other) or one.get("reasoning_content") != other.get("reasoning_content")


def _checked_prompt(prompt: Messages) -> Messages:
    if not prompt:
        raise NoRow("no prompt with an answer: the last message is not the assistant's answer to another")
    return prompt


def _checked_answer(answer: Messages) -> Messages:
    if not answer or answer[-1]["role"] != "assistant":
        raise NoRow("no prompt with an answer: the last message is not the assistant's answer to another")
    if any(one["role"] == "assistant" and one.empty for one in answer):
        raise NoRow("empty answer")
    return answer


def prompt_key(messages: Sequence[dict[str, Any]]) -> str:
    """What makes two prompts the same: roles and contents of their messages, except for case, white space and system prompts."""
    asked = [one for one in messages if one.get("role") != "system"]
    return json.dumps([[one.get("role"), _plain(one.get("content")), one.get("tool_calls")] for one in asked], default=str)


def _plain(content: Any) -> Any:
    return " ".join(content.casefold().split()) if isinstance(content, str) else content


def other_rows(prompts: Sequence[str], rows: Sequence[bytes], seed: int) -> list[int] | None:
    """For each row the number of a row with another prompt; None if all have the same.

    `prompts` are the keys of the rows' prompts and `rows` identify the rows. Each row is taken once, unless more than half of the rows have
    one prompt: then the remaining ones are taken in turn. A function of the seed and of what the rows are, not of their order.
    """

    def mixed(value: bytes) -> bytes:
        return hashlib.blake2b(value, digest_size=16, key=str(seed).encode()).digest()

    count, sizes = len(prompts), Counter(prompts)
    if len(sizes) < 2:
        return None
    commonest, most = max(sizes.items(), key=lambda item: (item[1], item[0]))
    order = sorted(range(count), key=lambda row: (prompts[row] != commonest, mixed(prompts[row].encode()), mixed(rows[row])))
    found = [0] * count
    for place, row in enumerate(order):
        if 2 * most <= count or place >= most:
            # rows of equal prompts are neighbors, at most `most` of them: this far away is another prompt
            found[row] = order[(place + most) % count]
        else:
            found[row] = order[most + place % (count - most)]
    return found
