"""Our parameter names and Hugging Face's, declared once and read in both directions.

`{i}` is a layer, `{e}` an expert: our stacked expert weights (E, out, in) are E separate weights (out, in) there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lmworks.errors import UserError

_NAMES = (
    ("embedding.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("head.weight", "lm_head.weight"),
    ("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    ("layers.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    *((f"layers.{{i}}.attention.{ours}.{kind}", f"model.layers.{{i}}.self_attn.{theirs}_proj.{kind}")
      for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")) for kind in ("weight", "bias")),
    ("layers.{i}.attention.query_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    ("layers.{i}.attention.key_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
    *((f"layers.{{i}}.ffn.{part}.weight", f"model.layers.{{i}}.mlp.{part}_proj.weight") for part in ("gate", "up", "down")),
    *((f"layers.{{i}}.ffn.shared.{part}.weight", f"model.layers.{{i}}.mlp.shared_experts.{part}_proj.weight")
      for part in ("gate", "up", "down")),
    *((f"layers.{{i}}.ffn.experts.{part}", f"model.layers.{{i}}.mlp.experts.{{e}}.{part}_proj.weight") for part in ("gate", "up", "down")),
    ("layers.{i}.ffn.router.weight", "model.layers.{i}.mlp.gate.weight"),
    ("layers.{i}.ffn.router.bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"),
)  # fmt: skip


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)") + r"\Z")


_TO_THEIRS = [(_pattern(ours), theirs) for ours, theirs in _NAMES]
_TO_OURS = [(_pattern(theirs), ours) for ours, theirs in _NAMES]


def _translate(name: str, table: list[tuple[re.Pattern[str], str]]) -> tuple[str, int | None]:
    """The name on the other side, with `{e}` left in it for stacked experts, and the expert that the given name speaks of."""
    for pattern, template in table:
        match = pattern.match(name)
        if match:
            groups = match.groupdict()
            expert = groups.get("e")
            return template.replace("{i}", groups.get("i") or ""), None if expert is None else int(expert)
    raise UserError(f"tensor {name} has no counterpart; this is not a model of a class that lmworks converts")


def huggingface_name(ours: str) -> str:
    """Their name for one of our tensors; `{e}` stands for the expert in a stacked one."""
    return _translate(ours, _TO_THEIRS)[0]


def to_huggingface(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors under Hugging Face's names, one at a time, so that a large model is never held twice."""
    for name, tensor in state.items():
        theirs = huggingface_name(name)
        if "{e}" in theirs:
            yield from ((theirs.replace("{e}", str(expert)), weight) for expert, weight in enumerate(tensor.unbind(0)))
        else:
            yield theirs, tensor


@torch.no_grad()
def from_huggingface(tensors: Iterator[tuple[str, Tensor]], state: Mapping[str, Tensor]) -> None:
    """Copy tensors with Hugging Face's names into `state`, our model's own tensors; raises `UserError` if the two do not match."""
    missing = {(name, expert) for name, tensor in state.items() for expert in (range(len(tensor)) if ".experts." in name else (None,))}
    for theirs, tensor in tensors:
        if theirs.endswith("rotary_emb.inv_freq"):
            continue
        ours, expert = _translate(theirs, _TO_OURS)
        if ours == "head.weight" and ours not in state:
            continue  # tied, and stored twice
        if (ours, expert) not in missing:
            raise UserError(f"tensor {theirs} does not belong to this model; the config and the weights are of different models")
        target = state[ours] if expert is None else state[ours][expert]
        if target.shape != tensor.shape:
            raise UserError(f"tensor {theirs} has shape {tuple(tensor.shape)}, but the config says {tuple(target.shape)}")
        target.copy_(tensor)
        missing.discard((ours, expert))
    if missing:
        name, expert = min(missing, key=str)
        raise UserError(f"{len(missing)} tensors are missing, the first is {name}{'' if expert is None else f' of expert {expert}'}")
