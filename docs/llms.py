"""Writes llms.txt and llms-full.txt, by which language models find their way in the documentation (https://llmstxt.org).

`python docs/llms.py FOLDER [BASE_URL]`: llms.txt lists the pages with links, llms-full.txt contains their texts.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from lmworks.cli.reference_commands import pages

DOCS = Path(__file__).parent
HINT = """\
With lmworks installed, `lmworks docs TOPIC` prints a page, `lmworks schema` the JSON Schema of a recipe, and `lmworks COMMAND --help` the
options of a command."""


def summary() -> str:
    """The first paragraph of the project's README."""
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    return " ".join(text.partition("\n\n")[2].partition("\n\n")[0].split())


def write(out: Path, base_url: str = "") -> list[Path]:
    """Write both files into `out`; links are `base_url` and the file of a page, relative to this folder. Returns their paths."""
    begin = f"# lmworks\n\n> {summary()}\n\n{HINT}\n"
    listed, whole = [begin], [begin]
    for section, group in groupby(pages(DOCS), key=lambda page: page.section):
        rows = list(group)
        links = [f"- [{page.title}]({base_url}{page.file})" + (f": {page.about}" if page.about else "") for page in rows]
        listed.append("\n".join([f"## {section}", "", *links, ""]))
        whole += [f"---\nSource: {page.file}\n\n{(DOCS / page.file).read_text(encoding='utf-8').strip()}\n" for page in rows]
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "llms.txt", out / "llms-full.txt"]
    for path, parts in zip(paths, (listed, whole), strict=True):
        path.write_text("\n".join(parts), encoding="utf-8")
    return paths


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
