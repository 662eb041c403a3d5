"""With an average of the weights, what is validated, selected and sampled on the way is what leaves."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.checkpoint import listing
from lmworks.inference.generate import SAMPLING, GenerateOptions, generate
from lmworks.io import jsonl
from lmworks.model import Transformer
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.layout import Layout
from lmworks.shards.batches import Batches
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.observe.sampling import _TOKENS
from lmworks.train.pretrain import held_out, pretrain
from lmworks.train.validation import validate
from lmworks.ui.terminal import Interrupted
from lmworks.weights.run_models import load_model
from tiny_run import SECOND, Tiny, before_each_step, checkpoint, curve, same_bits, training_context

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EMA = ("optimizer.ema_decay=0.9", "train.phases.general.tokens=1600 tokens",
       "train.phases.general.lr_schedule={warmup: 2 steps, decay: 2 steps}")  # fmt: skip
STEPS = 8 + SECOND


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Pretrained and tuned with an average whose weights are far from the last ones."""
    made = tiny.copy(tmp_path_factory.mktemp("average") / "run")
    made.walk(*EMA, last="tune")
    return made


def part_of(run: Tiny, part: str) -> dict[str, torch.Tensor]:
    """The tensors of a part of the newest checkpoint."""
    return {name.removeprefix(part): tensor for name, tensor in checkpoint(run.run_dir).items() if name.startswith(part)}


def test_the_last_validation_is_that_of_the_model_that_leaves(run: Tiny) -> None:
    recipe = run.resolve(*EMA).recipe
    batches = Batches(recipe, run.run_dir / "shards")
    measured = validate(ParallelModel([load_model(run.run_dir, "base")]), held_out(batches, recipe, 32, 4))
    line = curve(run.run_dir)[-1]
    for name, value in measured.items():  # the same text in the same precision, in batches of another size
        assert line[name] == pytest.approx(value, rel=1e-5), name
    assert listing.read_meta(listing.directories(run.run_dir / "checkpoints")[-1])["metric"] == line["validation/bits_per_byte"]
    raw = load_model(run.run_dir, "base")
    raw.load_state_dict(part_of(run, "model/"))
    assert abs(validate(ParallelModel([raw]), held_out(batches, recipe, 32, 4))["validation/loss"] - measured["validation/loss"]) > 1e-3


def test_the_last_samples_are_of_the_model_that_leaves(run: Tiny) -> None:
    tokenizer = load_tokenizer(run.run_dir / "tokenizer")
    lines = [line for line in jsonl.read(run.run_dir / "samples.jsonl") if line["step"] == STEPS]
    assert lines
    options = GenerateOptions(
        max_new_tokens=_TOKENS, temperature=SAMPLING["temperature"], min_p=SAMPLING["min_p"], seed=1, stop_ids=tuple(tokenizer.stop_ids)
    )
    made = generate(load_model(run.run_dir, "base"), [tokenizer.encode(line["prompt"]) for line in lines], options)
    assert [line["completion"] for line in lines] == [tokenizer.decode(ids, skip_special=True) for ids in made]


def test_expert_biases_stay_in_tuning(run: Tiny) -> None:
    before, after = checkpoint(run.run_dir), checkpoint(run.run_dir / "tune")
    biases = [name for name in after if name.startswith("model/") and name.endswith("router.bias")]
    assert biases
    for name in biases:
        assert before[name].abs().max() > 0.01 and torch.equal(after[name], before[name])


def test_the_average_goes_on_after_a_resume(tiny_copy: Tiny, run: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == STEPS - 3 else None)
        with pytest.raises(Interrupted):
            tiny_copy.pretrain(*EMA)
    tiny_copy.pretrain(*EMA)
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(run.run_dir)) == []


def test_tuning_begins_with_the_average(run: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, torch.Tensor]] = []

    def stop(self: Any) -> None:
        begun.append({name: weight.detach().clone() for name, weight in self.model.named_parameters()})

    monkeypatch.setattr("lmworks.train.trainer.Trainer.run", stop)
    monkeypatch.setattr("lmworks.train.trainer.Trainer.resume", lambda self: None)
    run.walk(*EMA, "tune.global_batch_tokens=512 tokens", last="tune")
    assert same_bits(begun[0], part_of(run, "average/")) == []


def trained(tiny: Tiny, to: Path, zero: int, seldom: bool) -> None:
    """As one of the ranks that share the weights; validating and sampling hardly ever, or after each step."""
    layout = Layout(dp_shard=2, zero=zero)
    every = "100%" if seldom else "1 steps"
    recipe = tiny.resolve(
        *EMA, f"run_dir={to}", "layout.dp_shard=2", f"layout.zero={zero}", f"train.validate_every={every}", f"train.sample_every={every}",
        "train.phases.general.tokens=2048 tokens", "train.phases.long.tokens=1024 tokens",
    ).recipe  # fmt: skip
    pretrain(training_context(recipe, to, ranks=Ranks(layout)))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_gathered_weights_are_not_left_behind(ranks: Any, tiny: Tiny, tmp_path: Path, zero: int) -> None:
    """Ranks that keep gathered weights from one forward to the next must not train with the average, nor validate without it."""
    found = []
    for seldom in (True, False):
        made = tiny.copy(tmp_path / str(seldom))
        ranks.run(trained, 2, tiny, made.run_dir, zero, seldom)
        found.append(made)
    assert same_bits(*(checkpoint(made.run_dir) for made in found)) == []
    last = [curve(made.run_dir)[-1] for made in found]
    assert last[0] == last[1]
    recipe = tiny.resolve(*EMA).recipe
    model = Transformer(recipe.model)
    for part in ("model/", "average/"):
        model.load_state_dict(part_of(found[0], part), strict=part == "model/")
    model.set_rope(recipe.train.phases[1].rope.apply(recipe.model.rope))  # type: ignore[union-attr]
    batches = Batches(recipe, found[0].run_dir / "shards")
    expected = validate(ParallelModel([model]), held_out(batches, recipe, 32, 4))["validation/loss"]
    assert math.isclose(last[0]["validation/loss"], expected, rel_tol=1e-4)  # sums in another order
