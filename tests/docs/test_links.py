"""Links between the pages lead somewhere, and files that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import DOCS, LINK, PAGES, ROOT, blocks, inline, prose

from smollm2 import gguf_file

FOLDERS = "tests|recipes|docs|benchmarks|src"
OURS = "|".join(sorted(path.name for path in (ROOT / "src" / "lmworks").iterdir() if path.is_dir()))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = [line.lstrip("#").strip() for _, line in prose(page) if re.match(r"#{1,6} ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for line, target in ((line, target) for line, text in prose(page) for target in LINK.findall(text)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else page.parent / path
        if not there.exists():
            wrong.append(f"{line}: {target} is not there")
        elif anchor and anchor not in anchors(there):
            wrong.append(f"{line}: {target}: no such heading")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    wrong = []
    for line, code in inline(page):
        for name in re.findall(rf"(?:^|(?<=[\s=]))((?:{FOLDERS})/[\w./-]*\w)", code):
            if not (ROOT / name).exists():
                wrong.append(f"{line}: {name}")
        if (name := re.fullmatch(rf"((?:{OURS})/[\w/]+\.py)", code)) and not (ROOT / "src" / "lmworks" / name[1]).exists():
            wrong.append(f"{line}: {code}")
    assert not wrong, "\n".join(wrong)


def test_names_that_contributors_look_up_are_in_their_files() -> None:
    rows = [line for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    named = [one for row in rows for one in re.findall(r"`([\w.]+)`(?: and `([\w.]+)`)? in `([\w/]+\.py)`", row)]
    assert len(named) > 15
    for *names, file in named:
        text = (ROOT / "src" / "lmworks" / file).read_text(encoding="utf-8")
        for name in filter(None, names):
            assert re.search(rf"^ *(?:def|class) {name.rpartition('.')[2]}\b", text, re.MULTILINE), f"{name} in {file}"


def test_files_that_the_sources_name_exist() -> None:
    """In code quotes, from any folder on."""
    there = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.py")]
    ours = sorted((ROOT / "src").rglob("*.py"))
    named = [(path, name) for path in ours for name in re.findall(r"`([a-z_/]+\.py)`", path.read_text(encoding="utf-8"))]
    missing = [f"{path.relative_to(ROOT)}: {name}" for path, name in named if not any(one.endswith(f"/{name}") for one in there)]
    assert len(named) > 20 and not missing, missing


def test_the_readme_leads_to_the_index_and_the_index_to_every_page() -> None:
    linked = {target for _, text in prose(ROOT / "README.md") for target in LINK.findall(text)}
    assert {"docs/README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= linked
    assert set(DOCS.rglob("*.md")) <= set(PAGES), "list the page in docs/README.md, or in the README.md of its folder"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180


def test_pictures_are_small() -> None:
    pictures = [path for path in (ROOT / "docs" / "figures").iterdir() if path.suffix in (".png", ".svg")]
    assert pictures
    assert all(path.stat().st_size < 300_000 for path in pictures)


@pytest.mark.parametrize("name", ["quickstart", "assistant"])
def test_the_output_that_a_tutorial_shows_is_of_the_recipe_that_is_shipped(name: str) -> None:
    """What does not depend on the machine: domains, benchmark sets, tasks, questions."""
    from lmworks.recipe.load import load_recipe

    if name == "assistant":
        gguf_file()  # without which the recipe has no shape
    recipe = load_recipe(name).recipe
    shown = " ".join(" ".join(block.lines) for block in blocks(DOCS / f"{name}.md") if block.language == "text")
    names = [source.domain for source in recipe.corpus.sources] or [f"answers: {data.name}" for data in recipe.tune.data]
    names += [*(b.name for b in recipe.evaluate.benchmarks), *(t.name for t in recipe.evaluate.tasks)]
    first_words = [" ".join(question.split()[:3]) for question in recipe.evaluate.questions]
    missing = [name for name in (*names, *first_words) if name[:14] not in shown]
    assert not missing, f"the recipe now has {missing}; run: python docs/refresh.py runs/{name}"
