"""Forms of a tokenizer that lmworks does not read, and how tokenizer.json is written from them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_PACKAGES = {  # what transformers needs to convert a form, by its file
    **dict.fromkeys(("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"), ("sentencepiece", "protobuf")),
    "tekken.json": ("mistral-common",), "merges.txt": (),
}  # fmt: skip
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")  # a line of its files


def other_form(folder: Path) -> str | None:
    """What to do about a tokenizer in `folder` that is there in another form than tokenizer.json; None if there is no other form."""
    tiktoken = next((file for file in sorted(folder.glob("*.model")) + sorted(folder.glob("*.tiktoken")) if _is_tiktoken(file)), None)
    if tiktoken is not None:
        return (
            f"{folder} has no tokenizer.json, only {tiktoken.name}, a file of tiktoken, which says neither how text is split nor what the "
            "special tokens are; put the tokenizer.json of this model there, from a repository that has it"
        )
    found = next((name for name in _PACKAGES if (folder / name).is_file()), None)
    if found is None:
        return None
    return (
        f"{folder} has no tokenizer.json, only {found}; write it: pip install {' '.join(['transformers', *_PACKAGES[found]])} && "
        "python -c 'import sys; from transformers import AutoTokenizer as A; A.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])' "
        f"{shlex.quote(str(folder))}"
    )


def _is_tiktoken(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return _TIKTOKEN.match(stream.read(200)) is not None
