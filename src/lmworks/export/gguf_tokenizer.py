"""A tokenizer in GGUF: which of llama.cpp's rules splits text as tokenizer.json does, and the fields of the file.

llama.cpp has no general pre-tokenizer, only named rules with fixed patterns. Its converter recognizes a published tokenizer by a hash of
ids; here the rule is found in the structure of tokenizer.json, so that tokenizers with added tokens or another vocabulary are recognized
too. A tokenizer that no rule fits is refused, with what does not fit. `notes` say for which texts the rule itself gives other ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError
from lmworks.io.files import explain_damage, read_json
from lmworks.tokenizer import special, tokenizer_json
from lmworks.tokenizer.foreign import ForeignTokenizer
from lmworks.tokenizer.named import DEFAULT
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.weights.gguf import gguf_package

if TYPE_CHECKING:
    import gguf

_SPACE = "\u2581"  # what SentencePiece has in place of a space
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT, _DIGITS = r"\p{N}", r"\p{N}+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPELLED = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UTF8 = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that occur in text
_PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""


def _cased(ending: str, digits: str) -> str:
    """The pattern of tokenizers that end a word where case changes."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    )  # fmt: skip


# patterns that split, one after the other, and whether words that are entries are taken whole (`ignore_merges`; None: either) -> the rule
_RULES: tuple[tuple[tuple[str, ...], bool | None, str], ...] = (
    ((_GPT2,), False, "gpt-2"),
    ((_DIGIT, _GPT2), False, "smollm"),
    ((special.SPLIT,), True, "llama-bpe"),
    ((special.SPLIT,), False, "smaug-bpe"),
    ((special.SPLIT_DIGITS,), False, "qwen2"),
    ((_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL,), False, "qwen35"),
    ((r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL,), False, "ufakzeka"),
    ((_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _TAIL,), False, "seed-coder"),
    ((r"\p{N}{1,3}", _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL), True, "minicpm5"),
    (
        (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
         _PUNCTUATED + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL), False, "deepseek-v3",
    ),
    ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"), False, "deepseek-coder"),
    ((_cased("", r"\p{N}"),), True, "tekken"),
    ((_cased(_CONTRACTIONS + "?", r"\p{N}{1,3}"),), False, "gpt-4o"),
)  # fmt: skip
_INEXACT = {
    name: f"llama.cpp's rule {name} takes letters outside ASCII for both cases, and splits before combining marks: words with them get "
    "other ids"
    for name in ("tekken", "gpt-4o")
}


@dataclass(frozen=True)
class Rule:
    """How llama.cpp tokenizes: `model` is gpt2 (byte-pair merges) or llama (SentencePiece: pieces by score), `pre` the pre-tokenizer.

    space_prefix: whether a space is put before text. notes: for which texts ids differ.
    """

    model: str
    pre: str
    space_prefix: bool = False
    notes: tuple[str, ...] = ()


def find_rule(tokenizer: Tokenizer) -> Rule:
    """The rule for a tokenizer. Raises `UserError` that says what llama.cpp cannot express."""
    path = tokenizer.directory / "tokenizer.json"
    spec = read_json(path)
    with explain_damage(path):
        try:
            return _find(tokenizer, spec)
        except _NoRule as error:
            raise UserError(f"{path}: {error}, for which llama.cpp has no tokenizer; set export.gguf=false") from None


class _NoRule(Exception):
    pass


def _find(tokenizer: Tokenizer, spec: dict[str, Any]) -> Rule:
    model = spec.get("model") or {}
    kind = model.get("type", "BPE")
    if kind != "BPE" or "merges" not in model:
        raise _NoRule(f"its model is {kind}")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise _NoRule(f"its BPE option {option} is {model[option]!r}")
    for token in spec.get("added_tokens") or []:
        for option in ("lstrip", "rstrip", "single_word"):
            if token.get(option):
                raise _NoRule(f"its token {token['content']!r} has {option}")
    if not isinstance(tokenizer, ForeignTokenizer):
        if _splits(spec) == (special.SPLIT,) and not spec.get("normalizer"):
            return Rule("gpt2", "glm4")
        raise _NoRule("it splits text by another rule than the tokenizers of lmworks")
    notes = [*_notes(tokenizer), *_normalized_tokens(spec)]
    if model.get("byte_fallback"):
        return _sentence_piece(tokenizer, spec, notes)
    normalizer = spec.get("normalizer")
    if normalizer == {"type": "NFC"}:
        notes.append("llama.cpp composes no characters (NFC), so that decomposed accents get other ids")
    elif normalizer:
        raise _NoRule(f"its normalizer {_name(normalizer)} changes text before it is split")
    # without unk_token both leave unknown bytes out
    if model.get("unk_token") and (
        missing := sum(char not in model["vocab"] for char, byte in tokenizer_json.BYTE_OF.items() if byte in _UTF8)
    ):
        raise _NoRule(f"{missing} single bytes are not in its vocabulary, and text with them becomes {model['unk_token']!r}")
    splits, whole = _splits(spec), bool(model.get("ignore_merges"))
    for patterns, ignores, name in _RULES:
        if splits == patterns and ignores in (None, whole):
            return Rule("gpt2", name, notes=(*notes, *([_INEXACT[name]] if name in _INEXACT else [])))
    known = sorted({name for patterns, _, name in _RULES if patterns == splits})
    if known:
        raise _NoRule(f"its option ignore_merges is {whole}, and llama.cpp's rule {known[0]} is for the other one")
    raise _NoRule(f"it splits text by {' then '.join(splits) or 'no pattern'}")


