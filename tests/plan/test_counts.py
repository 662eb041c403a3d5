"""Counts from the config equal the built model, tensor by tensor."""

from __future__ import annotations

import pytest
import torch
import yaml

from lmworks.model.lora import attach
from lmworks.model.transformer import Transformer
from lmworks.plan.counts import count_adapters, count_by_component
from lmworks.recipe.load import load_recipe, shipped, shipped_folder
from lmworks.recipe.parameters import count_parameters as total
from lmworks.recipe.parameters import parameters
from lmworks.recipe.schema.model import Lora, Model, Moe, is_adapter
from small_config import small_config

SMALL = small_config(vocab_size=96, num_hidden_layers=3)
LATENT = {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
VARIANTS = [
    Model.model_validate(SMALL),
    Model.model_validate({**SMALL, "attention_bias": True, "use_qk_norm": True}),
    Model.model_validate({**SMALL, "use_qk_norm": True, "qk_norm_over": "all_heads", "norm_position": "post"}),
    Model.model_validate({**SMALL, "use_qk_norm": True, "norm_position": "both", "hidden_act": "gelu_tanh", "scale_embeddings": True}),
    Model.model_validate({**SMALL, "tie_word_embeddings": True, "no_rope_layer_interval": 2, "head_dim": 16}),
    Model.model_validate(
        {**SMALL, "moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "first_k_dense_replace": 1}}
    ),
    Model.model_validate(
        {
            **SMALL,
            "moe": {
                "n_routed_experts": 6,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 8,
                "first_k_dense_replace": 0,
                "n_shared_experts": 2,
            },
        }
    ),
    Model.model_validate(
        {
            **SMALL,
            "moe": {
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 12,
                "first_k_dense_replace": 2,
                "n_shared_experts": 0,
            },
        }
    ),
    Model.model_validate(
        {
            **SMALL,
            "moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "first_k_dense_replace": 2},
            "mtp": {"num_nextn_predict_layers": 2},
        }
    ),
    Model.model_validate({
        **SMALL, "num_hidden_layers": 5, "hidden_act": "relu2", "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba": {"num_heads": 2, "head_dim": 16}, "moe": {"n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 12, "first_k_dense_replace": 0, "moe_latent_size": 10},
    }),
    Model.model_validate({**SMALL, "num_key_value_heads": 4, "head_dim": 12, "mla": {"q_lora_rank": 10, **LATENT}, "mtp": {}}),
    Model.model_validate({**SMALL, "num_key_value_heads": 4, "head_dim": 12, "mla": LATENT}),
]


def built(model: Model) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Transformer(model).named_parameters()}


@pytest.mark.parametrize("model", VARIANTS)
def test_every_tensor_has_its_name_and_shape(model: Model) -> None:
    assert {parameter.name: parameter.shape for parameter in parameters(model)} == built(model)
    assert total(model) == count_by_component(model).total


@pytest.mark.parametrize("targets", [("all-linear",), ("attention",), ("mlp",), ("output", "layers.1.ffn.down"), ("experts", "mlp")])
@pytest.mark.parametrize("model", VARIANTS)
def test_adapters_are_counted_as_they_are_built(model: Model, targets: tuple[str, ...]) -> None:
    if "experts" in targets and not model.moe:
        targets = ("mlp",)
    elif any("layers.1" in target for target in targets) and model.moe and model.moe.first_k_dense_replace < 2:
        targets = ("output", "layers.1.ffn.shared.down")
    lora = Lora(rank=3, targets=targets)
    with torch.device("meta"):
        adapted = Transformer(model)
        attach(adapted, lora)
    assert count_adapters(model, lora) == sum(value.numel() for name, value in adapted.named_parameters() if is_adapter(name)) > 0


@pytest.mark.parametrize("name", [name for name in shipped() if name != "glm46-355b-a32b"])
def test_shipped_models_are_built_as_counted(name: str) -> None:
    model = load_recipe(name).recipe.model
    assert {parameter.name: parameter.shape for parameter in parameters(model)} == built(model)


def test_active_parameters_by_hand() -> None:
    moe = Moe(n_routed_experts=4, num_experts_per_tok=1, moe_intermediate_size=10, n_shared_experts=1, first_k_dense_replace=1)
    model = Model(
        **small_config(vocab_size=100, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=16),
        moe=moe,
    )
    attention = 8 * 8 + 2 * 4 * 8 + 8 * 8
    norms = 2 * 2 * 8 + 8
    expert = 3 * 8 * 10
    counts = count_by_component(model)
    assert counts.total == 2 * 100 * 8 + 2 * attention + norms + 3 * 8 * 16 + 4 * 8 + 4 * expert + expert
    assert counts.active == counts.total - 3 * expert
    assert counts.active_computed == counts.active - 100 * 8
    tied = count_by_component(model.model_copy(update={"tie_word_embeddings": True}))
    assert tied.total == counts.total - 800
    assert tied.active_computed == counts.active_computed


def test_multi_token_prediction_is_counted_apart() -> None:
    """GLM-4.5-Air and GLM-4.6 with their layer hold what is published: 109.2B and 356.8B (110.5B where copies are stored too)."""
    air = load_recipe("glm45-air-106b-a12b").recipe.model
    counts, without = count_by_component(air), count_by_component(air.model_copy(update={"mtp": None}))
    assert (counts.total, counts.active, counts.components) == (without.total, without.active, without.components)
    expert = 3 * 4096 * 1408
    layer = 128 * expert + expert + 128 * 4096 + 2 * 4096  # with its shared expert, router and norms
    attention = 2 * 4096 * 96 * 128 + 2 * 4096 * 8 * 128 + 96 * 128 + 2 * 8 * 128
    assert counts.mtp == layer + attention + 2 * 4096 * 4096 + 3 * 4096
    assert counts.mtp_active == counts.mtp - 120 * expert
    assert round(counts.trained / 1e9, 1) == 109.2


PUBLISHED = {  # millions of parameters in total, by source
    # model cards (Llama, SmolLM2, Qwen3, Qwen3-Next, GLM-4.7-Flash, MiniMax-M2), and the number of values in their files where cards round
    "llama3.1-8b": 8_030, "llama3.1-70b": 70_554, "llama3.2-1b": 1_236, "llama3.2-3b": 3_213,
    "smollm2-135m": 134.5, "smollm2-360m": 362, "smollm2-1.7b": 1_710, "smollm3-3b": 3_080,
    "qwen3-0.6b": 440 + 155.6, "qwen3-1.7b": 1_410 + 311.2, "qwen3-4b": 3_630 + 389, "qwen3-14b": 14_800, "qwen3-32b": 32_800,
    "qwen3-30b-a3b": 30_500, "qwen3-235b-a22b": 235_000, "qwen3-next-80b-a3b": 80_000,
    "glm47-flash-30b-a3b": 30_000, "minimax-m2-230b-a10b": 230_000,
    # embedding and other parameters of Table 1 of the Gemma 3 Technical Report (arXiv:2503.19786), without the vision encoder
    "gemma3-1b": 302 + 698, "gemma3-12b": 1012 + 10_759, "gemma3-27b": 1416 + 25_600,
    "gpt-oss-20b": 20_910, "gpt-oss-120b": 116_830,  # Table 1 of arXiv:2508.10925
    "moonlight-16b-a3b": 15_290 + 2 * 335.5,  # Table 4 of arXiv:2502.16982, without embeddings
    "kimi-k2-1t-a32b": 1_040_000,  # Table 2 of arXiv:2507.20534
    "deepseek-v3-671b-a37b": 671_000,  # arXiv:2412.19437, section 4.2
    "falcon-h1-0.5b": 521.4, "falcon-h1-1.5b-deep": 1_550, "falcon-h1-7b": 7_590, "falcon-h1-34b": 33_600,  # arXiv:2507.22448, table 1
    "granite-4.0-h-small-32b-a9b": 32_000,  # the model card of Granite-4.0-H-Small
    "mellum2-12b-a2.5b": 12_149.9,  # of MellumForCausalLM of transformers
    "lfm2-1.2b": 1_170.3, "lfm2-8b-a1b": 8_340,  # of LFM2-1.2B and LFM2-8B-A1B
    "nemotron-nano-9b-v2": 8_888.2,  # the number of values in the files of NVIDIA-Nemotron-Nano-9B-v2
    "nemotron-3-nano-30b-a3b": 31_600,  # the model card of NVIDIA-Nemotron-3-Nano-30B-A3B
    "minimax-01-456b-a46b": 456_000,  # arXiv:2501.08313, section 1
}  # fmt: skip
OWN = ("dense-", "glm-", "glm45-", "glm46-", "lfm2-nano", "mellum-nano")  # shapes of this project, and GLM's, which the tests above count


def test_every_preset_of_a_published_model_is_counted() -> None:
    assert {name for name in shipped("models") if not name.startswith(OWN)} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_counts(name: str) -> None:
    model = Model.model_validate(yaml.safe_load((shipped_folder() / "models" / f"{name}.yaml").read_text(encoding="utf-8")))
    # The card of Kimi K2 rounds 1.026 trillion, the number of values in its files, to 1.04.
    assert total(model) == pytest.approx(PUBLISHED[name] * 1e6, rel=0.015 if name.startswith("kimi") else 0.01)


@pytest.mark.parametrize(
    ("name", "billions", "left_out"),
    # Within 1%, or 2% where the card cuts digits off (3.35 is 3.3, and 37.55 is 37), and 3% where it rounds up (2.44 is 2.5).
    # With the head (gpt-oss: Table 1 of arXiv:2508.10925), with both ends (Kimi K2: Table 2 of arXiv:2507.20534; Qwen3: its cards;
    # DeepSeek-V3), and with neither
    [("gpt-oss-20b", 3.61, 1), ("gpt-oss-120b", 5.13, 1), ("kimi-k2-1t-a32b", 32.6, 0), ("moonlight-16b-a3b", 2.24, 2),
     ("nemotron-3-nano-30b-a3b", 3.6, 0), ("nemotron-3-nano-30b-a3b", 3.2, 1),
     ("mellum2-12b-a2.5b", 2.5, 0), ("qwen3-30b-a3b", 3.3, 0), ("qwen3-235b-a22b", 22, 0), ("deepseek-v3-671b-a37b", 37, 0)],
)
def test_presets_have_the_published_active_parameters(name: str, billions: float, left_out: int) -> None:
    counts = count_by_component(Model.model_validate(yaml.safe_load((shipped_folder() / "models" / f"{name}.yaml").read_text())))
    within = {3.3: 0.02, 37: 0.02, 2.5: 0.03}.get(billions, 0.01)
    assert counts.active - left_out * counts.embedding == pytest.approx(billions * 1e9, rel=within)
