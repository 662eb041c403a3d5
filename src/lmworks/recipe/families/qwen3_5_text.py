"""Qwen3.5 and 3.6, dense, the language model: three layers with the gated delta rule to each with gated attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family, Names
from lmworks.recipe.families.gated_delta import (
    ATTENTION,
    DEFAULTS,
    GROUPS,
    NOT_IN_GGUF,
    RECURRENCE,
    layers_from_config,
    layers_to_config,
    recurrent_from_gguf,
    recurrent_gguf,
)
from lmworks.recipe.schema.model import Model, Rope

_OURS, _THEIRS = "layers.{i}.gated_delta.", "model.layers.{i}.linear_attn."
NAMES: Names = (
    *common.ENDS, *common.PRE_NORMS, *ATTENTION, *RECURRENCE,
    *((f"{_OURS}{part}.weight", f"{_THEIRS}in_proj_qkv.weight") for part in ("query", "key", "value")),
    *((f"{_OURS}{ours}.weight", f"{_THEIRS}in_proj_{theirs}.weight") for ours, theirs in (("gate", "z"), ("beta", "b"), ("decay", "a"))),
)  # fmt: skip
UNREAD = ("mtp.", "model.visual.")
PREFIXES = {"model.language_model.": "model."}
IGNORED = ("mamba_ssm_dtype",)
MROPE = ("mrope_section", "mrope_interleaved")
"""Which positions of images the frequencies have; those of text are all the same."""


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    return layers_to_config(model)


FAMILY = Family(
    name="Qwen3_5ForCausalLM", model_type="qwen3_5_text",
    about="hybrid: gated delta rule and gated attention; multi-token prediction is left out",
    names=(*NAMES, *common.FFN), groups=GROUPS, unread=UNREAD, prefixes=PREFIXES, wrapper=("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    norms_plus_one=True, rope_ignored=MROPE, ignored=IGNORED,
    defaults=DEFAULTS | {
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    partial_rotary_factor=0.25, fixed={"attn_output_gate": (True,), "mlp_only_layers": ([],)},
    requires=frozenset({"QK norm", "output gate", "gated delta rule"}), allows=frozenset({"partial RoPE"}),
    to_config=_to_config, from_config=layers_from_config,
    architectures=("qwen35",), gguf=partial(recurrent_gguf, architecture="qwen35", tiled=True), from_gguf=recurrent_from_gguf,
    without_gguf=NOT_IN_GGUF,
)  # fmt: skip
