"""The first command on a GPU: ten checks in ten minutes, JSON after every line, stopping at nothing.

    python benchmarks/gpu/first.py [--out FILE] [--toy] [--only NAME ...] [--seconds 570] [--wheels FOLDER]

`--toy`: small sizes, which a CPU does in a minute; sizes are those of a GPU with 80 GB otherwise. Nothing is downloaded: packages that the
machine lacks are read from wheels (`make gpu-wheels`). Exit code 1 if a check failed or did not begin.
"""

from __future__ import annotations

import argparse
import atexit
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]


def add_paths(wheels: Path) -> None:
    """Make the sources of this working tree importable, and of the packages in wheels those that the machine lacks."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu" / "first.jsonl")
    parser.add_argument("--toy", action="store_true", help="small sizes")
    parser.add_argument("--only", nargs="*", default=[], help="names of checks")
    parser.add_argument("--seconds", type=float, default=570, help="none begins after this time")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".gpu-wheels")
    options = parser.parse_args()
    add_paths(options.wheels)
    import lmworks  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)
    import torch

    if not options.toy and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here; --toy runs every check at a small size on the CPU")
    from gpu.runner import Check, Report, run

    from gpu import soundness, speed

    checks = [
        Check("versions", soundness.versions, 60),
        Check("first steps", soundness.first_steps, 120),
        Check("host waits", soundness.host_waits, 60),
        Check("against cpu", soundness.against_cpu, 60),
        Check("attention", speed.attention, 90),
        Check("grouped products", soundness.grouped_products, 30),
        Check("products", speed.products, 40),
        Check("8b shapes", speed.eight_layers_of_8b, 120),
        Check("decode", speed.decode, 60),
        Check("resume", soundness.resume, 180),
    ]
    if unknown := set(options.only) - {check.name for check in checks}:
        parser.error(f"there is no check {', '.join(sorted(unknown))}; there are: {', '.join(check.name for check in checks)}")
    chosen = [check for check in checks if not options.only or check.name in options.only]
    failed = run(chosen, Report(options.out), options.toy, options.seconds)
    passed = f"{len(chosen) - len(failed)} of {len(chosen)} checks passed"
    print(passed + (f"; not: {', '.join(failed)}" if failed else ""), file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
