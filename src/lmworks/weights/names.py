"""Converts between our parameter names and those of Hugging Face, from the table of a family (`lmworks.recipe.families`).

Stacked expert weights (E, out, in) are E separate weights (out, in) in Hugging Face's format. There, layers of multi-token prediction
continue the layer numbers, and each has its own copy of the embedding and the head. The rotated dimensions of latent attention, and of
some classes (`Family.interleaved_rope`), are interleaved there, in pairs (2i, 2i + 1); here they are halves, in pairs (i, i + R/2).

A tensor of theirs may be packed: hold the rows of several of ours (`Packing`). In the table of a family these have the same name of
theirs, in the order of their rows; `Family.groups` names those that repeat for each group of heads. What mixes the tokens of a layer is
`attention` in our names whatever it is; the table has the section of the recipe there (`gated_delta`), since kinds of layers have other
names in Hugging Face's format.

Some classes multiply by 1 + the weight of a norm; ours is the factor itself, in fp32. For a weight in bf16 it is exact from |w| = 2^-16 on,
and below it is off by 2^-24 at most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from lmworks.checkpoint.save_plan import TensorSlice
from lmworks.errors import UserError
from lmworks.recipe.families.family import Family, Names
from lmworks.recipe.families.registry import family_of
from lmworks.recipe.schema.model import SECTIONS, Model

_COPIES = {"embedding.weight": "model.layers.{i}.embed_tokens.weight", "head.weight": "model.layers.{i}.shared_head.head.weight"}
_MIXER = re.compile(r"layers\.(\d+)\.attention\.")
_ROTATED = re.compile(r"layers\.\d+\.attention\.(query|key|query_up|kv_down)\.(weight|bias)\Z")


@lru_cache(maxsize=4096)
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)") + r"\Z")


def matches(template: str, name: str) -> bool:
    """Whether a name, as the tables of families have it, is that of a template."""
    return _pattern(template).match(name) is not None


@lru_cache(maxsize=64)
def _to_theirs(names: Names) -> list[tuple[re.Pattern[str], tuple[str, str]]]:
    return [(_pattern(ours), (ours, theirs)) for ours, theirs in names]


@lru_cache(maxsize=64)
def _to_ours(names: Names) -> list[tuple[re.Pattern[str], tuple[str, str]]]:
    return [(_pattern(theirs), (theirs, ours)) for ours, theirs in names]


@lru_cache(maxsize=64)
def _parts(names: Names) -> dict[str, tuple[str, ...]]:
    """Their templates -> ours, in order."""
    parts: dict[str, list[str]] = {}
    for ours, theirs in names:
        parts.setdefault(theirs, []).append(ours)
    return {theirs: tuple(found) for theirs, found in parts.items()}


@lru_cache(maxsize=64)
def _zero(family: Family) -> list[re.Pattern[str]]:
    return [_pattern(ours) for ours in family.zero]


@lru_cache(maxsize=64)
def _derived(family: Family) -> list[re.Pattern[str]]:
    return [_pattern(theirs) for theirs in family.derived]


_COPY_OF = [(_pattern(theirs), ours) for ours, theirs in _COPIES.items()]


def _find(name: str, table: list[tuple[re.Pattern[str], tuple[str, str]]]) -> tuple[str, str, str] | None:
    """The template of a name, that of the corresponding one, and the corresponding name, with the placeholder `{e}` for stacked experts;
    None if there is none."""
    for pattern, (own, other) in table:
        if match := pattern.match(name):
            return own, other, other.replace("{i}", match.groupdict().get("i") or "")
    return None


def _our_names(theirs: str, family: Family) -> list[str]:
    """Our names of a tensor of theirs, as the table has them; several if its parts, or the kinds of feed-forward blocks, have one name."""
    table = _to_ours(family.names)
    if found := [one[2] for row in table if (one := _find(theirs, [row]))]:
        return found
    raise UserError(f"tensor {theirs} has no counterpart; this is not a model of a class that lmworks converts")


def huggingface_name(ours: str, model: Model, family: Family) -> str:
    """Hugging Face's name of the tensor that one of ours is, or is a part of; `{e}` is a placeholder for the expert in a stacked one."""
    if found := _find(name_in_table(ours, model), _to_theirs(family.names)):
        return found[2]
    raise UserError(f"{family.name} has no tensor for {ours}; the config and the weights are of different models")


