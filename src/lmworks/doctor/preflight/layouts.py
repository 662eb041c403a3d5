"""Whether a layout changes what is computed: the first weights, and the first steps.

Tensor ranks that draw their parts from the same seed have the same rows in every part; the loss falls all the same, only less (a 3B model
trained on a trillion tokens before it was found, in the SmolLM3 report). So the whole tensors are compared with those of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmworks.doctor.preflight import local_ranks
from lmworks.doctor.preflight.check_result import CheckContext, CheckResult
from lmworks.doctor.preflight.rounding import OF_LOSS, SLACK, worst
from lmworks.doctor.preflight.small_model import LONGER, RATE, Trained, small_layouts, small_recipe, train
from lmworks.model.init import normal, normal_part
from lmworks.plan.layout import describe
from lmworks.recipe.derivation.parameters import parameters
from lmworks.recipe.schema.layout import Layout, world_size
from lmworks.recipe.schema.recipe import Recipe

_BOX = 48  # rows and columns
_ALIKE = 0.1  # correlation of two boxes, beyond chance
TOLERANCE = 1e-5  # fp32 sums in another order differ by some 1e-6
OF_UPDATE = 4e-3  # of a step's rate: Newton-Schulz magnifies the rounding of small singular values
_CHANGES = "the layout changes the training result: use another, and report this one with resolved.json"
_ADVICE = "weights must follow from seed, name and place in the whole tensor; with a seed of the rank alone the model trains worse"


def same_start(context: CheckContext) -> CheckResult:
    """First weights of the real shapes, part by part, are those of the whole; and so are all weights on the layout scaled down."""
    tp = max(2, context.layout.tp)
    boxes = 0
    for name, shape in _kinds(context).items():
        parts = [_box(context.recipe.seed, name, shape, rank, tp) for rank in range(2)]
        for rank, part in enumerate(parts):
            if not torch.equal(part, _plainly(context.recipe.seed, name, shape, rank, tp, tuple(part.shape))):
                return CheckResult("fail", f"{name}: the part of tensor rank {rank} is not that part of the whole tensor", _ADVICE)
        count = parts[0].numel()
        if count >= _BOX and _correlation(parts[0], parts[1]) > _ALIKE + 5 / count**0.5:
            return CheckResult("fail", f"{name}: tensor ranks 0 and 1 begin with the same weights", _ADVICE)
        boxes += len(parts)
    tensors = 0
    for small in worlds(context):
        for found in small.many:
            for name, value in found.start.items():
                tensors += 1
                if not np.array_equal(value, small.one.start[name]):
                    text = f"{name} begins with other weights on {describe(small.layout)} than in one process"
                    return CheckResult("fail", f"{text} ({_repeats(value)})", _ADVICE)
    scaled = f", {tensors} whole tensors on the layout scaled down" if tensors else ""
    return CheckResult("ok", f"{boxes} parts of the real shapes{scaled}: all as in one process", figures={"boxes": float(boxes)})


def same_steps(context: CheckContext) -> CheckResult:
    """Losses, gradient norms, gradients and updated weights of a small model of the same kind, on the layout scaled down.

    In fp32 throughout; and in bf16, where the recipe may train in it. Which, the processor has no say in.
    """
    if world_size(context.layout) == 1:
        return CheckResult("skip", "one rank has nobody to differ from")
    texts: list[str] = []
    figures: dict[str, float] = {}
    for small in worlds(context):
        found = _in_fp32(small, figures)
        if isinstance(found, CheckResult):
            return found
        texts.append(f"{describe(small.layout)}: {found}")
        if small.bf16 is not None:
            found = _in_bf16(small, small.bf16, figures)
            if isinstance(found, CheckResult):
                return found
            texts[-1] += f"; {found}"
    return CheckResult("ok", "; ".join(texts), figures=figures)


def _in_fp32(small: World, figures: dict[str, float]) -> CheckResult | str:
    layout, one = small.layout, small.one
    of_loss = of_grad = of_weight = 0.0
    seen: set[str] = set()
    for found in small.many:
        pairs = zip([*found.losses, *found.norms], [*one.losses, *one.norms], strict=True)
        of_loss = max(of_loss, *(abs(a - b) / abs(b) for a, b in pairs))
        for name, grad in found.grads.items():
            off = float(np.abs(grad - one.grads[name]).max() / max(np.abs(one.grads[name]).max(), 1e-30))
            of_grad = max(of_grad, off)
            if off > TOLERANCE:
                return _differs(f"the gradient of {name}", layout, off)
        for name, weight in found.weights.items():
            seen.add(name)
            of_weight = max(of_weight, float(np.abs(weight - one.weights[name]).max()) / RATE)
    figures |= {f"{describe(layout)}/{kind}": off for kind, off in (("loss", of_loss), ("gradient", of_grad), ("weight", of_weight))}
    if of_loss > TOLERANCE:
        return _differs("the loss or the gradient norm", layout, of_loss)
    if of_weight > OF_UPDATE:
        return _differs("an updated weight", layout, of_weight)
    if missing := sorted(set(one.weights) - seen):
        return CheckResult("fail", f"no rank of {describe(layout)} has {missing[0]}", "report it with resolved.json")
    gradients = f" gradients by {of_grad:.0e}," if any(found.grads for found in small.many) else ""
    return f"loss off by {of_loss:.0e},{gradients} weights by {of_weight:.0e} of a step"


def _in_bf16(small: World, rounded: Rounded, figures: dict[str, float]) -> CheckResult | str:
    of_loss, times, where = 0.0, 0.0, ""
    for found in rounded.many:
        of_loss = max(of_loss, *(abs(a - b) / abs(b) for a, b in zip(found.losses, rounded.exact.losses, strict=True)))
        for kind in ("grads", "weights"):
            most, name = worst(getattr(rounded.exact, kind), getattr(rounded.one, kind), getattr(found, kind))
            if most > times:
                times, where = most, f"the gradient of {name}" if kind == "grads" else f"updated weight {name}"
    figures |= {f"{describe(small.layout)}/bf16 loss": of_loss, f"{describe(small.layout)}/bf16 error": times}
    if of_loss > OF_LOSS:
        return _differs("in bf16 the loss", small.layout, of_loss)
    if times > SLACK:
        text = f"in bf16 {where} on {describe(small.layout)} has {times:.1f} times the rounding error of one process"
        return CheckResult("fail", text, _CHANGES)
    return f"in bf16 loss off by {of_loss:.0e}, the rounding error {times:.1f} times that of one process"


@dataclass(frozen=True)
class Rounded:
    """One process in fp32 and in bf16, and the ranks in bf16."""

    exact: Trained
    one: Trained
    many: list[Trained]


@dataclass(frozen=True)
class World:
    """A layout scaled down, with what one process and what its ranks computed, in fp32, and in bf16 where the recipe may train in it."""

    layout: Layout
    one: Trained
    many: list[Trained]
    bf16: Rounded | None


def worlds(context: CheckContext) -> list[World]:
    """Each layout scaled down; made once for all checks."""
    if "worlds" not in context.memory:
        recipe = small_recipe(context.recipe)
        with_engine = recipe.train.model_copy(update={"deepspeed": context.recipe.train.deepspeed})
        among_ranks = recipe.model_copy(update={"train": with_engine})
        made: list[World] = []
        if layouts := small_layouts(context.layout):
            (one,) = local_ranks.run(train, 1, recipe, Layout())
            bf16 = _alone_in_bf16(context.recipe)
            for layout in layouts:
                many = local_ranks.run(train, world_size(layout), among_ranks, layout)
                made.append(World(layout, one, many, bf16 and Rounded(*bf16, _ranks_in_bf16(context.recipe, layout))))
        context.memory["worlds"] = made
    found: list[World] = context.memory["worlds"]
    return found


def _alone_in_bf16(recipe: Recipe) -> tuple[Trained, Trained] | None:
    """One process in fp32 and in bf16; None where the recipe computes in fp32, and for DeepSpeed, which keeps other numbers in bf16."""
    if recipe.train.precision == "fp32" or recipe.train.deepspeed is not None:
        return None
    (exact,) = local_ranks.run(train, 1, small_recipe(recipe), Layout(), LONGER)
    (one,) = local_ranks.run(train, 1, small_recipe(recipe, precision="bf16"), Layout(), LONGER)
    return exact, one


def _ranks_in_bf16(recipe: Recipe, layout: Layout) -> list[Trained]:
    return local_ranks.run(train, world_size(layout), small_recipe(recipe, precision="bf16"), layout, LONGER)


def _differs(what: str, layout: Layout, off: float) -> CheckResult:
    return CheckResult("fail", f"{what} on {describe(layout)} is off by {off:.1e} from one process", _CHANGES)


def _kinds(context: CheckContext) -> dict[str, tuple[int, ...]]:
    """One matrix of each component of the real model: name and shape."""
    found: dict[Any, tuple[str, tuple[int, ...]]] = {}
    for parameter in parameters(context.recipe.model):
        if len(parameter.shape) > 1:
            found.setdefault(parameter.component, (parameter.name, tuple(parameter.shape)))
    return dict(found.values())


def _place(shape: tuple[int, ...], rank: int, tp: int) -> tuple[int, ...]:
    """Where the part of a tensor rank begins, split along the next to last dim."""
    return (*(0 for _ in shape[:-2]), rank * (shape[-2] // tp), 0)


def _box(seed: int, name: str, shape: tuple[int, ...], rank: int, tp: int) -> torch.Tensor:
    sizes = (*(1 for _ in shape[:-2]), min(_BOX, max(1, shape[-2] // tp)), min(_BOX, shape[-1]))
    return normal_part(seed, name, shape, _place(shape, rank, tp), sizes)


def _plainly(seed: int, name: str, shape: tuple[int, ...], rank: int, tp: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """The same box row by row, out of the stream of the whole tensor."""
    first = _place(shape, rank, tp)[-2]
    rows = [normal(seed, name, (first + row) * shape[-1], sizes[-1]) for row in range(sizes[-2])]
    return torch.stack(rows).view(sizes)


def _correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return abs(float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]))


def _repeats(value: np.ndarray) -> str:
    """Whether the halves of a tensor are the same, along any dim: the mark of ranks with one seed."""
    for dim in range(value.ndim):
        if value.shape[dim] % 2:
            continue
        first, second = np.split(value, 2, axis=dim)
        if np.array_equal(first, second):
            return f"its halves along dim {dim} are equal, as of ranks that draw from the same seed"
    return "its parts are not those of the whole"
