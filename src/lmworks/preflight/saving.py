"""Trains a small model, saves it in the directory of the checkpoints, kills its ranks during a save, and resumes on one process.

A small model of the same architecture is also exported in every format that the recipe requests, and the exports are verified.
"""

from __future__ import annotations

import itertools
import queue
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmworks.checkpoint import listing
from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.checkpoint.state import load
from lmworks.export import gguf
from lmworks.export.export import DTYPES, check, why_no_gguf
from lmworks.export.huggingface import write_model
from lmworks.export.parity import compare, require_parity
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.plan.layout import describe
from lmworks.preflight import small_model
from lmworks.preflight.check_result import CheckContext, CheckResult
from lmworks.preflight.disks import nearest, scratch
from lmworks.preflight.layouts import OF_UPDATE, TOLERANCE
from lmworks.preflight.small_model import HEADS, RATE, STEPS, first_weights, one_step, small_recipe, state_of, whole
from lmworks.recipe.families.registry import class_for
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.build import with_optimizer

_AT_LEAST = 2  # whole checkpoints before the kill
_PATIENCE = 180.0  # seconds


def resumes(context: CheckContext) -> CheckResult:
    """Two ranks train and save every step until they are killed with SIGKILL inside a save. One process must then read the newest whole
    checkpoint, bit for bit, and a few steps later be where two ranks are that nobody has killed, but for the rounding of another layout."""
    recipe = small_recipe(context.recipe)
    layout = Layout(tp=2) if context.layout.tp > 1 else Layout(dp_shard=2, zero=context.layout.zero or 1)
    place = nearest(context.run_dir / "checkpoints")
    with scratch(place) as folder:
        began = time.monotonic()
        answers, processes = small_model.start_ranks(keep_saving, 2, folder / "store", recipe, layout, folder / "checkpoints")
        try:
            inside = _in_a_save(folder / "checkpoints", answers, processes)
        finally:
            small_model.end_ranks(processes)
        seconds = time.monotonic() - began
        path, refused = listing.newest_good(folder / "checkpoints")
        if path is None:
            why = refused[0][1] if refused else "none was finished"
            return CheckResult("fail", f"no checkpoint can be read after the kill: {why}", _ADVICE)
        if refused:
            return CheckResult("fail", f"{refused[0][0].name} was named whole and is not: {refused[0][1]}", _ADVICE)
        step = listing.step_of(path)
        resumed, *_ = small_model.run_ranks(go_on, 1, recipe, Layout(), path, step)
        undisturbed, *_ = small_model.run_ranks(go_on, 2, recipe, layout, None, step)
    if differ := [name for name, weight in undisturbed.saved.items() if not np.array_equal(weight, resumed.saved[name])]:
        return CheckResult("fail", f"{path.name} came back with other bits in {len(differ)} tensors, such as {differ[:1]}", _ADVICE)
    of_loss = max(abs(a - b) / abs(b) for a, b in zip(resumed.losses, undisturbed.losses, strict=True))
    of_weight = max(float(np.abs(resumed.after[name] - weight).max()) / RATE for name, weight in undisturbed.after.items())
    figures = {"steps_saved": float(step), "seconds_per_save": seconds / step, "loss": of_loss, "weight": of_weight}
    if of_loss > TOLERANCE or of_weight > OF_UPDATE:
        text = f"{STEPS} steps after the resume the loss is off by {of_loss:.0e}, the weights by {of_weight:.0e} of a step"
        return CheckResult("fail", text, "a resumed run does not train on from what was saved: report this with resolved.json", figures)
    when = "inside the save of the next" if inside else "between two saves"
    return CheckResult(
        "ok", f"{describe(layout)} killed {when}; one process read step {step} of {place}, every bit as saved, and trained on: loss off by "
        f"{of_loss:.0e}, weights by {of_weight:.0e} of a step", figures=figures,
    )  # fmt: skip


_ADVICE = "the storage loses or changes what was synced and renamed; put checkpoints on another disk (run_dir, checkpoints.local)"


def keep_saving(recipe: Recipe, layout: Layout, folder: Path) -> None:
    """Train and save every step, for ever."""
    model, optimizer = with_optimizer(recipe, first_weights(recipe, layout))
    model.train()
    options = recipe.checkpoints.model_copy(update={"asynchronous": False, "local": None, "copy_to": None, "keep_every": None})
    checkpoints = Checkpoints(folder, options, {})
    for step in itertools.count(1):
        one_step(recipe, model, optimizer, step)
        checkpoints.save(step, model.without_duplicates(state_of(model, optimizer)), {"step": step})


