"""`lmworks ladder`: a law is fitted to real runs, its prediction is older than the run, and the record cannot be changed."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from command import Lmworks

from lmworks.ablate.run_set import RunSet, save_arms
from lmworks.errors import UserError
from lmworks.io import jsonl
from lmworks.ladder import comparable
from lmworks.ladder.comparable import Course
from lmworks.ladder.points import size_and_tokens
from lmworks.ladder.run import _phases_left_out, resolve
from lmworks.plan.laws import FittedTo, LossLaw, load_law, sigmoid_score
from lmworks.recipe.changes import as_tree
from lmworks.recipe.schema.units import Duration
from lmworks.watch.ledger import Ledger, read_ledger
from tiny_run import Tiny

WIDTHS = (16, 64, 256)
TOKENS = (2048, 4096, 8192)
RUNS = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
PHASE = (
    "{{name: general, tokens: {tokens} tokens, mixture: {{code: 0.7, docs: 0.3}}, sequence_length: 32 tokens, "
    "global_batch_tokens: 256 tokens, lr_schedule: {{kind: linear, warmup: 2 steps, min_lr_ratio: {end}}}}}"
)


def words(run_dir: Path, width: int, tokens: int, end: float = 0.0) -> list[str]:
    sets = (
        f"run_dir={run_dir}", "model.moe=null", f"model.intermediate_size={width}", "tune=null", "train.validate_every=100%",
        "train.sample_every=100%", "train.save_every=100%", f"train.phases=[{PHASE.format(tokens=tokens, end=end)}]",
    )  # fmt: skip
    return [word for one in sets for word in ("--set", one)]


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Seven finished runs of three sizes and three horizons, on one corpus."""
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
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 20)
    ladder, target = tmp_path / "ladder", tiny.copy(tmp_path / "target").run_dir
    fitted = json.loads(lmworks("ladder", "fit", ladder, *runs, "--json").out)
    assert [point["tokens"] for point in fitted["points"]] == [TOKENS[tokens] for _, tokens in RUNS]
    sizes = {point["parameters"] for point in fitted["points"]}
    assert len(sizes) == 3 and all(abs(point["fitted"] / point["loss"] - 1) < 0.1 for point in fitted["points"])
    assert len(load_law(ladder).samples) == 20

    recipe = [tiny.recipe, *words(target, 256, 8192)]
    done = lmworks("ladder", "predict", ladder, *recipe, "--json")
    assert done.code == 0, done.err
    predicted = json.loads(done.out)
    assert predicted["low"] < predicted["predicted"] < predicted["high"] and predicted["measured"] is None
    assert fitted["benchmarks"] == predicted["benchmarks"] == [], "the recipe has none"
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


PLANTED = LossLaw(0.5, 60.0, 40.0, 0.4, 0.4)
ITEMS = 400


def values(name: str, score: float, items: int, chance: float) -> dict[str, float]:
    return {f"eval/{name}/cloze-0-shot": score, f"eval/{name}/items": items, f"eval/{name}/chance": chance}


