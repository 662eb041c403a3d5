"""Runs whose sources lie in a bucket, and whose copies lie in another: written, lost, restored, and gone on with."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from lmworks.checkpoint import Checkpoints, listing
from lmworks.checkpoint.copy_to import copy_checkpoint
from lmworks.errors import UserError
from lmworks.io.store import Store
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from lmworks.run import copy as copying
from lmworks.run.copy import copy_run, restore_run
from lmworks.run.stages import STAGES
from lmworks.watch.ledger import Ledger, read_ledger
from patience import PATIENCE
from tiny_run import RECIPE, Tiny, checkpoint, curve, same_bits

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from object_storage import Server, client, served

LMWORKS = (sys.executable, "-m", "lmworks.cli.main")
# Two short phases: enough for several saves, and for a resumed run to differ if anything were lost.
SHORT = ("train.phases.general.tokens=2600 tokens", "train.phases.long.tokens=512 tokens", "tune=null", "train.save_every=3 steps",
         "train.phases.general.lr_schedule={warmup: 1 steps, decay: 1 steps}",
             "train.phases.long.lr_schedule={kind: linear, warmup: 1 steps}",
         "train.validate_every=100%", "train.sample_every=100%", "model.residual_dropout=0.1")  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, served(patch) as one:
        yield one


@pytest.fixture
def bucket(server: Server) -> Iterator[str]:
    name = f"b-{uuid.uuid4().hex}"
    client().mkdir(name)
    yield name
    server.busy = lambda method, path: False


def objects(bucket: str) -> list[str]:
    return sorted(path.removeprefix(f"{bucket}/") for path in client().find(bucket))


@pytest.fixture(scope="module")
def far(server: Server, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny recipe with its texts in a bucket: compressed lines, and Parquet. Nothing was run."""
    folder = tmp_path_factory.mktemp("far")
    files = client()
    files.mkdir("texts")
    files.pipe_file("texts/docs/one.jsonl.gz", gzip.compress((tiny.texts / "docs.jsonl").read_bytes()))
    code = [path.read_text() for path in sorted((tiny.texts / "code").glob("*.py"))]
    with files.open("texts/code.parquet", "wb") as target:
        pq.write_table(pa.table({"text": code}), target, row_group_size=4)
    text = RECIPE.format(texts="s3://texts")
    text = text.replace('kind: code, path: s3://texts/code, include: "*.py"', "kind: parquet, path: s3://texts/code.parquet")
    text = text.replace("s3://texts/docs.jsonl", "s3://texts/docs/*.jsonl.gz")
    recipe = folder / "far.yaml"
    recipe.write_text(text)
    return Tiny(recipe, folder / "run")


def command(*arguments: str) -> list[str]:
    return [*LMWORKS, *arguments]


