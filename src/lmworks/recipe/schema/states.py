"""The states of recurrent layers, as the sections of their sizes declare them."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

from lmworks.recipe.schema.base import Node


class State(NamedTuple):
    """A tensor that a layer keeps of each row while it decodes: its shape without the rows, whatever the length. States are fp32, or of
    the type of the activations if `narrow`."""

    shape: tuple[int, ...]
    narrow: bool = False


class Sizes(Protocol):
    """The sizes of a model (`lmworks.recipe.schema.model.Model`) that its mixers share."""

    @property
    def hidden_size(self) -> int | None: ...
    @property
    def num_attention_heads(self) -> int | None: ...
    @property
    def head_dim(self) -> int | None: ...


class Recurrent(Node):
    """The sizes of a mixer that keeps states. `attends`: whether the layer has keys and values in the cache as well."""

    attends: ClassVar[bool] = False

    def states(self, model: Sizes, tp: int) -> tuple[State, ...]:
        """The states of a layer of this model, with its heads or channels split over so many ranks."""
        raise NotImplementedError
