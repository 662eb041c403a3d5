"""Latent attention against the paper's equations written out, its two ways of attending, and its cache.

Tolerance 1e-5 relative to the largest value unless a test says otherwise: both sides are fp32 and differ in the order of sums, which costs
about 1e-6 at these sizes; a wrong rotation or a key of another head costs more than 1e-2.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.model.test_transformer import build, relative, sample
from torch import Tensor

from lmworks.inference.generate import GenerateOptions, generate
from lmworks.model.cache import Cache
from lmworks.model.documents import from_cu_seqlens
from lmworks.model.mla import LatentAttention
from lmworks.model.rope import cos_sin, frequencies
from lmworks.plan.memory import kv_cache_bytes
from lmworks.recipe.schema.model import Mla, Model, Moe, Rope
from small_config import small_config

MLA = Mla(q_lora_rank=20, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6)
_SMALL: dict[str, Any] = small_config(vocab_size=128, num_hidden_layers=3, num_key_value_heads=4, head_dim=12)
CONFIGS = {
    "latent query": Model(**_SMALL, mla=MLA),
    "plain query": Model(**_SMALL, mla=MLA.model_copy(update={"q_lora_rank": None})),
    "wide value": Model(**_SMALL, mla=MLA.model_copy(update={"v_head_dim": 16}), rope=Rope(theta=500.0)),
    "experts": Model(**_SMALL, mla=MLA, moe=Moe(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)),
}
YARN = Rope(theta=500.0, scaling="yarn", factor=8, original_max_position_embeddings="16 tokens")


def on_paper(attention: LatentAttention, x_BTD: Tensor, rope: Rope) -> Tensor:
    """Equations 9 to 19 of arXiv:2405.04434, one head, one query and one key at a time, in fp64."""
    mla, weights = attention.mla, {name: parameter.detach().double() for name, parameter in attention.named_parameters()}
    x, H = x_BTD.double(), 4
    inverse, scale = frequencies(rope, mla.qk_rope_head_dim)

    def normed(value: Tensor, weight: Tensor) -> Tensor:
        return value / (value.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def turned(vector: Tensor, position: int) -> Tensor:
        """Pairs (i, i + R/2) as complex numbers, turned by their angle."""
        half = mla.qk_rope_head_dim // 2
        turns = torch.polar(torch.ones(half, dtype=torch.float64), position * inverse.double())
        out = torch.complex(vector[:half], vector[half:]) * turns
        return torch.cat((out.real, out.imag))

    query = x @ weights["query.weight"].T if mla.q_lora_rank is None else None
    if query is None:
        query = normed(x @ weights["query_down.weight"].T, weights["query_latent_norm.weight"]) @ weights["query_up.weight"].T
    down = x @ weights["kv_down.weight"].T
    latent = normed(down[..., : mla.kv_lora_rank], weights["kv_latent_norm.weight"])
    up = latent @ weights["kv_up.weight"].T
    C, X = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.qk_nope_head_dim + mla.v_head_dim
    rows = []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            heads = []
            for h in range(H):
                q = query[b, t, h * C : (h + 1) * C]
                q = torch.cat((q[: mla.qk_nope_head_dim], turned(q[mla.qk_nope_head_dim :], t)))
                scores, values = [], []
                for s in range(t + 1):
                    key = torch.cat((up[b, s, h * X : h * X + mla.qk_nope_head_dim], turned(down[b, s, mla.kv_lora_rank :], s)))
                    scores.append(q @ key * scale**2 / math.sqrt(C))
                    values.append(up[b, s, h * X + mla.qk_nope_head_dim : (h + 1) * X])
                heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            rows.append(weights["output.weight"] @ torch.cat(heads))
    return torch.stack(rows).view(*x.shape)


@pytest.mark.parametrize("name", ["latent query", "plain query", "wide value"])
@pytest.mark.parametrize("rope", [Rope(theta=500.0), YARN], ids=["rope", "yarn"])
def test_the_papers_equations(name: str, rope: Rope) -> None:
    model = build(CONFIGS[name].model_copy(update={"rope": rope}))
    x_BTD = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(2))
    spans = from_cu_seqlens((2, 24), None, None, x_BTD.device)
    attention = model.layers[0].attention
    expected = on_paper(attention, x_BTD, rope)
    for plain in (False, True):
        model.plain(plain)
        assert relative(attention(x_BTD, model.rotations(spans)[0], None).double(), expected) < 1e-5
    assert (model.layers[0].attention.score_scale > 1.4) == (rope.scaling == "yarn")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [24, 256])
def test_fast_equals_plain_in_loss_and_gradients(name: str, length: int) -> None:
    """24 tokens go through the fused kernel, 256 through attention in blocks; both with documents."""
    model = build(CONFIGS[name])
    tokens, labels, cu_seqlens = sample(length=length)
    results = []
    for plain in (False, True):
        model.plain(plain).zero_grad()
        loss = model.loss(tokens, labels, cu_seqlens).total / 40
        loss.backward()
        results.append((loss, {key: parameter.grad.clone() for key, parameter in model.named_parameters()}))
    (fast, fast_grads), (slow, slow_grads) = results
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=0)
    for key in slow_grads:
        assert relative(fast_grads[key], slow_grads[key]) < 5e-5, key


@pytest.mark.parametrize("name", CONFIGS)
def test_masked_documents_equal_documents_alone(name: str) -> None:
    model = build(CONFIGS[name]).eval()
    tokens = torch.randint(128, (1, 30), generator=torch.Generator().manual_seed(2))
    together = model(tokens, torch.tensor([0, 7, 20, 30], dtype=torch.int32))
    alone = torch.cat([model(tokens[:, a:b]) for a, b in ((0, 7), (7, 20), (20, 30))], dim=1)
    assert relative(together, alone) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cache_changes_nothing(name: str) -> None:
    """Token by token the query goes to the latents; the prompt and the whole row are expanded."""
    model = build(CONFIGS[name]).eval()
    tokens = torch.randint(128, (3, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        whole = model(tokens)
        cache = Cache(model.config, 3, 20, tokens.device, torch.float32)
        found = [model(tokens[:, :11], cache=cache)]
        cache.finish(11)
        for step in range(11, 20):
            found.append(model(tokens[:, step : step + 1], cache=cache))
            cache.finish(1)
    assert relative(torch.cat(found, dim=1), whole) < 1e-5


@pytest.mark.parametrize("name", ["latent query", "experts"])
def test_generation_equals_the_whole_row_again_and_again(name: str) -> None:
    model = build(CONFIGS[name]).eval()
    prompts = [[3, 17, 9], [40, 2, 8, 11, 60, 5]]
    written = generate(model, prompts, GenerateOptions(max_new_tokens=8))
    for prompt, answer in zip(prompts, written, strict=True):
        ids = list(prompt)
        for token in answer:
            with torch.no_grad():
                assert int(model(torch.tensor([ids]))[0, -1].argmax()) == token
            ids.append(token)
    assert all(len(answer) == 8 for answer in written)


def test_the_cache_holds_latents_alone() -> None:
    model = build(CONFIGS["latent query"])
    cache = Cache(model.config, 2, 10, torch.device("cpu"), torch.bfloat16)
    assert cache.bytes == 3 * 2 * 10 * (12 + 4) * 2 == 2 * kv_cache_bytes(model.config, 10)


def test_positions_change_at_a_phase_boundary() -> None:
    """YaRN scales the whole score here, and the rotation no longer; going back takes it off again."""
    model = build(CONFIGS["latent query"]).eval()
    tokens = torch.randint(128, (1, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        before = model(tokens)
        rope = model.rope
        model.set_rope(YARN)
        changed = model(tokens)
        model.set_rope(rope)
        assert torch.equal(model(tokens), before)
    assert relative(changed, before) > 1e-2
    cos, _ = cos_sin(torch.zeros(1, 1), model.inverse_frequencies, model.rope_scale, torch.float32)
    assert float(cos.max()) == 1.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_qk_norm": True}, "the latents are normed instead"),
        ({"attention_bias": True}, "no biases"),
        ({"sliding_window": "8 tokens"}, "every layer sees everything"),
        ({"no_rope_layer_interval": 2}, "every layer rotates"),
        ({"rope": Rope(partial_rotary_factor=0.5)}, "says how much of a head is rotated"),
        ({"num_key_value_heads": 2}, "a key of its own"),
        ({"head_dim": 16}, "it is mla.qk_nope_head_dim"),
    ],
)
def test_what_does_not_combine_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"model.{next(iter(change)).split('.')[0]}.* does not combine with model.mla: .*{why}"):
        Model(**(_SMALL | change), mla=MLA)
    with pytest.raises(ValueError, match="multiple of 2"):
        Mla(qk_rope_head_dim=3)
