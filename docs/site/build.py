"""Build the documentation site into a folder: python docs/site/build.py FOLDER

The pages of docs/ and of the root of the repository are gathered beside pages for the Python API, which Sphinx makes from docstrings. They
stay as GitHub shows them, so nothing in them is for Sphinx: the order of the navigation follows docs/README.md, and a comment
`<!-- file: PATH -->` is replaced by the text of that file. Every warning of Sphinx is an error, and so is a link of the finished site that
leads nowhere or loads something from elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import llms  # noqa: E402
import messages  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
INDEX = "README.md"  # the page of a folder that GitHub shows
ROOT_PAGES = {"README.md": "about.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "LOG.md": "log.md"}
API_ROOMS = ("api", "tokenizer", "shards", "model", "optim", "parallel", "train", "checkpoint", "inference")  # beside `lmworks` itself
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_FILE = re.compile(r"^<!-- file: (\S+) -->$", re.M)
_LOADED = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')\s]+)")  # by a style sheet
_LANGUAGES = {".yaml": "yaml", ".py": "python", ".sh": "bash"}
_API_INTRODUCTION = (
    "# Python API", "", "The names of `lmworks` are stable. Those of the packages below are documented for people who read the",
    "code, and may change.", "", "```{eval-rst}", ".. automodule:: lmworks", "   :members:", "   :imported-members:", "```", "",
    "## Packages", "", "| package | subject |", "|---|---|",
)  # fmt: skip


def page_map() -> dict[Path, Path]:
    """The place in the site of each page of the repository."""
    places = {ROOT / name: Path(place) for name, place in ROOT_PAGES.items()}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        place = page.relative_to(ROOT / "docs")
        places[page] = place.with_name("index.md") if place.name == INDEX else place
    return places


def gather(source: Path) -> None:
    """Write what Sphinx reads into the empty folder `source`."""
    places = page_map()
    for page, place in places.items():
        text = page_text(page, places, source)
        if page.name == INDEX and page != ROOT / INDEX:
            text += _navigation(page, places)
        _write(source / place, text)
    for name, text in api_pages().items():
        _write(source / "api" / name, text)
    _write(source / "messages.md", messages.page().replace(INDEX, "index.md"))
    shutil.copytree(ROOT / "docs" / "figures", source / "figures")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def page_text(page: Path, places: dict[Path, Path], source: Path) -> str:
    """A page with its links led to the places of the site, and with the files that it shows. Files of the repository that it links to
    come along."""
    here = places[page].parent

    def link(found: re.Match[str]) -> str:
        target, _, anchor = found[2].partition("#")
        if not target or urlsplit(found[2]).scheme:
            return found[0]
        path = (page.parent / target).resolve()
        place = places.get(path)
        if place is None and path.is_file():
            place = Path("figures") / path.name if path.parent.name == "figures" else Path("files") / path.relative_to(ROOT)
            if place.parts[0] == "files":
                (source / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, source / place)
        if place is None:
            raise SystemExit(f"error: {os.path.relpath(page, ROOT)}: {found[2]} is no page and no file")
        return f"{found[1]}{os.path.relpath(place, here)}{f'#{anchor}' if anchor else ''}{found[3]}"

    text = page.read_text(encoding="utf-8")
    parts, end = [], 0
    for block in _FENCE.finditer(text):  # code stays as it is
        parts += [_LINK.sub(link, text[end : block.start()]), block[0]]
        end = block.end()
    parts.append(_LINK.sub(link, text[end:]))
    return _FILE.sub(lambda found: _shown(ROOT / found[1]), "".join(parts))


def _shown(path: Path) -> str:
    return f"```{_LANGUAGES[path.suffix]}\n{path.read_text(encoding='utf-8')}```"


def _navigation(index: Path, places: dict[Path, Path]) -> str:
    """Tables of contents in the order in which the index of a folder links to pages; one for each heading of the front page."""
    front, left = index.parent == ROOT / "docs", dict.fromkeys(places)
    parts = []
    for section in re.split(r"^## ", index.read_text(encoding="utf-8"), flags=re.M) if front else [index.read_text(encoding="utf-8")]:
        targets = [(index.parent / target.partition("#")[0]).resolve() for _, target, _ in _LINK.findall(section)]
        pages = [page for page in dict.fromkeys(targets) if page in left and page != index and (front or page.parent == index.parent)]
        for page in pages:
            del left[page]
        if pages:
            title = section.partition("\n")[0].partition(":")[0] if front else ""
            parts.append(_toctree([os.path.relpath(places[page], places[index].parent) for page in pages], title))
    if front:
        rest = [str(places[page]) for page in left if page != index and page.parent in (ROOT, index.parent)]
        parts += [_toctree(["messages.md", "api/index.md"], "From the sources"), _toctree(rest, "Project")]
    return "".join(parts)


def _toctree(pages: list[str], caption: str = "") -> str:
    """Entries of the navigation; only those of the front page have captions."""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def api_pages() -> dict[str, str]:
    """A page for the names of `lmworks` itself and one for each room of the core, as directives for autodoc."""
    rows = [f"| [lmworks.{room}]({room}.md) | {_about(room)} |" for room in API_ROOMS]
    pages = {"index.md": "\n".join([*_API_INTRODUCTION, *rows, _toctree([f"{room}.md" for room in API_ROOMS])])}
    for room in API_ROOMS:
        modules = sorted(path.stem for path in (ROOT / "src" / "lmworks" / room).glob("*.py") if path.stem != "__init__")
        parts = [f"# lmworks.{room}\n\n{_about(room)}\n"]
        parts += [f"## {room}.{name}\n\n```{{eval-rst}}\n.. automodule:: lmworks.{room}.{name}\n   :members:\n```\n" for name in modules]
        pages[f"{room}.md"] = "\n".join(parts)
    return pages


def _about(room: str) -> str:
    import ast

    text = ast.get_docstring(ast.parse((ROOT / "src" / "lmworks" / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


class _Page(HTMLParser):
    """Anchors of a page, what it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.loaded += [given[name] for name in ("src", "href") if name in given and tag != "a"]


