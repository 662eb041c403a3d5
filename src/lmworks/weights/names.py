"""Converts between our parameter names and those of Hugging Face, from the table of a family (`lmworks.recipe.families`).

Stacked expert weights (E, out, in) are E separate weights (out, in) in Hugging Face's format. There, layers of multi-token prediction
continue the layer numbers, and each has its own copy of the embedding and the head. The rotated dimensions of latent attention are
interleaved there, in pairs (2i, 2i + 1); here they are halves, in pairs (i, i + R/2).

Some classes multiply by 1 + the weight of a norm; ours is the factor itself, in fp32. For a weight in bf16 it is exact from |w| = 2^-16 on,
and below it is off by 2^-24 at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial

import torch
from torch import Tensor

from lmworks.checkpoint.save_plan import TensorSlice
from lmworks.errors import UserError
from lmworks.recipe.families.family import Family
from lmworks.recipe.families.registry import family_of
from lmworks.recipe.schema.model import Model

_COPIES = {"embedding.weight": "model.layers.{i}.embed_tokens.weight", "head.weight": "model.layers.{i}.shared_head.head.weight"}
_ROTATED = re.compile(r"layers\.\d+\.attention\.(query|query_up|kv_down)\.weight\Z")


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)") + r"\Z")


@lru_cache(maxsize=64)
def _to_theirs(family: Family) -> list[tuple[re.Pattern[str], str]]:
    return [(_pattern(ours), theirs) for ours, theirs in family.names]


@lru_cache(maxsize=64)
def _to_ours(family: Family) -> list[tuple[re.Pattern[str], str]]:
    return [(_pattern(theirs), ours) for ours, theirs in family.names]


@lru_cache(maxsize=64)
def _zero(family: Family) -> list[re.Pattern[str]]:
    return [_pattern(ours) for ours in family.zero]


@lru_cache(maxsize=64)
def _derived(family: Family) -> list[re.Pattern[str]]:
    return [_pattern(theirs) for theirs in family.derived]


_COPY_OF = [(_pattern(theirs), ours) for ours, theirs in _COPIES.items()]


def _translate(name: str, table: list[tuple[re.Pattern[str], str]]) -> str | None:
    """The corresponding name, with the placeholder `{e}` for stacked experts; None if there is none."""
    for pattern, template in table:
        if match := pattern.match(name):
            return template.replace("{i}", match.groupdict().get("i") or "")
    return None


def _our_name(theirs: str, family: Family) -> str:
    if found := _translate(theirs, _to_ours(family)):
        return found
    raise UserError(f"tensor {theirs} has no counterpart; this is not a model of a class that lmworks converts")


def huggingface_name(ours: str, family: Family) -> str:
    """Hugging Face's name of one of our tensors; `{e}` is a placeholder for the expert in a stacked one."""
    if found := _translate(ours, _to_theirs(family)):
        return found
    raise UserError(f"{family.name} has no tensor for {ours}; the config and the weights are of different models")


def is_exported(ours: str, family: Family) -> bool:
    """Whether one of our tensors exists in models of the family; if not, it must be zero."""
    return not any(pattern.match(ours) for pattern in _zero(family))


def to_huggingface(state: Mapping[str, Tensor], model: Model) -> Iterator[tuple[str, Tensor]]:
    """Tensors of `model` under Hugging Face's names, one at a time, so that a large model is never in memory twice."""
    assert model.num_hidden_layers
    family = family_of(model)
    for name, tensor in state.items():
        numbered = _number_mtp_layers(name, model.num_hidden_layers)
        if not is_exported(numbered, family):
            if tensor.any():
                raise UserError(f"{name} is not zero, and {family.name} has no such tensor; this model cannot be exported as that class")
            continue
        theirs = huggingface_name(numbered, family)
        if "{e}" in theirs:
            yield from ((theirs.replace("{e}", str(expert)), weight) for expert, weight in enumerate(tensor.unbind(0)))
        else:
            yield theirs, _as_theirs(numbered, tensor, model, family)
        if name in _COPIES and exports_mtp(model) and model.mtp:
            yield from (
                (_COPIES[name].replace("{i}", str(model.num_hidden_layers + depth)), tensor.clone())
                for depth in range(model.mtp.num_nextn_predict_layers)
            )


def original_of(theirs: str) -> str | None:
    """Our name of the tensor of which a Hugging Face tensor is a copy, for a layer of multi-token prediction; None if it is no copy."""
    return next((ours for pattern, ours in _COPY_OF if pattern.match(theirs)), None)


