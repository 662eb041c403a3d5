"""`lmworks ladder curve`: a real run predicts its own curve, and that of another schedule."""

from __future__ import annotations

import json

import pytest
from command import Lmworks

from lmworks.io import jsonl
from tiny_run import Tiny

PHASE = (
    "{name: general, tokens: 10240 tokens, mixture: {code: 0.7, docs: 0.3}, sequence_length: 32 tokens, "
    "global_batch_tokens: 256 tokens, lr_schedule: {kind: linear, warmup: 2 steps, min_lr_ratio: 0.1}}"
)


def test_a_run_predicts_the_curve_of_another_schedule(lmworks: Lmworks, tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.ladder.curve.BOOTSTRAPS", 3)
    run_dir = tiny_copy.run_dir
    tiny_copy.walk("model.moe=null", "tune=null", "train.validate_every=3 steps", f"train.phases=[{PHASE}]", last="pretrain")
    lines = [line for line in jsonl.read(run_dir / "metrics.jsonl") if "validation/bits_per_byte" in line]

    own = lmworks("ladder", "curve", run_dir, "--json")
    assert own.code == 0, own.err
    found = json.loads(own.out)
    (fitted,) = found["runs"]
    assert fitted["measured"] == lines[-1]["validation/bits_per_byte"] and fitted["validations"] == 14 and fitted["tokens"] == 10240
    assert fitted["fitted"] == pytest.approx(fitted["measured"], rel=0.05) and found["residual"] < 0.05
    assert [point["step"] for point in found["points"]] == [line["step"] for line in lines if line["step"] > 2]
    rates = [line["optim/learning_rate"] / 0.01 for line in lines if line["step"] > 2]
    assert [point["lr_factor"] for point in found["points"]] == pytest.approx(rates), "the schedule is that of the training loop"
    assert found["points"][-1]["predicted"] == pytest.approx(fitted["fitted"])

    change = ["--set", "train.phases.general.lr_schedule.kind=constant", "--set", "train.phases.general.tokens=5120 tokens"]
    end = json.loads(lmworks("ladder", "curve", run_dir, "--for", run_dir, *change, "--json").out)["points"][-1]
    assert end["step"] == 20 and end["lr_factor"] == 1 and end["low"] <= end["high"] and end["predicted"] > fitted["fitted"]
    table = lmworks("ladder", "curve", run_dir, *change)
    assert table.code == 0 and f"{end['predicted']:.4f}" in table.out and "5,120" in table.out

    refused = lmworks("ladder", "curve", run_dir, "--set", "train.phases.general.global_batch_tokens=512 tokens").error
    assert "global_batch_tokens (256 tokens -> 512 tokens)" in refused
