"""The decoder: fast paths against their plain twins, documents, positions, counts.

Tolerance 1e-5 relative to the largest value unless a test says otherwise: both sides are fp32 and differ in the order of sums,
which costs about 1e-6 at these sizes; a leak across documents or a wrong mask costs more than 1e-2.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from lmworks.model import Transformer
from lmworks.model.attention import attend_fast, attend_plain
from lmworks.model.documents import attend_blocks, visible
from lmworks.model.init import initialize, normal
from lmworks.model.loss import IGNORE
from lmworks.recipe.parameters import count_parameters, parameters
from lmworks.recipe.schema.model import Balance, Mla, Model, Moe, Rope
from lmworks.shards.batch import IGNORE as SHARDS_IGNORE
from small_config import small_config

_SMALL: dict[str, Any] = small_config(vocab_size=128, num_hidden_layers=3)
_MOE = Moe(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, routed_scaling_factor=2.5)
_MLA = Mla(q_lora_rank=20, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6)
CONFIGS = {
    "dense": Model(**_SMALL),
    "mha": Model(**(_SMALL | {"num_key_value_heads": 4})),
    "mqa": Model(**(_SMALL | {"num_key_value_heads": 1})),
    "moe": Model(**_SMALL, moe=_MOE, use_qk_norm=True, attention_bias=True, rope=Rope(partial_rotary_factor=0.5), z_loss_weight=1e-2),
    "moe_groups": Model(**_SMALL, moe=_MOE.model_copy(update={"n_group": 4, "topk_group": 2, "scoring_func": "softmax"})),
    "aux": Model(**_SMALL, moe=_MOE.model_copy(update={"balance": Balance(method="aux", sequence_aux_loss_weight=0.1)})),
    "nope": Model(**_SMALL, no_rope_layer_interval=2, tie_word_embeddings=True),
    "no_rope": Model(**_SMALL, rope=Rope(partial_rotary_factor=0)),
    "window": Model(**_SMALL, sliding_window="6 tokens", layer_types=("full_attention", "sliding_attention", "sliding_attention")),
    "post_norm": Model(**_SMALL, norm_position="post", use_qk_norm=True, qk_norm_over="all_heads", moe=_MOE),
    "gemma": Model(
        **_SMALL, norm_position="both", hidden_act="gelu_tanh", scale_embeddings=True, query_pre_attn_scalar=40, use_qk_norm=True,
        sliding_window="6 tokens", layer_types=("sliding_attention", "full_attention"), sliding_rope=Rope(theta=300.0),
    ),
    "softcap": Model(**_SMALL, final_logit_softcapping=5.0, z_loss_weight=1e-2),
}


def build(config: Model, seed: int = 1) -> Transformer:
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model


def sample(rows: int = 2, length: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(128, (rows, length), generator=torch.Generator().manual_seed(2))
    labels = tokens.roll(-1, 1)
    labels[:, ::7] = IGNORE
    return tokens, labels, torch.tensor([0, 5, 17, length, length + 9, rows * length], dtype=torch.int32)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach() - expected.detach()).abs().max() / expected.abs().max().clamp_min(1e-12))


@pytest.mark.parametrize("name", CONFIGS)
def test_fast_equals_plain_in_loss_and_gradients(name: str) -> None:
    model, (tokens, labels, cu_seqlens) = build(CONFIGS[name]), sample()
    model.logit_chunk_size = 7
    results = []
    for plain in (False, True):
        model.plain(plain).zero_grad()
        loss = model.loss(tokens, labels, cu_seqlens)
        (loss.total / 40).backward()
        results.append((loss, {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}))
    (fast, fast_grads), (slow, slow_grads) = results
    torch.testing.assert_close(fast.total, slow.total, rtol=1e-5, atol=0)
    for part, expected in zip(fast.head, slow.head, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)
    assert fast_grads.keys() == slow_grads.keys() == dict(model.named_parameters()).keys()
    for key in slow_grads:
        assert relative(fast_grads[key], slow_grads[key]) < 2e-5, key


@pytest.mark.parametrize("name", CONFIGS)
def test_masked_documents_equal_documents_alone(name: str) -> None:
    model, (tokens, labels, cu_seqlens) = build(CONFIGS[name]).eval(), sample()
    together = model(tokens, cu_seqlens).flatten(0, 1)
    flat = tokens.flatten()
    bounds = cu_seqlens.tolist()
    alone = torch.cat([model(flat[None, a:b])[0] for a, b in pairwise(bounds)])
    assert relative(together, alone) < 1e-5
    # and the gradient that reaches one document comes from its own labels alone
    labels = labels.flatten()
    keep = labels.clone()
    keep[:5] = IGNORE
    model.embedding.weight.grad = None
    model.loss(tokens, keep.view_as(tokens), cu_seqlens).total.backward()
    only_first = [t for t in flat[:5].tolist() if t not in flat[5:].tolist()]
    assert only_first
    if not model.config.tie_word_embeddings:
        assert model.embedding.weight.grad[only_first].abs().max() == 0


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("documents", "window"), [(False, None), (True, None), (False, 70), (True, 9)])
@pytest.mark.parametrize("length", [40, 200, 256])  # of one block, of an uneven last one, of whole ones
def test_attention_in_blocks_equals_plain(heads: tuple[int, int], documents: bool, window: int | None, length: int) -> None:
    generator = torch.Generator().manual_seed(3)
    shape = [(2, count, length, width) for count, width in ((heads[0], 16), (heads[1], 16), (heads[1], 24))]
    inputs = [torch.randn(s, generator=generator).requires_grad_() for s in shape]
    mask = None
    if documents or window:
        places = torch.arange(length).expand(2, length)
        mask = visible(places, length, window, places // 30 * 30 if documents else 0)
    upstream = torch.randn(2, heads[0], length, 24, generator=generator)
    results = []

    def in_blocks(*inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attend_blocks(*inputs, mask.dense() if mask else None, 16**-0.5, window or length)[0]
        return out

    for attend in (in_blocks, partial(attend_plain, mask=mask, dropout=0.0), partial(attend_fast, mask=mask, dropout=0.0)):
        out = attend(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, upstream)])
    for found in (results[0], results[2]):
        for a, b in zip(found, results[1], strict=True):
            assert relative(a, b) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_from_the_config_equal_the_built_model(name: str) -> None:
    model = Transformer(CONFIGS[name])
    listed = {p.name: p.shape for p in parameters(model.config)}
    assert listed == {key: tuple(p.shape) for key, p in model.named_parameters()}
    assert count_parameters(model.config) == sum(p.numel() for p in model.parameters())


def test_initialisation_is_a_function_of_name_and_position() -> None:
    config = CONFIGS["moe"]
    first, second = initialize(Transformer(config), 7), initialize(Transformer(config), 7)
    other = initialize(Transformer(config), 8)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.dim() > 1:
            assert not torch.equal(a, c), name
    whole = normal(7, "layers.1.ffn.experts.gate", 0, 10_000)
    assert torch.equal(whole[1234:1300], normal(7, "layers.1.ffn.experts.gate", 1234, 66)), "a rank makes its own part alone"
    assert abs(float(whole.mean())) < 0.04
    assert abs(float(whole.std()) - 1) < 0.03
    # a layer more changes no weight of the layers before it, the residual scale aside
    deeper = initialize(Transformer(config.model_copy(update={"layers": 4})), 7)
    assert torch.equal(first.layers[1].ffn.experts.gate, deeper.layers[1].ffn.experts.gate)


@pytest.mark.parametrize("kind", ["attention_dropout", "residual_dropout"])
@pytest.mark.parametrize("other", [{}, {"num_key_value_heads": 4, "head_dim": 12, "mla": _MLA}], ids=["gqa", "mla"])
def test_dropout_is_of_training_alone(other: dict[str, Any], kind: str) -> None:
    tokens, _, cu_seqlens = sample()
    without, with_it = (build(Model(**_SMALL | other | {kind: rate})) for rate in (0.0, 0.5))
    with torch.no_grad():
        assert not torch.equal(with_it.train()(tokens, cu_seqlens), without.train()(tokens, cu_seqlens))
        assert torch.equal(with_it.eval()(tokens, cu_seqlens), without.eval()(tokens, cu_seqlens))


def test_labels_that_do_not_count_are_one_number() -> None:
    assert IGNORE == SHARDS_IGNORE


def test_no_valid_label_is_a_zero_gradient_not_a_nan() -> None:
    model, (tokens, labels, _) = build(CONFIGS["moe"]), sample()
    loss = model.loss(tokens, torch.full_like(labels, IGNORE))
    loss.total.backward()
    assert float(loss.head.cross_entropy) == 0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("moe", torch.float32, 1e-5),
        ("dense", torch.float32, 1e-5),
        ("moe", torch.bfloat16, 0.1),
    ],
)
def test_compiled_training_equals_eager(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """fp32: fusion changes the order of sums. bf16: fused code keeps fp32 between operations where eager code rounds, which is
    1% to 6% of a gradient's norm here; a lost term is more than half of it. Every expert is chosen, since a rounding that
    changes a choice would hide everything else."""
    config = (
        CONFIGS[name]
        if CONFIGS[name].moe is None
        else CONFIGS[name].model_copy(update={"moe": _MOE.model_copy(update={"num_experts_per_tok": 8})})
    )
    model, (tokens, labels, cu_seqlens) = build(config), sample()
    model.compute_dtype = dtype
    expected = model.loss(tokens, labels, cu_seqlens).total
    expected.backward()
    eager = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    model.compile(dynamic=False)
    found = model.loss(tokens, labels, cu_seqlens).total
    found.backward()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
    for key, parameter in model.named_parameters():
        assert float((parameter.grad - eager[key]).norm() / eager[key].norm()) < tolerance, key
