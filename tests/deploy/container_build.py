"""Builds a container file without a container engine: each RUN line is executed in a fresh Debian root, by chroot.

A root is made by debootstrap and stands for the images `debian` and, with Debian's Python in /usr/local, `python`. Everything runs in mount
and process namespaces of its own, so that mounts and processes end with the command, whatever happens. Instructions that the files of
lmworks do not use are refused instead of left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

MIRROR = "http://deb.debian.org/debian"
SECURITY = "http://deb.debian.org/debian-security"
DEBIAN = re.compile(r"debian:12(\.\d+)?-slim")
PYTHON = re.compile(r"python:3\.11(\.\d+)?-slim-bookworm")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# How a machine reaches its package indexes. A builder passes proxies and certificates on in the same way.
_NETWORK = re.compile(
    r"(?i)(https?|no)_proxy|PIP_(CERT|INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|DEFAULT_TIMEOUT)|(CURL|REQUESTS)_CA_BUNDLE|SSL_CERT_FILE"
)
_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
# The shell stays the first process of the namespace, without `exec`: a process that changes its user would no longer end with unshare.
_ENTER = """
root=$1; shift
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$root$(dirname "$2")"; touch "$root$2"; fi
  mount --bind "$1" "$root$2"
  mount -o remount,bind,"$3" "$root$2"
  shift 3
done
shift
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev/shm"
"$@"
exit
"""


class BuildError(Exception):
    """An instruction that failed or is not known."""


@dataclass(frozen=True)
class Mount:
    source: Path
    target: str
    write: bool = False


@dataclass
class Image:
    """What a stage made: files below `root`, and how programs start in it."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)

    def words(
        self, command: list[str], mounts: Iterable[Mount] = (), environment: dict[str, str] | None = None, user: str = "0:0"
    ) -> list[str]:
        """The command line of this machine that runs `command` in the image."""
        variables = [f"{name}={value}" for name, value in (self.environment | (environment or {})).items()]
        places = [word for one in mounts for word in (str(one.source), one.target, "rw" if one.write else "ro")]
        inside = ["chroot", f"--userspec={user}", "--groups=", str(self.root), "env", "-i", "-C", self.workdir, *variables, *command]
        return [*_APART, "sh", "-euc", _ENTER, "sh", str(self.root), *places, "--", *inside]


def make_base(root: Path) -> None:
    """A fresh Debian 12, with the package lists of the image."""
    _require(["debootstrap", "--variant=minbase", "bookworm", str(root), MIRROR])
    lists = [(MIRROR, "bookworm"), (MIRROR, "bookworm-updates"), (SECURITY, "bookworm-security")]
    (root / "etc/apt/sources.list").write_text("".join(f"deb {url} {suite} main\n" for url, suite in lists))


