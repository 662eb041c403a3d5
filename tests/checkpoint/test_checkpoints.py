"""Saving, loading, refusing and keeping checkpoints in one process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmworks.checkpoint import Checkpoints, list_checkpoints, load, newest_good, verify
from lmworks.checkpoint import save as save_module
from lmworks.checkpoint import tensor_files as tensor_files_module
from lmworks.checkpoint.save import CheckpointWriter
from lmworks.checkpoint.state import Staging
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from lmworks.recipe.schema.units import Duration
from patience import PATIENCE

IDENTITY = {"hidden_size": 8, "betas": (0.9, 0.95)}


def make_state(seed: int) -> dict[str, Any]:
    """Every kind of tensor that a run saves, and plain values beside them."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(8, 6, generator=generator)
    return {
        "model": {
            "head.weight": weights,
            "bfloat16": torch.randn(3, 5, generator=generator).bfloat16(),
            "scalar": torch.tensor(float(seed)),
            "empty": torch.empty(0, 4),
            "transposed": torch.randn(4, 7, generator=generator).t(),
            "mask": torch.rand(9, generator=generator) > 0.5,
            "view": torch.arange(100)[10 + seed:20 + seed],
        },
        "optimizer": {
            0: {"step": torch.tensor(seed), "momentum": torch.randn(2, 3, 4, generator=generator)}, "lr": seed / 7, "betas": (0.9, 0.95),
        },
        "rng": generator.get_state(),
    }


