"""GGUF files quantized by llama.cpp's own code: its library, or for Q8_0 its Python package `gguf`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.export.gguf import check_gguf, gguf_writer, load_gguf, notes, write_gguf
from lmworks.host import machine
from lmworks.io.files import full_disk, is_full_disk
from lmworks.model import Transformer
from lmworks.quantize.certificate import TensorRecord, relative_error
from lmworks.quantize.child import ChildScorer, Crashed, find_python, running
from lmworks.quantize.source import Scheme, Source
from lmworks.ui.terminal import bar

MODULES = ("llama_cpp",)
_NAME = "llama.cpp"
_ROLES = {"ffn_gate_inp.weight": "router", "exp_probs_b.bias": "router", "token_embd.weight": "embedding", "output.weight": "head"}
_NEVER = ("ssm_conv1d.weight", "shortconv.conv.weight")  # llama.cpp wants them in fp32


def find_llama(scheme: Scheme, given: Sequence[Path]) -> Path | None:
    """The Python that has llama.cpp's bindings; None for Q8_0, which needs none. Raises `UserError` if another scheme finds none."""
    python = find_python(MODULES, given)
    if python is None and scheme.kind != "Q8_0":
        raise UserError(
            f"{scheme.name} needs llama.cpp's library: pip install 'lmworks[llama]' (it compiles for some minutes), or name an environment "
            "that has llama-cpp-python with --python ENVIRONMENT/bin/python"
        )
    return python


def write_original(source: Source, path: Path) -> None:
    """The unquantized file, read back and compared bit for bit."""
    write_gguf(source.model, source.opened.tokenizer, path, source.dtype, _name(source))
    check_gguf(source.model, path, source.dtype)


def notes_of(source: Source) -> list[str]:
    """What the file says otherwise than the model."""
    return list(notes(source.opened.tokenizer, _name(source)))


def _name(source: Source) -> str:
    return source.opened.name.partition("@")[0]


def quantize(scheme: Scheme, original: Path, target: Path, python: Path | None) -> str:
    """Quantize `original` to `target`; returns what did it. Raises `UserError` if llama.cpp fails."""
    import gguf

    if python is None:
        _quantize_q8_0(original, target)
        return f"gguf {_version('gguf')} (llama.cpp's Python package)"
    total = len(gguf.GGUFReader(original).tensors)
    request = {"do": "quantize", "kind": scheme.kind, "source": str(original), "target": str(target), "threads": machine.threads()}
    with running(python, _NAME) as child, bar(f"{scheme.name}: quantize", total) as progress:
        child.progress = progress
        try:
            answer = child.ask(request)
        except Crashed as error:
            if is_full_disk(str(error)) or machine.free_disk(target.parent) < original.stat().st_size // 10:
                raise full_disk(target.parent) from None
            raise UserError(f"{scheme.name}: {error}") from None
    return f"llama.cpp (llama-cpp-python {answer['version']})"


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _quantize_q8_0(original: Path, target: Path) -> None:
    """What llama.cpp's library writes for Q8_0, by its Python package: matrices in Q8_0, all else as it is. Matrices whose rows are no
    multiple of 32 stay as they are, too; the library stores them in F16."""
    import gguf

    reader = gguf.GGUFReader(original)
    with gguf_writer(target, str(reader.fields["general.architecture"].contents())) as writer:
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name == "general.architecture":
                continue
            value = int(gguf.LlamaFileType.MOSTLY_Q8_0) if name == "general.file_type" else field.contents()
            writer.add_key_value(name, value, field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None)
        kind = gguf.GGMLQuantizationType.Q8_0
        plan = [(tensor, _is_meant(tensor) and int(tensor.shape[0]) % 32 == 0) for tensor in reader.tensors]
        for tensor, wide in plan:
            shape = [int(size) for size in reversed(tensor.shape.tolist())]
            bytes_ = math.prod(shape) // 32 * 34 if wide else tensor.data.nbytes
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), bytes_, kind if wide else tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with bar("gguf-q8_0: quantize", len(plan)) as progress:
            for tensor, wide in plan:
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type) if wide else None
                writer.write_tensor_data(tensor.data if values is None else gguf.quants.quantize(values, kind))
                progress.advance()


def _role(name: str) -> str:
    return next((role for suffix, role in _ROLES.items() if name == suffix or name.endswith(f".{suffix}")), "")


