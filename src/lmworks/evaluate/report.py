"""The evaluation stage: everything that a finished model is measured with, in one document.

    out_dir/results.json         all figures, of the base and the tuned model
    out_dir/items-NAME.jsonl     the items that failed and succeeded most clearly, with their log-likelihoods and replies
    out_dir/outcomes-NAME.json   right or wrong per item, for the paired comparison
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lmworks import files
from lmworks.corpus.contamination import Question
from lmworks.corpus.readers.items import Unavailable
from lmworks.evaluate import benchmarks, bits_per_byte, cloze, protection, references, tasks
from lmworks.evaluate.heldout import held_out, training_texts
from lmworks.evaluate.logprobs import BatchedLogProbs
from lmworks.evaluate.replies import Answerer, ChatTokenizer
from lmworks.evaluate.samples import samples
from lmworks.evaluate.statistics import paired_bootstrap
from lmworks.precision import dtype_for
from lmworks.progress import bar
from lmworks.recipe.schema.recipe import Recipe
from lmworks.train.observe.prompts import prompts as prompts_of

if TYPE_CHECKING:
    from lmworks.model import Transformer

Name = Literal["base", "tuned"]
Outcomes = dict[str, dict[str, bool]]  # set or task -> item id -> right
_NOTABLE = 10  # per set and side
ALL_SETS = "all sets"


def check(recipe: Recipe) -> None:
    """Raise `UserError` for a benchmark or task that this installation does not know, before anything is trained."""
    benchmarks.check_names(recipe.evaluate.benchmarks)
    for generator in recipe.evaluate.tasks:
        tasks.generate_tasks(generator, 1)


def evaluate(
    recipe: Recipe, model: Transformer, tokenizer: ChatTokenizer, corpus_dir: Path, out_dir: Path, name: Name,
    searched: Sequence[Path] = (),
) -> dict[str, Any]:  # fmt: skip
    """Measure `model` and write it into `out_dir/results.json` under `name`; returns the whole document.

    The activations are in the precision that the recipe trains in (fp32 for fp16); the results say which. `base` starts the
    document afresh and `tuned` adds to it, with the paired comparison. Equal inputs give equal figures (the speeds aside).
    `searched` are the folders with the records of what the text that the model was trained on was searched for: the verdict of a score on
    any other item says that it is not clean.
    Raises `UserError` for what `check` finds and for a corpus without held-out text.
    """
    check(recipe)
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / "results.json"
    results = files.read_json(path) if name == "tuned" and path.exists() else {"models": {}}
    texts = held_out(corpus_dir)
    if recipe.evaluate.references and "references" not in results:
        marks = references.references(texts, training_texts(corpus_dir))
        results["references"] = {"bits_per_byte": marks, "how": references.HOW, "missing": references.missing()}
    was_training, was_dtype = model.training, model.compute_dtype
    model.eval()
    precision = "fp32" if recipe.train.precision == "fp16" else recipe.train.precision
    model.compute_dtype = dtype_for(precision, model.embedding.weight.device)
    try:
        doubt = partial(protection.doubt, searched=searched, recipe=recipe, corpus_dir=corpus_dir)
        measured, outcomes, items = _measure(recipe, model, tokenizer, corpus_dir, texts, name, doubt)
    finally:
        model.train(was_training)
        model.compute_dtype = was_dtype
    results["models"][name] = measured
    results["not_clean"] = results.get("not_clean", {}) | measured.pop("not_clean")
    results["how"] = {"bits_per_byte": bits_per_byte.HOW, "benchmarks": _HOW_BENCHMARKS, "tasks": _HOW_TASKS}
    files.write_text(out_dir / f"items-{name}.jsonl", "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))
    files.write_json(out_dir / f"outcomes-{name}.json", outcomes)
    if name == "tuned" and "base" in results["models"]:
        results["compared"] = _compare(files.read_json(out_dir / "outcomes-base.json"), outcomes)
        for one in results["not_clean"].keys() & results["compared"].keys():
            results["compared"][one]["verdict"] += NOT_CLEAN
    files.write_json(path, results)
    return results


NOT_CLEAN = ", not clean"
_HOW_BENCHMARKS = (
    f"{benchmarks.PACKAGE}, cloze form, no examples shown; the likeliest choice per byte wins; a fixed sample by hash of the item; "
    "95% Wilson interval; the verdict compares the whole interval with chance, or with the best constant answer where one exists"
)
_HOW_TASKS = (
    f"reasoning-gym with seeds from {tasks.SEED}, answered freely and greedily, full marks of the package's verifier only; "
    "95% Wilson interval; baseline: the commonest right answer of the same questions"
)


_Doubt = Callable[[str, list[Question]], str | None]


def _measure(
    recipe: Recipe, model: Transformer, tokenizer: ChatTokenizer, corpus_dir: Path, texts: dict[str, list[str]], name: Name, doubt: _Doubt
) -> tuple[dict[str, Any], Outcomes, list[dict[str, Any]]]:
    context = context_length(recipe, model)
    logprobs = BatchedLogProbs(model, context)
    outcomes: Outcomes = {}
    items: list[dict[str, Any]] = []
    start = time.perf_counter()
    bpb = bits_per_byte.bits_per_byte(texts, tokenizer, tokenizer.vocab_size, logprobs, context, f"{name}: held-out text")
    speed = {"scored_tokens_per_second": sum(b.tokens for d, b in bpb.items() if d != references.OVERALL) / (time.perf_counter() - start)}
    measured: dict[str, Any] = {"context": context, "dtype": str(model.compute_dtype).removeprefix("torch."),
                                "bits_per_byte": {domain: value.to_json() for domain, value in bpb.items()}}
    try:
        questions = {one: benchmarks.load(one, recipe.evaluate.benchmark_items) for one in recipe.evaluate.benchmarks}
        measured["benchmarks"] = _cloze(questions, tokenizer, logprobs, context, name, outcomes, items)
        asked_of = {one: [benchmarks.question(item) for item in of_set] for one, of_set in questions.items()}
    except Unavailable as reason:
        measured["benchmarks"], measured["benchmarks_unavailable"] = {}, str(reason)
        asked_of = {}
    answerer = Answerer(model, tokenizer, chat=name == "tuned")
    start = time.perf_counter()
    asked = {one.name: tasks.generate_tasks(one, recipe.evaluate.task_items) for one in recipe.evaluate.tasks}
    measured["tasks"] = _free(asked, answerer, name, outcomes, items)
    asked_of |= {one: [tasks.question(task) for task in of_name] for one, of_name in asked.items()}
    measured["not_clean"] = {one: why for one, items_of in asked_of.items() if (why := doubt(one, items_of))}
    _mark(measured)
    if asked:
        speed["replies_per_second"] = sum(map(len, asked.values())) / (time.perf_counter() - start)
    prompts = recipe.evaluate.questions if name == "tuned" else prompts_of(recipe, corpus_dir)
    measured["samples"] = [sample.to_json() for sample in samples(model, tokenizer, prompts, chat=name == "tuned")]
    measured["speed"] = speed
    return measured, outcomes, items


def _mark(measured: dict[str, Any]) -> None:
    """Let each verdict on what may have been trained on say so: whoever prints a score prints its verdict."""
    doubtful = measured["not_clean"]
    for kind in ("benchmarks", "tasks"):
        for one, score in measured[kind].items():
            if one in doubtful or (one == ALL_SETS and doubtful.keys() & measured["benchmarks"].keys()):
                score["verdict"] += NOT_CLEAN


def context_length(recipe: Recipe, model: Transformer) -> int:
    """Tokens that the model was trained to look back on: the last phase's sequence length, or what the model states."""
    if recipe.train.phases:
        return int(recipe.train.phases[-1].sequence_length)
    return int(model.config.max_position_embeddings or 2048)


