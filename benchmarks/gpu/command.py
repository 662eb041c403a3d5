"""What the commands on a GPU share: their options, where packages come from, and how they run their checks."""

from __future__ import annotations

import argparse
import atexit
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu.runner import Check

ROOT = Path(__file__).parents[2]
_WHEELS = ROOT / ".gpu-wheels"


def add_paths(wheels: Path) -> None:
    """Make the sources of this working tree importable, and of the packages in wheels those that the machine lacks."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "tests")]
    lacking = [wheel for wheel in sorted(wheels.glob("*.whl")) if not _is_installed(wheel.name.partition("-")[0])]
    if lacking:
        unpacked = tempfile.TemporaryDirectory(prefix="lmworks-wheels-")
        atexit.register(unpacked.cleanup)
        for wheel in lacking:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(unpacked.name)
        sys.path.append(unpacked.name)


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def main(name: str, about: str | None, checks: Callable[[], Sequence[Check]]) -> None:
    """Run the command `name` with the options of this process. `checks`: called once packages can be imported."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu" / f"{name}.jsonl")
    parser.add_argument("--toy", action="store_true", help="small sizes, which a CPU does in a minute; otherwise those of a GPU with 80 GB")
    parser.add_argument("--only", nargs="*", default=[], help="names of checks")
    parser.add_argument("--seconds", type=float, default=570, help="none begins after this time")
    parser.add_argument("--wheels", type=Path, default=_WHEELS, help="packages that the machine lacks (`make gpu-wheels`)")
    options = parser.parse_args()
    add_paths(options.wheels)
    import lmworks  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)
    import torch

    if not options.toy and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here; --toy runs every check at a small size on the CPU")
    from gpu.runner import Report, run

    known = checks()
    if unknown := set(options.only) - {check.name for check in known}:
        parser.error(f"there is no check {', '.join(sorted(unknown))}; there are: {', '.join(check.name for check in known)}")
    chosen = [check for check in known if not options.only or check.name in options.only]
    failed = run(chosen, Report(options.out), options.toy, options.seconds)
    passed = f"{len(chosen) - len(failed)} of {len(chosen)} checks passed"
    print(passed + (f"; not: {', '.join(failed)}" if failed else ""), file=sys.stderr)
    sys.exit(bool(failed))
