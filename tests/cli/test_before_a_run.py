"""`show` and `plan` before a run is paid for: faults of the sources, runs as recipes, presets, and plans that are unwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from command import Lmworks

from lmworks.api import planning
from lmworks.host import machine
from lmworks.plan.layout import MARGIN, automatic, place
from lmworks.plan.memory import GIB
from lmworks.recipe.load import load_cluster, load_recipe
from lmworks.run import prediction
from lmworks.train import calibrate

RECIPE = """
name: looked-at
corpus: {{sources: [{{name: a, kind: jsonl, path: {path}, domain: web, rules: {rules}, license: MIT}}]}}
model: {{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 32, intermediate_size: 128}}
train: {{phases: [{{name: one, tokens: 4096 tokens, mixture: {{a: 1}}, sequence_length: 64 tokens, global_batch_tokens: 256 tokens}}]}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(path=tmp_path / "nowhere.jsonl", rules="nosuch"))
    return path


@pytest.mark.parametrize("command", ["show", "plan"])
def test_files_and_rules_are_looked_at(lmworks: Lmworks, recipe: Path, tmp_path: Path, command: str) -> None:
    done = lmworks(command, recipe)
    assert done.code == (0 if command == "show" else 2), "a plan refuses what a run would refuse"
    said = "".join((done.out + done.err).split())
    assert "nowhere.jsonl" in "".join(said.split("sourcea:")[1:]) and "sourcea:unknownrules'nosuch'" in said
    (tmp_path / "nowhere.jsonl").write_text('{"text": "here"}\n' * 9999)
    recipe.write_text(RECIPE.format(path=tmp_path / "nowhere.jsonl", rules="none"), encoding="utf-8")
    assert "source a" not in lmworks(command, recipe).out


def test_a_plan_names_all_faults(lmworks: Lmworks, tmp_path: Path) -> None:
    """Of all sources, phases, sets and stages. The run refuses the first, before it does anything."""
    rows = {"chats.jsonl": '{"messages": 7}\n', "pairs.jsonl": '{"prompt": "a", "chosen": "b"}\n', "prompts.jsonl": '{"prompt": ""}\n'}
    for name, line in rows.items():
        (tmp_path / name).write_text(line * 3)
    (tmp_path / "here.txt").write_text("some text")

    def data(*names: str, **keys: object) -> list[dict[str, object]]:
        return [{"name": f"{name}-{n}", "kind": "files", "path": str(tmp_path / name), **keys} for n, name in enumerate(names)]

    one = {"tokens": "4096 tokens", "mixture": {"a": 1}, "sequence_length": "64 tokens", "global_batch_tokens": "256 tokens"}
    long = {"kind": "wsd", "warmup": "90%", "decay": "90%"}
    source = {"kind": "jsonl", "domain": "web", "license": "MIT", "path": str(tmp_path / "nowhere.jsonl")}
    step = {"step": "python", "file": "steps.py", "function": "none"}
    tree = yaml.safe_load(RECIPE.format(path=tmp_path / "nowhere.jsonl", rules="nosuch")) | {
        "train": {"phases": [one | {"name": "first", "lr_schedule": long}, one | {"name": "second", "lr_schedule": long}]},
        "tune": {"data": data("chats.jsonl", "absent.jsonl", "missing.jsonl"), "epochs": 1},
        "dpo": {"data": data("gone.jsonl", "lost.jsonl")},
        "grpo": {"data": data("prompts.jsonl", "vanished.jsonl", reward="math"), "group_size": 2},
        "evaluate": {
            "benchmarks": [{"name": "nosuchset"}, {"name": "norsuch"}],
            "protect": [{"name": name, "kind": "jsonl", "path": str(tmp_path / f"{name}.jsonl"), "question": "q"} for name in ("p1", "p2")],
        },
    }
    tree["corpus"]["sources"] += [source | {"name": "b", "path": "not-here/"}, source | {"name": "c", "rules": "noneither"}]
    tree["corpus"]["steps"] = [step]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    done = lmworks("plan", tmp_path / "recipe.yaml")
    said = "".join((done.out + done.err).split())
    assert done.code == 2
    for fault in (
        "source a: unknown rules 'nosuch'", "source c: unknown rules 'noneither'", "not-here", "steps.py", "phase first: ",
        "phase second: ", "absent.jsonl", "missing.jsonl", "gone.jsonl", "lost.jsonl", "vanished.jsonl", "'nosuchset'", "'norsuch'",
        "protect.p1", "protect.p2",
    ):  # fmt: skip
        assert fault.replace(" ", "") in said, fault
    run = lmworks("run", tmp_path / "recipe.yaml", "--set", f"run_dir={tmp_path / 'run'}")
    assert run.code == 2 and run.error in done.err and len(run.error.splitlines()) == 1


