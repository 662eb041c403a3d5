"""Derived values: consistent with each other, and only where nothing was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmworks.errors import UserError
from lmworks.recipe import scaling_laws
from lmworks.recipe.load import load_recipe
from lmworks.recipe.parameters import count_active_parameters, count_parameters
from lmworks.recipe.schema.model import Model, Moe

Write = Callable[..., Path]
BARE = """\
name: bare
size: 20M
corpus:
  sources:
    - {name: a, kind: text, path: a.txt, license: MIT}
    - {name: b, kind: text, path: b.txt, license: MIT}
"""
PHASE = """\
train:
  phases: [{name: general, tokens: 1M, mixture: {a: 1.0}, sequence_length: 512 tokens, global_batch_tokens: 8Ki}]
"""


def test_size_alone_makes_a_run(write: Write) -> None:
    resolved = load_recipe(write(text=BARE))
    recipe = resolved.recipe
    (phase,) = recipe.train.phases
    assert count_parameters(recipe.model) == pytest.approx(20e6, rel=0.1)
    assert phase.tokens == pytest.approx(20 * count_active_parameters(recipe.model), rel=0.01)
    assert phase.tokens % phase.global_batch_tokens == 0 and phase.global_batch_tokens % phase.sequence_length == 0
    assert phase.mixture == {"a": 0.5, "b": 0.5}
    assert str(resolved.origins["model.num_hidden_layers"]).startswith("derived: nearest to size 20M")
    assert "2203.15556" in str(resolved.origins["train.phases.general.tokens"])


def test_size_in_the_file_fills_only_what_is_left_out(write: Write) -> None:
    recipe = load_recipe(write(text=BARE + "model: {num_hidden_layers: 3}\n")).recipe
    assert recipe.model.num_hidden_layers == 3


def test_size_on_the_command_line_scales_the_phases(write: Write) -> None:
    """The budgets keep their proportions, and what was written for another size gives way, overrides excepted."""
    path = write(("model:\n", "optimizer: {learning_rate: 0.5}\nmodel:\n"))
    small = load_recipe(path).recipe
    assert small.optimizer.learning_rate == 0.5
    resolved = load_recipe(path, ["train.phases.anneal.global_batch_tokens=32Ki"], size="40M")
    recipe = resolved.recipe
    general, anneal = recipe.train.phases
    assert count_parameters(recipe.model) == pytest.approx(40e6, rel=0.1)
    assert recipe.model.moe is not None and recipe.model.moe.n_routed_experts == 16
    assert general.tokens + anneal.tokens == pytest.approx(20 * count_active_parameters(recipe.model), rel=0.02)
    assert general.tokens / anneal.tokens == pytest.approx(2_000_000 / 262_144, rel=0.02)
    assert anneal.global_batch_tokens == 32 * 1024
    assert recipe.optimizer.learning_rate is not None and recipe.optimizer.learning_rate < 0.01
    assert str(resolved.origins["size"]) == "override --size 40M"
    assert str(resolved.origins["train.phases.anneal.global_batch_tokens"]) == "override --set train.phases.anneal.global_batch_tokens=32Ki"


def test_a_size_that_is_none(write: Write) -> None:
    with pytest.raises(UserError, match="size 'huge' is not a number of parameters; write for example '125M'"):
        load_recipe(write(), size="huge")


def test_max_length_follows_the_extension(write: Write) -> None:
    """YaRN's target counts where it is longer than what was trained on."""
    path = write(
        (
            "      sequence_length: 1Ki",
            "      rope: {scaling: yarn, factor: 8, original_max_position_embeddings: 512 tokens}\n      sequence_length: 1Ki",
        )
    )
    resolved = load_recipe(path)
    assert resolved.recipe.model.max_position_embeddings == 4096
    assert "original_max_position_embeddings" in str(resolved.origins["model.max_position_embeddings"])


