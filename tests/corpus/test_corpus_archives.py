"""Archives with everything that can be wrong with them, and repositories as one document."""

from __future__ import annotations

import gzip
import io
import lzma
import random
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from source_items import LIMIT, items, reasons, source, texts

from lmworks.corpus.read import archives, parts, read
from lmworks.corpus.read.repository import ordered
from lmworks.errors import Unavailable


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.tar.xz", "a.tar.bz2", "a.tar.zst"])
def test_files_in_archives(tmp_path: Path, name: str) -> None:
    if name == "a.zip":
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as zipped:
            zipped.writestr("d/a.md", "eins")
            zipped.writestr("d/b.md", "zwei")
            zipped.writestr("d/c.png", "drei")
    else:
        buffer = io.BytesIO()
        mode = "w:" + name.rpartition(".")[2].replace("tgz", "gz") if name != "a.tar" and not name.endswith("zst") else "w"
        with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
            add(archive, "d/a.md", b"eins")
            add(archive, "d/b.md", b"zwei")
            add(archive, "d/c.png", b"drei")
        data = buffer.getvalue()
        if name.endswith("zst"):
            data = pytest.importorskip("zstandard").compress(data)
        (tmp_path / name).write_bytes(data)
    found = items("markdown", path=str(tmp_path))
    assert texts(found) == ["eins", "zwei"]
    assert found[0].origin == found[0].facts["path"] == f"{tmp_path}/{name}/d/a.md"


