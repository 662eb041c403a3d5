"""tokenizer.json of a model of SentencePiece (`tokenizer.model`, `spiece.model`), which gives the ids that SentencePiece gives.

The file is a protocol buffer: pieces with scores and kinds, whether they are BPE or Unigram, and how text is normalized. What it does not
say (the tokens before and behind a text, added tokens) is in tokenizer_config.json and added_tokens.json, or follows from the class named
there.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.io.files import explain_damage, read_regular
from lmworks.recipe.scored_pieces import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, merges_of
from lmworks.tokenizer.named import read_object

_SPACE = "\u2581"
_UNIGRAM, _BPE = 1, 2
_NEVER = -1e6  # the score of unused entries; Unigram takes any
_MOST_BYTES = 1 << 26
_LLAMA, _T5, _BARE = (True, False), (False, True), (False, False)
_EDGES = {  # whether a class puts BOS before and EOS behind a text, where tokenizer_config.json does not say it
    **dict.fromkeys((None, "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizer", "TokenizersBackend"), _LLAMA),
    "T5Tokenizer": _T5,
}  # fmt: skip


@dataclass
class SentencePiece:
    """A model of SentencePiece: texts, scores and kinds of its pieces, the sort of model, and how it normalizes text."""

    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    sort: int = _UNIGRAM
    byte_fallback: bool = False
    named: dict[str, str] = field(default_factory=lambda: {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"})
    charsmap: bytes = b""
    space_first: bool = True
    fewer_spaces: bool = True
    marked: bool = True
    space_last: bool = False


def read(path: Path) -> SentencePiece:
    """Parse a file. Raises `UserError` if it is no model of SentencePiece."""
    found = SentencePiece()
    with explain_damage(path):
        specs = {2: b"", 3: b""}  # of the trainer and the normalizer; parts of a message that stand apart are one
        for number, value in _fields(read_regular(path, _MOST_BYTES)):
            if number == 1:
                piece = dict(_fields(value))
                found.texts.append(piece[1].decode())
                found.scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
                found.kinds.append(piece.get(3, NORMAL))
            elif number in specs:
                specs[number] += value
        trainer, rules = (dict(_fields(specs[number])) for number in (2, 3))
        found.sort, found.byte_fallback, found.space_last = trainer.get(3, _UNIGRAM), bool(trainer.get(35, 0)), bool(trainer.get(24, 0))
        found.named |= {name: trainer[at].decode() for at, name in enumerate(found.named, 45) if at in trainer}
        found.charsmap = rules.get(2, b"")
        found.space_first, found.fewer_spaces, found.marked = (bool(rules.get(at, 1)) for at in (3, 4, 5))
        if not found.texts or len(set(found.texts)) != len(found.texts) or UNKNOWN not in found.kinds:
            raise ValueError("its pieces are none, or have one twice, or no unknown one")
    return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of the fields of a message: integers, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}[kind]
        if at + size > len(data):
            raise ValueError("it is cut off")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
        shift += 7


def spec_of(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of tokenizer.json for a model, and the texts of its special tokens by their names in tokenizer_config.json.

    Raises `UserError` if tokenizer.json cannot express it.
    """
    model, folder = read(path), path.parent
    settings = read_object(folder / "tokenizer_config.json")
    try:
        _require_expressible(model)
        added = _added(model, folder, settings)
        users = [text for text, kind in zip(model.texts, model.kinds, strict=True) if kind == USER and text not in added]
        spec = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": sorted(added.values(), key=lambda one: one["id"]),
            **_text_rules(model, users, one_space=settings.get("legacy") is False), "post_processor": _edges(model, settings),
            "model": _model(model, users),
        }  # fmt: skip
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return spec, {name: text for name, text in model.named.items() if text in model.texts}


