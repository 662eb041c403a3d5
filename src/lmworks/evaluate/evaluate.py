"""The evaluation stage: everything that a finished model is measured with, in one document; and the scores of any one model.

    out_dir/results.json          all figures, of the base model and of later ones, and of the weights of `start_from`
    out_dir/items-NAME.jsonl      the items that failed and succeeded most clearly, with their log-likelihoods and replies
    out_dir/outcomes-NAME.jsonl   one line per item and score, for paired comparisons; `lmworks.evaluate.records` has the others

`evaluate_model` scores a model of a run, a checkpoint or a Hugging Face folder without a stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.corpus.contamination import Question
from lmworks.errors import UserError, all_refusals, raise_first
from lmworks.evaluate import bits_per_byte, protection
from lmworks.evaluate.answers import answer_bits, own_answer_bits
from lmworks.evaluate.bits_per_byte import DocumentBits, by_domain, held_out, training_texts
from lmworks.evaluate.comparison import NothingInCommon, compare
from lmworks.evaluate.generation.replies import Answerer, samples
from lmworks.evaluate.generation.scoring import SEED, Reasoning, generate_tasks
from lmworks.evaluate.generation.scoring import measure as measure_generation
from lmworks.evaluate.logprobs import BatchedLogProbs
from lmworks.evaluate.records import START, EvaluationResults, forgetting, not_compared, write_records
from lmworks.evaluate.results import read_results
from lmworks.evaluate.results_folder import Evaluated
from lmworks.evaluate.sets.benchmarks import check_local, check_names
from lmworks.evaluate.sets.items import FORMS, Form
from lmworks.evaluate.sets.scoring import NOT_CLEAN, measure, training_flops
from lmworks.evaluate.sets.sources import PACKAGE
from lmworks.host.devices import dtype_for
from lmworks.io import files
from lmworks.io.run_layout import BASE
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.observe.sampling import prompts as prompts_of
from lmworks.weights.open import OpenModel, context_length

if TYPE_CHECKING:
    from lmworks.model import Transformer


def refusals(recipe: Recipe) -> Iterator[UserError]:
    """The benchmarks and tasks that this installation does not know or cannot read, before anything is trained."""
    for one in recipe.evaluate.benchmarks:
        yield from islice(all_refusals(partial(look, [one]) for look in (check_names, check_local)), 1)
    yield from all_refusals(partial(generate_tasks, generator, 1) for generator in recipe.evaluate.tasks)


def evaluate(
    recipe: Recipe, model: Transformer, tokenizer: Tokenizer, corpus_dir: Path, out_dir: Path, name: str,
    searched: Sequence[Path] = (), conversations: Path | None = None, chat: bool | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure `model` and write it into `out_dir/results.json` under `name`; returns the whole document.

    The activations are in the precision that the recipe trains in (fp32 for fp16); the results say which. The base model
    starts the document afresh; those of later stages are added to it, each with its paired comparison with the base model, of which the
    last one is kept. Equal inputs give equal figures (the speeds aside).
    With the name `START` the weights are those that pretraining started from: they are measured once, after the base model, and every
    model is compared with them (`forgetting_since_start`).
    A later model is scored in the forms of the base model too, so that the two can be compared. `searched` are the folders with the
    records of what the text that the model was trained on was searched for: the verdict of a score on any other item says that it is not
    clean. `conversations` is the folder of the tuning data, whose held-out answers are scored too. `chat` says whether
    the model answers in a chat; by default later models do. Where the base model does, its answers to general questions are kept, and
    scored for the later models too (`own_answers`).
    Raises `UserError` for what `refusals` finds and for a corpus without held-out text.
    """
    raise_first(refusals(recipe))
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / "results.json"
    later = name != BASE.model
    results = files.read_json(path) if later and path.exists() else {"models": {}}
    texts = held_out(corpus_dir) if recipe.has_text else {}
    if texts and recipe.evaluate.references and "references" not in results:
        marks = bits_per_byte.references(texts, training_texts(corpus_dir))
        results["references"] = {"bits_per_byte": marks, "how": bits_per_byte.HOW_COMPRESSED, "missing": bits_per_byte.missing()}
    was_training, was_dtype = model.training, model.compute_dtype
    model.eval()
    precision = "fp32" if recipe.train.precision == "fp16" else recipe.train.precision
    model.compute_dtype = dtype_for(precision, model.embedding.weight.device)
    try:
        doubt = partial(protection.doubt, searched=searched, recipe=recipe, corpus_dir=corpus_dir)
        subject = OpenModel(model, tokenizer, context_length(recipe, model), later and name != START if chat is None else chat, name)
        base = results["models"].get(BASE.model, {}).get("scores", {}).values() if later else ()
        measured, found = _measure(recipe, subject, corpus_dir, out_dir, texts, _forms(base), doubt, conversations)
    finally:
        model.train(was_training)
        model.compute_dtype = was_dtype
    if name == START:
        results["start"] = measured
    else:
        results["models"][name] = measured
    results["not_clean"] = results.get("not_clean", {}) | measured.pop("not_clean")
    results["how"] = {"bits_per_byte": bits_per_byte.HOW, "scores": _HOW_SCORES, "tasks": _HOW_TASKS}
    write_records(out_dir, name, found, add=later)
    if later and name != START and BASE.model in results["models"]:
        results["compared"], results["forgetting"] = _compare(out_dir, BASE.model, name)
        for one, compared in results["compared"].items():
            if measured["scores"][one]["set"] in results["not_clean"]:
                compared["verdict"] += NOT_CLEAN
    if "start" in results:
        _, results["forgetting_since_start"] = _compare(out_dir, START, list(results["models"])[-1])
    files.write_json(path, results)
    return results


