"""Our scores and those of lm-evaluation-harness agree item by item, on every multiple-choice set, for random and trained models.

Three paths answer the same items: ours; lm-evaluation-harness with our model interface; and lm-evaluation-harness with its own class for
transformers, on our export. The last two read what `export` wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from late import Late, require_package
from lmworks.evaluate.generation import gsm8k
from lmworks.evaluate.generation.interface import Reply
from lmworks.evaluate.generation.replies import Answerer
from lmworks.evaluate.harness.exporting import FORMS, METRICS, Exported, export
from lmworks.evaluate.logprobs import BatchedLogProbs
from lmworks.evaluate.sets import benchmarks, forms
from lmworks.evaluate.sets.benchmarks import CHOICE, GENERATION
from lmworks.evaluate.sets.items import ChoiceItem, score_name
from lmworks.export.export import write_huggingface
from lmworks.metrics.log import read
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.recipe.schema.model import Model
from lmworks.tokenizer import load as load_tokenizer
from lmworks.verify.numbers import Stated
from lmworks.weights.open import OpenModel, open_model
from saved_run import save_run
from tiny_run import Tiny

require_package("lm_eval", "no lm-eval: pip install 'lmworks[harness]'")
running: Any = Late("lmworks.evaluate.harness.running")
task_data: Any = Late("lmworks.evaluate.harness.task_data")
harness_lm: Any = Late("lmworks.evaluate.harness.lm")
task_index: Any = Late("lmworks.evaluate.harness.task_index")
FAST, SLOW = 12, 200  # items per set and form
SAME = 0.999  # share of items with the same choice


@pytest.fixture(scope="module")
def random_model(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    """A mixture of experts with random weights and a short context, which most prompts exceed."""
    save_run(tiny, folder := tmp_path_factory.mktemp("random") / "run")
    return open_model(f"{folder}@base", "cpu")


@pytest.fixture(scope="module")
def trained_model(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    """The tiny run after its training."""
    run = tiny.copy(tmp_path_factory.mktemp("trained") / "run")
    run.walk(last="pretrain")
    return open_model(run.run_dir, "cpu")


@pytest.fixture(scope="module")
def export_folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model in Hugging Face format, whose context holds most prompts."""
    folder = tmp_path_factory.mktemp("dense") / "huggingface"
    config = Model(
        vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=64, use_qk_norm=True, tie_word_embeddings=True, initializer_range=0.2, max_position_embeddings="640 tokens",
    )  # fmt: skip
    model = initialize(Transformer(config), seed=11).eval()
    write_huggingface(model, load_tokenizer(tiny.run_dir / "tokenizer"), folder, torch.float32)
    return folder


