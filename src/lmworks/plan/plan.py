"""The plan of a run: parameters, FLOPs, memory, time, money and disk, from a recipe and a cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lmworks.parallel.pipeline_stages import micro_batches_for
from lmworks.plan import stages as stage_data
from lmworks.plan.automatic import choose_layout
from lmworks.plan.costs import Disk, Overheads, Saves, courses, device_hours, disk, overheads, phase_steps, saves, seconds
from lmworks.plan.counts import Counts, count_by_component, flops_per_token
from lmworks.plan.layout import MARGIN, DoesNotFit, Placement, Shares, choose, describe, devices
from lmworks.plan.memory import GIB, kv_cache_bytes, kv_cache_shrink
from lmworks.plan.stages import StageData, assumptions, lora_of, recipe_until, stages_as_phases
from lmworks.recipe import scaling_laws
from lmworks.recipe.phases import in_force, positions, warnings
from lmworks.recipe.schema.layout import Cluster, Layout, world_size
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.timeline import fewest_steps
from lmworks.recipe.weights import start_context
from lmworks.ui.amounts import DAY, compact, days

_LONG = 365 * DAY
# 6 N D of 37B active parameters and 14.8T tokens in 2.664M hours of H800 with 989 TFLOPS (DeepSeek-V3, arXiv:2412.19437, table 1): 34.6%,
# and 37% with attention. Its matrices are multiplied in fp8, so bf16 reaches no more unless communication is hidden better.
EXPERTS_MFU = 0.35
_BEST_MFU = 0.6  # of computation alone; published kernels of whole training steps reach 0.5 to 0.6


@dataclass(frozen=True)
class PhasePlan:
    """One phase on the cluster. Operations are forward and backward; `compute_seconds` is at the plan's MFU, attention counted."""

    name: str
    tokens: int
    steps: int
    sequence_length: int
    positions: str
    batch_tokens: int
    flops_parameters: float
    flops_attention: float
    flops_mtp: float
    placed: Placement
    bubble: float
    compute_seconds: float
    overheads: Overheads
    layout_in_mfu: bool
    measured_seconds: float | None = None  # in a rehearsal: all that the stage does
    fewest_steps: int | None = None  # where the batch grows with the loss: as early as it can, while `steps` has it never grow

    @property
    def seconds(self) -> float:
        if self.measured_seconds is not None:
            return self.measured_seconds
        included = self.overheads.of_layout if self.layout_in_mfu else 0.0
        return self.compute_seconds + self.overheads.total - included


