"""docs/architecture.md is held to the code: who may import whom, and the tests that stand behind the promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from doc_pages import ROOT, script

from lmworks.corpus.engine.passes import PASSES

SOURCE = ROOT / "src" / "lmworks"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
house = script("house")
ROOMS = house.rooms(PAGE)
FLOOR = set(house.shared(PAGE))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of each module of ours that a file imports, at its top or inside a function."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("lmworks."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            if node.module == "lmworks":
                yield from ((node.lineno, f"lmworks.{alias.name}") for alias in node.names if alias.name != "__version__")
            elif node.module and node.module.startswith("lmworks."):
                yield node.lineno, node.module


def test_the_table_names_every_room_and_the_floor_every_other_file() -> None:
    there = {path.parent.name for path in SOURCE.glob("*/*.py")}
    assert set(ROOMS) == there
    assert {path.stem for path in SOURCE.glob("*.py")} - {"__init__"} == FLOOR - there


def test_every_room_has_a_folder_of_tests() -> None:
    assert [room for room in ROOMS if not any((ROOT / "tests" / room).glob("test_*.py"))] == ["text"], "as CONTRIBUTING says"


def test_the_figure_is_what_the_script_draws() -> None:
    assert house.FIGURE.read_text(encoding="utf-8") == house.draw(PAGE), "run python docs/house.py"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_table_allows(room: str) -> None:
    files = sorted((SOURCE / room).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files
        for line, module in imports(path)
        if module.split(".")[1] not in ROOMS[room] | (FLOOR if room not in FLOOR else {"errors"}) | {room}
    ]
    assert not wrong, "\n".join(wrong)


def test_a_recipe_loads_nothing_heavy() -> None:
    program = "import sys, lmworks.recipe.load; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True).stdout.split()
    assert not {"numpy", "pyarrow", "torch", "regex", "ftfy"} & set(loaded)


MODULES = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCE.rglob("*.py")}


def imported_at_the_top(path: Path) -> set[str]:
    """Our modules that a file imports outside functions, under `if TYPE_CHECKING` too; a package stands for its `__init__`."""
    found, waiting = set[str](), list[ast.stmt](parsed(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in MODULES else str(node.module) for name in full)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            waiting += [child for child in ast.walk(node) if isinstance(child, ast.Import | ast.ImportFrom)]
    return found & set(MODULES)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The largest sets of modules each of which reaches all others of its set by imports."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, waiting = set[str](), [start]
        while waiting:
            waiting += (new := graph[waiting.pop()] - found)
            found |= new
        reached[start] = found
    rings = {frozenset(other for other in reached[module] if module in reached[other]) for module in graph if module in reached[module]}
    return [set(ring) for ring in sorted(rings, key=sorted)]


@pytest.mark.parametrize("room", ROOMS)
def test_no_modules_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    inside = {name for name in MODULES if name.split(".")[1:2] == [room]}
    found = circles({name: (imported_at_the_top(MODULES[name]) & inside) - {name} for name in inside})
    assert not found, "move what both need into a module that neither imports"


def test_the_model_reads_its_part_of_the_recipe_and_no_more() -> None:
    read = {module for path in (SOURCE / "model").glob("*.py") for _, module in imports(path) if module.startswith("lmworks.recipe")}
    assert read == {"lmworks.recipe.schema.model"}


def test_every_promise_names_its_tests_and_they_are_there() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE, flags=re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 10))
    for number, row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"promise {number} has no test"
        for file, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), flags=re.M), f"{file} has no {test}"


ASKING = {
    "os.cpu_count", "os.process_cpu_count", "os.sched_getaffinity", "os.statvfs", "os.sysconf", "multiprocessing.cpu_count",
    "psutil.cpu_count", "psutil.virtual_memory", "psutil.disk_usage", "psutil.disk_partitions", "shutil.disk_usage",
    "shutil.get_terminal_size", "os.get_terminal_size", "torch.cpu.get_capabilities", "mmap.PAGESIZE", "resource.getpagesize",
    "locale.getpreferredencoding",
}  # fmt: skip


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of what a file reads of modules and may ask the machine, `from os import cpu_count` among it."""
    last = {name.rpartition(".")[2] for name in ASKING}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and node.attr in last:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_only_one_file_asks_the_machine() -> None:
    asked = {(str(path.relative_to(SOURCE)), name) for path in SOURCE.rglob("*.py") for _, name in names(path) if name in ASKING}
    assert {file for file, _ in asked} == {"host/machine.py"}, sorted(asked)


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_no_program_is_read_in_the_encoding_of_the_locale(folder: str) -> None:
    """ruff's PLW1514 sees to files; `text=True` reads a pipe in whatever encoding the locale has, `encoding="utf-8"` does not."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\b(text|universal_newlines)\s*=", path.read_text(encoding="utf-8"))  # few: parsing all takes seconds
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and (given := {keyword.arg for keyword in node.keywords}) & {"text", "universal_newlines"}
        and ast.unparse(node.func).startswith("subprocess.") and "encoding" not in given
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_the_passes_of_a_corpus_job_are_those_of_its_table() -> None:
    table = PAGE.partition("| passes | what they do |")[2].partition("\n\n")[0]
    told = [name for row in table.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert told == [one.name for one in PASSES]


def test_the_registry_of_benchmark_sets_can_be_imported_first() -> None:
    """It imports the modules of its folder by name, which the test of import circles does not see."""
    subprocess.run([sys.executable, "-c", "import lmworks.evaluate.sets.benchmarks"], check=True)
