from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from late import require_package
from lmworks.errors import Unavailable, UserError, raise_first
from lmworks.evaluate.bits_per_byte import held_out
from lmworks.evaluate.evaluate import evaluate, refusals
from lmworks.evaluate.protection import item_hashes, protection, save_searched
from lmworks.evaluate.sets import benchmarks as loading
from lmworks.evaluate.sets.items import ChoiceItem
from lmworks.evaluate.tables import printable
from lmworks.host.devices import dtype_for
from lmworks.recipe.schema.evaluate import Benchmark, Evaluate
from lmworks.recipe.schema.recipe import Recipe

require_package("reasoning_gym", "reasoning-gym is not installed")


def toy_set(name: str, count: int) -> tuple[ChoiceItem, ...]:
    def item(i: int) -> ChoiceItem:
        question, choices = f"Question: what is {i}?", tuple(f"{choice} {i}" for choice in ("one thing", "another", "a third one"))
        continuations = tuple(f" {choice}" for choice in choices)
        return ChoiceItem(name, str(i), "", question, choices, i % 3, (f"{question}\nAnswer:",) * 3, continuations, f"{name} {i}")

    return tuple(map(item, range(count)))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = {"prose": ["It was the best of times. " * 12, "It was the worst of times."], "code": ["def f():\n    return 1\n"]}
    for split in ("train", "validation"):
        for domain, texts in rows.items():
            (tmp_path / "corpus" / split / f"{domain}-source").mkdir(parents=True)
            table = pa.table({"text": texts, "domain": [domain] * len(texts)})
            pq.write_table(table, tmp_path / "corpus" / split / f"{domain}-source" / "00000.parquet")
    return tmp_path / "corpus"


@pytest.fixture
def recipe() -> Recipe:
    benchmarks = ["piqa", {"name": "copa", "form": "cloze"}]
    asked = Evaluate(benchmarks=benchmarks, benchmark_items=30, tasks=["chain_sum", "syllogism"], task_items=6)
    return Recipe(name="t", evaluate=asked)


@pytest.fixture
def toy_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_all", lambda benchmark: toy_set(benchmark.name, 40))


def printed(results: dict) -> str:
    console = Console(file=io.StringIO(), width=220)
    console.print(printable(results))
    return console.file.getvalue()


def test_base_then_tuned(small_transformer, byte_tokenizer, corpus, recipe, tmp_path, toy_sets) -> None:
    small_transformer.train()
    out = tmp_path / "evaluate"
    save_searched(tmp_path / "trained", item_hashes(protection(recipe).questions))
    evaluate(recipe, small_transformer, byte_tokenizer, corpus, out, "base", [tmp_path / "trained"])
    results = evaluate(recipe, small_transformer, byte_tokenizer, corpus, out, "tuned", [tmp_path / "trained"])
    assert results["not_clean"] == {}
    assert small_transformer.training  # left as it was found
    assert small_transformer.compute_dtype == torch.float32
    small_transformer.eval()
    assert results == json.loads((out / "results.json").read_text())
    base, tuned = results["models"]["base"], results["models"]["tuned"]
    assert base["dtype"] == str(dtype_for("auto", torch.device("cpu"))).removeprefix("torch.")  # as the recipe trains
    assert set(base["bits_per_byte"]) == {"prose", "code", "overall"}
    assert base["bits_per_byte"] == tuned["bits_per_byte"]  # the same weights on the same text
    assert set(results["references"]["bits_per_byte"]) >= {"byte unigram", "xz -9e"}
    names = ("piqa/cloze/0-shot", "syllogism/generate/0-shot", "chain_sum/generate/0-shot")
    piqa, syllogism, sums = (base["scores"][name] for name in names)
    assert piqa["n"] == 30
    assert piqa["chance"] == pytest.approx(1 / 3)
    assert piqa["truncated"] == 0
    assert syllogism["empty_replies"] == 6  # the prompts are longer than this model's 96 tokens, and that is shown
    assert base["scores"]["all sets/cloze/0-shot"]["n"] == 60
    assert piqa["interval"][0] < piqa["score"] < piqa["interval"][1]
    assert sums["correct"] == 0  # random weights solve nothing, and nothing says otherwise
    assert sums["interval"][1] > 0.3  # six items prove little
    prompts = [tuple(sample["prompt"] for sample in model["samples"]) for model in (base, tuned)]
    assert prompts[1] == recipe.evaluate.questions
    own = [text.strip() for texts in held_out(corpus).values() for text in texts]  # none were given: the corpus's own beginnings
    assert prompts[0] and all(any(text.startswith(prompt) for text in own) for prompt in prompts[0])
    assert recipe.evaluate.prompts is None and prompts[0] != ("The",)
    assert results["compared"]["piqa/cloze/0-shot"]["difference"] == 0
    assert results["compared"]["piqa/cloze/0-shot"]["verdict"] == "no difference shown"

    lines = [json.loads(line) for line in (out / "items-base.jsonl").read_text().splitlines()]
    # of 30: the ten that failed by most, the ten that succeeded by most
    assert sum(line["score"] == "piqa/cloze/0-shot" for line in lines) == 20
    assert sum(line["set"] == "chain_sum" for line in lines) == 6
    assert all(len(line["logprobs"]) == 3 for line in lines if line["score"].split("/")[1] == "cloze")
    outcomes = [json.loads(line) for line in (out / "outcomes-base.jsonl").read_text().splitlines()]
    of_piqa = [one for one in outcomes if one["score"] == "piqa/cloze/0-shot"]
    assert len(outcomes) == 30 + 30 + 6 + 6 and len({one["id"] for one in of_piqa}) == 30
    assert sum(one["correct"] for one in of_piqa) == piqa["correct"]
    assert all(one["failure"] == (None if one["correct"] else "wrong") and one["value"] > 0 and one["tokens"] > 10 for one in of_piqa)
    assert set(piqa["by_norm"]) == {"byte", "char", "token", "none", "unconditional"}

    tuned["samples"][0]["completion"] = "[/bold] is what [it] wrote"
    text = printed(results)
    words = ("piqa", "chance", "base", "tuned", "xz -9e", "overall", "one stream from nothing")
    for word in (*words, "[/bold] is what [it] wrote", "no difference shown"):
        assert word in text


