"""Scores of a model on multiple-choice sets and tasks of the user's own, in the forms that suit it.

A model of little training does not use letters: it answers near chance in letter form, whatever it knows, and cloze form says more
(OLMES, arXiv:2406.08446). A model that can use them is asked with letters, since the likelihood of a text also depends on its length and
wording. A chat model is asked as a user would ask it, if its replies can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmworks.errors import Unavailable
from lmworks.evaluate.generation.replies import Answerer
from lmworks.evaluate.generation.scoring import measure as measure_generation
from lmworks.evaluate.logprobs import BatchedLogProbs
from lmworks.evaluate.records import EvaluationResults
from lmworks.evaluate.sets import benchmarks as loading
from lmworks.evaluate.sets import forms
from lmworks.evaluate.sets.benchmarks import GENERATION, Loaded, is_generated
from lmworks.evaluate.sets.items import ChoiceItem, Form, Item, OpenItem, asked_hash, protected_question, score_name, shortened
from lmworks.evaluate.statistics import Score, pooled
from lmworks.recipe.parameters import parameters
from lmworks.recipe.schema.evaluate import Benchmark, load_task
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.terminal import bar, console
from lmworks.weights.open import OpenModel

if TYPE_CHECKING:
    pass


LETTERS_FLOPS = 1e21
"""Training FLOPs below which no model has been reported to answer with letters above chance; above it, a probe decides. (OLMES finds
Pythia-6.7B, of 1.2e22, still at chance and Llama-2-7B, of 8e22, far above it.)"""
PROBE_ITEMS = 100  # over all sets
READABLE = 0.5  # share of replies that name a choice, from which free answers say something


@dataclass(frozen=True)
class Probes:
    """Measurements on a few items, made only if they decide: the score in letter form, and the share of free replies that name a choice."""

    letters: Callable[[], Score]
    readable: Callable[[], float]


@dataclass(frozen=True)
class Choice:
    """Forms to score a model in, and the reason in words."""

    forms: tuple[Form, ...]
    reason: str


def choose(chat: bool, flops: float | None, probes: Probes, paired: tuple[Form, ...] = ()) -> Choice:
    """The forms that suit a model.

    `chat`: it was tuned on conversations. `flops`: what its training took, None if that is not known. `paired`: the forms of the base
    model that it is compared with, which are always among them.
    """
    refused = ""
    if chat:
        share = probes.readable()
        measured = f"tuned on conversations, and {share:.0%} of its replies to probe items name a choice"
        free: tuple[Form, ...] = ("free",) if share >= READABLE else ()
        if paired:
            return Choice((*paired, *free), f"{', '.join(paired)} as the base model; {measured}")
        if free:
            return Choice(free, measured)
        refused = f"{measured}; "
    if flops is not None and flops < LETTERS_FLOPS:
        few = f"trained with {flops:.1e} FLOPs, and models answer with letters from about {LETTERS_FLOPS:.0e} on"
        return Choice(("cloze",), refused + few)
    found = probes.letters()
    measured = f"{found.correct} of {found.n} probe items are right in letter form, where a constant letter gets {found.baseline:.0%}"
    return Choice(("letters" if found.interval[0] > found.baseline else "cloze",), refused + measured)


def training_flops(recipe: Recipe, config: Model) -> float | None:
    """FLOPs of pretraining a model with this configuration, 6 per active parameter and token (Kaplan et al. 2020, arXiv:2001.08361); None
    for a run that began with weights of unknown training."""
    if recipe.start_from is not None:
        return None
    active = sum(one.size * one.active for one in parameters(config) if not one.mtp)
    return 6 * active * sum(int(phase.tokens) for phase in recipe.train.phases)


ALL_SETS = "all sets"
NOT_CLEAN = ", not clean"
"""The end of the verdict on a score that may be on trained text."""
_NOTABLE = 10  # items per score and side
_MOST_ANSWER = 600  # characters of an answer in the outcomes


@dataclass(frozen=True)
class Task:
    """A set in a form with its sample of items: one score. `chosen`: whether the form was chosen to suit the model, and not asked for."""

    name: str
    form: Form
    shots: int
    loaded: Loaded
    reason: str
    chosen: bool

    @property
    def score(self) -> str:
        return score_name(self.name, self.form, self.shots)


def measure(
    subject: OpenModel, benchmarks: Sequence[Benchmark], most: int, flops: float | None = None, paired: tuple[Form, ...] = ()
) -> EvaluationResults:
    """Score `subject` on the sets of a recipe, at most `most` items of each unless a benchmark says otherwise.

    `flops` and `paired` decide which forms suit it (`choose`). Raises `UserError` for data that is not what it should be.
    """
    found = EvaluationResults()
    generated = [one for one in benchmarks if is_generated(one)]
    tasks = _tasks(subject, [one for one in benchmarks if one not in generated], most, flops, paired, found)
    found.asked = {task.name: [protected_question(item) for item in task.loaded.items] for task in tasks}
    total = sum(len(item.continuations) if task.form != "free" and isinstance(item, ChoiceItem) else 1
                for task in tasks for item in task.loaded.items)
    with bar(f"{subject.name}: benchmarks", total) as progress:
        for task in tasks:
            progress.note(task.score)
            run = _free if task.form == "free" else _likelihood
            run(subject, task, found, progress.advance)
    found.scores |= pooled_scores(found.scores)
    answerer = Answerer(subject.model, subject.tokenizer, subject.chat)
    for benchmark in generated:
        chosen = GENERATION[benchmark.name].open(benchmark)
        measure_generation(chosen, answerer, benchmark.items or most, benchmark.shots, subject.name, found)
    return found


_NORM: dict[Form, str | None] = {"cloze": "byte", "letters": "none", "free": None}


def pooled_scores(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each form and number of worked examples that several sets have: their scores as one."""
    parts: dict[tuple[Form, int], list[Mapping[str, Any]]] = {}
    for one in scores.values():
        if one["form"] in _NORM and one["set"] != ALL_SETS:
            parts.setdefault((one["form"], one["shots"]), []).append(one)
    found: dict[str, dict[str, Any]] = {}
    for (form, shots), each in parts.items():
        if len(each) > 1:
            whole = pooled([Score(one["correct"], one["n"], one["chance"], one["baseline"]) for one in each]).to_json()
            doubt = NOT_CLEAN if any(one["verdict"].endswith(NOT_CLEAN) for one in each) else ""
            found[score_name(ALL_SETS, form, shots)] = whole | {
                "verdict": f"{whole['verdict']}{doubt}", "set": ALL_SETS, "form": form, "shots": shots, "norm": _NORM[form],
                "sets": [one["set"] for one in each],
            }  # fmt: skip
    return found


