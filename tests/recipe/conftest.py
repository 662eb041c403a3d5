"""A small recipe file to bend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

TEXT = """\
name: small
corpus:
  sources:
    - {name: prose, kind: text, path: a.txt, domain: prose, license: CC0-1.0}
    - {name: code, kind: code, path: src, domain: code, license: MIT}
model:
  preset: glm-tiny
train:
  phases:
    - name: general
      tokens: 2M
      mixture: {prose: 0.75, code: 0.25}
      sequence_length: 512 tokens
      global_batch_tokens: 8Ki
    - name: anneal
      tokens: 256Ki
      mixture: {prose: 1.0}
      sequence_length: 1Ki
      global_batch_tokens: 8Ki
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write the small recipe with replacements `(old, new)`; each old text must be there."""

    def make(*replacements: tuple[str, str], text: str = TEXT) -> Path:
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "small.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return make
