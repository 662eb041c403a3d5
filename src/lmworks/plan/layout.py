"""Legal layouts, whether they fit in memory, and the choice of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2
from typing import Literal

from lmworks.errors import UserError
from lmworks.host.devices import GPUS
from lmworks.parallel.pipeline_stages import bubble, pipelined_micro_batch
from lmworks.parallel.splits import split_problems
from lmworks.plan.memory import GIB, Memory, activation_bytes, gathered_weights, memory
from lmworks.plan.stages import has_rollouts, lora_of
from lmworks.recipe import checks
from lmworks.recipe.parameters import alignment_problems
from lmworks.recipe.schema.layout import CHECKPOINT_NONE, ActivationCheckpointing, Cluster, Layout, world_size
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase

Zero = Literal[0, 1, 2, 3]
_SCHEDULES = (("interleaved", 2), ("interleaved", 4), ("zero-bubble", 1), ("zero-bubble", 2))  # with stages per rank; simplest first
_IDLE = 0.05  # fraction of a step: below it, other layouts and schedules than 1F1B cost more communication than they save
MARGIN = 0.05  # fraction of device memory that a chosen layout leaves free, if possible: for fragmentation, libraries and the allocator
_SHORTEST_CP_SLICE = 4096  # splitting shorter sequences costs more in communication than it saves


@dataclass(frozen=True)
class Placement:
    """A legal layout for one phase, with its micro-batch and its memory on the fullest rank."""

    layout: Layout
    micro_batch_size: int
    accumulation: int
    memory: Memory

    @property
    def bubble(self) -> float:
        """Fraction of a step in which the pipeline is idle."""
        return bubble(self.layout.pp, self.accumulation, self.layout.pipeline_schedule, self.layout.pipeline_stages_per_rank)


def describe(layout: Layout) -> str:
    """Short text such as `TP8 x PP16 x DP64, EP32, ZeRO-1`."""
    axes = [("TP", layout.tp), ("PP", layout.pp), ("CP", layout.cp), ("HSDP", layout.dp_replicate), ("DP", layout.dp_shard)]
    text = " x ".join(f"{name}{size}" for name, size in axes if size > 1) or "one device"
    chunks = f" {layout.pipeline_stages_per_rank} stages a rank" if layout.pipeline_stages_per_rank > 1 else ""
    schedule = f", {layout.pipeline_schedule}{chunks}" if layout.pp > 1 and layout.pipeline_schedule != "1f1b" else ""
    return text + (f", EP{layout.ep}" if layout.ep > 1 else "") + schedule + (f", ZeRO-{layout.zero}" if world_size(layout) > 1 else "")


def devices(cluster: Cluster) -> int:
    """Devices of a cluster."""
    return cluster.nodes * cluster.devices_per_node


def problems(recipe: Recipe, cluster: Cluster, layout: Layout, phase: Phase | None = None) -> Iterator[str]:
    """The reasons why a layout is not legal; none if it is. With a phase, also whether its batch and sequence length divide."""
    model = recipe.model
    assert (
        model.num_attention_heads and model.num_key_value_heads and model.intermediate_size and model.num_hidden_layers and model.vocab_size
    )
    count = devices(cluster)
    if world_size(layout) != count:
        product = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
        yield f"{product} is {world_size(layout):,} ranks, the cluster has {count:,} devices"
    if cluster.devices_per_node % layout.tp:
        yield f"tp {layout.tp} must fit within a node of {cluster.devices_per_node} devices; between nodes its communication is too slow"
    bf16 = recipe.train.precision == "bf16" or (recipe.train.precision == "auto" and cluster.bf16)
    if bf16 or cluster.on_cpu:
        yield from alignment_problems(model, layout.tp, 4 if not bf16 and recipe.train.precision != "fp16" else 2)
    yield from split_problems(recipe, layout)
    yield from (text for _, text in checks.deepspeed_problems(recipe.model_copy(update={"layout": layout})))
    if phase is not None:
        yield from stage_problems(layout, phase)
        shares = Shares.of(phase, layout)
        if shares.sequences < shares.ranks:
            yield f"the {shares.sequences:,} sequences of a step of phase {phase.name} are fewer than the {shares.ranks:,} data ranks"
        elif layout.pp > 1:
            yield from _micro_batch_problem(recipe, layout, phase, shares.largest)


@dataclass(frozen=True)
class Shares:
    """The `sequences` of a step, which data `ranks` share: the `largest` share of one, as evenly as they divide."""

    sequences: int
    ranks: int

    @classmethod
    def of(cls, phase: Phase, layout: Layout) -> Shares:
        return cls(phase.global_batch_tokens // phase.sequence_length, layout.data_ranks)

    @property
    def largest(self) -> int:
        return -(-self.sequences // self.ranks)

    @property
    def idle(self) -> float:
        """Fraction of a step in which ranks wait on average for those with one sequence more."""
        return 1 - self.sequences / (self.largest * self.ranks)


def stage_problems(layout: Layout, phase: Phase) -> Iterator[str]:
    """The reasons why the sequences of a phase cannot be split, or written, on a layout, whatever its batch."""
    if has_rollouts(phase) and layout.pp > 1:
        yield f"phase {phase.name} generates with the weights that it trains, which pp {layout.pp} cannot; use tp, cp or dp_shard"
    if phase.sequence_length % (2 * layout.cp if layout.cp > 1 else 1):
        yield f"cp {layout.cp} does not divide sequences of {int(phase.sequence_length):,} into pairs of slices"
    elif phase.sequence_length // layout.cp % layout.tp:
        yield f"tp {layout.tp} does not divide the {phase.sequence_length // layout.cp:,} tokens of a sequence on a rank of cp"


def _micro_batch_problem(recipe: Recipe, layout: Layout, phase: Phase, sequences: int) -> Iterator[str]:
    """Interleaved schedules run equal rounds. (During a batch-size ramp blank micro-batches fill them.)"""
    most = recipe.train.micro_batch_sequences or 1
    if pipelined_micro_batch(layout, sequences, most) is not None:
        return
    ways = []
    if (larger := next((size for size in range(most, sequences + 1) if pipelined_micro_batch(layout, sequences, size)), None)) is not None:
        ways.append(f"train.micro_batch_sequences={larger}")
    ways.append("schedule=1f1b and pipeline_stages_per_rank=1")
    yield (
        f"the {sequences:,} sequences per rank and step of phase {phase.name} cannot be split into micro-batches that schedule "
        f"{layout.pipeline_schedule} runs over pp {layout.pp} in equal rounds; set {' or '.join(ways)}"
    )


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def legal(recipe: Recipe, cluster: Cluster, phases: Sequence[Phase], zero: Zero) -> Iterator[Layout]:
    """All layouts that are legal for some phases, in order of preference: smallest pipeline, then context, tensor and expert parallelism.
    Those come last whose data ranks wait long for each other, because they share the sequences of a step unevenly; not on a CPU, where
    what other axes exchange takes longer."""
    waiting: list[tuple[float, Layout]] = []
    for layout in _layouts(recipe, cluster, phases[0], zero):
        if any(problem for phase in phases for problem in problems(recipe, cluster, layout, phase)):
            continue
        if (idle := max(Shares.of(phase, layout).idle for phase in phases)) > _IDLE and not cluster.on_cpu:
            waiting.append((idle, layout))
        else:
            yield layout
    yield from (layout for _, layout in sorted(waiting, key=lambda one: one[0]))


def _layouts(recipe: Recipe, cluster: Cluster, phase: Phase, zero: Zero) -> Iterator[Layout]:
    model = recipe.model
    assert model.num_hidden_layers
    count = devices(cluster)
    for pp in _divisors(count, model.num_hidden_layers):
        for cp in _divisors(count // pp, max(1, phase.sequence_length // _SHORTEST_CP_SLICE)):
            for tp in _divisors(count // pp // cp, cluster.devices_per_node):
                dp = count // pp // cp // tp
                for ep in _divisors(model.moe.n_routed_experts, dp * cp) if model.moe else [1]:
                    yield Layout.model_construct(pp=pp, dp_replicate=1, dp_shard=dp, cp=cp, tp=tp, ep=ep, zero=zero)


def place(recipe: Recipe, cluster: Cluster, layout: Layout, phase: Phase) -> Placement:
    """The layout with the largest micro-batch, up to that of the recipe, that fits with a margin; with one sequence if none does."""
    per_rank = Shares.of(phase, layout).largest
    length, lora = int(phase.sequence_length), lora_of(phase)
    best = None
    for micro in range(min(recipe.train.micro_batch_sequences or 1, per_rank), 0, -1):
        if (pipelined_micro_batch(layout, per_rank, micro) or 1) == micro if layout.pp > 1 else per_rank % micro == 0:
            number = per_rank // micro
            best = Placement(layout, micro, number, memory(recipe, cluster, layout, length, micro, number, lora, has_rollouts(phase)))
            if fits(best, cluster, MARGIN):
                break
    assert best is not None
    return best


def fits(placed: Placement, cluster: Cluster, margin: float = 0.0) -> bool:
    """Whether the rank that needs most fits and leaves the fraction `margin` of the memory free."""
    return placed.memory.total <= (1 - margin) * cluster.memory_gib * GIB


def automatic(
    recipe: Recipe, cluster: Cluster, phase: Phase, zero: Zero, others: Sequence[Phase] = ()
) -> tuple[Placement | None, Placement | None]:
    """The first legal layout that fits with a margin, or fits at all; and the one that needs the least memory if none does.

    It must also fit the other phases of the run, `others`.

    Tensor parallelism is as small as possible and stays within a node; then the pipeline grows; the rest is data parallel. A pipeline with
    a large bubble gets the schedule with the smallest one.
    """
    leanest: Placement | None = None
    tight: Placement | None = None  # the first that fits without the margin, if none fits with it
    for layout in legal(recipe, cluster, (phase, *others), zero):
        placed = place(recipe, cluster, layout, phase)
        worst = max((placed, *(place(recipe, cluster, layout, other) for other in others)), key=lambda one: one.memory.total)
        if fits(worst, cluster, MARGIN):
            chosen = _least_idle(recipe, cluster, placed, (phase, *others))
            return chosen, chosen
        if tight is None and fits(worst, cluster):
            tight = placed
        if leanest is None or worst.memory.total < leanest.memory.total:
            leanest = worst
    if tight is not None:
        tight = _least_idle(recipe, cluster, tight, (phase, *others))
        return tight, tight
    return None, leanest


def _least_idle(recipe: Recipe, cluster: Cluster, placed: Placement, phases: Sequence[Phase]) -> Placement:
    """The same axes with another schedule, if 1F1B has a large bubble and another schedule that fits all phases has a smaller one."""

    best = placed
    for schedule, chunks in _SCHEDULES if placed.bubble > _IDLE else ():
        layout = placed.layout.model_copy(update={"pipeline_schedule": schedule, "pipeline_stages_per_rank": chunks})
        if any(problem for phase in phases for problem in problems(recipe, cluster, layout, phase)):
            continue
        tried, *rest = [place(recipe, cluster, layout, phase) for phase in phases]
        if all(fits(one, cluster) for one in (tried, *rest)) and tried.bubble < best.bubble:
            best = tried
    return best


def nearest_legal(recipe: Recipe, cluster: Cluster, wanted: Layout, phase: Phase) -> Layout | None:
    """The legal layout closest to the wanted one, by the factors between their axes; one that fits, if any does."""

    def distance(layout: Layout) -> float:
        axes = ("tp", "pp", "cp", "ep")
        return sum(abs(log2(getattr(layout, axis) / getattr(wanted, axis))) for axis in axes) + abs(layout.zero - wanted.zero)

    zeros: tuple[Zero, ...] = (wanted.zero, 1) if wanted.zero >= 2 else (wanted.zero,)
    found = sorted((layout for zero in zeros for layout in legal(recipe, cluster, [phase], zero)), key=distance)
    return next((layout for layout in found if fits(place(recipe, cluster, layout, phase), cluster)), found[0] if found else None)


class DoesNotFit(UserError):
    """A phase needs more memory than a device has; `placed` is the given layout, or that which needs least."""

    def __init__(self, message: str, placed: Placement) -> None:
        super().__init__(message)
        self.placed = placed


def choose(recipe: Recipe, cluster: Cluster, phase: Phase, given: Layout | None) -> Placement:
    """The layout for a phase: the given one if it is legal and fits, otherwise the automatic choice.

    Raises `UserError` with the reason and the nearest layout, setting or cluster that works, `DoesNotFit` for too little memory.
    """
    if given is not None:
        faults = list(problems(recipe, cluster, given, phase))
        if faults:
            near = nearest_legal(recipe, cluster, given, phase)
            hint = f"the nearest legal layout is {describe(near)}" if near else suggest_fit(recipe, cluster, phase, given.zero)
            raise UserError(f"phase {phase.name}: {describe(given)}: {faults[0]}; {hint}")
        placed = place(recipe, cluster, given, phase)
        if fits(placed, cluster):
            return placed
        near = nearest_legal(recipe, cluster, given, phase)
        hint = suggest_fit(recipe, cluster, phase, given.zero)
        if near is not None and fits(place(recipe, cluster, near, phase), cluster):
            hint = f"the nearest that fits is {describe(near)}"
        raise DoesNotFit(f"phase {phase.name}: {explain_shortage(placed, cluster)}; {hint}", placed)
    zero = recipe.layout.zero
    chosen, leanest = automatic(recipe, cluster, phase, zero)
    if chosen is not None:
        return chosen
    if leanest is None and (fault := undividable(recipe, cluster, phase)):
        raise UserError(f"{recipe.name} on {cluster.name}, phase {phase.name}: {fault}")
    if leanest is None:
        count, sequences = devices(cluster), phase.global_batch_tokens // phase.sequence_length
        step = f"a step has {sequences:,} sequences of {int(phase.sequence_length):,} tokens"
        reason = f"no layout divides the work over {count:,} devices: {step}"
    else:
        reason = explain_shortage(leanest, cluster)
    text = f"{recipe.name} on {cluster.name}, phase {phase.name}: {reason}; {suggest_fit(recipe, cluster, phase, zero)}"
    raise UserError(text) if leanest is None else DoesNotFit(text, leanest)


def undividable(recipe: Recipe, cluster: Cluster, phase: Phase) -> str | None:
    """Why no layout is legal even on one such device, where nothing is divided: a fault of the recipe, which no number of devices mends."""
    one = cluster.model_copy(update={"nodes": 1, "devices_per_node": 1})
    return next(problems(recipe, one, Layout(), phase), None)


def explain_shortage(placed: Placement, cluster: Cluster) -> str:
    """The memory that a layout needs, compared with the device, and its three largest components."""
    parts = sorted(placed.memory.components.items(), key=lambda item: -item[1])[:3]
    largest = ", ".join(f"{name} {size / GIB:,.1f}" for name, size in parts)
    return f"{describe(placed.layout)} needs {placed.memory.total / GIB:,.1f} GiB on a device of {cluster.memory_gib:g} ({largest})"


def suggest_fit(recipe: Recipe, cluster: Cluster, phase: Phase, zero: Zero, others: Sequence[Phase] = ()) -> str:
    """The smallest change with which the phase and `others` fit: settings first, then other numbers of devices."""
    for one in (phase, *others):
        copy = gathered_weights(recipe.model, activation_bytes(recipe, cluster), lora_of(one)) if has_rollouts(one) else 0.0
        if copy > cluster.memory_gib * GIB:
            return (
                f"no layout helps: for its answers each rank of {one.name} gathers all weights, {copy / GIB:,.1f} GiB; take "
                "devices with more memory or a smaller model, or train with slime (lmworks handover slime)"
            )

    def with_checkpointing(text: str) -> Recipe:
        train = recipe.train.model_copy(update={"activation_checkpointing": ActivationCheckpointing.parse(text)})
        return recipe.model_copy(update={"train": train})

    more = [text for text in ("25%", "50%", "75%") if recipe.train.activation_checkpointing.policy is CHECKPOINT_NONE]
    full = with_checkpointing("full")
    settings: tuple[tuple[Recipe, Zero, str], ...] = (
        (recipe, zero, ""),
        (full, zero, "train.activation_checkpointing=full"),
        (recipe, 3, "layout.zero=3"),
        (full, 3, "train.activation_checkpointing=full and layout.zero=3"),
    )
    shares = tuple((with_checkpointing(text), zero, f"train.activation_checkpointing={text}") for text in more)
    for changed, level, name in (settings[0], *shares, *settings[1:]):
        chosen, _ = automatic(changed, cluster, phase, level, others)
        if chosen is not None:
            return f"it fits with {name or 'the automatic layout'}: {describe(chosen.layout)}"
    if cluster.on_cpu:
        return _suggest_gpus(settings, phase, others)
    nodes = sorted((2**power for power in range(15)), key=lambda n: (abs(log2(n / cluster.nodes)), n))
    for per_node in dict.fromkeys((cluster.devices_per_node, 8)):
        for number in nodes:
            other = cluster.model_copy(update={"nodes": number, "devices_per_node": per_node})
            for changed, level, name in settings:
                chosen, _ = automatic(changed, other, phase, level, others)
                if chosen is not None:
                    setting = f" with {name}" if name else ""
                    return f"the nearest that fits is {number} x {per_node} {cluster.device}{setting}: {describe(chosen.layout)}"
    return "it does not fit any number of such devices"


def _suggest_gpus(settings: Sequence[tuple[Recipe, Zero, str]], phase: Phase, others: Sequence[Phase]) -> str:
    """Common GPUs with which the phases fit, the smallest first: CPUs of which one is too small are rarely joined."""
    for count, name in ((1, "rtx4090"), (1, "h100"), (8, "h100"), (64, "h100"), (512, "h100"), (4096, "h100")):
        cluster = Cluster.of_gpus(count, GPUS[name])
        for changed, level, setting in settings:
            chosen, _ = automatic(changed, cluster, phase, level, others)
            if chosen is not None:
                return f"it fits with --cluster {cluster.name}{f' and {setting}' if setting else ''}: {describe(chosen.layout)}"
    return "it fits neither this machine nor 4,096 H100"
