"""The archive: its members within 20 MB, the same bytes for the same run, verified before it gets its name."""

from __future__ import annotations

import getpass
import io
import os
import re
import socket
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks import __version__
from lmworks.bundle import contents, machine
from lmworks.bundle.pseudonyms import Kind
from lmworks.bundle.redact import Redactor
from lmworks.doctor.report import as_document
from lmworks.errors import UserError
from lmworks.io.destinations import require_new
from lmworks.io.files import write_bytes
from lmworks.io.masking import MASK, SECRET_NAME
from lmworks.io.urls import NAME as CREDENTIALS
from lmworks.watch.evidence import stages_in
from lmworks.watch.probes import diagnose_probed
from lmworks.watch.run_files import INDEX, PREFLIGHT, FolderFiles, RunFiles, read_document

MOST_BYTES = 20_000_000
_SHARES = {
    "metrics": 7_500_000, "ledger": 3_000_000, "logs": 4_000_000, "ranks": 1_500_000, "checkpoints": 1_500_000, "documents": 1_500_000,
}  # fmt: skip
"""Compressed bytes of each group; a megabyte is left for the list of files and the directory of the archive."""
_MOST_MEMBERS = 4000
_SHORTEST_SECRET = 6
_FORMAT = 1
_TIME = (1980, 1, 1, 0, 0, 0)
_VALUE = re.compile(r"[?&;][^=&;?#\s]+=([^&;#\s]*)")  # of the query of a URL


@dataclass(frozen=True)
class Member:
    """A file of the bundle: `size` in bytes, `packed` in the archive; `note` says what was left out of it."""

    name: str
    data: bytes
    packed: int
    note: str = ""

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class Bundle:
    """What the archive will contain. `omitted`: files of the allowlist that did not fit, with the reason. `pseudonyms`: what each stands
    for, which is shown to the user and is not in the archive."""

    members: Sequence[Member]
    omitted: Mapping[str, str]
    pseudonyms: Mapping[str, str]

    def archive(self) -> bytes:
        """The bytes of the archive, always the same for the same members."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for member in self.members:
                info = zipfile.ZipInfo(member.name, _TIME)
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(info, member.data, compresslevel=9)
        return buffer.getvalue()

    def write(self, path: Path) -> int:
        """Write the archive to a new file; returns its size. Raises `UserError` if the file exists."""
        require_new(path)
        data = self.archive()
        assert len(data) <= MOST_BYTES, len(data)
        write_bytes(path, data)
        return len(data)


def collect(run_dir: Path, preflight: Mapping[str, Any] | None = None) -> Bundle:
    """What a bundle of a run contains. `preflight`: the results of a preflight that was made now, in place of the last one of the run.

    Raises `UserError` if the folder is no run, or if a secret of this machine would get into the archive.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not the folder of a run; give one, such as runs/NAME")
    files = FolderFiles(run_dir)
    names = set(files.names())
    stages = list(stages_in(files))
    if not names & {"resolved.json", "ledger.jsonl", "metrics.jsonl"} or not any(one.events or one.lines or one.tree for one in stages):
        raise UserError(f"{run_dir} has no records of a run: neither resolved.json, ledger.jsonl nor metrics.jsonl of lmworks")
    redactor = Redactor(_run_dirs(run_dir, stages[0].tree), _names(files, stages[0].tree))
    packer = _Packer()
    diagnosis = as_document("RUN", [diagnose_probed(one) for one in stages])
    del diagnosis["verdict"]  # a sentence of what the lists below it say
    packer.add("doctor.json", redactor.value(diagnosis), "documents")
    packer.add("environment.json", machine.describe(run_dir, redactor), "documents")
    if preflight is not None:
        packer.add(PREFLIGHT, redactor.value(dict(preflight)), "documents")
    for content in contents.CONTENTS:
        for name in sorted(names, key=_newest_first):
            if content.fits(name) and not (name == PREFLIGHT and preflight is not None):
                packer.add(f"{redactor.member(name)}{content.suffix}", content.read(files, name, redactor), content.share)
    index = {
        "format": _FORMAT, "lmworks": __version__, "running": stages[0].running, "abandoned": stages[0].abandoned,
        "pseudonyms": redactor.pseudonyms.counts,
        "members": {one.name: {"bytes": one.size} | ({"note": one.note} if one.note else {}) for one in packer.members},
        "sha256": {name: redactor.text(files.sha256(name)) for name in contents.HASHED if name in names},
        "omitted": packer.omitted, **contents.listing(files, redactor),
    }  # fmt: skip
    members = [_member(INDEX, contents.as_bytes(index)), *packer.members]
    _refuse_secrets(members, files, redactor)
    return Bundle(members, packer.omitted, redactor.pseudonyms.table)


