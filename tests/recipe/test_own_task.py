"""Task files of the user, by their path."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.errors import UserError
from lmworks.recipe.schema.evaluate import load_task


def test_the_advice_on_a_large_file_is_whole_however_long_its_path_is(tmp_path: Path) -> None:
    task = tmp_path / ("long" * 50) / "task.yaml"
    task.parent.mkdir()
    task.write_text("#" * (1 << 17))
    with pytest.raises(UserError, match=r"task\.yaml is larger than .* a task is a few lines of YAML beside its data file$"):
        load_task(str(task))
