"""What a recipe's loading accepts can be trained: generated recipes, each for one step of each of its phases.

Keys of the model, the optimizer and the phases get values that a user might try, the odd and the extreme ones too. A recipe is either
refused with one line that names a key, or every number that is derived from it works: positions, schedules, batches, the update.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lmworks.errors import UserError
from lmworks.recipe.checks import phase_refusals
from lmworks.recipe.load import load_recipe
from lmworks.recipe.parameters import count_parameters
from lmworks.recipe.phases import in_force
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.timeline import Schedules, Timeline
from lmworks.shards.batch import Batch
from lmworks.train.build import build_model, with_optimizer
from lmworks.train.step import micro_batch_of, train_step

MOST = 1_000_000  # parameters
TREE: dict[str, Any] = {
    "name": "small", "threads": 1, "seed": 3,
    "corpus": {"sources": [{"name": "a", "kind": "text", "path": "a", "license": "MIT"}]},
    "tokenizer": {"vocab_size": 512},
    "model": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
    "train": {
        "precision": "fp32", "compile": False,
        "phases": [
            {"name": "one", "tokens": "2Ki", "mixture": {"a": 1.0}, "sequence_length": "32 tokens", "global_batch_tokens": "128 tokens"},
            {"name": "two", "tokens": "1Ki", "mixture": {"a": 1.0}, "sequence_length": "64 tokens", "global_batch_tokens": "128 tokens"},
        ],
    },
}  # fmt: skip
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
LENGTHS = ["1 tokens", "2 tokens", "8 tokens", "32 tokens", "64 tokens", "128 tokens", "1Ki", "1e12 tokens"]
SPANS = ["0%", "1%", "10%", "50%", "100%", "200%", "0 steps", "1 steps", "3 steps", "16 steps", "1e9 steps", "1 tokens", "700 tokens"]
NUMBERS = [-1.0, 0.0, 5e-324, 1e-38, 1e-30, 1e-8, 0.01, 0.5, 0.9, 0.999, 1.0, 1.001, 1.5, 2.0, 32.0, 1e4, 1e8, 1e30, 3e38, 1e39, 1e300]
COUNTS = [-1, 0, 1, 2, 3, 4, 5, 6, 8, 16, 31, 64]
ROPE = {
    "theta": [0.5, 1.0, 1.01, 2.0, 1e4, 1e6, 1e20, 1e38, 1e300], "scaling": ["none", "linear", "ntk", "yarn", "llama3"],
    "factor": [0.5, 1.0, 1.5, 8.0, 1e6, 1e30], "original_max_position_embeddings": LENGTHS,
}  # fmt: skip
KEYS: dict[str, list[Any]] = {
    "model.hidden_size": COUNTS, "model.num_hidden_layers": [0, 1, 2, 3, 4], "model.num_attention_heads": COUNTS,
    "model.num_key_value_heads": COUNTS, "model.head_dim": COUNTS, "model.intermediate_size": COUNTS,
    **{f"model.rope.{key}": values for key, values in ROPE.items()},
    "model.rope.partial_rotary_factor": [0.0, 0.01, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0], "model.rope.beta_fast": NUMBERS,
    "model.rope.beta_slow": NUMBERS, "model.rope.low_freq_factor": NUMBERS, "model.rope.high_freq_factor": NUMBERS,
    "model.use_qk_norm": [True], "model.qk_norm_over": ["head", "all_heads"], "model.attention_bias": [True],
    "model.norm_position": ["pre", "post", "both"], "model.no_rope_layer_interval": COUNTS, "model.sliding_window": LENGTHS,
    "model.layer_types": [["sliding_attention"], ["full_attention", "sliding_attention"]], "model.tie_word_embeddings": [True],
    "model.rms_norm_eps": NUMBERS, "model.initializer_range": [1e-30, 0.02, 0.5, 1e30], "model.final_logit_softcapping": NUMBERS,
    "model.z_loss_weight": NUMBERS[:12], "model.residual_dropout": NUMBERS[:12], "model.attention_dropout": NUMBERS[:12],
    "model.moe": [MOE], "model.mla": [MLA], "model.mtp": [{"num_nextn_predict_layers": 1}, {"num_nextn_predict_layers": 3}],
    **{f"model.moe.{key}": COUNTS for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
                                              "n_group", "topk_group", "first_k_dense_replace", "temperature_steps")},
    "model.moe.temperature": NUMBERS, "model.moe.routed_scaling_factor": NUMBERS, "model.moe.norm_topk_prob": [True, False],
    "model.moe.scoring_func": ["sigmoid", "softmax"], "model.moe.balance.method": ["bias", "aux", "sinkhorn", "none"],
    "model.moe.balance.bias_update_rate": NUMBERS, "model.moe.balance.bias_clamp": NUMBERS,
    "model.moe.balance.sequence_aux_loss_weight": NUMBERS, "model.moe.balance.aux_loss_weight": NUMBERS,
    **{f"model.mla.{key}": COUNTS for key in MLA},
    "optimizer.kind": ["adamw", "muon"], "optimizer.learning_rate": NUMBERS, "optimizer.adam_learning_rate": NUMBERS,
    "optimizer.betas": [[0.0, 0.0], [0.9, 0.95], [0.999, 0.999], [1.0, 0.9]], "optimizer.eps": NUMBERS, "optimizer.weight_decay": NUMBERS,
    "optimizer.newton_schulz_steps": [*COUNTS, 10**9], "optimizer.momentum": NUMBERS, "optimizer.max_grad_norm": NUMBERS,
    "optimizer.ema_decay": NUMBERS, "optimizer.lr_scales": [{"embedding": 100.0}, {"head": 1e-9, "vectors": 30.0}, {"matrices": 7.0}],
    **{f"train.phases.{number}.{key}": values for number in (0, 1) for key, values in {
        "tokens": [*LENGTHS, "2Ki", "500 tokens"], "sequence_length": LENGTHS, "global_batch_tokens": [*LENGTHS, "96 tokens"],
        "learning_rate_scale": NUMBERS, "lr_schedule.kind": ["constant", "cosine", "linear", "wsd", "multistep"],
        "lr_schedule.warmup": SPANS, "lr_schedule.decay": SPANS, "lr_schedule.min_lr_ratio": NUMBERS,
        "lr_schedule.milestone_fractions": [[], [0.5], [0.5, 0.9], [0.9, 0.5], [2.0]], "lr_schedule.gamma": NUMBERS,
        "sliding_window": ["full", *LENGTHS], "no_rope_layer_interval": COUNTS, "mask_documents": [False], "lr_schedule.phases": COUNTS,
        "balance.method": ["bias", "aux", "sinkhorn", "none"], "balance.aux_loss_weight": NUMBERS, "rope.partial_rotary_factor": NUMBERS,
        "batch_ramp": [{"start_tokens": "32 tokens", "over": span} for span in SPANS], "bias_update_rate": NUMBERS,
        "mtp_loss_weight": NUMBERS,
        **{f"rope.{key}": values for key, values in ROPE.items()},
    }.items()},
    "train.micro_batch_sequences": COUNTS, "train.logit_chunk_tokens": LENGTHS,
    "train.activation_checkpointing": ["none", "selective", "full", "50%"],
    "stability.spike.window_steps": COUNTS, "stability.spike.rollback_after": SPANS,
}  # fmt: skip


def plant(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put a value at a path; what stands in its way is made."""
    node: Any = tree
    *above, last = path.split(".")
    for key in above:
        node = node[int(key)] if isinstance(node, list) else node.setdefault(key, copy.deepcopy({"moe": MOE, "mla": MLA}.get(key, {})))
    node[last] = copy.deepcopy(value)


