"""The cheap rules of the doctor during training: every few minutes, in a process of its own at low priority, and findings in the ledger.

A process, because parsing the records takes up to a second of Python, in which the training loop could not launch its next operation, and
because no error in a rule may end a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from lmworks.io.run_layout import of_stage

FINDING = "finding"
_TIMEOUT = 120.0  # seconds for one diagnosis; it takes up to 2, and a file system may hang
_ENDS = 5.0  # seconds that a run waits at its end for a diagnosis under way


class PeriodicDiagnosis:
    """Within the block, diagnose a stage every `seconds` (never if None), and report each cause once, as
    `report("finding", stage=..., step=..., code=..., sentence=...)`. Causes that are not sure, and notes, are left to `lmworks doctor`."""

    def __init__(self, run_dir: Path, stage: str, seconds: float | None, report: Callable[..., None]) -> None:
        self._command = [sys.executable, "-P", "-m", __name__, str(Path(run_dir).absolute()), stage]
        self._stage, self._seconds, self._report = stage, seconds, report
        self._done, self._known = threading.Event(), set[str]()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._repeat, daemon=True, name="diagnosis")

    def __enter__(self) -> Self:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            if (process := self._process) is not None:
                process.kill()
            self._thread.join(_ENDS)

    def _repeat(self) -> None:
        assert self._seconds is not None
        while not self._done.wait(self._seconds):
            for found in self._diagnose():
                if isinstance(found, dict) and isinstance(code := found.get("code"), str) and code not in self._known:
                    self._known.add(code)
                    steps = found.get("steps") or [None]
                    self._report(FINDING, stage=self._stage, step=steps[-1], code=code, sentence=found.get("sentence"))

    def _diagnose(self) -> list[Any]:
        """The problems that are sure; none if the process fails."""
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            with self._process as process:  # whose end the block waits for
                try:
                    out, _ = process.communicate(timeout=_TIMEOUT)
                finally:
                    process.kill()
            found = json.loads(out)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return []
        finally:
            self._process = None
        return found if isinstance(found, list) else []


def main(run_dir: str, stage: str) -> None:
    """Print the problems of a stage as JSON. Without the parts of lmworks that import torch, which would take longer than the diagnosis."""
    from lmworks.watch.diagnosis import all_rules, diagnose
    from lmworks.watch.evidence import Evidence
    from lmworks.watch.rule import as_json
    from lmworks.watch.run_files import FolderFiles

    os.nice(19)
    evidence = Evidence(FolderFiles(Path(run_dir)), of_stage(stage))
    found = diagnose(evidence, [rule for rule in all_rules().values() if rule.cheap])
    print(json.dumps([as_json(one) for one in found.problems]))


if __name__ == "__main__":
    main(*sys.argv[1:])