@settings(max_examples=60)
@given(
    size=st.floats(2e6, 4e11),
    vocab=st.sampled_from([4096, 32_768, 151_552]),
    experts=st.sampled_from([None, (8, 2), (64, 6), (160, 8)]),
    tied=st.booleans(),
)
def test_shapes_are_sound(size: float, vocab: int, experts: tuple[int, int] | None, tied: bool) -> None:
    moe = Moe(n_routed_experts=experts[0], num_experts_per_tok=experts[1], moe_intermediate_size=1) if experts else None
    shape = scaling_laws.shape(int(size), Model(vocab_size=vocab, moe=moe, tie_word_embeddings=tied))
    expert_size = shape.pop("moe_intermediate_size", None)
    model = Model.model_validate(
        {
            **shape,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
            "moe": moe and moe.model_copy(update={"moe_intermediate_size": expert_size}),
        }
    )
    assert model.hidden_size == shape["num_attention_heads"] * shape["head_dim"]
    assert shape["num_attention_heads"] % shape["num_key_value_heads"] == 0
    assert model.num_hidden_layers is not None and model.num_hidden_layers >= 2
    assert 20 <= model.hidden_size / model.num_hidden_layers <= 175
    smallest = 2 * vocab * 64 * 2  # embeddings alone may exceed a tiny size
    assert count_parameters(model) == pytest.approx(size, rel=0.35) or size < smallest
    assert count_active_parameters(model) <= count_parameters(model)


@settings(max_examples=60)
@given(tokens=st.integers(10_000, 10**14), length=st.sampled_from([128, 512, 2048, 32_768]))
def test_batches_are_sound(tokens: int, length: int) -> None:
    batch = scaling_laws.batch_tokens(tokens, length)
    sequences = batch // length
    assert batch % length == 0 and sequences & (sequences - 1) == 0
    assert batch <= max(tokens, length)


def test_rates_fall_with_size_and_rise_with_data() -> None:
    assert scaling_laws.peak_learning_rate(10**9, 10**11) < scaling_laws.peak_learning_rate(10**8, 10**11)
    assert scaling_laws.peak_learning_rate(10**9, 10**10) < scaling_laws.peak_learning_rate(10**9, 10**11)
    # the paper's example of 1B parameters outside the embeddings and 100B tokens: 1.79 * 1e9**-0.713 * 1e11**0.307
    assert scaling_laws.peak_learning_rate(10**9, 10**11) == pytest.approx(1.63e-3, rel=0.01)


def test_rate_depends_on_the_optimizer() -> None:
    spectral = load_recipe("dense-125m", ["optimizer.update_scale=spectral", "optimizer.kind=muon"]).recipe.optimizer
    assert spectral.learning_rate == 0.02
    assert spectral.adam_learning_rate != 0.02
    adamw = load_recipe("dense-125m", ["optimizer.kind=adamw"]).recipe.optimizer
    assert adamw.learning_rate == adamw.adam_learning_rate


def test_latent_attention_says_how_wide_heads_are(write: Write) -> None:
    text = (
        BARE.replace(
            "size: 20M",
            "model: {hidden_size: 512, num_hidden_layers: 4, mla: {kv_lora_rank: 64, qk_rope_head_dim: 16, qk_nope_head_dim: 64}}",
        )
        + PHASE
    )
    resolved = load_recipe(write(text=text))
    model = resolved.recipe.model
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (8, 8, 80)
    assert str(resolved.origins["model.head_dim"]) == "derived: mla.qk_nope_head_dim + mla.qk_rope_head_dim"
    assert model.mla is not None and (model.mla.q_lora_rank, model.mla.v_head_dim) == (None, 128)
    with pytest.raises(
        UserError, match=r"model\.head_dim does not combine with model\.mla: it is mla\.qk_nope_head_dim \+ mla\.qk_rope_head_dim"
    ):
        load_recipe(write(text=text), ["model.head_dim=64"])
    with pytest.raises(UserError, match=r"size derives no shape with model\.mla; leave size out"):
        load_recipe(write(text=text), size="20M")


def test_multi_token_prediction_moves_no_derived_value(write: Write) -> None:
    """The layer is gone after training: what follows from the size of the model follows from the model without it."""
    bare, ahead = load_recipe(write(text=BARE)).recipe, load_recipe(write(text=BARE), ["model.mtp={}"]).recipe
    assert ahead.model.mtp is not None and ahead.model.mtp.num_nextn_predict_layers == 1
    assert ahead.model.model_copy(update={"mtp": None}) == bare.model
    assert (ahead.optimizer, ahead.train) == (bare.optimizer, bare.train)
    with pytest.raises(UserError, match=r"mtp_loss_weight: there is no multi-token-prediction layer to weigh"):
        load_recipe(write(text=BARE + PHASE), ["train.phases.general.mtp_loss_weight=0.1"])
    with pytest.raises(UserError, match=r"loss_weight: input should be greater than 0, not 0"):
        load_recipe(write(text=BARE), ["model.mtp={loss_weight: 0}"])
