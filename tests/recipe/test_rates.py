"""Learning rates that a recipe leaves out: of pretrained weights, and of the stages after pretraining."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from base_models import write_model, write_tokenizer
from lmworks.errors import UserError
from lmworks.recipe import scaling_laws
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.recipe import Recipe


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_tokenizer(folder, "qwen")
    write_model(folder, 448)
    return folder


def load(folder: Path, base: Path, *overrides: str, **changes: Any) -> Recipe:
    data = [{"name": "chats", "kind": "files", "path": "chats.jsonl"}]
    text = {"sources": [{"name": "notes", "kind": "text", "path": "notes.txt", "license": "MIT"}]}
    tree = {"name": "rates", "start_from": str(base), "tune": {"data": data}, "corpus": text} | changes
    path = folder / "rates.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_recipe(path, overrides).recipe


PHASE = {"name": "more", "tokens": "1M", "mixture": {"notes": 1.0}, "sequence_length": "64 tokens", "global_batch_tokens": "1Ki"}


def test_the_rate_of_pretrained_weights_does_not_rise_with_the_budget(base: Path, tmp_path: Path) -> None:
    found = {
        tokens: load(tmp_path, base, train={"phases": [PHASE | {"tokens": tokens}]}).optimizer.learning_rate for tokens in ("1M", "1B")
    }  # fmt: skip
    assert found["1M"] == found["1B"]


@pytest.mark.parametrize(
    ("hidden", "full", "adapters"),
    # 106M: SmolLM2-135M, the best of the sweep in LOG.md; 8B: the rates of alpaca and of QLoRA, 2e-5 and 2e-4
    [(106_203_456, (1e-4, 1.5e-4), (8e-4, 1.5e-3)), (7_000_000_000, (1.5e-5, 3e-5), (1.5e-4, 3e-4))],
)
def test_rates_of_tuning_are_what_was_measured_and_published(hidden: int, full: Any, adapters: Any) -> None:
    peak, _ = scaling_laws.rate_from_pretrained(hidden)
    assert full[0] <= scaling_laws.rate_of_stage("tune", peak, lora=False, pretrained=True, muon=False)[0] <= full[1]
    assert adapters[0] <= scaling_laws.rate_of_stage("tune", peak, lora=True, pretrained=True, muon=True)[0] <= adapters[1]


def test_a_rate_that_is_written_wins_and_the_others_follow_from_that_of_the_optimizer(base: Path, tmp_path: Path) -> None:
    dpo = {"data": [{"name": "pairs", "kind": "files", "path": "pairs.jsonl"}]}
    recipe = load(tmp_path, base, "tune.learning_rate=1e-5", "optimizer.learning_rate=0.001", "optimizer.adam_learning_rate=0.002", dpo=dpo)
    assert recipe.tune is not None and recipe.tune.learning_rate == 1e-5
    assert recipe.dpo is not None and recipe.dpo.learning_rate == pytest.approx(
        0.001 * 0.025 * scaling_laws.MUON_AFTER_PRETRAINED, rel=0.05
    )
    adapters = load(tmp_path, base, "optimizer.adam_learning_rate=0.002", dpo=dpo | {"lora": {"rank": 2}})
    assert adapters.dpo is not None and adapters.dpo.learning_rate == pytest.approx(0.002 * 0.5, rel=0.05)


def test_the_former_key_is_refused_with_what_to_do(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tune has no key 'learning_rate_scale' any more; set learning_rate, the peak rate itself"):
        load(tmp_path, base, "tune.learning_rate_scale=0.3")


def test_files_are_read_in_whole_passes_when_no_budget_is_written(base: Path, tmp_path: Path) -> None:
    """A token budget would repeat sixty conversations sixty times."""
    for overrides, epochs in (((), 2), (("tune.epochs=3",), 3), (("tune.tokens=1M",), None), (("tune.data.chats.weight=0.5",), None)):
        tune = load(tmp_path, base, *overrides).tune
        assert tune is not None and tune.epochs == epochs, overrides
