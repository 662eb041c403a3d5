"""The generation engine: one worker thread runs all requests in one continuous batch, and drops those of disconnected clients.

The same worker scores prompts for requests that ask for their log-probabilities, a piece between two steps of the answers.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from lmworks.errors import UserError
from lmworks.inference.batching import ContinuousBatch, Sampled
from lmworks.inference.generate import Token
from lmworks.inference.sampling import SAMPLING, GenerateOptions
from lmworks.serve.grammar import GrammarError, GrammarState
from lmworks.serve.prefixes import PrefixCache
from lmworks.serve.requests import Delta, EngineStats, Event, Job, PromptTooLong, Request, Scores
from lmworks.serve.step_threads import StepThreads
from lmworks.serve.vocabulary import Assembler, Piece

if TYPE_CHECKING:
    from lmworks.model import Transformer
    from lmworks.serve.vocabulary import Vocabulary


_PIECE = 512  # tokens of a prompt that are scored between two steps of the answers


def score(model: Transformer, prompt: Sequence[int], top: int = 0, entries: int | None = None) -> Iterator[list[Token]]:
    """Each token of `prompt` with its log-probability given those before it, and the `top` likeliest there among the first `entries`; a
    piece at a time, as the model reads them.

    The first token has log-probability nan and no alternatives, and is a piece of its own. The model computes in its own precision; the
    softmax is in fp32.
    """
    device, last = next(model.parameters()).device, len(prompt) - 1
    ids_1T = torch.tensor([list(prompt)], dtype=torch.long, device=device)
    cache = model.cache(1, max(last, 1))
    yield [Token(int(prompt[0]), float("nan"), ())]
    for start in range(0, last, _PIECE):
        stop = min(start + _PIECE, last)
        hidden_1RD, _ = model.hidden(ids_1T[:, start:stop], cache=cache)
        cache.finish(stop - start)
        logprobs_RV = model.logits(hidden_1RD[0]).log_softmax(dim=-1)
        chosen_R = logprobs_RV.gather(1, ids_1T[0, start + 1 : stop + 1, None])[:, 0].tolist()
        best, ids = logprobs_RV[:, :entries].topk(top, dim=-1) if top else (None, None)
        tokens = []
        for row, value in enumerate(chosen_R):
            likeliest = () if best is None or ids is None else tuple(zip(ids[row].tolist(), best[row].tolist(), strict=True))
            tokens.append(Token(int(prompt[start + row + 1]), value, likeliest))
        yield tokens


log = logging.getLogger(__name__)
_SEED_BITS = 63
_KEPT_CONTEXTS = 8  # of the model, kept as prefixes


@dataclass(eq=False)
class _Answer:
    job: Job
    index: int
    options: GenerateOptions
    assembler: Assembler
    grammar: GrammarState | None = None
    generated: int = 0
    hit_tokens: int = 0
    done: bool = False
    kept: list[Piece] = field(default_factory=list)  # of an answer that is sent whole
    scoring: Iterator[list[Token]] | None = None
    scored: list[Token] = field(default_factory=list)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.job.request.prompts[self.index]

    @property
    def seed(self) -> int:
        """Of this answer alone: those of a request with a seed differ, and repeat with it."""
        given = self.job.request.seed
        return secrets.randbits(_SEED_BITS) if given is None else given * 1_000_003 + self.index

    def send(self, piece: Piece, finish: str | None) -> None:
        if self.job.request.whole:
            self.kept.append(piece)
            if not finish:
                return
            piece = Piece("".join(one.text for one in self.kept), tuple(token for one in self.kept for token in one.tokens))
        if piece.text or piece.tokens or finish:
            self.job.send(Delta(self.index, piece.text, piece.tokens, self.generated, finish, self.hit_tokens))

    def end(self, piece: Piece, finish: str) -> None:
        self.done = True
        self.send(piece, finish)
        self.job.remaining -= 1
        if self.job.remaining == 0:
            self.job.send(None)


@dataclass
class _Counts:
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(eq=False)
class Engine:
    """A model, its vocabulary and the worker thread that runs it.

    `context` is the maximum length of prompt plus answer, in tokens. Up to `max_rows` answers are generated at a time, each with its own
    options; an answer that ends makes room for the next at once. Keys and values of `prefix_tokens` tokens are kept for prompts that begin
    like earlier ones: 8 times the context by default. `sampling` are the options of chats, in the terminal and on the page. `threads` are
    those of a CPU, by default as many as PyTorch has.
    """

    model: Transformer
    vocabulary: Vocabulary
    name: str
    context: int
    tuned: bool = True
    max_rows: int = 32
    prefix_tokens: int | None = None
    sampling: Mapping[str, float] = field(default_factory=lambda: dict(SAMPLING))
    threads: int = field(default_factory=torch.get_num_threads)
    _waiting: deque[_Answer] = field(default_factory=deque, repr=False)
    _scoring: deque[_Answer] = field(default_factory=deque, repr=False)
    _running: dict[int, _Answer] = field(default_factory=dict, repr=False)
    _counts: _Counts = field(default_factory=_Counts, repr=False)

    def __post_init__(self) -> None:
        self.model.eval()
        prefixes = None  # a beginning of a row cannot be copied where layers have states, which are those after its last token
        if not self.model.config.mixers:
            prefixes = PrefixCache(_KEPT_CONTEXTS * self.context if self.prefix_tokens is None else self.prefix_tokens)
        self._batch = ContinuousBatch(self.model, self.max_rows, prefixes=prefixes)
        on_cpu = self.model.embedding.weight.device.type == "cpu"
        self._step_threads = StepThreads(self.threads) if on_cpu else None
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
            room = self.room(len(prompt), request.options.max_new_tokens)
            options = replace(request.options, max_new_tokens=room, seed=0, entries=self.vocabulary.size)
            assembler = Assembler(self.vocabulary.decoder(request.marks), request.stop, options.min_tokens)
            answers.append(_Answer(job, index, options, assembler))
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
            running = sum(not answer.job.canceled for answer in [*self._scoring, *self._running.values()])
            counts = self._counts
            return EngineStats(running, len(self._waiting), counts.prompt_tokens, counts.generated_tokens, self._batch.hit_tokens)

    def close(self) -> None:
        """Cancel all requests and stop the worker."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._worker.join()

    def _run(self) -> None:
        torch.set_num_threads(self.threads)  # a new thread takes the number of any other, which may be in a decode step
        with torch.inference_mode():
            self._work()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._scoring and not self._running and not self._closed:
                    self._wake.wait()
                if self._closed:
                    self._abandon()
                    return
                chosen = self._take()
                self._scoring += (answer for answer in chosen if answer.job.request.score_prompts)
            for answer in chosen:
                self._counts.prompt_tokens += len(answer.prompt)
                if not answer.job.request.score_prompts:
                    self._begin(answer)
            self._score_piece()
            for row, answer in list(self._running.items()):
                if answer.done or answer.job.canceled:
                    self._drop(row)
            if self._running:
                self._advance()

    def _take(self) -> list[_Answer]:
        """Take as many answers from the queue as there is room for. The next is the longest-waiting one of the requests with the fewest
        running answers, so that a request for many answers does not delay the others by all of them. Of a request whose prompts are scored,
        one at a time."""
        self._waiting = deque(answer for answer in self._waiting if not answer.job.canceled)
        running = Counter(id(answer.job) for answer in self._running.values())
        scoring = {id(answer.job) for answer in self._scoring}
        chosen: list[_Answer] = []
        while len(self._running) + len(self._scoring) + len(chosen) < self.max_rows:
            answer = min((one for one in self._waiting if id(one.job) not in scoring), key=lambda one: running[id(one.job)], default=None)
            if answer is None:
                break
            self._waiting.remove(answer)
            running[id(answer.job)] += 1
            if answer.job.request.score_prompts:
                scoring.add(id(answer.job))
            chosen.append(answer)
        return chosen

    def _score_piece(self) -> None:
        """Score a piece of the prompt whose turn it is, and begin its answer after the last one. Equal prompts of a request are scored
        once."""
        while self._scoring and self._scoring[0].job.canceled:
            self._leave_scoring()
        if not self._scoring:
            return
        answer = self._scoring[0]
        job, prompt = answer.job, answer.prompt
        try:
            if prompt not in job.scored:
                answer.scoring = answer.scoring or score(self.model, prompt, answer.options.logprobs or 0, self.vocabulary.size)
                if (piece := next(answer.scoring, None)) is not None:
                    answer.scored += piece
                    return
                job.scored[prompt] = tuple(answer.scored)
            job.send(Scores(answer.index, job.scored[prompt]))
        except Exception as error:
            self._fail([answer], error)
        else:
            self._begin(answer)
        self._leave_scoring()

    def _leave_scoring(self) -> None:
        with self._wake:
            self._scoring.popleft()

    def _begin(self, answer: _Answer) -> None:
        request, options = answer.job.request, answer.options
        try:
            if options.max_new_tokens == 0:
                answer.end(Piece(), "length")
                return
            answer.grammar = request.grammar.answer(options.max_new_tokens) if request.grammar else None
            row = self._batch.add(answer.prompt, options, answer.seed, answer.grammar, request.salt)
            self._running[row] = answer
        except Exception as error:  # reported to the client; a failed request must not end the worker
            self._fail([answer], error)

    def _advance(self) -> None:
        try:
            for sampled in self._step():
                self._receive(self._running[sampled.id], sampled)
                if self._running[sampled.id].done:
                    self._drop(sampled.id)
        except Exception as error:
            self._fail(list(self._running.values()), error)
            self._running.clear()
            self._batch.clear()

    def _step(self) -> list[Sampled]:
        self._batch.max_rows = self.max_rows  # `Models` divides the rows among the models that are loaded
        if self._step_threads is None:
            return self._batch.step()
        return self._step_threads.run(self._batch.upcoming(), self._batch.step)

    def _receive(self, answer: _Answer, sampled: Sampled) -> None:
        if answer.grammar is not None and answer.grammar.error:
            self._fail([answer], GrammarError(f"the grammar of the answer is too complex: {answer.grammar.error}"))
            return
        answer.generated += 1
        answer.hit_tokens = sampled.hit_tokens
        self._counts.generated_tokens += 1
        if sampled.finish == "stop":
            answer.end(answer.assembler.finish(), "stop")
            return
        piece = answer.assembler.push(sampled.token)
        if piece.stopped:
            answer.end(piece, "stop")
        elif sampled.finish:
            rest = answer.assembler.finish()
            answer.end(Piece(piece.text + rest.text, piece.tokens + rest.tokens), "stop" if rest.stopped else "length")
        else:
            answer.send(piece, None)

    def _drop(self, row: int) -> None:
        self._batch.cancel(row)
        with self._wake:
            del self._running[row]

    def _fail(self, answers: list[_Answer], error: Exception) -> None:
        if not isinstance(error, UserError):
            log.error("generation failed", exc_info=error)
        for job in {id(answer.job): answer.job for answer in answers}.values():
            job.send(error)
            job.cancel()

    def _abandon(self) -> None:
        stopping = RuntimeError("the server is stopping")
        for job in {id(answer.job): answer.job for answer in [*self._waiting, *self._scoring, *self._running.values()]}.values():
            job.send(stopping)
        self._waiting.clear()
        self._scoring.clear()
        self._running.clear()
        self._batch.clear()
