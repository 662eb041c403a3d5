"""`lmworks ladder`: a law is fitted to real runs, its prediction is older than the run, and the record cannot be changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Lmworks

from lmworks import jsonl
from lmworks.plan.loss_law import load_law
from lmworks.watch.ledger import read_ledger
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


@pytest.mark.slow
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


@pytest.mark.slow
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


LADDER = """
recipe: {recipe}
set: [model.moe=null, tune=null, train.validate_bytes_per_domain=2048]
sizes: {{narrow: [model.intermediate_size=16], middle: [model.intermediate_size=64], wide: [model.intermediate_size=256]}}
horizons: [2048 tokens, 4096 tokens, 8192 tokens]
out: {out}
"""


def ladder_file(tmp_path: Path, recipe: Path) -> Path:
    file = tmp_path / "ladder.yaml"
    file.write_text(LADDER.format(recipe=recipe, out=tmp_path / "out"), encoding="utf-8")
    return file


def test_a_ladder_file_lists_a_trunk_and_branches_for_each_size(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    file = ladder_file(tmp_path, tiny.recipe)
    found = lmworks("ladder", "run", file, "--list", "--json")
    assert found.code == 0, found.error
    tokens = {one["name"]: one["tokens"] for one in json.loads(found.out)}
    assert [name for name in tokens if name.startswith("wide")] == ["wide-trunk", "wide-2048", "wide-4096", "wide-8192"]
    assert tokens["wide-trunk"] + tokens["wide-8192"] == 8192 and tokens["wide-trunk"] > 4096 > 3 * tokens["wide-4096"]

    text = file.read_text(encoding="utf-8")
    for before, after, why in (
        ("4096 tokens", "2100 tokens", "two are of almost the same"),
        ("2048 tokens", "100 tokens", "the shortest is of 0 steps"),
        ("middle: [model.intermediate_size=64], ", "", "at least 3 sizes, and there are 2"),
        ("model.intermediate_size=64", "model.intermediate_size=16", "two of them have the same number of parameters"),
        ("model.intermediate_size=64", "model.intermediate_sise=64", "size middle: "),
    ):
        file.write_text(text.replace(before, after), encoding="utf-8")
        refused = lmworks("ladder", "run", file)
        assert refused.code == 2 and why in refused.error, refused.error


@pytest.mark.slow
def test_decays_branch_off_from_one_run_of_each_size_and_a_law_is_fitted_to_them(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 10)
    file, out = ladder_file(tmp_path, tiny.recipe), tmp_path / "out"
    done = lmworks("ladder", "run", file, "--jobs", "2", "--json")
    assert done.code == 0, done.error
    fitted = json.loads(done.out)
    assert sorted(point["tokens"] for point in fitted["points"]) == sorted(3 * [2048, 4096, 8192])
    assert len(load_law(out).samples) == 10
    for index, horizon in enumerate((2048, 4096, 8192)):
        trunk, branch = (out / "arms" / name / "seed-1" for name in ("wide-trunk", f"wide-{horizon}"))
        resumed = next(one for one in read_ledger(branch / "ledger.jsonl") if one["event"] == "resume")
        assert resumed["step"] == int(sorted((trunk / "checkpoints").glob("step-*"))[index].name.removeprefix("step-"))
        rates = [one["optim/learning_rate"] for one in jsonl.read(branch / "metrics.jsonl") if "optim/learning_rate" in one]
        assert rates[-1] < 0.2 * max(rates)
    assert all(one["state"] == "done" for one in json.loads(lmworks("ladder", "run", file, "--list", "--json").out))
