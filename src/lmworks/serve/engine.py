"""One worker that generates for everybody: requests take turns, like ones share a batch, and a departed client costs nothing more."""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lmworks.errors import UserError
from lmworks.model.generate import GenerateOptions, Token, stream
from lmworks.serve.scoring import score
from lmworks.serve.text import Assembler, Piece, Placement

if TYPE_CHECKING:
    from lmworks.model import Transformer
    from lmworks.serve.vocabulary import Vocabulary

log = logging.getLogger(__name__)
_SEED_BITS = 40  # generate multiplies the seed by a million and must stay within 63 bits


class PromptTooLong(UserError):
    """The prompt leaves no room for an answer."""

    def __init__(self, length: int, context: int) -> None:
        super().__init__(
            f"the prompt has {length:,} tokens and this model's context is {context:,}: shorten it to at most {context - 1:,} tokens")


@dataclass(frozen=True)
class Request:
    """What to generate: each of `prompts` continued under `options`, whose seed is not used: `seed` is, or chance.

    `options.max_new_tokens` is cut to what the context leaves; 0 only scores the prompts. `stop` strings end an answer and
    are not part of it. With `score_prompts`, a `Scores` event precedes each answer.
    """

    prompts: tuple[tuple[int, ...], ...]
    options: GenerateOptions
    seed: int | None = None
    stop: tuple[str, ...] = ()
    score_prompts: bool = False


