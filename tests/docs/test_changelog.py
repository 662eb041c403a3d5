"""CHANGELOG.md lists every renamed recipe key."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doc_pages import ROOT
from pydantic import BaseModel

from lmworks.recipe.keys import nodes_of
from lmworks.recipe.schema.recipe import Recipe


def nodes(node: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield node
    for field in node.model_fields.values():
        for below in nodes_of(field.annotation):
            yield from nodes(below)


def test_every_renamed_key_is_a_row() -> None:
    page = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `[\w., ]+` \| `(\w+)` \| `(\w+)` \|$", page, flags=re.M))
    renamed = {item for node in nodes(Recipe) for item in node.renamed.items() if item[0] != item[1]}
    assert renamed
    assert renamed <= rows
