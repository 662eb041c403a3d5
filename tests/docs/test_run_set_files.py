"""The ladder and ablation files on the pages have keys that exist, and the text calls none of their keys by a former name."""

from __future__ import annotations

import yaml
from doc_pages import DOCS, blocks, inline

from lmworks.ablate.kinds import kinds
from lmworks.ladder.run import LadderFile
from lmworks.recipe.document import parse
from lmworks.recipe.load import as_node
from lmworks.recipe.names import FORMER

PAGES = [DOCS / "sizing.md", DOCS / "ablations.md"]


def test_the_files_on_the_pages_have_keys_that_exist() -> None:
    seen = set()
    for page in PAGES:
        for text in ("\n".join(block.lines) for block in blocks(page) if block.language == "yaml"):
            tree = yaml.safe_load(text)
            node = LadderFile if "sizes" in tree else kinds()[tree.get("kind", "arms")] if {"kind", "arms"} & set(tree) else None
            if node is not None:
                as_node(parse(text, page.name), node)
                seen.add(node)
    assert LadderFile in seen and len(seen) > 1


def test_no_former_key_is_named() -> None:
    former = {key for node in ("LadderFile", *(kind.__name__ for kind in kinds().values())) for key in FORMER.get(node, ())}
    assert former and not [f"{page.name}:{line}: {code}" for page in PAGES for line, code in inline(page) if code in former]
