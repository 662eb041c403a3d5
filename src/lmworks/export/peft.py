"""Writes and reads low-rank adapters in PEFT's format: adapter_config.json and adapter_model.safetensors with the names of the Hugging Face
class.

Those of routed experts are written for each expert, as the experts themselves are in a checkpoint. Where the class has one matrix for
several of ours, their k adapters of rank r are one of rank k r: A has the rows of all of them, and B is zero outside of their blocks. So
`rank_pattern` and `alpha_pattern` name these matrices. An adapter of rank r of such a matrix, as PEFT makes it, is read as k adapters with
the same A.

Names and matrices are those of the class of the base model (`class_of`): adapters of Phi-4 are for Phi-4, although a whole model tuned from
it is exported as the simplest class that computes the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.checkpoint import listing
from lmworks.checkpoint.save_plan import local_slice
from lmworks.checkpoint.tensor_files import Reader
from lmworks.errors import UserError
from lmworks.io.files import atomic_path, read_json, write_json
from lmworks.io.run_layout import BASE, of_stage
from lmworks.model import Transformer
from lmworks.model.lora import attach
from lmworks.recipe.families.family import Family, said
from lmworks.recipe.families.registry import family_in, family_of
from lmworks.recipe.parameters import parameters
from lmworks.recipe.schema.model import Lora, Model, is_adapter, matrix_of_adapter
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.weights import find_start_weights
from lmworks.weights import reference
from lmworks.weights.names import Packing, huggingface_name, packing, reordered
from lmworks.weights.run_models import stages_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED, _REWRITE = "adapter_model.bin", "if you trust it, load it in peft and write it again with save_pretrained(DIRECTORY)"
_PREFIX = "base_model.model."
_BASE = "lmworks_base"  # in the metadata of the weights: the hash of the tensors of the base model
_PATTERNS = ("rank_pattern", "alpha_pattern")
_COMPARED = {"peft_type", "r", "lora_alpha", "use_rslora", *_PATTERNS}  # with the recipe
_FREE = {
    # names, and what counts in training only
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout",
    # which modules have adapters, which the tensors say
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
    # options of what other keys choose
    "eva_config", "corda_config", "lora_ga_config", "loftq_config", "qalora_group_size", "megatron_core",
}  # fmt: skip
_VALUES = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva")}  # with others PEFT changes the base
_UNSET: tuple[Any, ...] = (None, False, "", [], {})  # what every other key must be: it may change what the adapter computes
_CONVERTED = "; peft writes it for the unchanged base model with save_pretrained(..., path_initial_model_for_weight_conversion=...)"
_EXPERTS = (  # classes of whose experts PEFT loads adapters: those of its `_MODEL_TO_CONVERSION_PATTERN`
    "deepseek_v3", "glm4_moe", "glm4_moe_lite", "mellum", "minimax", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_next",
)  # fmt: skip
_MAMBA, _UNLOADED = ("falcon_h1", "nemotron_h"), "out_proj"  # PEFT's `_check_lora_target_modules_mamba`


def class_of(base: Path, model: Model) -> Family:
    """The class that the base model of adapters has in `transformers`: that of the folder whose files the checkpoint `base` names,
    otherwise that of an export."""
    about = listing.reference_of(base)
    return family_of(model) if about is None else family_in(read_json(reference.find(base, about).path / "config.json"))


def class_before(recipe: Recipe, stage: str) -> Family:
    """The same of the base model that the adapters of a stage will have."""
    if stages_of(recipe, before=of_stage(stage)) == [BASE] and recipe.start_from is not None and not recipe.trains_base:
        start = find_start_weights(recipe.start_from)
        if start.kind == "huggingface" and recipe.model.mtp is None:
            return family_in(read_json(start.path / "config.json"))
    return family_of(recipe.model)


def why_not_loaded(names: Iterable[str], model: Model, family: Family, options: Lora) -> str | None:
    """Why PEFT would not load these adapters of ours, or would compute something else with them; None if it computes the same."""
    theirs = {matrix_of_adapter(name).removesuffix(".weight"): _module(name, model, family) for name in names}
    mamba = [matrix for matrix, module in theirs.items() if family.model_type in _MAMBA and module.endswith(f".{_UNLOADED}")]
    experts = [matrix for matrix, module in theirs.items() if "{e}" in module]
    gates, ups = ({matrix.removesuffix(end) for matrix in experts if matrix.endswith(end)} for end in (".gate", ".up"))
    remedy = "name other targets"
    if mamba:
        what = f"{_UNLOADED} of {family.name}"
    elif experts and family.model_type not in _EXPERTS:
        what = f"experts of {family.name}"
    elif gates != ups:
        what, remedy = "the gate of experts without up, or of up without the gate", "name both"
    elif gates and options.rslora:
        what, remedy = "experts with the scale of lora.rslora", "set it to false"
    else:
        return None
    return (
        f"PEFT does not load adapters of {what}, which lora.targets includes as {[*mamba, *experts][0]}; {remedy}, or use the merged model"
    )


def adapter_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The adapters of a checkpoint that holds nothing else, by our names."""
    reader = Reader(checkpoint)
    prefix = "model/"
    return {
        name.removeprefix(prefix): reader.read_slice(name, (0,) * len(record.shape), record.shape)
        for name, record in reader.table.items() if name.startswith(prefix)
    }  # fmt: skip


