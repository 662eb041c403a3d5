"""What a run writes: tokenizer, token files, checkpoints, metrics and exported models.

How often to save follows from the pause of a save (`save_interval`): so that failures cost least, and never more than half an hour of work.
Failures come at a rate per device: Llama 3 (arXiv:2407.21783, section 3.3.4) had 419 unexpected interruptions in 54 days on 16,384 GPUs. A
save that holds training up for C seconds every T seconds costs C / T of the time, and a failure on average T / 2 of work. With M seconds
between failures, T = sqrt(2 C M) costs least (Young 1974; Daly 2006 has the next order, which matters where C is near M).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from lmworks.errors import UserError
from lmworks.recipe.schema.base import NO_EFFECT, Node, read_by
from lmworks.recipe.schema.layout import DeviceCost
from lmworks.recipe.schema.units import Bytes, Duration, Seconds, Tokens

TEMPLATES = ("brief", "glm-4.6")
"""Chat templates of ours."""
_JINJA = ".jinja"


class Tokenizer(Node):
    """The tokenizer: byte-pair encoding over bytes or characters, special tokens, and a chat template."""

    effect: ClassVar = read_by("tokenizer", frozen=True)

    path: str | None = Field(
        None, description="an existing tokenizer.json (or its directory) to use instead of training one; relative to the working directory"
    )
    as_is: bool = Field(
        False,
        description="take the tokenizer at `path` as it is: its ids, special tokens and chat template. Otherwise it gets the special "
        "tokens of GLM-4 that it lacks, and the template of chat_template. With start_from it is, unless chat_template is brief or glm-4.6",
    )
    add_tokens: list[str] = Field(
        default_factory=list,
        description="texts that become tokens of a tokenizer that is taken as it is, such as words of a field. Rows are added to the "
        "weights of start_from where none are free; the rows of new tokens begin as the mean of the others (Hewitt 2021)",
    )
    vocab_size: int = Field(4096, ge=320, description="number of entries, including special tokens")
    kind: Literal["bytes", "sentencepiece"] = Field(
        "bytes",
        description="bytes: byte-level BPE as in GLM-4.x. sentencepiece: characters with byte fallback and single digits; slower to encode",
    )
    num_special_tokens: int = Field(
        64, ge=36, description="number of special tokens: GLM-4.x's 36, then 28 for roles, tools and code, then reserved ones"
    )
    sample_bytes: Bytes = Field(
        Bytes.parse("16MB"), description="amount of text that the tokenizer is trained on, sampled by mixture weight"
    )
    language_balance: float = Field(
        0.7,
        ge=0,
        le=1,
        description="exponent on the share of each language: 1 keeps the mixture, 0 weights all languages equally; code keeps its share",
    )
    max_words: int = Field(
        2_000_000, ge=10_000, description="distinct words counted in training; the rarest are dropped first; about 0.5 kB of memory each"
    )
    chat_template: Annotated[str, read_by("tokenizer")] = Field(
        "brief",
        description="glm-4.6: as published, each answer starts with its reasoning. brief: the same without empty reasoning. Or the path of "
        "a .jinja file, relative to the working directory: the template of a tokenizer that is taken as it is, instead of its own, as for "
        "a base model that has none",
    )

    @property
    def template_file(self) -> Path | None:
        """The chat template that replaces that of a tokenizer which is taken as it is."""
        return Path(self.chat_template).expanduser() if self.chat_template.endswith(_JINJA) else None

    @field_validator("chat_template")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in TEMPLATES and not name.endswith(_JINJA):
            raise ValueError(f"{name!r} is neither {' nor '.join(TEMPLATES)} nor the path of a {_JINJA} file")
        return name

    @field_validator("add_tokens")
    @classmethod
    def _distinct(cls, texts: list[str]) -> list[str]:
        for number, text in enumerate(texts):
            if not text or text in texts[:number]:
                raise ValueError(f"{text!r} {'is there twice' if text else 'is empty'}; remove it")
        return texts


class Cache(Node):
    """A cache of token blocks on a fast local disk, for shards on slow or remote storage; the processes of a machine share it."""

    dir: str = Field(description="a folder on the local disk")
    max_bytes: Bytes = Field(description="maximum size of the cached token blocks; document indexes take another 20 bytes per document")
    remote: str | None = Field(
        None,
        description="folder or fsspec URL with a copy of the run's shards folder; without it, that folder itself is cached",
    )
    prefetch: Duration = Field(Duration.parse("64 steps"), description="number of steps whose blocks are fetched in advance")

    @model_validator(mode="after")
    def _in_steps(self) -> Cache:
        if self.prefetch.unit != "steps":
            raise ValueError(f"shards.cache.prefetch {self.prefetch.text()!r} must be a number of steps, such as '64 steps'")
        return self


class Shards(Node):
    """Token files in Megatron's indexed format."""

    effect: ClassVar = read_by("shards")

    shard_tokens: Tokens = Field(Tokens.parse("1B"), description="tokens per .bin file")
    imported: Annotated[dict[str, str], read_by("shards", "pretrain")] = Field(
        default_factory=dict,
        description="additional sources by name: folders written by `lmworks data import`, relative to the working directory; mixtures "
        "may use them; they are searched for evaluation items and held-out text (corpus.decontaminate), and are not deduplicated",
    )
    cache: Annotated[Cache | None, NO_EFFECT] = None
    packing: Annotated[Literal["concatenate", "best_fit"], read_by("pretrain")] = Field(
        "concatenate",
        description="concatenate: documents are joined, then cut; best_fit: documents that fit stay whole, padded (arXiv:2404.10830)",
    )
    max_epochs: Annotated[float, NO_EFFECT] = Field(
        40.0,
        gt=0,
        description="maximum epochs over a source in a phase; repeated text loses value after about 4 epochs, all by 40 (arXiv:2305.16264)",
    )
    warn_epochs: Annotated[float, NO_EFFECT] = Field(
        4.0, gt=0, description="epochs over a source, in a phase or in all phases, above which a warning is printed"
    )


