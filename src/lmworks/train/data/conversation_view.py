"""The conversations of a run's tuning data as text, with what is trained marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from lmworks.errors import UserError
from lmworks.shards.format.indexed import IndexedFile
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.data.chat import chat_shards


@dataclass(frozen=True)
class Shown:
    """One conversation: pieces of text, each with whether the loss is on its tokens."""

    name: str
    number: int
    tokens: int
    trained: int
    pieces: tuple[tuple[str, bool], ...]


def conversations(data: Path, open_tokenizer: Callable[[], Tokenizer], name: str | None = None, count: int = 3) -> Iterator[Shown]:
    """The first `count` training conversations of each set, or of the set `name`. Raises `UserError` if there are none."""
    if not (data / "manifest.json").is_file():
        raise UserError(f"{data} has no conversations yet; they are read when tuning begins: lmworks tune RECIPE")
    prefixes, _ = chat_shards(data)
    if name is not None and name not in prefixes:
        raise UserError(f"there is no set {name!r} of conversations; there are: {', '.join(prefixes)}")
    tokenizer = open_tokenizer()
    for one in prefixes if name is None else [name]:
        file = IndexedFile(prefixes[one])
        starts = file.document_start(np.arange(min(count, file.documents) + 1))
        for number in range(len(starts) - 1):
            start, stop = int(starts[number]), int(starts[number + 1])
            assert file.mask is not None
            ids, mask = file.read(start, stop).tolist(), file.mask[start:stop].astype(bool).tolist()
            runs = groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
            spans = [(trained, [token for token, _ in pairs]) for trained, pairs in runs]
            pieces = tuple((tokenizer.decode(tokens), trained) for trained, tokens in spans)
            yield Shown(one, number, len(ids), sum(mask), pieces)