def generate(draw: Random) -> dict[str, Any]:
    tree = copy.deepcopy(TREE)
    for path in draw.sample(list(KEYS), draw.choice([1, 1, 2, 3, 5])):
        plant(tree, path, draw.choice(KEYS[path]))
    return tree


def accepted(path: Path) -> Recipe:
    """What `lmworks show` does before it prints."""
    recipe = load_recipe(path).recipe
    for refusal in phase_refusals(recipe):
        raise refusal
    return recipe


def train_a_step_of_each_phase(recipe: Recipe) -> None:
    """Every derived number of a whole run, and one update with the settings of each phase."""
    phases = recipe.train.phases
    timeline = Timeline(phases)
    schedules = Schedules(phases, [phase.steps for phase in timeline.phases], timeline.tokens_before)
    model, optimizer = with_optimizer(recipe, build_model(recipe))
    model.train()
    for index, phase in enumerate(phases):
        first, last = timeline.first_step(index), timeline.first_step(index + 1) - 1
        for step in {first, (first + last) // 2, last}:
            assert 0 <= schedules.lr_factor(step) < math.inf
        length, config = int(phase.sequence_length), in_force(recipe)[index]
        rows = min(2, timeline.sequences(first)[1])
        tokens = np.random.default_rng(index).integers(0, recipe.model.vocab_size, (rows, length), dtype=np.int32)
        batch = Batch(tokens, np.roll(tokens, -1, 1), np.arange(0, rows * length + 1, length, dtype=np.int32), index, first)
        model.configure(config)
        result = train_step(
            model, optimizer, batch, micro_batch_size=micro_batch_of(recipe, length), lr_factor=schedules.lr_factor(first),
            max_grad_norm=recipe.optimizer.max_grad_norm, bias_update_rate=config.moe.balance.bias_update_rate if config.moe else 0.0,
        )  # fmt: skip
        assert math.isfinite(float(result.loss)), "the loss of the first step"
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values()), "the weights"


