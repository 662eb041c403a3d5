"""Our parameter names and Hugging Face's, which a family declares once (`lmworks.recipe.families`), read in both directions.

Our stacked expert weights (E, out, in) are E separate weights (out, in) in Hugging Face's format. Layers of multi-token prediction continue
the layer numbers there, and each has its own copy of the embedding and the head. The rotated dimensions of latent attention are interleaved
there, in pairs (2i, 2i + 1), and here they are halves, in pairs (i, i + R/2).
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


_COPY_OF = [(_pattern(theirs), ours) for ours, theirs in _COPIES.items()]


def _translate(name: str, table: list[tuple[re.Pattern[str], str]]) -> tuple[str, int | None] | None:
    """The name on the other side, with `{e}` left in it for stacked experts, and the expert that the given name speaks of."""
    for pattern, template in table:
        match = pattern.match(name)
        if match:
            groups = match.groupdict()
            expert = groups.get("e")
            return template.replace("{i}", groups.get("i") or ""), None if expert is None else int(expert)
    return None


def _our_name(theirs: str, family: Family) -> tuple[str, int | None]:
    if found := _translate(theirs, _to_ours(family)):
        return found
    raise UserError(f"tensor {theirs} has no counterpart; this is not a model of a class that lmworks converts")


def huggingface_name(ours: str, family: Family) -> str:
    """Their name for one of our tensors; `{e}` stands for the expert in a stacked one."""
    if found := _translate(ours, _to_theirs(family)):
        return found[0]
    raise UserError(f"{family.name} has no tensor for {ours}; the config and the weights are of different models")


def has_place(ours: str, family: Family) -> bool:
    """Whether one of our tensors has a place there; one that has none is zero in a model of the family."""
    return not any(pattern.match(ours) for pattern in _zero(family))


def to_huggingface(state: Mapping[str, Tensor], model: Model) -> Iterator[tuple[str, Tensor]]:
    """Tensors of `model` under Hugging Face's names, one at a time, so that a large model is never held twice."""
    assert model.num_hidden_layers
    family = family_of(model)
    for name, tensor in state.items():
        numbered = _outward(name, model.num_hidden_layers)
        if not has_place(numbered, family):
            if tensor.any():
                raise UserError(f"{name} is not zero, and {family.name} has no place for it; this model cannot be exported as that class")
            continue
        theirs = huggingface_name(numbered, family)
        if "{e}" in theirs:
            yield from ((theirs.replace("{e}", str(expert)), weight) for expert, weight in enumerate(tensor.unbind(0)))
        else:
            yield theirs, _interleave(numbered, tensor, model)
        if name in _COPIES and carries_mtp(model) and model.mtp:
            yield from (
                (_COPIES[name].replace("{i}", str(model.num_hidden_layers + depth)), tensor.clone())
                for depth in range(model.mtp.num_nextn_predict_layers)
            )


@torch.no_grad()
def from_huggingface(
    tensors: Iterator[tuple[str, Tensor]], state: Mapping[str, Tensor], model: Model, family: Family, *, interleaved: bool = True
) -> None:
    """Copy tensors with the names of `family` into `state`, the tensors of `model`; raises `UserError` if the two do not match.

    `interleaved`: whether the rotated dimensions of latent attention are interleaved in `tensors`.
    """
    assert model.num_hidden_layers
    missing = {
        (name, expert)
        for name, tensor in state.items() if has_place(_outward(name, model.num_hidden_layers), family)
        for expert in (range(len(tensor)) if ".experts." in name else (None,))
    }  # fmt: skip
    copies: list[tuple[str, str, Tensor]] = []
    for theirs, tensor in tensors:
        if theirs.endswith("rotary_emb.inv_freq"):
            continue
        original = next((ours for pattern, ours in _COPY_OF if pattern.match(theirs)), None)
        if original is not None:
            copies.append((theirs, original, tensor))
            continue
        numbered, expert = _our_name(theirs, family)
        ours = _inward(numbered, model.num_hidden_layers)
        if ours == "head.weight" and ours not in state:
            continue  # tied, and stored twice
        if (ours, expert) not in missing:
            raise UserError(f"tensor {theirs} does not belong to this model; the config and the weights are of different models")
        target = state[ours] if expert is None else state[ours][expert]
        if target.shape != tensor.shape:
            raise UserError(f"tensor {theirs} has shape {tuple(tensor.shape)}, but the config says {tuple(target.shape)}")
        target.copy_(_interleave(numbered, tensor, model, back=True) if interleaved else tensor)
        missing.discard((ours, expert))
    if missing:
        name, expert = min(missing, key=str)
        raise UserError(f"{len(missing)} tensors are missing, the first is {name}{'' if expert is None else f' of expert {expert}'}")
    for theirs, original, tensor in copies:
        own = state.get(original, state["embedding.weight"])
        if tensor.shape != own.shape or not torch.equal(tensor.to(own.dtype), own):
            raise UserError(f"tensor {theirs} is not equal to the model's own; multi-token prediction shares it in lmworks")


