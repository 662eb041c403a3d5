"""Our model against `transformers`, on random weights, in fp32, in both directions.

Tolerances: logits 1e-5 and gradients 1e-4, relative to the largest value of the tensor. Both sides compute in fp32 with sums in
another order, which costs about 1e-6 here, and more where random states are steep (`bound`); a wrong sign, a missing bias or rotated
dimension costs more than 1e-2.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from random_configs import EXPERTS, random_config

from lmworks.errors import UserError
from lmworks.export.huggingface import write_model
from lmworks.inference.model import for_inference
from lmworks.model import Transformer
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallelize import build
from lmworks.recipe.families.family import Family
from lmworks.recipe.families.registry import FAMILIES, class_for, family_of, from_config, table, to_config
from lmworks.recipe.mixers import tp_problems
from lmworks.recipe.schema.gated_delta import GatedDelta
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.mixers import Lightning, Mamba, Multipliers, ShortConv
from lmworks.recipe.schema.model import Balance, Mla, Model, Moe, Rope
from lmworks.weights.huggingface import load_weights, read_model
from lmworks.weights.names import huggingface_name, is_exported, to_huggingface
from lmworks.weights.stacked import stack
from parallel.parity import recipe_of
from rank_pool import RankPool

_COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    "intermediate_size": 96, "max_position_embeddings": "64 tokens"
}  # fmt: skip
_MOE = Moe(
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    n_shared_experts=2,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
)
_SOFTMAX = Moe(
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    n_shared_experts=0,
    first_k_dense_replace=0,
    scoring_func="softmax",
    balance=Balance(method="aux"),
)
_SIGMOID = Moe(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=0, first_k_dense_replace=0)
_POST: dict[str, Any] = _COMMON | {"head_dim": 16, "norm_position": "post", "use_qk_norm": True, "qk_norm_over": "all_heads"}
_GEMMA: dict[str, Any] = _COMMON | {
    "use_qk_norm": True, "norm_position": "both", "hidden_act": "gelu_tanh", "scale_embeddings": True, "tie_word_embeddings": True
}  # fmt: skip
_MIXTRAL: dict[str, Any] = _COMMON | {"intermediate_size": 32}  # which is the size of an expert
_OLMOE: dict[str, Any] = _MIXTRAL | {"head_dim": 16, "use_qk_norm": True, "qk_norm_over": "all_heads"}
_LLAMA3 = Rope(theta=500_000, scaling="llama3", factor=8, original_max_position_embeddings="16 tokens")
_MLA = Mla(q_lora_rank=24, kv_lora_rank=20, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10)
_LATENT: dict[str, Any] = _COMMON | {"num_key_value_heads": 4, "head_dim": 20, "mla": _MLA}
_YARN = Rope(theta=500.0, scaling="yarn", factor=4, original_max_position_embeddings="16 tokens")
_MAMBA = Mamba(num_heads=6, head_dim=8, state_size=12, n_groups=2, gate_norm="none")
_FACTORS = Multipliers(
    embedding=2.0, logits=0.5, key=0.75, attention_in=1.25, attention_out=0.75, gate=1.5, ffn_out=0.75, mamba_in=1.5,
    mamba_parts=(0.75, 1.25, 0.5, 1.5, 2.0), mamba_out=0.5,
)  # fmt: skip
_STATES = Mamba(num_heads=8, head_dim=16, state_size=12, n_groups=2, norm_groups=2)
_GRANITE: dict[str, Any] = _COMMON | {"head_dim": 16, "layer_types": ("linear_attention", "full_attention"), "mamba": _STATES}
_HYBRID: dict[str, Any] = {"layer_types": ("hybrid",), "mamba": _MAMBA}
_ALL_HEADS: dict[str, Any] = {"use_qk_norm": True, "qk_norm_over": "all_heads"}
_SINKS: dict[str, Any] = _COMMON | {"intermediate_size": 32, "attention_sinks": True}
_CLAMPED = _SOFTMAX.model_copy(update={"add_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 0.5})
_LIGHTNING: dict[str, Any] = {
    "layer_types": ("linear_attention", "full_attention"), "lightning": Lightning(), "norm_position": "stream",
    "moe": _SOFTMAX.model_copy(update={"moe_intermediate_size": 96}),
}  # fmt: skip

_SQUARED = _SIGMOID.model_copy(update={"n_shared_experts": 2, "routed_scaling_factor": 2.5})
_NEMOTRON: dict[str, Any] = _COMMON | {
    "hidden_act": "relu2", "rope": Rope(partial_rotary_factor=0), "mamba": _STATES,
    "layer_types": ("linear_attention", "mlp", "full_attention", "mlp"),
}  # fmt: skip
_PLAIN_SHARED = _SOFTMAX.model_copy(update={"n_shared_experts": 2})
_SHARED = _SOFTMAX.model_copy(update={"n_shared_experts": 2, "shared_expert_gate": True})
_DELTA: dict[str, Any] = _COMMON | {
    "use_qk_norm": True, "attn_output_gate": True, "rope": Rope(partial_rotary_factor=0.25, theta=1e6),
    "layer_types": ("linear_attention", "linear_attention", "full_attention"),
    "gated_delta": GatedDelta(num_key_heads=2, num_value_heads=6, key_head_dim=8, value_head_dim=12),
}  # fmt: skip

_CONV: dict[str, Any] = _COMMON | {
    "head_dim": 16, "use_qk_norm": True, "layer_types": ("conv", "full_attention"), "short_conv": ShortConv(),
}  # fmt: skip

CASES = {
    "glm4_moe": Model(**_COMMON, use_qk_norm=True, attention_bias=True, rope=Rope(partial_rotary_factor=0.5, theta=1e5), moe=_MOE),
    "glm4_moe_groups": Model(
        **_COMMON,
        rope=Rope(partial_rotary_factor=0.5),
        moe=_MOE.model_copy(update={"n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    ),
    "qwen3": Model(**_COMMON, use_qk_norm=True),
    "qwen3_window": Model(
        **_COMMON,
        use_qk_norm=True,
        sliding_window="5 tokens",
        layer_types=("sliding_attention", "full_attention"),
        tie_word_embeddings=True,
    ),
    "qwen3_window_per_layer": Model(
        **_COMMON,
        use_qk_norm=True,
        sliding_window="5 tokens",
        layer_types=("full_attention", "sliding_attention", "sliding_attention", "sliding_attention"),
    ),
    "qwen3_moe": Model(**_COMMON, use_qk_norm=True, moe=_SOFTMAX),
    "qwen3_moe_dense_window": Model(
        **_COMMON,
        use_qk_norm=True,
        sliding_window="5 tokens",
        tie_word_embeddings=True,
        moe=_SOFTMAX.model_copy(update={"first_k_dense_replace": 2, "norm_topk_prob": False}),
    ),
    "mixtral": Model(**_MIXTRAL, moe=_SOFTMAX),
    "mixtral_window": Model(**_MIXTRAL, moe=_SOFTMAX, sliding_window="5 tokens", tie_word_embeddings=True, rope=Rope(theta=1e6)),
    "olmoe": Model(**_OLMOE, moe=_SOFTMAX),
    "olmoe_plain_weights": Model(**_OLMOE | {"num_key_value_heads": 4}, moe=_SOFTMAX.model_copy(update={"norm_topk_prob": False})),
    "qwen2_moe": Model(
        **_COMMON | {"head_dim": 16}, attention_bias=True, moe=_SHARED, sliding_window="5 tokens",
        layer_types=("sliding_attention", "full_attention"),
    ),
    "qwen2_moe_dense": Model(
        **_COMMON | {"head_dim": 16}, attention_bias=True, tie_word_embeddings=True,
        moe=_SHARED.model_copy(update={"first_k_dense_replace": 2, "norm_topk_prob": False, "n_shared_experts": 1}),
    ),
    "mistral": Model(**_COMMON, sliding_window="5 tokens"),
    "olmo2": Model(**_POST),
    "olmo2_tied": Model(**_POST | {"num_key_value_heads": 4}, tie_word_embeddings=True, rope=Rope(theta=500_000)),
    "olmo3": Model(
        **_POST, sliding_window="5 tokens", layer_types=("sliding_attention", "sliding_attention", "full_attention"), rope=_YARN,
        sliding_rope=Rope(theta=300.0),
    ),
    "mellum": Model(
        **_COMMON, use_qk_norm=True, sliding_window="5 tokens", rope=_YARN, sliding_rope=Rope(theta=300.0),
        layer_types=("sliding_attention", "sliding_attention", "full_attention"),
        moe=_SOFTMAX.model_copy(update={"first_k_dense_replace": 1}),
    ),
    "mellum_all_slide": Model(
        **_COMMON, use_qk_norm=True, sliding_window="5 tokens", sliding_rope=_YARN, tie_word_embeddings=True,
        moe=_SOFTMAX.model_copy(update={"norm_topk_prob": False}),
    ),
    "gemma3_text": Model(
        **_GEMMA,
        query_pre_attn_scalar=40,
        final_logit_softcapping=20.0,
        sliding_window="5 tokens",
        layer_types=("sliding_attention", "sliding_attention", "full_attention"),
        rope=Rope(theta=1e6, scaling="linear", factor=8),
        sliding_rope=Rope(theta=300.0),
    ),
    "gemma3_text_full": Model(**_GEMMA, rope=_YARN),
    "qwen2_window": Model(**_COMMON, attention_bias=True, sliding_window="5 tokens"),
    "qwen2": Model(**_COMMON, attention_bias=True),
    "llama": Model(**_COMMON, rope=Rope(theta=500_000)),
    "llama_linear": Model(**_COMMON, rope=Rope(scaling="linear", factor=4)),
    "llama_yarn": Model(**_COMMON, rope=_YARN),
    "llama_llama3": Model(**_COMMON, rope=_LLAMA3),
    "llama_ntk": Model(**_COMMON, rope=Rope(scaling="ntk", factor=4, original_max_position_embeddings="16 tokens")),
    "smollm3_window_per_layer": Model(**_COMMON, sliding_window="5 tokens", layer_types=("sliding_attention", "full_attention")),
    "smollm3": Model(**_COMMON, no_rope_layer_interval=4, tie_word_embeddings=True),
    "gpt_oss": Model(
        **_SINKS, attention_bias=True, attention_output_bias=True, sliding_window="5 tokens", moe=_CLAMPED,
        layer_types=("sliding_attention", "full_attention"), rope=_YARN.model_copy(update={"truncate": False}),
    ),
    "gpt_oss_full": Model(**_SINKS, moe=_CLAMPED.model_copy(update={"swiglu_limit": 0.2}), tie_word_embeddings=True),
    "minimax_m2": Model(
        **_MIXTRAL, use_qk_norm=True, qk_norm_over="all_heads", rope=Rope(theta=1e5, partial_rotary_factor=0.5), moe=_SIGMOID,
    ),
    "phi3": Model(**_COMMON | {"head_dim": 16}, rope=Rope(partial_rotary_factor=0.75), tie_word_embeddings=True),
    "phi3_window": Model(**_COMMON | {"head_dim": 16}, rope=Rope(partial_rotary_factor=0.5), sliding_window="5 tokens"),
    "glm4": Model(**_COMMON, norm_position="both", attention_bias=True, rope=Rope(partial_rotary_factor=0.5)),
    "glm4_yarn": Model(**_COMMON, norm_position="both", rope=_YARN),
    "granite": Model(
        **_COMMON | {"head_dim": 16}, multipliers=Multipliers(embedding=12.0, key=0.3, attention_out=0.22, ffn_out=0.22, logits=0.125)
    ),
    "qwen3_next": Model(**_DELTA, moe=_SHARED),
    "qwen3_next_dense": Model(
        **_DELTA, moe=_SHARED.model_copy(update={"first_k_dense_replace": 2, "norm_topk_prob": False, "n_shared_experts": 1}),
        tie_word_embeddings=True,
    ),
    "qwen3_5_text": Model(**_DELTA),
    "qwen3_5_text_tied": Model(**_DELTA, tie_word_embeddings=True, rms_norm_eps=1e-3),
    "qwen3_5_moe_text": Model(**_DELTA | {"intermediate_size": 32}, moe=_SHARED),
    "falcon_h1": Model(**_COMMON, layer_types=("hybrid",), mamba=_MAMBA, multipliers=_FACTORS),
    "falcon_h1_norm": Model(
        **_COMMON, layer_types=("hybrid",), mamba=_MAMBA.model_copy(update={"gate_norm": "after_gate", "norm_groups": 2}),
        tie_word_embeddings=True,
    ),
    "falcon_h1_norm_first": Model(
        **_COMMON, layer_types=("hybrid",), mamba=_MAMBA.model_copy(update={"gate_norm": "before_gate", "norm_groups": 2})
    ),
    "granitemoehybrid": Model(
        **_COMMON | {"head_dim": 16}, layer_types=("linear_attention", "linear_attention", "full_attention"), mamba=_STATES,
        rope=Rope(partial_rotary_factor=0), multipliers=Multipliers(
            embedding=12.0, key=0.3, attention_out=0.22, ffn_out=0.22, mamba_out=0.22, logits=0.125), tie_word_embeddings=True,
    ),
    "granitemoehybrid_experts": Model(
        **_GRANITE | {"intermediate_size": 32}, rope=_YARN, moe=_PLAIN_SHARED,
    ),
    "nemotron_h": Model(**_NEMOTRON),
    "nemotron_h_limit": Model(**_NEMOTRON | {"mamba": _STATES.model_copy(update={"min_time_step": 0.5})}),
    "nemotron_h_experts": Model(**_NEMOTRON | {"layer_types": ("linear_attention", "moe", "full_attention", "mlp")}, moe=_SQUARED),
    "nemotron_h_latent": Model(
        **_NEMOTRON | {"layer_types": ("linear_attention", "moe", "full_attention", "moe"), "mamba": _STATES.model_copy(update={
            "conv_bias": False}), "intermediate_size": 32},
        moe=_SQUARED.model_copy(update={"moe_latent_size": 24, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    ),
    "minimax": Model(
        **_COMMON, layer_types=("linear_attention", "full_attention"), lightning=Lightning(), norm_position="stream",
        moe=_SOFTMAX.model_copy(update={"moe_intermediate_size": 96}),
        multipliers=Multipliers(attention_stream=1.5, lightning_stream=0.75, lightning_out=1.25, ffn_stream=1.5),
    ),
    "lfm2": Model(**_CONV, tie_word_embeddings=True, rope=Rope(theta=1e6)),
    "lfm2_wide": Model(**_CONV | {"short_conv": ShortConv(conv_kernel=5), "layer_types": ("full_attention", "conv", "conv", "conv")}),
    "lfm2_moe": Model(**_CONV, moe=_SIGMOID.model_copy(update={"first_k_dense_replace": 2})),
    "lfm2_moe_scaled": Model(
        **_CONV, moe=_SIGMOID.model_copy(update={"norm_topk_prob": False, "routed_scaling_factor": 2.5}), tie_word_embeddings=True
    ),
    "deepseek_v3_dense": Model(**_LATENT),
    "deepseek_v3_plain_query": Model(**(_LATENT | {"mla": _MLA.model_copy(update={"q_lora_rank": None})}), rope=Rope(theta=500.0)),
    "deepseek_v3_moe": Model(**_LATENT, moe=_MOE),
    "deepseek_v3_moe_groups": Model(**_LATENT, moe=_MOE.model_copy(update={"n_group": 4, "topk_group": 2}), tie_word_embeddings=True),
    "deepseek_v3_eps_1e-5": Model(**_LATENT, moe=_MOE, rms_norm_eps=1e-5),
    "deepseek_v3_eps_1e-3": Model(**_LATENT, rms_norm_eps=1e-3),
    "deepseek_v3_yarn": Model(**_LATENT, rope=_YARN),
    "deepseek_v3_ntk": Model(**_LATENT, rope=Rope(scaling="ntk", factor=4, original_max_position_embeddings="16 tokens")),
}


def ours(config: Model) -> Transformer:
    """Random weights that hide nothing: norms away from 1, biases and selection biases away from 0."""
    generator = torch.Generator().manual_seed(1)
    model = Transformer(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
            if not is_exported(name, family_of(config)):
                tensor.zero_()
    return model


def theirs(model: Transformer) -> Any:
    import transformers

    config = to_config(model.config, model.rope, {"eos_token_id": 0, "pad_token_id": 0})
    kind = getattr(transformers, class_for(model.config))
    return kind(kind.config_class(**config, attn_implementation="eager")).eval()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach() - expected).abs().max() / expected.abs().max())


LEAST = 1e-5


def bound(model: Transformer, tokens: torch.Tensor, peer: Any) -> float:
    """The tolerance of logits: 1e-5, or four times what the model or its peer is off its own fp64 where that is more, as with steep random
    states, which the processor decides too; or two times the same with gradients, where attention on CPUs is computed otherwise."""
    with torch.no_grad():
        exact = for_inference(model, torch.float64, join=False)(tokens)
        off = relative(model(tokens).double(), exact)
        exact_peer = copy.deepcopy(peer).double()
        exact_peer.set_experts_implementation("eager")  # its grouped products have no fp64
        off = max(off, relative(peer(input_ids=tokens).logits.double(), exact_peer(input_ids=tokens).logits))
    return max(LEAST, 4 * off, 2 * relative(model(tokens).detach().double(), exact))


def close(found: torch.Tensor, expected: torch.Tensor, model: Transformer, tokens: torch.Tensor, peer: Any) -> bool:
    """Whether logits are within their tolerance, which is measured only where they are not within the least that it can be."""
    off = relative(found, expected)
    return off < LEAST or off < bound(model, tokens, peer)


def _load(directory: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients(name: str, tmp_path: Any) -> None:
    model = ours(CASES[name])
    write_model(model, tmp_path, {"eos_token_id": 0, "pad_token_id": 0}, torch.float32)
    peer = _load(tmp_path)
    meant = max((family for family in FAMILIES.values() if name.startswith(family.model_type)), key=lambda family: len(family.model_type))
    assert type(peer).__name__ == class_for(model.config) == meant.name
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(2))
    _same_logits_loss_and_gradients(model.eval(), peer, tokens)


def _same_logits_loss_and_gradients(model: Transformer, peer: Any, tokens: torch.Tensor) -> None:
    expected = peer(tokens, labels=tokens)
    expected.loss.backward()
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), 1)
    limit = cache(lambda: bound(model, tokens, peer))  # costs as much as all else, and few models need it
    exact = cache(lambda: _loss_and_gradients(for_inference(model, torch.float64, join=False).requires_grad_(), tokens, labels)[1])
    assert (error := relative(model(tokens), expected.logits)) < LEAST or error < limit()
    loss, gradients = _loss_and_gradients(model, tokens, labels)
    assert (error := relative(loss, expected.loss.detach())) < LEAST or error < limit()
    checked, largest = 0, max(float(parameter.grad.abs().max()) for parameter in peer.parameters())
    for key, parameter in peer.named_parameters():
        found = _named(key, gradients)
        if (own_largest := float(parameter.grad.abs().max())) > 1e-6 * largest:  # a weight of top-1 is always 1: its gradient is rounding
            error = float((found - parameter.grad).abs().max())
            if error >= 10 * LEAST * own_largest + 3e-6 * largest:
                off = float((found - _named(key, exact())).abs().max())  # by how much depends on the processor
                assert error < max(10 * limit() * own_largest + 3e-6 * largest, 4 * off), key  # a number's may be a sum that nearly cancels
        else:
            assert float(found.abs().max()) < 1e-5 * largest, key
        checked += 1
    assert checked == len(list(peer.parameters()))


def _loss_and_gradients(model: Transformer, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean loss, and the gradients by the names of transformers."""
    loss = model.loss(tokens, labels).total / 46
    loss.backward()
    own = {key: p.grad for key, p in model.named_parameters() if not key.startswith("mtp.")}
    stored = dict(stack(dict(to_huggingface(own, model.config)), family_of(model.config)))
    gradients = {_as_in_memory(key): gradient for key, gradient in stored.items()}
    if family_of(model.config).norms_plus_one:  # the weights are moved by 1; their gradients are not
        shifted = [key for key in gradients if key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight")]
        gradients |= {key: gradients[key] + 1 for key in shifted}
    return loss, gradients


def _as_in_memory(key: str) -> str:
    """A name in a file as transformers names the module; only Mixtral's, Granite's, Nemotron-H's and those of LFM2's experts differ."""
    key = key.replace("backbone.", "model.", 1)
    for stored, module in (("input_linear", "experts.gate_up_proj"), ("output_linear", "experts.down_proj"), ("router.layer", "router")):
        key = key.replace(f".block_sparse_moe.{stored}.weight", f".block_sparse_moe.{module}" + ".weight" * (stored == "router.layer"))
    if not any(one in key for one in (".block_sparse_moe.", ".feed_forward.experts.")) or "_proj" in key or ".router." in key:
        return key
    for part, kind in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        key = key.replace(f".{part}.", f".{kind}.")
    return key.replace(".block_sparse_moe.", ".mlp.")


def _named(key: str, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return gradients[key] if key in gradients else _fused(key, gradients)


def _fused(key: str, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """transformers holds an MoE layer's gate and up projections in one tensor in memory, gate first; Nemotron-H has no gate."""
    start, part = key.rsplit(".", 1)
    parts = ("gate", "up", "down") if f"{start}.0.gate_proj.weight" in gradients else ("up", "down")
    stack = {part: torch.stack([gradients[f"{start}.{e}.{part}_proj.weight"] for e in range(EXPERTS)]) for part in parts}
    return torch.cat((stack["gate"], stack["up"]), 1) if part == "gate_up_proj" else stack[part.removesuffix("_proj")]


@torch.no_grad()
def _randomize(peer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in peer.state_dict().items():
        if tensor.is_floating_point() and not key.endswith(("inv_freq", "slope_rate", "_decay")):
            noise = torch.randn(tensor.shape, generator=generator)
            added = 0 if FAMILIES[type(peer).__name__].norms_plus_one else 1
            tensor.copy_(added + 0.3 * noise if "norm" in key else 0.2 * noise)


@pytest.mark.parametrize(  # one configuration of each class is read below
    "name", [pytest.param(name, marks=pytest.mark.slow if name in {one.model_type for one in FAMILIES.values()} else ()) for name in CASES]
)
def test_reads_what_transformers_writes(name: str, tmp_path: Any) -> None:
    model = ours(CASES[name])
    peer = theirs(model)
    _randomize(peer, 3)
    peer.save_pretrained(tmp_path)
    read = read_model(tmp_path)
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        assert close(read(tokens), peer(tokens).logits, read, tokens, peer)


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("_ntk")])
def test_config_round_trip(name: str) -> None:
    config = CASES[name]
    back = from_config(to_config(config, config.rope, {}))
    assert back == config.model_copy(update={"moe": back.moe})
    if config.moe:
        assert back.moe == config.moe


_FAST, _ALL = 1, 40  # random configs of each class: in every run of the tests, and in the slow ones


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
@pytest.mark.parametrize("seeds", [range(_FAST), pytest.param(range(_FAST, _ALL), marks=pytest.mark.slow)], ids=["few", "many"])
def test_random_configs_of_transformers_are_read_and_written(family: Family, seeds: range, tmp_path: Any) -> None:
    for seed in seeds:
        config, peer, read = _random(family, seed, tmp_path / f"{seed}")
        # without token 0, which is the padding here: transformers gives its embedding no gradient
        tokens = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            assert close(read(tokens), peer(tokens).logits, read, tokens, peer), config
        assert from_config(to_config(read.config, read.rope, {})) == read.config, config
        write_model(read, tmp_path / f"{seed}-back", {"eos_token_id": 0, "pad_token_id": 0}, torch.float32)
        _same_logits_loss_and_gradients(read, _load(tmp_path / f"{seed}-back"), tokens)


def _random(family: Family, seed: int, folder: Path) -> tuple[Any, Any, Transformer]:
    """A random config, a model of `transformers` with it, and what is read of the folder that it has written."""
    import transformers

    config = random_config(family, seed)
    peer = getattr(transformers, family.name)(config).eval()
    _randomize(peer, seed)
    peer.save_pretrained(folder)
    return config, peer, read_model(folder)


WITH_STATES = (
    "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM", "MiniMaxForCausalLM", "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in WITH_STATES else pytest.mark.slow) for name in FAMILIES]
)
def test_what_transformers_writes_is_read_by_ranks_that_hold_parts_of_each_layer(name: str, tmp_path: Path, ranks: RankPool) -> None:
    """Two of `tp`, for the first random configuration whose sizes they divide."""
    for seed in range(_ALL):
        _, peer, read = _random(FAMILIES[name], seed, tmp_path / f"{seed}")
        if not tp_problems(read.config, 2):
            break
    tokens = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = peer(tokens).logits
    for logits in ranks.run(_logits_of_two, 2, read.config, tmp_path / f"{seed}", tokens.tolist()):
        assert close(torch.tensor(logits), expected, read, tokens, peer)


def _logits_of_two(config: Model, folder: Path, tokens: list[list[int]]) -> list[Any]:
    ranks = Ranks(Layout(tp=2))
    (part,) = build(recipe_of("dense").model_copy(update={"model": config}), ranks, torch.device("cpu"))
    load_weights(folder, dict(part.state_dict()), config)
    with torch.no_grad():
        hidden, _ = part.eval().hidden(torch.tensor(tokens))
        found: list[Any] = part.logits(hidden).tolist()
    return found


def test_a_new_family_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.recipe import families
    from lmworks.recipe.families import registry

    (tmp_path / "wide_norm.py").write_text(
        "from dataclasses import replace\n\nfrom lmworks.recipe.families import llama\n\n"
        "FAMILY = replace(\n"
        "    llama.FAMILY, name='WideForCausalLM', model_type='wide', about='both', requires=frozenset({'biases', 'QK norm'})\n)\n"
    )
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    found = registry._found()
    assert found.keys() == FAMILIES.keys() | {"WideForCausalLM"}
    monkeypatch.setattr(registry, "FAMILIES", found)
    config = to_config(Model(**_COMMON, use_qk_norm=True, attention_bias=True), Rope(), {})
    assert config["model_type"] == "wide" and from_config(config).attention_bias and "`WideForCausalLM`" in table()


def test_the_table_of_the_docs_is_the_registrys() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert table() in page, "run: python -m lmworks.recipe.families.registry, and put it into docs/serving.md"


def test_every_file_of_the_package_is_a_family_or_says_what_it_is() -> None:
    from lmworks.recipe import families

    folder = Path(families.__path__[0])
    others = {"__init__", "common", "family", "gated_delta", "keys", "mamba2", "registry", "rope"}
    files = {path.stem for path in folder.glob("*.py")} - others
    assert {family.model_type for family in FAMILIES.values()} == files
    assert {class_for(config) for config in CASES.values()} == {family.written_as or family.name for family in FAMILIES.values()}


def test_granite_with_attention_alone_is_read(tmp_path: Path) -> None:
    """Granite-4.0-Micro, 1B and 350M: the class of the hybrids, without Mamba-2; written as the plain class of Granite."""
    config = random_config(FAMILIES["GraniteMoeHybridForCausalLM"], 1)
    for positions, written in (("rope", "GraniteForCausalLM"), ("nope", None)):
        values = config.to_dict() | {"layer_types": ["attention"] * config.num_hidden_layers, "num_local_experts": 0}
        peer = _of_class("GraniteMoeHybridForCausalLM", values | {"position_embedding_type": positions, "residual_multiplier": 0.5})
        peer.save_pretrained(tmp_path / positions)
        read, tokens = read_model(tmp_path / positions), torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            assert close(read(tokens), peer(tokens).logits, read, tokens, peer)
        if written:
            assert class_for(read.config) == written
        else:
            with pytest.raises(UserError, match="no Hugging Face class expresses this model: it has no RoPE at all"):
                class_for(read.config)


def _of_class(name: str, values: dict[str, Any]) -> Any:
    """A random model of `transformers`."""
    import transformers

    kind = getattr(transformers, name)
    peer = kind(kind.config_class(**values | {"architectures": [name]}, attn_implementation="eager")).eval()
    _randomize(peer, 1)
    return peer


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
    with pytest.raises(UserError, match='hidden_act "gelu"; lmworks supports "silu" or "swish"'):
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
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is on"),
        ({"rope": Rope(partial_rotary_factor=0)}, "no RoPE at all"),
        ({"rope": Rope(partial_rotary_factor=0.5)}, "heads x head_dim is 96 .*, unlike the nearest class, Phi3ForCausalLM"),
        ({"use_qk_norm": True, "attention_bias": True}, "normalized per head .*, unlike the nearest class, Qwen2ForCausalLM"),
        ({"no_rope_layer_interval": 2, "use_qk_norm": True}, "layers without positions"),
        (
            _LATENT | {"mla": _MLA.model_copy(update={"rms_norm_eps": 1e-5})},
            r"its latents are normalized with 1e-05 instead of 1e-06 \(mla.rms_norm_eps\), unlike the nearest class, DeepseekV3",
        ),
        (_LATENT | {"moe": _MOE.model_copy(update={"n_shared_experts": 0})}, "no shared expert"),
        ({"moe": _MOE.model_copy(update={"scoring_func": "softmax"})}, "gates are softmax"),
        ({"moe": _MOE.model_copy(update={"n_shared_experts": 0})}, "no shared expert"),
        ({"use_qk_norm": True, "moe": _SOFTMAX.model_copy(update={"balance": Balance()})}, "a bias selects its experts"),
        ({"moe": _SOFTMAX.model_copy(update={"norm_topk_prob": False})}, "its chosen experts are not normalized .*nearest class, Mixtral"),
        ({"moe": _SOFTMAX.model_copy(update={"first_k_dense_replace": 2})}, "first layers are dense .* 2.*nearest class, Mixtral"),
        (_OLMOE | {"moe": _SOFTMAX.model_copy(update={"first_k_dense_replace": 1})}, "first layers are dense .* 1.*nearest class, Olmoe"),
        (_POST | {"head_dim": 24}, "heads x head_dim is 96 and not hidden_size 64"),
        (_HYBRID | {"layer_types": ("hybrid", "full_attention")}, "only some of its layers have Mamba-2"),
        (_HYBRID | {"mamba": _MAMBA.model_copy(update={"gate_norm": "after_gate"})}, "gated norm has 1 groups and not those of B and C, 2"),
        (_HYBRID | {"multipliers": Multipliers(ffn_stream=0.5)}, r"a factor that Falcon-H1 has not \(multipliers.ffn_stream\)"),
        (_LIGHTNING | {"multipliers": Multipliers(embedding=2.0)}, r"a factor that MiniMax-01 has not \(multipliers.embedding\)"),
        (_LIGHTNING | {"lightning": Lightning(rms_norm_eps=1e-5)}, "lightning attention has another eps"),
        (_LIGHTNING | {"moe": _SOFTMAX}, "moe_intermediate_size is not intermediate_size"),
        (_SINKS | {"moe": _CLAMPED, "attention_bias": True}, "only some projections of its attention have biases"),
        (_SINKS | {"moe": _CLAMPED.model_copy(update={"norm_topk_prob": False})}, "its chosen experts are not normalized .*GptOss"),
        (_SINKS | {"moe": _CLAMPED.model_copy(update={"first_k_dense_replace": 1})}, "first layers are dense .*GptOss"),
        (_ALL_HEADS | {"moe": _SIGMOID.model_copy(update={"norm_topk_prob": False})}, "chosen experts are not normalized .*MiniMaxM2"),
        (_ALL_HEADS | {"moe": _SIGMOID.model_copy(update={"first_k_dense_replace": 1})}, "first layers are dense .*MiniMaxM2"),
        (_SINKS | {"moe": _SOFTMAX}, "it has attention sinks .*, unlike the nearest class, Mixtral"),
        ({"attention_sinks": True}, "it has attention sinks"),
        ({"attention_output_bias": True}, "the output of its attention has a bias"),
        (_GRANITE | {"multipliers": Multipliers(gate=2.0)}, r"a factor that Granite has not \(multipliers.gate\)"),
        (_GRANITE | {"multipliers": Multipliers(attention_out=2.0)}, "its blocks have different factors on what they add"),
        (_GRANITE | {"mamba": _MAMBA}, "the inner width of Mamba-2 .* is no multiple of hidden_size 64"),
        (_GRANITE | {"mamba": _STATES.model_copy(update={"gate_norm": "before_gate"})}, "no norm on the product with the gate"),
        (_GRANITE | {"mamba": _STATES.model_copy(update={"norm_groups": 1})}, "gated norm has 1 groups and not those of B and C, 2"),
        (_GRANITE | {"head_dim": 24}, "heads x head_dim is 96 .*nearest class, GraniteMoeHybrid"),
        (_GRANITE | {"moe": _SOFTMAX}, "it has experts and no shared one"),
        (_GRANITE | {"moe": _PLAIN_SHARED.model_copy(update={"scoring_func": "sigmoid"})}, "its gates are sigmoid"),
        (_GRANITE | {"moe": _PLAIN_SHARED.model_copy(update={"norm_topk_prob": False})}, "experts are not normalized .*GraniteMoeHybrid"),
        (_GRANITE | {"moe": _PLAIN_SHARED.model_copy(update={"first_k_dense_replace": 1})}, "first layers are dense .*GraniteMoeHybrid"),
        (_LIGHTNING | {"norm_position": "pre"}, "its norms are not on the residual stream"),
        ({"norm_position": "post"}, "queries and keys are not normalized over all heads .*, unlike the nearest class, Olmo2"),
    ],
)
def test_models_without_a_class_are_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=f"no Hugging Face class expresses this model: .*{reason}"):
        class_for(Model(**(_COMMON | change)))


