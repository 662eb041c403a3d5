"""The page of quantized forms: what is said of those that passed is said of them alone."""

from __future__ import annotations

from typing import Any

from lmworks.pages.model_pages import _tiles


def result(scheme: str, verdict: str, size: int, kl: float) -> dict[str, Any]:
    return {"scheme": scheme, "verdict": verdict, "bytes": size, "agreement": {"kl_mean": kl}}


def test_only_forms_that_passed_are_the_smallest_and_the_closest() -> None:
    results = [result("q2", "failed", 10**6, 0.5), result("q4", "passed", 2 * 10**6, 0.02), result("q8", "passed", 4 * 10**6, 0.001),
               result("fp8", "failed", 4 * 10**6, 1e-9)]  # fmt: skip
    tiles = {label: (value, under) for label, value, under in _tiles({"results": results, "original_bytes": 8 * 10**6, "dtype": "bf16"})}
    assert tiles["passed"] == ("2", "of 4 results")
    assert tiles["smallest that passed"] == ("2 MB", "q4")
    assert tiles["closest to the original"] == ("0.001", "nats per token, q8")
    none = [label for label, _, _ in _tiles({"results": results[:1], "original_bytes": 8 * 10**6, "dtype": "bf16"})]
    assert none == ["passed", "original"]