def write_peft(
    checkpoint: Path, options: Lora, model: Model, family: Family, base: str, base_hash: str, directory: Path
) -> None:  # fmt: skip
    """Write the adapters of a checkpoint. `base` names the base model in the config, and `family` is its class."""
    from safetensors.torch import save_file

    state = adapter_tensors(checkpoint)
    tensors = {theirs: tensor.float().contiguous() for theirs, tensor in their_adapters(state, model, family)}
    targets = _targets(state, model, family)
    # PEFT adapts parameters, as stacks of experts are, without dropout only
    dropout = 0.0 if "target_parameters" in targets or any("experts" in name for name in state) else options.dropout
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True, "bias": "none",
        "r": options.rank, "lora_alpha": options.alpha, "lora_dropout": dropout, "use_rslora": options.rslora,
        **targets, "modules_to_save": None, "fan_in_fan_out": False,
        "init_lora_weights": True, **_Joined(state, model, family).patterns(options),
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_path(directory / WEIGHTS) as aside:
        save_file(tensors, aside, metadata={"format": "pt", _BASE: base_hash})
        aside.chmod(directory.stat().st_mode & 0o666)
    write_json(directory / CONFIG, config)


def unequal_adapters(checkpoint: Path, model: Model, family: Family, directory: Path) -> list[str]:
    """Names of the tensors in the file of `write_peft` that are not, bit for bit, those of the checkpoint."""
    from safetensors.torch import load_file

    stored = load_file(directory / WEIGHTS)
    written = dict(their_adapters(adapter_tensors(checkpoint), model, family))
    return [name for name in {**stored, **written} if name not in stored or not torch.equal(stored[name], written[name].float())]


def read_adapter(directory: Path, state: Mapping[str, Tensor], model: Model, options: Lora, base: Path) -> None:
    """`read_peft` for adapters of the checkpoint `base`."""
    read_peft(directory, state, model, class_of(base, model), options, listing.content_of(base))


