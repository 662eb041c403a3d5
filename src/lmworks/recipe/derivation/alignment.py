"""Alignment that the grouped matrix products of experts require: checked when a recipe is loaded, by the plan and by the run."""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.recipe.schema.model import Model

_ALIGNED = 16  # bytes: every row of an operand must be a multiple


def alignment_problems(model: Model, tp: int, element: int) -> Iterator[str]:
    """The reasons why grouped products of `element`-byte numbers cannot run with experts sharded over `tp` ranks; none if they can."""
    if model.moe is None:
        return
    step = _ALIGNED // element
    assert model.hidden_size
    if model.hidden_size % step:
        yield f"model.hidden_size {model.hidden_size} is not a multiple of {step}, which {_why(element)}"
    own, rest = divmod(model.moe.moe_intermediate_size, tp)
    if own % step and not rest:
        size = f"model.moe.moe_intermediate_size {model.moe.moe_intermediate_size}" + (f" / tp {tp} = {own}" if tp > 1 else "")
        yield f"{size} is not a multiple of {step}, which {_why(element)}; set {-(-own // step) * step * tp}"


def _why(element: int) -> str:
    return f"grouped products of {8 * element}-bit numbers require"
