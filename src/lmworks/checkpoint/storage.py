"""How tensors lie in a checkpoint: a storage for `torch.distributed.checkpoint` without pickle.

DCP's planners decide which rank saves which chunk of which tensor, and on loading which chunks a rank needs on its own layout.
This file is the storage below them: raw bytes in `data-RANK-NUMBER.bin`, and `tensors.json` saying where each chunk lies.
PyTorch's own file-system storage keeps that table as a pickle, which runs code when a checkpoint from elsewhere is opened.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from lmworks.checkpoint import manifest
from lmworks.files import sha256_file, sync_directory

TABLE = "tensors.json"
_FILE_BYTES = 1 << 30
_THREADS = min(4, os.cpu_count() or 1)
# One process without init_process_group is a layout like any other here, not something to warn about.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed.checkpoint")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a chunk lies: byte offset and length in a file, and what the manifest will say of the whole file."""

    file: str
    offset: int
    length: int
    entry: manifest.Entry | None = None


def raw_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor in row-major order as bytes; no copy if they lie so in CPU memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Writer(StorageWriter):
    """Writes one checkpoint into `directory`, which the coordinator makes. `documents` are small JSON files that go with it.

    Every file is synced and read back before it counts. The coordinator writes the documents, the table and last the manifest.
    """

    def __init__(self, directory: Path, documents: dict[str, Any], file_bytes: int = _FILE_BYTES) -> None:
        self.directory, self.documents, self.file_bytes = directory, documents, file_bytes

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self.directory.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        groups = _split(plan.items, self.file_bytes)
        batches = [(f"data-{plan.storage_data:05d}-{number:05d}.bin", items) for number, items in enumerate(groups)]
        results: list[WriteResult] = []
        manifest.parallel(lambda batch: results.extend(self._write_file(*batch, planner)), batches, _THREADS)
        return _done(results)

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        path, hasher, offset, places = self.directory / name, hashlib.sha256(), 0, []
        with open(path, "xb") as handle:
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor), "only tensors reach the storage"
                data = raw_bytes(tensor)
                handle.write(data)
                hasher.update(data)
                places.append((item.index, offset, data.nbytes))
                offset += data.nbytes
            handle.flush()
            os.fsync(handle.fileno())
            # Forget the cached pages, so that reading back asks the disk.
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        entry = manifest.Entry(offset, hasher.hexdigest())
        if sha256_file(path) != entry.sha256:
            raise OSError(f"{path} read back differs from what was written; the disk or its driver is faulty")
        return [WriteResult(index, length, Place(name, begin, length, entry)) for index, begin, length in places]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for rank in results for result in rank}
        files = {place.file: place.entry for place in places.values()}
        for name, value in {**self.documents, TABLE: _table(metadata, places)}.items():
            files[name] = manifest.write_synced(self.directory / name, json.dumps(value, indent=1).encode() + b"\n")
        manifest.seal(self.directory, files)
        sync_directory(self.directory)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _split(items: list[WriteItem], limit: int) -> list[list[WriteItem]]:
    """Items in order, in groups of about `limit` bytes."""
    groups: list[list[WriteItem]] = []
    room = 0
    for item in items:
        assert item.tensor_data is not None, "only tensors reach the storage"
        size = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= size
    return groups


def _table(metadata: Metadata, places: dict[MetadataIndex, Place]) -> dict[str, Any]:
    table = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), "only tensors reach the storage"
        chunks = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            where = {"file": place.file, "offset": place.offset, "length": place.length}
            chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **where})
        table[name] = {"dtype": str(tensor.properties.dtype).removeprefix("torch."), "shape": list(tensor.size), "chunks": chunks}
    return table


def read_table(directory: Path) -> dict[str, Any]:
    """name -> {dtype, shape, chunks} of every tensor in a checkpoint."""
    return dict(json.loads((directory / TABLE).read_text()))


class Reader(StorageReader):
    """Reads the chunks that a rank's plan asks for, straight into its tensors."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._places: dict[MetadataIndex, Place] = {}
        self._chunks: dict[MetadataIndex, tuple[torch.dtype, list[int]]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for name, record in read_table(self.directory).items():
            chunks = [ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])) for chunk in record["chunks"]]
            dtype = getattr(torch, record["dtype"])
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(record["shape"]), chunks)
            for chunk in record["chunks"]:
                index = MetadataIndex(name, chunk["offsets"])
                self._places[index] = Place(chunk["file"], chunk["offset"], chunk["length"])
                self._chunks[index] = (dtype, chunk["sizes"])
        return Metadata(state_dict_metadata=tensors, storage_data=self._places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The table that `read_metadata` filled is all there is."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index].file, []).append(item)
        manifest.parallel(lambda name: self._read_file(self.directory / name, by_file[name], planner), sorted(by_file), _THREADS)
        return _done(None)

    def _read_file(self, path: Path, items: list[ReadItem], planner: LoadPlanner) -> None:
        with open(path, "rb", buffering=0) as handle, torch.no_grad():
            for item in items:
                place = self._places[item.storage_index]
                dtype, sizes = self._chunks[item.storage_index]
                chunk = torch.empty(sizes, dtype=dtype)
                _read_into(handle.fileno(), place.offset, raw_bytes(chunk), path)
                for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    chunk = chunk.narrow(axis, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(chunk)
                planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _read_into(fd: int, offset: int, target: memoryview, path: Path) -> None:
    while target:
        count = os.preadv(fd, [target], offset)
        if not count:
            raise OSError(f"{path} ends too early")
        target, offset = target[count:], offset + count
