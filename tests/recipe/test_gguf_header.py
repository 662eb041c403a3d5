"""The header of GGUF files from anywhere: read exactly, or refused in one line, in bounded time and memory."""

from __future__ import annotations

import os
import random
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from lmworks.errors import UserError
from lmworks.recipe.gguf_header import TYPES, read_header
from lmworks.recipe.gguf_model import find_gguf
from lmworks.recipe.weights import find_weights


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(keys: list[bytes], tensors: list[bytes], data: int = 64, counts: tuple[int, int] | None = None, version: int = 3) -> bytes:
    given = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, *given) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


ARCHITECTURE = key("general.architecture", 8, text("llama"))
GOOD = file_of([ARCHITECTURE, key("a", 9, struct.pack("<IQ", 5, 3) + struct.pack("<3i", 1, -2, 3)), key("b", 7, b"\x01")],
               [tensor("one", (4, 2)), tensor("two", (8,), 0, 32)])  # fmt: skip


def test_a_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD)
    found = read_header(path)
    assert found.metadata == {"general.architecture": "llama", "a": [1, -2, 3], "b": True}
    one, two = found.tensors.values()
    assert (one.shape, one.nbytes, two.shape, two.nbytes) == ((2, 4), 32, (8,), 32) and two.offset == one.offset + 32


def test_the_types_are_those_that_the_package_dequantizes() -> None:
    """A type that a new release adds is missed here, and not by a user."""
    quants = pytest.importorskip("gguf.quants", reason="gguf is not installed: pip install 'lmworks[export]'")
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    readable = {*quants._type_traits, GGMLQuantizationType.F32, GGMLQuantizationType.F16}
    assert {int(one): (one.name, *GGML_QUANT_SIZES[one]) for one in readable} == TYPES


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is cut short"),
        (b"PK\x03\x04" + bytes(100), "does not begin with the letters GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "it is big-endian"),
        (b"GGUF" + struct.pack("<I", 9) + bytes(100), "its version is 9"),
        (file_of([], [], counts=(2**63, 0)), "it states 9,223,372,036,854,775,808 tensors"),
        (file_of([], [], counts=(0, 2**40)), "it states 1,099,511,627,776 keys"),
        (file_of([key("a", 8, struct.pack("<Q", 2**62))], []), "bytes of a text"),
        (file_of([key("a", 9, struct.pack("<IQ", 8, 2**50))], []), "elements of a"),
        (file_of([key("a", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 9, 1))], []), "a is an array of arrays"),
        (file_of([key("a", 99, b"")], []), "the value of a has type 99"),
        (file_of([ARCHITECTURE, ARCHITECTURE], []), "it has the key general.architecture twice"),
        (file_of([key(b"\xff\xfe", 7, b"\0")], []), "a text that is not UTF-8"),
        (file_of([key("a\x1b[2J", 7, b"\0")], []), "a name that cannot be printed"),
        (file_of([key("general.alignment", 4, struct.pack("<I", 0))], []), "general.alignment is 0"),
        (file_of([], [tensor("t", (4,)), tensor("t", (4,), 0, 32)]), "it has tensor t twice"),
        (file_of([], [tensor("t", (4,)), tensor("u", (4,), 0, 0)]), "tensors t and u overlap"),
        (file_of([], [tensor("t", (4,), 0, 7)]), "tensor t is not aligned"),
        (file_of([], [tensor("t", (1000,))]), "tensor t ends behind the end of the file"),
        (file_of([], [tensor("t", (2**40, 2**40))]), "tensor t ends behind the end of the file"),
        (file_of([], [tensor("t", (4,), 0, 2**63)]), "tensor t ends behind the end of the file"),
        (file_of([], [tensor("t", (4,), 77)]), "tensor t has type 77, which lmworks does not read"),
        (file_of([], [tensor("t", (33,), 3)]), "tensor t of type Q4_1 has shape (33,)"),
        (file_of([], [tensor("t", (0,))]), "has shape (0,)"),
        (file_of([], [text("t") + struct.pack("<I", 4_000_000)]), "tensor t has 4000000 dimensions"),
        (GOOD[:60], "it is cut short"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError) as raised:
        read_header(path)
    assert reason in str(raised.value) and "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_sparse_files_end_soon_and_take_little_memory(tmp_path: Path) -> None:
    """A terabyte of zeros costs nobody anything, and its zeros are texts of no bytes."""
    path = tmp_path / "m.gguf"
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for head in (
        file_of([key("a", 9, struct.pack("<IQ", 8, 1 << 30))], []), file_of([], [], counts=(1 << 16, 0)),
        file_of([], [], counts=(0, 1 << 12)), file_of([key("a", 9, struct.pack("<IQ", 0, 1 << 36))], []),
    ):  # fmt: skip
        path.write_bytes(head)
        os.truncate(path, 1 << 40)
        with pytest.raises(UserError):
            read_header(path)
    assert time.process_time() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    """Nothing but `UserError` comes out, whatever the bytes; and not even that where the header is still one."""
    generator, path = random.Random(5), tmp_path / "m.gguf"
    outcomes: dict[str, int] = {"read": 0, "refused": 0}
    for _ in range(3000):
        data = bytearray(GOOD)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data) - 64)] = generator.choice((0, 1, 255, generator.randrange(256)))
        path.write_bytes(bytes(data[: generator.choice((len(data), generator.randrange(len(data))))]))
        message = ""
        try:
            read_header(path)
        except UserError as error:
            message = str(error)
        assert "\n" not in message
        outcomes["refused" if message else "read"] += 1
    assert min(outcomes.values()) > 100


@pytest.mark.parametrize("name", ["config.json", "model.gguf", "model.safetensors"])
def test_pipes_and_folders_in_the_place_of_files(tmp_path: Path, name: str) -> None:
    for make in (os.mkfifo, os.mkdir):
        folder = tmp_path / make.__name__
        folder.mkdir()
        make(folder / name)
        if name == "model.safetensors":
            (folder / "config.json").write_text("{}")
        with pytest.raises(UserError) as raised:
            find_weights(folder / name if name == "model.gguf" else folder)
        assert "\n" not in str(raised.value)


def test_one_part_of_many(tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-99999.gguf").write_bytes(GOOD)
    with pytest.raises(UserError, match="one of 99999 parts"):
        find_gguf(tmp_path)
    (tmp_path / "m-00001-of-99999.gguf").rename(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(UserError, match=r"m-00002-of-00002\.gguf does not exist"):
        read_header(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(file_of([], [tensor("one", (4,))]))
    with pytest.raises(UserError, match="has tensor one once more"):
        read_header(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(file_of([], [tensor("three", (4,))]))
    found: Any = read_header(tmp_path / "m-00001-of-00002.gguf").tensors
    assert list(found) == ["one", "two", "three"]
