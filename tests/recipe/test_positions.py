"""What phases change of the positions: said, warned of, refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmworks.cli.tables import phase_positions, recipe_as_json
from lmworks.errors import UserError
from lmworks.plan.automatic import this_machine
from lmworks.plan.plan import make_plan
from lmworks.recipe.load import load_recipe
from lmworks.recipe.phases import positions, warnings

Write = Callable[..., Path]
LONG = "sequence_length: 1Ki\n      global_batch_tokens: 8Ki\n"


def long(rope: str, length: str = "4Ki") -> tuple[str, str]:
    return LONG, f"sequence_length: {length}\n      global_batch_tokens: 8Ki\n" + (f"      rope: {rope}\n" if rope else "")


def test_a_change_is_said_and_extends_the_context(write: Write) -> None:
    resolved = load_recipe(write(long("{scaling: yarn, factor: 8, original_max_position_embeddings: 512 tokens}")))
    first, second = positions(resolved.recipe)
    assert first.text == "theta 10,000"
    assert second.text == "theta 10,000 -> theta 10,000, yarn x8 from 512 tokens, scores x1.46"
    assert list(warnings(resolved.recipe)) == []
    assert f"positions of anneal (4,096 tokens): {second.text}" in phase_positions(resolved).plain
    plan = make_plan(resolved.recipe, resolved.fingerprint, this_machine(1))
    assert [phase.positions for phase in plan.phases] == [first.text, second.text]
    assert recipe_as_json(resolved)["positions"] == {"general": first.text, "anneal": second.text}


def test_windows_and_masks_are_said_too(write: Write) -> None:
    changes = ("train.phases.anneal.sliding_window=128 tokens", "train.phases.anneal.no_rope_layer_interval=2",
               "train.phases.anneal.mask_documents=false")  # fmt: skip
    _, second = positions(load_recipe(write(), changes).recipe)
    assert second.text == "theta 10,000 -> theta 10,000, window 128, no RoPE in every 2. layer; attention crosses document borders"


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ("", "anneal: sequences grow from 512 to 4,096 tokens and positions stay (theta 10,000); to extend them set "
         "train.phases.anneal.rope.theta (ABF)"),
        ("{scaling: ntk, factor: 2, original_max_position_embeddings: 512 tokens}",
        "anneal: ntk x2 extends 512 tokens to 1,024, but sequences have 4,096; "
         "set train.phases.anneal.rope.factor to 8 or more"),
    ],
)  # fmt: skip
def test_positions_that_are_outgrown_are_warned_of(write: Write, rope: str, told: str) -> None:
    resolved = load_recipe(write(long(rope)))
    (line,) = warnings(resolved.recipe)
    assert line.startswith(told)
    assert f"warning: {told}" in phase_positions(resolved).plain
    assert line in make_plan(resolved.recipe, resolved.fingerprint, this_machine(1)).warnings()
    assert list(warnings(load_recipe(write(long("", "1Ki"))).recipe)) == []  # twice as long is no matter


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ("{factor: 4}", "rope.factor 4 does nothing without rope.scaling"),
        ("{scaling: yarn, factor: 4}", "rope.scaling yarn needs rope.original_max_position_embeddings"),
        ("{scaling: llama3, factor: 4}", "rope.scaling llama3 needs rope.original_max_position_embeddings"),
    ],
)
def test_changes_that_make_no_sense_are_refused(write: Write, rope: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        load_recipe(write(long(rope)))
    assert "train.phases" in str(error.value)


def test_no_positions_cannot_be_changed(write: Write) -> None:
    path = write(long("{theta: 50000.0}"), ("preset: glm-tiny", "preset: glm-tiny\n  rope: {partial_rotary_factor: 0}"))
    with pytest.raises(UserError, match="no positions to change; leave rope out"):
        load_recipe(path)