def start_is_missing(out_dir: Path, reason: str) -> dict[str, Any]:
    """Note in `out_dir/results.json` why nothing can be compared with the weights of `start_from`; returns the whole document."""
    results = files.read_json(out_dir / "results.json")
    results["forgetting_since_start"] = not_compared(list(results["models"])[-1], reason)
    files.write_json(out_dir / "results.json", results)
    return results


_HOW_SCORES = (
    f"SET/FORM/SHOTS-shot; sets of {PACKAGE} unless the recipe names other data; cloze: the likeliest choice per byte wins (by_norm has "
    "other normalizations); letters: the likeliest letter; free: the answer that is read from a greedy reply; a fixed sample by hash of "
    "the item; 95% Wilson interval; the verdict compares the whole interval with chance, or with the best constant answer where one exists"
)
_HOW_TASKS = (
    f"reasoning-gym with seeds from {SEED}, answered freely and greedily, full marks of the package's verifier only; "
    "95% Wilson interval; baseline: the commonest right answer of the same questions"
)

_Doubt = Callable[[str, list[Question]], str | None]


def _measure(
    recipe: Recipe, subject: OpenModel, corpus_dir: Path, out_dir: Path, texts: dict[str, list[str]], paired: tuple[Form, ...],
    doubt: _Doubt, conversations: Path | None,
) -> tuple[dict[str, Any], EvaluationResults]:  # fmt: skip
    model, tokenizer, context, wanted = subject.model, subject.tokenizer, subject.context, recipe.evaluate
    logprobs = BatchedLogProbs(model, context)
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    documents = bits_per_byte.document_bits(texts, tokenizer, tokenizer.vocab_size, logprobs, context, f"{subject.name}: held-out text")
    if conversations is not None:
        documents += answer_bits(conversations, tokenizer, logprobs, context, f"{subject.name}: held-out answers")
    documents += own_answer_bits(subject, logprobs, out_dir)
    bpb = bits_per_byte.by_domain(documents)
    scored_tokens = sum(one.tokens for domain, one in bpb.items() if domain != bits_per_byte.OVERALL)
    seconds["held-out text"] = time.perf_counter() - start
    speed: dict[str, Any] = {"scored_tokens_per_second": scored_tokens / seconds["held-out text"]} if bpb else {}
    measured: dict[str, Any] = {"context": context, "dtype": str(model.compute_dtype).removeprefix("torch."),
                                "bits_per_byte": {domain: value.to_json() for domain, value in bpb.items()}}
    start = time.perf_counter()
    found = measure(subject, wanted.benchmarks, wanted.benchmark_items, training_flops(recipe, model.config), paired)
    seconds["benchmarks"] = time.perf_counter() - start
    found.documents = documents
    start, scored = time.perf_counter(), len(found.outcomes)
    answerer = Answerer(model, tokenizer, subject.chat)
    for generator in wanted.tasks:
        measure_generation(Reasoning(generator, wanted.task_items), answerer, None, None, subject.name, found)
    seconds["tasks"] = time.perf_counter() - start
    if wanted.tasks:
        speed["replies_per_second"] = (len(found.outcomes) - scored) / seconds["tasks"]
    measured["scores"], measured["unavailable"] = found.scores, found.unavailable
    measured["not_clean"] = {one: why for one, items_of in found.asked.items() if (why := doubt(one, items_of))}
    mark(found.scores, measured["not_clean"])
    prompts = wanted.questions if subject.chat else prompts_of(recipe, corpus_dir, tokenizer.encode)
    start = time.perf_counter()
    measured["samples"] = [sample.to_json() for sample in samples(model, tokenizer, prompts, chat=subject.chat)]
    seconds["samples"] = time.perf_counter() - start
    measured["speed"] = speed | {"seconds": seconds}
    return measured, found