def _tasks(
    subject: OpenModel, benchmarks: Sequence[Benchmark], most: int, flops: float | None, paired: tuple[Form, ...], found: EvaluationResults
) -> list[Task]:
    """Every set in its forms; sets without data are noted in `found`."""
    open_: list[tuple[Benchmark, Form | None]] = []  # with its form, if that is settled
    plain: dict[str, Sequence[Item]] = {}
    for one in benchmarks:
        try:
            plain[one.name] = loading.load(one, one.items or most, 0).items
        except Unavailable as unavailable:
            found.unavailable[one.name] = str(unavailable)
            continue
        task = load_task(one.file) if one.file is not None else None
        form = one.form if one.form != "auto" else task.form if task else None
        if any(isinstance(item, OpenItem) for item in plain[one.name]):
            form = "free"
        open_.append((one, form))
    automatic = [one for one, form in open_ if form is None]
    choice: Choice | None = None
    if automatic:
        probes = Probes(lambda: _probe_letters(subject, automatic), lambda: _probe_replies(subject, automatic))
        choice = choose(subject.chat, flops, probes, paired)
        console.print(f"{subject.name}: {' and '.join(choice.forms)} form ({choice.reason})", style="dim")
    tasks: list[Task] = []
    for one, form in open_:
        several, reason = ((form,), "asked for") if form is not None else (choice.forms, choice.reason) if choice else ((), "")
        for chosen in several:
            count = shots_of(one, chosen)
            if any((task.name, task.form, task.shots) == (one.name, chosen, count) for task in tasks):
                continue  # a form that is asked for and also chosen is one score
            tasks.append(Task(one.name, chosen, count, loading.load(one, one.items or most, count), reason, form is None))
    return tasks


def shots_of(benchmark: Benchmark, form: Form) -> int:
    """The worked examples before each question: those asked for, or those of the task, or those of the form, or fewer for a set that has
    fewer."""
    task = load_task(benchmark.file) if benchmark.file is not None else None
    if (settled := task.shots if task and benchmark.shots is None else benchmark.shots) is not None:
        return settled
    return min(forms.SHOTS[form], loading.most_shots(benchmark)) if forms.SHOTS[form] else 0


def _formulated(task: Task) -> list[ChoiceItem]:
    make: Callable[[ChoiceItem, Sequence[ChoiceItem]], ChoiceItem] = forms.letters if task.form == "letters" else forms.cloze
    return [make(item, task.loaded.shown_before(item, task.shots)) for item in task.loaded.items]  # type: ignore[arg-type]


