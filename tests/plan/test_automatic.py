"""`layout: auto`: one layout for all phases by the plan's rule, the same wherever it is decided, and kept by a run that has begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.errors import UserError
from lmworks.parallel.pipeline_stages import bubble
from lmworks.plan.automatic import choose_layout, devices_of, layout_of_run
from lmworks.plan.layout import MARGIN, Placement, automatic, fits, legal, place, problems
from lmworks.plan.plan import make_plan
from lmworks.recipe.load import load_cluster, load_recipe
from lmworks.recipe.schema.layout import Layout, layout_for, world_size


@pytest.mark.parametrize(("name", "where"), [("smollm3-3b", "64xh100"), ("glm-15b-a3b", "64xh100"), ("glm46-355b-a32b", "8192xh800")])
def test_one_layout_suits_all_phases_and_nothing_smaller_does(name: str, where: str) -> None:
    recipe, cluster = load_recipe(name, ["layout=auto"]).recipe, load_cluster(where)
    found = choose_layout(recipe, cluster)
    longest = max(recipe.train.phases, key=lambda phase: phase.sequence_length)
    assert world_size(found.layout) == cluster.nodes * cluster.devices_per_node
    assert not found.layout.auto
    for phase in recipe.train.phases:
        assert list(problems(recipe, cluster, found.layout, phase)) == []
        assert fits(place(recipe, cluster, found.layout, phase), cluster)
    for other in legal(recipe, cluster, [longest], recipe.layout.zero):
        if (other.pp, other.cp, other.tp, other.ep) == (found.layout.pp, found.layout.cp, found.layout.tp, found.layout.ep):
            break
        of_all = [place(recipe, cluster, other, phase) for phase in recipe.train.phases if not [*problems(recipe, cluster, other, phase)]]
        assert len(of_all) < len(recipe.train.phases) or not all(fits(one, cluster, MARGIN) for one in of_all), other
    assert choose_layout(recipe, cluster) == found
    assert {phase.placed.layout for phase in make_plan(recipe, "", cluster).phases} == {found.layout}
    assert "every phase fits" in found.why and cluster.device in found.why


def test_layouts_that_divide_a_step_evenly_come_first() -> None:
    """Eight sequences on six devices: two or one ranks of several devices each, before three pairs, one of which waits for a third of the
    step, and six ranks, of which four wait for half of it. With many sequences the six wait little."""
    recipe, cluster = load_recipe("dense-125m").recipe, load_cluster("8xh100").model_copy(update={"devices_per_node": 6})
    short = recipe.train.phases[0].model_copy(update={"sequence_length": 1024, "global_batch_tokens": 8 * 1024})
    ranks = [one.dp_shard for one in legal(recipe, cluster, [short], 1)]
    waiting = ranks.index(3)
    assert set(ranks[:waiting]) == {1, 2} and set(ranks[waiting:-1]) == {3} and ranks[-1] == 6
    many = short.model_copy(update={"global_batch_tokens": 128 * 1024})
    first, *_ = legal(recipe, cluster, [many], 1)
    assert first.dp_shard == 6


def test_a_pipeline_gets_the_schedule_that_leaves_it_idle_least() -> None:
    """More devices than a small batch feeds."""
    recipe, cluster = load_recipe("smollm3-3b").recipe, load_cluster("64xh100").model_copy(update={"nodes": 256, "memory_gib": 40})
    phase = recipe.train.phases[0]
    placed, _ = automatic(recipe, cluster, phase, 1)
    assert placed is not None and placed.layout.pp > 1
    plain = place(recipe, cluster, placed.layout.model_copy(update={"pipeline_schedule": "1f1b", "pipeline_stages_per_rank": 1}), phase)

    def idle(one: Placement) -> float:
        return bubble(one.layout.pp, one.accumulation, one.layout.pipeline_schedule, one.layout.pipeline_stages_per_rank)

    assert placed.layout.pipeline_schedule == "interleaved" and idle(placed) < idle(plain)
    assert list(problems(recipe, cluster, placed.layout, phase)) == [] and fits(placed, cluster)
    busy = load_recipe("glm46-355b-a32b").recipe
    small = load_cluster("8192xh800").model_copy(update={"nodes": 64, "memory_gib": 30})
    placed, _ = automatic(busy, small, busy.train.phases[0], 1)
    assert placed is not None and placed.layout.pp > 1 and placed.layout.pipeline_schedule == "1f1b", "64 micro-batches keep it busy"


def test_what_fits_nowhere_is_said_with_what_would_help() -> None:
    with pytest.raises(UserError, match=r"^layout: auto: .* needs .* GiB on a device of 131 .*; the nearest that fits is \d+ x") as refused:
        choose_layout(load_recipe("glm-15b-a3b", ["layout=auto"]).recipe, load_cluster("1xh200"))
    assert "\n" not in str(refused.value)


def test_auto_is_spelt_in_the_file_and_on_the_command_line(tmp_path: Path) -> None:
    text = Path(load_recipe("quickstart").path).read_text(encoding="utf-8")
    path = tmp_path / "mine.yaml"
    path.write_text(text + "\nlayout: auto\n")
    assert load_recipe(path).recipe.layout == Layout(auto=True) == load_recipe("quickstart", ["layout=auto"]).recipe.layout
    assert load_recipe(path, ["layout.zero=3"]).recipe.layout == Layout(auto=True, zero=3), "what is not an axis may be given"
    given = Layout(pp=2, dp_shard=2)
    assert load_recipe(path, given.overrides()).recipe.layout == given
    with pytest.raises(UserError, match=r"layout\.auto chooses all axes; leave out tp, or auto"):
        load_recipe(path, ["layout.tp=2"])


def test_a_run_that_has_begun_keeps_its_layout_on_any_number_of_ranks(tmp_path: Path) -> None:
    assert layout_of_run(tmp_path) is None
    resolved = load_recipe("quickstart", ["layout={tp: 2, dp_shard: 2}", "train.micro_batch_sequences=2", f"run_dir={tmp_path}"])
    resolved.save(tmp_path)
    assert layout_of_run(tmp_path) is None, "nothing was trained yet"
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    found = layout_of_run(tmp_path)
    assert found is not None
    again = load_recipe("quickstart", ["layout=auto", f"run_dir={tmp_path}", *found.overrides()])
    assert again.recipe == resolved.recipe
    assert layout_for(found.layout, 6) == Layout(tp=2, dp_shard=3)


def test_ranks_on_cpus_share_the_memory_of_their_host() -> None:
    two, four = devices_of(None, 4, 2, threads=1), devices_of(None, 4, 4, threads=1)
    assert (two.nodes, two.devices_per_node, four.nodes, four.devices_per_node) == (2, 2, 1, 4)
    if two.on_cpu:
        assert two.memory_gib == pytest.approx(2 * four.memory_gib)
    named = devices_of(load_cluster("64xh100"), 16, 8, threads=1)
    assert (named.nodes, named.memory_gib) == (2, load_cluster("64xh100").memory_gib)