def sources(part: TensorSlice, model: Model, family: Family) -> Iterator[tuple[str, TensorSlice]]:
    """This rank's slice of one of our tensors, as slices of Hugging Face tensors by name; a stack of experts gives one per expert."""
    assert model.num_hidden_layers
    numbered = _number_mtp_layers(part.name, model.num_hidden_layers)
    if not is_exported(numbered, family):
        return
    theirs = huggingface_name(numbered, family)
    if "{e}" not in theirs:
        yield theirs, part
        return
    for at in range(part.sizes[0]):
        box = TensorSlice(part.name, part.dtype, part.shape[1:], part.offsets[1:], part.sizes[1:], partial(_row, part, at))
        yield theirs.replace("{e}", str(part.offsets[0] + at)), box


def _row(part: TensorSlice, at: int) -> Tensor:
    return part.values()[at]


def why_missing(ours: str) -> str:
    """The end of a message that a checkpoint lacks one of our tensors."""
    if ours == "head.weight":
        return "if the head is the embedding, config.json must have tie_word_embeddings true"
    return "the config and the weights are of different models"


def refuse_foreign(names: Iterable[str], state: Mapping[str, object], model: Model, family: Family) -> None:
    """Raise `UserError` for a Hugging Face tensor without a counterpart in `state`, which has all tensors of `model`."""
    assert model.num_hidden_layers
    for theirs in names:
        derived = theirs.endswith("rotary_emb.inv_freq") or any(pattern.match(theirs) for pattern in _derived(family))
        if derived or original_of(theirs) is not None:
            continue
        if _restore_mtp_layers(_our_name(theirs, family), model.num_hidden_layers) not in state:
            raise UserError(f"tensor {theirs} does not belong to this model; the config and the weights are of different models")


def is_shifted(name: str, family: Family) -> bool:
    """Whether one of our tensors is that of the class plus 1."""
    return family.norms_plus_one and name.endswith("norm.weight")


def from_shifted(tensor: Tensor) -> Tensor:
    """The factors of a norm, from the weight of a class that adds 1 to it; in fp64, so that they are rounded once."""
    return tensor.double() + 1


def is_interleaved(name: str, model: Model) -> bool:
    """Whether one of our tensors has rotated rows, which are interleaved in Hugging Face's format."""
    assert model.num_hidden_layers
    return model.mla is not None and _ROTATED.match(_number_mtp_layers(name, model.num_hidden_layers)) is not None


def to_interleaved(name: str, tensor: Tensor, model: Model) -> Tensor:
    """Reorder the rows of one of our full tensors to Hugging Face's order."""
    assert model.num_hidden_layers
    return _interleave(_number_mtp_layers(name, model.num_hidden_layers), tensor, model)


def from_interleaved(name: str, tensor: Tensor, model: Model) -> Tensor:
    """Reorder the rows of a full Hugging Face tensor to our order."""
    assert model.num_hidden_layers
    return _interleave(_number_mtp_layers(name, model.num_hidden_layers), tensor, model, back=True)


def exports_mtp(model: Model) -> bool:
    """Whether multi-token prediction is exported: only with experts, and if the model's class supports it."""
    return model.mtp is not None and model.moe is not None and family_of(model).mtp


def _number_mtp_layers(name: str, layers: int) -> str:
    """Our name with the layer numbers that layers of multi-token prediction have in Hugging Face's format, their blocks as layers."""
    match = re.match(r"mtp\.(\d+)\.(block\.)?(.*)", name)
    return f"{'layers' if match[2] else 'mtp'}.{layers + int(match[1])}.{match[3]}" if match else name


def _restore_mtp_layers(name: str, layers: int) -> str:
    """The inverse of `_number_mtp_layers`."""
    match = re.match(r"(layers|mtp)\.(\d+)\.(.*)", name)
    if match is None or int(match[2]) < layers:
        return name
    return f"mtp.{int(match[2]) - layers}.{'block.' if match[1] == 'layers' else ''}{match[3]}"


def reordered(name: str, tensor: Tensor, model: Model, back: bool = False) -> Tensor:
    """A tensor whose rows are those of one of our tensors, in the order of Hugging Face's format, or `back` in ours."""
    assert model.num_hidden_layers
    return _interleave(_number_mtp_layers(name, model.num_hidden_layers), tensor, model, back)


def _as_theirs(name: str, tensor: Tensor, model: Model, family: Family) -> Tensor:
    return tensor.float() - 1 if is_shifted(name, family) else _interleave(name, tensor, model)


def _interleave(name: str, tensor: Tensor, model: Model, back: bool = False) -> Tensor:
    """Reorder the rotated rows of latent attention from halves to interleaved, or back; other tensors are returned unchanged."""
    mla = model.mla
    if mla is None or not _ROTATED.match(name):
        return tensor
    heads = tensor.unflatten(0, (1, -1) if "kv_down" in name else (-1, mla.qk_nope_head_dim + mla.qk_rope_head_dim))
    nope, rotated = heads.split((heads.shape[1] - mla.qk_rope_head_dim, mla.qk_rope_head_dim), dim=1)
    rotated = rotated.unflatten(1, (-1, 2) if back else (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((nope, rotated), dim=1).flatten(0, 1)
