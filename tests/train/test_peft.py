"""Low-rank adapters against the PEFT library: the same training, and an adapter of ours that it loads and merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_lora_run import based, tune  # noqa: F401
from torch import Tensor

from lmworks.export.export import find_adapter, write_adapter
from lmworks.export.huggingface import write_model
from lmworks.export.peft import their_adapters
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.model.lora import attach
from lmworks.recipe.families.registry import family_of
from lmworks.recipe.schema.model import Lora, Model, is_adapter
from lmworks.weights.run_models import load_model
from small_config import small_config
from tiny_run import Tiny

pytestmark = pytest.mark.slow
peft = pytest.importorskip("peft", minversion="0.19")
MODEL = Model.model_validate(small_config())
IDS = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(3))
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def base_in_transformers(model: Transformer, directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    write_model(model, directory, {}, torch.float32)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def three_steps(model: Any, trained: dict[str, Tensor], logits: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of three steps of AdamW, and the gradients of the last."""
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(model(IDS[:, :-1])).flatten(0, 1).float(), IDS[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.grad for name, value in trained.items() if value.grad is not None}


@pytest.mark.parametrize("rslora", [False, True])
def test_trains_as_peft_does(tmp_path: Path, rslora: bool) -> None:
    lora = Lora(rank=4, alpha=8.0, rslora=rslora)
    model = initialize(Transformer(MODEL), seed=1)
    theirs = base_in_transformers(model, tmp_path)
    attach(model, lora)
    mine = {name: value for name, value in model.named_parameters() if is_adapter(name)}
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in mine.values():  # B too, so that A has gradients from the first step
            value.copy_(torch.randn(value.shape, generator=draw) * 0.1)

    def named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        pairs = their_adapters({name: value.detach() for name, value in tensors.items()}, MODEL, family_of(MODEL))
        return {name.replace(".weight", ".default.weight"): value.clone() for name, value in pairs}

    options = peft.LoraConfig(r=4, lora_alpha=8.0, use_rslora=rslora, target_modules=list(LINEAR), task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(theirs, options)
    others = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for name, value in named(mine).items():
            others[name].copy_(value)
    losses, gradients = three_steps(model, mine, lambda found: found)
    their_losses, their_gradients = three_steps(adapted, others, lambda found: found.logits)
    assert others.keys() == named(mine).keys() and len(others) == 2 * 7 * MODEL.num_hidden_layers  # type: ignore[operator]
    assert losses == pytest.approx(their_losses, abs=1e-5) and losses[2] < losses[0]
    for name, value in named(gradients).items():  # fp32 sums in another order; gradients are about 1e-2
        assert torch.allclose(value, their_gradients[name], atol=1e-6), name
    for name, value in named(mine).items():  # AdamW's quotient amplifies the rounding of small gradients
        assert torch.allclose(value, others[name], atol=1e-4), name


def test_peft_loads_and_merges_our_adapter(based: Tiny, tmp_path: Path) -> None:  # noqa: F811
    """Of attention only: PEFT moves targets of dense MLPs of this class to its fused experts, and drops their adapters."""
    overrides = ("tune.lora.targets=[attention]",)
    tune(based, *overrides)
    recipe = based.resolve("tune.lora.rank=4", *overrides).recipe
    adapter = find_adapter(recipe, based.run_dir)
    assert adapter is not None
    write_adapter(recipe, adapter, tmp_path / "adapter")
    theirs = base_in_transformers(load_model(based.run_dir, "base"), tmp_path / "base")
    ids = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        tuned, before = load_model(based.run_dir, "tuned")(ids), theirs(ids).logits
        loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
        assert not torch.allclose(before, tuned, atol=1e-3), "the adapter changes the answers"
        assert torch.allclose(loaded(ids).logits, tuned, atol=1e-5)
        assert torch.allclose(loaded.merge_and_unload()(ids).logits, tuned, atol=1e-5)
