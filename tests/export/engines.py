"""Where the foreign engines are: in the folder that `engines.sh` filled, or where the environment says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_PLACES = {  # the variable, and the place below LMWORKS_ENGINES
    "LMWORKS_LLAMA_SERVER": "build/bin/llama-server",
    "LMWORKS_LLAMA_PYTHON": "bindings/bin/python",
    "LMWORKS_LLAMA_SOURCE": "llama.cpp",
    "LMWORKS_VLLM_PYTHON": "vllm/bin/python",
    "LMWORKS_COMPRESS_PYTHON": "compress/bin/python",
    "LMWORKS_FLA_PYTHON": "fla/bin/python",
    "LMWORKS_SLIME": "slime",
    "LMWORKS_SLIME_MEGATRON": "Megatron-LM",
}


def path_of(variable: str) -> Path | None:
    """Where the program or folder would be, if anything says so."""
    folder = os.environ.get("LMWORKS_ENGINES")
    found = os.environ.get(variable) or (folder and str(Path(folder) / _PLACES[variable]))
    if not found and variable == "LMWORKS_LLAMA_SERVER":
        found = shutil.which("llama-server")
    return Path(found) if found else None


def missing(engine: str) -> str | None:
    """Why `llama`, `vllm`, `compress` (llm-compressor), `fla` (flash-linear-attention) or `slime` (its sources) cannot be run."""
    for variable in _PLACES:
        if engine.upper() in variable:
            found = path_of(variable)
            if found is None or not found.exists():
                how = f"`sh tests/export/engines.sh DIR {engine}` installs it, then set LMWORKS_ENGINES=DIR"
                return f"{found or variable} is not there: {how}"
    return None


def engine(variable: str) -> Path:
    """The program or folder; the tests that ask for it are marked with what they need."""
    found = path_of(variable)
    assert found is not None and found.exists(), found
    return found


def ask(python: Path, script: str, question: Any, **environment: str) -> Any:
    """Run one of the scripts beside this file under a foreign Python; JSON in, JSON out."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | environment
    command = [str(python), str(_HERE / script)]
    done = subprocess.run(command, input=json.dumps(question), capture_output=True, encoding="utf-8", env=variables)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
