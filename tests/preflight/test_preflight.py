"""Preflight: silent on a sound run, and loud about each of the four mysteries of a published 3B run, planted here."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmworks.cli.main import main
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.parallel.mesh import Ranks
from lmworks.preflight import checks, data, disks, environment, layouts, saving, small_model, steps
from lmworks.preflight.check_result import CheckContext, CheckResult, MissingInput
from lmworks.preflight.layouts import BF16_SLACK, worst_error
from lmworks.preflight.small_model import small_layouts, small_recipe, train
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.layout import Layout, world_size
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards import epochs
from lmworks.watch.run_files import PREFLIGHT
from rank_pool import RankPool
from tiny_run import Tiny


def context_of(tiny: Tiny, *overrides: str) -> CheckContext:
    resolved = tiny.resolve(*overrides)
    return CheckContext(resolved.recipe, resolved.fingerprint, name=str(tiny.recipe))


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and time: what must not change. The results are kept beside them."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != PREFLIGHT]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


# The command


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lmworks", "preflight", *words])
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(checks, "CHECKS", tuple(check for check in checks.CHECKS if check.name in names))


def test_a_sound_run_passes_and_is_left_as_it_was(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Every check but the one of saving, which starts worlds of processes and has a slow test below, and that of this machine."""
    asked = [check.name for check in checks.CHECKS if check.name not in ("saving", "health")]
    only(monkeypatch, *asked)
    honest = disks.read_times  # how fast and even this machine's disks are just now, and of what kind, is no matter of the run's soundness
    monkeypatch.setattr(disks, "write_times", lambda folder: [0.01] * 8)
    monkeypatch.setattr(disks, "read_times", lambda files, draw: ([0.001] * 48, honest(files, draw)[1]))
    monkeypatch.setattr(machine, "file_system", lambda path: "ext4")
    before = everything(tiny.run_dir)
    sets = [word for value in (f"run_dir={tiny.run_dir}", "export.huggingface=true", "export.gguf=true") for word in ("--set", value)]
    assert command(monkeypatch, str(tiny.recipe), *sets, "--json") == 0
    answers = json.loads(capfd.readouterr().out)
    # one rank has nobody to talk to, nor to differ from (several: below); the recipe has no alerts, no benchmarks and no rewards
    one_rank = dict.fromkeys(("collectives", "parallel", "spare", "alerts", "evaluation"), "skip")
    assert {answer["name"]: answer["result"] for answer in answers} == dict.fromkeys(asked, "ok") | one_rank, answers
    assert [answer["name"] for answer in answers] == asked
    assert json.loads((tiny.run_dir / PREFLIGHT).read_text())["checks"] == answers
    assert all(answer["text"] for answer in answers)
    assert everything(tiny.run_dir) == before