def faults(site: Path) -> Iterator[str]:
    """Links of the finished site that lead nowhere, and whatever it would load from elsewhere."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        where = path.relative_to(site)
        for target in [*page.links, *page.loaded]:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                if target in page.loaded and url.scheme != "data":
                    yield f"{where}: loads {target}"
                continue
            there = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not there.is_file():
                yield f"{where}: {target} is not there"
            elif url.fragment and there in pages and unquote(url.fragment) not in pages[there].anchors:
                yield f"{where}: {target}: no such anchor"
    for path in site.glob("llms.txt"):
        links = _LINK.findall(path.read_text(encoding="utf-8"))
        yield from (f"llms.txt: {target} is not there" for _, target, _ in links if not (site / target).is_file())
    for path in sorted(site.rglob("*.css")):
        yield from (f"{path.relative_to(site)}: loads {url}" for url in _LOADED.findall(path.read_text(encoding="utf-8")))


def write_for_models(site: Path) -> None:
    """llms.txt, and the pages that it links to as Markdown."""
    for page in (ROOT / "docs").rglob("*.md"):
        place = site / page.relative_to(ROOT / "docs")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, place)
    llms.write(site)


def build(site: Path) -> int:
    """Build the site into the folder, which is replaced; returns the number of faults, each printed as a line."""
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as held:
        source, out = Path(held) / "pages", Path(held) / "site"
        gather(source)
        if build_main(["-q", "-W", "--keep-going", "-c", str(HERE), "-d", f"{held}/doctrees", "-b", "html", str(source), str(out)]):
            return 1
        write_for_models(out)
        found = list(faults(out))
        for line in found:
            print(line, file=sys.stderr)
        if not found:
            shutil.rmtree(site, ignore_errors=True)
            shutil.copytree(out, site, ignore=shutil.ignore_patterns(".buildinfo", "objects.inv", ".doctrees"))
    return len(found)


if __name__ == "__main__":
    sys.exit(min(1, build(Path(sys.argv[1]))))
