"""The faults, each as it comes from outside: signals, files, a disk that fills up. What must be planted inside is in hook/."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from plans import PLANTED
from running import Run


class Missed(Exception):
    """The run was over before the fault."""


def strike(run: Run) -> None:
    """Start the run, hit it once, and bring it to its end."""
    run.start()
    kind = run.plan.kind
    if kind in PLANTED:
        _planted(run)
    elif run.plan.point is None:
        _HOW[kind](run)
    run.finish(_mend_disk(run))
    if run.plan.point is not None and not run.died.exists():
        raise Missed(f"it never came to {run.plan.point}")


def _at_the_moment(run: Run) -> None:
    plan = run.plan
    if not run.reach(plan.moment):
        raise Missed(f"the run ended with {run.process.returncode} before step {plan.moment}: {run.said()[-300:]}")
    time.sleep(plan.delay)
    run.notes["step"] = run.done()


def _victim(run: Run) -> psutil.Process:
    """The rank that the plan names, as soon as it lives."""
    run.until(lambda: run.plan.rank in run.ranks() or not run.running)
    if (victim := run.ranks().get(run.plan.rank)) is None or not run.running:
        raise Missed("no rank was left")
    return victim


def _kill_rank(run: Run) -> None:
    _at_the_moment(run)
    run.kill([_victim(run)])


def _kill_all(run: Run) -> None:
    _at_the_moment(run)
    _end(run, only_supervisor=run.plan.how == "supervisor")


def _end(run: Run, only_supervisor: bool = False) -> None:
    everything = run.tree()
    if only_supervisor:
        # What it had started must not stay behind, nor be in the way of the next start.
        run.kill(everything[:1])
        run.until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in everything))
    else:
        run.kill(everything)


def _terminate(run: Run) -> None:
    _at_the_moment(run)
    run.signal([run.process], signal.SIGTERM)
    code = run.wait_for_end()
    run.notes["code"] = code
    assert code in (75, 0), f"ended with code {code} after SIGTERM: {run.said()[-400:]}"
    if code == 0:
        raise Missed("it was over before the signal")
    run.codes.append(code)
    run.start()


def _skip(run: Run) -> None:
    """A user has a window left out, of a run that was killed, was stopped, or is over; and then it is killed once more.

    The twin (a plan of no seed) is over, and is not killed."""
    plan = run.plan
    assert plan.window is not None
    start, stop = plan.window
    if plan.how == "end":
        run.finish()
    else:
        _at_the_moment(run)
        run.until(lambda: _saved(run, start) or not run.running)
        if plan.how == "kill":
            _end(run)
        else:
            run.signal([run.process], signal.SIGTERM)
            run.codes.append(run.wait_for_end())
    if not (saved := _saved(run, start)):
        raise Missed(f"there was no checkpoint of step {start} or earlier")
    chance = random.Random(plan.seed)
    words = ["ckpt", "rollback", str(run.dir), str(chance.choice(saved)), "--skip-steps", f"{start}:{stop}"]
    command = run.lmworks(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert command.wait() == 0, f"{' '.join(words)} ended with {command.returncode}: {command.stderr.read().decode()[-300:]}"
    run.start()
    if plan.seed < 0:
        return
    lines = len(run.records(0)) + chance.randrange(4)
    run.until(lambda: len(run.records(0)) >= lines or not run.running)
    time.sleep(plan.delay)
    if run.running:
        _end(run)


def _saved(run: Run, at_most: int) -> list[int]:
    """The steps, up to this one, of which there is a checkpoint."""
    return [step for path in run.checkpoints() if (step := int(path.name.removeprefix("step-"))) <= at_most]


def _kill_in_save(run: Run) -> None:
    """As soon as a save that is under way is seen on the disk."""
    if not run.reach(run.plan.moment):
        raise Missed("it was over before the save")
    folder, victims = run.dir / "checkpoints", run.tree() if run.plan.how == "all" else [_victim(run)]
    seen = run.until(lambda: any(folder.glob(".step-*.part")) or not run.running, every=0.0005)
    time.sleep(run.plan.delay / 5)  # a save of this model takes some ten to a hundred milliseconds
    if not run.running or not seen:
        raise Missed("it was over before the save")
    run.kill(victims)
    run.notes["torn"] = any(folder.glob(".step-*.part"))


def _damage(run: Run) -> None:
    """The newest checkpoint, while everything stands still; then a kill, so that the next start meets it."""
    _at_the_moment(run)
    chance = random.Random(run.plan.seed)
    folder = run.dir / "checkpoints"
    run.until(lambda: len(run.checkpoints()) > 1 or not run.running)
    ranks = list(run.ranks().values()) if "one" in run.plan.how and run.plan.supervised else []
    if ranks and run.running:
        run.signal(ranks, signal.SIGSTOP)
        time.sleep(0.2)  # a publication that was under way is a few system calls
    else:
        _end(run)
    newest = run.checkpoints()[-1:]
    if len(run.checkpoints()) < 2:
        run.signal(ranks, signal.SIGCONT)
        raise Missed("there were no two checkpoints")
    path = chance.choice(sorted(newest[0].iterdir()))
    spoil(path, run.plan.how.split()[0], chance)
    run.notes |= {"damaged": str(path.relative_to(folder)), "at": time.time()}
    if ranks:
        run.kill([ranks[run.plan.rank % len(ranks)]])
        run.signal(ranks, signal.SIGCONT)


def spoil(path: Path, how: str, chance: random.Random) -> None:
    """Flip one bit of a file, or cut it."""
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    if how == "flip":
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    else:
        os.truncate(path, place)


def _fill(run: Run) -> None:
    """Until there is room again a save cannot end (`checkpoints`), or no line be written (`run`)."""
    _at_the_moment(run)
    assert run.mounted
    left = 64_000 if run.plan.how == "checkpoints" else 0
    stat = os.statvfs(run.mounted)
    with open(run.mounted / "filler", "wb", buffering=0) as filler, suppress(OSError):
        for _ in range(max(0, stat.f_bavail * stat.f_bsize - left) // 4096):
            filler.write(b"\0" * 4096)
        while not left:
            filler.write(b"\0" * 4096)
    run.notes["filled"] = time.time()
    run.until(lambda: run.events("save_failed") or not run.running, most=20)
    run.notes["save_failed"] = len(run.events("save_failed"))
    if run.running:
        _make_room(run)


def _make_room(run: Run) -> None:
    assert run.mounted
    (run.mounted / "filler").unlink(missing_ok=True)


def _mend_disk(run: Run) -> Callable[[int], bool]:
    """Makes room, where that was not done while the run was already ending, and has it started again, once."""
    mended = False

    def mend(code: int) -> bool:
        nonlocal mended
        if run.plan.kind != "full disk" or code != 2 or mended:
            return False
        assert "is full" in run.said(), f"a full disk is not named: {run.said()[-400:]}"
        _make_room(run)
        mended = True
        return True

    return mend


def _planted(run: Run) -> None:
    if run.plan.how == "skip and kill":
        if not run.reach(run.plan.moment + 2):
            raise Missed("it was over before the kill")
        run.kill([_victim(run)])


def _slow(run: Run) -> None:
    """A rank that gets a quarter of its time, for some seconds."""
    _at_the_moment(run)
    victim = _victim(run)
    for _ in range(8):
        run.signal([victim], signal.SIGSTOP)
        time.sleep(0.3)
        run.signal([victim], signal.SIGCONT)
        time.sleep(0.1)


def _hang(run: Run) -> None:
    """A rank that is frozen; the others must end it."""
    _at_the_moment(run)
    victim = _victim(run)
    run.signal([victim], signal.SIGSTOP)
    run.notes["frozen"] = time.time()
    try:
        run.until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE or not run.running)
    finally:
        run.signal([victim], signal.SIGKILL)
    run.notes["seconds until it was ended"] = round(time.time() - run.notes["frozen"], 1)


def _shrink(run: Run) -> None:
    """A place is lost with its agent; with `grow` it is taken back once the others have gone on."""
    _at_the_moment(run)
    victim = _victim(run)
    host = victim.environ()["LMWORKS_HOST"]
    run.kill([*victim.parents()[:1], victim])
    run.until(lambda: _size(run) == run.plan.ranks - 1 or not run.running)
    if run.plan.kind == "grow" and run.running:
        code = run.lmworks("launch", "readmit", str(run.dir), host, stdout=subprocess.DEVNULL).wait()
        assert code == 0, f"readmit ended with code {code}"
        run.until(lambda: _size(run) == run.plan.ranks or not run.running)
        run.notes["grown"] = _size(run) == run.plan.ranks


def _size(run: Run) -> int:
    """Ranks of the world that trained last."""
    records = run.records(0)
    return int(records[-1]["ranks"]) if records else 0


_HOW: dict[str, Callable[[Run], None]] = {
    "kill a rank": _kill_rank, "kill all": _kill_all, "SIGTERM": _terminate, "kill inside a save": _kill_in_save,
    "damaged checkpoint": _damage, "full disk": _fill, "slow rank": _slow, "hang": _hang, "shrink": _shrink, "grow": _shrink,
    "skip window": _skip,
}  # fmt: skip