def _notes(tokenizer: ForeignTokenizer) -> Iterator[str]:
    if len(tokenizer.prefix) > 1:
        yield f"it puts {len(tokenizer.prefix)} tokens before a text, and llama.cpp only the first of them"
    if len(tokenizer.stop_ids) > 3:
        ends = tokenizer.decode(tokenizer.stop_ids[3:])
        yield f"llama.cpp has room for three tokens that end an answer, and this model has {len(tokenizer.stop_ids)}; left out: {ends}"


def _normalized_tokens(spec: dict[str, Any]) -> Iterator[str]:
    """For which texts the added tokens differ that count in normalized text (`normalized`): llama.cpp finds all of them in text as it is.

    Raises `_NoRule` where that is not the same text. Special tokens are left out: lmworks, too, finds them in text as it is.
    """
    texts = [token["content"] for token in spec.get("added_tokens") or [] if token.get("normalized") and not token.get("special")]
    if not texts or not spec.get("normalizer"):
        return
    import tokenizers

    bare = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}, "normalizer": spec["normalizer"]}
    normalize = tokenizers.Tokenizer.from_str(json.dumps(bare)).normalizer.normalize_str
    for text in texts:
        found, spaced = normalize(text), text.replace(_SPACE, " ")
        if found not in (text, text.replace(" ", _SPACE)) or (spaced != text and normalize(spaced) == found):
            raise _NoRule(f"its token {text!r} is found in normalized text, as {found!r}")
        if found != text:
            yield f"text with {_SPACE} in place of a space of its token {text!r} gets other ids"


