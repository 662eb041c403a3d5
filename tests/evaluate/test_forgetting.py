"""What counts as forgotten."""

from __future__ import annotations

from typing import Any

from lmworks.evaluate.records import forgetting, sentence


def _row(difference: float, verdict: str, **more: Any) -> dict[str, Any]:
    interval = [difference - 0.01, difference + 0.01]
    row = {"a": 1.0, "b": 1.0 + difference, "difference": difference, "interval": interval, "adjusted_p": 0.01, "n": 9}
    return row | {"verdict": verdict} | more


def test_only_what_is_shown_to_be_worse_is_forgotten() -> None:
    comparison = {
        "bits_per_byte": [_row(0.2, "worse", domain="docs"), _row(-0.1, "better", domain="code")],
        "scores": [_row(-0.3, "worse", score="arc/cloze/0-shot"), _row(-0.2, "no difference shown", score="piqa/cloze/0-shot")],
    }
    found = forgetting(comparison, "tuned")
    assert found["forgotten"] == ["bits per byte, docs", "arc/cloze/0-shot"]
    assert sentence(found) == (
        "Forgotten since the base model (tuned minus base, 95% interval): bits per byte, docs +0.200 [+0.190, +0.210]; "
        "arc/cloze/0-shot -0.300 [-0.310, -0.290]."
    )
    kept = forgetting({"bits_per_byte": comparison["bits_per_byte"][1:], "scores": comparison["scores"][1:]}, "tuned")
    assert sentence(kept) == "Nothing is shown to be forgotten: bits per byte, code -0.100 [-0.110, -0.090] and 1 more measures."
    assert sentence(forgetting({"bits_per_byte": [], "scores": []}, "tuned")).startswith("Nothing was measured")
