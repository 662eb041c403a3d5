"""A GGUF file as a Hugging Face folder: config.json and the files of the tokenizer made from its metadata, and links to the file itself.

The folder lies in the cache, under a name made from path, size and time of the file, and takes a few megabytes. Whatever reads a folder in
Hugging Face's format reads it too; `lmworks.weights` dequantizes the tensors as they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from pathlib import Path

from lmworks.errors import UserError
from lmworks.files import cache_directory, explain_os_errors
from lmworks.recipe.gguf.header import TYPES, Header, files_of_model, is_gguf, read_header
from lmworks.recipe.gguf.metadata import model_of
from lmworks.recipe.gguf.tokenizer import files_of_tokenizer
from lmworks.recipe.loading.huggingface import to_config

_FORMAT = 1  # of what is made here; a change makes the folders again
_ROPE_FACTORS = "rope_freqs.weight"
_DTYPES = {1: "float16", 32: "bfloat16"}  # llama.cpp's general.file_type, for files that are not quantized


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or the only one in a folder without safetensors; None if there is none.

    Raises `UserError` if a folder has several models.
    """
    if not path.is_dir():
        return path if is_gguf(path) else None
    found = sorted(one for one in path.iterdir() if is_gguf(one))
    if not found or any(path.glob("*.safetensors")):
        return None
    models = {files_of_model(one)[0] for one in found}
    if len(models) > 1:
        raise UserError(f"{path} has {len(models)} models ({', '.join(sorted(one.name for one in models))}); name one of the files")
    return models.pop()


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json that `tokenizer.path` names: itself, that in a folder, or that made of a GGUF file."""
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return path / "tokenizer.json"
    if (gguf := find_gguf(path)) is not None:
        return as_folder(gguf) / "tokenizer.json"
    return path / "tokenizer.json" if path.is_dir() else path


def as_folder(path: Path) -> Path:
    """The folder for a GGUF file, made if it is not in the cache. Raises `UserError` naming the file if it is damaged or not supported."""
    files = files_of_model(path)
    if not path.is_file():
        raise UserError(f"{path} {'is not a regular file' if path.exists() else 'does not exist'}; name a GGUF file")
    real = [file.resolve() for file in files]
    states = [file.stat() for file in real]
    key = [_FORMAT, *((str(file), state.st_size, state.st_mtime_ns) for file, state in zip(real, states, strict=True))]
    folder = cache_directory("gguf") / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    if folder.is_dir():
        return folder
    try:
        header = read_header(real[0])
        content = _files(header)
    except UserError as error:
        raise UserError(str(error) if str(path) in str(error) or str(real[0]) in str(error) else f"{path}: {error}") from None
    with explain_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
        try:
            for name, text in content.items():
                (aside / name).write_text(text, encoding="utf-8")
            for file, link in zip(real, files, strict=True):
                os.symlink(file, aside / link.name)
            try:
                aside.rename(folder)
            except OSError:
                if not folder.is_dir():  # made by another process meanwhile
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def _files(header: Header) -> dict[str, str]:
    model = model_of(header, _rope_factors(header))
    tokenizer = files_of_tokenizer(header.metadata)
    generation = json.loads(tokenizer["generation_config.json"])
    tokens = {"bos_token_id": generation.get("bos_token_id"), "eos_token_id": generation["eos_token_id"]}
    stored = _DTYPES.get(header.metadata.get("general.file_type", 0), "float32")
    config = to_config(model, model.rope, tokens | {"pad_token_id": generation.get("pad_token_id")}) | {"dtype": stored}
    return {"config.json": json.dumps(config, indent=2) + "\n"} | tokenizer


def _rope_factors(header: Header) -> list[float] | None:
    found = header.tensors.get(_ROPE_FACTORS)
    if found is None:
        return None
    if TYPES[found.type][0] != "F32" or len(found.shape) != 1:
        raise UserError(f"its tensor {_ROPE_FACTORS} is not a list of fp32 numbers")
    with open(found.file, "rb") as file:
        file.seek(found.offset)
        return list(struct.unpack(f"<{found.shape[0]}f", file.read(found.nbytes)))
