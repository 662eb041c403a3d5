"""Looks at a folder: which files it has, by kind and subfolder. Only names, sizes and types are read; memory does not grow with the files.

A kind is a reader of the corpus (`corpus/read`), or `rows` for files of JSON and parquet, whose meaning follows from their columns. What no
reader takes is counted by its ending, with the reason.
"""

from __future__ import annotations

import errno
import glob
import os
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile

from lmworks.corpus.read import parquet, warc
from lmworks.corpus.read.archives import is_archive
from lmworks.corpus.read.files import SUFFIXES
from lmworks.corpus.read.json_rows import SUFFIXES as JSON
from lmworks.corpus.read.listing import SKIPPED_DIRECTORIES, lies_outside
from lmworks.corpus.read.opening import COMPRESSED
from lmworks.corpus.read.part import printable
from lmworks.errors import UserError
from lmworks.io.masking import mask
from lmworks.train.data.row_files import SAVED_DATASETS

ROWS = "rows"
SAMPLE = 256
"""Files of a kind in a folder that are remembered, drawn evenly; the others are only counted."""
MOST_FOLDERS = 12
"""Subfolders that become sources of their own; more of them are one source."""
MOST_LISTED = 32
"""Files of a folder that become sources of their own where no path names those that belong together."""
_MOST_REASONS = 1000
_MARKS = {*SAVED_DATASETS, "config.json", "resolved.json", "tokenizer.json"}
_COMPANIONS = re.compile(
    r"(config|generation_config|adapter_config|preprocessor_config|processor_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens"
    r"|vocab|trainer_state|dataset_infos?|package|package-lock)\.json|chat_template\..*|.*\.index\.json|(vocab|merges)\.txt"
)
_HELD_OUT = re.compile(r"test|valid|validation|val|dev|eval|held[-_]?out")
_SHARD = re.compile(r"[-_.]?\d+([-_]of[-_]\d+)?$")
_KINDS = {
    **{ending.lower(): kind for kind in reversed(SUFFIXES) for ending in SUFFIXES[kind]},  # the first kind that reads an ending
    **dict.fromkeys((*JSON, *parquet.SUFFIXES), ROWS),
    **dict.fromkeys(warc.SUFFIXES, "warc"),
}
_HINTS = {
    ".csv": "save it as parquet: "
    "python -c \"import pyarrow.csv as c, pyarrow.parquet as p; "
    "p.write_table(c.read_csv('A.csv', parse_options=c.ParseOptions(newlines_in_values=True)), 'A.parquet')\"",
    ".tsv": "save it as parquet or JSON lines", ".xlsx": "save it as parquet or JSON lines",
    ".pdf": "make it text first, for example with pdftotext", ".docx": "make it text first, for example with pandoc",
    ".epub": "make it text first, for example with pandoc", ".log": "name it in a source of kind text with include: \"*.log\"",
}  # fmt: skip


@dataclass
class Files:
    """The files of a `kind` below a folder, and an even sample of them as (path, bytes). `deep`: they lie in subfolders, too. `beside`: the
    first of the files there that are left out for their names, and that a reader of the folder would read."""

    kind: str
    folder: str
    deep: bool = False
    count: int = 0
    bytes: int = 0
    sample: list[tuple[str, int]] = field(default_factory=list)
    endings: set[str] = field(default_factory=set)
    beside: list[str] = field(default_factory=list)

    def add(self, path: str, size: int, draw: random.Random) -> None:
        """Count a file."""
        self.count += 1
        self.bytes += size
        self.endings.add(_ending(path))
        if len(self.sample) < SAMPLE:
            self.sample.append((path, size))
        elif (place := int(draw.random() * self.count)) < SAMPLE:
            self.sample[place] = (path, size)

    def merge(self, other: Files) -> None:
        """Add the files of another folder."""
        share = round(SAMPLE * self.count / max(1, self.count + other.count))
        keep = min(len(self.sample), max(share, SAMPLE - len(other.sample)))
        self.sample = self.sample[:keep] + other.sample[: SAMPLE - keep]
        self.count += other.count
        self.bytes += other.bytes
        self.endings |= other.endings
        self.beside = (self.beside + other.beside)[:SAMPLE]
        self.deep = True

    @property
    def everything(self) -> str:
        """The folder, or a pattern for the files right in it where others, or a model, lie below."""
        return self.folder if self.deep else os.path.join(glob.escape(self.folder), "*")

    @property
    def path(self) -> str | None:
        """The path of a source for these files: all of the folder, or a pattern by ending or first letters for these and for none that is
        left out beside them; None if there is no such pattern."""
        if not self.beside:
            return self.everything
        names, others = [os.path.basename(path) for path, _ in self.sample], [os.path.basename(path) for path in self.beside]
        ending = glob.escape(min(self.endings)) if len(self.endings) == 1 else ""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(min(names), max(names), strict=False))
        begin = glob.escape("".join(letter for letter, _ in same)) if self.count == len(names) else ""
        for pattern in (f"*{ending}", f"{begin}*", f"{begin}*{ending}"):
            if all(fnmatchcase(name, pattern) for name in names) and not any(fnmatchcase(name, pattern) for name in others):
                return os.path.join(glob.escape(self.folder), *(["**"] if self.deep else []), pattern)
        return None

    def apart(self) -> list[Files]:
        """These files, each as its own where a few of them have no common path."""
        if self.path is not None or self.count > MOST_LISTED:
            return [self]
        return [Files(self.kind, path, True, 1, size, [(path, size)]) for path, size in sorted(self.sample)]


