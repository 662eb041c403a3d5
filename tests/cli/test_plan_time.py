"""`lmworks plan` with a time or an amount of money: tokens and size that fill it, and the predicted loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from command import Lmworks

from lmworks.api import planning
from lmworks.errors import UserError
from lmworks.plan.counts import flops_per_token
from lmworks.plan.laws import LAW_FILE, FittedTo, LossLaw, load_law, save_law
from lmworks.recipe.load import load_cluster, shipped_folder
from lmworks.ui.amounts import amount
from lmworks.watch.ledger import read_ledger
from tiny_run import Tiny

DAY = 86_400


def plan(lmworks: Lmworks, *words: str) -> dict[str, Any]:
    done = lmworks("plan", *words, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_a_time_on_a_cluster_is_answered_with_a_size_and_tokens(lmworks: Lmworks) -> None:
    found = plan(lmworks, "--time", "3d", "--cluster", "8xh100")
    assert found["seconds"] == pytest.approx(3 * DAY, rel=0.01)
    assert found["tokens_per_parameter"] == pytest.approx(20, rel=0.15), "compute-optimal"
    chosen = next(one for one in found["budget"]["candidates"] if one["size"] == found["budget"]["chosen"])
    assert chosen["tokens"] == pytest.approx(found["tokens"], rel=0.01)
    spent = plan(lmworks, "--money", str(found["dollars"]), "--cluster", "8xh100")
    assert spent["tokens"] == pytest.approx(found["tokens"], rel=0.01) and spent["budget"]["chosen"] == found["budget"]["chosen"]
    double = plan(lmworks, "--time", "6d", "--cluster", "8xh100")
    assert double["counts"]["active"] / found["counts"]["active"] == pytest.approx(2**0.5, rel=0.15)


@pytest.mark.parametrize(
    ("time", "cluster", "said"),
    [
        ("3d", "8xh100", "compute-optimal for this time by 20 tokens per active parameter"),
        ("10min", "2-cores", "the smallest model of this recipe, with 4.3 tokens per active parameter where 20 are compute-optimal; 97%"),
        ("1 s", "8xh100", "the largest model of this recipe with at least the optimal tokens: 46 per active parameter where 20 are"),
    ],
)
def test_compute_optimal_is_said_only_where_it_is(lmworks: Lmworks, time: str, cluster: str, said: str) -> None:
    """The vocabulary of 49,152 entries does not shrink, so that no model of the recipe has fewer than 3.25M parameters."""
    found = plan(lmworks, "--time", time, "--cluster", cluster)
    assert said in found["budget"]["why"]
    assert ("where 20" in found["budget"]["why"]) == (not 20 / 1.3 < found["tokens_per_parameter"] < 20 * 1.3)


def test_no_time_is_refused(lmworks: Lmworks) -> None:
    for words in (("--time", "0d", "--cluster", "8xh100"), ("quickstart", "--time", "0 s"), ("quickstart", "--set", "time=0min")):
        assert "is no time at all; write for example '30 s'" in lmworks("plan", *words).error


def test_experts_are_not_planned_with_the_mfu_of_dense_models(lmworks: Lmworks, tmp_path: Path) -> None:
    """35% by DeepSeek-V3's hours; on CPUs, and with an MFU of the user's own, what the cluster file says."""
    dense, experts = (plan(lmworks, recipe, "--cluster", "8xh100") for recipe in ("dense-125m", "glm-15b-a3b"))
    assert (dense["mfu"], experts["mfu"]) == (0.4, 0.35) and "arXiv:2412.19437" in experts["mfu_source"]
    assert 0.33 < 6 * 37e9 * 14.8e12 / (2.664e6 * 3600 * 989e12) < 0.36, "what the figure follows from"
    own = tmp_path / "own.yaml"
    own.write_text((shipped_folder() / "clusters" / "8xh100.yaml").read_text(encoding="utf-8") + "mfu_of_experts: 0.2\n", encoding="utf-8")
    assert plan(lmworks, "glm-15b-a3b", "--cluster", str(own))["mfu"] == 0.2
    assert plan(lmworks, "dense-125m", "--cluster", str(own))["mfu"] == 0.4
    timed = plan(lmworks, "glm-15b-a3b", "--time", "10d", "--cluster", "64xh100")
    assert timed["mfu"] == 0.35 and timed["seconds"] == pytest.approx(10 * DAY, rel=0.01)


def test_a_weight_without_a_sequence_is_refused_with_its_key(lmworks: Lmworks) -> None:
    """Whatever text there is, and on any cluster; a weight of 1 in 10,000 has sequences."""
    words = ("plan", "quickstart", "--cluster", "2-cores", "--set", "time=null", "--set")
    error = lmworks(*words, "train.phases.general.mixture={code: 0.999999, docs: 0.000001}").error
    assert "train.phases.general.mixture: the weight 1e-06 of docs rounds to 0 of 10,000; raise it to 0.0001 or more" in error
    assert lmworks(*words, "train.phases.general.mixture={code: 0.9999, docs: 0.0001}").code == 0


@pytest.mark.parametrize("more", [(), ("--set", "layout=auto")])
@pytest.mark.parametrize("cluster", ["2-cores", "8xh100"])
def test_experts_of_an_odd_size_are_named_and_not_the_number_of_devices(lmworks: Lmworks, cluster: str, more: tuple[str, ...]) -> None:
    words = ("plan", "quickstart", "--cluster", cluster, "--set", "time=null", "--set", "model.moe.moe_intermediate_size=100")
    error = lmworks(*words, *more).error
    assert "model.moe.moe_intermediate_size 100 is not a multiple of 8" in error and "set 104" in error
    assert "no layout divides" not in error and "devices" not in error


def test_more_served_tokens_mean_a_smaller_model_trained_for_longer_in_the_same_time(lmworks: Lmworks) -> None:
    words = ("--time", "3d", "--cluster", "8xh100")
    found = [plan(lmworks, *words), *(plan(lmworks, *words, "--served-tokens", count) for count in ("1B", "100B", "1T"))]
    active = [one["counts"]["active"] for one in found]
    assert active[0] == active[1] > active[2] > active[3], "a billion tokens are nothing beside the training"
    assert all(one["seconds"] == pytest.approx(3 * DAY, rel=0.01) for one in found)


def test_a_time_for_which_the_text_does_not_last_is_said_with_the_epochs(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    """By the token files, and before they are there by the sizes of the files of text, which have at most so many tokens."""
    epochs = []
    for run_dir in (tiny.run_dir, tmp_path / "not yet"):
        words = (str(tiny.recipe), "--set", f"run_dir={run_dir}", "--time", "3d", "--cluster", "8xh100")
        (said,) = (one for one in plan(lmworks, *words)["warnings"] if "the text does not last" in one)
        assert "; a run with this time reads none more than 40 times (shards.max_epochs) and leaves the rest of the time unused" in said
        epochs.append(float(said.partition("source docs would be read ")[2].partition(" times or more")[0].replace(",", "")))
        assert not any("does not last" in one for one in plan(lmworks, *words, "--set", "shards.max_epochs=1e15")["warnings"])
    assert 1e6 < epochs[1] < epochs[0] < 10 * epochs[1]


def test_a_recipe_with_a_size_of_its_own_gets_the_tokens_that_fit(lmworks: Lmworks) -> None:
    found = plan(lmworks, "glm-15b-a3b", "--time", "10d", "--cluster", "64xh100")
    written = plan(lmworks, "glm-15b-a3b", "--cluster", "64xh100")
    assert found["counts"] == written["counts"] and found["seconds"] == pytest.approx(10 * DAY, rel=0.01)
    shares = [[phase["tokens"] / one["tokens"] for phase in one["phases"]] for one in (found, written)]
    assert shares[0] == pytest.approx(shares[1], rel=0.01), "the proportions of the recipe"


def test_a_size_that_does_not_fit_into_memory_gives_way_to_the_largest_that_does(lmworks: Lmworks) -> None:
    found = plan(lmworks, "--time", "1500d", "--cluster", "1xh200")
    assert "the largest that fits into the memory" in found["budget"]["why"]
    assert found["tokens_per_parameter"] > 25


def test_the_loss_is_predicted_where_there_is_a_law(lmworks: Lmworks, tmp_path: Path) -> None:
    samples = tuple((e, a, 60.0, 0.3, 0.35, 0.01, 1.0) for e, a in ((0.59, 18.0), (0.61, 22.0)))
    law = LossLaw(0.6, 20.0, 60.0, 0.3, 0.35, "bits per byte", "12 runs", samples=samples)
    save_law(law, tmp_path / LAW_FILE)
    assert load_law(tmp_path) == law
    words = ("plan", "--time", "3d", "--cluster", "8xh100", "--ladder", tmp_path)
    said = lmworks(*words).out
    found = plan(lmworks, *map(str, words[1:]))
    active, tokens = found["counts"]["active"] - (0 if found["counts"]["tied"] else found["counts"]["embedding"]), found["tokens"]
    assert f"predicted loss: {law.predict(active, tokens):.3f} bits per byte, 90% interval" in said
    best = min(found["budget"]["candidates"], key=lambda one: one["loss"])
    assert best["size"] == found["budget"]["chosen"], "the law decides, not 20 tokens per parameter"
    low, high = np.quantile([LossLaw(*one[:5]).optimal_parameters(6 * active * tokens) for one in samples], [0.05, 0.95])
    assert low < law.optimal_parameters(6 * active * tokens) < high < 2 * low
    assert found["budget"]["why"] == (
        f"compute-optimal for this time by the fitted law; 90% interval {amount(low)} to {amount(high)} active parameters without the "
        "embedding look-up"
    )
    ratio = active * tokens / law.optimal_parameters(6 * active * tokens) ** 2
    assert f"({ratio:,.1f} is compute-optimal by the fitted law" in said and "20 is compute-optimal" not in said
    save_law(replace(law, undetermined="the compute-optimal size"), tmp_path / LAW_FILE)
    assert "20 is compute-optimal" in lmworks("plan", "dense-125m", "--cluster", "8xh100", "--ladder", tmp_path).out


def test_a_loss_far_beyond_the_runs_of_the_ladder_is_warned_of(lmworks: Lmworks, tmp_path: Path) -> None:
    """Beyond 30 times the operations of its largest run."""
    words = ("plan", "--time", "3d", "--cluster", "8xh100", "--ladder", tmp_path)
    for times in (29.0, 31.0):
        law = LossLaw(0.6, 20.0, 60.0, 0.3, 0.35, "bits per byte", "12 runs", fitted_to=FittedTo((1e6, 3e7), (2e8, 1.5e9), 1e18))
        save_law(law, tmp_path / LAW_FILE)
        found = plan(lmworks, *map(str, words[1:]))
        embedding = 0 if found["counts"]["tied"] else found["counts"]["embedding"]
        flops = 6 * (found["counts"]["active"] - embedding) * found["tokens"]
        assert law.fitted_to is not None
        save_law(replace(law, fitted_to=replace(law.fitted_to, flops=flops / times)), tmp_path / LAW_FILE)
        warned = [one for one in plan(lmworks, *map(str, words[1:]))["warnings"] if "predicted loss" in one]
        text = "31 times the operations of the ladder's largest run (fitted to 1M to 30M active parameters and 200M to 1.5B tokens)"
        assert [text in one for one in warned] == ([True] if times > 30 else [])
        assert (text in " ".join(lmworks(*words).out.split())) == (times > 30)


def test_stages_that_are_not_counted_are_named(lmworks: Lmworks) -> None:
    """The quickstart tunes its model after pretraining, which is in no phase of the plan."""
    said = lmworks("plan", "quickstart", "--set", "time=null").out
    assert "not counted: stages after pretraining (tune); saves" in " ".join(said.split())
    assert plan(lmworks, "quickstart", "--set", "time=null", "--set", "tune=null")["later_stages"] == []


def test_saves_that_are_not_counted_are_said_with_the_remedy(lmworks: Lmworks, tmp_path: Path) -> None:
    text = "not counted: saves and reading of tokens: 8xh100 states no disk_gb_per_second"
    assert text in " ".join(lmworks("plan", "dense-125m", "--cluster", "8xh100").out.split())
    stated = tmp_path / "stated.yaml"
    stated.write_text((shipped_folder() / "clusters" / "8xh100.yaml").read_text() + "disk_gb_per_second: 0.001\n", encoding="utf-8")
    assert "not counted" not in lmworks("plan", "dense-125m", "--cluster", stated).out
    found = [plan(lmworks, "dense-125m", "--cluster", str(where)) for where in ("8xh100", stated)]
    assert text.removeprefix("not counted: ") in found[0]["not_counted"] and found[1]["not_counted"] == ""
    assert found[0]["overheads"]["saves"] == 0 < found[1]["overheads"]["saves"] and found[0]["seconds"] < found[1]["seconds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name a recipe, or give --time or --money"),
        (("--time", "3d", "--money", "5", "--cluster", "8xh100"), "--time and --money both set the time"),
        (("--money", "5"), "name one with --cluster"),
        (("--money", "5", "--cluster", "2-cores"), "cluster 2-cores has no price; set dollars_per_device_hour"),
        (("quickstart", "--served-tokens", "1T"), "give --size auto"),
        (("--time", "3d", "--cluster", "8xh100", "--served-tokens", "x"), "--served-tokens x is not a number of tokens; write for example"),
        (("--time", "3d", "--cluster", "8xh100", "--served-tokens", "-1T"), "--served-tokens -1T is not a number of tokens"),
        (("--time", "3d", "--cluster", "8xh100", "--ladder", "nowhere"), "nowhere has no fitted law"),
        (("--time", "3 parsecs"), "is not a time"),
        (("--money", "inf", "--cluster", "8xh100"), "--money: inf dollars rent 8xh100 for no time that can be planned"),
        (("--time", "1,5h", "--cluster", "8xh100"), "a comma separates thousands: write 1.5h"),
        (("quickstart", "--mfu", "1.5"), "--mfu is a number from 0.001 to 1, or a run directory; 1.5 is neither"),
        (("quickstart", "--mfu", "nowhere"), "nowhere is not a run directory"),
        (("quickstart", "--mfu", "0.4", "--calibrate"), "--calibrate and --mfu both set the MFU"),
    ],
)
def test_bad_input_is_one_line(lmworks: Lmworks, words: tuple[str, ...], message: str) -> None:
    assert message in lmworks("plan", *words).error


def test_a_speed_is_measured_for_the_devices_that_are_here(lmworks: Lmworks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for recipe in ("quickstart", "assistant"):  # a run without pretraining is rehearsed
        error = lmworks("plan", recipe, "--calibrate", "--cluster", "8xh100").error
        assert error.startswith("--calibrate measures the speed of this machine, a CPU, and cluster 8xh100 has others (H100); leave it out")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    for name in ("8xh100", "2-cores"):
        with pytest.raises(UserError, match="this machine, NVIDIA H200, and cluster"):
            planning._require_devices_here(load_cluster(name))
    planning._require_devices_here(load_cluster("1xh200"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"e": -1}', '{"e": 1, "a": NaN}', "[" * 100_000])
def test_a_law_that_is_none_is_refused(lmworks: Lmworks, tmp_path: Path, text: str) -> None:
    (tmp_path / LAW_FILE).write_text(text, encoding="utf-8")
    assert "is not a fitted law" in lmworks("plan", "--time", "3d", "--cluster", "8xh100", "--ladder", tmp_path).error


def test_a_run_records_its_prediction_before_the_first_step_and_then_its_error(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    run_dir = tiny.copy(tmp_path / "run").run_dir
    assert lmworks("pretrain", tiny.recipe, "--set", f"run_dir={run_dir}").code == 0
    events = read_ledger(run_dir / "ledger.jsonl")
    names = [line["event"] for line in events]
    assert names.index("prediction") < names.index("start") and names.count("prediction") == names.count("prediction_error") == 1
    found = events[names.index("prediction_error")]["figures"]
    assert set(found) >= {"perf/tokens_per_second", "seconds", "checkpoint_bytes"}
    assert all(one["error"] == pytest.approx(one["predicted"] / one["measured"] - 1, abs=1e-4) for one in found.values())
    assert abs(found["checkpoint_bytes"]["error"]) < 0.5, "small tensors have large headers"
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "Predicted and measured" in page and f"{100 * found['seconds']['error']:+.0f}%" in page
    assert lmworks("pretrain", tiny.recipe, "--set", f"run_dir={run_dir}").code == 0
    assert [line["event"] for line in read_ledger(run_dir / "ledger.jsonl")].count("prediction") == 1


def test_a_plan_takes_the_speed_of_a_run(lmworks: Lmworks, tiny_copy: Tiny) -> None:
    """The metrics have the MFU over the same peak (`conftest.py`), for FLOPs that depend on the sequence length of the phase."""
    recipe, run_dir = tiny_copy.recipe, tiny_copy.run_dir
    assert "has not begun to pretrain" in lmworks("plan", recipe, "--mfu", run_dir).error
    assert lmworks("pretrain", recipe, "--set", f"run_dir={run_dir}").code == 0
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["train/sequence_length"] for line in lines} == {32, 64}
    reached = lines[-1]["step"]
    with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:  # another process, at half the speed
        for line in lines:
            speed = {"perf/tokens_per_second": line["perf/tokens_per_second"] / 2}
            file.write(json.dumps(line | {"step": line["step"] + reached + 1} | speed) + "\n")
    start = next(event for event in read_ledger(run_dir / "ledger.jsonl") if event["event"] == "start")
    with (run_dir / "ledger.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(start | {"event": "resume", "step": reached}) + "\n")
    found = plan(lmworks, str(recipe), "--mfu", str(run_dir))
    assert found["mfu"] == pytest.approx(median(line["perf/mfu"] for line in lines) / 2, rel=1e-6)
    assert found["mfu_source"].startswith(f"measured in {run_dir}: median of {len(lines)} metrics lines, ")
    assert found["seconds"] == pytest.approx(plan(lmworks, str(recipe), "--mfu", str(found["mfu"]))["seconds"])
    assert "was trained on CPUs, and cluster 8xh100 has others" in lmworks("plan", recipe, "--mfu", run_dir, "--cluster", "8xh100").error
    slow = run_dir.parent / "slow.yaml"
    slow.write_text("device: 1 CPU thread\ntflops: 0.000001\nmemory_gib: 4\n", encoding="utf-8")
    assert "above the peak of cluster slow" in lmworks("plan", recipe, "--mfu", run_dir, "--cluster", slow).error


@pytest.mark.slow
def test_a_plan_takes_the_speed_of_a_run_of_two_ranks(lmworks: Lmworks, tiny_copy: Tiny, tmp_path: Path) -> None:
    """Ranks on CPUs share one machine, so their common speed is that of its one device, communication over gloo included."""
    recipe, run_dir = tiny_copy.recipe, tiny_copy.run_dir
    assert lmworks("launch", "local", recipe, "--ranks", 2, "--to", "pretrain", "--set", f"run_dir={run_dir}").code == 0
    assert next(event for event in read_ledger(run_dir / "ledger.jsonl") if event["event"] == "start")["ranks"] == 2
    cluster = tmp_path / "here.yaml"
    cluster.write_text("device: 2 CPU cores\ntflops: 50\nmemory_gib: 8\n", encoding="utf-8")
    model = tiny_copy.resolve().recipe.model
    lines = [one for one in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if "perf/tokens_per_second" in one]
    speed = median(one["perf/tokens_per_second"] * flops_per_token(model, one["train/sequence_length"]).total for one in lines)
    found = plan(lmworks, str(recipe), "--mfu", str(run_dir), "--cluster", str(cluster))
    assert found["mfu"] == pytest.approx(speed / 50e12, rel=1e-6) and f"median of {len(lines)} metrics lines" in found["mfu_source"]
    assert found["compute_seconds"] == pytest.approx(found["flops"] / speed, rel=1e-6), "the time of both ranks together"
    assert {phase["layout_in_mfu"] for phase in found["phases"]} == {False}, "one machine without pipeline stages: nothing to take out"
