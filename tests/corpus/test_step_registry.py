"""A step is one file: its options, its documentation and its function are found by looking through the folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lmworks.corpus import steps
from lmworks.corpus.steps.base import StepOptions
from lmworks.corpus.steps.registry import STEPS
from lmworks.recipe.loading.reference import reference

ADDED = '''
"""The step `shout`."""

from typing import Literal

from pydantic import Field

from lmworks.corpus.document import PerDocument, Step
from lmworks.corpus.steps.base import Context, StepOptions


class Shout(StepOptions):
    """Write each text in capitals."""

    step: Literal["shout"] = Field("shout", description="which step this is")
    ending: str = Field("!", description="what is appended to the text")

    def make(self, context: Context) -> Step:
        return PerDocument("shout", lambda document: document.with_text(document.text.upper() + self.ending))
'''
PROGRAM = """
import sys
from pathlib import Path
from lmworks.corpus import steps
steps.__path__.append(sys.argv[1])
from lmworks.corpus import prepare
from lmworks.documents import corpus_files
from lmworks.recipe.loading.load import load_recipe
from lmworks.recipe.loading.reference import reference
import pyarrow.parquet as pq

assert "## Shout" in reference() and "what is appended to the text" in reference()
resolved = load_recipe("recipe.yaml", sys.argv[2:], corpus_only=True)
out = Path("corpus")
report = prepare(resolved.recipe, out)
assert report.sources[0].steps[0].step == "shout"
for path in corpus_files(out, "train")["mine"]:
    print(*pq.read_table(path)["text"].to_pylist(), sep="\\n")
"""
RECIPE = """\
name: added
corpus:
  sources: [{name: mine, kind: jsonl, path: rows.jsonl, license: none}]
  steps: [{step: shout}]
  decontaminate: null
"""


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / "steps").mkdir(exist_ok=True)
    (folder / "steps" / "shout.py").write_text(ADDED, encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": f"text number {number}"}) for number in range(5)), encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, str(folder / "steps"), *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", check=False)


def test_a_file_adds_a_step_to_recipe_reference_and_engine(tmp_path: Path) -> None:
    done = run(tmp_path, "corpus.steps.shout.ending=.")
    assert not done.returncode, done.stderr
    lines = done.stdout.split("\n")
    assert {f"TEXT NUMBER {number}." for number in range(5)} >= {line for line in lines if line} != set()


def test_its_options_are_checked_like_any_key(tmp_path: Path) -> None:
    done = run(tmp_path, "corpus.steps.shout.endings=.")
    assert done.returncode and "has no key 'endings'; did you mean 'ending'?" in done.stderr


@pytest.mark.parametrize("name", STEPS)
def test_every_step_is_in_one_file_of_its_name_and_in_the_reference(name: str) -> None:
    options = STEPS[name]
    assert issubclass(options, StepOptions) and options.__module__ == f"{steps.__name__}.{name}"
    assert f"## {options.__name__}\n" in reference() and "make" in vars(options)