def test_a_run_is_a_recipe(lmworks: Lmworks, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    load_recipe(recipe, ["seed=77"]).save(run)
    found = json.loads(lmworks("show", run, "--json").out)
    assert "77" in json.dumps(found)
    assert "looked-at" in lmworks("plan", run).out


def test_a_preset_says_how_it_is_used(lmworks: Lmworks) -> None:
    error = lmworks("plan", "dense-1b").error
    assert "is a model preset" in error and "dense-125m --set model.preset=dense-1b" in error
    assert (
        load_recipe("dense-125m", ["model.preset=dense-1b"]).recipe.model.num_hidden_layers
        != load_recipe("dense-125m").recipe.model.num_hidden_layers
    )


def test_years_are_remarked_on(lmworks: Lmworks) -> None:
    assert "years; use more devices" in " ".join(lmworks("plan", "smollm3-3b", "--cluster", "1xh200").out.split())
    assert "years" not in lmworks("plan", "dense-125m", "--cluster", "8xh100").out


def test_a_chosen_layout_leaves_a_margin() -> None:
    """Where one does. With a little less memory than the first that fits, the next is taken."""
    recipe, cluster = load_recipe("glm-15b-a3b").recipe, load_cluster("64xh100")
    phase = recipe.train.phases[0]
    chosen, _ = automatic(recipe, cluster, phase, recipe.layout.zero)
    assert chosen and chosen.memory.total <= (1 - MARGIN) * cluster.memory_gib * GIB
    least = place(recipe, cluster.model_copy(update={"memory_gib": 1.0}), chosen.layout, phase).memory.total / GIB
    tight = cluster.model_copy(update={"memory_gib": least * 1.01})  # its smallest micro-batch fits, with 1% to spare
    other, _ = automatic(recipe, tight, phase, recipe.layout.zero)
    assert other and other.layout != chosen.layout


def test_the_shipped_recipes_do_not_warn_of_themselves(lmworks: Lmworks) -> None:
    out = lmworks("plan", "glm46-355b-a32b", "--cluster", "8192xh800").out
    assert "positions stay" not in out and "checkpointing" in out


def test_omp_num_threads_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: range(6))
    monkeypatch.setattr(machine, "_cpu_quotas", list)
    for asked, threads in (("2", 2), ("99", 6), ("nonsense", 6), ("3,1", 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert load_recipe("quickstart").recipe.threads == threads
    monkeypatch.setenv(machine.VARIABLE, "cores=5,peak=1e11")
    assert load_recipe("quickstart").recipe.threads == 5  # a word about the machine counts more


def test_a_plan_says_what_this_machine_lacks_only_where_it_is_for_this_machine(
    lmworks: Lmworks, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    (tmp_path / "here.jsonl").write_text('{"text": "here"}\n' * 9999)
    recipe.write_text(RECIPE.format(path=tmp_path / "here.jsonl", rules="none"), encoding="utf-8")
    monkeypatch.setattr(prediction, "shortage", lambda *_, most=False: "little room is left" if most else None)
    assert "little room is left" in lmworks("plan", recipe).out
    assert "little room is left" not in lmworks("plan", recipe, "--cluster", "8xh100").out


def test_a_speed_that_was_measured_here_has_no_communication_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a plan for several machines adds it."""
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: (0.31, "measured"))
    assert planning._mfu(None, load_recipe("quickstart").recipe, load_cluster("8xh100"), True) == (0.31, "measured", False)
