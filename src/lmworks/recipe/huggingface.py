"""Which Hugging Face class is exactly our model, and its config, in both directions.

Class by class (transformers 5): what it has beyond the common part.
| class      | qk_norm | qkv bias | partial RoPE | NoPE layers | window | experts | MLA | MTP          |
| Glm4Moe    | either  | either   | yes          | no          | no     | yes     | no  | yes          |
| DeepseekV3 | no      | no       | no           | no          | no     | either  | yes | with experts |
| Qwen3      | yes     | no       | no           | no          | yes    | no      | no  | no           |
| Qwen2      | no      | yes      | no           | no          | yes    | no      | no  | no           |
| SmolLM3    | no      | no       | no           | yes         | yes    | no      | no  | no           |
| Llama      | no      | no       | no           | no          | no     | no      | no  | no           |
MTP (multi-token prediction) changes no logits: a class without a place for it is exact without it.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.recipe.model import Mla, Model, Moe, Mtp, Rope

_TYPES = {
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "SmolLM3ForCausalLM": "smollm3",
    "LlamaForCausalLM": "llama",
}

_SLIDING = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "SmolLM3ForCausalLM")
_SLIDES, _SEES_ALL = "sliding_attention", "full_attention"

_LATENT_EPS = 1e-6
"""DeepseekV3 of transformers norms latents with this, whatever rms_norm_eps says; other engines take rms_norm_eps."""


class NoClass(UserError):
    """No class expresses the model; `reason` says what of it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no Hugging Face class expresses this model: {reason}; change the model, or set export.huggingface=false")
        self.reason = reason


def class_for(model: Model) -> str:
    """The class whose mathematics is this model's; `NoClass` with the reason if there is none."""
    if model.logit_softcap:
        raise NoClass("logit_softcap is on")
    if model.rope.fraction == 0:
        raise NoClass("it has no RoPE at all (rope.fraction 0)")
    if model.mla is not None:
        if model.mla.norm_eps != _LATENT_EPS:
            raise NoClass(f"the latents of DeepseekV3 are normed with {_LATENT_EPS:g}, not {model.mla.norm_eps:g} (mla.norm_eps)")
        if model.moe is not None:
            _require_moe(model, model.moe)
        return "DeepseekV3ForCausalLM"
    if model.moe is not None:
        _require_moe(model, model.moe)
        return "Glm4MoeForCausalLM"
    if model.rope.fraction != 1:
        raise NoClass(f"it is dense and rotates {model.rope.fraction:g} of each head (rope.fraction)")
    if model.nope_every or (model.sliding_window and not model.qk_norm and not model.attention_bias):
        if model.qk_norm or model.attention_bias:
            raise NoClass("it has layers without positions (nope_every) together with qk_norm or attention_bias")
        return "SmolLM3ForCausalLM"
    if model.qk_norm and model.attention_bias:
        raise NoClass("it is dense with both qk_norm and attention_bias")
    if model.qk_norm:
        return "Qwen3ForCausalLM"
    if model.attention_bias:
        return "Qwen2ForCausalLM"
    return "LlamaForCausalLM"


def _require_moe(model: Model, moe: Moe) -> None:
    for problem, reason in (
        (moe.gate != "sigmoid", "its gates are softmax (moe.gate)"),
        (moe.shared_experts == 0, "it has no shared expert (moe.shared_experts)"),
        (bool(model.nope_every), "it has experts and layers without positions (nope_every)"),
        (bool(model.sliding_window), "it has experts and a sliding window"),
    ):
        if problem:
            raise NoClass(reason)


