"""However a source is cut, its parts say together what it says whole, and what a part is depends on the files alone."""

from __future__ import annotations

import datetime
import gzip
import http.server
import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_items import items, reasons, rows, source, texts

from lmworks.corpus.read import Part, parts, passed_over, provides, read
from lmworks.corpus.read.json_rows import can_be_cut
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Source
from lmworks.train.data.row_files import read_files


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_lines_belong_to_one_part_wherever_a_file_is_cut(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)  # few and short, since each byte or two is a part of its own below
    documents = [f"{number} " + "é" * draw.choice([0, 1, 5, 50, 200]) for number in range(20)]
    lines = [json.dumps({"text": text}, ensure_ascii=draw.random() < 0.5) for text in documents]
    end = draw.choice(["\n", "\r\n"])
    (tmp_path / "a.jsonl").write_bytes((end.join(lines) + draw.choice(["", end, end * 3])).encode())
    for part_bytes in (1, 2, 7, 64, 700, 5000):
        found = items("jsonl", part_bytes=part_bytes, path=str(tmp_path))
        assert texts(found) == documents
        assert len({item.origin for item in found}) == len(documents)


def test_the_origin_of_a_row_in_a_cut_file_is_its_place_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows(*(f"document {number}" for number in range(100))))
    for item in items("jsonl", part_bytes=500, path=str(path)):
        data = path.read_bytes()[int(item.origin.rpartition("@")[2]) :]
        assert json.loads(data.partition(b"\n")[0])["text"] == item.text


def test_lines_of_text_are_cut_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(1000)))
    given = source("text", path=str(tmp_path), document_format="lines")
    assert len(parts(given, 1000)) == 9
    assert texts(items("text", part_bytes=1000, path=str(tmp_path), document_format="lines")) == [
        f"line {number}" for number in range(1000)
    ]


def test_parquet_is_cut_by_row_groups(tmp_path: Path) -> None:
    documents = [f"document {number} " * 20 for number in range(500)]
    pq.write_table(pa.table({"text": documents}), tmp_path / "a.parquet", row_group_size=50)
    whole = items("parquet", path=str(tmp_path))
    assert texts(whole) == documents
    for part_bytes in (1, 1000, 5000):
        found = items("parquet", part_bytes=part_bytes, path=str(tmp_path))
        assert [(item.text, item.origin) for item in found] == [(item.text, item.origin) for item in whole]
    assert len(parts(source("parquet", path=str(tmp_path)), 1)) == 10


@pytest.mark.parametrize(("kind", "name", "left"), [("text", "a.txt", 100), ("jsonl", "a.jsonl", 27), ("parquet", "a.parquet", 20)])
def test_a_file_that_is_cut_or_replaced_before_it_is_read_is_named(tmp_path: Path, kind: str, name: str, left: int) -> None:
    """Of lines nothing was said of what was gone, and a parquet file with fewer row groups ended the run with a traceback."""

    def write(count: int) -> None:
        if kind == "parquet":
            pq.write_table(pa.table({"text": [f"document {number:04}" for number in range(count)]}), tmp_path / name, row_group_size=10)
        else:
            (tmp_path / name).write_bytes(rows(*(f"document {number:04}" for number in range(count))))

    write(400)
    given = source(kind, path=str(tmp_path), **({"document_format": "lines"} if kind == "text" else {}))
    cut = parts(given, 3000 if kind != "parquet" else 300)
    assert [item.reason for part in cut for item in read(given, part, 1000)] == [None] * 400
    write(left)
    found = [item for part in cut for item in read(given, part, 1000)]
    assert len(cut) > 3 and reasons(found) == ["changed_file"] * len(cut) and len(texts(found)) == left
    assert found[-1].text == "written to after it was listed; run the same command again"
    (tmp_path / name).unlink()
    assert {*reasons([item for part in cut for item in read(given, part, 1000)])} == {"damaged_file"}


def test_a_repository_that_changes_before_it_is_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)\n")
    given = source("repository", path=str(tmp_path))
    (part,) = parts(given, 1000)
    assert reasons([*read(given, part, 1000)]) == []
    (tmp_path / "b.py").write_text("print(2)\n")
    assert reasons([*read(given, part, 1000)]) == ["changed_file"]


