"""The first batch of every phase goes through the model, forward and backward, at its own length."""

from __future__ import annotations

import gc
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lmworks.host import machine
from lmworks.host.machine import return_freed_memory
from lmworks.metrics import system
from lmworks.optim.optimizer import Updates
from lmworks.parallel.mesh import alone
from lmworks.plan.counts import flops_per_token
from lmworks.plan.memory import GIB, memory
from lmworks.preflight.check_result import CheckContext, CheckResult
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.train.build import build_model, device_for, with_optimizer
from lmworks.train.curriculum import phase_settings
from lmworks.ui.amounts import days, size

_WATCH = 0.005  # seconds between looks at the memory of a process
_PATIENCE = 120.0  # seconds; more than this is not for a check
_NATS = 0.5  # tolerance of the first loss around ln(vocab) plus the effect of the logits' variance
_MORE, _EAGER, _MORE_BYTES = 1.5, 2.5, 1 << 28  # memory beyond the plan that is worth a word; eager code keeps what compiled code does not


@dataclass
class Peak:
    """Bytes above what was held before."""

    bytes: float = 0.0


def first_batches(context: CheckContext) -> CheckResult:
    """Finite loss near ln(vocab), finite gradients, and the peak of memory against the plan; eager, so that nothing is compiled for it.

    On the ranks of a launch with the real layout; else in one process, where that has room and time for it.
    """
    context.need_shards()
    recipe = context.recipe.model_copy(update={"train": context.recipe.train.model_copy(update={"compile": False})})
    if context.ranks is None and (refused := _too_much(context)):
        return refused
    ranks, device = context.ranks or alone(), device_for(recipe)
    texts, advice = [], []
    figures: dict[str, float] = {}
    result = 0
    low, high = expected_loss(recipe)
    updates: Updates | None = None
    with peak(device) as built:
        model = build_model(recipe, ranks)
        if recipe.train.deepspeed is not None:
            model, updates = with_optimizer(recipe, model)
    model.train()
    order = context.batches.order
    for phase in phase_settings(recipe, order.timeline):
        rows = order.sequences(phase.first_step)[1]
        micro = min(micro_batch_size(recipe, phase.sequence_length, bool(model.pipeline)), rows)
        taken = min(rows, micro * ranks.size("dp") * (ranks.size("pp") * ranks.layout.pipeline_stages_per_rank if model.pipeline else 1))
        whole = context.batches.batch(phase.first_step, 0, taken)
        if phase.model is not None:
            model.configure(phase.model)
        valid = max(1, whole.valid_tokens)
        with peak(device) as worked:
            own, share = whole.rows(*model.rank_sequences(taken)), valid / whole.tokens.size
            sums = model.sum_over_ranks(model.forward_backward(own, taken, micro, 1 / valid, share))
        loss = float(sums.cross_entropy) / valid
        norm = float(model.clip_gradients(0.0)[0])
        if updates is not None:
            updates.step(apply=False)  # drops the gradients, wherever DeepSpeed has them
        for parameter in model.parameters():
            parameter.grad = None
        used, planned = built.bytes + worked.bytes, _planned(context, recipe, phase.index, micro)
        name = phase.name
        figures |= {f"{name}/loss": loss, f"{name}/peak_bytes": used, f"{name}/planned_bytes": planned}
        texts.append(f"{name}: {micro} x {phase.sequence_length:,} tokens, loss {loss:.2f}, {size(used)} used, {size(planned)} planned")
        if not math.isfinite(loss) or not math.isfinite(norm):
            result = 2
            advice.append(
                f"{name}: loss {loss}, norm of the gradients {norm}; try train.precision=fp32, and look at model.initializer_range"
            )
        elif not low <= loss <= high:
            result = 2
            advice.append(
                f"{name}: the first loss should be between {low:.2f} and {high:.2f} (ln of the vocabulary); look at initializer_range"
            )
        elif used > (_EAGER if context.recipe.train.compile else _MORE) * planned + _MORE_BYTES:
            result = max(result, 1)
            advice.append(f"{name}: more memory than planned; lower train.micro_batch_sequences or set train.activation_checkpointing")
    return CheckResult(("ok", "warn", "fail")[result], "; ".join(texts), "; ".join(advice), figures)  # type: ignore[arg-type]


def expected_loss(recipe: Recipe) -> tuple[float, float]:
    """The range of the first loss: ln(vocab), plus half the variance of the logits.

    Normed states times a head of initializer_range give logits of variance hidden_size * initializer_range^2. A tied head sees its own
    embedding in the state, which can add as much as hidden_size * initializer_range."""
    model = recipe.model
    assert model.vocab_size and model.hidden_size
    spread = model.hidden_size * model.initializer_range**2 + (
        model.hidden_size * model.initializer_range if model.tie_word_embeddings else 0.0
    )
    return math.log(model.vocab_size) - _NATS, math.log(model.vocab_size) + _NATS + spread


def micro_batch_size(recipe: Recipe, length: int, pipelined: bool) -> int:
    """Sequences at a time, as the trainer takes them."""
    micro = recipe.train.micro_batch_sequences or 1
    return micro if pipelined else max(1, micro * max(int(phase.sequence_length) for phase in recipe.train.phases) // length)


def _planned(context: CheckContext, recipe: Recipe, index: int, micro: int) -> float:
    """Bytes that the plan counts for a phase of what is in the measurement: not the runtime, and of the optimizer only DeepSpeed's."""
    if context.ranks is not None:
        parts = context.plan.phases[index].placed.memory.components
    else:
        parts = memory(recipe, context.machine, Layout(), int(recipe.train.phases[index].sequence_length), micro, 1).components
    left_out = ("runtime",) if recipe.train.deepspeed else ("optimizer state", "runtime", "fp32 master")
    return sum(value for name, value in parts.items() if name not in left_out)


def _too_much(context: CheckContext) -> CheckResult | None:
    """Where the whole model does not belong into this process."""
    recipe = context.recipe
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else machine.available_memory()
    need = seconds = 0.0
    for phase in recipe.train.phases:
        length = int(phase.sequence_length)
        micro = micro_batch_size(recipe, length, False)
        need = max(need, memory(recipe, context.machine, Layout(), length, micro, 1).total)
        seconds += flops_per_token(recipe.model, length).total * micro * length / (0.1 * system.measure_peak())
    launch = f"on the machines of the run: lmworks launch local {context.name} --to preflight"
    if need > free:
        return CheckResult("skip", f"one process would need {need / GIB:,.0f} GiB, and {free / GIB:,.0f} are free here", launch)
    if seconds > _PATIENCE:
        return CheckResult("skip", f"it would take some {days(seconds)} here", launch)
    return None


@contextmanager
def peak(device: torch.device) -> Iterator[Peak]:
    """How much more memory than before the block was held at a time within it."""
    found = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        system.reset_memory_peak()
        yield found
        torch.cuda.synchronize()
        found.bytes = torch.cuda.max_memory_allocated() - before
        return
    import psutil

    gc.collect()
    return_freed_memory()  # it would hide what is used anew
    process, done = psutil.Process(os.getpid()), threading.Event()
    before = highest = process.memory_info().rss

    def watch() -> None:
        nonlocal highest
        while not done.wait(_WATCH):
            highest = max(highest, process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True, name="memory")
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found.bytes = max(highest, process.memory_info().rss) - before
