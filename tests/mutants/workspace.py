"""A private copy of the working tree in which sources are changed, and processes that run its tests, forks of one that imported torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from mutants.held import Held

PRELOADED = ("numpy", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "transformers", "hypothesis",
             "pydantic", "typer", "rich.console", "tokenizers", "pyarrow", "scipy.stats", "sympy", "httpx")  # fmt: skip


class Workspace:
    """A copy of the files of the working tree, without those that git ignores."""

    def __init__(self, root: Path, to: Path) -> None:
        self.path, self._is_changed = to, False
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, check=True
        ).stdout.decode()
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, to / name)
        for name in PRELOADED:
            import_module(name)
        assert "lmworks" not in sys.modules, "a fork would have the sources without the mistake"

    @contextmanager
    def changed(self, files: Mapping[str, str]) -> Iterator[None]:
        """Within the block, files of the copy, named from its root, have other contents."""
        before = {name: ((self.path / name).read_bytes(), (self.path / name).stat()) for name in files}
        self._is_changed = True
        try:
            for name, text in files.items():
                (self.path / name).write_text(text, encoding="utf-8")
                later = before[name][1].st_mtime + 1000  # compiled modules are recognized by size and second
                os.utime(self.path / name, (later, later))
            yield
        finally:
            for name, (content, about) in before.items():
                (self.path / name).write_bytes(content)
                os.utime(self.path / name, ns=(about.st_atime_ns, about.st_mtime_ns))
            self._is_changed = False

    @contextmanager
    def hold(self, tests: Sequence[str], traced: Sequence[str] = ()) -> Iterator[Held]:
        """Processes that run the tests in these files as the sources are now."""
        held = Held(self.path, tests, traced, keep_compiled=not self._is_changed)
        try:
            yield held
        finally:
            held.close()