@dataclass(frozen=True)
class Plan:
    """The estimates of a run before it starts."""

    recipe: str
    fingerprint: str
    cluster: Cluster
    devices: int
    counts: Counts
    phases: tuple[PhasePlan, ...]
    mfu: float
    mfu_source: str
    disk: Disk
    max_length: int
    kv_cache: float
    kv_cache_shrink: float
    kv_cache_by: str
    later_stages: tuple[str, ...]  # those that are in no phase of the plan
    unwise: tuple[str, ...]
    shortages: tuple[str, ...]  # phases that do not fit, with the remedy; that which needs most is the first
    data: Mapping[str, StageData]
    activation_checkpointing: str
    trains_base: bool
    stages: Mapping[str, Mapping[str, float]]  # seconds of every stage of the run by what they go to, where a rehearsal measured them
    saves: Saves | None = None  # how often it saves, and what failures are expected to cost

    @property
    def tokens(self) -> int:
        return sum(phase.tokens for phase in self.phases)

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def flops_parameters(self) -> float:
        return sum(phase.flops_parameters for phase in self.phases)

    @property
    def flops(self) -> float:
        return sum(phase.flops_parameters + phase.flops_attention + phase.flops_mtp for phase in self.phases)

    @property
    def flops_mtp(self) -> float:
        return sum(phase.flops_mtp for phase in self.phases)

    @property
    def seconds(self) -> float:
        """Of the phases; of the whole run where all its stages were rehearsed."""
        if self.stages:
            return sum(sum(parts.values()) for parts in self.stages.values())
        return sum(phase.seconds for phase in self.phases)

    @property
    def compute_seconds(self) -> float:
        return sum(phase.compute_seconds for phase in self.phases)

    @property
    def overheads(self) -> Overheads:
        """Seconds of all phases besides computation."""
        parts = [phase.overheads for phase in self.phases]
        return Overheads(*(sum(values) for values in zip(*(vars(part).values() for part in parts), strict=True))) if parts else Overheads()

    @property
    def layout_in_mfu(self) -> bool:
        """Whether the MFU contains communication between machines and pipeline bubble."""
        return all(phase.layout_in_mfu for phase in self.phases)

    @property
    def seconds_parameters(self) -> float:
        """Time for 6N alone, the figure that rules of thumb give."""
        return seconds(self.flops_parameters, self.devices, self.cluster, self.mfu)

    @property
    def device_hours(self) -> float:
        return device_hours(self.devices, self.seconds)

    @property
    def dollars(self) -> float:
        return self.device_hours * self.cluster.dollars_per_device_hour

    @property
    def tokens_per_second(self) -> float:
        training = sum(parts.get("steps", 0.0) for parts in self.stages.values()) or self.seconds
        return self.tokens / training if training else 0.0

    @property
    def tokens_per_parameter(self) -> float:
        """Tokens per active parameter; 20 is compute-optimal (arXiv:2203.15556), more buys a smaller model to serve."""
        return self.tokens / self.counts.active

    @property
    def not_counted(self) -> str:
        """What the time does not contain, and how to state what the cluster does not; empty if it contains everything."""
        found = []
        if self.later_stages:
            found.append(f"stages after pretraining ({', '.join(self.later_stages)})")
        if not self.phases and not self.stages:
            found.append("what the stages before training do; nothing is trained")
        if self.phases and not self.trains_base and not self.stages:
            found.append(
                "what the stages do besides training steps: reading data, loading weights, reference scores, writing answers, validation, "
                "evaluation before and after, export (--calibrate measures all of it)"
            )
        if self.phases and not self.stages and not self.cluster.disk_gb_per_second:
            found.append(
                f"saves and reading of tokens: {self.cluster.name} states no disk_gb_per_second; measure the speed at which a file of a "
                "checkpoint's size is written to the run directory, and set it in a cluster file (--cluster FILE)"
            )
        return "; ".join(found)

    def _mfu_limit(self, phase: PhasePlan) -> float:
        """The MFU of a phase whose computation is as fast as published ones, and whose communication does not overlap with it."""
        shortest = phase.compute_seconds * self.mfu / _BEST_MFU + phase.overheads.communication
        return self.mfu * phase.compute_seconds / shortest if phase.overheads.communication else 1.0

    def warnings(self) -> Iterator[str]:
        """Warnings about choices that are legal and fit, but are not advisable."""
        yield from self.unwise
        if self.seconds > _LONG:
            yield (
                f"it would take {days(self.seconds)}; use more devices (--cluster), a smaller model (--size), or fewer tokens"
            )
        slow = {phase.name: limit for phase in self.phases if (limit := self._mfu_limit(phase)) < self.mfu}
        if slow:
            yield (
                f"{', '.join(slow)}: the MFU is at most {min(slow.values()):.0%} to {max(slow.values()):.0%} unless communication between "
                f"machines ({self.cluster.network_gbps:g} Gbit/s per device) overlaps with computation; take experts within a machine "
                "(layout.ep), a larger batch, or fewer machines"
            )
        if self.cluster.nodes > 1 and not self.cluster.network_gbps:
            yield f"cluster {self.cluster.name} states no network_gbps, so the time contains no communication between machines"
        for phase in self.phases:
            held = phase.placed.memory.total / (self.cluster.memory_gib * GIB)
            if 1 - MARGIN < held <= 1:
                yield (
                    f"{phase.name}: the estimate is {held:.0%} of the memory, which leaves less than {MARGIN:.0%} for fragmentation and "
                    "libraries; set a smaller train.micro_batch_sequences, or more "
                    "activation checkpointing (train.activation_checkpointing)"
                )
        for phase in self.phases:
            shares = Shares(phase.batch_tokens // phase.sequence_length, phase.placed.layout.data_ranks)
            if shares.idle and phase.measured_seconds is None:
                yield (
                    f"{phase.name}: {shares.ranks:,} data ranks share the {shares.sequences:,} sequences of a step unevenly, and wait for "
                    f"each other in {shares.idle:.2g} of it; set "
                    f"global_batch_tokens={shares.ranks * shares.largest * phase.sequence_length}, which is a multiple"
                )
        idle: dict[tuple[float, int, int], tuple[list[str], Layout]] = {}
        for phase in self.phases:
            if self.mfu > 1 - phase.bubble:
                layout = phase.placed.layout
                idle.setdefault((phase.bubble, layout.pp, phase.placed.accumulation), ([], layout))[0].append(phase.name)
        for (share, stages, accumulation), (names, layout) in idle.items():
            enough = micro_batches_for(stages, 1 - self.mfu, layout.pipeline_schedule, layout.pipeline_stages_per_rank)
            yield (
                f"{', '.join(names)}: the pipeline is idle for {share:.0%} of each step, so {self.mfu:.0%} MFU cannot be reached; "
                f"use fewer devices, a batch of at least {enough} micro-batches per rank (now {accumulation}), or an interleaved schedule"
            )


def expected_mfu(cluster: Cluster, model: Model) -> tuple[float, str]:
    """The MFU that a cluster is expected to reach with a model, and where that figure comes from. A model with experts multiplies small
    matrices and sends tokens between devices, so that the MFU of dense models is not its own."""
    if model.moe is None or (cluster.mfu_of_experts is None and (cluster.on_cpu or cluster.mfu <= EXPERTS_MFU)):
        return cluster.mfu, cluster.mfu_source
    if cluster.mfu_of_experts is not None:
        return cluster.mfu_of_experts, "mfu_of_experts of the cluster"
    return EXPERTS_MFU, (
        f"of models with experts, below the {cluster.mfu:.0%} of dense ones: DeepSeek-V3's 2.664M H800-hours for 14.8T tokens of 37B "
        "active parameters (arXiv:2412.19437); mfu_of_experts of a cluster file replaces it"
    )


def _other_engines(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    if model.mla and model.rms_norm_eps != model.mla.rms_norm_eps:
        yield (
            f"model.rms_norm_eps is {model.rms_norm_eps:g} and model.mla.rms_norm_eps {model.mla.rms_norm_eps:g}: vLLM and llama.cpp take "
            "the first for latents too, so an export would have other logits there; set both to 1e-6 before you train"
        )


def _outside_laws(recipe: Recipe) -> Iterator[str]:
    """A rate that the Step Law gives for a run unlike those that it was fitted to, and a weight decay that forgets too soon."""
    phases, options = recipe.train.phases, recipe.optimizer
    if recipe.start_from is not None or not phases or not recipe.trains_base or not options.learning_rate:
        return
    hidden, tokens = max(1, scaling_laws.outside_embeddings(recipe.model)), sum(int(phase.tokens) for phase in phases)
    rate, decay, steps = options.learning_rate, options.weight_decay, sum(phase_steps(phase)[0] for phase in phases)
    law = scaling_laws.peak_learning_rate(hidden, tokens)
    if rate == law and law not in scaling_laws.RATE_BOUNDS and not scaling_laws.is_fitted(hidden, tokens):
        sizes, budgets = (" to ".join(map(compact, of)) for of in (scaling_laws.FITTED_PARAMETERS, scaling_laws.FITTED_TOKENS))
        yield (
            f"optimizer.learning_rate {rate:g} is that of the Step Law (arXiv:2503.04715), whose runs had {sizes} parameters outside the "
            f"embeddings and {budgets} tokens, and this one has {compact(hidden)} and {compact(tokens)}; compare rates in short runs first "
            "(lmworks ablate, kind: learning-rate)"
        )
    best = scaling_laws.optimal_timescale(tokens / hidden) * steps
    if rate * decay * best > scaling_laws.STRONG_DECAY:
        yield (
            f"optimizer.weight_decay {decay:g} at a learning rate of {rate:g} forgets what was learned after 1 / (rate x decay) = "
            f"{1 / (rate * decay):,.0f} of {steps:,} steps, and {best:,.0f} are best at {compact(tokens / hidden)} tokens per parameter "
            f"(arXiv:2505.13738); set it to {1 / (rate * best):.1g}"
        )


def _trained(recipe: Recipe, data: Mapping[str, StageData], stages: Collection[str] | None) -> tuple[Recipe, Disk]:
    """The recipe with what is trained as its phases, and what it writes: no phases and no checkpoints if it ends before its training."""
    found = stages_as_phases(recipe, data)
    held = disk(found)
    if stages is not None and "pretrain" not in stages:
        found = found.model_copy(update={"train": found.train.model_copy(update={"phases": []})})
        held = replace(held, data=held.data if "shards" in stages else 0.0)
    return found, held if found.train.phases else Disk(0.0, 0, held.data, 0.0)


def make_plan(
    recipe: Recipe,
    fingerprint: str,
    cluster: Cluster,
    layout: Layout | None = None,
    measured_mfu: float | None = None,
    measured_source: str = "measured here",
    layout_in_mfu: bool = True,
    unfit: bool = False,
    data: Mapping[str, StageData] | None = None,
    measured: Mapping[str, Mapping[str, float]] | None = None,
    stages: Collection[str] | None = None,
) -> Plan:
    """Plan a resolved recipe on a cluster, up to the last of `stages` (by default all that it has).

    `layout` (by default that of the cluster, or that of the recipe if it is for more than one device) is used for all phases. Without one
    each phase gets the smallest that fits, because a longer context may need another (checkpoints can be resharded); with `layout: auto`
    all phases get the one that the run would use.
    `measured` has the seconds of every stage by what they go to, from a rehearsal of the run; they replace what follows from the MFU.
    `measured_mfu` replaces that of the cluster. Without `layout_in_mfu` it contains neither communication between machines nor pipeline
    bubble, so they are added to the time. `data` is what was read of the data of the stages after pretraining. Raises `UserError` for a
    layout that is not legal, or does not fit unless `unfit` is set: then `Plan.shortages` says so.
    """
    whole = recipe_until(recipe, stages)
    data = {name: found for name, found in (data or {}).items() if name in whole.later_stages}
    later = tuple(whole.later_stages) if whole.trains_base else ()
    recipe, held = _trained(whole, data, stages)
    named = cluster.layout if cluster.layout and not cluster.layout.auto else None
    given = layout or named or (recipe.layout if world_size(recipe.layout) > 1 else None)
    if given is None and recipe.layout.auto and recipe.train.phases:
        given = choose_layout(recipe, cluster).layout
    total = devices(cluster)
    model = recipe.model
    mfu, mfu_source = (measured_mfu, measured_source) if measured_mfu is not None else expected_mfu(cluster, model)
    counts = count_by_component(model)
    phases, shortages, ran = [], list[DoesNotFit](), courses(recipe.train.phases)
    for phase, trained, here, course in zip(recipe.train.phases, in_force(recipe), positions(recipe), ran, strict=True):
        try:
            placed = choose(recipe, cluster, phase, given)
        except DoesNotFit as shortage:
            if not unfit:
                raise
            placed = shortage.placed
            shortages.append(shortage)
        steps, tokens = phase_steps(phase)
        cost = flops_per_token(trained, phase.sequence_length, lora_of(phase) is not None, placed.accumulation)
        compute = seconds(cost.total * tokens, total, cluster, mfu)
        phases.append(
            PhasePlan(
                name=phase.name,
                tokens=tokens,
                steps=steps,
                sequence_length=phase.sequence_length,
                positions=here.text,
                batch_tokens=phase.global_batch_tokens,
                flops_parameters=cost.parameters * tokens,
                flops_attention=cost.attention * tokens,
                flops_mtp=cost.mtp * tokens,
                placed=placed,
                bubble=placed.bubble,
                compute_seconds=compute,
                overheads=overheads(recipe, cluster, phase, placed, course, compute, held.checkpoint),
                layout_in_mfu=layout_in_mfu,
                measured_seconds=sum(measured[phase.name].values()) if measured and phase.name in measured else None,
                fewest_steps=None if phase.loss_ramp is None else fewest_steps(phase),
            )
        )
    assert model.max_position_embeddings and model.num_attention_heads and model.num_key_value_heads
    return Plan(
        recipe=recipe.name,
        fingerprint=fingerprint,
        cluster=cluster,
        devices=total,
        counts=counts,
        phases=tuple(phases),
        mfu=mfu,
        mfu_source=mfu_source,
        disk=held,
        max_length=model.max_position_embeddings,
        kv_cache=kv_cache_bytes(model, model.max_position_embeddings),
        kv_cache_shrink=kv_cache_shrink(model),
        kv_cache_by="latent attention" if model.mla else "GQA",
        later_stages=later,
        shortages=tuple(str(one) for one in sorted(shortages, key=lambda one: -one.placed.memory.total)),
        unwise=(
            *warnings(whole, start_context(whole)),
            *_other_engines(recipe),
            *_outside_laws(whole),
            *assumptions(recipe, data, measured is not None),
            *stage_data.data_warnings(whole, data),
        ),
        data=data,
        activation_checkpointing=recipe.train.activation_checkpointing.text(),
        trains_base=whole.trains_base,
        stages=measured or {},
        saves=saves(
            recipe,
            cluster,
            [(phase, course, one.seconds) for phase, course, one in zip(recipe.train.phases, ran, phases, strict=True)],
            held.checkpoint,
        ),
    )


def plain(plan: Plan) -> dict[str, Any]:
    """The plan with its totals as JSON values, in bytes, seconds and operations."""
    value = asdict(plan)
    value["data"] = stage_data.plain_data(plan.data)
    value["cluster"] = plan.cluster.model_dump(mode="json")
    for phase, source in zip(value["phases"], plan.phases, strict=True):
        placed = source.placed
        phase["seconds"] = source.seconds
        phase["placed"] = {
            "layout": placed.layout.model_dump(),
            "text": describe(placed.layout),
            "micro_batch_size": placed.micro_batch_size,
            "accumulation": placed.accumulation,
            "memory": placed.memory.components,
            "memory_total": placed.memory.total,
            "memory_elsewhere": placed.memory.elsewhere,
            "memory_available": plan.cluster.memory_gib * GIB,
        }
    sums = (
        "tokens", "steps", "flops_parameters", "flops_mtp", "flops", "seconds", "compute_seconds", "seconds_parameters", "device_hours",
        "dollars", "tokens_per_second", "tokens_per_parameter",
    )  # fmt: skip
    value["overheads"] = asdict(plan.overheads)
    return {**value, **{name: getattr(plan, name) for name in sums}, "not_counted": plan.not_counted, "warnings": list(plan.warnings())}
