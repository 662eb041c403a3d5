from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmworks.errors import UserError
from lmworks.shards.indexed import IndexedFile, IndexedWriter, token_dtype

DOCUMENTS = [np.array([1, 2, 3]), np.array([60_000]), np.arange(10, 15)]

# What megatron-core 0.16.1 writes for DOCUMENTS as uint16 (one sequence per document).
MEGATRON_BIN = bytes.fromhex("01000200030060ea0a000b000c000d000e00")
MEGATRON_IDX = bytes.fromhex(
    "4d4d4944494458000001000000000000000803000000000000000400000000000000"
    "03000000010000000500000000000000000000000600000000000000080000000000"
    "00000000000000000000010000000000000002000000000000000300000000000000"
)


def write(prefix: Path, documents: list[np.ndarray], dtype: str = "<u2") -> IndexedFile:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(document)
    return IndexedFile(prefix)


def test_files_are_megatrons_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "ours", DOCUMENTS)
    assert (tmp_path / "ours.bin").read_bytes() == MEGATRON_BIN
    assert (tmp_path / "ours.idx").read_bytes() == MEGATRON_IDX


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_megatron_reads_ours_and_we_read_megatrons(tmp_path: Path, dtype: str) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed (extra: slow)")
    import torch

    write(tmp_path / "ours", DOCUMENTS, dtype)
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [theirs[number].tolist() for number in range(len(theirs))] == [document.tolist() for document in DOCUMENTS]
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type)
    for document in DOCUMENTS:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"theirs{ending}").read_bytes() == (tmp_path / f"ours{ending}").read_bytes()


def test_documents_of_several_sequences_are_read(tmp_path: Path) -> None:
    """Megatron may split a document into sentences; ours never does."""
    write(tmp_path / "x", [np.arange(4), np.arange(4, 10), np.arange(3)])
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[18:34] = struct.pack("<QQ", 3, 3)
    index[-32:] = struct.pack("<QQQ", 0, 2, 3)
    (tmp_path / "x.idx").write_bytes(index)
    file = IndexedFile(tmp_path / "x")
    assert file.documents == 2
    assert file.document(0).tolist() == list(range(10))
    assert file.documents_until(np.array([0, 4, 9, 10])).tolist() == [1, 1, 1, 2]


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40))
@settings(max_examples=40, deadline=None)
def test_bisection_equals_searchsorted(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    file = write(tmp_path_factory.mktemp("x") / "x", [np.full(length, 7) for length in lengths])
    starts = np.cumsum([0, *lengths])
    positions = np.arange(-3, starts[-1] + 3)
    assert np.array_equal(file.documents_until(positions), np.searchsorted(starts[:-1], positions, side="right"))
    assert np.array_equal(file.document_start(np.arange(len(starts))), starts)


def test_type_follows_the_vocabulary() -> None:
    assert token_dtype(65_499) == np.uint16
    assert token_dtype(65_500) == np.int32
    assert token_dtype(151_552) == np.int32


def test_nothing_is_visible_when_writing_fails(tmp_path: Path) -> None:
    def fail_in_the_middle() -> None:
        with IndexedWriter(tmp_path / "x", np.dtype("<u2"), mask=True) as writer:
            writer.add(np.arange(3), np.ones(3, bool))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_in_the_middle()
    assert list(tmp_path.iterdir()) == []


def test_mask_lies_beside_the_tokens(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a.b", np.dtype("<u2"), mask=True) as writer:
        writer.add(np.array([1, 2, 3]), np.array([False, True, True]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx", "a.b.mask"]
    mask = IndexedFile(tmp_path / "a.b").mask
    assert mask is not None
    assert mask.tolist() == [0, 1, 1]
    (tmp_path / "a.b.mask").write_bytes(b"\0")
    with pytest.raises(UserError, match="has 1 entries for 3 tokens"):
        _ = IndexedFile(tmp_path / "a.b").mask


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("x.bin", lambda data: data[:-2], r"x\.bin has 16 bytes where its index states 18"),
        ("x.bin", lambda data: b"", r"x\.bin has 0 bytes where its index states 18"),
        ("x.bin", None, r"x\.bin is missing"),
        ("x.idx", lambda data: data[:-1], r"x\.idx has 101 bytes where its header states 102"),
        ("x.idx", lambda data: data[:20], r"x\.idx is cut off after 20 bytes"),
        ("x.idx", lambda data: b"P" + data[1:], r"x\.idx is not a Megatron index"),
        ("x.idx", None, r"x\.idx is missing"),
    ],
)
def test_a_damaged_shard_is_named_with_what_to_do(tmp_path: Path, name: str, damage, message: str) -> None:
    write(tmp_path / "x", DOCUMENTS)
    path = tmp_path / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message + r".*; delete the folder .* and run the same command again") as caught:
        IndexedFile(tmp_path / "x")
    assert "\n" not in str(caught.value)
