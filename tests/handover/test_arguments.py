"""The arguments that slime gets: what each property of a model must bring, and what slime's own parser has (`tests/recorded`)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from lmworks.deploy.source import Source
from lmworks.errors import UserError
from lmworks.handover import slime
from lmworks.handover.megatron import CLASSES, model_arguments
from lmworks.handover.prompts import RM_TYPES, Prompts
from lmworks.recipe.families.family import TRAITS
from lmworks.recipe.families.registry import FAMILIES, from_config
from lmworks.recipe.schema.model import Model, Rope
from recorded.facts import facts

sys.path.insert(0, str(Path(__file__).parents[1] / "export"))
from random_configs import random_config

SLIME = facts("slime-624b824a898a")  # with the Megatron-LM that its Dockerfile pins and patches

ALWAYS = {
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--group-query-attention", "--num-query-groups",
    "--kv-channels", "--vocab-size", "--max-position-embeddings", "--seq-length", "--normalization", "--norm-epsilon", "--swiglu",
    "--disable-bias-linear", "--position-embedding-type", "--rotary-base", "--rotary-percent", "--attention-dropout", "--hidden-dropout",
    "--attention-softmax-in-fp32",
}  # fmt: skip
BY_TRAIT: dict[str, set[str]] = {  # what a model with the trait must bring, and one without it must not
    "experts": {
        "--num-experts", "--moe-layer-freq", "--moe-ffn-hidden-size", "--moe-router-topk", "--moe-router-score-function",
        "--moe-router-dtype", "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-token-dispatcher-type",
        "--moe-grouped-gemm", "--moe-permute-fusion",
    },
    "shared experts": {"--moe-shared-expert-intermediate-size"}, "expert groups": {"--moe-router-num-groups", "--moe-router-group-topk"},
    "QK norm": {"--qk-layernorm"}, "biases": {"--add-qkv-bias"},
}  # fmt: skip
SIGMOID = {  # of sigmoid gates, whose selection bias the class always has
    "--moe-router-pre-softmax", "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "--moe-router-topk-scaling-factor",
}  # fmt: skip
BY_VALUE = {"softmax gates", "selection bias", "routed scale", "partial RoPE"}  # an argument that is there anyway has another value
REFUSED = {"sliding window", "full-attention layers beside it"}


PECULIAR: list[tuple[Callable[[Model], bool], str]] = [  # what Megatron does not compute
    (lambda model: model.sliding_window is not None, "window"), (lambda model: model.rope.scaling not in ("none", "linear"), "scaling"),
    (lambda model: model.moe is not None and not model.moe.norm_topk_prob, "weights that are not normalized"),
    (lambda model: model.moe is not None and model.moe.num_experts_per_tok == 1, "one expert"),
]  # fmt: skip


def plain(model: Model) -> Model:
    """The model without what Megatron does not compute."""
    old = model.rope
    rope = old if old.scaling in ("none", "linear") else Rope(theta=old.theta, partial_rotary_factor=old.partial_rotary_factor)
    moe = model.moe and model.moe.model_copy(update={"norm_topk_prob": True, "num_experts_per_tok": 2})
    return model.model_copy(update={"sliding_window": None, "layer_types": [], "rope": rope, "moe": moe})


def check(model: Model, family: str) -> dict[str, str | None]:
    """The arguments, after a look at each trait."""
    found = model_arguments(model, family)
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    wanted = set(ALWAYS)
    for trait, flags in BY_TRAIT.items():
        wanted |= flags if TRAITS[trait].found(model) else set()
    if model.moe is not None and model.moe.scoring_func == "sigmoid":
        wanted |= SIGMOID
    if not model.tie_word_embeddings:
        wanted.add("--untie-embeddings-and-output-weights")
    if model.mtp is not None:
        wanted.add("--mtp-num-layers")
    if model.rope.scaling == "linear":
        wanted.add("--rotary-seq-len-interpolation-factor")
    assert set(names) == wanted, set(names) ^ wanted
    for one in found:
        assert (wrong := SLIME.wrong(one.name, one.value)) is None, wrong
    values = {one.name: one.value for one in found}
    assert float(values["--rotary-percent"] or 0) == model.rope.partial_rotary_factor
    assert float(values["--rotary-base"] or 0) == model.rope.theta
    assert int(values["--seq-length"] or 0) <= int(values["--max-position-embeddings"] or 0)  # Megatron refuses a longer one
    assert values["--attention-dropout"] == values["--hidden-dropout"] == "0"
    if model.moe is not None:
        assert values["--moe-router-score-function"] == model.moe.scoring_func
        parts = re.findall(r"\[(\d)\]\*(\d+)", values["--moe-layer-freq"] or "")
        pattern = [int(sparse) for sparse, times in parts for _ in range(int(times))]
        assert pattern == [int(layer >= model.moe.first_k_dense_replace) for layer in range(model.num_hidden_layers or 0)]
        assert float(values.get("--moe-router-topk-scaling-factor") or 1) == model.moe.routed_scaling_factor
    return values


@pytest.mark.parametrize("name", CLASSES)
def test_every_trait_of_every_class_brings_its_arguments(name: str) -> None:
    family = FAMILIES[name]
    assert family.requires | family.allows <= BY_TRAIT.keys() | BY_VALUE | REFUSED
    for seed in range(12):
        model = from_config(random_config(family, seed).to_dict())
        wrong = [what for found, what in PECULIAR if found(model)]
        if wrong:
            with pytest.raises(UserError, match="which slime's Megatron computes differently or not at all"):
                model_arguments(model, name)
        check(plain(model), name)


def test_every_class_that_is_not_slimes_is_refused() -> None:
    for family in FAMILIES.values():
        if family.name not in CLASSES:
            with pytest.raises(UserError, match=f"no class that equals {family.name}"):
                model_arguments(from_config(random_config(family, 0).to_dict()), family.name)


def prompts(*kinds: str) -> Prompts:
    rows = [{"prompt": [{"role": "user", "content": "a"}], "label": "1", "metadata": {"rm_type": kind}} for kind in kinds]
    return Prompts(rows, 3)


def run_words(folder: Path, *kinds: str, **options: Any) -> dict[str, str | None]:
    """The arguments of train.py for rows with these rewards, each of which slime's parser takes."""
    model = Model(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                  intermediate_size=128, max_position_embeddings="512 tokens")  # fmt: skip
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    source = Source("m", folder, None, model, "LlamaForCausalLM", 1, 0, 0, "", 16, "float32", "", 512)
    found = [one for group in slime.run_arguments(source, prompts(*kinds), kinds[0], 64, **options).values() for one in group]
    for one in found:
        for value in [None] if one.value is None else one.value.split(" "):
            assert (wrong := SLIME.wrong(one.name, value)) is None, wrong
    return {one.name: one.value for one in found}


