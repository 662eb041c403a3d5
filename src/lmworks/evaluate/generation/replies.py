"""Replies of a model to prompts: by the chat template where it was tuned on it, else by plain text; and sample completions."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from lmworks.evaluate.generation.interface import Prompt, Reply
from lmworks.tokenizer.reply import read

if TYPE_CHECKING:
    import numpy as np

    from lmworks.inference.generate import GenerateOptions, Token
    from lmworks.model import Transformer
    from lmworks.tokenizer.special import State, ThoughtForm


MOST_ROWS = 64  # of a batch of replies


class ChatTokenizer(Protocol):
    """What is asked of `lmworks.tokenizer.Tokenizer`."""

    vocab_size: int
    eos_id: int
    prefix: tuple[int, ...]
    stop_ids: tuple[int, ...]

    @property
    def byte_lengths(self) -> np.ndarray: ...
    @property
    def thoughts(self) -> ThoughtForm: ...
    def state_of_thoughts(self, prompt: Sequence[int]) -> State: ...
    def decode_reply(self, ids: Iterable[int]) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str: ...
    def encode_chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, add_generation_prompt: bool = False
    ) -> tuple[list[int], list[bool]]: ...


def chat_prompt(tokenizer: ChatTokenizer, question: str) -> list[int]:
    """Ids of a conversation in which the user has asked and the assistant is to speak."""
    return tokenizer.encode_chat([{"role": "user", "content": question}], add_generation_prompt=True)[0]


@dataclass(frozen=True)
class _Row:
    """One sample of one prompt."""

    index: int
    sample: int
    ids: array[int]  # of 4 bytes: many long prompts are held at a time
    prompt: Prompt


class Answerer:
    """Replies to prompts, rows of like length together, in the order asked.

    A batch holds at most `batch_tokens` tokens of prompts and replies (a single longer prompt is run alone), so memory is bounded at any
    length. With a temperature, sample s of an item depends on (seed, set, item, s) only. A prompt that leaves no room for a token in the
    model's context gets an empty reply, which counts as truncated.
    """

    def __init__(
        self, model: Transformer, tokenizer: ChatTokenizer, chat: bool, seed: int = 0, batch_tokens: int = 16_384
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.chat, self.seed, self.batch_tokens = model, tokenizer, chat, seed, batch_tokens
        self.context = int(model.config.max_position_embeddings) if model.config.max_position_embeddings else None

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids that the model reads."""
        if not self.chat:
            return self.tokenizer.encode(prompt.text)
        ids = self.tokenizer.encode_chat(list(prompt.messages), add_generation_prompt=True)[0]
        return [*ids, *self.tokenizer.encode(prompt.prefix)[len(self.tokenizer.prefix) :]] if prompt.prefix else ids

    def length(self, prompt: Prompt) -> int:
        """Tokens of a prompt."""
        return len(self.encode(prompt))

    def __call__(
        self, prompts: Sequence[Prompt], temperature: float = 0.0, top_p: float = 1.0, advance: Callable[[int], None] | None = None
    ) -> list[list[Reply]]:
        """`prompt.samples` replies to each prompt. `advance` is called with the number of replies that are done."""
        from lmworks.inference.generate import GenerateOptions

        replies: list[list[Reply]] = []
        rows = []
        for index, prompt in enumerate(prompts):
            ids = array("i", self.encode(prompt))
            replies.append([Reply("", truncated=True, prompt_tokens=len(ids))] * prompt.samples)
            if self.context is None or len(ids) < self.context:
                rows += [_Row(index, sample, ids, prompt) for sample in range(prompt.samples)]
            elif advance:
                advance(prompt.samples)
        for batch in self._batches(rows):
            options = GenerateOptions(
                max_new_tokens=batch[0].prompt.max_new_tokens, temperature=temperature, top_p=top_p,
                stop_ids=tuple(self.tokenizer.stop_ids),
            )  # fmt: skip
            for row, reply in zip(batch, self._generate(batch, options), strict=True):
                replies[row.index][row.sample] = reply
            if advance:
                advance(len(batch))
        return replies

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """The longest first, so that trouble with memory shows at once. All rows of a batch have the same limit of new tokens."""
        batch: list[_Row] = []
        for row in sorted(rows, key=lambda row: (-row.prompt.max_new_tokens, -len(row.ids))):
            size = len(batch[0].ids) + batch[0].prompt.max_new_tokens if batch else 0
            like = batch and row.prompt.max_new_tokens == batch[0].prompt.max_new_tokens
            if batch and not (like and len(batch) < MOST_ROWS and (len(batch) + 1) * size <= self.batch_tokens):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def _generate(self, batch: list[_Row], options: GenerateOptions) -> list[Reply]:
        stops = [() if self.chat else row.prompt.stop for row in batch]
        prompts, seeds = [row.ids.tolist() for row in batch], [self._seed(row) for row in batch]
        written = generate_until(self.model, self.tokenizer, prompts, options, stops, seeds)
        return [self._reply(row, one) for row, one in zip(batch, written, strict=True)]

    def _reply(self, row: _Row, written: Written) -> Reply:
        ids, stopped = written.ids, written.stopped
        if self.chat:
            begins, thoughts = self.tokenizer.state_of_thoughts(row.ids), self.tokenizer.thoughts
            text = read(self.tokenizer.decode_reply(ids), begins=begins, thoughts=thoughts).content
        else:
            text = cut_at(self.tokenizer.decode(ids, skip_special=True), row.prompt.stop)
        return Reply(text, not stopped, len(ids), len(row.ids))

    def _seed(self, row: _Row) -> int:
        key = f"{self.seed}\0{row.prompt.set}\0{row.prompt.id}\0{row.sample}"
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")


