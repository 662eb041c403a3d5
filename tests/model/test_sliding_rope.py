"""The options of Gemma 3's layers: a RoPE of their own for sliding layers, a scale of the scores, norms on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmworks.inference.model import for_inference
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.model import Model, Rope
from lmworks.recipe.schema.train import Phase

_GEMMA: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "norm_position": "both", "hidden_act": "gelu_tanh", "scale_embeddings": True, "query_pre_attn_scalar": 5,
    "use_qk_norm": True, "initializer_range": 0.3,
}  # fmt: skip
_WINDOW: dict[str, Any] = {"sliding_window": "6 tokens", "sliding_rope": {"theta": 300.0}}
_MIXED = _WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def _model(**options: Any) -> Transformer:
    return initialize(Transformer(Model.model_validate(_GEMMA | options)), 1).eval()


_TOKENS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_tokens_one_by_one_give_the_logits_of_the_whole_sequence() -> None:
    model = _model(**_MIXED)
    expected = model(_TOKENS)
    for decoding in (model, for_inference(model), for_inference(model, rows=8)):
        cache, found = decoding.cache(2, 24), []
        for at in range(24):
            found.append(decoding(_TOKENS[:, at : at + 1], cache=cache))
            cache.finish(1)
        torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_each_kind_of_layer_has_its_rope() -> None:
    slow = Rope(theta=1e6)
    sliding, mixed, alike = (_model(**layers) for layers in (_WINDOW, _MIXED, _MIXED | {"sliding_rope": None}))
    before = [model(_TOKENS) for model in (sliding, mixed, alike)]
    assert not torch.equal(before[1], before[2])
    for model in (sliding, mixed, alike):
        model.set_rope(slow)
    assert torch.equal(sliding(_TOKENS), before[0])
    assert not torch.equal(mixed(_TOKENS), before[1])
    mixed.configure(mixed.config.model_copy(update={"sliding_rope": slow}))
    torch.testing.assert_close(mixed(_TOKENS), alike(_TOKENS), rtol=0, atol=0)


@torch.no_grad()
def test_a_phase_that_opens_the_window_gives_all_layers_the_rope_of_the_others() -> None:
    model = _model(**_MIXED)
    sizes = {"tokens": "64 tokens", "sequence_length": "32 tokens", "global_batch_tokens": "32 tokens"}
    phase = Phase.model_validate({"name": "long", "mixture": {"web": 1.0}, "sliding_window": "full", **sizes})
    opened = phase.changed(model.config)
    assert opened.sliding_rope is None
    model.configure(opened)
    assert torch.equal(model(_TOKENS), _model()(_TOKENS))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sliding_rope": {}}, "there is no window; set model.sliding_window"),
        (_WINDOW | {"rope": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 1 must equal that of model.rope, 0.5"),
        (_WINDOW | {"sliding_rope": {"theta": 1e38, "scaling": "linear", "factor": 1e12}}, "sliding_rope.theta 1e.38 .*fp32 can hold"),
        ({"moe": {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}}, "does not combine with model.moe"),
    ],
)
def test_options_that_do_not_combine_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Model.model_validate(_GEMMA | options)
