"""What each kind of ablation file expands to, and arms that continue a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from given_results import ONE_PHASE

from lmworks.ablate.ablate import Options, run_ablation
from lmworks.ablate.cost import FILE as SPEED
from lmworks.ablate.resolve import Experiment, resolve
from lmworks.ablate.runs import command, recipe_of
from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.metrics.log import read
from lmworks.watch.ledger import read_ledger
from tiny_run import Tiny

Make = Callable[..., Experiment]


@pytest.fixture
def make(tiny: Tiny, tmp_path: Path) -> Make:
    """Resolve an ablation of the tiny recipe with these keys."""

    def made(**keys: Any) -> Experiment:
        path = tmp_path / "made.yaml"
        path.write_text(yaml.safe_dump({"recipe": str(tiny.recipe), "out": str(tmp_path / "out")} | keys, sort_keys=False))
        return resolve(path)

    return made


def changes(experiment: Experiment) -> dict[str, list[str]]:
    return {arm.name: [str(change) for change in arm.changes] for arm in experiment.arms.values()}


def test_architecture_switches_features(make: Make) -> None:
    found = changes(make(kind="architecture", features=["qk-norm", "gqa", "moe", "tied-embeddings", "mtp", "rope", "post-norm", "z-loss"]))
    assert found.pop("recipe") == []
    assert found["without-qk-norm"] == ["model.use_qk_norm (true -> false)"]
    assert found["without-gqa"] == ["model.num_key_value_heads (1 -> 2)"]
    assert found["with-tied-embeddings"] == ["model.tie_word_embeddings (false -> true)"]
    assert found["without-moe"] == ["model.intermediate_size (64 -> 48)", "model.moe (taken out)"], "two experts and a shared one of 16"
    assert found["with-mtp"] == ["model.mtp (added)"]
    assert found["half-rope"] == ["model.rope.partial_rotary_factor (1.0 -> 0.5)"]
    assert found["with-post-norm"] == ["model.norm_position (pre -> post)"]
    assert found["without-z-loss"] == ["model.z_loss_weight (0.0001 -> 0.0)"]


def test_a_mixture_loses_a_source_and_keeps_the_tokenizer(make: Make) -> None:
    experiment = make(kind="mixture", sources=["code"], factor=0.5)
    base, arm = experiment.arms.values()
    assert arm.name == "code-times-0.5"
    assert arm.recipe.train.phases[0].mixture == pytest.approx({"code": 0.35 / 0.65, "docs": 0.3 / 0.65})
    assert arm.recipe.train.phases[1].mixture == {"docs": 1.0}
    assert arm.recipe.tokenizer.path == str(experiment.data_dir(base) / "tokenizer" / "tokenizer.json")
    assert not experiment.is_paired(arm), "other tokens are read"
    assert [measure.name for measure in make(kind="mixture", sources=["code"], factor=0.5, measures=["validation/loss"]).measures]
    with pytest.raises(UserError, match="phase long has no source but docs, so it cannot be taken out"):
        make(kind="mixture", sources=["docs"])
    with pytest.raises(UserError, match="no mixture has 'cod'; did you mean 'code'"):
        make(kind="mixture", sources=["cod"])


def test_optimizers_rates_and_batches(make: Make) -> None:
    rates = make(kind="optimizer", rates={"muon": [0.01, 0.02], "adamw": [0.002]})
    assert list(rates.arms) == ["muon-0.01", "muon-0.02", "adamw-0.002"] and rates.baseline.name == "muon-0.01"
    assert changes(rates)["adamw-0.002"][0] == "optimizer.kind (muon -> adamw)"
    sweep = make(kind="learning-rate", factors=[0.5, 1.0, 2.0])
    assert {arm.name: arm.label for arm in sweep.arms.values()} == {"rate-0.005": 0.005, "rate-0.01": 0.01, "rate-0.02": 0.02}
    assert sweep.baseline.name == "rate-0.01" and all(map(sweep.is_paired, sweep.arms.values()))
    batches = make(kind="batch", factors=[1.0, 2.0], set=["train.phases.general.tokens=5056 tokens"])
    double = batches.arms["batch-512"].recipe
    assert [int(phase.global_batch_tokens) for phase in double.train.phases] == [512, 512] and double.train.phases[0].batch_ramp is None
    assert double.optimizer.learning_rate == pytest.approx(0.01 * 2**0.5)
    with pytest.raises(UserError, match=r"0\.3 times the batch of phase general"):
        make(kind="batch", factors=[1.0, 0.3])


def test_what_is_measured_may_differ_where_it_is_measured(make: Make) -> None:
    arms: dict[str, Any] = {"arms": {"one": [], "two": ["evaluate.benchmark_items=9"]}}
    assert len(make(**arms, measures=["evaluation/bits_per_byte"]).arms) == 2
    with pytest.raises(UserError, match="equals arm one"):
        make(**arms, measures=["validation/bits_per_byte"])


def test_tokenizers_are_compared_per_byte(make: Make) -> None:
    experiment = make(kind="tokenizer", vocab_sizes=[600], kinds=["sentencepiece"])
    assert [arm.recipe.model.vocab_size for arm in experiment.arms.values()] == [512, 600, 512]
    assert {measure.name for measure in experiment.measures} == {f"evaluation/{name}bits_per_byte" for name in ("", "code/", "docs/")}
    assert len({arm.data_key for arm in experiment.arms.values()}) == 3
    with pytest.raises(UserError, match="different tokenizers"):
        make(kind="tokenizer", vocab_sizes=[600], measures=["train/loss"])


def test_copies_differ_in_their_initial_weights_alone(make: Make) -> None:
    experiment = make(kind="noise", copies=3)
    assert all(map(experiment.is_paired, experiment.arms.values()))
    assert {arm.recipe.training_seed for arm in experiment.arms.values()} == {5}
    runs = experiment.runs
    assert {recipe_of(run).training_seed for run in runs} == {1, 2, 3} and len({recipe_of(run).init_seed for run in runs}) == len(runs)
    for run in runs:
        assert f"train.init_seed={recipe_of(run).init_seed}" in command(experiment, run)


def test_seeds_vary_the_initial_weights_whatever_the_recipe_says(make: Make) -> None:
    """A train.init_seed of the recipe, of `set`, or of an arm tells arms apart and not seeds."""
    arms = {"a": [], "b": ["train.init_seed=8"]}
    for given in ({}, {"set": ["train.init_seed=7"]}):
        experiment = make(arms=arms, seeds=3, **given)
        drawn = {run.name: recipe_of(run).init_seed for run in experiment.runs}
        assert len(set(drawn.values())) == 6, drawn
        assert drawn == {run.name: recipe_of(run).init_seed for run in make(arms=arms, seeds=3, **given).runs}, "each time the same"
    for one in ("train.seed=99", "run_dir=elsewhere"):
        with pytest.raises(UserError, match="is of each run, and the ablation sets it"):
            make(arms=arms, set=[one])
        with pytest.raises(UserError, match="is of each run, and the ablation sets it"):
            make(arms={"a": [], "b": [one]})


def test_arms_of_other_shards_are_not_paired_with_a_tokenizer_of_the_recipe(make: Make) -> None:
    for given in ([], ["tokenizer.path=some/tokenizer.json"]):
        arms = {"a": [], "shorter": ["corpus.max_document_bytes=8KB"], "rate": ["optimizer.weight_decay=0.2"]}
        experiment = make(arms=arms, set=given)
        assert [experiment.is_paired(arm) for arm in experiment.arms.values()] == [True, False, True]


def test_arms_have_the_tokens_of_the_baseline(make: Make) -> None:
    """Whatever their own phases say, and as near to them as whole steps allow."""
    tokens, batch = "train.phases.general.tokens", "train.phases.general.global_batch_tokens"
    arms = {"big": [f"{batch}=1024 tokens"], "base": [], "more": ["train.phases.long.tokens=4096 tokens"]}
    two = ["train.phases.general.batch_ramp=null", "train.phases.general.lr_schedule={warmup: 1 steps, decay: 1 steps}"]
    experiment = make(arms=arms, set=two, baseline="base")
    assert list(experiment.arms) == ["big", "base", "more"] and {arm.tokens for arm in experiment.arms.values()} == {2816 + 2048}
    assert {arm.tokens for arm in make(arms=arms, set=two, baseline="base", budget="4096 tokens").arms.values()} == {4096}
    large = make(arms={"base": [f"{batch}=1024 tokens"], "small": []}, set=[ONE_PHASE, f"{tokens}=4000 tokens"])
    assert {arm.tokens for arm in large.arms.values()} == {3072}, "and not 3,840 for the small batch"
    with pytest.raises(UserError, match=r"arm long equals arm a in all .*; all arms have the tokens of the baseline"):
        make(arms={"a": [], "long": [f"{tokens}=6144 tokens"]}, set=[ONE_PHASE])


def test_budgets_keep_the_proportions_of_the_phases(make: Make) -> None:
    experiment = make(kind="noise", budget="4096 tokens")
    assert [int(phase.tokens) for phase in experiment.baseline.recipe.train.phases] == [2560, 1536]
    by_time = resolve(experiment.path, speeds={"copy-1": 100.0, "copy-2": 80.0})
    assert by_time.arms["copy-1"].tokens > 1.15 * by_time.arms["copy-2"].tokens


@pytest.fixture(scope="module")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A run that has stopped in its first phase, with a checkpoint of step 12."""
    run = tiny.copy(tmp_path_factory.mktemp("trained") / "run")
    run.walk("train.phases=" + json.dumps([_short(run)]), last="pretrain")
    return run


