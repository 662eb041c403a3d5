"""docs/glossary.md covers every recipe key, command and metric, and names none that does not exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest
from doc_pages import DOCS, ROOT

from lmworks.metrics.names import METRICS

PAGE = (DOCS / "glossary.md").read_text(encoding="utf-8")
COLUMNS = "| term | meaning | where | recipe key, command, metric | elsewhere |"


def rows() -> Iterator[list[str]]:
    """The cells of each row."""
    for table in PAGE.split(COLUMNS)[1:]:
        for line in table.strip().splitlines()[1:]:
            if not line.startswith("|"):
                break
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


NAMED = [name for row in rows() for name in re.findall(r"`([^`]+)`", row[3])]


@cache
def keys() -> frozenset[str]:
    """Dotted paths of all recipe keys, without the names of list items."""
    from lmworks.recipe.keys import known_paths
    from lmworks.recipe.schema.recipe import Recipe

    return frozenset(path.replace(".NAME", "") for path in known_paths(Recipe))


@cache
def commands() -> frozenset[str]:
    from lmworks.cli.main import command_tree

    def walk(command: object, name: str) -> Iterator[str]:
        below = getattr(command, "commands", {})
        yield from [name] if not below else [found for word, one in below.items() for found in walk(one, f"{name} {word}")]

    return frozenset(walk(command_tree(), "lmworks"))


@cache
def metrics() -> frozenset[str]:
    return frozenset(METRICS)


def covers(name: str, known: str) -> bool:
    """`a.b` covers itself, `a.b.*` also the keys of that node, and `a.b.**` all below it; `group/*` all metrics of a group."""
    above = name.rstrip("*")
    if name == above or known == above[:-1]:
        return known in (name, above[:-1])
    return known.startswith(above) and (above[-1] != "." or name.endswith("**") or "." not in known.removeprefix(above))


@pytest.mark.parametrize("kind", [keys, commands, metrics], ids=["keys", "commands", "metrics"])
def test_every_name_is_covered_by_a_row(kind: object) -> None:
    assert callable(kind)
    missing = sorted(known for known in kind() if not any(covers(name, known) for name in NAMED))
    assert not missing, f"add rows to docs/glossary.md for {missing}"


def test_every_name_in_a_row_exists() -> None:
    known = keys() | commands() | metrics()
    wrong = [name for name in NAMED if not any(covers(name, one) for one in known)]
    assert not wrong


def test_rows_are_whole_and_terms_unique() -> None:
    found = list(rows())
    assert len(found) > 60
    assert all(len(row) == 5 and row[0] and row[1] and row[2] for row in found), [row for row in found if len(row) != 5]
    terms = [row[0] for row in found]
    assert len(terms) == len(set(terms)), sorted(term for term in terms if terms.count(term) > 1)


def test_the_table_of_config_json_is_measured() -> None:
    command = [sys.executable, str(DOCS / "huggingface_keys.py")]
    printed = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, cwd=ROOT).stdout
    shown = PAGE.split("<!-- config.json -->\n")[1].split("<!-- end of config.json -->")[0]
    assert shown == printed, "put what python docs/huggingface_keys.py prints into docs/glossary.md"
