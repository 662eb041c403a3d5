"""Checks across the recipe that the type of a single node cannot make, such as names that must match.

`deepspeed_problems`: settings that do not combine with DeepSpeed. `phase_refusals`: budgets of phases without room for their steps and
schedules; they follow from a recipe alone, and `show`, `plan` and `run` make them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError

from lmworks.errors import UserError, all_refusals
from lmworks.recipe.keys import Keys, nearest
from lmworks.recipe.mixers import cp_problems
from lmworks.recipe.parameter import kind_of
from lmworks.recipe.parameters import alignment_problems, parameters
from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import LrSchedule, Phase
from lmworks.recipe.timeline import Schedules, Timeline, fewest_steps, norm_steps


def deepspeed_problems(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
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
    if recipe.optimizer.qk_clip_threshold is not None:
        yield ("optimizer", "qk_clip_threshold"), "weights lie in flat pieces under train.deepspeed; leave qk_clip_threshold out"
    if recipe.stability.detect_anomaly:
        yield ("stability", "detect_anomaly"), "the operators of DeepSpeed are not ours to watch; leave detect_anomaly out"
    if recipe.stability.recheck_every is not None:
        yield ("stability", "recheck_every"), "gradients and state lie in pieces under train.deepspeed; leave recheck_every out"
    if recipe.metrics.detail_every is not None:
        yield ("metrics", "detail_every"), "gradients and weights lie in pieces under train.deepspeed; leave detail_every out"


_COMPUTED = ("model", "optimizer", "train", "stability", "tune", "dpo", "grpo")  # sections whose numbers meet tensors
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of the normal numbers of fp32
_NO_EARLIER_TEXT = (
    "what the weights of start_from were trained on is not known; name sources of general text with ewc.mixture, such as {web: 1}"
)


def problems(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    """Each error in a resolved recipe, with its keys."""
    sources = [source.name for source in recipe.corpus.sources]
    for index, name in enumerate(sources):
        if name in sources[:index]:
            yield ("corpus", "sources", index, "name"), f"two sources are called {name!r}; give each its own name"
    for index, source in enumerate(recipe.corpus.sources):
        if source.buckets and source.bucket_by == "quality" and not any(step.gives_quality for step in recipe.corpus.steps):
            message = "buckets need the documents' quality; add {step: quality, model: FILE} to corpus.steps, or name another bucket_by"
            yield ("corpus", "sources", index, "buckets"), message
    for index, step in enumerate(recipe.corpus.steps):
        for name in getattr(step, "sources", ()):
            if name not in sources:
                yield ("corpus", "steps", index, "sources"), _unknown(name, sources)
    outputs = [name for source in recipe.corpus.sources for name in source.outputs if name not in sources]
    bodies = [data.name for data in recipe.tune.data] if recipe.tune else []
    for index, name in enumerate(bodies):
        if name in bodies[:index]:
            yield ("tune", "data", index, "name"), f"two bodies of conversations are called {name!r}; give each its own name"
    if recipe.run_dir and re.match(r"[a-z][a-z0-9+.-]*:/", recipe.run_dir):
        yield ("run_dir",), "a run directory has to be in a file system; checkpoints.copy_to and `lmworks copy` write to object storage"
    if recipe.time is not None and not recipe.train.phases:
        yield ("time",), "time sets the budgets of pretraining, and this recipe has no train.phases; add some, or set tune.tokens instead"
    if not recipe.trains_base and recipe.tune and recipe.tune.ewc and not recipe.tune.ewc.mixture:
        yield ("tune", "ewc"), _NO_EARLIER_TEXT
    if recipe.tune and recipe.tune.epochs is not None:
        if recipe.tune.tokens is not None:
            yield ("tune", "epochs"), "tune.tokens says how much to train, too; leave one of the two out"
        for index, data in enumerate(recipe.tune.data):
            if data.weight != 1:
                yield ("tune", "data", index, "weight"), "with tune.epochs all are read equally often; leave weight out, or set tokens"
    if recipe.tune and recipe.tune.final_weights == "best" and not recipe.tune.validation_fraction:
        yield ("tune", "final_weights"), "nothing is held out to find the best weights by; raise tune.validation_fraction, or take the last"
    if recipe.tune and recipe.tune.lora and recipe.tune.ewc:
        yield ("tune", "ewc"), "the weights that it would hold are frozen with tune.lora; leave one of the two out"
    for name, lora in recipe.loras.items():
        if lora.dropout and name != "tune":
            yield (name, "lora", "dropout"), f"{name} trains without dropout, so that a token keeps its probability; leave it out"
    known = [*sources, *outputs, *recipe.shards.imported]
    if recipe.tune and recipe.tune.replay:
        if not known:
            yield ("tune", "replay"), "there is no text to replay; add corpus.sources or shards.imported"
        for name in recipe.tune.replay.mixture:
            if name not in known:
                yield ("tune", "replay", "mixture", name), _unknown(name, known)
    for name in recipe.tune.ewc.mixture if recipe.tune and recipe.tune.ewc else ():
        if name not in known:
            yield ("tune", "ewc", "mixture", name), _unknown(name, known)
    phases = [phase.name for phase in recipe.train.phases]
    for index, phase in enumerate(recipe.train.phases):
        at: Keys = ("train", "phases", index)
        if phase.name in phases[:index]:
            yield (*at, "name"), f"two phases are called {phase.name!r}; give each its own name"
        if phase.ewc is not None and index == 0 and recipe.start_from is None:
            yield (*at, "ewc"), "there is no phase before the first one to hold on to; leave ewc out"
        elif phase.ewc is not None and index == 0 and not phase.ewc.mixture:
            yield (*at, "ewc"), _NO_EARLIER_TEXT
        for name in phase.ewc.mixture if phase.ewc else ():
            if name not in known:
                yield (*at, "ewc", "mixture", name), _unknown(name, known)
        for name in phase.mixture:
            if name not in known:
                yield (*at, "mixture", name), _unknown(name, known)
        if phase.qk_norm_steps is not None and not recipe.model.use_qk_norm:
            yield (*at, "qk_norm_steps"), "there is no norm to add; set model.use_qk_norm, or leave this out"
        elif phase.qk_norm_steps is not None and any(before.qk_norm_steps is not None for before in recipe.train.phases[:index]):
            yield (*at, "qk_norm_steps"), "an earlier phase has added the norm already; leave this out"
        if phase.mtp_loss_weight is not None and recipe.model.mtp is None:
            yield (*at, "mtp_loss_weight"), "there is no multi-token-prediction layer to weigh; add model.mtp or leave this out"
        for number, change in enumerate(phase.mixture_changes):
            for name in change.mixture:
                if name not in known:
                    yield (*at, "mixture_changes", number, "mixture", name), _unknown(name, known)
    model = recipe.model
    if not model.vocab_size or not model.num_hidden_layers:
        return  # of a recipe for a corpus alone
    element = 2 if recipe.train.precision in ("bf16", "fp16") else 4  # `auto` may be either; the plan knows of which cluster
    for text in alignment_problems(model, max(1, recipe.layout.tp), element):
        yield ("model", "moe", "moe_intermediate_size") if "moe_intermediate" in text else ("model", "hidden_size"), text
    for name in _COMPUTED:
        yield from _numbers(getattr(recipe, name), (name,))
    yield from _changes(recipe)
    yield from _schedules(recipe)
    if model.vocab_size < recipe.tokenizer.vocab_size and not recipe.tokenizer.path:
        yield (
            ("model", "vocab_size"),
            f"{model.vocab_size} rows are too few for tokenizer.vocab_size {recipe.tokenizer.vocab_size}; leave model.vocab_size out",
        )
    if recipe.tokenizer.add_tokens and recipe.tune and recipe.tune.lora and not recipe.train.phases:
        yield ("tune", "lora"), "adapters train no rows of tokenizer.add_tokens; leave lora out, or train the rows in train.phases before"
    if recipe.tokenizer.add_tokens and not recipe.tokenizer.as_is:
        yield ("tokenizer", "add_tokens"), "tokens are added to a tokenizer that is kept; set tokenizer.as_is=true, or leave them out"
    if recipe.tokenizer.template_file and not recipe.tokenizer.as_is:
        yield ("tokenizer", "chat_template"), "a file is the template of a tokenizer that is kept; set tokenizer.as_is=true, or take brief"
    yield from deepspeed_problems(recipe)
    yield from _qk_clip_problems(recipe)
    if scales := recipe.optimizer.lr_scales:
        kinds = {kind_of(one.name, len(one.shape)) for one in parameters(model)}
        for kind in (one for one in scales if one not in kinds):
            why = "its head is the embedding (tie_word_embeddings)" if kind == "head" else f"it has no {kind}"
            yield ("optimizer", "lr_scales", kind), f"this model has {', '.join(sorted(kinds))}; {why}, so leave this out"
    if model.qk_norm_blend != 1:
        yield ("model", "qk_norm_blend"), "phases set it, and it ends at 1; leave it out, and set train.phases.qk_norm_steps"
    if model.moe and model.moe.first_k_dense_replace >= model.num_hidden_layers:
        yield (
            ("model", "moe", "first_k_dense_replace"),
            f"all {model.num_hidden_layers} layers would be dense; lower first_k_dense_replace or set model.moe to null",
        )


def _qk_clip_problems(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    """Why the scores of attention cannot be bounded by scaling weights."""
    at: Keys = ("optimizer", "qk_clip_threshold")
    if recipe.optimizer.qk_clip_threshold is None:
        return
    if recipe.model.use_qk_norm:
        yield at, "model.use_qk_norm makes scores independent of the size of query and key weights; leave one of the two out"
    if recipe.model.attention_sinks:
        yield at, "model.attention_sinks adds scores that no weight of queries and keys scales; leave one of the two out"
    if not recipe.model.attention_layers:
        yield at, "no layer has scores of queries and keys to bound; leave it out"
    for name in recipe.loras:
        yield (name, "lora"), f"optimizer.qk_clip_threshold scales weights that {name}.lora freezes; leave one of the two out"


def _numbers(value: Any, keys: Keys) -> Iterator[tuple[Keys, str]]:
    """Numbers that are infinite or 0 in fp32, the widest type in which training computes with them."""
    if isinstance(value, Node):
        for name in type(value).model_fields:
            yield from _numbers(getattr(value, name), (*keys, name))
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from _numbers(one, (*keys, index))
    elif isinstance(value, float) and value and not _SMALLEST <= abs(value) <= _LARGEST:
        end = f"more than {_LARGEST:.4g}; lower it" if abs(value) > 1 else f"nearer to 0 than {_SMALLEST:.4g}; raise it, or set it to 0"
        yield keys, f"{value:g} cannot be computed with in fp32: it is {end}"


def _changes(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    """What phases change in the model, each seen with those before it."""
    model = recipe.model
    said = list(cp_problems(model, recipe.layout.cp))
    yield from ((("layout", "cp"), text) for text in said)
    for index, phase in enumerate(recipe.train.phases):
        at: Keys = ("train", "phases", index)
        if phase.rope and model.rope.partial_rotary_factor == 0 and not phase.rope.partial_rotary_factor:
            yield (*at, "rope"), "rope.partial_rotary_factor is 0, so there are no positions to change; leave rope out"
        if phase.balance and model.moe is None:
            yield (*at, "balance"), "there are no experts to balance; add model.moe or leave this out"
        try:
            model = phase.changed(model)
        except ValidationError as error:
            name = next((name for name in ("sliding_window", "no_rope_layer_interval") if getattr(phase, name) is not None), "rope")
            yield (*at, name if phase.rope is None else "rope"), error.errors()[0]["msg"].removeprefix("Value error, ")
            return
        for text in cp_problems(model, recipe.layout.cp):
            if text not in said:  # a phase changes nothing else that matters to them
                said.append(text)
                yield (*at, "balance", "method"), text


def _schedules(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    """Schedules that span phases: these are there, and say nothing of a schedule themselves."""
    phases = recipe.train.phases
    for name in ("tune", "dpo", "grpo"):
        if (stage := getattr(recipe, name)) is not None and stage.lr_schedule.phases > 1:
            yield (name, "lr_schedule", "phases"), f"{name} is one phase; leave phases out"
    index = 0
    while index < len(phases):
        first, spans = phases[index].name, phases[index].lr_schedule.phases
        if index + spans > len(phases):
            key: Keys = ("train", "phases", index, "lr_schedule", "phases")
            yield key, f"there are {len(phases) - index} phases from {first} on, not {spans}; lower it"
        for number in range(index + 1, min(index + spans, len(phases))):
            phase = phases[number]
            if phases[number].loss_ramp is not None:
                for name, length in phases[index].lr_schedule.lengths:
                    if length.unit == "steps":
                        yield ("train", "phases", index, "lr_schedule", name), (
                            f"{length.text()} are not known where the schedule spans {phases[number].name}, whose batch grows with the "
                            "loss (batch_ramp.kind); give it in tokens or percent"
                        )
            for name, free in (("lr_schedule", LrSchedule()), ("learning_rate_scale", 1.0)):
                if getattr(phase, name) != free:
                    yield ("train", "phases", number, name), f"the schedule of phase {first} spans {phase.name} too; leave this out"
        index += spans


def _unknown(name: str, known: list[str]) -> str:
    close = nearest(name, known)
    hint = f"did you mean {close!r}?" if close else f"the sources are: {', '.join(known) or 'none'}"
    return f"no source is called {name!r}; {hint}"


def phase_refusals(recipe: Recipe) -> Iterator[UserError]:
    """Phases without a whole step, and schedules longer than what they span: one refusal for each schedule; and routers whose
    temperature is not 1 at the end. Of a recipe with `time` they are asked for once its budgets are set."""
    if not recipe.trains_base:
        return

    def look(phases: Sequence[Phase]) -> None:
        timeline = Timeline(phases)
        Schedules(phases, [phase.steps for phase in timeline.phases], timeline.tokens_before)
        for phase, steps in zip(phases, timeline.phases, strict=True):
            norm_steps(phase, steps)

    def end_of_warm_up() -> None:
        moe, steps = recipe.model.moe, sum(map(fewest_steps, recipe.train.phases))
        if moe is not None and moe.temperature != 1 and moe.temperature_steps >= steps:
            raise UserError(
                f"model.moe.temperature_steps {moe.temperature_steps:,} are not over when the run ends after {steps:,} steps, and the "
                f"model is used at a temperature of 1; set at most {steps - 1:,}"
            )

    phases, together = recipe.train.phases, list[Sequence[Phase]]()  # those that a schedule spans, whose lengths are of all of them
    while (begin := sum(map(len, together))) < len(phases):
        together.append(phases[begin : begin + phases[begin].lr_schedule.phases])
    found = list(all_refusals(partial(look, one) for one in together))
    yield from found or all_refusals([partial(look, recipe.train.phases), end_of_warm_up])
