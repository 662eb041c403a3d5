"""`lmworks ablate` from the command line: a killed ablation goes on, data are made once, and what is wrong with a file is one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command import Lmworks

import killed_measurement
from child_process import child_process
from lmworks.ablate.resolve import resolve
from lmworks.ablate.run_set import save_arms
from lmworks.checkpoint import listing
from lmworks.host import machine
from lmworks.metrics.log import read
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.train.calibrate import Speed
from lmworks.watch.ledger import read_ledger
from patience import PATIENCE
from tiny_run import Tiny

ARMS = {"muon": [], "adamw": ["optimizer.kind=adamw", "optimizer.adam_learning_rate=0.002", "optimizer.learning_rate=0.002"]}
BITS = "validation/bits_per_byte"


def write(tiny: Tiny, folder: Path, **keys: Any) -> Path:
    """An ablation of the tiny recipe, in which None takes a key out."""
    tree = {
        "recipe": str(tiny.recipe), "set": ["train.save_every=2 steps"], "budget": "5120 tokens", "seeds": 2, "arms": ARMS,
        "out": str(folder / "out"), **keys,
    }  # fmt: skip
    path = folder / "pair.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}, sort_keys=False))
    return path


def end_after_a_save(file: Path, run: Path, number: signal.Signals) -> tuple[int, str]:
    """Start the first run of an ablation alone (`--index 0/4`), and send a signal to the command once that run has saved something new.
    Returns its exit code, and what it wrote to stderr."""
    before = listing.directories(run / "checkpoints")
    command = [sys.executable, "-m", "lmworks.cli.main", "ablate", str(file), "--index", "0/4"]
    with child_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + PATIENCE
        while listing.directories(run / "checkpoints")[-1:] == before[-1:]:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        os.kill(process.pid, number)
        assert process.stderr
        return process.wait(PATIENCE), process.stderr.read()


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_runs_are_trained_and_an_end_between_them_repeats_nothing(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Whole, with data that exist: two arms with one seed. The command ends when the first run has ended, as a job of an array or by
    SIGKILL (a process of its own, which imports torch again), and is run again."""
    monkeypatch.setenv(machine.VARIABLE, "speed=1e9,cores=1,peak=1e11")  # so that no speed is measured
    file, out = write(tiny, tmp_path, recipe=str(tiny.run_dir), seeds=1, set=None, budget="3072 tokens"), tmp_path / "out"
    if is_killed:
        command = [sys.executable, "-m", "lmworks.cli.main", "ablate", str(file)]
        with child_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            until = time.monotonic() + PATIENCE
            while not (out / "ablation.html").exists():
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.01)
            process.kill()
    else:
        assert lmworks("ablate", file, "--index", "0/2").code == 0
    ended = json.loads((out / "ablation.json").read_text())
    assert ended["unfinished"] == ["adamw, seed 1"] and ended["verdicts"] == []
    first = out / "arms" / "muon" / "seed-1"
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.is_file()}

    done = lmworks("ablate", file)
    assert done.code == 0, done.err
    assert "adamw, seed 1: done" in done.err and "muon, seed 1: done" not in done.err
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.is_file()} == before, "nothing is repeated"
    built = [event for path in out.rglob("ledger.jsonl") for event in read_ledger(path) if event["event"] == "stage_began"]
    assert built == [], "the data are those of the recipe's own run"
    ends = {arm: read(out / "arms" / arm / "seed-1")[-1] for arm in ARMS}
    assert {end["train/tokens"] for end in ends.values()} == {3072}
    document = json.loads((out / "ablation.json").read_text())
    assert document["unfinished"] == []
    assert document["measures"][BITS]["sample"] and document["measures"][BITS]["other_sample"] == []
    difference = ends["adamw"][BITS] - ends["muon"][BITS]
    (one,) = (one for one in document["verdicts"] if one["measure"] == BITS)
    assert (one["arm"], one["verdict"], one["difference"]) == ("adamw", "no verdict", pytest.approx(difference))
    table = done.out[done.out.index("Verdicts") : done.out.index("Values")]
    assert table.count("adamw") == 3 and "no verdict" in table and f"page: {out / 'ablation.html'}" in done.out.replace("\n", "")
    assert "Arms need not vary alike" in " ".join(done.out.split()), "what the verdicts assume"
    page = (out / "ablation.html").read_text()
    assert "finished: 2 runs" in page and "no verdict" in page and "optimizer.kind (muon -&gt; adamw)" in page

    other = write(tiny, tmp_path, recipe=str(tiny.run_dir), set=None, budget="4096 tokens", noise=str(out), out=str(tmp_path / "other"))
    error = lmworks("ablate", other).error
    assert f"noise: the runs of {out} have 3,072 training tokens, and these have 4,096; make a noise floor" in error