@torch.no_grad()
def read_peft(
    directory: Path, state: Mapping[str, Tensor], model: Model, family: Family, options: Lora, base_hash: str | None
) -> None:  # fmt: skip
    """Copy a PEFT adapter into `state`, the adapters of `model` by our names, of which this rank may hold slices. `family` is the class of
    the base model.

    Raises `UserError` if the adapter does not have the options, the targets or the shapes of `state`, or names another base model
    (with `base_hash` None it may be any). Into a state on the meta device nothing is copied: that is a check.
    """
    from safetensors import SafetensorError, safe_open

    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            pickled = name == WEIGHTS and (directory / _PICKLED).is_file()
            why = f", only {_PICKLED}, which is pickled and could run any program: {_REWRITE}" if pickled else ""
            raise UserError(f"lora.init_from: {directory} is no PEFT adapter; it has no {name}{why}")
    config, joined = _read_config(directory / CONFIG), _Joined(state, model, family)
    _require_options(config, options, joined.patterns(options), directory)
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(safe_open(directory / WEIGHTS, framework="pt"))
        except SafetensorError as error:
            raise UserError(f"lora.init_from: {directory / WEIGHTS} is damaged ({error}); get it again from its origin") from None
        base = (handle.metadata() or {}).get(_BASE)
        if None not in (base, base_hash) and base != base_hash:
            raise UserError(f"lora.init_from: {directory} is an adapter of another base model; this run's has the hash {base_hash}")
        _require_targets(directory, set(handle.keys()), state, model, family)
        for name, tensor in state.items():
            names = _their_names(name, tensor, model, family)
            parts = [handle.get_tensor(theirs) for theirs in names]
            whole = torch.stack(parts) if tensor.ndim == 3 and len({part.shape for part in parts}) == 1 else parts[0]
            if (packed := packing(matrix_of_adapter(name), model, family)) is not None:
                whole = joined.part(name, whole, packed, bool(config.get(_PATTERNS[0])))
            if whole.shape != tensor.shape:
                raise UserError(
                    f"lora.init_from: {directory} is an adapter of another base model: {names[-1]} has the shape "
                    f"{tuple(parts[0].shape)}, and here it is {tuple(tensor.shape[-2:])}"
                )
            whole = reordered(matrix_of_adapter(name), whole, model, family, back=True) if name.endswith("B") else whole
            if (part := local_slice(name, tensor)) is not None:
                box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
                part.values().copy_(whole[box])


def _require_targets(directory: Path, found: set[str], state: Mapping[str, Tensor], model: Model, family: Family) -> None:
    """Raise `UserError` unless `found`, the tensors of a file, are the adapters in `state`, with the targets that would have them."""
    theirs = {name: _their_names(name, tensor, model, family) for name, tensor in state.items()}
    if found == {one for names in theirs.values() for one in names}:
        return
    possible: dict[str, set[str]] = {}
    for name, tensor in _every_adapter(model).items():
        possible.setdefault(matrix_of_adapter(name).removesuffix(".weight"), set()).update(_their_names(name, tensor, model, family))
    if unknown := sorted(found.difference(*possible.values())):
        raise UserError(
            f"lora.init_from: {directory} has the tensor {unknown[0]}, which is no adapter of a matrix that lora.targets can name: it is "
            "of another base model, or of its embedding or head; train an adapter of other modules"
        )
    adapted = [matrix for matrix, names in possible.items() if names <= found]
    targets = {next(end for end in _ends(matrix) if all(one in adapted for one in possible if f".{one}".endswith(f".{end}")))
               for matrix in adapted}  # fmt: skip
    raise UserError(
        f"lora.init_from: {directory} has adapters of other matrices than lora.targets names; set lora.targets to its own: "
        f"[{', '.join(sorted(targets))}]"
    )


def _ends(name: str) -> list[str]:
    """The ends of a name in whole parts, the shortest first."""
    parts = name.split(".")
    return [".".join(parts[at:]) for at in reversed(range(len(parts)))]


def _every_adapter(model: Model) -> dict[str, Tensor]:
    """The adapters of all matrices that can have one, of rank 1, on the meta device."""
    with torch.device("meta"):
        everything = Transformer(model)
        attach(everything, Lora(rank=1, targets=("all-linear", *(("experts",) if model.moe else ()))))
    return {name: value for name, value in everything.state_dict().items() if is_adapter(name)}


