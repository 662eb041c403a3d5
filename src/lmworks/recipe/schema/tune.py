"""Supervised fine-tuning and its conversations.

`TuningSet` is what sets of conversations, of preference pairs and of rewarded prompts have in common.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import NO_EFFECT, Node, read_by
from lmworks.recipe.schema.evaluate import Generator
from lmworks.recipe.schema.model import Lora
from lmworks.recipe.schema.train import MOST_RATE, EarlyStopping, Ewc, Forgetting, LrSchedule, check_weights
from lmworks.recipe.schema.units import Duration, Tokens

Column = Literal[
    "messages", "system", "tools", "prompt", "instruction", "input", "history", "response", "text", "segments", "chosen", "rejected",
    "label", "answer", "tests", "role", "content", "train",
]  # fmt: skip
GENERATED = 2000  # rows of a set that is not the user's own


LEARNING_RATE = (
    "peak learning rate of this stage; derived from that of pretraining when omitted. Under muon it is that of the matrices, and what "
    "AdamW trains keeps its proportion to it; adapters, which AdamW trains, have it as it is"
)


class TuningSet(Node):
    """A set of files or of generated questions."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of this set, also in the names of files")
    path: str | None = Field(
        None,
        description="kind files: a file (.jsonl, .json or .parquet, also compressed), a folder or a pattern, relative to the working "
        "directory",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="our name of a column: its name in the files, as {prompt: question_text, response: reply}; role, content and train are "
        f"those of each message. Ours are {', '.join(get_args(Column))}",
    )
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field(
        default_factory=dict, description="name of a speaker in the files: its role, as {customer: user, agent: assistant}"
    )
    tasks: list[Generator] = Field(
        default_factory=list, description="kind tasks: generators of the questions; those of evaluate.tasks when omitted"
    )

    @model_validator(mode="after")
    def _known_columns(self) -> TuningSet:
        for name in self.columns:
            if name not in get_args(Column):
                raise ValueError(f"{self.name}: columns has {name!r}, which is none of our names: {', '.join(get_args(Column))}")
        return self


StoryForm = Literal["whole", "spoken", "exchanges"]
ConversationFormat = Literal["auto", "messages", "sharegpt", "alpaca", "completion", "segments", "text"]
_DEFAULT_TOKENS = Tokens.parse("500k tokens")


class Thoughts(Node):
    """What happens to the thoughts of answers."""

    train: bool = Field(True, description="whether the text of thoughts is trained; the marks around it always are")
    history: Literal["template", "keep", "drop"] = Field(
        "template",
        description="thoughts of answers before the last question: as the chat template has them, kept (in the text of the answer, where "
        "the template has no place for them), or dropped",
    )
    empty: Literal["train", "prompt"] = Field(
        "train",
        description="an empty block of thoughts that the template puts before an answer without any: trained, for a model that decides "
        "itself, or part of the prompt, as where a model is asked not to think",
    )


class ChatData(TuningSet):
    """One set of conversations for fine-tuning."""

    kind: Literal["files", "huggingface", "chitchat", "virtual-stories", "tasks"] = Field(
        description="files: .jsonl, .json and .parquet, also compressed; huggingface: a dataset; chitchat and "
        "virtual-stories come from the corpus wheels; tasks: reasoning-gym"
    )
    path: str | None = Field(
        None,
        description="kind files: a file, a folder or a pattern, relative to the working directory; kind huggingface: NAME[:CONFIG] on the "
        "hub, or a directory",
    )
    format: ConversationFormat = Field(
        "auto",
        description="kinds files and huggingface: messages (OpenAI), sharegpt, alpaca, completion (a question and an answer), segments or "
        "text (without a template); auto finds it by the columns of a row",
    )
    answers: Literal["all", "last", "each"] = Field(
        "all",
        description="which answers of a conversation are trained: all in one sequence; the last one only; or each with what comes before "
        "it as a sequence of its own, for templates that show an answer otherwise once the user has spoken again",
    )
    empty_answers: Literal["omit", "train"] = Field("omit", description="answers without text, thoughts or a call: not trained, or trained")
    thoughts: Thoughts = Thoughts()
    split: str = Field("train", description="kind huggingface: name of the split")
    languages: tuple[str, ...] = Field((), description="kind virtual-stories: ISO 639-1 codes (en, ja, zh); all when empty")
    story_form: StoryForm = Field(
        "whole",
        description="kind virtual-stories: whole, with system prompt, thoughts and tool calls; spoken, what the two say to each other; "
        "exchanges, each question alone with its reply, where that is short and has no digits",
    )
    max_rows: int | None = Field(
        None, gt=0, description=f"maximum number of conversations, drawn evenly; all of files and datasets, {GENERATED} of other kinds"
    )
    weight: float = Field(1.0, gt=0, description="weight in the mixture, relative to the other sets; cannot be used with tune.epochs")

    @property
    def limit(self) -> int | None:
        """The maximum number of conversations; None for all."""
        return self.max_rows if self.max_rows is not None or self.kind in ("files", "huggingface") else GENERATED


class Replay(Node):
    """General text among the conversations, so that the model forgets less of it."""

    fraction: float = Field(gt=0, lt=1, description="fraction of the sequences of a step, and so of the tokens that are read")
    mixture: dict[str, float] = Field(
        default_factory=dict,
        description="weight of each source; weights sum to one. When empty, those of the last phase of pretraining, or equal weights",
    )

    @model_validator(mode="after")
    def _sums_to_one(self) -> Replay:
        if self.mixture:
            check_weights("tune.replay", self.mixture)
        return self


class Tune(Node):
    """Supervised fine-tuning, with loss on the assistant's tokens only."""

    effect: ClassVar = read_by("tune")

    data: list[ChatData] = Field(default_factory=list)
    tokens: Annotated[Tokens | None, read_by("tune", "export")] = Field(
        None, description="token budget; where neither this nor epochs is given, 2 epochs of files and datasets, else 500k tokens"
    )
    epochs: Annotated[int | None, read_by("tune", "export")] = Field(
        None, gt=0, description="passes over the conversations of all sets, instead of a token budget: each conversation once per pass"
    )
    sequence_length: Tokens = Field(Tokens.parse("512 tokens"), description="tokens per sequence")
    global_batch_tokens: Tokens = Field(Tokens.parse("8Ki tokens"), description="tokens per optimizer step")
    learning_rate: float | None = Field(None, gt=0, le=MOST_RATE, description=LEARNING_RATE)
    lr_schedule: LrSchedule = LrSchedule(kind="linear", warmup=Duration.parse("5%"), min_lr_ratio=0.0)
    validation_fraction: float = Field(
        0.02, ge=0, lt=1, description="fraction of each set of conversations that is held out for validation; at least one, at most 500"
    )
    final_weights: Annotated[Literal["last", "best"], read_by("tune", "export")] = Field(
        "last", description="weights that the stage ends with: the last ones, or those with the lowest loss on the held-out conversations"
    )
    early_stopping: EarlyStopping | None = Field(None, description="end tuning early; requires held-out conversations")
    forgetting: Annotated[Forgetting, NO_EFFECT] = Forgetting()
    lora: Lora | None = Field(None, description="train low-rank adapters instead of the weights")
    replay: Replay | None = Field(None, description="sequences of the recipe's own corpus or token files in every step")
    ewc: Ewc | None = Field(None, description="elastic weight consolidation towards the weights that tuning starts from")

    @property
    def planned_tokens(self) -> Tokens:
        """The token budget. With `epochs` it is known only when the conversations have been read, and plans assume the default."""
        return self.tokens if self.tokens is not None else _DEFAULT_TOKENS
