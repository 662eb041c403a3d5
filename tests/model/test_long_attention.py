"""Attention over long rows: what is seen as two numbers a query, and the paths that never make all scores.

Tolerance 1e-5 relative to the largest value: both sides are fp32 and differ in the order of sums (about 1e-6); a mask that is off by one
costs more than 1e-2.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.model.flex_on_cpu import flex_on_cpu
from tests.model.test_mla import CONFIGS as LATENT
from tests.model.test_transformer import CONFIGS, build, relative, sample
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lmworks.model import chunked, documents
from lmworks.model.attention import attend_fast, attend_plain
from lmworks.model.cache import Cache
from lmworks.model.chunked import block_mask
from lmworks.model.documents import Visible, from_cu_seqlens, visible
from saved_bytes import saved_bytes

CU_SEQLENS = torch.tensor([0, 5, 17, 24, 33, 48], dtype=torch.int32)


@pytest.fixture
def all_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row counts as long, and blocks are small."""
    monkeypatch.setattr(documents, "_KEPT", 0)
    monkeypatch.setattr(chunked, "_SCORES", 1)
    monkeypatch.setattr(chunked, "_FEWEST", 7)


def pair_by_pair(rows: int, length: int, bounds: list[int], window: int | None) -> Tensor:
    """Who sees whom, from the definition."""
    document = [sum(start <= at for start in bounds) for at in range(rows * length)]
    seen = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for row in range(rows):
        for query in range(length):
            for key in range(query + 1):
                same = document[row * length + query] == document[row * length + key]
                seen[row, 0, query, key] = same and (window is None or query - key < window)
    return seen


@pytest.mark.parametrize("window", [None, 1, 6])
def test_two_numbers_a_query_say_what_a_mask_says(window: int | None) -> None:
    found = from_cu_seqlens((2, 24), CU_SEQLENS, window, torch.device("cpu"))
    assert found.mask is not None and found.window_mask is not None
    assert torch.equal(found.mask.dense(), pair_by_pair(2, 24, CU_SEQLENS.tolist()[:-1], None))
    assert torch.equal(found.window_mask.dense(), pair_by_pair(2, 24, CU_SEQLENS.tolist()[:-1], window))
    assert found.positions_BT.flatten().tolist() == [at - max(b for b in CU_SEQLENS.tolist() if b <= at) for at in range(48)]


def test_a_cache_says_the_same() -> None:
    config = CONFIGS["dense"].model_copy(update={"sliding_window": 3})
    cache = Cache(config, rows=2, capacity=20, device=torch.device("cpu"), dtype=torch.float32)
    cache.expect([9, 4])
    cache.begin(9)
    cache.finish([9, 4])
    assert cache.begin(2).tolist() == [[9, 10], [4, 5]]
    seen = cache._sliding.mask().dense().view(4, 4)  # of the two tokens before those of the step, and these
    assert [row.nonzero().flatten().tolist() for row in seen] == [[0, 1, 2], [1, 2, 3]] * 2
    assert cache._full.mask().dense().sum(-1).flatten().tolist() == [10, 11, 5, 6]


