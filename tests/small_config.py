"""The small model configuration that tests start from."""

from __future__ import annotations

from typing import Any


def small_config(**changes: Any) -> dict[str, Any]:
    """Keys of `Model` for a dense model of two layers, with `changes`."""
    return {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48,
    } | changes  # fmt: skip