def planted_run(
    tiny: Tiny, run_dir: Path, width: int, tokens: int, scored: tuple[str, ...] = ("colors", "coins"), more: Sequence[str] = ()
) -> float:
    """The records of a finished run as training would write them, with a planted loss, a score that follows it (colors) and one at chance
    (coins); returns the expected score. `more` are overrides of the recipe."""
    resolved = tiny.resolve(*words(run_dir, width, tokens)[1::2], *more)
    resolved.save(run_dir)
    for stage in ("corpus", "tokenizer"):
        (run_dir / stage).mkdir()
    (run_dir / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")
    (run_dir / "corpus" / "manifest.json").write_text("{}", encoding="utf-8")
    steps, loss = tokens // 256, PLANTED.loss(*size_and_tokens(resolved.recipe))
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        ledger.write("start", stage="pretrain", steps=steps, tokens=tokens)
        ledger.write("finish", stage="pretrain", step=steps)
    expected = float(sigmoid_score(loss, 0.25, 1.0, 2.0, 2.6))
    random = np.random.default_rng(width * tokens)
    scores = {"colors": random.binomial(ITEMS, expected) / ITEMS, "coins": (ITEMS // 2 + width * tokens % 7) / ITEMS}
    lines = [
        {"step": 1, "time": 1.0, "optim/learning_rate": 0.01, **values("colors", 0.9, 3, 0.25)},
        {"step": steps, "time": 2.0, "optim/learning_rate": 0.0, "validation/bits_per_byte": loss},
    ]  # fmt: skip
    for name in scored:
        lines[-1] |= values(name, scores[name], ITEMS, {"colors": 0.25, "coins": 0.5}[name])
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return expected


def test_what_seeds_do_to_the_loss_is_told(lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the second seed have losses that are higher by 2%."""
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 2)
    runs = []
    for width, tokens, seed in product(WIDTHS, TOKENS, (1, 2)):
        runs.append(tmp_path / f"{width}-{tokens}-{seed}")
        planted_run(tiny, runs[-1], width, tokens, (), [f"train.seed={seed}"])
        if seed == 2:
            scale_loss(runs[-1], 1.02)
    done = lmworks("ladder", "fit", tmp_path / "ladder", *runs)
    noise = json.loads(lmworks("ladder", "fit", tmp_path / "ladder", *runs, "--json").out)["noise"]
    assert 0.008 < noise["seeds"] < 0.02, "two values that differ by 2%: 1.4%"
    told = f"noise (standard deviation): {noise['seeds']:.2%} between seeds, {noise['run']:.2%} of a run alone; more held-out text"
    assert told in " ".join(done.out.split())


def test_a_ladder_of_equal_tokens_per_parameter_is_told_and_its_law_chooses_no_size(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The natural ladder, from `fit` to `predict` and `plan`."""
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 12)
    runs, ladder, random = [], tmp_path / "ladder", np.random.default_rng(0)
    for width in (16, 48, 128, 320, 640, 1280, 2560):
        parameters = size_and_tokens(tiny.resolve(*words(tmp_path, width, 2048)[1::2]).recipe)[0]
        runs.append(tmp_path / f"{width}")
        planted_run(tiny, runs[-1], width, 256 * round(parameters / 1024), ())
        scale_loss(runs[-1], float(np.exp(0.003 * random.standard_normal())))
    said = " ".join(lmworks("ladder", "fit", ladder, *runs).out.split())
    assert "these runs do not tell the compute-optimal size" in said and "tokens per parameter. Add runs of " in said
    found = json.loads(lmworks("ladder", "fit", ladder, *runs, "--json").out)
    assert len(found["undetermined"]) == 3 and found["proposed_runs"]
    target = words(tmp_path / "target", 2560, 2048)
    warned = json.loads(lmworks("ladder", "predict", ladder, tiny.recipe, *target, "--json").out)
    assert any("laws that agree with the runs of the ladder differ by" in line for line in warned["warnings"])
    assert warned["high"] > 1.05 * warned["low"]
    refused = lmworks("plan", "--time", "3d", "--cluster", "8xh100", "--ladder", ladder).error
    assert "--ladder: its runs do not tell the compute-optimal size" in refused and "give --size" in refused


def scale_loss(run_dir: Path, factor: float) -> None:
    *lines, last = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = json.loads(last)
    found["validation/bits_per_byte"] *= factor
    (run_dir / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(found), ""]), encoding="utf-8")


def test_benchmark_scores_are_predicted_through_the_loss_and_scored_afterwards(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From records of nine runs to the record of a prediction."""
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 8)
    ladder, target, runs = tmp_path / "ladder", tmp_path / "target", []
    for width in WIDTHS:
        for tokens in TOKENS:
            runs.append(tmp_path / f"{width}-{tokens}")
            planted_run(tiny, runs[-1], width, tokens)
    fitted = json.loads(lmworks("ladder", "fit", ladder, *runs, "--json").out)
    law, sizes = load_law(ladder), [point["parameters"] for point in fitted["points"]]
    assert law.fitted_to == FittedTo((min(sizes), max(sizes)), (TOKENS[0], TOKENS[-1]), 6 * max(sizes) * TOKENS[-1])
    assert fitted["residual"] < 1e-4 and "each size has one seed" in "".join(fitted["doubts"])
    printed = lmworks("ladder", "fit", ladder, *runs).out
    assert "residual 0.00% (root mean square)" in printed and "between seeds" not in printed, "one seed does not show it"
    coins, colors = fitted["benchmarks"]
    assert (colors["name"], colors["chance"], colors["items"], colors["runs"]) == ("colors/cloze-0-shot", 0.25, ITEMS, 9)
    assert colors["signal"] and colors["ceiling"] > 0.5 and "samples" not in colors
    assert (coins["name"], coins["chance"], coins["signal"]) == ("coins/cloze-0-shot", 0.5, False) and fitted["left_out"] == {}
    assert fitted["points"][0]["scores"]["colors/cloze-0-shot"]["items"] == ITEMS, "those of the last step"

    refused = lmworks("ladder", "predict", ladder, tiny.recipe, *words(target, 512, 16384, end=1.0))
    assert refused.code == 2 and "ends at 100% of its peak learning rate" in refused.error and not (ladder / "predictions.jsonl").exists()
    recipe = [tiny.recipe, *words(target, 512, 16384)]
    said = lmworks("ladder", "predict", ladder, *recipe)
    assert "coins/cloze-0-shot: no signal in the ladder" in said.out and "the run does not score coins/cloze-0-shot" in said.out, said.err
    (line,) = jsonl.read(ladder / "predictions.jsonl")
    of_coins, of_colors = line["benchmarks"]
    assert of_coins == {"name": "coins/cloze-0-shot", "items": ITEMS, "predicted": None, "low": None, "high": None}
    assert f"colors/cloze-0-shot: {of_colors['predicted']:.3f}, 90% interval {of_colors['low']:.3f} to {of_colors['high']:.3f}" in said.out

    assert "not measured" in lmworks("ladder", "score", ladder).out
    expected = planted_run(tiny, target, 512, 16384)
    (found,) = json.loads(lmworks("ladder", "score", ladder, "--json").out)["scores"]
    measured = found["benchmarks"][1]["measured"]
    assert abs(of_colors["predicted"] - expected) < 0.1 and of_colors["low"] < measured < of_colors["high"] < of_colors["low"] + 0.3
    assert found["benchmarks"][1] == of_colors | {"measured": measured, "error": of_colors["predicted"] - measured, "inside": True}
    assert found["benchmarks"][0]["measured"] is not None and found["benchmarks"][0]["error"] is None
    kept = json.loads((ladder / "scores.json").read_text(encoding="utf-8"))
    assert kept["scores"] == [found]
    assert kept["benchmarks"]["colors/cloze-0-shot"]["coverage"] == 1.0 and kept["benchmarks"]["coins/cloze-0-shot"]["finished"] == 0
    assert "colors/cloze-0-shot: 1 finished: mean error" in lmworks("ladder", "score", ladder).out
    record = ladder / "predictions.jsonl"
    record.write_text(record.read_text(encoding="utf-8").replace(str(of_colors["low"]), "0.001"), encoding="utf-8")
    assert "was changed" in lmworks("ladder", "score", ladder).error


def test_scores_that_cannot_be_used_are_told(lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 2)
    runs = [tmp_path / str(number) for number in range(len(RUNS))]
    for (width, tokens), run_dir in zip(RUNS, runs, strict=True):
        planted_run(tiny, run_dir, WIDTHS[width], TOKENS[tokens], ("colors",) if run_dir == runs[2] else ("colors", "coins"))
    shown = lmworks("ladder", "fit", tmp_path / "ladder", *runs)
    assert "coins/cloze-0-shot is left out: 6 of 7 runs have scored it" in shown.out, shown.err
    assert "sigmoid(slope * (midpoint - loss))" in shown.out and "colors" in shown.out
    followed = {"stage": "pretrain", "step": TOKENS[0] // 256, **values("colors", 3, 400, 0.25)}
    (runs[0] / "follow.jsonl").write_text(json.dumps(followed) + "\n", encoding="utf-8")
    error = lmworks("ladder", "fit", tmp_path / "ladder", *runs).error
    assert "eval/colors/cloze-0-shot cannot be 3 of 400 items with chance 0.25; remove the line from metrics.jsonl or follow.jsonl" in error


def rehash(folder: Path, **changes: object) -> None:
    """Write the only prediction anew with these changes, as if it had been recorded so."""
    (line,) = jsonl.read(folder / "predictions.jsonl")
    record = {key: value for key, value in (line | changes).items() if key != "hash"}
    text = json.dumps(record | {"hash": hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()})
    (folder / "predictions.jsonl").write_text(text + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def planted(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The records of seven runs of three sizes and three horizons."""
    folder = tmp_path_factory.mktemp("planted")
    runs = [folder / str(number) for number in range(len(RUNS))]
    for (width, tokens), run_dir in zip(RUNS, runs, strict=True):
        planted_run(tiny, run_dir, WIDTHS[width], TOKENS[tokens], ())
    return runs


def test_only_the_run_that_was_predicted_is_scored(
    lmworks: Lmworks, tiny: Tiny, planted: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another size, budget, optimizer, mixture, text or tokenizer, and a run that is older than its prediction, each in one line."""
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 2)
    ladder, target = tmp_path / "ladder", tmp_path / "target"
    assert lmworks("ladder", "fit", ladder, *planted).code == 0
    assert lmworks("ladder", "predict", ladder, tiny.recipe, *words(target, 256, 16384)).code == 0

    def refused(width: int = 256, tokens: int = 16384, *more: str, files: Mapping[str, str] | None = None) -> str:
        shutil.rmtree(target, ignore_errors=True)
        planted_run(tiny, target, width, tokens, (), more)
        for name, text in (files or {}).items():
            with (target / name).open("a", encoding="utf-8") as file:
                file.write(text)
        done = lmworks("ladder", "score", ladder)
        assert done.code == (2 if done.err else 0)
        return done.error if done.err else ""

    assert refused() == "" and json.loads(lmworks("ladder", "score", ladder, "--json").out)["finished"] == 1
    remedy = "move it away, and run the predicted recipe there"
    assert "active parameters, and the prediction" in refused(64)
    assert f"it has 8,192 tokens, and the prediction 16,384; {remedy}" in refused(tokens=8192)
    assert "optimizer.weight_decay (0.1 -> 0.3)" in refused(256, 16384, "optimizer.weight_decay=0.3")
    assert "optimizer.learning_rate" in refused(256, 16384, "optimizer.learning_rate=0.1")
    schedule = "train.phases.general.lr_schedule"
    assert f"has another learning-rate schedule than the predicted recipe; {remedy}" in refused(256, 16384, f"{schedule}.kind=cosine")
    assert f"and the predicted recipe at 0%; the loss depends on it, and the law of a ladder holds for one: {remedy}" in refused(
        256, 16384, f"{schedule}.min_lr_ratio=0.1"
    )
    assert "train.phases.general.mixture.code (0.7 -> 0.5)" in refused(256, 16384, "train.phases.general.mixture={code: 0.5, docs: 0.5}")
    assert "global_batch_tokens (256 tokens -> 512 tokens)" in refused(256, 16384, "train.phases.general.global_batch_tokens=512 tokens")
    assert refused(256, 16384, "train.seed=9") == "", "a prediction holds for every seed"
    assert f"is validated on other text than the ladder, so its loss cannot be compared; {remedy}" in refused(
        files={"corpus/manifest.json": " "}
    )
    assert f"has another tokenizer than the ladder: {remedy}" in refused(files={"tokenizer/tokenizer.json": " "})
    changed = json.dumps({"event": "mixture_changed", "time": 3.0, "step": 3, "mixture": {"code": 1.0}, "number": 0}) + "\n"
    assert "was changed at step 3" in refused(files={"ledger.jsonl": changed})
    bad = "".join(json.dumps({"event": "bad_step", "stage": "pretrain", "time": 3.0, "step": step}) + "\n" for step in (3, 4))
    assert "has diverged (2 of " in refused(files={"ledger.jsonl": bad}) and "it tests no prediction: move it away" in refused(
        files={"ledger.jsonl": bad}
    )
    late = {"step": 64, "time": 3.0, "optim/learning_rate": 0.01, "validation/bits_per_byte": 2.0}
    assert "ends at 100% of its peak learning rate" in refused(files={"metrics.jsonl": json.dumps(late) + "\n"})
    assert refused() == ""
    rehash(ladder, time=time.time() + 60)
    assert f"{target} began to train before its prediction was written" in refused()


def test_rungs_of_another_recipe_are_refused(
    lmworks: Lmworks, tiny: Tiny, planted: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `fit` and by `predict`, each in one line."""
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 2)
    ladder = tmp_path / "ladder"

    def fitted_with(number: int, *more: str, width: int = 256, tokens: int = 8192) -> str:
        planted_run(tiny, odd := tmp_path / str(number), width, tokens, (), more)
        return lmworks("ladder", "fit", ladder, *planted, odd).error

    mixture = "train.phases.general.mixture={code: 0.5, docs: 0.5}"
    assert "mixture.code (0.7 -> 0.5), train.phases.general.mixture.docs (0.3 -> 0.5); the law of a ladder holds for" in fitted_with(
        0, mixture
    )
    batch = fitted_with(1, "train.phases.general.global_batch_tokens=512 tokens", width=64, tokens=2048)
    assert f"{tmp_path / '1'} has a batch of 512 tokens, and {planted[0]} one of 256" in batch
    assert "optimizer.betas" in fitted_with(2, "optimizer.betas=[0.8, 0.9]")
    assert "model.vocab_size" in fitted_with(3, "model.vocab_size=1024")
    assert "model.tie_word_embeddings" in fitted_with(4, "model.tie_word_embeddings=true")
    assert f"is the same run as {planted[0]}: same recipe and same seed" in fitted_with(5, width=WIDTHS[0], tokens=TOKENS[0])
    shutil.copytree(planted[0], other := tmp_path / "other")
    (other / "tokenizer" / "tokenizer.json").write_text("[]", encoding="utf-8")
    assert "has another tokenizer than" in lmworks("ladder", "fit", ladder, *planted, other).error
    assert "law of 6 parameters: name at least 7 finished runs" in lmworks("ladder", "fit", ladder, *planted[:2]).error
    assert not ladder.exists()
    planted_run(tiny, seed := tmp_path / "seed", WIDTHS[0], TOKENS[0], (), ["train.seed=9"])
    assert lmworks("ladder", "fit", ladder, *planted, seed).code == 0, "another seed, and another budget of the same batch"

    recipe = [tiny.recipe, *words(tmp_path / "target", 512, 16384), "--set"]
    for change, why in (
        (mixture, "mixture.code (0.7 -> 0.5)"),
        ("optimizer.weight_decay=0.3", "optimizer.weight_decay (0.1 -> 0.3)"),
        ("train.phases.general.global_batch_tokens=512 tokens", "has a batch of 512 tokens, and all runs of the ladder have 256"),
        ("model.vocab_size=1024", "model.vocab_size"),
        ("time=1h", "its token budgets depend on time; add --set time=null"),
    ):
        assert why in lmworks("ladder", "predict", ladder, *recipe, change).error
    said = lmworks("ladder", "predict", ladder, *recipe, "train.seed=3")
    tokenizer = f"tokenizer.path={planted[0]}/tokenizer/tokenizer.json"
    assert said.code == 0 and f"run it with --set {tokenizer}" in said.out
    (tmp_path / "with" / "tokenizer").mkdir(parents=True)
    shutil.copy(planted[0] / "tokenizer" / "tokenizer.json", tmp_path / "with" / "tokenizer")
    assert "tokenizer" not in lmworks("ladder", "predict", ladder, *recipe, f"run_dir={tmp_path / 'with'}").out
    old = json.loads((ladder / "ladder.json").read_text(encoding="utf-8"))
    (ladder / "ladder.json").write_text(json.dumps({name: old[name] for name in ("runs", "held_out_text")}), encoding="utf-8")
    assert "fit the ladder again: lmworks ladder fit" in lmworks("ladder", "predict", ladder, *recipe, "train.seed=4").error


def test_schedules_that_end_otherwise_and_runs_that_end_early_are_refused(
    lmworks: Lmworks, tiny: Tiny, planted: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's own schedule ends at a tenth of the peak, those of the ladder at 0; and early stopping leaves tokens untrained."""
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 2)
    ladder, odd = tmp_path / "ladder", tmp_path / "odd"

    def fitted_with(*more: str) -> str:
        shutil.rmtree(odd, ignore_errors=True)
        planted_run(tiny, odd, 256, 8192, (), more)
        return lmworks("ladder", "fit", ladder, *planted, odd).error

    tenth = "train.phases.general.lr_schedule.min_lr_ratio=0.1"
    assert f"{odd} ends at 10% of its peak learning rate, and {planted[0]} at 0%" in fitted_with(tenth)
    assert f"{odd} ended at step 32 of 64, so its loss is not that of its token budget" in fitted_with(
        "train.phases.general.tokens=16384 tokens", "train.early_stopping={patience: 2}"
    )
    planted_run_without_its_last_validation(odd)
    assert f"{odd} has no finite validation/bits_per_byte behind its last step" in lmworks("ladder", "fit", ladder, *planted, odd).error
    bad = "".join(json.dumps({"event": "bad_step", "stage": "pretrain", "time": 3.0, "step": step}) + "\n" for step in (3, 4))
    (odd / "ledger.jsonl").write_text(bad, encoding="utf-8")
    assert f"{odd} has diverged (2 of" in lmworks("ladder", "fit", ladder, *planted, odd).error, "whatever it ended with"

    assert lmworks("ladder", "fit", ladder, *planted).code == 0
    refused = lmworks("ladder", "predict", ladder, tiny.recipe, *words(tmp_path / "target", 512, 16384, end=0.1)).error
    assert "ends at 10% of its peak learning rate, and the runs of the ladder at 0%" in refused
    assert "let the schedule of its last phase end at 0 (lr_schedule.min_lr_ratio)" in refused
    assert not (ladder / "predictions.jsonl").exists()


def planted_run_without_its_last_validation(run_dir: Path) -> None:
    """Its loss was not a number there."""
    *lines, last = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    resolved = json.loads((run_dir / "resolved.json").read_text(encoding="utf-8"))
    resolved["train"]["phases"][0]["tokens"] = "8192 tokens"
    (run_dir / "resolved.json").write_text(json.dumps(resolved), encoding="utf-8")
    line = json.loads(last) | {"validation/bits_per_byte": float("nan")}
    (run_dir / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(line), ""]), encoding="utf-8")