def test_a_folder_that_vanishes_while_it_is_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    walk, gone = os.walk, str(tmp_path / "gone")

    def walked(*given: Any, **more: Any) -> Iterator[Any]:
        for found in walk(*given, **more):
            if found[0] == gone:
                shutil.rmtree(gone)
            yield found

    monkeypatch.setattr(os, "walk", walked)
    given = source("text", path=str(tmp_path))
    found = [item for part in parts(given, 1000) for item in read(given, part, 1000)]
    assert texts(found) == ["a"] and [(item.reason, item.origin) for item in found if item.reason] == [("unlisted_folder", gone)]


def test_small_files_go_together_and_a_changed_one_changes_its_part(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text("x" * 100)
    given = source("text", path=str(tmp_path))
    before = [part.as_json() for part in parts(given, 1000)]
    assert [len(part["files"]) for part in before] == [10, 10, 10, 10]
    os.utime(tmp_path / "25.txt", (1, 1))
    after = [part.as_json() for part in parts(given, 1000)]
    assert [place for place in range(4) if before[place] != after[place]] == [2]


def test_a_file_name_that_is_no_unicode(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    with open(name, "wb") as out:
        out.write(b"coffee")
    (item,) = items("text", path=str(tmp_path))
    assert item.text == "coffee"
    assert item.origin == f"{tmp_path}/caf\\udce9.txt"
    assert json.dumps(dict(item.facts), ensure_ascii=False).encode()


def test_links_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / ".kept").mkdir()
    (tmp_path / "data" / ".kept" / "b.txt").write_text("linked")
    (tmp_path / "data" / "deep" / "a.txt").write_text("here")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "data" / ".kept")
    for number in range(5):  # each link offers every directory again: 2 ** 40 paths before the kernel stops
        (tmp_path / "data" / f"loop{number}").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "gone.txt").symlink_to("nowhere")
    (tmp_path / "data" / "self.txt").symlink_to(tmp_path / "data" / "self.txt")
    (tmp_path / "name").symlink_to(tmp_path / "data")
    for path in (tmp_path / "data", tmp_path / "data" / "**" / "*.txt", tmp_path / "name"):
        found = items("text", path=str(path))
        assert sorted(texts(found)) == ["here", "linked"]
        assert reasons(found) == ["damaged_file", "damaged_file"]


@pytest.mark.parametrize(("kind", "suffix"), [("text", "txt"), ("jsonl", "jsonl"), ("parquet", "parquet"), ("code", "py")])
def test_links_that_lead_out_of_a_source_are_not_followed(tmp_path: Path, kind: str, suffix: str) -> None:
    (tmp_path / "secrets").mkdir()
    secret = tmp_path / "secrets" / f"key.{suffix}"
    secret.write_text('{"text": "a key"}')
    if kind == "parquet":
        pq.write_table(pa.table({"text": ["a key"]}), secret)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "folder").symlink_to(tmp_path / "secrets")
    (tmp_path / "data" / f"file.{suffix}").symlink_to(secret)
    (tmp_path / "data" / f"up.{suffix}").symlink_to(f"../secrets/key.{suffix}")
    for path in (tmp_path / "data", tmp_path / "data" / "**" / f"*.{suffix}", f"file://{tmp_path}/data", f"local://{tmp_path}/data"):
        found = items(kind, path=str(path))
        assert reasons(found) == ["leads_out"] * 3
        assert sorted(Path(item.origin).name for item in found) == sorted(["folder", f"file.{suffix}", f"up.{suffix}"])
        assert not any("a key" in item.text for item in found)
    assert reasons(items(kind, path=str(tmp_path / "data" / f"file.{suffix}"))) == [], "named by the user"


