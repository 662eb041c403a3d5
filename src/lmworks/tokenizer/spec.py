"""Building and editing tokenizer.json, the file that `tokenizers` and `transformers` load."""

from __future__ import annotations

import re
from typing import Any

from lmworks.tokenizer import special
from lmworks.tokenizer.bpe import BYTE_OF

BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]  # how SentencePiece writes a byte of a character without an entry


def byte_level(merges: list[tuple[int, int]]) -> dict[str, Any]:
    """Byte-level BPE. The ids 0 to 255 are the bytes in the order of their printable characters, as in `tokenizers`."""
    pre = [_split(special.SPLIT), {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return _spec(_model(sorted(BYTE_OF), merges), {"type": "Sequence", "pretokenizers": pre}, decoder)


def sentencepiece(alphabet: str, merges: list[tuple[int, int]]) -> dict[str, Any]:
    """BPE over characters with byte fallback. Spaces are not replaced, so that text is decoded exactly, including U+2581."""
    model = _model([*BYTE_PIECES, *alphabet], merges)
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    return _spec({**model, "byte_fallback": True}, _split(special.SPLIT_DIGITS), decoder)


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _model(symbols: list[str], merges: list[tuple[int, int]]) -> dict[str, Any]:
    pieces = list(symbols)
    for a, b in merges:
        pieces.append(pieces[a] + pieces[b])
    return {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {piece: number for number, piece in enumerate(pieces)}, "merges": [[pieces[a], pieces[b]] for a, b in merges]}


def _spec(model: dict[str, Any], pre_tokenizer: dict[str, Any], decoder: dict[str, Any]) -> dict[str, Any]:
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder, "model": model}


def complete_specials(spec: dict[str, Any]) -> dict[str, str]:
    """Give an imported tokenizer the special tokens that it lacks, as far as this needs no new ids; returns the replaced names.

    Its own end of text token becomes ours, and its reserved tokens become the other missing ones: the ids, and so the rows of weights, do
    not change.
    """
    there = {token["content"]: token for token in spec["added_tokens"]}
    vocab = spec["model"]["vocab"]
    reserved = iter([name for name in there if _RESERVED.fullmatch(name)])
    renamed: dict[str, str] = {}
    for name in special.REQUIRED:
        own = None if name in there else _END if name == special.END and _END in there else next(reserved, None)
        if own is not None:
            there[own]["content"] = name
            if own in vocab:
                vocab[name] = vocab.pop(own)
            renamed[own] = name
    return renamed


_END = "<|end_of_text|>"  # Llama 3's
_RESERVED = re.compile(r"<\|reserved(_special_token)?_\d+\|>")


def add_specials(spec: dict[str, Any], names: list[str], size: int) -> list[str]:
    """Add `names`, and reserved tokens up to `size` entries, after the ordinary ids, as in GLM-4.x. Returns all added names."""
    taken = {token["content"] for token in spec["added_tokens"]}
    start = max([*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"])]) + 1
    names, number = list(names), 0
    while start + len(names) < size:
        if (name := special.reserved(number)) not in {*taken, *names}:
            names.append(name)
        number += 1
    spec["added_tokens"] += [
        {"id": start + n, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": name not in special.MARKUP} for n, name in enumerate(names)]
    return names


def truncated(spec: dict[str, Any], size: int) -> dict[str, Any]:
    """The tokenizer of `size` entries that the same training would have produced: its merges are the first merges of this one.

    `spec` is one of ours: its special tokens follow the ordinary ones, which follow the order of the merges.
    """
    model, added = spec["model"], spec["added_tokens"]
    surplus = max(0, len(model["vocab"]) + len(added) - size)
    merges = max(0, len(model["merges"]) - surplus)
    kept = len(model["vocab"]) - len(model["merges"]) + merges
    vocab = {piece: number for piece, number in model["vocab"].items() if number < kept}
    moved = [token | {"id": kept + n} for n, token in enumerate(added)]
    return spec | {"model": model | {"vocab": vocab, "merges": model["merges"][:merges]}, "added_tokens": moved}
