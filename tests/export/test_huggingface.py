"""Our model against `transformers`, on random weights, in fp32, in both directions.

Tolerances: logits 1e-5 and gradients 1e-4, relative to the largest value of the tensor. Both sides compute in fp32 with sums in
another order, which costs about 1e-6 here; a wrong sign, a missing bias or rotated dimension costs more than 1e-2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmworks.errors import UserError
from lmworks.export.config import class_for, from_config, to_config
from lmworks.export.huggingface import read_model, write_model
from lmworks.export.names import from_huggingface, to_huggingface
from lmworks.model import Transformer
from lmworks.recipe.model import Mla, Model, Moe, Rope

_COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 24, "ffn_size": 96, "max_length": "64 tokens"
}  # fmt: skip
_MOE = Moe(experts=8, top_k=3, expert_size=32, shared_experts=2, dense_layers=1, routed_scale=2.5)
_MLA = Mla(q_rank=24, kv_rank=20, rope_dim=8, nope_dim=12, value_dim=10)
_LATENT: dict[str, Any] = _COMMON | {"kv_heads": 4, "head_dim": 20, "mla": _MLA, "norm_eps": 1e-6}
_YARN = Rope(theta=500.0, scaling="yarn", factor=4, original_length="16 tokens")

CASES = {
    "glm4_moe": Model(**_COMMON, qk_norm=True, attention_bias=True, rope=Rope(fraction=0.5, theta=1e5), moe=_MOE),
    "glm4_moe_groups": Model(
        **_COMMON, rope=Rope(fraction=0.5), moe=_MOE.model_copy(update={"groups": 4, "top_groups": 2, "normalize_top_k": False})
    ),
    "qwen3": Model(**_COMMON, qk_norm=True),
    "qwen3_window": Model(**_COMMON, qk_norm=True, sliding_window="5 tokens", global_every=2, tie_embeddings=True),
    "qwen2": Model(**_COMMON, attention_bias=True),
    "llama": Model(**_COMMON, rope=Rope(theta=500_000)),
    "llama_linear": Model(**_COMMON, rope=Rope(scaling="linear", factor=4)),
    "llama_yarn": Model(**_COMMON, rope=_YARN),
    "llama_ntk": Model(**_COMMON, rope=Rope(scaling="ntk", factor=4, original_length="16 tokens")),
    "smollm3": Model(**_COMMON, nope_every=4, tie_embeddings=True),
    "deepseek_dense": Model(**_LATENT),
    "deepseek_plain_query": Model(**(_LATENT | {"mla": _MLA.model_copy(update={"q_rank": None})}), rope=Rope(theta=500.0)),
    "deepseek_moe": Model(**_LATENT, moe=_MOE),
    "deepseek_moe_groups": Model(**_LATENT, moe=_MOE.model_copy(update={"groups": 4, "top_groups": 2}), tie_embeddings=True),
    "deepseek_yarn": Model(**_LATENT, rope=_YARN),
    "deepseek_ntk": Model(**_LATENT, rope=Rope(scaling="ntk", factor=4, original_length="16 tokens")),
}
_CLASSES = {
    "glm4_moe": "Glm4Moe", "qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "smollm3": "SmolLM3", "deepseek": "DeepseekV3"
}  # fmt: skip


def ours(config: Model) -> Transformer:
    """Random weights that hide nothing: norms away from 1, biases and selection biases away from 0."""
    generator = torch.Generator().manual_seed(1)
    model = Transformer(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model


def theirs(model: Transformer) -> Any:
    import transformers

    config = to_config(model.config, model.rope, {"eos_token_id": 0, "pad_token_id": 0})
    kind = getattr(transformers, class_for(model.config))
    return kind(kind.config_class(**config, attn_implementation="eager")).eval()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients(name: str, tmp_path: Any) -> None:
    model = ours(CASES[name])
    write_model(model, tmp_path, {"eos_token_id": 0, "pad_token_id": 0}, torch.float32)
    import transformers

    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(peer).__name__ == class_for(model.config)
    assert type(peer).__name__.startswith(_CLASSES[name.split("_")[0] if not name.startswith("glm4") else "glm4_moe"])
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(2))
    expected = peer(tokens, labels=tokens)
    expected.loss.backward()
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), 1)
    model.eval()
    assert relative(model(tokens), expected.logits) < 1e-5
    loss = model.loss(tokens, labels).total / 46
    loss.backward()
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)
    gradients = dict(to_huggingface({key: p.grad for key, p in model.named_parameters()}, model.config))
    checked = 0
    for key, parameter in peer.named_parameters():
        found = _fused(key, gradients) if ".experts." in key else gradients[key]
        assert relative(found, parameter.grad) < 1e-4, key
        checked += 1
    assert checked == len(list(peer.parameters()))


def _fused(key: str, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """transformers holds an MoE layer's gate and up projections in one tensor in memory, gate first."""
    start = key.rsplit(".", 1)[0]
    stack = {part: torch.stack([gradients[f"{start}.{e}.{part}_proj.weight"] for e in range(8)]) for part in ("gate", "up", "down")}
    return torch.cat((stack["gate"], stack["up"]), 1) if key.endswith("gate_up_proj") else stack["down"]


