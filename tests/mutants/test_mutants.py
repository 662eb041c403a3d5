"""Every declared mutant can still be planted: `make mutants` plants them and has the fast tests find them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from mutants.equivalent import EQUIVALENT
from mutants.lines import changed_lines, needed_lines
from mutants.mutant import ROOT, declared
from mutants.sampled import TARGETS

SOURCE = '''"""A module."""

LIMIT = 3


@cached
def half(
    number,
    most=2,
):
    if number > most and (
        number > 1
    ):
        return most
    return number / 2
'''


def test_every_mutant_can_be_planted() -> None:
    mutants = declared()
    assert len(mutants) >= 200
    assert len({mutant.promise for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        assert mutant.promise.endswith(".") and mutant.old != mutant.new, mutant
        for path, _, test in (one.partition("::") for one in mutant.test_paths):
            assert (ROOT / path).exists(), mutant
            assert not test or f"\ndef {test.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), mutant
        ast.parse(mutant.mutated())


def test_what_mutants_are_drawn_from_is_there() -> None:
    for target in TARGETS.values():
        assert all(list((ROOT / "src" / "lmworks").glob(pattern)) for pattern in target.modules.split()), target.modules
        assert all((ROOT / test).exists() for test in target.tests), target.tests


def test_equivalent_mutants_are_of_lines_that_are_there() -> None:
    for module, before, _, _ in EQUIVALENT:
        text = " ".join(line.strip() for line in (ROOT / "src" / "lmworks" / module).read_text(encoding="utf-8").splitlines())
        assert before in text, (module, before)


def test_the_lines_that_a_mistake_changes() -> None:
    for old, new, lines, imported in (
        ("number / 2", "number / 3", {15}, {6, 7, 8, 9, 10}),
        ("number > 1", "number > 0", {11, 12, 13}, {6, 7, 8, 9, 10}),
        ("most=2", "most=1", set(range(6, 16)), {6, 7, 8, 9, 10}),
        ("LIMIT = 3", "LIMIT = 4", set(range(1, 17)), {3, 6}),
    ):
        assert needed_lines(SOURCE, SOURCE.replace(old, new), imported)[0] == lines, old
    assert changed_lines(SOURCE, SOURCE.replace("LIMIT = 3\n", "")) == (3, 4)
    assert changed_lines(SOURCE, SOURCE + "half = None\n") == (16, 17)


HELD = """
import os
import signal
import sys
from pathlib import Path

from mutants.held import Held

module, test = Path("src/lmworks/one.py"), "tests/test_one.py::test_half"
before = "PARTS = (\\n    2,\\n    3,\\n)\\n\\n\\ndef half(x):\\n    return x / PARTS[0]\\n\\n\\ndef other(x):\\n    return x\\n"
after = before.replace("x / PARTS[0]", "(x\\n        * PARTS[0])")
module.write_text(before)
held = Held(Path.cwd(), ["tests/test_one.py"])
module.write_text(after)
planted = held.run({test: 10.0}, {str(module): (before, after)})
module.write_text(before)
passed = held.run({test: 10.0})
outside = held.run({test: 10.0}, {str(module): (before, before.replace("    2,\\n", ""))})
print(held.tests == [test], planted.outcome, outside.outcome, passed.outcome)
os.kill(held._process, signal.SIGKILL)
print(held.run({test: 10.0}).outcome, held.run({test: 10.0}, {str(module): (before, after)}).outcome)
held.close()
"""


def test_the_process_that_runs_the_tests_keeps_no_mistake_and_starts_again(tmp_path: Path) -> None:
    """It took the mistake for the source when that was changed while it still imported the tests, and its own end for a mistake that was
    found. A line less outside functions, which moves all that are below, was planted in those, where it changes nothing."""
    for name, text in (("src/lmworks/__init__.py", ""), ("tests/test_one.py", """
import time
time.sleep(0.5)
from lmworks.one import half

def test_half():
    assert half(4) == 2
""")):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-c", HELD], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "tests")}, capture_output=True,
        encoding="utf-8", timeout=120,
    )  # fmt: skip
    lines = [line for line in found.stdout.splitlines() if "is started again" not in line]
    assert lines == ["True failed not planted passed", "passed failed"], found.stdout + found.stderr


TRACED = """
from pathlib import Path

from mutants.held import Held

held = Held(Path.cwd(), ["tests/test_two.py"], traced=["src/lmworks/one.py"])
_, traced = held.trace()
print(*(test.lines["src/lmworks/one.py"] for test in traced.values()))
held.close()
"""


def test_lines_are_traced_also_behind_a_test_that_limits_the_size_of_files(tmp_path: Path) -> None:
    """The tracer could not write, raised, and was taken away: no later test ran a line, and their mistakes survived."""
    one = "def half(x):\n    return x / 2\n"
    for name, text in (("src/lmworks/__init__.py", ""), ("src/lmworks/one.py", one), ("tests/test_two.py", """
import resource
import signal
from lmworks.one import half

def test_limited():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    half(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    half(2)

def test_half():
    half(4)
""")):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-c", TRACED], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "tests")}, capture_output=True,
        encoding="utf-8", timeout=120,
    )  # fmt: skip
    assert found.stdout.split() == ["[2]", "[2]"], found.stdout + found.stderr


FORKED = """
import os
import sys

from mutants.held import temporary_folder

with temporary_folder("folder-") as folder:
    child = os.fork()
    if child == 0:
        sys.exit(0)
    print(os.waitpid(child, 0)[1], folder.is_dir())
print(folder.exists())
"""


def test_a_fork_that_ends_leaves_the_copy_of_the_sources() -> None:
    found = subprocess.run([sys.executable, "-c", FORKED], env={"PYTHONPATH": str(ROOT / "tests")}, capture_output=True, encoding="utf-8")
    assert found.stdout.split() == ["0", "True", "False"], found.stdout + found.stderr
