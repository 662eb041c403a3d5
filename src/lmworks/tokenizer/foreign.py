"""Tokenizers of models that lmworks has not trained: the ids of their tokenizer.json, their own begin and end tokens and chat template.

A model that is trained or tuned further needs a tokenizer of ours (`tokenizer.path` adopts one); to be measured it needs this.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.files import explain_damage, read_json
from lmworks.tokenizer import special as special_
from lmworks.tokenizer.chat import Template, encode
from lmworks.tokenizer.tokenizer import Tokenizer

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def open_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in `directory`: one of lmworks if it has our special tokens, else a `ForeignTokenizer`."""
    directory = Path(directory)
    spec = read_json(directory / "tokenizer.json")
    with explain_damage(directory / "tokenizer.json"):
        added = {token["content"] for token in spec.get("added_tokens") or []}
    return Tokenizer(directory) if added.issuperset(special_.REQUIRED) else ForeignTokenizer(directory)


class ForeignTokenizer(Tokenizer):
    """Encodes with `tokenizers` what `transformers` would encode, except that text never becomes a special token.

    `prefix` are the ids that the tokenizer puts before every text (a BOS token, or nothing); `encode` puts them there, too.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        spec = read_json(path)
        with explain_damage(path):
            import tokenizers

            try:
                whole = tokenizers.Tokenizer.from_str(json.dumps(spec))
            except Exception as error:  # its Rust code raises the bare class
                raise UserError(f"{path} is not a tokenizer that the package tokenizers reads ({error})") from None
            added = {token["content"]: int(token["id"]) for token in spec.get("added_tokens") or [] if token.get("special")}
            self.special = dict(sorted(added.items(), key=lambda item: item[1]))
            self.vocab_size = whole.get_vocab_size(with_added_tokens=True)
            # user-defined tokens such as runs of spaces are text; control tokens are not
            ordinary = [token for token in spec.get("added_tokens") or [] if not token.get("special")]
            self._text = tokenizers.Tokenizer.from_str(json.dumps(spec | {"added_tokens": ordinary, "post_processor": None,
                                                                          "truncation": None, "padding": None}))
            self._whole = whole
        self._hidden = frozenset(self.special.values())
        self._index_special()
        self._config = self._optional("tokenizer_config.json")
        self.tokens = {name: text for name in _TOKENS if (text := _text_of(self._config.get(name))) is not None}
        self.prefix = self._find_prefix()
        self.stop_ids = self._find_stops()
        if not self.stop_ids:
            raise UserError(f"{self.directory} names no end-of-text token; add eos_token_id to its generation_config.json")
        eos = self.special.get(self.tokens.get("eos_token", ""))
        self.eos_id = self.stop_ids[0] if eos is None else eos
        self.pad_id = self.eos_id

    def _optional(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        found = read_json(path) if path.is_file() else {}
        return found if isinstance(found, dict) else {}

    def _find_prefix(self) -> tuple[int, ...]:
        bare, full = (self._whole.encode("a", add_special_tokens=special).ids for special in (False, True))
        size = next((at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare), 0)
        bos = self.special.get(self.tokens.get("bos_token", ""))
        if not size and self._config.get("add_bos_token") is True and bos is not None:
            return (bos,)
        return tuple(full[:size])

    def _find_stops(self) -> tuple[int, ...]:
        found: list[int] = []
        for given in (self._optional("generation_config.json").get("eos_token_id"), self._optional("config.json").get("eos_token_id")):
            found += [int(one) for one in (given if isinstance(given, list) else [given]) if isinstance(one, int)]
        eos = self.special.get(self.tokens.get("eos_token", ""))
        return tuple(dict.fromkeys([*found, *([] if eos is None else [eos])]))

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """The ids of `text` behind `prefix`; special tokens in it stay ordinary text unless `allow_special`."""
        ids = self.encode_parts(self.split_special(text)) if allow_special else self._ordinary(text)
        return ids if tuple(ids[: len(self.prefix)]) == self.prefix and self.prefix else [*self.prefix, *ids]

    def encode_parts(self, parts: Sequence[str], transform: Any = lambda text: text) -> list[int]:
        """Encode alternating text and special tokens, beginning with text, without `prefix`."""
        ids: list[int] = []
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self.special[part])
            elif part:
                ids.extend(self._ordinary(transform(part)))
        return ids

    def encode_batch(self, texts: Sequence[str], threads: int | None = None) -> list[np.ndarray]:
        """The ids of each text as uint32, without special tokens."""
        return [np.array(self._ordinary(text), dtype=np.uint32) for text in texts]

    def _ordinary(self, text: str) -> list[int]:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return list(self._text.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of `ids`; `skip_special` leaves out control tokens."""
        return str(self._whole.decode([int(one) for one in ids], skip_special_tokens=skip_special))

    @property
    def has_chat_template(self) -> bool:
        """Whether the directory has a chat template, in a file of its own or in tokenizer_config.json."""
        return (self.directory / "chat_template.jinja").is_file() or self._chat_template_in_config() is not None

    def _chat_template_in_config(self) -> str | None:
        given = self._config.get("chat_template")
        if isinstance(given, list):  # several, by name
            given = next((one.get("template") for one in given if isinstance(one, dict) and one.get("name") == "default"), None)
        return given if isinstance(given, str) else None

    @cached_property
    def _template(self) -> Template:
        path = self.directory / "chat_template.jinja"
        if path.is_file():
            return Template(path.read_text(encoding="utf-8"), str(path), self.tokens)
        path, given = self.directory / "tokenizer_config.json", self._chat_template_in_config()
        if given is None:
            raise UserError(f"{path} has no chat_template; this model cannot be asked in a chat")
        return Template(given, str(path), self.tokens)

    def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
                    add_generation_prompt: bool = False, thinking: bool | None = None) -> tuple[list[int], list[bool]]:
        """The ids of the conversation. The mask is empty of True: which tokens the assistant wrote is known for our templates only."""
        ids = encode(self, self._template, messages, tools, add_generation_prompt, thinking)
        return ids, [False] * len(ids)


def _text_of(token: Any) -> str | None:
    """The text of a special token in tokenizer_config.json, which is a string or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None
