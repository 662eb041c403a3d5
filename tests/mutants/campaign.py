"""Plants mistakes one at a time and records which fast test finds each: `make mutants`, and with SLICE=K/N one of N pieces.

python tests/mutants/campaign.py [--slice K/N] [--only TEXT] [--sampled TARGET ...] plants the declared mutants (`rooms/`) or those that
cosmic-ray makes of a target's modules (`sampled.py`). First those tests run that a declaration names, and then those of the room or target
that run a changed line, the cheapest first, until one fails that passes without the mistake, or until they have taken much longer than
without it. For a few mistakes nobody finds out which lines they run, and all tests of the room do. What was recorded with the same module
and tests is not repeated. Mutants that change nothing that can be observed are declared in `equivalent.py` and not counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist, median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `import lmworks` sets it, which comes after torch here
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from mutants.equivalent import is_equivalent
from mutants.held import Held, Outcome, temporary_folder
from mutants.lines import Coverage, digest
from mutants.mutant import ROOT, Mutant, declared
from mutants.sampled import TARGETS, sample
from mutants.tracing import Traced
from mutants.workspace import Workspace

_TURN = 30  # mistakes of one room or target before the next has its share
_SLOWER, _MORE = 5.0, 5.0  # a test may take so many times its processor time without the mistake, and so many seconds more
_FEW = 3  # mistakes for which running all tests costs less than finding out which lines they run
_ONLY_NAMED = "passed those named"  # the others have not run
_NAMED = 120.0  # seconds of a processor for a test of which nothing is known


@dataclass(frozen=True)
class Planted:
    """A mistake: a module, named from the root of the repository, with its contents without and with it."""

    name: str
    group: str  # room or target
    module: str
    before: str
    after: str
    named: tuple[str, ...] = ()  # files of tests, or FILE::NAME, that are to find it

    def key(self) -> str:
        return hashlib.sha256("\0".join([self.name, self.module, self.before, self.after]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Group:
    """The mistakes of a room or target, and the files of tests that are to find them."""

    name: str
    mistakes: list[Planted]
    modules: tuple[str, ...]
    tests: tuple[str, ...]


@dataclass
class Record:
    key: str  # of the mistake
    tests: str  # digest of the file of the test that found it, or of all that did not
    commit: str
    name: str
    group: str
    found: bool
    outcome: str
    test: str
    why: str
    seconds: float


def groups(targets: Sequence[str], count: int, seed: int, only: str) -> Iterator[Group]:
    """The mistakes that are asked for; of the declared ones those whose "ROOM: PROMISE" has `only`."""
    rooms: dict[str, list[Mutant]] = {}
    for mutant in declared() if not targets else ():
        if re.search(only, f"{mutant.room}: {mutant.promise}"):
            rooms.setdefault(mutant.room, []).append(mutant)
    for room, mutants in rooms.items():
        mistakes = []
        for one in mutants:
            before = one.path.read_text(encoding="utf-8")
            module, named = str(one.path.relative_to(ROOT)), tuple(one.test_paths[:-1])
            mistakes.append(Planted(one.promise, room, module, before, one.mutated(), named))
        yield Group(room, mistakes, _modules(mistakes), _files(path for one in mutants for path in one.test_paths))
    for target in targets:
        drawn = [Planted(one.name, target, one.path, one.source, one.mutated) for one in sample(target, count, seed)]
        yield Group(target, drawn, _modules(drawn), _files(TARGETS[target].tests))


def _modules(mistakes: Sequence[Planted]) -> tuple[str, ...]:
    return tuple(sorted({one.module for one in mistakes}))


def _files(tests: Iterable[str]) -> tuple[str, ...]:
    """The files of tests in some folders, files and tests (FILE::NAME)."""
    found: dict[str, None] = {}
    for path in (ROOT / one.partition("::")[0] for one in tests):
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            found[str(file.relative_to(ROOT))] = None
    return tuple(found)


def _digest(root: Path, group: Group, found_by: str) -> str:
    """Of the tests that a record depends on."""
    return digest(root, [found_by.partition("::")[0]] if found_by else group.tests)


class Campaign:
    def __init__(self, folder: Path, seconds: float, quick: bool = False) -> None:
        self.folder, self.seconds, self.quick = folder, seconds, quick
        described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, encoding="utf-8")
        self.commit = described.stdout.strip()
        self.results = folder / "results.jsonl"
        self.records: dict[str, Record] = {}
        if self.results.exists():
            rows = [json.loads(line) for line in self.results.read_text(encoding="utf-8").splitlines()]
            self.records = {row["key"]: Record(**row) for row in rows}
        self._sound: dict[str, bool] = {}

    def run(self, asked: Sequence[Group], until: float) -> list[Record]:
        left = {group.name: [one for one in group.mistakes if self._recorded(group, one) is None] for group in asked}
        count = sum(map(len, left.values()))
        print(f"{sum(len(group.mistakes) for group in asked)} mistakes, {count} of them to be planted", flush=True)
        with temporary_folder("mutants-") as folder:
            workspace = Workspace(ROOT, folder) if count else None
            while any(left.values()) and time.time() < until:
                for group in filter(lambda one: left[one.name], asked):
                    assert workspace is not None
                    turn, left[group.name] = left[group.name][:_TURN], left[group.name][_TURN:]
                    self._turn(workspace, group, turn, until)
        return [record for group in asked for one in group.mistakes if (record := self._recorded(group, one)) is not None]

    def _recorded(self, group: Group, one: Planted) -> Record | None:
        """What is known of a mistake with the same tests: of the file that found it, or of all."""
        record = self.records.get(one.key())
        if record is None or (record.outcome == _ONLY_NAMED and not self.quick):
            return None
        if record.test and not (ROOT / record.test.partition("::")[0]).is_file():
            return None
        return record if record.tests == _digest(ROOT, group, record.test if record.found else "") else None

    def _turn(self, workspace: Workspace, group: Group, mistakes: Sequence[Planted], until: float) -> None:
        for one, outcome in self._named(workspace, mistakes, until):
            self._keep(workspace, group, one, outcome)
        left = [one for one in mistakes if self._recorded(group, one) is None and not (self.quick and one.named)]
        if not left or time.time() > until:
            return
        kept = self.folder / "lines" / f"{group.name.replace('/', '-')}.json"
        coverage = Coverage(workspace, group.modules, group.tests, kept) if len(left) > _FEW else None
        with workspace.hold(group.tests) as held:
            for one in left:
                if time.time() > until:
                    break
                limits, imported = dict.fromkeys(held.tests, _NAMED), False
                if coverage is not None:
                    tests, imported = coverage.of(one.module, one.before, one.after)
                    limits = self._limits(tests)
                self._keep(workspace, group, one, self._plant(workspace, held, one, limits, imported))

    def _named(self, workspace: Workspace, mistakes: Sequence[Planted], until: float) -> Iterator[tuple[Planted, Outcome]]:
        """Those that the tests find that are named for them; with `quick` also those that they do not find."""
        named = [one for one in mistakes if one.named]
        if not named:
            return
        with workspace.hold(_files(name for one in named for name in one.named)) as held:
            for one in named:
                if time.time() > until:
                    break
                tests = dict.fromkeys((test for name in one.named for test in held.tests if _is_in(test, name)), _NAMED)
                outcome = self._plant(workspace, held, one, tests, imported=False)
                if outcome.found:
                    yield one, outcome
                elif self.quick:
                    yield one, replace(outcome, outcome=_ONLY_NAMED)

    def _limits(self, tests: Mapping[str, Traced]) -> dict[str, float]:
        """How much each test may take, of those that all together take at most `seconds` without the mistake, or one alone."""
        limits: dict[str, float] = {}
        spent, made = 0.0, set[str]()
        for name, test in tests.items():
            spent += test.seconds + sum(cost for fixture, cost in test.fixtures.items() if fixture not in made)
            made |= {*test.fixtures}
            if limits and spent > self.seconds:
                break
            limits[name] = _SLOWER * (test.seconds + sum(test.fixtures.values())) + _MORE
        return limits

    def _plant(self, workspace: Workspace, held: Held, one: Planted, tests: Mapping[str, float], imported: bool) -> Outcome:
        """The outcome of the first test that fails because of a mistake. Each may take so many seconds of a processor."""
        left = dict(tests)
        outcome = Outcome("no test runs it", "", "")
        seconds = 0.0
        while left:
            with workspace.changed({one.module: one.after}):
                outcome = Outcome("not planted", "", "") if imported else held.run(left, {one.module: (one.before, one.after)})
                if outcome.outcome == "not planted":
                    with workspace.hold([*dict.fromkeys(name.partition("::")[0] for name in left)]) as changed:
                        outcome = changed.run(left)
            seconds += outcome.seconds
            if outcome.test not in left or self._passes(held, outcome.test, left[outcome.test]):
                break
            left = dict([*left.items()][[*left].index(outcome.test) + 1 :])  # it fails without the mistake, too: go on behind it
            outcome = Outcome("passed", "", "")
        return replace(outcome, seconds=round(seconds, 2))

    def _passes(self, held: Held, test: str, seconds: float) -> bool:
        """Whether a test passes with the sources as they are."""
        if test not in self._sound:
            sound = held.run({test: seconds})
            self._sound[test] = sound.outcome == "passed"
            if not self._sound[test]:
                print(f"    {sound.outcome} without a mistake, too: {test} {sound.why}", flush=True)
        return self._sound[test]

    def _keep(self, workspace: Workspace, group: Group, one: Planted, outcome: Outcome) -> None:
        tests = _digest(workspace.path, group, outcome.test if outcome.found else "")
        record = Record(one.key(), tests, self.commit, one.name, group.name, outcome.found, **asdict(outcome))
        said = f"found by {record.test}" if record.found else f"SURVIVED ({record.outcome})"
        print(f"{record.seconds:6.1f} s  {one.group}: {one.name}: {said} {record.why[:80]}", flush=True)
        self.records[record.key] = record
        self.results.parent.mkdir(parents=True, exist_ok=True)
        with open(self.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")


def _is_in(test: str, name: str) -> bool:
    """Whether a test is of a file, or a case of FILE::NAME."""
    return test == name or test.startswith((f"{name}::", f"{name}["))


def wilson(found: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson, 1927)."""
    z = NormalDist().inv_cdf(0.975)
    center, spread = found + z * z / 2, z * (found * (count - found) / count + z * z / 4) ** 0.5
    return (center - spread) / (count + z * z), (center + spread) / (count + z * z)


