"""A campaign of bad rows and files: no crash, no hang, each with its reason, and as many items as there were rows."""

from __future__ import annotations

import bz2
import collections
import gzip
import io
import json
import lzma
import random
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_items import source

from lmworks.corpus.read import parts, read
from lmworks.corpus.read.part import Item
from lmworks.errors import UserError

LIMIT = 20_000
ANY = "any"  # what was mutated at random may be anything, but one item
PROSE = "The quick brown fox, naïve and 狐, jumps over the lazy dog. "
KNOWN = {
    *("damaged_file", "damaged_member", "bad_utf8", "binary", "unsafe_name", "encrypted", "duplicate_member", "bomb", "empty_text"),
    *("enormous", "broken_json", "not_a_notebook", "not_a_page", "broken_record", "no_column", "wrong_type", "null_text", "rest_unread"),
    "other_ending",  # a damaged name
}

Row = tuple[bytes, str | None]


def json_bytes(value: object, ascii_only: bool = False) -> bytes:
    return json.dumps({"text": value, "url": "u"}, ensure_ascii=ascii_only).encode()


def mutated(data: bytes, draw: random.Random, times: int = 3) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, times)):
        at = draw.randrange(len(changed)) if changed else 0
        match draw.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del changed[at : at + draw.randint(1, 20)]
            case 2:
                changed[at:at] = draw.randbytes(draw.randint(1, 20))
            case 3:
                changed[at : at + 8] = bytes(8)
    return bytes(changed)


