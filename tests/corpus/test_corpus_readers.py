"""Readers on real formats, and on everything that can be wrong with them."""

from __future__ import annotations

import bz2
import ctypes
import gzip
import io
import json
import lzma
import os
import random
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_items import LIMIT, items, reasons, rows, source, texts

from lmworks.corpus.read import File, Part, huggingface, parts, read
from lmworks.corpus.read.opening import bounded_lines
from lmworks.corpus.read.rows import _fact
from lmworks.errors import Unavailable, UserError

GOOD = ["first document", "second: naïve 文書", "third"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    data = rows(*GOOD)
    if suffix == ".gz":
        data = gzip.compress(data)
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(data) // 2  # two frames, as parallel compressors write
        data = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    path = tmp_path / f"data.jsonl{suffix}"
    path.write_bytes(data)
    found = items("jsonl", path=str(path))
    assert texts(found) == GOOD
    assert found[1].origin == f"{path}:2"


@pytest.mark.parametrize(("suffix", "compress"), [(".bz2", bz2.compress), (".xz", lzma.compress)])
def test_a_damaged_stream_is_not_the_end_of_a_compressed_file(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    path, parallel = tmp_path / f"data.jsonl{suffix}", [compress(rows(text)) for text in GOOD]
    path.write_bytes(b"".join(parallel) + bytes(8))
    assert texts(items("jsonl", path=str(path))) == GOOD
    path.write_bytes(bytes(4).join(parallel))
    assert texts(items("jsonl", path=str(path))) == GOOD, "padding between streams"
    path.write_bytes(parallel[0] + b"?" + parallel[1][1:] + parallel[2])
    found = items("jsonl", path=str(path))
    assert texts(found) == GOOD[:1] and reasons(found) == ["damaged_file"]
    path.write_bytes(parallel[0] + parallel[1][:-5])
    found = items("jsonl", path=str(path))
    assert texts(found)[:1] == GOOD[:1] and reasons(found) == ["damaged_file"]
    path.write_bytes(bytes(64))
    assert reasons(items("jsonl", path=str(path))) == ["damaged_file"], "zero bytes are no padding where nothing is before them"


def test_zstd_with_the_widest_window_is_read(tmp_path: Path) -> None:
    """A frame of 2 GB of window and one plain block, by its published form (RFC 8878): a compressor would take as much memory."""
    data, window = rows(*GOOD), (31 - 10) << 3
    frame = bytes.fromhex("28b52ffd00") + bytes([window]) + (len(data) << 3 | 1).to_bytes(3, "little") + data
    (tmp_path / "data.jsonl.zst").write_bytes(frame)
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_PERTURB, 0)  # `make test` fills new memory, here 2 GB of which nothing is read
    try:
        assert texts(items("jsonl", path=str(tmp_path))) == GOOD
    finally:
        libc.mallopt(_M_PERTURB, int(os.environ.get("MALLOC_PERTURB_", "0")))


_M_PERTURB = -6  # malloc.h of glibc


def _zipped(data: bytes) -> bytes:
    with zipfile.ZipFile(made := io.BytesIO(), "w") as archive:
        archive.writestr("a.jsonl", data)
    return made.getvalue()


def _tarred(data: bytes) -> bytes:
    with tarfile.open(fileobj=(made := io.BytesIO()), mode="w") as archive:
        info = tarfile.TarInfo("a.jsonl")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return made.getvalue()


@pytest.mark.parametrize(
    ("name", "make", "remedy"),
    [
        ("a.jsonl", gzip.compress, "add .gz to its name"),
        ("a.jsonl", bz2.compress, "add .bz2 to its name"),
        ("a.jsonl", lzma.compress, "add .xz to its name"),
        ("a.jsonl", _zipped, "it is an archive"),
        ("a.zip", _zipped, "it is an archive"),
        ("a.tar.gz", lambda data: gzip.compress(_tarred(data)), "it is an archive"),
    ],
)
def test_what_is_no_text_is_one_damaged_file_with_a_remedy(tmp_path: Path, name: str, make: Callable[[bytes], bytes], remedy: str) -> None:
    (tmp_path / name).write_bytes(make(rows(*GOOD * 30)))
    for more in [{"kind": "jsonl"}] + [{"kind": "text", "document_format": "lines"}] * (name == "a.jsonl"):
        found = items(path=str(tmp_path / name), part_bytes=100, **more)
        assert reasons(found) == ["damaged_file"] and remedy in found[0].text, "it is not cut, and its bytes are no rows"


def test_objects_without_a_line_break_between_them_are_rows(tmp_path: Path) -> None:
    first, second, third = rows(*GOOD).splitlines()
    (tmp_path / "a.jsonl").write_bytes(first + second)
    (tmp_path / "b.jsonl").write_bytes(first + b"\n" + second + third + b"\n" + first + b',\n[1] [2]\n{"text": "x"} {"text"\n{"a": 1} 2\n')
    (tmp_path / "c.jsonl").write_bytes(b"".join(rows(*GOOD).splitlines()) * 9000)
    found = items("jsonl", path=str(tmp_path))
    assert texts(found) == [*GOOD[:2], *GOOD, GOOD[0], *GOOD * 9000]
    assert reasons(found) == ["broken_json"] * 3


def test_bad_rows_are_quarantined_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    bad = [b'{"text": "cut off', b'{"text": "\xff\xfe"}', b'{"text": null}', b'{"other": 1}', b'{"text": 7}', b'["text"]', b"[" * 100_000]
    path.write_bytes(b"\n".join([rows("before").strip(), *bad, b"", rows("after").strip()]))
    found = items("jsonl", limit=10**6, path=str(path))
    assert texts(found) == ["before", "after"]
    assert reasons(found) == ["broken_json", "bad_utf8", "null_text", "null_text", "wrong_type", "wrong_type", "broken_json"]
    assert found[1].text == '{"text": "cut off'


def test_a_document_over_the_limit_is_enormous_also_when_its_line_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(rows("a" * (LIMIT + 1), "é" * (LIMIT // 2 + 1), "é" * (LIMIT // 2), "b" * 200_000, "fine"))
    found = items("jsonl", path=str(path))
    assert texts(found) == ["é" * (LIMIT // 2), "fine"]
    assert reasons(found) == ["enormous"] * 3


BROKEN = {
    "escape": r'{"text": "C:\xyz", "more": [1, {"a": "}"}]}', "comma": '{"text": "x", "more": [1, 2],}', "word": '{"text": undefined}',
    "quotes": '{"text": "he said "so" again"}', "deep": '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "zero": '{"text": "a\0b"}', "long": '{"text": "' + 1_500_000 * "ab" + '"}', "escapes": '{"text": "' + 1_500_000 * "\\\\" + '"}',
}  # fmt: skip


SLOW_ROWS = ("deep", "escapes")  # to read, which the form around them does not change


@pytest.mark.parametrize(
    ("broken", "around"),
    [
        pytest.param(broken, around, marks=pytest.mark.slow if broken in SLOW_ROWS and around not in ("[\n{}\n]", "{}") else ())
        for broken in BROKEN for around in ("[{}]", "[\n{}\n]", "[{},]", "{}")
    ],
)  # fmt: skip
def test_a_broken_row_of_an_array_costs_itself_only(tmp_path: Path, broken: str, around: str) -> None:
    path = tmp_path / "data.json"
    documents = [json.dumps({"text": text, "of": [{"text": "no row"}]}, indent=1) for text in ("one", "two", "three")]
    between = ",\n" if around != "{}" else "\n"
    path.write_text(around.replace("{}", between.join([documents[0], BROKEN[broken], *documents[1:]])))
    found = items("jsonl", path=str(path))
    assert texts(found) == ["one", "two", "three"]
    assert reasons(found) == ["enormous" if broken in ("long", "escapes") else "broken_json"]
    assert [item.origin for item in found] == [f"{path}:{number}" for number in range(1, 5)]


@pytest.mark.parametrize(
    ("broken", "lost"),
    [
        ('{"text": [1, 2}', ": Expecting ',' delimiter at character 14 of it: {"),
        ('{"text": "5" disk"}', ": Expecting ',' delimiter at character 13 of it: {"),
        ('{"text": "x"}}', ": Expecting value at character 0 of it: }"),
        ("nothing", ": Expecting value at character 0 of it: nothing"),
        ('{"text": "x"}] {"text": "y"}', ": it follows the end of the array: {"),
    ],
)
def test_where_the_end_of_a_row_is_not_found_the_rest_is_named_with_its_size(tmp_path: Path, broken: str, lost: str) -> None:
    path = tmp_path / "data.json"
    path.write_text('[{"text": "one"}, ' + broken + ', {"text": "two", "of": {"text": "no row"}}' * 40_000 + "]")
    found = items("jsonl", path=str(path))
    assert texts(found)[0] == "one" and len(texts(found)) <= 2
    (rest,) = [item for item in found if item.reason is not None]
    assert rest.reason == "rest_unread" and rest.text.startswith("rest of the file unread, 1.7 MB" + lost), rest.text
    assert rest.origin == f"{path}:{len(found)}" and sum(item.consumed for item in found) == path.stat().st_size
    path.write_text('[{"text": "one"}, ')
    assert reasons(items("jsonl", path=str(path))) == ["broken_json"], "nothing behind it is known to be lost"


def test_tabs_and_line_breaks_in_strings_are_text(tmp_path: Path) -> None:
    text = "a\tb\nc \x1b[0m"
    raw = '{"text": "' + text + '"}'
    (tmp_path / "a.json").write_text(f"[{raw}, {raw}]")
    (tmp_path / "b.json").write_text(f"{raw}\n{raw}")
    (tmp_path / "c.jsonl").write_text(raw.replace("\n", " ") + "\n" + rows("d").decode())
    assert texts(items("jsonl", path=str(tmp_path))) == [text] * 4 + [text.replace("\n", " "), "d"]


@pytest.mark.parametrize(
    "first", ["[INFO] exported 2 rows", "[2024-05-01 12:00] x", "[1, 2] x", '["a"] x', "[" * 100_000, "[" * 5000 + "]" * 5000, "[", "# x"]
)
def test_a_first_line_with_a_bracket_makes_no_array_of_a_file_of_lines(tmp_path: Path, first: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(first.encode() + b"\n" + rows("one", "two"))
    found = items("jsonl", path=str(tmp_path))
    assert (texts(found), reasons(found)) == (["one", "two"], ["broken_json"])


def test_an_object_over_several_lines_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"title": "x", "text": "word " * 500_000, "more": ["\u6587"] * 9}, indent=2))
    (tmp_path / "b.json").write_text(json.dumps({"of": [[1, "x" * 90]] * 20_000, "text": "last"}, indent=2))
    found = items("jsonl", limit=3_000_000, path=str(tmp_path))
    assert [(len(item.text), item.reason) for item in found] == [(2_500_000, None), (4, None)]


def test_the_time_of_an_array_does_not_grow_with_its_longest_row(tmp_path: Path) -> None:
    """What was read at once because of that row was copied for each of those behind it."""
    documents = ["a" * 4_200_000, *(f"the row {number:,} of these" for number in range(90_000))]
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in documents]))
    (tmp_path / "a.jsonl").write_bytes(rows(*documents))

    def seconds(name: str) -> float:
        given, begin = source("jsonl", path=f"{tmp_path}/{name}"), time.process_time()
        assert sum(item.reason is None for part in parts(given, 1 << 40) for item in read(given, part, 5_000_000)) == 90_001
        return time.process_time() - begin

    assert seconds("a.json") < 2.5 * seconds("a.jsonl")


def test_a_fact_that_is_nested_too_deep_is_none() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert _fact(deep) is None and _fact([[1]]) == "[[1]]"
    while deep:  # freed by itself, it would overflow the stack of some versions of Python
        deep = deep.pop()  # type: ignore[assignment]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("document_format", ["file", "lines"])
def test_a_byte_order_mark_is_believed_in_files_and_archives(tmp_path: Path, encoding: str, document_format: str) -> None:
    data = "\ufeffeins é\nzwei".encode(encoding)
    (tmp_path / "a.txt").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("c.txt", data)
    found = items("text", path=str(tmp_path), document_format=document_format)
    assert texts(found) == (["eins é", "zwei"] if document_format == "lines" else ["eins é\nzwei"]) * 2
    (tmp_path / "a.md").write_bytes(data)
    assert texts(items("markdown", path=str(tmp_path / "a.md"))) == ["eins é\nzwei"]
    (tmp_path / "a.md").write_bytes(data[:-1])
    assert reasons(items("markdown", path=str(tmp_path / "a.md"))) == ["bad_utf8"]


def test_include_names_files_and_members_of_archives_alike(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("logs/one.log", "two.log", "c.txt"):
            archive.writestr(name, f"{name} in the archive")
    (tmp_path / "x.log").write_text("x.log")
    members = ["logs/one.log in the archive", "two.log in the archive"]
    assert texts(items("text", path=str(tmp_path), include="*.log")) == [*members, "x.log"]
    assert texts(items("text", path=str(tmp_path / "a.zip"), include="*.log")) == members
    assert texts(items("text", path=str(tmp_path / "a.zip"), include="one.log")) == members[:1], "by its name, as in a folder"
    found = items("text", path=str(tmp_path), include="*.zip")
    assert (texts(found), reasons(found)) == (["c.txt in the archive"], ["other_ending"] * 2), "of these archives what the kind reads"


def test_bounded_lines() -> None:
    stream = io.BytesIO(b"short\n" + b"x" * 50 + b"\n" + b"y" * 10 + b"\r\n" + b"z" * 49)
    assert list(bounded_lines(stream, 10)) == [(b"short", True), (b"x" * 12, False), (b"y" * 10, True), (b"z" * 12, False)]


_PEAK = """
import resource, sys
from lmworks.corpus.read import parts, read
from lmworks.recipe.schema.corpus import Source
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
source = Source(name="big", kind=sys.argv[1], path=sys.argv[2], license="test")
start = peak()
found = [(item.reason, len(item.text)) for part in parts(source, 1 << 40) for item in read(source, part, 1_000_000)]
print(found, peak() - start < 60)
"""


@pytest.mark.parametrize("kind", ["jsonl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("text", "gz"))])
def test_200_megabytes_in_one_line_do_not_blow_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / {"jsonl": "big.jsonl", "text": "big.txt", "gz": "big.jsonl.gz"}[kind]
    with open(path, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1) if kind == "gz" else raw as out:
        million = random.Random(0).randbytes(500_000).hex().encode()
        for _ in range(200):
            out.write(million)
        out.write(b"\n" + rows("after"))
    command = [sys.executable, "-c", _PEAK, "jsonl" if kind == "gz" else kind, str(path)]
    output = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    assert output.strip() == {"text": "[('enormous', 400)] True"}.get(kind, "[('enormous', 400), (None, 5)] True")


_PEAK_OF_LINES = """
import resource, sys
from lmworks.corpus.read import parts, read
from lmworks.recipe.schema.corpus import Source
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
source = Source(name="many", kind="jsonl", path=sys.argv[1], license="test")
start, documents, characters = peak(), 0, 0
for part in parts(source, 1 << 40):
    for item in read(source, part, 1_000_000):
        assert item.reason is None
        documents, characters = documents + 1, characters + len(item.text)
print(documents, characters, peak() - start < 30)
"""


@pytest.mark.parametrize("suffix", [pytest.param("", marks=pytest.mark.slow), ".gz"])
def test_200_megabytes_of_documents_take_little_memory_however_small_their_file_is(tmp_path: Path, suffix: str) -> None:
    """The compressed file has 3 MB. It is one part, which is read in pieces like plain text: 30 MB, whatever it holds."""
    path = tmp_path / f"many.jsonl{suffix}"
    document = rows(" ".join(f"Line {number} of a text that says the same again." for number in range(400)))
    with open(path, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6) if suffix else raw as out:
        for _ in range(200_000_000 // len(document) + 1):
            out.write(document)
    assert not suffix or path.stat().st_size < 4_000_000
    output = subprocess.run([sys.executable, "-c", _PEAK_OF_LINES, str(path)], capture_output=True, encoding="utf-8", check=True).stdout
    documents, characters, bounded = output.split()
    assert int(characters) > 195_000_000 and int(documents) > 9_000 and bounded == "True"


def test_a_damaged_gzip_file_costs_its_rest_only(tmp_path: Path) -> None:
    whole = gzip.compress(rows(*[f"document {number} " + str(hash(str(number)) ** 3) for number in range(2000)]))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.jsonl").write_bytes(rows("after"))
    found = items("jsonl", path=str(tmp_path))
    assert found[-1].text == "after"
    assert reasons(found)[-1] == "damaged_file"
    assert len(texts(found)) > 100


def test_parquet_with_nulls_and_bad_utf8(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff\xfe bad", None, b"also good"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers(), null_count=1)
    pq.write_table(pa.table({"body": column, "n": [1, 2, 3, 4]}), tmp_path / "data.parquet")
    found = items("parquet", path=str(tmp_path), text_key="body")
    assert texts(found) == ["good", "also good"]
    assert reasons(found) == ["bad_utf8", "null_text"]


def test_facts_that_python_cannot_hold_cost_no_row(tmp_path: Path) -> None:
    late = pa.array([300_000_000_000_000_000, 0], pa.timestamp("us"))
    there = pa.array([7, 8], pa.timestamp("us", tz="No/Where"))
    price, url = pa.array([Decimal("1.50"), None]), pa.array([b"http://a.b", b"\xff"])
    columns = {"late": late, "there": there, "price": price, "url": url, "list": pa.array([[value] for value in late])}
    meta = pa.StructArray.from_arrays([pa.array(GOOD[:2]), late], ["text", "late"])
    pq.write_table(pa.table({"meta": meta, **columns}), tmp_path / "a.parquet")
    found = items("parquet", path=str(tmp_path), text_key="meta.text", fact_keys=tuple(columns), language_key="url")
    assert texts(found) == GOOD[:2]
    assert found[0].facts == {"late": "300000000000000000", "there": "7", "price": "1.50", "url": "http://a.b"}
    listed = {"late": "1970-01-01T00:00:00", "list": '["1970-01-01 00:00:00"]'}
    assert found[1].facts == {"there": "8", "url": "\N{REPLACEMENT CHARACTER}", **listed}
    assert found[0].language == "http://a.b", "a column of bytes is text"


def test_a_row_without_the_column_shows_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "a"}\n')
    assert [(item.reason, item.text) for item in items("jsonl", path=str(tmp_path))] == [("null_text", '{"content": "a"}')]


def test_parquet_of_numbers_and_a_broken_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 this is none")
    assert reasons(items("parquet", path=str(tmp_path))) == ["wrong_type", "wrong_type", "damaged_file"]


def test_parquet_without_the_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["a"], "url": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"source mine: .*a\.parquet has no column 'text', only content, url; set text_key"):
        items("parquet", path=str(tmp_path))


def test_text_files_directories_and_globs(tmp_path: Path) -> None:
    (tmp_path / "deep" / ".git").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("\ufeffeins", "utf-8")
    (tmp_path / "deep" / "b.md").write_text("zwei")
    (tmp_path / "deep" / ".git" / "c.txt").write_text("hidden")
    (tmp_path / "d.txt").write_bytes(b"latin \xe9")
    (tmp_path / "e.txt").write_bytes(b"\x00\x01binary")
    found = items("text", path=str(tmp_path))
    assert texts(found) == ["eins"], "Markdown is a kind of its own"
    assert reasons(found) == ["bad_utf8", "binary"]
    assert texts(items("text", path=str(tmp_path / "**" / "*.md"))) == ["zwei"]
    assert texts(items("text", path=str(tmp_path / "a.txt"))) == ["eins"]
    assert texts(items("text", path=str(tmp_path), include="*.md")) == ["zwei"]


def test_lines_as_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"eins\r\n\nzwei\n" + b"\xff\n" + b"x" * (LIMIT + 5) + b"\nlast")
    found = items("text", path=str(tmp_path), document_format="lines")
    assert texts(found) == ["eins", "zwei", "last"]
    assert reasons(found) == ["bad_utf8", "enormous"]


@pytest.mark.parametrize("suffix", ["gz", "xz", "bz2"])
def test_small_files_that_expand_without_measure_are_bombs(tmp_path: Path, suffix: str) -> None:
    pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}[suffix]
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(pack(b"a" * 20_000_000))
    (tmp_path / "b.jsonl").write_bytes(rows("after"))
    found = items("jsonl", path=str(tmp_path))
    assert (texts(found), reasons(found)) == (["after"], ["enormous", "bomb"])


def test_code_trees_take_code_and_leave_the_rest(tmp_path: Path) -> None:
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "x.js").write_text("x")
    (tmp_path / "main.py").write_text("print(1)")
    (tmp_path / "lib.rs").write_text("fn main() {}")
    (tmp_path / "logo.png").write_bytes(b"\x89PNG\0")
    assert texts(items("code", path=str(tmp_path))) == ["fn main() {}", "print(1)"]


def test_fsspec_urls() -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus-test/a.jsonl.gz", gzip.compress(rows("over the wire")))
    memory.pipe("/corpus-test/b.jsonl", rows("plain"))
    assert texts(items("jsonl", path="memory://corpus-test")) == ["over the wire", "plain"]
    assert texts(items("jsonl", path="memory://corpus-test/*.gz")) == ["over the wire"]
    with pytest.raises(Unavailable, match="source mine: no files at memory://corpus-none; check the path"):
        items("jsonl", path="memory://corpus-none")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_at_a_url_too_only_lines_are_cut(encoding: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/cut/a.json", json.dumps([{"text": text} for text in GOOD]).encode(encoding))
    memory.pipe("/cut/b.jsonl", rows(*GOOD).decode().encode(encoding))
    for name, most in (("a.json", 1), ("b.jsonl", 3 if encoding == "utf-8" else 1)):
        given = source("jsonl", path=f"memory://cut/{name}")
        found = parts(given, 60)
        assert (len(found) == 1) == (most == 1)
        assert texts([item for part in found for item in read(given, part, LIMIT)]) == GOOD


def test_an_unknown_protocol_is_named() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(UserError, match="source mine: path: cannot use nonsense://bucket"):
        items("jsonl", path="nonsense://bucket/a.jsonl")


def test_a_missing_source_names_itself(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=f"source mine: no files at {tmp_path}/nowhere; check the path"):
        items("text", path=str(tmp_path / "nowhere"))


def test_unknown_document_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="source mine: unknown document_format 'pages'; known are chats, days, file, lines"):
        items("text", path=str(tmp_path), document_format="pages")
    with pytest.raises(UserError, match="unknown document_format 'pages' of the standard library; known are code, docs"):
        items("stdlib", document_format="pages")


def test_the_standard_library_as_code_and_docs() -> None:
    code = items("stdlib", document_format="code", limit=10**6, include="json/*.py")
    assert {item.origin for item in code} >= {"json/__init__.py", "json/decoder.py"}
    assert not any("test" in item.origin.split("/") for item in items("stdlib", limit=10**6))
    docs = texts(items("stdlib", document_format="docs", limit=10**6, include="textwrap.py"))
    assert any(text.startswith('The "if" statement') or "if_stmt" in text for text in docs)
    assert "textwrap.dedent(text)\n    Remove any common leading whitespace from every line in `text`." in docs[-1]


@pytest.mark.parametrize("stored", ["jsonl", "disk"])
def test_hugging_face_datasets_are_streamed(tmp_path: Path, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the datasets package is not installed (extra: data)")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    if stored == "jsonl":
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "train.jsonl").write_bytes(rows(*GOOD))
    else:
        (tmp_path / "rows.jsonl").write_bytes(rows(*GOOD))
        datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train").save_to_disk(str(tmp_path / "set"))
    found = items("huggingface", path=str(tmp_path / "set"))
    assert texts(found) == GOOD
    assert found[0].origin.endswith("set/train:0")
    with pytest.raises(UserError, match=r"source mine: dataset .* has no column 'body', only text.*; set text_key"):
        items("huggingface", path=str(tmp_path / "set"), text_key="body")
    with pytest.raises(Unavailable, match=r"source mine: cannot load dataset .*nowhere"):
        items("huggingface", path=str(tmp_path / "nowhere"))
    some = items("huggingface", path=str(tmp_path / "set"), max_bytes="1 byte")
    assert len(texts(some)) == 1


def test_stored_datasets_are_cut_by_rows_and_streamed_ones_by_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the datasets package is not installed (extra: data)")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    documents = [f"document {number} " * 20 for number in range(300)]
    datasets.Dataset.from_dict({"text": documents, "url": ["u"] * 300}).save_to_disk(str(tmp_path / "stored"))
    found = items("huggingface", path=str(tmp_path / "stored"), part_bytes=10_000, fact_keys=["url"])
    assert texts(found) == documents
    assert found[299].origin == f"{tmp_path}/stored/train:299"
    assert found[0].facts == {"url": "u"}
    assert len(parts(source("huggingface", path=str(tmp_path / "stored")), 10_000)) > 5
    before = sorted(path.name for path in (tmp_path / "stored").iterdir())
    some = items("huggingface", path=str(tmp_path / "stored"), max_bytes="5 kB")
    assert 10 < len(some) < 50 and some[0].text != documents[0]
    assert all(item.text == documents[int(item.origin.rpartition("train:")[2])] for item in some)
    assert sorted(path.name for path in (tmp_path / "stored").iterdir()) == before, "nothing is written beside the data of the user"
    (tmp_path / "files").mkdir()
    for number in range(3):
        (tmp_path / "files" / f"train-{number}.jsonl").write_bytes(rows(*documents[number * 100 : number * 100 + 100]))
    streamed = items("huggingface", path=str(tmp_path / "files"))
    assert texts(streamed) == documents
    assert len({item.origin for item in streamed}) == 300
    assert len(parts(source("huggingface", path=str(tmp_path / "files")), 1)) == 3
    some = items("huggingface", path=str(tmp_path / "files"), max_bytes="5 kB")
    assert [item.origin.rpartition("/")[2] for item in some] == [f"drawn:{number}" for number in range(len(some))], "rows are not known"


@pytest.mark.parametrize("second", [b'{"text": "two", "n": [1]}\n', b'{"text": "two"}\n{"other": 3, "n": 1}\n', b'{"text": "\xff"}\n'])
def test_a_dataset_whose_files_do_not_fit_is_damaged_there(tmp_path: Path, second: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "one", "n": 1}\n')
    (tmp_path / "data" / "b.jsonl").write_bytes(second)
    found = items("huggingface", path=str(tmp_path / "data"))
    assert texts(found)[:1] == ["one"]
    assert reasons(found) == ["damaged_file"] and "\n" not in found[-1].text


def test_a_lost_connection_to_the_hub_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="the datasets package is not installed (extra: data)")
    httpx = pytest.importorskip("httpx")

    class Rows:
        n_shards = 1

        def shard(self, num_shards: int, index: int) -> Iterator[dict[str, str]]:
            yield {"text": "first"}
            raise httpx.ReadTimeout("timed out")

    monkeypatch.setattr(huggingface, "_rows", lambda source: Rows())
    found = read(source("huggingface", path="some/set"), Part((File("some/set", 0),), 0, (0, 1)), LIMIT)
    assert next(found).text == "first"
    with pytest.raises(UserError, match="source mine: cannot continue reading hub://some/set: timed out; run the same command again"):
        next(found)
