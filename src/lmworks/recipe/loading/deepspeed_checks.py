"""Settings of a recipe that do not combine with DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tree.paths import Keys


def problems(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    """Each setting of a recipe that does not combine with DeepSpeed: its keys and the reason."""
    engine, layout, train = recipe.train.deepspeed, recipe.layout, recipe.train
    if engine is None:
        return
    if layout.pp > 1 and layout.zero >= 2:
        yield (
            ("layout", "pp"),
            f"ZeRO-{layout.zero} cannot be combined with a pipeline: each micro-batch would reduce gradients or gather weights; "
            "set pp=1, or leave out train.deepspeed",
        )
    for axis, why in (
        ("pp", "its pipeline is another than ours"),
        ("tp", "it partitions whole parameters, not those that are split already"),
        ("cp", "it partitions over all ranks, each with sequences of its own"),
        ("ep", "it partitions experts like other weights, without sending tokens"),
        ("dp_replicate", "it shards over all ranks"),
    ):
        if getattr(layout, axis) > 1 and not (axis == "pp" and layout.zero >= 2):
            yield ("layout", axis), f"train.deepspeed does not combine with {axis}: {why}; set {axis}=1 and dp_shard to the ranks there are"
    if layout.zero == 0:
        yield ("layout", "zero"), "DeepSpeed shards optimizer state at least; set zero to 1, 2 or 3"
    if layout.zero < 3 and engine.offload == "nvme":
        yield ("train", "deepspeed", "offload"), "optimizer state goes to a disk at ZeRO-3 only; set layout.zero=3, or offload=cpu"
    if layout.zero < 3 and engine.offload_weights != "none":
        yield ("train", "deepspeed", "offload_weights"), "weights stay on the GPU below ZeRO-3; set layout.zero=3"
    if recipe.optimizer.kind == "muon":
        yield (
            ("optimizer", "kind"),
            "Muon needs whole matrices, and DeepSpeed gives an optimizer flat pieces (its own Muon is scaled otherwise than ours); "
            "set optimizer.kind=adamw",
        )
    if recipe.optimizer.ema_decay:
        yield ("optimizer", "ema_decay"), "an average of the weights is not kept under train.deepspeed; set ema_decay=0"
    if train.precision == "fp16":
        yield ("train", "precision"), "the loss scale of fp16 is not carried through train.deepspeed; set bf16 or fp32"
    if layout.zero == 3 and train.compile:
        yield ("train", "compile"), "compiled layers do not see the weights that ZeRO-3 gathers around them; set train.compile=false"
    consolidated: list[Keys] = [("train", "phases", index, "ewc") for index, phase in enumerate(train.phases) if phase.ewc]
    for keys in consolidated + ([("tune", "ewc")] if recipe.tune and recipe.tune.ewc else []):
        yield keys, "gradients lie in pieces under train.deepspeed, where no penalty can be added; leave ewc out"
    for name in recipe.loras:
        yield (name, "lora"), f"DeepSpeed holds all weights in flat pieces and would train them; leave train.deepspeed or {name}.lora out"
    if recipe.stability.detect_anomaly:
        yield ("stability", "detect_anomaly"), "the operators of DeepSpeed are not ours to watch; leave detect_anomaly out"
    if recipe.stability.recheck_every is not None:
        yield ("stability", "recheck_every"), "gradients and state lie in pieces under train.deepspeed; leave recheck_every out"
    if recipe.metrics.detail_every is not None:
        yield ("metrics", "detail_every"), "gradients and weights lie in pieces under train.deepspeed; leave detail_every out"
