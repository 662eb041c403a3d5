"""Hostile input by the thousand: `python tests/fuzz/fuzz_campaign.py recipes --count 100000 --seed 0 --out runs/fuzz`.

A case is a function of its kind, the seed and its number. It runs in a process with limits, watched by another: what it may do is end well
or be refused with one line (`UserError`; a documented status of HTTP). A failure is any other exception, a crash, a case that takes more
than its processor time or waits for ever, one that takes more memory than its limit, and whatever is written outside the case's folder.
Failures are counted by where they happened, and the first of each place are kept as FILE.json: `--replay FILE.json` runs one of them with
its traceback. Finished blocks of cases are not repeated by the next call.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

import psutil

from lmworks.errors import UserError
from lmworks.io import jsonl

Case = dict[str, Any]  # what JSON can say; bytes as base64
BLOCK = 100
SECONDS = 20.0  # of processor time for a case, processes with limits of their own not counted
WAIT = 60.0  # by the clock, for a case that does not work but wait
MEMORY = 3 << 30  # of address space, beyond what the process began with
_KEPT = 3  # failures of one place whose inputs are kept


class Fault(Exception):
    """What a case has done and may not."""


class Outside(BaseException):
    """A case wrote outside its folder; nothing that it calls may catch this."""


class Kind(Protocol):
    """One kind of input."""

    def prepare(self) -> None:
        """Once, in the process that watches: imports and seeds, but no threads."""

    def begin(self) -> None:
        """Once, in each process that runs cases."""

    def case(self, draw: Random) -> Case:
        """The input of a case."""

    def run(self, case: Case, folder: Path) -> str:
        """Do with it what a user would; says how it ended. Raises `UserError` where it is refused, anything else is a failure."""


def kind_of(name: str) -> Kind:
    if name == "recipes":
        from fuzz_recipes import Recipes

        return Recipes()
    if name == "steps":
        from fuzz_steps import Steps

        return Steps()
    if name == "requests":
        from fuzz_requests import Requests

        return Requests()
    if name == "artifacts":
        from fuzz_artifacts import Artifacts

        return Artifacts()
    from fuzz_traps import Traps

    return Traps()


def draw_for(name: str, seed: int, number: int) -> Random:
    return Random(f"{name}:{seed}:{number}")


@dataclass
class Report:
    """What became of cases: how many ended in which way, and of failures which, by where they happened."""

    ended: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        self.ended.update(line["ended"])
        self.failures += line["failures"]

    def table(self) -> str:
        places = collections.Counter(failure["place"] for failure in self.failures)
        first = {failure["place"]: failure for failure in reversed(self.failures)}
        lines = [", ".join(f"{count:,} {what}" for what, count in sorted(self.ended.items()))]
        for place, count in places.most_common():
            lines.append(f"{count:6} {place}  (case {first[place]['number']}: {first[place]['said']})")
        return "\n".join(lines)


def outcome(kind: Kind, case: Case, folder: Path) -> tuple[str, str, str]:
    """How a case ended, and of a failure where and what it said."""
    try:
        return kind.run(case, folder), "", ""
    except UserError as error:
        if "\n" in str(error).strip():
            return "failed", "a message of several lines", str(error)[:300]
        if len(str(error)) > 20_000:
            return "failed", "a message of more than 20,000 characters", str(error)[:300]
        return "refused", "", ""
    except (Exception, Outside) as error:
        return "failed", place_of(error), f"{type(error).__name__}: {str(error)[:300]}"


def place_of(error: BaseException) -> str:
    """The kind of an exception and the last line of ours that it came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/lmworks/" in frame.filename]
    line = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {line.filename.rpartition('/lmworks/')[2]}:{line.lineno} {line.name}"


