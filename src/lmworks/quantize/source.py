"""The model to quantize: its weights as they are exported, its tokenizer, and a fingerprint of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lmworks import machine
from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.evaluate.opening import OpenModel, open_model
from lmworks.export.export import DTYPES, write_huggingface
from lmworks.export.gguf import weight_bits
from lmworks.files import read_json
from lmworks.model import Transformer
from lmworks.recipe.derivation.parameters import count_parameters
from lmworks.recipe.gguf.folder import as_folder, find_gguf
from lmworks.recipe.loading.huggingface import from_config
from lmworks.recipe.loading.load import load_resolved
from lmworks.recipe.loading.named import locate
from lmworks.recipe.schema.model import Model
from lmworks.train.load import folder
from lmworks.weights.file_hashes import hash_files
from lmworks.weights.huggingface import files_of, only_pickled


@dataclass(frozen=True)
class Source:
    """A model with its weights rounded to `dtype`, the type of its export; it computes in fp32, as the reference of every certificate.

    `directory` is its Hugging Face directory, or None for a run; `run_dir` the run, or None. `bytes` is the size of the weights in
    `dtype`, `fingerprint` a hash of names and contents of its files (of a run's checkpoints: of their manifests).
    """

    opened: OpenModel
    dtype: torch.dtype
    directory: Path | None
    run_dir: Path | None
    fingerprint: str

    @property
    def model(self) -> Transformer:
        return self.opened.model

    @property
    def bytes(self) -> int:
        state = self.model.state_dict()
        tied = self.model.config.tie_word_embeddings
        return sum(tensor.numel() for name, tensor in state.items() if not (tied and name == "head.weight")) * self.dtype.itemsize

    @property
    def template(self) -> str | None:
        """The chat template, or None."""
        path = self.opened.tokenizer.directory / "chat_template.jinja"
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def write_huggingface(self, directory: Path) -> Path:
        """The Hugging Face directory of the model: its own, or one written to `directory`."""
        if self.directory is not None:
            return self.directory
        write_huggingface(self.model, self.opened.tokenizer, directory, self.dtype)
        return directory


def open_source(where: str) -> Source:
    """Open a run, a Hugging Face directory or a GGUF file on the CPU. Raises `UserError` if it is none, or holds weights that run code."""
    where = locate(where)
    path = Path(where).expanduser()
    gguf = find_gguf(path)
    if gguf is not None and weight_bits(gguf) < 16:
        raise UserError(f"{gguf} is quantized already; quantize the model that it was made from")
    path = path if gguf is None else as_folder(gguf)
    _refuse_what_cannot_be(path, where)
    run_dir = _run_of(path)
    recipe = load_resolved(run_dir / "resolved.json") if run_dir is not None else None
    _require_memory(recipe.model if recipe is not None else from_config(read_json(path / "config.json")), where)
    opened = open_model(where, torch.device("cpu"), as_stored=True)
    opened.model.compute_dtype = torch.float32
    opened.model.eval()
    if (path / "config.json").is_file():
        described = read_json(path / "config.json")
        stored = str(described.get("dtype") or described.get("torch_dtype"))
        dtype = torch.bfloat16 if stored == "bfloat16" else torch.float32
        directory, files = path if gguf is None else None, [*files_of(path), path / "config.json", path / "tokenizer.json"]
    else:
        assert run_dir is not None and recipe is not None
        dtype, directory = DTYPES[recipe.export.dtype], None
        files = [*_checkpoint_files(run_dir), run_dir / "tokenizer" / "tokenizer.json"]
    with torch.no_grad():
        for name, tensor in opened.model.state_dict().items():
            if not name.endswith("router.bias"):  # exported in fp32
                tensor.copy_(tensor.to(dtype))
    return Source(replace(opened, precision="fp32"), dtype, directory, run_dir, _fingerprint(files, opened.name))


def _refuse_what_cannot_be(path: Path, where: str) -> None:
    if path.is_dir() and not any((path / name).is_file() for name in ("resolved.json", "meta.json")):
        if only_pickled(path):
            files_of(path)
        if not (path / "config.json").is_file():
            raise UserError(f"{where} is neither a run (resolved.json) nor a Hugging Face directory (config.json)")
        if "quantization_config" in read_json(path / "config.json"):
            raise UserError(f"{where} is quantized already; quantize the model that it was made from")


def _require_memory(model: Model, where: str) -> None:
    """The weights in fp32 twice: those of the original, and of what was made of it."""
    needed = 2 * 4 * count_parameters(model)
    machine.require_memory(needed, f"quantizing {where}", "free some, or quantize on a machine with more")


def _run_of(path: Path) -> Path | None:
    """The run of RUN or RUN@WHICH; None for a Hugging Face directory, also for the export of a run."""
    if not path.exists():
        path = Path(str(path).rpartition("@")[0])
    return path if (path / "resolved.json").is_file() else None


def _checkpoint_files(run_dir: Path) -> Iterator[Path]:
    for kind in ("base", "tuned"):
        for checkpoint in listing.directories(folder(run_dir, kind)):
            yield checkpoint / "manifest.json"


def _fingerprint(files: list[Path], name: str) -> str:
    hashes = hash_files(file for file in files if file.is_file())
    lines = [name, *(f"{file.name} {digest}" for file, digest in sorted(hashes.items()))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
