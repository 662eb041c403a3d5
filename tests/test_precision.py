"""The type that a device computes fastest in follows what its processor says it can do."""

from __future__ import annotations

import pytest
import torch

from lmworks.model.init import initialize
from lmworks.model.transformer import Transformer
from lmworks.optim.groups import Group
from lmworks.optim.muon import Muon
from lmworks.precision import dtype_for, has_bf16
from lmworks.recipe.load import load_recipe
from lmworks.train.pretrain import build_model

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
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert has_bf16(CPU) is expected
    fast = torch.bfloat16 if expected else torch.float32
    assert dtype_for("auto", CPU) == fast
    assert dtype_for("fp32", CPU) == torch.float32, "what the recipe names is not changed"
    assert dtype_for("bf16", CPU) == torch.bfloat16
    recipe = load_recipe("quickstart", ["model.layers=2", "threads=1"]).recipe
    assert recipe.train.precision == "auto"
    assert build_model(recipe).compute_dtype == fast
    matrix = {"w": torch.nn.Parameter(initialize(Transformer(recipe.model), 1).head.weight.detach())}
    assert Muon([Group("muon", 0.01, 0.0, matrix)]).dtype == fast