def inputs(heads: tuple[int, int], queries: int, keys: int, value_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads[0], queries, 16), (2, heads[1], keys, 16), (2, heads[1], keys, value_dim)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("kind", ["documents", "window", "cached"])
@pytest.mark.parametrize("value_dim", [16, 12])
def test_chunks_equal_plain(heads: tuple[int, int], kind: str, value_dim: int, all_long: None) -> None:
    keys, places = 48, torch.arange(48).expand(2, 48)
    if kind == "cached":  # fewer queries than keys, in two stretches as under context parallelism
        places = torch.cat((torch.arange(6, 14), torch.arange(30, 41))).expand(2, -1)
    starts = torch.stack((places[0] // 10 * 10, places[0] // 17 * 17))
    mask = visible(places, keys, 5 if kind == "window" else None, starts)
    assert mask.kept_B1TS is None
    given = inputs(heads, places.shape[1], keys, value_dim)
    results = []
    for attend in (mask.attend, partial(attend_plain, mask=mask, dropout=0.0)):
        out = attend(*given)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
        results.append([out, *torch.autograd.grad(out, given, upstream)])
    for found, expected in zip(*results, strict=True):
        assert relative(found, expected) < 1e-5


def test_long_rows_whose_values_are_narrow_take_linear_memory_too() -> None:
    """Latent attention of one document a row: no mask, and no fused kernel for values narrower than keys."""
    query, key, value = (x[:1, :, :2100] for x in inputs((2, 2), 2100, 2100, 12))
    kept = saved_bytes(lambda: attend_fast(query, key, value, None, 0.0))
    assert kept < 16 * query.untyped_storage().nbytes()
    assert relative(attend_fast(query, key, value, None, 0.0), attend_plain(query, key, value, None, 0.0)) < 1e-5


def test_blocks_of_keys_that_nobody_sees_are_never_touched(all_long: None) -> None:
    """Later tokens and other documents hold NaN: a product with them, even weighted by zero, would show."""
    mask = visible(torch.arange(28, 42)[None], 48, None, torch.tensor([[28] * 7 + [35] * 7]))
    query, key, value = (x[:1].detach().requires_grad_() for x in inputs((4, 2), 14, 48, 16))
    with torch.no_grad():
        for unseen in (slice(0, 28), slice(42, 48)):
            key[:, :, unseen] = value[:, :, unseen] = float("nan")
    out = mask.attend(query, key, value)
    grads = torch.autograd.grad(out.square().sum(), (query, key, value))
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    assert grads[1][:, :, :28].abs().max() == grads[1][:, :, 42:].abs().max() == 0


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("dense", None), ("moe", None), ("window", None), ("nope", None),
        ("window", "aot_eager"),  # traced forward and backward as for the compiler; machine code takes a minute
        pytest.param("window", "inductor", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_model_with_long_rows_equals_its_twin(name: str, backend: str | None, all_long: None) -> None:
    model, (tokens, labels, cu_seqlens) = build(CONFIGS[name]), sample()
    results = []
    for plain in (True, False):
        model.plain(plain).zero_grad()
        if backend and not plain:
            model.compile(dynamic=False, backend=backend)
        loss = model.loss(tokens, labels, cu_seqlens).total
        loss.backward()
        results.append((loss, {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}))
    (expected, slow), (found, fast) = results
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    for key in slow:
        assert relative(fast[key], slow[key]) < 2e-5, key


def test_what_is_kept_grows_with_the_length_and_not_with_its_square() -> None:
    def kept(length: int) -> int:
        model = build(CONFIGS["window"])
        tokens = torch.zeros(1, length, dtype=torch.long)
        cu_seqlens = torch.tensor([0, length // 3, length], dtype=torch.int32)
        return saved_bytes(lambda: model.loss(tokens, tokens, cu_seqlens).total)

    sizes = [kept(length) for length in (2304, 4608)]
    assert sizes[1] < 2.1 * sizes[0]


@pytest.mark.parametrize("window", [None, 200])
def test_the_blocks_for_flex_attention(window: int | None) -> None:
    """Against its own way to make them, from all pairs; and its forward pass, which runs on CPUs too."""
    length = 700
    cu_seqlens = torch.tensor([0, 90, 400, 700, 701, 1400], dtype=torch.int32)
    places = torch.arange(length).expand(2, length)
    starts = documents.starts((2, length), cu_seqlens)
    mask: Visible = visible(places, length, window, starts)
    blocks = block_mask(mask.first_BT, mask.last_BT, length)
    expected = create_block_mask(blocks.mask_mod, 2, None, length, length, device="cpu")
    assert torch.equal(blocks.to_dense(), expected.to_dense())
    assert blocks.full_kv_num_blocks is not None and expected.full_kv_num_blocks is not None
    assert torch.equal(blocks.full_kv_num_blocks, expected.full_kv_num_blocks)
    query, key, value = (x.detach() for x in inputs((4, 2), length, length, 16))
    out = flex_attention(query, key, value, block_mask=blocks, enable_gqa=True)
    assert relative(out, attend_plain(query, key, value, mask, 0.0)) < 1e-5


@pytest.mark.parametrize("name", ["dense", "window", "moe", "mla"])
def test_a_model_that_attends_as_on_a_gpu_equals_its_twin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one block of queries on, whatever the boundaries: a dense mask and shared heads have no fused kernel there."""
    model, length = build(CONFIGS.get(name) or LATENT["experts"]), 130
    tokens, labels, _ = sample(2, length)
    for bounds in ([0, 40, length, 2 * length], [0, length, 2 * length]):
        cu_seqlens, results = torch.tensor(bounds, dtype=torch.int32), []
        for plain in (True, False):
            with monkeypatch.context() as patch:
                used = [] if plain else flex_on_cpu(patch)
                model.plain(plain).zero_grad()
                loss = model.loss(tokens, labels, cu_seqlens).total
                loss.backward()
            assert len(used) == (0 if plain else len(model.every_block()))
            results.append((loss, {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}))
        (expected, slow), (found, fast) = results
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        for key in slow:
            assert relative(fast[key], slow[key]) < 2e-5, key


def test_few_queries_have_a_dense_mask_also_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flex_on_cpu(monkeypatch)
    few, many = (visible(torch.arange(count).expand(2, count), 300, None) for count in (127, 128))
    assert few.blocks is None and few.kept_B1TS is not None
    assert many.blocks is not None and many.kept_B1TS is None


def test_layers_are_compiled_once_whatever_the_boundaries_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "has_flex", lambda device: True)
    model, length = build(CONFIGS["window"]), 130
    counter = CompileCounter()
    for block in model.layers:
        block.compile(backend=counter, dynamic=False)
    tokens, labels, _ = sample(2, length)
    counts = []
    for bounds in ([0, length, 2 * length], [0, 40, length, 2 * length], [0, 7, 99, length, length + 60, 2 * length]):
        with torch.no_grad():
            model.loss(tokens, labels, torch.tensor(bounds, dtype=torch.int32))
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] == counts[2] > 0


@pytest.mark.parametrize("name", ["window", pytest.param("dense", marks=pytest.mark.slow), pytest.param("mla", marks=pytest.mark.slow)])
def test_prefill_compiles_attention_for_few_shapes_and_not_for_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts have any number and length: FlexAttention's own forward, in a graph whose sizes may vary."""
    monkeypatch.setattr(documents, "has_flex", lambda device: True)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention, backend=counter)
    monkeypatch.setattr(chunked, "_compiled", lambda: compiled)
    model, generator = build(CONFIGS.get(name) or LATENT["experts"]), torch.Generator().manual_seed(1)
    counts = []
    with torch.no_grad():
        for rows, steps, past in [(1, 128, 0), (2, 200, 0), (3, 133, 7), (3, 256, 0), (1, 140, 3), (5, 171, 20), (4, 129, 1), (2, 300, 5)]:
            tokens = torch.randint(0, 64, (rows, past + steps), generator=generator)
            cache = model.cache(rows, past + steps)
            if past:
                model.forward(tokens[:, :past], cache=cache)
                cache.finish(past)
            found = model.forward(tokens[:, past:], cache=cache)
            expected = model.plain(True).forward(tokens)[:, past:]
            model.plain(False)
            assert relative(found, expected) < 1e-5
            counts.append(counter.frame_count)
    assert counts[4] == counts[-1], counts  # all that comes later is one of these
    assert counts[-1] <= 4 * (2 if name == "window" else 1), counts
