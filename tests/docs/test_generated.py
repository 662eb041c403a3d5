"""Pages that are made from the code are as it would make them now (docs/generated.py)."""

from __future__ import annotations

from doc_pages import ROOT, script

from lmworks.ablate.kinds import kinds

DOCS = ROOT / "docs"


def test_the_page_of_the_rules_is_made_from_them() -> None:
    assert (DOCS / "rules.md").read_text() == script("generated").rules() + "\n", "python docs/generated.py rules > docs/rules.md"


def test_every_kind_of_ablation_has_its_keys_on_the_page() -> None:
    assert script("generated").ablations() in (DOCS / "ablations.md").read_text(encoding="utf-8"), "python docs/generated.py ablations"
    names = "arms anneal architecture batch critical-batch learning-rate mixture noise optimizer tokenizer"
    assert set(kinds()) == set(names.split())


def test_keys_of_other_tools() -> None:
    assert (DOCS / "coming-from.md").read_text(encoding="utf-8") == script("generated").coming_from() + "\n", (
        "python docs/generated.py coming-from, and write that over docs/coming-from.md"
    )
