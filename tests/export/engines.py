"""Where the foreign engines are: in the folder that `engines.sh` filled, or where the environment says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_PLACES = {  # the variable, and the place below LMWORKS_ENGINES
    "LMWORKS_LLAMA_SERVER": "build/bin/llama-server",
    "LMWORKS_LLAMA_PYTHON": "bindings/bin/python",
    "LMWORKS_LLAMA_SOURCE": "llama.cpp",
    "LMWORKS_VLLM_PYTHON": "vllm/bin/python",
}


def engine(variable: str) -> Path:
    """The program or folder, or a skipped test that says how to get it."""
    folder = os.environ.get("LMWORKS_ENGINES")
    found = os.environ.get(variable) or (folder and str(Path(folder) / _PLACES[variable]))
    if not found and variable == "LMWORKS_LLAMA_SERVER":
        found = shutil.which("llama-server")
    if not found or not Path(found).exists():
        which = "vllm" if "VLLM" in variable else "llama"
        pytest.skip(
            f"{found or variable} is not there: `sh tests/export/engines.sh DIR {which}` installs it, then set LMWORKS_ENGINES=DIR"
        )
    return Path(found)


def ask(python: Path, script: str, question: Any, **environment: str) -> Any:
    """Run one of the scripts beside this file under a foreign Python; JSON in, JSON out."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | environment
    done = subprocess.run([str(python), str(_HERE / script)], input=json.dumps(question), capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
