"""tokenizer.json of Mistral's `tekken.json`: byte-level BPE with a regex, ranked tokens, and special tokens before them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.io.files import explain_damage, read_json
from lmworks.recipe.scored_pieces import NORMAL, merges_of
from lmworks.tokenizer.tokenizer_json import BYTE_OF

_EARLY = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""The special tokens of files that name none."""
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def spec_of(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of tokenizer.json, and the texts of the special tokens by their names in tokenizer_config.json. Raises `UserError`."""
    given = read_json(path)
    with explain_damage(path):
        config, named = given["config"], given.get("special_tokens")
        count = int(config["default_num_special_tokens"])
        special = {one["rank"]: one["token_str"] for one in named} if named else dict(enumerate(_EARLY))
        specials = [str(special.get(number, f"<SPECIAL_{number}>")) for number in range(count)]
        char_of = {byte: char for char, byte in BYTE_OF.items()}
        ranked = [base64.b64decode(one["token_bytes"]) for one in given["vocab"][: int(config["default_vocab_size"]) - count]]
        texts = ["".join(char_of[byte] for byte in token) for token in ranked]
        vocabulary = {text: number for number, text in enumerate([*specials, *texts])}
        if len(vocabulary) != count + len(texts) or "<s>" not in specials:
            raise UserError(f"{path} has a token twice, or no token <s>; get the file again from its origin")
        pattern = str(config["pattern"])
    ranks = range(len(texts))
    merges = merges_of(texts, [NORMAL] * len(texts), [-float(rank) for rank in ranks])  # the lowest rank is merged first
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    single, other = ({"Sequence": {"id": letter, "type_id": 0}} for letter in "AB")
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": number, "content": text} | flags for number, text in enumerate(specials)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]}, "decoder": bytes_,
        "post_processor": {"type": "TemplateProcessing", "single": [start, single], "pair": [start, single, start, other],
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [specials.index("<s>")], "tokens": ["<s>"]}}},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": True, "vocab": vocabulary, "merges": merges,
        },
    }  # fmt: skip
    return spec, {name: text for name, text in _NAMED.items() if text in specials}
