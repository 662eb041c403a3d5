"""Adapters of runs that start from other classes than Llama: they fit the class of the base model, or it is said that PEFT refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from command import Lmworks
from test_start_tuning import ROWS, chats, write_recipe  # noqa: F401

from base_models import write_tokenizer
from late import Late, require_package
from lmworks.io.files import read_json
from lmworks.recipe.load import load_recipe
from lmworks.run.refusals import Before, _adapters

require_package("peft", "no peft: pip install peft")
peft: Any = Late("peft")


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _recipe(folder: Path, base: Path, chats: Path) -> tuple[Path, dict[str, Any]]:  # noqa: F811
    path = write_recipe(folder, base, chats)
    recipe = yaml.safe_load(path.read_text())
    recipe["tune"] |= {"lora": {"rank": 4, "alpha": 16.0}, "tokens": "1Ki", "learning_rate": 0.01}
    path.write_text(yaml.safe_dump(recipe))
    return path, recipe


def test_a_run_from_phi_exports_and_continues_adapters_of_phi(lmworks: Lmworks, chats: Path, tmp_path: Path) -> None:  # noqa: F811
    import transformers

    base = tmp_path / "base"
    write_tokenizer(base, "qwen")
    torch.manual_seed(3)
    config = transformers.Phi3Config(
        vocab_size=ROWS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.Phi3ForCausalLM(config).save_pretrained(base)
    path, recipe = _recipe(tmp_path, base, chats)
    done = lmworks("run", path)
    assert done.code == 0, done.err
    export = tmp_path / "run" / "export"
    assert read_json(export / "huggingface" / "config.json")["architectures"] == ["LlamaForCausalLM"]
    tokens = torch.arange(1, 60)[None]
    with torch.no_grad():
        before, merged = (_load(folder)(tokens).logits for folder in (base, export / "huggingface"))
        alone = peft.PeftModel.from_pretrained(_load(base), export / "peft").eval()(tokens).logits
    assert (alone - merged).abs().max() < 1e-4 < 1e-2 < (before - merged).abs().max()
    recipe["tune"]["lora"]["init_from"] = str(export / "peft")
    path.write_text(yaml.safe_dump(recipe | {"run_dir": str(tmp_path / "next")}))
    done = lmworks("tune", path)
    assert done.code == 0, done.err


def test_what_peft_does_not_load_is_said_before_training_and_in_the_export(
    lmworks: Lmworks, chats: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    import transformers

    base = tmp_path / "base"
    write_tokenizer(base, "qwen")
    torch.manual_seed(3)
    config = transformers.FalconH1Config(
        vocab_size=ROWS, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, head_dim=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.FalconH1ForCausalLM(config).save_pretrained(base)
    path, recipe = _recipe(tmp_path, base, chats)
    done = lmworks("run", path)
    assert done.code == 0, done.err
    said = "PEFT does not load adapters of out_proj of FalconH1ForCausalLM, which lora.targets includes as layers.0."
    text = " ".join(done.out.split())
    assert f"warning: tune.lora: {said}" in text.partition("Tuning")[0] and "equal, bit for bit; PEFT does not load" in text
    assert read_json(tmp_path / "run" / "export" / "peft" / "parity.json")["not_in_peft"].startswith(said)
    recipe["tune"]["lora"]["targets"] = ["query", "mlp"]
    path.write_text(yaml.safe_dump(recipe))
    before = Before(load_recipe(path).recipe, tmp_path / "run", tmp_path)
    assert not _adapters("tune")(before) and not before.notes