def _short(run: Tiny) -> dict[str, Any]:
    """The first phase of the tiny recipe alone, without a ramp."""
    phase = yaml.safe_load(run.recipe.read_text())["train"]["phases"][0]
    return phase | {"tokens": "3072 tokens", "batch_ramp": None}


def test_arms_continue_a_checkpoint(trained: Tiny, make: Make) -> None:
    newest = listing.directories(trained.run_dir / "checkpoints")[-1]
    experiment = make(
        kind="anneal", recipe=str(trained.run_dir), checkpoint=str(trained.run_dir / "checkpoints" / "step-00000008"), budget="1024 tokens",
        candidates={"all-docs": {"docs": 3.0}},
    )  # fmt: skip
    assert newest.name == "step-00000012"
    old, new = experiment.arms.values()
    assert [int(phase.tokens) for phase in old.recipe.train.phases] == [8 * 256, 1024]
    assert old.recipe.train.phases[1].mixture == {"code": 0.7, "docs": 0.3}
    assert new.recipe.train.phases[1].mixture == pytest.approx({"code": 0.28, "docs": 0.72}), "40% of the old, 60% of the new"
    assert old.recipe.train.phases[1].learning_rate_scale == 1.0, "wsd has not begun to fall"
    same = {"again": {"code": 2.1, "docs": 0.9}}  # 0.7 and 0.3, up to the rounding of 2.1 / 3
    with pytest.raises(UserError) as raised:
        make(kind="anneal", recipe=str(trained.run_dir), checkpoint=str(trained.run_dir), budget="1024 tokens", candidates=same)
    assert str(raised.value).endswith(
        "arm again equals arm old in all that is trained or measured; change another key, or remove it (kind: noise compares equal arms)"
    ), "and no overrides of a phase"
    with pytest.raises(UserError, match="is of another model than the recipe"):
        make(kind="anneal", checkpoint=str(trained.run_dir), budget="1Ki", candidates={"d": {"docs": 1.0}}, set=["model.hidden_size=64"])
    with pytest.raises(UserError, match="is neither a run directory nor a checkpoint"):
        make(kind="anneal", checkpoint="nowhere", budget="1024 tokens", candidates={"d": {"docs": 1.0}})
    with pytest.raises(UserError, match="needs budget"):
        make(kind="critical-batch", checkpoint=str(trained.run_dir))


