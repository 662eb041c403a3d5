"""Runs and a corpus to make pages of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from page_runs import write_run

from lmworks.corpus import prepare
from lmworks.corpus.analysis.analyze import analyze
from lmworks.recipe.schema.corpus import Corpus, Source
from lmworks.recipe.schema.recipe import Recipe


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run called trial."""
    run = tmp_path / "trial"
    write_run(run)
    return run


@pytest.fixture(scope="session")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The figures of a corpus of two sources with copies and noise; the step `lines` measures something."""
    folder = tmp_path_factory.mktemp("corpus")
    license = "<script>alert(1)</script>&\"'"
    docs = Source(name="docs", kind="stdlib", document_format="docs", include="email/*.py", domain="docs", license=license)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"{'qxz ' * 60}{number % 5}"}) + "\n" for number in range(20)))
    rows = Source(name="rows", kind="jsonl", path=str(folder / "rows.jsonl"), domain="web", rules="none", license="x")
    steps = [{"step": "clean"}, {"step": "lines", "min_characters": 1}, {"step": "rules"}]
    plain = {"validation_fraction": 0.1, "dedup": {"minhash": None}, "decontaminate": None}
    prepare(Recipe(name="looked-at", corpus=Corpus(sources=[docs, rows], steps=steps, **plain)), folder / "out")
    return analyze(folder / "out")
