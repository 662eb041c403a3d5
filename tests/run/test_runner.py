"""The stage walker: skips what is done, makes again what is gone, resumes what broke, and refuses what would not be the same run."""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from lmworks.errors import UserError
from lmworks.io.files import sha256_file
from lmworks.run import runner, stages
from lmworks.watch.ledger import read_ledger
from lmworks.weights.run_models import load_model
from tiny_run import BRIEF, Tiny, before_each_step, checkpoint, prepare, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ALL = ["corpus", "tokenizer", "shards", "pretrain", "tune", "evaluate", "export"]
# What holds a time or a speed: the lock names the last process, the page says when it was written, the tokenizer's report how fast it is.
CLOCKED = {"lock", "report.html", "ledger.jsonl", "metrics.jsonl", "tokenizer/report.json"}
# Rewritten with the same content; a copy also says where it lies.
RECIPES = {"recipe.yaml", "resolved.json", "origins.json"}


def hashes(folder: Path) -> dict[str, str]:
    """Of all files by path; what holds a clock or says where things lie left out."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    left_out = {*CLOCKED, *RECIPES, "stage.json", "job.json"}
    return {name: sha256_file(path) for name, path in files.items() if not {name, path.name} & left_out}


def times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name not in {"lock", *RECIPES}}


def fail_in(step: int) -> Callable[[int], None]:
    def fail(now: int) -> None:
        if now == step:
            raise RuntimeError("the power went")

    return fail


def done(told: list[tuple[str, str]]) -> list[str]:
    """The stages that were worked on."""
    assert [stage for stage, what in told if what == "begin"] == [stage for stage, what in told if what == "end"]
    return [stage for stage, what in told if what == "begin"]


def test_a_second_walk_does_nothing(run: Tiny) -> None:
    contents, written = hashes(run.run_dir), times(run.run_dir)
    assert run.walk() == [(stage, "skip") for stage in ALL]
    assert hashes(run.run_dir) == contents
    assert times(run.run_dir) == written


@pytest.mark.parametrize("folder", ["corpus", "tokenizer", "shards"])
def test_a_deleted_folder_is_made_again_equal(run: Tiny, folder: str) -> None:
    before = hashes(run.run_dir)
    shutil.rmtree(run.run_dir / folder)
    assert done(run.walk()) == [folder]
    assert hashes(run.run_dir) == before
    assert len([name for name in before if name.startswith(folder)]) >= 3


def test_deleted_checkpoints_are_trained_again_equal(run: Tiny) -> None:
    before = checkpoint(run.run_dir)
    shutil.rmtree(run.run_dir / "checkpoints")
    assert done(run.walk()) == ["pretrain"]
    assert same_bits(checkpoint(run.run_dir), before) == []


def test_other_text_reaches_the_later_stages_and_a_started_run_refuses_it(tmp_path: Path) -> None:
    made = prepare(tmp_path / "own")
    made.walk(last="pretrain")
    with open(made.texts / "docs.jsonl", "a", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)[60:])
    with pytest.raises(UserError, match=r"sources\.docs\.files \(1 file -> 1 changed .* continue with --allow corpus.sources.docs.files$"):
        made.walk()
    (made.run_dir / "sources.json").unlink()  # had nobody looked at the files
    with pytest.raises(UserError, match=r"token files in .*shards are not those that this run began with; .* with --allow shards$"):
        made.walk(last="pretrain")
    assert done(made.walk(last="shards")) == [], "the new text was tokenized before training refused it"
    made.walk(last="pretrain", allow=["shards"])
    assert [line["event"] for line in read_ledger(made.run_dir / "ledger.jsonl")].count("data_changed") == 1


def test_an_added_file_is_noticed_and_costs_its_own_part(tmp_path: Path) -> None:
    made = prepare(tmp_path / "own")
    made.walk(last="corpus")
    read = made.run_dir / "corpus" / "staging" / "read"
    before = {path: path.stat().st_mtime_ns for path in read.rglob("*.parquet")}
    (made.texts / "code" / "zzz.py").write_text(inspect.getsource(argparse))
    told = made.walk(last="corpus")
    assert [what for stage, what in told if stage == "corpus"] == ["note", "begin", "end"]
    redone = {path.parent.name for path, when in before.items() if path.stat().st_mtime_ns != when}
    assert redone == {"code"}
    assert [what for stage, what in made.walk(last="corpus")] == ["skip"]


def test_files_that_are_gone_do_not_undo_a_finished_corpus(run: Tiny) -> None:
    texts = run.texts.rename(run.texts.with_name("moved"))
    try:
        assert run.walk() == [(stage, "skip") for stage in ALL]
    finally:
        texts.rename(run.texts)


def test_an_extended_budget_keeps_tokenizer_and_shards(run: Tiny) -> None:
    longer = "train.phases.long.tokens=4096 tokens"
    assert done(run.walk(longer, last="pretrain", allow=["train.phases.long.tokens"])) == ["pretrain"]


def test_all_of_it_is_a_function_of_the_recipe(finished: Tiny, tmp_path: Path) -> None:
    """Made from nothing in another place: the same bytes in every folder whose files hold no clock."""
    other = Tiny(finished.recipe, tmp_path / "elsewhere")
    other.walk()
    ours, theirs = hashes(finished.run_dir), hashes(other.run_dir)
    for folder in ("corpus/", "tokenizer/", "shards/", "tune/data/"):
        made = [name for name in ours if name.startswith(folder)]
        assert [(name, ours[name]) for name in made] == [(name, theirs[name]) for name in theirs if name.startswith(folder)]
    for folder in ("checkpoints", "tune/checkpoints"):
        assert same_bits(checkpoint(other.run_dir, folder=folder), checkpoint(finished.run_dir, folder=folder)) == []


def test_a_stage_that_broke_is_done_again(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed try leaves: a stamp that says so, and half a folder."""
    with monkeypatch.context() as patch:
        before_each_step(patch, fail_in(5))
        with pytest.raises(RuntimeError, match="the power went"):
            tiny_copy.walk(*BRIEF)
    assert json.loads((tiny_copy.run_dir / "checkpoints" / "stage.json").read_text())["done"] is False
    (tiny_copy.run_dir / "tune").mkdir()
    (tiny_copy.run_dir / "tune" / "stage.json").write_text(json.dumps({"stage": "tune", "done": False, "inputs": {"seed": "another"}}))
    (tiny_copy.run_dir / "tune" / "rubbish").write_text("left by an older recipe")
    assert done(tiny_copy.walk(*BRIEF)) == ALL[3:]
    assert [event["step"] for event in read_ledger(tiny_copy.run_dir / "ledger.jsonl") if event["event"] == "resume"] == [4]
    assert not (tiny_copy.run_dir / "tune" / "rubbish").exists()


