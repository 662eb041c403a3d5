"""tokenizer.json, the file that `tokenizers` and `transformers` load: built, edited, and read as plain byte-pair encoding.

Read, it gives the ranks that tiktoken needs, and a check that tiktoken gives the same ids. SentencePiece models cannot be run by tiktoken,
which starts from bytes and not from characters; `tokenizers` encodes those.

`tokenizers` merges the listed pairs in the order of the list. tiktoken has no list: it merges any two neighbors whose bytes together are a
token, the lowest id first. For merges that result from BPE training both are the same; for an arbitrary tokenizer.json they may differ, so
an imported one is checked (`check_same_ids`).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lmworks.errors import UserError
from lmworks.tokenizer import special


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: printable Latin-1 characters stand for themselves, the other bytes are numbered from
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def to_bytes(token: str) -> bytes:
    """The bytes that a vocabulary entry stands for. `KeyError` if it is not in the byte-level alphabet."""
    return bytes([BYTE_OF[char] for char in token])


@dataclass(frozen=True)
class Bpe:
    """The contents of a tokenizer.json."""

    pieces: dict[int, bytes]  # the bytes that each ordinary token stands for
    merges: list[tuple[bytes, bytes]]
    pattern: str
    added: dict[str, int]  # text of each added token -> id
    hidden: frozenset[str]  # the added tokens that decoding may skip
    byte_level: bool  # otherwise SentencePiece's kind: characters, and single bytes for characters without an entry

    @property
    def vocab_size(self) -> int:
        return len(self.pieces) + len(self.added)

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        """Bytes of each ordinary token of a byte-level tokenizer -> id; a lower id merges earlier."""
        return {piece: number for number, piece in self.pieces.items()}


def read_bpe(spec: dict[str, Any], where: str) -> Bpe:
    """Interpret the parsed tokenizer.json `spec`. Raises a `UserError` that names `where` if it is not lossless BPE.

    Accepted are byte-level BPE as in GLM-4.x, and BPE over characters with byte fallback that adds no spaces.
    """

    def refuse(why: str) -> UserError:
        return UserError(f"{where}: {why}; lmworks needs a byte-level BPE tokenizer.json of the GLM-4 kind, or one of its own")

    model = spec.get("model") or {}
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict) or "merges" not in model:
        raise refuse("the model is not BPE")
    if spec.get("normalizer"):
        raise refuse(f"the normalizer {spec['normalizer'].get('type')} changes the text, so it cannot be decoded back")
    for option in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise refuse(f"the BPE option {option} is set")
    byte_level = not model.get("byte_fallback")
    pattern = (_byte_level_pattern if byte_level else _split_pattern)(spec.get("pre_tokenizer") or {})
    if pattern is None:
        raise refuse("the pre-tokenizer is not one Split by a regex followed by ByteLevel" if byte_level else
                     "the option byte_fallback is set, and the pre-tokenizer is not one Split by a regex")

    added = {token["content"]: token for token in spec.get("added_tokens", [])}
    if any(token.get("lstrip") or token.get("rstrip") or token.get("single_word") for token in added.values()):
        raise refuse("an added token strips the space around it")
    understood = to_bytes if byte_level else piece_bytes
    try:
        pieces = {number: understood(text) for text, number in model["vocab"].items() if text not in added}
        merges = [(understood(left), understood(right)) for left, right in map(_pair, model["merges"])]
    except (KeyError, ValueError):
        raise refuse("the vocabulary has entries outside the byte-level alphabet") from None
    bpe = Bpe(pieces, merges, pattern, {text: token["id"] for text, token in added.items()},
              frozenset(text for text, token in added.items() if token.get("special")), byte_level)
    single = {piece for piece in pieces.values() if len(piece) == 1}
    if missing := 256 - len(single):
        raise refuse(f"{missing} single bytes are not in the vocabulary")
    if sorted([*pieces, *bpe.added.values()]) != list(range(bpe.vocab_size)):
        raise refuse("the token ids have gaps or repeat")
    return bpe


def without_pieces(model: dict[str, Any], texts: Collection[str]) -> dict[str, Any]:
    """The `model` of a tokenizer.json in which no text becomes the entries `texts`. Ids, scores and the size of the vocabulary stay.

    A tokenizer without its added tokens still finds those that are entries of the vocabulary: Unigram takes any piece of a text, BPE
    what its merges reach, or with ignore_merges a whole word, as WordLevel and WordPiece do. Their texts become ones that nobody knows.
    """
    vocab = model.get("vocab") or {}
    # nobody can write them, since they are drawn at each opening
    hidden = {text: f"{text}\U0010fffd{secrets.token_hex(16)}" for text in texts}
    if isinstance(vocab, list):  # Unigram: pieces with their scores
        return model | {"vocab": [[hidden.get(piece, piece), *score] for piece, *score in vocab]}
    changed = model | {"vocab": {hidden.get(piece, piece): number for piece, number in vocab.items()}}
    if model.get("unk_token") in vocab:
        changed["unk_token"] = hidden.get(model["unk_token"], model["unk_token"])
    if "merges" in model and not hidden.keys().isdisjoint(vocab):
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = [(left, right, left + right.removeprefix(prefix)) for left, right in map(_pair, model["merges"])]
        changed["merges"] = [[left, right] for left, right, whole in pairs if hidden.keys().isdisjoint((left, right, whole))]
    return changed


def is_byte(text: str, spec: dict[str, Any]) -> bool:
    """Whether `text` is the entry that a byte of any text becomes, such as a letter of byte-level BPE."""
    model = spec.get("model") or {}
    if text not in (model.get("vocab") or {}):
        return False
    if model.get("byte_fallback"):
        return BYTE_PIECE.fullmatch(text) is not None
    return text in BYTE_OF and any('"ByteLevel"' in json.dumps(spec.get(part)) for part in ("pre_tokenizer", "normalizer"))


def piece_bytes(text: str) -> bytes:
    """The bytes of a piece: <0x41> is one byte, other pieces are their text."""
    byte = BYTE_PIECE.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.encode()


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _byte_level_pattern(pre: dict[str, Any]) -> str | None:
    match pre:
        case {"type": "Sequence", "pretokenizers": [
            dict(split),
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]}:
            return _split_pattern(split)
    return None


def _split_pattern(pre: dict[str, Any]) -> str | None:
    match pre:
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return pattern
    return None


def check_same_ids(bpe: Bpe, where: str) -> None:
    """`UserError` unless tiktoken with the `ranks` of a byte-level `bpe` gives the ids of the merge list for every text.

    Proof: suppose tiktoken merges neighbors x and y to T. No earlier merge crossed the ends of T, so the bytes between them were merged as
    in T alone, and x, y is the state of T alone after all merges below T's rank. Hence it suffices that for each T this state is a listed
    pair, and that the list is in the order of the ids. Listed pairs that are never reached (the long lists of GLM-4 and Llama 3) are
    harmless.
    """
    if not bpe.byte_level:
        return
    last = -1
    for left, right in bpe.merges:
        rank = bpe.ranks.get(left + right)
        if rank is None or rank < last:
            raise UserError(f"{where}: the merges are not in the order of the token ids, so fast encoding would differ from it")
        last = rank
    listed = set(bpe.merges)
    for token, rank in bpe.ranks.items():
        if len(token) > 1 and merge_below(token, bpe.ranks, rank) not in listed:
            raise UserError(f"{where}: the token {token!r} is not reached by the merges, so fast encoding would differ from it")


def merge_below(token: bytes, ranks: dict[bytes, int], below: int) -> tuple[bytes, ...]:
    """The pieces of `token` after all merges of rank less than `below`, lowest rank and leftmost first."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], below), i) for i in range(len(parts) - 1))
        if rank >= below:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return tuple(parts)


BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]  # how SentencePiece writes a byte of a character without an entry


def byte_level_spec(merges: list[tuple[int, int]]) -> dict[str, Any]:
    """Byte-level BPE. The ids 0 to 255 are the bytes in the order of their printable characters, as in `tokenizers`."""
    pre = [_split(special.SPLIT), {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return _spec(_model(sorted(BYTE_OF), merges), {"type": "Sequence", "pretokenizers": pre}, decoder)


def sentencepiece_spec(alphabet: str, merges: list[tuple[int, int]]) -> dict[str, Any]:
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
    """Give an imported tokenizer the special tokens that it lacks, where this needs no new ids; returns the replaced names.

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