def test_a_failed_check_gives_exit_code_1_and_says_what_to_do(
    tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, "hashes", "vocabulary")
    shard = next(tiny_copy.run_dir.glob("shards/**/*.bin"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    assert command(monkeypatch, str(tiny_copy.recipe), "--set", f"run_dir={tiny_copy.run_dir}") == 1
    out = capfd.readouterr().out
    assert " 1 fail" in out and "its hash differs" in out and "do:" in out and " 2 ok" in out and "1 failed" in out


def test_before_anything_is_prepared_it_says_what_to_run_first(tiny: Tiny, tmp_path: Path) -> None:
    resolved = tiny.resolve(f"run_dir={tmp_path}/none")
    context = CheckContext(resolved.recipe, resolved.fingerprint, name="tiny.yaml")
    found = {check.name: checks.ask(check, context) for check in checks.CHECKS if check.name not in ("saving", "health")}
    assert not [name for name, finding in found.items() if finding.result == "fail"], found
    for name in ("reading", "hashes", "first-batches", "shuffled"):
        assert found[name].result == "skip" and "lmworks shards build tiny.yaml" in found[name].advice
    assert "lmworks tokenizer train" in found["vocabulary"].advice
    assert not (tmp_path / "none").exists()


def test_whatever_goes_wrong_in_a_check_is_a_finding() -> None:
    def raising(error: Exception) -> Callable[[CheckContext], CheckResult]:
        def work(context: CheckContext) -> CheckResult:
            raise error

        return work

    for error, result, advice in (
        (UserError("it is broken; mend it"), "fail", "mend it"),
        (MissingInput("not there", "make it"), "skip", "make it"),
        (KeyError("x"), "fail", "fix the cause"),
    ):
        found = checks.ask(checks.Check("one", "one", raising(error)), None)  # type: ignore[arg-type]
        assert found.result == result and found.advice.startswith(advice)


# Mystery 1: storage that stalls


def test_mystery_1_reads_that_stall_while_the_mean_looks_well(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    now = [0.0]

    def read_block(path: Path, start: int) -> int:
        now[0] += 2.5 if next(clock) == 20 else 0.0001  # one shard was moved away, and is fetched
        return 1 << 20

    monkeypatch.setattr(disks.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(disks, "read_block", read_block)
    context = context_of(tiny)
    _ = context.plan
    found = disks.read(context)
    assert found.result == "warn" and "stall" in found.text and "shards.cache" in found.advice
    assert found.figures["worst_read_seconds"] == pytest.approx(2.5)


def test_a_disk_that_reads_too_slowly_fails(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "read_times", lambda *_: ([1e6, 1e6], 2))
    found = disks.read(context_of(tiny))
    assert found.result == "fail" and "training would wait for its data" in found.text


def test_writes_are_measured_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(disks.os, "fsync", synced.append)
    assert len(disks.write_times(tmp_path)) == len(synced) > 1


def test_other_ranks_are_told_that_the_checks_are_over(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    context = replace(context_of(tiny), ranks=SimpleNamespace(broadcast=told.append))
    monkeypatch.setattr(checks, "CHECKS", ())
    checks.preflight(context, lambda *_: None, lambda _: None)
    assert told == [None]


def test_a_disk_of_even_speed_is_not_accused() -> None:
    assert not disks.stalled([0.01, 0.012, 0.5])
    assert not disks.stalled([2.0, 2.1, 2.2])  # slow, but even
    assert disks.stalled([0.01, 0.012, 1.5])


def test_a_directory_that_cannot_be_written_is_named(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "write_times", lambda folder: [0.01] * 4)
    honest, closed = tempfile.TemporaryDirectory, tmp_path / "closed"
    closed.mkdir()

    def refuse(dir: Path, **options: Any) -> Any:  # as for a user who may not, or below /proc, whoever runs the tests
        if Path(dir) == closed:
            raise FileNotFoundError(2, "No such file or directory", str(dir))
        return honest(dir=dir, **options)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    found = disks.written(context_of(tiny, f"checkpoints.local={closed / 'fast'}"))
    assert found.result == "fail" and f"checkpoints.local: {closed} cannot be written (No such file or directory)" in found.text
    assert found.advice == "choose a writable directory for checkpoints.local"
    told = checks.ask(next(check for check in checks.CHECKS if check.name == "saving"), context_of(tiny, f"run_dir={closed / 'run'}"))
    assert told.result == "fail" and told.text == f"{closed} cannot be written (No such file or directory)"


def test_a_machines_disk_takes_what_its_own_ranks_write(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(tiny, "checkpoints.local=/tmp/fast", "layout.dp_shard=4")
    asked = {}
    for ranks in (4, 1):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        asked[ranks] = {place.name: place.needed for place in disks.places(context)}["checkpoints.local"]
    assert asked[1] == asked[4] / 4 > 0


def test_a_disk_without_room_fails(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "write_times", lambda folder: [0.01] * 4)
    assert disks.written(context_of(tiny)).result == "ok"
    monkeypatch.setenv(machine.VARIABLE, "peak=1e11,disk=100e3")
    found = disks.written(context_of(tiny))
    assert found.result == "fail" and "keep_last" in found.advice


def test_a_phase_that_saves_more_often_than_the_disk_can_is_told_of(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between `save_every` of all training there is time enough; the second phase's own is what the disk cannot follow."""
    monkeypatch.setattr(disks, "write_times", lambda folder: [0.01] * 8)
    plan = context_of(tiny).plan
    save = plan.disk.checkpoint / ((4 << 20) / 0.01)  # seconds, at a block of 4 MiB in 0.01
    monkeypatch.setattr(type(plan), "seconds", save * plan.steps / 2.5)  # a save takes the time of 2.5 steps; they are 4 apart
    assert disks.written(context_of(tiny)).result == "ok"
    told = disks.written(context_of(tiny, "train.phases.long.save_every=1 steps"))
    assert told.result == "warn" and "raise train.save_every" in told.advice


# Mystery 3: documents are shuffled, sequences are not


def test_mystery_3_sequences_read_one_after_another(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data.shuffled(context_of(tiny)).result == "ok"
    monkeypatch.setattr(epochs, "permute", lambda position, count, key: position)
    found = data.shuffled(context_of(tiny))
    assert found.result == "fail" and "100%" in found.text and "by sequence" in found.advice


def test_a_sequence_that_comes_twice_is_found(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = epochs.permute
    monkeypatch.setattr(epochs, "permute", lambda position, count, key: honest(position // 2, count, key))
    found = data.shuffled(context_of(tiny))
    assert found.result == "fail" and "repeat within epoch" in found.text


# Mystery 4: tensor ranks with one seed


def one_seed(function: Callable[..., Any], *args: Any) -> Any:
    """A rank on which every part of a tensor is drawn as if it were the first."""
    from lmworks.parallel import parallelize

    honest = parallelize.local_shard

    def first_part(parameter: torch.Tensor) -> Any:
        part, begins = honest(parameter)
        return part, tuple(0 for _ in begins)

    parallelize.local_shard = first_part
    try:
        return function(*args)
    finally:
        parallelize.local_shard = honest


def unsummed(function: Callable[..., Any], *args: Any) -> Any:
    """A rank that leaves its loss out of the sum."""
    from lmworks.parallel.mesh import Ranks

    honest = Ranks.all_reduce
    Ranks.all_reduce = lambda self, tensor, axis: tensor  # type: ignore[method-assign]
    try:
        return function(*args)
    finally:
        Ranks.all_reduce = honest  # type: ignore[method-assign]


def alone(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@pytest.fixture
def played_by(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Have the ranks of a check played by the pool of the tests, with something planted on each."""

    def by(plant: Callable[..., Any]) -> None:
        def run(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
            return [function(*args)] if size == 1 else ranks.run(plant, size, function, *args)

        monkeypatch.setattr(small_model, "run_ranks", run)

    return by


@pytest.mark.slow
def test_mystery_4_tensor_ranks_with_one_seed(tiny: Tiny, played_by: Callable[[Callable[..., Any]], None]) -> None:
    overrides = ("layout.tp=2", "model.num_key_value_heads=2")
    played_by(alone)
    sound = context_of(tiny, *overrides)
    assert layouts.same_start(sound).result == layouts.same_steps(sound).result == "ok"
    played_by(one_seed)
    found = layouts.same_start(context_of(tiny, *overrides))
    assert found.result == "fail" and "its halves along dim" in found.text and "same seed" in found.text


def test_ranks_that_compute_something_else_are_found(tiny: Tiny, played_by: Callable[[Callable[..., Any]], None]) -> None:
    played_by(unsummed)
    found = layouts.same_steps(context_of(tiny, "layout.dp_shard=2"))
    assert found.result == "fail" and "the layout changes the training result" in found.advice


@pytest.mark.slow
def test_deepspeed_goes_through_its_own_steps(tiny: Tiny) -> None:
    """It keeps process groups in globals: its ranks, and the first batches in one process, are processes of their own."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (extra: deepspeed)")
    overrides = ("layout={dp_shard: 2, zero: 3}", "optimizer.kind=adamw", "train.deepspeed={offload: cpu, offload_weights: cpu}")
    context = context_of(tiny, *overrides)
    found = layouts.same_steps(context)
    assert found.result == "ok" and "weights by" in found.text and "gradients" not in found.text, found
    assert layouts.same_start(context).result == "ok"
    (batch,) = small_model.run_ranks(first_batches_of, 1, tiny, overrides)
    assert batch.result == "ok", batch


def first_batches_of(tiny: Tiny, overrides: tuple[str, ...]) -> CheckResult:
    return steps.first_batches(context_of(tiny, *overrides))


def test_parts_that_do_not_know_their_place_are_found(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = layouts.normal_part
    monkeypatch.setattr(layouts, "normal_part", lambda seed, name, shape, begins, sizes: honest(seed, name, shape, [0] * len(shape), sizes))
    assert layouts.same_start(context_of(tiny)).result == "fail"


# The other checks


def test_small_layouts_have_every_axis_of_the_real_one() -> None:
    real = Layout(pp=16, dp_replicate=4, dp_shard=64, cp=2, tp=8, ep=32)
    found = small_layouts(real)
    assert all(world_size(layout) <= 8 for layout in found)
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        assert any(getattr(layout, axis) == 2 for layout in found), axis
    assert small_layouts(Layout()) == []


@pytest.mark.parametrize("name", ["quickstart", "dense-125m", "smollm3-3b", "glm46-355b-a32b"])
def test_small_models_are_of_the_same_kind(name: str) -> None:
    recipe = load_recipe(name).recipe
    small = small_recipe(recipe)
    assert {key: bool(value) for key, value in small.model} | {"residual_dropout": 0, "attention_dropout": 0} == {
        key: bool(value) for key, value in recipe.model
    } | {"residual_dropout": 0, "attention_dropout": 0}
    assert np.isfinite(train(small, Layout()).losses).all()


def test_a_broken_first_batch_is_found(tiny: Tiny) -> None:
    sound = steps.first_batches(context_of(tiny))
    assert sound.result == "ok" and sound.figures["general/loss"] == pytest.approx(np.log(512), abs=0.2)
    wild = steps.first_batches(context_of(tiny, "model.initializer_range=4.0", "model.tie_word_embeddings=true"))
    tight = steps.first_batches(context_of(tiny, "model.final_logit_softcapping=30.0"))
    assert tight.result == "ok" and wild.figures["general/loss"] > sound.figures["general/loss"] + 1


def test_a_loss_far_from_the_vocabulary_is_found(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "expected_loss", lambda recipe: (9.0, 10.0))
    found = steps.first_batches(context_of(tiny))
    assert found.result == "fail" and "ln of the vocabulary" in found.advice


def test_another_tokenizer_is_found(tiny_copy: Tiny) -> None:
    file = tiny_copy.run_dir / "tokenizer" / "tokenizer.json"
    assert data.vocabulary(context_of(tiny_copy)).result == "ok"
    file.write_text(file.read_text() + " ")
    check = next(check for check in checks.CHECKS if check.name == "vocabulary")
    found = checks.ask(check, context_of(tiny_copy))
    assert found.result == "fail" and "another tokenizer" in found.text


def test_token_files_that_are_not_those_the_run_began_with_are_found(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_copy.pretrain()
    assert data.hashes(context_of(tiny_copy)).result == "ok"
    monkeypatch.setattr(data.Manifest, "digests", lambda self: {"docs": "0" * 16})
    found = data.hashes(context_of(tiny_copy))
    assert found.result == "fail" and "different token files of code, docs" in found.text


def test_a_missing_extra_is_named(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    found = environment.versions(context_of(tiny, "export.huggingface=true"))
    assert found.result == "fail" and "transformers" in found.text and "lmworks[" in found.advice


def test_a_recipe_in_bf16_is_warned_of_where_it_is_slow(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(environment, "_FILES", 0)
    found = environment.versions(context_of(tiny, "train.precision=bf16"))
    assert (found.result, "no bf16 in this hardware" in found.text) == (("ok", False) if has_bf16 else ("warn", True))
    assert environment.versions(context_of(tiny, "train.precision=auto")).result == "ok"


def measured_on(layout: dict[str, Any], recipe: str, run_dir: str) -> tuple[str, str, dict[str, float]]:
    ranks = Ranks(Layout(**layout))
    resolved = load_recipe(recipe, [f"run_dir={run_dir}", *(f"layout.{axis}={size}" for axis, size in layout.items())])
    context = CheckContext(resolved.recipe, resolved.fingerprint, ranks=ranks)
    first = steps.first_batches(context)
    found = environment.network(context)
    return found.result, first.result, found.figures | first.figures


def test_ranks_measure_their_collectives_and_take_a_first_step(tiny: Tiny, ranks: RankPool) -> None:
    alone_here = steps.first_batches(context_of(tiny)).figures
    for network, first, figures in ranks.run(measured_on, 2, {"dp_shard": 2}, str(tiny.recipe), str(tiny.run_dir)):
        assert network in ("ok", "warn") and first in ("ok", "warn")
        assert figures["fsdp/latency_seconds"] > 0 and figures["fsdp/bytes_per_second"] > 0
        assert figures["general/loss"] == pytest.approx(alone_here["general/loss"], abs=0.05)  # of other rows: twice as many


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("Glm4MoeForCausalLM", ()),
        ("Olmo2ForCausalLM", ("model.moe=null", "model.norm_position=post", "model.qk_norm_over=all_heads")),
        ("SmolLM3ForCausalLM", ("model.moe=null", "model.use_qk_norm=false", "model.no_rope_layer_interval=4")),
        ("Qwen3MoeForCausalLM", ("model.moe={n_routed_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, n_shared_experts: 0, "
                                 "first_k_dense_replace: 0, scoring_func: softmax, balance: {method: aux}}",)),
    ],
)  # fmt: skip
def test_export_of_a_small_model_of_the_same_kind(tiny: Tiny, name: str, overrides: tuple[str, ...]) -> None:
    found = saving.export_round_trip(context_of(tiny, "export.huggingface=true", "export.gguf=true", *overrides))
    assert found.result == "ok" and name in found.text and "tensors equal" in found.text


def go_on_with_a_new_optimizer(recipe: Recipe, layout: Layout, path: Path | None, saved: int) -> saving.Course:
    """A resume that brings back every bit of the weights, and nothing of the optimizer; in a process of its own."""
    honest = saving.load
    saving.load = lambda path, state: honest(path, {"model": state["model"]})
    return saving.go_on(recipe, layout, path, saved)


@pytest.mark.parametrize("changed", [None, "first"])
def test_weights_that_begin_otherwise_on_ranks_are_found(tiny: Tiny, changed: str | None) -> None:
    one = {"first": np.arange(3.0), "second": np.ones(2)}
    other = {name: value + (name == changed) for name, value in one.items()}
    context = replace(context_of(tiny), memory={"worlds": [_world(start=(one, other))]})
    found = layouts.same_start(context)
    assert found.result == ("fail" if changed else "ok"), found
    assert not changed or "the initial weights of first" in found.text


def test_a_finding_in_bf16_is_one(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    context = replace(context_of(tiny, "layout.dp_shard=2"), memory={"worlds": [_world(bf16=object())]})
    monkeypatch.setattr(layouts, "_in_fp32", lambda *_: "fine")
    monkeypatch.setattr(layouts, "_in_bf16", lambda *_: CheckResult("fail", "the losses differ in bf16", "look at the kernels"))
    assert layouts.same_steps(context).text == "the losses differ in bf16"


def _world(start: Any = (None, None), bf16: Any = None) -> Any:
    one, other = (SimpleNamespace(start=begun) for begun in start)
    return SimpleNamespace(layout=Layout(dp_shard=2), one=one, many=[other], bf16=bf16)


def test_a_checkpoint_that_comes_back_with_other_bits_is_found(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_model, "start_ranks", lambda *_: ([], []))
    monkeypatch.setattr(small_model, "end_ranks", lambda _: None)
    monkeypatch.setattr(saving, "_in_a_save", lambda *_: True)
    monkeypatch.setattr(saving.listing, "newest_good", lambda _: (Path("step-000000003"), []))

    def run(function: Any, ranks: int, recipe: Any, layout: Any, path: Path | None, step: int) -> list[Any]:
        weight = np.arange(4.0) + (path is not None) * np.array([0, 0, 1e-7, 0])
        return [SimpleNamespace(saved={"w": weight}, losses=[1.0], after={"w": weight})]

    monkeypatch.setattr(small_model, "run_ranks", run)
    found = saving.resumes(context_of(tiny_copy))
    assert found.result == "fail" and "came back with other bits in 1 tensors" in found.text


@pytest.mark.slow
def test_saving_survives_a_kill_on_sound_storage_and_tells_of_bad(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(tiny_copy.run_dir)
    sound = saving.resumes(context_of(tiny_copy))
    assert sound.result == "ok" and "and trained on" in sound.text, sound
    with monkeypatch.context() as patch:
        patch.setattr(saving, "go_on", go_on_with_a_new_optimizer)
        forgetful = saving.resumes(context_of(tiny_copy))
    assert forgetful.result == "fail" and "steps after the resume" in forgetful.text, forgetful
    honest = saving.listing.newest_good

    def flipped(folder: Path) -> Any:
        newest = saving.listing.directories(folder)[-1]
        victim = max(newest.iterdir(), key=lambda path: path.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
        return honest(folder)

    monkeypatch.setattr(saving.listing, "newest_good", flipped)
    found = saving.resumes(context_of(tiny_copy))
    assert found.result == "fail" and "another disk" in found.advice
    assert everything(tiny_copy.run_dir) == before


def test_rounding_of_a_vector_is_judged_by_those_of_all_layers() -> None:
    """One process happens to be near fp32 in one of four layers, and a layout is as far from it as either is elsewhere; then half a sum is
    missing there."""
    draw = np.random.default_rng(0)
    names = [f"layers.{layer}.attention.query.bias" for layer in range(4)]
    exact = {name: draw.normal(size=32) for name in names}
    one = {name: value + (0.01 if name == names[1] else 0.1) * draw.normal(size=32) for name, value in exact.items()}
    sound = {name: value + 0.1 * draw.normal(size=32) for name, value in exact.items()}
    assert worst_error(exact, one, sound)[0] < 2 < BF16_SLACK
    times, name = worst_error(exact, one, sound | {names[1]: exact[names[1]] / 2})
    assert (times > BF16_SLACK, name) == (True, names[1])
    alone = {"norm.weight": exact[names[1]]}
    assert worst_error(alone, {"norm.weight": one[names[1]]}, {"norm.weight": sound[names[1]]})[0] > 8, "of one layer, by its own error"
