"""Plants mistakes one at a time and records which fast test finds each: `make mutants`, and with SLICE=K/N one of N pieces.

python tests/mutants/campaign.py [--slice K/N] [--only TEXT] [--sampled TARGET ...] plants the declared mutants (`rooms/`) or those that
cosmic-ray makes of a target's modules (`sampled.py`). What was recorded under the same sources and tests is not repeated. A mistake counts
as found if a test fails that passes without it.
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
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import NormalDist, median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `import lmworks` sets it, which comes after torch here
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from mutants.mutant import ROOT, declared
from mutants.sampled import TARGETS, sample
from mutants.workspace import Outcome, Workspace

_QUICK = " quick"  # behind the key of a mistake that the tests named first did not find


@dataclass(frozen=True)
class Planted:
    """A mistake and the tests that are to find it."""

    name: str
    group: str  # room or target
    files: dict[str, str]  # contents by name
    tests: tuple[str, ...]


@dataclass
class Record:
    key: str  # of the mistake, all sources and the tests
    commit: str
    name: str
    group: str
    found: bool
    outcome: str
    test: str
    why: str
    seconds: float


def planted(targets: Sequence[str], count: int, seed: int) -> Iterator[Planted]:
    """The mistakes that are asked for, of each room or target in turn, so that each has its share whenever the time is over."""
    groups: dict[str, list[Planted]] = {}
    for one in declared() if not targets else ():
        files = {str(one.path.relative_to(ROOT)): one.mutated()}
        groups.setdefault(one.room, []).append(Planted(one.promise, one.room, files, tuple(one.test_paths)))
    for target in targets:
        tests = TARGETS[target].tests
        groups[target] = [Planted(one.name, target, {one.path: one.mutated}, tests) for one in sample(target, count, seed)]
    for turn in zip_longest(*groups.values()):
        yield from filter(None, turn)


class Keys:
    """Names what a record depends on: the sources, the mistake, the tests, and what all tests use."""

    def __init__(self) -> None:
        shared = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").glob("*.py")]
        self._digests: dict[str, str] = {"": self._digest(shared)}

    def of(self, one: Planted) -> str:
        parts = [self._digests[""], one.name, json.dumps(one.files, sort_keys=True), *map(self._tests, one.tests)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def _tests(self, path: str) -> str:
        if path not in self._digests:
            whole = ROOT / path.partition("::")[0]
            self._digests[path] = self._digest(sorted(whole.rglob("*.py")) if whole.is_dir() else [whole])
        return path + self._digests[path]

    @staticmethod
    def _digest(paths: Sequence[Path]) -> str:
        digest = hashlib.sha256()
        for path in sorted(paths):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()


class Campaign:
    def __init__(self, results: Path, seconds: float, quick: bool = False) -> None:
        self.results, self.seconds, self.quick = results, seconds, quick
        described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, encoding="utf-8")
        self.commit = described.stdout.strip()
        self.records: dict[str, Record] = {}
        if results.exists():
            rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
            self.records = {row["key"]: Record(**row) for row in rows}
        self._sound: dict[str, Outcome] = {}

    def run(self, mistakes: Sequence[Planted], until: float) -> list[Record]:
        keys = Keys()
        todo = [(keys.of(one), one) for one in mistakes]
        left = [(key, one) for key, one in todo if self._recorded(key) is None]
        print(f"{len(todo)} mistakes, {len(todo) - len(left)} of them recorded before", flush=True)
        began = time.time()
        with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
            workspace = Workspace(ROOT, Path(folder)) if left else None
            for number, (key, one) in enumerate(left):
                if time.time() > until:
                    break
                assert workspace is not None
                record = self._plant(workspace, key, one)
                self._keep(record)
                spent = time.time() - began
                remain = spent / (number + 1) * (len(left) - number - 1)
                said = f"found by {record.test}" if record.found else f"SURVIVED ({record.outcome}) {record.why}"
                print(f"{number + 1}/{len(left)} {record.seconds:6.1f} s  {one.group}: {one.name}\n    {said}"
                      f"  [{spent / 60:.1f} min, some {remain / 60:.1f} min left]", flush=True)  # fmt: skip
        return [record for key, _ in todo if (record := self._recorded(key)) is not None]

    def _recorded(self, key: str) -> Record | None:
        """What is known of a mistake: by all of its tests, or with `quick` by those named first."""
        return self.records.get(key) or (self.records.get(key + _QUICK) if self.quick else None)

    def _plant(self, workspace: Workspace, key: str, one: Planted) -> Record:
        with workspace.changed(one.files):
            outcome = workspace.run(one.tests[:-1] or one.tests if self.quick else one.tests, self.seconds)
        found = outcome.outcome == "failed"
        if found:
            sound = self._without(workspace, outcome.test)
            if sound.outcome != "passed":
                outcome = Outcome("fails without it", outcome.test, sound.why, outcome.seconds)
                found = False
        key += "" if found or not self.quick else _QUICK
        return Record(key, self.commit, one.name, one.group, found, outcome.outcome, outcome.test, outcome.why, outcome.seconds)

    def _without(self, workspace: Workspace, test: str) -> Outcome:
        """What a test says of the sources as they are."""
        if test not in self._sound:
            self._sound[test] = workspace.run([test], self.seconds)
        return self._sound[test]

    def _keep(self, record: Record) -> None:
        self.records[record.key] = record
        self.results.parent.mkdir(parents=True, exist_ok=True)
        with open(self.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")


def wilson(found: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson, 1927)."""
    z = NormalDist().inv_cdf(0.975)
    center, spread = found + z * z / 2, z * (found * (count - found) / count + z * z / 4) ** 0.5
    return (center - spread) / (count + z * z), (center + spread) / (count + z * z)


