"""Quantizes a model by several schemes, and certifies each result before it counts.

    out/SCHEME/            the result, with certificate.json and tensors.json
    out/SCHEME.failed/     a result outside of its limits, or with a tensor lost or damaged
    out/quantization.json  all certificates
    out/quantization.html  the page that compares them (written by the command)
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.evaluate.sets.benchmarks import contents
from lmworks.host import machine
from lmworks.io.files import explain_os_errors, read_json, replace_directory, write_json
from lmworks.quantize import compressed, gguf
from lmworks.quantize.agreement import Texts, read_texts
from lmworks.quantize.certificate import certificate
from lmworks.quantize.evidence import Comparison, Job, compressed_evidence, gguf_evidence
from lmworks.quantize.source import Scheme, Source, open_source
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.ui.terminal import console
from lmworks.weights.verified import CERTIFICATE, file_records, verify_export

_LONGEST = 512  # tokens of a window
_WORKING = ".working-"


@dataclass(frozen=True)
class Options:
    """tokens: held-out tokens to measure on, and as many at most to calibrate with. pythons: environments with foreign libraries.
    benchmarks: sets to evaluate, at most `items` items of each."""

    held_out: Path | None = None
    calibration: Path | None = None
    tokens: int = 16384
    pythons: tuple[Path, ...] = ()
    benchmarks: Sequence[Benchmark] = ()
    items: int = 200


def quantize(where: str, schemes: Sequence[Scheme], out: Path, options: Options) -> dict[str, Any]:
    """Quantize a run or a Hugging Face directory; the document with the certificates of all results of this model in `out`.

    A result that was already certified from the same files with the same settings is kept. The model itself is only read. Raises
    `UserError` before anything is written if a library, text or disk space is missing.
    """
    pythons = {scheme.name: _find(scheme, options.pythons) for scheme in schemes}
    vllm = compressed.find_vllm(options.pythons) if any(scheme.format == "compressed-tensors" for scheme in schemes) else None
    source = open_source(where)
    if out.resolve() in [one.resolve() for one in (source.directory, Path(where)) if one is not None]:
        raise UserError(f"--out {out} is the model itself; choose another directory")
    for scheme in schemes:
        _require_own_folders(out, scheme)
    length = min(_LONGEST, source.opened.context - 1)  # an engine wants room for a next token
    texts = read_texts(source.run_dir, options.held_out, options.calibration, source.opened.tokenizer, length, options.tokens)
    for scheme in schemes:
        if scheme.format == "compressed-tensors":
            compressed.require(scheme, source, texts.calibration)
    _require_space(out, source)
    made_from = _made_from(where, source, texts, options)
    comparison = Comparison(source, options.benchmarks, options.items)
    with explain_os_errors(out), _working(out) as working:
        for scheme in schemes:
            python = pythons[scheme.name]
            wanted = {**made_from, "limits": asdict(scheme.limits), "engine": (python if scheme.format == "gguf" else vllm) is not None}
            if _is_done(out, scheme, wanted):
                console.print(f"{scheme.name}: certified already, kept", style="dim")
                continue
            began = time.monotonic()
            (folder := working / scheme.name).mkdir()
            certify = gguf_evidence if scheme.format == "gguf" else compressed_evidence
            evidence = certify(scheme, Job(source, texts, comparison, python, vllm, working, folder))
            measured = {"seconds": time.monotonic() - began, "files": file_records(folder)}
            document = certificate(scheme, evidence, wanted) | measured
            write_json(folder / CERTIFICATE, document)
            write_json(folder / "tensors.json", [asdict(one) for one in evidence.records])
            _publish(folder, out, document)
    return collect(out, source)


def available(schemes: Sequence[Scheme], pythons: Sequence[Path]) -> tuple[list[Scheme], list[UserError]]:
    """The schemes whose library is there, and for each other one what it needs. Raises `UserError` if no library is there."""
    found, missing = [], []
    for scheme in schemes:
        try:
            _find(scheme, pythons)
            found.append(scheme)
        except UserError as error:
            missing.append(error)
    if not found and missing:
        raise missing[0]
    return found, missing


def _find(scheme: Scheme, pythons: Sequence[Path]) -> Path | None:
    return gguf.find_llama(scheme, pythons) if scheme.format == "gguf" else compressed.find_llmcompressor(scheme, pythons)


def default_out(where: str) -> Path:
    """The folder for results of a model: RUN/quantized, or DIRECTORY-quantized beside a Hugging Face directory."""
    path = Path(where).expanduser()
    run, at, which = where.rpartition("@")
    if not path.exists() and at:
        return Path(run).expanduser() / f"quantized-{which}"
    return path / "quantized" if (path / "resolved.json").is_file() else path.with_name(f"{path.name}-quantized")


def _made_from(where: str, source: Source, texts: Texts, options: Options) -> dict[str, Any]:
    return {
        "model": source.opened.name, "where": where, "fingerprint": source.fingerprint, "dtype": str(source.dtype).removeprefix("torch."),
        "held_out": texts.measured_from, "calibration": texts.calibration_from, "tokens": options.tokens,
        "benchmarks": [one.name for one in options.benchmarks], "items": options.items,
        "read": _read(texts, options),
    }  # fmt: skip


def _read(texts: Texts, options: Options) -> str:
    """A hash of all that is read beside the model: files keep their names when their contents change."""
    windows = [[[window.domain, *window.ids] for window in part] for part in (texts.measured, texts.calibration)]
    return hashlib.sha256(json.dumps([windows, contents(options.benchmarks)]).encode()).hexdigest()[:16]


def _is_done(out: Path, scheme: Scheme, wanted: dict[str, Any]) -> bool:
    """Whether there is a result of these files with these settings, whose own files are still those that were measured."""
    for folder in (out / scheme.name, out / f"{scheme.name}.failed"):
        path = folder / CERTIFICATE
        found = read_json(path) if path.is_file() else {}
        if found.get("made_from") != wanted or not found.get("files"):
            continue
        try:
            verify_export(folder)
        except UserError as error:
            console.print(f"{scheme.name}: {error}; it is made again", style="yellow")
            continue
        return True
    return False


def _require_own_folders(out: Path, scheme: Scheme) -> None:
    """Raise `UserError` if there is something else where a result will be: it would be removed."""
    for folder in (out / scheme.name, out / f"{scheme.name}.failed"):
        is_ours = folder.is_dir() and not folder.is_symlink() and ((folder / CERTIFICATE).is_file() or not any(folder.iterdir()))
        if (folder.exists() or folder.is_symlink()) and not is_ours:
            raise UserError(f"{folder} is no result of lmworks quantize; nothing was changed: move it away, or choose another --out")


def _publish(folder: Path, out: Path, document: dict[str, Any]) -> None:
    """Give a certified result its name; the results of the scheme that were there before are removed."""
    passed = out / str(document["scheme"])
    failed = passed.with_name(f"{passed.name}.failed")
    target, other = (passed, failed) if document["verdict"] == "passed" else (failed, passed)
    replace_directory(folder, target)
    shutil.rmtree(other, ignore_errors=True)


def collect(out: Path, source: Source) -> dict[str, Any]:
    """The certificates in `out` that are of this model, written to quantization.json."""
    found = [read_json(path) for path in sorted(out.glob(f"*/{CERTIFICATE}"))]
    of_this = [one for one in found if one.get("made_from", {}).get("fingerprint") == source.fingerprint]
    document = {
        "model": source.opened.name,
        "dtype": str(source.dtype).removeprefix("torch."),
        "original_bytes": source.bytes,
        "results": sorted(of_this, key=lambda one: -one["bytes"]),
    }
    write_json(out / "quantization.json", document)
    return document


def _require_space(out: Path, source: Source) -> None:
    """Raise `UserError` if the disk cannot hold the original once more and a result."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    needed, free = math.ceil(2.1 * source.bytes), machine.free_disk(there)
    if free < needed:
        raise UserError(f"quantizing needs {needed / 1e9:.2f} GB in {out}, and {free / 1e9:.2f} GB are free; choose another --out")


@contextmanager
def _working(out: Path) -> Iterator[Path]:
    """A folder for unfinished files, removed at the end however it comes; those of killed processes are removed, too."""
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob(f"{_WORKING}*"):
        process = left.name.removeprefix(_WORKING)
        # what has our own id is of an earlier process
        if process.isdecimal() and (int(process) == os.getpid() or not machine.is_running(int(process))):
            shutil.rmtree(left, ignore_errors=True)
    folder = out / f"{_WORKING}{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
