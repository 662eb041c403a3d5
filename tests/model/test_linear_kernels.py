"""Kernels of flash-linear-attention: what they are given, when, and, in its own interpreter, what they compute."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from export.engines import ask, engine
from lmworks.model import Transformer, linear_kernels
from lmworks.model.delta_rule import delta_rule, delta_rule_plain
from lmworks.model.init import initialize
from lmworks.model.ssd import scan, scan_plain
from lmworks.recipe.schema.gated_delta import GatedDelta
from lmworks.recipe.schema.mixers import Lightning, Mamba
from lmworks.recipe.schema.model import Model

HERE = Path(__file__).parent
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "layer_types": ("linear_attention", "full_attention"),
}  # fmt: skip
MIXERS = {
    "gated_delta": GatedDelta(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8),
    "mamba": Mamba(num_heads=4, head_dim=8, state_size=16, n_groups=2),
    "lightning": Lightning(),
}
SLOPES = [torch.arange(5, 25), torch.cat((torch.arange(9), torch.arange(11)))]  # a document that began before its row, and two


def kernel(calls: list[str], name: str, *inputs: Tensor, g: Tensor | None = None, scale: float, initial_state: Tensor | None,
           output_final_state: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the package documents of `chunk_simple_gla` and `chunk_gated_delta_rule`, which know no documents."""
    calls.append(name)
    query, key, value, *rest = inputs
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16 and scale == 1 and output_final_state
    decay = rest[0] if g is None else g
    assert query.shape[2] == value.shape[2] and decay.dtype == torch.float32
    run = scan_plain if name == "scan" else delta_rule_plain
    going_on = torch.ones(query.shape[:2], dtype=torch.int64)
    out, state = run(query, key, value, decay, *rest[1:], going_on, initial_state)
    return out.to(value.dtype), state


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the package, which stands for itself."""
    made: list[str] = []
    for module, name in (("simple_gla", "scan"), ("gated_delta_rule", "delta_rule")):
        stand_in: Any = ModuleType(module)
        setattr(stand_in, f"chunk_{module}", partial(kernel, made, name))
        monkeypatch.setitem(sys.modules, f"fla.ops.{module}", stand_in)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(linear_kernels, "_available", lambda device: True)
    return made


@pytest.mark.parametrize("name", ["scan", "delta_rule"])
@pytest.mark.parametrize("with_state", [False, True])
def test_documents_heads_and_types_are_those_of_the_chunks(name: str, with_state: bool, calls: list[str]) -> None:
    draw = torch.Generator().manual_seed(2)
    positions_BT = torch.stack(SLOPES) if with_state else torch.stack((torch.arange(20), SLOPES[1]))
    query, key = (torch.randn(2, 20, 2, 8, generator=draw) for _ in range(2))
    value, decay = torch.randn(2, 20, 4, 8, generator=draw), -torch.rand(2, 20, 4, generator=draw)
    key = torch.nn.functional.normalize(key, dim=-1)
    beta = (torch.rand(2, 20, 4, generator=draw),) if name == "delta_rule" else ()
    state = torch.randn(2, 4, 8, 8, generator=draw) if with_state else None
    query, key, value = (x.bfloat16() for x in (query, key, value))
    run, plain = (scan, scan_plain) if name == "scan" else (delta_rule, delta_rule_plain)
    found, expected = (one(query, key, value, decay, *beta, positions_BT, state) for one in (run, plain))
    assert calls == [name]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_full_precision_and_other_devices_keep_the_chunks(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [torch.randn(1, 8, 2, 4) for _ in range(3)]
    scan(*wide, -torch.rand(1, 8, 2), torch.arange(8)[None])
    assert not calls
    monkeypatch.undo()
    assert not linear_kernels.usable(torch.zeros(1, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", MIXERS)
def test_a_model_in_half_precision_trains_with_them(kind: str, calls: list[str]) -> None:
    """Loss and gradients near those of the chunks, and each layer has asked once."""
    model = initialize(Transformer(Model(**SMALL, **{kind: MIXERS[kind]})), seed=1)
    model.compute_dtype = torch.bfloat16
    tokens = torch.randint(0, 64, (2, 21), generator=torch.Generator().manual_seed(3))
    borders = torch.tensor([0, 9, 20, 40])
    results = []
    for available in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear_kernels, "_available", lambda device, available=available: available)
            loss = model.loss(tokens[:, :-1], tokens[:, 1:], borders).total / 40
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results.append((loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])))
    assert calls == ["delta_rule" if kind == "gated_delta" else "scan"]
    (loss, found), (reference, expected) = results
    assert abs(float(loss - reference)) < 5e-3
    assert float(torch.nn.functional.cosine_similarity(found, expected, dim=0)) > 0.999


@pytest.mark.slow
@pytest.mark.needs("fla")
@pytest.mark.parametrize("name", ["scan", "delta_rule"])
@pytest.mark.parametrize("with_state", [False, True])
def test_the_real_kernels_compute_our_chunks(name: str, with_state: bool) -> None:
    """In fp32 by Triton's interpreter: outputs, states and all gradients (measured: at most 7.7e-6)."""
    sources = f"{HERE.parents[1] / 'src'}"
    found = ask(engine("LMWORKS_FLA_PYTHON"), str(HERE / "interpreted_kernels.py"), [name, with_state], PYTHONPATH=sources)
    assert len(found) == 6 + (name == "delta_rule") + with_state and max(found) < 2e-5, found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gated_delta", "mamba"])
def test_compiled_layers_break_around_the_kernels(kind: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The package forbids to compile its functions: the same loss and gradients as without the compiler."""
    for name in ("simple_gla", "gated_delta_rule"):
        (function,) = [name for name in vars(sys.modules[f"fla.ops.{name}"]) if name.startswith("chunk_")]
        module = sys.modules[f"fla.ops.{name}"]
        monkeypatch.setattr(module, function, torch.compiler.disable(getattr(module, function)))
    tokens = torch.randint(0, 64, (2, 21), generator=torch.Generator().manual_seed(3))
    results = []
    for compiled in (False, True):
        model = initialize(Transformer(Model(**SMALL, **{kind: MIXERS[kind]})), seed=1)
        model.compute_dtype = torch.bfloat16
        if compiled:
            torch._dynamo.reset()
            model.compile(backend="aot_eager")
        loss = model.loss(tokens[:, :-1], tokens[:, 1:], torch.tensor([0, 9, 20, 40])).total / 40
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    assert len(calls) == 2
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)