@pytest.mark.parametrize("kind", ["text", "repository", "rows of training"])
def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "closed", "other"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "a.txt").write_text(name)
        (tmp_path / "data" / name / "a.jsonl").write_text("{}\n")
    scan, closed = os.scandir, [str(tmp_path / "data" / "closed")]

    def scandir(path: str) -> Any:
        if os.fspath(path) in closed:
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    if kind == "rows of training":
        said = {closed[0]: "unlisted folder: a folder that cannot be listed (Permission denied)"}
        for path, told in (("", said), ("**/*.jsonl", said), ("*/a.jsonl", said), ("o*/*.jsonl", {})):
            assert {row.origin: row.fault for row in read_files("tune.data.mine", str(tmp_path / "data" / path)) if row.fault} == told, path
        closed.append(str(tmp_path / "data"))
        with pytest.raises(UserError, match=r"^tune.data.mine.path: cannot read .*data: Permission denied$"):
            list(read_files("tune.data.mine", str(tmp_path / "data")))
        return
    found = items(kind, path=str(tmp_path / "data"))
    assert [item.origin for item in found if item.reason == "unlisted_folder"] == closed
    assert "(Permission denied)" in next(item.text for item in found if item.reason)
    assert len(texts(found)) == (2 if kind == "text" else 1)
    if kind == "text":
        assert passed_over(source("text", path=str(tmp_path / "data"))).startswith("2 files with other endings not read (2 .jsonl;")
        for glob, told in (("**/*.txt", 1), ("*/a.txt", 1), ("c*/*.txt", 1), ("o*/*.txt", 0), ("*.txt", 0)):
            (tmp_path / "data" / "other" / "b.txt").write_text("so that a glob has a file")
            (tmp_path / "data" / "b.txt").write_text("so that a glob has a file")
            assert reasons(items("text", path=str(tmp_path / "data" / glob))) == ["unlisted_folder"] * told, glob
        closed.append(str(tmp_path / "data"))
        with pytest.raises(UserError, match=r"source mine: cannot read .*data: Permission denied"):
            items("text", path=str(tmp_path / "data"))


def test_a_pipe_among_the_files_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.txt").write_text("here")
    assert texts(items("text", path=str(tmp_path))) == ["here"]


def test_globs_stay_in_their_directory(tmp_path: Path) -> None:
    for name in ("a1.txt", "a2.txt", "b.txt", "deep/a3.txt", "deep/er/a4.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    expected = {
        "*.txt": ["a1.txt", "a2.txt", "b.txt"],
        "a?.txt": ["a1.txt", "a2.txt"],
        "[!a]*.txt": ["b.txt"],
        "*/*.txt": ["deep/a3.txt"],
        "**/a*.txt": ["a1.txt", "a2.txt", "deep/a3.txt", "deep/er/a4.txt"],
        "deep/**": ["deep/a3.txt", "deep/er/a4.txt"],
    }
    for pattern, found in expected.items():
        assert texts(items("text", path=f"{tmp_path}/{pattern}")) == found, pattern


def test_columns_by_path_and_by_template_with_facts_and_language(tmp_path: Path) -> None:
    row = {"title": "On", "meta": {"body": "text", "lang": "de"}, "url": "http://x.y/", "n": 3, "day": "2024-05-01", "odd": [1, "é"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"meta": {"body": 5}}) + "\n" + json.dumps({"meta": 1}) + "\n")
    more = {"path": str(tmp_path), "fact_keys": ["url", "n", "odd", "meta.lang", "absent"], "language_key": "meta.lang"}
    first, second, third = items("jsonl", text_key="meta.body", **more)
    assert (first.text, first.language) == ("text", "de")
    assert first.facts == {"url": "http://x.y/", "n": 3, "odd": '[1, "é"]', "meta.lang": "de"}
    assert (second.reason, third.reason) == ("wrong_type", "null_text")
    strict = items("jsonl", text_key="# {title}\n\n{meta.body}", **more)
    assert [item.reason for item in strict] == [None, "missing_column", "missing_column"]
    assert strict[1].text == 'title is missing in {"meta": {"body": 5}}'
    lenient = items("jsonl", text_key="# {title?}\n\n{meta.body?}", **more)
    assert [item.text for item in lenient] == ["# On\n\ntext", "# \n\n5", ""]
    assert [item.reason for item in lenient] == [None, None, "null_text"]
    assert provides(source("jsonl", **more)) == ("url", "n", "odd", "meta.lang", "absent")


def test_columns_of_parquet_may_be_nested_and_dated(tmp_path: Path) -> None:
    table = pa.table({"a": [{"b": "text", "c": None}], "when": [datetime.datetime(2024, 5, 1)], "weight": [float("nan")]})
    pq.write_table(table, tmp_path / "a.parquet")
    (item,) = items("parquet", path=str(tmp_path), text_key="a.b", fact_keys=["when", "weight", "a.c"])
    assert (item.text, dict(item.facts)) == ("text", {"when": "2024-05-01T00:00:00"})
    with pytest.raises(UserError, match=r"has no column 'url', only a, weight, when; set fact_keys"):
        items("parquet", path=str(tmp_path), text_key="a.b", fact_keys=["url"])