def test_text_that_is_read_many_times_is_told(
    lmworks: Lmworks, tiny: Tiny, planted: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the shards of the ladder: by `predict` of a run that is too long for them, and by `fit` of runs that were."""
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 2)
    ladder, runs = tmp_path / "ladder", [shutil.copytree(run, tmp_path / run.name) for run in planted]

    def predicted(name: str, tokens: int) -> list[str]:
        done = lmworks("ladder", "predict", ladder, tiny.recipe, *words(tmp_path / name, 256, tokens), "--json")
        assert done.code == 0, done.error
        return [line for line in json.loads(done.out)["warnings"] if line.startswith("repeated text")]

    def fitted() -> list[str]:
        doubts = json.loads(lmworks("ladder", "fit", ladder, *runs, "--json").out)["doubts"]
        return [line for line in doubts if "more than 4 times" in line]

    assert fitted() == predicted("without-shards", 2_560_000) == [], "not known"
    for run in runs:
        shutil.copytree(tiny.run_dir / "shards", run / "shards")
    assert fitted() == predicted("short", 16384) == []
    (told,) = predicted("long", 2_560_000)
    assert "the run reads a source" in told and "the predicted loss is likely too low" in told
    planted_run(tiny, tmp_path / "eighth", 256, 2_560_000, ())
    shutil.copytree(tiny.run_dir / "shards", tmp_path / "eighth" / "shards")
    runs.append(tmp_path / "eighth")
    (told,) = fitted()
    assert told.startswith("1 of 8 runs read a source more than 4 times")


def test_weight_decay_that_the_ladder_does_not_show_is_told(
    lmworks: Lmworks, tiny: Tiny, planted: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 steps at a learning rate of 0.5 with a weight decay of 0.1 last 3.2 time constants, and the ladder's longest run far less."""
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 2)
    ladder = tmp_path / "ladder"
    assert lmworks("ladder", "fit", ladder, *planted).code == 0

    def predicted(name: str, *more: str) -> str:
        return " ".join(lmworks("ladder", "predict", ladder, tiny.recipe, *words(tmp_path / name, 256, 16384), *more).out.split())

    told = "weight decay: the run lasts 3.2 times 1 / (learning_rate x weight_decay) steps, and the ladder's longest 0.0 times"
    assert told in predicted("long", "--set", "optimizer.learning_rate=0.5")
    (warning,) = json.loads(predicted("json", "--set", "optimizer.learning_rate=0.5", "--json"))["warnings"]
    assert warning.startswith(told) and "weight decay" not in predicted("short")
    old = json.loads((ladder / "ladder.json").read_text(encoding="utf-8"))
    (ladder / "ladder.json").write_text(json.dumps(old | {"weight_decay": 2.2}), encoding="utf-8")
    assert "weight decay" not in predicted("as-long", "--set", "optimizer.learning_rate=0.5")
    del old["weight_decay"]
    (ladder / "ladder.json").write_text(json.dumps(old), encoding="utf-8")
    assert "weight decay" not in predicted("old", "--set", "optimizer.learning_rate=0.5"), "of an earlier version"


