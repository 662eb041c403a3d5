"""Which stages of a run read which keys of the recipe, and what a change of one means once training has begun: said here, once.

From these rows follow what a stage's inputs are (`lmworks.run.staleness`), what `--allow` is asked for (`lmworks.recipe.fingerprint`), the
mark * of docs/recipe.md and the table of docs/changes.md. A file that a stage reads of an earlier one is no key: the stages name those
themselves, so a row lists only the stages whose own code looks at the key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

Rule = Literal["free", "allow", "never"]
"""What a change needs once there is a checkpoint: nothing; `--allow KEY`; or another run directory."""

BEFORE_TUNING = ("corpus", "tokenizer", "shards", "pretrain")  # a change of what they read can reach a weight of pretraining


@dataclass(frozen=True)
class Row:
    """`keys` are dotted paths, in words; each stands for all below it as well, and * for what a part of a path may be called. `stages` read
    them.

    `resume`: nothing that is finished depends on them, but a training under way would not go on bit for bit. `frozen`: weights would
    mean something else after a change.
    """

    keys: str
    stages: str = ""
    resume: bool = False
    frozen: bool = False

    @property
    def readers(self) -> tuple[str, ...]:
        return tuple(self.stages.split())

    @property
    def rule(self) -> Rule:
        if self.frozen:
            return "never"
        return "allow" if self.resume or any(stage in BEFORE_TUNING for stage in self.readers) else "free"

    def matches(self, path: str) -> bool:
        parts = path.split(".")
        return any(_covers(pattern.split("."), parts) for pattern in self.keys.split())


def _covers(pattern: list[str], parts: list[str]) -> bool:
    return len(pattern) <= len(parts) and all(map(fnmatchcase, parts, pattern))


# Of the rows that match a key the last one counts.
ROWS = (
    Row("name", "export"),
    Row("seed", "corpus tokenizer shards pretrain tune"),
    Row("run_dir size"),
    Row("time threads layout", resume=True),
    Row("corpus", "corpus"),
    Row("corpus.decontaminate", "corpus shards tune"),
    Row("corpus.sources.*.optional", "corpus pretrain"),
    Row("corpus.sources.*.buckets", "corpus tokenizer pretrain"),  # their weights are part of every mixture
    Row("corpus.sources.*.fim", "shards"),
    Row("corpus.sources.*.package corpus.sources.*.sha256", "corpus tune"),
    Row("corpus.processes corpus.executor corpus.keep_staged"),
    Row("tokenizer", "tokenizer", frozen=True),
    Row("tokenizer.chat_template", "tokenizer"),
    Row("shards", "shards"),
    Row("shards.imported", "shards pretrain"),
    Row("shards.packing", "pretrain"),
    Row("shards.max_epochs shards.warn_epochs shards.cache"),
    Row("model", "pretrain tune evaluate export"),
    Row("model.initializer_range", "pretrain export"),
    Row("model.max_position_embeddings", "evaluate export"),
    Row("model.preset model.moe.capacity_factor"),
    Row("optimizer", "pretrain tune"),
    Row("optimizer.ema_decay", "pretrain tune evaluate export"),
    Row("train", "pretrain"),
    Row("train.init_from", "pretrain export", frozen=True),
    Row("train.phases", "pretrain evaluate export"),  # their order
    Row("train.phases.*", "pretrain"),
    # The budgets weigh the tokenizer's sample too, but a longer run before its first step is no reason to cut all text anew.
    Row("train.phases.*.tokens", "pretrain export"),
    Row("train.phases.*.sequence_length", "pretrain evaluate export"),
    Row("train.phases.*.rope", "pretrain tune evaluate export"),
    Row("train.phases.*.mtp_loss_weight", "pretrain tune"),
    Row("train.phases.*.mixture", "tokenizer pretrain"),
    Row("train.phases.*.mixture_changes", "pretrain"),
    Row("train.phases.*.needle train.phases.*.save_every"),
    Row("train.precision", "pretrain tune evaluate"),
    # They change the order of float additions, as threads and layout do.
    Row("train.micro_batch_size train.compile train.activation_checkpointing train.logit_chunk_size train.deepspeed", resume=True),
    Row("train.*_every train.validate_bytes_per_domain train.save_every_seconds"),
    Row("checkpoints metrics launch"),
    Row("stability", resume=True),
    Row(
        "stability.save_bad_batches stability.starved_share stability.data_timeout stability.max_failed_saves stability.slow_threshold "
        "stability.recheck_every stability.on_corruption"
    ),
    Row("tune", "tune"),
    Row("tune.tokens", "tune export"),
    Row("evaluate", "evaluate"),
    # What an evaluation asks: all text that is trained on is searched for it.
    Row("evaluate.benchmarks evaluate.task* evaluate.protect", "corpus shards tune evaluate"),
    Row("export", "export"),
)


@lru_cache(maxsize=4096)
def row_of(path: str) -> Row:
    """The row that counts for a key, by its dotted path."""
    found = next((row for row in reversed(ROWS) if row.matches(path)), None)
    assert found is not None, f"no row of lmworks.recipe.reads says which stages read {path}"
    return found


def readers(path: str) -> tuple[str, ...]:
    """The stages that read a key."""
    return row_of(path).readers


def rule(paths: Iterable[str]) -> Rule:
    """What a change of these keys needs once there is a checkpoint: the strictest of their rules."""
    found = {row_of(path).rule for path in paths}
    return "never" if "never" in found else "allow" if "allow" in found else "free"


_NONE = {False: "none", True: "a training under way"}
_SAID = {"free": "may change", "allow": "`--allow`", "never": "another `run_dir`"}


def table() -> str:
    """The rows as Markdown, for docs/changes.md."""
    lines = ["| keys | read by | once training has begun |", "|---|---|---|"]
    for row in ROWS:
        keys = ", ".join(f"`{key}`" for key in row.keys.split())
        lines.append(f"| {keys} | {', '.join(row.readers) or _NONE[row.resume]} | {_SAID[row.rule]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