def sources(part: TensorSlice, model: Model, family: Family) -> Iterator[tuple[str, TensorSlice]]:
    """What this rank holds of one of our tensors as parts of tensors of theirs, by their names; of stacked experts one each."""
    assert model.num_hidden_layers
    numbered = _outward(part.name, model.num_hidden_layers)
    if not has_place(numbered, family):
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


def refuse_foreign(names: Iterable[str], state: Mapping[str, object], model: Model, family: Family) -> None:
    """Raise `UserError` for a tensor of theirs that is none of `state`, all tensors of `model`."""
    assert model.num_hidden_layers
    for theirs in names:
        if theirs.endswith("rotary_emb.inv_freq") or any(pattern.match(theirs) for pattern, _ in _COPY_OF):
            continue
        if _inward(_our_name(theirs, family)[0], model.num_hidden_layers) not in state:
            raise UserError(f"tensor {theirs} does not belong to this model; the config and the weights are of different models")


def rotates(name: str, model: Model) -> bool:
    """Whether rows of one of our tensors lie in another order there."""
    assert model.num_hidden_layers
    return model.mla is not None and _ROTATED.match(_outward(name, model.num_hidden_layers)) is not None


def from_interleaved(name: str, tensor: Tensor, model: Model) -> Tensor:
    """A whole tensor of theirs in our order of rows."""
    assert model.num_hidden_layers
    return _interleave(_outward(name, model.num_hidden_layers), tensor, model, back=True)


def carries_mtp(model: Model) -> bool:
    """Whether the model's class has a place for multi-token prediction beside experts; elsewhere it stays behind."""
    return model.mtp is not None and model.moe is not None and family_of(model).mtp


def _outward(name: str, layers: int) -> str:
    """Our name with the numbers that layers of multi-token prediction have there, its block as one of the layers."""
    match = re.match(r"mtp\.(\d+)\.(block\.)?(.*)", name)
    return f"{'layers' if match[2] else 'mtp'}.{layers + int(match[1])}.{match[3]}" if match else name


def _inward(name: str, layers: int) -> str:
    match = re.match(r"(layers|mtp)\.(\d+)\.(.*)", name)
    if match is None or int(match[2]) < layers:
        return name
    return f"mtp.{int(match[2]) - layers}.{'block.' if match[1] == 'layers' else ''}{match[3]}"


def _interleave(name: str, tensor: Tensor, model: Model, back: bool = False) -> Tensor:
    """Reorder the rotated rows of latent attention from halves to interleaved, or back; other tensors are returned unchanged."""
    mla = model.mla
    if mla is None or not _ROTATED.match(name):
        return tensor
    heads = tensor.unflatten(0, (1, -1) if "kv_down" in name else (-1, mla.qk_nope_head_dim + mla.qk_rope_head_dim))
    still, turned = heads.split((heads.shape[1] - mla.qk_rope_head_dim, mla.qk_rope_head_dim), dim=1)
    turned = turned.unflatten(1, (-1, 2) if back else (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((still, turned), dim=1).flatten(0, 1)