def test_batch_sizes_may_follow_the_size_or_the_budget() -> None:
    def ladder(*rows: tuple[int, int, int]) -> list[comparable.Batch]:
        return [comparable.Batch(f"{size}-{tokens}", size, tokens, batch) for size, tokens, batch in rows]

    by_size = ladder((1, 10, 64), (1, 20, 64), (2, 10, 128), (2, 20, 128))
    by_budget = ladder((1, 10, 64), (1, 20, 128), (2, 10, 64), (2, 20, 128))
    for batches in (by_size, by_budget):
        comparable.require_batch_rule(batches)
        comparable.require_batch_rule(batches, comparable.Batch("target", 4, 40, 256))
        with pytest.raises(UserError, match="target has a batch of 32 tokens, and that of the ladder's runs grows"):
            comparable.require_batch_rule(batches, comparable.Batch("target", 4, 40, 32))
    for odd in (ladder((1, 10, 64), (1, 20, 64), (2, 10, 64), (2, 20, 128)), ladder((1, 10, 128), (1, 20, 128), (2, 10, 64), (2, 20, 64))):
        with pytest.raises(UserError, match="the runs of a ladder need one batch size"):
            comparable.require_batch_rule(odd)


@pytest.mark.slow
def test_runs_that_do_not_belong_to_a_ladder_are_refused(lmworks: Lmworks, tiny: Tiny, runs: list[Path], tmp_path: Path) -> None:
    ladder = tmp_path / "ladder"
    assert "is listed twice" in lmworks("ladder", "fit", ladder, *runs, runs[0]).error
    assert "2 runs do not determine a law" in lmworks("ladder", "fit", ladder, *runs[:2]).error
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


