"""Models for inference: the same results as the model that they are made of, one wait of the host per step of decoding, few operators.

Tolerance 1e-5 relative to the largest logit in fp32 (sums in another order), and 3e-2 in bf16, whose rounding is 4e-3.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.model.test_mla import CONFIGS as MLA
from tests.model.test_mtp import CONFIGS as MTP
from tests.model.test_transformer import CONFIGS, build
from torch.utils._python_dispatch import TorchDispatchMode

from lmworks.inference.batching import ContinuousBatch
from lmworks.inference.generate import generate
from lmworks.inference.model import PackedLinear, for_inference, is_whole, packing_pays
from lmworks.inference.sampling import GenerateOptions
from lmworks.model import Transformer
from lmworks.model.layers import Linear
from lmworks.model.lora import attach
from lmworks.model.router import Router
from lmworks.recipe.schema.model import Lora

ALL = CONFIGS | {f"mla {name}": config for name, config in MLA.items()}
CPU = torch.device("cpu")


def tokens() -> torch.Tensor:
    return torch.randint(100, (2, 11), generator=torch.Generator().manual_seed(7))


def away(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rows", [1, 16])
@torch.no_grad()
def test_it_computes_the_same(name: str, rows: int) -> None:
    model = build(ALL[name]).eval()
    expected = model(tokens())
    assert away(for_inference(model, rows=rows)(tokens()), expected) < 1e-5
    exact = for_inference(model, torch.float64)
    assert {one.dtype for one in exact.parameters()} <= {torch.float64, torch.float32} and exact(tokens()).dtype == torch.float64
    assert away(exact(tokens()).float(), expected) < 1e-5
    assert away(model(tokens()), expected) == 0, "the original is not changed"


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_weights_that_are_only_cast_give_the_same_bits(name: str) -> None:
    model = build(ALL[name]).eval()
    model.compute_dtype = torch.bfloat16
    cast = for_inference(model, join=False)
    assert torch.equal(cast(tokens()), model(tokens()))
    kinds = {one.dtype: type(module) for module in cast.modules() for one in module._parameters.values() if one is not None}
    assert set(kinds) <= {torch.bfloat16, torch.float32} and kinds.get(torch.float32, Router) is Router
    assert away(for_inference(model)(tokens()), model(tokens())) < 3e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_joined_norm_of_heads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of many rows, for which the norms of models in training have a path of their own."""
    monkeypatch.setattr("lmworks.model.layers._FEW", 0)
    found = 0
    for config in ALL.values():
        model = build(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(len(name)))
        model.compute_dtype = dtype
        joined = for_inference(model)
        found += sum(getattr(block.attention, "joined_norm", None) is not None for block in joined.every_block())
        assert away(joined(tokens()), model(tokens())) < (1e-5 if dtype == torch.float32 else 5e-2)
    assert found, "no model of these has norms of heads"


def test_nothing_is_cast_in_a_step_of_decoding() -> None:
    model = build(CONFIGS["dense"]).eval()
    model.compute_dtype = torch.bfloat16
    sizes = {parameter.numel() for parameter in model.parameters() if parameter.ndim == 2}
    batch = ContinuousBatch(for_inference(model))
    batch.add([1, 2, 3], GenerateOptions(max_new_tokens=9))
    batch.step()
    with watched() as seen:
        batch.step()
    assert not [name for name, size in seen.sizes if name == "aten._to_copy.default" and size in sizes]


@torch.no_grad()
def test_adapters_stay_apart_and_are_cast() -> None:
    model = build(CONFIGS["moe"]).eval()
    attach(model, Lora(rank=4, targets=("all-linear", "experts")))
    for name, parameter in model.named_parameters():
        if ".lora" in name or "_lora" in name:
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(len(name)))
    expected = model(tokens())
    assert away(for_inference(model)(tokens()), expected) < 1e-6
    narrow = for_inference(model, torch.bfloat16)
    assert {p.dtype for name, p in narrow.named_parameters() if "lora" in name} == {torch.bfloat16}


def test_weights_are_shared_or_the_original_is_emptied() -> None:
    model = build(CONFIGS["nope"]).eval()
    assert is_whole(model)
    shared = for_inference(model)
    assert shared.embedding.weight.data_ptr() == model.embedding.weight.data_ptr() and shared.head.weight is shared.embedding.weight
    with torch.no_grad():
        expected = model(tokens())
        taken = for_inference(model, consume=True)
        assert away(taken(tokens()), expected) < 1e-5
    assert all(parameter.is_meta for parameter in model.parameters())


