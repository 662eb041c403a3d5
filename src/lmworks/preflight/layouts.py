"""Checks that the layout does not change the result: initial weights, and the first steps.

Tensor-parallel ranks that initialize their shards from the same seed have equal shards; the loss still falls, but less (the SmolLM3 report
describes a 3B model that was trained on a trillion tokens before this was found). So full tensors are compared with those of one process.

How far a layout in bf16 may be from one process in bf16 follows from the model and not from the machine. A layout adds the same products up
in another order. It rounds other numbers to bf16, but no more of them, so that its error is another draw of the same size. That size is
seen in one process: the distance between its bf16 and its fp32, some 1% of the gradient of most tensors and 10% where a token near the
border between two experts has gone to the other. A wrong sum is off by as much as the tensor is large.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmworks.model.init import normal, normal_part
from lmworks.plan.layout import describe
from lmworks.preflight import small_model
from lmworks.preflight.check_result import CheckContext, CheckResult
from lmworks.preflight.small_model import LONGER, RATE, Trained, small_layouts, small_recipe, train
from lmworks.recipe.parameters import parameters
from lmworks.recipe.schema.layout import Layout, world_size
from lmworks.recipe.schema.recipe import Recipe

BF16_SLACK = 4.0  # times the error of one process; 15 sound layouts reached 3.0, the quietest of 25 mistakes 5.4 (LOG.md)
BF16_OF_LOSS = 2**-8  # one rounding: a mean over the tokens is off by less
BF16_OF_NORM = 2**-6  # squares of rounded gradients are larger in the mean


def worst_error(exact: Mapping[str, np.ndarray], one: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """How many times the error of one process that of a layout is, and in which tensor; of all in `found` the largest.

    `exact` is one process in fp32, `one` the same in bf16. The error is the Euclidean distance from `exact`, of a tensor, and of each row
    of attention's matrices, since a sum that is missing there may concern a few: those of a shared key. A row is allowed the matrix'
    mean error besides its own in `one`, which may by chance be next to none. Elsewhere rows are tokens or experts, of which a token that
    goes to another expert moves some by much. A vector, too, is allowed the mean error of those of its name in all layers besides its own:
    it has few numbers, and Adam moves one by the sign of a gradient that rounding decides. Selection biases are excluded: they move by the
    sign of a difference of counts.
    """
    largest, of_layers = (0.0, ""), defaultdict[str, list[float]](list)
    for name, value in exact.items():
        if value.ndim == 1:
            of_layers[_LAYER.sub("", name)].append(float(_of_rows(one[name] - value).sum()))
    for name, value in found.items():
        if name.endswith("router.bias"):
            continue
        allowed, off = _of_rows(one[name] - exact[name]), _of_rows(value - exact[name])
        if len(alike := of_layers[_LAYER.sub("", name)]) > 1:
            allowed = allowed + np.mean(alike)
        times = np.sqrt(off.sum() / max(allowed.sum(), 1e-30))
        if ".attention." in name and value.ndim == 2:
            times = max(times, np.sqrt(off / np.maximum(allowed + allowed.mean(), 1e-30)).max())
        largest = max(largest, (float(times), name))
    return largest


def _of_rows(difference: np.ndarray) -> np.ndarray:
    """The square of each row's length (R,); a vector is one row."""
    return np.square(difference.reshape(-1, difference.shape[-1]).astype(np.float64)).sum(1)


_LAYER = re.compile(r"\d+")
_BOX = 48  # rows and columns of a compared slice
_ALIKE = 0.1  # correlation of two slices above chance
TOLERANCE = 1e-5  # fp32 sums in another order differ by about 1e-6
OF_UPDATE = 4e-3  # of the learning rate: Newton-Schulz amplifies the rounding of small singular values
_CHANGES = "the layout changes the training result: use another, and report this one with resolved.json"
_ADVICE = "initial weights must depend on seed, name and position in the full tensor; with a seed per rank the model trains worse"


def same_start(context: CheckContext) -> CheckResult:
    """Check that shards of the initial weights, in the real shapes, equal the full tensors; and all weights on a scaled-down layout."""
    tp = max(2, context.layout.tp)
    boxes = 0
    for name, shape in _kinds(context).items():
        parts = [_box(context.recipe.seed, name, shape, rank, tp) for rank in range(2)]
        for rank, part in enumerate(parts):
            if not torch.equal(part, _plainly(context.recipe.seed, name, shape, rank, tp, tuple(part.shape))):
                return CheckResult("fail", f"{name}: the shard of tensor rank {rank} differs from the full tensor", _ADVICE)
        count = parts[0].numel()
        if count >= _BOX and _correlation(parts[0], parts[1]) > _ALIKE + 5 / count**0.5:
            return CheckResult("fail", f"{name}: tensor ranks 0 and 1 have the same initial weights", _ADVICE)
        boxes += len(parts)
    tensors = 0
    for small in worlds(context):
        for found in small.many:
            for name, value in found.start.items():
                tensors += 1
                if not np.array_equal(value, small.one.start[name]):
                    text = f"the initial weights of {name} on {describe(small.layout)} differ from those of one process"
                    return CheckResult("fail", f"{text} ({_repeats(value)})", _ADVICE)
    scaled = f", {tensors} full tensors on the scaled-down layout" if tensors else ""
    return CheckResult("ok", f"{boxes} shards of the real shapes{scaled}: all as in one process", figures={"boxes": float(boxes)})


