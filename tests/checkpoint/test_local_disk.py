"""Checkpoints that are saved on each machine's own disk first; here a machine is a directory that two ranks share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lmworks.checkpoint import Checkpoints, copy_to, list_checkpoints, listing, load, local_disk, newest_good, tensor_files, verify
from lmworks.checkpoint import checkpoints as checkpoints_module
from lmworks.checkpoint import save as save_module
from lmworks.errors import UserError
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from rank_pool import RankPool

WHOLE = torch.arange(42.0).reshape(7, 6)


def open_(folder: str, events: list[tuple[str, dict[str, Any]]] | None = None, ranks_per_machine: int = 2, **options: Any) -> Checkpoints:
    machine = dist.get_rank() // ranks_per_machine if dist.is_initialized() else 0
    own = Options(local=f"{folder}/machine-{machine}", **options)
    heard = events if events is not None else []
    return Checkpoints(Path(folder) / "run" / "checkpoints", own, {}, report=lambda event, **fields: heard.append((event, fields)))


def state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"model": {"matrix": distribute_tensor(WHOLE + value, mesh, [Shard(0)], src_data_rank=None)}, "count": torch.tensor(value)}


def holds(found: dict[str, Any], value: float) -> bool:
    mine = state(value)["model"]["matrix"].to_local()
    return torch.equal(found["model"]["matrix"].to_local(), mine) and found["count"] == value


def save(folder: str, steps: list[int], break_copies: bool = False) -> list[tuple[str, dict[str, Any]]]:
    events: list[tuple[str, dict[str, Any]]] = []
    with pytest.MonkeyPatch.context() as patch:
        if break_copies:  # as if the run were killed before a byte has left the machines
            patch.setattr(local_disk.LocalDisk, "add", lambda self, name: None)
        with open_(folder, events, keep_last=2) as checkpoints:
            for step in steps:
                checkpoints.save(step, state(step), {"step": step})
    return events


def resume(folder: str, expected: int) -> tuple[list[str], list[str]]:
    """Below which directories the matrix and the count were read, and the events."""
    events: list[tuple[str, dict[str, Any]]] = []
    read, honest = [], tensor_files._read_into
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "_read_into", lambda fd, at, to, path: (read.append(path), honest(fd, at, to, path))[1])
        with open_(folder, events) as checkpoints:
            found = state(0)
            assert checkpoints.load_latest(found) == {"step": expected}
    assert holds(found, expected)
    return sorted({path.relative_to(folder).parts[0] for path in read}), [event for event, _ in events]


def machines(folder: Path) -> dict[str, list[str]]:
    return {path.name: sorted(one.name for one in next(path.iterdir()).iterdir()) for path in sorted(folder.glob("machine-*"))}


def test_each_machine_copies_its_own_files_and_the_first_rank_seals(ranks: RankPool, tmp_path: Path) -> None:
    shared = tmp_path / "run" / "checkpoints"
    events = ranks.run(save, 4, str(tmp_path), [1, 2, 3])
    assert [event for event, _ in events[0] if event == "checkpoint_copied"] == ["checkpoint_copied"] * 3
    assert events[1:] == [[], [], []]
    assert [(row["step"], row["good"]) for row in verify(shared)] == [(2, True), (3, True)]
    assert sorted(path.name for path in shared.iterdir()) == [listing.name_of(2), listing.name_of(3)], "no marker is left"
    assert machines(tmp_path) == {f"machine-{one}": [listing.name_of(2), listing.name_of(3)] for one in (0, 1)}
    own = [sorted({path.name[:10] for path in (tmp_path / f"machine-{one}").rglob("step-00000003/data-*")}) for one in (0, 1)]
    assert own == [["data-00000", "data-00001"], ["data-00002", "data-00003"]]
    alone = {"model": {"matrix": torch.zeros(7, 6)}, "count": torch.tensor(0)}
    assert load(shared / listing.name_of(3), alone) == {"step": 3}
    assert torch.equal(alone["model"]["matrix"], WHOLE + 3)


def test_resuming_prefers_the_machines_own_copy_where_it_is_whole_everywhere(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, 4, str(tmp_path), [1, 2])
    own = [["machine-0"], ["machine-0"], ["machine-1", "run"], ["machine-1", "run"]]  # the count was written by rank 0
    assert [places for places, _ in ranks.run(resume, 4, str(tmp_path), 2)] == own
    data = next((tmp_path / "machine-1").rglob("step-00000002/data-00003*"))
    content = data.read_bytes()
    data.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert [places for places, _ in ranks.run(resume, 4, str(tmp_path), 2)] == [["run"]] * 4, "all or none"
    data.write_bytes(content)
    assert [places for places, _ in ranks.run(resume, 2, str(tmp_path), 2)] == [["machine-0"], ["machine-0", "run"]], "another layout"
    shutil.rmtree(tmp_path / "machine-0")
    assert [places for places, _ in ranks.run(resume, 4, str(tmp_path), 2)] == [["run"]] * 4, "a machine was replaced"


def test_a_copy_that_was_cut_off_is_finished_at_the_next_start(ranks: RankPool, tmp_path: Path) -> None:
    shared = tmp_path / "run" / "checkpoints"
    ranks.run(save, 4, str(tmp_path), [1])
    ranks.run(save, 4, str(tmp_path), [2], True)
    assert [row["step"] for row in list_checkpoints(shared)] == [1]
    assert listing.pending(shared) == [shared / listing.name_of(2)]
    assert ranks.run(resume, 4, str(tmp_path), 2)[0][1] == ["checkpoint_copied"]
    assert [(row["step"], row["good"]) for row in verify(shared)] == [(1, True), (2, True)]
    ranks.run(save, 4, str(tmp_path), [3], True)
    shutil.rmtree(next((tmp_path / "machine-1").rglob(listing.name_of(3))))
    assert ranks.run(resume, 4, str(tmp_path), 2)[0][1] == ["checkpoint_given_up"]
    assert not listing.pending(shared)


def save_and_copy_on(folder: str, spoil: bool) -> tuple[list[str], list[str]]:
    """The files that this rank copied away, and the events. With `spoil`, the second machine's first file arrives with a changed byte."""
    events: list[tuple[str, dict[str, Any]]] = []
    honest, copied = copy_to.copy_files, []

    def watched(source: Path, target: Path, names: Any) -> None:
        honest(source, target, names)
        if target.parent.name == "far":
            copied.extend(names)
            if spoil and dist.get_rank() == 2 and len(copied) == len(list(names)):
                path = next(target.glob("data-00002*"))
                path.write_bytes(b"!" + path.read_bytes()[1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_to, "copy_files", watched)
        with open_(folder, events, keep_last=5, copy_to=f"{folder}/far") as checkpoints:
            checkpoints.save(1, state(1), {"step": 1})
    return [name[:10] for name in copied], [event for event, fields in events if "/far" in fields.get("to", "")]


@pytest.mark.parametrize("spoil", [False, True])
def test_other_storage_gets_from_each_machine_what_it_has(ranks: RankPool, tmp_path: Path, spoil: bool) -> None:
    """The manifest comes last, from the first; a copy that arrives damaged is nobody's, and made again."""
    found = ranks.run(save_and_copy_on, 4, str(tmp_path), spoil)
    assert [row["good"] for row in verify(tmp_path / "far")] == [True]
    assert [path.name for path in (tmp_path / "far").iterdir()] == [listing.name_of(1)]
    own, other = found[0][0], found[2][0]
    assert set(own) == {"data-00000", "data-00001", "manifest.j", "meta.json", "tensors.js"} and own[-1] == "manifest.j"
    assert set(other) == {"data-00002", "data-00003"}
    assert found[1][0] == found[3][0] == []
    assert found[0][1] == (["checkpoint_copy_failed"] if spoil else []) + ["checkpoint_copied"]


def test_a_copy_of_which_a_machine_has_lost_its_part_is_not_sealed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, 4, str(tmp_path), [1])
    for path in (tmp_path / "machine-1").rglob("data-00003*"):
        path.unlink()
    assert ["data-00003" in text for text in ranks.run(copy_on, 4, str(tmp_path))] == [True] * 4
    assert list((tmp_path / "far").iterdir()) == []


