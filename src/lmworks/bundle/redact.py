"""What of a value, a path or a line may leave the machine.

Nothing of the input is kept but numbers, words and messages that lmworks' own sources contain (`vocabulary`), and pseudonyms. A text of any
other form is replaced by its length. So a document, a prompt or a secret need not be recognized to be left out.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import lmworks
from lmworks.bundle.pseudonyms import Kind, Pseudonyms
from lmworks.bundle.vocabulary import known_messages, words

_DEPTH = 4  # messages within messages
_MOST_CACHED, _LONGEST_CACHED = 100_000, 300  # texts, and characters of one
_DEEPEST = 60  # levels of a JSON value
_LONGEST_TEXT, _LONGEST_NAME, _MOST_SEGMENTS = 4000, 128, 24
_NUMBER = re.compile(r"[+-]?\d{1,9}(?:,\d{3}){0,6}(?:\.\d{1,20})?(?:[eE][+-]?\d{1,3})?%?")
_UNITS = (
    r"[kMGTP]?i?(?:B|bytes?|FLOP/s|B/s)|[kMGTP]|ms|us|ns|s|seconds?|min|h|hours?|d|days?|steps?|tokens?|tokens/s|sequences?|W|°C|MHz|GHz|x|"
    r"ranks?|epochs?"
)
_QUANTITY = re.compile(rf"[+-]?\d{{1,18}}(?:,\d{{3}}){{0,6}}(?:\.\d{{1,20}})?(?:[eE][+-]?\d{{1,3}})? ?(?:{_UNITS})")
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?:Z|[+-]\d\d:?\d\d)?)?|\d\d:\d\d:\d\d(?:[.,]\d{1,9})?")
_VERSION = re.compile(r"\d{1,4}(?:\.\d{1,4}){1,2}(?:(?:a|b|rc|\.post|\.dev)\d{1,4})?(?:\+(?:cpu|cu\d{2,3}|rocm[\d.]{1,8}))?")
_SHAPE = re.compile(r"[\[(]?\d{1,9}(?:, ?\d{1,9}|x\d{1,9}|-\d{1,9}){0,12}[\])]?")  # of tensors, and ranges of ranks
_HASH = re.compile(r"(?:sha256[:=])?[0-9a-fA-F]{16,128}")
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(?:[^/?#@\s]*@)?([^/?#\s]*)([^?#\s]*)\S*")
_BUCKETS = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "wasb", "wasbs", "az", "r2", "oci", "hdfs", "file"))
_SCHEMES = _BUCKETS | {"http", "https", "hf", "ftp", "sftp", "ssh", "tcp", "env", "memory"}
_EMAIL = re.compile(r"[^\s@/:]{1,64}@[^\s@/:]{1,255}")
_ADDRESS = re.compile(r"(?:\d{1,3}\.){3}\d{1,3}|\[?[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}\]?")
_ADDRESS_WITHIN = re.compile(r"(?:\d{1,3}\.){3}\d{1,3}|(?:[0-9a-fA-F]{1,4}:){2,}|[0-9a-fA-F]{1,4}::|::[0-9a-fA-F]{1,4}")
_LOCAL = ("127.0.0.1", "::1", "0.0.0.0", "::")
_NUMBERED = re.compile(r"([A-Za-z]{1,20})[-_.]?(\d{1,12})((?:-\d{1,12}){0,2})")
_PATH = re.compile(r"(?:~|\.{1,2})?/|[A-Za-z]:[\\/]|~")
_EXTENSIONS = frozenset({
    ".py", ".json", ".jsonl", ".yaml", ".yml", ".log", ".bin", ".idx", ".crc", ".npy", ".npz", ".parquet", ".txt", ".md", ".html", ".gz",
    ".zst",
    ".zip", ".tar", ".safetensors", ".gguf", ".jinja", ".csv", ".pt", ".whl", ".so", ".sh", ".lineage", ".part", ".pickle", ".held",
    ".kept",
    ".lock", ".svg",
})  # fmt: skip
_SEPARATORS = re.compile(r"([/.:=,;|+@\[\](){}<>\"'\\-])")
OMITTED = "[text of "
_QUOTES = ("'", '"', "`")


class Redactor:
    """Redacts values of one run, with the same pseudonyms everywhere.

    `run_dir`: its paths, as written and resolved, become RUN/... `names`: what is known of names, with their kinds.
    """

    def __init__(self, run_dirs: Iterable[str] = (), names: Mapping[str, Kind] | None = None) -> None:
        self.pseudonyms = Pseudonyms()
        self._run_dirs = sorted({one.rstrip("/") for one in run_dirs if len(one) > 1}, key=len, reverse=True)
        self._words, self._messages = words(), known_messages()
        self._keys: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        for name, kind in (names or {}).items():
            if name and name not in self._words and name not in _LOCAL:
                self.pseudonyms.of(name, kind)

    # JSON.

    def value(self, value: Any, depth: int = 0) -> Any:
        """A JSON value of the same form. Numbers, booleans and null are kept."""
        if depth > _DEEPEST:
            return None
        if isinstance(value, dict):
            return {self.key(str(key)): self.value(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item, depth + 1) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def key(self, key: str) -> str:
        """A key of a map, also one that names a metric or a recipe value; distinct keys stay distinct."""
        if key not in self._keys:
            kept = self._token(key)
            found = kept if kept is not None else self.pseudonyms.of(key, "name")
            if len(self._keys) >= _MOST_CACHED:
                return found
            self._keys[key] = found
        return self._keys[key]

    def text(self, text: str, depth: int = 0) -> str:
        """A text: a word, a number, a path, a name or a message; of another text, its length."""
        if not text or text in self._words:
            return text
        if len(text) <= _LONGEST_CACHED and not depth:
            if text not in self._texts and len(self._texts) < _MOST_CACHED:
                self._texts[text] = self._filled(text, depth)
            return self._texts.get(text) or self._filled(text, depth)
        if len(text) <= _LONGEST_TEXT:
            return self._filled(text, depth)
        return f"{OMITTED}{len(text):,} characters]"

    def is_public(self, text: str) -> bool:
        """Whether a text is a word of the sources."""
        return text in self._words

    # Messages.

    def message(self, text: str, depth: int = 0) -> str | None:
        """A message of a known form, with what it names redacted; None if it has no known form."""
        if depth >= _DEPTH or len(text) > _LONGEST_TEXT:
            return None
        found = self._messages.fit(text)
        if found is None:
            return None
        template, filled = found
        parts = [template[0]]
        for value, constant in zip(filled, template[1:], strict=True):
            parts += [self._filled(value, depth + 1), constant]
        return "".join(parts)

    def _filled(self, text: str, depth: int) -> str:
        """What a message has filled in: one thing, or several behind each other."""
        stripped = text.strip()
        if not stripped:
            return text
        kept = self.message(stripped, depth) or self._token(stripped)
        if kept is None or OMITTED in kept:  # a shorter form at its beginning may leave less out
            several = self._several(stripped, depth)
            kept = several if several is not None and (kept is None or OMITTED not in several) else kept
        return text.replace(stripped, kept if kept is not None else f"{OMITTED}{len(stripped):,} characters]")

    def _several(self, text: str, depth: int) -> str | None:
        """Several things behind each other. Words are a sentence, of which nothing is kept, unless a known message has listed them."""
        for separator in ("; ", ", ", ": "):
            pieces = text.split(separator)
            if 1 < len(pieces) <= _MOST_SEGMENTS:
                messages = [self.message(piece, depth + 1) for piece in pieces]
                each = [message or self._token(piece) for message, piece in zip(messages, pieces, strict=True)]
                if all(each) and (depth or any(messages) or all(self._is_figure(piece) for piece in pieces)):
                    return separator.join(map(str, each))
        pieces = text.split(" ")
        if len(pieces) > _MOST_SEGMENTS:
            return None
        for count in range(1, len(pieces)):  # two messages with a space between them
            first, second = " ".join(pieces[:count]), " ".join(pieces[count:])
            if (left := self.message(first, depth + 1)) and (right := self._known(second, depth + 1)):
                return f"{left} {right}"
            if (right := self.message(second, depth + 1)) and (left := self._known(first, depth + 1)):
                return f"{left} {right}"
        return None

    def _known(self, text: str, depth: int) -> str | None:
        return text if text in self._words else self.message(text, depth) or self._token(text)

    def _is_figure(self, text: str) -> bool:
        return any(shape.fullmatch(text) for shape in (_NUMBER, _QUANTITY, _DATE, _SHAPE))

    # One thing without spaces.

    def _token(self, text: str) -> str | None:
        """One word, number, path or name; None for anything longer."""
        if text in self._words or text in _LOCAL:
            return text
        if (known := self.pseudonyms.known(text)) is not None:
            return known
        for quote in _QUOTES:
            if len(text) > 2 and text[0] == text[-1] == quote:
                inner = self._token(text[1:-1])
                return None if inner is None else f"{quote}{inner}{quote}"
        if _ADDRESS.fullmatch(text):
            return self.pseudonyms.of(text, "address")
        if any(shape.fullmatch(text) for shape in (_NUMBER, _QUANTITY, _DATE, _VERSION, _SHAPE)):
            return text
        if _HASH.fullmatch(text):
            return self.pseudonyms.of(text, "hash")
        if (url := _URL.fullmatch(text)) is not None:
            return self._url(url)
        if _EMAIL.fullmatch(text):
            return self.pseudonyms.of(text, "email")
        if _PATH.match(text):
            return self.path(text) if len(text) <= _LONGEST_TEXT and "\n" not in text else None
        if len(text) > _LONGEST_NAME or any(character.isspace() for character in text):
            return None
        if _ADDRESS_WITHIN.search(text):
            return self.pseudonyms.of(text, "address")
        return self._segments(text)

    def _url(self, url: re.Match[str]) -> str:
        scheme, host, rest = url.groups()
        kept = scheme.lower() if scheme.lower() in _SCHEMES else "url"
        place = "" if not host else host if host in _LOCAL else self._host(host, "bucket" if kept in _BUCKETS else "address")
        return f"{kept}://{place}{f'/{self._named(rest)}' if rest.strip('/') else ''}"

    def _host(self, host: str, kind: Kind) -> str:
        name, colon, port = host.rpartition(":")
        if colon and port.isdigit():
            return f"{self.pseudonyms.known(name) or self.pseudonyms.of(name, kind)}:{port}"
        return self.pseudonyms.of(host, kind)

    def _segments(self, text: str) -> str:
        """A compound of words and names, such as validation/acme/loss or corpus.sources.acme.path."""
        pieces = _SEPARATORS.split(text)
        if len(pieces) == 1:
            return self._segment(text)
        # A name with a hyphen or a dot is one name, if it is known as a whole or its parts are not words.
        coarse = re.split(r"([/:=,|@])", text)
        if len(coarse) > 1:
            return (
                "".join(one if number % 2 else self._segments(one) for number, one in enumerate(coarse))
                if len(coarse) < 50
                else (self.pseudonyms.of(text, "name"))
            )
        if (known := self.pseudonyms.known(text)) is not None:
            return known
        parts = text.split(".")
        if len(parts) > 1 and all(part in self._words or part.isdigit() or self.pseudonyms.known(part) for part in parts):
            return ".".join(self.pseudonyms.known(part) or part for part in parts)
        if len(parts) > 2 and parts[0] in self._words and parts[1] in self._words:  # a key with the name of an item in it
            return ".".join(self._segment(part) for part in parts)
        return self._segment(text)

    def _segment(self, text: str) -> str:
        if not text or text in self._words:
            return text
        if (known := self.pseudonyms.known(text)) is not None:
            return known
        if _NUMBER.fullmatch(text) or _VERSION.fullmatch(text):
            return text
        if _HASH.fullmatch(text):
            return self.pseudonyms.of(text, "hash")
        if (numbered := _NUMBERED.fullmatch(text)) and numbered[1] in self._words and numbered[2].isdigit():
            return text
        stem, dot, suffix = text.partition(".")
        if dot and all(f".{one}" in _EXTENSIONS or one in self._words for one in suffix.split(".")):
            return f"{self._segment(stem)}.{suffix}"
        return self.pseudonyms.of(text, "name")

    # Paths.

    def path(self, text: str) -> str:
        """A path: RUN/... for one of the run, that of the package for a file of an installed public package, else a pseudonym."""
        for run_dir in self._run_dirs:
            if text == run_dir or text.startswith(f"{run_dir}/"):
                return self.member(f"RUN{text[len(run_dir) :]}")
        return public_file(text) or self._named(text)

    def member(self, path: str) -> str:
        """A path within the run, each of its names redacted."""
        return "/".join(one if one in ("", "RUN", ".", "..") else self._segment(one) for one in path.split("/"))

    def _named(self, path: str) -> str:
        suffix = Path(path).suffix.lower()
        return self.pseudonyms.of(path, "path") + (suffix if suffix in _EXTENSIONS else "")


def public_file(path: str) -> str | None:
    """A file of lmworks, of a package that it depends on, or of Python's library, from the name of the package on; None for any other."""
    for root, names in _public_roots():
        if path.startswith(f"{root}/") and ".." not in path:
            inner = path[len(root) + 1 :]
            if inner.partition("/")[0].removesuffix(".py") in names and Path(path).is_file():
                return inner
    return None


@cache
def _public_roots() -> Sequence[tuple[str, frozenset[str]]]:
    sites = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *(one for one in sys.path if one.endswith("site-packages"))}
    packages = frozenset(public_packages()) | {"torch", "torchgen", "triton", "functorch"}
    modules = frozenset(name.replace("-", "_") for name in packages) | {"yaml", "google", "PIL", "sklearn", "attr", "dateutil"}
    roots = [(str(Path(lmworks.__file__).parent.parent), frozenset({"lmworks"})), *((site, modules) for site in sorted(sites))]
    return [*roots, (sysconfig.get_path("stdlib"), frozenset(sys.stdlib_module_names))]


@cache
def public_packages() -> Sequence[str]:
    """The distributions that lmworks and its extras depend on."""
    try:
        needed = metadata.requires("lmworks") or []
    except metadata.PackageNotFoundError:
        needed = []
    return sorted({re.split(r"[^\w.-]", one)[0].lower() for one in needed})