def table(records: Sequence[Record], equivalent: Collection[str]) -> Iterator[str]:
    """`equivalent` are the keys of mistakes that no test can find."""
    yield "| room | planted | equivalent | found | of these by time | share found (95%) | median seconds |"
    yield "|---|---|---|---|---|---|---|"
    groups: dict[str, list[Record]] = {}
    for one in sorted(records, key=lambda record: record.group):
        groups.setdefault(one.group, []).append(one)
    for name, planted in [*groups.items(), *([("all", list(records))] if len(groups) > 1 else [])]:
        ones = [one for one in planted if one.found or one.key not in equivalent]
        found = sum(one.found for one in ones)
        low, high = wilson(found, len(ones)) if ones else (0.0, 1.0)
        share = f"{found / max(len(ones), 1):.3f} ({low:.3f} to {high:.3f})"
        late, seconds = sum(one.outcome == "timed out" for one in ones), median(one.seconds for one in planted)
        yield f"| {name} | {len(planted)} | {len(planted) - len(ones)} | {found} | {late} | {share} | {seconds:.1f} |"
    for one in records:
        if not one.found and one.key not in equivalent:
            yield f"- {one.group}: {one.name} ({one.outcome})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", help="K/N: each Nth mistake")
    parser.add_argument("--only", default="", help="a regular expression, in ROOM: PROMISE")
    parser.add_argument("--sampled", nargs="*", default=[], choices=[*TARGETS, "all"], help="mutants of cosmic-ray, not declared ones")
    parser.add_argument("--count", type=int, default=300, help="of each target that is sampled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="processor time that the tests of one mistake take without it, at most")
    parser.add_argument("--quick", action="store_true", help="only the tests that a declaration names, where it names some")
    parser.add_argument("--until", type=float, default=float("inf"), help="begin none after this time, in seconds since 1970")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "mutants", help="of results and of the lines that tests run")
    options = parser.parse_args()
    asked = [*groups([*TARGETS] if "all" in options.sampled else options.sampled, options.count, options.seed, options.only)]
    number, pieces = map(int, (options.slice or "0/1").split("/"))
    for group in asked:
        group.mistakes[:] = [one for one in group.mistakes if re.search(options.only, f"{one.group}: {one.name}")]
        group.mistakes[:] = group.mistakes[number % pieces :: pieces]
    first = number % max(len(asked), 1)  # so that the time is over in another room each time
    asked = [*asked[first:], *asked[:first]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of the tests end with this one
    records = Campaign(options.folder, options.seconds, options.quick).run(asked, options.until)
    equivalent = {one.key() for group in asked for one in group.mistakes if is_equivalent(one.module, one.before, one.after)}
    print("\n".join(table(records, equivalent)))
    sys.exit(any(not one.found for one in records) and not options.sampled)


if __name__ == "__main__":
    main()