def test_columns_of_html_and_markdown_are_read_as_such(tmp_path: Path) -> None:
    pytest.importorskip("trafilatura")
    body = "<div><nav><a href='/'>Home</a> <a href='/s'>Shop</a></nav><h2>Pumps</h2><p>Hold the <b>red</b> button &amp; wait.</p></div>"
    short = "<p>It is five &lt; six.</p>"
    rows = [{"title": "A <b> in a title", "body": body}, {"title": "Short", "body": short}]
    rows += [{"title": "None", "body": "<script>x()</script>"}, {"title": "Huge", "body": "<p>" + "word " * 2000 + "</p>"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]}), tmp_path / "a.parquet")
    for kind in ("jsonl", "parquet"):
        asked = source(kind, path=f"{tmp_path}/a.{kind}", text_key="{title}: {body}", markup={"body": "html"})
        found = list(read(asked, parts(asked, 1 << 20)[0], 1500))
        assert "Hold the **red** button & wait." in found[0].text and found[0].text.startswith("A <b> in a title: "), found[0].text
        assert "Home" not in found[0].text and "<p>" not in found[0].text
        assert found[1].text == "Short: It is five < six."
        assert [item.reason for item in found] == [None, None, "no_text", "enormous"]
    (tmp_path / "m.jsonl").write_text(json.dumps({"text": "---\ntitle: 'On pumps'\n---\n\nText."}) + "\n")
    (item,) = items("jsonl", path=f"{tmp_path}/m.jsonl", markup={"text": "markdown"})
    assert item.text == "# On pumps\n\nText."


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kind": "jsonl", "markup": {"body": "html"}}, "markup names 'body', which is no column of text_key: text"),
        ({"kind": "text", "markup": {"text": "html"}}, "markup is for columns, which kind text does not have"),
    ],
)
def test_markup_of_what_is_no_column_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source(path="x", **more)


@pytest.mark.parametrize("template", ["{", "{}", "{{}}", "{a}{", "{?}"])
def test_a_template_that_is_none_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="source mine: text_key"):
        source("jsonl", path="x", text_key=template)


def test_halves_of_surrogate_pairs_are_no_text_and_do_no_harm_in_facts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "half \\ud83d"}\n{"text": "fine", "url": "\\ud83d"}\n')
    found = items("jsonl", path=str(tmp_path), fact_keys=["url"])
    assert reasons(found) == ["bad_utf8"]
    assert found[1].facts == {"url": "?"}


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """Python's own server knows no ranges; it also lists directories, in which files are found by their links."""

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Ranges, directory=str(tmp_path))) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_files_of_a_web_server(tmp_path: Path, server: str) -> None:
    documents = [f"document {number} over the wire" for number in range(2000)]
    (tmp_path / "a.jsonl").write_bytes(rows(*documents))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rows(*documents)))
    pq.write_table(pa.table({"text": documents}), tmp_path / "c.parquet")
    assert texts(items("jsonl", part_bytes=1000, path=f"{server}/a.jsonl")) == documents
    assert texts(items("jsonl", path=f"{server}/b.jsonl.gz")) == documents
    assert texts(items("parquet", path=f"{server}/c.parquet")) == documents
    with pytest.raises(UserError, match="source mine: no files at"):
        items("jsonl", path=f"{server}/none.jsonl")


def test_a_web_server_that_goes_away_stops_the_run(tmp_path: Path, server: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(rows("document"))
    given = Source(name="mine", kind="jsonl", path=f"{server}/a.jsonl", license="test")
    (part,) = parts(given, 1000)
    assert Part.from_json(part.as_json()) == part
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(UserError, match=r"source mine: cannot continue reading http.*; run the same command again"):
        list(read(given, part, 1000))


def test_only_a_file_whose_rows_are_lines_is_cut(tmp_path: Path) -> None:
    rows_of, pretty, lines = [{"text": "one"}, {"text": "two"}], tmp_path / "pretty.json", tmp_path / "lines.jsonl"
    pretty.write_text(json.dumps(rows_of, indent=1))
    lines.write_text("".join(json.dumps(one) + "\n" for one in rows_of))
    assert [can_be_cut(str(path), json_rows=True) for path in (pretty, lines)] == [False, True]
    assert can_be_cut(str(pretty), json_rows=False), "a line is a row"
