"""Hugging Face directories in compressed-tensors, quantized by llm-compressor: FP8, INT8, GPTQ, AWQ, as vLLM and SGLang read them.

llm-compressor and the versions of transformers that it admits live in an environment of their own, which gets and returns files.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.files import atomic_path, full_disk, is_full_disk, read_json, write_json
from lmworks.model import Transformer
from lmworks.quantize.agreement import Window
from lmworks.quantize.certificate import TensorRecord, relative_error
from lmworks.quantize.child import ChildScorer, Crashed, find_python, running
from lmworks.quantize.source import Scheme, Source
from lmworks.recipe.weight_files import INDEX
from lmworks.tokenizer.named import TEMPLATE, tokenizer_files
from lmworks.ui.terminal import bar
from lmworks.weights.huggingface import files_of, load_weights

MODULES = ("llmcompressor",)
GROUPS = (128, 64, 32)
"""Sizes of groups of weights that share a scale, with 4 bits; the first that divides all rows is used."""
_NAME = "llm-compressor"
_PARTS = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx")
_ROLES = (
    (re.compile(r"\.(mlp|feed_forward)\.(gate\.(weight|e_score_correction_bias)|expert_bias)\Z"), "router"),
    (re.compile(r"embed_tokens\.weight\Z"), "embedding"),
    (re.compile(r"(\Alm_head|shared_head\.head)\.weight\Z"), "head"),
)
# what AWQ moves scales into (`mappings` in programs.py), beside the matrices that it quantizes
_SMOOTHED = re.compile(
    r"\.(input_layernorm|post_attention_layernorm|pre_feedforward_layernorm|q_a_layernorm|kv_a_layernorm|up_proj)\.(weight|bias)\Z"
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ROUNDS = 4  # of fitting the scales of rows and columns


def find_llmcompressor(scheme: Scheme, given: Sequence[Path]) -> Path:
    """The Python that has llm-compressor. Raises `UserError` if there is none."""
    python = find_python(MODULES, given)
    if python is None:
        raise UserError(
            f"{scheme.name} needs llm-compressor: make an environment with 'python -m venv ENVIRONMENT' and "
            "'ENVIRONMENT/bin/pip install llmcompressor==0.14.0.1', and name it with --python ENVIRONMENT/bin/python "
            "(pip install 'lmworks[compress]' also works, but replaces transformers by an older version)"
        )
    return python


def find_vllm(given: Sequence[Path]) -> Path | None:
    """The Python that has vLLM, the engine of these forms."""
    return find_python(("vllm",), given)


def require(scheme: Scheme, source: Source, calibration: Sequence[Window]) -> None:
    """Raise `UserError` if the scheme cannot hold the model, or needs text that is not there."""
    if scheme.calibrated and not calibration:
        raise UserError(f"{scheme.name} needs text to calibrate with, and the held-out text is a single document: give --calibration FILE")
    if source.model.config.single_blocks:  # the names of all blocks are alike, so that none can be left as it is
        raise UserError(
            f"{scheme.name} would also round the state spaces of layers of one block (mlp and moe in model.layer_types); use a form of GGUF"
        )
    _group(scheme, source)


def quantize(scheme: Scheme, source: Source, original: Path, target: Path, python: Path, calibration: Sequence[Window]) -> str:
    """Write the quantized directory `target` from the directory `original`; returns what made it. Raises `UserError` if it fails."""
    mtp = _mtp_layers(source)
    request = {
        "do": "quantize", "kind": scheme.kind, "source": str(original), "target": str(target), "mtp_layers": mtp,
        "calibration": [list(window.ids) for window in calibration] if scheme.calibrated else [], "group": _group(scheme, source),
    }  # fmt: skip
    with running(python, _NAME, **_environment()) as child, bar(f"{scheme.name}: quantize"):
        try:
            version = child.ask(request)["version"]
        except Crashed as error:
            if is_full_disk(str(error)) or machine.free_disk(target.parent) < source.bytes // 10:
                raise full_disk(target.parent) from None
            raise UserError(f"{scheme.name}: {error}") from None
    _complete(scheme, source, original, target)
    return f"llm-compressor {version}"


def _environment() -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return quiet | {"OMP_NUM_THREADS": str(machine.threads())}


def _group(scheme: Scheme, source: Source) -> int:
    """The size of groups for 4 bits. Raises `UserError` if the rows of a matrix hold no whole number of the smallest."""
    if not scheme.calibrated:
        return 0
    model = source.model.config
    rows = [tensor.shape[-1] for name, tensor in source.model.state_dict().items() if tensor.dim() > 1 and "router" not in name]
    if model.moe is not None:
        rows.append(model.moe.moe_intermediate_size)
    found = next((size for size in GROUPS if not any(row % size for row in rows)), None)
    if found is None:
        odd = next(row for row in rows if row % GROUPS[-1])
        raise UserError(f"{scheme.name} needs rows of a multiple of {GROUPS[-1]} weights, and the model has rows of {odd}; use fp8 or int8")
    return found


def _mtp_layers(source: Source) -> list[int]:
    model = source.model.config
    layers = model.num_hidden_layers or 0
    return list(range(layers, layers + (model.mtp.num_nextn_predict_layers if model.mtp else 0)))


def _complete(scheme: Scheme, source: Source, original: Path, target: Path) -> None:
    """Give the result the tokenizer, templates and config of the original, what is not quantized, and the layers of multi-token prediction,
    as they are.

    transformers does not load these layers, so what it saves has none, and an engine that trusts the config would not start.
    """
    _restore(scheme, original, target)
    for name in tokenizer_files(original):
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(original / name, target / name)
    described = read_json(target / "config.json").get("quantization_config")
    if not isinstance(described, dict):
        raise UserError(f"{_NAME} wrote no quantization_config to {target / 'config.json'}; update it, or use another scheme")
    own = ["lm_head", *(rf"re:model\.layers\.{layer}\..*" for layer in _mtp_layers(source))]
    described["ignore"] = list(dict.fromkeys([*described.get("ignore", []), *own]))
    write_json(target / "config.json", read_json(original / "config.json") | {"quantization_config": described})
    with _tensors(original) as before, _tensors(target) as after:
        lost = [name for name in before if name not in after and _layer(name) in _mtp_layers(source)]
        kept = {name: before[name].get_tensor(name) for name in lost}
    if kept:
        from safetensors.torch import save_file

        with atomic_path(target / "model-mtp.safetensors") as aside:
            save_file(kept, aside, metadata={"format": "pt"})
            aside.chmod(target.stat().st_mode & 0o666)
    files = sorted(target.glob("*.safetensors"))  # all that were written here; readers go by the index, which these are to get
    with _tensors(target, files) as found:
        _write_index(target, files, found)


def _restore(scheme: Scheme, original: Path, target: Path) -> None:
    """Put back what is not quantized: llm-compressor calibrates norms that add 1 to their weights as others, and what it makes of them
    afterwards differs by rounding."""
    from safetensors.torch import save_file

    with _tensors(original) as before, ExitStack() as stack:
        files = {file: stack.enter_context(_tensors(target, [file])) for file in sorted(target.glob("*.safetensors"))}
        names = {name for found in files.values() for name in found}
        for file, found in files.items():
            kept = {name: before[name].get_tensor(name) for name in found if name in before and _is_kept(scheme, name, names)}
            if not any(_differ(found[name].get_tensor(name), tensor) for name, tensor in kept.items()):
                continue
            with atomic_path(file) as aside:
                save_file({name: handle.get_tensor(name) for name, handle in found.items()} | kept, aside, metadata={"format": "pt"})
                aside.chmod(target.stat().st_mode & 0o666)


def _is_kept(scheme: Scheme, name: str, names: Collection[str]) -> bool:
    """Whether a tensor of a result with these `names` is to be the original's."""
    quantized = f"{name.removesuffix('.weight')}.weight_scale" in names
    return not quantized and not (scheme.kind == "awq" and _SMOOTHED.search(name))


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.dtype != other.dtype or not torch.equal(one, other)


