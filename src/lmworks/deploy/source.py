"""The model that is deployed: what its files say about it, without reading weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.export.gguf import weight_bits
from lmworks.io.files import explain_damage, read_json
from lmworks.recipe.families.registry import family_in, from_config
from lmworks.recipe.gguf_header import files_of_model
from lmworks.recipe.gguf_model import as_folder, find_gguf
from lmworks.recipe.hub import locate, name_of
from lmworks.recipe.schema.model import Model
from lmworks.recipe.weight_files import of_adapter, safetensors_of
from lmworks.recipe.weights import stored_model
from lmworks.tokenizer.named import DEFAULT, chat_templates
from lmworks.weights.huggingface import only_pickled
from lmworks.weights.quantized import stated
from lmworks.weights.verified import CERTIFICATE

_PUBLISHED = ("fp8", "mxfp4")  # forms in which makers publish models, some of them in no other; `lmworks quantize` writes neither


@dataclass(frozen=True)
class Source:
    """A model in Hugging Face's format, and its GGUF file if there is one.

    `weight_bytes`: size of the files that the engine reads. `mtp`: layers of multi-token prediction whose weights are there.
    `quantization`: its `quant_method`, or "". `dtype`: as config.json says. `template`: text of the chat template.
    """

    name: str
    directory: Path
    gguf: Path | None
    model: Model
    family: str
    weight_bytes: int
    gguf_bytes: int
    mtp: int
    quantization: str
    bits: int
    dtype: str
    template: str
    context: int

    def served(self, gguf: bool) -> Path:
        """What an engine reads: the GGUF file if it takes such, or else the directory."""
        return self.gguf if gguf and self.gguf is not None else self.directory


def open_source(path: Path, gguf: Path | None = None, name: str | None = None) -> Source:
    """Read a run directory with an export, a directory in Hugging Face's format, or a GGUF file. Raises `UserError` if it is none."""
    path = Path(locate(path))
    directory, found = _places(path)
    gguf = gguf or found
    if gguf is not None and not gguf.is_file():
        raise UserError(f"--gguf {gguf} is not a file")
    if gguf is not None and len(parts := files_of_model(gguf)) > 1:  # hashes and containers are of one file
        raise UserError(
            f"{gguf} is one of {len(parts)} parts of a model; join them with llama-gguf-split --merge {parts[0].name} FILE, "
            "and give --gguf FILE"
        )
    config = read_json(directory / "config.json")
    with explain_damage(directory / "config.json"):
        model, stored = from_config(config), stored_model(directory)
        quantization, bits = _quantization(stated(directory, config))
    name = name if name is not None else ((path.stem if path.is_file() else name_of(path.resolve()) or path.resolve().name) or "model")
    for text in (name, str(directory.resolve()), str(gguf.resolve() if gguf else "")):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{text!r} is not UTF-8; rename it, or give --name") from None
    if not name.strip() or len(name) > 200:
        raise UserError("the name of the model must have 1 to 200 characters; give --name")
    files = safetensors_of(directory)
    if not files and gguf is None:
        raise UserError(
            f"{directory} has no GGUF file and no .safetensors file{only_pickled(directory) or '; export a model: lmworks export RECIPE'}"
        )
    return Source(
        name=name, directory=directory.resolve(), gguf=gguf.resolve() if gguf else None, model=model, family=family_in(config).name,
        weight_bytes=sum(file.stat().st_size for file in files), gguf_bytes=gguf.stat().st_size if gguf else 0,
        mtp=stored.mtp.num_nextn_predict_layers if stored.mtp else 0, quantization=quantization, bits=bits,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        template=chat_templates(directory).get(DEFAULT, ("",))[0],
        context=int(model.max_position_embeddings or 2048),
    )  # fmt: skip


def require_certified(source: Source, gguf: bool) -> None:
    """Raise `UserError` if what the engine reads is quantized, and no certificate beside it says that it is near the original. In the forms
    `_PUBLISHED` it is the original, unless there is a certificate."""
    from lmworks.quantize.certificate import require_passed

    path = source.served(gguf)
    published = source.quantization in ("", *_PUBLISHED) and not (path / CERTIFICATE).is_file()
    if weight_bits(path) < 16 if path.is_file() else not published:
        require_passed(path)


def _places(path: Path) -> tuple[Path, Path | None]:
    if (found := find_gguf(path)) is not None and not (path / "config.json").is_file():
        return as_folder(found), found
    if (path / "config.json").is_file():
        near = list(path.glob("*.gguf")) or [path.parent / "gguf" / "model.gguf"]
        return path, near[0] if len(near) == 1 and near[0].is_file() else None
    if (path / "resolved.json").is_file():
        export = path / "export"
        if not (export / "huggingface" / "config.json").is_file():
            raise UserError(f"{path} has no export for engines; make one with: lmworks export RECIPE --set export.huggingface=true")
        gguf = export / "gguf" / "model.gguf"
        return export / "huggingface", gguf if gguf.is_file() else None
    other = f"{path} is no run directory (resolved.json), no GGUF file and no model in Hugging Face's format (config.json)"
    raise UserError(of_adapter(path) or other)


def _quantization(found: Any) -> tuple[str, int]:
    """`quant_method` of a quantization_config and the bits of its weights; ("", 16) without one."""
    if not found:
        return "", 16
    groups = re.findall(r"'num_bits': (\d+)", str(found))  # compressed-tensors: of each group of layers
    bits = found.get("bits") or found.get("w_bit") or (min(map(int, groups)) if groups else 8)
    return str(found.get("quant_method") or "unknown"), int(bits)
