"""What the pages of this project show: their commands, links and names of files."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_INDEX = DOCS / "README.md"


def _listed(index: Path) -> Iterator[Path]:
    """The pages that an index lists, and after the index of a folder those that this lists."""
    for target in LINK.findall(index.read_text(encoding="utf-8")):
        if not target.startswith(("..", "#", "http")):
            yield (page := index.parent / target.partition("#")[0])
            if page.name == "README.md":
                yield from _listed(page)


# README first, then the pages in the order of the index, which is the order in which their commands are run.
PAGES = [ROOT / "README.md", *dict.fromkeys(_listed(_INDEX)), _INDEX, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
_SHELL = ("bash", "console", "sh", "shell", "")  # languages of blocks in which every line is a command
_PROGRAMS = re.compile(r"(lmworks|make|pip|python|vllm|llama-[a-z]+|sh|export|docker|curl) \S")


def script(name: str) -> ModuleType:
    """A program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Command:
    """One command as a reader would type it."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Block:
    """The lines of a block of code: fenced with a language, or indented by four spaces (language None)."""

    language: str | None
    line: int
    lines: tuple[str, ...]


def blocks(page: Path) -> Iterator[Block]:
    """All blocks of code of a page, in order."""
    fence: tuple[str, int] | None = None
    held: list[str] = []
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), ""], start=1):
        if line.startswith("```"):
            if fence is not None:
                yield Block(fence[0], fence[1], tuple(held))
            fence, held = ((line[3:].strip(), number + 1) if fence is None else None), []
        elif fence is not None:
            held.append(line)
        elif line.startswith("    "):
            held.append(line[4:])
        elif held:
            yield Block(None, number - len(held), tuple(held))
            held = []
    assert fence is None, f"{page}: a block begun at line {fence[1] - 1 if fence else 0} has no end"


def commands(page: Path) -> list[Command]:
    """Every line of a block for the shell, and any other line of code that begins with a program. Lines that end in \\ are joined."""
    found = []
    for block in blocks(page):
        joined, begin = "", block.line
        for number, line in enumerate(block.lines, start=block.line):
            begin = begin if joined else number
            joined += line.removeprefix("$ ") if block.language != "console" or line.startswith("$ ") or joined else ""
            if joined.endswith("\\"):
                joined = joined[:-1].rstrip() + " "
                continue
            text = joined.strip()
            if text and not text.startswith("#") and (block.language in _SHELL or _PROGRAMS.match(text)):
                found.append(Command(page, begin, text))
            joined = ""
    return found


def prose(page: Path) -> list[tuple[int, str]]:
    """The lines outside blocks of code, numbered."""
    lines = list(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    covered = {block.line + offset for block in blocks(page) for offset in range(-1, len(block.lines) + 1) if block.language is not None}
    return [(number, line) for number, line in lines if number not in covered]


def inline(page: Path) -> list[tuple[int, str]]:
    """What stands in backticks in the prose, with its line."""
    return [(number, code) for number, line in prose(page) for code in re.findall(r"`([^`]+)`", line)]