def _write_index(target: Path, files: Sequence[Path], found: Mapping[str, Any]) -> None:
    index = target / INDEX
    if len(files) == 1:
        index.unlink(missing_ok=True)
        return
    from safetensors import safe_open

    weight_map: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            weight_map |= dict.fromkeys(handle.keys(), file.name)
    total = sum(file.stat().st_size for file in files)
    write_json(index, {"metadata": {"total_size": total}, "weight_map": {name: weight_map[name] for name in found}})


def _layer(name: str) -> int | None:
    match = _LAYER.match(name)
    return int(match[1]) if match else None


@contextmanager
def _tensors(directory: Path, files: Sequence[Path] = ()) -> Iterator[dict[str, Any]]:
    """Name -> open file of every tensor of a directory, or of `files` in it. Raises `UserError` for a damaged file."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in files or files_of(directory):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                raise UserError(f"{file} is damaged ({error}); quantize again") from None
            found |= dict.fromkeys(handle.keys(), handle)
        yield dict(sorted(found.items()))


def _dequantized(name: str, found: Mapping[str, Any]) -> tuple[Tensor, str] | None:
    """The values of tensor `name` of a quantized directory, in fp32, and their type; None if it is not there."""
    stem = name.removesuffix(".weight")
    read = lambda part: found[stem + part].get_tensor(stem + part)  # noqa: E731
    if f"{stem}.weight_packed" in found:
        rows, columns = read(".weight_shape").tolist()
        packed = read(".weight_packed")
        nibbles = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], -1).flatten(1)[:, :columns] - 8
        return _scaled(nibbles.float().reshape(rows, columns), read(".weight_scale")), "INT4"
    if name not in found:
        return None
    stored = found[name].get_tensor(name)
    if f"{stem}.weight_scale" in found and name.endswith(".weight"):
        kind = {torch.int8: "INT8", torch.float8_e4m3fn: "FP8"}.get(stored.dtype, str(stored.dtype))
        return _scaled(stored.float(), read(".weight_scale")), kind
    return stored, str(stored.dtype).removeprefix("torch.")


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Weights (rows, columns) times scales (rows, groups)."""
    scale = scale.float().reshape(len(values), -1) if scale.numel() > 1 else scale.float().reshape(1, 1)
    return values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)


