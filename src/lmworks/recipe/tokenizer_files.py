"""Forms of a tokenizer that lmworks does not read, and how tokenizer.json is written from them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

SENTENCEPIECE = ("tokenizer.model", "spiece.model")
TEKKEN = "tekken.json"
_OTHERS = (*SENTENCEPIECE, TEKKEN, "sentencepiece.bpe.model", "merges.txt", "vocab.json")
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")  # a line of its files


def other_form(folder: Path) -> str | None:
    """What to do about a tokenizer in `folder` that is there in another form than tokenizer.json; None if there is no other form."""
    if (convertible := to_convert(folder)) is not None:
        return f"{folder} has no tokenizer.json, only {convertible.name}; write it: lmworks tokenizer convert {shlex.quote(str(folder))}"
    tiktoken = next((file for file in sorted(folder.glob("*.model")) + sorted(folder.glob("*.tiktoken")) if _is_tiktoken(file)), None)
    if tiktoken is not None:
        return (
            f"{folder} has no tokenizer.json, only {tiktoken.name}, a file of tiktoken, which says neither how text is split nor what the "
            "special tokens are; put the tokenizer.json of this model there, from a repository that has it"
        )
    if (folder / "sentencepiece.bpe.model").is_file():
        return (
            f"{folder} has no tokenizer.json, only sentencepiece.bpe.model, whose pieces the Python class of its tokenizer numbers "
            "otherwise; put the tokenizer.json of this model there, from a repository that has it"
        )
    if not (folder / "merges.txt").is_file():
        return None
    return (
        f"{folder} has no tokenizer.json, only merges.txt; write it: pip install transformers && "
        "python -c 'import sys; from transformers import AutoTokenizer as A; A.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])' "
        f"{shlex.quote(str(folder))}"
    )


def instead_of(path: Path) -> str | None:
    """What to do about a folder or file that is named as a tokenizer and has it in another form than tokenizer.json; None for others."""
    if path.is_dir():
        return None if (path / "tokenizer.json").exists() else other_form(path)
    if path.name not in _OTHERS and not _is_tiktoken(path):
        return None
    beside = path.with_name("tokenizer.json")
    return f"{path} is no tokenizer.json; name {beside}" if beside.is_file() else other_form(path.parent)


def to_convert(folder: Path) -> Path | None:
    """The file of which `lmworks tokenizer convert` makes tokenizer.json; None if there is none."""
    files = [folder / name for name in (*SENTENCEPIECE, TEKKEN)]
    return next((file for file in files if file.is_file() and not _is_tiktoken(file)), None)


def _is_tiktoken(file: Path) -> bool:
    if not file.is_file():
        return False
    if file.suffix == ".tiktoken":
        return True
    try:
        with file.open("rb") as stream:
            return _TIKTOKEN.match(stream.read(200)) is not None
    except OSError:  # whoever reads it says why
        return False
