"""Our model against `transformers`, on random weights, in fp32, in both directions.

Tolerances: logits 1e-5 and gradients 1e-4, relative to the largest value of the tensor. Both sides compute in fp32 with sums in
another order, which costs about 1e-6 here; a wrong sign, a missing bias or rotated dimension costs more than 1e-2.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lmworks.errors import UserError
from lmworks.export.huggingface import read_model, write_model
from lmworks.export.names import from_huggingface, to_huggingface
from lmworks.model import Transformer
from lmworks.recipe.huggingface import class_for, from_config, to_config
from lmworks.recipe.model import Mla, Model, Moe, Rope

_COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 24, "ffn_size": 96, "max_length": "64 tokens"
}  # fmt: skip
_MOE = Moe(experts=8, top_k=3, expert_size=32, shared_experts=2, dense_layers=1, routed_scale=2.5)
_MLA = Mla(q_rank=24, kv_rank=20, rope_dim=8, nope_dim=12, value_dim=10)
_LATENT: dict[str, Any] = _COMMON | {"kv_heads": 4, "head_dim": 20, "mla": _MLA}
_YARN = Rope(theta=500.0, scaling="yarn", factor=4, original_length="16 tokens")

CASES = {
    "glm4_moe": Model(**_COMMON, qk_norm=True, attention_bias=True, rope=Rope(fraction=0.5, theta=1e5), moe=_MOE),
    "glm4_moe_groups": Model(
        **_COMMON, rope=Rope(fraction=0.5), moe=_MOE.model_copy(update={"groups": 4, "top_groups": 2, "normalize_top_k": False})
    ),
    "qwen3": Model(**_COMMON, qk_norm=True),
    "qwen3_window": Model(**_COMMON, qk_norm=True, sliding_window="5 tokens", layer_types=("sliding_attention", "full_attention"),
                          tie_embeddings=True),
    "qwen3_window_per_layer": Model(**_COMMON, qk_norm=True, sliding_window="5 tokens",
                                    layer_types=("full_attention", "sliding_attention", "sliding_attention", "sliding_attention")),
    "qwen2_window": Model(**_COMMON, attention_bias=True, sliding_window="5 tokens"),
    "qwen2": Model(**_COMMON, attention_bias=True),
    "llama": Model(**_COMMON, rope=Rope(theta=500_000)),
    "llama_linear": Model(**_COMMON, rope=Rope(scaling="linear", factor=4)),
    "llama_yarn": Model(**_COMMON, rope=_YARN),
    "llama_ntk": Model(**_COMMON, rope=Rope(scaling="ntk", factor=4, original_length="16 tokens")),
    "smollm3": Model(**_COMMON, nope_every=4, tie_embeddings=True),
    "smollm3_window": Model(**_COMMON, sliding_window="5 tokens", layer_types=("sliding_attention", "full_attention")),
    "deepseek_dense": Model(**_LATENT),
    "deepseek_plain_query": Model(**(_LATENT | {"mla": _MLA.model_copy(update={"q_rank": None})}), rope=Rope(theta=500.0)),
    "deepseek_moe": Model(**_LATENT, moe=_MOE),
    "deepseek_moe_groups": Model(**_LATENT, moe=_MOE.model_copy(update={"groups": 4, "top_groups": 2}), tie_embeddings=True),
    "deepseek_eps_1e-5": Model(**_LATENT, moe=_MOE, norm_eps=1e-5),
    "deepseek_eps_1e-3": Model(**_LATENT, norm_eps=1e-3),
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


@torch.no_grad()
def _randomize(peer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in peer.state_dict().items():
        if tensor.is_floating_point() and "rotary" not in key:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.3 * noise if "norm" in key else 0.2 * noise)


@pytest.mark.parametrize("name", CASES)
def test_reads_what_transformers_writes(name: str, tmp_path: Any) -> None:
    model = ours(CASES[name])
    peer = theirs(model)
    _randomize(peer, 3)
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


def _random_config(kind: str, draw: random.Random) -> Any:
    """A small config of one of transformers' classes, in which everything that may vary does."""
    import transformers

    layers, kv_heads, rotated = draw.choice([2, 3, 5]), draw.choice([1, 2, 3]), 2 * draw.randint(1, 4)
    heads = kv_heads * draw.choice([1, 2])
    ropes: list[dict[str, Any]] = [
        {"rope_type": "default"}, {"rope_type": "linear", "factor": draw.choice([2.0, 4.0])},
        {"rope_type": "yarn", "factor": draw.choice([2.0, 8.0]), "original_max_position_embeddings": 16},
    ]  # fmt: skip
    rope = draw.choice(ropes) | {"rope_theta": draw.choice([500.0, 1e4, 1e6])}
    values: dict[str, Any] = {
        "vocab_size": draw.choice([96, 256]), "hidden_size": 8 * draw.randint(3, 8), "intermediate_size": 8 * draw.randint(2, 9),
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 4 * draw.randint(1, 6),
        "rms_norm_eps": 10.0 ** -draw.randint(3, 7), "tie_word_embeddings": draw.random() < 0.5, "max_position_embeddings": 64,
        "rope_parameters": rope, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0,
    }  # fmt: skip
    if kind in ("Qwen2", "Qwen3", "SmolLM3") and draw.random() < 0.7:
        values |= {"use_sliding_window": True, "sliding_window": draw.randint(2, 12), "max_window_layers": draw.randint(0, layers)}
        if draw.random() < 0.6:
            values["layer_types"] = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    if kind == "Llama":
        values["hidden_size"] = 8 * heads * draw.randint(1, 3)  # its config takes nothing else
    if kind == "SmolLM3":
        values["no_rope_layer_interval"] = draw.randint(2, 4)
    if kind in ("Glm4Moe", "DeepseekV3"):
        groups = draw.choice([1, 2, 4])
        values |= {
            "n_routed_experts": 8, "num_experts_per_tok": draw.randint(1, 2), "moe_intermediate_size": 8 * draw.randint(1, 4),
            "n_shared_experts": draw.randint(1, 2), "first_k_dense_replace": draw.randint(0, layers), "n_group": groups,
            "topk_group": draw.randint(1, groups), "norm_topk_prob": draw.random() < 0.5, "routed_scaling_factor": draw.choice([1.0, 2.5]),
        }  # fmt: skip
    if kind == "Glm4Moe":
        values |= {"use_qk_norm": draw.random() < 0.5, "attention_bias": draw.random() < 0.5, "head_dim": 8 * draw.randint(1, 3)}
        values["rope_parameters"] = rope | {"partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])}
    if kind == "DeepseekV3":
        values |= {
            "q_lora_rank": draw.choice([None, 4 * draw.randint(2, 6)]), "kv_lora_rank": 4 * draw.randint(2, 6), "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": draw.randint(4, 12), "v_head_dim": draw.randint(4, 16), "num_key_value_heads": heads,
            "rope_interleave": draw.random() < 0.7,
        }  # fmt: skip
        values.pop("head_dim")
        if rope["rope_type"] == "yarn":
            values["rope_parameters"] = rope | {"mscale": 1.0, "mscale_all_dim": 1.0}
    return getattr(transformers, f"{kind}Config")(**values, attn_implementation="eager")


_FAST, _ALL = 3, 40  # random configs of each class: in every run of the tests, and in the slow ones


@pytest.mark.parametrize("kind", _CLASSES.values())
@pytest.mark.parametrize("seeds", [range(_FAST), pytest.param(range(_FAST, _ALL), marks=pytest.mark.slow)], ids=["few", "many"])
def test_random_configs_of_transformers_are_read(kind: str, seeds: range, tmp_path: Any) -> None:
    import transformers

    for seed in seeds:
        config = _random_config(kind, random.Random(f"{kind}/{seed}"))
        peer = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        _randomize(peer, seed)
        peer.save_pretrained(tmp_path / str(seed))
        read = read_model(tmp_path / str(seed))
        tokens = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            assert relative(read(tokens), peer(tokens).logits) < 1e-5, config
            again = from_config(to_config(read.config, read.rope, {}))
        assert again == read.config, config


def test_an_older_config_without_layer_types_slides_where_its_class_says() -> None:
    """Configs from before transformers 4.53 name the first layer that slides, or for SmolLM3 nothing at all."""
    config = to_config(CASES["qwen2_window"], Rope(), {}) | {"max_window_layers": 2}
    del config["layer_types"]
    read = from_config(config)
    assert [read.slides(layer) for layer in range(4)] == [False, False, True, True]
    config = to_config(CASES["smollm3"], Rope(), {}) | {"use_sliding_window": True, "sliding_window": 5, "layer_types": None}
    read = from_config(config)
    assert [read.slides(layer) for layer in range(4)] == [False, False, False, True]
    with pytest.raises(UserError, match="layer_types that are not 4 of sliding_attention and full_attention"):
        from_config(config | {"layer_types": ["chunked_attention"] * 4})
    with pytest.raises(UserError, match="hidden_act gelu; lmworks reads silu"):
        from_config(config | {"hidden_act": "gelu"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": ["sliding_attention"]}, "there is no window; set model.sliding_window"),
        ({"layer_types": ["full_attention"], "sliding_window": "4 tokens"}, "has no layer that slides"),
        ({"layer_types": ["sliding_attention"] * 5, "sliding_window": "4 tokens"}, "has 5 entries for 4 layers"),
    ],
)
def test_layer_types_that_say_nothing_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Model(**_COMMON, **change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logit_softcap": 30.0}, "logit_softcap is on"),
        ({"rope": Rope(fraction=0)}, "no RoPE at all"),
        ({"rope": Rope(fraction=0.5)}, "rotates 0.5 of each head"),
        ({"qk_norm": True, "attention_bias": True}, "both qk_norm and attention_bias"),
        ({"nope_every": 2, "qk_norm": True}, "layers without positions"),
        (
            _LATENT | {"mla": _MLA.model_copy(update={"norm_eps": 1e-5})},
            r"the latents of DeepseekV3 are normed with 1e-06, not 1e-05 \(mla.norm_eps\)",
        ),
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