def _their_names(name: str, tensor: Tensor, model: Model, family: Family) -> list[str]:
    """PEFT's names of one of our adapter tensors: a stack of experts is the tensors of each."""
    theirs = _module(name, model, family)
    experts = range(tensor.shape[0] if "{e}" in theirs else 1)
    return [f"{_PREFIX}{theirs.replace('{e}', str(expert))}.lora_{name[-1]}.weight" for expert in experts]


def _module(name: str, model: Model, family: Family) -> str:
    """The name of the module in `transformers` of which one of our adapter tensors is; `{e}` is a placeholder for the expert."""
    theirs = huggingface_name(matrix_of_adapter(name), model, family).removesuffix(".weight")
    return next((own + theirs.removeprefix(start) for start, own in family.modules.items() if theirs.startswith(start)), theirs)


def their_adapters(state: Mapping[str, Tensor], model: Model, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Our adapters as PEFT has them."""
    joined = _Joined(state, model, family)
    for name, tensor in state.items():
        names = _their_names(name, tensor, model, family)
        if (packed := packing(matrix_of_adapter(name), model, family)) is not None:
            if matrix_of_adapter(name) == joined.adapted(packed)[0]:
                yield names[0], joined.whole(packed, name[-1])
        elif "experts" in name:
            yield from zip(names, tensor.unbind(0), strict=True)
        else:
            yield names[0], reordered(matrix_of_adapter(name), tensor, model, family) if name.endswith("B") else tensor


class _Joined:
    """The adapters in `state` of matrices that are parts of one matrix of the class, as an adapter of that one."""

    def __init__(self, state: Mapping[str, Tensor], model: Model, family: Family) -> None:
        self._state, self._model, self._family = state, model, family
        self._of = {matrix_of_adapter(name): name.removesuffix("A") for name in state if name.endswith("A")}
        self._rows = {parameter.name: parameter.shape[0] for parameter in parameters(model)}

    def adapted(self, packed: Packing) -> list[str]:
        """The matrices in `packed` that have an adapter."""
        return [matrix for matrix in packed.ours if matrix in self._of]

    def whole(self, packed: Packing, kind: str) -> Tensor:
        """A or B of the adapter of the packed matrix."""
        parts = {matrix: self._state[self._of[matrix] + kind].float() for matrix in self.adapted(packed)}
        return torch.cat(list(parts.values())) if kind == "A" else self._pack(packed, parts, blocks=True)

    def part(self, name: str, whole: Tensor, packed: Packing, blocks: bool) -> Tensor:
        """One of our tensors of A or B from that of the packed matrix, whose B has `blocks` or, with the rank of a single adapter, none.

        A tensor of another shape is returned as it is. Raises `UserError` if the adapter changes what is no part of ours.
        """
        matrices = self.adapted(packed)
        own, rows = matrices.index(matrix_of_adapter(name)), [self._rows[matrix] for matrix in packed.ours]
        if whole.shape[0 if name.endswith("A") else 1] % len(matrices) and blocks:
            return whole
        if name.endswith("A"):
            return whole.chunk(len(matrices))[own] if blocks else whole
        if whole.shape[0] != sum(rows):
            return whole
        found = dict(zip(packed.ours, packed.unpack(whole, rows), strict=True))
        if blocks:
            found |= {matrix: found[matrix].chunk(len(matrices), dim=1)[at] for at, matrix in enumerate(matrices)}
        parts = {matrix: found[matrix] for matrix in matrices}
        if not torch.equal(self._pack(packed, parts, blocks), whole.float()):
            theirs = packed.name.removesuffix(".weight")
            raise UserError(f"lora.init_from: the adapter of {theirs} is not one of {' and '.join(matrices)} alone; see lora.targets")
        return parts[matrices[own]]

    def _pack(self, packed: Packing, parts: Mapping[str, Tensor], blocks: bool) -> Tensor:
        """B of the packed matrix: rows of zeros where a part has no adapter, and with `blocks` columns of its own for each part."""
        rank = next(iter(parts.values())).shape[1]
        wide = []
        for matrix in packed.ours:
            columns = torch.zeros(self._rows[matrix], rank * (len(parts) if blocks else 1))
            if matrix in parts:
                begin = rank * list(parts).index(matrix) if blocks else 0
                columns[:, begin : begin + rank] = parts[matrix]
            wide.append(columns)
        return packed.pack(wide)

    def patterns(self, options: Lora) -> dict[str, dict[str, float]]:
        """`rank_pattern` and `alpha_pattern`: by the last part of a name if all matrices with it are alike, otherwise by whole names."""
        found = {}
        for matrix in self._of:
            if (packed := packing(matrix, self._model, self._family)) is not None:
                found[packed.name.removesuffix(".weight")] = len(self.adapted(packed))
        numbers = {theirs: number for theirs, number in found.items() if number > 1}
        ends = {theirs.rpartition(".")[2]: number for theirs, number in found.items()}
        if all(ends[theirs.rpartition(".")[2]] == number for theirs, number in found.items()):
            numbers = {end: number for end, number in ends.items() if number > 1}
        alpha = {theirs: options.alpha * number ** (0.5 if options.rslora else 1) for theirs, number in numbers.items()}
        ranks: dict[str, float] = {theirs: options.rank * number for theirs, number in numbers.items()}
        return dict(zip(_PATTERNS, (ranks, alpha), strict=True))


def _targets(state: Mapping[str, Tensor], model: Model, family: Family) -> dict[str, list[str]]:
    """`target_modules`, and `target_parameters` if there are some: ends of the names of the adapted modules and weights, as PEFT matches
    them, short where all of that name are adapted.

    PEFT takes a target module with the name of an expert's matrix for the stack of experts, so a module of that name, in a dense layer or
    a shared expert, is named by its weight. Routed experts have short names: in classes of today one module holds their stacks, and in
    others those without an adapter get one of zeros.
    """

    def modules(names: Iterable[str]) -> set[str]:
        return {_module(name, model, family) for name in names if name.endswith("A")}

    possible, found, weights = modules(_every_adapter(model)), set[str](), set[str]()
    of_experts = {name.rpartition(".")[2] for name in possible if "{e}" in name}
    linear = {name for name in possible if "{e}" not in name}
    adapted = modules(state)
    for name in adapted:
        last = name.rpartition(".")[2]
        short = last if all(other in adapted for other in linear if other.endswith(f".{last}")) else name
        if name not in linear:
            found.add(last)
        elif last in of_experts:
            weights.add(f"{short}.weight")
        else:
            found.add(short)
    return {"target_modules": sorted(found)} | ({"target_parameters": sorted(weights)} if weights else {})


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"lora.init_from: {path} is not the config of an adapter: {error}") from None


def _require_options(config: dict[str, Any], options: Lora, patterns: dict[str, dict[str, float]], directory: Path) -> None:
    """Raise `UserError` if the config has options that lmworks lacks or does not know, or other ones than the recipe; `patterns` are ours
    (`_Joined`)."""
    where = f"lora.init_from: {directory}"
    if config.get("peft_type") != "LORA":
        raise UserError(f"{where} is of the type {config.get('peft_type')!r}; lmworks reads LORA")
    for name, value in config.items():
        if name not in _COMPARED | _FREE and value not in _VALUES.get(name, _UNSET):
            more = _CONVERTED if name == "init_lora_weights" else ""
            raise UserError(f"{where} has {said(name, value)}, which lmworks does not support{more}")
    for name in _PATTERNS:
        if config.get(name) and config[name] != patterns[name]:
            raise UserError(f"{where} has {name} {config[name]}, other ranks or scales than lora.rank, lora.alpha and lora.targets give")
    same = {"r": ("rank", options.rank), "lora_alpha": ("alpha", options.alpha), "use_rslora": ("rslora", options.rslora)}
    for theirs, (ours, value) in same.items():
        if config.get(theirs, False if ours == "rslora" else None) != value:
            raise UserError(f"{where} has {theirs} {config.get(theirs)!r}, and the recipe has lora.{ours} {value!r}; set that")
