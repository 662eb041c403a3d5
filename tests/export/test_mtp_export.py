"""Multi-token prediction in a Hugging Face checkpoint: the published names, left out by `transformers` as a model, and by its own reader of
such layers computing what ours do.

Tolerances: hidden states 1e-5 and gradients 1e-4, relative to the largest value, in fp32; see test_huggingface.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_configs import random_config
from safetensors.torch import load_file, save_file
from test_huggingface import relative

from lmworks.errors import UserError
from lmworks.export.huggingface import write_model
from lmworks.io.files import read_json, write_json
from lmworks.model import Transformer
from lmworks.recipe.families.registry import FAMILIES
from lmworks.recipe.schema.model import Mla, Model, Moe, Mtp, Rope
from lmworks.weights.huggingface import read_model
from lmworks.weights.names import exports_mtp

_MOE = Moe(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, first_k_dense_replace=1, routed_scaling_factor=2.5)
_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": "64 tokens",
    "moe": _MOE,
}
_GLM = _SMALL | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope": Rope(partial_rotary_factor=0.5),
    "attention_bias": True,
    "use_qk_norm": True,
}
_MLA = Mla(q_lora_rank=24, kv_lora_rank=20, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10)
_DEEPSEEK = _SMALL | {"num_key_value_heads": 4, "head_dim": 20, "rms_norm_eps": 1e-6, "mla": _MLA}
# transformers knows the layer by the number it has in the published models: 46 in GLM-4.5-Air, 61 in DeepSeek-V3
CASES = {
    "glm": Model(**_GLM, num_hidden_layers=46, mtp=Mtp()),
    "glm tied": Model(**_GLM, num_hidden_layers=46, mtp=Mtp(), tie_word_embeddings=True),
    "deepseek": Model(**_DEEPSEEK, num_hidden_layers=61, mtp=Mtp()),
}
_STOPS = {"eos_token_id": 0, "pad_token_id": 0}


def build(config: Model) -> Transformer:
    model = Transformer(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            # small steps into the residual stream, or 61 layers would drown what the first ones said
            size = 0.05 if name.endswith(("output.weight", "down.weight", "experts.down")) else 0.2
            tensor.copy_(1 + 0.3 * noise if "norm" in name else size * noise)
    return model


@pytest.mark.parametrize("name", ["glm", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "glm")])
def test_transformers_leaves_it_out_and_its_own_reader_agrees(name: str, tmp_path: Path) -> None:
    import transformers
    from transformers.modeling_layers import MtpModel

    model = build(CASES[name])
    write_model(model, tmp_path, _STOPS, torch.float32)
    peer, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]
    assert not any(".eh_proj" in key for key, _ in peer.named_parameters())
    tokens = torch.randint(96, (1, 12), generator=torch.Generator().manual_seed(2))
    output = peer(tokens, output_hidden_states=True)
    assert relative(model.eval()(tokens).detach(), output.logits.detach()) < 1e-5
    # from here on transformers' layer: the normed state of a token, the token after it, and that token's position
    head = MtpModel.from_pretrained(peer)
    positions = torch.arange(1, 12)[None]
    theirs = head.forward_layer(0, output.hidden_states[-1][:, :-1], positions, None, input_ids=tokens[:, 1:])
    loss = torch.nn.functional.cross_entropy(peer.lm_head(theirs)[0, :-1], tokens[0, 2:], reduction="sum")
    loss.backward()
    labels = torch.cat((tokens[:, 1:], torch.full((1, 1), -100)), 1)
    found = model.train().loss(tokens, labels)
    assert found.mtp is not None
    torch.testing.assert_close(found.mtp, loss.detach(), rtol=1e-5, atol=0)
    model.zero_grad()
    (found.total - model.head_loss(model.hidden(tokens)[0], labels)[0] - found.layers.aux).backward()
    ours, layer = dict(model.named_parameters()), dict(head.layers[0].named_parameters())
    names = {
        "embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "post_norm",
        "block.attention_norm": "mtp_block.input_layernorm", "block.attention.output": "mtp_block.self_attn.o_proj",
        "block.ffn.router": "mtp_block.mlp.gate", "block.ffn.shared.down": "mtp_block.mlp.shared_experts.down_proj",
    }  # fmt: skip
    for mine, other in names.items():
        assert relative(ours[f"mtp.0.{mine}.weight"].grad / 0.3, layer[f"{other}.weight"].grad) < 1e-4, mine
    # and through to the shared embedding and the layers below
    assert relative(ours["embedding.weight"].grad / 0.3, peer.get_input_embeddings().weight.grad) < 1e-4
    below = peer.model.layers[3].post_attention_layernorm.weight.grad
    assert relative(ours["layers.3.ffn_norm.weight"].grad / 0.3, below) < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_published_names_and_back(name: str, tmp_path: Path) -> None:
    model = build(CASES[name])
    write_model(model, tmp_path, _STOPS, torch.float32)
    written, number = load_file(tmp_path / "model.safetensors"), model.config.num_hidden_layers
    start = f"model.layers.{number}."
    outside = {key.removeprefix(start) for key in written if key.startswith(start) and ".mlp." not in key and ".self_attn." not in key}
    tied = model.config.tie_word_embeddings
    assert outside == {
        "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "embed_tokens.weight", "input_layernorm.weight",
        "post_attention_layernorm.weight", *(() if tied else ("shared_head.head.weight",)),
    }  # fmt: skip
    assert read_json(tmp_path / "config.json")["num_nextn_predict_layers"] == 1
    assert torch.equal(written[start + "embed_tokens.weight"], model.embedding.weight)
    state = read_model(tmp_path).state_dict()
    assert state.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(state[key], tensor), key
    if tied:
        return
    written[start + "shared_head.head.weight"][5, 5] += 1
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"shared_head\.head\.weight is not equal to the model's own"):
        read_model(tmp_path)


def test_a_checkpoint_without_the_layer_is_read_without_it(tmp_path: Path) -> None:
    """What transformers saves keeps the number in the config and drops the layer; GLM-4.6 as published has no copies."""
    import transformers

    model = build(CASES["glm"].model_copy(update={"num_hidden_layers": 2}))
    write_model(model, tmp_path / "whole", _STOPS, torch.float32)
    written = load_file(tmp_path / "whole" / "model.safetensors")
    copies = [key for key in written if "layers.2.embed_tokens" in key or "shared_head.head" in key]
    assert len(copies) == 2
    bare = tmp_path / "bare"
    bare.mkdir()
    save_file({key: tensor for key, tensor in written.items() if key not in copies}, bare / "model.safetensors", metadata={"format": "pt"})
    write_json(bare / "config.json", read_json(tmp_path / "whole" / "config.json"))
    assert torch.equal(read_model(bare).mtp[0].projection.weight, model.mtp[0].projection.weight)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).save_pretrained(tmp_path / "saved")
    assert read_json(tmp_path / "saved" / "config.json")["num_nextn_predict_layers"] == 1
    read = read_model(tmp_path / "saved")
    assert read.config.mtp is None
    tokens = torch.arange(20)[None]
    assert relative(read(tokens), model.eval()(tokens).detach()) < 1e-5


def test_a_class_without_a_place_for_it_is_exact_without_it(tmp_path: Path) -> None:
    model = build(Model(**(_GLM | {"moe": None, "rope": Rope(), "attention_bias": False, "num_hidden_layers": 2}), mtp=Mtp()))
    assert not exports_mtp(model.config)
    write_model(model, tmp_path, _STOPS, torch.float32)
    read = read_model(tmp_path)
    assert read.config == model.config.model_copy(update={"mtp": None})
    tokens = torch.arange(20)[None]
    assert torch.equal(read(tokens), model.eval()(tokens))


def test_layers_ahead_that_the_class_leaves_out_are_left_out(tmp_path: Path) -> None:
    """Published Mellum 2 has one such layer, and `transformers` reads the model without it."""
    import transformers

    config = random_config(FAMILIES["MellumForCausalLM"], 1)
    config.num_mtp_layers, config.mtp_layer_types, config.mtp_mlp_layer_types = 1, ["sliding_attention"], ["sparse"]
    transformers.MellumForCausalLM(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"mtp.layers.0.input_layernorm.weight": torch.ones(3)}, file, {"format": "pt"})
    assert read_json(tmp_path / "config.json")["num_nextn_predict_layers"] == 1
    read, tokens = read_model(tmp_path), torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(read(tokens), again(tokens).logits, rtol=1e-5, atol=1e-5)
    assert read.config.mtp is None
    save_file(tensors | {"mtp2.layers.0.input_layernorm.weight": torch.ones(3)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"mtp2\.layers\.0\.input_layernorm\.weight"):
        read_model(tmp_path)


def test_layers_in_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index names every tensor, the copies too, and how large all are together."""
    monkeypatch.setattr("lmworks.export.huggingface._SHARD_BYTES", 60_000)
    model = build(CASES["glm"].model_copy(update={"num_hidden_layers": 2, "mtp": Mtp(num_nextn_predict_layers=2)}))
    write_model(model, tmp_path, _STOPS, torch.bfloat16)
    index = read_json(tmp_path / "model.safetensors.index.json")
    files = {file: load_file(tmp_path / file) for file in set(index["weight_map"].values())}
    assert len(files) > 2 and index["weight_map"] == {key: file for file, tensors in files.items() for key in tensors}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    read = read_model(tmp_path)
    assert read.config.mtp is not None and read.config.mtp.num_nextn_predict_layers == 2
    for key, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[key], tensor if key.endswith("router.bias") else tensor.bfloat16().float()), key
