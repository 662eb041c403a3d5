"""What `conftest.py` does to all tests."""

from __future__ import annotations

import gzip
import time

import pytest

NOW = gzip.compress(b"text", mtime=time.time_ns() % 2**32)  # other bytes in every process


@pytest.mark.parametrize(("name", "data"), [("a.gz", NOW), ("b.gz", NOW)])
def test_no_name_of_a_test_holds_bytes(request: pytest.FixtureRequest, name: str, data: bytes) -> None:
    """Workers that find other names than their neighbours end the whole suite before its first test."""
    assert request.node.name.endswith(f"[{name}-data]")
