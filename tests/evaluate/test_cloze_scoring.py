from __future__ import annotations

import math

import pytest
import torch

from lmworks.evaluate.logprobs import BatchedLogProbs, PlainLogProbs
from lmworks.evaluate.sets import forms
from lmworks.evaluate.sets.items import ChoiceItem
from lmworks.evaluate.statistics import pooled


def item(context: str, choices: list[str], answer: int = 0, key: str = "1", name: str = "toy") -> ChoiceItem:
    return ChoiceItem(
        name, key, "", context, tuple(choices), answer, (context,) * len(choices), tuple(" " + c for c in choices),
        f"{context} {choices[answer]}",
    )  # fmt: skip


def by_hand(bigram, tokenizer, context: str, continuation: str) -> float:
    table = bigram.embedding.weight
    ids = tokenizer.encode(context + continuation)
    start = len(tokenizer.encode(context))
    return sum(table[a, b].item() for a, b in zip(ids[start - 1 : -1], ids[start:], strict=True))


def test_known_probabilities(bigram, byte_tokenizer) -> None:
    items = [item("Question: why?\nAnswer:", ["because", "no", "höher"]), item("x", ["y", "zz"], key="2")]
    answered = forms.answer(items, byte_tokenizer, BatchedLogProbs(bigram))
    for a in answered:
        expected = [by_hand(bigram, byte_tokenizer, a.item.contexts[0], c) for c in a.item.continuations]
        assert a.logprobs == pytest.approx(expected, rel=1e-12)  # double precision on both sides
        assert a.prompt_tokens == max(len((a.item.contexts[0] + c).encode()) for c in a.item.continuations)
        assert a.pick("none") == expected.index(max(expected))
        assert a.scores("byte") == pytest.approx([e / len(c[1:].encode()) for e, c in zip(expected, a.item.continuations, strict=True)])
        assert a.scores("char") == pytest.approx([e / len(c[1:]) for e, c in zip(expected, a.item.continuations, strict=True)])


def test_normalisation_changes_the_pick() -> None:
    a = forms.Answered(item("q", ["ab", "abcdefgh"]), (-4.0, -8.0))
    assert a.pick("none") == 0  # -4 against -8
    assert a.pick("byte") == 1  # -2 against -1 per byte
    assert a.margin == pytest.approx(-1.0)
    assert not a.correct()
    assert forms.Answered(item("q", ["ab", "ü"]), (-4.0, -3.0)).pick("byte") == 1  # 2 bytes: -1.5
    assert forms.Answered(item("q", ["ab", "ü"]), (-4.0, -3.0)).pick("char") == 0  # 1 character: -3


def test_batched_equals_one_at_a_time_on_a_real_decoder(small_transformer, byte_tokenizer) -> None:
    texts = [("a context", " and its end"), ("a", "b"), ("a context", " x"), ("a context", " y")]
    texts += [("long " * 10, "tail"), ("a context a", "nd")]
    requests = [forms.split_at_boundary(byte_tokenizer, *text) for text in texts]
    plain = PlainLogProbs(small_transformer)(requests)
    assert len(set(plain)) == len(plain)
    for batch_tokens in (1, 40, 8192):
        # fp32 sums in another order over a two-layer model: relative 1e-5
        assert BatchedLogProbs(small_transformer, batch_tokens=batch_tokens, logit_chunk_size=7)(requests) == pytest.approx(plain, rel=1e-5)


def test_left_truncation_agrees_and_keeps_the_continuation(small_transformer, byte_tokenizer) -> None:
    request = forms.split_at_boundary(byte_tokenizer, "a very long context " * 3, "the end")
    short = (request[0][-10:], request[1])
    kept = PlainLogProbs(small_transformer)([short])
    limit = 10 + len(request[1]) - 1
    assert PlainLogProbs(small_transformer, limit)([request]) == pytest.approx(kept)
    assert BatchedLogProbs(small_transformer, limit)([request, short]) == pytest.approx(kept * 2, rel=1e-5)
    assert PlainLogProbs(small_transformer)([request]) != pytest.approx(kept, rel=1e-3)
    # a limit below the continuation's own length still scores all of it
    shortest = PlainLogProbs(small_transformer)([(request[0][-1:], request[1])])
    assert BatchedLogProbs(small_transformer, 2)([request]) == pytest.approx(shortest, rel=1e-5)


def test_rows_that_begin_another_are_not_run(bigram, byte_tokenizer) -> None:
    requests = [(list(b"context"), [i]) for i in range(97, 117)] + [(list(b"context"), list(b"abc"))]
    scored = BatchedLogProbs(bigram)(requests)
    assert bigram.rows_run == 1
    assert scored == pytest.approx(PlainLogProbs(bigram)(requests))