def copy_on(folder: str) -> str:
    with open_(folder, copy_to=f"{folder}/far") as checkpoints:
        here = checkpoints._local_disk
        assert here is not None
        if not here.is_first:
            return "data-00003, told to the first of each machine"
        with pytest.raises(OSError, match="is on no machine") as caught:
            copy_to.copy_checkpoint(here.place / listing.name_of(1), f"{folder}/far", here.copy_to_communicator)
    return str(caught.value)


def bad_copies(folder: str) -> list[str]:
    """The second machine's first copy arrives with a changed byte; it is tried again with the next one."""
    events: list[tuple[str, dict[str, Any]]] = []
    honest, spoilt = copy_to.copy_files, []

    def spoil(source: Path, target: Path, names: Any) -> None:
        honest(source, target, names)
        if dist.get_rank() == 2 and not spoilt:
            spoilt.append(path := next(target.glob("data-00002*")))
            path.write_bytes(b"!" + path.read_bytes()[1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_to, "copy_files", spoil)
        with open_(folder, events, keep_last=5) as checkpoints:
            checkpoints.save(1, state(1), {"step": 1}, wait=True)
            checkpoints._local_disk.wait()  # type: ignore[union-attr]
            assert newest_good(checkpoints.directory)[0] is None
            checkpoints.save(2, state(2), {"step": 2})
    return [event for event, _ in events]


def test_a_bad_copy_is_not_published_and_is_tried_again(ranks: RankPool, tmp_path: Path) -> None:
    events = ranks.run(bad_copies, 4, str(tmp_path))[0]
    assert events == ["checkpoint", "checkpoint_copy_failed", "checkpoint", "checkpoint_copied", "checkpoint_copied"]
    assert [(row["step"], row["good"]) for row in verify(tmp_path / "run" / "checkpoints")] == [(1, True), (2, True)]


def needed_here(folder: str) -> list[int]:
    """What each save of this rank has asked its own disk for, and how much all ranks write."""
    asked: list[int] = []
    honest = save_module.create_directory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "create_directory", lambda *given: (asked.append(given[1]), honest(*given))[1])
        with open_(folder) as checkpoints:
            checkpoints.save(1, state(1), {"step": 1})
    return asked


