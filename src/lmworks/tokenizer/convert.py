"""`lmworks tokenizer convert`: tokenizer.json of a model's folder that has its tokenizer in another form."""

from __future__ import annotations

import json
from pathlib import Path

from lmworks.errors import UserError
from lmworks.io.files import write_json, write_text
from lmworks.recipe.tokenizer_files import TEKKEN, instead_of, to_convert
from lmworks.tokenizer import from_sentencepiece, from_tekken
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.ui import terminal

_COMPARED = ("Hello world, this is a test of 123 numbers.", "def f(x):\n    return x", "Gr\u00f6\u00dfe, \u043c\u0438\u0440, \u6771\u4eac")


def convert(folder: Path) -> Path:
    """Write tokenizer.json into a folder, and without tokenizer_config.json that too; returns the first. Raises `UserError`."""
    path = folder / "tokenizer.json"
    if path.exists():
        raise UserError(f"{path} exists already; move it away to write it again")
    source = to_convert(folder)
    if source is None:
        raise UserError(instead_of(folder) or f"{folder} has no tokenizer.model, spiece.model or tekken.json; name the folder of a model")
    spec, named = (from_tekken if source.name == TEKKEN else from_sentencepiece).spec_of(source)
    if not (folder / "tokenizer_config.json").exists():  # with this class transformers takes tokenizer.json as it stands
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | named)
    if "Precompiled" in json.dumps(spec["normalizer"]):
        terminal.console.print(
            f"{source} normalizes text by a table (nmt_nfkc and the like), which the package tokenizers applies to characters with "
            "their marks: ids of text with combining marks or control characters may differ from those of SentencePiece",
            style="yellow", markup=False,
        )  # fmt: skip
    write_text(path, json.dumps(spec, ensure_ascii=False, indent=1) + "\n")
    return path


_named: set[Path] = set()


def name_other_ids(tokenizer: Tokenizer) -> None:
    """Say once if the model of SentencePiece beside a tokenizer.json gives a few texts other ids."""
    source = to_convert(tokenizer.directory)
    if source is None or source.name == TEKKEN or source in _named:
        return
    _named.add(source)
    try:
        theirs = from_sentencepiece.ids_of(source, _COMPARED)
    except UserError:  # nothing else reads it
        return
    ours = [found.tolist() for found in tokenizer.encode_batch(_COMPARED)]
    different = next((one for one in zip(_COMPARED, ours, theirs, strict=True) if one[1] != one[2]), None)
    if different is not None:
        text, own, other = different
        terminal.console.print(
            f"{tokenizer.directory}: tokenizer.json, which is used, gives {text!r} the ids {own[:8]}, and {source.name} beside it "
            f"{other[:8]}; unless the model was trained with tokenizer.json, move that away and run lmworks tokenizer convert",
            style="yellow", markup=False,
        )  # fmt: skip
