"""Artifacts: files that lmworks, its peers or anybody wrote, spoilt, and read by what reads them in use.

Each `Artifact` writes good files (`make`), and uses what is in a folder as a command would (`use`). A case spoils one to three files.
"""

from __future__ import annotations

import base64
import bz2
import contextlib
import gzip
import io
import json
import lzma
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import fuzz_mutate as mutate
import numpy as np
from fuzz_campaign import Case

from lmworks.errors import UserError
from lmworks.io.files import write_json

PROSE = "The quick brown fox, naïve and 狐, jumps over the lazy dog. "
CHAT = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b <|user|> c"},
    {"role": "assistant", "content": "<think>x</think>d"},
]
TEMPLATES = [
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{{ messages | tojson }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 'a' * 10 ** 11 }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__ }}",
    "{{ raise_exception('no\\nno') }}",
    "{{ strftime_now('%' * 100) }}",
    "{% include 'x' %}",
    "{{ ('%' ~ 'c') % 9999999999 }}",
    "{{ range(99999) | list | length }}",
    "{{ messages[0].nothing.at.all }}",
    "{{ '{0.__class__}'.format(messages) }}",
]


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of bytes, with the special tokens: what `lmworks tokenizer train` writes, without its training."""
    from lmworks.tokenizer import special
    from lmworks.tokenizer.chat import shipped_template
    from lmworks.tokenizer.tokenizer_json import add_specials, byte_level_spec

    spec = byte_level_spec([(84, 104), (32, 97)])
    add_specials(spec, special.names(40), 298)
    write_json(directory / "tokenizer.json", spec)
    (directory / "chat_template.jinja").write_text(shipped_template(), encoding="utf-8")


def write_foreign_tokenizer(directory: Path) -> None:
    """A tokenizer of another kind of model, with a chat template of its own."""
    from base_models import write_tokenizer as write

    write(directory, "qwen")


def small(**more: Any) -> Any:
    from lmworks.recipe.schema.model import Model

    shape = {
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 32,
        "max_position_embeddings": "48 tokens",
    }
    return Model.model_validate({**shape, **more})


def small_model(**more: Any) -> Any:
    from lmworks.model import Transformer
    from lmworks.model.init import initialize

    return initialize(Transformer(small(**more)), seed=5).eval()


def make_checkpoint(folder: Path) -> None:
    import torch

    from lmworks.checkpoint import manifest
    from lmworks.checkpoint.save_plan import TensorSlice
    from lmworks.checkpoint.tensor_files import metadata_files, write_metadata, write_slices

    values = {"model.a": torch.arange(12.0).reshape(3, 4), "model.b": torch.ones(5, dtype=torch.bfloat16)}
    place = folder / "step-00000010"
    place.mkdir()
    parts = [TensorSlice(name, v.dtype, tuple(v.shape), (0,) * v.dim(), tuple(v.shape), lambda v=v: v) for name, v in values.items()]  # type: ignore[misc]
    written = write_slices(place, 0, parts)
    meta = {
        "step": 10,
        "metric": 2.5,
        "permanent": False,
        "identity": {"a": 1},
        "meta": {"tokens": 640, "phase": "general"},
        "values": {"x": [1, 2]},
    }
    write_metadata(place, metadata_files([written], {"meta.json": meta}))
    assert manifest.problem(place) is None


def resign(folder: Path) -> None:
    """A manifest that fits whatever the other files have become: hashes do not say who wrote a checkpoint."""
    from lmworks.checkpoint import manifest

    for place in folder.glob("step-*"):
        with contextlib.suppress(OSError):
            entries = {path.name: manifest.entry_of(path.read_bytes()) for path in place.iterdir() if path.name != manifest.NAME}
            (place / manifest.NAME).write_bytes(manifest.canonical(entries))


def use_checkpoint(folder: Path) -> None:
    import torch

    from lmworks.checkpoint import checkpoints, listing

    listing.list_checkpoints(folder)
    listing.saved(folder)
    listing.verify(folder)
    path, _ = listing.newest_good(folder)
    if path is None:
        raise UserError("no good one")
    state = {"model": {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}, "x": None}
    checkpoints.load(path, state, {"a": 1}, verified=True)


def make_tokens(folder: Path) -> None:
    from lmworks.shards.indexed import IndexedWriter

    with IndexedWriter(folder / "part", np.dtype("<u2"), mask=True) as writer:
        for size in (5, 1, 9, 30):
            writer.add(np.arange(size) % 256, np.ones(size, bool))


def use_tokens(folder: Path) -> None:
    from lmworks.shards.indexed import IndexedFile

    file = IndexedFile(folder / "part")
    file.tokens.sum()
    for number in range(min(file.documents, 50)):
        file.document(number).sum()
    file.documents_until(np.arange(min(len(file), 50)))
    if file.mask is not None:
        file.mask.sum()


def make_foreign(folder: Path) -> None:
    make_tokens(folder)
    size, documents = 61, 5
    tokens = np.array([*range(size - 1), 258] * documents, "<u2")  # "!" and what follows it, and the closing token
    tokens.tofile(folder / "a.ds")
    ends = [size * number for number in range(1, documents + 1)]
    (folder / "a.ds.index").write_bytes(np.array(ends, "<u8").tobytes())
    (folder / "a.ds.metadata").write_text(f"tokenizer|2\n{size * documents}\n0", encoding="utf-8")
    np.save(folder / "b.npy", tokens)
    rows = "".join(f"{end - size},{end},id{end},file,{end}\n" for end in ends)
    (folder / "b.csv.gz").write_bytes(gzip.compress(rows.encode(), mtime=0))
    write_tokenizer(folder / "tokenizer")


def use_foreign(folder: Path) -> None:
    from lmworks.shards.import_tokens import import_tokens

    said = None
    for kind, path in (("megatron", folder / "part.idx"), ("datatrove", folder / "a.ds"), ("olmo", folder / "b.npy")):
        try:
            import_tokens(kind, path, folder / "tokenizer", "mine", folder / kind, domain="d")  # type: ignore[arg-type]
        except UserError as error:
            said = error
    if said:
        raise said


def use_tokenizer(folder: Path) -> None:
    from lmworks import tokenizer

    found = tokenizer.load(folder)
    for text in (PROSE, "", "<|user|>\n" * 3, "\0\ud7ff 12345 " + " " * 20):
        assert isinstance(found.decode(found.encode(text)), str)
    found.encode_batch([PROSE, ""], threads=1)
    found.encode_chat(CHAT, add_generation_prompt=False)
    found.byte_lengths.sum()


def use_template(folder: Path) -> None:
    from lmworks.tokenizer import rendering
    from lmworks.tokenizer.chat import Template

    rendering.SECONDS = 1.0
    if not (folder / "chat_template.jinja").is_file():
        raise UserError("the template is gone")  # as the loaders of models say, of which this is none
    Template((folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace"), "chat_template.jinja").render(CHAT)


def make_sources(folder: Path) -> None:
    rows = b"".join(json.dumps({"text": PROSE * n, "url": "u"}).encode() + b"\n" for n in range(1, 6))
    page = f"<html><body><article><h1>T</h1><p>{PROSE * 3}</p></article></body></html>".encode()
    cells = [{"cell_type": kind, "source": [PROSE], "metadata": {}, "outputs": []} for kind in ("code", "markdown")]
    paper = rf"\documentclass{{a}}\begin{{document}}\section{{A}} {PROSE} $x^2$\end{{document}}".encode()
    members = {"a.txt": PROSE.encode(), "b/c.md": PROSE.encode() * 9, "d.py": b"x = 1\n", "e.gz": gzip.compress(PROSE.encode(), mtime=0)}
    zipped, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive, tarfile.open(fileobj=tarred, mode="w") as tar:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "../../outside"
        tar.addfile(link)
    files = {
        "rows.jsonl": rows,
        "rows.jsonl.gz": gzip.compress(rows, mtime=0),
        "rows.jsonl.xz": lzma.compress(rows),
        "rows.jsonl.bz2": bz2.compress(rows),
        "a.zip": zipped.getvalue(),
        "a.tar": tarred.getvalue(),
        "a.tgz": gzip.compress(tarred.getvalue(), mtime=0),
        "page.html": page,
        "book.ipynb": json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}).encode(),
        "paper.tex": paper,
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)


def use_source(kind: str, name: str) -> Callable[[Path], None]:
    def use(folder: Path) -> None:
        from lmworks.corpus.read import parts, read
        from lmworks.recipe.schema.corpus import Source

        source = Source.model_validate({"name": "mine", "kind": kind, "path": str(folder / name), "license": "test"})
        for part in parts(source, 1 << 20):
            for item in read(source, part, 20_000):
                json.dumps([item.origin, dict(item.facts), item.text], ensure_ascii=False).encode()

    return use


def make_records(folder: Path) -> None:
    from page_runs import write_run

    write_run(folder / "run")
    write_json(folder / "run" / "lock", {"pid": 1, "host": "other", "since": 1.0})
    (folder / "run" / "report.html").unlink(missing_ok=True)


def use_records(folder: Path) -> None:
    from lmworks.pages.run_page import write_page
    from lmworks.recipe.load import load_cluster
    from lmworks.train.data.mixture import read_changes
    from lmworks.watch.ledger import read_ledger

    write_page(folder / "run", load_cluster("1xh200"))
    read_ledger(folder / "run" / "ledger.jsonl")
    read_changes(folder / "run")


def make_model(folder: Path) -> None:
    import torch

    from lmworks.export.huggingface import write_model

    write_model(small_model(), folder, {"eos_token_id": 258, "pad_token_id": 258}, torch.float32)


def make_experts(folder: Path) -> None:
    import torch

    from lmworks.export.huggingface import write_model

    moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    write_model(
        small_model(moe=moe, mtp={"num_nextn_predict_layers": 1}), folder, {"eos_token_id": 258, "pad_token_id": 258}, torch.bfloat16
    )


def use_model(folder: Path) -> None:
    from lmworks.weights.huggingface import read_model

    read_model(folder)


def make_manifest(folder: Path) -> None:
    shard = {
        "prefix": "train/a-00000",
        "tokens": 45,
        "documents": 4,
        "sha256": {".bin": "0" * 64, ".idx": "1" * 64},
        "size": {".bin": 90, ".idx": 99},
    }
    split = {"tokens": 45, "bytes": 100, "documents": 4, "inputs": "x", "shards": [shard]}
    write_json(
        folder / "manifest.json",
        {
            "format": 1,
            "seed": 1,
            "vocab_size": 298,
            "dtype": "uint16",
            "tokenizer_sha256": "2" * 64,
            "token_bytes_sha256": "3" * 64,
            "sources": [{"name": "a", "domain": "d", "train": split, "validation": split}],
        },
    )


def use_manifest(folder: Path) -> None:
    from lmworks.shards.manifest import Manifest, check_vocabulary, verify

    found = Manifest.load(folder)
    found.digests()
    check_vocabulary(found, 300)
    for name in found.train_tokens():
        found.stream(folder, name)
    verify(folder, found)


def make_run(folder: Path) -> None:
    import torch

    from lmworks.checkpoint import Checkpoints
    from lmworks.recipe.changes import as_tree
    from lmworks.recipe.schema.recipe import Recipe

    model = small_model()
    recipe = Recipe(name="talker", model=model.config)
    write_json(folder / "resolved.json", as_tree(recipe))
    write_tokenizer(folder / "tokenizer")
    with Checkpoints(folder / "checkpoints", recipe.checkpoints, {}) as checkpoints:
        checkpoints.save(1, {"model": dict(model.state_dict())}, {}, wait=True)
    torch.manual_seed(0)


def use_run(folder: Path) -> None:
    from lmworks.serve.models import load_engine

    resign(folder / "checkpoints")
    load_engine(folder).close()


@dataclass(frozen=True)
class Artifact:
    """A kind of artifact. `files` are those that are spoilt, all if empty; `signed` ones get a manifest that fits in half of the cases."""

    make: Callable[[Path], None]
    use: Callable[[Path], None]
    files: tuple[str, ...] = ()
    signed: bool = False
    weight: float = 1.0


ARTIFACTS: dict[str, Artifact] = {
    "checkpoint": Artifact(make_checkpoint, use_checkpoint, signed=True, weight=3),
    "tokens": Artifact(make_tokens, use_tokens, weight=2),
    "foreign": Artifact(make_foreign, use_foreign, weight=1),
    "tokenizer": Artifact(write_tokenizer, use_tokenizer, ("tokenizer.json",), weight=2),
    "foreign tokenizer": Artifact(write_foreign_tokenizer, use_tokenizer, ("tokenizer.json",), weight=1.5),
    "template": Artifact(write_tokenizer, use_template, ("chat_template.jinja",), weight=0.3),
    "records": Artifact(make_records, use_records, weight=4),
    "model": Artifact(make_model, use_model, weight=1.5),
    "experts": Artifact(make_experts, use_model, weight=1),
    "manifest": Artifact(make_manifest, use_manifest, weight=1),
    "run": Artifact(make_run, use_run, weight=1),
    **{
        f"source {name}": Artifact(make_sources, use_source(kind, name), (name,), weight=0.4)
        for kind, name in (
            ("jsonl", "rows.jsonl"),
            ("jsonl", "rows.jsonl.gz"),
            ("jsonl", "rows.jsonl.xz"),
            ("jsonl", "rows.jsonl.bz2"),
            ("text", "a.zip"),
            ("text", "a.tar"),
            ("markdown", "a.tgz"),
            ("html", "page.html"),
            ("notebook", "book.ipynb"),
            ("latex", "paper.tex"),
        )
    },
}


class Artifacts:
    """Each case is a kind of artifact, with the files of it that are spoilt; None where one is missing."""

    def prepare(self) -> None:
        import torch

        torch.set_num_threads(1)
        from lmworks.shards import import_tokens  # noqa: F401

        self._good: dict[str, dict[str, bytes]] = {}
        made: dict[Callable[[Path], None], dict[str, bytes]] = {}
        for name, artifact in ARTIFACTS.items():
            if artifact.make not in made:
                with tempfile.TemporaryDirectory() as folder:
                    artifact.make(Path(folder))
                    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
                    made[artifact.make] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
            self._good[name] = made[artifact.make]

    def begin(self) -> None:
        pass

    def case(self, draw: Random) -> Case:
        name = draw.choices(list(ARTIFACTS), [artifact.weight for artifact in ARTIFACTS.values()])[0]
        good = self._good[name]
        names, spoilt = ARTIFACTS[name].files or tuple(good), {}
        for file in draw.sample(names, min(len(names), draw.choice([1, 1, 1, 2, 3]))):
            data = self._spoil(file, good[file], draw) if draw.random() < 0.97 else draw.choice([None, b"", b"\0" * 100])
            spoilt[file] = data if data is None else base64.b64encode(data).decode()
        return {"artifact": name, "files": spoilt, "signed": ARTIFACTS[name].signed and draw.random() < 0.7}

    def _spoil(self, file: str, data: bytes, draw: Random) -> bytes:
        if draw.random() < 0.25:
            return mutate.data(data, draw)
        if file.endswith((".json", ".ipynb")):
            return mutate.spoiled_json(json.loads(data), draw)
        if file.endswith((".jsonl", "tensors.jsonl.gz")):
            packed = file.endswith(".gz")
            rows = [json.loads(line) for line in (gzip.decompress(data) if packed else data).splitlines()]
            number = draw.randrange(len(rows))
            lines = [mutate.spoiled_json(row, draw) if at == number else json.dumps(row).encode() for at, row in enumerate(rows)]
            return gzip.compress(b"\n".join(lines) + b"\n", mtime=0) if packed else b"\n".join(lines) + b"\n"
        if file.endswith(".jinja"):
            source = draw.choice([data.decode(), *TEMPLATES])
            return (mutate.text(source, draw) if draw.random() < 0.8 else source).encode("utf-8", "surrogatepass")
        if file.endswith(".safetensors"):
            size = int.from_bytes(data[:8], "little")
            head = mutate.spoiled_json(json.loads(data[8 : 8 + size]), draw)
            return len(head).to_bytes(8, "little") + head + data[8 + size :]
        if file.endswith((".html", ".tex")):
            return mutate.text(data.decode(), draw, 8).encode("utf-8", "surrogatepass")
        return mutate.data(data, draw)

    def run(self, case: Case, folder: Path) -> str:
        artifact, files = ARTIFACTS[case["artifact"]], dict(self._good[case["artifact"]])
        files |= {name: None if data is None else base64.b64decode(data) for name, data in case["files"].items()}
        for name, data in files.items():
            if data is not None:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
        if case["signed"]:
            resign(folder)
        artifact.use(folder)
        return f"{case['artifact']} read"
