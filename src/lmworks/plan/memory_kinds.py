"""The planned memory of a step by the kinds that a rank can measure, and the recipe key that takes most off the largest of them.

`lmworks profile` shows both beside what it measured; the report of a run whose memory has run out has the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lmworks.plan.memory import moments
from lmworks.plan.stages import has_rollouts, lora_of, stages_as_phases
from lmworks.recipe.schema.layout import CHECKPOINTING_POLICIES, ActivationCheckpointing, Cluster, Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.schema.units import Tokens

KINDS = {
    "weights": "fp32 weights and the copies in the type of the computation",
    "gradients": "in fp32",
    "optimizer state": "moments, averages, anchors, the reference of grpo",
    "activations": "kept for the backward pass, and its working memory",
    "logits": "of the chunks of the head, and the gradient of its matrix",
    "rollouts": "gathered weights and the KV cache of answers, while there are no activations and logits",
    "batches": "read ahead",
    "caching allocator": "reserved and not allocated",
    "runtime": "of Python, libraries and the device before the model is made",
    "other": "all that is in none of the rows above",
}
"""The rows of the table of memory, in their order, with what is in each."""

_OF_COMPONENT = {"fp32 master": "weights", "head and loss": "logits", "in transit": "other"}
FRAGMENTED = 0.25  # of the reserved memory that is free: more than this is fragmentation, not rounding
_WORTH = 0.05  # of an item: a change that takes off less is not named
_FEWEST_CHUNK = 64  # tokens whose logits are computed at one time: fewer make the products of the head slow


@dataclass(frozen=True)
class Remedy:
    """The change of a recipe, or of the environment, that makes an item smaller: its key, the argument of `--set`, about how much it takes
    off (bytes, seconds or a share, like the item; 0 where that is not known), and what it costs. A variable of the environment has a key in
    capitals and its value in `change`."""

    key: str
    change: str
    saves: float
    costs: str = ""


@dataclass(frozen=True)
class StepMemory:
    """What a step of a phase of a recipe is planned to need on the rank that needs most, or on those of `pipeline_stage`. `recipe` has its
    stages as phases."""

    recipe: Recipe
    cluster: Cluster
    phase: Phase
    micro_batch_size: int
    micro_batches: int
    pipeline_stage: int | None = None

    def kinds(self, recipe: Recipe | None = None, micro_batch_size: int | None = None, layout: Layout | None = None) -> dict[str, float]:
        """Planned bytes by kind, of this recipe or a changed one."""
        recipe, micro = recipe or self.recipe, micro_batch_size or self.micro_batch_size
        training, *drawing = moments(
            recipe, self.cluster, layout or recipe.layout, int(self.phase.sequence_length), micro,
            -(-self.micro_batches * self.micro_batch_size // micro), lora_of(self.phase), has_rollouts(self.phase), self.pipeline_stage,
        )  # fmt: skip
        found = dict.fromkeys(KINDS, 0.0)
        for name, size in training.components.items():
            found[_OF_COMPONENT.get(name, name)] += size
        found["rollouts"] = sum(one.components[name] for one in drawing for name in ("gathered weights", "KV cache"))
        return found

    def remedy(self, kind: str, measured: float) -> Remedy | None:
        """The change that takes most off a kind of which `measured` bytes were found, in the proportion that the plan says; more ranks only
        where nothing else helps."""
        if kind == "caching allocator":
            return Remedy("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", measured, "nothing; it is an environment variable")
        before = self.kinds()[kind] if kind in KINDS else 0.0
        found = [
            Remedy(key, change, measured * (1 - after[kind] / before), costs)
            for key, change, after, costs in self._changes(kind)
            if before and after[kind] < (1 - _WORTH) * before
        ]
        return max(found, key=lambda one: (not one.key.startswith("layout."), one.saves), default=None)

    def _changes(self, kind: str) -> Iterator[tuple[str, str, Mapping[str, float], str]]:
        """Changes that may make a kind smaller: key, argument of `--set`, planned kinds after it, cost."""
        train, layout = self.recipe.train, self.recipe.layout
        if kind == "activations":
            for name, costs in (("full", "about a third more computation"), ("selective", "a few per cent more computation")):
                if train.activation_checkpointing.policy.name != "full" and train.activation_checkpointing.text() != name:
                    policy = ActivationCheckpointing(CHECKPOINTING_POLICIES[name])
                    after = self.kinds(self._with(activation_checkpointing=policy))
                    yield "train.activation_checkpointing", f"train.activation_checkpointing={name}", after, costs
            if (train.micro_batch_sequences or 1) > 1 and self.micro_batch_size > 1:
                fewer = (train.micro_batch_sequences or 1) // 2
                after = self.kinds(micro_batch_size=max(1, self.micro_batch_size // 2))
                yield "train.micro_batch_sequences", f"train.micro_batch_sequences={fewer}", after, "smaller matrix products"
        if kind == "logits" and (chunk := int(train.logit_chunk_tokens)) > _FEWEST_CHUNK:
            fewer = max(_FEWEST_CHUNK, chunk // 4)
            after = self.kinds(self._with(logit_chunk_tokens=Tokens(fewer)))
            yield "train.logit_chunk_tokens", f"train.logit_chunk_tokens={fewer}", after, "smaller matrix products of the head"
        if kind in ("gradients", "optimizer state") and self.recipe.optimizer.kind == "adamw" and lora_of(self.phase) is None:
            optimizer = self.recipe.optimizer.model_copy(update={"kind": "muon"})
            after = self.kinds(self.recipe.model_copy(update={"optimizer": optimizer}))
            yield "optimizer.kind", "optimizer.kind=muon", after, "another optimizer, with other learning rates; only for a new run"
        if kind in ("weights", "gradients", "optimizer state", "activations", "logits"):
            stage: dict[str, Any] = {"weights": 3, "gradients": 2}
            axis = "tp" if kind == "logits" else "cp" if kind == "activations" else "dp_shard"
            changes = {axis: 2 * getattr(layout, axis), "zero": max(layout.zero, stage.get(kind, layout.zero))}
            words = " --set ".join(f"layout.{name}={value}" for name, value in changes.items() if value != getattr(layout, name))
            after = self.kinds(layout=layout.model_copy(update=changes))
            yield f"layout.{axis}", words, after, "twice as many ranks"

    def _with(self, **changes: Any) -> Recipe:
        return self.recipe.model_copy(update={"train": self.recipe.train.model_copy(update=changes)})


def step_memory(
    recipe: Recipe, stage: str, cluster: Cluster, length: int, micro_batch_size: int, rows: int, phase: int = 0,
    pipeline_stage: int | None = None,
) -> StepMemory:  # fmt: skip
    """The planned memory of a step of `stage` in sequences of `length`, `rows` of them in all; `phase` is the number of the phase of
    pretraining."""
    base = stage == "pretrain"
    if not base and recipe.trains_base:  # as the stage of a run without pretraining
        train = recipe.train.model_copy(update={"phases": []})
        recipe = recipe.model_copy(update={"train": train, "start_from": recipe.start_from or "the base model"})
    planned = stages_as_phases(recipe)
    named = next((one for one in planned.train.phases if one.name == stage), None)
    of = planned.train.phases[phase] if base or named is None else named
    of = of.model_copy(update={"sequence_length": Tokens(length)})
    ranks = recipe.layout.data_ranks
    own = max(1, -(-rows // ranks))
    micro_batch_size = min(micro_batch_size, own)
    return StepMemory(planned, cluster, of, micro_batch_size, -(-own // micro_batch_size), pipeline_stage)


def total(kinds: Mapping[str, float]) -> float:
    """Bytes of all kinds at once: answers are drawn where there are no activations and logits, before them."""
    apart = min(kinds.get("rollouts", 0.0), kinds.get("activations", 0.0) + kinds.get("logits", 0.0))
    return sum(kinds.values()) - apart


def largest(kinds: Mapping[str, float]) -> str:
    """The kind that needs most and that a recipe can change: not the runtime, and `other` only where nothing else is left."""
    chosen = {name: size for name, size in kinds.items() if name not in ("runtime", "other", "total")}
    return max(chosen, key=lambda name: chosen[name]) if any(chosen.values()) else "other"
