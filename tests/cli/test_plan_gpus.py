"""`lmworks plan` with GPUs by name, and with too little memory."""

from __future__ import annotations

import json

from command import Lmworks


def test_a_plan_for_a_consumer_gpu(lmworks: Lmworks) -> None:
    assert "1 x RTX4090, 22.4 GiB, 165.2 dense bf16 TFLOPS each" in lmworks("plan", "dense-125m", "--cluster", "1xrtx4090").out


def test_a_plan_that_does_not_fit_is_printed_with_the_shortage(lmworks: Lmworks) -> None:
    found = lmworks("plan", "smollm3-3b", "--cluster", "2-cores")
    assert found.code == 2
    assert "optimizer state" in found.out
    assert "needs 71.4 GiB on a device of 16" in found.error
    assert "it fits with --cluster 1xh100: one device" in found.error
    assert "CPU" not in found.error
    plan = json.loads(lmworks("plan", "smollm3-3b", "--cluster", "2-cores", "--json").out)
    assert len(plan["shortages"]) == len(plan["phases"])
