"""Layers besides softmax attention: Mamba-2, lightning attention and short convolutions; and constant factors on activations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.states import Recurrent, Sizes, State

_WIDEST, _MOST = 1 << 20, 1 << 16
_Factor = Annotated[float, Field(gt=0, le=1e6)]


class Mamba(Recurrent):
    """Mamba-2 (arXiv:2405.21060): a state space of num_heads x head_dim x state_size numbers per row and layer, whatever the length."""

    num_heads: int = Field(gt=0, le=_MOST, description="heads, each with a decay and a time step of its own")
    head_dim: int = Field(64, gt=0, le=_WIDEST, description="inputs of one head; num_heads * head_dim is the inner width")
    state_size: int = Field(128, gt=0, le=_WIDEST, description="numbers that the state holds of each input (d_state)")
    n_groups: int = Field(1, gt=0, le=_MOST, description="groups of heads that share B and C")
    conv_kernel: int = Field(4, gt=1, le=64, description="tokens that the convolution before the state space sees")
    conv_bias: bool = Field(True, description="biases of the convolution")
    gate_norm: Literal["none", "after_gate", "before_gate"] = Field(
        "after_gate",
        description="where the output has an RMS norm: after_gate, on the product with the gate (Mamba-2, Granite 4); before_gate, on what "
        "the gate multiplies; none (Falcon-H1)",
    )
    norm_groups: int = Field(1, gt=0, le=_MOST, description="groups of the inner width that gate_norm normalizes separately")
    min_time_step: float = Field(
        0.0, ge=0, le=1, description="the smallest time step; transformers has one in Nemotron-H (0.001), NVIDIA's own code has none"
    )

    @property
    def inner_size(self) -> int:
        """The width of its input, gate and output."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: the inputs, B and C."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    def of_rank(self, tp: int) -> Mamba:
        """The sizes of one of `tp` ranks: its heads, the groups that these belong to, and the groups of their norm. Ranks that have heads
        of one group all have that group."""
        names = ("num_heads", "n_groups", "norm_groups")
        return self.model_copy(update={name: max(1, getattr(self, name) // tp) for name in names})

    def states(self, model: Sizes, tp: int) -> tuple[State, ...]:
        """The last inputs of the convolution, and a matrix per head."""
        own = self.of_rank(tp)
        return State((own.conv_kernel - 1, own.conv_size), narrow=True), State((own.num_heads, own.state_size, own.head_dim))

    @model_validator(mode="after")
    def _groups_divide(self) -> Mamba:
        if self.num_heads % self.n_groups:
            raise ValueError(f"mamba.n_groups {self.n_groups} must divide mamba.num_heads {self.num_heads}")
        if self.inner_size % self.norm_groups:
            raise ValueError(f"mamba.norm_groups {self.norm_groups} must divide the inner width {self.inner_size} (num_heads * head_dim)")
        if self.norm_groups > 1 and self.gate_norm == "none":
            raise ValueError(f"mamba.norm_groups {self.norm_groups} does nothing without a norm; set mamba.gate_norm or leave it out")
        return self


class Lightning(Recurrent):
    """Lightning attention (MiniMax-01, arXiv:2501.08313): linear attention with a constant decay per head, in the heads of attention."""

    rms_norm_eps: float = Field(
        1e-6, gt=0, description="added to the mean square in the norm of its outputs; fixed in MiniMax's class, whatever rms_norm_eps says"
    )

    def states(self, model: Sizes, tp: int) -> tuple[State, ...]:
        """A matrix per head of attention."""
        return (State(((model.num_attention_heads or 0) // tp, model.head_dim or 0, model.head_dim or 0)),)


class ShortConv(Recurrent):
    """A gated short convolution in place of attention (LFM2, arXiv:2511.23404): each channel sees its last few tokens."""

    conv_kernel: int = Field(3, gt=1, le=64, description="tokens that the convolution spans, the current one included (LFM2: 3)")

    def states(self, model: Sizes, tp: int) -> tuple[State, ...]:
        """The last inputs of the convolution."""
        return (State((self.conv_kernel - 1, (model.hidden_size or 0) // tp), narrow=True),)


class Multipliers(Node):
    """Constant factors on activations: of maximal update parametrization (arXiv:2203.03466) in Falcon-H1, of DeepNorm (arXiv:2203.00555) in
    MiniMax-01."""

    embedding: _Factor = Field(1.0, description="on the embedded tokens")
    logits: _Factor = Field(1.0, description="on the logits")
    key: _Factor = Field(1.0, description="on the keys of attention")
    attention_in: _Factor = Field(1.0, description="on what attention reads")
    attention_out: _Factor = Field(1.0, description="on what attention adds to the residual stream")
    attention_stream: _Factor = Field(1.0, description="on the residual stream where attention adds to it (MiniMax-01: 3.56)")
    gate: _Factor = Field(1.0, description="on the gate of a dense feed-forward block, before SiLU")
    ffn_out: _Factor = Field(1.0, description="on what the feed-forward block adds to the residual stream")
    ffn_stream: _Factor = Field(1.0, description="on the residual stream where the feed-forward block adds to it (MiniMax-01: 3.56)")
    mamba_in: _Factor = Field(1.0, description="on what Mamba-2 reads")
    mamba_parts: tuple[_Factor, _Factor, _Factor, _Factor, _Factor] = Field(
        (1.0, 1.0, 1.0, 1.0, 1.0), description="on the gate, the input, B, C and the time step of Mamba-2"
    )
    mamba_out: _Factor = Field(1.0, description="on what Mamba-2 adds to the residual stream")
    lightning_out: _Factor = Field(1.0, description="on what lightning attention adds to the residual stream")
    lightning_stream: _Factor = Field(1.0, description="on the residual stream where lightning attention adds to it")

    def changed(self) -> list[str]:
        """The names of the factors that are not 1."""
        plain = Multipliers()
        return [name for name in type(self).model_fields if getattr(self, name) != getattr(plain, name)]

    def of_mixer(self, mixer: str) -> tuple[float, float]:
        """The factors on the residual stream and on what is added to it by a mixer (`Model.mixer`); hybrid layers have their own inside."""
        if mixer == "lightning":
            return self.lightning_stream, self.lightning_out
        return self.attention_stream, 1.0 if mixer == "hybrid" else self.mamba_out if mixer == "mamba" else self.attention_out
