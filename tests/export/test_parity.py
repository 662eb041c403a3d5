"""The gate: models that are equal pass whatever their rounding, and one wrong number in the last of thirty layers does not.

Twelve with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import DENSE, SPARSE
from random_configs import random_config
from safetensors.torch import load_file, save_file

from lmworks.errors import UserError
from lmworks.export import parity as gate
from lmworks.export.float64 import in_float64
from lmworks.export.huggingface import write_model
from lmworks.export.parity import SLACK, Parity, compare, require_parity
from lmworks.model import Transformer
from lmworks.recipe.families.family import Family
from lmworks.recipe.families.registry import FAMILIES, from_config
from lmworks.recipe.schema.model import Balance, Model, Moe, Rope

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'lmworks[export]'")

_SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 48, "num_hidden_layers": 30, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "max_position_embeddings": "64 tokens", "rms_norm_eps": 1e-5, "rope": Rope(theta=100_000),
}  # fmt: skip
_MOE = Moe(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=1,
           routed_scaling_factor=2.5)  # fmt: skip
_PLAIN = Model(**_SHAPE, tie_word_embeddings=True)
_EXPERTS = Model(
    **_SHAPE | {
        "num_hidden_layers": 12, "use_qk_norm": True, "attention_bias": True, "rope": Rope(theta=100_000, partial_rotary_factor=0.5)},
    moe=_MOE,
)  # fmt: skip
_SOFTMAX = Model(
    **_SHAPE | {"use_qk_norm": True, "num_hidden_layers": 8},
    moe=_MOE.model_copy(update={
        "scoring_func": "softmax", "n_shared_experts": 0, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0,
        "balance": Balance(method="aux")}),
)  # fmt: skip
TOKENS = {"text": [torch.arange(40) % 17], "random": [torch.randint(128, (48,), generator=torch.Generator().manual_seed(3))]}


def random_model(config: Model, scale: float = 0.15) -> Transformer:
    generator = torch.Generator().manual_seed(1)
    model = Transformer(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.3 * noise if "norm" in name else scale * noise)
            if name.endswith("router.bias"):
                tensor.mul_(0.1 if config.moe and config.moe.scoring_func == "sigmoid" else 0.0)
    return model.eval()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Transformer, Path]]:
    known: dict[str, tuple[Transformer, Path]] = {}

    def of(name: str) -> tuple[Transformer, Path]:
        if name not in known:
            config, directory = {"dense": _PLAIN, "experts": _EXPERTS, "softmax": _SOFTMAX}[name], tmp_path_factory.mktemp(name)
            model = random_model(config)
            write_model(model, directory, {"eos_token_id": 0, "pad_token_id": 0}, torch.float32)
            known[name] = model, directory
        return known[name]

    return of


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Change what transformers has loaded."""
    load = gate._load_in_transformers

    def planted(mistake: Callable[[Any], None]) -> None:
        def loaded(directory: Path) -> Any:
            theirs = load(directory)
            with torch.no_grad():
                mistake(theirs)
            return theirs

        monkeypatch.setattr(gate, "_load_in_transformers", loaded)

    return planted


def refused(parity: Parity) -> str:
    with pytest.raises(UserError, match="differs from the trained model: ") as caught:
        require_parity(parity, Path("there"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{dtype}", marks=pytest.mark.slow if dtype == torch.bfloat16 and name != "experts" else ())
        for name in ("dense", "experts", "softmax") for dtype in (torch.float32, torch.bfloat16)
    ],
)  # fmt: skip
def test_equal_models_pass_far_below_the_bound(written: Any, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model, _ = written(name)
    write_model(model, tmp_path, {"eos_token_id": 0, "pad_token_id": 0}, dtype)
    parity = compare(model, tmp_path, TOKENS, dtype)
    require_parity(parity, tmp_path)
    assert not parity.narrow and parity.tokens == 88 and parity.kinds.keys() == {"text", "random"}
    assert parity.relative < parity.bound * 2 / SLACK, "fp64 rounds as much as fp32 does, 2^-29 times"
    assert parity.bound < 1e-10 < 1e-7 < parity.kinds["random"].our_rounding


# Files in bf16 round the weights of norms: those that a class stores less 1 round otherwise. LFM2-MoE normalizes the weights of experts
# with another eps, which only fp64 shows, and calls its table of RoPE otherwise. Each class goes through in fp32 in test_huggingface.py.
ROUNDED = ("LlamaForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM",
           "Lfm2MoeForCausalLM")  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=() if one.norms_plus_one or one.name in ROUNDED else pytest.mark.slow, id=one.model_type)
        for one in FAMILIES.values()
    ],
)
def test_each_class_passes_in_the_type_of_its_files(family: Family, tmp_path: Path) -> None:
    """With norms far from 1: a class that adds 1 to their weights stores other bits than those of the factors."""
    model = random_model(from_config(random_config(family, 0).to_dict() | {"vocab_size": 128}))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("norm.weight"):
                tensor.mul_(3)
    write_model(model, tmp_path, {"eos_token_id": 0, "pad_token_id": 0}, torch.bfloat16)
    parity = compare(model, tmp_path, TOKENS, torch.bfloat16)
    require_parity(parity, tmp_path)