def test_a_forgotten_directory_is_not_that_of_the_first_run(lmworks: Lmworks, tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text("{}", encoding="utf-8")
    assert "is a run, not the directory of a ladder" in lmworks("ladder", "fit", tmp_path, tmp_path).error
    assert [path.name for path in tmp_path.iterdir()] == ["resolved.json"]


LADDER = """
recipe: {recipe}
set: [model.moe=null, tune=null, train.validation_bytes_per_domain=2KiB{more}]
sizes: {{narrow: [model.intermediate_size=16], middle: [model.intermediate_size=64], wide: [model.intermediate_size=256]}}
horizons: [2048 tokens, 4096 tokens, 8192 tokens]
out: {out}
"""


def ladder_file(tmp_path: Path, recipe: Path, *more: str) -> Path:
    file = tmp_path / "ladder.yaml"
    text = "".join(f", '{one}'" for one in more)
    file.write_text(LADDER.format(recipe=recipe, out=tmp_path / "out", more=text), encoding="utf-8")
    return file


def own_task(folder: Path, count: int) -> Path:
    rows = [{"question": f"Word {number}?", "choices": ["red", "green", "blue", "grey"], "answer": number % 4} for number in range(count)]
    (folder / "colors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "colors.yaml").write_text("file: colors.jsonl\nchoices: choices\n", encoding="utf-8")
    return folder / "colors.yaml"


def evaluations(file: Path, name: str) -> tuple[object, int]:
    """When a run of the ladder scores benchmarks, and how many items."""
    evaluate = resolve(file).arms[name].recipe.evaluate
    return evaluate.every, evaluate.every_items


def test_decays_score_the_benchmarks_of_the_recipe_at_their_end_and_trunks_do_not(tiny: Tiny, tmp_path: Path) -> None:
    task = own_task(tmp_path, 60)
    without = ladder_file(tmp_path, tiny.recipe)
    assert evaluations(without, "wide-4096") == evaluations(without, "wide-trunk") == ("never", 50), "as without a ladder"
    file = ladder_file(tmp_path, tiny.recipe, f"evaluate.benchmarks=[{task}]")
    assert evaluations(file, "wide-4096") == (Duration.parse("100%"), 200) and evaluations(file, "wide-trunk") == ("never", 50)
    file = ladder_file(tmp_path, tiny.recipe, f"evaluate.benchmarks=[{task}]", "evaluate.every_items=700", "evaluate.every=never")
    assert evaluations(file, "wide-4096") == ("never", 700), "the ladder file has the last word"


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
        (text[text.index("{narrow") : text.index("\nhorizons")], "[200K, 1M]", "its overrides; write {200K: [size=200K], ...}"),
        ("model.intermediate_size=64", "model.intermediate_size=64, optimizer.weight_decay=0.3", "optimizer.weight_decay (0.1 -> 0.3)"),
        ("model.intermediate_size=64", "run_dir=elsewhere", "size middle: run_dir is of each run, and the ladder sets it by out"),
        ("tune=null", "tune=null, train.seed=9", "set: train.seed is of each run, and the ladder sets it by seeds; use seeds instead"),
        ("tune=null", "tune=null, time=1h", "set: time is of each run, and the ladder sets it by horizons; use horizons instead"),
        ("tune=null", "tune=null, train.phases.general.lr_schedule.kind=cosine", "sets it by warmup_fraction and decay_fraction"),
        ("out: ", "decay_fraction: 0.999\nout: ", "the shortest is of 8 steps of 256 tokens, of which 8 decay: none is left before them"),
        ("out: ", "warmup_fraction: 0.99\nout: ", "the warm-up of 8 steps lasts longer than the 6 steps before the decay"),
    ):
        file.write_text(text.replace(before, after), encoding="utf-8")
        refused = lmworks("ladder", "run", file, "--list")
        assert refused.code == 2 and why in refused.error, refused.error


def test_phases_that_a_ladder_leaves_out_are_named(tiny: Tiny, tmp_path: Path) -> None:
    assert "longest phase (general) and leaves out long" in _phases_left_out(resolve(ladder_file(tmp_path, tiny.recipe)))
    one = json.dumps([as_tree(phase) for phase in tiny.resolve().recipe.train.phases[:1]])
    assert _phases_left_out(resolve(ladder_file(tmp_path, tiny.recipe, f"train.phases={one}"))) == ""


def test_a_branch_has_the_learning_rates_of_a_wsd_schedule_of_its_horizon(tiny: Tiny, tmp_path: Path) -> None:
    """So the larger run that is predicted can be trained in one phase."""
    arm = resolve(ladder_file(tmp_path, tiny.recipe)).arms["wide-8192"]
    schedule = "{kind: wsd, warmup: 1 steps, decay: 6 steps, min_lr_ratio: 0}"
    one_phase = PHASE.format(tokens=8192, end=0).replace("{kind: linear, warmup: 2 steps, min_lr_ratio: 0}", schedule)
    branched, whole = (Course.of(recipe).lr_factors() for recipe in (arm.recipe, tiny.resolve(f"train.phases=[{one_phase}]").recipe))
    assert len(branched) == 32 and branched[0] == 1 and branched[-1] == 0
    assert branched == pytest.approx(whole, abs=1e-12)  # the same formula, on tokens since the start of one phase or of another


def test_all_runs_of_a_size_have_the_learning_rate_of_its_trunk(tiny: Tiny, tmp_path: Path) -> None:
    """Rates that the recipe leaves out are derived from tokens, of which a branch has others than its trunk, and a longer trunk more."""
    file = tmp_path / "ladder.yaml"
    sizes = "{small: [size=30M], middle: [size=60M], large: [size=100M]}"
    text = f"recipe: {tiny.recipe}\nset: [model.moe=null, tune=null]\nsizes: {sizes}\nhorizons: [150M tokens, 300M tokens, 600M tokens]\n"
    file.write_text(f"{text}out: {tmp_path / 'out'}\n", encoding="utf-8")
    ladder = resolve(file)

    def rates(ladder: RunSet, size: str) -> set[float | None]:
        return {arm.recipe.optimizer.learning_rate for arm in ladder.arms.values() if arm.name.startswith(size)}

    small, middle = rates(ladder, "small"), rates(ladder, "middle")
    assert len(small) == len(middle) == 1 and small != middle
    save_arms(ladder)
    file.write_text(file.read_text(encoding="utf-8").replace("600M tokens]", "600M tokens, 1200M tokens]"), encoding="utf-8")
    longer = resolve(file)
    assert rates(longer, "small") == small
    save_arms(longer)
    file.write_text(file.read_text(encoding="utf-8").replace("tune=null]", "tune=null, optimizer.learning_rate=0.001]"), encoding="utf-8")
    with pytest.raises(UserError, match=r"arm small-trunk has changed since its runs began: optimizer.learning_rate"):
        save_arms(resolve(file))


@pytest.mark.slow
def test_an_added_horizon_continues_the_trunks(lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the trunks are trained once, and nothing else of before again."""
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 10)
    file, out = ladder_file(tmp_path, tiny.recipe), tmp_path / "out"
    assert lmworks("ladder", "run", file).code == 0
    before = {path: path.stat().st_mtime_ns for path in out.glob("arms/*-[0-9]*/seed-1/**/*") if path.is_file()}
    file.write_text(file.read_text(encoding="utf-8").replace("8192 tokens]", "8192 tokens, 16384 tokens]"), encoding="utf-8")
    done = lmworks("ladder", "run", file, "--json")
    assert done.code == 0, done.error
    assert sorted({point["tokens"] for point in json.loads(done.out)["points"]}) == [2048, 4096, 8192, 16384]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    for size in ("narrow", "middle", "wide"):
        trunk, branch = (out / "arms" / f"{size}-{name}" / "seed-1" for name in ("trunk", "2048"))
        steps = [one["step"] for one in jsonl.read(trunk / "metrics.jsonl") if "train/loss" in one]
        assert steps == sorted(set(steps)) and steps[-1] == 51, "of 64 steps, without the last 13"
        assert len({(run / "tokenizer" / "tokenizer.json").read_bytes() for run in (trunk, branch)}) == 1
    assert all(one["state"] == "done" for one in json.loads(lmworks("ladder", "run", file, "--list", "--json").out))


def test_a_branch_continues_the_trunk_of_its_own_seed(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    file = ladder_file(tmp_path, tiny.recipe)
    text = file.read_text(encoding="utf-8")
    file.write_text(text + "seeds: 2\n", encoding="utf-8")
    continued = {(run.arm.name, run.seed): run.branch for run in resolve(file).runs}
    assert len(continued) == 3 * 4 * 2
    for (name, seed), branch in continued.items():
        trunk = tmp_path / "out" / "arms" / f"{name.split('-')[0]}-trunk" / f"seed-{seed}"
        assert branch is None if name.endswith("trunk") else branch is not None and branch.checkpoint.parents[1] == branch.run_dir == trunk
    for seeds, why in (("[1, 1]", "lists 1 twice"), ("0", "must be from 1"), ("400", "more than 1000 runs")):
        file.write_text(f"{text}seeds: {seeds}\n", encoding="utf-8")
        assert why in lmworks("ladder", "run", file).error


def test_all_runs_of_a_ladder_have_one_tokenizer(tiny: Tiny, tmp_path: Path) -> None:
    """It is trained on the mixture over all phases, whose shares another division into phases rounds otherwise."""
    ladder = resolve(ladder_file(tmp_path, tiny.recipe))
    trained = {arm.data_key for arm in ladder.arms.values() if arm.recipe.tokenizer.path is None}
    imported = {arm.recipe.tokenizer.path for arm in ladder.arms.values()} - {None}
    shortest = ladder.arms["wide-2048"]
    assert trained == {shortest.data_key} and imported == {str(ladder.data_dir(shortest) / "tokenizer" / "tokenizer.json")}


@pytest.mark.slow
def test_decays_branch_off_from_one_run_of_each_size_and_a_law_is_fitted_to_them(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmworks.ladder.run.BOOTSTRAPS", 10)
    file, out = ladder_file(tmp_path, tiny.recipe, f"evaluate.benchmarks=[{own_task(tmp_path, 60)}]"), tmp_path / "out"
    file.write_text(file.read_text(encoding="utf-8") + "seeds: [1, 5]\n", encoding="utf-8")
    done = lmworks("ladder", "run", file, "--jobs", "2", "--json")
    assert done.code == 0, done.error
    fitted = json.loads(done.out)
    assert sorted((point["tokens"], point["seed"]) for point in fitted["points"]) == sorted(3 * list(product([2048, 4096, 8192], [1, 5])))
    losses = {seed: [point["loss"] for point in fitted["points"] if point["seed"] == seed] for seed in (1, 5)}
    assert not set(losses[1]) & set(losses[5]) and not any("one seed" in one for one in fitted["doubts"])
    assert len({path.read_bytes() for path in out.glob("arms/*/*/tokenizer/tokenizer.json")}) == 1
    (law,) = load_law(out).benchmarks
    assert len(load_law(out).samples) == 10 and (law.name, law.chance, law.items, law.runs) == ("colors/cloze-0-shot", 0.25, 60, 18)
    assert not any("eval/colors/items" in one for one in jsonl.read(out / "arms" / "wide-trunk" / "seed-1" / "metrics.jsonl"))
    for seed, (index, horizon) in product((1, 5), enumerate((2048, 4096, 8192))):
        trunk, branch = (out / "arms" / name / f"seed-{seed}" for name in ("wide-trunk", f"wide-{horizon}"))
        resumed = next(one for one in read_ledger(branch / "ledger.jsonl") if one["event"] == "resume")
        assert resumed["step"] == int(sorted((trunk / "checkpoints").glob("step-*"))[index].name.removeprefix("step-"))
        rates = [one["optim/learning_rate"] for one in jsonl.read(branch / "metrics.jsonl") if "optim/learning_rate" in one]
        assert rates[-1] < 0.2 * max(rates)
    assert all(one["state"] == "done" for one in json.loads(lmworks("ladder", "run", file, "--list", "--json").out))
