"""The same tasks under Ray and under Slurm leave the same corpus, and say why they could not."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmworks.corpus import prepare
from lmworks.corpus.engine import slurm_executor
from lmworks.corpus.engine.job import Job, hash_referenced_files, pass_named
from lmworks.corpus.engine.passes import PASSES
from lmworks.corpus.pipeline import preview
from lmworks.corpus.read import parts
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Corpus, Source
from lmworks.recipe.schema.recipe import Recipe
from slurm_cluster import cluster


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    rows = [json.dumps({"text": path.read_text(encoding="utf-8")}) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))]
    (folder / "a.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "mine.py").write_text("def fails(document):\n    return 1 / 0\n")
    return folder


def recipe(texts: Path, steps: tuple[str, ...] = (), **executor: Any) -> Recipe:
    source = Source(name="lib", kind="jsonl", path=str(texts / "*.jsonl"), domain="code", language="code", license="PSF-2.0")
    own = [{"step": "python", "file": "mine.py", "function": name} for name in steps]
    return Recipe(name="test", corpus=Corpus(sources=[source], part_bytes="200kB", steps=own, processes=2, executor=executor))


def hash_of_outputs(out: Path) -> str:
    paths = sorted(path for path in out.rglob("*") if path.is_file() and "staging" not in path.relative_to(out).parts)
    return hashlib.sha256(b"".join(str(path.relative_to(out)).encode() + path.read_bytes() for path in paths)).hexdigest()


@pytest.fixture(scope="module")
def local(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("local") / "corpus"
    prepare(recipe(texts), out)
    return hash_of_outputs(out)


@pytest.fixture(scope="module")
def slurm_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with cluster(tmp_path_factory.mktemp("slurm")) as conf:
        yield conf


@pytest.mark.slow
def test_ray_leaves_the_same(texts: Path, local: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed (extra: ray)")
    prepare(recipe(texts, kind="ray"), tmp_path / "out")
    assert hash_of_outputs(tmp_path / "out") == local


@pytest.mark.slow
def test_under_ray_a_step_that_fails_is_named(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed (extra: ray)")
    with pytest.raises(UserError, match=r"step fails .*lib/\d+/0 .*ZeroDivisionError"):
        prepare(recipe(texts, ("fails",), kind="ray"), tmp_path / "out", folder=texts)


@pytest.mark.slow
@pytest.mark.needs("slurm")
def test_slurm_leaves_the_same(texts: Path, local: str, slurm_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm_here))
    monkeypatch.setattr(slurm_executor, "_POLL_SECONDS", 0.5)
    prepare(recipe(texts, kind="slurm", max_jobs=2, memory="500M"), tmp_path / "out")
    assert hash_of_outputs(tmp_path / "out") == local
    assert len(list((tmp_path / "out" / "staging" / "slurm").glob("read-*.log"))) == 2, "the parts were dealt out among two jobs"


@pytest.mark.slow
@pytest.mark.needs("slurm")
def test_under_slurm_a_step_that_fails_is_named_and_nothing_is_left_waiting(
    texts: Path, slurm_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm_here))
    monkeypatch.setattr(slurm_executor, "_POLL_SECONDS", 0.5)
    with pytest.raises(UserError, match=r"step fails .*lib/\d+/0 .*ZeroDivisionError"):
        prepare(recipe(texts, ("fails",), kind="slurm"), tmp_path / "out", folder=texts)
    subprocess.run(["sleep", "2"], check=True)
    assert not subprocess.run(["squeue", "--noheader"], capture_output=True, encoding="utf-8", check=True).stdout


def job_of(asked: Recipe, out: Path, texts: Path) -> Job:
    found = {source.name: parts(source, int(asked.corpus.part_bytes)) for source in asked.corpus.sources}
    return Job(asked, texts, out.resolve(), found, hash_referenced_files(asked, texts), "")


def test_the_script_says_what_the_recipe_asks_for(texts: Path, tmp_path: Path) -> None:
    asked = recipe(texts, kind="slurm", max_jobs=3, max_running_jobs=2, partition="cpu", memory="4G", reduce_memory="64G",
        time_limit="2:00:00",
                   options=("--constraint=nvme",), setup=("module load python",))  # fmt: skip
    job = job_of(asked, tmp_path / "out", texts)
    read, decide = (slurm_executor.batch_script(job, pass_named(PASSES, name)).splitlines() for name in ("read", "resolve_duplicates"))
    wanted = ["--array=0-2%2", "--partition=cpu", "--mem=4G", "--time=2:00:00", "--constraint=nvme", "--requeue"]
    assert [f"#SBATCH {option}" in read for option in wanted] == [True] * len(wanted)
    assert read.index("module load python") < len(read) - 1
    assert read[-1].endswith(f'corpus task {job.out} read "$SLURM_ARRAY_TASK_ID" --of 3')
    assert "#SBATCH --mem=64G" in decide
    assert "#SBATCH --array=0-0%2" in decide
    bash = subprocess.run(["bash", "-n"], input="\n".join(read), encoding="utf-8", check=False)
    assert bash.returncode == 0
    assert any("lmworks-read" in str(shown) for shown in preview(asked, tmp_path / "out", texts))
    assert not (tmp_path / "out").exists()


def test_the_tasks_of_a_pass_are_dealt_out_whole(texts: Path, tmp_path: Path) -> None:
    job = job_of(recipe(texts), tmp_path / "out", texts)
    job.save()
    jobs = 3
    for first in range(jobs):
        slurm_executor.run_tasks(job.out, "read", first, jobs)
    assert all(pass_named(PASSES, "read").is_done(job, piece) for piece in job.pieces)
    with pytest.raises(UserError, match=rf"the pass read has {len(job.pieces)} tasks, numbered from 0"):
        slurm_executor.run_tasks(job.out, "read", 99, 100)
    with pytest.raises(UserError, match="a corpus job has no pass 'reed'; it has: size, draw, read"):
        slurm_executor.run_tasks(job.out, "reed", 0, 1)


def test_a_batch_job_leaves_its_reason_where_the_executor_looks(texts: Path, tmp_path: Path) -> None:
    job = job_of(recipe(texts, ("fails",)), tmp_path / "out", texts)
    job.save()
    with pytest.raises(UserError, match="step fails"):
        slurm_executor.run_tasks(job.out, "read", 0, 10)
    (told,) = slurm_executor.failures_folder(job).glob("*.txt")
    assert "step fails" in told.read_text()


def test_without_slurm_it_says_so(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="kind slurm needs sbatch, which is not on this machine"):
        prepare(recipe(texts, kind="slurm"), tmp_path / "out")