def test_bad_members_cost_themselves_only(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    noise = random.Random(0).randbytes(30_000).hex()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("good.txt", "good")
        archive.writestr("../../etc/evil.txt", "out")
        archive.writestr("/etc/evil.txt", "out")
        archive.writestr("twice.txt", "first")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("twice.txt", "second")
        archive.writestr("locked.txt", "secret")
        archive.writestr("wrong.txt", noise)
        archive.writestr("huge.txt", "x" * 200_000)
        archive.writestr("after.txt", "after")
    data = bytearray(path.read_bytes())
    entry = data.index(b"locked.txt", data.index(b"PK\x01\x02"))  # of the directory
    data[entry - 46 + 8] |= 1
    local = data.index(b"wrong.txt")
    data[local + 5000 : local + 5100] = bytes(100)
    path.write_bytes(data)
    found = items("text", path=str(path))
    assert texts(found) == ["good", "first", "after"]
    assert reasons(found) == ["unsafe_name", "unsafe_name", "duplicate_member", "encrypted", "damaged_file", "enormous"]


def test_a_tar_file_that_breaks_off_costs_its_rest(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    draw = random.Random(0)
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for number in range(100):
            add(archive, f"{number}.txt", draw.randbytes(2000).hex().encode())
    (tmp_path / "a.tgz").write_bytes(buffer.getvalue()[:120_000])
    (tmp_path / "b.txt").write_text("after")
    found = items("text", path=str(tmp_path))
    assert 40 < len(texts(found)) < 80
    assert set(reasons(found)) == {"damaged_file"}
    assert found[-1].text == "after"


@pytest.mark.parametrize(
    ("damage", "names", "reason"),
    [
        (lambda data: data[:2048], "ab", "ends without an end mark"),
        (lambda data: data[:2148], "ab", "breaks off in the header"),
        (lambda data: data[:2148] + b"?" + data[2149:], "ab", "header of a member is damaged"),
        (lambda data: data.rstrip(b"\0") + b"\0" * 1600 + b"garbage" * 80, "abc", "header of a member is damaged"),
    ],
)
def test_the_end_of_a_tar_file_is_its_end_mark(tmp_path: Path, damage: Callable[[bytes], bytes], names: str, reason: str) -> None:
    (tmp_path / "a.tar").write_bytes(damage(_tar_of("abc")))
    found = items("text", path=str(tmp_path))
    assert texts(found) == list(names)
    assert reasons(found) == ["damaged_file"] and reason in found[-1].text


def test_a_tar_file_behind_another_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(_tar_of("ab") + _tar_of("bc"))
    found = items("text", path=str(tmp_path))
    assert (texts(found), reasons(found)) == (["a", "b", "c"], ["duplicate_member"])


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
@pytest.mark.parametrize(("options", "join"), [(["-b1"], ""), (["--format=posix"], "-r"), (["--format=v7"], "-A"), (["-z"], "")])
def test_what_tar_itself_writes_is_whole(tmp_path: Path, options: list[str], join: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    path = tmp_path / ("a.tar.gz" if "-z" in options else "a.tar")

    def tar(*words: str) -> None:
        subprocess.run(["tar", "-C", str(tmp_path), *words], check=True)

    tar(*options, "-cf", str(path), "a.txt")
    if join == "-A":
        tar("-cf", str(tmp_path / "other"), "b.txt")
    if join:
        tar(join + "f", str(path), str(tmp_path / "other") if join == "-A" else "b.txt")
    found = items("text", path=str(path))
    assert (texts(found), reasons(found)) == (["a", "b"] if join else ["a"], [])


def _tar_of(names: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            add(archive, f"{name}.txt", name.encode())
    return buffer.getvalue()


def test_links_in_tar_files_lead_nowhere(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"{kind!r}.txt")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        add(archive, "a.txt", b"text")
    assert texts(items("text", path=str(tmp_path))) == ["text"]


def test_zip_files_whose_directory_promises_too_much_are_bombs(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(20):
            archive.writestr(f"{number}.txt", b"\0" * 1000)
    data = bytearray(path.read_bytes())
    at = -1
    while (at := data.find(b"PK\x01\x02", at + 1)) >= 0:
        data[at + 24 : at + 28] = (200_000_000).to_bytes(4, "little")
    path.write_bytes(data)
    assert reasons(items("text", path=str(tmp_path))) == ["bomb"]


def headed(name: str, size: int, kind: bytes = tarfile.REGTYPE, pax: dict[str, str] | None = None) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.pax_headers = size, kind, pax or {}
    return info.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", ["text", "repository"])
@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.tar", headed("a.txt", 10**15) + b"x" * 2000, ["bomb"]),
        ("a.tar", headed("a", 10**15, b"Z") + b"x" * 2000, ["bomb"]),
        ("a.tar", headed("a.txt", 5, pax={"size": str(10**15)}) + b"x" * 2000, ["bomb"]),
        ("a.tar.gz", gzip.compress(headed("a", 300_000_000, tarfile.XHDTYPE) + b"7 a=bc\n" * 300_000, 1), ["bomb"]),
        ("a.tar.gz", gzip.compress(headed("a", 300_000_000, tarfile.GNUTYPE_LONGNAME) + b"a" * 2_000_000, 1), ["bomb"]),
        ("a.tar", headed("a.txt", -512) + b"x" * 2000, ["damaged_file"]),
        ("a.tar.xz", lzma.compress(headed("a.bin", 20_000_000) + bytes(20_000_000), preset=0), ["bomb"]),
    ],
)  # fmt: skip
def test_tar_files_that_promise_or_hold_too_much_are_bombs(tmp_path: Path, kind: str, name: str, content: bytes, found: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    path = tmp_path if kind == "text" else tmp_path / name
    assert [reason for reason in reasons(items(kind, path=str(path))) if reason not in ("no_text", "binary", "enormous")] == found


def test_what_comes_out_of_an_archive_is_counted_over_all_its_members(tmp_path: Path) -> None:
    packed = gzip.compress(b"\n" * 1_200_000)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(20):
            add(archive, f"{number}.txt.gz", packed)
    found = items("text", path=str(tmp_path), limit=3_000_000)
    assert reasons(found)[-1] == "bomb" and reasons(found).count("empty_text") < 20
    with zipfile.ZipFile(tmp_path / "a.tar", "w") as zipped:
        zipped.writestr("a.txt.gz", gzip.compress(bytes(20_000_000)))
    (tmp_path / "a.tar").rename(tmp_path / "a.zip")
    assert reasons(items("text", path=str(tmp_path), document_format="lines")) == ["enormous", "bomb"]


@pytest.mark.parametrize(("limit", "value"), [("_SECONDS", 0.1), ("_MEMORY", 48 << 20)])
def test_an_archive_that_takes_too_much_costs_itself_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    """A sparse file's map of its holes, which tarfile reads whole, under limits that are low."""
    monkeypatch.setattr(archives, limit, value)
    monkeypatch.setattr(archives, "_idle", [])
    holes = b"250000\n" + b"0\n" * 500_000
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.txt", "GNU.sparse.realsize": "5"}
    holed = headed("a.txt", len(holes), pax=sparse) + holes
    (tmp_path / "a.tar").write_bytes(holed + bytes(-len(holed) % 512) + bytes(1024))
    (tmp_path / "b.txt").write_text("after")
    found = items("text", path=str(tmp_path))
    assert (texts(found), reasons(found)) == (["after"], ["bomb"])


def test_an_archive_that_is_left_in_the_middle_is_forgotten(tmp_path: Path) -> None:
    for name in ("a.zip", "b.zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for number in range(3):
                archive.writestr(f"{number}.txt", f"{name} {number}")
    given = source("text", path=str(tmp_path / "a.zip"))
    assert next(read(given, parts(given, 1 << 40)[0], LIMIT)).text == "a.zip 0"
    assert texts(items("text", path=str(tmp_path))) == [f"{name} {number}" for name in ("a.zip", "b.zip") for number in range(3)]


REPOSITORY = {
    "README.md": "# A project\n",
    "pkg/__init__.py": "from pkg.a import f\n",
    "pkg/a.py": "from .z import g\n\n\ndef f():\n    return g()\n",
    "pkg/z.py": "def g():\n    return 1\n",
    "pkg/loop1.py": "import pkg.loop2\n",
    "pkg/loop2.py": "import pkg.loop1\n",
    "pkg/data.csv": "1,2\n",
    "pkg/min.js": "x" * 5000,
    "pkg/x_pb2.py": "x = 1\n",
    "pkg/gen.go": "// Code generated by protoc. DO NOT EDIT.\n",
    "vendor/other.py": "print('not ours')\n",
    "node_modules/x/index.js": "module.exports = 1\n",
    "logo.png": "\0binary",
    "setup.py": "import pkg\n",
}
ORDER = ["README.md", "pkg/z.py", "pkg/a.py", "pkg/__init__.py", "pkg/loop2.py", "pkg/loop1.py", "setup.py"]


def write_tree(root: Path) -> None:
    for name, text in REPOSITORY.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def headers(text: str) -> list[str]:
    return [line[4:-4] for line in text.splitlines() if line.startswith("==> ") and line.endswith(" <==")]


def test_a_repository_is_one_document_in_the_order_of_its_imports(tmp_path: Path) -> None:
    write_tree(tmp_path / "repos" / "one")
    (tmp_path / "repos" / "one" / "link.py").symlink_to("/etc/passwd")
    (tmp_path / "repos" / "one" / "loop").symlink_to(tmp_path)
    (item,) = items("repository", path=str(tmp_path / "repos" / "one"))
    assert headers(item.text) == ORDER
    assert item.facts == {"repository": "one", "files": 7, "left_out": 7}
    assert "==> pkg/z.py <==\ndef g():\n    return 1\n" in item.text
    write_tree(tmp_path / "repos" / "two")
    assert [item.facts["repository"] for item in items("repository", path=str(tmp_path / "repos" / "*"))] == ["one", "two"]


@pytest.mark.parametrize("ending", ["zip", "tar.gz"])
def test_repositories_in_archives_lose_the_directory_around_them(tmp_path: Path, ending: str) -> None:
    write_tree(tmp_path / "tree" / "one-1.2")
    if ending == "zip":
        with zipfile.ZipFile(tmp_path / "one-1.2.zip", "w") as archive:
            for name, text in REPOSITORY.items():
                archive.writestr(f"one-1.2/{name}", text)
    else:
        with tarfile.open(tmp_path / "one-1.2.tar.gz", "w:gz") as tar:
            tar.add(tmp_path / "tree" / "one-1.2", "one-1.2")
    (item,) = items("repository", path=str(tmp_path / f"*.{ending}"))
    (same,) = items("repository", path=str(tmp_path / "tree" / "one-1.2"))
    assert item.text == same.text
    assert item.facts == {"repository": "one-1.2", "files": 7, "left_out": 7}


def test_long_repositories_are_cut_between_files(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}.py").write_text(f"# {number}\n" * 300)
    found = items("repository", path=str(tmp_path))
    assert len(found) > 2
    assert all(len(item.text.encode()) <= 10_000 for item in found)
    assert [name for item in found for name in headers(item.text)] == [f"{number:02}.py" for number in range(30)]
    (tmp_path / "one.py").write_text("# one file alone is longer than a document may be\n" * 300)
    assert reasons(items("repository", path=str(tmp_path))) == ["enormous"]


def test_a_repository_without_text_and_none_at_all(tmp_path: Path) -> None:
    (tmp_path / "logo.png").write_bytes(b"\0")
    assert reasons(items("repository", path=str(tmp_path))) == ["no_text"]
    with pytest.raises(Unavailable, match="source mine: no directories and no archives"):
        items("repository", path=str(tmp_path / "*.png"))


def test_python_that_cannot_be_parsed_keeps_its_place() -> None:
    deep = {"a.py": "(" * 100_000, "b.py": "-" * 100_000 + "1", "c.py": "import (", "d.py": "import a, b, c\n", "e.py": "\0"}
    assert ordered(deep) == ["a.py", "b.py", "c.py", "d.py", "e.py"]
    chain = {f"m{number:04}.py": f"import m{number + 1:04}\n" for number in range(3000)}
    assert ordered(chain) == sorted(chain, reverse=True)
