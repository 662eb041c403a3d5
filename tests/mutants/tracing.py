"""Which lines of some modules each test runs, and the processor time that it takes.

Lines of the processes that a test starts are its own. What a fixture of many tests runs belongs to each of them. What a cache keeps belongs
to the test that filled it, and what torch compiles runs no line.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

_TRACED = Path(__file__).with_name("traced")
_RANKS = 10.0  # processor seconds that ranks take to start, which only the first test that has them pays when all run


@dataclass
class Traced:
    """seconds: of a processor, beside those of `fixtures` by name, which many tests share. lines: by module, named from the root of the
    repository."""

    seconds: float = 0.0
    fixtures: dict[str, float] = field(default_factory=dict)
    lines: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class _Test:
    item: pytest.Item
    number: int
    seconds: float = 0.0
    passed: bool = False


@dataclass
class _Fixture:
    name: str
    base: str  # what the names of the tests begin with that may have it
    number: int
    seconds: float = 0.0


class Tracing:
    """A plugin of pytest. What runs has a number in a file that all processes map, 0 before the tests."""

    def __init__(self, root: Path, folder: Path, modules: Sequence[str]) -> None:
        self._lines, self._modules = folder / "lines", modules
        (folder / "files").write_text("\n".join(str(root / name) for name in modules), encoding="utf-8")
        (folder / "now").write_bytes(bytes(4))
        self._lines.touch()
        sys.path.insert(0, str(_TRACED))
        os.environ |= {"LMWORKS_TRACED": str(folder), "PYTHONPATH": f"{_TRACED}:{os.environ['PYTHONPATH']}"}
        sys.modules.pop("sitecustomize", None)
        import sitecustomize

        self._tracer = sitecustomize.tracer
        self._tests: list[_Test] = []
        self._fixtures: list[_Fixture] = []
        self._numbers = 0

    @contextmanager
    def _running(self, one: Any) -> Iterator[None]:
        """What runs within the block is this one's, and what it costs is not of what is around it."""
        around = self._tracer.now[:4]
        self._tracer.now[:4] = struct.pack("<i", one.number)
        before = _spent()
        try:
            yield
        finally:
            one.seconds += _spent() - before
            self._tracer.now[:4] = around

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    @contextmanager
    def test(self, item: pytest.Item) -> Iterator[_Test]:
        one = _Test(item, self._number())
        fixtures = len(self._fixtures)
        with self._running(one):
            yield one
        one.seconds -= sum(fixture.seconds for fixture in self._fixtures[fixtures:])
        self._tests.append(one)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            yield
            return
        one = _Fixture(fixturedef.argname, fixturedef.baseid, self._number())
        inner = len(self._fixtures)
        with self._running(one):
            yield
        one.seconds -= sum(fixture.seconds for fixture in self._fixtures[inner:])
        self._fixtures.append(one)

    def result(self) -> Any:
        """The lines that ran before all tests, and the tests that passed, as Held.trace() returns them."""
        ran: dict[int, dict[str, set[int]]] = {}
        for row in self._lines.read_text(encoding="utf-8").splitlines():
            number, module, line = map(int, row.split())
            ran.setdefault(number, {}).setdefault(self._modules[module], set()).add(line)
        tests = {}
        for test in filter(lambda one: one.passed, self._tests):
            names: Sequence[str] = getattr(test.item, "fixturenames", ())
            parts = [test, *(one for one in self._fixtures if one.name in names and test.item.nodeid.startswith(one.base))]
            fixtures = {f"{one.base}::{one.name}": round(one.seconds, 3) for one in parts[1:] if isinstance(one, _Fixture)}
            fixtures |= {"ranks": _RANKS} if "ranks" in names else {}
            tests[test.item.nodeid] = asdict(Traced(round(test.seconds, 3), fixtures, _sorted([ran.get(one.number, {}) for one in parts])))
        return _sorted([ran.get(0, {})]), tests


def _sorted(parts: Sequence[dict[str, set[int]]]) -> dict[str, list[int]]:
    return {name: sorted(set().union(*(part.get(name, set()) for part in parts))) for name in {name for part in parts for name in part}}


def _spent() -> float:
    """Processor seconds of this process and of all that it has started."""
    own = os.times()
    spent = sum(own[:4])
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            spent += sum(one.cpu_times()[:4])
    return spent
