"""Adapters of PEFT on some modules or layers only: what `lora.targets` has to be is said, and then they are read."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Lmworks
from safetensors.torch import load_file, save_file

from base_models import write_model, write_tokenizer
from lmworks.errors import UserError
from lmworks.export.peft import read_peft
from lmworks.model.lora import attach
from lmworks.recipe.families.registry import family_of
from lmworks.recipe.schema.model import Lora, is_adapter
from lmworks.recipe.weights import find_weights
from lmworks.weights.huggingface import read_model


def _adapter(folder: Path, **options: Any) -> Path:
    """An adapter of PEFT for the model in `folder`, none of whose numbers is zero."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter)
    adapted.save_pretrained(folder / "adapter")
    return folder / "adapter"


def _read(folder: Path, adapter: Path, targets: tuple[str, ...]) -> dict[str, torch.Tensor]:
    model, lora = read_model(folder), Lora(rank=4, alpha=8, targets=targets)
    attach(model, lora)
    state = {name: tensor for name, tensor in model.state_dict().items() if is_adapter(name)}
    read_peft(adapter, state, model.config, family_of(model.config), lora, None)
    return state


def test_the_command_that_merges_a_published_adapter_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    import peft
    import transformers

    base = tmp_path / "base"
    write_tokenizer(base, "qwen")
    write_model(base, 400)
    adapter = _adapter(base, target_modules=["q_proj", "v_proj"]).rename(tmp_path / "an adapter")
    lmworks = Lmworks(monkeypatch, capfd)
    said = {lmworks(*command, adapter).error for command in (("chat",), ("speed",), ("deploy", "--cpu", "--out", tmp_path / "d"))}
    said.add(lmworks("quantize", adapter, "--to", "gguf-q8_0").error)
    assert all(f"{adapter} is a PEFT adapter of {base}, and no whole model; continue it" in one for one in said), said
    install, _, command = str(min(said)).partition("merge the two: ")[2].partition(" && ")
    assert install == "pip install peft"
    done = subprocess.run([sys.executable, *shlex.split(command)[1:]], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    merged = find_weights(tmp_path / "an adapter-merged").path
    ids = torch.arange(12)[None]
    expected = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        torch.testing.assert_close(read_model(merged).eval()(ids).float(), expected.eval()(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, ("query", "value")),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}, ("1.attention.query", "1.attention.value")),
        ({"target_modules": r".*\.0\.mlp\.down_proj"}, ("0.ffn.down",)),
    ],
)
def test_the_targets_that_are_named_are_those_of_the_adapter(tmp_path: Path, options: dict[str, Any], targets: tuple[str, ...]) -> None:
    write_model(tmp_path, 64)
    adapter = _adapter(tmp_path, **options)
    with pytest.raises(UserError, match=r"has adapters of other matrices than lora\.targets names; set lora\.targets to") as refused:
        _read(tmp_path, adapter, ("all-linear",))
    named = re.search(r"\[(.*)\]$", str(refused.value))
    assert named and tuple(named[1].split(", ")) == targets
    assert all(bool(tensor.all()) for tensor in _read(tmp_path, adapter, targets).values())


def test_half_an_adapter_is_no_target(tmp_path: Path) -> None:
    write_model(tmp_path, 64)
    file = _adapter(tmp_path, target_modules=["q_proj", "v_proj"]) / "adapter_model.safetensors"
    stored = load_file(file)
    save_file({name: value for name, value in stored.items() if "v_proj.lora_B" not in name}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"to its own: \[query\]$"):
        _read(tmp_path, file.parent, ("all-linear",))


def test_an_adapter_of_the_embedding_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, 64)
    adapter = _adapter(tmp_path, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(UserError, match=r"has the tensor .*embed_tokens.*, which is no adapter of a matrix that lora.targets can name"):
        _read(tmp_path, adapter, ("query",))