@dataclass(frozen=True)
class Delta:
    """More of answer `index`. `finish` is `stop` or `length` in its last delta; `generated` counts its tokens so far."""

    index: int
    text: str
    tokens: tuple[Placement, ...]
    generated: int
    finish: str | None = None


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the tokens of prompt `index`; the first has none (nan), as nothing comes before it."""

    index: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class EngineStats:
    """What the worker has done since it started, and what it has before it now (answers, tokens)."""

    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int


Event = Delta | Scores | Exception | None  # None ends a job


@dataclass(eq=False)
class Job:
    """A request under way; `cancel` makes the worker drop it at the next token."""

    request: Request
    emit: Callable[[Event], None]
    remaining: int
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def tell(self, event: Event) -> None:
        if self.cancelled:
            return
        try:
            self.emit(event)
        except RuntimeError:  # the listener's event loop is gone
            self.cancelled = True


@dataclass(eq=False)
class _Answer:
    job: Job
    index: int
    options: GenerateOptions
    assembler: Assembler
    generated: int = 0
    done: bool = False

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.job.request.prompts[self.index]

    @property
    def key(self) -> tuple[object, ...]:
        """Answers with equal keys may share a batch. A seeded job shares with nobody, so company never changes its samples."""
        return (self.options, None if self.job.request.seed is None else id(self.job))

    def tell(self, piece: Piece, finish: str | None) -> None:
        if piece.text or piece.tokens or finish:
            self.job.tell(Delta(self.index, piece.text, piece.tokens, self.generated, finish))

    def end(self, piece: Piece, finish: str) -> None:
        self.done = True
        self.tell(piece, finish)
        self.job.remaining -= 1
        if self.job.remaining == 0:
            self.job.tell(None)


@dataclass(eq=False)
class _Group:
    answers: list[_Answer]
    tokens: Iterator[list[Token | None]] | None = None

    @property
    def live(self) -> list[_Answer]:
        return [answer for answer in self.answers if not answer.done and not answer.job.cancelled]


@dataclass
class _Counts:
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(eq=False)
class Engine:
    """A model, its vocabulary and the worker thread that runs it.

    `context` is the longest prompt plus answer, in tokens. Up to `max_groups` batches of up to `max_batch` answers are in
    flight at once and advance by one token each in turn, so a short question does not wait for a long answer.
    """

    model: Transformer
    vocabulary: Vocabulary
    name: str
    context: int
    tuned: bool = True
    max_batch: int = 8
    max_groups: int = 4
    _waiting: deque[_Answer] = field(default_factory=deque, repr=False)
    _groups: list[_Group] = field(default_factory=list, repr=False)
    _counts: _Counts = field(default_factory=_Counts, repr=False)

    def __post_init__(self) -> None:
        self.model.eval()
        self._wake = threading.Condition()
        self._closed = False
        self._worker = threading.Thread(target=self._run, name="lmworks-generate", daemon=True)
        self._worker.start()

    def submit(self, request: Request, emit: Callable[[Event], None]) -> Job:
        """Queue a request; `emit` is called on the worker thread with each event, then with None.

        Raises `PromptTooLong`.
        """
        job = Job(request, emit, len(request.prompts))
        answers = []
        for index, prompt in enumerate(request.prompts):
            options = replace(request.options, max_new_tokens=self.room(len(prompt), request.options.max_new_tokens), seed=0)
            answers.append(_Answer(job, index, options, Assembler(self.vocabulary.decoder(), request.stop)))
        with self._wake:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._waiting.extend(answers)
            self._wake.notify()
        return job

    def room(self, prompt: int, wanted: int | None = None) -> int:
        """New tokens that fit behind a prompt of `prompt` tokens, at most `wanted`. Raises `PromptTooLong`."""
        least = 0 if wanted == 0 else 1
        if prompt + least > self.context:
            raise PromptTooLong(prompt, self.context)
        left = self.context - prompt
        return left if wanted is None else min(wanted, left)

    def stream(self, request: Request) -> Iterator[Delta | Scores]:
        """Events of a request as they come; leaving the iterator early cancels it."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        job = self.submit(request, events.put)
        try:
            while (event := events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            job.cancel()

    @property
    def waiting(self) -> int:
        """Answers that wait for a place."""
        with self._wake:
            return sum(not answer.job.cancelled for answer in self._waiting)

    def open(self, request: Request) -> tuple[Job, AsyncIterator[Delta | Scores]]:
        """Queue a request from an event loop, as `submit` does: the job, which the caller cancels when nobody listens any more, and its
        events."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def post(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        job = self.submit(request, post)

        async def iterate() -> AsyncIterator[Delta | Scores]:
            while (event := await events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event

        return job, iterate()

    @property
    def alive(self) -> bool:
        """Whether the worker can still take requests."""
        return self._worker.is_alive() and not self._closed

    def stats(self) -> EngineStats:
        """Counters for a metrics page."""
        with self._wake:
            running = sum(len(group.live) for group in self._groups)
            return EngineStats(running, len(self._waiting), self._counts.prompt_tokens, self._counts.generated_tokens)

    def close(self) -> None:
        """Drop all work and end the worker."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._worker.join()

    def _run(self) -> None:
        import torch

        # Streams that take turns on one thread leave their inference mode out of order; one around all of them keeps it on.
        with torch.inference_mode():
            self._work()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._groups and not self._closed:
                    self._wake.wait()
                if self._closed:
                    self._abandon()
                    return
                while self._waiting and len(self._groups) < self.max_groups:
                    group = self._gather()
                    if group.answers:
                        self._groups.append(group)
            for group in list(self._groups):
                self._advance(group)
                if not group.live:
                    self._close(group)

    def _gather(self) -> _Group:
        """The longest-waiting answer and those that may share its batch, in order."""
        chosen: list[_Answer] = []
        kept: deque[_Answer] = deque()
        for answer in self._waiting:
            if answer.job.cancelled:
                continue
            if len(chosen) < self.max_batch and (not chosen or answer.key == chosen[0].key):
                chosen.append(answer)
            else:
                kept.append(answer)
        self._waiting = kept
        return _Group(chosen)

    def _advance(self, group: _Group) -> None:
        try:
            if group.tokens is None:
                self._begin(group)
            else:
                self._step(group)
        except Exception as error:  # one broken request must not end the worker; each client is told
            log.exception("generation failed")
            for job in {id(answer.job): answer.job for answer in group.live}.values():
                job.tell(error)
                job.cancel()

    def _begin(self, group: _Group) -> None:
        for answer in group.live:
            self._counts.prompt_tokens += len(answer.prompt)
            if answer.job.request.score_prompts:
                answer.job.tell(Scores(answer.index, score(self.model, answer.prompt, answer.options.logprobs or 0)))
        if group.answers[0].options.max_new_tokens == 0:
            for answer in group.live:
                answer.end(Piece(), "length")
            return
        first = group.answers[0]
        # A batch draws by (seed, row), so a seeded job's next batch goes by its first answer's index.
        given = first.job.request.seed
        seed = secrets.randbits(_SEED_BITS) if given is None else (given + first.index) % 2**_SEED_BITS
        prompts = [list(answer.prompt) for answer in group.answers]
        group.tokens = stream(self.model, prompts, replace(first.options, seed=seed))

    def _step(self, group: _Group) -> None:
        assert group.tokens is not None
        row = next(group.tokens, None)
        for answer, token in zip(group.answers, row or [None] * len(group.answers), strict=True):
            if answer.done or answer.job.cancelled:
                continue
            if token is None:
                answer.end(answer.assembler.finish(), "length")
                continue
            answer.generated += 1
            self._counts.generated_tokens += 1
            if token.id in answer.options.stop_ids:
                answer.end(answer.assembler.finish(), "stop")
                continue
            piece = answer.assembler.push(token)
            if piece.stopped:
                answer.end(piece, "stop")
            elif answer.generated == answer.options.max_new_tokens:
                rest = answer.assembler.finish()
                answer.end(Piece(piece.text + rest.text, piece.tokens + rest.tokens), "stop" if rest.stopped else "length")
            else:
                answer.tell(piece, None)

    def _close(self, group: _Group) -> None:
        self._groups.remove(group)
        close = getattr(group.tokens, "close", None)
        if close is not None:
            close()  # frees the key/value cache now

    def _abandon(self) -> None:
        gone = RuntimeError("the server is stopping")
        jobs = {id(answer.job): answer.job for answer in [*self._waiting, *(a for group in self._groups for a in group.live)]}
        for job in jobs.values():
            job.tell(gone)
        self._waiting.clear()
        for group in list(self._groups):
            self._close(group)
