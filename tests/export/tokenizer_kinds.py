"""Tokenizers of the kinds that published models have, small: trained here with the pre-tokenizers of their tokenizer.json; and texts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.tokenizer.tokenizer import Tokenizer

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPACE = "\u2581"


@dataclass(frozen=True)
class Published:
    """What differs between the tokenizer.json of published models: the patterns that split, and the rule of llama.cpp for them.

    byte_level: GPT-2's own pattern is part of ByteLevel. digits: `individual_digits` of a part before it. whole: `ignore_merges`.
    spaces: for SentencePiece's kind, (normalizer, pre_tokenizer).
    """

    rule: str
    splits: tuple[str, ...] = ()
    byte_level: bool = False
    digits: bool = False
    whole: bool = False
    normalizer: Any = None
    spaces: tuple[Any, Any] | None = None
    listed_only: bool = False
    exact: bool = True


_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, _REPLACE]}
_MERGED = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def _metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}


KINDS = {
    "gpt2": Published("gpt-2", byte_level=True),
    "smollm": Published("smollm", byte_level=True, digits=True),
    "llama3": Published("llama-bpe", (CL100K,), whole=True),
    "smaug": Published("smaug-bpe", (CL100K,)),
    "qwen2": Published("qwen2", (CL100K.replace("{1,3}", ""),), normalizer={"type": "NFC"}),
    "qwen35": Published(
        "qwen35", (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + TAIL,),
        normalizer={"type": "NFC"},
    ),
    "deepseek3": Published(
        "deepseek-v3",
        (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
         + "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"),
    ),
    "tekken": Published(
        "tekken",
        (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|" + TAIL,),
        whole=True, exact=False,
    ),
    "gpt4o": Published(
        "gpt-4o",
        (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + TAIL,), exact=False,
    ),
    "llama2": Published("default", spaces=(_PREPEND, None)),
    "mistral": Published("default", spaces=(None, _metaspace("always")), exact=False),
    "mistral-first": Published("default", spaces=(None, _metaspace("first")), exact=False),
    "gemma": Published("default", spaces=(_REPLACE, _MERGED)),
    "gemma-listed": Published("sarvam-moe", spaces=(_REPLACE, _MERGED), listed_only=True),
}  # fmt: skip

_TRAINED_ON = (
    "The user asks, and the assistant answers: what is 1 + 2? It's 3, isn't it? They're 12 or 123 or 1234 years; I'll see, we've SEEN.\n"
    "def add(a, b):\n    return a + b\n\n\n  HTTPServer isNotA naïve café, Straße, 東京都 今天天气很好 привет мир مرحبا नमस्ते\t\tx\r\n"
    " e\u0301te\u0301 👩‍👩‍👧 ½ ² Ⅷ ٣ "
) * 4
_PARTS = (
    "Hello", " world", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "1", "12", "123", "1234567", " 42",
    "3.14", "½", "²", "Ⅷ", "٣", "It's", "IT'S", "we'LL", "don't", "'", "''", "’s", "東京", "今天天气", " こんにちは", "한국어",
    "привет", " Ёлка", "مرحبا", "नमस्ते", "ไทย", "é", "e\u0301", "ÉCOLE", "straße", "naïve", "👍🏽", "👩‍👩‍👧", "🇩🇪",
    "...", "?!", "--", "==>", "a/b", "C:\\x", "<b>", "</b>", "{\"k\": [1, 2]}", "x_y", "camelCase", "HTTPServer",
    "\u00a0", "\u200b", "\u3000", "\ufeff", "\u2028", "$5", "€", "#tag", "@me", "http://a.b/c?d=e&f=1", "\x00",
    "\x7f", "tab\tx", "`code`",
)  # fmt: skip


def texts(tokenizer: Tokenizer, count: int = 400) -> list[str]:
    """Every part alone, and random sequences of parts, with the special tokens of the tokenizer among them."""
    chance, parts = random.Random(7), [*_PARTS, *list(tokenizer.special)[:6]]
    return [*parts, *("".join(chance.choices(parts, k=chance.randint(2, 9))) for _ in range(count - len(parts)))]


def write_kind(folder: Path, name: str) -> Published:
    """Train a tokenizer of a kind on a little text, and write its files into `folder`."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    kind = KINDS[name]
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    if kind.spaces is None:
        tokenizer = Tokenizer(models.BPE(ignore_merges=kind.whole))
        split = [pre_tokenizers.Split(Regex(one), "isolated") for one in kind.splits]
        split += [pre_tokenizers.Digits(individual_digits=True)] if kind.digits else []
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.byte_level)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level]) if split else byte_level
        tokenizer.normalizer = normalizers.NFC() if kind.normalizer else None
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
        tokenizer.train_from_iterator([_TRAINED_ON], trainer)
        tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        spec = json.loads(tokenizer.to_str())
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*special, *bytes_], show_progress=False)
        tokenizer.train_from_iterator([_TRAINED_ON.replace("\n", " ").replace("\r", " ").replace("\t", " ")], trainer)
        spec = json.loads(tokenizer.to_str())
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in special]
        spec["normalizer"], spec["pre_tokenizer"] = kind.spaces
        if kind.listed_only:  # a piece that no merge makes, which pieces by score would be
            pieces = spec["model"]["vocab"]
            pieces["qz"] = len(pieces)
            pieces.setdefault("q", len(pieces))
            pieces.setdefault("z", len(pieces))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>",
              "clean_up_tokenization_spaces": False}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return kind
