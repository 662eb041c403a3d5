"""What phases change of the positions: said, warned of, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmworks.cli.tables import phase_positions, recipe_as_json
from lmworks.errors import UserError
from lmworks.plan.automatic import this_machine
from lmworks.plan.plan import make_plan
from lmworks.recipe.families.registry import from_config, to_config
from lmworks.recipe.load import load_recipe, load_recipe_text
from lmworks.recipe.phases import positions, warnings
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.weights import start_context

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


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
}  # fmt: skip
DATA = "data: [{name: mine, kind: files, path: mine.jsonl}]"
NOTES = "corpus: {sources: [{name: notes, kind: jsonl, path: n.jsonl, domain: other, license: CC0-1.0}]}\n"


def phase(name: str, length: int, rope: str = "") -> str:
    rope = f", rope: {rope}" if rope else ""
    return f"{{name: {name}, tokens: 8Ki, mixture: {{notes: 1.0}}, sequence_length: {length}, global_batch_tokens: 4Ki{rope}}}"


def tune(length: int) -> str:
    return f"tune: {{{DATA}, epochs: 1, sequence_length: {length}, global_batch_tokens: 4Ki}}\n"


LINEAR = "{scaling: linear, factor: 8, original_max_position_embeddings: 64}"


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe that starts from weights with this context."""

    def make(context: int, text: str, **keys: Any) -> Recipe:
        (tmp_path / "base").mkdir(exist_ok=True)
        (tmp_path / "base" / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": context} | keys), encoding="utf-8")
        return load_recipe_text(f"name: longer\nstart_from: {tmp_path / 'base'}\n{text}").recipe

    return make


YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}}


@pytest.mark.parametrize(
    ("context", "text", "keys", "stated"),
    [
        (64, tune(256), {}, 256),
        (8192, tune(256), {}, 8192),
        (64, f"dpo: {{{DATA}, sequence_length: 512}}\n{tune(256)}", {}, 512),
        (64, f"{NOTES}train: {{phases: [{phase('a', 128)}, {phase('b', 256)}]}}\n", {}, 256),
        (64, f"{NOTES}train: {{phases: [{phase('a', 128, LINEAR)}]}}\n", {}, 512),
        (64, tune(128), YARN, 128),  # as far as it is trained, not as far as the scaling of others would reach
        (64, f"tune: {{{DATA}, epochs: 1, sequence_length: 256}}\nmodel: {{max_position_embeddings: 128 tokens}}\n", {}, 128),
    ],
)  # fmt: skip
def test_the_model_states_the_context_that_it_is_trained_at(
    started: Callable[..., Recipe], context: int, text: str, keys: dict[str, Any], stated: int
) -> None:
    """Weights that are trained further at longer sequences were exported with the context that they had before."""
    model = started(context, text, **keys).model
    assert model.max_position_embeddings == stated
    if "phases" not in text:  # the positions are those of the weights, whatever context is stated beside them
        config = to_config(model, model.rope, {})
        assert config["max_position_embeddings"] == stated
        assert from_config(config).rope == from_config(CONFIG | {"max_position_embeddings": context} | keys).rope


def test_from_random_weights_later_stages_count_too(write: Write) -> None:
    recipe = load_recipe(write(), ["tune={}", "tune.sequence_length=8Ki"]).recipe
    assert recipe.model.max_position_embeddings == 8192
    (line,) = warnings(recipe)
    assert line.startswith("tune: sequences grow from 512 to 8,192 tokens") and "or set tune.sequence_length to 512 tokens" in line


@pytest.mark.parametrize(
    ("context", "text", "keys", "told"),
    [
        (64, tune(256), {}, ["tune: sequences grow from 64 to 256 tokens and positions stay (theta 10,000); to extend them train a phase"]),
        (8192, f"{tune(256)}dpo: {{{DATA}, sequence_length: 1024}}\n", {}, []),
        (64, f"{NOTES}train: {{phases: [{phase('a', 256)}]}}\n{tune(512)}", {}, ["a: sequences grow from 64 to 256 tokens"]),
        (64, f"{NOTES}train: {{phases: [{phase('a', 256, '{theta: 1e6}')}]}}\n{tune(256)}", {}, []),
        (8192, f"{NOTES}train: {{phases: [{phase('a', 512, '{theta: 1e4}')}, {phase('b', 4096)}]}}\n", {}, []),  # they stay
        (256, tune(512), YARN, ["tune: yarn x4 extends 64 tokens to 256, but sequences have 512; set tune.sequence_length to 256 tokens"]),
        (64, f"{tune(256)}model: {{max_position_embeddings: 64 tokens}}\n", {},
         ["model.max_position_embeddings is 64, and tune trains sequences of 256 tokens", "tune: sequences grow from 64 to 256 tokens"]),
    ],
)  # fmt: skip
def test_sequences_grow_from_the_context_of_the_weights(
    started: Callable[..., Recipe], context: int, text: str, keys: dict[str, Any], told: list[str]
) -> None:
    """They were compared with each other alone, and the remedy named keys of phases where there are none."""
    recipe = started(context, text, **keys)
    for lines in (list(warnings(recipe, start_context(recipe))), make_plan(recipe, "", this_machine(1)).warnings()):
        found = [line for line in lines if "sequences" in line]
        assert [line[: len(begin)] for line, begin in zip(found, told, strict=True)] == told
        assert not any("train.phases.tune" in line or "train.phases.dpo" in line for line in found)


def test_weights_that_are_gone_are_not_missed(started: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = started(64, tune(256))
    (tmp_path / "base" / "config.json").unlink()
    assert start_context(recipe) is None and list(warnings(recipe, None)) == []