ROWS: list[Callable[[random.Random], Row]] = [
    lambda draw: (json_bytes(PROSE * draw.randint(1, 50)), None),
    lambda draw: (json_bytes(PROSE * draw.randint(1, 50), ascii_only=True), None),
    lambda draw: (b"\xef\xbb\xbf" + json_bytes(PROSE), None),
    lambda draw: (json_bytes("null byte \0 as an escape"), None),
    lambda draw: (b'{"text": "a", "text": "twice", "x": NaN}', None),
    lambda draw: (json_bytes(PROSE, ascii_only=True)[: draw.randint(1, 60)], "broken_json"),
    lambda draw: (json_bytes(PROSE) + b"}", "broken_json"),
    lambda draw: (b'{"text": "raw \0 null byte"}', "broken_json"),
    lambda draw: (b"\0" * draw.randint(1, 5000), "broken_json"),
    lambda draw: (b'{"text": "\xff\xfe ' + b"x" * draw.randint(0, 500) + b'"}', "bad_utf8"),
    lambda draw: (b'{"text": "\xed\xa0\xbd"}', "bad_utf8"),
    lambda draw: (b'{"text": "half \\ud83d"}', "bad_utf8"),
    lambda draw: (json_bytes(None), "null_text"),
    lambda draw: (b'{"other": 1}', "null_text"),
    lambda draw: (json_bytes(draw.choice([7, 1.5, True, [], {}, ["text"], {"text": "x"}])), "wrong_type"),
    lambda draw: (draw.choice([b"[]", b'["text"]', b'"text"', b"5", b"null", b"true", b"NaN"]), "wrong_type"),
    lambda draw: (b'{"text": ' + b"9" * 5000 + b"}", "broken_json"),
    lambda draw: (draw.choice([b"[", b'{"text":']) * draw.randint(2000, 15_000), "broken_json"),
    lambda draw: (b'{"text": "x", "deep": ' + b"[" * 9000 + b"]" * 9000 + b"}", "broken_json"),
    lambda draw: (json_bytes(draw.choice(["", " ", "\n\t", "\u3000"])), "empty_text"),
    lambda draw: (json_bytes("x" * (LIMIT + 1)), "enormous"),
    lambda draw: (json_bytes("é" * (LIMIT // 2 + 1), ascii_only=True), "enormous"),
    lambda draw: (json_bytes("x" * (4 * LIMIT + 70_000)), "enormous"),
    lambda draw: (mutated(json_bytes(PROSE * 3), draw).translate(bytes.maketrans(b"\n\r", b"  ")).strip() or b"x", ANY),
    lambda draw: (draw.randbytes(draw.randint(1, 300)).translate(bytes.maketrans(b"\n\r", b"  ")).strip() or b"x", ANY),
]
# long rows are rare, so that the campaign is about their kinds and not about copying bytes
_WEIGHTS = [0.05 if kind in (17, 18, 21, 22) else 1 for kind in range(len(ROWS))]


def check_reasons(found: list[Item], expected: list[str | None]) -> None:
    assert len(found) == len(expected)
    for item, reason in zip(found, expected, strict=True):
        assert reason == ANY or item.reason == reason, (item, reason)
        json.dumps([item.origin, dict(item.facts), item.text if item.reason else ""], ensure_ascii=False).encode()
        assert item.reason is not None or 0 < len(item.text.encode()) <= LIMIT


def all_items(kind: str, path: Path, part_bytes: int = 1 << 40) -> list[Item]:
    given = source(kind, path=str(path), fact_keys=["url"] if kind in ("jsonl", "parquet") else [])
    return [item for part in parts(given, part_bytes) for item in read(given, part, LIMIT)]


def fuzz_rows(folder: Path, count: int, draw: random.Random) -> int:
    zstandard = pytest.importorskip("zstandard")
    packers: dict[str, Callable[[bytes], bytes]] = {
        "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress
    }  # fmt: skip
    done = 0
    while done < count:
        made = [draw.choices(ROWS, _WEIGHTS)[0](draw) for _ in range(min(2000, count - done))]
        suffix = draw.choice(list(packers))
        path = folder / f"rows.jsonl{suffix}"
        path.write_bytes(packers[suffix](b"\n".join(line for line, _ in made) + draw.choice([b"", b"\n"])))
        check_reasons(all_items("jsonl", path, draw.choice([1 << 40, 100_000, 3000])), [reason for _, reason in made])
        path.unlink()
        done += len(made)
    return done


FILES: list[Callable[[random.Random], Row]] = [
    lambda draw: ((PROSE * draw.randint(1, 30)).encode(), None),
    lambda draw: (b"\xef\xbb\xbf" + PROSE.encode(), None),
    lambda draw: (b"", "empty_text"),
    lambda draw: (b" \n\t", "empty_text"),
    lambda draw: (b"text\0" + draw.randbytes(10), "binary"),
    lambda draw: ((PROSE * 20).encode() + b"\xff", "bad_utf8"),
    lambda draw: (PROSE.encode("utf-16"), None),
    lambda draw: (PROSE.encode("utf-16-le"), "binary"),
    lambda draw: (b"x" * (LIMIT + 1), "enormous"),
    lambda draw: (mutated(PROSE.encode(), draw), ANY),
]


def fuzz_files(folder: Path, count: int, draw: random.Random) -> int:
    made = [draw.choice(FILES)(draw) for _ in range(count)]
    for number, (data, _) in enumerate(made):
        (folder / f"{number:06}.txt").write_bytes(data)
    check_reasons(all_items("text", folder, 100_000), [reason for _, reason in made])
    return count


def archives(draw: random.Random) -> dict[str, bytes]:
    zipped, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive, tarfile.open(fileobj=tarred, mode="w:gz") as tar:
        for number in range(5):
            data = (PROSE * draw.randint(1, 20)).encode() if number else draw.randbytes(500)
            archive.writestr(f"{number}.md", data)
            info = tarfile.TarInfo(f"{number}.md")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return {"a.zip": zipped.getvalue(), "a.tgz": tarred.getvalue()}


def damaged_containers(draw: random.Random) -> tuple[str, str, bytes]:
    """(kind, file name, damaged content) of a file that holds several documents or needs a parser of its own."""
    match draw.randrange(6):
        case 0:
            buffer = io.BytesIO()
            table = pa.table({"text": [PROSE * draw.randint(1, 9) for _ in range(40)], "url": ["u"] * 40})
            pq.write_table(table, buffer, row_group_size=10, compression=draw.choice(["zstd", "snappy", "none"]))
            return "parquet", "a.parquet", mutated(buffer.getvalue(), draw)
        case 1:
            name, data = draw.choice(list(archives(draw).items()))
            return "markdown", name, mutated(data, draw, 10)
        case 2:
            name, data = draw.choice(list(archives(draw).items()))
            return "text", name, data[: draw.randrange(len(data))]
        case 3:
            record = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nWARC-Target-URI: u\r\nContent-Length: 60\r\n\r\n"
            return "warc", "a.warc", mutated((record + PROSE.encode()[:60] + b"\r\n\r\n") * 5, draw)
        case 4:
            cells = [{"cell_type": draw.choice(["code", "markdown"]), "source": PROSE, "outputs": []} for _ in range(3)]
            return "notebook", "a.ipynb", mutated(json.dumps({"cells": cells, "metadata": {}}).encode(), draw)
        case _:
            packed = gzip.compress(b"\n".join(json_bytes(PROSE) for _ in range(20)))
            return "jsonl", "a.jsonl.gz", mutated(packed, draw)


def fuzz_containers(folder: Path, count: int, draw: random.Random) -> collections.Counter[str]:
    pytest.importorskip("warcio")
    found: collections.Counter[str] = collections.Counter()
    for number in range(count):
        kind, name, data = damaged_containers(draw)
        path = folder / f"{number}-{name}"
        path.write_bytes(data)
        try:
            listed = all_items(kind, path)
        except UserError as error:  # the only file of the source, and a column has another name now
            found["no_column" if "has no column" in str(error) else f"unexpected: {error}"] += 1
            continue
        assert len(listed) <= 10_000, (kind, number)  # a bent back reference may repeat line ends
        assert {item.reason for item in listed if item.reason} <= KNOWN, (kind, number)
        found.update(item.reason or "document" for item in listed)
        path.unlink()
    return found


def fuzz_markup(folder: Path, count: int, draw: random.Random) -> int:
    pytest.importorskip("trafilatura")
    pytest.importorskip("pylatexenc")
    page = f"<html><body><article><h1>T</h1><p>{PROSE * 3}</p><p>{PROSE * 2}</p><pre>x</pre></article></body></html>".encode()
    body = rf"\section{{A}} {PROSE} $x^2$ \begin{{equation}}y\end{{equation}}"
    paper = rf"\documentclass{{a}}\begin{{document}}{body}\end{{document}}".encode()
    for kind, name, data in (("html", "html", page), ("latex", "tex", paper)):
        inner = folder / kind
        inner.mkdir()
        for number in range(count):
            (inner / f"{number:06}.{name}").write_bytes(mutated(data, draw, 12))
        found = all_items(kind, inner)
        assert len(found) == count
        assert {item.reason for item in found if item.reason} <= {"no_text", "bad_utf8", "hangs_parser"}
        assert sum(item.reason in (None, "bad_utf8") for item in found) > count / 2
        assert sum(item.reason is None for item in found) > count / 4
    return 2 * count


def campaign(folder: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    for name in ("rows", "files", "containers", "markup"):
        (folder / name).mkdir()
    rows = fuzz_rows(folder / "rows", count * 85 // 100, draw)
    files = fuzz_files(folder / "files", count * 10 // 100, draw)
    containers = count * 4 // 100
    reasons = fuzz_containers(folder / "containers", containers, draw)
    assert not [reason for reason in reasons if reason.startswith("unexpected")]
    assert reasons["document"] > containers
    assert reasons["damaged_file"] > containers / 20
    assert rows + files + containers + fuzz_markup(folder / "markup", count // 200, draw) == count


def test_two_thousand_rows_and_files(tmp_path: Path) -> None:
    campaign(tmp_path, 2000, 0)


@pytest.mark.slow
def test_a_hundred_thousand_rows_and_files(tmp_path: Path) -> None:
    campaign(tmp_path, 100_000, 1)


_PEAK = """
import collections, json, resource, sys
from lmworks.corpus.read import parts, read
from lmworks.recipe.schema.corpus import Source
import pyarrow.parquet, zstandard
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
source = Source(name="big", kind=sys.argv[1], path=sys.argv[2], license="test")
start = peak()
found = collections.Counter(item.reason or "document" for part in parts(source, 1 << 30) for item in read(source, part, 16_000_000))
print(json.dumps([found, peak() - start]))
"""


def reasons_and_peak(kind: str, path: Path) -> tuple[dict[str, int], float]:
    command = [sys.executable, "-c", _PEAK, kind, str(path)]
    found, peak = json.loads(subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout)
    return found, peak


def giant(path: Path, megabytes: int, data: bytes) -> None:
    million = (data * (1_000_000 // len(data) + 1))[:1_000_000]
    with open(path, "wb") as out:
        for _ in range(megabytes):
            out.write(million)
        out.write(b"\n" + json_bytes("after") + b"\n")


@pytest.mark.slow
@pytest.mark.parametrize("data", [b"a", b"\0", b'{"text": ', b"[", b"\xff"], ids=["letters", "nulls", "objects", "brackets", "bad_utf8"])
def test_a_line_of_a_gigabyte(tmp_path: Path, data: bytes) -> None:
    giant(tmp_path / "a.jsonl", 1000, data)
    found, peak = reasons_and_peak("jsonl", tmp_path / "a.jsonl")
    assert found == {"enormous": 1, "document": 1}
    assert peak < 400  # a line may be four times as long as the longest document, twice while it grows


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
def test_bombs_end_early(tmp_path: Path, suffix: str) -> None:
    zstandard = pytest.importorskip("zstandard")
    openers = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open, "zst": zstandard.open}
    with openers[suffix](tmp_path / f"a.jsonl.{suffix}", "wb") as out:
        for _ in range(3000):
            out.write(bytes(1_000_000))
    found, peak = reasons_and_peak("jsonl", tmp_path / f"a.jsonl.{suffix}")
    assert found == {"bomb": 1} or found == {"enormous": 1, "bomb": 1}
    assert peak < 400


@pytest.mark.slow
def test_a_column_that_repeats_one_giant_value_does_not_fill_the_memory(tmp_path: Path) -> None:
    indices = pa.array([0] * 20_000, pa.int32())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 10_000_000]))})
    pq.write_table(table, tmp_path / "a.parquet", dictionary_pagesize_limit=1 << 30, store_schema=False, compression="zstd")
    found, peak = reasons_and_peak("parquet", tmp_path / "a.parquet")
    assert found.pop("bomb") == 1
    assert set(found) == {"document"} and found["document"] < 200
    assert peak < 400