def _member(name: str, data: bytes, note: str = "") -> Member:
    return Member(name, data, len(zlib.compress(data, 9)) + 2 * len(name) + 200, note)


class _Packer:
    """Members within the share of their group. Lines are thinned until they fit, other files that do not fit are left out."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.omitted: dict[str, str] = {}
        self._left = dict(_SHARES)

    def add(self, name: str, content: Any, share: str) -> None:
        if content is None:
            return
        if len(self.members) >= _MOST_MEMBERS or any(one.name == name for one in self.members):
            self.omitted[name] = f"more than {_MOST_MEMBERS:,} files" if len(self.members) >= _MOST_MEMBERS else "its name is taken"
            return
        member = _member(name, contents.as_bytes(content))
        room = self._left[share] if share != "logs" else min(self._left[share], max(self._left[share] // 4, 200_000))
        count = len(content) if isinstance(content, list) else 0
        while member.packed > room and count > 8:
            count = min(count - 1, int(count * room / member.packed * 0.95))
            kept = content[-count:] if share == "logs" else contents.thinned(content, count)
            member = _member(name, contents.as_bytes(content, kept), f"{len(kept):,} of {len(content):,} lines")
        if member.packed > room:
            self.omitted[name] = f"its {member.size:,} bytes exceed what is left of the {_SHARES[share]:,} bytes for {share}"
            return
        self._left[share] -= member.packed
        self.members.append(member)


def _newest_first(name: str) -> tuple[str, ...]:
    """Checkpoints from the newest on, all else by name: what does not fit is then what is oldest."""
    parts = name.split("/")
    return tuple("".join(chr(255 - ord(c)) if c.isdigit() and part.startswith("step-") else c for c in part) for part in parts)


def _run_dirs(run_dir: Path, tree: Mapping[str, Any]) -> Iterator[str]:
    yield from (str(run_dir), str(run_dir.absolute()), str(run_dir.resolve()))
    if isinstance(tree.get("run_dir"), str):
        yield from (tree["run_dir"], os.path.abspath(tree["run_dir"]))


def _names(files: RunFiles, tree: dict[str, Any]) -> dict[str, Kind]:
    found: dict[str, Any] = dict(contents.names_of(tree))
    found |= dict(contents.hosts_of(files))
    found |= {socket.gethostname(): "host", **dict.fromkeys(_users(), "user")}
    return found


def _users() -> Iterator[str]:
    try:
        yield getpass.getuser()
    except (OSError, KeyError):
        return


def _refuse_secrets(members: Sequence[Member], files: FolderFiles, redactor: Redactor) -> None:
    """A second look by other means: no credential that this machine knows may be in any member."""
    secrets = [(f"the variable {name}", value) for name, value in os.environ.items() if SECRET_NAME.search(name)]
    secrets += [(f"a credential of {CREDENTIALS}", secret) for secret in _credentials(read_document(files, CREDENTIALS))]
    with suppress(RuntimeError):  # a container may have no home folder
        secrets.append(("the home folder", str(Path.home())))
    for what, secret in secrets:
        data = secret.encode()
        if len(data) < _SHORTEST_SECRET or redactor.is_public(secret):
            continue
        for member in members:
            if data in member.data:
                raise UserError(
                    f"the bundle was not written, since {member.name} would contain {what}; please report this"
                )


def _credentials(known: Mapping[str, Any]) -> Iterator[str]:
    """Passwords and tokens before the @, and masked values of the query, of URLs by their masked form."""
    for masked, real in known.items():
        if not isinstance(real, str):
            continue
        user, at, _ = real.rpartition("@")
        if at:
            yield user.rpartition(":")[2].removeprefix("//")  # a token may stand alone
        for shown, value in zip(_VALUE.findall(masked), _VALUE.findall(real), strict=False):
            if shown == MASK:
                yield value