@pytest.mark.slow
def test_the_critical_batch_beside_the_gradient_noise_scale(trained: Tiny, make: Make) -> None:
    """Whole: two branches of a real checkpoint, trained, compared, and the gradients of that checkpoint measured."""
    start = trained.run_dir / "checkpoints" / "step-00000008"
    experiment = make(
        kind="critical-batch", recipe=str(trained.run_dir), checkpoint=str(start), budget="1024 tokens", factors=[1, 4], seeds=1,
        measures=["validation/loss", "evaluation/bits_per_byte"],
    )  # fmt: skip
    (experiment.out / "arms").mkdir(parents=True)
    known = {"seconds": 1.0, "flops": 1e9, "tokens_per_second": 1.0, "threads": 1}
    (experiment.out / SPEED).write_text(json.dumps(dict.fromkeys(experiment.arms, known)))  # nothing is calibrated
    document, out, _ = run_ablation(str(experiment.path), Options(jobs=2), lambda event: None, lambda line: None)
    runs = {arm: out / "arms" / arm / "seed-1" for arm in experiment.arms}
    for run in runs.values():
        events = read_ledger(run / "ledger.jsonl")
        assert [(e["event"], e["step"]) for e in events if e["event"] == "resume"] == [("resume", 8)], "with its optimizer state"
        assert [e["name"] for e in events if e["event"] == "stage_began"] == ["evaluate"]
    (data,) = (out / "data").glob("*/ledger.jsonl")
    made = [e["name"] for e in read_ledger(data) if e["event"] == "stage_began"]
    assert made == ["tokenizer"], "corpus and shards are those of the run that is continued"
    assert read(runs["batch-times-1"])[-1]["step"] == 12 and read(runs["batch-times-4"])[-1]["step"] == 9
    rates = {arm: read(run)[-1]["optim/learning_rate"] for arm, run in runs.items()}
    assert rates["batch-times-4"] == pytest.approx(2 * rates["batch-times-1"])
    assert document["verdicts"][0]["verdict"] == "no verdict"
    results = json.loads((runs["batch-times-4"] / "evaluate" / "results.json").read_text())["models"]["base"]
    values = document["measures"]["evaluation/bits_per_byte"]["values"]["batch-times-4"]
    assert values == {"1": results["bits_per_byte"]["overall"]["bits_per_byte"]}
    conclusion = document["conclusion"]
    assert [size for size, _ in conclusion["points"]] == [256, 1024] and conclusion["points"][0][1] == 0
    assert conclusion["critical"] == (1024 if conclusion["points"][1][1] <= 0.01 else 256)
    scale = conclusion["noise_scale"]
    assert scale["small"] == 32 and scale["large"] == 256 and scale["tokens"] > 1
    assert start.is_dir(), "the run that was continued keeps its checkpoint"
    assert "Critical batch size" in (out / "ablation.html").read_text()
