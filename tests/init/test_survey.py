"""A large tree in little time and memory, and a file that replaces no other."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmworks.init.survey import SAMPLE, survey


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