def test_short_rows_are_not_padded_to_the_longest(bigram) -> None:
    """Forty rows of 7 to 101 tokens fit into one batch, of which half would be padding."""
    requests = [([i + 1, *range(98, 98 + 20 * (1 + i % 5) - 2 * (i // 5))], [97]) for i in range(40)]
    rows = [len(context) for context, _ in requests]
    fed: list[int] = []
    hidden = bigram.hidden
    bigram.hidden = lambda tokens, *rest: (fed.append(tokens.numel()), hidden(tokens, *rest))[1]
    scored = BatchedLogProbs(bigram, batch_tokens=4000)(requests)
    assert sum(rows) <= sum(fed) < 1.3 * sum(rows) < 0.7 * len(rows) * max(rows)
    assert scored == pytest.approx(PlainLogProbs(bigram)(requests))


def test_progress_counts_every_request_once(bigram) -> None:
    requests = [(list(b"ab"), [i]) for i in range(9)] + [(list(b"cd" * i), [1, 2]) for i in range(1, 9)]
    seen: list[int] = []
    BatchedLogProbs(bigram, batch_tokens=4)(requests, seen.append)
    assert sum(seen) == len(requests)
    assert len(seen) > 1


def test_an_empty_context_is_refused(bigram) -> None:
    with pytest.raises(ValueError, match="context"):
        BatchedLogProbs(bigram)([([], [1])])


class Merging:
    """A tokenizer that merges `: ` into one token, over the boundary of context and continuation."""

    prefix: tuple[int, ...] = ()
    start = (2000,)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            step = 2 if text.startswith(": ") else 1
            ids.append(1000 if step == 2 else ord(text[0]))
            text = text[step:]
        return ids


def test_a_token_over_the_boundary_is_scored_with_the_continuation() -> None:
    context, continuation = forms.split_at_boundary(Merging(), "Q:", " yes")
    assert (context, continuation) == ([ord("Q")], [1000, *map(ord, "yes")])
    assert Merging().encode("Q:")[-1] == ord(":")  # encoded apart, the colon would have been another token


class WithBos(Merging):
    prefix = start = (1,)

    def encode(self, text: str) -> list[int]:
        return [1, *super().encode(text)]


@pytest.mark.parametrize(("encoder", "first"), [(Merging(), 2000), (WithBos(), 1)])
def test_text_without_a_context_is_predicted_from_the_one_token_before_a_text(encoder: Merging, first: int) -> None:
    assert forms.split_at_boundary(encoder, "", "yes") == ([first], [*map(ord, "yes")])
    assert forms.split_at_boundary(encoder, ":", " ") == ([first], [1000]), "both are one token together"
    assert forms.split_at_boundary(encoder, "", "") == ([first], [])
    assert forms.without_question(encoder, "She sang", "yes") == ([first], [*map(ord, "yes")])


def test_scores_know_chance_and_the_best_constant_answer() -> None:
    yes_no = [forms.Answered(item("q", ["yes", "no"], 0 if i < 7 else 1, str(i)), (-1.0, -9.0)) for i in range(10)]
    score = forms.score(yes_no)
    assert (score.correct, score.n, score.chance, score.baseline) == (7, 10, 0.5, 0.7)
    assert score.verdict == "at chance"
    mixed = [forms.Answered(item("q", ["a", "b", "c"]), (-1, -2, -3)), forms.Answered(item("q", ["d", "e"]), (-2, -1))]
    assert forms.score(mixed).chance == pytest.approx((1 / 3 + 1 / 2) / 2)
    other = [forms.Answered(item("q", [f"{key}{c}" for c in "abcd"], 2, key, "other"), (-3, -2, -1, -4)) for key in "xy"]
    together = pooled([forms.score(yes_no), forms.score(other)])
    assert (together.correct, together.n) == (9, 12)
    assert together.baseline == pytest.approx((0.7 * 10 + 2 * 0.25) / 12)


def test_notable_items_are_the_ends_of_the_ranking() -> None:
    every = [forms.Answered(item("q", ["a", "b"], key=str(i)), (0.0, float(i - 50))) for i in range(100)]
    kept = forms.notable(every, each=3)
    assert [round(a.margin) for a in kept] == [-49, -48, -47, 48, 49, 50]
    assert not kept[0].to_json()["correct"]
    assert kept[-1].to_json()["correct"]


def test_uniform_model_gives_uniform_scores(bigram, byte_tokenizer) -> None:
    uniform = type(bigram)(torch.full((259, 259), 1 / 259, dtype=torch.float64))
    answered = forms.answer([item("q", ["abc", "de"])], byte_tokenizer, BatchedLogProbs(uniform))
    assert answered[0].logprobs == pytest.approx((-4 * math.log(259), -3 * math.log(259)))
