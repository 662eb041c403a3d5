"""Changes that a finding offers: those that the run's own recipe takes, and that move a value to where they say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import test_rules_checkpoints
import test_rules_numerics
import test_rules_optimization
from judged import Metrics, judge
from test_rules_tuning import DPO, GRPO, TUNE

from lmworks.io.run_layout import of_stage
from lmworks.recipe.changes import as_tree
from lmworks.recipe.keys import get, locate
from lmworks.recipe.load import load_recipe_text
from lmworks.watch.diagnosis import all_rules, diagnose
from lmworks.watch.evidence import Evidence
from lmworks.watch.offers import NONE_LEFT, offered
from lmworks.watch.rule import Change, Finding
from lmworks.watch.run_files import open_run
from written_run import RECIPE, write_run

MLA = ["model.mla={q_lora_rank: 32, kv_lora_rank: 16, qk_nope_head_dim: 16, qk_rope_head_dim: 16, v_head_dim: 16}"]
MOE = ["model.moe={n_routed_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32}"]
LORA = [TUNE, "tune.lora={rank: 8}"]
STAGES = {"tune": [TUNE], "dpo": [DPO], "grpo": [GRPO]}


def keys_of(folder: Path, changes: Sequence[Change], overrides: Sequence[str] = (), stage: str = "pretrain") -> list[str]:
    """The keys that are offered to a run, of these changes; empty for what is left when none of them is."""
    run = write_run(folder / f"run-{len(list(folder.iterdir()))}", stage=stage, overrides=overrides)
    return [one.key for one in offered(Evidence(open_run(run)), Finding((), changes=changes, code="disk-full")).changes]


@pytest.mark.parametrize(
    ("overrides", "change", "stays"),
    [
        ([], Change("model.use_qk_norm", "true"), True),
        (MLA, Change("model.use_qk_norm", "true"), False),
        (["optimizer.qk_clip_threshold=100"], Change("model.use_qk_norm", "true"), False),
        (MLA, Change("optimizer.qk_clip_threshold", "100"), True),
        (LORA, Change("optimizer.qk_clip_threshold", "100"), False),
        (MOE, Change("model.moe.balance.bias_update_rate", "0.02"), True),
        ([], Change("tune.save_every", "20%"), False),
        ([TUNE], Change("tune.save_every", "20%"), False),
        ([], Change("train.save_every", "20%"), True),
        ([], Change("train.save_every", "10%"), False),  # it is that
        ([], Change("launch.timeout", "600 s"), False),  # in other words, too
        ([], Change("launch.timeout", "5 min", moves="up"), False),
        ([], Change("launch.timeout", "5 min", moves="down"), True),
        (["launch.timeout=1 min"], Change("launch.timeout", "2 min", moves="down"), False),
        ([], Change("train.save_every_time", "20 min", moves="up"), True),  # of no value yet
        ([], Change("train.phases.0.sequence_length", "1024 tokens"), True),
        ([], Change("train.phases.0.sequence_length", "100 tokens"), False),  # which do not divide the batch
        ([], Change("train.phases.7.tokens", "1M"), False),
    ],
)  # fmt: skip
def test_a_change_is_offered_if_the_recipe_takes_it_and_it_moves_the_value(
    overrides: list[str], change: Change, stays: bool, tmp_path: Path
) -> None:
    assert keys_of(tmp_path, [change, Change(advice="another way")], overrides) == [*([change.key] if stays else []), ""]
    try:
        load_recipe_text(RECIPE, [*overrides, f"{change.key}={change.value}"])
    except ValueError:
        assert not stays


def test_a_finding_without_a_change_that_helps_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", overrides=["checkpoints.keep_last=1"])
    found = offered(Evidence(open_run(run)), Finding((), changes=[Change("checkpoints.keep_last", "1")], code="disk-full"))
    assert [str(one) for one in found.changes] == [f"{NONE_LEFT}disk-full"]


@pytest.mark.parametrize("text", ['{"name": "old", "model": {"of": "another version"}}', "{}", '{"model": 3}', "[1]"])
def test_of_a_recipe_that_cannot_be_read_every_change_stays(text: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "resolved.json").write_text(text)
    finding = Finding((), changes=[Change("checkpoints.keep_last", "1"), Change("tune.save_every", "1%")], code="disk-full")
    assert offered(Evidence(open_run(run)), finding) is finding


Case = tuple[Any, Sequence[Any], Sequence[str]]
SICK: dict[str, Case] = {  # one of each cause
    **{code: (change, (), over) for change, over, code in test_rules_optimization.NAMED.values()},
    **{code: (change, events, over) for change, events, over, code in test_rules_numerics.NAMED.values()},
    **{codes[0]: (change, events, over) for change, events, over, codes in test_rules_checkpoints.NAMED.values()},
}


@pytest.mark.parametrize("kind", [MLA, MOE, LORA, ["launch.timeout=1 min", "checkpoints.keep_last=1", "checkpoints.local=/scratch"]])
def test_every_offer_to_a_sick_run_is_one_that_the_loader_takes(kind: list[str], tmp_path: Path) -> None:
    seen = 0
    for number, (change, events, own) in enumerate(SICK.values()):
        overrides = [*kind, *own]
        found = judge(tmp_path / str(number), change, events, overrides)
        now = as_tree(load_recipe_text(RECIPE, overrides).recipe)
        for one in (each for finding in (*found.problems, *found.unsure, *found.notes) for each in finding.changes if each.key):
            seen += 1
            after = as_tree(load_recipe_text(RECIPE, [*overrides, f"{one.key}={one.value}"]).recipe)
            keys = locate(after, one.key)
            assert get(after, keys) != get(now, keys), f"{one.key} is {one.value} already"
    assert seen > 10


def stands_still(metrics: Metrics) -> None:
    metrics["perf/save_seconds"] = [60.0 if step % 20 == 0 else 0.0 for step in range(1, 201)]


@pytest.mark.parametrize("stage", STAGES)
def test_the_changes_for_slow_saves_are_keys_of_every_stage(stage: str, tmp_path: Path) -> None:
    saves: Metrics = {}
    stands_still(saves)
    run = write_run(tmp_path / "run", saves, stage=stage, overrides=STAGES[stage])
    (found,) = diagnose(Evidence(open_run(run), of_stage(stage)), [all_rules()["slow-saves"]]).problems
    assert [one.key for one in found.changes] == ["checkpoints.local", "train.save_every"]


PHASE = "train.phases.0.save_every=40 steps"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"train.save_every": "50%"}),  # 30% of the time, and half of the run at most
        (["train.save_every=20 steps"], {"train.save_every": "100 steps"}),
        (["train.save_every=20480 tokens"], {"train.save_every": "102400 tokens"}),
        (["train.save_every_time=10 s", "train.save_every=50%"], {"train.save_every_time": "3 min"}),
        (["train.save_every_time=100 s"], {"train.save_every": "50%", "train.save_every_time": "17 min"}),
        ([PHASE], {"train.phases.0.save_every": "100 steps"}),
        (["train.save_every=50%"], {}),
    ],
)  # fmt: skip
def test_saves_become_rarer_by_the_intervals_that_are_in_force(overrides: list[str], expected: dict[str, str], tmp_path: Path) -> None:
    (found,) = judge(tmp_path, stands_still, overrides=[*overrides, "checkpoints.local=/scratch"], only="slow-saves").problems
    assert {one.key: one.value for one in found.changes if one.key} == expected


def test_what_bounds_attention_scores_follows_from_the_architecture(tmp_path: Path) -> None:
    (change, own, _) = next(case for case in test_rules_optimization.NAMED.values() if case[2] == "attention-logits-growing")
    for number, (more, expected) in enumerate({
        (): ["model.use_qk_norm"], ("model.use_qk_norm=true",): ["optimizer.learning_rate"],
        tuple(MLA): ["optimizer.qk_clip_threshold", "optimizer.learning_rate"],
        ("optimizer.qk_clip_threshold=300",): ["optimizer.qk_clip_threshold", "optimizer.learning_rate"],
        ("optimizer.qk_clip_threshold=50",): ["optimizer.learning_rate"],
    }.items()):  # fmt: skip
        (found,) = judge(tmp_path / str(number), change, (), [*own, *more], only="attention-logits-growing").problems
        assert [one.key for one in found.changes] == expected