def to_config(model: Model, rope: Rope, tokens: dict[str, Any]) -> dict[str, Any]:
    """config.json. `rope` is that of the last phase; `tokens` holds eos_token_id and pad_token_id."""
    architecture = class_for(model)
    assert model.layers
    config: dict[str, Any] = {
        "architectures": [architecture], "model_type": _TYPES[architecture], "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size, "intermediate_size": model.ffn_size, "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim, "hidden_act": "silu", "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std, "max_position_embeddings": int(model.max_length or 2048),
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": model.attention_dropout, "attention_bias": model.attention_bias, "use_cache": True,
        "rope_parameters": _rope_parameters(rope, model), **tokens,
    }  # fmt: skip
    if model.moe is not None:
        moe = model.moe
        config |= {
            "n_routed_experts": moe.experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.expert_size,
            "n_shared_experts": moe.shared_experts, "first_k_dense_replace": moe.dense_layers, "norm_topk_prob": moe.normalize_top_k,
            "routed_scaling_factor": moe.routed_scale, "n_group": moe.groups, "topk_group": moe.top_groups, "use_qk_norm": model.qk_norm,
            "num_nextn_predict_layers": model.mtp.layers if model.mtp else 0, "partial_rotary_factor": rope.fraction,
        }  # fmt: skip
    if model.mla is not None:
        mla = model.mla
        config |= {
            "q_lora_rank": mla.q_rank, "kv_lora_rank": mla.kv_rank, "qk_rope_head_dim": mla.rope_dim, "qk_nope_head_dim": mla.nope_dim,
            "v_head_dim": mla.value_dim, "rope_interleave": True,
        }  # fmt: skip
        if model.moe is None:
            config |= {"first_k_dense_replace": model.layers, "num_nextn_predict_layers": 0}
        for key in ("head_dim", "use_qk_norm", "partial_rotary_factor"):
            config.pop(key, None)
    if architecture == "SmolLM3ForCausalLM":
        positions = [int(model.has_positions(layer)) for layer in range(model.layers)]
        config |= {"no_rope_layers": positions, "no_rope_layer_interval": model.nope_every or model.layers + 1}
    if architecture in _SLIDING:
        config |= {
            "use_sliding_window": bool(model.sliding_window), "sliding_window": int(model.sliding_window) if model.sliding_window else None,
            "layer_types": [_SLIDES if model.slides(layer) else _SEES_ALL for layer in range(model.layers)],
        }  # fmt: skip
    return config


def _rope_parameters(rope: Rope, model: Model) -> dict[str, Any]:
    theta = rope.theta
    if rope.scaling == "ntk":  # a raised base, and said so
        rotated = model.mla.rope_dim if model.mla else int((model.head_dim or 0) * rope.fraction)
        theta = rope.theta * rope.factor ** (rotated / (rotated - 2))
    parameters: dict[str, Any] = {"rope_type": "default" if rope.scaling in ("none", "ntk") else rope.scaling, "rope_theta": theta}
    if model.moe is not None and model.mla is None:
        parameters["partial_rotary_factor"] = rope.fraction
    if rope.scaling in ("linear", "yarn"):
        parameters["factor"] = rope.factor
    if rope.scaling == "yarn":
        assert rope.original_length is not None
        parameters["original_max_position_embeddings"] = int(rope.original_length)
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if model.mla is not None:
            parameters |= {"mscale": 1.0, "mscale_all_dim": 1.0}  # the scale is on the whole score
    return parameters


