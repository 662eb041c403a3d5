"""Adapters for the class of the base model, where the simplest class that computes the same has other matrices; against the PEFT library.

Tolerance of logits: as in test_huggingface.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_huggingface import CASES, _load, close, ours, relative
from test_packed_adapters import TOKENS, adapted, drawn, equal_in_peft, peft, written

from late import require_package
from lmworks.errors import UserError
from lmworks.export.export import _base_name
from lmworks.export.huggingface import write_model
from lmworks.export.peft import read_peft, why_not_loaded
from lmworks.io.files import write_json
from lmworks.model import Transformer
from lmworks.model.lora import attach, merge
from lmworks.recipe.families.registry import FAMILIES, family_of
from lmworks.recipe.schema.model import Lora, is_adapter
from lmworks.weights.huggingface import read_model

require_package("peft", "no peft: pip install peft")
PHI = FAMILIES["Phi3ForCausalLM"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Phi-4 as it is published, whose model is also Llama's."""
    import transformers

    torch.manual_seed(3)
    config = transformers.Phi3Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("targets", [("all-linear",), ("query", "value", "mlp"), ("key", "layers.1.ffn.up")])
def test_adapters_of_a_fused_base_are_written_for_it(base: Path, tmp_path: Path, targets: tuple[str, ...]) -> None:
    model, lora = read_model(base), Lora(rank=3, alpha=6.0, targets=targets)
    assert family_of(model.config).name == "LlamaForCausalLM"
    state = drawn(model, lora)
    folder = written(state, lora, tmp_path, model.config, PHI)
    peer = peft.PeftModel.from_pretrained(_load(base), folder)
    again = {name: torch.zeros_like(value) for name, value in state.items()}
    read_peft(folder, again, model.config, PHI, lora, "abc")
    assert all(torch.equal(again[name], value) for name, value in state.items())
    with torch.no_grad():
        assert close(peer(TOKENS).logits, merge(model)(TOKENS), model, TOKENS, peer)
        assert relative(peer(TOKENS).logits, _load(base)(TOKENS).logits) > 0.1, "the adapter changes the answers"


def test_an_adapter_that_peft_made_for_a_fused_base_is_read(base: Path, tmp_path: Path) -> None:
    options = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["qkv_proj", "o_proj", "gate_up_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    torch.manual_seed(0)
    peer = peft.get_peft_model(_load(base), options).eval()
    peer.save_pretrained(tmp_path / "peft")
    model, lora = read_model(base), Lora(rank=4, alpha=8.0, targets=("attention", "gate", "up"))
    attach(model, lora)
    state = {name: value for name, value in model.state_dict().items() if is_adapter(name)}
    read_peft(tmp_path / "peft", state, model.config, PHI, lora, None)
    with torch.no_grad():
        assert close(model(TOKENS), peer(TOKENS).logits, model, TOKENS, peer)


@pytest.mark.parametrize(
    ("change", "read"),
    [
        *(({"init_lora_weights": value}, True) for value in (True, False, "gaussian", "orthogonal", "eva")),
        *(({"init_lora_weights": value}, False)
          for value in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica", None)),
        *(({name: value}, False) for name, value in (
            ("alora_invocation_tokens", [290]), ("use_dora", True), ("lora_bias", True), ("bias", "all"), ("modules_to_save", ["lm_head"]),
            ("layer_replication", [[0, 2], [1, 2]]), ("trainable_token_indices", [5]), ("use_qalora", True), ("kasa_config", {"beta": 1}),
            ("fan_in_fan_out", True), ("a_key_of_tomorrow", 1),
        )),
        *(({name: value}, True) for name, value in (
            ("a_key_of_tomorrow", None), ("a_key_of_tomorrow", False), ("peft_version", "0.30"), ("lora_dropout", 0.1),
            ("exclude_modules", ["x"]), ("target_parameters", ["q_proj.weight"]),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_only_options_that_add_b_a_to_the_base_are_read(tmp_path: Path, change: dict[str, Any], read: bool) -> None:
    lora, config = Lora(rank=2, alpha=4.0, targets=("query",)), CASES["llama"]
    _, state = adapted(lora, config)
    folder = written(state, lora, tmp_path, config)
    defaults = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM", inference_mode=True).to_dict()
    given = {name: sorted(value) if isinstance(value, set) else value for name, value in defaults.items()} | change
    write_json(folder / "adapter_config.json", given)
    again = {name: torch.zeros_like(value) for name, value in state.items()}
    if not read:
        (name,) = change
        with pytest.raises(UserError, match=f"has {name} .*, which lmworks does not support"):
            read_peft(folder, again, config, family_of(config), lora, "abc")
        return
    read_peft(folder, again, config, family_of(config), lora, "abc")
    assert all(torch.equal(again[name], value) for name, value in state.items())


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h", "granitemoehybrid"])
@pytest.mark.parametrize("targets", [("all-linear",), ("query", "key", "value", "input", "mlp")])
def test_it_is_known_which_adapters_peft_does_not_load(tmp_path: Path, name: str, targets: tuple[str, ...]) -> None:
    lora, config = Lora(rank=2, alpha=4.0, targets=targets), CASES[name]
    _, state = adapted(lora, config)
    folder, why = written(state, lora, tmp_path, config), why_not_loaded(state, config, family_of(config), lora)
    write_model(ours(config), tmp_path / "base", {}, torch.float32)
    assert (why is not None) == (name != "granitemoehybrid" and targets == ("all-linear",))
    if why is None:
        peft.PeftModel.from_pretrained(_load(tmp_path / "base"), folder)
        return
    assert "PEFT does not load adapters of out_proj of " in why and "projection; name other targets" in why
    with pytest.raises(ValueError, match="out_proj"):
        peft.PeftModel.from_pretrained(_load(tmp_path / "base"), folder)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_a_group_may_have_matrices_smaller_than_the_rank(tmp_path: Path, name: str) -> None:
    lora, config = Lora(rank=8, alpha=8.0, targets=("all-linear",)), CASES[name].model_copy(update={"moe": None})
    with torch.device("meta"):
        smallest = min(min(weight.shape) for key, weight in Transformer(config).state_dict().items() if ".beta." in key)
    assert smallest < lora.rank
    equal_in_peft(lora, config, tmp_path)
    for targets in (("attention.beta",), ("all-linear", "beta")):
        with pytest.raises(UserError, match=rf"rank 8 is larger than the matrix layers\.0\.attention\.beta .* use at most {smallest}"):
            adapted(lora.model_copy(update={"targets": targets}), config)
    with pytest.raises(UserError, match=r"lora\.rank 999 is larger than the matrix layers\."):
        adapted(lora.model_copy(update={"rank": 999}), config)


@pytest.mark.parametrize(("trains_base", "named"), [(False, "models/phi"), (True, "mine")])
def test_the_base_model_of_adapters_is_what_they_were_trained_on(tmp_path: Path, trains_base: bool, named: str) -> None:
    recipe: Any = SimpleNamespace(name="mine", start_from="models/phi", trains_base=trains_base)
    assert _base_name(recipe, tmp_path / "run" / "checkpoints" / "step-00000000") == named


def test_the_known_targets_are_those_of_the_model() -> None:
    with pytest.raises(UserError, match=r"'experts' matches no matrix of this model; known are attention, mlp, all-linear, attention\.key"):
        adapted(Lora(targets=("experts",)), CASES["llama"])