def test_layers_of_multi_token_prediction_are_left_out() -> None:
    model = build(next(iter(MTP.values()))).eval()
    assert len(model.mtp) and not for_inference(model).mtp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_packed_weights(dtype: torch.dtype, bias: bool) -> None:
    if not packing_pays(dtype, CPU, 16):
        pytest.skip("this processor does not arrange weights of this type")
    linear = Linear(48, 80, bias)
    for number, parameter in enumerate(linear.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).to(dtype)
    packed = PackedLinear(linear)
    for shape in ((1, 48), (16, 1, 48), (2, 37, 48)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        assert packed(x).shape == linear(x).shape and packed(x).dtype == dtype
        assert away(packed(x).float(), linear(x).float()) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert (
        not packing_pays(torch.float64, CPU, 16)
        and not packing_pays(torch.float32, CPU, 1)
        and not packing_pays(dtype, torch.device("cuda"), 16)
    )


def test_generation_takes_a_prepared_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Transformer] = []
    first = ContinuousBatch.__init__
    monkeypatch.setattr(ContinuousBatch, "__init__", lambda self, model, **given: (made.append(model), first(self, model, **given))[1])
    model = build(CONFIGS["moe"])
    model.train()
    model.compute_dtype = torch.bfloat16
    generate(model, [[1, 2]], GenerateOptions(max_new_tokens=2))
    assert made[0].prepared and made[0].embedding.weight.dtype == torch.bfloat16 and model.training
    generate(made[0], [[1, 2]], GenerateOptions(max_new_tokens=2))
    assert made[1] is made[0]


class _Seen(TorchDispatchMode):
    """Operators, with the size of their result, and the lines that make numbers of Python of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.sizes: list[tuple[str, int]] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.names[str(function)] += 1
        self.sizes.append((str(function), out.numel() if isinstance(out, torch.Tensor) else 0))
        if str(function) in ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default"):
            self.note()
        return out

    def note(self) -> None:
        frames = [one for one in traceback.extract_stack() if "/lmworks/" in one.filename]
        self.waits.append(f"{frames[-1].filename.rpartition('/')[2]}: {frames[-1].line}" if frames else "a test")


@contextmanager
def watched() -> Iterator[_Seen]:
    """What a block does. On a GPU each of these waits stops the host until all work before it is done."""
    seen = _Seen()
    with pytest.MonkeyPatch.context() as patch, seen:
        for name in ("tolist", "numpy", "cpu"):
            original = getattr(torch.Tensor, name)
            patch.setattr(torch.Tensor, name, lambda self, *rest, original=original: (seen.note(), original(self, *rest))[1])
        yield seen


@pytest.mark.parametrize("name", ["dense", "moe", "window", "mla experts"])
def test_a_step_waits_once(name: str) -> None:
    """Rows of all kinds that join, outgrow their cache, leave and are cut off, with and without alternatives."""
    batch = ContinuousBatch(for_inference(build(ALL[name]).eval()), max_rows=6, prefill_tokens=6)
    options = [
        GenerateOptions(max_new_tokens=4), GenerateOptions(max_new_tokens=7, temperature=1.0, logprobs=3),
        GenerateOptions(max_new_tokens=9, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01),
        GenerateOptions(max_new_tokens=9, temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.1, logit_bias=((5, 1.0),)),
        GenerateOptions(max_new_tokens=9, stop_ids=(3,), min_tokens=2),
    ]  # fmt: skip
    for seed, one in enumerate(options):
        batch.add([1, 2, 3 + seed] * (1 + seed), one, seed)
    steps = 0
    while batch.busy:
        with watched() as seen:
            came = batch.step()
        assert len(seen.waits) == bool(came), seen.waits
        steps += 1
    assert steps > 8


@pytest.mark.parametrize(("name", "most"), [("dense", 49), ("moe", 93)])
def test_operators_of_a_layer(name: str, most: int) -> None:
    """Of a step in which rows of one cache are decoded, views among them. The bounds may only fall."""
    counts = []
    for layers in (2, 3):
        config = ALL[name].model_copy(update={"num_hidden_layers": layers})
        batch = ContinuousBatch(for_inference(build(config).eval()))
        for seed in range(4):
            batch.add([1, 2, 3 + seed], GenerateOptions(max_new_tokens=9, temperature=1.0), seed)
        batch.step()
        with watched() as seen:
            batch.step()
        counts.append(seen.names.total())
    assert 0 < counts[1] - counts[0] <= most
