"""Token files in remote storage: read in blocks through a local cache, ahead of the step that needs them.

The open shards of a folder: an LRU cache, since the number of open files is limited.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol
from zlib import crc32

import numpy as np

from lmworks.errors import UserError
from lmworks.io.files import write_bytes
from lmworks.io.store import Store
from lmworks.recipe.schema.artifacts import Cache
from lmworks.shards import indexed
from lmworks.shards.block_cache import BlockCache, block_key
from lmworks.shards.indexed import BLOCK, ENDING, IndexedFile, damaged, read_whole, with_ending
from lmworks.shards.manifest import Manifest, Shard

_AT_ONCE = 32  # requests under way, which hide each other's latency
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between tries to read what could not be read
_STEPS_AT_ONCE = 4  # threads, so that requests of the next steps overlap with those of this one


class Storage(Protocol):
    """A storage from which files are read, by their names below the shards folder."""

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file."""


class Folder:
    """A folder, local or mounted."""

    def __init__(self, path: Path) -> None:
        self._path = Path(path)

    def read(self, name: str, start: int, stop: int) -> bytes:
        try:
            fd = os.open(self._path / name, os.O_RDONLY)
        except FileNotFoundError:
            raise damaged(self._path / name, "is missing") from None
        try:
            return os.pread(fd, stop - start, start)
        finally:
            os.close(fd)


