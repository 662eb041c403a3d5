"""Token files behind a cache on the local disk: the same batches, whatever happens to the cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from test_batches import same
from test_order import recipe_of
from token_shards import write_token_shards

from lmworks.errors import UserError
from lmworks.io.store import Store
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batches import Batches
from lmworks.shards.block_cache import BlockCache, block_key
from lmworks.shards.indexed import BLOCK
from lmworks.shards.remote import Folder

PHASES = [("one", 6, 256, {"a": 0.6, "b": 0.4}), ("two", 4, 1024, {"b": 1.0})]
BIG, TINY = 64 << 20, 8 * BLOCK


class Counted:
    """Storage that counts the tokens read."""

    def __init__(self, folder: Path) -> None:
        self.inner, self.reads, self.lock = Folder(folder), [], threading.Lock()

    def read(self, name: str, start: int, stop: int) -> bytes:
        if name.endswith(".bin"):
            with self.lock:
                self.reads.append((name, start, stop))
        return self.inner.read(name, start, stop)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    lengths = {name: [rng.integers(1, 3000, 120).tolist() for _ in range(3)] for name in "ab"}
    write_token_shards(made, lengths)
    return made


def recipe_with(cache: Path, size: int, packing: str = "concatenate", ahead: str = "0 steps", remote: str | None = None) -> Recipe:
    settings = {"dir": str(cache), "max_bytes": f"{size} bytes", "prefetch": ahead, "remote": remote}
    return recipe_of(PHASES, shards={"packing": packing, "max_epochs": 100, "cache": settings})


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("size", [BIG, TINY])
def test_batches_are_the_same_through_any_cache(folder: Path, tmp_path: Path, packing: str, size: int) -> None:
    plain = Batches(recipe_of(PHASES, shards={"packing": packing, "max_epochs": 100}), folder)
    cached = Batches(recipe_with(tmp_path, size, packing), folder)
    assert all(same(plain.batch(step), cached.batch(step)) for step in range(plain.steps))
    assert sum(path.stat().st_size for path in tmp_path.glob("blocks-*")) <= size


def test_a_restart_reads_nothing_twice(folder: Path, tmp_path: Path) -> None:
    first, again = Counted(folder), Counted(folder)
    one = Batches(recipe_with(tmp_path, BIG), folder, storage=first)
    whole = [one.batch(step) for step in range(one.steps)]
    assert first.reads
    other = Batches(recipe_with(tmp_path, BIG), folder, storage=again)
    assert all(same(batch, other.batch(step)) for step, batch in enumerate(whole))
    assert again.reads == []
    blocks = [(name, block) for name, start, stop in first.reads for block in range(start // BLOCK, -(-stop // BLOCK))]
    assert len(blocks) == len(set(blocks)), "and the first run read no block twice"


def test_what_is_torn_in_the_cache_is_fetched_again(folder: Path, tmp_path: Path) -> None:
    plain = Batches(recipe_of(PHASES, shards={"max_epochs": 100}), folder)
    Batches(recipe_with(tmp_path, BIG), folder).batch(0)
    (blocks,) = tmp_path.glob("blocks-*")
    data = bytearray(blocks.read_bytes())
    data[1000::BLOCK] = bytes(value ^ 1 for value in data[1000::BLOCK])
    blocks.write_bytes(data)
    storage = Counted(folder)
    assert same(Batches(recipe_with(tmp_path, BIG), folder, storage=storage).batch(0), plain.batch(0))
    assert storage.reads


def test_damage_where_the_files_lie_stops_the_run(folder: Path, tmp_path: Path) -> None:
    class Flipped(Folder):
        def read(self, name: str, start: int, stop: int) -> bytes:
            data = bytearray(super().read(name, start, stop))
            data[-1] ^= name.endswith(".bin")
            return bytes(data)

    with pytest.raises(UserError, match=r"train/\w-0000\d\.bin is damaged \(its checksum differs at byte [\d,]+\); delete"):
        Batches(recipe_with(tmp_path, BIG), folder, storage=Flipped(folder)).batch(0)


def test_a_flipped_bit_of_a_local_file_stops_the_run_before_it_is_used(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "shards"))
    recipe = recipe_of(PHASES, shards={"max_epochs": 100})
    for path in copied.glob("train/*.bin"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2 :: BLOCK] = bytes(value ^ 1 for value in data[len(data) // 2 :: BLOCK])
        path.write_bytes(data)
    batches = Batches(recipe, copied)
    with pytest.raises(UserError, match=r"\.bin is damaged \(its checksum differs at byte [\d,]+\); delete the folder"):
        list(map(batches.batch, range(batches.steps)))


def test_files_are_read_through_fsspec(folder: Path, tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/run/shards", recursive=True)
    plain = Batches(recipe_of(PHASES, shards={"max_epochs": 100}), folder)
    here = tmp_path / "here"
    here.mkdir()
    (here / "manifest.json").write_bytes((folder / "manifest.json").read_bytes())
    cached = Batches(recipe_with(tmp_path / "cache", BIG, remote="memory://run/shards"), here)
    assert all(same(plain.batch(step), cached.batch(step)) for step in range(plain.steps))
    assert Store("memory://run/shards", "test").read("train/a-00000.bin", 3, 9) == (folder / "train" / "a-00000.bin").read_bytes()[3:9]


@pytest.mark.parametrize("failing", [2, 10**6])
def test_storage_that_fails_is_asked_again_and_then_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr("lmworks.shards.remote._PAUSES", (0.0, 0.0))
    left = iter(range(failing))

    class Failing(Counted):
        def read(self, name: str, start: int, stop: int) -> bytes:
            if name.endswith(".bin") and next(left, None) is not None:
                raise TimeoutError("no answer")
            return super().read(name, start, stop)

    batches = Batches(recipe_with(tmp_path, BIG), folder, storage=Failing(folder))
    if failing == 2:
        assert same(batches.batch(0), Batches(recipe_of(PHASES, shards={"max_epochs": 100}), folder).batch(0))
    else:
        said = r"\.bin could not be read in 3 tries \(TimeoutError: no answer\); check that the storage"
        with pytest.raises(UserError, match=said):
            batches.batch(0)


def test_what_comes_is_fetched_ahead(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, brought, bring = Counted(folder), set(), Batches.fill_cache

    def recorded(self: Batches, step: int) -> None:
        bring(self, step)
        brought.add(step)

    monkeypatch.setattr(Batches, "fill_cache", recorded)
    batches = Batches(recipe_with(tmp_path, BIG, ahead="20 steps"), folder, storage=storage)
    batches.batch(0)
    while not brought >= set(range(1, batches.steps)):
        time.sleep(0.01)
    known = len(storage.reads)
    for step in range(batches.steps):
        batches.batch(step)
    assert len(storage.reads) == known, "all of it was there"


def test_threads_that_store_blocks_in_one_set_replace_none_of_each_other(tmp_path: Path) -> None:
    cache, ways = BlockCache(tmp_path, 8 * BLOCK), 8  # one set
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for attempt in range(50):
            keys = [attempt * ways + way + 1 for way in range(ways)]
            threads = [threading.Thread(target=cache.put, args=(key, bytes([key % 251]) * BLOCK)) for key in keys]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [cache.get(key, BLOCK) for key in keys] == [bytes([key % 251]) * BLOCK for key in keys]
    finally:
        sys.setswitchinterval(interval)


WORKER = """
import sys, hashlib, json
from pathlib import Path
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batches import Batches
batches = Batches(Recipe.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
order = [step for _ in range(8) for step in range(batches.steps)][:: int(sys.argv[3])]
print(json.dumps([[step, hashlib.sha256(batches.batch(step).tokens.tobytes()).hexdigest()] for step in order]))
"""


def test_processes_share_a_cache_that_is_too_small_for_one(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, TINY).model_dump_json()
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, recipe, str(folder), direction], stdout=subprocess.PIPE, encoding="utf-8")
        for direction in ("1", "-1")
    ]
    plain = Batches(recipe_of(PHASES, shards={"max_epochs": 100}), folder)
    for worker in workers:
        told, _ = worker.communicate()
        assert worker.returncode == 0
        for step, digest in json.loads(told):
            assert digest == hashlib.sha256(plain.batch(step).tokens.tobytes()).hexdigest()


FULL = """
import resource, sys
from pathlib import Path
from lmworks.errors import UserError
from lmworks.shards.block_cache import BlockCache
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    BlockCache(Path(sys.argv[1]), 1 << 24)
except UserError as error:
    print(error)
"""


def test_a_disk_without_room_is_named(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == f"the disk of {tmp_path} has no room for 16,777,216 bytes; lower shards.cache.max_bytes\n"
    assert list(tmp_path.glob("blocks-*")) == []
    with pytest.raises(UserError, match=r"shards\.cache\.max_bytes 1,000 is too small"):
        BlockCache(tmp_path, 1000)


def test_the_slot_used_longest_ago_gives_way(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, TINY)
    for key in range(1, 9):
        cache.put(key, bytes([key]) * BLOCK)
    assert cache.get(1, 3) == b"\x01" * 3
    cache.put(9, b"nine")
    assert cache.get(2, 1) is None, "the oldest but 1, which was used since"
    assert cache.get(1, 1) and cache.get(9, 4) == b"nine"
    assert BlockCache(tmp_path, TINY).get(9, 4) == b"nine", "it outlives its process"
    assert BlockCache(tmp_path, 2 * TINY).get(9, 4) is None, "of another size it begins anew"
    assert len(list(tmp_path.glob("blocks-*"))) == 1
    assert len({block_key(digest * 16, block) for digest in ("0", "f", "a") for block in range(1000)}) == 3000