@pytest.mark.slow  # the same within this process: test_a_checkpoint_that_was_rolled_back_stays_where_it_is
def test_a_run_is_restored_from_a_bucket_and_resumes_bit_exactly(server: Server, bucket: str, far: Tiny, tmp_path: Path) -> None:
    """Killed when its second checkpoint is in the bucket, and its folder deleted."""
    reference = Tiny(far.recipe, tmp_path / "reference")
    reference.walk(*SHORT, last="pretrain")
    run = Tiny(far.recipe, tmp_path / "run")
    options = [part for one in (*SHORT, f"run_dir={run.run_dir}", f"checkpoints.copy_to=s3://{bucket}/run") for part in ("--set", one)]

    server.busy = lambda method, path: "step-00000009" in path  # no later one is ever copied
    process = subprocess.Popen(command("pretrain", str(run.recipe), *options), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not client().exists(f"{bucket}/run/checkpoints/step-00000006/manifest.json"):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    shutil.rmtree(run.run_dir)
    server.busy = lambda method, path: False

    said = subprocess.run(
        command("restore", f"s3://{bucket}/run", str(run.run_dir)), capture_output=True, encoding="utf-8", check=True, timeout=PATIENCE
    ).stdout
    assert "pretrain: step-00000006" in said
    assert [path.name for path in listing.directories(run.run_dir / "checkpoints")] == ["step-00000006"]
    subprocess.run(command("pretrain", str(run.recipe), *options), check=True, capture_output=True, timeout=PATIENCE)
    assert same_bits(checkpoint(run.run_dir), checkpoint(reference.run_dir)) == []
    assert curve(run.run_dir) == curve(reference.run_dir)
    assert [one["step"] for one in read_ledger(run.run_dir / "ledger.jsonl") if one["event"] == "resume"] == [6]


def save(folder: Path, url: str, steps: int = 1, **fields: Any) -> None:
    import torch

    events: list[tuple[str, dict[str, Any]]] = fields.setdefault("events", [])
    with Checkpoints(folder, Options(copy_to=url), {}, report=lambda event, **told: events.append((event, told))) as checkpoints:
        for step in range(1, steps + 1):
            checkpoints.save(step, {"model": {"weight": torch.full((100,), float(step))}}, {"step": step}, wait=True)


@pytest.fixture(scope="module")
def trained(server: Server, far: Tiny) -> Tiny:
    """A finished run with its corpus from the bucket."""
    far.walk(*SHORT, last="pretrain")
    return far


def test_corpus_and_shards_are_copied_and_restored(bucket: str, trained: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    copy_run(trained.run_dir, f"s3://{bucket}/all", told.append)
    assert [re.sub("step-.*? ", "", one) for one in told] == ["corpus: copied", "shards: copied", "pretrain: copied"]
    names = objects(bucket)
    assert not [name for name in names if "credentials" in name or name.endswith("/lock")]

    # What is there and the same is not sent again, and one that differs is.
    client().pipe_file(f"{bucket}/all/shards/manifest.json", b"{}")
    client().rm_file(f"{bucket}/all/shards/{copying.SEAL}")
    sent: list[str] = []
    honest = Store._holds
    monkeypatch.setattr(Store, "_holds", lambda self, name, entry: honest(self, name, entry) or bool(sent.append(name)))
    told.clear()
    copy_run(trained.run_dir, f"s3://{bucket}/all", told.append)
    assert sent == ["shards/manifest.json"]
    assert [one.rpartition(": ")[2] for one in told[:2]] == ["already there", "copied"]
    assert objects(bucket) == names

    back = Tiny(trained.recipe, tmp_path / "back")
    synced: set[int] = set()
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino) or sync(file))  # type: ignore[func-returns-value]
    restore_run(f"s3://{bucket}/all", back.run_dir, told.append)
    restored = [path for path in back.run_dir.rglob("*") if path.is_file()]
    assert [path for path in restored if path.stat().st_ino not in synced] == [], "after a power cut they are still whole"
    for stage in ("corpus", "tokenizer", "shards"):
        outputs = json.loads((trained.run_dir / stage / "stage.json").read_text())["outputs"]
        assert outputs
        for name in outputs:
            assert (back.run_dir / stage / name).read_bytes() == (trained.run_dir / stage / name).read_bytes()
    assert back.walk(*SHORT, last="shards") == [(stage, "skip") for stage in ("corpus", "tokenizer", "shards")]
    with pytest.raises(UserError, match=r"is not empty; restore into a new directory"):
        restore_run(f"s3://{bucket}/all", back.run_dir, told.append)


