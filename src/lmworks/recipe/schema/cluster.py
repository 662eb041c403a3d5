"""The machines of a cluster file, for planning."""

from __future__ import annotations

from pydantic import Field

from lmworks import gpus
from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.layout import Layout


class Cluster(Node):
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
    dollars_per_hour: float = Field(0.0, ge=0, le=1e6, description="per device")
    watts: float = Field(0.0, ge=0, le=1e6, description="power per device, including its share of the machine and the cooling")
    mfu: float = Field(0.4, ge=1e-6, le=1, description="expected model FLOPs utilization (MFU); `lmworks plan --calibrate` measures it")
    mfu_source: str = Field("assumed", description="where that MFU comes from")
    mfu_of_experts: float | None = Field(
        None, ge=1e-6, le=1, description="expected MFU of models with experts; when omitted, `mfu` on CPUs, and on GPUs at most 0.35"
    )
    layout: Layout | None = None

    @classmethod
    def of_gpus(cls, count: int, gpu: gpus.Gpu) -> Cluster:
        """GPUs by the data sheet, in machines of at most 8; `count` above 8 must be a multiple of it."""
        per_node = min(count, gpus.LARGEST_NODE)
        return cls(
            name=f"{count}x{gpu.name}", nodes=count // per_node, devices_per_node=per_node, device=gpu.name.upper(), tflops=gpu.tflops,
            memory_gib=round(gpu.memory * gpus.GB / 2**30, 1), mfu_source="assumed share of the data sheet's dense bf16 peak",
        )  # fmt: skip

    @property
    def on_cpu(self) -> bool:
        """Whether its devices are CPUs."""
        return "CPU" in self.device
