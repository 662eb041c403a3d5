"""The recipe key that makes the largest item of the time, or of the data, of a step smaller, and by how much."""

from __future__ import annotations

from collections.abc import Mapping

from lmworks.host import machine
from lmworks.parallel.mesh import own_device
from lmworks.parallel.parallelize import is_compiled
from lmworks.plan.memory_kinds import Remedy
from lmworks.profile.measure import Measured
from lmworks.profile.target import Target

_RECOMPUTED = {"full": 1.0, "selective": 0.3}  # of a forward pass, by policy


def time_remedy(target: Target, part: str, seconds: Mapping[str, float], one: Measured) -> Remedy | None:
    """The change for the largest part of the time; None where the model itself is what takes it."""
    recipe, item = target.recipe, seconds[part]
    train, device = recipe.train, own_device()
    if part == "data":
        if recipe.shards.cache is None and target.stage == "pretrain":
            costs = "space on the local disk; it helps where the storage of the shards is slow, not where this machine is"
            return Remedy("shards.cache", "'shards.cache={dir: /local/disk, max_bytes: 20GB}'", item, costs)
        return (
            Remedy("shards.cache.prefetch", "shards.cache.prefetch='256 steps'", item, "space in the cache")
            if recipe.shards.cache
            else None
        )
    if part in ("scoring", "forward", "backward"):
        policy = train.activation_checkpointing.policy.name
        trains = part != "scoring"  # which recomputes nothing, and is not compiled
        if policy in _RECOMPUTED and trains:
            saves = _RECOMPUTED[policy] * float(train.activation_checkpointing.share) * seconds["forward"]
            return Remedy("train.activation_checkpointing", "train.activation_checkpointing=none", saves, "memory of the activations")
        if device.type == "cuda" and not is_compiled(recipe, device) and trains:
            return Remedy("train.compile", "train.compile=true", 0.0, "a minute at the start")
        if device.type == "cuda" and train.precision == "fp32":
            return Remedy("train.precision", "train.precision=bf16", item / 2, "rounding")
        if device.type == "cpu" and (recipe.threads or 1) < machine.cores():
            cores = machine.cores()
            return Remedy("threads", f"threads={cores}", item * (1 - (recipe.threads or 1) / cores), "the other cores of this machine")
        if one.micro_batches > 1 and trains:
            more = 2 * (train.micro_batch_sequences or 1)
            return Remedy("train.micro_batch_sequences", f"train.micro_batch_sequences={more}", 0.0, "twice the activations")
        return None
    if part == "save":
        if not recipe.checkpoints.asynchronous:
            return Remedy("checkpoints.asynchronous", "checkpoints.asynchronous=true", item, "host memory for a copy of the state")
        return Remedy("train.save_every", f"train.save_every={_doubled(train.save_every.text())}", item / 2, "twice the lost work")
    if part == "validation":
        return Remedy("train.validate_every", f"train.validate_every={_doubled(train.validate_every.text())}", item / 2, "fewer points")
    if part == "rollouts" and recipe.grpo is not None:
        fewer = int(recipe.grpo.max_new_tokens) // 2
        return Remedy("grpo.max_new_tokens", f"grpo.max_new_tokens={fewer}", item / 2, "longer answers are cut")
    if part in ("optimizer", "collectives"):
        if target.stage == "pretrain":
            batch = int(train.phases[one.phase_index].global_batch_tokens)
            name = f"train.phases.{one.phase}.global_batch_tokens"
            return Remedy(name, f"{name}={2 * batch}", item / 2, "per token; half as many updates")
        key = {"tune": "tune.global_batch_tokens", "dpo": "dpo.pairs_per_step", "grpo": "grpo.prompts_per_step"}[target.stage]
        section = getattr(recipe, target.stage)
        return Remedy(key, f"{key}={2 * int(getattr(section, key.split('.')[1]))}", item / 2, "per token; half as many updates")
    if part == "gap":
        if train.log_every.text() != "1 steps":
            return None
        return Remedy("train.log_every", "train.log_every='10 steps'", 0.0, "fewer metrics lines")
    return None


def data_remedy(target: Target, item: str, data: Mapping[str, float]) -> Remedy | None:
    """The change for the largest item of the data."""
    recipe, share = target.recipe, data[item]
    if item == "waiting":
        return Remedy("shards.cache", "'shards.cache={dir: /local/disk, max_bytes: 20GB}'", share, "space on the local disk")
    if item == "padding" and target.stage == "pretrain":
        return Remedy("shards.packing", "shards.packing=concatenate", share, "documents are cut at the ends of sequences")
    if item == "padding":
        length = int(getattr(recipe, target.stage).sequence_length)
        if target.stage == "tune":  # rows are packed with whole conversations: longer rows waste less
            return Remedy("tune.sequence_length", f"tune.sequence_length={2 * length}", share / 2, "memory of longer rows")
        return Remedy(f"{target.stage}.sequence_length", f"{target.stage}.sequence_length={length // 2}", 0.0, "longer pairs are left out")
    return None  # tokens without loss are those of prompts and of the ends of documents


def _doubled(text: str) -> str:
    """An interval of twice the length: `10%` is `20%`, `100 steps` is `200 steps`."""
    number = text.rstrip("%").split(" ")[0]
    unit = text[len(number) :]
    twice = 2 * float(number)
    return f"'{min(twice, 100) if unit == '%' else twice:g}{unit}'"
