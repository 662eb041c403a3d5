"""Layers of multi-token prediction of a base model: those whose weights are there, whatever config.json states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from base_models import write_tokenizer
from lmworks.deploy.source import open_source
from lmworks.errors import UserError
from lmworks.export.huggingface import write_model
from lmworks.io.files import read_json, write_json
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.load import load_recipe_text
from lmworks.recipe.parameters import count_parameters
from lmworks.recipe.schema.model import Model
from lmworks.recipe.weights import find_weights
from lmworks.weights.huggingface import load_weights, map_weights, read_model

SIZES: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": "128 tokens",
    "moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MODELS = {
    "glm4_moe": SIZES | {"rope": {"partial_rotary_factor": 0.5}},
    "deepseek_v3": SIZES | {"mla": LATENT, "num_key_value_heads": 4, "head_dim": 16},
}  # fmt: skip


def _base(folder: Path, kind: str = "glm4_moe", layers: int = 1) -> Path:
    """A base model with so many layers ahead, as it is published."""
    model = Model.model_validate(MODELS[kind] | {"mtp": {"num_nextn_predict_layers": layers}})
    folder.mkdir()
    write_model(initialize(Transformer(model), 1), folder, {}, torch.float32)
    write_tokenizer(folder, "glm", 400)
    return folder


def _without(folder: Path, *parts: str) -> Path:
    """The base model without tensors whose names contain one of these."""
    file = folder / "model.safetensors"
    save_file({name: one for name, one in load_file(file).items() if not any(part in name for part in parts)}, file, {"format": "pt"})
    return folder


def _resolved(folder: Path, *lines: str) -> Model:
    return load_recipe_text("\n".join([f"name: ahead\nstart_from: {folder}", *lines])).recipe.model


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3", "kimi_k2"])
def test_layers_that_transformers_has_dropped_are_no_part_of_the_model(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    from transformers import AutoModelForCausalLM

    base, saved = _base(tmp_path / "base", kind.replace("kimi_k2", "deepseek_v3")), tmp_path / "saved"
    assert _resolved(base).mtp is not None and read_model(base).config.mtp is not None and "num_nextn" not in capsys.readouterr().err
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(saved)
    write_tokenizer(saved, "glm", 400)
    config = read_json(saved / "config.json")
    assert config.get("num_nextn_predict_layers", 1) == 1
    write_json(saved / "config.json", config | {"model_type": kind})
    model = _resolved(saved)
    tensors = load_file(saved / "model.safetensors")
    weights = sum(one.numel() for name, one in tensors.items() if not name.endswith("e_score_correction_bias"))
    assert model.mtp is None and count_parameters(model) == weights
    assert set(map_weights(saved, model)) == set(tensors)
    assert read_model(saved).config.mtp is None
    assert " ".join(capsys.readouterr().err.split()).count("states num_nextn_predict_layers 1, but the files have weights of 0") == 1
    assert (open_source(base).mtp, open_source(saved).mtp) == (1, 0)


def test_a_recipe_adds_layers_of_its_own(tmp_path: Path) -> None:
    base = _without(_base(tmp_path / "base"), "layers.2.")
    model = _resolved(base, "model: {mtp: {num_nextn_predict_layers: 1}}")
    assert model.mtp is not None and model.mtp.num_nextn_predict_layers == 1
    assert not any(".layers.2." in name for name in map_weights(base, model))
    made = initialize(Transformer(model), 2)
    kept = made.state_dict()["mtp.0.projection.weight"].clone()
    load_weights(base, made.state_dict(), model, extend=True)
    torch.testing.assert_close(made.state_dict()["mtp.0.projection.weight"], kept, rtol=0, atol=0)


def test_as_many_layers_as_have_weights(tmp_path: Path) -> None:
    base = _without(_base(tmp_path / "base", layers=3), "layers.3.", "layers.4.")
    found = find_weights(base).model
    assert found.mtp is not None and found.mtp.num_nextn_predict_layers == 1
    assert any("layers.2.eh_proj" in name for name in map_weights(base, found))


@pytest.mark.parametrize("missing", [("layers.2.eh_proj",), ("layers.2.mlp.experts.3.up_proj",), ("layers.2.",)])
def test_a_layer_that_is_partly_there_is_refused(tmp_path: Path, missing: tuple[str, ...]) -> None:
    base = _without(_base(tmp_path / "base", layers=2), *missing)  # of the last, the second layer is there without the first
    model = find_weights(base).model
    assert model.mtp is not None and model.mtp.num_nextn_predict_layers == 2
    with pytest.raises(UserError, match=r"has no tensor model\.layers\.2\."):
        map_weights(base, model)
    with pytest.raises(UserError, match=r"has no tensor model\.layers\.2\."):
        load_weights(base, Transformer(model).state_dict(), model, extend=True)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    base = _base(tmp_path / "base")
    (base / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        find_weights(base)
