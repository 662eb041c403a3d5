"""`lmworks profile`: the largest item is the one that was planted, a run is left as it was, and what is measured is what there is."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmworks.cli.main import main
from lmworks.errors import UserError
from lmworks.plan.memory_kinds import total
from lmworks.profile.measure import Measurement
from lmworks.profile.report import Profile, from_plain
from lmworks.profile.run import profile
from lmworks.profile.spans import Spans
from lmworks.profile.target import open_target
from lmworks.recipe.parameters import parameters
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.batches import Batches
from tiny_run import STEPS, Tiny

LONG = (
    "train.phases.general.sequence_length=256", "train.phases.general.global_batch_tokens=1024", "train.phases.general.tokens=16Ki",
    "train.phases.general.batch_ramp=null", "train.phases.general.lr_schedule={kind: constant, warmup: 0%}",
    "model.max_position_embeddings=512",
)  # fmt: skip


def measured(
    tiny: Tiny, *overrides: str, run_dir: Path | None = None, warm_up: int = 0, timed: int = 1, trace: Path | None = None
) -> Profile:  # fmt: skip
    sets = [f"run_dir={run_dir or tiny.run_dir}", *overrides]
    found = profile(open_target(str(tiny.recipe), sets, None, None, None), warm_up, timed, trace)
    assert found is not None
    return found


def planned_to(error: float, found: Profile, *kinds: str) -> None:
    """These kinds of memory are what was planned, up to this share of it, and their sum is not more than a tenth above."""
    items = {kind: found.memory[kind] for kind in kinds}
    for kind, item in items.items():
        assert item.measured == pytest.approx(item.planned, rel=error), (kind, items)
    assert sum(item.measured for item in items.values()) <= 1.1 * sum(item.planned or 0.0 for item in items.values()), items


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_memory_is_what_the_model_has_and_the_plan_says(tiny: Tiny, tmp_path: Path) -> None:
    """Weights, gradients and optimizer state are exact; activations and logits are planned to 15%, and their sum to 10% at least."""
    before = everything(tiny.run_dir)
    trace = tmp_path / "trace.json"
    found = measured(tiny, trace=trace)
    recipe = tiny.resolve().recipe
    count = sum(one.size for one in parameters(recipe.model))
    assert found.memory["weights"].measured == found.memory["gradients"].measured == 4 * count
    assert found.memory["optimizer state"].measured == pytest.approx(found.memory["optimizer state"].planned, rel=1e-3)
    planned_to(0.15, found, "activations", "logits")
    parts = {name: item.measured for name, item in found.time.items()}
    inside = sum(parts.get(name, 0.0) for name in ("data", "forward", "backward", "optimizer", "collectives", "gap"))
    assert inside == pytest.approx(found.step_seconds, rel=0.2)
    assert min(parts[name] for name in ("forward", "backward", "optimizer", "validation", "save")) > 0
    assert not {"scoring", "rollouts"} & parts.keys()
    assert found.kernels and sum(float(one["share"]) for one in found.kernels) <= 1
    assert from_plain(json.loads(json.dumps(found.plain()))) == found
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"lmworks: forward", "lmworks: optimizer"} <= {event["name"] for event in events}
    assert everything(tiny.run_dir) == before and not list(tiny.run_dir.parent.glob(".lmworks-profile-*"))


def test_every_method_that_is_timed_is_called_in_a_step(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that a step no longer calls would leave its part without this time, and nothing else would show it."""
    timed, calls, given = Spans.timed, Counter[str](), []

    def counting(spans: Spans, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        given.append(function.__name__)

        def call(*args: Any, **options: Any) -> Any:
            calls[function.__name__] += 1
            return function(*args, **options)

        return timed(spans, name, call)

    monkeypatch.setattr(Spans, "timed", counting)
    measured(tiny)
    assert given and calls.keys() == set(given)


def test_activations_that_are_kept_are_the_largest_memory_and_checkpointing_takes_off_what_is_said(tiny: Tiny) -> None:
    found = measured(tiny, *LONG, "train.micro_batch_sequences=4", "model.num_hidden_layers=4")
    largest = found.largest_memory
    assert largest.name == "activations" and largest.remedy is not None and largest.remedy.key == "train.activation_checkpointing"
    after = measured(tiny, *LONG, "train.micro_batch_sequences=4", "model.num_hidden_layers=4", largest.remedy.change)
    # the peak is then where a layer is computed again, and there are no logits at that moment
    saved = sum(found.memory[kind].measured - after.memory[kind].measured for kind in ("activations", "logits"))
    assert saved == pytest.approx(largest.remedy.saves, rel=0.25)
    assert after.memory["weights"] == found.memory["weights"]


@pytest.mark.slow
def test_a_large_head_is_the_largest_memory_and_its_chunk_the_key(tiny: Tiny) -> None:
    head = (*LONG, "model.vocab_size=8192", "model.num_hidden_layers=1", "model.moe=null", "train.micro_batch_sequences=4")
    found = measured(tiny, *head)
    largest = found.largest_memory
    assert largest.name == "logits" and largest.remedy is not None and largest.remedy.key == "train.logit_chunk_tokens"
    after = measured(tiny, *head, largest.remedy.change)
    assert largest.measured - after.memory["logits"].measured == pytest.approx(largest.remedy.saves, rel=0.25)


def test_gradients_are_no_activations(tiny: Tiny) -> None:
    """Of a model whose gradients need more memory than the activations of a short sequence: its peak is at the end of the
    backward pass, where these are gone."""
    found = measured(tiny, "model.hidden_size=256", "model.moe=null", "train.micro_batch_sequences=1")
    activations = found.memory["activations"]
    assert found.memory["gradients"].measured > 1.5 * (activations.planned or 0.0)
    assert activations.measured <= 1.1 * (activations.planned or 0.0)


def test_a_slow_loader_is_the_largest_time_and_the_largest_waste_of_data(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Callable[..., Batch] = Batches.batch

    def slow(self: Batches, *given: int) -> Batch:
        time.sleep(0.6)
        return honest(self, *given)

    monkeypatch.setattr(Batches, "batch", slow)
    found = measured(tiny, "train.validate_every=100%", "train.save_every=100%", warm_up=4)
    assert found.largest_time.name == "data" and found.largest_time.remedy is not None
    assert found.largest_time.remedy.key == "shards.cache" and found.time["data"].measured > 0.2
    assert found.largest_data.name == "waiting" and found.data["waiting"] > 0.4
    assert found.data["read_bytes_per_second"] < 2 * found.data["needed_bytes_per_second"]


def test_a_recipe_without_data_reads_random_tokens(tiny: Tiny, tmp_path: Path) -> None:
    found = measured(tiny, run_dir=tmp_path / "none")
    assert any("random tokens" in note for note in found.notes)
    assert not list(tmp_path.iterdir())
    assert found.data["padding"] == 0


@pytest.fixture
def trained(finished: Tiny) -> Path:
    """A run that has pretrained and tuned."""
    return finished.run_dir


def test_a_run_is_read_and_never_changed(trained: Path) -> None:
    """The latest stage, on its own data and weights; and pretraining, which has ended, in its last steps."""
    before = everything(trained)
    tuning = profile(open_target(str(trained), [], None, None, None), 1, 2, None)
    assert tuning is not None and tuning.stage == "tune" and tuning.data["without_loss"] > 0.2 and not tuning.notes
    assert 0.02 < tuning.data["padding"] < 0.5  # rows of whole conversations
    ended = profile(open_target(str(trained), [], None, "pretrain", None), 1, 2, None)
    assert ended is not None and ended.phase == "long" and ended.first_step == STEPS - 4 and ended.sequence_length == 64
    first = profile(open_target(str(trained), ["train.micro_batch_sequences=2"], None, "pretrain", "general"), 1, 2, None)
    assert first is not None and first.first_step == 0 and first.micro_batch_size == 4  # sequences of half the longest phase
    assert everything(trained) == before
    assert not list(trained.parent.glob(".lmworks-profile-*"))


def test_what_cannot_be_profiled_is_refused(tiny: Tiny, trained: Path, tmp_path: Path) -> None:
    def refused(*words: str | None) -> str:
        name, stage, phase = words
        sets = [f"run_dir={tmp_path}/none"] if name == str(tiny.recipe) else []
        with pytest.raises(UserError) as error:
            profile(open_target(str(name), sets, None, stage, phase), 1, 2, None)
        return str(error.value)

    assert "--stage 'tuned' is not a stage" in refused(str(trained), "tuned", None)
    assert "--phase 'longer' is not a phase" in refused(str(trained), "pretrain", "longer")
    assert "it has none" in refused(str(trained), "tune", "long")
    assert "profile pretraining" in refused(str(tiny.recipe), "tune", None)
    assert "resolved.json" in refused(str(tmp_path), None, None)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lmworks", "profile", *words])
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_the_command_prints_three_tables_with_their_largest_items(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (str(tiny.recipe), "--set", f"run_dir={tiny.run_dir}", "--steps", "1", "--warm-up", "1")
    assert command(monkeypatch, *words) == 0
    out = capfd.readouterr().out
    for text in ("Memory of the rank", "planned", "measured", "Time of a step", "Data", "MFU of the measured peak", "largest: "):
        assert text in out, text
    assert out.count("largest: ") == 3
    assert command(monkeypatch, *words, "--trace", "/nowhere/trace.json") == 2
    assert "the folder does not exist" in capfd.readouterr().err


def aligned(folder: Path, stage: str) -> list[str]:
    """The words of the command line that give a recipe this stage, with rows of its own."""
    rows = {
        "dpo": [{"prompt": f"What is {n} + 1?", "chosen": str(n + 1), "rejected": str(n)} for n in range(24)],
        "grpo": [{"prompt": f"Say {n}", "answer": str(n)} for n in range(24)],
    }[stage]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "reward.py").write_text("def reward(prompt, answer, row):\n    return len(set(answer)) / max(1, len(answer))\n")
    source = {"name": "own", "kind": "files", "path": str(folder / "rows.jsonl")}
    own: dict[str, Any] = {"sequence_length": "64 tokens", "data": [source]}
    if stage == "dpo":
        own |= {"pairs_per_step": 8, "validation_fraction": 0.2, "epochs": 10}
    else:
        own |= {"group_size": 3, "prompts_per_step": 3, "steps": 6, "max_new_tokens": 16, "validation_prompts": 3, "beta": 0.02}
        own |= {"updates_per_rollout": 2, "data": [source | {"reward": "python", "file": str(folder / "reward.py")}]}
    return ["--set", f"{stage}={json.dumps(own)}", "--stage", stage]


@pytest.mark.parametrize("stage", ["dpo", "grpo"])
def test_the_parts_of_a_step_of_alignment(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stage: str
) -> None:
    """Scoring is no forward pass of training; the reference of dpo is numbers, that of grpo a copy of the weights; answers need memory of
    their own, at another time than activations."""
    before = everything(trained)
    assert command(monkeypatch, str(trained), *aligned(tmp_path, stage), "--steps", "1", "--warm-up", "1", "--json") == 0
    found = from_plain(json.loads(capfd.readouterr().out))
    assert found.stage == stage and everything(trained) == before and not found.notes
    parts = {name: item.measured for name, item in found.time.items()}
    assert min(parts[name] for name in ("scoring", "forward", "backward", "optimizer")) > 0
    assert ("rollouts" in parts) == (stage == "grpo")
    assert 0 < sum(parts.values()) - parts["validation"] - parts["save"] <= 1.01 * found.step_seconds
    weights = found.memory["weights"].measured
    assert found.memory["optimizer state"].measured == pytest.approx(found.memory["optimizer state"].planned, rel=1e-3)
    planned_to(0.15, found, "activations", "logits")
    if stage == "grpo":
        drawn = found.memory["rollouts"]
        assert drawn.measured > 2 * weights, "answers are drawn in fp64"
        assert drawn.measured == pytest.approx(drawn.planned, rel=0.25)
        assert found.memory["optimizer state"].measured > 2 * weights
    kinds = {name: item.measured for name, item in found.memory.items()}
    assert total(kinds) == pytest.approx(max(found.memory_peak, total(kinds | {"other": 0.0})))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_two_ranks_of_one_model(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], axis: str
) -> None:
    """Memory is planned for the stage of the rank that needs most; the stages of a pipeline have forward passes."""
    layout = (f"layout.{axis}=2", "model.num_key_value_heads=2", "model.num_hidden_layers=4", f"run_dir={tmp_path}/none")
    words = [word for one in layout for word in ("--set", one)]
    assert command(monkeypatch, str(tiny.recipe), *words, "--steps", "1", "--warm-up", "1", "--json") == 0
    found = from_plain(json.loads(capfd.readouterr().out))
    assert [one.stage for one in found.ranks] == ([0, 1] if axis == "pp" else [0, 0])
    assert min(found.time[name].measured for name in ("forward", "backward", "optimizer", "collectives")) > 0
    for kind in ("weights", "gradients", "optimizer state"):
        assert found.memory[kind].measured == pytest.approx(found.memory[kind].planned, rel=1e-3), kind
    planned_to(0.15, found, *(["activations", "logits"] if found.memory.get("logits") else ["activations"]))


@pytest.mark.slow
def test_two_ranks_are_started_and_the_slowest_named(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (str(tiny.recipe), "--set", f"run_dir={tiny.run_dir}", "--set", "layout.dp_shard=2", "--set", "layout.zero=3", "--steps", "2")
    assert command(monkeypatch, *words, "--json") == 0
    found = from_plain(json.loads(capfd.readouterr().out))
    assert [one.rank for one in found.ranks] == [0, 1] and found.slowest in (0, 1)
    assert found.time["collectives"].measured > 0 and found.layout.startswith("DP2")
    slowest = max(found.ranks, key=lambda one: one.own + one.data)
    assert slowest.rank == found.slowest
    assert command(monkeypatch, *words[:3], "--set", "layout.dp_shard=512", "--steps", "2") == 2
    assert "has room for" in capfd.readouterr().err


def test_padding_is_what_has_no_label_at_the_end_of_a_row() -> None:
    labels = np.full((2, 8), IGNORE, np.int32)
    labels[0, 4:6], labels[1, 1:8] = 7, 7  # a document without labels, one with two, and padding; one document
    batch = Batch(np.ones((2, 8), np.int32), labels, np.array([0, 3, 6, 8, 16], np.int32), 0, 0)
    counts = SimpleNamespace(found=SimpleNamespace(data={}))
    Measurement._count(counts, batch)  # type: ignore[arg-type]
    assert counts.found.data["padding"] == 2 and counts.found.data["without_loss"] == 16 - 9 - 2