def run(folder: Path, seeds: range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        tree = generate(Random(seed))
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        try:
            recipe = accepted(path)
        except UserError:
            outcomes["refused"] += 1
            continue
        longest = max(int(phase.sequence_length) for phase in recipe.train.phases)
        if count_parameters(recipe.model) > MOST or longest > 2048:
            outcomes["too large"] += 1
            continue
        try:
            train_a_step_of_each_phase(recipe)
        except Exception as error:
            pytest.fail(f"seed {seed}: accepted, but {type(error).__name__}: {error}\n{json.dumps(tree)}")
        outcomes["trained"] += 1
    return outcomes


def test_what_is_accepted_trains_a_step_of_each_phase(tmp_path: Path) -> None:
    found = run(tmp_path, range(80))
    assert found["trained"] > 25 and found["refused"] > 10, found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_is_accepted_trains_a_step_of_each_phase_a_thousand_times(tmp_path: Path) -> None:
    found = run(tmp_path, range(1000, 4000))
    assert found["trained"] > 800, found


@pytest.mark.parametrize(("path", "value", "said"), [
    ("model.moe.routed_scaling_factor", 1e39, r"model\.moe\.routed_scaling_factor: 1e\+39 cannot be .* more than 3\.403e\+38"),
    ("model.moe.balance.bias_clamp", 1e300, r"model\.moe\.balance\.bias_clamp: 1e\+300 cannot be computed with in fp32"),
    ("optimizer.eps", 5e-324, r"optimizer\.eps: 4\.94066e-324 cannot be .* nearer to 0 than 1\.175e-38; raise it, or set it to 0"),
    ("train.phases.1.balance", {"bias_clamp": 1e39}, r"train\.phases\.(1|two)\.balance\.bias_clamp: 1e\+39 cannot"),
])  # fmt: skip
def test_a_number_that_fp32_does_not_have_is_refused_with_its_key(tmp_path: Path, path: str, value: Any, said: str) -> None:
    """It would be infinite or 0 where it meets a tensor, and the first step not a number."""
    tree = copy.deepcopy(TREE)
    plant(tree, "model.moe", MOE)
    plant(tree, path, value)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(UserError, match=said) as caught:
        accepted(tmp_path / "recipe.yaml")
    assert "\n" not in str(caught.value)