def test_a_changed_recipe_is_refused_by_name_until_it_is_allowed(run: Tiny) -> None:
    change = ("optimizer.max_grad_norm=0.5", "train.phases.long.learning_rate_scale=0.25", "checkpoints.keep_last=3")
    before = hashes(run.run_dir)
    said = (
        r"the recipe changed since this run began: optimizer.max_grad_norm \(1.0 -> 0.5\), "
        r"train.phases.long.learning_rate_scale \(0.5 -> 0.25\); undo it, choose another run_dir, or continue with "
        r"--allow optimizer.max_grad_norm --allow train.phases.long.learning_rate_scale$"
    )
    with pytest.raises(UserError, match=said):
        run.walk(*change)
    with pytest.raises(UserError, match=r"--allow train.phases.long.learning_rate_scale$"):
        run.walk(*change, allow=["optimizer.max_grad_norm"])
    assert hashes(run.run_dir) == before
    told = run.walk(*change, allow=["optimizer.max_grad_norm", "train.phases"])
    assert done(told) == ["pretrain", "tune", "evaluate", "export"]  # the text and its tokens stay
    (event,) = [event for event in read_ledger(run.run_dir / "ledger.jsonl") if event["event"] == "recipe_changed"]
    assert event["allowed"] == [
        {"key": "optimizer.max_grad_norm", "old": 1.0, "new": 0.5}, {"key": "train.phases.long.learning_rate_scale", "old": 0.5,
        "new": 0.25}
    ]  # fmt: skip
    assert event["harmless"] == [{"key": "checkpoints.keep_last", "old": 2, "new": 3}]
    assert run.walk(*change) == [(stage, "skip") for stage in ALL]  # and it is the recipe of the run from now on


def test_phases_that_have_begun_keep_their_order(run: Tiny) -> None:
    text = run.recipe.read_text()
    general, long = text.index("    - name: general"), text.index("    - name: long")
    end = text.index("tune:\n")
    swapped = run.run_dir.parent / "swapped.yaml"
    swapped.write_text(text[:general] + text[long:end] + text[general:long] + text[end:])
    with pytest.raises(UserError, match=r"phase general, number 1 of this run, has begun; keep its name and its place"):
        Tiny(swapped, run.run_dir).walk(allow=["train.phases"])