def tensors_of(state: dict[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= tensors_of(value, f"{prefix}{key}/")
        elif isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
    return found


def assert_same(left: dict[Any, Any], right: dict[Any, Any]) -> None:
    ours, theirs = tensors_of(left), tensors_of(right)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
    assert left["optimizer"]["lr"] == right["optimizer"]["lr"]
    assert left["optimizer"]["betas"] == right["optimizer"]["betas"]


def files_of(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir()}


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("file_bytes", [1 << 30, 100])
def test_a_state_comes_back_bit_for_bit_and_saves_to_the_same_bytes(tmp_path, monkeypatch, asynchronous, file_bytes):
    monkeypatch.setattr(tensor_files_module, "_FILE_BYTES", file_bytes)
    options = Options(asynchronous=asynchronous)
    state = make_state(3)
    with Checkpoints(tmp_path / "a", options, IDENTITY) as checkpoints:
        checkpoints.save(100, state, {"tokens": 4096, "phase": "general"}, metric=1.5)
    assert len(list((tmp_path / "a/step-00000100").glob("data-*.bin"))) == (1 if file_bytes > 1000 else 8)
    loaded = make_state(4)
    weights = loaded["model"]["head.weight"]
    with Checkpoints(tmp_path / "a", options, IDENTITY) as checkpoints:
        assert checkpoints.load_latest(loaded) == {"tokens": 4096, "phase": "general"}
    assert loaded["model"]["head.weight"] is weights, "loaded in place"
    assert_same(loaded, make_state(3))
    with Checkpoints(tmp_path / "b", options, IDENTITY) as checkpoints:
        checkpoints.save(100, loaded, {"tokens": 4096, "phase": "general"}, metric=1.5)
    assert files_of(tmp_path / "a/step-00000100") == files_of(tmp_path / "b/step-00000100")


def test_training_may_go_on_while_a_save_is_under_way(tmp_path, monkeypatch):
    """The thread is held before it writes anything; what it then writes is the state of the call, in reused memory."""
    gate, write = threading.Event(), CheckpointWriter._write_data
    staged = []

    def held(self, aside, parts, document):
        gate.wait(PATIENCE)
        staged.append(next(part for part in parts if part.name == "model/head.weight").values().data_ptr())
        return write(self, aside, parts, document)

    monkeypatch.setattr(CheckpointWriter, "_write_data", held)
    state, meta = make_state(1), {"tokens": 1}
    with Checkpoints(tmp_path, Options(), {}) as checkpoints:
        for step in (1, 2):
            gate.clear()
            for tensor in tensors_of(state).values():
                tensor.fill_(step)
            state["optimizer"]["lr"] = meta["tokens"] = step
            checkpoints.save(step, state, meta)
            assert not (tmp_path / f"step-{step:08d}").exists()
            for tensor in tensors_of(state).values():
                tensor.fill_(77)
            state["optimizer"]["lr"] = meta["tokens"] = 77
            gate.set()
            checkpoints.wait()
            loaded = make_state(0)
            assert load(tmp_path / f"step-{step:08d}", loaded) == {"tokens": step}
            assert all(bool((tensor == step).all()) for name, tensor in tensors_of(loaded).items() if not name.endswith("mask"))
            assert loaded["optimizer"]["lr"] == step
    assert staged[0] == staged[1] != state["model"]["head.weight"].data_ptr()


def test_the_next_save_waits_for_the_one_before(tmp_path, monkeypatch):
    write, running, most = CheckpointWriter._write_data, [0], []

    def slow(self, *args):
        running[0] += 1
        most.append(running[0])
        time.sleep(0.05)
        made = write(self, *args)
        running[0] -= 1
        return made

    monkeypatch.setattr(CheckpointWriter, "_write_data", slow)
    with Checkpoints(tmp_path, Options(keep_last=5), {}) as checkpoints:
        for step in range(3):
            checkpoints.save(step, make_state(step), {})
    assert most == [1, 1, 1]
    assert [row["step"] for row in list_checkpoints(tmp_path)] == [0, 1, 2]


def test_a_reader_of_the_weights_need_not_know_the_optimizer(tmp_path):
    with Checkpoints(tmp_path, Options(), IDENTITY) as checkpoints:
        checkpoints.save(1, make_state(5), {})
    part = {"model": make_state(6)["model"]}
    load(tmp_path / "step-00000001", part)
    assert torch.equal(part["model"]["head.weight"], make_state(5)["model"]["head.weight"])


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    with Checkpoints(tmp_path, Options(), IDENTITY) as checkpoints:
        checkpoints.save(1, make_state(5), {})
    path = tmp_path / "step-00000001"

    def message(state, identity=None):
        before = {name: tensor.clone() for name, tensor in tensors_of(state).items()}
        with pytest.raises(UserError) as caught:
            load(path, state, identity)
        assert all(torch.equal(before[name], tensor) for name, tensor in tensors_of(state).items()), "nothing was loaded"
        assert "\n" not in str(caught.value)
        return str(caught.value)

    wider, fewer, more, coarser = (make_state(1) for _ in range(4))
    wider["model"]["head.weight"] = torch.zeros(8, 7)
    assert "another model: model/head.weight is (8, 6) float32 there and (8, 7) float32 here" in message(wider)
    del fewer["model"]["scalar"]
    assert "model/scalar is () float32 there and absent here" in message(fewer)
    more["model"]["extra"] = torch.zeros(2)
    assert "model/extra is absent there and (2,) float32 here" in message(more)
    coarser["model"]["bfloat16"] = torch.zeros(3, 5)
    assert "model/bfloat16 is (3, 5) bfloat16 there and (3, 5) float32 here" in message(coarser)
    assert "hidden_size is 8 there and 9 here" in message(make_state(1), IDENTITY | {"hidden_size": 9})
    load(path, make_state(1), IDENTITY)


def test_what_is_kept_and_what_goes(tmp_path):
    events = []
    options = Options(keep_last=2, keep_every=Duration.parse("40 steps"))
    losses = {10: 5.0, 20: 1.0, 30: 3.0, 40: 2.0, 50: float("nan"), 60: 4.0, 70: 4.0, 80: 4.0, 90: 4.0, 100: 4.0}
    with Checkpoints(tmp_path, options, {}, report=lambda event, **fields: events.append((event, fields))) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, make_state(1), {}, metric=loss, permanent=step == 30)
        assert [checkpoints.latest_good(step) for step in (90, 89, 5)] == [tmp_path / "step-00000090", tmp_path / "step-00000080", None]
    # 20 is the best, 30 permanent, 40 and 80 the first at each 40 steps, 90 and 100 the last.
    assert [row["step"] for row in list_checkpoints(tmp_path)] == [20, 30, 40, 80, 90, 100]
    assert [fields["step"] for event, fields in events if event == "checkpoint"] == list(losses)
    assert [fields["step"] for event, fields in events if event == "checkpoint_pruned"] == [10, 50, 60, 70]
    assert not any(name.startswith(".") for name in names(tmp_path))


def test_the_last_good_one_only_goes_when_its_successor_is_whole(tmp_path, monkeypatch):
    seen, publish = [], save_module.publish

    def watched(aside, final):
        seen.append(names(tmp_path))
        if final.name == "step-00000003":
            raise OSError("pulled the plug")
        publish(aside, final)

    monkeypatch.setattr(save_module, "publish", watched)
    checkpoints = Checkpoints(tmp_path, Options(keep_last=1, keep_best=False), {})
    checkpoints.save(1, make_state(1), {})
    checkpoints.save(2, make_state(2), {}, wait=True)
    assert seen[1] == [".step-00000002.part", "step-00000001"]
    assert names(tmp_path) == ["step-00000002"]
    checkpoints.save(3, make_state(3), {})
    with pytest.raises(UserError, match="pulled the plug"):
        checkpoints.close()
    assert names(tmp_path) == ["step-00000002"]


def test_after_a_rollback_the_checkpoint_just_saved_stays(tmp_path):
    with Checkpoints(tmp_path, Options(keep_last=2, keep_best=False), {}) as checkpoints:
        for step in (30, 40, 5):
            checkpoints.save(step, make_state(1), {}, wait=True)
    assert [row["step"] for row in list_checkpoints(tmp_path)] == [5, 30, 40]


def test_saving_a_step_again_replaces_it(tmp_path):
    with Checkpoints(tmp_path, Options(), {}) as checkpoints:
        checkpoints.save(1, make_state(1), {"turn": 1})
        checkpoints.save(1, make_state(2), {"turn": 2})
    state = make_state(9)
    assert load(tmp_path / "step-00000001", state) == {"turn": 2}
    assert_same(state, make_state(2))
    assert names(tmp_path) == ["step-00000001"]


def test_what_killed_saves_left_is_cleaned_at_the_start(tmp_path):
    with Checkpoints(tmp_path, Options(), {}) as checkpoints:
        checkpoints.save(1, make_state(1), {})
        checkpoints.save(2, make_state(2), {})
    (tmp_path / ".step-00000003.part").mkdir()
    (tmp_path / ".step-00000003.part/data-00000-00000.bin").write_bytes(b"half")
    (tmp_path / ".step-00000000.gone").mkdir()
    os.rename(tmp_path / "step-00000002", tmp_path / ".step-00000002.replaced")
    (tmp_path / "notes.txt").write_text("mine")
    for look in (list_checkpoints, verify, newest_good):
        look(tmp_path)
    assert len(names(tmp_path)) == 5, "looking changes nothing"
    Checkpoints(tmp_path, Options(), {}).close()
    assert names(tmp_path) == ["notes.txt", "step-00000001", "step-00000002"]


def test_listing_and_verifying_for_the_command_line(tmp_path):
    assert list_checkpoints(tmp_path / "none") == [] == verify(tmp_path / "none")
    with Checkpoints(tmp_path, Options(), {}) as checkpoints:
        assert checkpoints.latest_good() is None
        checkpoints.save(1, make_state(1), {"tokens": 10, "phase": "a"}, metric=2.0)
        checkpoints.save(2, make_state(2), {"tokens": 20, "phase": "b"})
    row = list_checkpoints(tmp_path)[0]
    assert (row["step"], row["tokens"], row["phase"], row["metric"], row["files"], row["problem"]) == (1, 10, "a", 2.0, 3, None)
    assert row["bytes"] == sum(one.stat().st_size for one in (tmp_path / "step-00000001").iterdir() if one.name != "manifest.json")
    (tmp_path / "step-00000002/meta.json").unlink()
    assert "meta.json" in list_checkpoints(tmp_path)[1]["problem"]
    assert [(row["step"], row["good"], row["problem"]) for row in verify(tmp_path)] == [(1, True, None), (2, False, "meta.json is missing")]
    assert newest_good(tmp_path) == (tmp_path / "step-00000001", [(tmp_path / "step-00000002", "meta.json is missing")])


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    with Checkpoints(tmp_path, Options(), {}) as checkpoints:
        checkpoints.save(1, make_state(1), {})
    for name, content in files_of(tmp_path / "step-00000001").items():
        assert name.endswith((".json", ".jsonl.gz", ".bin"))
        if name.endswith(".bin"):
            tensors = tensors_of(make_state(1)).values()
            assert len(content) == sum(tensor.numel() * tensor.element_size() for tensor in tensors), "raw elements and nothing else"


@pytest.mark.parametrize(("shape", "slices"), [
    ((), [((), ())]), ((0, 3), [((0, 0), (0, 3))]), ((3, 0), [((0, 0), (3, 0))]), ((5,), [((0,), (5,))]),
    ((5, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4)), ((4, 0), (1, 4))]), ((2, 40), [((0, 0), (1, 40)), ((1, 0), (1, 40))]),
])  # fmt: skip
def test_a_tensor_is_read_in_slices_that_fit(shape: tuple[int, ...], slices: list[Any]) -> None:
    """Of 32 bytes here, and of a row where that is more; also where there is nothing in it."""
    record = tensor_files_module.SavedTensor(torch.float32, shape, [])
    assert tensor_files_module.split_rows(record, 32) == slices


@pytest.mark.parametrize(("size", "locks"), [(1000, True), (1001, False)])
def test_the_ranks_of_a_machine_lock_at_most_half_of_its_memory(size: int, locks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of CUDA are recorded: a processor locks no memory."""
    calls: list[Any] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, count, flags: calls.append(("lock", address, count)) or 0,
        cudaHostUnregister=lambda address: calls.append(("free", address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(machine, "ranks_here", lambda: (0, 2))
    monkeypatch.setattr(machine, "memory", lambda: 4000)
    staging = Staging()
    staging._memory = torch.empty(size, dtype=torch.uint8)
    address = staging._memory.data_ptr()
    staging._lock()
    staging.close()
    assert calls == [("lock", address, size), ("free", address)] * locks and not staging._memory.numel()
