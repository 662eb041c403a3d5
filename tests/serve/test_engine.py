"""The worker: turns, batches, seeds, cancellation, limits."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from lmworks.inference.batching import Sampled
from lmworks.inference.generate import GenerateOptions, Token, generate
from lmworks.model import Transformer
from lmworks.serve.engine import Engine, _Answer, score
from lmworks.serve.requests import Delta, Job, PromptTooLong, Request, Scores
from lmworks.serve.vocabulary import Assembler, Vocabulary
from patience import PATIENCE

CONTEXT = 256
Wait = Callable[[Callable[[], bool]], None]


def texts(engine: Engine, request: Request) -> list[str]:
    out = [""] * len(request.prompts)
    for event in engine.stream(request):
        if isinstance(event, Delta):
            out[event.index] += event.text
    return out


def ids(vocabulary: Vocabulary, *prompts: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(vocabulary.encode(prompt)) for prompt in prompts)


def test_greedy_answers_equal_generate(engine: Engine, model: Transformer, vocabulary: Vocabulary) -> None:
    prompts = ids(vocabulary, "def main(", "import", "class Reader(object):\n    def read(self")
    options = GenerateOptions(max_new_tokens=24)
    expected = []
    for new in generate(model, [list(prompt) for prompt in prompts], options):
        decoder = vocabulary.decoder()
        expected.append("".join(map(decoder.push, new)) + decoder.finish())
    assert texts(engine, Request(prompts, options)) == expected
    assert len(set(expected)) == 3  # the prompts matter


def test_a_whole_answer_is_one_event_with_all_that_its_parts_had(engine: Engine, vocabulary: Vocabulary) -> None:
    prompts = ids(vocabulary, "def main(", "import os")
    for stop in ((), ("e",)):
        request = Request(prompts, GenerateOptions(max_new_tokens=16, temperature=1.0, logprobs=2), seed=3, stop=stop)
        parts: list[list[Delta]] = [[], []]
        for event in engine.stream(request):
            assert isinstance(event, Delta)
            parts[event.index].append(event)
        whole = sorted(engine.stream(replace(request, whole=True)), key=lambda event: event.index)
        assert len(whole) == 2 and sum(map(len, parts)) > 2
        for one, several in zip(whole, parts, strict=True):
            assert isinstance(one, Delta)
            assert one.text == "".join(part.text for part in several)
            assert [(placed.token.id, placed.offset) for placed in one.tokens] == [
                (placed.token.id, placed.offset) for part in several for placed in part.tokens
            ]
            assert (one.finish, one.generated) == (several[-1].finish, several[-1].generated)


def test_many_clients_at_once_get_what_each_would_get_alone(engine: Engine, vocabulary: Vocabulary) -> None:
    requests = [
        Request(ids(vocabulary, f"value = {n} + "), GenerateOptions(max_new_tokens=8 + n % 5, temperature=n % 2, top_p=0.9), seed=n)
        for n in range(24)
    ]
    alone = [texts(engine, request) for request in requests]
    together: list[list[str] | None] = [None] * len(requests)

    def ask(n: int) -> None:
        together[n] = texts(engine, requests[n])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_all_requests_share_one_batch(engine: Engine, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, sizes, hold = engine._step, list[int](), threading.Event()

    def step() -> list[Sampled]:
        hold.wait(PATIENCE)
        sampled = honest()
        sizes.append(len(sampled))
        return sampled

    monkeypatch.setattr(engine, "_step", step)
    greedy, warm = GenerateOptions(max_new_tokens=6), GenerateOptions(max_new_tokens=6, temperature=1.0)
    ended: queue.SimpleQueue[object] = queue.SimpleQueue()
    prompts = ids(vocabulary, "x", "def main(")
    requests = [Request(prompts, greedy)] * 4 + [Request(prompts[:1], warm)] * 2 + [Request(prompts[1:], warm, seed=1)] * 2
    for request in requests:
        engine.submit(request, lambda event: ended.put(None) if event is None else None)
    hold.set()
    for _ in requests:
        ended.get(timeout=PATIENCE)
    assert sum(sizes) == 6 * 12
    assert max(sizes) >= 10  # the worker may have taken the first request, of two answers, before the others were in


def test_a_request_for_many_answers_leaves_room_for_others(model: Transformer, vocabulary: Vocabulary) -> None:
    engine = Engine(model, vocabulary, "tiny", CONTEXT, max_rows=4)
    order: queue.SimpleQueue[str] = queue.SimpleQueue()
    prompt = ids(vocabulary, "a")
    engine.submit(Request(prompt * 60, GenerateOptions(max_new_tokens=20)), lambda event: order.put("many") if event is None else None)
    engine.submit(Request(prompt, GenerateOptions(max_new_tokens=20)), lambda event: order.put("one") if event is None else None)
    assert [order.get(timeout=PATIENCE) for _ in range(2)] == ["one", "many"]
    engine.close()


def test_a_conversation_is_not_read_again(engine: Engine, model: Transformer, vocabulary: Vocabulary) -> None:
    options = GenerateOptions(max_new_tokens=40)
    first = ids(vocabulary, "import argparse\nimport collections\nimport json\nclass Reader(object):\n    def read(self, name, value):\n")
    answer = list(engine.stream(Request(first, options)))
    written = tuple(placed.token.id for event in answer for placed in event.tokens)
    second = ((*first[0], *written, *vocabulary.encode("\nEND")),)
    before = engine.stats()
    found = texts(engine, Request(second, options))
    hits = engine.stats().hit_tokens - before.hit_tokens
    assert hits >= (len(first[0]) + len(written) - 1) // 32 * 32 > len(first[0])
    fresh = Engine(model, vocabulary, "tiny", CONTEXT)
    assert texts(fresh, Request(second, options)) == found
    fresh.close()
    before = engine.stats()
    assert texts(engine, Request(second, options, salt="another client")) == found
    assert engine.stats().hit_tokens == before.hit_tokens


def test_a_seed_repeats_and_its_answers_differ_across_batches(engine: Engine, vocabulary: Vocabulary) -> None:
    prompt = ids(vocabulary, "def ")[0]
    request = Request((prompt,) * 20, GenerateOptions(max_new_tokens=12, temperature=1.0), seed=2**63 - 1)
    first = texts(engine, request)
    assert texts(engine, request) == first
    assert len(set(first)) == 20
    unseeded = Request((prompt,), GenerateOptions(max_new_tokens=12, temperature=1.0))
    assert texts(engine, unseeded) != texts(engine, unseeded)


def test_a_short_question_does_not_wait_for_a_long_answer(engine: Engine, vocabulary: Vocabulary) -> None:
    order: list[str] = []
    long = engine.submit(
        Request(ids(vocabulary, "a"), GenerateOptions(max_new_tokens=200)), lambda event: order.append("long") if event is None else None)
    texts(engine, Request(ids(vocabulary, "b"), GenerateOptions(max_new_tokens=3)))
    order.append("short")
    assert order == ["short"]
    long.cancel()


def test_leaving_the_stream_frees_the_worker(
    engine: Engine, vocabulary: Vocabulary, waiting: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    honest, steps, left = engine._step, iter(range(1000)), threading.Event()

    def step() -> list[Sampled]:
        assert next(steps) < 20 or left.wait(PATIENCE)  # however long the one who leaves takes to be heard
        return honest()

    monkeypatch.setattr(engine, "_step", step)
    events = engine.stream(Request(ids(vocabulary, "a"), GenerateOptions(max_new_tokens=200)))
    next(events)
    events.close()
    left.set()
    waiting(lambda: not engine._running)
    assert engine.stats().generated_tokens < 100
    assert engine.stats().running == 0


def test_stop_strings_and_tokens_end_an_answer(engine: Engine, vocabulary: Vocabulary) -> None:
    prompts = ids(vocabulary, "def main(")
    whole = texts(engine, Request(prompts, GenerateOptions(max_new_tokens=30)))[0]
    middle = whole[len(whole) // 2 : len(whole) // 2 + 5]
    events = list(engine.stream(Request(prompts, GenerateOptions(max_new_tokens=30), stop=(middle,))))
    assert "".join(event.text for event in events) == whole[: whole.index(middle)]
    assert events[-1].finish == "stop"
    told = [token for event in engine.stream(Request(prompts, GenerateOptions(max_new_tokens=5))) for token in event.tokens]
    tokens = [token.token.id for token in told]  # an event has several where a character took them
    ended = list(engine.stream(Request(prompts, GenerateOptions(max_new_tokens=5, stop_ids=(tokens[2],)))))
    assert [event.finish for event in ended][-1] == "stop"
    assert ended[-1].generated == tokens.index(tokens[2]) + 1


def test_the_context_is_the_limit(engine: Engine, vocabulary: Vocabulary) -> None:
    token = vocabulary.encode("a")[0]
    full = Request(((token,) * (CONTEXT - 4),), GenerateOptions(max_new_tokens=50))
    last = list(engine.stream(full))[-1]
    assert (last.generated, last.finish) == (4, "length")
    assert (engine.room(CONTEXT - 4, 50), engine.room(CONTEXT - 4, 3), engine.room(CONTEXT - 4)) == (4, 3, 4)
    with pytest.raises(PromptTooLong, match="the prompt has 256 tokens, and the context of this model is 256; shorten it to at most 255"):
        engine.submit(Request(((token,) * CONTEXT,), GenerateOptions()), print)


def test_scores_equal_a_direct_forward(engine: Engine, model: Transformer, vocabulary: Vocabulary) -> None:
    prompt = ids(vocabulary, "for name, value in sorted(items): print(name)")[0]
    request = Request((prompt,), GenerateOptions(max_new_tokens=0, logprobs=3), score_prompts=True)
    scores = next(event for event in engine.stream(request) if isinstance(event, Scores))
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt]))[0].log_softmax(-1)
    assert math.isnan(scores.tokens[0].logprob)
    for at, token in enumerate(scores.tokens[1:]):
        assert token.id == prompt[at + 1]
        # the same sums over other shapes: fp32 rounding only
        assert token.logprob == pytest.approx(logprobs[at, token.id].item(), abs=2e-5)
        assert [number for number, _ in token.top] == logprobs[at].topk(3).indices.tolist()


def scored(model: Transformer, prompt: list[int], piece: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Token, ...]:
    monkeypatch.setattr("lmworks.serve.engine._PIECE", piece)
    with torch.inference_mode():
        return tuple(token for tokens in score(model, prompt, 2) for token in tokens)


def test_rows_beyond_the_vocabulary_are_neither_written_nor_offered(model: Transformer, vocabulary: Vocabulary) -> None:
    """A model whose embedding has more rows than the tokenizer has entries, and likes them best."""
    import copy

    smaller = copy.copy(vocabulary)
    smaller.size = vocabulary.size - 8
    prompt = [one for one in vocabulary.encode("for name in sorted(names):") if one < smaller.size]
    larger = copy.deepcopy(model)
    with torch.no_grad():
        larger.head.weight[smaller.size :] = larger.head.weight[: smaller.size].abs().max() * larger.head.weight[smaller.size :].sign() * 9
    engine = Engine(larger, smaller, "tiny", CONTEXT)
    try:
        for options in (GenerateOptions(max_new_tokens=12, logprobs=5), GenerateOptions(max_new_tokens=12, temperature=2.0, logprobs=5)):
            events = [*engine.stream(Request((tuple(prompt),), options, seed=1, score_prompts=True))]
            tokens = [placed.token for event in events if isinstance(event, Delta) for placed in event.tokens]
            scores = [token for event in events if isinstance(event, Scores) for token in event.tokens[1:]]
            assert len(tokens) == 12 and len(scores) == len(prompt) - 1
            for token in tokens + scores:
                assert token.id < smaller.size and len(token.top) == 5 and all(other < smaller.size for other, _ in token.top)
    finally:
        engine.close()


def test_long_prompts_are_scored_in_pieces(model: Transformer, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = vocabulary.encode("import os, sys\n" * 10)
    whole, pieces = scored(model, prompt, 512, monkeypatch), scored(model, prompt, 7, monkeypatch)
    assert [token.id for token in pieces] == list(prompt)
    assert [token.logprob for token in pieces[1:]] == pytest.approx([token.logprob for token in whole[1:]], abs=2e-5)
    assert [[number for number, _ in token.top] for token in pieces] == [[number for number, _ in token.top] for token in whole]
    assert math.isnan(scored(model, prompt[:1], 7, monkeypatch)[0].logprob)


def test_answers_go_on_between_the_pieces_of_a_prompt_that_is_scored(
    engine: Engine, model: Transformer, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmworks.serve.engine._PIECE", 4)
    widths: list[int] = []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, **more: (widths.append(ids.shape[1]), hidden(ids, **more))[1])
    answer = engine.stream(Request(ids(vocabulary, "a"), GenerateOptions(max_new_tokens=200)))
    next(answer)
    prompt = tuple(vocabulary.encode("import os, sys\n" * 10)[:41])
    scores = engine.stream(Request((prompt,), GenerateOptions(max_new_tokens=0), score_prompts=True))
    assert isinstance(next(scores), Scores)
    pieces = [at for at, width in enumerate(widths) if width == 4]
    assert len(pieces) == 10 and all(1 in widths[one:other] for one, other in pairwise(pieces))
    answer.close()


def test_equal_prompts_are_scored_once_and_those_of_a_canceled_request_no_more(
    engine: Engine, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, ...]] = []
    monkeypatch.setattr("lmworks.serve.engine.score", lambda *given: (begun.append(given[1]), score(*given))[1])
    same, *others = ids(vocabulary, "a = 1", *(f"value = {n}" for n in range(8)))
    nothing = GenerateOptions(max_new_tokens=0)
    events = [one for one in engine.stream(Request((same,) * 40, nothing, score_prompts=True)) if isinstance(one, Scores)]
    assert [one.index for one in events] == [*range(40)] and len({id(one.tokens) for one in events}) == 1 and begun == [same]
    held, wait = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        held.set()
        assert wait.wait(PATIENCE)

    job = engine.submit(Request(tuple(others), nothing, score_prompts=True), hold)  # the worker waits with the first scores
    assert held.wait(PATIENCE)
    job.cancel()
    wait.set()
    assert texts(engine, Request((same,), GenerateOptions(max_new_tokens=1)))
    assert begun == [same, others[0]]


def test_a_failure_is_told_and_the_worker_goes_on(
    engine: Engine, model: Transformer, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    request = Request(ids(vocabulary, "a"), GenerateOptions(max_new_tokens=3))
    with monkeypatch.context() as patch:
        patch.setattr(model, "hidden", broken)
        with pytest.raises(RuntimeError, match="out of luck"):
            texts(engine, request)
    assert engine.alive
    assert texts(engine, request)[0]


def test_a_request_that_cannot_begin_ends_alone(engine: Engine, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("no room for the prompt")

    request = Request(ids(vocabulary, "a"), GenerateOptions(max_new_tokens=3))
    with monkeypatch.context() as patch:
        patch.setattr(engine._batch, "add", full)
        with pytest.raises(RuntimeError, match="no room"):
            texts(engine, request)
    assert engine.alive
    assert texts(engine, request)[0]


def test_a_stop_text_that_the_end_completes_is_a_stop(engine: Engine, vocabulary: Vocabulary) -> None:
    """A character that never came to its end is shown as a replacement, which may be a part of a stop text."""

    class Unfinished:
        def push(self, token: int) -> str:
            return "so"

        def finish(self) -> str:
            return "\N{REPLACEMENT CHARACTER}"

    events: list[Any] = []
    request = Request(ids(vocabulary, "a"), GenerateOptions(max_new_tokens=1))
    answer = _Answer(Job(request, events.append, 1), 0, request.options, Assembler(Unfinished(), ["o\N{REPLACEMENT CHARACTER}"]))
    engine._receive(answer, Sampled(0, Token(5, 0.0), "length"))
    assert [(event.text, event.finish) for event in events if event is not None] == [("s", "stop")]


def test_close_ends_what_is_under_way(model: Transformer, vocabulary: Vocabulary, waiting: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, vocabulary, "tiny", CONTEXT)
    honest, steps = engine._step, iter(range(1000))

    def step() -> list[Sampled]:
        if next(steps) == 20:  # the answer is not at its end before it is closed
            waiting(lambda: engine._closed)
        return honest()

    monkeypatch.setattr(engine, "_step", step)
    events = engine.stream(Request(ids(vocabulary, "a"), GenerateOptions(max_new_tokens=200)))
    next(events)
    engine.close()
    with pytest.raises(RuntimeError, match="stopping"):
        list(events)