SMALLEST = ("norm element by one bit", "scale of scores 0.01%", "one weight of the head", "row of an expert")
MISTAKES = [
    pytest.param(name, mistake, marks=() if mistake in SMALLEST else pytest.mark.slow)
    for name, mistakes in (("dense", DENSE), ("experts", SPARSE)) for mistake in mistakes
]  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_a_mistake_in_the_last_of_thirty_layers_is_found(written: Any, plant: Any, name: str, mistake: str) -> None:
    model, directory = written(name)
    plant((DENSE if name == "dense" else SPARSE)[mistake])
    parity = compare(model, directory, TOKENS, torch.float32)
    assert parity.relative > 100 * parity.bound
    last = "layer 29 of 30" if name == "dense" else "layer 11 of 12"
    where = "the last norm or the head, behind all layers" if mistake in ("one weight of the head", "tied") else last
    assert f"first in {where}" in refused(parity) and "position" in parity.where


def test_a_looser_gate_would_miss_them(written: Any, plant: Any) -> None:
    """What comparing in fp32 hides: an eps that is ten times too small moves logits less than rounding does."""
    model, directory = written("dense")
    plant(DENSE["norm element by one bit"])
    parity = compare(model, directory, TOKENS, torch.float32)
    assert parity.fp32 < 10 * max(part.our_rounding for part in parity.kinds.values()) and parity.relative > 100 * parity.bound


def test_another_theta_for_all_layers_is_named(written: Any, plant: Any) -> None:
    model, directory = written("dense")
    plant(lambda theirs: theirs.model.rotary_emb.inv_freq.copy_(1.0 / 100_001 ** (torch.arange(0, 8, 2) / 8)))
    assert "its inverse frequency 3 is" in refused(compare(model, directory, TOKENS, torch.float32))


def test_tables_that_differ_in_the_last_bit_are_equal(written: Any, plant: Any) -> None:
    model, directory = written("dense")
    plant(lambda theirs: theirs.model.rotary_emb.inv_freq.mul_(1 + 2**-23))
    require_parity(compare(model, directory, TOKENS, torch.float32), directory)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.3.mlp.experts.5.up_proj.weight"])
def test_a_number_that_no_token_reads_is_found_in_the_file(written: Any, tmp_path: Path, name: str) -> None:
    model, directory = written("experts")
    tensors = load_file(directory / "model.safetensors")
    tensors[name][-1, -1] += 1e-6
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    parity = compare(model, tmp_path, {"text": [torch.arange(1)]}, torch.float32)
    assert parity.unreached_experts == 11 * (8 - 3)
    assert f"tensor {name} of the files is not the model's" in refused(parity)


def test_not_a_number_is_refused(written: Any, plant: Any) -> None:
    model, directory = written("dense")
    plant(lambda theirs: theirs.model.norm.weight.fill_(float("nan")))
    assert "logits by inf of the largest" in refused(compare(model, directory, TOKENS, torch.float32))


def test_an_operation_that_stays_in_fp32_is_noted_and_widens_the_bound(written: Any, plant: Any) -> None:
    def cast(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # as code that is compiled would be
            return (out.float() * 1.0).to(out.dtype)

    model, directory = written("dense")
    plant(lambda theirs: theirs.model.layers[2].mlp.register_forward_hook(cast))
    parity = compare(model, directory, TOKENS, torch.float32)
    rounding = sum(max(getattr(part, side) for part in parity.kinds.values()) for side in ("our_rounding", "their_rounding"))
    assert parity.narrow and parity.bound == pytest.approx(2 * rounding)
    require_parity(parity, directory)
    assert refused(replace(parity, relative=parity.bound * 1.01))


def test_everything_is_in_fp64_and_weights_stay_as_they_are() -> None:
    linear = torch.nn.Linear(4, 4)
    with in_float64() as narrow:
        out = linear(torch.ones(1, 4)).to(torch.float32).float().softmax(-1, dtype=torch.float32)
        assert out.dtype == torch.float64 and torch.zeros(2, dtype=torch.float32).dtype == torch.float64
    assert not narrow and linear.weight.dtype == torch.float32
