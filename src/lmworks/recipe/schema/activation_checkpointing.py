"""Activation checkpointing: what a layer keeps for the backward pass, which recomputes the rest (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from lmworks.recipe.schema.units import Quantity


@dataclass(frozen=True)
class Policy:
    """What a layer `keeps` between its forward and its backward pass, and the pipeline schedules that cannot run it, with the reason.

    `lmworks.plan.memory.layer_activations` estimates the bytes per token.
    """

    name: str
    keeps: Literal["everything", "products", "input"]
    refused_by: tuple[tuple[str, str], ...] = ()


NONE = Policy("none", "everything")
SELECTIVE = Policy(
    "selective", "products",
    (("zero-bubble", "schedule zero-bubble runs two backward passes through a layer, and selective checkpointing of torch allows one"),),
)  # fmt: skip
FULL = Policy("full", "input")
POLICIES = {policy.name: policy for policy in (NONE, SELECTIVE, FULL)}


@dataclass(frozen=True, repr=False)
class ActivationCheckpointing(Quantity):
    """A policy and the share of layers that follow it, spread evenly: `none`, `selective`, `full`, `50%` (of the layers in full), or
    `selective 50%`."""

    policy: Policy
    share: Fraction = Fraction(1)
    example = "none, selective, full, '50%' or 'selective 50%'"

    @classmethod
    def parse(cls, text: str) -> ActivationCheckpointing:
        name, _, percent = text.strip().rpartition(" ") if "%" in text else (text.strip(), "", "")
        policy = POLICIES.get(name.strip() or ("full" if percent else ""))
        try:
            share = Fraction(percent.removesuffix("%")) / 100 if percent else Fraction(1)
        except (ValueError, ZeroDivisionError):
            policy, share = None, Fraction(1)
        if policy is None or not 0 < share <= 1 or (policy is NONE and percent) or len(text) > 40:
            raise ValueError(f"{text[:40]!r} is no activation checkpointing policy; write for example {cls.example}")
        return cls(policy, share)

    def text(self) -> str:
        if self.share == 1:
            return self.policy.name
        percent = f"{float(100 * self.share):g}%"
        return percent if self.policy is FULL else f"{self.policy.name} {percent}"

    def of(self, layer: int) -> Policy:
        """The policy of a layer (counted from 0; layers of multi-token prediction follow the others)."""
        return self.policy if int((layer + 1) * self.share) > int(layer * self.share) else NONE

    def problems(self, schedule: str) -> Iterator[str]:
        """The reasons why a pipeline schedule cannot run it; none if it can."""
        for name, why in self.policy.refused_by:
            if name == schedule:
                yield f"{why}; set train.activation_checkpointing to full or none, or schedule=1f1b"

    def __repr__(self) -> str:
        return f"ActivationCheckpointing({self.text()!r})"