def account(scheme: Scheme, original: Path, target: Path) -> list[TensorRecord]:
    """What became of every tensor of the original directory."""
    records = []
    with _tensors(original) as before, _tensors(target) as after:
        with bar(f"{scheme.name}: tensors", len(before)) as progress:
            for name, handle in before.items():
                records.append(_record(scheme, name, handle.get_tensor(name), _dequantized(name, after)))
                progress.advance()
        known = {name.removesuffix(".weight") for name in before}
        strange = [name for name in after if name not in before and not any(name.removesuffix(part) in known for part in _PARTS)]
    return records + [TensorRecord(name, "changed", note="not in the original") for name in strange]


def _record(scheme: Scheme, name: str, wanted: Tensor, found: tuple[Tensor, str] | None) -> TensorRecord:
    role = next((role for pattern, role in _ROLES if pattern.search(name)), "")
    if found is None or found[0].shape != wanted.shape:
        return TensorRecord(name, "missing", role=role)
    values, kind = found
    if kind not in ("INT4", "INT8", "FP8"):
        if not _differ(values, wanted):
            return TensorRecord(name, "kept", kind, role=role)
        smoothed = scheme.kind == "awq" and _SMOOTHED.search(name)
        return TensorRecord(name, "scaled" if smoothed else "changed", kind, role=role)
    expected = wanted.float()
    if scheme.kind == "awq":
        expected = _rescaled(expected, values)
    zero = bool(wanted.any()) and not bool(values.any())
    return TensorRecord(name, "quantized", kind, relative_error(expected.numpy(), values.numpy()), role=role, zero=zero)