def test_again_gives_the_same(small_transformer, byte_tokenizer, corpus, recipe, tmp_path, toy_sets) -> None:
    def run(folder: str) -> dict:
        results = evaluate(recipe, small_transformer, byte_tokenizer, corpus, tmp_path / folder, "base")
        del results["models"]["base"]["speed"]
        return results

    assert run("one") == run("two") == run("one")
    assert (tmp_path / "one" / "items-base.jsonl").read_bytes() == (tmp_path / "two" / "items-base.jsonl").read_bytes()


def test_a_new_base_forgets_the_old_tuned_model(small_transformer, byte_tokenizer, corpus, recipe, tmp_path, toy_sets) -> None:
    for name in ("base", "tuned", "base"):
        results = evaluate(recipe, small_transformer, byte_tokenizer, corpus, tmp_path / "e", name)
    assert list(results["models"]) == ["base"]
    assert "compared" not in results


def test_without_the_benchmarks_it_goes_on_and_says_so(small_transformer, byte_tokenizer, corpus, recipe, tmp_path, monkeypatch) -> None:
    def refuse(benchmark: Benchmark) -> None:
        raise Unavailable("the benchmark sets could not be had: no network")

    monkeypatch.setattr(loading, "load_all", refuse)
    results = evaluate(recipe, small_transformer, byte_tokenizer, corpus, tmp_path / "e", "base")
    model = results["models"]["base"]
    assert model["unavailable"] == {"piqa": "the benchmark sets could not be had: no network", "copa": model["unavailable"]["piqa"]}
    assert model["bits_per_byte"]["overall"]["bytes"] > 0
    assert set(model["scores"]) == {"chain_sum/generate/0-shot", "syllogism/generate/0-shot"}  # and no score is made up
    assert "not measured: copa: the benchmark sets could not be had: no network" in " ".join(printed(results).split())


def test_faults_are_named_before_work_begins(small_transformer, byte_tokenizer, corpus, tmp_path) -> None:
    def asking(**settings: list[str]) -> Recipe:
        return Recipe(name="t", evaluate=Evaluate(**settings))

    with pytest.raises(UserError, match="did you mean hellaswag"):
        raise_first(refusals(asking(benchmarks=["helaswag"])))
    with pytest.raises(UserError, match="did you mean chain_sum"):
        raise_first(refusals(asking(tasks=["chain_sums"])))
    with pytest.raises(UserError, match=r"holds no \.parquet file"):
        evaluate(asking(), small_transformer, byte_tokenizer, tmp_path / "nowhere", tmp_path / "e", "base")


def test_scores_on_what_was_not_searched_for_are_marked(small_transformer, byte_tokenizer, corpus, recipe, tmp_path, toy_sets) -> None:
    """The tuned model was trained on text that was searched for less than the base model's."""
    asked = protection(recipe).questions
    save_searched(tmp_path / "base", item_hashes(asked))
    save_searched(tmp_path / "tuned", item_hashes([one for one in asked if not one.name.startswith(("piqa", "chain_sum"))]))
    given = (small_transformer, byte_tokenizer, corpus, tmp_path / "e")
    evaluate(recipe, *given, "base", [tmp_path / "base"])
    results = evaluate(recipe, *given, "tuned", [tmp_path / "base", tmp_path / "tuned"])
    why = "not all text trained on was searched for {} of its {} items"
    assert results["not_clean"] == {"piqa": why.format(30, 30), "chain_sum": why.format(6, 6)}
    for name, tuned in results["models"]["tuned"]["scores"].items():
        assert tuned["verdict"].endswith(", not clean") == (name.partition("/")[0] in ("piqa", "all sets", "chain_sum"))
        assert "not clean" not in results["models"]["base"]["scores"][name]["verdict"]
    assert results["compared"]["piqa/cloze/0-shot"]["verdict"].endswith(", not clean")
    assert "not clean: piqa: not all text" in " ".join(printed(results).split())
    off = recipe.model_copy(update={"corpus": recipe.corpus.model_copy(update={"decontaminate": None})})
    found = evaluate(off, *given, "base")
    assert set(found["not_clean"]) == {"piqa", "copa", "chain_sum", "syllogism"}
    assert found["not_clean"]["copa"] == "corpus.decontaminate is null"
