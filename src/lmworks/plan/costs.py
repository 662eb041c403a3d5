"""The costs of a plan: steps, time, money and disk; and the time of a phase besides its computation.

That time is communication between machines, the pipeline bubble, uneven shares of a batch, reading of tokens, validation and saves.

Between machines, each device has a link of `cluster.network_gbps`. A collective over ranks of several machines sends
(machines - 1) / machines of its bytes through the links of each machine's ranks, which share the work (the bound that ring and tree
algorithms approach). Gradients, weights and pipeline activations move behind computation, so only what takes longer than the computation
counts. Tokens for experts and the keys and values of context parallelism are waited for. Muon's exchange of matrices is small beside the
gradients and is left out. Token files are read ahead, so reading counts only where it takes longer than the computation.

An MFU is usually stated for a whole run and then contains communication and bubble. The MFU that `--calibrate` measures is that of one
process, so they come on top of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil

from lmworks.plan.counts import count_adapters
from lmworks.plan.layout import Placement, Shares, devices
from lmworks.plan.memory import rank_parameters
from lmworks.plan.stages import StagePhase, lora_of
from lmworks.recipe.parameters import parameters
from lmworks.recipe.schema.artifacts import lost_share, save_interval, seconds_between_failures
from lmworks.recipe.schema.layout import Cluster, Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.schema.units import Duration
from lmworks.recipe.timeline import PhaseSteps
from lmworks.shards.indexed import token_dtype


def batch_tokens(data_ranks: int, micro_batch_size: int, sequence_length: int, accumulation: int) -> int:
    """Tokens of one optimizer step."""
    return data_ranks * micro_batch_size * sequence_length * accumulation


def steps(tokens: int, tokens_per_step: int) -> int:
    """Whole optimizer steps of a token budget."""
    return tokens // tokens_per_step


def device_hours(devices: int, seconds: float) -> float:
    """Device-hours of a run of `seconds` on `devices` devices."""
    return devices * seconds / 3600


def phase_steps(phase: Phase) -> tuple[int, int]:
    """Steps and tokens of a phase, exactly as in training: with the batch-size ramp, or as counted in the data of a later stage. The most
    steps where the batch grows with the loss, whose tokens are the same."""
    if isinstance(phase, StagePhase) and phase.known_steps is not None:
        return phase.known_steps, int(phase.tokens)
    found = PhaseSteps.of(phase)
    return found.steps, found.tokens


@dataclass(frozen=True)
class Course:
    """The steps of a phase within its stage, of which it has those from `begin` to `end`. A percentage of a key outside the phases, such as
    `train.validate_every`, is one of the whole stage."""

    begin: int
    end: int
    steps: int
    tokens: int

    def multiples(self, every: Duration) -> int:
        """Steps of the phase that are multiples of this interval."""
        interval = every.interval(self.steps, self.tokens)
        return self.end // interval - self.begin // interval

    def times(self, every: Duration) -> int:
        """How often an event that has this interval happens in the phase, and at the last step of the stage too."""
        return self.multiples(every) + (self.end == self.steps and self.steps % every.interval(self.steps, self.tokens) > 0)


def courses(phases: Sequence[Phase]) -> list[Course]:
    """The course of each phase: those of pretraining follow each other, each of the later stages is its own."""
    sums = [phase_steps(phase) for phase in phases]
    steps, tokens, begin, found = sum(own for own, _ in sums), sum(read for _, read in sums), 0, []
    for phase, (own, read) in zip(phases, sums, strict=True):
        if isinstance(phase, StagePhase):
            found.append(Course(0, own, own, read))
        else:
            found.append(Course(begin, begin + own, steps, tokens))
            begin += own
    return found


@dataclass(frozen=True)
class Disk:
    """Bytes on disk. `data` is an upper bound, because tokens that are repeated over epochs are stored once. `staged` are those of a save
    that are copied to host memory, from where they are written while training goes on; 0 where it waits."""

    checkpoint: float
    checkpoints_kept: int
    data: float
    staged: float


def _saved_parameters(recipe: Recipe) -> tuple[int, int]:
    """Parameters that a checkpoint has, and how many of them Muon may train: all, or adapters where no phase trains more."""
    loras = [lora_of(phase) for phase in recipe.train.phases]
    adapters = [count_adapters(recipe.model, lora) for lora in loras if lora is not None]
    if adapters and len(adapters) == len(loras):
        return max(adapters), 0  # AdamW trains them
    sizes = [(parameter.size, parameter.is_matrix) for parameter in parameters(recipe.model)]
    return sum(size for size, _ in sizes), sum(size for size, matrix in sizes if matrix)


def disk(recipe: Recipe) -> Disk:
    """Bytes of one checkpoint (fp32 weights and optimizer state), the maximum number kept, and bytes of the token files."""
    trained, matrices = _saved_parameters(recipe)
    states = matrices * 4 + (trained - matrices) * 8 if recipe.optimizer.kind == "muon" else trained * 8
    ema = trained * 4 if recipe.optimizer.ema_decay else 0
    kept = recipe.checkpoints.keep_last + recipe.checkpoints.keep_best
    tokens = sum(phase.tokens for phase in recipe.train.phases)
    if recipe.checkpoints.keep_every:
        kept += sum(course.multiples(recipe.checkpoints.keep_every) for course in courses(recipe.train.phases))
    saved = trained * 4 + states + ema
    data = tokens * token_dtype(recipe.model.vocab_size or 0).itemsize
    return Disk(saved, kept, data, saved if recipe.checkpoints.asynchronous else 0.0)


def seconds(flops: float, devices: int, cluster: Cluster, mfu: float) -> float:
    """Seconds for `flops` operations at MFU `mfu`."""
    return flops / (devices * cluster.tflops * 1e12 * mfu)


_BYTES_PER_TOKEN = 4.0  # of validation text; most tokenizers reach 3 to 4.5
_GRADIENT = 4  # bytes of a number: gradients are reduced in fp32
_WEIGHT = 2  # weights and activations travel in bf16


@dataclass(frozen=True)
class Overheads:
    """Seconds of a phase besides computation. `of_layout`: those that the MFU of a whole run contains."""

    communication: float = 0.0
    bubble: float = 0.0
    uneven_shares: float = 0.0
    data: float = 0.0
    validation: float = 0.0
    saves: float = 0.0

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    @property
    def of_layout(self) -> float:
        return self.communication + self.bubble


@dataclass(frozen=True)
class _Group:
    """Ranks of an axis on machines: `stride` ranks lie between neighbors."""

    size: int
    stride: int
    per_machine: int

    @property
    def inside(self) -> int:
        """Ranks of the group on one machine."""
        return max(1, min(self.size, self.per_machine // self.stride))

    @property
    def machines(self) -> int:
        return ceil(self.size / self.inside)

    def collective(self, size: float) -> float:
        """Bytes that each device sends to other machines in a reduce-scatter or all-gather of `size` bytes."""
        return size * (self.machines - 1) / self.machines / self.inside

    def exchange(self, size: float) -> float:
        """Bytes that each device sends to other machines in an all-to-all in which it sends `size` bytes."""
        return size * (1 - self.inside / self.size)


def overheads(
    recipe: Recipe, cluster: Cluster, phase: Phase, placed: Placement, course: Course, compute: float, checkpoint: float
) -> Overheads:  # fmt: skip
    """Overheads of a phase with `compute` seconds of computation in all; a checkpoint has `checkpoint` bytes."""
    steps, idle, uneven = course.end - course.begin, placed.bubble, Shares.of(phase, placed.layout).idle
    return Overheads(
        communication=steps * _exposed(recipe, cluster, phase, placed, compute / max(1, steps)),
        bubble=compute * idle / (1 - idle),
        uneven_shares=compute * uneven / (1 - uneven),
        data=_reading(recipe, cluster, phase, compute),
        validation=_validation(recipe, phase, compute, course),
        saves=_saves(recipe, cluster, phase, compute, course, checkpoint),
    )


def _exposed(recipe: Recipe, cluster: Cluster, phase: Phase, placed: Placement, compute: float) -> float:
    """Seconds of a step, with `compute` seconds of computation, in which devices wait for other machines; 0 if no link is stated."""
    if cluster.nodes == 1 or not cluster.network_gbps:
        return 0.0
    layout, model, each = placed.layout, recipe.model, cluster.devices_per_node
    speed = cluster.network_gbps * 1e9 / 8  # bytes per second of a device's link
    micro = compute / placed.accumulation
    tokens = placed.micro_batch_size * int(phase.sequence_length) / layout.cp
    assert model.hidden_size and model.num_key_value_heads and model.head_dim and model.num_hidden_layers
    inner = layout.tp
    layers = -(-model.num_hidden_layers // layout.pp)
    waited = 0.0
    if layout.cp > 1:  # keys and values forward, and again with their gradients backward
        group = _Group(layout.cp, inner, each)
        waited += 3 * layers * group.collective(layout.cp * tokens * 2 * model.num_key_value_heads * model.head_dim * _WEIGHT / layout.tp)
    if model.moe and layout.ep > 1:  # to the experts and back, forward and backward
        group = _Group(layout.ep, inner, each)
        width = model.moe.moe_latent_size or model.hidden_size
        sparse = sum(model.feed_forward(layer) == "moe" for layer in range(model.num_hidden_layers)) / layout.pp
        waited += 4 * sparse * group.exchange(tokens * model.moe.num_experts_per_tok * width * _WEIGHT / layout.tp)
    step_bytes, micro_bytes = _data_parallel(recipe, layout, each)
    seconds = placed.accumulation * (waited / speed + max(0.0, micro_bytes / speed - micro)) + max(0.0, step_bytes / speed - micro)
    if layout.pp > 1 and _Group(layout.pp, cluster.nodes * each // layout.pp, each).machines > 1:  # behind the other micro-batches
        passed = 2 * tokens * model.hidden_size * _WEIGHT / layout.tp * layout.pipeline_stages_per_rank
        seconds += placed.accumulation * max(0.0, passed / speed - micro)
    return seconds


def _data_parallel(recipe: Recipe, layout: Layout, each: int) -> tuple[float, float]:
    """Bytes of gradients and weights that a device sends to other machines, in a step and in a micro-batch."""
    shared, experts = rank_parameters(recipe.model, layout)
    ranks = layout.dp_shard * layout.cp
    step = micro = 0.0
    for count, size, stride in ((shared, ranks, layout.tp), (experts, ranks // layout.ep, layout.tp * layout.ep)):
        group = _Group(size, stride, each)
        if size > 1 and layout.zero >= 3:
            micro += 2 * group.collective(count * _WEIGHT)
            step += group.collective(count * _GRADIENT)
        elif size > 1:
            step += group.collective(count * (_GRADIENT + _WEIGHT))
        if layout.dp_replicate > 1:
            copies = _Group(layout.dp_replicate, stride * size, each)
            step += 2 * copies.collective(count * _GRADIENT / max(1, size))
    return step, micro


def _reading(recipe: Recipe, cluster: Cluster, phase: Phase, compute: float) -> float:
    """Seconds in which training waits for its tokens. 0 if the cluster states no speed of its disk."""
    if not cluster.disk_gb_per_second:
        return 0.0
    read = int(phase.tokens) * token_dtype(recipe.model.vocab_size or 0).itemsize
    return max(0.0, read / (cluster.disk_gb_per_second * 1e9) - compute)


def _validation(recipe: Recipe, phase: Phase, compute: float, course: Course) -> float:
    """A forward pass, a third of a training step, over the validation text of every domain."""
    domains = len({source.domain for source in recipe.corpus.sources})
    tokens = domains * recipe.train.validation_bytes_per_domain / _BYTES_PER_TOKEN
    return course.times(recipe.train.validate_every) * tokens / max(1, int(phase.tokens)) * compute / 3


def _saves(recipe: Recipe, cluster: Cluster, phase: Phase, compute: float, course: Course, checkpoint: float) -> float:
    """Time for which training waits for checkpoints: in the background, only what takes longer than the interval.

    0 if the cluster states no speed of its disk.
    """
    if not cluster.disk_gb_per_second:
        return 0.0
    one = checkpoint / (cluster.disk_gb_per_second * 1e9)
    number = max(_saves_by_steps(recipe, phase, course), compute / seconds_between_saves(recipe, cluster, checkpoint))
    return number * (max(0.0, one - compute / max(1, number)) if recipe.checkpoints.asynchronous else one)


def _saves_by_steps(recipe: Recipe, phase: Phase, course: Course) -> int:
    own = phase.save_every
    return own.times(course.end - course.begin, int(phase.tokens)) if own else course.times(recipe.train.save_every)


def save_seconds(recipe: Recipe, cluster: Cluster, checkpoint: float) -> tuple[float, float]:
    """How long training stands still for a save, and how long one is written; 0 if the cluster states no speed of its disk."""
    if not cluster.disk_gb_per_second:
        return 0.0, 0.0
    written = checkpoint / (cluster.disk_gb_per_second * 1e9)
    return (0.0 if recipe.checkpoints.asynchronous else written), written


def seconds_between_saves(recipe: Recipe, cluster: Cluster, checkpoint: float) -> float:
    """The time after which a run saves whatever its step (`train.save_every_time`)."""
    if recipe.train.save_every_time is not None:
        return float(recipe.train.save_every_time)
    pause, written = save_seconds(recipe, cluster, checkpoint)
    return save_interval(pause if written else None, devices(cluster), written)


@dataclass(frozen=True)
class Saves:
    """The longest time between two saves of a plan, in seconds; the expected time between failures, which CPUs and GPUs are taken to have
    alike; and the fraction of the time that saves and repeated work are expected to cost."""

    interval: float
    between_failures: float
    lost: float


def saves(recipe: Recipe, cluster: Cluster, phases: Sequence[tuple[Phase, Course, float]], checkpoint: float) -> Saves | None:
    """Saves of phases with their seconds; None without any."""
    by_time = seconds_between_saves(recipe, cluster, checkpoint)
    found = [min(by_time, took / max(1, _saves_by_steps(recipe, phase, course))) for phase, course, took in phases]
    if not found:
        return None
    longest, count = max(found), devices(cluster)
    return Saves(longest, seconds_between_failures(count), lost_share(longest, save_seconds(recipe, cluster, checkpoint)[0], count))
