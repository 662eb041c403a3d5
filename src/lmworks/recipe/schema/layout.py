"""How a run is laid out over devices: the mesh of ranks, what a layer recomputes, DeepSpeed, and the machines of a cluster file.

Activation checkpointing: what a layer keeps for the backward pass, which recomputes the rest (Chen et al. 2016, arXiv:1604.06174).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.errors import UserError
from lmworks.host import devices
from lmworks.recipe.schema.base import RESUME_ONLY, Node
from lmworks.recipe.schema.units import Quantity

_MOST_RANKS = 1 << 20  # of an axis of the mesh


class Layout(Node):
    """The size of each axis of the device mesh. With `layout: auto` the plan chooses them once the number of ranks is known."""

    effect: ClassVar = RESUME_ONLY

    auto: bool = Field(False, description="let the plan choose the axes before the ranks start; the same as layout: auto")
    pp: int = Field(1, gt=0, le=_MOST_RANKS, description="pipeline stages")
    dp_replicate: int = Field(1, gt=0, le=_MOST_RANKS, description="replicas of the sharded model")
    dp_shard: int = Field(1, gt=0, le=_MOST_RANKS, description="ranks that the weights of a replica are sharded over (FSDP)")
    cp: int = Field(1, gt=0, le=_MOST_RANKS, description="ranks that a sequence is split over (context parallelism)")
    tp: int = Field(1, gt=0, le=_MOST_RANKS, description="ranks that a matrix is split over (tensor parallelism)")
    ep: int = Field(
        1, gt=0, le=_MOST_RANKS, description="ranks that the experts are split over (expert parallelism); they lie inside dp_shard x cp"
    )
    zero: Literal[0, 1, 2, 3] = Field(
        1, description="ZeRO stage: 0 replicates everything, 1 shards optimizer state, 2 also gradients, 3 also weights"
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = Field(
        "1f1b", description="pipeline schedule, the order of micro-batches"
    )
    pipeline_stages_per_rank: int = Field(
        1, gt=0, le=_MOST_RANKS, description="pipeline stages on each rank of pp; more than 1 only with interleaved or zero-bubble"
    )
    layers_per_pipeline_stage: tuple[int, ...] | None = Field(
        None, description="layers of each pipeline stage, first to last; balanced by cost when omitted"
    )

    text_form: ClassVar = {"const": "auto"}

    @model_validator(mode="before")
    @classmethod
    def _spelt_out(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value

    @model_validator(mode="after")
    def _auto_or_axes(self) -> Layout:
        given = [name for name, value in self if name not in ("auto", "zero") and value != Layout.model_fields[name].default]
        if self.auto and given:
            raise ValueError(f"layout.auto chooses all axes; leave out {', '.join(given)}, or auto")
        return self

    @property
    def data_ranks(self) -> int:
        """The groups of ranks that share the sequences of a step."""
        return self.dp_replicate * self.dp_shard

    def overrides(self) -> list[str]:
        """The layout as arguments of `--set`."""
        return [f"layout.{axis}={json.dumps(value)}" for axis, value in self if value is not None]


def world_size(layout: Layout) -> int:
    """The number of ranks of a layout; `ep` adds none, since it lies inside dp_shard x cp."""
    return layout.pp * layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp


def ep_problems(layout: Layout) -> Iterator[str]:
    """The reasons why the ranks of `ep` do not lie inside dp_shard x cp; none if they do."""
    ranks = layout.dp_shard * layout.cp
    if ranks % layout.ep:
        yield f"ep {layout.ep} does not divide dp_shard x cp = {ranks}; expert ranks are a subset of the data and context ranks"
    elif layout.cp % layout.ep and layout.ep % layout.cp:
        yield (
            f"ep {layout.ep} does not fit cp {layout.cp} and dp_shard {layout.dp_shard}: it must divide cp, or be a multiple of cp that "
            "divides dp_shard x cp"
        )


def min_world_size(layout: Layout) -> int:
    """The smallest number of ranks of a layout; all other possible numbers are multiples of it."""
    axis = _data_axis(layout)
    per_data_rank = 1 if axis == "dp_replicate" else max(1, layout.ep // layout.cp)  # experts need dp_shard in multiples of this
    return world_size(layout) // int(getattr(layout, axis)) * per_data_rank


def layout_for(layout: Layout, world: int) -> Layout:
    """The layout on `world` ranks: pp, cp, tp and ep are kept, and the data axis takes the remaining ranks.

    The data axis is dp_shard, or dp_replicate if the recipe has replicas, because then dp_shard is what a replica needs to fit.
    Raises `UserError` that names the nearest possible numbers of ranks.
    """
    axis, unit = _data_axis(layout), min_world_size(layout)
    if world % unit:
        legal = sorted({size for size in (world // unit * unit, -(-world // unit) * unit) if size})
        sizes = {name: getattr(layout, name) for name in ("pp", "dp_shard", "cp", "tp", "ep") if name != axis}
        kept = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise UserError(f"{world} ranks are not a multiple of {unit} (layout {kept}); start {' or '.join(map(str, legal))} ranks")
    return layout.model_copy(update={axis: world // (world_size(layout) // int(getattr(layout, axis)))})


def _data_axis(layout: Layout) -> str:
    return "dp_replicate" if layout.dp_replicate > 1 else "dp_shard"


@dataclass(frozen=True)
class CheckpointingPolicy:
    """What a layer `keeps` between its forward and its backward pass, and the pipeline schedules that cannot run it, with the reason.

    `lmworks.plan.memory.layer_activations` estimates the bytes per token.
    """

    name: str
    keeps: Literal["everything", "products", "input"]
    refused_by: tuple[tuple[str, str], ...] = ()


CHECKPOINT_NONE = CheckpointingPolicy("none", "everything")
CHECKPOINT_SELECTIVE = CheckpointingPolicy(
    "selective", "products",
    (("zero-bubble", "schedule zero-bubble runs two backward passes through a layer, and selective checkpointing of torch allows one"),),
)  # fmt: skip
CHECKPOINT_FULL = CheckpointingPolicy("full", "input")
CHECKPOINTING_POLICIES = {policy.name: policy for policy in (CHECKPOINT_NONE, CHECKPOINT_SELECTIVE, CHECKPOINT_FULL)}


@dataclass(frozen=True, repr=False)
class ActivationCheckpointing(Quantity):
    """A policy and the share of layers that follow it, spread evenly: `none`, `selective`, `full`, `50%` (of the layers in full), or
    `selective 50%`."""

    policy: CheckpointingPolicy
    share: Fraction = Fraction(1)
    example = "none, selective, full, '50%' or 'selective 50%'"

    @classmethod
    def forms(cls) -> list[dict[str, Any]]:
        shared = "|".join(name for name in CHECKPOINTING_POLICIES if name != CHECKPOINT_NONE.name)
        percent = r"\d+(\.\d+)?%"
        return [{"enum": list(CHECKPOINTING_POLICIES)}, {"type": "string", "pattern": rf"^\s*(({shared})\s+)?{percent}\s*$"}]

    @classmethod
    def parse(cls, text: str) -> ActivationCheckpointing:
        name, _, percent = text.strip().rpartition(" ") if "%" in text else (text.strip(), "", "")
        policy = CHECKPOINTING_POLICIES.get(name.strip() or ("full" if percent else ""))
        try:
            share = Fraction(percent.removesuffix("%")) / 100 if percent else Fraction(1)
        except (ValueError, ZeroDivisionError):
            policy, share = None, Fraction(1)
        if policy is None or not 0 < share <= 1 or (policy is CHECKPOINT_NONE and percent) or len(text) > 40:
            raise ValueError(f"{text[:40]!r} is no activation checkpointing policy; write for example {cls.example}")
        return cls(policy, share)

    def text(self) -> str:
        if self.share == 1:
            return self.policy.name
        percent = f"{float(100 * self.share):g}%"
        return percent if self.policy is CHECKPOINT_FULL else f"{self.policy.name} {percent}"

    def of(self, layer: int) -> CheckpointingPolicy:
        """The policy of a layer (counted from 0; layers of multi-token prediction follow the others)."""
        if self.share == 1:  # a plan asks a hundred thousand times, and products of fractions are slow
            return self.policy
        return self.policy if int((layer + 1) * self.share) > int(layer * self.share) else CHECKPOINT_NONE

    def problems(self, schedule: str) -> Iterator[str]:
        """The reasons why a pipeline schedule cannot run it; none if it can."""
        for name, why in self.policy.refused_by:
            if name == schedule:
                yield f"{why}; set train.activation_checkpointing to full or none, or schedule=1f1b"

    def __repr__(self) -> str:
        return f"ActivationCheckpointing({self.text()!r})"


OffloadTarget = Literal["none", "cpu", "nvme"]
ZERO_BUCKET = 1 << 26  # numbers that are reduced or gathered at a time: enough for the full bandwidth, and 256 MB
ZERO_LIVE = 1 << 28  # numbers of weights that may be whole at a time under ZeRO-3


class DeepSpeed(Node):
    """DeepSpeed ZeRO at stage `layout.zero` over the ranks of `layout.dp_shard`, with offloading of the training state."""

    offload: OffloadTarget = Field("none", description="where optimizer state is kept and updated: on the GPU, in CPU memory, or on a disk")
    offload_weights: OffloadTarget = Field("none", description="where weights are kept until a layer needs them; with layout.zero 3")
    path: str | None = Field(None, description="nvme: directory on a fast disk of each machine; not needed after the run")

    @model_validator(mode="after")
    def _consistent(self) -> DeepSpeed:
        if "nvme" in (self.offload, self.offload_weights) and self.path is None:
            raise ValueError("nvme needs path: a directory on the disk to use")
        return self


class DeviceCost(Node):
    """What a device (a GPU, or the cores of one rank) costs and draws; 0 where it is not known."""

    dollars_per_device_hour: float = Field(0.0, ge=0, le=1e6, description="price of a device")
    watts_per_device: float = Field(0.0, ge=0, le=1e6, description="power of a device, with its share of the machine and the cooling")


class Cluster(DeviceCost):
    """The machines, for planning."""

    name: str = Field("custom", description="derived from the file's name")
    nodes: int = Field(1, gt=0, le=1_000_000, description="machines")
    devices_per_node: int = Field(1, gt=0, le=1024, description="accelerators (or the CPU) in one machine")
    device: str = Field("CPU", description="name of one device")
    tflops: float = Field(ge=1e-6, le=1e6, description="dense peak TFLOPS per device in its fastest type, bf16 or fp32, without sparsity")
    bf16: bool = Field(True, description="whether the device multiplies bf16 in hardware; otherwise `train.precision: auto` is fp32")
    memory_gib: float = Field(gt=0, le=1e6, description="per device")
    network_gbps: float = Field(0.0, ge=0, le=1e6, description="per device, between nodes; 0: not known")
    disk_gb_per_second: float = Field(0.0, ge=0, le=1e6, description="speed of the run directory's file system, for all machines")
    mfu: float = Field(0.4, ge=1e-6, le=1, description="expected model FLOPs utilization (MFU); `lmworks plan --calibrate` measures it")
    mfu_source: str = Field("assumed", description="where that MFU comes from")
    mfu_of_experts: float | None = Field(
        None, ge=1e-6, le=1, description="expected MFU of models with experts; when omitted, `mfu` on CPUs, and on GPUs at most 0.35"
    )
    layout: Layout | None = None

    @classmethod
    def of_gpus(cls, count: int, gpu: devices.Gpu) -> Cluster:
        """GPUs by the data sheet, in machines of at most 8; `count` above 8 must be a multiple of it."""
        per_node = min(count, devices.LARGEST_NODE)
        return cls(
            name=f"{count}x{gpu.name}", nodes=count // per_node, devices_per_node=per_node, device=gpu.name.upper(), tflops=gpu.tflops,
            memory_gib=round(gpu.memory * devices.GB / 2**30, 1), mfu_source="assumed share of the data sheet's dense bf16 peak",
            dollars_per_device_hour=gpu.price, watts_per_device=gpu.watts,
        )  # fmt: skip

    @property
    def on_cpu(self) -> bool:
        """Whether its devices are CPUs."""
        return "CPU" in self.device