def _is_meant(tensor: Any) -> bool:
    """Whether a tensor is one that schemes quantize, if its rows fit: a matrix, or a stack of them."""
    return tensor.name.endswith(".weight") and not tensor.name.endswith(_NEVER) and len(tensor.shape) > 1 and _role(tensor.name) != "router"


def account(scheme: Scheme, source: Source, original: Path, target: Path) -> list[TensorRecord]:
    """What became of every tensor of the model."""
    import gguf

    before, after = ({tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors} for path in (original, target))
    records = []
    for name, tensor in before.items():
        if name not in after:
            records.append(TensorRecord(name, "missing", role=_role(name)))
            continue
        found = after[name]
        kind = found.tensor_type.name
        if found.tensor_type == tensor.tensor_type:
            fate: Any = "kept" if found.data.tobytes() == tensor.data.tobytes() else "changed"
            note = _why(scheme, kind, int(tensor.shape[0])) if fate == "kept" and _is_meant(tensor) else ""
            records.append(TensorRecord(name, fate, kind, note=note, role=_role(name)))
            continue
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = gguf.quants.dequantize(found.data, found.tensor_type)
        error = relative_error(wanted, values) if wanted.size == values.size else math.inf
        zero = bool(wanted.any()) and not bool(values.any())
        records.append(TensorRecord(name, "quantized", kind, error, _why(scheme, kind, int(tensor.shape[0])), _role(name), zero))
    strange = sorted(after.keys() - before.keys())
    records += (TensorRecord(name, "changed", after[name].tensor_type.name, note="not in the original") for name in strange)
    return records + _absent(source.model)


def _why(scheme: Scheme, kind: str, row: int) -> str:
    """Why a tensor is of a larger type than the scheme's."""
    block = 256 if "_K" in scheme.kind else 32
    if kind.endswith("_K") or not row % block:
        return ""
    return f"rows of {row} values: {scheme.kind} needs multiples of {block}"


def mtp(model: Transformer) -> str:
    """What becomes of layers of multi-token prediction; empty if the model has none."""
    return "left out: llama.cpp would load these layers but not run them; the file says that it has none" if model.config.mtp else ""


def _absent(model: Transformer) -> list[TensorRecord]:
    records = [TensorRecord(name, "absent", note=mtp(model)) for name in model.state_dict() if name.startswith("mtp.")]
    if model.config.tie_word_embeddings:
        records.append(TensorRecord("head.weight", "absent", note="tied to the embedding"))
    return records


def check_fields(source: Source, original: Path, target: Path) -> list[str]:
    """What differs beside the tensors: the chat template, the tokenizer, the description of the model."""
    import gguf

    before, after = (
        {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if not name.startswith("GGUF.")}
        for path in (original, target)
    )
    found = []
    if (after.get("tokenizer.chat_template") or None) != (source.template or None):
        found.append("the chat template differs from the original's")
    own = {"general.file_type", "general.quantization_version", "tokenizer.chat_template"}
    found += (f"the field {name} differs from the original's" for name in sorted(before.keys() - own) if after.get(name) != before[name])
    return found


@contextmanager
def llama_scorer(python: Path, model: Path, vocabulary: int, length: int, scratch: Path) -> Iterator[ChildScorer]:
    """Open a GGUF file in llama.cpp, for windows of at most `length` tokens. Raises `Crashed` if llama.cpp does not load it."""
    with running(python, _NAME) as child:
        answer = child.ask({"do": "open", "model": str(model), "length": length, "threads": machine.threads()})
        yield ChildScorer(child, scratch, vocabulary, f"llama.cpp (llama-cpp-python {answer['version']}), cache in fp32")


def measure_speed(python: Path, model: Path, ids: Sequence[int], following: Sequence[int], repeats: int) -> dict[str, float]:
    """Tokens per second of reading `ids` and of generating as many tokens as `following`, medians of the repeats."""
    with running(python, _NAME) as child:
        request = {"do": "speed", "model": str(model), "ids": list(ids), "following": list(following), "threads": machine.threads()}
        return child.ask(request | {"repeats": repeats})


def dequantized(source: Source, path: Path) -> Transformer:
    """Our model with the weights of the file, dequantized."""
    model = deepcopy(source.model)
    load_gguf(model, path)
    return model