@pytest.mark.parametrize("kind", RM_TYPES)
def test_slime_takes_every_argument_of_the_run(tmp_path: Path, kind: str) -> None:
    words = run_words(tmp_path, kind, **({"rm_url": "http://rewards:8000/score"} if kind == "remote_rm" else {}))
    assert words["--num-rollout"] == "1" and words["--rm-type"] == kind  # without epochs or rollouts slime's parser ends the run
    assert words.get("--reward-key") == ("score" if kind == "dapo" else None)
    assert words.get("--rm-url") == ("http://rewards:8000/score" if kind == "remote_rm" else None)
    assert words["--num-steps-per-rollout"] == "1" and words["--rollout-stop-token-ids"] == "1 2"
    assert (words["--rollout-max-prompt-len"], words["--rollout-max-response-len"]) == ("448", "64")  # together the context of 512


def test_enough_prompts_are_cut_into_steps(tmp_path: Path) -> None:
    words = run_words(tmp_path, *["math"] * 200, epochs=3)
    assert (words["--rollout-batch-size"], words["--num-steps-per-rollout"]) == ("128", "4")


@pytest.mark.parametrize(("rows", "epochs", "rollouts"), [(5, 1, 1), (5, 3, 3), (128, 2, 2), (129, 1, 2), (255, 1, 2), (200, 3, 5)])
def test_no_prompt_is_left_out(tmp_path: Path, rows: int, epochs: int, rollouts: int) -> None:
    """slime's epochs are of whole rollouts: 255 prompts in rollouts of 128 would be 128 prompts."""
    words = run_words(tmp_path, *["math"] * rows, epochs=epochs)
    assert words["--num-rollout"] == str(rollouts) and "--num-epoch" not in words
    assert rollouts * int(words["--rollout-batch-size"] or 0) >= rows * epochs


def test_rewards_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    for kinds, options, message in (
        (("dapo", "math"), {}, "the rewards dapo and math cannot be mixed"),
        (("math", "remote_rm"), {}, "say where it is with --rm-url URL"),
        (("math",), {"rm_url": "http://a"}, "which no row has"),
    ):
        with pytest.raises(UserError, match=message):
            run_words(tmp_path, *kinds, **options)


def test_slime_takes_the_arguments_of_the_script() -> None:
    """Those that are written out in run.sh, for the converter and for train.py."""
    script = resources.files("lmworks.handover").joinpath("run.sh.jinja").read_text()
    names = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", script)) - {"--nproc-per-node"}  # of torchrun
    assert {"--hf-checkpoint", "--ref-load", "--actor-num-gpus-per-node"} <= names
    assert names <= SLIME.options.keys(), names - SLIME.options.keys()
