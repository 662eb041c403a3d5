"""CHANGELOG.md lists every renamed recipe key."""

from doc_pages import ROOT

from lmworks.recipe.former import table


def test_every_renamed_key_is_a_row() -> None:
    page = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert table() in page, "put what python -m lmworks.recipe.former prints into CHANGELOG.md"
