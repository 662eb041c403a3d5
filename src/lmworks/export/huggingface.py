"""Writes Hugging Face checkpoints, and low-rank adapters in PEFT's format; `lmworks.weights.huggingface` reads the former.

Adapters are adapter_config.json and adapter_model.safetensors with the names of the Hugging Face class; those of routed experts are written
for each expert, as the experts themselves are in a checkpoint. They are read here too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.checkpoint.save_plan import local_slice
from lmworks.checkpoint.tensor_files import Reader
from lmworks.errors import UserError
from lmworks.io.files import atomic_path, write_json
from lmworks.model import Transformer
from lmworks.model.lora import attach
from lmworks.recipe.families.family import Family
from lmworks.recipe.families.registry import family_of, to_config
from lmworks.recipe.schema.model import Lora, Model, is_adapter, matrix_of_adapter
from lmworks.ui.terminal import bar
from lmworks.weights.huggingface import open_all
from lmworks.weights.names import exports_mtp, huggingface_name, reordered, to_huggingface

_SHARD_BYTES = 5 * 10**9


def write_model(model: Transformer, directory: Path, tokens: dict[str, Any], dtype: torch.dtype) -> None:
    """Write config.json and safetensors (in files of at most 5 GB); `tokens` has eos_token_id and pad_token_id."""
    from safetensors.torch import save_file

    config = to_config(model.config, model.rope, tokens) | {"dtype": str(dtype).removeprefix("torch.")}
    directory.mkdir(parents=True, exist_ok=True)
    state = _exported(model)
    files = list(_split(state, dtype))
    index: dict[str, str] = {}
    total = 0
    with bar("huggingface", sum(tensor.numel() for tensor in state.values())) as progress:
        for number, names in enumerate(files, 1):
            file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            part = {key: state[key] for key in names}
            chosen = {name: _cast(name, tensor, dtype) for name, tensor in to_huggingface(part, model.config)}
            with atomic_path(directory / file) as aside:
                save_file(chosen, aside, metadata={"format": "pt"})
                aside.chmod(directory.stat().st_mode & 0o666)  # safetensors makes it unreadable for others, such as a server's user
            index |= dict.fromkeys(chosen, file)
            total += sum(tensor.nbytes for tensor in chosen.values())
            progress.advance(sum(state[key].numel() for key in names))
    if len(files) > 1:
        write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    write_json(directory / "config.json", config)


def _exported(model: Transformer) -> dict[str, Tensor]:
    """The tensors that a checkpoint holds, by our names."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("head.weight", None)
    if not exports_mtp(model.config):
        state = {name: tensor for name, tensor in state.items() if not name.startswith("mtp.")}
    return state


def unequal_tensors(model: Transformer, directory: Path, dtype: torch.dtype) -> list[str]:
    """Names of the tensors in the files of `write_model` that are not, bit for bit, those of `model`."""
    found = []
    with ExitStack() as stack:
        handles = {name: handle for handle in open_all(directory, stack).values() for name in handle.keys()}  # noqa: SIM118
        for name, tensor in to_huggingface(_exported(model), model.config):
            stored = handles.pop(name).get_tensor(name) if name in handles else None
            if stored is None or not torch.equal(stored, _cast(name, tensor, dtype)):
                found.append(name)
    return [*found, *handles]


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # not rounded: the selection bias decides near-ties between experts
    return tensor.detach().to("cpu", torch.float32 if name.endswith("e_score_correction_bias") else dtype).contiguous()


def _split(state: dict[str, Tensor], dtype: torch.dtype) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in state.items():
        if names and size + tensor.numel() * dtype.itemsize > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.numel() * dtype.itemsize
    yield names


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the messages and progress bars of `transformers`, which is installed."""
    import transformers

    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED, _REWRITE = "adapter_model.bin", "if you trust it, load it in peft and write it again with save_pretrained(DIRECTORY)"
_PREFIX = "base_model.model."
_BASE = "lmworks_base"  # in the metadata of the weights: the hash of the tensors of the base model
_UNSUPPORTED = ("modules_to_save", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "target_parameters", "lora_bias")


def adapter_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The adapters of a checkpoint that holds nothing else, by our names."""
    reader = Reader(checkpoint)
    prefix = "model/"
    return {
        name.removeprefix(prefix): reader.read_slice(name, (0,) * len(record.shape), record.shape)
        for name, record in reader.table.items() if name.startswith(prefix)
    }  # fmt: skip


def write_peft(checkpoint: Path, options: Lora, model: Model, base: str, base_hash: str, directory: Path) -> None:
    """Write the adapters of a checkpoint. `base` names the base model in the config; it is written beside the adapter as a model."""
    from safetensors.torch import save_file

    state = adapter_tensors(checkpoint)
    family, tensors = family_of(model), {}
    for name, tensor in state.items():
        for theirs, part in _their_tensors(name, tensor, model, family):
            tensors[theirs] = part.float().contiguous()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True, "bias": "none",
        "r": options.rank, "lora_alpha": options.alpha, "lora_dropout": options.dropout, "use_rslora": options.rslora,
        "target_modules": _target_modules(state, model, family), "modules_to_save": None, "fan_in_fan_out": False,
        "init_lora_weights": True,
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_path(directory / WEIGHTS) as aside:
        save_file(tensors, aside, metadata={"format": "pt", _BASE: base_hash})
        aside.chmod(directory.stat().st_mode & 0o666)
    write_json(directory / CONFIG, config)