def from_config(config: dict[str, Any]) -> Model:
    """Our model from a config.json of one of the classes above; `UserError` for what they have and we have not."""
    try:
        return Model.model_validate(_from_config(config))
    except KeyError as error:
        raise UserError(f"config.json has no {error.args[0]}") from None
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"config.json describes no model that lmworks has: {reason}") from None


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in _TYPES:
        raise UserError(f"config.json is of class {architecture}; lmworks reads {', '.join(_TYPES)}")
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UserError(f"config.json has hidden_act {activation}; lmworks reads silu")
    rope = {"rope_type": "default", **(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    theta, kind = rope.get("rope_theta", config.get("rope_theta", 10_000.0)), rope.get("rope_type", "default")
    if kind not in ("default", "linear", "yarn"):
        raise UserError(f"config.json has rope_type {kind}; lmworks reads default, linear and yarn")
    glm, latent, layers = architecture == "Glm4MoeForCausalLM", architecture == "DeepseekV3ForCausalLM", config["num_hidden_layers"]
    if config.get("attention_bias") and architecture not in ("Glm4MoeForCausalLM", "Qwen2ForCausalLM"):
        raise UserError(f"config.json has attention_bias, which in {architecture} also gives the output a bias; lmworks has none there")
    if latent and kind == "yarn" and (rope.get("mscale"), rope.get("mscale_all_dim")) != (1, 1):
        raise UserError("config.json has YaRN with mscale or mscale_all_dim other than 1; lmworks scales the whole score, as DeepSeek-V3")
    positions = config.get("no_rope_layers") if architecture == "SmolLM3ForCausalLM" else None
    nope_every = 0
    if positions and 0 in positions:
        nope_every = positions.index(0) + 1
        if [int((layer + 1) % nope_every != 0) for layer in range(layers)] != list(positions):
            raise UserError("config.json has no_rope_layers that are not every n-th layer")
    window, layer_types = _window(config, architecture, layers)
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5)) if glm else 1.0
    heads = config["num_attention_heads"]
    mla = _latent(config) if latent else None
    head_dim = mla.nope_dim + mla.rope_dim if mla else config.get("head_dim") or config["hidden_size"] // heads
    values: dict[str, Any] = {
        "vocab_size": config["vocab_size"], "hidden_size": config["hidden_size"], "layers": layers, "heads": heads,
        "kv_heads": heads if latent else config.get("num_key_value_heads") or heads, "head_dim": head_dim, "mla": mla,
        "ffn_size": config["intermediate_size"], "attention_bias": architecture == "Qwen2ForCausalLM" or bool(config.get("attention_bias")),
        "qk_norm": bool(config.get("use_qk_norm")) if glm else architecture == "Qwen3ForCausalLM",
        "rope": Rope(
            theta=theta, fraction=fraction, scaling="none" if kind == "default" else kind, factor=rope.get("factor", 1.0),
            original_length=f"{rope['original_max_position_embeddings']} tokens" if kind == "yarn" else None,
            beta_fast=rope.get("beta_fast") or 32.0, beta_slow=rope.get("beta_slow") or 1.0,
        ),
        "nope_every": nope_every, "sliding_window": f"{window} tokens" if window else None, "layer_types": layer_types,
        "tie_embeddings": bool(config.get("tie_word_embeddings")), "norm_eps": config["rms_norm_eps"],
        "init_std": config.get("initializer_range", 0.02), "max_length": f"{config['max_position_embeddings']} tokens",
    }  # fmt: skip
    if glm or (latent and config["first_k_dense_replace"] < layers):
        values["moe"] = Moe(
            experts=config["n_routed_experts"], top_k=config["num_experts_per_tok"], expert_size=config["moe_intermediate_size"],
            shared_experts=config["n_shared_experts"], dense_layers=config["first_k_dense_replace"],
            normalize_top_k=config["norm_topk_prob"],
            routed_scale=config["routed_scaling_factor"], groups=config.get("n_group", 1), top_groups=config.get("topk_group", 1),
        )  # fmt: skip
        if config.get("num_nextn_predict_layers"):
            values["mtp"] = Mtp(layers=config["num_nextn_predict_layers"])
    return values


def _latent(config: dict[str, Any]) -> Mla:
    return Mla(
        q_rank=config.get("q_lora_rank"), kv_rank=config["kv_lora_rank"], rope_dim=config["qk_rope_head_dim"],
        nope_dim=config["qk_nope_head_dim"], value_dim=config["v_head_dim"], norm_eps=_LATENT_EPS,
    )  # fmt: skip


def _window(config: dict[str, Any], architecture: str, layers: int) -> tuple[int | None, tuple[str, ...]]:
    """Sliding window, and which layers slide, as the shortest pattern that repeats; empty where all do."""
    if architecture not in _SLIDING or not config.get("use_sliding_window") or not config.get("sliding_window"):
        return None, ()
    types = config.get("layer_types") or _default_layer_types(config, architecture, layers)
    if len(types) != layers or set(types) - {_SLIDES, _SEES_ALL}:
        raise UserError(f"config.json has layer_types that are not {layers} of {_SLIDES} and {_SEES_ALL}; lmworks cannot read it")
    if _SLIDES not in types:
        return None, ()
    size = next(size for size in range(1, layers + 1) if all(types[layer] == types[layer % size] for layer in range(layers)))
    return config["sliding_window"], tuple(types[:size]) if _SEES_ALL in types else ()


def _default_layer_types(config: dict[str, Any], architecture: str, layers: int) -> list[str]:
    """Which layers slide where an older config.json does not list them: in SmolLM3 those without positions, else the upper ones."""
    if architecture == "SmolLM3ForCausalLM":
        every = config.get("no_rope_layer_interval", 4)
        positions = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
        return [_SEES_ALL if rotates else _SLIDES for rotates in positions]
    first = config.get("max_window_layers", 28)
    return [_SLIDES if layer >= first else _SEES_ALL for layer in range(layers)]