class Checkpoints(Node):
    """What is saved and what is kept."""

    effect: ClassVar = NO_EFFECT

    keep_last: int = Field(2, gt=0, description="number of newest checkpoints to keep")
    keep_every: Duration | None = Field(None, description="interval of checkpoints that are never deleted")
    keep_best: bool = Field(
        True, description="keep the checkpoint with the lowest validation loss, of those whose step is validated and saved; with early "
        "stopping, which saves at each new lowest, the later stages use it"
    )
    asynchronous: bool = Field(True, description="write in the background while training goes on")
    local: str | None = Field(
        None,
        description="directory on each machine's local disk to save to first; a background copy to the run directory follows",
    )
    copy_to: str | None = Field(
        None, description="directory or fsspec URL to copy finished checkpoints to, in the background; `lmworks restore` copies them back"
    )

    def of(self, folder: str) -> Checkpoints:
        """The same settings with `copy_to` extended by the name of a checkpoint folder, so that the copies of two stages stay apart."""
        return self if self.copy_to is None else self.model_copy(update={"copy_to": f"{self.copy_to.rstrip('/')}/{folder}"})


FAILURES_PER_DEVICE_SECOND = 419 / (54 * 86_400 * 16_384)
MOST_LOST = 1800.0  # seconds of work
_LEAST_PAUSE = 1.0  # seconds: what a save that is written in the background holds up all the same


def seconds_between_failures(devices: int) -> float:
    """The mean time between unexpected failures of a run on so many devices."""
    return 1 / (FAILURES_PER_DEVICE_SECOND * devices)


def save_interval(pause: float | None, devices: int, written: float = 0.0) -> float:
    """Seconds between two saves. `pause` is how long training stands still for one, None before that is known, and `written` how long one
    takes in the background: a save does not begin before the one before has ended."""
    if pause is None:
        return MOST_LOST
    best = math.sqrt(2 * max(pause, _LEAST_PAUSE) * seconds_between_failures(devices))
    return max(written, pause, min(MOST_LOST, best))


def lost_share(interval: float, pause: float, devices: int) -> float:
    """The fraction of the time that saves and failures are expected to cost: pauses, and half an interval of work per failure."""
    return pause / interval + interval / 2 / seconds_between_failures(devices)


class Metrics(DeviceCost):
    """Where metrics are written (JSONL always is), and what a device costs, for the run page; that of the cluster file when omitted."""

    effect: ClassVar = NO_EFFECT

    tensorboard: bool = Field(False, description="also write TensorBoard events")
    wandb_project: str | None = Field(None, description="also log to this Weights & Biases project")
    trackio_project: str | None = Field(
        None,
        description="also log to this Trackio project, in the run directory unless TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is "
        "set",
    )
    mlflow_experiment: str | None = Field(
        None, description="also log to this MLflow experiment, in the run directory unless MLFLOW_TRACKING_URI is set"
    )
    prometheus_port: int | None = Field(None, gt=0, description="also serve /metrics on this loopback port")
    detail_every: Duration | None = Field(
        None, description="interval between per-layer metrics (activations, attention logits, gradients, updates); never when omitted"
    )
    diagnose_every: Seconds | None = Field(
        Seconds.parse("10 min"), description="interval at which rules of `lmworks doctor` judge the run while it trains; never when null"
    )


class RopeExtension(Node):
    """A longer context without further training: RoPE is stretched from the length that the model was trained to look back on."""

    scaling: Literal["linear", "ntk", "yarn", "llama3"] = Field("yarn", description="method, as model.rope.scaling")
    factor: float = Field(gt=1, description="factor on the trained context")

    @classmethod
    def parse(cls, text: str) -> RopeExtension:
        """`METHOD:FACTOR`, such as `yarn:2`. Raises `UserError`."""
        method, _, factor = text.partition(":")
        try:
            return cls.model_validate({"scaling": method, "factor": factor})
        except ValidationError:
            raise UserError(f"--rope {text}: write METHOD:FACTOR, such as yarn:2; methods are linear, ntk, yarn and llama3") from None


class Export(Node):
    """Formats to write; each is loaded again and compared before it counts as done."""

    effect: ClassVar = read_by("export")

    huggingface: bool = Field(True, description="safetensors, config and tokenizer for transformers, vLLM and SGLang")
    gguf: bool | Literal["auto"] = Field(
        "auto", description="one file for llama.cpp; auto: if llama.cpp can express the model and its tokenizer"
    )
    rope: RopeExtension | None = None
    dtype: Literal["fp32", "bf16"] = Field("bf16", description="type of the exported weights; the router's selection bias stays fp32")
