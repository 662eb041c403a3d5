"""Update the pages that show a finished run of recipes/quickstart.yaml or recipes/assistant.yaml: python docs/refresh.py RUN

Writes the summary that `lmworks run` printed at the end of RUN into docs/quickstart.md or docs/assistant.md, the section MEASURED of the
quickstart into README.md, and a picture of the run page.
Needs the extra `dev`, and a chromium for the picture. Run it from the root of the repository.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from rich.console import Console

from lmworks.errors import UserError
from lmworks.io.files import read_json, write_text
from lmworks.pages.run_page import write_page
from lmworks.run.prediction import summary

ROOT = Path(__file__).resolve().parents[1]
PICTURES = {"quickstart": "run-page.png", "assistant": "assistant-page.png"}  # by the name of the recipe
MEASURED = "What was measured"  # the section of the summary that README.md shows
WIDTH = 100  # columns that a page on GitHub shows without scrolling
_WIDE, _TALLEST = 1280, 1500  # pixels of the picture
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def printed(run_dir: Path) -> str:
    """The end of the run as a terminal of WIDTH columns shows it."""
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    console.print(summary(run_dir))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().strip("\n").splitlines())


def section(text: str, title: str) -> str:
    """The lines of a summary below `title`, up to the next empty line."""
    return text.split(f"{title}\n")[1].split("\n\n")[0]


def replace_block(document: str, name: str, text: str) -> str:
    """Put `text` as a block of plain text between the markers of `name`."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if begin not in document or end not in document:
        raise UserError(f"the page has no block {name!r}; keep the lines {begin} and {end} in it")
    before, rest = document.split(begin)
    return f"{before}{begin}\n```text\n{text}\n```\n{end}{rest.split(end)[1]}"


def take_picture(page: Path, picture: Path) -> None:
    """The top of a run page, down to the loss curve, in a browser with a light color scheme, as a PNG of few colors."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise UserError(f"no browser to take the picture with: none of {', '.join(BROWSERS)} is in PATH")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": _WIDE, "height": 900}, color_scheme="light")
        view.goto(page.resolve().as_uri())
        first = view.locator("figure").first.bounding_box()
        assert first is not None, "a run that has trained has a loss curve"
        height = min(first["y"] + first["height"] + 24, _TALLEST)
        view.screenshot(path=picture, full_page=True, clip={"x": 0, "y": 0, "width": _WIDE, "height": height})
        browser.close()
    Image.open(picture).convert("RGB").quantize(255, dither=Image.Dither.NONE).save(picture, optimize=True)


def main(run_dir: Path) -> None:
    summary_text, recipe = printed(run_dir), read_json(run_dir / "resolved.json")["name"]
    if recipe not in PICTURES:
        raise UserError(f"{run_dir} is a run of {recipe!r}; pages show runs of {' and '.join(PICTURES)}")
    blocks = [(ROOT / "docs" / f"{recipe}.md", recipe, summary_text)]
    if recipe == "quickstart":
        blocks.append((ROOT / "README.md", "measured", section(summary_text, MEASURED)))
    pages = {page: replace_block(page.read_text(encoding="utf-8"), name, text) for page, name, text in blocks}
    take_picture(write_page(run_dir), ROOT / "docs" / "figures" / PICTURES[recipe])
    for page, document in pages.items():
        write_text(page, document)


if __name__ == "__main__":
    try:
        main(*map(Path, sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
