"""The generation engine: one worker thread runs all requests, in turn and in shared batches, and drops those of disconnected clients."""

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

from lmworks.model.generate import GenerateOptions, Token, stream
from lmworks.serve.requests import Delta, EngineStats, Event, Job, PromptTooLong, Request, Scores
from lmworks.serve.scoring import score
from lmworks.serve.text import Assembler, Piece

if TYPE_CHECKING:
    from lmworks.model import Transformer
    from lmworks.serve.vocabulary import Vocabulary

log = logging.getLogger(__name__)
_SEED_BITS = 40  # `generate` multiplies the seed by a million, within 63 bits


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
        """Answers with equal keys may share a batch. A job with a seed has batches of its own, so others never change its samples."""
        return (self.options, None if self.job.request.seed is None else id(self.job))

    def send(self, piece: Piece, finish: str | None) -> None:
        if piece.text or piece.tokens or finish:
            self.job.send(Delta(self.index, piece.text, piece.tokens, self.generated, finish))

    def end(self, piece: Piece, finish: str) -> None:
        self.done = True
        self.send(piece, finish)
        self.job.remaining -= 1
        if self.job.remaining == 0:
            self.job.send(None)


@dataclass(eq=False)
class _Group:
    """A batch of answers that are generated together."""

    answers: list[_Answer]
    tokens: Iterator[list[Token | None]] | None = None

    @property
    def active(self) -> list[_Answer]:
        return [answer for answer in self.answers if not answer.done and not answer.job.canceled]


@dataclass
class _Counts:
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(eq=False)
class Engine:
    """A model, its vocabulary and the worker thread that runs it.

    `context` is the maximum length of prompt plus answer, in tokens. Up to `max_groups` batches of up to `max_batch` answers are in flight
    and advance by one token each in turn, so that a short answer does not wait for a long one.
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
        """The number of new tokens that fit after a prompt of `prompt` tokens, at most `wanted`. Raises `PromptTooLong`."""
        required = 0 if wanted == 0 else 1
        if prompt + required > self.context:
            raise PromptTooLong(prompt, self.context)
        left = self.context - prompt
        return left if wanted is None else min(wanted, left)

    def stream(self, request: Request) -> Iterator[Delta | Scores]:
        """The events of a request as they occur; closing the iterator cancels the request."""
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
        """The number of answers in the queue."""
        with self._wake:
            return sum(not answer.job.canceled for answer in self._waiting)

    def open(self, request: Request) -> tuple[Job, AsyncIterator[Delta | Scores]]:
        """Queue a request from an event loop; returns the job and its events. The caller cancels the job when nobody reads the events any
        more."""
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
        """Statistics for `/metrics`."""
        with self._wake:
            running = sum(len(group.active) for group in self._groups)
            return EngineStats(running, len(self._waiting), self._counts.prompt_tokens, self._counts.generated_tokens)

    def close(self) -> None:
        """Cancel all requests and stop the worker."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._worker.join()

    def _run(self) -> None:
        import torch

        # Interleaved generators exit their inference mode out of order; this outer one keeps it enabled.
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
                if not group.active:
                    self._close(group)

    def _gather(self) -> _Group:
        """Take the longest-waiting answer and those that may share its batch from the queue."""
        chosen: list[_Answer] = []
        kept: deque[_Answer] = deque()
        for answer in self._waiting:
            if answer.job.canceled:
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
        except Exception as error:  # reported to the clients; a failed request must not end the worker
            log.exception("generation failed")
            for job in {id(answer.job): answer.job for answer in group.active}.values():
                job.send(error)
                job.cancel()

    def _begin(self, group: _Group) -> None:
        for answer in group.active:
            self._counts.prompt_tokens += len(answer.prompt)
            if answer.job.request.score_prompts:
                answer.job.send(Scores(answer.index, score(self.model, answer.prompt, answer.options.logprobs or 0)))
        if group.answers[0].options.max_new_tokens == 0:
            for answer in group.active:
                answer.end(Piece(), "length")
            return
        first = group.answers[0]
        # Samples depend on (seed, row), so later batches of a job with a seed add the index of their first answer.
        given = first.job.request.seed
        seed = secrets.randbits(_SEED_BITS) if given is None else (given + first.index) % 2**_SEED_BITS
        prompts = [list(answer.prompt) for answer in group.answers]
        group.tokens = stream(self.model, prompts, replace(first.options, seed=seed))

    def _step(self, group: _Group) -> None:
        assert group.tokens is not None
        row = next(group.tokens, None)
        for answer, token in zip(group.answers, row or [None] * len(group.answers), strict=True):
            if answer.done or answer.job.canceled:
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
                answer.send(piece, None)

    def _close(self, group: _Group) -> None:
        self._groups.remove(group)
        close = getattr(group.tokens, "close", None)
        if close is not None:
            close()  # frees the key/value cache now

    def _abandon(self) -> None:
        stopping = RuntimeError("the server is stopping")
        jobs = {id(answer.job): answer.job for answer in [*self._waiting, *(a for group in self._groups for a in group.active)]}
        for job in jobs.values():
            job.send(stopping)
        self._waiting.clear()
        for group in list(self._groups):
            self._close(group)