def _rescaled(wanted: Tensor, found: Tensor) -> Tensor:
    """`wanted` with the scales of rows and columns that AWQ has moved between layers: those of the least squares fit to `found`."""
    product, square = (found * wanted).double(), wanted.double().square()
    rows, columns = torch.ones(len(wanted), 1, dtype=torch.float64), torch.ones(1, wanted.shape[1], dtype=torch.float64)
    for _ in range(_ROUNDS):
        columns = (product * rows).sum(0, keepdim=True) / (square * rows.square()).sum(0, keepdim=True).clamp_min(1e-30)
        rows = (product * columns).sum(1, keepdim=True) / (square * columns.square()).sum(1, keepdim=True).clamp_min(1e-30)
    return (wanted.double() * rows * columns).float()


def check_files(original: Path, target: Path) -> list[str]:
    """What differs beside the tensors: the chat template, the tokenizer, the config."""
    found = [
        f"the {'chat template' if name == TEMPLATE else f'file {name}'} differs from the original's"
        for name in tokenizer_files(original)
        if not ((target / name).is_file() and (target / name).read_bytes() == (original / name).read_bytes())
    ]
    before, after = (read_json(path / "config.json") for path in (original, target))
    found += (f"config.json differs from the original's in {key}" for key in before if after.get(key) != before[key])
    return found


def dequantized(source: Source, target: Path, scratch: Path) -> Transformer:
    """Our model with the weights of the directory, dequantized."""
    from safetensors.torch import save_file

    plain = scratch / "dequantized"
    plain.mkdir()
    try:
        with _tensors(target) as found:
            names = {re.sub(r"\.weight_packed\Z", ".weight", name) for name in found}
            values = {name: _dequantized(name, found) for name in sorted(names) if not name.endswith(_PARTS)}
            save_file({name: one[0].contiguous() for name, one in values.items() if one}, plain / "model.safetensors")
        config = read_json(target / "config.json")
        write_json(plain / "config.json", {key: value for key, value in config.items() if key != "quantization_config"})
        model = deepcopy(source.model)
        load_weights(plain, dict(model.state_dict()), model.config)
    finally:
        shutil.rmtree(plain, ignore_errors=True)
    return model


@contextmanager
def transformers_scorer(python: Path, model: Path, vocabulary: int, scratch: Path) -> Iterator[ChildScorer]:
    """Open a directory in transformers: logits in fp32, with activations quantized where scheme and library do so.

    Raises `Crashed` if it does not load every tensor."""
    with running(python, _NAME, "transformers", **_environment()) as child:
        answer = child.ask({"do": "open", "model": str(model), "threads": machine.threads()})
        yield ChildScorer(child, scratch, vocabulary, f"transformers {answer['version']} with compressed-tensors")


@contextmanager
def vllm_scorer(python: Path, model: Path, vocabulary: int, length: int, scratch: Path) -> Iterator[ChildScorer]:
    """Open a directory in vLLM, for windows of at most `length` tokens: logits as it computes them to serve the model.

    Raises `Crashed` if it does not load it."""
    with running(python, "vLLM", **_vllm_environment()) as child:
        answer = child.ask({"do": "open", "model": str(model), "length": length})
        yield ChildScorer(child, scratch, vocabulary, f"vLLM {answer['version']}")


def measure_speed(python: Path, model: Path, ids: Sequence[int], following: Sequence[int], repeats: int) -> dict[str, float]:
    """Tokens per second at which vLLM reads `ids` and generates as many tokens as `following`, medians of the repeats."""
    with running(python, "vLLM", **_vllm_environment()) as child:
        return child.ask({"do": "speed", "model": str(model), "ids": list(ids), "following": list(following), "repeats": repeats})


def _vllm_environment() -> dict[str, str]:
    # in one process, where its logits can be seen; on a CPU, 1 GB for its cache
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return _environment() | own