def mark(scores: dict[str, dict[str, Any]], doubtful: dict[str, str]) -> None:
    """Let each verdict on what may have been trained on say so: whoever prints a score prints its verdict."""
    for score in scores.values():
        if doubtful.keys() & set(score.get("sets", [score["set"]])):
            score["verdict"] += NOT_CLEAN


def _forms(scores: Iterable[dict[str, Any]]) -> tuple[Form, ...]:
    """The forms that were chosen for a model."""
    chosen = {score["form"] for score in scores if score.get("chosen")}
    return tuple(form for form in FORMS if form in chosen)


def _compare(out_dir: Path, earlier: str, later: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `later` model minus the `earlier` one for every score, over the items that both answered; and what it has forgotten."""
    found: dict[str, Any] = {"scores": [], "bits_per_byte": []}
    with suppress(NothingInCommon):  # an evaluation without benchmarks, on few held-out documents
        found = compare([read_results(out_dir, name, name) for name in (earlier, later)], examples=0)["comparisons"][0]
    return {row["score"]: {key: row[key] for key in _COMPARED} for row in found["scores"]}, forgetting(found, later, earlier)


_COMPARED = ("difference", "interval", "n", "p", "adjusted_p", "minimum_detectable", "lost", "gained", "verdict")


def evaluate_model(
    opened: OpenModel, benchmarks: Sequence[Benchmark], most: int, *, flops: float | None = None,
    doubt: Callable[[str, list[Question]], str | None] | None = None, documents: Sequence[DocumentBits] = (),
) -> Evaluated:  # fmt: skip
    """Score a model on benchmark sets.

    `most` is the number of items per set where a benchmark has none; `flops` what its training took, if known, which decides on the form.
    `doubt` says why the scores of a set may be on trained text. `documents` are the bits of held-out documents, if they were measured.
    Raises `UserError` for sets that do not exist and data that cannot be read.
    """
    check_names(benchmarks)
    check_local(benchmarks)
    found = measure(opened, benchmarks, most, flops)
    not_clean = {one: why for one, asked in found.asked.items() if (why := doubt(one, asked))} if doubt else {}
    mark(found.scores, not_clean)
    dtype = str(opened.model.compute_dtype).removeprefix("torch.")
    found.documents = list(documents)
    model: dict[str, Any] = {"context": opened.context, "dtype": dtype, "scores": found.scores, "unavailable": found.unavailable}
    if documents:
        model["bits_per_byte"] = {domain: value.to_json() for domain, value in by_domain(documents).items()}
    return Evaluated(opened.name, model, not_clean, found)
