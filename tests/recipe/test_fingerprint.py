"""Fingerprints, and what a resume may change."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmworks.errors import UserError
from lmworks.recipe.changes import changed_keys, fingerprint, harmless, require_allowed
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.recipe import Recipe

Write = Callable[..., Path]


def loaded(path: Path, *overrides: str) -> Recipe:
    return load_recipe(path, overrides).recipe


def test_how_it_is_written_does_not_matter(write: Write) -> None:
    first = load_recipe(write()).fingerprint
    assert (
        load_recipe(write(("tokens: 2M", "tokens: 2000k"), ("global_batch_tokens: 8Ki", "global_batch_tokens: 8192 tokens"))).fingerprint
        == first
    )
    assert load_recipe(write(("{prose: 0.75, code: 0.25}", "{code: 0.25, prose: 0.75}"))).fingerprint == first
    assert load_recipe(write(), ["seed=2"]).fingerprint != first


def test_sub_trees(write: Write) -> None:
    """A stage is stamped with what it reads: other changes leave it done."""
    before, after = loaded(write()), loaded(write(), "train.phases.anneal.tokens=512Ki")
    assert fingerprint(before, ["corpus", "tokenizer"]) == fingerprint(after, ["tokenizer", "corpus"])
    assert fingerprint(before, ["train.phases"]) != fingerprint(after, ["train.phases"])
    assert fingerprint(before, ["train.phases.general"]) == fingerprint(after, ["train.phases.general"])


def test_changed_keys_are_named(write: Write) -> None:
    old = loaded(write(), "threads=2")
    new = loaded(
        write(),
        "threads=2",
        "train.phases.general.tokens=3M",
        "metrics.tensorboard=true",
        "optimizer.learning_rate=0.01",
        "optimizer.adam_learning_rate=0.01",
    )
    changes = {change.path: (change.old, change.new) for change in changed_keys(old, new)}
    assert changes["train.phases.general.tokens"] == ("2000000 tokens", "3000000 tokens")
    assert set(changes) == {"train.phases.general.tokens", "metrics.tensorboard", "optimizer.learning_rate", "optimizer.adam_learning_rate"}
    assert changed_keys(old, old) == []


def test_a_phase_that_was_put_in_between_is_named(write: Write) -> None:
    """Items are told apart by name, so the phases after it do not all count as changed."""
    old = loaded(write())
    inserted = (
        "    - name: anneal",
        "    - {name: middle, tokens: 1M, mixture: {code: 1.0}, sequence_length: 512 tokens, global_batch_tokens: 8Ki}\n    - name: anneal",
    )
    paths = [
        change.path
        for change in changed_keys(
            old, loaded(write(inserted), *(f"optimizer.{k}={getattr(old.optimizer, k)}" for k in ("learning_rate", "adam_learning_rate")))
        )
    ]
    assert paths == ["train.phases.middle"]


def test_a_resume_refuses_by_name(write: Write) -> None:
    old, new = (
        loaded(write()),
        loaded(write(), "train.phases.general.global_batch_tokens=16Ki", "checkpoints.keep_last=5", "train.micro_batch_sequences=1"),
    )
    changes = changed_keys(old, new)
    with pytest.raises(UserError) as caught:
        require_allowed(changes, ["train.micro_batch_sequences"])
    message = str(caught.value)
    assert "train.phases.general.global_batch_tokens (8192 tokens -> 16384 tokens)" in message
    assert message.endswith("continue with --allow train.phases.general.global_batch_tokens")
    assert "keep_last" not in message and "micro_batch_sequences" not in message
    require_allowed(changes, ["train.micro_batch_sequences", "train.phases"])


def test_a_node_that_one_of_them_lacks_is_one_change() -> None:
    old = {
        "model": {"moe": None, "num_hidden_layers": 2}, "phases": [{"name": "a", "tokens": 1}], "imported": {}, "tune": None, "zero": 0,
        "gone": {"x": 1, "y": 2},
    }  # fmt: skip
    new = {
        "model": {"moe": {"n_routed_experts": 1, "num_experts_per_tok": 2}, "num_hidden_layers": 2}, "imported": {"z": "path"},
        "tune": {"q": 1}, "gone": None, "zero": None,
        "phases": [{"name": "a", "tokens": 2}, {"name": "b", "tokens": 1, "mixture": {"c": 1}}],
    }  # fmt: skip
    changes = {change.path: change for change in changed_keys(old, new)}
    assert {path: change.keys for path, change in changes.items()} == {
        "model.moe": ("model.moe.n_routed_experts", "model.moe.num_experts_per_tok"), "phases.a.tokens": ("phases.a.tokens",),
        "phases.b": ("phases.b.name", "phases.b.tokens", "phases.b.mixture.c"), "imported.z": ("imported.z",), "tune": ("tune.q",),
        "gone": ("gone.x", "gone.y"), "zero": ("zero",),
    }  # fmt: skip
    assert str(changes["phases.b"]) == "phases.b (added)" and str(changes["gone"]) == "gone (taken out)"
    assert str(changes["zero"]) == "zero (0 -> null)" and changes["phases.b"].new == new["phases"][1]
    assert {change.path for change in changed_keys(new, old)} == changes.keys()


def test_a_source_may_be_called_like_a_key(write: Write) -> None:
    """What a mixture names is no key of the phase."""
    assert not harmless("train.phases.general.mixture.needle") and harmless("train.phases.general.needle")
    assert not harmless("train.phases.general.mixture.save_every") and harmless("train.save_every")


def test_harmless_changes_pass(write: Write) -> None:
    old, new = (
        loaded(write()),
        loaded(write(), "run_dir=elsewhere", "train.save_every=7 steps", "tune.tokens=1M", "evaluate.prompts=[x]", "export.gguf=false"),
    )
    require_allowed(changed_keys(old, new))
    own = "evaluate.protect=[{name: own, path: own.jsonl}]"
    for asked in ("evaluate.benchmarks=[piqa]", "evaluate.tasks=[x]", "evaluate.task_items=7", own):  # the training text is searched for it
        with pytest.raises(UserError, match=re.escape(asked.partition("=")[0])):
            require_allowed(changed_keys(old, loaded(write(), asked)))
    for change in ("threads=1", "seed=9", "layout.tp=2", "train.compile=false"):
        with pytest.raises(UserError):
            require_allowed(changed_keys(loaded(write(), "threads=2"), loaded(write(), "threads=2", change)))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=8,
)


@given(tree=st.dictionaries(st.text(min_size=1, max_size=5), values, max_size=4))
def test_order_of_keys_does_not_matter(tree: dict[str, object]) -> None:
    assert fingerprint(tree) == fingerprint(dict(reversed(tree.items())))