@dataclass(frozen=True)
class Course:
    """Whole weights by name, after the step that was saved and some steps later, and the losses of these."""

    saved: dict[str, np.ndarray]
    losses: list[float]
    after: dict[str, np.ndarray]


def go_on(recipe: Recipe, layout: Layout, path: Path | None, saved: int) -> Course:
    """Come to the step `saved`, by a checkpoint or (None) by training from the first, and train on."""
    model, optimizer = with_optimizer(recipe, first_weights(recipe, layout))
    model.train()
    if path is None:
        for step in range(1, saved + 1):
            one_step(recipe, model, optimizer, step)
    else:
        state = state_of(model, optimizer, values=False)
        load(path, state)
        model.state_loaded(state)
    then = _weights(model)
    losses = [float(one_step(recipe, model, optimizer, step).loss) for step in range(saved + 1, saved + 1 + STEPS)]
    return Course(then, losses, _weights(model))


def _weights(model: ParallelModel) -> dict[str, np.ndarray]:
    return {name: whole(value) for name, value in model.state_dict().items()}


def _in_a_save(folder: Path, answers: Any, processes: list[BaseProcess]) -> bool:
    """Wait until some checkpoints are whole and the next is half written; False if that moment could not be met."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        whole = listing.directories(folder) if folder.is_dir() else []
        if whole and listing.step_of(whole[-1]) >= _AT_LEAST and any(folder.glob(".step-*.part/*")):
            return True
        try:
            rank, _, failure = answers.get_nowait()
            raise small_model.LostRank(f"rank {rank}: {str(failure).strip().splitlines()[-1]}")
        except queue.Empty:
            pass
        if not all(process.is_alive() for process in processes):
            raise small_model.LostRank("a rank that was to save ended by itself")
        time.sleep(0.001)
    return False


_HIDDEN, _HEAD = 128, 64
_ROWS, _LENGTH = 2, 32


@torch.no_grad()
def export_round_trip(context: CheckContext) -> CheckResult:
    """Compare the exports, as loaded by transformers and read by a GGUF reader, with the model."""
    options = context.recipe.export
    if not options.huggingface and not options.gguf:
        return CheckResult("skip", "the recipe exports nothing")
    check(context.recipe)
    absent = [name for name, asked in (("transformers", options.huggingface), ("gguf", options.gguf)) if asked and find_spec(name) is None]
    if absent:
        return CheckResult("skip", f"{', '.join(absent)} cannot be imported", "pip install 'lmworks[export]'")
    dtype, directory = DTYPES[options.dtype], context.run_dir / "tokenizer"
    whole = context.recipe.model
    assert whole.vocab_size and whole.num_attention_heads and whole.head_dim
    rows = whole.vocab_size
    # a class may require heads x head_dim to equal the hidden size, and llama.cpp layers without positions as in the full model
    head = _HIDDEN // HEADS if whole.num_attention_heads * whole.head_dim == whole.hidden_size else _HEAD
    small = small_recipe(context.recipe, rows, _HIDDEN, head)
    model = initialize(
        Transformer(small.model.model_copy(update={"no_rope_layer_interval": whole.no_rope_layer_interval})), small.seed
    ).eval()
    texts = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.huggingface:
            write_model(model, folder, {"eos_token_id": [0], "pad_token_id": 0}, dtype)
            tokens_BT = torch.randint(rows, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(small.seed))
            parity = compare(model, folder, tokens_BT, dtype)
            require_parity(parity, folder)
            off = f"off by {parity.relative:.0e} of the largest in fp64, {parity.fp32:.0e} in fp32"
            texts.append(f"{class_for(model.config)}: logits {off}")
        tokenizer = load_tokenizer(directory) if (directory / "tokenizer.json").exists() else None
        if options.gguf == "auto" and (why := why_no_gguf(whole, tokenizer)) is not None:
            texts.append(f"no GGUF: {why}")
        elif options.gguf and tokenizer is not None:
            path = folder / "model.gguf"
            gguf.write_gguf(model, tokenizer, path, dtype, small.name)
            texts.append(f"GGUF {gguf.architecture_for(model.config)}: {gguf.check_gguf(model, path, dtype)} tensors equal")
        elif options.gguf:
            texts.append("GGUF not tested: it contains the tokenizer, and there is none yet")
    return CheckResult("ok", "; ".join(texts))