def test_a_machine_needs_room_for_what_its_own_ranks_write(ranks: RankPool, tmp_path: Path) -> None:
    asked = ranks.run(needed_here, 4, str(tmp_path))
    own = [sum(path.stat().st_size for path in (tmp_path / f"machine-{one}").rglob("data-*")) for one in (0, 1)]
    assert asked == [[own[0]], [], [own[1]], []] and sum(own) > max(own)


def fail_after(folder: str, what: str) -> tuple[list[str], list[str], bool]:
    """Three saves; the ledger, or the pruning, fails on the first rank each time. What was loaded again, and what was kept."""

    def report(event: str, **fields: Any) -> None:
        if what == "ledger" and dist.get_rank() == 0:
            raise UserError("the disk of ledger.jsonl is full")

    def prune(*arguments: Any, **options: Any) -> list[int]:
        raise PermissionError(13, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        if what == "pruning":
            patch.setattr(checkpoints_module, "prune", prune)
        with Checkpoints(Path(folder), Options(keep_last=1), {}, report=report) as all_:
            outcomes = []
            for step in (1, 2, 3):
                try:
                    all_.save(step, state(step), {"step": step}, wait=True)
                    outcomes.append("saved")
                except UserError as error:
                    outcomes.append(str(error))
            found = state(0)
            all_.load_latest(found)
    return outcomes, [path.name for path in listing.directories(Path(folder))], holds(found, 3)


@pytest.mark.parametrize("what", ["ledger", "pruning"])
def test_what_the_first_rank_does_after_a_save_is_no_failure_of_the_save(ranks: RankPool, tmp_path: Path, what: str) -> None:
    """It alone would try again, in a collective that the others do not enter."""
    found = ranks.run(fail_after, 2, str(tmp_path / "run"), what)
    assert [outcomes for outcomes, _, _ in found] == [["saved"] * 3] * 2
    assert all(loaded for _, _, loaded in found)
    kept = [listing.name_of(step) for step in ((1, 2, 3) if what == "pruning" else (3,))]
    assert found[0][1] == kept


def test_a_thread_that_copies_outlives_what_fails_after_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prune(*arguments: Any, **options: Any) -> list[int]:
        raise PermissionError(13, "Permission denied")

    def forget(self: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoints_module, "prune", prune)
    monkeypatch.setattr(local_disk.LocalDisk, "_remove_old", forget)
    with open_(str(tmp_path)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"model": {"weight": torch.full((5,), float(step))}}, {"step": step})
        checkpoints._local_disk.wait()  # type: ignore[union-attr]
    assert [row["good"] for row in verify(tmp_path / "run" / "checkpoints")] == [True] * 3


def test_one_process_alone(tmp_path: Path) -> None:
    def tensors(value: float) -> dict[str, Any]:
        return {"model": {"weight": torch.full((5,), value)}}

    with open_(str(tmp_path), copy_to=str(tmp_path / "far")) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, tensors(step), {"step": step})
    assert [row["step"] for row in list_checkpoints(tmp_path / "run" / "checkpoints")] == [2, 3]
    assert [row["good"] for row in verify(tmp_path / "far")] == [True] * 3
    found = tensors(0)
    with open_(str(tmp_path)) as checkpoints:
        assert checkpoints.load_latest(found) == {"step": 3}
    assert torch.equal(found["model"]["weight"], torch.full((5,), 3.0))
