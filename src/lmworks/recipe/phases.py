"""The model in each phase of pretraining, and its RoPE settings in words, with warnings about them.

`in_force` is the one function that training, saving, resuming, tuning, replaying and planning ask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.recipe.schema.artifacts import RopeExtension
from lmworks.recipe.schema.model import Model, Rope
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import LARGEST, Tokens


def in_force(recipe: Recipe) -> list[Model]:
    """The model as each phase trains it: that of the recipe with the changes of the phase and of those before it (`Phase.changed`).

    They may concern positions, windows, the balancing of experts, the weight of multi-token prediction and whether there is QK norm, never
    a weight's shape. A phase that adds QK norm step by step (`qk_norm_steps`) has it whole here, as at its end.
    """
    found, model = [], recipe.model
    if model.use_qk_norm and any(phase.qk_norm_steps is not None for phase in recipe.train.phases):
        model = model.model_copy(update={"qk_norm_blend": 0.0})  # up to the phase that adds the norm
    for phase in recipe.train.phases:
        model = phase.changed(model)
        found.append(model)
    return found


def trained_models(recipe: Recipe) -> list[Model]:
    """The different models that a run trains: as it is built, and as each phase changes it. Later stages take over the last one."""
    found = [recipe.model]
    for model in in_force(recipe):
        found += [model] if model is not found[-1] and model != found[-1] else []
    return found


def final(recipe: Recipe) -> Model:
    """The model as the last phase trains it, and as every later stage takes it over."""
    return (in_force(recipe) or [recipe.model])[-1]


def extended(model: Model, context: int, extension: RopeExtension) -> Model:
    """A trained model whose RoPE is stretched from the context that it states, or else `context`, and which states the longer one. Its
    weights are the same. Raises `UserError` where there is no RoPE to stretch, or one that is stretched already."""
    rope, context = model.rope, int(model.max_position_embeddings or context)
    if rope.partial_rotary_factor == 0:
        raise UserError("the model has no RoPE (rope.partial_rotary_factor 0), so there is nothing to extend; leave the extension out")
    if rope.scaling != "none":
        raise UserError(
            f"the model was trained with positions that are stretched already ({describe(rope)}); lmworks extends those of plain RoPE only"
        )
    changes = {
        "scaling": extension.scaling, "factor": extension.factor, "original_max_position_embeddings": Tokens.parse(f"{context} tokens"),
    }  # fmt: skip
    if context * extension.factor > LARGEST:
        raise UserError(f"a factor of {extension.factor:g} on the context of {context:,} tokens is too large; lower it")
    longer = Tokens.parse(f"{int(context * extension.factor)} tokens")
    stretched = Rope.model_validate(rope.model_copy(update=changes).__dict__)
    changed = model.model_copy(update={"rope": stretched, "max_position_embeddings": longer})
    try:
        return Model.model_validate(changed.__dict__)
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


_GROWTH = 2  # times longer than where the positions were set, above which training without a change is warned of


@dataclass(frozen=True)
class Positions:
    """The RoPE settings of one phase; `text` describes them, and those before it where the phase changes them."""

    phase: str
    length: int
    rope: Rope
    text: str


def positions(recipe: Recipe) -> list[Positions]:
    """The RoPE settings of each phase: those of the phase before, unless it changes them. `text` also has windows, layers without
    positions, and whether attention crosses document borders."""
    found: list[Positions] = []
    before = recipe.model
    for phase, model in zip(recipe.train.phases, in_force(recipe), strict=True):
        old, new = _described(before), _described(model)
        text = new if old == new else f"{old} -> {new}"
        text += "" if phase.mask_documents else "; attention crosses document borders"
        found.append(Positions(phase.name, int(phase.sequence_length), model.rope, text))
        before = model
    return found


def _described(model: Model) -> str:
    words = [describe(model.rope)]
    if model.sliding_window:
        words.append(f"window {int(model.sliding_window):,}")
    if model.no_rope_layer_interval:
        words.append(f"no RoPE in every {model.no_rope_layer_interval}. layer")
    return ", ".join(words)


def describe(rope: Rope) -> str:
    """`theta 10,000, yarn x4 from 2,048 tokens, scores x1.3`."""
    if rope.partial_rotary_factor == 0:
        return "none"
    words = [f"theta {rope.theta:,.0f}"]
    if rope.scaling != "none":
        since = f" from {int(rope.original_max_position_embeddings):,} tokens" if rope.original_max_position_embeddings else ""
        words.append(f"{rope.scaling} x{rope.factor:g}{since}")
    if rope.scaling == "yarn" and rope.factor > 1:
        words.append(f"scores x{(0.1 * math.log(rope.factor) + 1) ** 2:.3g}")
    return ", ".join(words)


def warnings(recipe: Recipe, context: int | None = None) -> Iterator[str]:
    """Phases and later stages that outgrow their positions, one line each, and a context length that is stated shorter than was trained.

    `context` is that of the weights that training starts from, None if it is not known.
    """
    found = positions(recipe)
    parts = [*((here.phase, here.length, here.rope, f"train.phases.{here.phase}.rope") for here in found),
             *((name, int(section.sequence_length), final(recipe).rope, "") for name, section in recipe.later_stages.items())]  # fmt: skip
    if not parts:
        return
    name, longest, *_ = max(parts, key=lambda part: part[1])
    stated = int(recipe.model.max_position_embeddings or longest)
    if stated < longest:
        yield (
            f"model.max_position_embeddings is {stated:,}, and {name} trains sequences of {longest:,} tokens; the model would be served "
            f"with the shorter context: set it to {longest} tokens"
        )
    if recipe.model.rope.partial_rotary_factor == 0 or recipe.model.no_rope_layer_interval == 1:
        return
    since = (context or stated) if recipe.start_from is not None else parts[0][1]
    rope = recipe.model.rope
    written = {phase.name for phase in recipe.train.phases if phase.rope is not None}  # whoever writes them down means them
    for name, length, here, key in parts:
        if here != rope:
            since, rope = length, here
        elif key and name in written:
            since = max(since, length)
        elif length > _GROWTH * since:
            remedy = (
                f"set {key}.theta (ABF), or {key}.scaling to linear, ntk, yarn or llama3 with a factor; to keep them write {key}.theta as "
                "it is"
                if key
                else f"train a phase of such sequences before, with its rope.theta (ABF) or rope.scaling; or set {name}.sequence_length to "
                f"{since} tokens"
            )
            grown = f"{name}: sequences grow from {since:,} to {length:,} tokens and positions stay ({describe(rope)})"
            yield f"{grown}; to extend them {remedy}"
            since = length
        # Llama 3.1 itself goes beyond this product: 8 x 8,192 tokens became 131,072
        original = int(rope.original_max_position_embeddings or 0) if rope.scaling not in ("none", "llama3") else 0
        reach = int(original * rope.factor)
        if original and reach < length:
            remedy = f"{key}.factor to {math.ceil(length / original)} or more" if key else f"{name}.sequence_length to {reach} tokens"
            yield (
                f"{name}: {rope.scaling} x{rope.factor:g} extends {original:,} tokens to {reach:,}, but sequences have {length:,}; "
                f"set {remedy}"
            )
