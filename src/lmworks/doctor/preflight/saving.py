"""A small state is saved where the checkpoints will lie, its ranks are killed inside a save, and one process goes on from it."""

from __future__ import annotations

import queue
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from lmworks.checkpoint import listing
from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.checkpoint.loading import load
from lmworks.doctor.preflight import world
from lmworks.doctor.preflight.disks import nearest, scratch
from lmworks.doctor.preflight.finding import Context, Finding
from lmworks.doctor.preflight.small import small_recipe
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.plan.layout import describe
from lmworks.recipe.after import Layout
from lmworks.recipe.recipe import Recipe

_AT_LEAST = 2  # whole checkpoints before the kill
_PATIENCE = 180.0  # seconds


def survives(context: Context) -> Finding:
    """Two ranks save again and again until they are killed with SIGKILL inside a save; one process must then read the newest whole
    checkpoint, bit for bit: the weights of its step are known, since they follow from a seed."""
    recipe = small_recipe(context.recipe)
    layout = Layout(tp=2) if context.layout.tp > 1 else Layout(dp_shard=2, zero=context.layout.zero or 1)
    place = nearest(context.run_dir / "checkpoints")
    with scratch(place) as folder:
        began = time.monotonic()
        answers, processes = world.start(keep_saving, 2, folder / "store", recipe, layout, folder / "checkpoints")
        try:
            inside = _in_a_save(folder / "checkpoints", answers, processes)
        finally:
            world.end(processes)
        path, refused = listing.newest_good(folder / "checkpoints")
        if path is None:
            why = refused[0][1] if refused else "none was finished"
            return Finding("fail", f"no checkpoint can be read after the kill: {why}", _ADVICE)
        step = listing.step_of(path)
        if refused:
            return Finding("fail", f"{refused[0][0].name} was named whole and is not: {refused[0][1]}", _ADVICE)
        state = {"model": Transformer(recipe.model).state_dict()}
        meta = load(path, state)
        expected = initialize(Transformer(recipe.model), step).state_dict()
        differ = [name for name, tensor in expected.items() if not torch.equal(tensor, state["model"][name])]
        if differ or meta["step"] != step:
            return Finding("fail", f"{path.name} came back with other bits in {len(differ)} tensors, such as {differ[:1]}", _ADVICE)
        when = "inside the save of the next" if inside else "between two saves"
        return Finding(
            "ok", f"{describe(layout)} killed {when}; one process read step {step} of {place}, every bit as saved",
            figures={"steps_saved": float(step), "seconds_per_save": (time.monotonic() - began) / step},
        )  # fmt: skip


_ADVICE = "the storage loses or changes what was synced and renamed; put checkpoints on another disk (run_dir, checkpoints.local)"


def keep_saving(recipe: Recipe, layout: Layout, folder: Path) -> None:
    """Save the weights of seed 1 as step 1, those of seed 2 as step 2, and so on for ever."""
    ranks = Ranks(layout)
    options = recipe.checkpoints.model_copy(update={"asynchronous": False, "local": None, "copy_to": None, "keep_every": None})
    checkpoints = Checkpoints(folder, options, {})
    step = 0
    while True:
        step += 1
        model = ParallelModel(build(recipe.model_copy(update={"seed": step}), ranks, torch.device("cpu")), ranks)
        checkpoints.save(step, model.written({"model": model.state_dict()}), {"step": step})


def _in_a_save(folder: Path, answers: Any, processes: list[BaseProcess]) -> bool:
    """Wait until some checkpoints are whole and the next is half written; False if that moment could not be met."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        whole = listing.directories(folder) if folder.is_dir() else []
        if whole and listing.step_of(whole[-1]) >= _AT_LEAST and any(folder.glob(".step-*.part/*")):
            return True
        try:
            rank, _, failure = answers.get_nowait()
            raise world.Lost(f"rank {rank}: {str(failure).strip().splitlines()[-1]}")
        except queue.Empty:
            pass
        if not all(process.is_alive() for process in processes):
            raise world.Lost("a rank that was to save ended by itself")
        time.sleep(0.001)
    return False
