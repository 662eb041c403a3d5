"""The GGUF file against our model: read with the `gguf` package, and for the classes that `transformers` reads from GGUF, run by it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from adapted import adapted
from random_configs import random_config
from small_models import SOFTMAX

from lmworks.errors import UserError
from lmworks.export.gguf import architecture_for, check_gguf, gguf_writer, load_gguf, write_gguf, write_gguf_adapter
from lmworks.io.files import read_json, write_json
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.families.family import Family
from lmworks.recipe.families.registry import FAMILIES, family_of, from_config
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import load as load_tokenizer
from small_config import small_config

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'lmworks[export]'")

# ours -> theirs, written out here a second time, from llama.cpp's gguf-py/gguf/constants.py
GLM_NAMES = {
    "embedding.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "head.weight": "output.weight",
    "layers.1.attention_norm.weight": "blk.1.attn_norm.weight", "layers.1.ffn_norm.weight": "blk.1.post_attention_norm.weight",
    "layers.1.attention.query.weight": "blk.1.attn_q.weight", "layers.1.attention.query.bias": "blk.1.attn_q.bias",
    "layers.1.attention.key.weight": "blk.1.attn_k.weight", "layers.1.attention.value.bias": "blk.1.attn_v.bias",
    "layers.1.attention.output.weight": "blk.1.attn_output.weight", "layers.1.attention.key_norm.weight": "blk.1.attn_k_norm.weight",
    "layers.0.ffn.down.weight": "blk.0.ffn_down.weight", "layers.1.ffn.experts.gate": "blk.1.ffn_gate_exps.weight",
    "layers.1.ffn.experts.down": "blk.1.ffn_down_exps.weight", "layers.1.ffn.shared.up.weight": "blk.1.ffn_up_shexp.weight",
    "layers.1.ffn.router.weight": "blk.1.ffn_gate_inp.weight", "layers.1.ffn.router.bias": "blk.1.exp_probs_b.bias",
}  # fmt: skip


MLA: dict[str, Any] = {
    "num_key_value_heads": 2, "head_dim": 24, "rms_norm_eps": 1e-6,
    "mla": {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
}  # fmt: skip

ALL_HEADS: dict[str, Any] = {"num_key_value_heads": 2, "use_qk_norm": True, "qk_norm_over": "all_heads"}
OLMOE: dict[str, Any] = ALL_HEADS | {"moe": SOFTMAX | {"first_k_dense_replace": 0}}
SLIDING: dict[str, Any] = ALL_HEADS | {
    "norm_position": "post", "sliding_window": "4 tokens", "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip
YARN: dict[str, Any] = {"scaling": "yarn", "factor": 4.0, "original_max_position_embeddings": "8 tokens"}
MELLUM: dict[str, Any] = {
    "use_qk_norm": True, "sliding_window": "4 tokens", "layer_types": ["full_attention", "sliding_attention"],
    "sliding_rope": {"theta": 10_000.0}, "moe": SOFTMAX | {"first_k_dense_replace": 0},
}  # fmt: skip
SINKS: dict[str, Any] = {
    "attention_bias": True, "attention_output_bias": True, "attention_sinks": True, "sliding_window": "4 tokens",
    "layer_types": ["sliding_attention", "full_attention"],
    "moe": SOFTMAX | {"first_k_dense_replace": 0, "add_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
}  # fmt: skip
STATES: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "mamba": {"num_heads": 4, "head_dim": 16, "state_size": 8},
}  # fmt: skip
PLAIN_WEIGHTS: dict[str, Any] = OLMOE["moe"] | {"norm_topk_prob": False}


def written(run: Any, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    write_gguf(run.model, run.tokenizer, path, dtype, "tiny")
    return gguf.GGUFReader(path)


def values(reader: Any, name: str) -> tuple[np.ndarray, Any]:
    tensor = next(tensor for tensor in reader.tensors if tensor.name == name)
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type), tensor.tensor_type


def test_tensors_are_ours(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run("glm4moe")
    state = run.model.state_dict()
    for dtype, kind in ((torch.float32, gguf.GGMLQuantizationType.F32), (torch.bfloat16, gguf.GGMLQuantizationType.BF16)):
        path = tmp_path / "model.gguf"
        reader = written(run, path, dtype)
        assert len(reader.tensors) == len(state) == check_gguf(run.model, path, dtype)
        for ours, name in GLM_NAMES.items():
            found, used = values(reader, name)
            wide = state[ours].dim() > 1 and "router" not in ours
            assert used == (kind if wide else gguf.GGMLQuantizationType.F32), name
            expected = (state[ours].to(dtype) if wide else state[ours]).float().numpy()
            np.testing.assert_array_equal(found, expected, err_msg=name)


def test_metadata(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run("glm4moe")
    fields = written(run, tmp_path / "model.gguf").fields
    found = {key: field.contents() for key, field in fields.items()}
    expected = {
        "general.architecture": "glm4moe", "general.name": "tiny", "general.type": "model", "general.file_type": 0,
        "glm4moe.block_count": 4, "glm4moe.context_length": 256, "glm4moe.embedding_length": 128, "glm4moe.feed_forward_length": 256,
        "glm4moe.attention.head_count": 4, "glm4moe.attention.head_count_kv": 2, "glm4moe.attention.key_length": 64,
        "glm4moe.attention.value_length": 64, "glm4moe.rope.dimension_count": 32, "glm4moe.rope.freq_base": 10_000.0,
        "glm4moe.expert_count": 8, "glm4moe.expert_used_count": 2, "glm4moe.expert_shared_count": 1, "glm4moe.expert_weights_scale": 2.5,
        "glm4moe.expert_feed_forward_length": 64, "glm4moe.leading_dense_block_count": 1, "glm4moe.expert_weights_norm": True,
        "glm4moe.expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID), "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "glm4",
        "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.eos_token_id": run.tokenizer.eos_id,
        "tokenizer.ggml.eot_token_id": run.tokenizer.special["<|user|>"],
        "tokenizer.ggml.eom_token_id": run.tokenizer.special["<|observation|>"],
        "tokenizer.chat_template": (run.directory / "tokenizer" / "chat_template.jinja").read_text(),
    }  # fmt: skip
    assert {key: found.get(key) for key in expected} == expected
    assert found["glm4moe.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    spec = read_json(run.directory / "tokenizer" / "tokenizer.json")
    assert len(tokens) == len(types) == run.tokenizer.vocab_size
    assert {token: number for number, token in enumerate(tokens) if types[number] == gguf.TokenType.NORMAL} == spec["model"]["vocab"]
    assert types[run.tokenizer.special["<|user|>"]] == gguf.TokenType.CONTROL
    assert types[run.tokenizer.special["<think>"]] == gguf.TokenType.USER_DEFINED
    assert found["tokenizer.ggml.merges"] == [" ".join(pair) for pair in spec["model"]["merges"]]


def test_names_that_llama_cpp_takes_for_a_tokenizer_are_spelt_otherwise(make_run: Callable[..., Any], tmp_path: Path) -> None:
    """It lowers the name and looks for these three in it."""
    run = make_run("llama")
    for name in ("My-Phi-3-mini", "phi3", "ModernBERT modern-bert", "phi-4", "my run"):
        write_gguf(run.model, run.tokenizer, tmp_path / "model.gguf", torch.float32, name)
        stored = gguf.GGUFReader(tmp_path / "model.gguf").fields["general.name"].contents()
        assert not any(one in stored.lower() for one in ("phi-3", "phi3", "modern-bert"))
        assert stored.replace("_", "-") == name.replace("phi3", "phi-3")


def loaded_by_transformers(path: Path, model: Model) -> Any:
    """What `from_pretrained(gguf_file=...)` does, which wants the accelerate package besides."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'lmworks[export]'")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # of Qwen it reads neither attention.key_length nor the width of experts, and llama.cpp always normalizes their weights
    unread: dict[str, Any] = {"head_dim": model.head_dim}
    if model.moe:
        unread |= {"moe_intermediate_size": model.moe.moe_intermediate_size, "norm_topk_prob": True}
    config = transformers.AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"] | unread)
    peer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=peer)["tensors"]
    missing, unexpected = peer.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    peer.tie_weights()
    return peer


