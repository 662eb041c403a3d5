"""Random small configs of a class of `transformers`, in which everything that the class may vary does.

What to vary follows from the keys that the class has and from what its family declares, so that a new family of known keys needs nothing
here.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from lmworks.recipe.families.family import Family

EXPERTS = 8


def random_config(family: Family, seed: int) -> Any:
    """A config of the family's class; the same for the same seed."""
    import transformers

    draw = random.Random(f"{family.name}/{seed}")
    kind = getattr(transformers, family.name).config_class
    keys = {field.name for field in dataclasses.fields(kind)}
    layers, kv_heads, rotated = draw.choice([2, 3, 5]), draw.choice([1, 2, 3]), 2 * draw.randint(1, 4)
    heads = kv_heads * draw.choice([1, 2])
    ropes: list[dict[str, Any]] = [
        {"rope_type": "default"}, {"rope_type": "linear", "factor": draw.choice([2.0, 4.0])},
        {"rope_type": "yarn", "factor": draw.choice([2.0, 8.0]), "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "factor": draw.choice([2.0, 8.0]), "original_max_position_embeddings": 16,
         "low_freq_factor": draw.choice([0.5, 1.0]), "high_freq_factor": draw.choice([2.0, 4.0])},
    ]  # fmt: skip
    ropes = [one for one in ropes if one["rope_type"] in (family.rope_types or (one["rope_type"],))]
    rope = draw.choice(ropes) | {"rope_theta": draw.choice([500.0, 1e4, 1e6])}
    head_dim = 8 * draw.randint(1, 3) if family.has("partial RoPE") else 4 * draw.randint(1, 6)
    values: dict[str, Any] = {
        "vocab_size": draw.choice([96, 256]), "hidden_size": 24 * draw.randint(1, 3),
        "intermediate_size": 8 * draw.randint(2, 9), "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "rms_norm_eps": 10.0 ** -draw.randint(3, 7), "tie_word_embeddings": draw.random() < 0.5,
        "max_position_embeddings": 64, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0,
    }  # fmt: skip
    if "intermediate_size" in family.omits:
        del values["intermediate_size"]
    if "head_dim" not in family.omits:
        values["head_dim"] = head_dim
    if "biases" in family.allows:
        values["attention_bias"] = draw.random() < 0.5
    if "use_qk_norm" in keys:
        values["use_qk_norm"] = draw.random() < 0.5
    if "sliding_window" in keys:
        slides = draw.random() < 0.7
        window = {"use_sliding_window": slides, "sliding_window": draw.randint(2, 12) if slides else None,
                  "max_window_layers": draw.randint(0, layers)}  # fmt: skip
        values |= {key: value for key, value in window.items() if key in keys}
        if slides and "layer_types" in keys and draw.random() < 0.6:
            values["layer_types"] = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    if "layer_types" in keys and "use_sliding_window" not in keys and "sliding_window" in keys and not slides:
        values |= {"layer_types": ["full_attention"] * layers, "sliding_window": 4}  # transformers makes the mask in any case
    if "swiglu_limit" in keys:
        values |= {"swiglu_alpha": draw.choice([0.5, 1.702]), "swiglu_limit": draw.choice([0.2, 7.0])}
        ropes[2]["truncate"] = draw.random() < 0.5
        rope |= {"truncate": ropes[2]["truncate"]} if rope["rope_type"] == "yarn" else {}
    if "query_pre_attn_scalar" in keys:
        values |= {"query_pre_attn_scalar": draw.choice([head_dim, 5]), "final_logit_softcapping": draw.choice([None, 3.0])}
    if "no_rope_layer_interval" in keys:
        values["no_rope_layer_interval"] = draw.randint(2, 4)
    if "num_experts_per_tok" in keys:
        groups = draw.choice([1, 2, 4])
        experts = {
            "n_routed_experts": EXPERTS, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": draw.randint(1, 2),
            "moe_intermediate_size": 8 * draw.randint(1, 4), "n_shared_experts": draw.randint(1, 2), "n_group": groups,
            "topk_group": draw.randint(1, groups), "norm_topk_prob": draw.random() < 0.5, "routed_scaling_factor": draw.choice([1.0, 2.5]),
            "first_k_dense_replace": draw.randint(0, layers), "mlp_only_layers": list(range(draw.randint(0, layers - 1))),
        }  # fmt: skip
        values |= {key: value for key, value in experts.items() if key in keys}
    if "mlp_layer_types" in keys:
        dense = draw.randint(0, layers)
        values["mlp_layer_types"] = draw.choice([None, ["dense"] * dense + ["sparse"] * (layers - dense)])
    factors = [0.5, 0.75, 1.0, 1.5]
    values |= {key: draw.choice(factors) for key in sorted(keys) if key.endswith(("_multiplier", "_alpha_factor", "_beta_factor"))}
    if "logits_scaling" in keys:
        values["logits_scaling"] = draw.choice([0.5, 3.0, 8.0])
    if "mamba_n_heads" in keys:
        groups = draw.choice([1, 2])
        inner = groups * draw.choice([1, 3])
        mamba = {
            "mamba_n_heads": inner, "mamba_d_head": 4, "mamba_d_ssm": 4 * inner, "mamba_n_groups": groups,
            "mamba_d_state": draw.choice([4, 12]), "mamba_d_conv": draw.choice([2, 4]), "mamba_conv_bias": draw.random() < 0.5,
            "mamba_rms_norm": draw.random() < 0.5, "mamba_norm_before_gate": draw.random() < 0.5, "mamba_chunk_size": draw.choice([8, 32]),
            "mlp_multipliers": [draw.choice(factors) for _ in range(2)], "ssm_multipliers": [draw.choice(factors) for _ in range(5)],
        }  # fmt: skip
        values |= {key: value for key, value in mamba.items() if key in keys}
    if "shared_intermediate_size" in keys:
        values |= {
            "mamba_d_head": "auto", "mamba_expand": draw.choice([1, 2]), "layer_types": [
                *draw.sample(["linear_attention", "full_attention"] * layers, layers - 2), *draw.sample(["mamba", "attention"], 2)],
            "num_local_experts": draw.choice([0, EXPERTS]), "position_embedding_type": draw.choice([None, "nope", "rope"]),
            "shared_intermediate_size": draw.randint(1, 2) * values["intermediate_size"],
        }  # fmt: skip
    if "layers of one block" in family.requires:
        feeds = draw.choice([["mlp"], ["moe"], ["mlp", "moe"]])
        kinds = ["linear_attention", "full_attention", *feeds, *draw.choices(["linear_attention", *feeds], k=layers - 2)]
        groups = draw.choice([1, 2])
        values |= {
            "layers_block_type": draw.sample(kinds, len(kinds)), "layer_norm_epsilon": values.pop("rms_norm_eps"),
            "mamba_num_heads": groups * draw.choice([1, 3]), "mamba_head_dim": 4, "n_groups": groups,
            "ssm_state_size": draw.choice([4, 12]), "conv_kernel": draw.choice([2, 4]), "use_conv_bias": draw.random() < 0.5,
            "chunk_size": draw.choice([8, 32]), "moe_latent_size": draw.choice([None, 8]),
            "time_step_min": draw.choice([1e-30, 0.001, 0.5]),
            "moe_shared_expert_intermediate_size": draw.randint(1, 2) * values["moe_intermediate_size"], "n_shared_experts": 1,
            "tie_word_embeddings": False,
            "sliding_window": None,
        }  # fmt: skip
        values.pop("num_hidden_layers")
    if "conv_L_cache" in keys:
        values |= {
            "norm_eps": values.pop("rms_norm_eps"), "conv_L_cache": draw.choice([2, 3, 5]), "layer_types": draw.sample(
                [*draw.choices(["conv", "full_attention"], k=layers - 2), "conv", "full_attention"], layers),
            "num_dense_layers": draw.randint(0, layers - 1), "block_auto_adjust_ff_dim": draw.random() < 0.5, "block_multiple_of": 8,
        }  # fmt: skip
        values = {key: value for key, value in values.items() if key in keys or key.endswith("_id")}
    if "linear_num_key_heads" in keys:
        groups, width = draw.choice([1, 2, 3]), 4 * draw.randint(1, 4)
        if usual := draw.random() < 0.5:  # what llama.cpp has too
            values |= {"rms_norm_eps": 1e-6} | {key: one for key, one in (("norm_topk_prob", True), ("mlp_only_layers", [])) if key in keys}
        values |= {
            "linear_num_key_heads": groups, "linear_num_value_heads": groups * draw.choice([1, 2]),
            "linear_key_head_dim": width, "linear_value_head_dim": width if usual else 4 * draw.randint(1, 4),
            "linear_conv_kernel_dim": draw.choice([2, 4]),  # transformers needs one layer of attention to count positions
            "layer_types": draw.sample(["linear_attention"] * (layers - 1) + ["full_attention"] * (layers - 1), layers - 2) + draw.sample(
                ["linear_attention", "full_attention"], 2) if not usual else
                [("full_attention" if layer % 2 else "linear_attention") for layer in range(layers)],
        }  # fmt: skip
    if "shared_expert_intermediate_size" in keys:
        values["shared_expert_intermediate_size"] = draw.randint(1, 2) * values["moe_intermediate_size"]
    if "lightning attention" in family.requires:
        values |= {"num_local_experts": EXPERTS, "block_size": draw.choice([8, 32]), "sliding_window": None, "layer_types": [
            draw.choice(["linear_attention", "full_attention"]) for _ in range(layers - 1)] + ["linear_attention"]}  # fmt: skip
    if "kv_lora_rank" in keys:
        values |= {
            "q_lora_rank": draw.choice([None, 4 * draw.randint(2, 6)]), "kv_lora_rank": 4 * draw.randint(2, 6), "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": draw.randint(4, 12), "v_head_dim": draw.randint(4, 16), "num_key_value_heads": heads,
            "rope_interleave": draw.random() < 0.7,
        }  # fmt: skip
        values.pop("head_dim", None)
        if rope["rope_type"] == "yarn":
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if family.has("partial RoPE"):
        size = head_dim if "head_dim" in values else values["hidden_size"] // heads
        rope["partial_rotary_factor"] = draw.choice([share for share in (0.25, 0.5, 1.0) if size * share % 2 == 0])
    local_theta = draw.choice([300.0, family.sliding_rope_theta, rope["rope_theta"]])
    ropes_of_layers = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local_theta}}
    rope = rope if family.sliding_rope_theta is None else ropes_of_layers
    values |= {} if "rope_parameters" in family.omits else {"rope_parameters": rope}
    return kind(**values, attn_implementation="eager", architectures=[family.name])
