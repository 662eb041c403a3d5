"""Which recipe key becomes which key of config.json: python docs/huggingface_keys.py prints the table of docs/glossary.md.

The table is measured, not typed: each model key of some sample models is changed, and the changed keys of config.json are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from lmworks.errors import UserError
from lmworks.recipe.families.registry import to_config
from lmworks.recipe.schema.model import Model

_SHAPE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "max_position_embeddings": "64 tokens",
}  # fmt: skip
_MOE: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2}
_SOFTMAX: dict[str, Any] = _MOE | {"n_shared_experts": 0, "n_group": 1, "topk_group": 1, "scoring_func": "softmax"}
_MLA: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
_EXTENDED: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": "16 tokens"}
SAMPLES: tuple[dict[str, Any], ...] = (
    _SHAPE | {"moe": _MOE, "rope": {"partial_rotary_factor": 0.5}, "mtp": {}},
    _SHAPE | {"num_key_value_heads": 4, "head_dim": 20, "mla": _MLA, "moe": _MOE, "rms_norm_eps": 1e-6},
    _SHAPE | {"rope": _EXTENDED | {"scaling": "yarn"}},
    _SHAPE | {"rope": _EXTENDED | {"scaling": "llama3"}},
    _SHAPE | {"use_qk_norm": True, "sliding_window": "8 tokens", "layer_types": ["sliding_attention", "full_attention"]},
    _SHAPE | {"use_qk_norm": True, "moe": _SOFTMAX | {"balance": {"method": "none"}}},
    _SHAPE | {"use_qk_norm": True, "moe": _SOFTMAX | {"balance": {"method": "aux"}}},
    _SHAPE | {"no_rope_layer_interval": 4},
)  # fmt: skip


def _keys(node: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key in type(node).model_fields:
        value = getattr(node, key)
        if isinstance(value, BaseModel):
            yield from _keys(value, (*path, key))
        else:
            yield (*path, key)


def _other_values(annotation: Any, value: Any) -> list[Any]:
    """Values to try in place of `value`."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)) and value:
        return [value * 2, value // 2 if isinstance(value, int) else value / 2, value + 1]
    if isinstance(value, (int, float)):
        return [2, 0.5]
    if get_origin(annotation) is Literal:
        return [other for other in get_args(annotation) if other != value]
    if isinstance(value, tuple):
        return [tuple(reversed(value))] if value else []
    return ["32 tokens"] if value is not None else []


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _config(sample: dict[str, Any]) -> dict[str, Any]:
    model = Model.model_validate(sample)
    return _flat(to_config(model, model.rope, {}))


def _changed(sample: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    return sample | {key: _changed(sample.get(key) or {}, tuple(rest), value) if rest else value}


def measured() -> dict[str, set[str]]:
    """Model key by its dotted path -> keys of config.json that change with it and with no class."""
    found: dict[str, set[str]] = {}
    for sample in SAMPLES:
        model, before = Model.model_validate(sample), _config(sample)
        for path in _keys(model):
            node: Any = model
            for part in path[:-1]:
                node = getattr(node, part)
            field = type(node).model_fields[path[-1]]
            for value in _other_values(field.annotation, getattr(node, path[-1])):
                try:
                    after = _config(_changed(sample, path, value))
                except (UserError, ValueError):
                    continue
                if after["architectures"] != before["architectures"]:
                    continue
                different = {
                    key for key in before.keys() & after.keys() if before[key] != after[key] and not isinstance(before[key], list)
                }
                if different:
                    found.setdefault(".".join(("model", *path)), set()).update(different)
                    break
    return found


def table() -> str:
    """The model keys whose name in config.json differs, as Markdown."""
    lines = ["| recipe key | config.json |", "|---|---|"]
    for path, theirs in measured().items():
        if theirs != {path.rpartition(".")[2]}:
            lines.append(f"| `{path}` | {', '.join(f'`{key}`' for key in sorted(theirs))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
