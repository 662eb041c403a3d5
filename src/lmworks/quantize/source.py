"""The quantization schemes, and the limits within which a result counts.

The model to quantize: its weights as they are exported, its tokenizer, and a fingerprint of its files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.export.export import DTYPES, write_huggingface
from lmworks.export.gguf import weight_bits
from lmworks.host import machine
from lmworks.io.files import read_json
from lmworks.model import Transformer
from lmworks.recipe.families.registry import from_config
from lmworks.recipe.gguf_model import as_folder, find_gguf
from lmworks.recipe.hub import locate
from lmworks.recipe.load import load_resolved
from lmworks.recipe.parameters import count_parameters
from lmworks.recipe.schema.model import Model
from lmworks.recipe.weight_files import of_adapter
from lmworks.weights.huggingface import files_of, only_pickled
from lmworks.weights.open import OpenModel, open_model
from lmworks.weights.quantized import READERS
from lmworks.weights.quantized import stated as stated_quantization
from lmworks.weights.run_models import folder
from lmworks.weights.verified import CERTIFICATE, hash_files


@dataclass(frozen=True)
class Limits:
    """What a result must keep to, against the original on held-out text.

    kl: largest mean KL divergence of the next-token distribution, in nats
    same_choice: least share of tokens at which both models rank the same token first
    perplexity_ratio: largest ratio of perplexities
    error: largest root-mean-square error of one quantized tensor, relative to the root mean square of its values
    expert_tokens: least calibration tokens per expert without a warning
    """

    kl: float
    same_choice: float
    perplexity_ratio: float
    error: float
    expert_tokens: int = 128


@dataclass(frozen=True)
class Scheme:
    """A way to store weights. `about` describes it in a few words; `format` is the file format; `kind` is its name in the library that
    makes it; `calibrated` says whether the library runs text through the model."""

    name: str
    about: str
    format: Literal["gguf", "compressed-tensors"]
    kind: str
    limits: Limits
    calibrated: bool = False


SCHEMES = {
    one.name: one
    for one in (
        Scheme("gguf-q8_0", "8.5 bits per weight", "gguf", "Q8_0", Limits(0.005, 0.97, 1.01, 0.02)),
        Scheme("gguf-q6_k", "6.6 bits per weight", "gguf", "Q6_K", Limits(0.01, 0.95, 1.02, 0.04)),
        Scheme("gguf-q5_k_m", "5 to 6.6 bits per weight", "gguf", "Q5_K_M", Limits(0.025, 0.92, 1.03, 0.08)),
        Scheme("gguf-q4_k_m", "4 to 6.6 bits per weight", "gguf", "Q4_K_M", Limits(0.06, 0.87, 1.07, 0.15)),
        Scheme("fp8", "FP8 (E4M3), a scale per row and per token", "compressed-tensors", "fp8", Limits(0.03, 0.92, 1.03, 0.06)),
        Scheme("int8", "INT8, a scale per row and per token", "compressed-tensors", "int8", Limits(0.03, 0.92, 1.03, 0.03)),
        Scheme("gptq", "INT4, groups of 32 to 128, GPTQ", "compressed-tensors", "gptq", Limits(0.1, 0.85, 1.1, 0.25), calibrated=True),
        Scheme("awq", "INT4, groups of 32 to 128, AWQ", "compressed-tensors", "awq", Limits(0.1, 0.85, 1.1, 0.25), calibrated=True),
    )
}  # fmt: skip


def chosen(text: str) -> list[Scheme]:
    """The schemes of `--to`. Raises `UserError` for an unknown one."""
    names = list(dict.fromkeys(filter(None, (part.strip().lower() for part in text.split(",")))))
    if unknown := next((name for name in names if name not in SCHEMES), None):
        raise UserError(f"--to {unknown}: no such scheme; the schemes are {', '.join(SCHEMES)}")
    if not names:
        raise UserError(f"--to names no scheme; the schemes are {', '.join(SCHEMES)}")
    return [SCHEMES[name] for name in names]


def with_limits(scheme: Scheme, given: Sequence[str]) -> Scheme:
    """The scheme with the limits of `--limit NAME=VALUE`. Raises `UserError`."""
    known = {one.name: one.type for one in fields(Limits)}
    changed: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            changed[name] = int(value) if known[name] == "int" else float(value)
            if not 0 <= changed[name] < math.inf:
                raise ValueError
        except (KeyError, ValueError):
            raise UserError(f"--limit {text}: write NAME=NUMBER, not negative, with one of the names {', '.join(known)}") from None
    return replace(scheme, limits=replace(scheme.limits, **changed))


@dataclass(frozen=True)
class Source:
    """A model with its weights rounded to `dtype`, the type of its export; it computes in fp32, as the reference of every certificate.

    `directory` is its Hugging Face directory, or None where one is written first: for a run, a GGUF file, and weights that are published
    quantized, whose values are the original. `run_dir` is the run, or None. `bytes` is the size of the weights in
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
        tokenizer = self.opened.tokenizer
        return tokenizer.chat_template if tokenizer.has_chat_template else None

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
        read = ", ".join(name for name, _ in READERS.values())
        raise UserError(
            f"{gguf} is quantized already; quantize the model that it was made from, in Hugging Face's format; one that is published "
            f"quantized only is read too ({read})"
        )
    path = path if gguf is None else as_folder(gguf)
    _check_quantizable(path, where)
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
        # others read the values that we read: those of quantized weights are written out
        directory = path if gguf is None and not stated_quantization(path, described) else None
        files = [*files_of(path), path / "config.json", path / "tokenizer.json"]
    else:
        assert run_dir is not None and recipe is not None
        dtype, directory = DTYPES[recipe.export.dtype], None
        files = [*_checkpoint_files(run_dir), run_dir / "tokenizer" / "tokenizer.json"]
    with torch.no_grad():
        for name, tensor in opened.model.state_dict().items():
            if not name.endswith("router.bias"):  # exported in fp32
                tensor.copy_(tensor.to(dtype))
    return Source(replace(opened, precision="fp32"), dtype, directory, run_dir, _fingerprint(files, opened.name))


def _check_quantizable(path: Path, where: str) -> None:
    if path.is_dir() and not any((path / name).is_file() for name in ("resolved.json", "meta.json")):
        if only_pickled(path):
            files_of(path)
        if not (path / "config.json").is_file():
            other = f"{where} is neither a run (resolved.json) nor a Hugging Face directory (config.json)"
            raise UserError(of_adapter(path) or other)
        if (path / CERTIFICATE).is_file():
            raise UserError(f"{where} is a result of `lmworks quantize`; quantize the model that it was made from")


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
