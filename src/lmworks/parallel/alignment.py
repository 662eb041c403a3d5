"""Sizes that the experts' grouped matrix products can take: what the plan refuses is what the run refuses."""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.recipe.schema.model import Model

_ALIGNED = 16  # bytes, which every row of an operand must fill


def alignment_problems(model: Model, tp: int, element: int) -> Iterator[str]:
    """Why the products cannot be made of numbers of `element` bytes with experts shared by `tp` ranks; nothing if they can."""
    if model.moe is None:
        return
    step = _ALIGNED // element
    assert model.hidden_size
    if model.hidden_size % step:
        yield f"model.hidden_size {model.hidden_size} is not a multiple of {step}, which {_why(element)}"
    own, rest = divmod(model.moe.moe_intermediate_size, tp)
    if own % step and not rest:
        size = f"model.moe.moe_intermediate_size {model.moe.moe_intermediate_size}" + (f" / tp {tp} = {own}" if tp > 1 else "")
        yield f"{size} is not a multiple of {step}, which {_why(element)}; take {-(-own // step) * step * tp}"


def _why(element: int) -> str:
    return f"grouped products of {8 * element}-bit numbers need"