def _cloze(
    questions: dict[str, list[benchmarks.Item]], tokenizer: ChatTokenizer, logprobs: BatchedLogProbs, context: int, name: Name,
    outcomes: Outcomes, items: list[dict[str, Any]],
) -> dict[str, Any]:
    scored: dict[str, Any] = {}
    answered: list[cloze.Answered] = []
    with bar(f"{name}: benchmarks", sum(item.choices for of_set in questions.values() for item in of_set)) as progress:
        for one, of_set in questions.items():
            progress.note(one)
            part = cloze.answer(of_set, tokenizer, logprobs, progress.advance)
            answered += part
            by_norm = {norm: cloze.score(part, norm).accuracy for norm in cloze.NORMS}
            truncated = sum(a.tokens - 1 > context for a in part)  # their contexts lost their beginnings
            scored[one] = cloze.score(part).to_json() | {"by_norm": by_norm, "truncated": truncated}
            outcomes[one] = {a.item.id: a.correct() for a in part}
            items += [a.to_json() for a in cloze.notable(part, _NOTABLE)]
    if len(scored) > 1:
        scored[ALL_SETS] = cloze.score_sets(answered).to_json()
    return scored


def _free(
    asked: dict[str, list[tasks.Task]], answerer: Callable[..., list[str]], name: Name, outcomes: Outcomes, items: list[dict[str, Any]]
) -> dict[str, Any]:
    every = [task for of_name in asked.values() for task in of_name]
    with bar(f"{name}: tasks", len(every)) as progress:
        judged = tasks.judge(every, answerer([task.question for task in every], progress.advance))
    scored: dict[str, Any] = {}
    for one in asked:
        part = [j for j in judged if j.task.name == one]
        scored[one] = tasks.score(part).to_json() | {
            "mean_mark": sum(j.mark for j in part) / len(part), "empty_replies": sum(not j.reply for j in part),
        }  # fmt: skip
        outcomes[one] = {j.task.id: j.solved for j in part}
        solved, failed = [j for j in part if j.solved], [j for j in part if not j.solved]
        items += [j.to_json() for j in failed[:_NOTABLE] + solved[:_NOTABLE]]
    return scored


def _compare(base: Outcomes, tuned: Outcomes) -> dict[str, Any]:
    """Tuned minus base for every set and task, over the items that both answered."""
    compared = {}
    for one in tuned:
        ids = sorted(base.get(one, {}).keys() & tuned[one].keys())
        if ids:
            compared[one] = paired_bootstrap([base[one][i] for i in ids], [tuned[one][i] for i in ids]).to_json()
    return compared