def test_foreign_weights_are_refused(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    write_model(ours(CASES["llama"]), tmp_path, {}, torch.float32)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    first = min(tensors)
    for change, reason in (
        ({name: tensor for name, tensor in tensors.items() if name != first}, f"has no tensor {first}"),
        (tensors | {"model.layers.0.mlp.c_fc.weight": torch.zeros(1)}, "has no counterpart"),
        (tensors | {"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}, "does not belong to this model"),
        (tensors | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"][:-1]}, "has shape"),
    ):
        save_file({name: tensor.contiguous() for name, tensor in change.items()}, file)
        with pytest.raises(UserError, match=reason):
            read_model(tmp_path)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3_moe", "minimax_m2", "nemotron_h_experts", "lfm2_moe"])
def test_a_selection_bias_is_not_rounded(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = ours(CASES[name])
    write_model(model, tmp_path, {}, torch.bfloat16)
    found, family = load_file(tmp_path / "model.safetensors"), family_of(model.config)
    biases = {key: value for key, value in model.state_dict().items() if key.endswith("router.bias")}
    assert biases
    for key, value in biases.items():
        assert torch.equal(found[huggingface_name(key, model.config, family)], value)


def test_a_selection_bias_is_not_left_behind() -> None:
    """Qwen3-MoE has no such tensor. A bias of zero, as after training without it, changes nothing; any other would select other experts."""
    model = ours(CASES["qwen3_moe"])
    state = dict(model.state_dict())
    assert not [name for name, _ in to_huggingface(state, model.config) if "bias" in name]
    state["layers.2.ffn.router.bias"] = torch.full((8,), 0.1)
    with pytest.raises(UserError, match=r"layers.2.ffn.router.bias is not zero, and Qwen3MoeForCausalLM has no such tensor"):
        list(to_huggingface(state, model.config))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("falcon_h1", {"mamba_n_heads": 5}, "mamba_n_heads 5 and mamba_d_head 8, whose product is not the inner width 48"),
        ("falcon_h1", {"time_step_limit": [0.1, 2.0]}, r"time_step_limit \[0.1, 2.0\]; lmworks supports time steps without limits"),
        ("falcon_h1", {"mamba_proj_bias": True}, "mamba_proj_bias true; lmworks supports false"),
        ("granitemoehybrid", {"mamba_n_heads": 5}, "mamba_n_heads 5 and mamba_d_head 16, whose product is not the inner width 128"),
        ("granitemoehybrid", {"layer_types": ["attention", "moe"] * 2}, "layer_types that are not 4 of full_attention and linear_"),
        ("granitemoehybrid", {"time_step_limit": [0.1, 2.0]}, "time steps without limits"),
        ("granitemoehybrid_experts", {"shared_intermediate_size": 40}, "40, which must be a multiple of intermediate_size 32"),
        ("lfm2", {"layer_types": ["conv", "mamba"] * 2}, "layer_types that are not 4 of full_attention and conv"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": None}, "no layer of conv"),
        ("lfm2", {"conv_bias": True}, "conv_bias true; lmworks supports false"),
        ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 0}, "block_multiple_of 0, which must be positive"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias false; lmworks supports true"),
        ("minimax", {"layer_types": ["linear_attention"]}, "layer_types that are not 4 of full_attention and linear_attention"),
        ("minimax", {"layer_types": ["full_attention"] * 4}, "no layer of linear_attention"),
        ("minimax", {"sliding_window": 5}, "sliding_window 5; lmworks supports no value"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias false; lmworks supports true"),
        ("minimax_m2", {"rotary_dim": 6}, "rope_parameters.partial_rotary_factor 0.5 and partial_rotary_factor 0.25, which differ"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, 'qk_norm_type "per_head"; lmworks supports "per_layer"'),
        (
            "deepseek_v3_moe",
            {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "head_dim": 8,
             "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
            "mlp_layer_types .* which are not 4, first dense and then sparse",
        ),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2; lmworks has experts in every layer after the first dense ones"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]; in lmworks only the first layers can be dense"),
        ("qwen3_moe", {"num_experts": None}, "num_experts null, which must be an integer"),
        ("qwen3_moe", {"num_experts": "many"}, 'num_experts "many", which must be an integer'),
        ("qwen3_moe", {"num_local_experts": 4}, "num_experts 8 and num_local_experts 4, two names of the same; keep one"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers 3, which must be a list"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size 64; lmworks supports 0"),
        ("mellum", {"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types .* which are not 4, first dense and then sparse"),
        ("mellum", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types .* which are not 4, first dense and then sparse"),
        ("mellum", {"sliding_window": None}, "layer_types with sliding_attention, but no window"),
        ("mellum", {"layer_types": ["sliding_attention"]}, "layer_types that are not 4 of sliding_attention and full_attention"),
        ("mellum", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}, "within full_attention and sliding_attention"),
        ("mellum", {"rope_theta": 300.0}, "rope_theta 300.0; lmworks supports no value"),
        ("mellum", {"num_experts": 8, "num_local_experts": 4}, "num_experts 8 and num_local_experts 4, two names of the same; keep one"),
        ("mellum", {"decoder_sparse_step": 2}, "decoder_sparse_step 2, a key that this class does not have in transformers"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0; lmworks supports no value"),
        ("qwen3_window", {"use_sliding_window": False}, "layer_types with sliding_attention, but no window"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}, "no_rope_layers that are not every n-th layer"),
        ("deepseek_v3_moe", {"scoring_func": "softmax"}, 'scoring_func "softmax"; lmworks supports "sigmoid"'),
        ("deepseek_v3_moe", {"head_dim": 12}, "head_dim 12, but its other keys say 8"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types .*, a key that this class does not have in transformers"),
        ("llama", {"mlp_bias": True}, "mlp_bias true; lmworks supports false"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps NaN, which must be a number"),
        ("llama", {"tie_word_embeddings": "false"}, 'tie_word_embeddings "false", which must be true or false'),
        ("llama", {"rope_theta": 300.0}, "rope_parameters.rope_theta 500000.0 and rope_theta 300.0, which differ; keep one"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling and rope_parameters, two names of the same"),
        ("llama", {"model_type": "mistral"}, 'of class LlamaForCausalLM, but of model_type "mistral"; that of the class is llama'),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "with an object full_attention; lmworks supports one"),
        ("llama_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}}, "scales cos and sin by 1; lm"),
        (
            "llama_yarn",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
            "mscale 1.0, which",
        ),
        ("llama_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": 0}}, "truncate 0, which must be true or false"),
        ("llama", {"attention_bias": True}, "attention_bias, which in LlamaForCausalLM includes an output bias"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type longrope; lmworks supports default, linear, llama3, yarn"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
            "has no rope_parameters.low_freq_factor, which its rope_type needs",
        ),
        ("olmo2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5, but Olmo2ForCausalLM has no such"),
        ("llama", {"architectures": ["GemmaForCausalLM"]}, "is of class GemmaForCausalLM; lmworks supports DeepseekV3ForCausalLM, "),
        ("gemma3_text", {"architectures": ["Gemma4ForCausalLM"]}, r"a norm on values, .*lmworks has none of these.*nearest .*Gemma3"),
        ("nemotron_h", {"hybrid_override_pattern": "MM*-"}, "hybrid_override_pattern and layers_block_type, and they differ"),
        ("nemotron_h", {"hybrid_override_pattern": "M-*?", "layers_block_type": None}, "layer_types that are not 4 of .* and mlp and moe"),
        ("nemotron_h", {"num_hidden_layers": 5}, "layer_types that are not 5 of "),
        ("nemotron_h", {"hybrid_override_pattern": "M*M*", "layers_block_type": None}, "no layer of mlp or moe"),
        ("nemotron_h", {"time_step_limit": [0.1, 2.0]}, r"time_step_limit \[0.1, 2.0\]; lmworks supports"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings true; lmworks supports false"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, 'mlp_hidden_act "silu"; lmworks supports "relu2"'),
        ("nemotron_h_experts", {"moe_shared_expert_intermediate_size": 40}, "40 must be a multiple of moe_intermediate_size 32"),
        ("llama", {"architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2"},
         r"whose weights many layers share.*a projection for each use; .*The nearest class is NemotronHForCausalLM"),
        ("llama", {"architectures": [], "model_type": "zamba2"}, "of class Zamba2ForCausalLM, which has attention and feed-forward blocks"),
        ("llama", {"architectures": None, "model_type": "gemma"}, r"is of class unknown \(model_type gemma\); lmworks supports"),
    ],
)
def test_what_a_config_has_and_we_have_not_is_refused(name: str, change: dict[str, Any], reason: str) -> None:
    config = to_config(CASES[name], CASES[name].rope, {}) | change
    with pytest.raises(UserError, match=reason) as error:
        from_config(config)
    assert "\n" not in str(error.value)
