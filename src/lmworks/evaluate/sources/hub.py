"""Rows of benchmark sets from the Hugging Face hub, through `datasets` (extra `data`), which keeps what it downloads in its cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from lmworks.errors import Unavailable, UserError
from lmworks.evaluate.items import Row


def rows(repository: str, config: str | None, split: str) -> Iterator[tuple[str, Row]]:
    """The rows of a split, with their numbers. `Unavailable` says why they cannot be had."""
    try:
        import datasets
    except ImportError:
        raise UserError("evaluate.benchmarks: `hub` needs the datasets package: pip install 'lmworks[data]'") from None
    try:
        found: Any = datasets.load_dataset(repository, config, split=split)
    except (FileNotFoundError, ConnectionError, OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise Unavailable(f"cannot load {repository}, split {split}, from the hub: {reason}") from None
    for number, row in enumerate(found):
        yield str(number), cast(Row, row)