def ids_of(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """The ids of texts without special tokens. Only the pieces that are in them are looked at, so this takes no longer than to read the
    file. Raises `UserError` as `spec_of` does."""
    import tokenizers

    model = read(path)
    _require_expressible(model)
    marked = _SPACE + "\n".join(texts).replace(" ", _SPACE).replace("\n", f"\n{_SPACE}")
    within = {marked[at : at + size] for size in range(1, 17) for at in range(len(marked))}
    kept = [number for number, text in enumerate(model.texts) if model.kinds[number] != NORMAL or text in within]
    few = replace(model, texts=[model.texts[one] for one in kept], scores=[model.scores[one] for one in kept],
                  kinds=[model.kinds[one] for one in kept])  # fmt: skip
    spec = {"version": "1.0", "added_tokens": [], "post_processor": None, **_text_rules(few, [], False), "model": _model(few, [])}
    found = tokenizers.Tokenizer.from_str(json.dumps(spec)).encode_batch(list(texts))
    return [[kept[one] for one in encoded.ids] for encoded in found]


def _require_expressible(model: SentencePiece) -> None:
    of_kind: dict[int, list[str]] = {kind: [] for kind in range(NORMAL, BYTE + 1)}
    for text, kind in zip(model.texts, model.kinds, strict=True):
        of_kind.setdefault(kind, []).append(text)
    letters = {text for text in of_kind[NORMAL] + of_kind[USER] if len(text) == 1}
    unknown = {*"".join(of_kind[NORMAL])} - letters if model.sort == _BPE else set()
    unused = [text for text in of_kind[UNUSED] if len(text) > 1 and {*text} <= letters]
    spaces = [text for text in of_kind[USER] if " " in text or _SPACE * 2 in text]
    reasons = {
        "pieces of words or characters": model.sort not in (_UNIGRAM, _BPE),
        "a space behind a text and not before it (treat_whitespace_as_suffix)": model.space_last,
        "spaces that stay spaces (escape_whitespaces)": not model.marked,
        f"unused pieces that are merged and cut again ({', '.join(map(repr, unused[:1]))})": model.sort == _BPE and bool(unused),
        f"merges of characters that are no pieces ({', '.join(map(repr, sorted(unknown)[:1]))})": bool(unknown),
        f"a user-defined piece with spaces ({', '.join(map(repr, spaces[:1]))})": model.fewer_spaces and bool(spaces),
    }
    reason = next((reason for reason, is_so in reasons.items() if is_so), None)
    if reason is not None:
        raise UserError(f"it has {reason}, which tokenizer.json cannot express; take a model that has a tokenizer.json")


def _added(model: SentencePiece, folder: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The added tokens by text: control and unknown pieces, and those of tokenizer_config.json and added_tokens.json."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    found = {text: {"id": number, "content": text} | flags | {"special": True}
             for number, (text, kind) in enumerate(zip(model.texts, model.kinds, strict=True)) if kind in (CONTROL, UNKNOWN)}  # fmt: skip
    stated: dict[str, dict[str, Any]] = {}
    with explain_damage(folder / "added_tokens.json"):
        stated |= {str(text): {"id": int(number)} for text, number in read_object(folder / "added_tokens.json").items()}
    with explain_damage(folder / "tokenizer_config.json"):
        for number, one in (settings.get("added_tokens_decoder") or {}).items():
            own = {key: bool(one.get(key, False)) for key in flags if key != "normalized"}  # as SentencePiece finds its own, in the text
            stated[str(one["content"])] = {"id": int(number)} | own
    numbers = {text: number for number, text in enumerate(model.texts)}
    following = len(model.texts)
    for text, one in sorted(stated.items(), key=lambda item: int(item[1]["id"])):
        if one["id"] != numbers.get(text, following):
            raise UserError(
                f"{folder} gives the added token {text[:50]!r} the id {one['id']}, where the vocabulary has "
                f"{numbers.get(text, following)}; correct tokenizer_config.json and added_tokens.json"
            )
        following += text not in numbers
        found[text] = {"content": text} | flags | found.get(text, {}) | one
    return found


def _text_rules(model: SentencePiece, users: list[str], one_space: bool) -> dict[str, Any]:
    """What is done to a text before its pieces are found, and behind that. `one_space`: no space comes first behind a special token."""

    def change(pattern: str, text: str, kind: str = "Regex") -> dict[str, Any]:
        return {"type": "Replace", "pattern": {kind: pattern}, "content": text}

    def cut(pattern: str, behavior: str) -> dict[str, Any]:
        return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}

    charsmap = base64.b64encode(model.charsmap).decode()
    rules = [{"type": "Precompiled", "precompiled_charsmap": charsmap}] if charsmap else []
    rules += [change(r"\A +", ""), change(" {2,}", " ")] if model.fewer_spaces else []
    rules += [change(" ", _SPACE, "String"), *([change(rf"{_SPACE}+\z", "")] if model.fewer_spaces else [])]
    decoders = [change(_SPACE, " ", "String"), {"type": "ByteFallback"}, {"type": "Fuse"}]
    splits: list[dict[str, Any]] = []
    if model.space_first:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        if one_space:  # two steps, because one alone puts no mark before a text that begins with one
            mark = {"type": "Metaspace", "split": False}
            splits += [mark | {"replacement": " ", "prepend_scheme": "first"}, mark | {"replacement": _SPACE, "prepend_scheme": "never"}]
        else:
            rules.append({"type": "Prepend", "prepend": _SPACE})
    if users:  # pieces that are found first, wherever they stand in a text
        splits.append(cut("|".join(map(re.escape, sorted(users, key=len, reverse=True))), "Isolated"))
    if model.byte_fallback and (users or model.sort == _UNIGRAM):  # else "<0x41>" in a text would be the entry of a byte
        splits.append(cut("<(?=0x[0-9A-F]{2}>)", "MergedWithPrevious"))
    return {
        "normalizer": {"type": "Sequence", "normalizers": rules}, "decoder": {"type": "Sequence", "decoders": decoders},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if splits else None,
    }  # fmt: skip


