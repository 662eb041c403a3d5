"""`lmworks schema`: the files that people write, as JSON Schema. `lmworks docs`: the pages of the documentation."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lmworks.cli import completion
from lmworks.cli.options import JsonOption, console, print_json
from lmworks.errors import UserError
from lmworks.recipe.keys import nearest, nearest_or_all

SCHEMAS = ("recipe", "model", "cluster", "ablation", "ladder")
_LINK = re.compile(r"^\| \[(?P<title>[^\]]+)\]\((?P<path>[\w/.-]+\.md)\) \| (?P<about>.*) \|$")
_HEADING = re.compile(r"^# (.+)$", re.M)


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("schema")(schema)
    app.command("docs")(docs)


def schema(
    kind: Annotated[str, typer.Argument(metavar="[KIND]", help=f"What the file describes: {', '.join(SCHEMAS)}.")] = "recipe",
) -> None:
    """Print the JSON Schema (draft 2020-12) of a recipe, a model preset, a cluster, an ablation or a ladder, for editors and scripts."""
    print_json(schema_of(kind))


def schema_of(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of file. Raises `UserError` for another kind."""
    from lmworks.ablate.kinds import kinds
    from lmworks.ladder.run import LadderFile
    from lmworks.recipe.json_schema import json_schema
    from lmworks.recipe.schema.base import Node
    from lmworks.recipe.schema.layout import Cluster
    from lmworks.recipe.schema.model import Model
    from lmworks.recipe.schema.recipe import Recipe

    nodes: dict[str, type[Node]] = {"recipe": Recipe, "model": Model, "cluster": Cluster, "ladder": LadderFile}
    if kind not in SCHEMAS:
        raise UserError(f"there is no schema of {kind[:100]!r}; {nearest_or_all(kind, SCHEMAS)}")
    return json_schema(f"lmworks {kind}", nodes[kind] if kind in nodes else kinds())


@dataclass(frozen=True)
class Page:
    """A page of the documentation: its topic, which is its path without the ending, its title, what it is about, the section of the index
    that lists it, and its file, relative to the folder."""

    topic: str
    title: str
    about: str
    section: str
    file: str


def pages(folder: Path) -> list[Page]:
    """The pages of a folder: in the order of its README.md and those of its folders, and then the others."""
    index = folder / "README.md"
    if not index.is_file():
        raise UserError(f"the documentation is not installed (no {index}); install lmworks from its wheel or its repository")
    found: dict[Path, Page] = {}
    for listing in (index, *sorted(folder.glob("*/README.md"))):
        section = ""
        for line in listing.read_text(encoding="utf-8").splitlines():
            section = line.removeprefix("## ") if line.startswith("## ") else section
            path = (listing.parent / link["path"]).resolve() if (link := _LINK.match(line)) else folder
            if link and path.is_file() and path.is_relative_to(folder.resolve()):
                about = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", link["about"])
                found.setdefault(path, _page(folder, path, link["title"], about, section))
    for path in sorted(folder.resolve().rglob("*.md")):
        if path != index.resolve() and path not in found:
            heading = _HEADING.search(path.read_text(encoding="utf-8"))
            found[path] = _page(folder, path, heading[1] if heading else path.stem)
    return list(found.values())


def _page(folder: Path, path: Path, title: str, about: str = "", section: str = "") -> Page:
    inner = path.relative_to(folder.resolve())
    topic = inner.parent if inner.name == "README.md" else inner.with_suffix("")
    return Page(topic.as_posix(), title, about, section or "Others", inner.as_posix())


def docs(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="[TOPIC]", autocompletion=completion.topics, help="Page to print; without it, the topics.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a page of the documentation as Markdown, from the installed package; without a topic, list the topics."""
    from lmworks.recipe.load import shipped_folder

    folder = shipped_folder("docs")
    found = pages(folder)
    if topic is None:
        if as_json:
            print_json([asdict(page) for page in found])
            return
        table = Table(box=None, pad_edge=False)
        for heading in ("topic", "page", ""):
            table.add_column(heading, overflow="fold")
        for page in found:
            table.add_row(page.topic, page.title, page.about)
        console().print(table)
        return
    page = _find(topic, found)
    text = (folder / page.file).read_text(encoding="utf-8")
    if as_json:
        print_json(asdict(page) | {"text": text})
    else:
        console().out(text.rstrip("\n"), highlight=False)


def _find(topic: str, found: list[Page]) -> Page:
    """The page of a topic. Raises `UserError` that names the topics that may have been meant."""
    name = topic.strip().lower().removesuffix(".md").removeprefix("docs/").strip("/")
    for page in found:
        if name in (page.topic, page.topic.rpartition("/")[2], page.title.lower()):
            return page
    topics = [page.topic for page in found]
    close = nearest(name, topics)
    words = re.findall(r"\w{3,}", name)
    about = [page.topic for page in found if words and all(word in f"{page.topic} {page.title} {page.about}".lower() for word in words)]
    meant = list(dict.fromkeys([*([close] if close else []), *about]))[:5]
    hint = f"did you mean {' or '.join(meant)}?" if meant else "list the topics with: lmworks docs"
    raise UserError(f"there is no page {topic[:100]!r}; {hint}")