@dataclass
class Survey:
    """What a folder holds: files by kind, folders and files that are models, folders with a tokenizer alone, saved datasets, and what is
    not used: a reason with its count and the first name."""

    folder: str
    files: list[Files] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    tokenizers: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)
    named: dict[str, str] = field(default_factory=dict)
    count: int = 0
    bytes: int = 0

    def leave_out(self, reason: str, path: str, count: int = 1) -> None:
        """Count what is not used."""
        if reason not in self.unused and len(self.unused) >= _MOST_REASONS:
            reason = "files with other endings"
        self.unused[reason] += count
        self.named.setdefault(reason, path)

    def add(self, other: Survey) -> None:
        """Add all but the files by kind."""
        self.models += other.models
        self.tokenizers += other.tokenizers
        self.datasets += other.datasets
        for reason, count in other.unused.items():
            self.leave_out(reason, other.named[reason], count)
        self.count += other.count
        self.bytes += other.bytes


_UNNAMED = "files and folders whose names are not UTF-8: rename them"


def _is_utf8(name: str) -> bool:
    """Whether a recipe, which is UTF-8, can hold this name."""
    return name.isascii() or printable(name) == name


def survey(folder: str) -> Survey:
    """Look at a folder. Raises `UserError` if it cannot be listed, or if a recipe cannot name it."""
    if not os.path.isdir(folder):
        what = "a URL" if "://" in folder else "a file" if os.path.exists(folder) else "not there"
        raise UserError(f"{mask(folder)} is {what}; init looks at a folder of this machine")
    if not _is_utf8(folder):
        raise UserError(f"the name of {printable(folder)} is not UTF-8, and a recipe is: rename the folder")
    try:
        os.scandir(folder).close()
    except OSError as error:
        raise UserError(f"{folder} cannot be listed: {error.strerror}") from None
    return _look(folder, os.path.realpath(folder), random.Random(0))


def _look(folder: str, root: str, draw: random.Random) -> Survey:
    """A folder whose subfolders are apart: one `Files` for each and each kind, or one for all where they are many. A subfolder that holds a
    model or a dataset further below is looked at in the same way, so that no source reads these."""
    found = Survey(folder)
    own: dict[str, Files] = {}
    below: dict[str, list[Files]] = {}
    folders = _scan(folder, folder, root, draw, found, own)
    split = False
    for path in folders:
        inside = Survey(path)
        files: dict[str, Files] = {}
        waiting = [path]
        while waiting:
            waiting += _scan(waiting.pop(), path, root, draw, inside, files)
        special = inside.models + inside.datasets
        if special and special != [path]:
            inside, files, split = _look(path, root, draw), {}, True
            found.files += inside.files
        split |= bool(special)
        found.add(inside)
        for kind, one in files.items():
            one.deep = True
            below.setdefault(kind, []).append(one)
    for kind in sorted({*own, *below}):
        first, rest = own.get(kind), below.get(kind, [])
        if split or (rest and sum(one.count > 0 for one in rest) <= MOST_FOLDERS):
            found.files += [one for one in (first, *rest) if one is not None and one.count]
            continue
        whole = first or Files(kind, folder)
        whole.deep = True
        for other in rest:
            whole.merge(other)
        found.files += [whole] if whole.count else []
    return found