def _edges(model: SentencePiece, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The post-processor: BOS before and EOS behind every text."""
    name = settings.get("tokenizer_class")
    usual = _EDGES.get(str(name).removesuffix("Fast") if name is not None else None)
    stated = [settings.get(f"add_{end}_token") for end in ("bos", "eos")]
    if usual is None and not isinstance(stated[0], bool):
        raise UserError(
            f"tokenizer_config.json names the class {str(name)[:60]}, of which lmworks does not know whether it puts a BOS token before a "
            "text; say it there with add_bos_token and add_eos_token: true or false, if the class takes the ids of the file as they are"
        )
    wanted = [bool(usual_one if one is None else one) for one, usual_one in zip(stated, usual or _BARE, strict=True)]
    control = {text: number for number, text in enumerate(model.texts) if model.kinds[number] == CONTROL}
    bos, eos = (model.named[f"{end}_token"] if is_so and model.named[f"{end}_token"] in control else None
                for end, is_so in zip(("bos", "eos"), wanted, strict=True))  # fmt: skip
    if bos is None and eos is None:
        return None

    def around(letter: str) -> list[Any]:
        before, behind = ([{"SpecialToken": {"id": one, "type_id": 0}}] if one is not None else [] for one in (bos, eos))
        return [*before, {"Sequence": {"id": letter, "type_id": 0}}, *behind]

    marks = {text: {"id": text, "ids": [control[text]], "tokens": [text]} for text in (bos, eos) if text is not None}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": [*around("A"), *around("B")], "special_tokens": marks}


def _model(model: SentencePiece, users: list[str]) -> dict[str, Any]:
    if model.sort == _UNIGRAM:
        return _unigram(model)
    unknown = model.texts[model.kinds.index(UNKNOWN)]
    return {
        "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": True, "byte_fallback": model.byte_fallback, "ignore_merges": bool(users),
        "vocab": {text: number for number, text in enumerate(model.texts)},
        "merges": merges_of(model.texts, model.kinds, model.scores),
    }  # fmt: skip


def _unigram(model: SentencePiece) -> dict[str, Any]:
    least = min((score for kind, score in zip(model.kinds, model.scores, strict=True) if kind == NORMAL), default=0.0)
    own = {USER: 0.0, UNUSED: _NEVER, UNKNOWN: least, CONTROL: least, BYTE: least}
    scores = [own.get(kind, score) for kind, score in zip(model.kinds, model.scores, strict=True)]
    vocabulary = [[text, score] for text, score in zip(model.texts, scores, strict=True)]
    return {"type": "Unigram", "unk_id": model.kinds.index(UNKNOWN), "vocab": vocabulary, "byte_fallback": model.byte_fallback}
