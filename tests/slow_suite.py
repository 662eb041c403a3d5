"""A plugin for `make slow`: a slice of the slow tests, within a time, with a line for each test and a table of them all at the end.

`--slow-suite` selects the tests marked `slow`. What passed under the same sources before, by the file of `--results`, is not run again.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import durations
import slow_needs

ROOT = Path(__file__).parents[1]
OUTCOMES = ("passed", "failed", "left out")


@dataclass
class Result:
    test: str
    outcome: str
    seconds: float = 0.0
    why: str = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("slow suite")
    group.addoption("--slow-suite", action="store_true", help="run the tests marked slow, and end with a table of them")
    group.addoption("--slice", metavar="K/N", help="piece K mod N of N; K div N says which of its tests is first")
    group.addoption("--until", type=float, metavar="EPOCH", help="begin no test that would last beyond this time, in seconds since 1970")
    group.addoption("--results", type=Path, metavar="FILE", help="append to it; do not repeat what passed under the same sources")
    group.addoption("--record-durations", action="store_true", help=f"write the measured times into {durations.PATH.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.slow_suite:
        config.option.markexpr = "slow"
        config.pluginmanager.register(SlowSuite(config), "slow-suite")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in needs_of(item):
        if why := slow_needs.NEEDS[name].missing():
            pytest.skip(why)


def needs_of(item: pytest.Item) -> list[str]:
    return [name for mark in item.iter_markers("needs") for name in mark.args]


def slices(tests: Sequence[tuple[str, Sequence[str]]], seconds: Mapping[str, float], pieces: int) -> list[list[str]]:
    """The tests, each with what it needs installed, in pieces of some equal duration and in their order.

    Tests that need the same installation stay together, since each piece that has one of them pays for it; so does a file of less than half
    a piece, whose tests may share a fixture.
    """

    def lasts(names: Iterable[str]) -> float:
        return sum(seconds.get(name, durations.UNKNOWN) for name in names)

    files: dict[str, list[str]] = {}
    for name, _ in tests:
        files.setdefault(name.split("::")[0], []).append(name)
    half = lasts(name for name, _ in tests) / pieces / 2
    small = {file for file, names in files.items() if lasts(names) < half}
    blocks: dict[str, list[str]] = {}
    installed: dict[str, float] = {}
    for name, needs in tests:
        file = name.split("::")[0]
        large = [need for need in needs if slow_needs.NEEDS[need].large]
        block = large[0] if large else file if file in small else name
        blocks.setdefault(block, []).append(name)
        if large:
            installed[block] = lasts(f"install {need}" for need in large)
    cost = {block: lasts(names) + installed.get(block, 0) for block, names in blocks.items()}
    total, before = sum(cost.values()), 0.0
    found: list[list[str]] = [[] for _ in range(pieces)]
    for block, names in blocks.items():
        found[min(int(pieces * (before + cost[block] / 2) / total), pieces - 1)] += names
        before += cost[block]
    return found


def fingerprint() -> str:
    """Of all that decides what a test finds, but for the machine and the packages on it."""
    digest = hashlib.sha256()
    paths = (path for folder in ("src", "tests", "docs", "recipes") for path in (ROOT / folder).rglob("*"))
    for path in sorted(path for path in paths if path.suffix in (".py", ".sh", ".yaml", ".md", ".jinja", ".html", ".js")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class SlowSuite:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.until: float | None = config.option.until
        self.controls = not hasattr(config, "workerinput")
        self.expected = durations.read()
        self.found: dict[str, Result] = {}
        self.earlier: dict[str, Result] = {}
        self.begun = self.item_begun = time.time()
        self.inside = False  # a test or a fixture, which may be interrupted
        self.spent = self.foreseen = 1.0  # seconds of finished tests, and what was expected of them
        if self.controls:
            self.tree = fingerprint()
            self.earlier = self._read(config.option.results)
            self.passed = [name for name, result in self.earlier.items() if result.outcome == "passed"]
        else:
            self.passed = config.workerinput["passed"]
        self.left = 0.0  # expected seconds of what is selected and not yet done
        self.count = 0

    def _read(self, path: Path | None) -> dict[str, Result]:
        if path is None or not path.exists():
            return {}
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return {row["test"]: Result(row["test"], row["outcome"], row["seconds"], row["why"]) for row in rows if row["tree"] == self.tree}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["passed"] = self.passed

    # What runs

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if config.option.slice:
            number, pieces = map(int, config.option.slice.split("/"))
            chosen = slices([(item.nodeid, needs_of(item)) for item in items], self.expected, pieces)[number % pieces]
            turn = number // pieces * 7 % max(len(chosen), 1)  # who comes last, and may be left out, is another one in each round
            order = {name: place for place, name in enumerate(chosen[turn:] + chosen[:turn])}
        else:
            order = {item.nodeid: place for place, item in enumerate(items)}
        for name in self.passed:
            order.pop(name, None)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
        self._selected(order)

    def _selected(self, names: Iterable[str]) -> None:
        self.names = list(names)
        self.left = sum(self.expected.get(name, durations.UNKNOWN) for name in self.names)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self._selected(ids)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self.item_begun = time.time()
        if self.until is not None:
            lasts = self.expected.get(item.nodeid, durations.UNKNOWN) * self.spent / self.foreseen
            left = self.until - time.time()
            if lasts > left:
                pytest.skip(f"no time: it would last some {lasts:.0f} s, and {max(left, 0):.0f} s are left")
        yield from self._interruptible()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        yield from self._interruptible()

    def _interruptible(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """A test that lasts longer than was expected of it ends with the time that there is, and does not fail for it."""
        left = (self.until or float("inf")) - time.time()
        if left <= 0 or left > (settings.timeout or 0):
            return None

        def end(number: int, frame: Any) -> None:
            if not self.inside:  # between two phases, where pytest itself would be interrupted
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                return
            pytest.skip(f"no time: stopped after {time.time() - self.item_begun:.0f} s, when the time was over")

        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, left)
        item.stash[_OURS] = True
        return True

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool | None:
        if item.stash.get(_OURS, None) is None:
            return None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return True

    # What is told

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No letters: each test gets a line."""
        if report.failed:
            return ("failed" if report.when == "call" else "error", "", "")
        if report.skipped:
            return ("skipped", "", "")
        return ("passed" if report.when == "call" else "", "", "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # a file whose tests cannot be named
            self.found[report.nodeid] = Result(report.nodeid, "left out", why=_reason(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self.found.setdefault(report.nodeid, Result(report.nodeid, "left out", why="not finished"))
        result.seconds += report.duration
        if report.failed:
            result.outcome, result.why = "failed", _failure(report)
        elif report.skipped and result.outcome != "failed":
            result.outcome, result.why = "left out", _reason(report)
        elif report.when == "call":
            result.outcome, result.why = "passed", ""
        if report.when != "teardown":
            return
        foreseen = self.expected.get(report.nodeid, durations.UNKNOWN)
        self.left -= foreseen
        if result.outcome == "passed":
            self.spent += result.seconds
            self.foreseen += foreseen
        if self.controls:
            self._tell(result)

    def _tell(self, result: Result) -> None:
        result.seconds = round(result.seconds, 1)
        self.count += 1
        if self.config.option.results:
            self.config.option.results.parent.mkdir(parents=True, exist_ok=True)
            with open(self.config.option.results, "a", encoding="utf-8") as file:
                file.write(json.dumps({"tree": self.tree} | asdict(result)) + "\n")
        workers = getattr(self.config.option, "numprocesses", None) or 1
        left = self.left * self.spent / self.foreseen / workers
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(
            f"{self.count}/{len(self.names)}  {result.outcome:8} {result.seconds:6.1f} s  {result.test}"
            f"  [{_minutes(time.time() - self.begun)}, some {_minutes(left)} left]" + (f"\n    {result.why}" if result.why else "")
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.config.option.collectonly:
            return
        results = self.earlier | self.found if not self.config.option.slice else self.found
        for name in self.names:
            results.setdefault(name, Result(name, "left out", why="not begun"))
        files: dict[str, list[Result]] = {}
        for name in sorted(results):
            files.setdefault(name.split("::")[0], []).append(results[name])
        which = f"slice {self.config.option.slice}" if self.config.option.slice else "all slow tests"
        terminalreporter.section(f"{which}, {_minutes(time.time() - self.begun)}")
        for line in table(files):
            terminalreporter.write_line(line)

    def pytest_sessionfinish(self) -> None:
        if self.controls and self.config.option.record_durations:
            measured = {name: one.seconds for name, one in (self.earlier | self.found).items() if one.outcome == "passed"}
            known = self.names if not self.config.option.slice else self.expected  # after a run of all, what is no more is forgotten
            kept = {name: time for name, time in self.expected.items() if name in known or name.startswith("install ")}
            durations.write(kept | measured)


_OURS = pytest.StashKey[bool]()


def table(files: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Per file how many passed, failed, and were left out; then each failure, and each reason with how many tests it left out."""
    yield f"| {'file':44} | {' | '.join(f'{outcome:>8}' for outcome in OUTCOMES)} | {'minutes':>8} |"
    yield f"|{'-' * 46}|{'|'.join('-' * 9 + ':' for _ in OUTCOMES)}|{'-' * 9}:|"
    everything = [one for results in files.values() for one in results]
    for file, results in [*files.items(), ("all", everything)]:
        counts = [sum(one.outcome == outcome for one in results) for outcome in OUTCOMES]
        seconds = sum(one.seconds for one in results)
        yield f"| {file:44} | {' | '.join(f'{count:8}' for count in counts)} | {seconds / 60:8.1f} |"
    for one in everything:
        if one.outcome == "failed":
            yield f"failed: {one.test}: {one.why}"
    for file, results in files.items():
        reasons: dict[str, list[Result]] = {}
        for one in results:
            if one.outcome == "left out":
                reasons.setdefault(re.sub(r"\d+", "", one.why), []).append(one)
        for alike in reasons.values():
            names = [one.test.partition("::")[2] for one in alike]
            named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            yield f"left out: {file}: {named or 'the file'}: {alike[0].why}"


def _failure(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message if crash else str(report.longrepr)).split())[:200]


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return told.removeprefix("Skipped: ")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