SLOW = (pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen2"))


@pytest.mark.parametrize("name", [*SLOW, "qwen3", "llama-ntk", "qwen3moe"])  # it reads no GLM, no SmolLM3 and no rope.scaling
def test_transformers_runs_the_file(make_run: Callable[..., Any], tmp_path: Path, name: str) -> None:
    """A reader that shares no code with us computes our logits from the file alone, RoPE's reordering included. Tolerance: fp32 sums in
    another order cost about 1e-6 of the largest logit; rows in the wrong order cost more than 1e-1."""
    run = make_run(name)
    written(run, tmp_path / "model.gguf")
    names = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert ("output.weight" in names) != run.recipe.model.tie_word_embeddings
    theirs = loaded_by_transformers(tmp_path / "model.gguf", run.recipe.model).eval()
    tokens = torch.tensor([run.tokenizer.encode("def main(argv):\n    return argv[1:] # the rest\n" * 8)])
    with torch.no_grad():
        expected, found = run.model(tokens), theirs(tokens).logits
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_changed_byte_is_found(make_run: Callable[..., Any], tmp_path: Path, where: str) -> None:
    run, path = make_run("llama"), tmp_path / "model.gguf"
    reader = written(run, path)
    tensor = {"first": reader.tensors[0], "middle": reader.tensors[len(reader.tensors) // 2], "last": reader.tensors[-1]}[where]
    at = int(tensor.data_offset) + int(tensor.n_bytes) // 2
    del reader, tensor
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(UserError, match=r"model.gguf differs from the trained model: the values of tensor .* differ"):
        check_gguf(run.model, path, torch.float32)


def test_embedding_rows_beyond_the_tokenizer_are_unused_tokens(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run("llama")
    config = run.recipe.model.model_copy(update={"vocab_size": run.tokenizer.vocab_size + 8})
    write_gguf(Transformer(config), run.tokenizer, tmp_path / "model.gguf", torch.float32, "wide")
    found = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert found["tokenizer.ggml.token_type"].contents()[-8:] == [int(gguf.TokenType.UNUSED)] * 8


GATED: dict[str, Any] = SOFTMAX | {"first_k_dense_replace": 0, "n_shared_experts": 1, "shared_expert_gate": True}
DELTA: dict[str, Any] = {
    "use_qk_norm": True, "attn_output_gate": True, "rms_norm_eps": 1e-6, "layer_types": ["linear_attention", "full_attention"],
    "gated_delta": {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 8, "value_head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_qk_norm": True, "sliding_window": "64 tokens"}, "it has a sliding window, which llama.cpp ignores"),
        ({"no_rope_layer_interval": 2}, r"one of 2 layers has no positions .*, and llama.cpp supports only one of 4"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is on"),
        ({"sliding_window": "64 tokens"}, "llama.cpp runs Mistral as llama, which ignores it"),
        (
            {"use_qk_norm": True, "rope": {"scaling": "llama3", "original_max_position_embeddings": "8 tokens"}},
            "for its architecture llama and not for qwen3",
        ),
        (MLA | {"rms_norm_eps": 1e-5}, "norm_eps 1e-05, with which llama.cpp would normalize latents"),
        (MLA | {"num_hidden_layers": 27}, "decides by the number of layers whether there is a q_lora_rank"),
        (MLA | {"rope": {"scaling": "yarn", "factor": 4.0, "original_max_position_embeddings": "8 tokens"}}, "rope.scaling yarn"),
        ({"use_qk_norm": True, "moe": SOFTMAX | {"first_k_dense_replace": 1}}, "llama.cpp's qwen3moe has experts in all"),
        ({"use_qk_norm": True, "moe": SOFTMAX | {"first_k_dense_replace": 0, "norm_topk_prob": False}}, "not normalized"),
        (OLMOE, "weights of its chosen experts are normalized .*olmoe does not do"),
        (OLMOE | {"moe": PLAIN_WEIGHTS, "num_key_value_heads": 1}, "llama.cpp's olmoe has a key norm of the whole width"),
        (OLMOE | {"moe": PLAIN_WEIGHTS, "tie_word_embeddings": True}, "llama.cpp's olmoe needs a head of its own"),
        (DELTA | {"rms_norm_eps": 1e-5}, "rms_norm_eps is not 1e-06, and llama.cpp takes it for the lengths"),
        (DELTA | {"layer_types": ["full_attention", "linear_attention"]}, "its layers of full attention are not each few layers"),
        (DELTA | {"gated_delta": DELTA["gated_delta"] | {"value_head_dim": 12}}, "keys and values have different widths"),
        (DELTA | {"moe": GATED | {"norm_topk_prob": False}}, "the weights of its experts are not normalized, unlike"),
        ({"attention_bias": True, "moe": GATED}, "the weights of its experts are normalized, unlike those of llama.cpp's qwen2moe"),
        ({"attention_bias": True, "moe": GATED | {"norm_topk_prob": False}, "tie_word_embeddings": True}, "qwen2moe needs a head of"),
        (ALL_HEADS | {"norm_position": "post", "tie_word_embeddings": True}, "llama.cpp's olmo2 needs a head of its own"),
        (SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}, "its sliding layers are not three of four"),
        (SINKS | {"layer_types": ["full_attention", "sliding_attention"]}, "its sliding layers are not every second one from the first on"),
        (SINKS | {"attention_bias": False, "attention_output_bias": False}, "its attention has no biases .*llama.cpp's gpt-oss has them"),
        (SINKS | {"moe": SINKS["moe"] | {"swiglu_limit": 6.0}}, "are not 1.702 and 7, the constants of llama.cpp's gpt-oss"),
        (STATES | {"mamba": STATES["mamba"] | {"num_heads": 2}}, "the inner width of Mamba-2 is .*, and llama.cpp wants twice hidden_size"),
        (STATES | {"mamba": STATES["mamba"] | {"conv_bias": False}}, "the convolution of its Mamba-2 has no bias"),
        (STATES | {"layer_types": ["linear_attention"]}, "no layer has attention .*, whose heads llama.cpp wants to know"),
        (MELLUM | {"moe": SOFTMAX | {"first_k_dense_replace": 1}}, "first layers are dense .*, and llama.cpp's mellum has experts in all"),
        (MELLUM | {"moe": MELLUM["moe"] | {"norm_topk_prob": False}}, "are not normalized .*, and llama.cpp's mellum normalizes them"),
        (MELLUM | {"tie_word_embeddings": True}, "llama.cpp's mellum needs a head of its own"),
        (MELLUM | {"sliding_rope": {"theta": 300.0}}, r"not the plain RoPE with the theta of the others .*mellum \(sliding_rope\)"),
        (MELLUM | {"sliding_rope": None, "rope": YARN}, r"not the plain RoPE with the theta of the others .*mellum \(sliding_rope\)"),
        (MELLUM | {"rope": {"scaling": "ntk", "factor": 2.0, "original_max_position_embeddings": "8 tokens"}}, "mellum has one theta"),
        (SINKS | {"tie_word_embeddings": True}, "llama.cpp's gpt-oss needs a head of its own"),
        (SINKS | {"rope": YARN | {"truncate": False}}, r"its YaRN does not round \(rope.truncate false\), and llama.cpp rounds"),
        (SLIDING | {"sliding_rope": {"theta": 300.0}}, r"not the plain RoPE with the theta of the others .*olmo2 \(sliding_rope\)"),
        (SLIDING | {"rope": {"scaling": "ntk", "factor": 2.0, "original_max_position_embeddings": "8 tokens"},
                    "sliding_rope": {"theta": 10_000.0}}, "rope.scaling ntk, which is written as a larger theta"),
    ],
)
def test_what_llama_cpp_cannot_express_is_refused(change: dict[str, Any], reason: str) -> None:
    shape = small_config(num_hidden_layers=4, num_attention_heads=2, head_dim=16, intermediate_size=32)
    model = Model.model_validate(shape | change)
    with pytest.raises(UserError, match=rf"no architecture of llama.cpp expresses this model: .*{reason}.*export.gguf=false"):
        architecture_for(model)


def test_latent_attention_is_split_by_head(make_run: Callable[..., Any], tmp_path: Path) -> None:
    """Keys transposed and values, head by head, and rotated rows in pairs (2i, 2i + 1), as llama.cpp's converter writes them."""
    run = make_run("deepseek")
    reader, state, mla = written(run, tmp_path / "model.gguf"), run.model.state_dict(), run.model.config.mla
    heads, nope, rope = run.model.config.num_attention_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim
    both = state["layers.1.attention.kv_up.weight"].view(heads, nope + mla.v_head_dim, mla.kv_lora_rank).numpy()
    np.testing.assert_array_equal(values(reader, "blk.1.attn_k_b.weight")[0], both[:, :nope].swapaxes(1, 2))
    np.testing.assert_array_equal(values(reader, "blk.1.attn_v_b.weight")[0], both[:, nope:])
    down, ours = values(reader, "blk.1.attn_kv_a_mqa.weight")[0], state["layers.1.attention.kv_down.weight"].numpy()
    np.testing.assert_array_equal(down[: mla.kv_lora_rank], ours[: mla.kv_lora_rank])
    np.testing.assert_array_equal(down[mla.kv_lora_rank :: 2], ours[mla.kv_lora_rank : mla.kv_lora_rank + rope // 2])
    found = {key: reader.get_field(f"deepseek2.attention.{key}").contents() for key in ("head_count_kv", "key_length", "key_length_mla")}
    assert found == {"head_count_kv": 1, "key_length": mla.kv_lora_rank + rope, "key_length_mla": nope + rope}
    assert reader.get_field("deepseek2.rope.dimension_count").contents() == rope


@pytest.mark.parametrize("name", ["glm4moe", "deepseek", "llama", "qwen3", "smollm3"])
def test_weights_come_back_from_the_file(make_run: Callable[..., Any], tmp_path: Path, name: str) -> None:
    run = make_run(name)
    written(run, tmp_path / "model.gguf")
    other = initialize(Transformer(run.model.config), 99)
    load_gguf(other, tmp_path / "model.gguf")
    expected = run.model.state_dict()
    for key, tensor in other.state_dict().items():
        if not key.startswith("mtp."):
            assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize(("change", "told"), [
    ({"num_hidden_layers": 5}, r"has no tensor blk\.4\."), ({"intermediate_size": 96}, "has another shape than in the model"),
])  # fmt: skip
def test_a_file_of_another_model_is_refused_by_tensor(
    make_run: Callable[..., Any], tmp_path: Path, change: dict[str, int], told: str
) -> None:
    run = make_run("llama")
    written(run, tmp_path / "model.gguf")
    with pytest.raises(UserError, match=told):
        load_gguf(Transformer(run.model.config.model_copy(update=change)), tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("glm4moe", ("all-linear", "experts")),
        ("llama", ("all-linear",)),
        ("deepseek", ("query_down", "query_up", "kv_down", "attention.output", "mlp", "experts")),
    ],
)
def test_an_adapter_changes_the_file_as_merging_does(
    make_run: Callable[..., Any], tmp_path: Path, name: str, targets: tuple[str, ...]
) -> None:
    """The file of the base model, plus scale B A of the adapter's file, is the file of the merged model."""
    run = make_run(name)
    one = adapted(run.model, *targets)
    write_gguf_adapter(one.adapters, one.lora, run.model, tmp_path / "adapter.gguf", "tiny")
    base, adapter = written(run, tmp_path / "base.gguf"), gguf.GGUFReader(tmp_path / "adapter.gguf")
    write_gguf(one.merged, run.tokenizer, tmp_path / "merged.gguf", torch.float32, "tiny")
    merged = gguf.GGUFReader(tmp_path / "merged.gguf")
    fields = {key: adapter.get_field(key).contents() for key in ("general.type", "adapter.type", "adapter.lora.alpha")}
    assert fields == {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": one.lora.alpha * 2}  # rslora, rank 4
    assert adapter.get_field("general.architecture").contents() == base.get_field("general.architecture").contents()
    parts = {tensor.name: tensor.data for tensor in adapter.tensors}
    changed = {tensor.name.rpartition(".")[0] for tensor in adapter.tensors}
    assert len(changed) == len(one.adapters) / 2
    for tensor in base.tensors:
        found = tensor.data
        if tensor.name in changed:
            found = found + one.lora.scale * parts[f"{tensor.name}.lora_b"] @ parts[f"{tensor.name}.lora_a"]
        np.testing.assert_allclose(found, values(merged, tensor.name)[0], atol=1e-6, err_msg=tensor.name)  # the order of sums


@pytest.mark.parametrize(
    ("name", "reason"),
    [("deepseek", "the expansion of latents to keys and values"), ("glm4", "matrices with adapters as parts of larger ones")],
)
def test_an_adapter_of_what_llama_cpp_has_otherwise_is_refused(
    make_run: Callable[..., Any], tmp_path: Path, name: str, reason: str
) -> None:  # fmt: skip
    run = make_run(name)
    one = adapted(run.model, "attention" if name == "deepseek" else "mlp")
    with pytest.raises(UserError, match=reason):
        write_gguf_adapter(one.adapters, one.lora, run.model, tmp_path / "adapter.gguf", "tiny")
    assert not (tmp_path / "adapter.gguf").exists()


def test_another_split_rule_is_refused(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run("llama")
    spec = read_json(run.directory / "tokenizer" / "tokenizer.json")
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+|\S+"
    write_json(tmp_path / "tokenizer.json", spec)
    with pytest.raises(UserError, match="splits text by another rule than the tokenizers of lmworks"):
        write_gguf(run.model, load_tokenizer(tmp_path), tmp_path / "model.gguf", torch.float32, "tiny")
    assert not (tmp_path / "model.gguf").exists()


def test_multi_token_prediction_stays_behind(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run("glm4moe-mtp")
    reader = written(run, tmp_path / "model.gguf")
    own = [name for name in run.model.state_dict() if not name.startswith("mtp.")]
    assert len(reader.tensors) == len(own) == check_gguf(run.model, tmp_path / "model.gguf", torch.float32)
    assert len(own) < len(run.model.state_dict()) and int(reader.get_field("glm4moe.nextn_predict_layers").contents()) == 0
    assert int(reader.get_field("glm4moe.block_count").contents()) == run.model.config.num_hidden_layers


@pytest.mark.parametrize("family", [family for family in FAMILIES.values() if family.architectures], ids=lambda family: family.model_type)
@pytest.mark.parametrize("models", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_names_are_those_of_llama_cpps_tables(family: Family, models: int, make_run: Callable[..., Any], tmp_path: Path) -> None:
    """Models from random configs of the class: each tensor that llama.cpp lists for the architecture and the model has, and no other."""
    tokenizer, written = make_run("llama").tokenizer, 0
    for seed in range(300):
        values = random_config(family, seed).to_dict() | {"vocab_size": tokenizer.vocab_size}
        config = from_config(values)
        try:
            architecture = architecture_for(config)
            if family_of(config) is not family and not family.written_as:  # the model is that of a simpler class
                continue
        except UserError:  # most random models have something that llama.cpp does not know
            continue
        model = initialize(Transformer(config), seed)
        write_gguf(model, tokenizer, tmp_path / "model.gguf", torch.float32, "random")
        reader = gguf.GGUFReader(tmp_path / "model.gguf")
        assert check_gguf(model, tmp_path / "model.gguf", torch.float32) == len(reader.tensors)
        known = family_of(config).gguf(config).names_of or architecture
        number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
        listed = {gguf.TENSOR_NAMES[kind].replace("{bid}", "*") for kind in gguf.MODEL_TENSORS[number]}
        found = {re.sub(r"\.(weight|bias)$", "", re.sub(r"blk\.\d+\.", "blk.*.", tensor.name)) for tensor in reader.tensors}
        assert found <= listed
        assert reader.get_field(f"{architecture}.block_count").contents() == config.num_hidden_layers
        written += 1
        if written == models:
            break
    assert written


def test_llama_3s_scaling_is_a_factor_for_each_frequency(make_run: Callable[..., Any], tmp_path: Path) -> None:
    """As llama.cpp's converter writes it: 1 for the fast, `factor` for the slow, and between them what interpolates."""
    run = make_run("llama-llama3")
    reader = written(run, tmp_path / "model.gguf")
    found, kind = values(reader, "rope_freqs.weight")
    rope, expected = run.recipe.model.rope, []
    for pair in range(32):
        turns = 64 * rope.theta ** (-2 * pair / 64) / (2 * np.pi)  # within the original 64 tokens
        smooth = (turns - 1.0) / (4.0 - 1.0)
        expected.append(1.0 if turns > 4 else rope.factor if turns < 1 else 1 / ((1 - smooth) / rope.factor + smooth))
    assert kind == gguf.GGMLQuantizationType.F32 and found.shape == (32,) and sum(1 < value < 4 for value in expected) > 1
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # powers in fp32 here, in fp64 above
    assert reader.get_field("llama.rope.scaling.type") is None


def test_qwen3_moe_and_olmo2_as_llama_cpp_names_them(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run("qwen3moe")
    reader = written(run, tmp_path / "model.gguf")
    found = {key.removeprefix("qwen3moe."): field.contents() for key, field in reader.fields.items() if key.startswith("qwen3moe.")}
    assert {key: found[key] for key in found if key.startswith("expert")} == {
        "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64
    }  # fmt: skip
    state = run.model.state_dict()
    np.testing.assert_array_equal(values(reader, "blk.2.ffn_gate_exps.weight")[0], state["layers.2.ffn.experts.gate"].numpy())
    np.testing.assert_array_equal(values(reader, "blk.2.ffn_norm.weight")[0], state["layers.2.ffn_norm.weight"].numpy())
    run = make_run("olmo2")
    reader, state = written(run, tmp_path / "model.gguf"), run.model.state_dict()
    for name, ours in (("post_attention_norm", "attention_norm"), ("post_ffw_norm", "ffn_norm"), ("attn_k_norm", "attention.key_norm")):
        np.testing.assert_array_equal(values(reader, f"blk.1.{name}.weight")[0], state[f"layers.1.{ours}.weight"].numpy())
    assert state["layers.1.attention.query_norm.weight"].shape == (128,) and state["layers.1.attention.key_norm.weight"].shape == (64,)


def test_shipped_recipes_have_an_architecture() -> None:
    from lmworks.recipe.load import load_recipe, shipped

    found = {}
    for name in shipped():
        recipe: Recipe = load_recipe(name).recipe
        found[name] = architecture_for(recipe.model)
    assert found["quickstart"] == "mellum"
    assert found["glm46-355b-a32b"] == "glm4moe"
    assert found["smollm3-3b"] == "smollm3"


def test_a_file_whose_writing_fails_is_closed(tmp_path: Path) -> None:
    """While the error, which holds the frames, is still there: a disk with an open file cannot be unmounted."""
    path = tmp_path / "model.gguf"

    def write() -> None:
        with gguf_writer(path, "llama") as writer:
            writer.write_header_to_file()
            assert str(path) in {one.path for one in psutil.Process().open_files()}
            raise OSError("full")

    with pytest.raises(OSError, match="full") as kept:
        write()
    assert kept.value.__traceback__ is not None
    assert str(path) not in {one.path for one in psutil.Process().open_files()}