@pytest.mark.parametrize("name", CASES)
def test_reads_what_transformers_writes(name: str, tmp_path: Any) -> None:
    model = ours(CASES[name])
    peer = theirs(model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for key, tensor in peer.state_dict().items():
            if tensor.is_floating_point() and "rotary" not in key:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + 0.3 * noise if "norm" in key else 0.2 * noise)
    peer.save_pretrained(tmp_path)
    read = read_model(tmp_path)
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        assert relative(read(tokens), peer(tokens).logits) < 1e-5


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("_ntk")])
def test_config_round_trip(name: str) -> None:
    config = CASES[name]
    back = from_config(to_config(config, config.rope, {}))
    assert back == config.model_copy(update={"moe": back.moe})
    if config.moe:
        assert back.moe == config.moe


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logit_softcap": 30.0}, "logit_softcap is on"),
        ({"rope": Rope(fraction=0)}, "no RoPE at all"),
        ({"rope": Rope(fraction=0.5)}, "rotates 0.5 of each head"),
        ({"qk_norm": True, "attention_bias": True}, "both qk_norm and attention_bias"),
        ({"nope_every": 2, "qk_norm": True}, "layers without positions"),
        (_LATENT | {"norm_eps": 1e-5}, r"the latents of DeepseekV3 are normed with 1e-06, not 1e-05 \(norm_eps\)"),
        (_LATENT | {"moe": _MOE.model_copy(update={"shared_experts": 0})}, "no shared expert"),
        ({"moe": _MOE.model_copy(update={"gate": "softmax"})}, "gates are softmax"),
        ({"moe": _MOE.model_copy(update={"shared_experts": 0})}, "no shared expert"),
    ],
)
def test_models_without_a_class_are_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=f"no Hugging Face class expresses this model: .*{reason}"):
        class_for(Model(**(_COMMON | change)))


def test_foreign_weights_are_refused(tmp_path: Any) -> None:
    model = ours(CASES["llama"])
    state = dict(model.state_dict())
    tensors = list(to_huggingface(state, model.config))
    with pytest.raises(UserError, match="1 tensors are missing, the first is"):
        from_huggingface(iter(tensors[:-1]), state, model.config)
    with pytest.raises(UserError, match="has no counterpart"):
        from_huggingface(iter([*tensors, ("model.layers.0.mlp.c_fc.weight", torch.zeros(1))]), state, model.config)
    with pytest.raises(UserError, match="has shape"):
        from_huggingface(iter([(tensors[0][0], torch.zeros(3, 3)), *tensors[1:]]), state, model.config)
