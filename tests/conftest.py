"""What every room's tests may use: a run on a little real text, prepared once, and a browser."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch counts cores that the other workers use, too
    gc.disable()  # `_Garbage` collects; while files are imported and assertions rewritten it took a third of the time for nothing

import fake_cuda as fake_cuda_device
import tiny_run
from late import is_slow
from lmworks.host import machine
from rank_pool import RankPool
from unsynced import do_not_wait_for_the_disk

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Measuring the peak takes a second in every process, and only perf/mfu and plans depend on it.
os.environ[machine.VARIABLE] = f"peak=1e11,{os.environ.get(machine.VARIABLE, '')}"
# A shell that starts the tests in the background has them ignore Ctrl-C, and every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
do_not_wait_for_the_disk()
# How long an example takes says something of what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip


pytest_plugins = ["slow_suite"]


TESTS = Path(__file__).parent
LONG = ("docs", "parallel", "train", "launch")  # rooms with files of a minute, which come first so that all workers end together
RANKED = pytest.StashKey[set[Path]]()  # files with tests of ranks, which come before those: see `pytest_runtest_setup`


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of slow tests only: every worker of the fast suite would import deepspeed, trl and mlflow for nothing."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return True if is_slow(collection_path.read_text(encoding="utf-8")) else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each worker begins with another part of the files: assertions are rewritten by the first that imports a file, and in a clone without
    compiled files all of them would rewrite all, which takes longer than their imports."""
    report = yield
    if collector.path == TESTS and (worker := os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) != "0":
        sizes = [sum(file.stat().st_size for file in room.path.rglob("test_*.py")) for room in report.result]
        begin = sum(sizes) * int(worker) / int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        first = sum(end <= begin for end in accumulate(sizes))
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path)  # all workers must have the same order
    config.stash[RANKED] = ranked = {item.path for item in items if "ranks" in getattr(item, "fixturenames", ())}
    if not config.option.slow_suite:  # which has an order of its own
        items.sort(key=lambda item: (item.path not in ranked, item.path.parent.name not in LONG))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their parameter: packed ones hold the time, and each worker must find the same names."""
    return argname if isinstance(val, bytes) else None


class _Garbage:
    """Collected between files, and every fiftieth test; what is left then is not looked at again. A run collects when its training begins:
    a million objects of imports, caches and fixtures took it up to 1.5 s each time."""

    file: Path | None = None
    modules, tests = 0, 0

    def collect(self, file: Path | None) -> None:
        gc.disable()
        self.tests += 1
        if file != self.file or len(sys.modules) > self.modules + 200 or self.tests % 50 == 0:
            gc.collect()
            gc.freeze()
            self.file, self.modules = file, len(sys.modules)


_garbage = _Garbage()
_pools: list[RankPool] = []  # that of the fixture `ranks`


def pytest_collection_finish(session: pytest.Session) -> None:
    _garbage.collect(None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    _garbage.collect(item.path)
    if item.path not in item.config.stash[RANKED]:
        for pool in _pools:
            pool.close()  # threads of earlier worlds wake a hundred times a second: ranks that wait take 4% of a core


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tiny_run.Tiny:
    """A recipe and a run directory in which corpus, tokenizer and shards are done."""
    return tiny_run.prepare(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny_copy(tiny: tiny_run.Tiny, tmp_path: Path) -> tiny_run.Tiny:
    """A copy of that run directory of the test's own."""
    return tiny.copy(tmp_path / "run")


@pytest.fixture(scope="session")
def finished(tiny: tiny_run.Tiny, tmp_path_factory: pytest.TempPathFactory) -> tiny_run.Tiny:
    """A run that has gone through all stages. Who changes it takes a copy."""
    run = tiny.copy(tmp_path_factory.mktemp("finished") / "run")
    run.walk()
    return run


@pytest.fixture(params=["bf16 products", "no bf16 products"])
def has_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The test runs twice: on a processor that multiplies bf16 matrices, and on one that does not, whichever this one is."""
    found: bool = request.param == "bf16 products"
    monkeypatch.setenv(machine.VARIABLE, f"{os.environ[machine.VARIABLE]},bf16={'yes' if found else 'no'}")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium from the system; the test is skipped, with the reason, where there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is in PATH")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'lmworks[dev]'")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo worlds of up to 8 processes."""
    _pools.append(pool := RankPool())
    yield pool
    _pools.remove(pool)
    pool.close()


@pytest.fixture(scope="session")
def fake_cuda(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[fake_cuda_device.FakeCuda]:
    """A CUDA device on which nothing is computed, in a process of its own: `fake_cuda.run("traced_steps:step", kind="dense")`."""
    if (reason := fake_cuda_device.missing()) is not None:
        pytest.skip(reason)
    cache = getattr(request.config, "cache", None)  # absent with `-p no:cacheprovider`
    device = fake_cuda_device.FakeCuda.build(Path(cache.mkdir("fake_cuda")) if cache else tmp_path_factory.mktemp("fake_cuda"))
    yield device
    device.close()
