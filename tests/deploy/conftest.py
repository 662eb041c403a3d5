"""One exported model for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployable import GLM, export
from tiny_run import Tiny


@pytest.fixture(scope="session")
def exported(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts in GLM's class with a layer of multi-token prediction, and its GGUF file."""
    return export(tiny, tmp_path_factory.mktemp("exported"), GLM | {"mtp": {}}, gguf=True)
