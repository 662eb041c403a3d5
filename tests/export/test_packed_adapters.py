"""Low-rank adapters of matrices that are parts of one matrix in the class, against the PEFT library.

Tolerance of logits: as in test_huggingface.py.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_huggingface import CASES, _load, close, ours

from late import Late, require_package
from lmworks.checkpoint import Checkpoints, listing
from lmworks.errors import UserError
from lmworks.export.huggingface import write_model
from lmworks.export.peft import _EXPERTS, read_peft, unequal_adapters, why_not_loaded, write_peft
from lmworks.model import Transformer
from lmworks.model.lora import attach
from lmworks.recipe.families.family import Family
from lmworks.recipe.families.registry import FAMILIES, family_of
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from lmworks.recipe.schema.model import Lora, Model, is_adapter

require_package("peft", "no peft: pip install peft")
peft: Any = Late("peft")
_CLASS = "qwen3_5_text"
MODEL = CASES[_CLASS]
TOKENS = torch.randint(1, 256, (2, 20), generator=torch.Generator().manual_seed(1))


def adapted(lora: Lora, config: Model = MODEL) -> tuple[Transformer, dict[str, torch.Tensor]]:
    model = ours(config).eval()
    return model, drawn(model, lora)


def drawn(model: Transformer, lora: Lora) -> dict[str, torch.Tensor]:
    """The adapters of a model, none of which is zero."""
    attach(model, lora)
    state = {name: value.detach() for name, value in model.state_dict().items() if is_adapter(name)}
    draw = torch.Generator().manual_seed(4)
    for value in state.values():
        value.copy_(0.3 * torch.randn(value.shape, generator=draw))
    return state


def written(state: dict[str, torch.Tensor], lora: Lora, folder: Path, config: Model = MODEL, family: Family | None = None) -> Path:
    family = family or family_of(config)
    with Checkpoints(folder / "saved", Options(), {}) as checkpoints:
        checkpoints.save(1, {"model": state}, {}, wait=True)
    saved = listing.directories(folder / "saved")[-1]
    write_peft(saved, lora, config, family, "base", "abc", folder / "peft")
    assert unequal_adapters(saved, config, family, folder / "peft") == []
    return folder / "peft"


def equal_in_peft(lora: Lora, config: Model, folder: Path) -> tuple[dict[str, torch.Tensor], Path]:
    """Adapters with which PEFT computes what the model does, and where they are written."""
    model, state = adapted(lora, config)
    there = written(state, lora, folder, config)
    write_model(ours(config), folder / "base", {}, torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")  # modules that have no adapter here
        peer = peft.PeftModel.from_pretrained(_load(folder / "base"), there)
    with torch.no_grad():
        assert close(peer(TOKENS).logits, model(TOKENS), model, TOKENS, peer)
    return state, there


@pytest.mark.parametrize(
    ("name", "targets", "rslora"),
    [*((_CLASS, targets, rslora)
       for targets in (("all-linear",), ("attention.query", "layers.1.attention.key")) for rslora in (False, True)),
     ("granitemoehybrid", ("all-linear",), False), ("granitemoehybrid_experts", ("mlp",), False),
     ("nemotron_h_experts", ("query", "input", "mlp"), False), ("lfm2", ("all-linear",), False), ("lfm2_moe", ("all-linear",), True),
     ("mellum_all_slide", ("all-linear",), False)],
)
def test_peft_computes_with_our_adapters_and_they_are_read_back(name: str, targets: tuple[str, ...], rslora: bool, tmp_path: Path) -> None:
    lora, config = Lora(rank=3, alpha=6.0, rslora=rslora, targets=targets), CASES[name]
    state, folder = equal_in_peft(lora, config, tmp_path)
    again = {name: torch.zeros_like(value) for name, value in state.items()}
    read_peft(folder, again, config, family_of(config), lora, "abc")
    assert all(torch.equal(again[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("name", "targets"),
    [*((name, ("mlp", "experts")) for name in ("qwen3_moe_dense_window", "mellum", "qwen3_next_dense")),
     *((name, ("experts",)) for name in ("mixtral", "olmoe", "minimax", "minimax_m2")),
     *((name, ("mlp",)) for name in ("glm4_moe", "qwen2_moe_dense", "qwen3_5_moe_text", "lfm2_moe")),
     ("deepseek_v3_moe", ("all-linear",)), ("glm4_moe", ("all-linear", "experts")),
     ("glm4_moe", ("0.ffn.gate", "shared.up", "experts.down"))],
)  # fmt: skip
def test_peft_computes_with_adapters_beside_experts_and_of_them(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Matrices of dense layers and shared experts have the names of those of routed experts, which PEFT takes for the stacks."""
    lora, config = Lora(rank=3, alpha=6.0, dropout=0.1, targets=targets), CASES[name]
    state, folder = equal_in_peft(lora, config, tmp_path)
    assert why_not_loaded(state, config, family_of(config), lora) is None
    again = {name: torch.zeros_like(value) for name, value in state.items()}
    read_peft(folder, again, config, family_of(config), lora, "abc")
    assert all(torch.equal(again[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("name", "targets", "rslora", "said"),
    [*((name, ("experts",), False, "other targets") for name in (
        "gpt_oss", "granitemoehybrid_experts", "lfm2_moe", "nemotron_h_experts", "qwen2_moe", "qwen3_5_moe_text")),
     ("mixtral", ("experts",), True, "set it to false"), ("mixtral", ("experts.gate", "experts.down"), False, "name both")],
)  # fmt: skip
def test_it_is_known_which_adapters_of_experts_peft_does_not_load(
    name: str, targets: tuple[str, ...], rslora: bool, said: str, tmp_path: Path
) -> None:  # fmt: skip
    lora, config = Lora(rank=3, alpha=6.0, rslora=rslora, targets=targets), CASES[name]
    state = adapted(lora, config)[1]
    why = why_not_loaded(state, config, family_of(config), lora)
    assert why and re.match(rf"PEFT does not load adapters of .*layers\.\d\.ffn\.experts\.\w+; .*{said}, or use the merged model", why)
    with pytest.raises((AssertionError, ValueError, UserWarning)):
        equal_in_peft(lora, config, tmp_path)


def test_the_classes_of_whose_experts_peft_loads_adapters() -> None:
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN as patterns

    routed = {family.model_type for family in FAMILIES.values() if any("{e}" in theirs for _, theirs in family.names)}
    assert {name for name in routed if patterns.get(name) in ("qwen2_moe", "mixtral")} == set(_EXPERTS)


def test_an_adapter_that_peft_made_has_one_a_for_all_parts(tmp_path: Path) -> None:
    lora = Lora(rank=4, alpha=8.0, targets=("attention.query", "attention.key", "attention.value", "attention.gate"))
    write_model(ours(MODEL), tmp_path / "base", {}, torch.float32)
    modules = ["q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z"]
    options = peft.LoraConfig(r=4, lora_alpha=8.0, target_modules=modules, task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    peer = peft.get_peft_model(_load(tmp_path / "base"), options).eval()
    peer.save_pretrained(tmp_path / "peft")
    model, state = adapted(lora)
    read_peft(tmp_path / "peft", state, MODEL, family_of(MODEL), lora, None)
    with torch.no_grad():
        assert close(model(TOKENS), peer(TOKENS).logits, model, TOKENS, peer)
    assert torch.equal(state["layers.0.attention.query.lora.A"], state["layers.0.attention.value.lora.A"])
    fewer = {name: value for name, value in state.items() if ".attention.query." not in name}
    with pytest.raises(UserError, match=r"is not one of .* alone; see lora\.targets"):
        read_peft(tmp_path / "peft", fewer, MODEL, family_of(MODEL), lora, None)


def test_other_ranks_of_packed_matrices_are_refused(tmp_path: Path) -> None:
    lora = Lora(rank=3, alpha=6.0, targets=("attention",))
    folder = written(adapted(lora)[1], lora, tmp_path)
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"q_proj": 6, "in_proj_qkv": 9} and config["alpha_pattern"] == {"q_proj": 12.0, "in_proj_qkv": 18.0}
    config["rank_pattern"]["q_proj"] = 3
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"has rank_pattern .*, other ranks or scales"):
        read_peft(folder, adapted(lora)[1], MODEL, family_of(MODEL), lora, "abc")
