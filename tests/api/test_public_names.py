"""`import lmworks`: a dozen names at most, imported on first use, typed for the user's type checker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lmworks

HEAVY = {"torch", "numpy", "pandas", "pyarrow", "pydantic", "yaml", "typer", "rich", "tokenizers", "transformers"}
SNIPPET = Path(__file__).with_name("user_snippet.py")
PROGRAM = """
import sys, json, lmworks
before = sorted(sys.modules)
lmworks.load_recipe, lmworks.UserError, lmworks.Interrupted, lmworks.Recipe, lmworks.open_run
print(json.dumps([before, sorted(sys.modules)]))
"""


def test_the_import_loads_nothing_and_recipes_and_runs_load_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, encoding="utf-8", check=True)
    first, later = map(set, json.loads(done.stdout))
    assert not HEAVY & first and {name for name in first if name.startswith("lmworks.")} == set()
    assert "torch" not in later


def test_a_dozen_names_and_each_is_there() -> None:
    assert len(lmworks.__all__) < 12 and set(lmworks.__all__) == set(lmworks._MODULES) and set(lmworks.__all__) <= set(dir(lmworks))
    for name in lmworks.__all__:
        found = getattr(lmworks, name)
        assert found.__module__ == f"lmworks.{lmworks._MODULES[name]}" and found.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'load_modell'"):
        lmworks.load_modell  # type: ignore[attr-defined]  # noqa: B018


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(lmworks.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
def test_a_users_program_passes_strict_mypy(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_bytes(SNIPPET.read_bytes())
    strict = ["--strict", "--config-file=", "--cache-dir", str(tmp_path / "cache"), "program.py"]
    done = subprocess.run([sys.executable, "-m", "mypy", *strict], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout
    (tmp_path / "program.py").write_text(SNIPPET.read_text(encoding="utf-8").replace("max_new_tokens=8", 'max_new_tokens="8"'))
    done = subprocess.run([sys.executable, "-m", "mypy", *strict], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 1 and 'incompatible type "str"; expected "int"' in done.stdout
