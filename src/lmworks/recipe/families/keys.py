"""The keys of a config.json: which ones a class reads, with the defaults of `transformers`, and which ones change no number.

The lists are closed. A key that is in none of them is refused, because a model with it may compute something else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from lmworks.errors import UserError


class Null(NamedTuple):
    """A key that may be null, and its default."""

    kind: type
    default: Any = None


class Extra(NamedTuple):
    """A key that the class does not declare, but reads if it is there; it may not be null."""

    kind: type


Defaults = dict[str, Any]
"""Key -> the default of the class, whose type the value must have; or `Null`, or `Extra`."""

ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys of RoPE at the top, which `rope.py` reads."""

FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"), "mlp_bias": (False,), "is_encoder_decoder": (False,), "add_cross_attention": (False,),
    "pruned_heads": ({},), "rope_interleaved": (False,), "use_mrope": (False,),
}  # fmt: skip
"""The values that keys must have where they are written."""

_ANYTHING = frozenset({
    # of every class: names, types, what is returned, and tasks other than the next token
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "auto_map", "name_or_path", "tokenizer_class",
    "output_hidden_states", "output_attentions", "output_scores", "output_router_logits", "return_dict", "return_dict_in_generate",
    "use_return_dict", "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params", "prefix", "torchscript", "use_bfloat16", "tf_legacy_loss", "tie_encoder_decoder", "is_decoder",
    "cross_attention_hidden_size", "tie_last_hidden_states", "attn_implementation", "experts_implementation", "gradient_checkpointing",
    # of generation, which older versions kept here
    "use_cache", "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "epsilon_cutoff",
    "eta_cutoff", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "cache_implementation",
    # how a model was or is trained; weights are the same with any value
    "pretraining_tp", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "neftune_noise_alpha",
    # of other programs; a few thousand published configs have them
    "quantization_config",  # the reader of the weights looks at it
    "is_llama_config", "max_sequence_length", "model_max_length", "tokenizer_model_max_length", "tokenizer_padding_side",
    "use_flash_attn", "use_flash_attention", "use_flash_attention_2", "dual_chunk_attention_config", "pad_token", "bos_token",
    "eos_token", "unk_token", "add_bos_token", "add_eos_token",
})  # fmt: skip
_PREFIXES = ("_", "unsloth", "transformers.js", "trl_")
_SUFFIXES = ("_token_id", "_token_ids")


def changes_no_number(key: str) -> bool:
    """Whether a key of config.json has no influence on the logits of any class, whatever its value."""
    return key in _ANYTHING or key.startswith(_PREFIXES) or key.endswith(_SUFFIXES)


def read(config: Mapping[str, Any], defaults: Defaults, fixed: Mapping[str, tuple[Any, ...]], ignored: tuple[str, ...]) -> dict[str, Any]:
    """All keys of `defaults`, with the value of the config or the default of the class; keys of RoPE are left to `rope.py`.

    Raises `UserError` for a value of another kind, for one that `fixed` does not list, and for a key that nobody knows.
    """
    for key, value in config.items():
        allowed = fixed.get(key)
        if allowed is not None and not any(value is one or (type(value) is type(one) and value == one) for one in (*allowed, None)):
            one_of = " or ".join(json.dumps(one) for one in allowed) or "no value"
            raise UserError(f"config.json has {said(key, value)}; lmworks supports {one_of}")
        known = key in defaults or key in ROPE or allowed is not None or key in ignored or changes_no_number(key)
        if not known and value is not None:
            raise UserError(
                f"config.json has {said(key, value)}, a key that this class does not have in transformers and that lmworks does not know; "
                f"if the model computes the same without it, remove it"
            )
    return {key: _value(config, key, declared) for key, declared in defaults.items()}


def _value(config: Mapping[str, Any], key: str, declared: Any) -> Any:
    nullable = isinstance(declared, Null)
    kind = declared.kind if isinstance(declared, (Null, Extra)) else type(declared)
    if key not in config:
        return declared.default if nullable else None if isinstance(declared, Extra) else declared
    value = config[key]
    return None if value is None and nullable else of_kind(key, value, kind)


def of_kind(key: str, value: Any, kind: type) -> Any:
    """The value, if it is of this kind; `UserError` otherwise. A float may be written without a fraction; infinity is no number."""
    if kind is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    else:
        fits = type(value) is kind
    if not fits:
        names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", list: "a list", dict: "an object"}
        raise UserError(f"config.json has {said(key, value)}, which must be {names[kind]}")
    return float(value) if kind is float else value


def one_name(config: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The config with one name for each key, where `transformers` takes two. Raises `UserError` if both are there and differ."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = aliases.get(key, key)
        if name in found and found[name] != value:
            other = next(one for one in config if one != key and aliases.get(one, one) == name)
            raise UserError(f"config.json has {said(other, config[other])} and {said(key, value)}, two names of the same; keep one")
        found[name] = value
    return found


def said(key: str, value: Any) -> str:
    """Key and value, in a message."""
    text = json.dumps(value, ensure_ascii=True)
    return f"{key} {text if len(text) <= 80 else text[:77] + '...'}"
