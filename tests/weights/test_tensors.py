"""Tensors of a checkpoint against its config.json: what is not read is named, and what `transformers` reads otherwise is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmworks.errors import UserError
from lmworks.weights.huggingface import read_model, refuse_unequal_copies

_SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0,
}  # fmt: skip
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def _folder(folder: Path, name: str, **values: Any) -> Path:
    """A model of a class, written by transformers."""
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(1)
    kind(kind.config_class(**_SHAPE, **values)).save_pretrained(folder)
    return folder


def _write(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> None:
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def _logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(1, 49).view(2, 24)
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, torch.Tensor) else found.logits


def _in_transformers(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_a_tied_flag_beside_a_head(tmp_path: Path) -> None:
    """A copy of the embedding is no other head. transformers unties one that differs, other programs do not read it: it is refused."""
    folder = _folder(tmp_path, "LlamaForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    _write(folder, tensors | {_HEAD: tensors[_EMBEDDING]}, tie_word_embeddings=True)
    torch.testing.assert_close(_logits(read_model(folder)), _logits(_in_transformers(folder)), rtol=0, atol=1e-5)
    off = tensors[_EMBEDDING].clone()
    off[-1, -1] += 0.5
    _write(folder, tensors | {_HEAD: off})
    assert not torch.equal(_in_transformers(folder).lm_head.weight, tensors[_EMBEDDING]), "transformers reads the head"
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight, .*write tie_word_embeddings false"):
        read_model(folder)
    _write(folder, tensors | {_HEAD: off}, tie_word_embeddings=False)
    torch.testing.assert_close(_logits(read_model(folder)), _logits(_in_transformers(folder)), rtol=0, atol=1e-5)
    _write(folder, {name: tensor for name, tensor in tensors.items() if name != _HEAD}, tie_word_embeddings=...)
    with pytest.raises(UserError, match=r"no tensor lm_head.weight; if the head is the embedding, config.json must have tie_word_embe"):
        read_model(folder)


def test_a_class_that_ties_by_default(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "SmolLM3ForCausalLM")
    _write(folder, load_file(folder / "model.safetensors"), tie_word_embeddings=..., no_rope_layers=..., layer_types=...)
    torch.testing.assert_close(_logits(read_model(folder)), _logits(_in_transformers(folder)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("LlamaForCausalLM", {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, "q_proj.bias does not belong to this model"),
        ("Qwen2ForCausalLM", {"model.layers.1.self_attn.k_proj.bias": None}, "no tensor model.layers.1.self_attn.k_proj.bias"),
        ("Qwen3ForCausalLM", {"model.layers.0.mlp.up_proj.bias": torch.ones(48)}, "up_proj.bias has no counterpart"),
        ("LlamaForCausalLM", {"lm_head.bias": torch.ones(96)}, "lm_head.bias has no counterpart"),
        ("LlamaForCausalLM", {"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "model.norm.weight holds int8"),
        ("LlamaForCausalLM", {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, r"up_proj.weight_scale is a scale"),
        ("LlamaForCausalLM", {"model.layers.2.mlp.up_proj.weight": torch.ones(48, 32)}, "layers.2.mlp.up_proj.weight does not belong"),
        ("LlamaForCausalLM", {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 32)}, "lora_A.weight has no counterpart"),
    ],
)
def test_other_tensors_than_those_of_the_model(name: str, change: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, name)
    tensors = load_file(folder / "model.safetensors") | change
    _write(folder, {key: tensor for key, tensor in tensors.items() if tensor is not None})
    with pytest.raises(UserError, match=why) as error:
        read_model(folder)
    assert "\n" not in str(error.value)


def test_buffers_of_rope_are_no_weights(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "LlamaForCausalLM")
    expected = _logits(read_model(folder))
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    _write(folder, load_file(folder / "model.safetensors") | old | {"model.rotary_emb.inv_freq": torch.ones(4)})
    torch.testing.assert_close(_logits(read_model(folder)), expected, rtol=0, atol=0)
    torch.testing.assert_close(_logits(_in_transformers(folder)), expected, rtol=0, atol=1e-5)


def test_copies_of_multi_token_prediction_are_compared_without_the_model(tmp_path: Path) -> None:
    from lmworks.export.huggingface import write_model
    from lmworks.model import Transformer
    from lmworks.model.init import initialize
    from lmworks.recipe.schema.model import Model

    model = Model.model_validate({
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "mtp": {}, "rope": {"partial_rotary_factor": 0.5},
        "moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    })  # fmt: skip
    write_model(initialize(Transformer(model), 1), tmp_path, {}, torch.float32)
    refuse_unequal_copies(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    copy = "model.layers.2.shared_head.head.weight"
    tensors[copy][5, 5] += 1
    _write(tmp_path, tensors)
    with pytest.raises(UserError, match=f"{copy} is not equal to the model's own"):
        refuse_unequal_copies(tmp_path, model)