def same_steps(context: CheckContext) -> CheckResult:
    """Compare losses, gradient norms, gradients and updated weights of a small model of the same architecture on the scaled-down layout
    with those of one process: in fp32, and also in bf16 if the recipe may train in it, on any processor.
    """
    if world_size(context.layout) == 1:
        return CheckResult("skip", "there is only one rank")
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
            most, name = worst_error(getattr(rounded.exact, kind), getattr(rounded.one, kind), getattr(found, kind))
            if most > times:
                times, where = most, f"the gradient of {name}" if kind == "grads" else f"updated weight {name}"
    figures |= {f"{describe(small.layout)}/bf16 loss": of_loss, f"{describe(small.layout)}/bf16 error": times}
    if of_loss > BF16_OF_LOSS:
        return _differs("in bf16 the loss", small.layout, of_loss)
    if times > BF16_SLACK:
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
    """A scaled-down layout with the results of one process and of its ranks, in fp32 and, if the recipe may train in it, in bf16."""

    layout: Layout
    one: Trained
    many: list[Trained]
    bf16: Rounded | None


def worlds(context: CheckContext) -> list[World]:
    """The scaled-down layouts; computed once for all checks."""
    if "worlds" not in context.memory:
        recipe = small_recipe(context.recipe)
        with_engine = recipe.train.model_copy(update={"deepspeed": context.recipe.train.deepspeed})
        among_ranks = recipe.model_copy(update={"train": with_engine})
        made: list[World] = []
        if layouts := small_layouts(context.layout):
            (one,) = small_model.run_ranks(train, 1, recipe, Layout())
            bf16 = _alone_in_bf16(context.recipe)
            for layout in layouts:
                many = small_model.run_ranks(train, world_size(layout), among_ranks, layout)
                made.append(World(layout, one, many, bf16 and Rounded(*bf16, _ranks_in_bf16(context.recipe, layout))))
        context.memory["worlds"] = made
    found: list[World] = context.memory["worlds"]
    return found


def _alone_in_bf16(recipe: Recipe) -> tuple[Trained, Trained] | None:
    """One process in fp32 and in bf16; None if the recipe trains in fp32 or with DeepSpeed, which stores other tensors in bf16."""
    if recipe.train.precision == "fp32" or recipe.train.deepspeed is not None:
        return None
    (exact,) = small_model.run_ranks(train, 1, small_recipe(recipe), Layout(), LONGER)
    (one,) = small_model.run_ranks(train, 1, small_recipe(recipe, precision="bf16"), Layout(), LONGER)
    return exact, one


def _ranks_in_bf16(recipe: Recipe, layout: Layout) -> list[Trained]:
    return small_model.run_ranks(train, world_size(layout), small_recipe(recipe, precision="bf16"), layout, LONGER)


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
    """The offsets of a tensor rank's shard, split along the second-to-last dimension."""
    return (*(0 for _ in shape[:-2]), rank * (shape[-2] // tp), 0)


def _box(seed: int, name: str, shape: tuple[int, ...], rank: int, tp: int) -> torch.Tensor:
    sizes = (*(1 for _ in shape[:-2]), min(_BOX, max(1, shape[-2] // tp)), min(_BOX, shape[-1]))
    return normal_part(seed, name, shape, _place(shape, rank, tp), sizes)


def _plainly(seed: int, name: str, shape: tuple[int, ...], rank: int, tp: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """The same slice, row by row from the stream of the full tensor."""
    first = _place(shape, rank, tp)[-2]
    rows = [normal(seed, name, (first + row) * shape[-1], sizes[-1]) for row in range(sizes[-2])]
    return torch.stack(rows).view(sizes)


def _correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return abs(float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]))


def _repeats(value: np.ndarray) -> str:
    """Describe whether the halves of a tensor along any dimension are equal, as with ranks that use the same seed."""
    for dim in range(value.ndim):
        if value.shape[dim] % 2:
            continue
        first, second = np.split(value, 2, axis=dim)
        if np.array_equal(first, second):
            return f"its halves along dim {dim} are equal, as if ranks used the same seed"
    return "its shards differ from the full tensor"
