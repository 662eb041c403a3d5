"""The runs of the export tests: models of each class, briefly trained on real text, because random weights choose experts by rounding."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("export", "cli")]

from export.conftest import data, make_run  # noqa: E402, F401
