"""Tokenizers of other models, taken as they are: the ids of their tokenizer.json, their own special tokens and chat template."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.io.files import explain_damage, read_json
from lmworks.tokenizer import tokenizer_json
from lmworks.tokenizer.chat import TOOLS, Template, encode
from lmworks.tokenizer.named import DEFAULT, TOOL_USE, chat_templates, read_object, special_tokens
from lmworks.tokenizer.special import MARKUP
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.tokenizer.turns import Turns


class ForeignTokenizer(Tokenizer):
    """Encodes with `tokenizers` what `transformers` would encode, except that text never becomes a special token.

    `prefix` are the ids that the tokenizer puts before every text (a BOS token, or nothing); `encode` puts them there, too. `tokens` are
    the special ones by the names that chat templates have for them. `chat_template` is the source of one that takes the place of all of the
    directory's.
    """

    lossless = False  # it may normalize text, or put a space before it

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        self.directory, self._given = Path(directory), chat_template
        path = self.directory / "tokenizer.json"
        spec = read_json(path)
        with explain_damage(path):
            import tokenizers

            try:
                whole = tokenizers.Tokenizer.from_str(json.dumps(spec))
            except Exception as error:  # its Rust code raises the bare class
                raise UserError(f"{path} is not a tokenizer that the package tokenizers reads ({error})") from None
            # where the vocabulary has a gap, the library numbers added tokens anew: ids of the file would be those of other tokens, or none
            for token in spec.get("added_tokens") or []:
                if (found := whole.token_to_id(token["content"])) != int(token["id"]):
                    raise UserError(f"{path} gives its token {token['content'][:100]!r} the id {token['id']}, but the package tokenizers "
                                    f"gives it {found}; get the file again from its origin")  # fmt: skip
            # a token that is a byte of every text, as a pad token "!" of byte-level BPE, is text whatever the file says
            control = [token for token in spec.get("added_tokens") or []
                       if token.get("special") and not tokenizer_json.is_byte(token["content"], spec)]  # fmt: skip
            tokens = {token["content"]: token for token in control}
            self.special = {name: int(token["id"]) for name, token in sorted(tokens.items(), key=lambda item: int(item[1]["id"]))}
            self._alone = frozenset(name for name, token in tokens.items() if token.get("single_word"))
            self._strips = {name: (bool(token.get("lstrip")), bool(token.get("rstrip"))) for name, token in tokens.items()}
            # user-defined tokens such as runs of spaces are text; control tokens are not
            ordinary = [token for token in spec.get("added_tokens") or [] if token["content"] not in tokens]
            self.markup = {token["content"]: int(token["id"]) for token in ordinary if token["content"] in MARKUP}
            model = tokenizer_json.without_pieces(spec["model"], tokens)
            plain = spec | {"added_tokens": ordinary, "model": model, "post_processor": None, "truncation": None, "padding": None}
            self._text = tokenizers.Tokenizer.from_str(json.dumps(plain))
            later = _without_first_space(spec.get("pre_tokenizer"))
            self._later = self._text if later is None else tokenizers.Tokenizer.from_str(json.dumps(plain | {"pre_tokenizer": later}))
            self._whole, self._spec = whole, spec
            # without the others, the library numbers them anew
            numbered = {self._text.token_to_id(token["content"]): int(token["id"]) for token in ordinary}
            self._renumbered = {wrong: right for wrong, right in numbered.items() if wrong != right}
            self.vocab_size = max(whole.get_vocab(with_added_tokens=True).values()) + 1
        self._hidden = frozenset(self.special.values())
        self._index_special()
        self.tokens = special_tokens(self.directory)
        self.prefix = self._find_prefix()
        self.eos_ids = self._find_eos()
        if not self.eos_ids:
            raise UserError(f"{self.directory} names no end-of-text token; add eos_token_id to its generation_config.json")
        eos = self.special.get(self.tokens.get("eos_token", ""))
        self.eos_id = self.eos_ids[0] if eos is None else eos
        self.stated_pad = self._find_pad()
        self.pad_id = self.special.get(self.tokens.get("pad_token", ""), self.eos_id) if self.stated_pad is None else self.stated_pad

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """The ids at which an answer stops: those of generation_config.json and of the end-of-text token, and the tokens with which a
        chat template ends an answer."""
        ends: set[int] = set()
        for tools in [one for name, one in ((DEFAULT, None), (TOOL_USE, TOOLS)) if name in self.named_templates]:
            with suppress(UserError):  # it is refused where a mask is needed
                ends |= self._turns_for(tools).stops
        return tuple(dict.fromkeys([*self.eos_ids, *sorted(ends)]))

    @property
    def start(self) -> tuple[int, ...]:
        """`prefix`, else the BOS token, else the end of text, as in lm-evaluation-harness."""
        return self.prefix or (self.special.get(self.tokens.get("bos_token", ""), self.eos_id),)

    def _find_prefix(self) -> tuple[int, ...]:
        bare, full = (self._whole.encode("a", add_special_tokens=special).ids for special in (False, True))
        size = next((at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare), 0)
        return tuple(full[:size])  # beside a tokenizer.json, `transformers` ignores add_bos_token

    def _find_eos(self) -> tuple[int, ...]:
        found: list[int] = []
        for given in self._stated("eos_token_id"):
            found = found or [int(one) for one in (given if isinstance(given, list) else [given]) if isinstance(one, int)]
        eos = self.special.get(self.tokens.get("eos_token", ""))
        return tuple(dict.fromkeys([*found, *([] if eos is None else [eos])]))

    def _find_pad(self) -> int | None:
        """The id for padding that the files beside the tokenizer state; some of old models state -1, for none."""
        return next((one for one in self._stated("pad_token_id") if type(one) is int and one >= 0), None)

    def _stated(self, key: str) -> list[Any]:
        """What generation_config.json and config.json say; the second counts where the first says nothing, as in `transformers`."""
        return [read_object(self.directory / name).get(key) for name in ("generation_config.json", "config.json")]

    def split_special(self, text: str, anywhere: bool = False) -> list[str]:
        """As in `TextTokenizer`; a special token that counts as a single word only is text inside of one, unless `anywhere`."""
        parts = super().split_special(text)
        if anywhere or not self._alone:
            return parts
        found, at = parts[:1], len(parts[0])
        for name, after in zip(parts[1::2], parts[2::2], strict=True):
            end = at + len(name)
            if name in self._alone and (_in_word(text[at - 1 : at]) or _in_word(text[end : end + 1])):
                found[-1] += name + after
            else:
                found += [name, after]
            at = end + len(after)
        return found

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """The ids of `text` behind `prefix`; special tokens in it stay ordinary text unless `allow_special`."""
        ids = self.encode_parts(self.split_special(text)) if allow_special else self._ordinary(text)
        return ids if tuple(ids[: len(self.prefix)]) == self.prefix and self.prefix else [*self.prefix, *ids]

    def encode_parts(self, parts: Sequence[str], transform: Any = lambda text: text) -> list[int]:
        """Encode alternating text and special tokens, beginning with text, without `prefix`."""
        return self._encode_parts([transform(part) if number % 2 == 0 else part for number, part in enumerate(parts)])[0]

    def encode_marked(self, text: str, markers: str) -> tuple[list[int], list[int]]:
        """Ids of text in which the special tokens are special, without the `markers`, and where each id begins in it, in characters."""
        removed = str.maketrans("", "", markers)
        return self._encode_parts([part.translate(removed) for part in self.split_special(text)])

    def _encode_parts(self, parts: Sequence[str]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        starts: list[int] = []
        offset = 0
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self.special[part])
                starts.append(offset)
            else:
                kept, skipped = self._stripped(parts, number)
                encoded = (self._text if number == 0 else self._later).encode(kept, add_special_tokens=False) if kept else None
                ids += self._ids(encoded) if encoded else []
                starts += [offset + skipped + start for start, _ in encoded.offsets] if encoded else []
            offset += len(part)
        return ids, starts

    def _stripped(self, parts: Sequence[str], number: int) -> tuple[str, int]:
        """A text without the spaces that the special tokens beside it swallow, and how many it has lost at its beginning."""
        kept = _well_formed(parts[number])
        if number + 1 < len(parts) and self._strips[parts[number + 1]][0]:
            kept = kept.rstrip()
        size = len(kept)
        if number and self._strips[parts[number - 1]][1]:
            kept = kept.lstrip()
        return kept, size - len(kept)

    def encode_batch(self, texts: Sequence[str], threads: int | None = None) -> list[np.ndarray]:
        """The ids of each text as uint32, without special tokens."""
        found = self._text.encode_batch([_well_formed(text) for text in texts], add_special_tokens=False)
        return [np.array(self._ids(one), dtype=np.uint32) for one in found]

    def _ordinary(self, text: str) -> list[int]:
        return self._ids(self._text.encode(_well_formed(text), add_special_tokens=False))

    def _ids(self, encoded: Any) -> list[int]:
        return [self._renumbered.get(one, one) for one in encoded.ids] if self._renumbered else list(encoded.ids)

    def decode(self, ids: Iterable[int], skip_special: bool = False, keep: Collection[int] = ()) -> str:
        """The text of `ids`; `skip_special` leaves out control tokens, but not `keep`."""
        hidden = self._hidden.difference(keep) if skip_special else ()
        return str(self._whole.decode([one for one in map(int, ids) if one not in hidden], skip_special_tokens=False))

    @cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of each id, as far as an id alone has any: the decoder may drop a space before the first one."""
        table = [b""] * self.vocab_size
        byte_level = "ByteLevel" in json.dumps(self._spec.get("decoder"))
        for piece, token in self._whole.get_vocab(with_added_tokens=False).items():
            table[token] = _byte_level(piece) if byte_level else tokenizer_json.piece_bytes(piece.replace("\u2581", " "))
        for token in self._spec.get("added_tokens") or []:
            table[int(token["id"])] = token["content"].encode()
        return table

    @property
    def has_chat_template(self) -> bool:
        """Whether the directory has a chat template, in a file of its own or in tokenizer_config.json."""
        return DEFAULT in self.named_templates

    @cached_property
    def named_templates(self) -> dict[str, str]:  # type: ignore[override]
        return {name: source for name, (source, _) in self._sources.items()}

    @cached_property
    def _sources(self) -> dict[str, tuple[str, Path | str]]:
        return dict(chat_templates(self.directory)) if self._given is None else {DEFAULT: (self._given, "tokenizer.chat_template")}

    @cached_property
    def _template(self) -> Template:
        if DEFAULT not in self._sources:
            raise UserError(f"{self.directory / 'tokenizer_config.json'} has no chat_template; this model cannot be asked in a chat")
        source, where = self._sources[DEFAULT]
        return Template(source, str(where), self.tokens)

    @cached_property
    def _tool_template(self) -> Template:
        if TOOL_USE not in self._sources:
            return self._template
        source, where = self._sources[TOOL_USE]
        return Template(source, f"{where} ({TOOL_USE})", self.tokens, TOOLS)

    def _turns_for(self, tools: Any) -> Turns:
        """The turns of the template that shows a conversation with these tools."""
        template = self._template_for(tools)
        if template not in self._turns:
            self._turns[template] = Turns(self, self.encode_marked, self.eos_ids, template, f"the chat template of {self.directory}")
        return self._turns[template]

    @cached_property
    def _turns(self) -> dict[Template, Turns]:
        return {}

    def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
                    add_generation_prompt: bool = False, thinking: bool | None = None) -> tuple[list[int], list[bool]]:
        """The ids of the conversation, and for each id whether the assistant wrote it, where `Turns` can tell; of a prompt, the
        assistant has written nothing that counts. Raises `UserError`.
        """
        if not add_generation_prompt:
            return self._turns_for(tools).encode(messages, tools, thinking)
        ids = encode(self, self._template_for(tools), messages, tools, add_generation_prompt, thinking)
        return ids, [False] * len(ids)

    def answer_ends(self, ids: Sequence[int], mask: Sequence[bool]) -> list[int]:
        """Where each answer in `ids` ends, behind the token that ends its turn."""
        return [at for at, (before, spoken) in enumerate(zip(mask, [*mask[1:], False], strict=True), 1) if before and not spoken]


def _without_first_space(pre: Any) -> Any:
    """A pre-tokenizer that puts a space before the first word of a text, as it is for later text; None if it does not."""
    if isinstance(pre, dict) and pre.get("type") == "Metaspace" and pre.get("prepend_scheme") == "first":
        return pre | {"prepend_scheme": "never"}
    if isinstance(pre, dict) and pre.get("type") == "Sequence":
        inner = [(one, _without_first_space(one)) for one in pre["pretokenizers"]]
        if any(later is not None for _, later in inner):
            return pre | {"pretokenizers": [one if later is None else later for one, later in inner]}
    return None


def _well_formed(text: str) -> str:
    """`text` with lone surrogates replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _byte_level(piece: str) -> bytes:
    try:
        return tokenizer_json.to_bytes(piece)
    except KeyError:
        return piece.encode()


def _in_word(char: str) -> bool:
    """Whether a character is one of a word to `tokenizers`, whose \\w has marks and joiners; not so for no character."""
    return bool(char) and (char.isalpha() or unicodedata.category(char) in ("Mn", "Mc", "Me", "Nd", "Nl", "Pc") or char in "\u200c\u200d")