@pytest.fixture(scope="module")
def trained_export(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a dense model that was trained for 80 steps, whose context holds most prompts."""
    run, folder = tiny.copy(tmp_path_factory.mktemp("briefly") / "run"), tmp_path_factory.mktemp("briefly") / "huggingface"
    phase = (
        "{name: general, tokens: 102400 tokens, mixture: {code: 0.7, docs: 0.3}, sequence_length: 640 tokens, "
        "global_batch_tokens: 1280 tokens, lr_schedule: {warmup: 4 steps}}"
    )
    run.walk("model.moe=null", "tune=null", "train.micro_batch_sequences=1", f"train.phases=[{phase}]", last="pretrain")
    losses = [one["validation/loss"] for one in read(run.run_dir) if "validation/loss" in one]
    assert losses[-1] < losses[0] - 0.5, "it has learned"
    opened = open_model(run.run_dir, "cpu")
    write_huggingface(opened.model, load_tokenizer(run.run_dir / "tokenizer"), folder, torch.float32)
    return folder


def tasks(folder: Path, items: int) -> list[Exported]:
    """All sets in both forms, as tasks of lm-evaluation-harness in `folder`."""
    return export(folder, [Benchmark(name=name) for name in CHOICE], most=items)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Exported]]:
    folder = tmp_path_factory.mktemp("few")
    return folder, tasks(folder, FAST)


def ours(opened: OpenModel, items: int) -> dict[str, list[forms.Answered]]:
    """Every set in both forms by our own path."""
    logprobs = BatchedLogProbs(opened.model, opened.context)
    found = {}
    for name in CHOICE:
        for form in FORMS:
            shots = forms.SHOTS[form]  # type: ignore[index]
            loaded = benchmarks.load(Benchmark(name=name), items, shots)
            make: Any = forms.letters if form == "letters" else forms.cloze
            asked: list[ChoiceItem] = [make(item, loaded.shown_before(item, shots)) for item in loaded.items]
            found[score_name(name, form, shots)] = forms.answer(asked, opened.tokenizer, logprobs)
    return found


def choices(sample: dict[str, Any]) -> dict[str, int]:
    """The choice of lm-evaluation-harness under each normalization, by its own formulas, out of its record of an item."""
    values = [value for value, _ in sample["filtered_resps"]]
    texts = sample["doc"].get("choices") or [""] * len(values)
    lengths = {"byte": [len(text.encode()) for text in texts], "char": [len(text) for text in texts], "none": [1] * len(values)}
    scaled = {norm: [value / max(1, length) for value, length in zip(values, of, strict=True)] for norm, of in lengths.items()}
    return {norm: scores.index(max(scores)) for norm, scores in scaled.items()}


def compare(mine: dict[str, list[forms.Answered]], document: dict[str, Any], exported: Sequence[Exported]) -> None:
    """The same choice on at least 99.9% of the items, and equal accuracy, per set and form."""
    assert {one.score for one in exported} == mine.keys() and len(exported) == 2 * len(CHOICE)
    for one in exported:
        samples, answered = document["samples"][one.task], mine[one.score]
        assert [sample["doc"]["id"] for sample in samples] == [a.item.id for a in answered]
        for norm in [norm for norm, metric in METRICS.items() if metric in samples[0]["metrics"]]:
            same = [choices(sample)[norm] == a.pick(norm) for sample, a in zip(samples, answered, strict=True)]  # type: ignore[arg-type]
            assert sum(same) >= SAME * len(same), (one.task, norm)
            accuracy = document["results"][one.task][f"{METRICS[norm]},none"]
            assert accuracy == forms.score(answered, norm).accuracy, (one.task, norm)  # type: ignore[arg-type]


def by_their_class(folder: Path, include: Path, exported: Sequence[Exported], context: int) -> dict[str, Any]:
    """lm-evaluation-harness with its own class for transformers."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=8, max_length=context)
    with task_data.Source().installed():
        loaded = task_index.manager(include, trusted=False).load([one.task for one in exported])
        found = evaluate(theirs, loaded, bootstrap_iters=0)
    assert found is not None
    return dict(found)


def check_our_class(opened: OpenModel, folder: Path, exported: Sequence[Exported], items: int) -> None:
    options = running.HarnessOptions([one.task for one in exported], include_path=folder)
    compare(ours(opened, items), running.run(opened, options).document, exported)


@pytest.mark.slow
def test_our_class_agrees_on_a_random_model(random_model: OpenModel, few: tuple[Path, list[Exported]]) -> None:
    check_our_class(random_model, *few, FAST)


def test_our_class_agrees_on_a_trained_model(trained_model: OpenModel, few: tuple[Path, list[Exported]]) -> None:
    check_our_class(trained_model, *few, FAST)


@pytest.mark.slow
def test_their_class_agrees_on_our_export(export_folder: Path, few: tuple[Path, list[Exported]]) -> None:
    opened = open_model(export_folder, "cpu")
    compare(ours(opened, FAST), by_their_class(export_folder, *few, opened.context), few[1])


@pytest.mark.slow
def test_their_class_agrees_on_the_export_of_a_trained_model(trained_export: Path, tmp_path: Path) -> None:
    """On many items: training moves log-likelihoods apart, or together where it has learned the same of two choices."""
    opened, exported = open_model(trained_export, "cpu"), tasks(tmp_path, SLOW)
    compare(ours(opened, SLOW), by_their_class(trained_export, tmp_path, exported, opened.context), exported)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["random_model", "trained_model", "export_folder"])
