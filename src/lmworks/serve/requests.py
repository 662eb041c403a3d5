"""Requests to the engine, the events that it sends for them, and its statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lmworks.errors import UserError
from lmworks.inference.sampling import GenerateOptions, Token
from lmworks.serve.grammar import Grammar
from lmworks.serve.vocabulary import Placement


class PromptTooLong(UserError):
    """The prompt leaves no room for an answer."""

    def __init__(self, length: int, context: int) -> None:
        super().__init__(
            f"the prompt has {length:,} tokens, and the context of this model is {context:,}; shorten it to at most {context - 1:,} tokens")


@dataclass(frozen=True)
class Request:
    """A generation request: each of `prompts` is continued with `options`, with `seed` (random by default) instead of `options.seed`.

    `options.max_new_tokens` is limited to the rest of the context; 0 only scores the prompts. `stop` strings end an answer and are not
    part of it; the first `options.min_tokens` tokens are not searched for them. With `score_prompts`, a `Scores` event precedes each
    answer. `grammar` restricts each answer. `marks` are control tokens whose text is a part of the answer. Requests with the same `salt`
    share what has been read of prompts that begin alike. With `whole` each answer is one `Delta` at its end, and
    nobody is woken up before.
    """

    prompts: tuple[tuple[int, ...], ...]
    options: GenerateOptions
    seed: int | None = None
    stop: tuple[str, ...] = ()
    score_prompts: bool = False
    grammar: Grammar | None = None
    salt: str = ""
    marks: tuple[str, ...] = ()
    whole: bool = False


@dataclass(frozen=True)
class Delta:
    """The next part of answer `index`. `finish` is `stop` or `length` in the last part; `generated` counts the answer's tokens so far, and
    `hit_tokens` those of its prompt that were not read, because an earlier prompt or answer began with them."""

    index: int
    text: str
    tokens: tuple[Placement, ...]
    generated: int
    finish: str | None = None
    hit_tokens: int = 0


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the tokens of prompt `index`; nan for the first, which has no context."""

    index: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class EngineStats:
    """Answers that are running and waiting, and the tokens that the worker has processed since it started; `hit_tokens` are the prompt
    tokens that were not read, because an earlier prompt or answer began with them."""

    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    hit_tokens: int = 0


Event = Delta | Scores | Exception | None  # None ends a job


@dataclass(eq=False)
class Job:
    """A submitted request; after `cancel` the worker drops it at the next token. `scored`: the prompts that have been scored."""

    request: Request
    emit: Callable[[Event], None]
    remaining: int
    canceled: bool = False
    scored: dict[tuple[int, ...], tuple[Token, ...]] = field(default_factory=dict)

    def cancel(self) -> None:
        self.canceled = True

    def send(self, event: Event) -> None:
        if self.canceled:
            return
        try:
            self.emit(event)
        except RuntimeError:  # the event loop of the listener is closed
            self.canceled = True
