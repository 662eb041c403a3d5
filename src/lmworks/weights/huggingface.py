"""Reads Hugging Face checkpoints: config.json and safetensors, a tensor or a slice of one at a time.

`map_weights` tells which file holds each tensor from the headers alone: no weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.checkpoint.save_plan import TensorSlice, local_slice
from lmworks.errors import UserError
from lmworks.io.files import explain_damage, read_json
from lmworks.model import Transformer
from lmworks.recipe.families.family import Family
from lmworks.recipe.families.registry import family_in, from_config
from lmworks.recipe.gguf_header import is_gguf
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.model import Model as Config
from lmworks.recipe.weight_files import ADAPTER, layers_ahead, left_aside, safetensors_of
from lmworks.recipe.weights import stored_model
from lmworks.ui import terminal
from lmworks.weights.gguf import GgufWeights
from lmworks.weights.names import (
    from_interleaved,
    from_shifted,
    huggingface_name,
    is_interleaved,
    is_shifted,
    original_of,
    refuse_foreign,
    sources,
    why_missing,
)
from lmworks.weights.quantized import dequantized
from lmworks.weights.stacked import split_stacks
from lmworks.weights.verified import verify_export

_MEAN_ROWS = 8192  # rows that are read at a time, for their mean or to compare them
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
"""Names of weights that are read by running what is in them."""
_SMALL = 1 << 20  # elements; smaller models are not checked


@torch.no_grad()
def load_weights(
    directory: Path, state: Mapping[str, Tensor], model: Config, *, extend: bool = False, added: range = range(0)
) -> None:  # fmt: skip
    """Copy the weights of a Hugging Face checkpoint into `state`, tensors of `model` under our names. This rank may hold slices of them;
    only these are read.

    `extend`: `model` may have more vocabulary rows than the checkpoint, and layers of multi-token prediction of which it has nothing, which
    keep their values.
    `added`: the ids of tokens that the tokenizer of the checkpoint does not have. Their rows, and those that the checkpoint does not have,
    become the mean of the others. So a new token is at first no likelier than the average one (Hewitt 2021, "Initializing New Word
    Embeddings for Pretrained Language Models"; `resize_token_embeddings` of transformers draws around the same mean).
    Raises `UserError` if the weights do not match `model`, and with `extend` if one of them is no number, which is otherwise said.
    """
    with ExitStack() as stack:
        handles = {name: handle for handle in open_all(directory, stack).values() for name in handle.keys()}  # noqa: SIM118
        config = read_json(directory / "config.json")
        family = family_in(config)
        with torch.device("meta"):
            refuse_foreign(handles, Transformer(model).state_dict(), model, family)
        interleaved, stored_ahead = bool(config.get("rope_interleave", True)), layers_ahead(handles, model.num_hidden_layers or 0)
        for name, tensor in state.items():
            ours = "embedding.weight" if name == "head.weight" and model.tie_word_embeddings else name
            part = local_slice(ours, tensor)
            for theirs, box in sources(part, state, model, family) if part is not None else ():
                if theirs in handles:
                    change: Callable[[Tensor], Tensor] | None = None
                    if is_shifted(ours, family):
                        change = from_shifted
                    elif interleaved and is_interleaved(ours, model, family):
                        change = partial(from_interleaved, ours, model=model)
                    _read_slice(handles[theirs].get_slice(theirs), theirs, box, change, extend, added)
                elif not (extend and _is_added(name, stored_ahead)):
                    raise UserError(f"{directory} has no tensor {theirs}; {why_missing(ours)}")


def _is_added(ours: str, stored_ahead: int) -> bool:
    """Whether one of our tensors is of a layer of multi-token prediction behind those that the checkpoint has."""
    return ours.startswith("mtp.") and int(ours.split(".")[1]) >= stored_ahead


def _read_slice(
    source: Any, theirs: str, box: TensorSlice, change: Callable[[Tensor], Tensor] | None, extend: bool, added: range
) -> None:  # fmt: skip
    """Copy the slice `box` of a Hugging Face tensor; with `change`, of its rows or values, the whole tensor is read."""
    shape = tuple(source.get_shape())
    vocabulary = box.name in ("embedding.weight", "head.weight")
    fewer_rows = extend and vocabulary and shape[0] < box.shape[0]
    if shape[1:] != box.shape[1:] or (shape != box.shape and not fewer_rows):
        raise UserError(f"tensor {theirs} has shape {shape}, but the config says {box.shape}")
    begin, count = box.offsets[0], max(0, min(box.sizes[0], shape[0] - box.offsets[0]))
    slices = (slice(begin, begin + count), *(slice(at, at + size) for at, size in zip(box.offsets[1:], box.sizes[1:], strict=True)))
    if count:
        read = change(source[:])[slices] if change else source[slices]
        if not read.is_floating_point() or read.dtype.itemsize == 1:
            raise UserError(f"tensor {theirs} holds {str(read.dtype).removeprefix('torch.')}; lmworks does not read this quantization")
        if read.isnan().any():
            _say_or_refuse(f"tensor {theirs} has weights that are not numbers (NaN)", refuse=extend)
        box.values()[:count].copy_(read)
    begin, end = box.offsets[0], box.offsets[0] + box.sizes[0]
    if vocabulary and (rows := [row - begin for row in (*added, *range(shape[0], box.shape[0])) if begin <= row < end]):
        values = box.values()
        values[rows] = _mean_row(source, slices[1], min([shape[0], *added[:1]])).to(values)


def _say_or_refuse(what: str, refuse: bool) -> None:
    if refuse:
        raise UserError(f"{what}; the files are damaged, or training had failed: take others")
    terminal.console.print(what, style="yellow")


def _mean_row(source: Any, columns: slice, rows: int) -> Tensor:
    """The mean of the first rows of a tensor in a file, which need not fit into memory."""
    parts = (source[begin : min(rows, begin + _MEAN_ROWS), columns].double().sum(0) for begin in range(0, rows, _MEAN_ROWS))
    return torch.stack(list(parts)).sum(0) / rows


def refuse_unequal_copies(directory: Path, model: Config) -> None:
    """Raise `UserError` if a checkpoint has a tensor beside the one that `model` reads in its place, and their values differ: a head
    although `tie_word_embeddings` says that it is the embedding, or the embedding or the head of a layer of multi-token prediction.

    `transformers` keeps a head that differs, whatever the config says; other programs go by the config.
    """
    with ExitStack() as stack:
        handles = {name: handle for handle in open_all(directory, stack).values() for name in handle.keys()}  # noqa: SIM118
        family = family_in(read_json(directory / "config.json"))
        embedding, head = (huggingface_name(name, model, family) for name in ("embedding.weight", "head.weight"))
        own = {"embedding.weight": embedding, "head.weight": embedding if model.tie_word_embeddings else head}
        if model.tie_word_embeddings and head in handles and not _equal(handles, head, embedding):
            raise UserError(
                f"{directory}: tensor {head} differs from {embedding}, but by config.json, or the default of its class, they are tied; "
                f"write tie_word_embeddings false to use it, or remove the tensor"
            )
        for theirs in handles:
            if (ours := original_of(theirs)) is not None and not _equal(handles, theirs, own[ours]):
                raise UserError(
                    f"{directory}: tensor {theirs} is not equal to the model's own; multi-token prediction shares it in lmworks"
                )


def _equal(handles: Mapping[str, Any], name: str, other: str) -> bool:
    """Whether two tensors of a checkpoint have the same values; they need not fit into memory."""
    if other not in handles:
        return True  # the model has none, which is refused elsewhere
    first, second = handles[name].get_slice(name), handles[other].get_slice(other)
    rows = first.get_shape()[0] if first.get_shape() else 0
    return first.get_shape() == second.get_shape() and all(
        torch.equal(first[begin : begin + _MEAN_ROWS].float(), second[begin : begin + _MEAN_ROWS].float())
        for begin in range(0, rows, _MEAN_ROWS)
    )


def read_model(directory: Path) -> Transformer:
    """Read a model from a Hugging Face checkpoint. Raises `UserError` if lmworks does not support its class or options, or if files are
    not those that passed a comparison whose report is beside them."""
    directory = Path(directory)
    verify_export(directory)
    name_left_aside(directory)
    with explain_damage(directory / "config.json"):
        described = stored_model(directory)
    sizes = _sizes(directory)
    _refuse_wrong_size(described, sizes, directory)
    model = Transformer(described)
    load_weights(directory, dict(model.state_dict()), model.config)
    refuse_unequal_copies(directory, model.config)
    return model.eval()


def _sizes(directory: Path) -> dict[str, int]:
    """The number of elements of each tensor, from the headers of the files."""
    with ExitStack() as stack:
        handles = open_all(directory, stack).values()
        return {name: math.prod(handle.get_slice(name).get_shape()) for handle in handles for name in handle.keys()}  # noqa: SIM118


def _refuse_wrong_size(described: Config, sizes: dict[str, int], directory: Path) -> None:
    """Raise `UserError` if the config describes far more weights than the files have, before memory is allocated for them. Exact shapes
    are checked when the weights are read."""
    stored, wanted = sum(sizes.values()), None
    if (described.num_hidden_layers or 0) <= len(sizes) and (described.moe is None or described.moe.n_routed_experts <= len(sizes)):
        try:
            with torch.device("meta"):
                wanted = sum(tensor.numel() for tensor in Transformer(described).state_dict().values())
        except (RuntimeError, OverflowError, TypeError):  # sizes overflow
            wanted = None
    if wanted is None or wanted > 2 * stored + _SMALL:
        raise UserError(f"{directory / 'config.json'} does not describe the {stored:,} weights beside it; they belong to different models")


def open_all(directory: Path, stack: ExitStack) -> dict[Path, Any]:
    """Open all files of weights; they are memory-mapped or read in slices, never whole. Raises `UserError` for a damaged one."""
    files, config = files_of(directory), read_json(directory / "config.json")
    if is_gguf(files[0]):
        return {files[0]: GgufWeights(files[0], from_config(config))}
    opened = {file: _open(file, stack) for file in files}
    _refuse_duplicates(opened)
    found = dequantized(directory, config, opened)
    return split_stacks(_named_as_in_class(found, config), family_in(config))


def _refuse_duplicates(opened: Mapping[Path, Any]) -> None:
    """Raise `UserError` if two files have a tensor of one name, of which the last that is read would count."""
    of: dict[str, Path] = {}
    for file, handle in opened.items():
        for name in handle.keys():  # noqa: SIM118
            if name in of:
                raise UserError(f"{file} and {of[name]} both have the tensor {name}; keep the files of one model there")
            of[name] = file


@cache
def name_left_aside(directory: Path) -> None:
    """Say once which files beside the weights look like weights and are not read, and which layers of config.json have no weights."""
    if files_of(directory)[0].suffix == ".safetensors" and (names := left_aside(directory)):
        terminal.console.print(f"{directory}: not read, as in transformers: {', '.join(names)}", style="yellow")
    models = from_config(read_json(directory / "config.json")), stored_model(directory)
    stated, stored = (model.mtp.num_nextn_predict_layers if model.mtp else 0 for model in models)
    if stored < stated:
        terminal.console.print(
            f"{directory}: config.json states num_nextn_predict_layers {stated}, but the files have weights of {stored}; layers without "
            "weights are left out",
            style="yellow",
        )


def _named_as_in_class(handles: dict[Path, Any], config: dict[str, Any]) -> dict[Path, Any]:
    """Open files of safetensors in which tensors have the names of the class, where the files have others: with another prefix; without
    one, as AutoModel of transformers saves a model without its head; or with the name of the head for a tied embedding, of which
    `safetensors.torch.save_model` keeps one."""
    family, model = family_in(config), from_config(config)
    embedding, head = (huggingface_name(name, model, family) for name in ("embedding.weight", "head.weight"))
    prefix = embedding.partition(".")[0] + "."
    stored = [name for handle in handles.values() for name in handle.keys()]  # noqa: SIM118
    names = {name: _with_prefix(name, family.prefixes) for name in stored}
    if embedding.removeprefix(prefix) in names and not any(name.startswith(prefix) for name in names.values()):
        names = {name: name if name == head else prefix + name for name in stored}
    if model.tie_word_embeddings and head in names.values() and embedding not in names.values():
        names = {name: embedding if ours == head else ours for name, ours in names.items()}
    return handles if all(map(str.__eq__, names, names.values())) else {file: _Renamed(one, names) for file, one in handles.items()}


class _Renamed:
    """An open file of safetensors whose tensors have other names than in the file; `names` are those by the names in the file."""

    def __init__(self, handle: Any, names: Mapping[str, str]) -> None:
        self._handle = handle
        self._names = {names[name]: name for name in handle.keys()}  # noqa: SIM118

    def keys(self) -> list[str]:
        return list(self._names)

    def get_slice(self, name: str) -> Any:
        return self._handle.get_slice(self._names[name])

    def get_tensor(self, name: str) -> Any:
        return self._handle.get_tensor(self._names[name])


def _with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    return next((own + name.removeprefix(start) for start, own in prefixes.items() if name.startswith(start)), name)


def files_of(directory: Path) -> list[Path]:
    """The files of weights of a checkpoint: safetensors (`safetensors_of`), or a GGUF file with its parts; `UserError` if there are none,
    or if an adapter lies beside them, which `transformers` would add."""
    files = safetensors_of(directory) or sorted(directory.glob("*.gguf"))
    if (directory / ADAPTER).is_file():
        raise UserError(f"{directory / ADAPTER} is of an adapter, which transformers would add to this model; move one of the two away")
    if not files:
        raise UserError(f"{directory} has no .safetensors file{only_pickled(directory)}")
    for file in files:
        if not file.is_file():  # opening a pipe would wait for ever
            raise UserError(f"{file} is not a regular file; put the weights there")
    return files


def only_pickled(directory: Path) -> str:
    """For the message that a directory has no safetensors: ", only NAME, which is pickled ..."; empty if there are no pickled weights."""
    found = next((path.name for pattern in PICKLED for path in sorted(directory.glob(pattern))), None)
    if found is None:
        return ""
    return (
        f", only {found}, which is pickled and could run any program: if you trust it, load it in transformers and write it again "
        "with save_pretrained(DIRECTORY)"
    )


def _open(file: Path, stack: ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except SafetensorError as error:
        raise UserError(f"{file} is damaged ({error}); put a good copy there, or export it again") from None


_EXTENDED = ("embedding.weight", "head.weight")  # may have more rows than the file


@dataclass(frozen=True)
class Wanted:
    """A tensor of a checkpoint: `ours` is our name of it, of the stack of experts that it is part of, or of one of those in it."""

    ours: str
    shape: tuple[int, ...]


def wanted_tensors(model: Model, family: Family) -> dict[str, Wanted]:
    """Every tensor that `model` is made of, by its name in Hugging Face's format. Takes no memory, whatever the size."""
    with torch.device("meta"):
        state = Transformer(model).state_dict()
    found: dict[str, Wanted] = {}
    for name, tensor in state.items():
        ours = "embedding.weight" if name == "head.weight" and model.tie_word_embeddings else name
        part = local_slice(ours, tensor)
        assert part is not None
        found |= {theirs: Wanted(ours, box.shape) for theirs, box in sources(part, state, model, family)}
    return found


def map_weights(directory: Path, model: Model) -> dict[str, Path]:
    """The file of each tensor of `model` in the checkpoint in `directory`. The vocabulary of `model` may be larger than the checkpoint's,
    and it may have layers of multi-token prediction of which the checkpoint has nothing.

    Raises `UserError` for files that are damaged or pickled, and for tensors that are missing, foreign, or of another shape.
    """
    directory = Path(directory)
    name_left_aside(directory)
    family = family_in(read_json(directory / "config.json"))
    wanted = wanted_tensors(model, family)
    with torch.device("meta"):
        ours = Transformer(model).state_dict()
    found: dict[str, Path] = {}
    stored_ahead = 0
    with ExitStack() as stack:
        for file, handle in open_all(directory, stack).items():
            names = handle.keys()
            stored_ahead = max(stored_ahead, layers_ahead(names, model.num_hidden_layers or 0))
            refuse_foreign(names, ours, model, family)
            for theirs in (name for name in names if name in wanted):
                shape, expected = tuple(handle.get_slice(theirs).get_shape()), wanted[theirs].shape
                fewer_rows = wanted[theirs].ours in _EXTENDED and shape[:1] < expected[:1] and shape[1:] == expected[1:]
                if shape != expected and not fewer_rows:
                    raise UserError(f"{file}: tensor {theirs} has shape {shape}, but the config says {expected}")
                found[theirs] = file
    missing = [name for name, one in wanted.items() if name not in found and not _is_added(one.ours, stored_ahead)]
    if missing:
        more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
        raise UserError(f"{directory} has no tensor {missing[0]}{more}; {why_missing(wanted[missing[0]].ours)}")
    return found