def _scan(folder: str, top: str, root: str, draw: random.Random, into: Survey, by_kind: dict[str, Files]) -> list[str]:
    """Count the files of one folder towards `top`, and return its subfolders, sorted; none of a folder that is a model or a dataset."""
    found = Survey(folder)
    files: dict[str, Files] = {}
    folders: list[str] = []
    marks: set[str] = set()
    held_out = any(_HELD_OUT.fullmatch(part.lower()) for part in os.path.relpath(os.path.realpath(folder), root).split(os.sep))
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name in _MARKS or entry.name.endswith(".safetensors"):
                    marks.add(entry.name if entry.name in _MARKS else ".safetensors")
                _sort(entry, root, found, files, folders, top, draw, held_out)
    except OSError as error:
        found.leave_out(f"folders that cannot be listed ({error.strerror})", folder)
    if marks & set(SAVED_DATASETS):
        into.datasets.append(folder)
        return []
    if "resolved.json" in marks or {"config.json", ".safetensors"} <= marks:
        into.models.append(folder)
        return []
    if "tokenizer.json" in marks:
        into.tokenizers.append(folder)
    into.add(found)
    for kind, one in files.items():
        if kind in by_kind:
            by_kind[kind].merge(one)
        else:
            by_kind[kind] = one
    return sorted(folders)


def _sort(
    entry: os.DirEntry[str], root: str, found: Survey, files: dict[str, Files], folders: list[str], top: str, draw: random.Random,
    held_out: bool,
) -> None:  # fmt: skip
    name, path = entry.name, entry.path
    try:
        if name[0] == ".":
            found.leave_out("hidden files and folders", path)
        elif entry.is_symlink() and lies_outside(path, root):
            found.leave_out("links that lead out of the folder", path)
        elif entry.is_symlink() and os.path.exists(path):  # what it means lies elsewhere in the folder, and is read there
            if entry.is_file() and _ending(os.path.realpath(path)).lower() != _ending(name).lower():
                found.leave_out("links to files of the folder that have another ending: copy each to the name of its link", path)
        elif entry.is_dir():
            if name in SKIPPED_DIRECTORIES:
                found.leave_out("folders of tools", path)
            elif not _is_utf8(name):
                found.leave_out(_UNNAMED, path)
            else:
                folders.append(path)
        elif not entry.is_file():
            found.leave_out("broken links, pipes, sockets and devices", path)
        elif not os.access(path, os.R_OK):
            found.leave_out(f"files that cannot be read ({os.strerror(errno.EACCES)})", path)
        else:
            size = entry.stat().st_size
            found.count += 1
            found.bytes += size
            if (kind := _kind(name, path, size, found)) is not None:
                one = files.setdefault(kind, Files(kind, top))
                if reason := _left_out(name, kind, held_out):
                    found.leave_out(reason, path)
                    one.beside += [path] if len(one.beside) < SAMPLE else []
                else:
                    one.add(path, size, draw)
    except OSError as error:
        found.leave_out(f"files that cannot be read ({error.strerror})", path)


def _ending(name: str) -> str:
    """The ending of a name, with that of a compressed file before it."""
    plain, ending = os.path.splitext(os.path.basename(name))
    return os.path.splitext(plain)[1] + ending if ending.lower() in COMPRESSED else ending


def _left_out(name: str, kind: str, held_out: bool) -> str:
    """Why a file is no training data, by its name or, with `held_out`, by that of its folder; empty if it may be."""
    if _COMPANIONS.fullmatch(name):
        return "files that belong to a model, a tokenizer, a dataset or a program, by their names"
    stem = _SHARD.sub("", name.removesuffix(_ending(name)).lower())
    if kind == ROWS and (held_out or _HELD_OUT.fullmatch(re.split(r"[-_.](?!out$)", stem)[-1])):
        return "files of rows that are held out by the name of the file or its folder (test, validation, dev): rename it to train on them"
    return ""


def _kind(name: str, path: str, size: int, found: Survey) -> str | None:
    """The kind of a file by its ending; None for one that is not used, which is counted here."""
    plain = name.lower()
    ending = os.path.splitext(plain)[1]
    kind = _KINDS.get(ending)
    if kind is None and ending in COMPRESSED and not is_archive(plain):
        kind = _KINDS.get(os.path.splitext(plain.removesuffix(ending))[1])
    if not size:
        found.leave_out("empty files", path)
    elif (kind is not None or ending == ".gguf") and not _is_utf8(name):
        found.leave_out(_UNNAMED, path)
    elif ending == ".gguf":
        found.models.append(path)
    elif kind is None:
        if is_archive(plain):
            reason = "archives: name each in a source, with the kind of its files"
        else:
            reason = f"files {f'ending in {ending}' if ending else 'without an ending'}" + (
                f" ({_HINTS[ending]})" if ending in _HINTS else ""
            )
        found.leave_out(reason, path)
    else:
        return kind
    return None