def is_exported(ours: str, family: Family) -> bool:
    """Whether one of our tensors exists in models of the family; if not, it must be zero."""
    return not any(pattern.match(ours) for pattern in _zero(family))


@dataclass(frozen=True)
class Packing:
    """A tensor of Hugging Face's format, or of llama.cpp, that holds the rows of several of ours: in each of `groups` groups, an equal part
    of each of them.

    `name` is its name, `ours` are our names in the order of the rows. With one group the parts follow each other.
    """

    name: str
    ours: tuple[str, ...]
    groups: int

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """Theirs, from ours in order. They may be other tensors with the same rows."""
        return torch.cat([part.unflatten(0, (self.groups, -1)) for part in parts], dim=1).flatten(0, 1)

    def unpack(self, packed: Tensor, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """Ours, with so many rows each, from theirs."""
        grouped = packed.unflatten(0, (self.groups, -1))
        return tuple(part.flatten(0, 1) for part in grouped.split([count // self.groups for count in rows], dim=1))

    def boxes(self, part: TensorSlice, rows: Sequence[int]) -> Iterator[TensorSlice]:
        """A slice of one of ours, as slices of theirs: one for each group of which it has rows. `rows` are those of all parts."""
        own = self.ours.index(part.name)
        every, before, of_group = (sum(some) // self.groups for some in (rows, rows[:own], rows[own : own + 1]))
        first, last = part.offsets[0], part.offsets[0] + part.sizes[0]
        for group in range(first // of_group, -(-last // of_group)):
            begin, end = max(first, group * of_group), min(last, (group + 1) * of_group)
            yield replace(
                part, shape=(sum(rows), *part.shape[1:]), sizes=(end - begin, *part.sizes[1:]),
                offsets=(group * every + before + begin - group * of_group, *part.offsets[1:]),
                values=partial(_rows, part, begin - first, end - first),
            )  # fmt: skip


def packing(ours: str, model: Model, family: Family) -> Packing | None:
    """The packed tensor of which one of ours is a part; None if it is a tensor of its own."""
    found = packing_in(family.names, ours, model, family.groups)
    return found if found and len(found.ours) > 1 else None


def packing_in(names: Names, ours: str, model: Model, groups: Mapping[str, Callable[[Model], int]] | None = None) -> Packing | None:
    """The tensor of which one of ours is a part by a table of names, alone or with others; None if the table does not have it."""
    if (found := _find(name_in_table(ours, model), _to_theirs(names))) is None:
        return None
    own, template, theirs = found
    # of one block: a class may have one name for the matrices of a dense block and of a shared expert, of which a layer has one
    block, count = _block(own), (groups or {}).get(template)
    parts = tuple(part for part in _parts(names)[template] if _block(part) == block)
    places = (own[: at + 1] for at, letter in enumerate(own) if letter == ".")
    common = [start for start in places if all(part.startswith(start) for part in parts)][-1] if len(parts) > 1 else own
    start = ours.removesuffix(own.removeprefix(common))
    return Packing(theirs, tuple(start + part.removeprefix(common) for part in parts), count(model) if count else 1)


def _block(ours: str) -> str:
    """The block that a tensor is of: the modules around its own. A norm of a layer is one by itself."""
    module = ours.rpartition(".")[0]
    return module if module.endswith("_norm") else module.rpartition(".")[0]


def to_huggingface(state: Mapping[str, Tensor], model: Model) -> Iterator[tuple[str, Tensor]]:
    """Tensors of `model` under Hugging Face's names, one at a time, so that a large model is never in memory twice. Those that are parts
    of one tensor there must all be in `state` (`packed_together`)."""
    assert model.num_hidden_layers
    family = family_of(model)
    for name, tensor in state.items():
        numbered = _number_mtp_layers(name, model.num_hidden_layers)
        if not is_exported(numbered, family):
            if tensor.any():
                raise UserError(f"{name} is not zero, and {family.name} has no such tensor; this model cannot be exported as that class")
            continue
        theirs = huggingface_name(name, model, family)
        if (packed := packing(name, model, family)) is not None:
            if name == packed.ours[0]:
                yield theirs, packed.pack([state[part] for part in packed.ours])
        elif "{e}" in theirs:
            yield from ((theirs.replace("{e}", str(expert)), weight) for expert, weight in enumerate(tensor.unbind(0)))
        else:
            yield theirs, _as_theirs(name, tensor, model, family)
        if name in _COPIES and exports_mtp(model) and model.mtp:
            yield from (
                (_COPIES[name].replace("{i}", str(model.num_hidden_layers + depth)), tensor.clone())
                for depth in range(model.mtp.num_nextn_predict_layers)
            )


def packed_together(names: Iterable[str], model: Model) -> Iterator[tuple[str, ...]]:
    """Our names in order, those of parts of one Hugging Face tensor together, at the place of the first."""
    family, layers = family_of(model), model.num_hidden_layers
    assert layers
    for name in names:
        packed = packing(name, model, family) if is_exported(_number_mtp_layers(name, layers), family) else None
        if packed is None or name == packed.ours[0]:
            yield (name,) if packed is None else packed.ours


def original_of(theirs: str) -> str | None:
    """Our name of the tensor of which a Hugging Face tensor is a copy, for a layer of multi-token prediction; None if it is no copy."""
    return next((ours for pattern, ours in _COPY_OF if pattern.match(theirs)), None)


def sources(part: TensorSlice, state: Mapping[str, Tensor], model: Model, family: Family) -> Iterator[tuple[str, TensorSlice]]:
    """This rank's slice of one of our tensors, as slices of Hugging Face tensors by name: a stack of experts gives one per expert, and a
    part of a packed tensor one per group. `state` has the shapes of the other parts."""
    assert model.num_hidden_layers
    numbered = _number_mtp_layers(part.name, model.num_hidden_layers)
    if not is_exported(numbered, family):
        return
    theirs = huggingface_name(part.name, model, family)
    if (packed := packing(part.name, model, family)) is not None:
        yield from ((theirs, box) for box in packed.boxes(part, [state[name].shape[0] for name in packed.ours]))
        return
    if "{e}" not in theirs:
        yield theirs, part
        return
    for at in range(part.sizes[0]):
        box = TensorSlice(part.name, part.dtype, part.shape[1:], part.offsets[1:], part.sizes[1:], partial(_row, part, at))
        yield theirs.replace("{e}", str(part.offsets[0] + at)), box


def _row(part: TensorSlice, at: int) -> Tensor:
    return part.values()[at]


def _rows(part: TensorSlice, begin: int, end: int) -> Tensor:
    return part.values()[begin:end]


def why_missing(ours: str) -> str:
    """The end of a message that a checkpoint lacks one of our tensors."""
    if ours == "head.weight":
        return "if the head is the embedding, config.json must have tie_word_embeddings true"
    return "the config and the weights are of different models"


def refuse_foreign(names: Iterable[str], state: Mapping[str, object], model: Model, family: Family) -> None:
    """Raise `UserError` for a Hugging Face tensor without a counterpart in `state`, which has all tensors of `model`."""
    known = {name_in_table(name, model) for name in state}
    for theirs in names:
        derived = theirs.endswith("rotary_emb.inv_freq") or any(pattern.match(theirs) for pattern in _derived(family))
        if derived or theirs.startswith(family.unread) or original_of(theirs) is not None:
            continue
        if not known & {*_our_names(theirs, family)}:
            raise UserError(f"tensor {theirs} does not belong to this model; the config and the weights are of different models")


def is_shifted(name: str, family: Family) -> bool:
    """Whether one of our tensors is that of the class plus 1."""
    return family.norms_plus_one and name.endswith("norm.weight") and not name.endswith("attention.norm.weight")


def from_shifted(tensor: Tensor) -> Tensor:
    """The factors of a norm, from the weight of a class that adds 1 to it; in fp64, so that they are rounded once."""
    return tensor.double() + 1


def rounded_in_class(name: str, tensor: Tensor, model: Model, dtype: torch.dtype) -> Tensor:
    """One of our tensors with the values that files of the class in `dtype` have of it."""
    if not is_shifted(name, family_of(model)):
        return tensor.to(dtype)
    return from_shifted((tensor.double() - 1).to(dtype))


def is_interleaved(name: str, model: Model, family: Family) -> bool:
    """Whether one of our tensors has rotated rows, which are interleaved in Hugging Face's format."""
    assert model.num_hidden_layers
    rotated = model.mla is not None or family.interleaved_rope
    return rotated and _ROTATED.match(_number_mtp_layers(name, model.num_hidden_layers)) is not None


def to_interleaved(name: str, tensor: Tensor, model: Model) -> Tensor:
    """Reorder the rows of one of our full tensors, or of another one with the same rows, to Hugging Face's order."""
    return _interleave(name, tensor, model)


def from_interleaved(name: str, tensor: Tensor, model: Model) -> Tensor:
    """Reorder the rows of a full Hugging Face tensor to our order."""
    return _interleave(name, tensor, model, back=True)


def exports_mtp(model: Model) -> bool:
    """Whether multi-token prediction is exported: only with experts, and if the model's class supports it."""
    return model.mtp is not None and model.moe is not None and family_of(model).mtp


def _number_mtp_layers(name: str, layers: int) -> str:
    """Our name with the layer numbers that layers of multi-token prediction have in Hugging Face's format, their blocks as layers."""
    match = re.match(r"mtp\.(\d+)\.(block\.)?(.*)", name)
    return f"{'layers' if match[2] else 'mtp'}.{layers + int(match[1])}.{match[3]}" if match else name


def name_in_table(name: str, model: Model) -> str:
    """Our name as the tables of families have it: with the numbers of layers in Hugging Face's format, and in layers of another kind than
    attention with the section of that kind."""
    assert model.num_hidden_layers
    name = _number_mtp_layers(name, model.num_hidden_layers)
    match = _MIXER.match(name)
    mixer = model.mixer(int(match[1])) if match else ""
    return f"layers.{match[1]}.{mixer}.{name[match.end() :]}" if match and mixer in SECTIONS else name


def reordered(name: str, tensor: Tensor, model: Model, family: Family, back: bool = False) -> Tensor:
    """A tensor whose rows are those of one of our tensors, in the order of Hugging Face's format, or `back` in ours."""
    return _interleave(name, tensor, model, back) if is_interleaved(name, model, family) else tensor


def _as_theirs(name: str, tensor: Tensor, model: Model, family: Family) -> Tensor:
    return tensor.float() - 1 if is_shifted(name, family) else reordered(name, tensor, model, family)


def _interleave(name: str, tensor: Tensor, model: Model, back: bool = False) -> Tensor:
    """Reorder the rotated rows of each head from halves to interleaved, or back. In latent attention they are the last of a head, and
    `kv_down` has the key of one head for all; otherwise they are the first."""
    if (mla := model.mla) is not None:
        heads = tensor.unflatten(0, (1, -1) if "kv_down" in name else (-1, mla.qk_nope_head_dim + mla.qk_rope_head_dim))
        kept, rotated = heads.split((heads.shape[1] - mla.qk_rope_head_dim, mla.qk_rope_head_dim), dim=1)
        return torch.cat((kept, _turned(rotated, back)), dim=1).flatten(0, 1)
    assert model.head_dim
    width = int(model.head_dim * model.rope.partial_rotary_factor)
    rotated, kept = tensor.unflatten(0, (-1, model.head_dim)).split((width, model.head_dim - width), dim=1)
    return torch.cat((_turned(rotated, back), kept), dim=1).flatten(0, 1)


def _turned(rotated: Tensor, back: bool) -> Tensor:
    return rotated.unflatten(1, (-1, 2) if back else (2, -1)).transpose(1, 2).flatten(1, 2) if rotated.shape[1] else rotated