def guard(folder: Path) -> None:
    """Have this process write nothing but what is below `folder`, and end when it takes too much."""
    inside = os.path.realpath(folder)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, (str, bytes)) or not (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                return
            names: Iterable[Any] = (path,)
        elif event in ("os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.chmod", "os.chown", "os.utime"):
            names = arguments[:1]
        elif event in ("os.rename", "os.link", "os.symlink"):
            names = arguments[event == "os.symlink" : 2]
        else:
            return
        for name in names:
            if isinstance(name, (str, bytes)):
                real = os.path.realpath(os.fsdecode(name))
                if not (real + "/").startswith(inside + "/") and not real.startswith(("/dev/", "/proc/")):
                    raise Outside(f"{event} {real}")

    with open("/proc/self/statm", encoding="ascii") as handle:
        began = int(handle.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (began + MEMORY, began + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    sys.addaudithook(refuse)


def run_cases(kind: Kind, name: str, seed: int, numbers: Sequence[int], box: Path, tell: int) -> None:
    """What the watched process does: cases one after the other, a line when each begins and one when it has ended."""
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    os.chdir(box)
    tempfile.tempdir = str(box)
    sys.dont_write_bytecode = True
    kind.begin()
    guard(box)
    for number in numbers:
        case, folder = kind.case(draw_for(name, seed, number)), box / "case"
        folder.mkdir()
        before = {entry.name for entry in os.scandir(box.parent)}
        os.write(tell, json.dumps(["begins", number]).encode() + b"\n")
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # nobody handles SIGPROF, so it ends this process, in C code too
        ended, place, said = outcome(kind, case, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if {entry.name for entry in os.scandir(box.parent)} - before:
            ended, place, said = "failed", "files beside the folder", ""
        os.write(tell, json.dumps(["ended", number, ended, place, said]).encode() + b"\n")
        for one in os.listdir(box):
            shutil.rmtree(box / one, ignore_errors=True) if (box / one).is_dir() else (box / one).unlink()


def watch(kind: Kind, name: str, seed: int, numbers: Sequence[int], out: Path) -> Report:
    """Run cases, each in a process that may end at any moment; a case that ends its process is a failure, and the next ones go on."""
    report, left = Report(), list(numbers)
    while left:
        with tempfile.TemporaryDirectory(dir=out, prefix=".box-", ignore_cleanup_errors=True) as parent:
            box = Path(parent) / "box"
            box.mkdir()
            hears, tell = os.pipe()
            child = os.fork()
            if not child:
                code = 1
                try:
                    os.close(hears)
                    os.setpgid(0, 0)
                    run_cases(kind, name, seed, left, box, tell)
                    code = 0
                except BaseException:
                    os.write(tell, json.dumps(["broke", traceback.format_exc()]).encode() + b"\n")
                finally:
                    os._exit(code)
            os.close(tell)
            at, why = _listen(hears, child, report, left)
            if at is not None:
                report.ended["failed"] += 1
                report.failures.append({"number": at, "place": why, "said": ""})
                left = left[left.index(at) + 1 :]
    for failure in report.failures:
        failure |= {"kind": name, "seed": seed}
    return report


def _listen(hears: int, child: int, report: Report, left: list[int]) -> tuple[int | None, str]:
    """Read what the process tells until it ends; the case that it was at and why it ended, if it ended in one."""
    at: int | None = None
    rest, hung, used = b"", False, -1.0
    while True:
        ready, _, _ = select.select([hears], [], [], WAIT)
        if not ready and (now := work_of(child)) != used:  # it goes on, however slowly this machine lets it
            used = now
            continue
        hung = not ready
        chunk = os.read(hears, 1 << 16) if ready else b""
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in map(json.loads, lines):
            if line[0] == "broke":
                raise RuntimeError(f"the campaign itself failed:\n{line[1]}")
            if line[0] == "begins":
                at = line[1]
                continue
            _, number, ended, place, said = line
            report.ended[ended] += 1
            if ended == "failed":
                report.failures.append({"number": number, "place": place, "said": said})
            left.remove(number)
            at = None
    os.close(hears)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what it has started
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if at is None:
        return None, ""
    if hung:
        return at, f"waits for more than {WAIT:g} s"
    return at, f"takes more than {SECONDS:g} s of processor time" if code == -signal.SIGPROF else f"ends the process ({code})"


def work_of(child: int) -> float:
    """What a process and those below it have worked, in seconds; another number at each call while one of them is able to work."""
    process = psutil.Process(child)
    family = [process, *process.children(recursive=True)]
    with contextlib.suppress(psutil.NoSuchProcess):
        if any(one.status() == psutil.STATUS_RUNNING for one in family):
            return time.monotonic()
    times = [one.cpu_times() for one in family if one.is_running()]
    return sum(one.user + one.system for one in times)


def campaign(name: str, count: int, seed: int, out: Path, jobs: int = 1) -> Report:
    """The cases 0 to `count` of a seed, in blocks, of which those that an earlier call has finished are only read."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-{seed}.jsonl"
    done = {line["block"] for line in jsonl.read(path)}
    todo = [block for block in range(-(-count // BLOCK)) if block not in done]
    kind = kind_of(name)
    if todo:
        kind.prepare()
    watchers = []
    for job in range(jobs if todo else 0):
        watcher = os.fork()
        if not watcher:
            code = 1
            try:
                fd = jsonl.open_append(path) if job == 0 else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                for block in todo[job::jobs]:
                    found = watch(kind, name, seed, range(block * BLOCK, min(count, (block + 1) * BLOCK)), out)
                    keep(kind, name, seed, found, out)
                    jsonl.append(fd, {"block": block, "ended": dict(found.ended), "failures": found.failures})
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        watchers.append(watcher)
        time.sleep(0.05)  # so that the first has mended the file before others write
    codes = [os.waitstatus_to_exitcode(os.waitpid(watcher, 0)[1]) for watcher in watchers]
    if any(codes):
        raise SystemExit("the campaign was broken off; the same command goes on")
    report = Report()
    for line in jsonl.read(path):
        if line["block"] < -(-count // BLOCK):
            report.add(line)
    return report


def keep(kind: Kind, name: str, seed: int, report: Report, out: Path) -> None:
    """Write the inputs of the first failures of each place."""
    folder = out / "failures"
    for failure in report.failures:
        key = "".join(letter if letter.isalnum() else "-" for letter in failure["place"])[:100]
        (folder / key).mkdir(parents=True, exist_ok=True)
        if len(list((folder / key).iterdir())) < _KEPT:
            case = kind.case(draw_for(name, seed, failure["number"]))
            (folder / key / f"{name}-{seed}-{failure['number']}.json").write_text(json.dumps({**failure, "case": case}), encoding="utf-8")


def replay(path: Path) -> None:
    """Run one failure as it was kept, without limits, in this process."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    kind = kind_of(kept["kind"])
    kind.prepare()
    kind.begin()
    print(json.dumps(kept["case"])[:4000], file=sys.stderr)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            print(kind.run(kept["case"], Path(folder)))
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=["recipes", "requests", "artifacts", "steps"])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--replay", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("LMWORKS_MACHINE", "peak=1e11,cores=2,memory=64e9,available=32e9,disk=1e12,filesystem=ext4,bf16=yes")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.replay:
        replay(arguments.replay)
        return 0
    failed = False
    for name in arguments.kinds:
        began = time.monotonic()
        report = campaign(name, arguments.count, arguments.seed, arguments.out.resolve(), arguments.jobs)
        print(f"{name}, seed {arguments.seed}, {time.monotonic() - began:.0f} s: {report.table()}", flush=True)
        failed |= bool(report.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
