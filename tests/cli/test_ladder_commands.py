"""`lmworks ladder`: a law is fitted to real runs, its prediction is older than the run, and the record cannot be changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Lmworks

from lmworks.plan.loss_law import load_law
from tiny_run import Tiny

WIDTHS = (16, 64, 256)
TOKENS = (2048, 4096, 8192)
RUNS = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2)]
PHASE = (
    "{{name: general, tokens: {tokens} tokens, mixture: {{code: 0.7, docs: 0.3}}, sequence_length: 32 tokens, "
    "global_batch_size: 256 tokens, lr_schedule: {{kind: linear, warmup: 2 steps, min_lr_ratio: {end}}}}}"
)


def words(run_dir: Path, width: int, tokens: int, end: float = 0.0) -> list[str]:
    sets = (
        f"run_dir={run_dir}", "model.moe=null", f"model.intermediate_size={width}", "tune=null", "train.validate_every=100%",
        "train.sample_every=100%", "train.save_every=100%", f"train.phases=[{PHASE.format(tokens=tokens, end=end)}]",
    )  # fmt: skip
    return [word for one in sets for word in ("--set", one)]


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six finished runs of three sizes and three horizons, on one corpus."""
    made = []
    for width, tokens in RUNS:
        run_dir = tiny.copy(tmp_path_factory.mktemp("ladder") / "run").run_dir
        overrides = words(run_dir, WIDTHS[width], TOKENS[tokens])[1::2]
        tiny.walk(*overrides, last="pretrain")
        made.append(run_dir)
    return made


def test_a_prediction_is_older_than_its_run_and_is_scored_afterwards(
    lmworks: Lmworks, tiny: Tiny, runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmworks.ladder.fit.BOOTSTRAPS", 20)
    ladder, target = tmp_path / "ladder", tiny.copy(tmp_path / "target").run_dir
    fitted = json.loads(lmworks("ladder", "fit", ladder, *runs, "--json").out)
    assert [point["tokens"] for point in fitted["points"]] == [TOKENS[tokens] for _, tokens in RUNS]
    sizes = {point["parameters"] for point in fitted["points"]}
    assert len(sizes) == 3 and all(abs(point["fitted"] / point["loss"] - 1) < 0.1 for point in fitted["points"])
    assert len(load_law(ladder).samples) == 20

    recipe = [tiny.recipe, *words(target, 256, 8192)]
    predicted = json.loads(lmworks("ladder", "predict", ladder, *recipe, "--json").out)
    assert predicted["low"] < predicted["predicted"] < predicted["high"] and predicted["measured"] is None
    assert "has a prediction already" in lmworks("ladder", "predict", ladder, *recipe).error
    assert "not finished" in lmworks("ladder", "score", ladder).out

    assert lmworks("pretrain", *recipe).code == 0
    scored = json.loads(lmworks("ladder", "score", ladder, "--json").out)
    (one,) = scored["scores"]
    assert one["error"] == pytest.approx(predicted["predicted"] - one["measured"]) and scored["finished"] == 1
    assert one["inside"] == (one["low"] <= one["measured"] <= one["high"]) and scored["coverage"] == float(one["inside"])
    assert abs(one["error"]) < 1, "of about 6 bits per byte"
    assert f"{one['error']:+.4f}" in lmworks("ladder", "score", ladder).out
    assert "has begun to train" in lmworks("ladder", "predict", tmp_path / "ladder", tiny.recipe, *words(runs[0], 16, 2048)).error

    record = ladder / "predictions.jsonl"
    record.write_text(record.read_text(encoding="utf-8").replace(str(predicted["predicted"]), "1.5"), encoding="utf-8")
    assert "was changed" in lmworks("ladder", "score", ladder).error


def test_runs_that_do_not_belong_to_a_ladder_are_refused(lmworks: Lmworks, tiny: Tiny, runs: list[Path], tmp_path: Path) -> None:
    ladder = tmp_path / "ladder"
    assert "is listed twice" in lmworks("ladder", "fit", ladder, *runs, runs[0]).error
    assert "2 runs does not determine a law" in lmworks("ladder", "fit", ladder, *runs[:2]).error
    assert "has not finished pretraining" in lmworks("ladder", "fit", ladder, *runs, tiny.run_dir).error
    assert "has no corpus" in lmworks("ladder", "fit", ladder, *runs, tmp_path / "nothing").error
    constant = tiny.copy(tmp_path / "constant").run_dir
    tiny.walk(*words(constant, 16, 2048, end=1.0)[1::2], last="pretrain")
    assert "of its peak learning rate" in lmworks("ladder", "fit", ladder, *runs, constant).error
    other = tmp_path / "other"
    (other / "corpus").mkdir(parents=True)
    for name in ("ledger.jsonl", "metrics.jsonl", "resolved.json"):
        (other / name).write_bytes((runs[0] / name).read_bytes())
    (other / "corpus" / "manifest.json").write_text("{}", encoding="utf-8")
    assert "on other text" in lmworks("ladder", "fit", ladder, *runs, other).error
    assert not ladder.exists(), "nothing is written for a ladder that cannot be fitted"
    assert "has no fitted law" in lmworks("ladder", "predict", runs[0], tiny.recipe).error
    assert "has no predictions" in lmworks("ladder", "score", tmp_path).error
