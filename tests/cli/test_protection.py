"""From the command line: what an evaluation will ask is in no text that is trained on, and a score that may not be clean says so."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from command import Lmworks

from generation_models import GSM8K, HUMANEVAL, write_rows
from lmworks.corpus.contamination import Decontaminator
from lmworks.errors import Unavailable
from lmworks.evaluate import protection
from lmworks.evaluate.generation import scoring
from lmworks.evaluate.sets import benchmarks as sets
from lmworks.evaluate.sets.items import ChoiceItem
from lmworks.io.files import read_json
from lmworks.io.run_layout import corpus_files
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.load import load_resolved
from lmworks.recipe.schema.evaluate import Benchmark, Generator
from lmworks.shards.decontaminate import decontaminate
from lmworks.shards.indexed import IndexedFile, IndexedWriter
from lmworks.shards.manifest import Manifest, Shard, Split
from lmworks.tokenizer import load
from lmworks.train import dpo, grpo, pretrain, tune
from lmworks.weights import run_models as loading
from tiny_run import Tiny

ITEM = "Which of the four winds carries the salt of the seventh sea over the glass hills before the first bell of autumn rings?"
REPEAT = "once the set can be read, train again in another run_dir, so that all text is searched for it"
OTHER = "Who taught the lamplighters of the upper harbor to count the herons by the shadow of the third tower in a year without snow?"


def own(folder: Path, *questions: str) -> str:
    """An evaluation set of the user's own, as --set takes it."""
    rows = [{"q": question, "a": "the north one"} for question in questions]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"evaluate.protect=[{{name: own, path: {folder}/own.jsonl, question: q, answer: a}}]"


