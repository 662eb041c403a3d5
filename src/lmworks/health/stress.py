"""A stress test: matrix products on every core and every GPU at once. Each gives the same bits twice, and about the speed of the others.

`python -m lmworks.health.stress SECONDS` measures and prints JSON; `stress` starts it, so that it has its own threads, and judges.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from typing import Any

from lmworks.health.node import Node
from lmworks.health.report import Result
from lmworks.host import machine

_SIZE, _GPU_SIZE = 512, 8192
_CORE_FLOOR, _GPU_FLOOR = 0.5, 0.8  # of the median; cores differ by design in some processors, GPUs of one node do not
_ENDS = 30.0  # seconds more than the measurement: the imports, the allocations


def stress(node: Node, seconds: float) -> Result:
    """Run the stress test for `seconds`, and judge it."""
    code, text = node.run((sys.executable, "-P", "-m", "lmworks.health.stress", str(seconds)), seconds + _ENDS, "stress")
    try:
        return judge(json.loads(text))
    except (ValueError, KeyError, TypeError):
        return Result(
            "unknown", f"the stress test ended with code {code} and no measurement", "run it alone: python -m lmworks.health.stress 5"
        )


def judge(found: list[dict[str, Any]]) -> Result:
    """The result of measurements: name, kind (model of the device), flops, equal (its first bits again), digest."""
    wrong = [f"{one['name']} computed other bits the second time" for one in found if not one["equal"]]
    slow, texts = [], []
    figures = dict[str, float]()
    for kind in sorted({str(one["kind"]) for one in found}):
        alike = [one for one in found if one["kind"] == kind]
        usual = Counter(one["digest"] for one in alike).most_common(1)[0]
        if usual[1] > len(alike) / 2:
            wrong += [
                f"{one['name']} computed other bits than the other {kind}" for one in alike if one["digest"] != usual[0] and one["equal"]
            ]
        middle = statistics.median(one["flops"] for one in alike)
        floor = (_CORE_FLOOR if kind == "core" else _GPU_FLOOR) * middle
        slow += [f"{one['name']} has {one['flops'] / middle:.0%} of the median speed" for one in alike if one["flops"] < floor]
        figures |= {f"{kind}/median_flops": middle, f"{kind}/lowest_flops": min(one["flops"] for one in alike)}
        texts.append(f"{len(alike)} x {kind}: {middle / 1e9:,.0f} GFLOP/s, the slowest {min(one['flops'] for one in alike) / middle:.0%}")
    if wrong:
        return Result("fail", "; ".join(wrong + slow), "drain the node: its results cannot be trusted", figures)
    if slow:
        return Result("fail", "; ".join(slow), "check cooling, power and clocks of the node", figures)
    return Result("ok", "; ".join(texts) + ", same bits twice", figures=figures)


def measure(seconds: float) -> list[dict[str, Any]]:
    """Measure all cores that this process may use, then all GPUs, for `seconds` each."""
    return [*_cores(seconds), *_gpus(seconds)]


def _cores(seconds: float) -> list[dict[str, Any]]:
    """A process on each core. Its speed refers to its processor time, so other programs on the core do not make it slow."""
    readers = []
    for cpu in sorted(machine.processors()) or [0]:
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                if machine.processors():
                    machine.pin([cpu])
                os.write(writing, json.dumps({"name": f"core {cpu}", "kind": "core", **_core(seconds)}).encode())
            finally:
                os._exit(0)
        os.close(writing)
        readers.append(reading)
    found = []
    for reading in readers:
        with open(reading, "rb") as handle:
            found.append(json.loads(handle.read()))
        os.wait()
    return found


def _core(seconds: float) -> dict[str, Any]:
    import numpy as np

    draw = np.random.default_rng(0)
    left, right = (draw.standard_normal((_SIZE, _SIZE), dtype=np.float32) for _ in range(2))
    first, equal, count = left @ right, True, 0
    began, until = time.thread_time(), time.monotonic() + seconds
    while time.monotonic() < until or not count:
        equal = equal and np.array_equal(left @ right, first)
        count += 1
    took = max(time.thread_time() - began, 1e-9)
    return {"flops": 2 * _SIZE**3 * count / took, "equal": bool(equal), "digest": hashlib.sha256(first.tobytes()).hexdigest()[:16]}


def _gpus(seconds: float) -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    draw = torch.Generator().manual_seed(0)
    square = torch.randn(_GPU_SIZE, _GPU_SIZE, generator=draw)
    work: list[tuple[Any, ...]] = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            left = square.to(index, torch.bfloat16)
            work.append((left, left @ left, torch.empty_like(left), *(torch.cuda.Event(enable_timing=True) for _ in range(2))))
    counts = [0 for _ in work]
    until = time.monotonic() + seconds
    for index, (*_, begin, _) in enumerate(work):
        with torch.cuda.device(index):
            torch.cuda.synchronize()
            begin.record()
    while time.monotonic() < until or not all(counts):
        for index, (left, _, out, *_) in enumerate(work):  # all at once, as in training: power and cooling are shared
            with torch.cuda.device(index):
                for _ in range(8):
                    torch.mm(left, left, out=out)
                counts[index] += 8
        for index in range(len(work)):
            torch.cuda.synchronize(index)
    found = []
    for index, (_, first, out, begin, end) in enumerate(work):
        with torch.cuda.device(index):
            end.record()
            torch.cuda.synchronize()
            digest = int(first.view(torch.int16).sum(dtype=torch.int64))
            rate = 2 * _GPU_SIZE**3 * counts[index] / (begin.elapsed_time(end) / 1000)
            name = torch.cuda.get_device_name(index)
            found.append(
                {"name": f"GPU {index}", "kind": name, "flops": rate, "equal": bool(torch.equal(first, out)), "digest": str(digest)}
            )
    return found


if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    print(json.dumps(measure(float(sys.argv[1]))))
