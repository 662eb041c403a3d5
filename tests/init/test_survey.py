"""A large tree in little time and memory, and a file that replaces no other."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmworks.corpus.read.opening import bounded_lines
from lmworks.errors import UserError
from lmworks.init import meaning
from lmworks.init.meaning import understand
from lmworks.init.survey import SAMPLE, survey

TEXT = "The fox runs over the hill, and it sleeps in the sun. " * 10


def test_nothing_is_overwritten_when_two_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = (
        "import sys; from pathlib import Path; from lmworks.init.write import write_new; write_new(Path('out.yaml'), sys.argv[1] * 100_000)"
    )
    both = [subprocess.Popen([sys.executable, "-c", program, letter], stderr=subprocess.PIPE) for letter in "ab"]
    assert sorted(one.wait() for one in both) == [0, 1]
    assert len(set(Path("out.yaml").read_text(encoding="utf-8"))) == 1 and len(Path("out.yaml").read_text(encoding="utf-8")) == 100_000
    assert [path.name for path in tmp_path.iterdir()] == ["out.yaml"]


def test_time_and_memory_of_a_large_tree(tmp_path: Path) -> None:
    for folder in range(40):
        (tmp_path / "many" / str(folder)).mkdir(parents=True)
        for file in range(500):
            os.mknod(tmp_path / "many" / str(folder) / f"{file}.txt")
    for file in range(2 * SAMPLE):
        (tmp_path / "many" / "8" / f"{file}.md").write_text("not empty", encoding="utf-8")
    (tmp_path / "many" / "7" / "0.txt").write_text("not empty", encoding="utf-8")
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = survey(str(tmp_path / "many"))
    spent = time.process_time() - begin
    assert found.count == 20_000 + 2 * SAMPLE and found.unused["empty files"] == 19_999
    assert spent < 20_000 * 10e-6 * 10, spent  # ten seconds for a million, times what a busy machine takes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kB
    assert all(len(one.sample) <= SAMPLE for one in found.files)


def test_the_command_that_makes_a_table_parquet_reads_line_breaks_in_texts(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    text = "one\n\ntwo, with a comma\n" * 10
    (tmp_path / "A.csv").write_text("id,text\n" + "".join(f'{number},"{text}"\n' for number in range(8000)))
    (hint,) = survey(str(tmp_path)).unused
    command = hint.partition('python -c "')[2].rpartition('"')[0]
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True)
    assert pq.read_table(tmp_path / "A.parquet").column("text").to_pylist() == [text] * 8000


@pytest.mark.parametrize(("name", "rows"), [("a.jsonl", [1]), ("a.txt", [])])
def test_the_end_of_a_line_that_is_too_long_is_not_looked_for(
    name: str, rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def lines(stream: Any, limit: int) -> Iterator[tuple[bytes, bool]]:
        for line, whole in bounded_lines(stream, limit):
            yield line, whole
            assert whole, "its end is looked for, which takes minutes where it is 200 GB away"

    monkeypatch.setattr("lmworks.corpus.read.json_rows.bounded_lines", lines)
    monkeypatch.setattr("lmworks.train.data.row_files._LONGEST_ROW", 1 << 20)
    with (tmp_path / name).open("w", encoding="utf-8") as file:
        file.write((json.dumps({"text": TEXT}) + "\n") * len(rows))
        file.truncate(1 << 30)  # a hole, which takes no place on a disk
    assert [one.rows for one in understand(survey(str(tmp_path)))] == rows


def test_lines_that_are_too_long_are_read_over_in_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.train.data.row_files._LONGEST_ROW", 1000)
    rows = [TEXT, "x" * 5000, TEXT]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows), encoding="utf-8")
    (one,) = understand(survey(str(tmp_path)))
    assert len(one.texts) == 2


def test_names_that_no_recipe_can_hold(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff"))
    odd.mkdir()
    (odd / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / os.fsdecode(b"\xff.gguf")).write_text("GGUF", encoding="utf-8")
    found = survey(str(tmp_path))
    assert not found.files and not found.models
    assert dict(found.unused) == {"files and folders whose names are not UTF-8: rename them": 2}
    with pytest.raises(UserError, match=r"odd\\udcff is not UTF-8, and a recipe is: rename the folder"):
        survey(str(odd))


def test_a_file_that_may_not_be_read_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read every file
    found = survey(str(tmp_path))
    assert not found.files and dict(found.unused) == {"files that cannot be read (Permission denied)": 1}


def test_files_that_vanish_while_they_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text((json.dumps({"text": TEXT}) + "\n") * 30, encoding="utf-8")
    found, counted = survey(str(tmp_path)), meaning._count
    (tmp_path / "a.jsonl").unlink()  # before it is read

    def late(path: str, size: int, raw: list[int]) -> float:
        (tmp_path / "b.jsonl").unlink()  # between its rows and their number
        return counted(path, size, raw)

    monkeypatch.setattr(meaning, "_count", late)
    (one,) = understand(found)
    assert one.path == str(tmp_path) and one.rows == pytest.approx(30, rel=0.05)
    assert list(found.unused) == ["files of rows that no stage understands (its files are missing, or are no files)"]