@pytest.mark.parametrize(
    "change", ["train.log_every=2 steps", "train.save_every=3 steps", "metrics.tensorboard=true", "checkpoints.keep_best=false"]
)
def test_a_harmless_change_passes_and_makes_nothing_again(run: Tiny, change: str) -> None:
    assert run.walk(change) == [(stage, "skip") for stage in ALL]
    (event,) = [event for event in read_ledger(run.run_dir / "ledger.jsonl") if event["event"] == "recipe_changed"]
    assert [one["key"] for one in event["harmless"]] == [change.split("=")[0]] and event["allowed"] == []


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        (("model.residual_dropout=0.1", "model.moe.balance.bias_update_rate=0.002", "model.z_loss_weight=0"), ["pretrain"]),
        (("train.phases.long.sequence_length=128 tokens",), ["pretrain"]),  # the tokens are the same
    ],
)
def test_how_it_learns_may_change_in_the_middle(
    tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...], again: list[str]
) -> None:
    """A checkpoint must compute the same, not have been learnt the same way."""
    with monkeypatch.context() as patch:
        before_each_step(patch, fail_in(10))
        with pytest.raises(RuntimeError):
            tiny_copy.walk(last="pretrain")
    tokens = {path: path.stat().st_mtime_ns for path in (tiny_copy.run_dir / "shards").rglob("*.bin")}
    assert done(tiny_copy.walk(*changes, last="pretrain", allow=["model", "train.phases"])) == again
    assert {path: path.stat().st_mtime_ns for path in tokens} == tokens and tokens
    assert [event["step"] for event in read_ledger(tiny_copy.run_dir / "ledger.jsonl") if event["event"] == "resume"] == [8]


def test_a_changed_tune_section_tunes_again_from_the_same_base(run: Tiny) -> None:
    base, tuned = checkpoint(run.run_dir), checkpoint(run.run_dir, folder="tune/checkpoints")
    assert done(run.walk("tune.learning_rate=0.001")) == ["tune", "evaluate", "export"]
    assert same_bits(checkpoint(run.run_dir), base) == []
    again = checkpoint(run.run_dir, folder="tune/checkpoints")
    assert "model/head.weight" in same_bits(again, tuned)
    assert done(run.walk()) == ["tune", "evaluate", "export"]  # and back
    assert same_bits(checkpoint(run.run_dir, folder="tune/checkpoints"), tuned) == []


def test_without_its_tune_section_the_base_model_is_what_leaves(run: Tiny) -> None:
    """Although the tuned one of the older recipe still lies there."""
    shorter = run.run_dir.parent / "shorter.yaml"
    text = run.recipe.read_text()
    shorter.write_text(text[: text.index("tune:\n")] + text[text.index("evaluate:") :])
    told = Tiny(shorter, run.run_dir).walk()
    assert [stage for stage, what in told if what == "skip"] == ALL[:4] and done(told) == ["evaluate", "export"]
    assert set(json.loads((run.run_dir / "evaluate" / "results.json").read_text())["models"]) == {"base"}
    assert bool((load_model(run.run_dir).head.weight == checkpoint(run.run_dir)["model/head.weight"]).all())
    with pytest.raises(UserError, match="the recipe has no section tune; add one to have this stage"):
        Tiny(shorter, run.run_dir).walk(last="tune")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("evaluate.benchmarks=[arc-esay]", "'arc-esay'; did you mean arc-easy"),
        ("evaluate.tasks=[chain_sun]", "'chain_sun'; did you mean chain_sum"),
    ],
)
def test_what_a_later_stage_cannot_do_is_said_at_once(finished: Tiny, tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Tiny(finished.recipe, tmp_path / "new").walk(override)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["lock"]


def test_what_cannot_be_exported_is_said_at_once(finished: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Hugging Face class expresses this model"):
        Tiny(finished.recipe, tmp_path / "new").walk("export.huggingface=true", "model.sliding_window=16 tokens")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["lock"]


def test_the_page_is_written_after_each_stage(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[str]] = []
    honest = runner.write_page

    def watched(run_dir: Path) -> Path:
        written.append(sorted(stage.name for stage in stages.STAGES if (run_dir / stage.folder).exists()))
        return honest(run_dir)

    monkeypatch.setattr(runner, "write_page", watched)
    tiny_copy.walk(*BRIEF)
    assert len(written) == 4 and written[-1] == sorted(ALL)
    assert "in 7 steps" in (tiny_copy.run_dir / "report.html").read_text()


def test_a_broken_stamp_is_made_again(run: Tiny) -> None:
    (run.run_dir / "shards" / "stage.json").write_text("{")
    assert done(run.walk()) == ["shards"]


@pytest.mark.parametrize("save_every", ["2 steps", "100%"])
def test_a_run_directory_that_is_moved_away_is_named(
    tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, save_every: str
) -> None:
    """And nothing is written in its place, into which `mv` would put it back."""

    def go_away(step: int) -> None:
        if step == 3:
            tiny_copy.run_dir.rename(tmp_path / "elsewhere")

    before_each_step(monkeypatch, go_away)
    with pytest.raises(UserError, match=rf"^{tiny_copy.run_dir} was moved or deleted while it was in use; put it back"):
        tiny_copy.walk(*BRIEF, f"train.save_every={save_every}", last="pretrain")
    assert not tiny_copy.run_dir.exists()
