"""Checks of the path that a command is told to write to. They come before its work, so that finished work is not lost to such a path."""

from __future__ import annotations

import os
from pathlib import Path

from lmworks.errors import UserError


def require_folder(out: Path, option: str = "--out") -> None:
    """Raise `UserError` unless `out` is a directory that can be written, or can be made."""
    _require_writable(out, out, option)


def require_empty(out: Path) -> None:
    """Raise `UserError` unless `out` is an empty directory, or can be made."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} is not an empty directory; choose another, or remove it")
    _require_writable(out, out.parent, "--out")


def require_file(out: Path, option: str = "--out") -> None:
    """Raise `UserError` unless `out` is a file that can be replaced, or can be made."""
    if out.exists() and not out.is_file():
        raise UserError(f"{option} {out} is {'a directory' if out.is_dir() else 'no regular file'}; name a file to write")
    _require_writable(out, out.parent, option)


def require_new(out: Path, option: str = "--out") -> None:
    """Raise `UserError` unless nothing is at `out`, and a file can be made there."""
    if os.path.lexists(out):
        raise UserError(f"{out} exists and is not overwritten; give another file with {option}")
    _require_writable(out, out.parent, option)


def _require_writable(out: Path, folder: Path, option: str) -> None:
    """Raise `UserError` unless `folder`, or else the nearest one above it that exists, can be written."""
    there = next(one for one in (folder, *folder.absolute().parents) if os.path.lexists(one))
    if not there.is_dir():
        raise UserError(f"{option} {out} cannot be written: {there} is not a directory; choose another path")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{option} {out} cannot be written: {there} is closed to you; make it writable, or choose another path")