def test_a_copy_that_came_out_different_is_no_copy(tiny_copy: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that loses a byte while shards that were made again replace those of an earlier copy."""
    stage = next(one for one in STAGES if one.name == "shards")
    remote, seal = Store(str(tmp_path / "copy"), "copy"), tmp_path / "copy" / "shards" / copying.SEAL
    assert copying._copy_stage(tiny_copy.run_dir, remote, stage) == "copied" and seal.is_file()
    changed = tiny_copy.run_dir / "shards" / "manifest.json"
    changed.write_bytes(changed.read_bytes() + b"\n")
    monkeypatch.setattr(LocalFileSystem, "put_file", lambda self, path, to: Path(to).write_bytes(Path(path).read_bytes()[:-1]))
    with pytest.raises(OSError, match=r"the copy of .*manifest\.json in .* differs from it"):
        copying._copy_stage(tiny_copy.run_dir, remote, stage)
    assert not seal.exists(), "half of it is the earlier one"


def test_tokens_are_read_from_the_copy(bucket: str, trained: Tiny, tmp_path: Path) -> None:
    """Without their local files: through the cache, block by block."""
    copy_run(trained.run_dir, f"s3://{bucket}/run", print)
    lean = trained.copy(tmp_path / "lean")
    shutil.rmtree(lean.run_dir / "checkpoints")
    (lean.run_dir / "metrics.jsonl").unlink()
    for path in [*(lean.run_dir / "shards").rglob("*.bin"), *(lean.run_dir / "shards").rglob("*.idx")]:
        path.unlink()
    lean.pretrain(*SHORT, f"shards.cache={{dir: {tmp_path}/cache, max_bytes: 100MB, remote: 's3://{bucket}/run/shards'}}")
    assert same_bits(checkpoint(lean.run_dir), checkpoint(trained.run_dir)) == []


@pytest.mark.parametrize("harm", ["truncated", pytest.param("gone", marks=pytest.mark.slow)])
def test_a_damaged_copy_is_passed_over_aloud(bucket: str, trained: Tiny, tmp_path: Path, harm: str) -> None:
    folder = trained.run_dir / "checkpoints"
    copy_run(trained.run_dir, f"s3://{bucket}/run", print)
    older = tmp_path / "step-00000001"
    shutil.copytree(listing.directories(folder)[-1], older)
    assert copy_checkpoint(older, f"s3://{bucket}/run/checkpoints")
    newest, files = listing.directories(folder)[-1].name, client()
    data = f"{bucket}/run/checkpoints/{newest}/data-00000-00000.bin"
    shards = next(f"{bucket}/{name}" for name in objects(bucket) if name.startswith("run/shards/") and name.endswith(".bin"))
    for path in (data, shards):
        content = files.cat_file(path)
        files.rm_file(path)
        if harm == "truncated":
            files.pipe_file(path, content[:-1])
    told: list[str] = []
    restore_run(f"s3://{bucket}/run", tmp_path / "back", told.append)
    said = "\n".join(told)
    assert f"pretrain: {newest} is not used: " in said and "pretrain: step-00000001" in said
    assert "shards: the copy is damaged" in said and not (tmp_path / "back" / "shards").exists()
    assert [path.name for path in listing.directories(tmp_path / "back" / "checkpoints")] == ["step-00000001"]
    # And one without any good checkpoint is no run.
    files.rm_file(f"{bucket}/run/checkpoints/step-00000001/manifest.json")
    with pytest.raises(UserError, match=r"s3://.* has no complete checkpoint of a run"):
        restore_run(f"s3://{bucket}/run", tmp_path / "other", told.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "step-00000001"]


def test_a_checkpoint_that_was_rolled_back_stays_where_it_is(bucket: str, trained: Tiny, tmp_path: Path) -> None:
    run = trained.copy(tmp_path / "run")
    copy_run(run.run_dir, f"s3://{bucket}/run", print)
    first, *_, last = listing.directories(run.run_dir / "checkpoints")
    with Ledger(run.run_dir / "ledger.jsonl") as ledger:
        ledger.write("rollback", stage="pretrain", step=listing.step_of(last), to_step=listing.step_of(first), skip=None)
    shutil.rmtree(last)
    copy_run(run.run_dir, f"s3://{bucket}/run", print)
    told: list[str] = []
    restore_run(f"s3://{bucket}/run", tmp_path / "back", told.append)
    assert f"pretrain: {last.name} is not used: it was rolled back" in told
    assert [path.name for path in listing.directories(tmp_path / "back" / "checkpoints")] == [first.name]
    back = Tiny(trained.recipe, tmp_path / "back")
    back.pretrain(*SHORT)
    assert same_bits(checkpoint(back.run_dir), checkpoint(trained.run_dir)) == []
    assert curve(back.run_dir) == curve(trained.run_dir)


def test_a_run_is_restored_from_a_folder_that_its_checkpoints_were_copied_to(tiny_copy: Tiny, tmp_path: Path) -> None:
    """As in the bucket, `run.gz` lies beside the checkpoints."""
    run, place = tiny_copy, tmp_path / "disk of another machine"
    run.pretrain(*SHORT, f"checkpoints.copy_to={place}")
    assert (place / "checkpoints" / "run.gz").is_file()
    told: list[str] = []
    restore_run(str(place), tmp_path / "back", told.append)
    newest = listing.directories(run.run_dir / "checkpoints")[-1]
    assert f"pretrain: {newest.name}" in told
    assert same_bits(checkpoint(tmp_path / "back"), checkpoint(run.run_dir)) == [] and curve(tmp_path / "back") == curve(run.run_dir)
    back = [one["event"] for one in read_ledger(tmp_path / "back" / "ledger.jsonl")]
    assert back and back == [one["event"] for one in read_ledger(run.run_dir / "ledger.jsonl")][: len(back)]


# Copies a checkpoint, and is killed by the server's keeper when the first data is on its way.
_COPY = """
import sys
from pathlib import Path
from lmworks.checkpoint.copy_to import copy_checkpoint
from lmworks.io.store import Store
copy_checkpoint(Path(sys.argv[1]), sys.argv[2])
"""


def test_an_upload_that_is_killed_is_no_checkpoint(server: Server, bucket: str, trained: Tiny) -> None:
    source, url = listing.directories(trained.run_dir / "checkpoints")[-1], f"s3://{bucket}/run/checkpoints"
    asked: list[str] = []

    def busy(method: str, path: str) -> bool:
        if method == "PUT" and path.endswith(".bin"):
            asked.append(path)
            process.kill()
            process.wait()
        return bool(asked)

    server.busy = busy
    process = subprocess.Popen([sys.executable, "-c", _COPY, str(source), url])
    assert process.wait(PATIENCE) == -signal.SIGKILL and asked
    server.busy = lambda method, path: False
    assert not [name for name in objects(bucket) if name.endswith("manifest.json")]
    with pytest.raises(UserError, match="has no complete checkpoint"):
        restore_run(f"s3://{bucket}/run", trained.run_dir.with_name("never"), print)
    assert copy_checkpoint(source, url)
    assert not copy_checkpoint(source, url), "it is there already"


def test_a_server_that_is_busy_for_a_while_costs_time_only(server: Server, bucket: str, far: Tiny, tmp_path: Path) -> None:
    from lmworks.corpus.read import parts, read

    left = [2]

    def busy(method: str, path: str) -> bool:
        left[0] -= 1
        return left[0] >= 0

    source = next(one for one in far.resolve().recipe.corpus.sources if one.name == "docs")
    server.busy = busy
    items = [item for part in parts(source, 1 << 20) for item in read(source, part, 1 << 20)]
    assert left[0] < 0 and len(items) == 60 and all(item.reason is None for item in items)
    left[0] = 2
    events: list[tuple[str, dict[str, Any]]] = []
    save(tmp_path / "run", f"s3://{bucket}/run", events=events)
    assert left[0] < 0 and [event for event, _ in events] == ["checkpoint", "checkpoint_copied"]


def test_one_line_for_a_bucket_that_is_not_there(server: Server, far: Tiny, tmp_path: Path, trained: Tiny) -> None:
    missing = f"s3://none-{uuid.uuid4().hex}/x"
    for act in (
        lambda: save(tmp_path / "run", missing),
        lambda: copy_run(trained.run_dir, missing, print),
        lambda: restore_run(missing, tmp_path / "new", print),
    ):
        with pytest.raises(UserError, match=r"s3://none-.* has no complete checkpoint of a run|s3://none-.* does not exist"):
            act()
    with pytest.raises(UserError, match=r"source docs: no files at s3://none.* check the path"):
        Tiny(far.recipe, tmp_path / "fresh").walk(f"corpus.sources.docs.path={missing}/a.jsonl", last="corpus")


def test_one_line_for_a_wrong_key_without_it(server: Server, bucket: str, far: Tiny, tmp_path: Path, trained: Tiny) -> None:
    server.check_keys(0)
    try:
        url = f"s3://{bucket}/run"
        for act in (
            lambda: restore_run(url, tmp_path / "new", print),
            lambda: copy_run(trained.run_dir, url, print),
            lambda: save(tmp_path / "saved", url),
            lambda: Tiny(far.recipe, tmp_path / "run").walk(last="corpus"),
        ):
            with pytest.raises(UserError, match=r"s3://\S+ denies access \(.*\); check the key or password") as caught:
                act()
            assert "hush" not in str(caught.value) and "\n" not in str(caught.value)
        arguments = command("restore", url, str(tmp_path / "new"))
        done = subprocess.run(arguments, capture_output=True, encoding="utf-8", check=False, timeout=PATIENCE, env=dict(os.environ))
        assert done.returncode == 2 and done.stderr.startswith("error: restore: s3://") and "hush" not in done.stdout + done.stderr
    finally:
        server.check_keys(float("inf"))
