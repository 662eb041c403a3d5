"""The engine: parts, tasks, processes and interruptions change nothing of what comes out, and everything is accounted for."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from lmworks.corpus import prepare
from lmworks.corpus.contamination import Question
from lmworks.corpus.engine import local_executor
from lmworks.corpus.report import Report
from lmworks.errors import UserError
from lmworks.io.run_layout import corpus_files
from lmworks.recipe.schema.corpus import Corpus, Source
from lmworks.recipe.schema.recipe import Recipe
from patience import PATIENCE

QUESTIONS = [Question("riddles/1", "Where is the ninth zebra of them?")]
STEPS = '''
import os, time
from lmworks.corpus.document import Document, Drop, step

@step(makes=["capitals"], statistics=["capitals"])
def capitals(document: Document, most: float = 0.9) -> Document | Drop:
    share = sum(map(str.isupper, document.text)) / len(document.text)
    if share > most:
        return Drop("capitals", f"{share:.0%}", {"capitals": share})
    return document.with_text(document.text.replace("the ", "")).with_facts(capitals=share)

def fails(document: Document) -> Document:
    return document if "zebra" not in document.text else document.with_text(1 / 0)

def dies(document: Document) -> Document:
    os.kill(os.getpid(), 9)
    return document

def sleeps(document: Document) -> Document:
    time.sleep(600)
    return document

@step(needs=["url"])
def of_url(document: Document) -> Document:
    return document
'''


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About a megabyte of the standard library as rows, with some duplicates and some malformed rows, and a file of steps."""
    folder = tmp_path_factory.mktemp("texts")
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    rows = [json.dumps({"text": path.read_text(encoding="utf-8"), "n": place}) for place, path in enumerate(sources)]
    rows[10:10] = ['{"text": "cut', '{"text": null}', json.dumps({"text": "SHOUTED" * 60}), rows[3], rows[7].replace("import", "imports")]
    for name, some in (("a.jsonl", rows[:30]), ("b.jsonl", rows[30:])):
        (folder / name).write_text("\n".join(some) + "\n")
    (folder / "mine.py").write_text(STEPS)
    return folder


def source(texts: Path, **more: Any) -> Source:
    return Source(**{"name": "lib", "kind": "jsonl", "path": f"{texts}/*.jsonl", "domain": "code", "language": "code",
                     "license": "PSF-2.0", **more})  # fmt: skip


def recipe(*sources: Source, **corpus: Any) -> Recipe:
    return Recipe(name="test", corpus=Corpus(sources=list(sources), **{"validation_fraction": 0.1, "part_bytes": "150kB", **corpus}))


def python_step(function: str, **options: Any) -> dict[str, Any]:
    return {"step": "python", "file": "mine.py", "function": function, "options": options}


def hash_of_outputs(out: Path) -> str:
    """Hash of the names and contents of all files except staged ones."""
    paths = sorted(path for path in out.rglob("*") if path.is_file() and "staging" not in path.relative_to(out).parts)
    return hashlib.sha256(b"".join(str(path.relative_to(out)).encode() + path.read_bytes() for path in paths)).hexdigest()


def read_again(out: Path, before: dict[Path, int]) -> set[str]:
    """Parts that were read again since `before`."""
    return {f"{path.parent.name}/{path.stem}" for path, when in read_times(out).items() if before.get(path) != when}