def test_an_arm_that_the_kernel_kills_is_a_failed_arm(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmworks.train.calibrate.measure", killed_measurement.measure)
    arms = {"small": [], "wide": ["model.intermediate_size=512"]}
    file = write(tiny, tmp_path, recipe=str(tiny.run_dir), seeds=1, set=None, budget="4096 tokens", equal="time", arms=arms)
    done = lmworks("ablate", file)
    why = "1 of 2 runs failed, first wide, seed 1: memory ran out while its speed was measured (its process was killed); lower"
    assert done.code == 2 and why in done.error, done.err
    assert "small, seed 1: done" in done.err and "Values" in done.out
    assert "tokens_per_second" in json.loads((tmp_path / "out" / "speed.json").read_text())["small"]


def test_an_arm_that_does_not_fit_in_equal_time_costs_the_others_nothing(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs have failed with the advice, and the others have their tables; when it fits, the same command measures and trains it."""
    fits = False

    def measure(recipe: Recipe, batches: Sequence[Batch], patience: float, flops: Callable[[int], float]) -> Speed:
        if recipe.model.intermediate_size == 512 and not fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return Speed({batch.tokens.shape[1]: 1e9 * (1 + fits) for batch in batches}, 1e9, 1e9)

    monkeypatch.setattr("lmworks.ablate.cost.measure_apart", measure)
    arms = {"small": [], "wide": ["model.intermediate_size=512"]}
    file, out = write(tiny, tmp_path, recipe=str(tiny.run_dir), seeds=1, set=None, budget="4096 tokens", equal="time", arms=arms), "out"
    done = lmworks("ablate", file)
    assert done.code == 2 and "1 of 2 runs failed, first wide, seed 1: memory ran out while its speed was measured" in done.error, done.err
    assert "lower its train.micro_batch_sequences" in done.error and "ablate.log" not in done.error
    said = done.out.replace("\n", "")
    assert "Values" in said and "small" in said and f"page: {tmp_path / out / 'ablation.html'}" in said
    known = json.loads((tmp_path / out / "speed.json").read_text())
    assert "tokens_per_second" in known["small"] and "failed" in known["wide"]
    assert not (tmp_path / out / "arms" / "wide").exists()
    fits = True
    done = lmworks("ablate", file, "--json")
    assert done.code == 0 and json.loads(done.out)["unfinished"] == [], done.err
    known = json.loads((tmp_path / out / "speed.json").read_text())
    ends = {arm: read(tmp_path / out / "arms" / arm / "seed-1")[-1]["train/tokens"] for arm in arms}
    ratio = known["wide"]["tokens_per_second"] / known["small"]["tokens_per_second"]
    assert ends["small"] == 4096 and ends["wide"] == pytest.approx(4096 * ratio, abs=256) and ratio != 1, "small is not measured again"


def test_a_baseline_without_a_speed_is_named(lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*given: object) -> Speed:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("lmworks.ablate.cost.measure_apart", measure)
    done = lmworks("ablate", write(tiny, tmp_path, recipe=str(tiny.run_dir), seeds=1, set=None, equal="time"))
    assert done.code == 2 and "arm muon, whose time all arms get, has no speed: memory ran out" in done.error, done.err


@pytest.mark.slow
def test_a_stopped_ablation_goes_on_and_shares_its_data(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    file, out = write(tiny, tmp_path), tmp_path / "out"
    first = out / "arms" / "muon" / "seed-1"
    end_after_a_save(file, first, signal.SIGKILL)
    assert [path.name for path in (out / "arms").glob("*/seed-*")] == ["seed-1"], "one run of four"
    assert not (out / "ablation.json").exists()
    code, said = end_after_a_save(file, first, signal.SIGINT)
    assert code == 130 and f"stopped, and every run has saved; go on with: lmworks ablate {file}" in said
    saved = listing.directories(first / "checkpoints")[-1]

    broken = out / "arms" / "adamw" / "seed-2" / "checkpoints"
    broken.parent.mkdir(parents=True)
    broken.touch()
    failed = lmworks("ablate", file, "--jobs", "2")
    assert f"1 of 4 runs failed, first adamw, seed 2: {broken} is not a directory" in failed.error
    assert "4 runs" in failed.err and "FLOPs" in failed.err and "about" in failed.err, "the cost is stated before"
    assert (out / "ablation.json").exists(), "with what has finished"
    broken.unlink()
    done = lmworks("ablate", file, "--markdown")
    assert done.code == 0, done.err
    events = read_ledger(first / "ledger.jsonl")
    assert [event["event"] for event in events].count("start") == 1
    steps = [event["step"] for event in events if event["event"] == "resume"]
    assert len(steps) == 2 and 0 < steps[0] < steps[1] == listing.step_of(saved), "killed and stopped, it went on from what was saved"

    runs = sorted((out / "arms").glob("*/seed-*"))
    assert [f"{run.parent.name}/{run.name}" for run in runs] == ["adamw/seed-1", "adamw/seed-2", "muon/seed-1", "muon/seed-2"]
    (data,) = (path for path in (out / "data").iterdir() if path.is_dir())
    built = [(path, event) for path in out.rglob("ledger.jsonl") for event in read_ledger(path) if event["event"] == "stage_began"]
    assert [(path, event["name"]) for path, event in built] == [(data / "ledger.jsonl", name) for name in ("corpus", "tokenizer", "shards")]
    for name in ("shards/train/code-00000.bin", "tokenizer/tokenizer.json", "corpus/manifest.json"):
        assert len({(run / name).stat().st_ino for run in (*runs, data)}) == 1, name

    document = json.loads((out / "ablation.json").read_text())
    assert document["unfinished"] == [] and document["cost"]["finished"] == 4
    for arm, seed in (("muon", 1), ("adamw", 2)):
        last = read(out / "arms" / arm / f"seed-{seed}")[-1]
        assert document["measures"]["validation/bits_per_byte"]["values"][arm][str(seed)] == last["validation/bits_per_byte"]
    assert {(one["arm"], one["measure"]) for one in document["verdicts"]} == {
        ("adamw", f"validation/{name}bits_per_byte") for name in ("", "code/", "docs/")
    }
    assert all(not one["paired"] and one["seeds"] == 2 and one["low"] < one["difference"] < one["high"] for one in document["verdicts"])
    values = document["measures"]["validation/bits_per_byte"]["values"]
    assert values["muon"]["1"] != values["muon"]["2"], "a seed changes the run"
    cost = document["cost"]
    assert cost["measured_hours"] > 0 and cost["predicted_hours_of_finished"] > 0 and cost["measured_disk"] > 0
    assert all(len(listing.directories(run / "checkpoints")) == 1 for run in runs), "pruned"
    page = (out / "ablation.html").read_text()
    assert "adamw" in page and page.count("<script") == 2 and document["verdicts"][0]["verdict"] in page
    assert "| adamw | validation/bits_per_byte |" in done.out and "**Cost**" in done.out

    before = {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*") if path.is_file()}
    again = lmworks("ablate", file, "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["verdicts"] == document["verdicts"]
    assert {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*") if path.is_file()} == before, "nothing is repeated"
    listed = lmworks("ablate", file, "--list")
    assert listed.out.splitlines()[0].split()[:4] == ["0", "done", "muon,", "seed"]
    assert "lmworks pretrain" in listed.out

    changed = write(tiny, tmp_path, arms=ARMS | {"adamw": ["optimizer.kind=adamw"]})
    assert "arm adamw has changed since its runs began: optimizer.learning_rate (0.002 -> 0.01)" in lmworks("ablate", changed).error
    more = write(tiny, tmp_path, seeds=3)
    assert lmworks("ablate", more, "--list", "--json").code == 0, "seeds may be added"


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"arms": {"one": [], "two": ["threads=1"]}}, "arm two equals arm one in all that is trained or measured; change another key"),
        ({"arms": {"one": [], "two": ["export.huggingface=true"]}}, "arm two equals arm one in all that is trained or measured"),
        ({"arms": {"one": [], "two": ["name=other"]}}, "arm two equals arm one in all that is trained or measured"),
        ({"arms": {"one": [], "two": ["evaluate.benchmark_items=9"]}}, "arm two equals arm one in all that is trained or measured"),
        ({"kind": "optimizer", "rates": {"muon": [0.01, 0.010000001]}}, "rates: two values make the arm muon-0.01; remove one of them"),
        ({"kind": "learning-rate", "factors": [1, 2, 2.0000001]}, "factors: two values make the arm rate-0.02; remove one of them"),
        ({"kind": "tokenizer", "vocab_sizes": [600, 600]}, "two values make the arm vocab-600; remove one of them"),
        ({"kind": "mixture", "sources": ["code", "code"], "factor": 0.5}, "sources: two values make the arm code-times-0.5"),
        ({"kind": "architecture", "features": ["mtp", "mtp"]}, "features: two values make the arm with-mtp; remove one of them"),
        ({"arms": {"one": [], "two": ["optimizer.learning_rat=1"]}}, "optimizer has no key 'learning_rat'; did you mean 'learning_rate'?"),
        ({"arms": {"one": [], "two": ["optimizer.learning_rat=1"]}}, "arm two: --set optimizer.learning_rat=1: "),
        ({"arms": {"one": [], "two": ["seed 3"]}}, "arm two: --set 'seed 3' is not of the form a.b=c"),
        ({"arms": {"one": [], "two": ["train.seed=3"]}}, "arm two: its overrides: train.seed is of each run"),
        ({"arms": {"one": []}}, "needs two arms or more"),
        ({"arms": {"one": [], "a/b": ["optimizer.kind=adamw"]}}, "arm a/b: cannot be the name of an arm"),
        ({"seeds": [1, 2, 1]}, "pair.yaml:5: seeds: lists 1 twice"),
        ({"seeds": 0}, "seeds: must be from 1 to 1000"),
        ({"sedes": 2}, "the top has no key 'sedes'; did you mean 'seeds'?"),
        ({"kind": "learning-rat"}, "there is no kind 'learning-rat' of ablation; did you mean 'learning-rate'?"),
        ({"baseline": "muonn"}, "baseline: there is no arm 'muonn'; did you mean 'muon'?"),
        ({"budget": True}, "budget: True has no unit"),
        ({"budget": "100 tokens"}, "arm muon: the budget gives phase general less than one step of 256 tokens"),
        ({"measures": ["validation/bits_per_bite"]}, "no metric 'validation/bits_per_bite'; did you mean 'validation/bits_per_byte'?"),
        ({"measures": ["needle/accuracy"]}, "measures: no arm writes needle/accuracy, which needs a phase with needle"),
        ({"measures": ["train/mtp_loss"]}, "measures: no arm writes train/mtp_loss, which needs model.mtp"),
        ({"measures": ["validation/prose/loss"]}, "no source has the domain 'prose'; the domains are: code, docs"),
        (
            {"measures": ["eval/piqa/cloze-0-shot"], "set": ["evaluate.benchmarks=[copa]", "evaluate.every=50%"]},
            "no arm writes eval/piqa/cloze-0-shot, because evaluate.benchmarks does not name 'piqa'; it names: copa",
        ),
        (
            {"measures": ["eval/copa/cloze-0-shot"], "set": ["evaluate.benchmarks=[copa]", "evaluate.every=never"]},
            "no arm writes eval/copa/cloze-0-shot, which needs evaluate.benchmarks and evaluate.every",
        ),
        ({"measures": ["evaluation/arc-easy"]}, "because evaluate.benchmarks and evaluate.tasks do not name 'arc-easy'"),
        (
            {"arms": {"small": [], "large": ["tokenizer.vocab_size=600"]}, "measures": ["validation/loss"]},
            "validation/loss is in nats/token, and the arms small and large have different tokenizers; compare bits per byte",
        ),
        ({"recipe": "tinny.yaml"}, "there is no recipe 'tinny.yaml'"),
        ({"recipe": None}, "recipe: is missing and has no default"),
        ({"noise": "nowhere"}, "nowhere/ablation.json does not exist"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_one_line(lmworks: Lmworks, tiny: Tiny, tmp_path: Path, keys: dict[str, Any], error: str) -> None:
    if keys.get("kind"):
        keys = keys | {"arms": None}
    assert error in lmworks("ablate", write(tiny, tmp_path, **keys)).error
    assert not (tmp_path / "out" / "data").exists(), "nothing was prepared"


@pytest.mark.slow
def test_a_benchmark_at_chance_is_neither_better_nor_trusted(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole: models of 60k parameters guess on 12 questions with 4 choices, during training and in the evaluation stage."""
    monkeypatch.setenv(machine.VARIABLE, "speed=1e9,cores=1,peak=1e11")
    words = ("red", "green", "blue", "grey")
    rows = [{"question": f"Which word is first in {number}?", "choices": words, "answer": words[number % 4]} for number in range(12)]
    (tmp_path / "colors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "colors.yaml").write_text("file: colors.jsonl\nchoices: choices\n")
    asked = [f"evaluate.benchmarks=[{tmp_path / 'colors.yaml'}]", "evaluate.every=4 steps", "evaluate.every_items=8"]
    scores = ["eval/colors/cloze-0-shot", "evaluation/colors"]
    file = write(tiny, tmp_path, set=asked, budget="3072 tokens", measures=[*scores, BITS])
    done = lmworks("ablate", file, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    for score, items in zip(scores, (8, 12), strict=True):
        measure = document["measures"][score]
        assert (measure["items"], measure["chance"]) == (items, 0.25)
        assert not measure["quality"]["trust"] and "no arm is shown to be above chance" in measure["quality"]["reasons"]
        assert measure["quality"]["monotonicity"] is not None and len(measure["curves"]["muon"]["tokens"]) == 4, "evaluation has a curve"
        (one,) = (one for one in document["verdicts"] if one["measure"] == score)
        assert one["verdict"] in ("no difference shown", "no verdict")
        assert one["from_items"] > 0 or score == "evaluation/colors", "where items are recorded, all runs may get the same ones right"
    assert document["unfinished"] == [], "the file of the benchmark is an input of the evaluation stage"
    assert document["measures"][BITS]["chance"] is None and document["measures"][BITS]["quality"]["above_chance"] is None
    table = lmworks("ablate", file, "--markdown").out
    assert table.count("no arm is shown to be above chance") == 2


def array_script() -> str:
    """The Slurm script of the page."""
    page = (Path(__file__).parents[2] / "docs" / "ablations.md").read_text(encoding="utf-8")
    return re.search(r"\n    (#!/bin/bash\n(?:    .*\n)+)", page)[1].replace("\n    ", "\n")  # type: ignore[index]


def test_the_jobs_of_the_array_on_the_page_do_one_run_each(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    """The page's ablation has two arms with three seeds."""
    file, script = write(tiny, tmp_path, seeds=3), array_script()
    every = lmworks("ablate", file, "--list")
    jobs = int(re.search(r"#SBATCH --array=0-(\d+)\n", script)[1]) + 1  # type: ignore[index]
    assert f"--index $SLURM_ARRAY_TASK_ID/{jobs}\n" in script
    assert every.out.splitlines()[-1] == f"as a Slurm array: --array=0-{jobs - 1}, and --index $SLURM_ARRAY_TASK_ID/{jobs}"
    found = [json.loads(lmworks("ablate", file, "--list", "--json", "--index", f"{job}/{jobs}").out) for job in range(jobs)]
    assert [len(rows) for rows in found] == [1] * jobs
    whole = json.loads(lmworks("ablate", file, "--list", "--json").out)
    assert [rows[0] for rows in found] == whole and len({row["directory"] for row in whole}) == 6
    assert all(row["ranks"] == 1 and row["command"][1] == "pretrain" for row in whole) and "launch" not in every.out


def test_the_list_says_how_ranks_are_started(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    file = write(tiny, tmp_path, set=["layout.dp_replicate=2"])
    for index in ([], ["--index", "1/4"]):
        lines = lmworks("ablate", file, "--list", *index).out.splitlines()
        runs = [line for line in lines if "seed" in line]
        assert len(runs) == (1 if index else 4) and all("lmworks launch local" in line and "--to pretrain" in line for line in runs)
        assert lines[len(runs)] == "2 ranks of a run are started by lmworks launch local, on the machine that the run is on"
    assert {row["ranks"] for row in json.loads(lmworks("ablate", file, "--list", "--json").out)} == {2}


@pytest.mark.slow
def test_an_array_of_jobs_trains_runs_of_two_ranks(tiny: Tiny, tmp_path: Path) -> None:
    """The script of the page under bash, one process per job side by side, with srun as the command itself: each job trains one run of two
    ranks, the data are made once, and the last job has all results. A failed job keeps its exit code."""
    set_ = ["layout.dp_replicate=2", "train.micro_batch_sequences=2"]
    file, out = write(tiny, tmp_path, recipe=str(tiny.run_dir), seeds=1, set=set_, budget="3072 tokens"), tmp_path / "out"
    functions = f'srun() {{ "$@"; }}; lmworks() {{ {shlex.quote(sys.executable)} -m lmworks.cli.main "$@"; }}\n'
    script = functions + array_script().replace("qk-norm.yaml", shlex.quote(str(file))).replace("_ID/6", "_ID/2")

    def job(number: int, text: str) -> subprocess.Popen[str]:
        environment = os.environ | {"SLURM_ARRAY_TASK_ID": str(number), machine.VARIABLE: "speed=1e9,cores=1,peak=1e11"}
        return subprocess.Popen(["bash", "-c", text], env=environment, stderr=subprocess.PIPE, encoding="utf-8", stdout=subprocess.DEVNULL)

    jobs = [job(number, script) for number in range(2)]
    said = [one.communicate(timeout=PATIENCE)[1] for one in jobs]
    assert [one.returncode for one in jobs] == [0, 0], said
    for number, arm in enumerate(ARMS):
        assert [f"{name}, seed 1: done" in said[number] for name in ARMS] == [name == arm for name in ARMS], said
        (start,) = (event for event in read_ledger(out / "arms" / arm / "seed-1" / "ledger.jsonl") if event["event"] == "start")
        assert start["ranks"] == 2 and read(out / "arms" / arm / "seed-1")[-1]["train/tokens"] == 3072
    assert json.loads((out / "ablation.json").read_text())["unfinished"] == []
    failed = job(1, script.replace(str(file), str(tmp_path / "nothing.yaml")))
    assert "there is no ablation file" in failed.communicate(timeout=PATIENCE)[1] and failed.returncode == 2


def test_directories_and_options(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    file = write(tiny, tmp_path)
    assert "--index: '4/4' is not of the form I/N" in lmworks("ablate", file, "--index", "4/4").error
    assert "--json and --markdown: choose one" in lmworks("ablate", file, "--json", "--markdown").error
    error = lmworks("ablate", "muon-adamv").error
    assert "there is no ablation file 'muon-adamv', as a file or by name; did you mean 'muon-adamw'?" in error
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").touch()
    assert "taken holds files and is not an ablation" in lmworks("ablate", file, "--out", tmp_path / "taken").error


def test_a_changed_recipe_is_refused_and_added_arms_are_not(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    save_arms(resolve(write(tiny, tmp_path)))
    assert "arm muon has changed since its runs began: " in lmworks("ablate", write(tiny, tmp_path, budget="7680 tokens")).error
    save_arms(resolve(write(tiny, tmp_path, arms=ARMS | {"more": ["model.use_qk_norm=false"]})))


def test_the_shipped_ablations_resolve_and_are_listed() -> None:
    root = Path(__file__).parents[2]
    table = (root / "docs" / "ablations.md").read_text(encoding="utf-8").split("## Shipped ablations")[1].split("\n## ")[0]
    shipped = sorted((root / "recipes" / "ablations").glob("*.yaml"))
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", table, flags=re.M)) == [path.stem for path in shipped]
    for path in shipped:
        experiment = resolve(path)
        assert experiment.runs, path
        assert not any(arm.recipe.export.huggingface or arm.recipe.export.gguf for arm in experiment.arms.values()), path
