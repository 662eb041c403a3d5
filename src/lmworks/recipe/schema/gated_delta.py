"""The sizes of layers with the gated delta rule."""

from __future__ import annotations

from pydantic import Field, model_validator

from lmworks.recipe.schema.states import Recurrent, Sizes, State

_WIDEST, _MOST_HEADS = 1 << 20, 1 << 16


class GatedDelta(Recurrent):
    """Linear attention with the gated delta rule (arXiv:2412.06464), as in Qwen3-Next and Qwen3.5."""

    num_key_heads: int = Field(gt=0, le=_MOST_HEADS, description="heads of queries and keys (Qwen3-Next: 16)")
    num_value_heads: int = Field(
        gt=0, le=_MOST_HEADS, description="heads of values, decays and outputs; a multiple of num_key_heads (Qwen3-Next: 32)"
    )
    key_head_dim: int = Field(128, gt=0, le=_WIDEST, description="width of a head's query and key")
    value_head_dim: int = Field(128, gt=0, le=_WIDEST, description="width of a head's value; the state of a head is key by value width")
    conv_kernel: int = Field(4, gt=1, le=64, description="tokens that the causal convolution of queries, keys and values spans")

    @model_validator(mode="after")
    def _heads_divide(self) -> GatedDelta:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"model.gated_delta.num_key_heads {self.num_key_heads} must divide num_value_heads {self.num_value_heads}"
            )
        return self

    @property
    def key_size(self) -> int:
        """Width of all queries, and of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Width of all values, and of all outputs."""
        return self.num_value_heads * self.value_head_dim

    def states(self, model: Sizes, tp: int) -> tuple[State, ...]:
        """The last inputs of the convolution, and a matrix per head."""
        inputs = State((self.conv_kernel - 1, (2 * self.key_size + self.value_size) // tp), narrow=True)
        return inputs, State((self.num_value_heads // tp, self.key_head_dim, self.value_head_dim))
