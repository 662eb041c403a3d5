"""Evaluation in the loop: from the command to metrics and run page, and the same scores as the evaluation stage gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmworks.evaluate.in_loop import LoopEvaluation, make_evaluation, pack
from lmworks.evaluate.logprobs import PlainLogProbs
from lmworks.evaluate.sets import forms
from lmworks.evaluate.sets.items import ChoiceItem
from lmworks.metrics.log import read
from lmworks.pages.run_page import write_page
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.evaluate import Evaluate
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import IGNORE
from tiny_run import Tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WORDS = ("red", "a longer green", "blue, the color of the sky", "grey")


def items(count: int, name: str = "toy") -> list[ChoiceItem]:
    def item(number: int) -> ChoiceItem:
        context, rest = f"Question: which color is number {number}?\nAnswer:", tuple(f" {word}" for word in WORDS)
        return ChoiceItem(name, str(number), "", context, WORDS, number % 4, (context,) * 4, rest, "")

    return list(map(item, range(count)))


def test_equals_the_plain_scores(small_transformer: Any, byte_tokenizer: Any) -> None:
    every = [*items(7), *items(5, "other")]
    requests = forms.requests_of(every, byte_tokenizer)
    model = ParallelModel([small_transformer])
    small_transformer.train()
    values = LoopEvaluation(every, requests, length=96, rows=3)(model)
    assert small_transformer.training  # left as it was found
    small_transformer.eval()
    answered = forms.answer(every, byte_tokenizer, PlainLogProbs(small_transformer))
    for name in ("toy", "other"):
        part = [one for one in answered if one.item.set == name]
        assert values[f"eval/{name}/cloze-0-shot"] == forms.score(part).accuracy
        bits = sum(one.bits_per_byte for one in part) / len(part)
        assert values[f"eval/{name}/bits_per_byte"] == pytest.approx(bits, rel=1e-5)  # fp32, batched in another shape
        assert (values[f"eval/{name}/items"], values[f"eval/{name}/chance"]) == (len(part), 0.25)
    assert len(values) == 8


def test_items_that_lose_their_beginnings_are_counted(tmp_path: Path, byte_tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"goal": "g" * size, "sol1": "a", "sol2": "b", "label": 0} for size in (10, 100, 110)]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe.model_validate({"name": "t", "evaluate": {"benchmarks": [{"name": "piqa", "path": str(tmp_path / "piqa.jsonl")}]}})
    assert make_evaluation(recipe, byte_tokenizer, 64, 2, Ranks(Layout())) is not None
    assert "piqa during training: 2 of 3 items are longer than 64 tokens, so they lose their beginnings" in capfd.readouterr().err
    assert make_evaluation(recipe, byte_tokenizer, 128, 2, Ranks(Layout())) is not None
    assert "lose their beginnings" not in capfd.readouterr().err


SIZES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=30)


@given(SIZES, st.integers(8, 40), st.integers(1, 4))
def test_every_label_is_in_one_place_after_its_context(sizes: list[tuple[int, int]], length: int, rows: int) -> None:
    def ids(number: int, start: int, stop: int) -> list[int]:
        return [1000 * number + one for one in range(start, stop)]

    requests = [(ids(n, 1, a + 1), ids(n, a + 1, a + b + 1)) for n, (a, b) in enumerate(sizes)]
    batches, places = pack(requests, length, rows)
    assert {batch.tokens.shape for batch in batches} == {(rows, length)}
    tokens, labels = (np.concatenate([getattr(batch, name) for batch in batches]) for name in ("tokens", "labels"))
    for (context, rest), place in zip(requests, places, strict=True):
        kept = rest[:length]
        assert labels[place.row, place.start : place.stop].tolist() == kept
        inputs = [*context, *kept][:-1][-length:]
        assert tokens[place.row, place.stop - len(inputs) : place.stop].tolist() == inputs
        batch, row = divmod(place.row, rows)
        starts = batches[batch].cu_seqlens.tolist()
        assert row * length + place.stop - len(inputs) in starts  # a document of its own
        assert not any(row * length + place.stop - len(inputs) < start < row * length + place.stop for start in starts)
    assert (labels != IGNORE).sum() == sum(min(len(rest), length) for _, rest in requests)
    assert all(batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == rows * length for batch in batches)
    assert all((np.diff(batch.cu_seqlens) > 0).all() for batch in batches)


def own_task(folder: Path) -> Path:
    rows = [{"question": f"Which word is first in {number}?", "choices": WORDS, "answer": WORDS[number % 4]} for number in range(12)]
    (folder / "colors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "colors.yaml").write_text("file: colors.jsonl\nchoices: choices\n")
    return folder / "colors.yaml"


def test_a_run_is_evaluated_on_the_way_and_its_page_shows_it(tiny_copy: Tiny, tmp_path: Path) -> None:
    task = own_task(tmp_path)
    asked = (f"evaluate.benchmarks=[{task}]", "evaluate.every=8 steps", "evaluate.every_items=10")
    tiny_copy.walk(*asked, last="pretrain", allow=["evaluate.benchmarks"])
    lines = {line["step"]: line for line in read(tiny_copy.run_dir) if "eval/colors/cloze-0-shot" in line}
    assert sorted(lines) == [8, 16, 21]  # every 8 steps, and at the end
    for line in lines.values():
        assert line["eval/colors/cloze-0-shot"] * 10 == pytest.approx(round(line["eval/colors/cloze-0-shot"] * 10))
        assert line["eval/colors/bits_per_byte"] > 0 and line["perf/evaluation_seconds"] > 0
    assert len({line["eval/colors/bits_per_byte"] for line in lines.values()}) == 3  # of the weights of that step
    page = write_page(tiny_copy.run_dir).read_text()
    learning = page[page.index('<section id="loss"') : page.index('<section id="held-out"')]
    assert "Benchmarks during training" in learning and "Right answers" in learning and '>colors<' in learning.replace(' ', '')


def test_the_last_scores_are_those_of_the_finished_model(tiny_copy: Tiny, tmp_path: Path) -> None:
    from lmworks.evaluate.sets import benchmarks
    from lmworks.tokenizer import load
    from lmworks.weights.run_models import load_model

    asked = (f"evaluate.benchmarks=[{own_task(tmp_path)}]", "evaluate.every=100%", "evaluate.every_items=12")
    tiny_copy.walk(*asked, last="pretrain", allow=["evaluate.benchmarks"])
    (line,) = (line for line in read(tiny_copy.run_dir) if "eval/colors/cloze-0-shot" in line)
    benchmark = tiny_copy.resolve(*asked).recipe.evaluate.benchmarks[0]
    tokenizer, model = load(tiny_copy.run_dir / "tokenizer"), load_model(tiny_copy.run_dir, "base")
    # in the loop, contexts are cut to the sequences of the first phase
    answered = forms.answer(benchmarks.load(benchmark, None, 0).items, tokenizer, PlainLogProbs(model, 32))
    assert line["eval/colors/cloze-0-shot"] == forms.score(answered).accuracy
    assert line["eval/colors/bits_per_byte"] == pytest.approx(sum(one.bits_per_byte for one in answered) / 12, rel=1e-4)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [("1M tokens", "never"), ("2M tokens", "50%"), ("3M tokens", "25%"), ("4M tokens", "20%"), ("20M tokens", "10%")],
)  # fmt: skip
def test_the_default_interval_costs_less_than_a_twentieth(tiny: Tiny, tokens: str, expected: str) -> None:
    sets = "[arc-easy, piqa, hellaswag, sciq, copa]"
    resolved = tiny.resolve(f"evaluate.benchmarks={sets}", f"train.phases.general.tokens={tokens}")
    every = resolved.recipe.evaluate.every
    assert (every if isinstance(every, str) else every.text()) == expected
    total = sum(phase.tokens for phase in resolved.recipe.train.phases)
    if not isinstance(every, str):
        # a forward pass is a third of a step; no set has more than 350 tokens per item
        assert 100 / float(every.value) * 5 * 50 * 350 / 3 < 0.05 * total


def test_never_is_never(tiny: Tiny) -> None:
    assert tiny.resolve().recipe.evaluate.every == "never"  # there are no sets
    assert Evaluate(every="never").every == "never"
    with pytest.raises(ValueError, match="not a quantity"):
        Evaluate(every="sometimes")


def test_token_losses_add_up(small_transformer: Any) -> None:
    from lmworks.shards.batch import Batch

    tokens = torch.randint(0, 250, (3, 16), generator=torch.Generator().manual_seed(1)).numpy().astype(np.int32)
    labels = np.roll(tokens, -1, 1)
    labels[1, 5:] = IGNORE
    batch = Batch(tokens, labels, np.array([0, 16, 20, 32, 48], np.int32), 0, 0)
    model = ParallelModel([small_transformer])
    found = model.token_cross_entropy(batch)
    assert found.shape == (3, 16) and (found[1, 5:] == 0).all() and (found[0] > 0).all()
    assert float(found.sum()) == pytest.approx(model.summed_cross_entropy(batch), rel=1e-5)