def table(records: Sequence[Record]) -> Iterator[str]:
    yield "| room | planted | found | share found (95%) | median seconds |"
    yield "|---|---|---|---|---|"
    groups: dict[str, list[Record]] = {}
    for one in sorted(records, key=lambda record: record.group):
        groups.setdefault(one.group, []).append(one)
    for name, ones in [*groups.items(), *([("all", list(records))] if len(groups) > 1 else [])]:
        found = sum(one.found for one in ones)
        low, high = wilson(found, len(ones))
        share, seconds = f"{found / len(ones):.2f} ({low:.2f} to {high:.2f})", median(one.seconds for one in ones)
        yield f"| {name} | {len(ones)} | {found} | {share} | {seconds:.1f} |"
    for one in records:
        if not one.found:
            yield f"- {one.group}: {one.name} ({one.outcome})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", help="K/N: each Nth mistake")
    parser.add_argument("--only", help="a regular expression, in ROOM: PROMISE")
    parser.add_argument("--sampled", nargs="*", default=[], choices=[*TARGETS, "all"], help="mutants of cosmic-ray, not declared ones")
    parser.add_argument("--count", type=int, default=300, help="of each target that is sampled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=900, help="time limit of the tests of one mistake")
    parser.add_argument("--quick", action="store_true", help="only the tests that are named first")
    parser.add_argument("--until", type=float, default=float("inf"), help="begin none after this time, in seconds since 1970")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants" / "results.jsonl")
    options = parser.parse_args()
    mistakes = list(planted([*TARGETS] if "all" in options.sampled else options.sampled, options.count, options.seed))
    if options.only:
        mistakes = [one for one in mistakes if re.search(options.only, f"{one.group}: {one.name}")]
    if options.slice:
        number, pieces = map(int, options.slice.split("/"))
        mistakes = mistakes[number % pieces :: pieces]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of the tests end with this one
    records = Campaign(options.results, options.seconds, options.quick).run(mistakes, options.until)
    print("\n".join(table(records)))
    sys.exit(any(not one.found for one in records) and not options.sampled)


if __name__ == "__main__":
    main()
