"""The open shards of a folder: an LRU cache, since the number of open files is limited."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from lmworks.shards.format import checksums
from lmworks.shards.format.indexed import IndexedFile, with_ending
from lmworks.shards.format.manifest import Manifest, Shard
from lmworks.shards.storage.remote import RemoteShards

_MOST_OPEN = 256  # each takes two descriptors, and some systems give a process 1,024


class ShardFiles:
    """`files(prefix)` returns the opened shard. The index of a shard is hashed when it is first opened. Its tokens are verified block by
    block as they are read (see `lmworks.shards.format.checksums`). `remote` opens shards in remote storage. Safe to share between threads.
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
        if checksums.ENDING in shard.sha256:
            path = with_ending(prefix, checksums.ENDING)
            sums = checksums.read_checksums(path, shard.sha256[checksums.ENDING], shard.size[".bin"])
        if prefix not in self._sound:
            checksums.read_whole(with_ending(prefix, ".idx"), shard.sha256[".idx"])
            self._sound.add(prefix)
        return IndexedFile(prefix, checksums.MappedData(with_ending(prefix, ".bin"), sums))
