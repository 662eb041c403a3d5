"""Activation checkpointing: which layers follow which policy, and how a recipe writes it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmworks.recipe.schema.layout import CHECKPOINT_FULL, CHECKPOINT_NONE, CHECKPOINT_SELECTIVE, ActivationCheckpointing
from lmworks.recipe.schema.train import Train


@given(percent=st.integers(1, 100), layers=st.integers(1, 200))
def test_a_share_is_spread_evenly(percent: int, layers: int) -> None:
    """Any stretch of layers has its share to less than one layer, so that pipeline stages are alike."""
    found = [ActivationCheckpointing.parse(f"{percent}%").of(layer) is CHECKPOINT_FULL for layer in range(layers)]
    for begin in range(0, layers, 7):
        stretch = found[begin:]
        assert abs(sum(stretch) - Fraction(percent, 100) * len(stretch)) < 1


@pytest.mark.parametrize("text", ["none", "selective", "full", "50%", "selective 12.5%"])
def test_it_is_written_as_it_is_read(text: str) -> None:
    train = Train(activation_checkpointing=text)  # type: ignore[arg-type]
    assert train.model_dump(mode="json")["activation_checkpointing"] == text
    assert Train.model_validate(train.model_dump(mode="json")) == train


def test_its_parts() -> None:
    assert ActivationCheckpointing.parse("full 100%") == ActivationCheckpointing(CHECKPOINT_FULL) == ActivationCheckpointing.parse("100%")
    half = ActivationCheckpointing(CHECKPOINT_SELECTIVE, Fraction(1, 2))
    assert ActivationCheckpointing.parse("selective 50%") == half != ActivationCheckpointing(CHECKPOINT_SELECTIVE)
    assert ActivationCheckpointing.parse("none").of(0) is CHECKPOINT_NONE


@pytest.mark.parametrize("text", ["", "half", "0%", "101%", "none 50%", "-5%", "1/0%", "nan%", "50", "x 50%", "9" * 5000 + "%"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no activation checkpointing policy; write for example"):
        Train(activation_checkpointing=text)  # type: ignore[arg-type]
