"""`lmworks run --to STAGE`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from command import Lmworks


def test_a_run_ends_with_the_stage(lmworks: Lmworks, mine: Callable[[str, str], Path], tmp_path: Path) -> None:
    recipe = mine("seed: 5", "seed: 6")
    assert "--to 'token' is not a stage; did you mean tokenizer?" in lmworks("run", recipe, "--to", "token").error
    assert not list(tmp_path.rglob("stage.json"))
    done = lmworks("run", recipe, "--to", "tokenizer")
    assert done.code == 0, done.error
    assert {path.parent.name for path in tmp_path.rglob("stage.json")} == {"corpus", "tokenizer"}
