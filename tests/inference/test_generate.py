"""Generation: the cache against full recomputation, batches against single prompts, and each way of choosing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.model.test_transformer import _SMALL, CONFIGS, build

from lmworks.errors import UserError
from lmworks.inference.generate import GenerateOptions, filter_logits, generate, stream
from lmworks.recipe.schema.model import Model

PROMPTS = [[3, 5, 7], [11] * 9, [1, 2]]


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_equals_recomputed(name: str) -> None:
    """Tolerance 1e-4 on log-probabilities: fp32 sums over another shape."""
    model = build(CONFIGS[name]).eval()
    steps = list(stream(model, PROMPTS, GenerateOptions(max_new_tokens=12)))
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for step in steps:
            token = step[row]
            assert token is not None
            with torch.no_grad():
                logprobs = model(torch.tensor([text]))[0, -1].log_softmax(-1)
            assert int(logprobs.argmax()) == token.id
            assert abs(float(logprobs[token.id]) - token.logprob) < 1e-4
            text.append(token.id)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    model = build(CONFIGS["moe"])
    options = GenerateOptions(max_new_tokens=10, temperature=1.0, top_p=0.9, seed=5)
    together = generate(model, [PROMPTS[0], PROMPTS[1]], options)
    assert together[0] == generate(model, [PROMPTS[0], PROMPTS[2]], options)[0]
    assert together == generate(model, [PROMPTS[0], PROMPTS[1]], options), "the seed decides"
    for seed in (6, -5):
        other = generate(model, [PROMPTS[0], PROMPTS[1]], replace(options, seed=seed))
        assert all(one != two for one, two in zip(together, other, strict=True))


def test_stopping_ends_one_row_and_leaves_the_others() -> None:
    model = build(CONFIGS["dense"])
    free = generate(model, PROMPTS, GenerateOptions(max_new_tokens=8))
    stop = free[0][3]
    stopped = generate(model, PROMPTS, GenerateOptions(max_new_tokens=8, stop_ids=(stop,)))
    for before, after in zip(free, stopped, strict=True):
        assert after == (before[: before.index(stop)] if stop in before else before)


def test_filters() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    kept = lambda **options: torch.isfinite(filter_logits(logits, GenerateOptions(temperature=1.0, **options)))[0].tolist()  # noqa: E731
    probabilities = logits.softmax(-1)[0].tolist()
    assert kept() == [True] * 4
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_p=probabilities[0] - 1e-6) == [True, False, False, False]
    assert kept(top_p=probabilities[0] + 1e-6) == [True, True, False, False]
    assert kept(min_p=probabilities[1] / probabilities[0] + 1e-6) == [True, False, False, False]
    assert torch.allclose(filter_logits(logits, GenerateOptions(temperature=2.0)), logits / 2)


def test_sampling_follows_the_distribution() -> None:
    model = build(CONFIGS["dense"]).eval()
    with torch.no_grad():
        expected = model(torch.tensor([[3, 5, 7]]))[0, -1].softmax(-1)
    drawn = [row[0] for row in generate(model, [[3, 5, 7]] * 4000, GenerateOptions(max_new_tokens=1, temperature=1.0))]
    found = torch.bincount(torch.tensor(drawn), minlength=128) / len(drawn)
    # total variation of 4000 draws over 128 outcomes stays below 0.1; uniform draws would be off by more than 0.3
    assert float((found - expected).abs().sum() / 2) < 0.1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_only_pad_the_embedding_are_not_drawn(temperature: float) -> None:
    """Nor are they among the likeliest; log-probabilities are those of all rows."""
    from lmworks.inference.sampling import Draw, choose

    torch.manual_seed(0)
    logits = torch.randn(2, 12)
    logits[:, 7:] += 5
    options = GenerateOptions(temperature=temperature, logprobs=9, entries=7)
    for draw in range(50):
        padded, free = choose(logits, [Draw(options, draw), Draw(replace(options, entries=None), draw)])
        assert padded.id < 7 and {token for token, _ in padded.top} == set(range(7)) and len(free.top) == 9
        expected = logits.log_softmax(-1)[0]
        assert padded.logprob == pytest.approx(float(expected[padded.id])) and dict(padded.top)[padded.id] == padded.logprob
        assert max(padded.top, key=lambda one: one[1])[0] == int(expected[:7].argmax())
    assert free.id >= 7 or temperature


def test_the_context_is_a_limit() -> None:
    model = build(Model(**_SMALL, max_position_embeddings="8 tokens"))
    with pytest.raises(UserError, match="the prompt has 9 tokens, but the model's context is 8; shorten the prompt"):
        generate(model, [[1] * 9], GenerateOptions(max_new_tokens=2))
    assert len(generate(model, [[1] * 6], GenerateOptions(max_new_tokens=50))[0]) == 2
    with pytest.raises(UserError, match="a prompt is empty"):
        generate(model, [[]], GenerateOptions())