def test_all_agree_on_many_items(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    subject, exported = request.getfixturevalue(which), tasks(tmp_path, SLOW)
    opened = open_model(subject, "cpu") if isinstance(subject, Path) else subject
    check_our_class(opened, tmp_path, exported, SLOW)
    if isinstance(subject, Path):
        compare(ours(opened, SLOW), by_their_class(subject, tmp_path, exported, opened.context), exported)


def test_a_difference_is_seen(random_model: OpenModel, few: tuple[Path, list[Exported]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: without the context, choices differ."""
    monkeypatch.setattr(harness_lm.HarnessLM, "_encode_pair", lambda self, context, rest: ([self.eos_id], self.encode(rest)))
    with pytest.raises(AssertionError):
        check_our_class(random_model, *few, FAST)


def test_gsm8k_replies_and_answers_agree(
    export_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same replies by all three paths, and the same judgment: a stated number, or else the last one of a reply that has ended."""
    monkeypatch.setattr(gsm8k, "_MOST_TOKENS", 40)
    benchmark = Benchmark(name="gsm8k", shots=0)
    [exported] = export(tmp_path, [benchmark], most=FAST)
    opened = open_model(export_folder, "cpu")
    answerer = Answerer(opened.model, opened.tokenizer, chat=False)
    chosen = GENERATION["gsm8k"].open(benchmark)
    asked = chosen.prompts(FAST, 0, answerer)
    replies = [reply for [reply] in answerer(asked)]
    judged = [one for prompt, reply in zip(asked, replies, strict=True) for one in chosen.judge(prompt, [reply])]
    assert len({reply.text for reply in replies}) > 1
    documents = [
        running.run(opened, running.HarnessOptions([exported.task], include_path=tmp_path)).document,
        by_their_class(export_folder, tmp_path, [exported], opened.context),
    ]
    for document in documents:
        samples = document["samples"][exported.task]
        stated, last = ([one for one in samples if one["filter"] == name] for name in ("stated", "last-number"))
        assert [one["resps"][0][0] for one in stated] == [reply.text for reply in replies]
        found = [
            bool(one["exact_match"]) if one["filtered_resps"] != ["[invalid]"] else bool(other["exact_match"]) and not reply.truncated
            for one, other, reply in zip(stated, last, replies, strict=True)
        ]
        assert found == [one.correct for one in judged]


@pytest.mark.parametrize(
    ("reply", "answer", "correct"),
    [("So 5 + 4 = 9.\n#### 9", 9, True), ("The answer is 1,234.", 1234, True), ("It is 12 and then 18", 18, True), ("9 of 18", 9, False),
     ("The answer is $7.00 for 3", 7, True), ("no number", 1, False), ("-5", -5, True)],
)  # fmt: skip
def test_the_numbers_that_replies_give(tmp_path: Path, reply: str, answer: int, correct: bool) -> None:
    """The filters of the exported task read the same answer as our judge."""
    [exported] = export(tmp_path, [Benchmark(name="gsm8k", shots=0)], most=1)
    with task_data.Source().installed():
        task = task_index.manager(tmp_path, trusted=False).load([exported.task])["tasks"][exported.task]
    task.set_fewshot_seed(1)
    task.build_all_requests(limit=1)
    [instance] = task.instances
    instance.resps.append(reply)
    task.apply_filters()
    marks = {
        name: task.process_results({**instance.doc, "answer": str(answer)}, [instance.filtered_resps[name]])["exact_match"]
        for name in ("stated", "last-number")
    }
    settled = marks["stated"] if instance.filtered_resps["stated"] != "[invalid]" else marks["last-number"]
    assert bool(settled) == gsm8k.judge(Reply(reply), Stated(str(answer), Fraction(answer))).correct == correct