def add_python(root: Path) -> None:
    """Python with pip in /usr/local, as in the image `python`: a virtual environment of Debian's."""
    script = "apt-get update && apt-get install -y --no-install-recommends python3-venv && python3 -m venv /usr/local"
    _run(Image(root), script + " && rm -rf /var/lib/apt/lists/*")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """(name, rest) of each instruction: comments are left out, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        name, _, rest = line.strip().partition(" ")
        yield name, rest.strip()


def images(text: str) -> list[str]:
    """The images from which the stages of a container file start."""
    return [rest.split()[0] for name, rest in instructions(text) if name == "FROM"]


def build(context: Path, bases: dict[str, Path], work: Path) -> Image:
    """Execute the Containerfile in `context`. `bases`: "debian" and "python". Each stage is a copy below `work`; returns the last."""
    stages: dict[str, Image] = {}
    image: Image | None = None
    ignored = (context / ".dockerignore").read_text().split()
    for number, (name, rest) in enumerate(instructions((context / "Containerfile").read_text(encoding="utf-8"))):
        if name == "FROM":
            source, *alias = rest.split()
            kind = "debian" if DEBIAN.fullmatch(source) else "python" if PYTHON.fullmatch(source) else None
            if kind is None:
                raise BuildError(f"FROM {source}: not executed, because no Debian root stands for this image")
            work.mkdir(parents=True, exist_ok=True)
            image = Image(work / f"stage{number}")
            subprocess.run(["cp", "-a", "--reflink=auto", str(bases[kind]), str(image.root)], check=True)
            stages[alias[1] if alias else f"{number}"] = image
            continue
        if image is None:
            raise BuildError(f"{name} before FROM")
        match name:
            case "RUN":
                _run(image, rest)
            case "COPY":
                _copy(image, rest, context, stages, ignored)
            case "WORKDIR":
                image.workdir = rest
                (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ENV":
                image.environment |= dict(one.split("=", 1) for one in shlex.split(rest))
            case "ENTRYPOINT":
                image.entrypoint = json.loads(rest)
            case _:
                raise BuildError(f"{name} is no instruction that this builder knows")
    if image is None:
        raise BuildError("no FROM")
    return image


def _run(image: Image, script: str) -> None:
    print(f"RUN {script}", flush=True)
    machine = image.root / "machine"
    machine.mkdir(exist_ok=True)
    variables, mounts = {}, [Mount(Path("/etc/resolv.conf").resolve(), "/etc/resolv.conf")]
    for name, value in os.environ.items():
        if _NETWORK.fullmatch(name):
            if Path(value).is_dir():
                mounts.append(Mount(Path(value), value))
            elif Path(value).is_file():
                shutil.copyfile(value, machine / name)
                value = f"/machine/{name}"
            variables[name] = value
    try:
        _require(image.words(["/bin/sh", "-c", script], mounts, variables))
    finally:
        shutil.rmtree(machine)


def _copy(image: Image, rest: str, context: Path, stages: dict[str, Image], ignored: list[str]) -> None:
    words = rest.split()
    where = context
    if words[0].startswith("--from="):
        where = stages[words.pop(0).removeprefix("--from=")].root
    *sources, target = words
    place = image.root / (target if target.startswith("/") else f"{image.workdir}/{target}").lstrip("/")
    for source in sources:
        if where is context and any(fnmatch(source, pattern) for pattern in ignored):
            raise BuildError(f"COPY {source}: .dockerignore leaves it out")
        found = where / source.lstrip("/")
        if found.is_dir():
            shutil.copytree(found, place, dirs_exist_ok=True)
        elif found.is_file():
            to = place / found.name if target.endswith("/") or len(sources) > 1 else place
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, to)
        else:
            raise BuildError(f"COPY {source}: there is no such file")


def _require(words: list[str]) -> None:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise BuildError(f"exit code {done.returncode}: {shlex.join(words[-3:])}\n{done.stdout.decode(errors='replace')[-3000:]}")


def built(context: Path, bases: dict[str, Path], work: Path, kept: Path | None) -> Image:
    """`build`; if the file copies nothing from its folder, an image is kept in `kept`, and executed again only if the file changes."""
    text = (context / "Containerfile").read_text(encoding="utf-8")
    if kept is None or any(name == "COPY" and not rest.startswith("--from=") for name, rest in instructions(text)):
        return build(context, bases, work)
    place = kept / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not place.exists():
        image = build(context, bases, work)
        assert image.workdir == "/" and not image.entrypoint and image.environment == Image(place).environment
        place.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", str(image.root), f"{place}.new"], check=True)
        os.rename(f"{place}.new", place)
    return Image(place)


def started(image: Image, service: dict[str, Any], context: Path, owner: str) -> list[str]:
    """The command line that starts a service of compose.yaml as the user `owner`, who wrote `context`."""
    mounts = [
        Mount((context / one["source"]).resolve(), one["target"], write=not one.get("read_only", False)) for one in service["volumes"]
    ]
    return image.words([*image.entrypoint, *service["command"]], mounts, service.get("environment"), owner)