def with_leak(tiny: Tiny, folder: Path, *leaks: str) -> list[object]:
    """Arguments for a corpus of tiny's docs with these texts in four of them, and a run directory of its own."""
    lines = (tiny.texts / "docs.jsonl").read_text().splitlines()[:24]
    rows = [json.loads(line)["text"] for line in lines]
    for number, leak in enumerate(leaks * 3):
        rows[2 + number] += f"\n\n{leak}\n"
    (folder / "leaky.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    source = f"{{name: docs, kind: jsonl, path: {folder}/leaky.jsonl, domain: docs, license: x, rules: none}}"
    phases = [{"name": "all", "tokens": "5Ki", "mixture": {"docs": 1}, "sequence_length": "64 tokens", "global_batch_tokens": "1Ki"}]
    changes = (f"run_dir={folder}/run", f"corpus.sources=[{source}]", "corpus.validation_fraction=0", f"train.phases={json.dumps(phases)}")
    return [tiny.recipe, *itertools.chain.from_iterable(("--set", change) for change in changes)]


def trained_on(run_dir: Path) -> str:
    files = [path for some in corpus_files(run_dir / "corpus", "train").values() for path in some]
    return "\n".join(row["text"] for path in files for row in pq.read_table(path, columns=["text"]).to_pylist())


def test_a_file_of_ones_own_is_kept_out_of_the_corpus_and_watched(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    arguments = with_leak(tiny, tmp_path, ITEM, OTHER)
    done = lmworks("corpus", "prepare", *arguments, "--set", own(tmp_path, ITEM))
    assert done.code == 0, done.err
    assert ITEM not in trained_on(tmp_path / "run") and OTHER in trained_on(tmp_path / "run")
    own(tmp_path, ITEM, OTHER)
    done = lmworks("corpus", "prepare", *arguments, "--set", own(tmp_path, ITEM, OTHER))
    assert "the files of own have changed" in done.out + done.err
    assert ITEM not in trained_on(tmp_path / "run") and OTHER not in trained_on(tmp_path / "run")
    (tmp_path / "own.jsonl").write_text('{"question": "none"}\n')
    error = lmworks("corpus", "prepare", *arguments, "--set", own(tmp_path).replace("own.jsonl", "gone.jsonl")).error
    assert error.startswith("evaluate.protect.own: no files at")


def test_other_tasks_clean_the_corpus_again(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    asked = scoring.generate_tasks(Generator(name="family_relationships"), 50)[3].question
    arguments = with_leak(tiny, tmp_path, asked)
    lmworks("corpus", "prepare", *arguments, "--set", "evaluate.tasks=[spell_backward]")
    assert asked in trained_on(tmp_path / "run")
    lmworks("corpus", "prepare", *arguments, "--set", "evaluate.tasks=[spell_backward, family_relationships]")
    assert asked not in trained_on(tmp_path / "run")


def test_problems_and_programs_are_kept_out_and_options_are_checked(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    code = {"prompt": 'def add_2(x):\n    """ The sum of the petals of x roses and of the two that the gardener cut before it rained."""\n',
            "canonical_solution": "    return sum(petals(rose) for rose in x) + 2 * cut_before_rain\n"}  # fmt: skip
    problem, program = ITEM, code["prompt"] + code["canonical_solution"]
    numbers = write_rows(tmp_path / "gsm8k.jsonl", [{"question": ITEM, "answer": "#### 4"}, *GSM8K])
    programs = write_rows(tmp_path / "humaneval.jsonl", [{**HUMANEVAL[2], **code}])
    arguments = with_leak(tiny, tmp_path, problem, program)
    lmworks("corpus", "prepare", *arguments)
    assert problem in trained_on(tmp_path / "run") and "def add_2" in trained_on(tmp_path / "run")
    sets = f"evaluate.benchmarks=[{{name: gsm8k, path: {numbers}}}, {{name: humaneval, path: {programs}, samples: 3}}]"
    done = lmworks("corpus", "prepare", *arguments, "--set", sets)
    assert done.code == 0, done.err
    assert problem not in trained_on(tmp_path / "run") and "def add_2" not in trained_on(tmp_path / "run")
    for benchmark, message in (
        ("{name: gsm8k, lengths: [512 tokens]}", "gsm8k.lengths: this set does not have this option, only items, shots, hub, path"),
        ("{name: ruler-vt, path: data}", "ruler-vt.path: this set does not have this option, only items, shots, lengths; leave"),
        ("{name: piqa, samples: 5}", "piqa.samples: only sets that are answered by generation have it; leave it out"),
    ):
        error = lmworks("evaluate", *arguments, "--set", f"evaluate.benchmarks=[{benchmark}]").error
        assert message in " ".join(error.split()), error


def toy_set(benchmark: Benchmark) -> tuple[ChoiceItem, ...]:
    name, choices = benchmark.name, ("one thing", "another", "a third one")
    asked = [{"copa": ITEM, "piqa": OTHER}[name], *(f"what is {name} {number}?" for number in range(20))]
    rest = tuple(f" {choice}" for choice in choices)
    return tuple(
        ChoiceItem(name, str(number), "", text, choices, number % 3, (text,) * 3, rest, f"{text}{rest[number % 3]}")
        for number, text in enumerate(asked)
    )


def evaluated(lmworks: Lmworks, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: object) -> tuple[Any, str]:
    """The results of an untrained model, and what was printed."""
    monkeypatch.setattr(pretrain, "pretrain", lambda *given: None)

    def untrained(run_dir: Path, name: str) -> Transformer:
        return initialize(Transformer(load_resolved(run_dir / "resolved.json").model), seed=1).eval()

    monkeypatch.setattr(loading, "load_model", untrained)
    done = lmworks("evaluate", *arguments, "--set", "tune=null", "--set", "evaluate.benchmark_items=5", "--failures")
    assert done.code == 0, done.err
    assert "Failures in % of the items" in done.out and "wrong: copa/cloze/0-shot" in done.out
    return read_json(folder / "run" / "evaluate" / "results.json"), done.out


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_benchmarks_are_kept_out_and_one_that_was_not_is_scored_as_not_clean(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(benchmark: Benchmark) -> tuple[ChoiceItem, ...]:
        if benchmark.name == "piqa":
            raise Unavailable("no network today")
        return toy_set(benchmark)

    arguments = with_leak(tiny, tmp_path, ITEM)
    for change in ("evaluate.benchmarks=[piqa, copa]", "corpus.validation_fraction=0.2"):
        arguments += ["--set", change]
    monkeypatch.setattr(sets, "load_all", away)
    done = lmworks("corpus", "prepare", *arguments)
    assert done.code == 0, done.err
    assert ITEM not in trained_on(tmp_path / "run"), "copa asks it"
    assert read_json(tmp_path / "run" / "corpus" / "report.json")["protected"]["copa"]["found"] == 1
    assert "cannot be decontaminated against piqa" in " ".join((done.out + done.err).split())
    monkeypatch.setattr(sets, "load_all", toy_set)
    results, said = evaluated(lmworks, monkeypatch, tmp_path, *arguments)
    scores = results["models"]["base"]["scores"]
    assert results["not_clean"] == {"piqa": f"no network today; {REPEAT}"}
    for marked in ("piqa", "all sets"):
        assert scores[f"{marked}/cloze/0-shot"]["verdict"].endswith(", not clean")
    assert not scores["copa/cloze/0-shot"]["verdict"].endswith("not clean")
    assert f"not clean: piqa: no network today; {REPEAT}" in " ".join(said.split())
    assert "Not clean: piqa: no network today" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tuning_data_holds_nothing_that_is_asked(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def enough(*given: object) -> None:
        raise RuntimeError("the data is made")

    chats = (tiny.texts / "chats.jsonl").read_text().splitlines()
    leak = {"messages": [{"role": "user", "content": "A riddle!"}, {"role": "assistant", "content": ITEM}]}
    (tmp_path / "chats.jsonl").write_text("\n".join([*chats[:40], json.dumps(leak)]) + "\n")
    monkeypatch.setattr(pretrain, "pretrain", lambda *given: None)
    monkeypatch.setattr(tune, "TuningCurriculum", enough)
    data = f"tune.data=[{{name: mine, kind: files, path: {tmp_path}/chats.jsonl}}]"
    lmworks("tune", *with_leak(tiny, tmp_path), "--set", own(tmp_path, ITEM), "--set", data)
    manifest = read_json(tmp_path / "run" / "tune" / "data" / "manifest.json")
    assert manifest["data"]["mine"]["left_out"] == {"holds an evaluation item": 1}


TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi."}]


def saying(turn: int, content: Any) -> list[dict[str, Any]]:
    """A conversation with this in one turn."""
    return [{**message, "content": content} if number == turn else message for number, message in enumerate(TALK)]


CLEAN = {"prompt": "What is 1 + 1?", "chosen": "2", "rejected": "3", "answer": "2"}
ANSWERS = {"chosen": "Yes.", "rejected": "No."}
ASKED: dict[str, list[dict[str, Any]]] = {  # a user's turn is an item
    "grpo": [{"prompt": ITEM}, {"prompt": saying(1, ITEM)[:2]}, {"prompt": saying(1, [{"type": "text", "text": f" {ITEM}"}])[:2]}],
    "dpo": [{"prompt": ITEM, **ANSWERS}, {"prompt": saying(1, ITEM)[:2], **ANSWERS}],
}
HELD: dict[str, list[dict[str, Any]]] = {  # an item is in another text, or is only a part of it
    "grpo": [
        {"prompt": f"Question: {ITEM}"}, {"prompt": saying(1, f"Question: {ITEM}\nAnswer:")[:2]}, {"prompt": saying(0, ITEM)[:2]},
        {"prompt": f"<b>{ITEM.replace(' ', '</b> <b>')}</b>"}, {"prompt": json.dumps({"task": f"{ITEM} \u201c"})},
        {"prompt": "Hello?", "question": f"Question: {ITEM}"}, {"prompt": "Hello!", "answer": ITEM},
        {"prompt": TALK[:2], "tools": [{"type": "function", "function": {"name": "ask", "description": ITEM, "parameters": {}}}]},
    ],
    "dpo": [
        {"prompt": f"Question: {ITEM}", **ANSWERS}, {"prompt": saying(0, ITEM)[:2], **ANSWERS},
        {"prompt": [*saying(2, ITEM), TALK[1]], **ANSWERS}, {"prompt": "Hello?", "chosen": ITEM, "rejected": "No."},
        {"prompt": "Hello?", "chosen": "Yes.", "rejected": ITEM},
        {"prompt": [TALK[1]], "chosen": [{**TALK[2], "reasoning_content": ITEM}], "rejected": [{**TALK[2], "content": "No."}]},
        {
            "prompt": [TALK[1]], "chosen": [TALK[2]], "rejected": [{**TALK[2], "content": "No."}],
            "tools": [{"type": "function", "function": {"name": "ask", "description": ITEM, "parameters": {}}}],
        },
    ],
}  # fmt: skip


def aligned(lmworks: Lmworks, tiny: Tiny, folder: Path, stage: str, rows: list[Any], *changes: str) -> tuple[Any, str]:
    """What a stage, which is not trained, reports of its only data set, if anything; and what is printed."""

    def enough(*given: object, **named: object) -> None:
        raise RuntimeError("the data is read")

    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def reward(prompt, answer, row):\n    return 0.0\n")
    data = {"name": "mine", "kind": "files", "path": f"{folder}/rows.jsonl"}
    data |= {"reward": "python", "file": f"{folder}/reward.py"} if stage == "grpo" else {}
    node = {"data": [data], "sequence_length": "512 tokens"} | ({"max_new_tokens": 8} if stage == "grpo" else {})
    every = (f"{stage}={json.dumps(node)}", "tune=null", "model.max_position_embeddings=512 tokens", *changes)
    options = itertools.chain.from_iterable(("--set", change) for change in every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "pretrain", lambda *given: None)
        patch.setattr(dpo, "weights_before", enough)
        patch.setattr(grpo, "weights_before", lambda *given: SimpleNamespace(communicator=SimpleNamespace(is_first=True)))
        patch.setattr(grpo, "run_stage", enough)
        done = lmworks(stage, *with_leak(tiny, folder), *options)
    path = folder / "run" / stage / {"grpo": "prompts.json", "dpo": "data/manifest.json"}[stage]
    return read_json(path)["data"]["mine"] if path.exists() else None, " ".join((done.out + done.err).split())


@pytest.mark.parametrize("action", ["drop", "report", "fail"])
@pytest.mark.parametrize("stage", ["dpo", "grpo"])
def test_preference_pairs_and_prompts_hold_nothing_that_is_asked(
    stage: str, action: str, lmworks: Lmworks, tiny: Tiny, tmp_path: Path
) -> None:  # fmt: skip
    asked, held, kept = ASKED[stage], HELD[stage], {"dpo": "pairs", "grpo": "prompts"}[stage]
    changes = f"corpus.decontaminate.action={action}", own(tmp_path, ITEM)
    made, said = aligned(lmworks, tiny, tmp_path, stage, [CLEAN, *held, *asked], *changes)
    if action == "fail":
        assert made is None
        assert f"{stage}.data.mine: {tmp_path}/rows.jsonl:2 holds the evaluation item own/" in said
        _, said = aligned(lmworks, tiny, tmp_path, stage, [CLEAN, *asked], *changes)
        assert f"{tmp_path}/rows.jsonl:2 is asked by the evaluation; take it out, or set corpus.decontaminate.action to drop" in said
    elif action == "drop":
        assert made["left_out"] == {"asked by the evaluation": len(asked), "holds an evaluation item": len(held)}
        assert (made[kept], made["contaminated"]) == (1, len(held + asked))
    else:
        assert (made["left_out"], made[kept], made["contaminated"]) == ({}, 1 + len(held + asked), len(held + asked))
        assert f"{stage}.data.mine: {len(held + asked)} contaminated rows are kept" in said
    searched = protection.searched_items([tmp_path / "run" / stage])
    assert len(searched) == (1 if action == "drop" else 0), "with fail the run is refused before its first stage"


def test_a_set_that_can_be_read_after_training_began_does_not_count_as_searched_for(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(benchmark: Benchmark) -> tuple[ChoiceItem, ...]:
        raise Unavailable("no network today")

    folder, given = tmp_path / "run" / "grpo", (lmworks, tiny, tmp_path, "grpo", [CLEAN], "evaluate.benchmarks=[copa]", own(tmp_path, ITEM))
    monkeypatch.setattr(sets, "load_all", away)
    aligned(*given)
    assert len(protection.searched_items([folder])) == 1
    monkeypatch.setattr(sets, "load_all", toy_set)
    aligned(*given)
    assert len(protection.searched_items([folder])) == 22
    monkeypatch.setattr(sets, "load_all", away)
    aligned(*given)
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    monkeypatch.setattr(sets, "load_all", toy_set)
    aligned(*given)
    assert len(protection.searched_items([folder])) == 1, "the first step read prompts that were searched for less"


def test_imported_shards_lose_the_documents_that_hold_what_is_asked(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    arguments = with_leak(tiny, tmp_path)
    assert lmworks("tokenizer", "train", *arguments).code == 0
    tokenizer_dir = tmp_path / "run" / "tokenizer"
    tokenizer = load(tokenizer_dir)
    texts = [f"Note {number} about the {number * number} herons of the lower harbor." for number in range(30)]
    texts[11] += f" {ITEM}"
    with IndexedWriter(tmp_path / "web", np.dtype("<u2")) as writer:
        for text in texts:
            writer.add(np.array([*tokenizer.encode(text), tokenizer.eos_id]))
    options = ("--tokenizer", tokenizer_dir, "--name", "web", "--out", tmp_path / "imported")
    assert lmworks("data", "import", "megatron", tmp_path / "web", *options).code == 0
    imported = ("--set", f"shards.imported={{web: {tmp_path}/imported}}")

    def texts_of() -> list[str]:
        found = []
        for shard in Manifest.load(tmp_path / "run" / "shards").source("web").train.shards:
            file = IndexedFile(tmp_path / "run" / "shards" / shard.prefix)
            found += [tokenizer.decode(file.document(number).tolist()[:-1]) for number in range(file.documents)]
        return sorted(found)

    assert lmworks("shards", "build", *arguments, *imported).code == 0
    assert texts_of() == sorted(texts)
    protected = (*imported, "--set", own(tmp_path, ITEM))
    failed = lmworks("shards", "build", *arguments, *protected, "--set", "corpus.decontaminate.action=fail").error
    assert "shards.imported.web: 1 of its 30 documents hold protected text, the first that of own/" in failed
    assert lmworks("shards", "build", *arguments, *protected, "--set", "corpus.decontaminate.action=report").code == 0
    assert texts_of() == sorted(texts) and read_json(tmp_path / "run" / "shards" / "imported-web.json")["contaminated"] == 1
    done = lmworks("shards", "build", *arguments, *protected)
    assert done.code == 0, done.err
    assert texts_of() == sorted(texts[:11] + texts[12:])
    split = Manifest.load(tmp_path / "run" / "shards").source("web").train
    assert (split.documents, split.bytes) == (29, sum(len(text.encode()) for text in texts[:11] + texts[12:]))
    assert read_json(tmp_path / "run" / "shards" / "imported-web.json")["passages"][0]["against"].startswith("own/")
    assert lmworks("data", "verify", tmp_path / "run").code == 0


def test_what_many_imported_documents_share_with_protected_text_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notice, item = range(20), range(100, 120)
    with IndexedWriter(tmp_path / "web", np.dtype("<u2")) as writer:
        for number in range(24):
            writer.add(np.array([1000 + number, *(notice if number < 12 else item)]))
    shard = Shard.model_construct(prefix=str(tmp_path / "web"), tokens=24 * 21, documents=24, sha256={}, size={})
    split = Split.model_construct(tokens=24 * 21, bytes=1000, documents=24, inputs="", shards=(shard,))
    tokenizer: Any = SimpleNamespace(decode=lambda ids, skip_special: " ".join(f"word{one}" for one in ids))
    decontaminator = Decontaminator(13)
    decontaminator.protect(["docs/7"], [tokenizer.decode(notice, True)], evaluation=False)
    decontaminator.protect(["own/3"], [tokenizer.decode(item, True)], evaluation=True)
    assert decontaminate("web", split, tokenizer, decontaminator, "report", tmp_path) == split
    found = read_json(tmp_path / "imported-web.json")
    assert (found["contaminated"], found["exempt"]) == (12, 1)
    assert [(one["against"], one["let_pass"]) for one in found["widespread"]] == [("docs/7", True), ("own/3", False)]
    said = " ".join("".join(capsys.readouterr()).split())
    assert "shards.imported.web: own/3, in 12 documents: a leak, however frequent" in said
    assert "shards.imported.web: docs/7, in 12 documents: 1 passages of held-out text were exempt as boilerplate" in said
