"""Layers of Mamba-2, of lightning attention and of short convolutions in whole models: documents, reference implementations, decoding in
batches, bad settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmworks.errors import UserError
from lmworks.inference.generate import GenerateOptions, generate
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.load import load_recipe
from lmworks.recipe.mixers import tp_problems
from lmworks.recipe.schema.mixers import Lightning, Mamba, Multipliers, ShortConv
from lmworks.recipe.schema.model import Model, Moe

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "initializer_range": 0.2,
}  # fmt: skip
_FACTORS = Multipliers(embedding=1.5, key=0.5, attention_in=0.75, gate=1.25, mamba_parts=(0.5, 1.5, 0.75, 1.25, 2.0), mamba_out=0.5)
MODELS = {
    "hybrid": Model(
        **_SMALL, layer_types=("hybrid",), multipliers=_FACTORS,
        mamba=Mamba(num_heads=4, head_dim=8, state_size=16, n_groups=2, norm_groups=2),
    ),
    "mamba": Model(
        **_SMALL, layer_types=("linear_attention", "full_attention"),
        mamba=Mamba(num_heads=4, head_dim=8, state_size=16, gate_norm="before_gate", conv_bias=False),
    ),
    "blocks": Model(
        **_SMALL | {"num_hidden_layers": 4}, layer_types=("linear_attention", "moe", "full_attention", "mlp"), hidden_act="relu2",
        mamba=Mamba(num_heads=4, head_dim=8, state_size=16, n_groups=2, norm_groups=2, min_time_step=0.02),
        moe=Moe(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=0, moe_latent_size=16),
    ),
    "lightning": Model(
        **_SMALL, layer_types=("linear_attention", "full_attention"), lightning=Lightning(), norm_position="stream",
        multipliers=Multipliers(lightning_stream=1.5, attention_stream=0.75, ffn_out=0.5),
    ),
    "conv": Model(**_SMALL, layer_types=("conv", "full_attention"), short_conv=ShortConv()),
}  # fmt: skip
_FEW = {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
_ALL = pytest.mark.parametrize("name", MODELS)


def model_of(name: str) -> Transformer:
    return initialize(Transformer(MODELS[name]), seed=3)


def test_layers_of_one_block_have_one_norm_each() -> None:
    model = MODELS["blocks"]
    found = [name.removeprefix("layers.") for name, _ in Transformer(model).named_parameters() if "layers." in name and "_norm." in name]
    assert [name for name in found if "attention.gate_norm" not in name] == [
        "0.attention_norm.weight", "1.ffn_norm.weight", "2.attention_norm.weight", "3.ffn_norm.weight",
    ]  # fmt: skip
    assert (model.sparse_layers, model.attention_layers) == ((1,), (2,))
    assert [model.feed_forward(layer) for layer in range(4)] == ["none", "moe", "none", "mlp"]


@_ALL
def test_nothing_of_a_document_reaches_the_next(name: str) -> None:
    model, tokens = model_of(name), torch.randint(64, (2, 90), generator=torch.Generator().manual_seed(1))
    whole = model(tokens, torch.tensor([0, 31, 90, 155, 180]))
    alone = [model(row[:, start:end]) for row, start, end in ((tokens[:1], 31, 90), (tokens[1:], 0, 65), (tokens[1:], 65, 90))]
    torch.testing.assert_close(whole[:1, 31:], alone[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole[1:], torch.cat(alone[1:], 1), rtol=1e-4, atol=1e-4)


@_ALL
def test_reference_implementations(name: str) -> None:
    model, tokens = model_of(name), torch.randint(64, (2, 90), generator=torch.Generator().manual_seed(1))
    labels, borders = tokens.roll(-1, 1), torch.tensor([0, 31, 90, 155, 180])
    found = []
    for plain in (False, True):
        model.plain(plain)
        model.zero_grad()
        loss = model.loss(tokens, labels, borders).total
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    for fast, plain in zip(*found, strict=True):
        assert float((fast - plain).abs().max()) < 1e-4 * float(plain.abs().max()) + 1e-5


@_ALL
def test_decoding_in_batches_equals_reading_it_all(name: str) -> None:
    """Prompts of different lengths, padded and in pieces, and rows that leave and join: the most likely tokens of the whole text so far."""
    model = model_of(name).eval()
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(64, (size,), generator=generator).tolist() for size in (3, 17, 1, 70, 40)]
    answers = generate(model, prompts, GenerateOptions(max_new_tokens=9, temperature=0.0, stop_ids=(7,)))
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            best = model(torch.tensor([prompt + answer]))[0].argmax(-1).tolist()
        expected = best[len(prompt) - 1 :]
        assert answer == expected[: len(answer)] and (len(answer) == 9 or expected[len(answer)] == 7)


@_ALL
def test_states_go_on_from_any_token(name: str) -> None:
    model, tokens = model_of(name).eval(), torch.randint(64, (2, 80), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model(tokens)
        for pieces in ([80], [1] * 80, [3, 1, 70, 2, 4], [64, 16]):
            cache, found, at = model.cache(2, 80), [], 0
            for size in pieces:
                found.append(model(tokens[:, at : at + size], cache=cache))
                cache.finish(size)
                at += size
            torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mamba": {"num_heads": 4, "n_groups": 3}, "layer_types": ["hybrid"]}, "n_groups 3 must divide mamba.num_heads 4"),
        ({"mamba": {"num_heads": 2, "norm_groups": 3}, "layer_types": ["hybrid"]}, "norm_groups 3 must divide the inner width 128"),
        ({"mamba": {"num_heads": 2, "norm_groups": 2, "gate_norm": "none"}, "layer_types": ["hybrid"]}, "does nothing without a norm"),
        ({"mamba": {"num_heads": 4}}, "model.mamba is of no layer"),
        ({"layer_types": ["full_attention", "moe"]}, "has moe, which needs model.moe"),
        ({"layer_types": ["full_attention", "mlp"], "moe": _FEW}, "has mlp and no moe, so that model.moe is of no layer"),
        ({"layer_types": ["full_attention", "moe"], "moe": _FEW}, "which layers have experts; set model.moe.first_k_dense_replace to 0"),
        ({"layer_types": ["full_attention", "mlp"], "mtp": {}}, "mtp does not combine with layers of one block"),
        ({"hidden_act": "relu2", "moe": _FEW | {"add_bias": True}}, "moe.add_bias is of experts with a gate"),
        ({"hidden_act": "relu2", "multipliers": {"gate": 0.5}}, "relu2, which has no gate"),
        ({"layer_types": ["hybrid"]}, "hybrid, which needs exactly one of model.mamba"),
        ({"multipliers": {"mamba_out": 0.5}}, "mamba_out has nothing to multiply without model.mamba"),
        ({"multipliers": {"lightning_stream": 0.5}}, "lightning_stream has nothing to multiply without model.lightning"),
        ({"multipliers": {"attention_in": 0.5}}, "attention_in is a factor of hybrid layers"),
        ({"multipliers": {"key": 0.5}, "mtp": {}}, "multipliers does not combine with model.mla and model.mtp"),
        (
            {"multipliers": {"gate": 0.5}, "moe": {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8}},
            "gate is a factor of dense feed-forward blocks",
        ),
    ],
)
def test_settings_that_do_not_combine_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Model.model_validate(_SMALL | change)


def test_layouts_that_split_states_are_refused() -> None:
    settings = ["model.preset=glm-nano", "model.layer_types=[hybrid]", "model.mamba={num_heads: 4}", "layout.cp=2"]
    with pytest.raises(UserError, match=r"model.mamba are passed from no rank.*set layout.cp to 1"):
        load_recipe("quickstart", settings)


@pytest.mark.parametrize(
    ("sizes", "problems"),
    [
        ({"num_heads": 6}, ["tp 4 does not divide model.mamba.num_heads 6"]),
        ({"num_heads": 24, "n_groups": 6}, ["tp 4 neither divides model.mamba.n_groups 6 nor is a multiple of it"]),
        ({"num_heads": 8, "norm_groups": 2}, ["tp 4 does not divide model.mamba.norm_groups 2"]),
        ({"num_heads": 8, "state_size": 7}, ["tp 4 does not divide the 14 rows of B and C, 2 * model.mamba.n_groups * state_size"]),
        ({"num_heads": 8, "n_groups": 2, "norm_groups": 4}, []),
        ({"num_heads": 8, "n_groups": 8, "norm_groups": 8}, []),
    ],
)
def test_heads_that_ranks_cannot_split_are_named(sizes: dict[str, Any], problems: list[str]) -> None:
    """Two key/value heads are no matter where no layer attends."""
    model = Model(**_SMALL, layer_types=("linear_attention",), mamba=Mamba(head_dim=8, **{"state_size": 16} | sizes))
    assert tp_problems(model, 4) == problems
    attending = model.model_copy(update={"layer_types": ("linear_attention", "full_attention")})
    assert tp_problems(attending, 4) == ["tp 4 does not divide model.num_key_value_heads 2", *problems]
