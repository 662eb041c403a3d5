"""The plugin of the slow suite, on small suites of its own."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import durations
import slow_needs
from slow_suite import slices

pytest_plugins = ["pytester"]

SUITE = """
import time

import pytest

pytestmark = pytest.mark.slow


def test_sound():
    pass


def test_broken():
    assert 1 + 1 == 3, "sums are off"


def test_without_its_engine():
    pytest.skip("no engine here")


@pytest.mark.needs("absent")
def test_marked():
    pass


def test_lasts():
    time.sleep(200)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.Pytester:
    pytester.makepyfile(test_a=SUITE)
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    needs")
    monkeypatch.setattr(durations, "PATH", tmp_path / "durations.json")
    monkeypatch.setitem(slow_needs.NEEDS, "absent", slow_needs.Need("absent", lambda: "absent is not installed"))
    return pytester


IN_A_SECOND = """
import time


def pytest_collection_finish(session):
    session.config.pluginmanager.get_plugin("slow-suite").until = time.time() + 1
"""
MAKING_A_REPORT_LASTS = """

def pytest_runtest_makereport(item, call):
    begun = time.time()
    while call.when == "setup" and time.time() < begun + 2:  # a signal ends a single sleep
        time.sleep(0.01)
"""
QUICK = {f"test_a.py::test_{name}": 0.1 for name in ("sound", "broken", "without_its_engine", "marked")}


def run(suite: pytest.Pytester, *arguments: str) -> tuple[int, str]:
    result = suite.runpytest_inprocess("-p", "slow_suite", "-p", "no:cacheprovider", "-q", "--slow-suite", *arguments)
    return int(result.ret), result.stdout.str()


def test_the_table_tells_of_all(suite: pytest.Pytester) -> None:
    durations.write(QUICK | {"test_a.py::test_lasts": 1e6})
    until = str(time.time() + 3600)
    code, told = run(suite, "--until", until, "--results", "results.jsonl")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "| test_a.py                                    |        1 |        1 |        3 |" in told
    assert "failed: test_a.py::test_broken: " in told and "sums are off" in told
    assert "left out: test_a.py: test_without_its_engine: no engine here" in told
    assert "left out: test_a.py: test_marked: absent is not installed" in told
    assert "left out: test_a.py: test_lasts: no time: it would last some" in told
    # what passed is known, the rest is tried again
    _, told = run(suite, "--until", until, "--results", "results.jsonl", "--record-durations")
    assert "test_sound" not in told and "1/4" in told
    assert "| test_a.py                                    |        1 |        1 |        3 |" in told
    assert durations.read()["test_a.py::test_sound"] < 0.1 and durations.read()["test_a.py::test_broken"] == 0.1, "of what passed"


def test_what_outlasts_the_time_is_stopped_and_fails_nothing(suite: pytest.Pytester) -> None:
    durations.write({"test_a.py::test_lasts": 0.0})
    suite.makeconftest(IN_A_SECOND)
    code, told = run(suite, "--until", "0", "--timeout", "300", "-k", "lasts")
    assert code == pytest.ExitCode.OK
    assert "left out: test_a.py: test_lasts: no time: stopped after" in told


def test_the_end_of_the_time_never_interrupts_pytest_itself(suite: pytest.Pytester) -> None:
    """The time ends while a report is made, and the test that follows is not begun."""
    durations.write(QUICK)
    suite.makeconftest(IN_A_SECOND + MAKING_A_REPORT_LASTS)
    code, told = run(suite, "--until", "0", "--timeout", "300", "-k", "sound or marked")
    assert code == pytest.ExitCode.OK and "INTERNALERROR" not in told
    assert "| test_a.py                                    |        1 |        0 |        1 |" in told


def test_what_was_interrupted_has_not_passed(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_a="import pytest\n@pytest.mark.slow\ndef test_stops():\n    pytest.exit('enough')")
    _, told = run(suite, "--results", "results.jsonl")
    assert "| test_a.py                                    |        0 |        0 |        1 |" in told
    assert "left out: test_a.py: test_stops: not finished" in told and not (suite.path / "results.jsonl").exists()


def test_what_passed_under_other_sources_is_run_again(suite: pytest.Pytester) -> None:
    row = {"tree": "other", "test": "test_a.py::test_sound", "outcome": "passed", "seconds": 1.0, "why": ""}
    (suite.path / "results.jsonl").write_text(json.dumps(row) + "\n")
    _, told = run(suite, "-k", "sound", "--results", "results.jsonl")
    assert "1/1  passed" in told


def test_a_slice_is_another_part_each_time_and_all_make_the_whole(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_b="import pytest\n@pytest.mark.slow\n@pytest.mark.parametrize('n', range(9))\ndef test_b(n):\n    pass\n")
    told = [run(suite, "--slice", f"{number}/3", "--collect-only")[1] for number in range(4)]
    names = [[line for line in one.splitlines() if "::" in line] for one in told]
    assert sorted(names[0] + names[1] + names[2]) == sorted(set(names[0] + names[1] + names[2])) and sum(map(len, names[:3])) == 14
    assert set(names[3]) == set(names[0]) and names[3] != names[0], "in another round another test comes last"


def test_slices_last_equally_long_and_keep_together_what_costs() -> None:
    vllm = [(f"export/a.py::{number}", ["vllm"]) for number in range(4)] + [("serve/z.py::one", ["vllm"])]
    small = [(f"model/b.py::{number}", []) for number in range(5)]
    tests = [*vllm[:4], *small, *((f"parallel/c.py::{number}", []) for number in range(100)), vllm[4]]
    seconds = {name: 10.0 for name, _ in tests} | {"install vllm": 90.0}
    found = slices(tests, seconds, 5)
    assert sorted(name for one in found for name in one) == sorted(name for name, _ in tests)
    assert sum(any(name in one for name, _ in vllm) for one in found) == 1, "one installation"
    assert sum(any(name in one for name, _ in small) for one in found) == 1, "one file, one fixture"
    lasting = [sum(seconds[name] for name in one) + (90 if vllm[0][0] in one else 0) for one in found]
    assert max(lasting) - min(lasting) <= 90, lasting