def read_times(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (out / "staging" / "read").glob("*/?????.parquet")}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes even for little work."""
    monkeypatch.setattr(local_executor, "_MIN_BYTES_PER_PROCESS", 50_000)


@pytest.fixture(scope="module")
def undisturbed(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    out = tmp_path_factory.mktemp("undisturbed") / "corpus"
    return out, prepare(recipe(source(texts), steps=[{"step": "clean"}, python_step("capitals")]), out, QUESTIONS, texts)


def test_documents_and_bytes_add_up(undisturbed: tuple[Path, Report]) -> None:
    out, report = undisturbed
    (lib,) = report.sources
    lost = [*lib.quarantined.values(), *lib.dropped.values()]
    edited = sum(step.edited for step in lib.steps)
    assert lib.parts > 4
    assert edited < -1000, "a step shortened the texts"
    assert lib.came.documents == sum(one.documents for one in lost) + lib.train.documents + lib.validation.documents
    assert lib.came.bytes == sum(one.bytes for one in lost) - edited + lib.train.bytes + lib.validation.bytes
    assert [step.step for step in lib.steps] == ["clean", "capitals", "dedup", "decontaminate"]
    for before, after in zip(lib.steps, lib.steps[1:], strict=False):
        assert before.left == after.came
    assert {reason: one.documents for reason, one in lib.quarantined.items()} == {"broken_json": 1, "null_text": 1}
    assert {"capitals", "duplicate", "near_duplicate"} <= lib.dropped.keys()
    kept = {split: [row for path in corpus_files(out, split)["lib"] for row in pq.read_table(path).to_pylist()] for split in lib.outputs}
    for split, rows in kept.items():
        counts = lib.outputs[split]["lib"]
        assert (len(rows), sum(len(row["text"].encode()) for row in rows)) == (counts.documents, counts.bytes)


def test_every_document_has_a_decision(undisturbed: tuple[Path, Report]) -> None:
    out, report = undisturbed
    rows = [row for path in sorted((out / "decisions" / "lib").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    (lib,) = report.sources
    assert len({row["id"] for row in rows}) == len(rows) == lib.came.documents
    assert sum(row["bytes"] for row in rows) == lib.came.bytes
    fates = Counter(row["fate"] for row in rows)
    assert fates == {
        "train": lib.train.documents, "validation": lib.validation.documents, "quarantine": 2, "capitals": 1,
        "dedup": sum(one.documents for one in lib.steps[2].dropped.values()),
        **({"decontaminate": lib.steps[3].came.documents - lib.steps[3].left.documents} if lib.steps[3].dropped else {}),
    }  # fmt: skip
    for split in ("train", "validation"):
        written = {identity for path in corpus_files(out, split)["lib"] for identity in pq.read_table(path)["id"].to_pylist()}
        assert written == {row["id"] for row in rows if row["fate"] == split}
    shouted = next(row for row in rows if row["fate"] == "capitals")
    assert (shouted["reason"], shouted["detail"]) == ("capitals", f"{shouted['capitals']:.0%}")
    copies = {row["reason"]: row for row in rows if row["fate"] == "dedup"}
    assert all(copies[reason]["copy_of"] in {row["id"] for row in rows} for reason in ("duplicate", "near_duplicate"))


def test_statistics_are_distributions_of_what_came_and_of_what_stayed(undisturbed: tuple[Path, Report]) -> None:
    _, report = undisturbed
    found = report.statistics["lib/capitals"]
    (lib,) = report.sources
    assert found["read"]["count"] == lib.steps[1].came.documents
    assert found["train"]["count"] == lib.train.documents
    assert found["read"]["most"] > 0.8 > found["train"]["most"]


@pytest.mark.usefixtures("eager")
def test_processes_change_nothing(texts: Path, undisturbed: tuple[Path, Report], tmp_path: Path) -> None:
    asked = recipe(source(texts), steps=[{"step": "clean"}, python_step("capitals")], processes=2)
    prepare(asked, tmp_path / "out", QUESTIONS, texts)
    assert hash_of_outputs(tmp_path / "out") == hash_of_outputs(undisturbed[0])


def test_max_bytes_is_exact_over_many_parts(texts: Path, tmp_path: Path) -> None:
    asked = recipe(source(texts, max_bytes="300kB"), steps=[{"step": "clean"}])
    (lib,) = prepare(asked, tmp_path / "out").sources
    drawn = lib.steps[0].came
    rows = [row for path in (tmp_path / "out" / "decisions" / "lib").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    left_out = [row["bytes"] for row in rows if row["fate"] == "max_bytes"]
    assert drawn.bytes <= 300_000 < drawn.bytes + max(left_out)
    assert lib.not_drawn.documents == len(left_out)
    assert len({row["id"].split("/")[1] for row in rows if row["fate"] != "max_bytes"}) > 2, "drawn from many parts"


def test_an_added_file_costs_its_own_part(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes((texts / "a.jsonl").read_bytes())
    asked = recipe(source(folder), decontaminate=None)
    prepare(asked, tmp_path / "out")
    before = read_times(tmp_path / "out")
    prepare(asked, tmp_path / "out")
    assert read_again(tmp_path / "out", before) == set()
    (folder / "b.jsonl").write_bytes((texts / "b.jsonl").read_bytes())
    prepare(asked, tmp_path / "out")
    again = read_again(tmp_path / "out", before)
    assert again
    assert not again & {f"{path.parent.name}/{path.stem}" for path in list(before)[:-1]}, "only the last part may have been filled up"
    prepare(asked, tmp_path / "fresh")
    assert hash_of_outputs(tmp_path / "out") == hash_of_outputs(tmp_path / "fresh")


def test_a_changed_step_of_ones_own_is_done_again(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STEPS)
    asked = recipe(source(texts), steps=[python_step("capitals")])
    prepare(asked, tmp_path / "out", folder=tmp_path)
    before = read_times(tmp_path / "out")
    (tmp_path / "mine.py").write_text(STEPS.replace("the ", "and "))
    prepare(asked, tmp_path / "out", folder=tmp_path)
    assert len(read_again(tmp_path / "out", before)) == len(before)
    prepare(asked, tmp_path / "fresh", folder=tmp_path)
    assert hash_of_outputs(tmp_path / "out") == hash_of_outputs(tmp_path / "fresh")


def test_what_is_staged_may_go(texts: Path, undisturbed: tuple[Path, Report], tmp_path: Path) -> None:
    asked = recipe(source(texts), steps=[{"step": "clean"}, python_step("capitals")], keep_staged=False)
    prepare(asked, tmp_path / "out", QUESTIONS, texts)
    assert hash_of_outputs(tmp_path / "out") == hash_of_outputs(undisturbed[0])
    assert [path.name for path in (tmp_path / "out" / "staging").iterdir()] == ["job.json"]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_fails_is_named_with_its_document(texts: Path, tmp_path: Path, processes: int) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    rows = [json.dumps({"text": f"word{n} " * 2000 + ("zebra" if n == 17 else "")}) for n in range(30)]
    (folder / "a.jsonl").write_text("\n".join(rows) + "\n")
    asked = recipe(source(folder), steps=[python_step("fails")], processes=processes)
    wanted = r"step fails .*lib/\d+/\d+ .*ZeroDivisionError: division by zero"
    with pytest.raises(UserError, match=wanted):
        prepare(asked, tmp_path / "out", folder=texts)


@pytest.mark.usefixtures("eager")
def test_a_process_that_is_killed_is_named_with_what_it_was_at(texts: Path, tmp_path: Path) -> None:
    wanted = r"a process was killed while working on: read and filter lib part \d+; most likely memory ran out: lower corpus.processes"
    with pytest.raises(UserError, match=wanted):
        prepare(recipe(source(texts), steps=[python_step("dies")], processes=2), tmp_path / "out", folder=texts)


def test_a_fact_that_nobody_gives_is_refused_at_once(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="step of_url needs the fact 'url', which source lib does not have"):
        prepare(recipe(source(texts), steps=[python_step("of_url")]), tmp_path / "out", folder=texts)
    asked = recipe(source(texts, fact_keys=("url",)), steps=[python_step("of_url")], dedup={"minhash": None})
    assert prepare(asked, tmp_path / "out", folder=texts).sources[0].train.documents


def test_the_copy_of_the_source_with_priority_is_kept(texts: Path, tmp_path: Path) -> None:
    first, second = source(texts), source(texts, name="best", path=f"{texts}/a.jsonl")
    with pytest.raises(UserError, match=r"source best .*: none of its 30 documents is left to train on"):
        prepare(recipe(first, second, decontaminate=None), tmp_path / "out")
    lib, best = prepare(recipe(first, second, decontaminate=None, dedup={"priority": ("best",)}), tmp_path / "out").sources
    assert (lib.name, best.name) == ("lib", "best")
    assert best.train.documents > 20 > best.steps[-2].dropped["duplicate"].documents
    assert lib.dropped["duplicate"].documents > 20


RUN = """
import sys
from pathlib import Path
from lmworks.corpus import prepare
from lmworks.corpus.contamination import Question
from lmworks.recipe.schema.recipe import Recipe
from lmworks.corpus.engine import local_executor
local_executor._MIN_BYTES_PER_PROCESS = 50_000
print("begun", flush=True)
out, texts = map(Path, sys.argv[2:])
prepare(Recipe.model_validate_json(Path(sys.argv[1]).read_text()), out, [Question("riddles/1", "Where is the ninth zebra of them?")], texts)
"""


def start(asked: Recipe, out: Path, texts: Path) -> subprocess.Popen[bytes]:
    """Start the stage in a process group of its own; returns once it is working."""
    path = out.with_name(f"{out.name}.json")
    path.write_text(asked.model_dump_json())
    command = [sys.executable, "-c", RUN, str(path), str(out), str(texts)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def tasks_done(out: Path) -> int:
    """Number of tasks with a marker."""
    found = (path.name for path in (out / "staging").glob("*/**/*.json"))
    return sum(name.count(".") == 1 for name in found)


def kill(process: subprocess.Popen[bytes], out: Path, tasks: int, seconds: float) -> bool:
    """Kill the whole group some time after `tasks` more tasks are done; returns whether it was still working."""
    wanted = tasks_done(out) + tasks
    while process.poll() is None and tasks_done(out) < wanted:
        time.sleep(0.01)
    time.sleep(seconds)
    alive = process.poll() is None
    if alive:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    return alive


def killed(asked: Recipe, texts: Path, folder: Path, kills: int) -> list[int]:
    """Make corpora under `kills` kills, starting a new one whenever one is complete; returns the number of finished tasks at each kill."""
    chance = random.Random(7)
    at: list[int] = []
    number = 0
    while True:
        out = folder / f"corpus-{number}"
        process = start(asked, out, texts)
        if len(at) < kills and kill(process, out, chance.randrange(9), chance.uniform(0, 0.5)):
            at.append(tasks_done(out))
            continue
        assert process.wait() == 0
        assert process.stdout is not None
        process.stdout.close()
        if len(at) == kills:
            return at
        number += 1


def interrupted(texts: Path, undisturbed: Path, folder: Path, kills: int) -> list[int]:
    asked = recipe(source(texts), steps=[{"step": "clean"}, python_step("capitals")], processes=2)
    at = killed(asked, texts, folder, kills)
    whole = [out for out in folder.glob("corpus-?*") if out.is_dir()]
    assert [hash_of_outputs(out) for out in whole] == [hash_of_outputs(undisturbed)] * len(whole)
    assert not list(folder.rglob(".*.part"))
    return at


def test_killed_and_typed_again_gives_the_same(texts: Path, undisturbed: tuple[Path, Report], tmp_path: Path) -> None:
    assert interrupted(texts, undisturbed[0], tmp_path, 1)[0] > 0, "the kill fell into the work"


@pytest.mark.slow
def test_killed_fifty_times_and_typed_again_gives_the_same(texts: Path, undisturbed: tuple[Path, Report], tmp_path: Path) -> None:
    at = interrupted(texts, undisturbed[0], tmp_path, 50)
    assert len(set(at)) > 8, "the kills fell all over the work"


def test_workers_end_with_the_process_that_began_them(texts: Path, tmp_path: Path) -> None:
    process = start(recipe(source(texts), steps=[python_step("sleeps")], processes=2), tmp_path / "out", texts)
    workers: list[psutil.Process] = []
    while len(workers) < 2:
        time.sleep(0.05)
        workers = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE)
    assert not alive
