"""The type that a device computes fastest in follows what its processor says it can do."""

from __future__ import annotations

import pytest
import torch

from lmworks.host import machine
from lmworks.host.devices import dtype_for, has_bf16
from lmworks.optim.optimizer import Optimizer
from lmworks.recipe.load import load_recipe
from lmworks.train.build import build_model, with_optimizer

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("able", "expected"),
    [
        ({"avx2": True, "avx512_f": True}, False),
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"neon": True, "bf16": True}, True),
    ],
)
def test_a_processor_without_bf16_products_computes_in_fp32(monkeypatch: pytest.MonkeyPatch, able: dict[str, bool], expected: bool) -> None:
    monkeypatch.delenv(machine.VARIABLE)  # what it says would stand before what the processor says
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert has_bf16(CPU) is expected
    fast = torch.bfloat16 if expected else torch.float32
    assert dtype_for("auto", CPU) == fast
    assert dtype_for("fp32", CPU) == torch.float32, "what the recipe names is not changed"
    assert dtype_for("bf16", CPU) == torch.bfloat16
    recipe = load_recipe("quickstart", ["model.num_hidden_layers=2", "threads=1"]).recipe
    assert recipe.train.precision == "auto"
    assert build_model(recipe).compute_dtype == fast


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_newton_schulz_runs_in_the_type_of_the_recipe_whatever_the_processor(has_bf16: bool, precision: str) -> None:
    recipe = load_recipe("quickstart", ["model.num_hidden_layers=2", "threads=1", f"train.precision={precision}"]).recipe
    _, optimizer = with_optimizer(recipe, build_model(recipe))
    assert isinstance(optimizer, Optimizer)
    assert optimizer.muon.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
