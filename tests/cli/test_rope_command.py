"""`--rope`: a longer context than the trained one, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import Lmworks

from lmworks.recipe.schema.artifacts import RopeExtension
from lmworks.serve.models import load_engine
from saved_run import save_run
from tiny_run import Tiny


def test_ruler_beyond_the_trained_context(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    save_run(tiny, tmp_path / "run", "model.max_position_embeddings=600 tokens")
    base = f"{tmp_path}/run@base"
    options = ("--tasks", "ruler-vt", "--lengths", "1000", "--items", 1)
    assert "more than the model's context of 600" in lmworks("evaluate", base, *options).error
    done = lmworks("evaluate", base, *options, "--rope", "yarn:2", "--json")
    assert done.code == 0 and '"context": 1200' in done.out, done.err
    engine = load_engine(base, rope=RopeExtension(factor=2))
    assert engine.context == 1200 and engine.model.config.rope.scaling == "yarn"
    engine.close()


@pytest.mark.parametrize("command", ["chat", "serve", "evaluate"])
def test_a_method_that_is_none_is_refused(lmworks: Lmworks, tiny: Tiny, tmp_path: Path, command: str) -> None:
    save_run(tiny, tmp_path / "run")
    words = ("--tasks", "ruler-vt") if command == "evaluate" else ()
    assert "--rope twice:2: write METHOD:FACTOR" in lmworks(command, f"{tmp_path}/run@base", *words, "--rope", "twice:2").error