class RemoteShards:
    """Opens shards whose tokens are read through the cache. Indexes and checksums are copied and verified when a shard is opened."""

    def __init__(self, settings: Cache, shards_dir: Path, storage: Storage | None = None) -> None:
        self._folder = Path(os.path.expanduser(settings.dir))
        self.cache = BlockCache(self._folder, int(settings.max_bytes))
        local = Folder(shards_dir)
        self.storage = storage or (Store(settings.remote, "shards.cache.remote") if settings.remote and "://" in settings.remote else None)
        self.storage = self.storage or (Folder(Path(settings.remote)) if settings.remote else local)
        self._local = local
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tokens")
        self._pending: dict[tuple[str, int, int], Future[None]] = {}
        self._lock = threading.Lock()

    def open(self, prefix: Path, shard: Shard) -> IndexedFile:
        """The shard, with its index on the local disk."""
        index = self._copied(shard, ".idx")
        sums = np.frombuffer(read_whole(self._copied(shard, ENDING), shard.sha256[ENDING]), "<u4")
        return IndexedFile(prefix, RemoteData(self, shard, sums), index)

    def fill_cache(self, wanted: Iterable[tuple[IndexedFile, int, int]]) -> None:
        """Read the blocks of tokens [start, stop) of each shard into the cache, with parallel requests."""
        for future in [self._begin(file, start, stop) for file, start, stop in wanted]:
            if future:
                future.result()

    def _begin(self, file: IndexedFile, start: int, stop: int) -> Future[None] | None:
        data, width = file.data, file.dtype.itemsize
        if not isinstance(data, RemoteData):
            return None
        name = data.shard.prefix, start * width // BLOCK, -(-stop * width // BLOCK)
        with self._lock:
            if name not in self._pending:
                self._pending[name] = self._pool.submit(self._read_blocks, data, *name)
            return self._pending[name]

    def _read_blocks(self, data: RemoteData, prefix: str, first: int, past: int) -> None:
        try:
            data.blocks(first, past)
        finally:
            with self._lock:
                del self._pending[prefix, first, past]

    def read(self, shard: Shard, ending: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file of a shard. Imported shards have absolute prefixes and are not read from the remote storage."""
        storage = self._local if Path(shard.prefix).is_absolute() else self.storage
        assert storage
        return _read_with_retries(storage, shard.prefix + ending, start, stop)

    def _copied(self, shard: Shard, ending: str) -> Path:
        path = self._folder / "index" / f"{shard.sha256[ending]}{ending}"
        if not path.exists():
            write_bytes(path, self.read(shard, ending, 0, shard.size[ending]))
        try:
            read_whole(path, shard.sha256[ending])
        except UserError:
            path.unlink()
            raise damaged(Path(shard.prefix + ending), "is damaged (its hash differs)") from None
        return path


def _read_with_retries(storage: Storage, name: str, start: int, stop: int) -> bytes:
    """Read, with retries if the storage fails. Raises a `UserError` that names the file if all of them fail."""
    for pause in (*_PAUSES, None):
        try:
            return storage.read(name, start, stop)
        except UserError:
            raise
        except FileNotFoundError:
            raise damaged(Path(name), "is missing where the shards are kept (shards.cache.remote)") from None
        except Exception as error:  # each storage raises its own exceptions
            if pause is None:
                what = " ".join(f"{type(error).__name__}: {error}".split())
                raise UserError(
                    f"{name} could not be read in {len(_PAUSES) + 1} tries ({what}); check that the storage of the shards "
                    "(shards.cache.remote) answers, then run the same command again"
                ) from error
            time.sleep(pause)
    raise AssertionError


class RemoteData:
    """The tokens of one shard; implements `lmworks.shards.indexed.Data`. Each read of a block is verified by its checksum."""

    def __init__(self, shards: RemoteShards, shard: Shard, sums: np.ndarray) -> None:
        self._shards, self.shard, self._sums = shards, shard, sums
        self._size = shard.size[".bin"]

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> np.ndarray:
        first = start // BLOCK
        data = b"".join(self.blocks(first, -(-stop // BLOCK)))
        return np.frombuffer(data, np.uint8)[start - first * BLOCK : stop - first * BLOCK]

    def blocks(self, first: int, past: int) -> list[bytes]:
        """Blocks [first, past), from the cache or else from the storage, adjacent blocks in one request."""
        found = [self._cached(block) for block in range(first, past)]
        at = 0
        while at < len(found):
            if found[at] is not None:
                at += 1
                continue
            end = at
            while end < len(found) and found[end] is None:
                end += 1
            found[at:end] = self._fetched(first + at, first + end)
            at = end
        return [block for block in found if block is not None]

    def _cached(self, block: int) -> bytes | None:
        size = min(BLOCK, self._size - block * BLOCK)
        data = self._shards.cache.get(block_key(self.shard.sha256[".bin"], block), size)
        return data if data is not None and crc32(data) == self._sums[block] else None

    def _fetched(self, first: int, past: int) -> list[bytes]:
        data = self._shards.read(self.shard, ".bin", first * BLOCK, min(past * BLOCK, self._size))
        blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
        for block, content in zip(range(first, past), blocks, strict=False):
            if crc32(content) != self._sums[block]:
                raise damaged(Path(f"{self.shard.prefix}.bin"), f"is damaged (its checksum differs at byte {block * BLOCK:,})")
            self._shards.cache.put(block_key(self.shard.sha256[".bin"], block), content)
        if len(blocks) < past - first:
            raise damaged(Path(f"{self.shard.prefix}.bin"), f"is cut off after {first * BLOCK + len(data):,} bytes")
        return blocks


class ReadAhead:
    """Calls `fill_cache(step)` for the next `steps` steps in background threads. Errors are ignored: they recur when the step is read."""

    def __init__(self, fill_cache: Callable[[int], None], steps: int, last: int) -> None:
        self._fill_cache, self._steps, self._last = fill_cache, steps, last
        self._goal = self._done = -1
        self._moved = threading.Condition()
        for number in range(_STEPS_AT_ONCE):
            threading.Thread(target=self._work, name=f"read-ahead-{number}", daemon=True).start()

    def follow(self, step: int) -> None:
        """Called when a batch is read: continue until `steps` steps after it; restart there after a jump to another step."""
        with self._moved:
            if not self._done - self._steps <= step <= self._done + 1:
                self._done = step
            self._goal = min(step + self._steps, self._last)
            self._moved.notify_all()

    def _work(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._done < self._goal)
                self._done += 1
                step = self._done
            try:
                self._fill_cache(step)
            except Exception:
                continue


_MOST_OPEN = 256  # each takes two descriptors, and some systems give a process 1,024


class ShardFiles:
    """`files(prefix)` returns the opened shard. The index of a shard is hashed when it is first opened. Its tokens are verified block by
    block as they are read (see `lmworks.shards.indexed`). `remote` opens shards in remote storage. Safe to share between threads.
    """

    def __init__(self, shards_dir: Path, manifest: Manifest, remote: RemoteShards | None = None, most: int = _MOST_OPEN) -> None:
        self._shards = {Path(shards_dir) / shard.prefix: shard for shard in manifest.shards()}
        self._open: OrderedDict[Path, IndexedFile] = OrderedDict()
        self._sound: set[Path] = set()
        self.remote, self._most, self._lock = remote, most, threading.Lock()

    def __call__(self, prefix: Path) -> IndexedFile:
        with self._lock:
            if prefix not in self._open:
                self._open[prefix] = self._opened(prefix, self._shards[prefix])
                if len(self._open) > self._most:
                    self._open.popitem(last=False)
            self._open.move_to_end(prefix)
            return self._open[prefix]

    def _opened(self, prefix: Path, shard: Shard) -> IndexedFile:
        if self.remote:
            return self.remote.open(prefix, shard)
        sums = None
        if indexed.ENDING in shard.sha256:
            path = with_ending(prefix, indexed.ENDING)
            sums = indexed.read_checksums(path, shard.sha256[indexed.ENDING], shard.size[".bin"])
        if prefix not in self._sound:
            indexed.read_whole(with_ending(prefix, ".idx"), shard.sha256[".idx"])
            self._sound.add(prefix)
        return IndexedFile(prefix, indexed.MappedData(with_ending(prefix, ".bin"), sums))
