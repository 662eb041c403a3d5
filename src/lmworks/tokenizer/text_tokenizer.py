"""Text to token ids and back, with a trained tokenizer; and incremental decoding, for text that is shown while it is generated."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmworks.errors import UserError
from lmworks.io.files import explain_damage, read_json
from lmworks.tokenizer import special as special_
from lmworks.tokenizer import tokenizer_json as bpe_

if TYPE_CHECKING:
    import tiktoken
    import tokenizers


# tiktoken's regex engine fails on about a million consecutive spaces. Such a text is encoded by `tokenizers`, slower, with the same ids.
_LONG = 100_000
# A match begins only where a run of spaces begins: tried at each of its spaces, the search would be quadratic in the run's length.
_LONG_SPACE = re.compile(rf"(?<!\s)\s{{{_LONG}}}")
_PARALLEL_BYTES = 1 << 20


class TextTokenizer:
    """A BPE tokenizer. `encode` returns the ids that `tokenizers` and `transformers` return for the same tokenizer.json. Byte-level BPE
    runs on tiktoken.

    Text never becomes a special token: "<|user|>" in a document or a message is encoded as plain text, unless the
    caller passes `allow_special=True`. (`transformers` always encodes it as the special token, so its ids differ.)
    """

    markup: Mapping[str, int] = {}
    """The marks of thoughts and calls that are tokens but not `special`, as others publish them; text becomes them."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path} does not exist; make it with `lmworks tokenizer train RECIPE`")
        with explain_damage(path):
            bpe = bpe_.read_bpe(read_json(path), str(path))
            missing = [name for name in special_.REQUIRED if name not in bpe.added]
            if missing:
                raise UserError(f"{path} lacks the special token {missing[0]}; train a tokenizer with lmworks or add it")
            self._bpe = bpe
            self.vocab_size: int = bpe.vocab_size
            self.special: dict[str, int] = dict(sorted(bpe.added.items(), key=lambda item: item[1]))
            self.eos_id: int = self.special[special_.END]
            self.pad_id: int = self.eos_id  # as in GLM-4.x; padding has no loss
            self.stop_ids: tuple[int, ...] = tuple(self.special[name] for name in special_.STOPS)
            self._hidden = frozenset(self.special[name] for name in bpe.hidden)
            self._index_special()

    def _index_special(self) -> None:
        longest_first = sorted(self.special, key=len, reverse=True)
        self._special_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else "(?!)")
        self._special_beginnings = frozenset(name[:size] for name in self.special for size in range(1, len(name)))
        self._longest_special = max(map(len, self.special), default=1)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """The ids of `text`; special tokens in it stay ordinary text unless `allow_special`."""
        if allow_special:
            return self.encode_parts(self.split_special(text))
        if self._needs_reference(text):
            return self._ordinary_by_reference(text)
        return self._tiktoken.encode_ordinary(text)

    def encode_parts(self, parts: Sequence[str], transform: Callable[[str], str] = lambda text: text) -> list[int]:
        """Encode alternating text and special tokens, beginning with text; `transform` is applied to the text."""
        ids: list[int] = []
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self.special[part])
            elif part:
                ids.extend(self.encode(transform(part)))
        return ids

    def encode_batch(self, texts: Sequence[str], threads: int | None = None) -> list[np.ndarray]:
        """The ids of each text as uint32, without special tokens. Long batches use `threads` threads."""
        if not self._bpe.byte_level:
            found = self._reference_for_text.encode_batch(list(texts), add_special_tokens=False)
            return [np.array(one.ids, dtype=np.uint32) for one in found]
        if threads == 1 or len(texts) < 2 or sum(map(len, texts)) < _PARALLEL_BYTES:
            return [self._encode_numpy(text) for text in texts]
        with ThreadPoolExecutor(threads) as pool:  # tiktoken releases the interpreter lock
            return list(pool.map(self._encode_numpy, texts))

    def split_special(self, text: str, anywhere: bool = False) -> list[str]:
        """`text` cut at its special tokens: text, special, text, special, ..., text. `anywhere`: also at what is none only because of the
        text beside it."""
        return self._special_pattern.split(text)

    def special_prefix_length(self, text: str) -> int:
        """The length of the longest suffix of `text` that is the beginning of a special token; 0 if there is none."""
        most = min(self._longest_special - 1, len(text))
        return next((size for size in range(most, 0, -1) if text[-size:] in self._special_beginnings), 0)

    def _encode_numpy(self, text: str) -> np.ndarray:
        if self._needs_reference(text):
            return np.array(self._ordinary_by_reference(text), dtype=np.uint32)
        # copied, because tiktoken returns a read-only view of its buffer
        return np.array(self._tiktoken.encode_to_numpy(text, disallowed_special=()), dtype=np.uint32)

    def _needs_reference(self, text: str) -> bool:
        return not self._bpe.byte_level or (len(text) >= _LONG and _LONG_SPACE.search(text) is not None)

    def _ordinary_by_reference(self, text: str) -> list[int]:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # replaces lone surrogates, as tiktoken does
        return self._reference_for_text.encode(text, add_special_tokens=False).ids

    @cached_property
    def _tiktoken(self) -> tiktoken.Encoding:
        import tiktoken

        with explain_damage(self.directory / "tokenizer.json"):  # a pattern of its pre-tokenizer that is no regular expression
            return tiktoken.Encoding(
                str(self.directory), pat_str=self._bpe.pattern, mergeable_ranks=self._bpe.ranks, special_tokens=self.special
            )

    @cached_property
    def reference(self) -> tokenizers.Tokenizer:
        """The same tokenizer in `tokenizers`: the reference for the ids."""
        import tokenizers

        return tokenizers.Tokenizer.from_file(str(self.directory / "tokenizer.json"))

    @cached_property
    def _reference_for_text(self) -> tokenizers.Tokenizer:
        import tokenizers

        spec = read_json(self.directory / "tokenizer.json")
        spec |= {"added_tokens": [], "model": bpe_.without_pieces(spec["model"], self._bpe.added), "post_processor": None}
        return tokenizers.Tokenizer.from_str(json.dumps(spec))

    def decode(self, ids: Iterable[int], skip_special: bool = False, keep: Collection[int] = ()) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD. `skip_special` leaves out control tokens, but not <think>, and not `keep`."""
        return b"".join(self.token_bytes(token, skip_special and token not in keep) for token in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token: int, skip_special: bool = False) -> bytes:
        """The bytes of one id. `UserError` if there is no such id; with `skip_special` it has none, as a generated id may be that of a row
        that only pads the embedding."""
        if skip_special and (token in self._hidden or token >= self.vocab_size):
            return b""
        if not 0 <= token < self.vocab_size:
            raise UserError(f"the token id {token} is outside the vocabulary of {self.vocab_size}; these ids come from another tokenizer")
        return self._bytes[token]

    @cached_property
    def _bytes(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        for token, piece in self._bpe.pieces.items():
            table[token] = piece
        for name, token in self.special.items():
            table[token] = name.encode()
        return table

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """(vocab_size,) int32: bytes of text each id stands for; 0 for special tokens, which are no text. For bits per byte."""
        lengths = np.array([len(text) for text in self._bytes], dtype=np.int32)
        lengths[list(self.special.values())] = 0
        return lengths


class StreamDecoder:
    """Never emits part of a UTF-8 character: its bytes are kept until it is complete.

    All that `push` returned and then `finish()` is the text of `Tokenizer.decode`; invalid UTF-8 becomes U+FFFD. `keep` are ids that have
    their text although `skip_special` would leave it out.
    """

    def __init__(self, tokenizer: TextTokenizer, skip_special: bool = False, keep: Collection[int] = ()) -> None:
        self._tokenizer, self._skip, self._keep = tokenizer, skip_special, keep
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly empty. Ids beyond the vocabulary, which only pad the embedding, have no text."""
        if token >= self._tokenizer.vocab_size:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token, self._skip and token not in self._keep))

    def finish(self) -> str:
        """What is left: nothing, or U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)
