"""The tokenizer of a GGUF file as the files of a Hugging Face folder, for `tokenizers` and `transformers` to read.

A file has the entries, their kinds, merges or scores, and the name of the rule by which text is split. Nothing of it says how text is
normalized: llama.cpp normalizes none, and so does what is made here.

The rule is a name in `tokenizer.ggml.pre`, which stands for the regexes of a published tokenizer (llama.cpp's src/llama-vocab.cpp): a text
is split by the first, the pieces by the second, and so on; what lies between two matches is a piece too. `SPLITS` has them as
pre-tokenizers of `tokenizers`. The regexes of `tekken` and `gpt-4o` here are those that llama.cpp runs, which are simpler than the
published ones. `tests/export/test_gguf_tokenizers.py` compares ids with llama.cpp for every name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.scored_pieces import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, merges_of

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_MARKED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_UPPER, _LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"

_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-"
    "\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-"
    "\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-"
    "\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2"
    "\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)  # with case, of DeepSeek LLM


def _cased(ending: str) -> str:
    words = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{ending}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{ending}"
    return words + r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+" % ("" if not ending else "{1,3}")


@dataclass(frozen=True)
class Split:
    """The regexes, and what llama.cpp assumes beside them: that a piece which is an entry is not merged, and a BOS token before a text."""

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2_ALONE, _DIGITS = Split((_GPT2,)), Split((r"\p{N}", _GPT2))
_LLAMA3_BOS = Split((_LLAMA3,), ignore_merges=True, add_bos=True)
_DEEPSEEK3 = Split((r"\p{N}{1,3}", _CJK, _MARKED))

SPLITS: dict[str, Split] = {
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais", "exaone4", "trillion",
                     "granite-docling"), _GPT2_ALONE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3_BOS),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Split((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), Split((_LLAMA3,), ignore_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "hunyuan", "solar-open", "megrez", "grok-2"),
                    Split((_QWEN2,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "qwen35": Split((rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
                     r"\s+(?!\S)|\s+",)),
    "deepseek-llm": Split((r"[\r\n]", rf"\s?[{_LETTERS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
                           "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}+")),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), Split((_BLOOM,))),
    "viking": Split((_BLOOM, r"\p{N}")),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "tekken": Split((_cased(""),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), Split((_cased(f"{_CONTRACTIONS}?"),))),
    "minicpm5": Split((r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_REST}"), ignore_merges=True),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"),
                    Split((rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|"
                           r"\s+(?!\S)|\s+",))),
    "seed-coder": Split((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
}  # fmt: skip


def pre_tokenizer(split: Split) -> dict[str, Any]:
    """The pre-tokenizer of tokenizer.json. Published ones have GPT-2's rule as an option of ByteLevel, and single digits as Digits."""
    *others, last = split.regexes
    published = last == _GPT2
    steps = [_step(regex) for regex in (others if published else split.regexes)]
    whole = [*steps, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": published}]
    return whole[0] if len(whole) == 1 else {"type": "Sequence", "pretokenizers": whole}


def _step(regex: str) -> dict[str, Any]:
    if regex == r"\p{N}":
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


_PREFIX = "tokenizer.ggml."
_MOST_ENTRIES = 1 << 20
_MOST_CHARACTERS = 1 << 24  # of all entries; 262,144 entries have 1.8 million
_SPACE = "\u2581"
_NAMED = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id", "unk_token": "unknown_token_id"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
"""Texts of control tokens that end an answer, by which llama.cpp finds them where the metadata does not name them."""


def files_of_tokenizer(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The content of tokenizer.json, tokenizer_config.json, generation_config.json and, if there is one, chat_template.jinja; several
    templates are in tokenizer_config.json.

    Raises `UserError` for a tokenizer that cannot be expressed exactly, with the reason.
    """
    given = _Given(metadata)
    kind = given.metadata.get(f"{_PREFIX}model")
    if kind == "gpt2":
        spec = _byte_level(given)
    elif kind == "llama":
        spec = _sentencepiece(given)
    else:
        raise UserError(f"its tokenizer is of kind {str(kind)[:50]!r} (tokenizer.ggml.model); lmworks reads gpt2 and llama")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: given.texts[number] for name, key in _NAMED.items() if (number := given.token(key)) is not None}
    ends = given.ends()
    if not ends:
        raise UserError("its tokenizer names no end-of-text token (tokenizer.ggml.eos_token_id)")
    generation: dict[str, Any] = {"eos_token_id": ends} | {
        key: number for key, name in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id"))
        if (number := given.token(name)) is not None
    }  # fmt: skip
    templates = _templates(metadata)
    if len(templates) > 1:
        config["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    files = {"tokenizer.json": spec, "tokenizer_config.json": config, "generation_config.json": generation}
    found = {name: json.dumps(content, ensure_ascii=False, indent=1) + "\n" for name, content in files.items()}
    return found | ({"chat_template.jinja": templates["default"]} if [*templates] == ["default"] else {})


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name, the default one first."""
    named = metadata.get("tokenizer.chat_templates")
    keys = {"default": "tokenizer.chat_template"}
    keys |= {str(name): f"tokenizer.chat_template.{name}" for name in (named if isinstance(named, list | tuple) else ())}
    found = {name: metadata.get(key) for name, key in keys.items()}
    return {name: source for name, source in found.items() if isinstance(source, str) and source.strip()}


class _Given:
    """Entries and settings of the tokenizer in a GGUF file, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.texts: list[str] = [text or f"[EMPTY_{number}]" for number, text in enumerate(self._list("tokens", str))]
        if not self.texts or len(self.texts) > _MOST_ENTRIES or sum(map(len, self.texts)) > _MOST_CHARACTERS:
            raise UserError(f"its vocabulary has {len(self.texts):,} entries of {sum(map(len, self.texts)):,} characters")
        if len(set(self.texts)) != len(self.texts):
            twice = Counter(self.texts).most_common(1)[0][0]
            raise UserError(f"its vocabulary has the entry {twice[:50]!r} twice")
        self.kinds: list[int] = self._list("token_type", int) if f"{_PREFIX}token_type" in metadata else [NORMAL] * len(self.texts)
        if len(self.kinds) != len(self.texts):
            raise UserError(f"its vocabulary has {len(self.texts):,} entries and {len(self.kinds):,} kinds (tokenizer.ggml.token_type)")
        for key in (*_ENDS, "bos_token_id"):  # whatever their kind, they are never text
            if (number := self.token(key)) is not None:
                self.kinds[number] = CONTROL

    def _list(self, key: str, kind: type) -> list[Any]:
        found = self.metadata.get(f"{_PREFIX}{key}")
        if not isinstance(found, list) or (found and type(found[0]) is not kind):
            raise UserError(f"it has no {_PREFIX}{key} that lmworks can read")
        return list(found)

    def token(self, key: str) -> int | None:
        """The id that a key names; None if it names none."""
        number = self.metadata.get(f"{_PREFIX}{key}")
        return number if type(number) is int and 0 <= number < len(self.texts) else None

    def flag(self, key: str, default: bool) -> bool:
        found = self.metadata.get(f"{_PREFIX}{key}", default)
        if not isinstance(found, bool):
            raise UserError(f"its {_PREFIX}{key} is not true or false")
        return found

    def ends(self) -> list[int]:
        """The ids that end an answer."""
        named = [number for key in _ENDS if (number := self.token(key)) is not None]
        control = {self.texts[number]: number for number, kind in enumerate(self.kinds) if kind == CONTROL}
        return list(dict.fromkeys([*named, *(control[text] for text in _END_TEXTS if text in control)]))

    def merges(self) -> list[list[str]]:
        found: list[list[str]] = []
        for merge in self._list("merges", str):
            at = merge.find(" ", 1)
            if at < 0:
                raise UserError(f"it has a merge that is no pair: {merge[:50]!r}")
            found.append([merge[:at], merge[at + 1 :]])
        return found

    def vocabulary(self) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """The ordinary entries, and the added ones. Unused entries behind the last other one are rows of the embedding only."""
        used = max((number for number, kind in enumerate(self.kinds) if kind != UNUSED), default=-1) + 1
        special = {number for number in range(used) if self.kinds[number] in (CONTROL, UNKNOWN)}
        added = special | {number for number in range(used) if self.kinds[number] == USER}
        ordinary = max((number for number in range(used) if number not in added), default=-1) + 1
        # added entries behind the last ordinary one are numbered on by the library; any others must be entries to have their ids
        vocabulary = {self.texts[number]: number for number in range(ordinary)}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return vocabulary, [{"id": one, "content": self.texts[one]} | flags | {"special": one in special} for one in sorted(added)]

    def edges(self, add_bos: bool) -> dict[str, Any] | None:
        """The post-processor: the tokens before and behind every text."""
        bos = self.token("bos_token_id") if self.flag("add_bos_token", add_bos) else None
        eos = self.token("eos_token_id") if self.flag("add_eos_token", False) else None
        if bos is None and eos is None:
            return None
        named = {self.texts[one]: one for one in (bos, eos) if one is not None}
        marks = {text: {"id": text, "ids": [one], "tokens": [text]} for text, one in named.items()}

        def template(letter: str) -> list[Any]:
            mark = lambda one: [{"SpecialToken": {"id": self.texts[one], "type_id": 0}}] if one is not None else []  # noqa: E731
            return [*mark(bos), {"Sequence": {"id": letter, "type_id": 0}}, *mark(eos)]

        pair = [*template("A"), *template("B")]
        return {"type": "TemplateProcessing", "single": template("A"), "pair": pair, "special_tokens": marks}


def _spec(given: _Given, add_bos: bool, **parts: Any) -> dict[str, Any]:
    vocabulary, added = given.vocabulary()
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    } | parts.pop("model") | {"vocab": vocabulary}  # fmt: skip
    model["merges"] = model.pop("merges")(vocabulary)
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": None,
        "post_processor": given.edges(add_bos), "decoder": None,
    } | parts | {"model": model}  # fmt: skip


def _byte_level(given: _Given) -> dict[str, Any]:
    name = given.metadata.get(f"{_PREFIX}pre")
    split = SPLITS.get(str(name))
    if split is None:
        raise UserError(
            f"its tokenizer splits text by the rule {str(name)[:50]!r} (tokenizer.ggml.pre), which lmworks does not know; take the model "
            f"in Hugging Face's format. Known are {', '.join(sorted(SPLITS))}"
        )
    if given.flag("add_space_prefix", False):
        raise UserError("its tokenizer puts a space before a text (tokenizer.ggml.add_space_prefix), which a byte-level one does not")
    merges = given.merges()
    return _spec(
        given, split.add_bos, pre_tokenizer=pre_tokenizer(split), model={"ignore_merges": split.ignore_merges, "merges": lambda _: merges},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )  # fmt: skip


def _sentencepiece(given: _Given) -> dict[str, Any]:
    """Entries with scores: of neighbors that make an entry, those with the highest score are merged first."""
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if given.metadata.get(f"{_PREFIX}{key}"):
            raise UserError(f"its tokenizer normalizes text ({_PREFIX}{key}), which lmworks does not")
    scores: list[float] = given._list("scores", float)
    if len(scores) != len(given.texts):
        raise UserError(f"its vocabulary has {len(given.texts):,} entries and {len(scores):,} scores (tokenizer.ggml.scores)")
    bytes_ = {text for text, kind in zip(given.texts, given.kinds, strict=True) if kind == BYTE}
    missing = {f"<0x{byte:02X}>" for byte in range(256)} - bytes_
    if missing:
        raise UserError(f"its tokenizer has no entry for the byte {min(missing)}, which text without other entries needs")
    normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}]
    decoders.append({"type": "Fuse"})
    if given.flag("add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = given.token("unknown_token_id")
    model = {
        "unk_token": None if unknown is None else given.texts[unknown], "fuse_unk": True, "byte_fallback": True,
        "merges": lambda vocabulary: merges_of([*vocabulary], given.kinds, scores),
    }  # fmt: skip
    return _spec(
        given, True, model=model, normalizer={"type": "Sequence", "normalizers": normalizers},
        decoder={"type": "Sequence", "decoders": decoders},
    )  # fmt: skip
