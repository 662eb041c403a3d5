"""Continuous batching: rows that come and go against rows alone and against full recomputation.

Tolerance 2e-5 on log-probabilities unless a test says otherwise: fp32 sums in another order, up to 30 tokens deep.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.model.test_mla import CONFIGS as MLA
from tests.model.test_transformer import _SMALL, CONFIGS, build

from lmworks.errors import UserError
from lmworks.inference import batching
from lmworks.inference.batching import ContinuousBatch
from lmworks.inference.generate import generate
from lmworks.inference.sampling import GenerateOptions, Token, filter_logits
from lmworks.model import Transformer
from lmworks.model.cache import Cache
from lmworks.recipe.schema.model import Model
from lmworks.serve.prefixes import PrefixCache

ALL = CONFIGS | {f"mla {name}": config for name, config in MLA.items()}
BLOCK = 8
PROMPTS = [[3, 5, 7], [11] * 19, [1, 2], list(range(40, 49)), [9, 8, 7, 6, 5]]


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_SMALLEST", 8)  # so that short rows outgrow theirs


def run(batch: ContinuousBatch) -> dict[int, list[Token]]:
    """All tokens of all rows, until nothing is left to do."""
    found: dict[int, list[Token]] = {}
    while batch.busy:
        for sampled in batch.step():
            found.setdefault(sampled.id, []).append(sampled.token)
    return found


def logits(model: Transformer, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]))[0, -1]


ALIKE = ("mla wide value", "mla plain query", "aux", "moe", "mha", "no_rope", "dense")  # to a cache, as others here


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in ALL])
def test_rows_that_come_and_go_are_as_alone(name: str) -> None:
    model = build(ALL[name]).eval()
    batch = ContinuousBatch(model, max_rows=3, prefill_tokens=6)
    options = [GenerateOptions(max_new_tokens=10 + 3 * number) for number in range(len(PROMPTS))]
    rows = [batch.add(prompt, one) for prompt, one in zip(PROMPTS[:2], options, strict=False)]
    found: dict[int, list[Token]] = {}
    for _ in range(5):
        for sampled in batch.step():
            found.setdefault(sampled.id, []).append(sampled.token)
    rows += [batch.add(prompt, one) for prompt, one in zip(PROMPTS[2:], options[2:], strict=True)]
    for row, tokens in run(batch).items():
        found.setdefault(row, []).extend(tokens)
    for row, prompt, one in zip(rows, PROMPTS, options, strict=True):
        (alone,) = generate(model, [prompt], one)
        assert [token.id for token in found[row]] == alone
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + alone]))[0, len(prompt) - 1 :].log_softmax(-1)
        assert logprobs.argmax(-1).tolist()[:-1] == alone
        own = logprobs[torch.arange(len(alone)), alone].tolist()
        assert own == pytest.approx([token.logprob for token in found[row]], abs=1e-4)  # and latents are not expanded with a cache


@pytest.mark.parametrize("name", ["moe", "window", "mla experts"])
def test_draws_depend_on_the_seed_of_the_row_only(name: str) -> None:
    model = build(ALL[name]).eval()
    options = GenerateOptions(max_new_tokens=24, temperature=1.0, top_p=0.95)
    alone = ContinuousBatch(model)
    alone.add(PROMPTS[1], options, seed=7)
    crowded = ContinuousBatch(model, max_rows=4, prefill_tokens=5)
    others = [crowded.add(prompt, GenerateOptions(max_new_tokens=9, temperature=0.5 * number)) for number, prompt in enumerate(PROMPTS)]
    for _ in range(3):
        crowded.step()
    row, again = crowded.add(PROMPTS[1], options, seed=7), crowded.add(PROMPTS[1], options, seed=8)
    (expected,), found = run(alone).values(), run(crowded)
    assert [token.id for token in found[row]] == [token.id for token in expected]
    assert [token.logprob for token in found[row]] == pytest.approx([token.logprob for token in expected], abs=2e-5)
    assert [token.id for token in found[again]] != [token.id for token in expected]
    assert len(others) + 2 == crowded.add([1], options)  # ids count up


def test_each_row_has_its_own_options_and_both_log_probabilities() -> None:
    model = build(CONFIGS["softcap"]).eval()
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.3, "top_p": 0.6}, {"temperature": 0.9, "min_p": 0.2},
        {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "logprobs": 3},
    ]  # fmt: skip
    batch = ContinuousBatch(model)
    options = [GenerateOptions(max_new_tokens=6, **kind) for kind in kinds]
    rows = [batch.add(PROMPTS[3], one, seed) for seed, one in enumerate(options)]
    found = run(batch)
    for row, one in zip(rows, options, strict=True):
        text = list(PROMPTS[3])
        for token in found[row]:
            own = logits(model, text)
            assert token.logprob == pytest.approx(float(own.log_softmax(-1)[token.id]), abs=2e-5)
            expected = 0.0 if one.greedy else float(filter_logits(own[None], one).log_softmax(-1)[0, token.id])
            assert token.drawn_logprob == pytest.approx(expected, abs=5e-5)  # the filters' sums besides
            assert len(token.top) == (one.logprobs or 0)
            text.append(token.id)
    assert any(token.drawn_logprob > token.logprob + 0.1 for token in found[rows[2]]), "a filter raises the probability of what it keeps"


def test_a_free_place_is_taken_in_the_next_step() -> None:
    batch = ContinuousBatch(build(CONFIGS["dense"]).eval(), max_rows=2)
    first = batch.add([1, 2], GenerateOptions(max_new_tokens=2))
    batch.add([3], GenerateOptions(max_new_tokens=20))
    third = batch.add([4], GenerateOptions(max_new_tokens=20))
    assert [(one.id, one.finish) for one in batch.step()] == [(0, None), (1, None)]
    assert {one.id: one.finish for one in batch.step()} == {first: "length", 1: None}
    assert (batch.stats().running, batch.stats().waiting) == (1, 1)
    assert third in {one.id for one in batch.step()}


def test_a_long_prompt_does_not_stop_the_others() -> None:
    model = build(CONFIGS["dense"]).eval()
    batch, widest = ContinuousBatch(model, prefill_tokens=8), []
    hidden = model.hidden
    model.hidden = lambda tokens, **given: (widest.append(tokens.numel()), hidden(tokens, **given))[1]  # type: ignore[method-assign]
    quick = batch.add([1], GenerateOptions(max_new_tokens=40))
    batch.step()
    long = batch.add(list(range(100)), GenerateOptions(max_new_tokens=2))
    late = -1
    for step in range(1, 13):
        came = {one.id for one in batch.step()}
        assert came == ({quick, late} if step >= 4 else {quick}), "a later short prompt is read between two pieces of the long one"
        if step == 2:
            late = batch.add([5, 6], GenerateOptions(max_new_tokens=30))
    assert max(widest) == 8
    assert {one.id for _ in range(3) for one in batch.step()} == {quick, late, long}


def test_stop_tokens_end_a_row() -> None:
    model = build(CONFIGS["dense"]).eval()
    (free,) = generate(model, [PROMPTS[0]], GenerateOptions(max_new_tokens=8))
    batch = ContinuousBatch(model)
    batch.add(PROMPTS[0], GenerateOptions(max_new_tokens=8, stop_ids=(free[3],)))
    finishes = []
    while batch.busy:
        finishes += [one.finish for one in batch.step()]
    assert finishes == [None] * free.index(free[3]) + ["stop"]


def test_the_caches_are_bounded() -> None:
    model = build(CONFIGS["dense"]).eval()
    batch = ContinuousBatch(model, max_tokens=64)
    for _ in range(6):
        batch.add([1, 2, 3], GenerateOptions(max_new_tokens=20))  # 32 slots each
    running = []
    while batch.busy:
        batch.step()
        running.append(batch.stats().running)
        held = sum(group.cache.room * group.cache.capacity for group in batch._running.values())
        assert held <= 4 * 64
    assert max(running) == 2
    with pytest.raises(UserError, match="3 tokens of prompt and 80 new ones need 128 slots, but the caches have 64; ask for fewer"):
        batch.add([1, 2, 3], GenerateOptions(max_new_tokens=80))


def test_memory_is_given_back_when_rows_leave() -> None:
    batch = ContinuousBatch(build(CONFIGS["dense"]).eval())
    for number in range(16):
        batch.add([number + 1], GenerateOptions(max_new_tokens=3 if number else 7))
    for _ in range(4):
        batch.step()
    (group,) = batch._running.values()
    assert len(group.rows) == 1 and group.cache.room <= 4


def test_the_rows_of_a_cache_are_copied_once_when_they_outgrow_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.inference.batching._SMALLEST", 4)
    reserved: list[tuple[int, int]] = []
    reserve = Cache.reserve
    monkeypatch.setattr(Cache, "reserve", lambda self, rows: (reserved.append((self.capacity, rows)), reserve(self, rows))[1])
    batch = ContinuousBatch(build(CONFIGS["dense"]).eval())
    for number in range(8):
        batch.add([number + 1] * (1 + number % 3), GenerateOptions(max_new_tokens=12 if number else 2))
    run(batch)
    assert reserved == [(4, 8), (8, 7), (16, 7)], "a cache has room for all rows that can come to it, and for no others"


def test_the_next_step_is_known() -> None:
    batch = ContinuousBatch(build(CONFIGS["dense"]).eval(), prefill_tokens=6)
    assert batch.upcoming() == 0
    for prompt in ([1, 2, 3, 4, 5], [2, 3]):
        batch.add(prompt, GenerateOptions(max_new_tokens=4))
    counts = []
    while batch.busy:
        counts.append(batch.upcoming())
        batch.step()
    assert counts == [6, 1 + 2, 2, 2, 1] and batch.upcoming() == 0  # 3 of both, the rest of the longer one beside a row, and rows


@pytest.mark.parametrize("state", ["waiting", "reading", "running"])
def test_cancel(state: str) -> None:
    model = build(CONFIGS["dense"]).eval()
    batch = ContinuousBatch(model, max_rows=3 if state == "waiting" else 4, prefill_tokens=4)
    options = GenerateOptions(max_new_tokens=12)
    rows = [batch.add(prompt, options) for prompt in ([3, 5, 7], [1, 2], [6], [2] * 30)]
    for _ in range({"waiting": 1, "reading": 3, "running": 6}[state]):
        batch.step()
    gone = rows[1] if state == "running" else rows[3]
    batch.cancel(gone)
    batch.cancel(gone)  # and what has ended already
    found = run(batch)
    assert gone not in found
    (alone,) = generate(model, [[6]], options)
    assert [token.id for token in found[rows[2]]] == alone[-len(found[rows[2]]) :]
    assert not batch.stats().running and not batch._running and not batch._reading


def test_equal_prompts_are_read_once() -> None:
    model = build(CONFIGS["moe"]).eval()
    batch, read = ContinuousBatch(model), []
    hidden = model.hidden
    model.hidden = lambda tokens, **given: (read.append(tuple(tokens.shape)), hidden(tokens, **given))[1]  # type: ignore[method-assign]
    options = GenerateOptions(max_new_tokens=5, temperature=1.0)
    rows = [batch.add(PROMPTS[1], options, seed) for seed in range(6)]
    found = run(batch)
    assert read[0] == (1, 19) and read[1] == (6, 1)
    assert len({tuple(token.id for token in found[row]) for row in rows}) == 6
    assert len({found[row][0].logprob for row in rows if found[row][0].id == found[rows[0]][0].id}) == 1
    assert (batch.stats().prompt_tokens, batch.stats().hit_tokens) == (6 * 19, 5 * 19)


@pytest.mark.parametrize("name", ["moe", "window", "nope", "mla latent query"])
def test_prefixes_change_nothing_and_are_not_read_again(name: str) -> None:
    model = build(ALL[name]).eval()
    system = [(7 * n) % 97 for n in range(2 * BLOCK + 5)]
    options = GenerateOptions(max_new_tokens=BLOCK + 4)
    batch = ContinuousBatch(model, prefixes=PrefixCache(64 * BLOCK, BLOCK))
    first = batch.add([*system, 1, 2], options)
    answer = [token.id for token in run(batch)[first]]
    assert batch.stats().hit_tokens == 0
    following = [[*system, 1, 2], [*system, 3], [*system, 1, 2, *answer, 9, 9], system[: BLOCK + 1], system[:BLOCK], [99, *system]]
    hits = []
    for prompt in following:
        before = batch.stats().hit_tokens
        row = batch.add(prompt, options)
        found = run(batch)[row]
        hits.append(batch.stats().hit_tokens - before)
        assert [token.id for token in found] == generate(model, [prompt], options)[0]
    # the third repeats a whole turn: prompt and answer without its last token; the fifth has a token to read, and so no whole block
    assert hits == [2 * BLOCK, 2 * BLOCK, 4 * BLOCK, BLOCK, 0, 0]
    together = ContinuousBatch(model, prefixes=batch.prefixes, prefill_tokens=16)
    rows = [together.add(prompt, options) for prompt in following]
    found_together = run(together)
    for row, prompt in zip(rows, following, strict=True):  # rows that begin at different lengths are padded
        assert [token.id for token in found_together[row]] == generate(model, [prompt], options)[0]


def test_prefixes_where_layers_with_a_window_have_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is several windows long, and so is the answer, of which only the end can be gone on from."""
    model, size, hashed = build(CONFIGS["gemma"]).eval(), 4, Mock(wraps=hashlib.blake2b)
    monkeypatch.setattr("lmworks.serve.prefixes.hashlib.blake2b", hashed)
    batch = ContinuousBatch(model, prefill_tokens=10, prefixes=PrefixCache(1024, size))

    def hits(prompt: list[int], new: int = 2) -> tuple[int, list[int]]:
        before, row = batch.stats().hit_tokens, batch.add(prompt, GenerateOptions(max_new_tokens=new))
        found = run(batch)[row]
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + [token.id for token in found]]))[0, len(prompt) - 1 :].log_softmax(-1)
        for token, expected in zip(found, logprobs, strict=False):
            assert token.id == int(expected.argmax()) and token.logprob == pytest.approx(float(expected[token.id]), abs=1e-4)
        return batch.stats().hit_tokens - before, [token.id for token in found]

    system = [(7 * n) % 97 for n in range(53)]
    first, answer = hits(system, 30)
    assert first == 0
    assert hashed.call_count == 2 * (1 + 82 // size), "each block is hashed once to keep it, however many pieces it was read in"
    text = [*system, *answer]
    assert hits([*text, 1, 2, 3])[0] == 80, "the next turn: prompt and answer"
    assert hits([*system[:30], 5])[0] == 28, "another prompt of the same beginning"
    assert hits([*text[:70], 1])[0] == 52, "within the answer: as far as the prompt"
    assert hits([*text[:70], 2])[0] == 68, "which has been read since"
    assert hits([*text[:75], 3])[0] == 68
    assert hits([*text[:80], 4])[0] == 80
    assert hits([*text, 1, 2, 3])[0] == 84


def test_prefixes_are_kept_apart_by_salt_and_forgotten() -> None:
    model = build(CONFIGS["dense"]).eval()
    prefixes = PrefixCache(4 * BLOCK, BLOCK)
    batch = ContinuousBatch(model, prefixes=prefixes)
    options = GenerateOptions(max_new_tokens=1)

    def hits(prompt: list[int], salt: str = "") -> int:
        before = batch.stats().hit_tokens
        batch.add(prompt, options, salt=salt)
        run(batch)
        assert prefixes.tokens <= 4 * BLOCK
        return batch.stats().hit_tokens - before

    one, two = ([seed, *range(2 * BLOCK)] for seed in (1, 2))
    assert [hits(one), hits(one), hits(one, "other"), hits(one, "other")] == [0, 2 * BLOCK, 0, 2 * BLOCK]
    assert hits(two) == 0  # the least recently used are dropped: those without a salt
    assert [hits(one, "other"), hits(two), hits(one)] == [2 * BLOCK, 2 * BLOCK, 0]
    assert hits([n % 100 for n in range(10 * BLOCK)]) == 0
    assert hits([n % 100 for n in range(10 * BLOCK)]) == 4 * BLOCK, "of a prompt that is longer than what is kept, the beginning is"
    prefixes.clear()
    assert (prefixes.tokens, hits(two)) == (0, 0)


class Only:
    """Allows the ids of one set, then of the next."""

    def __init__(self, *sets: set[int]) -> None:
        self.sets, self.accepted = list(sets), list[int]()

    def allowed(self) -> torch.Tensor:
        return torch.tensor([token in self.sets[len(self.accepted)] for token in range(100)])

    def accept(self, token: int) -> int:
        self.accepted.append(token)
        return token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_restricts_its_row_only(temperature: float) -> None:
    model = build(CONFIGS["dense"]).eval()
    options = GenerateOptions(max_new_tokens=3, temperature=temperature, top_k=50 if temperature else 0)
    batch, grammar = ContinuousBatch(model), Only({5, 6}, {99}, set(range(20, 60)))
    held, free = batch.add(PROMPTS[0], options, 1, grammar), batch.add(PROMPTS[0], options, 1)
    found = run(batch)
    ids = [token.id for token in found[held]]
    assert ids[0] in {5, 6} and ids[1] == 99 and ids[2] in range(20, 60)
    assert grammar.accepted == ids
    assert found[held][1].drawn_logprob == 0 and found[held][1].logprob < -0.1, "the model's own probability is not changed"
    alone = ContinuousBatch(model)
    row = alone.add(PROMPTS[0], options, 1)
    assert [token.id for token in run(alone)[row]] == [token.id for token in found[free]]


def test_bad_input() -> None:
    batch = ContinuousBatch(build(Model(**_SMALL, max_position_embeddings="8 tokens")).eval())
    with pytest.raises(UserError, match="a prompt is empty"):
        batch.add([], GenerateOptions())
    with pytest.raises(UserError, match="max_new_tokens is 0; generate at least 1 token"):
        batch.add([1], GenerateOptions(max_new_tokens=0))
    with pytest.raises(UserError, match="the prompt has 9 tokens, but the model's context is 8; shorten the prompt"):
        batch.add([1] * 9, GenerateOptions())
    assert not batch.busy and batch.step() == []
    batch.add([1] * 6, GenerateOptions(max_new_tokens=50))
    assert len(run(batch)[0]) == 2, "the context is a limit"
