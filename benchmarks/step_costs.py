"""What a training step asks of a GPU, counted without one: host waits, copies to the device, operators, and the bytes that they move.

    python benchmarks/step_costs.py [--record]

Steps of small models are traced operator by operator on fake CUDA tensors (tests/gpu), eagerly, with one micro-batch: compiled layers
launch fewer kernels. The bytes are those of all inputs and outputs of an operator. `--record` writes the figures to
tests/recorded/step_costs.json, above which they must not rise. It needs a C++ compiler and a torch that was built without CUDA.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "gpu")]

from step_cases import ALONE, FIGURES, RANKS, torch_version  # noqa: E402

from fake_cuda import FakeCuda, missing  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the figures that a test compares with")
    options = parser.parse_args()
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder:
        found = FakeCuda.build(Path(folder)).run("traced_steps:steps", cases=ALONE | RANKS)
    print(f"{'step':24} {'waits':>6} {'copies':>7} {'operators':>10} {'MB moved':>9}")
    for name, report in found.items():
        waits, copies = sum(report["waits"].values()), sum(report["to_device"].values())
        print(f"{name:24} {waits:6} {copies:7} {report['operators']:10,} {report['bytes'] / 1e6:9.2f}")
    if options.record:
        figures = {name: {key: report[key] for key in ("operators", "bytes")} for name, report in found.items()}
        FIGURES.write_text(json.dumps({"torch": torch_version(), "steps": figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