def _likelihood(subject: OpenModel, task: Task, found: EvaluationResults, advance: Callable[[int], None]) -> None:
    logprobs = BatchedLogProbs(subject.model, subject.context)
    cloze = task.form == "cloze"
    answered = forms.answer(_formulated(task), subject.tokenizer, logprobs, advance, unconditional=cloze)
    scored = forms.score(answered)
    # the contexts of the truncated ones have lost their beginnings
    more: dict[str, Any] = {"truncated": sum(a.prompt_tokens - 1 > subject.context for a in answered)}
    if cloze:
        more["by_norm"] = {norm: forms.score(answered, norm).accuracy for norm in answered[0].norms}
        more["bits_per_byte"] = sum(a.bits_per_byte for a in answered) / len(answered)
    failures = [None if a.correct() else "wrong" for a in answered]
    outcomes = [
        _outcome(a.item, failure, a.bits_per_byte if cloze else None, a.prompt_tokens, a.item.choices[a.pick()])
        for a, failure in zip(answered, failures, strict=True)
    ]
    found.add(task.score, _entry(task, scored, outcomes) | more, outcomes, [a.to_json() for a in forms.notable(answered, _NOTABLE)])


def _free(subject: OpenModel, task: Task, found: EvaluationResults, advance: Callable[[int], None]) -> None:
    answerer = Answerer(subject.model, subject.tokenizer, subject.chat)
    shown = [task.loaded.shown_before(item, task.shots) for item in task.loaded.items]
    judged = forms.answer_freely(task.loaded.items, shown, answerer, advance)
    scored = forms.score_freely(judged)
    outcomes = [_outcome(one.item, one.failure, float(one.correct), one.reply.prompt_tokens, one.reply.text) for one in judged]
    right, wrong = [one for one in judged if one.correct], [one for one in judged if not one.correct]
    entry = _entry(task, scored, outcomes) | {"failures": forms.failures(judged)}
    found.add(task.score, entry, outcomes, [one.to_json() for one in wrong[:_NOTABLE] + right[:_NOTABLE]])


def _outcome(item: Item, failure: str | None, value: float | None, tokens: int, answer: str) -> dict[str, Any]:
    passage = {"passage": item.passage} if isinstance(item, ChoiceItem) and item.passage else {}
    return {
        "set": item.set, "id": item.id, "subject": item.subject, "correct": failure is None, "value": value, "failure": failure,
        "tokens": tokens, "answer": shortened(answer, _MOST_ANSWER), "asked": asked_hash(item), **passage,
    }  # fmt: skip


def _entry(task: Task, scored: Score, outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = scored.to_json() | {"set": task.name, "form": task.form, "shots": task.shots, "norm": _NORM[task.form]}
    entry |= {"chosen": task.chosen, "reason": task.reason}
    if task.shots:
        shown = task.loaded.examples if task.loaded.per_subject else task.loaded.examples[: task.shots]
        entry["examples"] = {"from": task.loaded.origin, "fingerprint": loading.fingerprint(shown)}
        if task.loaded.left_out:
            entry["examples"]["left_out"] = task.loaded.left_out
    subjects: dict[str, list[bool]] = {}
    for one in outcomes:
        subjects.setdefault(one["subject"], []).append(one["correct"])
    if len(subjects) > 1:
        entry["by_subject"] = {name: {"correct": sum(right), "n": len(right)} for name, right in sorted(subjects.items())}
    return entry


def _probed(benchmarks: Sequence[Benchmark], form: Form) -> list[Task]:
    each = -(-PROBE_ITEMS // len(benchmarks))
    shots = [shots_of(one, form) for one in benchmarks]
    return [
        Task(one.name, form, count, loading.load(one, each, count), "probe", True) for one, count in zip(benchmarks, shots, strict=True)
    ]


def _probe_letters(subject: OpenModel, benchmarks: Sequence[Benchmark]) -> Score:
    items = [item for task in _probed(benchmarks, "letters") for item in _formulated(task)]
    with bar(f"{subject.name}: probe of letters", sum(len(item.choices) for item in items)) as progress:
        answered = forms.answer(items, subject.tokenizer, BatchedLogProbs(subject.model, subject.context), progress.advance)
    sets: dict[str, list[forms.Answered]] = {}
    for one in answered:
        sets.setdefault(one.item.set, []).append(one)
    return pooled([forms.score(part) for part in sets.values()])


def _probe_replies(subject: OpenModel, benchmarks: Sequence[Benchmark]) -> float:
    items = [item for task in _probed(benchmarks, "free") for item in task.loaded.items][: PROBE_ITEMS // 4]
    with bar(f"{subject.name}: probe of replies", len(items)) as progress:
        judged = forms.answer_freely(items, [()] * len(items), Answerer(subject.model, subject.tokenizer, subject.chat), progress.advance)
    return sum(one.extracted is not None for one in judged) / len(judged)
