"""What is done again and why: the declaration against the page, the tokenizer under trained weights, lost files, and folders of others."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, get_args

import pytest

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.io.files import sha256_file
from lmworks.recipe import scaling_laws
from lmworks.recipe.changes import readers, table
from lmworks.recipe.keys import known_paths
from lmworks.recipe.load import load_resolved
from lmworks.recipe.schema.base import Node, StageName
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run import run_dir as staleness
from lmworks.run import stages
from lmworks.run.prediction import text_shortage
from lmworks.run.run_dir import list_files
from lmworks.run.runner import StageEvent, run_stages
from lmworks.run.stages import STAGES, Stage, StageContext, stages_for
from lmworks.shards import build
from lmworks.watch.ledger import read_ledger
from lmworks.weights import run_models
from lmworks.weights.run_models import load_model
from tiny_run import STEPS, Tiny, checkpoint, prepare, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PAGE = (Path(__file__).parents[2] / "docs" / "changes.md").read_text(encoding="utf-8")
LONGER = "train.phases.long.tokens=4096 tokens"


def told_by(run: Tiny, *overrides: str, last: str | None = None, allow: tuple[str, ...] = ()) -> list[StageEvent]:
    told: list[StageEvent] = []
    run_stages(run.resolve(*overrides), last=last, allow=allow, on_event=told.append, resume_command="lmworks run")
    return told


def done(told: list[StageEvent]) -> list[str]:
    return [one.stage for one in told if one.kind == "begin"]


def why(told: list[StageEvent], stage: str) -> str:
    return next(str(one.printable) for one in told if (one.stage, one.kind) == (stage, "begin"))


def in_table() -> list[tuple[list[str], set[str], str]]:
    """The rows of the page: keys, stages, and what a change needs."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    names = {stage.name for stage in STAGES}
    rows = [(re.findall(r"`([^`]+)`", keys), set(by.split(", ")) & names, needs) for keys, by, needs in lines]
    assert len(rows) == len(table().splitlines()) - 2
    return rows


def covers(key: str, path: str) -> bool:
    wanted, parts = key.split("."), path.split(".")
    return len(wanted) <= len(parts) and all(fnmatchcase(part, one) for one, part in zip(wanted, parts, strict=False))


def test_the_page_has_the_table_of_the_declaration() -> None:
    begin, end = "<!-- table: python -m lmworks.recipe.changes -->\n", "\n<!-- end of table -->"
    assert PAGE.split(begin)[1].split(end)[0] == table()


def test_effects_name_the_stages_of_a_run() -> None:
    assert get_args(StageName) == tuple(stage.name for stage in STAGES)