def _name(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "Sequence":
        return "+".join(_name(one) for one in part.get("normalizers") or part.get("pretokenizers") or [])
    return str(part.get("type")) if isinstance(part, dict) else str(part)


def _splits(spec: dict[str, Any]) -> tuple[str, ...]:
    """The patterns that isolate parts of the text, in order, of a pre-tokenizer that ends in bytes."""
    pre = spec.get("pre_tokenizer") or {}
    parts = list(pre.get("pretokenizers") or []) if pre.get("type") == "Sequence" else [pre]
    found = []
    for number, part in enumerate(parts):
        match part:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                found.append(_spelling(pattern))
            case {"type": "Digits", "individual_digits": bool(each)}:
                found.append(_DIGIT if each else _DIGITS)
            case {"type": "ByteLevel", "add_prefix_space": False} if number == len(parts) - 1:
                found += [_GPT2] if part.get("use_regex", True) else []
            case _:
                raise _NoRule(f"its pre-tokenizer has {_name(part)} with {({key: value for key, value in part.items() if key != 'type'})}")
    if not parts or parts[-1].get("type") != "ByteLevel":
        raise _NoRule(f"its pre-tokenizer is {_name(pre)} without bytes (ByteLevel)")
    return tuple(found)


def _spelling(pattern: str) -> str:
    """One spelling for patterns that mean the same."""
    return pattern.replace("\r", r"\r").replace("\n", r"\n").replace(_SPELLED, _CONTRACTIONS)


def _sentence_piece(tokenizer: ForeignTokenizer, spec: dict[str, Any], notes: list[str]) -> Rule:
    """Characters, single bytes for characters without an entry, and a mark in place of spaces."""
    if spec["model"].get("ignore_merges"):
        raise _NoRule("its options byte_fallback and ignore_merges are both set")
    prefix, splits_words = _spaces(spec)
    pieces = _pieces(spec)
    if splits_words and (piece := next((one for one in pieces if _SPACE in one[1:]), None)) is not None:
        raise _NoRule(f"it splits text at spaces, and its piece {piece!r} would be made across them")
    if prefix == "first":
        # behind a special token, llama.cpp puts a space before text too: right for text alone, or for conversations, but not both
        prefix = "never" if tokenizer.has_chat_template else "always"
        notes.append(
            "the space before the first word of a text that is no conversation is left out" if prefix == "never"
            else "text behind a special or added token gets a space before it, and text that begins with a space a second one"
        )  # fmt: skip
    elif prefix == "always" and not spec.get("normalizer"):
        notes.append("text that begins with a space, also behind a special or added token, gets a second one")
    if _any_pair_may_merge(spec, pieces):
        return Rule("llama", "default", prefix == "always", tuple(notes))
    if any("\n" in piece for piece in pieces):
        raise _NoRule("its merges depend on their list, and some of its pieces hold line ends")
    if prefix == "always":
        raise _NoRule("its merges depend on their list, and it puts a space before text")
    return Rule("gpt2", "sarvam-moe", notes=tuple(notes))


def _spaces(spec: dict[str, Any]) -> tuple[str, bool]:
    """When a space is put before text (always, first, never), and whether words are split."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizer, pre = spec.get("normalizer"), spec.get("pre_tokenizer")
    parts: list[Any] = [] if normalizer is None else normalizer.get("normalizers") or [normalizer]
    match pre:
        case {"type": "Metaspace", "replacement": "\u2581", **options} if not parts:
            return str(options.get("prepend_scheme", "always")), bool(options.get("split", True))
        case None | {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}:  # without effect: no space is left
            if parts == [replace]:
                return "never", False
            if parts == [{"type": "Prepend", "prepend": _SPACE}, replace]:
                return "always", False
    raise _NoRule(f"it is of SentencePiece's kind with the normalizer {_name(normalizer)} and the pre-tokenizer {_name(pre)}")


def _pieces(spec: dict[str, Any]) -> dict[str, int]:
    """Pieces of text with their ids, without added tokens and single bytes."""
    added = {token["content"] for token in spec.get("added_tokens") or []}
    return {
        text: number
        for text, number in spec["model"]["vocab"].items()
        if text not in added and not tokenizer_json.BYTE_PIECE.fullmatch(text)
    }


def _pairs(spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for merge in spec["model"]["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _any_pair_may_merge(spec: dict[str, Any], pieces: Mapping[str, int]) -> bool:
    """Whether merging any two neighbors whose text together is a piece, the lowest id first, gives the ids of the merge list.

    llama.cpp does so for SentencePiece, with scores that fall with the id. The proof is that of `bpe.check_same_ids`, over characters.
    """
    last, listed = -1, set()
    for left, right in _pairs(spec):
        rank = pieces.get(left + right)
        if rank is None or rank < last:
            return False
        last = rank
        listed.add((left, right))
    return all(len(text) == 1 or _state_below(text, pieces, rank) in listed for text, rank in pieces.items())


def _state_below(text: str, pieces: Mapping[str, int], below: int) -> tuple[str, ...]:
    parts = list(text)
    while len(parts) > 1:
        rank, at = min((pieces.get(parts[i] + parts[i + 1], below), i) for i in range(len(parts) - 1))
        if rank >= below:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return tuple(parts)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, rows: int) -> None:
    """Write the tokenizer for `rows` rows of the embedding; rows that the tokenizer does not use become unused tokens."""
    kinds = gguf_package().TokenType
    rule = find_rule(tokenizer)
    spec = read_json(tokenizer.directory / "tokenizer.json")
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [int(kinds.UNUSED)] * rows
    for text, number in spec["model"]["vocab"].items():
        byte = spec["model"].get("byte_fallback") and tokenizer_json.BYTE_PIECE.fullmatch(text)
        tokens[number], types[number] = text, int(kinds.BYTE if byte and rule.model == "llama" else kinds.NORMAL)
    for added in spec["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], int(kinds.CONTROL if added["special"] else kinds.USER_DEFINED)
    writer.add_tokenizer_model(rule.model)
    writer.add_tokenizer_pre(rule.pre)
    writer.add_token_list(tokens)
    if rule.model == "llama":
        writer.add_token_scores([-float(number) for number in range(rows)])
    else:
        writer.add_token_merges([" ".join(pair) for pair in _pairs(spec)])
    writer.add_token_types(types)
    if spec["model"].get("byte_fallback"):
        writer.add_add_space_prefix(rule.space_prefix)
    _add_control_tokens(writer, tokenizer)
    writer.add_pad_token_id(tokenizer.pad_id if tokenizer.pad_id < rows else tokenizer.eos_id)  # a config may name an id beyond them
    writer.add_add_eos_token(False)
    if tokenizer.has_chat_template:
        writer.add_chat_template(tokenizer.chat_template)
        others = {"".join(char if char.isascii() and char.isalnum() else "_" for char in name): source
                  for name, source in tokenizer.named_templates.items() if name not in ("", DEFAULT)}  # fmt: skip
        for name, source in sorted(others.items()):
            writer.add_string(f"tokenizer.chat_template.{name}", source)
        if others:
            writer.add_array("tokenizer.chat_templates", sorted(others))


def _add_control_tokens(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """The tokens before a text, and those that end an answer: llama.cpp stops at eos, eot and eom."""
    if isinstance(tokenizer, ForeignTokenizer):
        ends = [one for one in tokenizer.stop_ids if one != tokenizer.eos_id]
        writer.add_eos_token_id(tokenizer.eos_id)
        for add, end in zip((writer.add_eot_token_id, writer.add_eom_token_id), ends, strict=False):
            add(end)
        if tokenizer.prefix:
            writer.add_bos_token_id(tokenizer.prefix[0])
        writer.add_add_bos_token(bool(tokenizer.prefix))
        writer.add_unk_token_id(tokenizer.special.get(tokenizer.tokens.get("unk_token", ""), tokenizer.eos_id))
        return
    ids = tokenizer.special
    writer.add_bos_token_id(ids["[gMASK]"])
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_eot_token_id(ids[special.USER])
    writer.add_eom_token_id(ids[special.OBSERVATION])
    writer.add_add_bos_token(False)
    writer.add_unk_token_id(tokenizer.eos_id)
