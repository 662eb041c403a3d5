"""The gated delta rule: chunks against one token after another, document borders, and states of decoding.

Tolerances: everything is fp64, where sums in another order cost about 1e-12; a token of another document costs more than 1e-3.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lmworks.model import Transformer
from lmworks.model.cache import JoinedCache
from lmworks.model.delta_rule import delta_rule, delta_rule_plain
from lmworks.model.init import initialize
from lmworks.optim.groups import is_matrix
from lmworks.plan.counts import count_by_component, flops_per_token
from lmworks.plan.memory import kv_cache_bytes
from lmworks.recipe.parameters import count_parameters, parameters
from lmworks.recipe.schema.model import Model
from small_config import small_config

_DELTA: dict[str, Any] = small_config(num_hidden_layers=4) | {
    "layer_types": ("linear_attention", "linear_attention", "full_attention"),
    "gated_delta": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 6},
    "initializer_range": 0.2, "attn_output_gate": True,
    "moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_gate": True},
}


def _model(**changes: Any) -> Transformer:
    model = initialize(Transformer(Model.model_validate(_DELTA | changes)), 0).eval()
    model.compute_dtype = torch.float64
    return model


def _inputs(T: int, G: int, H: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(T)
    B, K, V = 2, 8, 6
    query, key = (torch.nn.functional.normalize(torch.randn(B, T, G, K, generator=draw, dtype=torch.float64), dim=-1) for _ in range(2))
    value, state = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((B, T, H, V), (B, H, K, V)))
    decay, beta = (torch.rand(B, T, H, generator=draw, dtype=torch.float64) for _ in range(2))
    return [tensor.requires_grad_() for tensor in (query, key, value, -3 * decay, beta, state)]


@pytest.mark.parametrize(("T", "G", "H"), [(1, 2, 2), (7, 1, 3), (64, 2, 2), (150, 2, 4)])
def test_chunks_equal_one_token_after_another(T: int, G: int, H: int) -> None:
    """Outputs, last state and all gradients; documents begin within chunks, at their borders, and before the rows."""
    inputs = _inputs(T, G, H)
    positions = torch.stack((torch.arange(T), torch.arange(T) + 5))
    for row, start in ((0, 70), (0, 100), (1, 3), (1, 64), (1, 128)):
        positions[row, start:] = torch.arange(max(0, T - start))
    found = []
    for rule in (delta_rule, delta_rule_plain):
        query, key, value, decay, beta, state = inputs
        out, last = rule(query, key, value, decay, beta, positions, state)
        found.append((out, last, *torch.autograd.grad((out * out.detach().cos()).sum() + last.square().sum(), inputs)))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


def test_documents_do_not_see_each_other() -> None:
    model = _model()
    tokens = torch.randint(0, 64, (2, 90), generator=torch.Generator().manual_seed(0))
    bounds = [0, 8, 9, 75, 90, 180]
    with torch.no_grad():
        joined = model(tokens, torch.tensor(bounds, dtype=torch.int32)).flatten(0, 1)
        for start, end in pairwise(bounds):
            alone = model(tokens.flatten()[None, start:end])[0]
            torch.testing.assert_close(joined[start:end], alone, rtol=1e-8, atol=1e-10)


def test_states_token_by_token_equal_the_whole_sequence() -> None:
    """Padded prompts, rows added, removed and kept, memory that is used again, and caches that are joined."""
    model = _model()
    tokens = torch.randint(0, 64, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(tokens)
        read = model.cache(3, 16)
        prompts = [5, 9, 2]
        read.expect(prompts)
        model(tokens[:, :9], cache=read)
        read.finish(prompts)
        more = [4, 0, 3]
        read.expect(more)
        after = model(torch.stack([tokens[row, at : at + 4] for row, at in enumerate(prompts)]), cache=read)
        read.finish(more)
        torch.testing.assert_close(after[0], whole[0, 5:9], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(after[2, :3], whole[2, 2:5], rtol=1e-8, atol=1e-10)
        running, other = model.cache(1, 32), model.cache(0, 32)
        running.remove(0)
        for row in (1, 0):
            running.add(read, row)
        other.add(read, 0)
        other.add(read, 2)
        other.remove(0)
        running.keep([1, 0])
        at = [9, 9, 5]  # rows 0 and 1, and 2 in the other cache
        cache = JoinedCache([running, other])
        for _ in range(15):
            step = model(torch.stack([tokens[row, place] for row, place in enumerate(at)])[:, None], cache=cache)
            cache.finish(1)
            for row, place in enumerate(at):
                torch.testing.assert_close(step[row, 0], whole[row, place], rtol=1e-8, atol=1e-10)
            at = [place + 1 for place in at]


def test_states_of_padding_are_an_error() -> None:
    model = _model()
    cache = model.cache(1, 8)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long), cache=cache)
    with pytest.raises(AssertionError, match="expected"):
        cache.finish([2])


def test_plain_equals_fast() -> None:
    model = _model()
    tokens = torch.randint(0, 64, (2, 70), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), model.plain()(tokens), rtol=1e-4, atol=1e-5)  # softmax in fp32


def test_counts_and_matrices() -> None:
    model = _model()
    named = dict(model.named_parameters())
    assert {p.name: p.shape for p in parameters(model.config)} == {name: tuple(tensor.shape) for name, tensor in named.items()}
    assert count_parameters(model.config) == count_by_component(model.config).total == sum(tensor.numel() for tensor in named.values())
    matrices = {p.name for p in parameters(model.config) if p.is_matrix}
    assert matrices == {name for name, tensor in named.items() if is_matrix(name, tensor)}
    of_layer = {name.removeprefix("layers.0.attention.") for name in matrices if name.startswith("layers.0.attention.")}
    assert of_layer == {f"{name}.weight" for name in ("query", "key", "value", "gate", "beta", "decay", "output")}


def test_the_cache_and_the_operations_of_linear_layers_do_not_grow_with_the_length() -> None:
    model = _model()
    for rows, length in ((1, 16), (3, 64)):
        assert model.cache(rows, length).bytes == rows * kv_cache_bytes(model.config, length, 8)
    short, long = (flops_per_token(model.config, length).attention for length in (15, 31))
    heads = 4 * (model.config.head_dim or 0)
    assert long - short == 3 * 2 * 2 * heads * (16 - 8)  # of the one full layer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gated_delta": None}, "model.layer_types has linear_attention, which needs exactly one of model.gated_delta"),
        ({"layer_types": ()}, "model.gated_delta is of no layer; add linear_attention to model.layer_types, or leave it out"),
        ({"mtp": {}}, "model.mtp does not combine with model.gated_delta; leave it out"),
        ({"sliding_window": "8 tokens"}, "model.layer_types has no layer that slides; leave model.sliding_window out"),
        ({"gated_delta": {"num_key_heads": 3, "num_value_heads": 4}}, "model.gated_delta.num_key_heads 3 must divide num_value_heads 4"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Model.model_validate(_DELTA | changes)