@dataclass
class Written:
    """The new tokens of a prompt, and whether it stopped: at a stop token, which is left out, or when its text had a stop, which is not
    cut off."""

    tokens: list[Token]
    stopped: bool = False

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def cut_at(text: str, stops: Sequence[str]) -> str:
    """The text before the first of `stops`."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def generate_until(
    model: Transformer, tokenizer: ChatTokenizer, prompts: Sequence[list[int]], options: GenerateOptions, stops: Sequence[Sequence[str]],
    seeds: Sequence[int],
) -> list[Written]:  # fmt: skip
    """Continue each prompt until a stop token, until its text has one of its `stops`, or up to the limit of tokens."""
    from lmworks.inference.generate import stream

    written = [Written([]) for _ in prompts]
    # a token is at least a byte, and some write none: the end of the reply that may hold a stop is a few tokens longer than it
    reach = [max((len(stop.encode()) for stop in of_row), default=0) + 8 for of_row in stops]
    steps = stream(model, list(prompts), replace(options, entries=tokenizer.vocab_size), seeds)
    ended: set[int] | None = None
    while True:
        try:
            step = steps.send(ended)
        except StopIteration:
            break
        ended = set()
        for row, token in enumerate(step):
            if token is None:
                continue
            if token.id in options.stop_ids:
                written[row].stopped = True
                continue
            written[row].tokens.append(token)
            if stops[row]:
                end = tokenizer.decode([one.id for one in written[row].tokens[-reach[row] :]], skip_special=True)
                if any(stop in end for stop in stops[row]):
                    written[row].stopped = True
                    ended.add(row)
    return written


@dataclass(frozen=True)
class Sample:
    prompt: str
    completion: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


_SAMPLE_TOKENS = 64


def samples(model: Transformer, tokenizer: ChatTokenizer, prompts: Sequence[str], chat: bool, seed: int = 0) -> list[Sample]:
    """A completion of each prompt: of running text, or of a question under the chat template; empty where the context has no room.
    The same seed draws the same text."""
    from lmworks.inference.generate import SAMPLING, GenerateOptions, generate

    if not prompts:
        return []
    ids = [chat_prompt(tokenizer, prompt) if chat else tokenizer.encode(prompt) for prompt in prompts]
    options = GenerateOptions(
        max_new_tokens=_SAMPLE_TOKENS, temperature=SAMPLING["temperature"], min_p=SAMPLING["min_p"], stop_ids=tuple(tokenizer.stop_ids),
        seed=seed,
    )  # fmt: skip
    context = int(model.config.max_position_embeddings or 0)
    fitting = [row for row, one in enumerate(ids) if not context or len(one) < context]
    written = dict(zip(fitting, generate(model, [ids[row] for row in fitting], options), strict=True)) if fitting else {}
    return [Sample(prompt, tokenizer.decode(written.get(row, []), skip_special=True)) for row, prompt in enumerate(prompts)]
