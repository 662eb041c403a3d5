"""Penalties, biases and a minimum length, compared with the processors of transformers and with OpenAI's formula."""

from __future__ import annotations

import pytest
import torch

from lmworks.errors import UserError
from lmworks.inference.batching import ContinuousBatch
from lmworks.inference.sampling import Draw, GenerateOptions, adjust, choose
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.model import Model

V = 50
PROMPT = (3, 7, 7, 11)


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = Model(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16, intermediate_size=64,
        initializer_range=0.3, max_position_embeddings="256 tokens",
    )  # fmt: skip
    return initialize(Transformer(config), seed=1).eval()


def reference(logits_V: torch.Tensor, options: GenerateOptions, written: list[int]) -> torch.Tensor:
    """transformers' processors in vLLM's order, then OpenAI's formula: mu[j] - c[j] * frequency - (c[j] > 0) * presence."""
    from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor
    from transformers import SequenceBiasLogitsProcessor as Bias

    processors = LogitsProcessorList()
    if options.min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), options.min_tokens, list(options.stop_ids), device="cpu"))
    if options.logit_bias:
        processors.append(Bias({(token,): value for token, value in options.logit_bias}))
    processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    out = processors(torch.tensor([[*PROMPT, *written]]), logits_V[None].clone())[0]
    for token in set(written):
        out[token] -= written.count(token) * options.frequency_penalty + options.presence_penalty
    return out


KINDS = [
    {}, {"repetition_penalty": 1.3}, {"repetition_penalty": 0.7}, {"frequency_penalty": 0.5}, {"presence_penalty": -1.5},
    {"logit_bias": ((4, 2.5), (9, -100.0))}, {"min_tokens": 6, "stop_ids": (1, 2, 5)},
    {"frequency_penalty": 1.0, "presence_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": ((7, 1.0),), "min_tokens": 3,
     "stop_ids": (0,)},
]  # fmt: skip


def test_each_option_equals_its_reference_in_a_mixed_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [Draw(GenerateOptions(**kind), seed=0, prompt=PROMPT) for kind in KINDS]  # type: ignore[arg-type]
    written: list[list[int]] = [[] for _ in KINDS]
    for _ in range(8):
        logits = torch.randn(len(KINDS), V, generator=generator) * 2
        logits[:, 13] += 9  # chosen again and again: what is generated twice counts twice
        before = logits.clone()
        found = adjust(logits, [draw.history for draw in draws])
        assert torch.equal(logits, before)  # log-probabilities are of the model's own distribution
        for row, draw in enumerate(draws):
            # one rounding of fp32 apart: the sums are in another order
            assert torch.allclose(found[row], reference(logits[row], draw.options, written[row]), rtol=1e-6, atol=1e-6), KINDS[row]
        for row, token in enumerate(choose(logits, draws)):
            written[row].append(token.id)
    assert all(row.count(13) > 4 for row in written)


def test_a_row_without_these_options_keeps_its_bits() -> None:
    logits = torch.randn(2, V)
    plain, biased = Draw(GenerateOptions(), 0), Draw(GenerateOptions(logit_bias=((4, 100.0),)), 0)
    assert adjust(logits, [plain.history, plain.history]) is logits  # nothing is computed
    assert torch.equal(adjust(logits, [plain.history, biased.history])[0], logits[0])
    assert [token.id for token in choose(logits, [plain, biased])] == [int(logits[0].argmax()), 4]


def test_the_batch_passes_the_prompt_and_what_was_generated(model: Transformer) -> None:
    """Greedy generation by hand, with the reference, equals the batch, in which other rows run too."""
    for kind in KINDS:
        options = GenerateOptions(max_new_tokens=12, **kind)  # type: ignore[arg-type]
        batch = ContinuousBatch(model)
        batch.add(PROMPT[:2], GenerateOptions(max_new_tokens=20, presence_penalty=2.0))
        row, found = batch.add(PROMPT, options), []
        while batch.busy:
            found += [sampled.token.id for sampled in batch.step() if sampled.id == row]
        written: list[int] = []
        while len(written) < 12 and not (written and written[-1] in options.stop_ids):
            with torch.no_grad():
                logits = model(torch.tensor([[*PROMPT, *written]]))[0, -1]
            written.append(int(reference(logits, options, written).argmax()))
        assert found == written, kind


def test_the_batch_penalizes_what_is_in_the_prompt(model: Transformer) -> None:
    options, differ = GenerateOptions(max_new_tokens=1, repetition_penalty=100.0), 0
    for seed in range(20):
        prompt = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[: V // 2]
        batch = ContinuousBatch(model)
        batch.add(prompt.tolist(), options)
        (sampled,) = batch.step()
        with torch.no_grad():
            logits = model(prompt[None])[0, -1]
        penalized = logits.clone()
        penalized[prompt] = torch.where(logits > 0, logits / 100, logits * 100)[prompt]
        assert sampled.token.id == int(penalized.argmax())
        differ += sampled.token.id != int(logits.argmax())
    assert differ > 5


def test_the_likelihood_of_a_draw_is_under_the_penalized_distribution() -> None:
    logits = torch.zeros(1, V)
    draw = Draw(GenerateOptions(temperature=1.0, logit_bias=tuple((token, -100.0) for token in range(2, V))), 0)
    (token,) = choose(logits, [draw])
    assert token.id < 2
    assert token.drawn_logprob == pytest.approx(torch.tensor(0.5).log().item(), abs=1e-6)
    assert token.logprob == pytest.approx(-torch.tensor(float(V)).log().item(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_refused(temperature: float) -> None:
    """Greedily the first of them would be chosen, and a draw would be no token at all."""
    logits = torch.randn(2, V)
    logits[1, 3] = float("nan")
    with pytest.raises(UserError, match=r"the logits of the model are not numbers \(NaN\)"):
        choose(logits, [Draw(GenerateOptions(temperature=temperature), seed) for seed in range(2)])


def test_a_top_p_of_zero_leaves_the_likeliest_token() -> None:
    logits = torch.randn(4, V)
    drawn = choose(logits, [Draw(GenerateOptions(temperature=1.0, top_p=0.0), seed) for seed in range(4)])
    assert [token.id for token in drawn] == logits.argmax(-1).tolist()