def test_a_change_of_any_key_makes_again_what_the_page_says(finished: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys that there are, those of the run's recipe and those that it leaves out."""
    recipe, rows = load_resolved(finished.run_dir / "resolved.json"), in_table()
    files = json.loads((finished.run_dir / "sources.json").read_text())
    values: dict[str, Any] = dict.fromkeys(known_paths(Recipe)) | staleness.recipe_values(recipe)
    monkeypatch.setattr(staleness, "_content", cache(staleness._content))
    current = [staleness.stage_inputs(stage, recipe, finished.run_dir, files) for stage in STAGES]
    of_run = stages_for(recipe)
    for stage, made in zip(STAGES, current, strict=True):
        assert stage not in of_run or not staleness.stale_reason(stage, recipe, finished.run_dir, made)
    wrong = []
    for path, value in values.items():
        pair = (value, ["x", value])
        made = [[staleness.stage_inputs(stage, recipe, finished.run_dir, files, {path: one}) for stage in STAGES] for one in pair]
        again = {stage.name for stage, before, after in zip(STAGES, *made, strict=True) if before != after}
        expected = next(stages for keys, stages, _ in reversed(rows) if any(covers(key, path) for key in keys))
        if again != expected:
            wrong.append((path, again, expected))
    assert len(values) > 300 and not wrong


# What a stage looks at without what it makes depending on it.
ASIDE = {
    "tokenizer": ["train.phases.*.tokens"],  # see the row of that key
    # samples on the way, and what is refused now because a later stage would
    "pretrain": ["name", "evaluate.prompts", "evaluate.questions", "dpo", "grpo", "model.max_position_embeddings"],
    "tune": [
        "name",
        "evaluate.prompts",
        "evaluate.questions",
        "dpo",
        "grpo",
        "model.max_position_embeddings",
        "model.initializer_range",
        "train.phases.*.sequence_length",
        "train.init_seed",
    ],  # and the micro-batch
    "evaluate": ["dpo", "grpo"],  # whether there are such stages, whose checkpoints are among its inputs
    "export": ["dpo", "grpo"],
}


class Watched:
    """Which values of a recipe are asked for, by dotted path, while the stage `now` is at work."""

    def __init__(self) -> None:
        self.now = ""
        self.read: set[tuple[str, str]] = set()
        self._paths: dict[int, str] = {}
        self._kept: list[Any] = []

    def know(self, recipe: Recipe) -> Recipe:
        self._kept.append(recipe)  # so that no other object gets its address
        self._add(recipe, "")
        return recipe

    def _add(self, value: Any, path: str) -> None:
        if isinstance(value, Node):
            self._paths[id(value)] = path
            for key, below in value.__dict__.items():
                self._add(below, f"{path}.{key}".lstrip("."))
        elif isinstance(value, list):
            for number, item in enumerate(value):
                self._add(item, f"{path}.{item.__dict__.get('name', number) if isinstance(item, Node) else number}")

    def __call__(self, node: Any, key: str) -> Any:
        value = object.__getattribute__(node, key)
        path = self._paths.get(id(node))
        called = bool(path) and key in ("name", "step")  # of an item in a list: a part of the path, so that another one is another key
        if self.now and path is not None and not called and key in type(node).model_fields and not isinstance(value, (Node, list)):
            self.read.add((self.now, f"{path}.{key}".lstrip(".")))
        return value


def test_stages_read_no_key_that_is_not_declared(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("corpus", "tokenizer", "shards"):
        shutil.rmtree(tiny_copy.run_dir / folder)
    watched = Watched()

    def at(stage: Stage) -> Stage:
        def work(context: StageContext) -> Any:
            watched.now = stage.name
            try:
                return stage.work(replace(context, recipe=watched.know(context.recipe)))
            finally:
                watched.now = ""

        return replace(stage, work=work)

    monkeypatch.setattr(stages, "STAGES", tuple(map(at, stages.STAGES)))
    monkeypatch.setattr(run_models, "load_resolved", lambda path: watched.know(load_resolved(path)))
    monkeypatch.setattr(Node, "__getattribute__", lambda node, key: watched(node, key))
    tiny_copy.walk()
    monkeypatch.undo()
    recipe = load_resolved(tiny_copy.run_dir / "resolved.json")
    assert {stage for stage, _ in watched.read} == {stage.name for stage in stages_for(recipe)}
    undeclared = {(stage, path) for stage, path in watched.read if readers(path) and stage not in readers(path)}
    assert not {(stage, path) for stage, path in undeclared if not any(covers(key, path) for key in ASIDE.get(stage, ()))}


def test_what_comes_out_the_same_makes_nothing_else_again(tiny_copy: Tiny, tmp_path: Path) -> None:
    recipe = tmp_path / "other.yaml"
    recipe.write_text(tiny_copy.recipe.read_text().replace("domain: docs, license: PSF-2.0", "domain: docs, license: Apache-2.0"))
    told = told_by(Tiny(recipe, tiny_copy.run_dir), last="shards")
    assert done(told) == ["corpus"]
    assert "repeated because corpus.sources.docs.license (PSF-2.0 -> Apache-2.0); stages built on it follow" in why(told, "corpus")
    assert why(told, "corpus").count("tokenizer, shards") == 1
    assert done(told_by(Tiny(recipe, tiny_copy.run_dir), last="shards")) == []


def test_the_tokenizer_stays_under_trained_weights(tmp_path: Path) -> None:
    """Text is added to a run that has trained: its corpus and token files are made again around the tokenizer that the weights know."""
    made = prepare(tmp_path / "own")
    made.walk(last="pretrain")
    tokenizer = made.run_dir / "tokenizer" / "tokenizer.json"
    before, weights = tokenizer.read_bytes(), checkpoint(made.run_dir)
    with open(made.texts / "docs.jsonl", "a", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)[60:])
    told = told_by(made, last="pretrain", allow=("corpus.sources.docs.files",))
    assert done(told) == ["corpus", "tokenizer", "shards", "pretrain"]
    assert "corpus.sources.docs.files (1 file -> 1 changed" in why(told, "corpus")
    assert "tokenizer.json is kept because weights were trained with it" in why(told, "tokenizer")
    assert tokenizer.read_bytes() == before
    assert same_bits(checkpoint(made.run_dir), weights) == []
    assert listing.read_meta(listing.directories(made.run_dir / "checkpoints")[-1])["meta"]["tokenizer"] == sha256_file(tokenizer)
    (made.run_dir / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer.json is lost, and the tokenizer trained on .*corpus now is not the one of the weights"):
        made.walk(last="pretrain")
    assert not tokenizer.exists()
    tokenizer.write_bytes(before)
    assert done(told_by(made, last="pretrain")) == ["tokenizer"]


@pytest.mark.parametrize("change", ["tokenizer.sample_bytes=100kB", "tokenizer.language_balance=0.5"])
def test_nothing_allows_another_tokenizer(run: Tiny, change: str) -> None:
    with pytest.raises(UserError, match=rf"trained with: {change.split('=')[0]} \(.*no --allow permits that.*choose another run_dir$"):
        run.walk(change, allow=["tokenizer", change.split("=")[0]])


def test_another_chat_template_is_no_other_tokenizer(run: Tiny) -> None:
    tokenizer, base = sha256_file(run.run_dir / "tokenizer" / "tokenizer.json"), checkpoint(run.run_dir)
    told = told_by(run, "tokenizer.chat_template=glm-4.6", allow=("tokenizer.chat_template",), last="tune")
    assert done(told) == ["tokenizer", "tune"]
    assert sha256_file(run.run_dir / "tokenizer" / "tokenizer.json") == tokenizer
    assert same_bits(checkpoint(run.run_dir), base) == []


def test_weights_are_not_read_beside_another_tokenizer(run: Tiny) -> None:
    path = run.run_dir / "tokenizer" / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n")
    for read in (lambda: load_model(run.run_dir), lambda: load_model(run.run_dir, "base"), run.walk):
        with pytest.raises(UserError, match="is not the tokenizer that the weights of this run were trained with"):
            read()


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("tokenizer/tokenizer.json", ["tokenizer"]),
        ("shards/train/docs-00000.bin", ["shards"]),
        ("corpus/train/docs/00000.parquet", ["corpus"]),
        ("evaluate/results.json", ["evaluate"]),
    ],
)
def test_a_lost_file_is_made_again(run: Tiny, name: str, again: list[str]) -> None:
    path = run.run_dir / name
    content = path.read_bytes()
    path.unlink()
    told = told_by(run)
    assert done(told)[:1] == again and f"{name} is missing" in why(told, again[0])
    assert name == "evaluate/results.json" or (done(told) == again and path.read_bytes() == content)
    path.write_bytes(content[: len(content) // 2])
    if again != ["tokenizer"]:  # a tokenizer that is cut short is not the one that the weights know
        assert done(told_by(run))[:1] == again


def test_a_file_that_changes_while_a_stage_reads_it_makes_the_stage_again(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage may have read what was there before, so it is recorded as made from that."""
    corpus, honest = tiny_copy.run_dir / "corpus" / "manifest.json", build.build_shards

    def edited(*arguments: Any) -> Any:
        built = honest(*arguments)
        corpus.write_bytes(corpus.read_bytes().replace(b"{\n  ", b"{\n\t ", 1))
        return built

    (tiny_copy.run_dir / "shards" / "manifest.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(build, "build_shards", edited)
        assert done(told_by(tiny_copy, last="shards")) == ["shards"]
    assert done(told_by(tiny_copy, last="shards")) == ["tokenizer", "shards"]


def test_a_lost_checkpoint_is_trained_again(run: Tiny) -> None:
    whole = checkpoint(run.run_dir)
    next((run.run_dir / "checkpoints" / listing.name_of(STEPS)).glob("data-*")).unlink()
    assert done(told_by(run, last="pretrain")) == ["pretrain"]
    assert same_bits(checkpoint(run.run_dir, STEPS), whole) == []


def test_files_of_others_are_never_touched(finished: Tiny, tmp_path: Path) -> None:
    project = tmp_path / "project"
    for folder in ("tokenizer", "export", "evaluate"):
        (project / folder).mkdir(parents=True)
        (project / folder / "mine.txt").write_text("a year of work")
    before = sorted(path for path in project.rglob("*") if path.is_file())
    with pytest.raises(UserError, match=r"tokenizer holds mine.txt and was not made by lmworks; nothing in it was changed: move it away"):
        Tiny(finished.recipe, project).walk()
    assert [path for path in sorted(project.rglob("*")) if path.is_file() and path.name != "lock"] == before
    (project / "lock").unlink()
    (project / "metrics.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"project holds metrics.jsonl and is not a run of lmworks; choose another directory"):
        Tiny(finished.recipe, project).walk()
    (project / "metrics.jsonl").unlink()
    (project / "lock").write_text("poetry")
    with pytest.raises(UserError, match="project holds lock and is not a run"):
        Tiny(finished.recipe, project).walk()
    assert (project / "lock").read_text() == "poetry"


def test_a_link_to_the_folder_of_another_run_is_not_followed(run: Tiny, tmp_path: Path) -> None:
    other = run.copy(tmp_path / "other")
    before = sha256_file(run.run_dir / "evaluate" / "results.json")
    for path in sorted((other.run_dir / "evaluate").iterdir()):
        path.unlink()
    (other.run_dir / "evaluate").rmdir()
    (other.run_dir / "evaluate").symlink_to(run.run_dir / "evaluate", target_is_directory=True)
    with pytest.raises(UserError, match=r"evaluate is a link to .*, which belongs to another run"):
        other.walk("evaluate.prompts=[Once]")
    assert sha256_file(run.run_dir / "evaluate" / "results.json") == before


def test_clearing_keeps_what_says_that_the_folder_is_ours(run: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between clearing and the first line of the next try must not leave a folder that nobody owns up to."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lmworks.run.runner.write_stamp", killed)
        with pytest.raises(KeyboardInterrupt):
            run.walk("evaluate.prompts=[Once]", last="evaluate")
    assert [path.name for path in (run.run_dir / "evaluate").iterdir()] == ["stage.json"]
    assert done(told_by(run, "evaluate.prompts=[Once]", last="evaluate")) == ["evaluate"]


def test_training_longer_needs_one_word(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates derive from the budget, so they follow it, and are told."""
    monkeypatch.setattr(scaling_laws, "RATE_BOUNDS", (1e-5, 1.0))  # within which a model of this size is at the upper one
    recipe = tmp_path / "open.yaml"
    recipe.write_text(tiny.recipe.read_text().replace("optimizer: {learning_rate: 0.01, adam_learning_rate: 0.01}\n", ""))
    run = Tiny(recipe, tiny.copy(tmp_path / "run").run_dir)
    run.walk(last="pretrain")
    said = (
        r"began: train.phases.long.tokens \(2048 tokens -> 4096 tokens\), from which optimizer.learning_rate \(.*\), "
        r"optimizer.adam_learning_rate \(.*\) follow; .* continue with --allow train.phases.long.tokens$"
    )
    with pytest.raises(UserError, match=said):
        run.walk(LONGER, last="pretrain")
    told = told_by(run, LONGER, last="pretrain", allow=("train.phases.long.tokens",))
    assert done(told) == ["pretrain"]
    note = next(str(one.printable) for one in told if one.kind == "note")
    assert note.startswith("derived values that change with it: optimizer.learning_rate")
    assert "to keep them: --set optimizer.learning_rate=" in note
    (event,) = [line for line in read_ledger(run.run_dir / "ledger.jsonl") if line["event"] == "recipe_changed"]
    keys = {"train.phases.long.tokens", "optimizer.learning_rate", "optimizer.adam_learning_rate"}
    assert {one["key"] for one in event["allowed"]} == keys


def test_a_new_phase_needs_one_word(run: Tiny, tmp_path: Path) -> None:
    recipe = tmp_path / "more.yaml"
    last = "    - {name: last, tokens: 1024 tokens, mixture: {code: 1.0}, sequence_length: 32 tokens, global_batch_tokens: 256 tokens}\n"
    recipe.write_text(run.recipe.read_text().replace("tune:\n", f"{last}tune:\n"))
    longer = Tiny(recipe, run.run_dir)
    with pytest.raises(UserError, match=r"began: train.phases.last \(added\); undo it, .* continue with --allow train.phases.last$"):
        longer.walk(last="pretrain")
    tokenizer = sha256_file(run.run_dir / "tokenizer" / "tokenizer.json")
    assert done(told_by(longer, last="pretrain", allow=("train.phases.last",))) == ["tokenizer", "pretrain"]  # whose sample it would weigh
    assert sha256_file(run.run_dir / "tokenizer" / "tokenizer.json") == tokenizer
    assert listing.step_of(listing.directories(run.run_dir / "checkpoints")[-1]) == STEPS + 4


def test_too_little_text_is_said_before_training_and_of_every_source(tiny_copy: Tiny) -> None:
    budgets = ("train.phases.general.tokens=500M", "train.phases.long.tokens=500M")
    said = r"more often than shards.max_epochs 40 \(code [\d.]+ times in phase general, docs [\d.]+ times in phase general, docs .* long\)"
    with pytest.raises(UserError, match=said):
        tiny_copy.walk(*budgets, last="shards")
    for run_dir in (tiny_copy.run_dir, tiny_copy.run_dir / "not-yet"):  # the plan knows it by the token files, or by the texts
        assert re.search(said, text_shortage(tiny_copy.resolve(*budgets).recipe, run_dir) or "")
        assert text_shortage(tiny_copy.resolve().recipe, run_dir) is None


def test_a_full_disk_in_any_stage_is_one_line(run: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.evaluate import evaluate

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluate, "held_out", full)
    with pytest.raises(UserError, match=r"the disk of .*evaluate is full \(.*\): free some space and run the same command again"):
        run.walk("evaluate.prompts=[Once]")



def test_stages_know_what_they_need(finished: Tiny) -> None:
    """Each file that a stage names is one that an earlier stage makes."""
    recipe = load_resolved(finished.run_dir / "resolved.json")
    earlier: set[str] = set()
    absent = {stage.folder for stage in STAGES} - {stage.folder for stage in stages_for(recipe)}
    for stage in stages_for(recipe):
        for need in (one for one in stage.needs if one.partition("/")[0] not in absent):
            assert need.partition("/")[0] in earlier and (finished.run_dir / need).exists(), (stage.name, need)
        earlier.add(stage.folder)


def test_an_edited_file_of_conversations_pairs_prompts_or_rewards_makes_its_stage_stale(tiny_copy: Tiny, tmp_path: Path) -> None:
    """By its contents: the same file with another time, as on another machine, is not tuned on again."""
    files = {name: tmp_path / name for name in ("chats.jsonl", "pairs.jsonl", "prompts.jsonl", "reward.py")}
    for path in files.values():
        path.write_bytes((tiny_copy.texts / "chats.jsonl").read_bytes())
    chats, pairs, prompts, reward = map(str, files.values())
    tune = ("tune.data=[{name: sums, kind: files, path: %s, max_rows: 300}]" % chats, "tune.tokens=256 tokens")  # noqa: UP031
    all_stages = (
        *tune, "dpo={data: [{name: pairs, kind: files, path: %s}]}" % pairs,  # noqa: UP031
        "grpo={data: [{name: asked, kind: files, path: %s, reward: python, file: %s}]}" % (prompts, reward),  # noqa: UP031
    )  # fmt: skip
    recipe = tiny_copy.resolve(*all_stages).recipe

    def inputs() -> dict[str, dict[str, str]]:
        listed = list_files(recipe, {})
        return {stage.name: staleness.stage_inputs(stage, recipe, tiny_copy.run_dir, listed) for stage in stages_for(recipe)}

    for name, stage in (("chats.jsonl", "tune"), ("pairs.jsonl", "dpo"), ("prompts.jsonl", "grpo"), ("reward.py", "grpo")):
        before = inputs()
        files[name].write_text(files[name].read_text().replace("What is 1 + 1?", "What is one and one?"))
        now = inputs()
        assert [one for one in now if now[one] != before[one]] == [stage], name

    short = (*tune, "train.phases.general.tokens=2600 tokens", "train.phases.long.tokens=512 tokens",
             "train.phases.general.lr_schedule={warmup: 1 steps, decay: 1 steps}")  # fmt: skip
    told_by(tiny_copy, *short, last="tune")
    os.utime(files["chats.jsonl"], (1, 1))
    assert done(told_by(tiny_copy, *short, last="tune")) == []
    files["chats.jsonl"].write_text(files["chats.jsonl"].read_text().replace("What is 2 + 2?", "What is two and two?"))
    told = told_by(tiny_copy, *short, last="tune")
    assert done(told) == ["tune"]
    assert "tune.data.sums.files" in why(told, "tune") and "1 changed" in why(told, "tune")