def unequal_adapters(checkpoint: Path, model: Model, directory: Path) -> list[str]:
    """Names of the tensors in the file of `write_peft` that are not, bit for bit, those of the checkpoint."""
    from safetensors.torch import load_file

    stored, family, found = load_file(directory / WEIGHTS), family_of(model), []
    for name, tensor in adapter_tensors(checkpoint).items():
        for theirs, part in _their_tensors(name, tensor, model, family):
            if theirs not in stored or not torch.equal(stored.pop(theirs), part.float()):
                found.append(theirs)
    return [*found, *stored]


@torch.no_grad()
def read_peft(directory: Path, state: Mapping[str, Tensor], model: Model, options: Lora, base_hash: str | None) -> None:
    """Copy a PEFT adapter into `state`, the adapters of `model` by our names, of which this rank may hold slices.

    Raises `UserError` if the adapter does not have the options, the targets or the shapes of `state`, or names another base model
    (with `base_hash` None it may be any). Into a state on the meta device nothing is copied: that is a check.
    """
    from safetensors import SafetensorError, safe_open

    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            pickled = name == WEIGHTS and (directory / _PICKLED).is_file()
            why = f", only {_PICKLED}, which is pickled and could run any program: {_REWRITE}" if pickled else ""
            raise UserError(f"lora.init_from: {directory} is no PEFT adapter; it has no {name}{why}")
    _require_options(_read_config(directory / CONFIG), options, directory)
    family = family_of(model)
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(safe_open(directory / WEIGHTS, framework="pt"))
        except SafetensorError as error:
            raise UserError(f"lora.init_from: {directory / WEIGHTS} is damaged ({error}); get it again from its origin") from None
        base = (handle.metadata() or {}).get(_BASE)
        if None not in (base, base_hash) and base != base_hash:
            raise UserError(f"lora.init_from: {directory} is an adapter of another base model; this run's has the hash {base_hash}")
        found = set(handle.keys())
        known: set[str] = set()
        for name, tensor in state.items():
            parts = []
            for theirs, _ in _their_tensors(name, torch.empty(tensor.shape, device="meta"), model, family):
                if theirs not in found:
                    raise UserError(f"lora.init_from: {directory} has no tensor {theirs}: it has other targets or another base model")
                known.add(theirs)
                parts.append(handle.get_tensor(theirs))
            whole = torch.stack(parts) if tensor.ndim == 3 and len({part.shape for part in parts}) == 1 else parts[0]
            if whole.shape != tensor.shape:
                raise UserError(
                    f"lora.init_from: {directory} is an adapter of another base model: {theirs} has the shape {tuple(parts[0].shape)}, and "
                    f"here it is {tuple(tensor.shape[-2:])}"
                )
            whole = reordered(matrix_of_adapter(name), whole, model, back=True) if name.endswith("B") else whole
            if (part := local_slice(name, tensor)) is not None:
                box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
                part.values().copy_(whole[box])
        if unknown := sorted(found - known):
            raise UserError(f"lora.init_from: {directory} has the tensor {unknown[0]}, which lora.targets does not name; add its target")


def _their_tensors(name: str, tensor: Tensor, model: Model, family: Family) -> Iterator[tuple[str, Tensor]]:
    """One of our adapter tensors as PEFT names it: a stack of experts as the tensors of each."""
    theirs = huggingface_name(matrix_of_adapter(name), family).removesuffix(".weight")
    ending = f".lora_{name[-1]}.weight"
    if "{e}" in theirs:
        yield from ((_PREFIX + theirs.replace("{e}", str(number)) + ending, part) for number, part in enumerate(tensor.unbind(0)))
    else:
        yield _PREFIX + theirs + ending, reordered(matrix_of_adapter(name), tensor, model) if name.endswith("B") else tensor


def _target_modules(state: Mapping[str, Tensor], model: Model, family: Family) -> list[str]:
    """Ends of the names of the adapted modules, as PEFT matches them: short where all modules of that name are adapted. Routed experts do
    not count, since they are no modules in today's classes; in others they would get adapters of zeros."""

    def modules(names: Mapping[str, Any]) -> set[str]:
        found = [huggingface_name(matrix_of_adapter(name), family).removesuffix(".weight") for name in names if name.endswith("A")]
        experts = range(model.moe.n_routed_experts if model.moe else 1)
        return {name.replace("{e}", str(expert)) for name in found for expert in experts}

    adapted = modules(state)
    with torch.device("meta"):
        everything = Transformer(model)
        attach(everything, Lora(rank=1, targets=("all-linear",)))
    possible = modules({name: value for name, value in everything.state_dict().items() if is_adapter(name)})
    short: set[str] = set()
    for name in adapted:
        last = name.rpartition(".")[2]
        whole = all(other in adapted for other in possible if other.endswith(f".{last}"))
        short.add(last if whole else name)
    return sorted(short)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"lora.init_from: {path} is not the config of an adapter: {error}") from None


def _require_options(config: dict[str, Any], options: Lora, directory: Path) -> None:
    """Raise `UserError` if the config has options that lmworks lacks, or other ones than the recipe."""
    where = f"lora.init_from: {directory}"
    if config.get("peft_type") != "LORA":
        raise UserError(f"{where} is of the type {config.get('peft_type')!r}; lmworks reads LORA")
    if config.get("bias", "none") != "none":
        raise UserError(f"{where} has bias {config['bias']!r}; lmworks supports none")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise UserError(f"{where} has {name}, which lmworks does not support")
    same = {"r": ("rank", options.rank), "lora_alpha": ("alpha", options.alpha), "use_rslora": ("rslora", options.rslora)}
    for theirs, (ours, value) in same.items():
        if config.get(theirs, False if ours == "rslora" else None) != value:
            raise UserError(f"{where} has {theirs} {config.get(theirs)!r}, and the recipe has lora.{ours} {value!r}; set that")
