"""The site: every page is in its navigation, and a link that leads nowhere, or a file from elsewhere, fails the build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from doc_pages import DOCS, ROOT, script


@pytest.fixture(scope="module")
def site() -> ModuleType:
    return script("site/build")


@pytest.fixture(scope="module")
def gathered(site: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    site.gather(folder)
    return folder


def test_every_page_is_once_in_the_navigation(site: ModuleType, gathered: Path) -> None:
    listed = []
    for page in gathered.rglob("*.md"):
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S):
            listed += [page.parent / entry for entry in tree.split() if entry.endswith(".md")]
    pages = set(gathered.rglob("*.md")) - {gathered / "index.md"}
    assert len(pages) > 50 and set(listed) == pages and len(listed) == len(pages)


def test_links_of_the_gathered_pages_lead_somewhere(site: ModuleType, gathered: Path) -> None:
    """Also to files of the repository, which come along, and not inside blocks of code."""
    texts = {page: site._FENCE.sub("", page.read_text(encoding="utf-8")) for page in gathered.rglob("*.md")}
    targets = [(page, target) for page, text in texts.items() for _, target, _ in site._LINK.findall(text)]
    files = [(page, target.partition("#")[0]) for page, target in targets if "://" not in target and target[0] != "#"]
    assert len(files) > 200
    assert not [f"{page}: {target}" for page, target in files if not (page.parent / target).is_file()]


def test_a_page_shows_the_file_that_a_comment_names(site: ModuleType, tmp_path: Path) -> None:
    shown = site._FILE.sub(lambda found: site._shown(ROOT / found[1]), "before\n<!-- file: recipes/quickstart.yaml -->\nafter")
    assert shown == f"before\n```yaml\n{(ROOT / 'recipes/quickstart.yaml').read_text(encoding='utf-8')}```\nafter"
    broken = tmp_path / "docs" / "page.md"
    broken.parent.mkdir()
    broken.write_text("[a site](https://example.org), and a page that is [gone](gone.md)\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"gone\.md is no page and no file"):
        site.page_text(broken, {broken: Path("page.md")}, tmp_path)


def test_every_error_of_the_sources_is_on_the_page_of_messages(gathered: Path) -> None:
    """With what stands between values of it, so that a search for a line of an error leads there."""
    page = (gathered / "messages.md").read_text(encoding="utf-8")
    raised = [path.read_text(encoding="utf-8").count("raise UserError(") for path in (ROOT / "src" / "lmworks").rglob("*.py")]
    assert sum(block.count("\n") - 1 for block in page.split("```messages")[1:]) > 0.9 * sum(raised)
    for part in ("the recipe changed since this run began: …", "no source is called …; …", "--index: … is not of the form I/N"):
        assert part in page, part


def test_messages_of_the_troubleshooting_page_are_those_of_the_sources(gathered: Path) -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").split("<!-- causes -->")[0]
    shown = re.findall(r"^\| `([^`]+)` \|", page, flags=re.M)
    sources = "\n".join(re.sub(r'"\n\s+f?"', "", path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py"))
    assert len(shown) > 10 and not [text for text in shown if text not in sources]


GOOD = '<html><body><h1 id="top">T</h1><a href="b.html#there">b</a><a href="https://example.org">out</a><img src="p.png"></body></html>'


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("b.html#there", "c.html"), "a.html: c.html is not there"),
        (("b.html#there", "b.html#gone"), "a.html: b.html#gone: no such anchor"),
        (("b.html#there", "#gone"), "a.html: #gone: no such anchor"),
        (('src="p.png"', 'src="https://cdn.example.org/p.png"'), "a.html: loads https://cdn.example.org/p.png"),
        (("<body>", '<body><link rel="stylesheet" href="//fonts.example.org/x.css">'), "a.html: loads //fonts.example.org/x.css"),
        (("<body>", '<body><script src="gone.js"></script>'), "a.html: gone.js is not there"),
    ],
    ids=["page", "anchor", "own-anchor", "picture", "font", "script"],
)
def test_faults_of_a_finished_site_are_found(site: ModuleType, tmp_path: Path, change: tuple[str, str], fault: str) -> None:
    (tmp_path / "b.html").write_text('<h1 id="there">B</h1>')
    (tmp_path / "p.png").write_bytes(b"")
    (tmp_path / "a.html").write_text(GOOD)
    (tmp_path / "a.css").write_text("p { background: url(p.png) }")
    assert not list(site.faults(tmp_path))
    (tmp_path / "a.html").write_text(GOOD.replace(*change))
    assert list(site.faults(tmp_path)) == [fault]
    (tmp_path / "a.html").write_text(GOOD)
    (tmp_path / "a.css").write_text("@import url('https://fonts.example.org/x.css');")
    assert list(site.faults(tmp_path)) == ["a.css: loads https://fonts.example.org/x.css"]


def test_pages_for_language_models_are_there(site: ModuleType, tmp_path: Path) -> None:
    site.write_for_models(tmp_path)
    assert not list(site.faults(tmp_path))
    (tmp_path / "cookbook.md").unlink()
    assert list(site.faults(tmp_path)) == ["llms.txt: cookbook.md is not there"]


@pytest.mark.slow
def test_the_site_is_built_and_searched_without_a_server(site: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    playwright = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium") or pytest.skip("no chromium")
    out = tmp_path / "site"
    done = subprocess.run([sys.executable, str(DOCS / "site" / "build.py"), str(out)], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert "](cookbook.md)" in (out / "llms.txt").read_text(encoding="utf-8") and (out / "cookbook.md").is_file()
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 400, "height": 800})
        errors: list[str] = []
        view.on("pageerror", lambda error: errors.append(str(error)))
        view.on("request", lambda request: request.url.startswith("file:") or errors.append(request.url))
        for page in sorted(out.rglob("*.html")):
            view.goto(page.as_uri())
            wide = view.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{page.relative_to(out)} scrolls sideways by {wide} pixels on a narrow screen"
        view.goto(f"{(out / 'search.html').as_uri()}?q=label_smoothing")
        view.wait_for_selector("#search-results a[href*='recipe/dpo.html']")
        browser.close()
    assert not errors
