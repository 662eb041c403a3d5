"""`LMWORKS_MACHINE` and the locale, as commands meet them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import Lmworks

from lmworks.cli.options import device_of
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.recipe.load import shipped_folder


def test_a_recipe_is_resolved_and_planned_for_the_machine_that_is_said(
    monkeypatch: pytest.MonkeyPatch, lmworks: Lmworks, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # a run of the quickstart in this directory has measured how many threads pay
    for cores, memory in ((3, 48), (2, 96)):
        monkeypatch.setenv(machine.VARIABLE, f"cores={cores},memory={memory * 2**30},peak=2e12,bf16=yes")
        assert json.loads(lmworks("show", "quickstart", "--json").out)["recipe"]["threads"] == cores
        planned = json.loads(lmworks("plan", "quickstart", "--json").out)["cluster"]
        assert planned["device"] == f"{cores} CPU threads"
        assert (planned["memory_gib"], planned["tflops"], planned["bf16"]) == (memory, 2.0, True)
    monkeypatch.setenv(machine.VARIABLE, "bf16=no,peak=2e12")
    assert json.loads(lmworks("plan", "quickstart", "--json").out)["cluster"]["bf16"] is False


def test_a_wrong_word_ends_every_command(monkeypatch: pytest.MonkeyPatch, lmworks: Lmworks) -> None:
    monkeypatch.setenv(machine.VARIABLE, "core=3")
    done = lmworks("report", "nowhere")  # which asks the machine nothing
    assert done.error.startswith("LMWORKS_MACHINE: 'core' is not known; ") and done.err.count("\n") == 1


def test_what_a_terminal_cannot_show_ends_nothing(tmp_path: Path) -> None:
    """Standard output in ASCII, on 20 columns: a text becomes question marks, JSON becomes escapes, and no line is cut."""
    path = tmp_path / "mine.yaml"
    path.write_text((shipped_folder() / "quickstart.yaml").read_text(encoding="utf-8") + "run_dir: läufe\n", encoding="utf-8")
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "20", "TERM": "dumb"}
    command = [sys.executable, "-m", "lmworks.cli.main", "show", str(path)]
    told = [subprocess.run([*command, *words], env=environment, capture_output=True, check=True).stdout for words in ([], ["--json"])]
    assert b"run_dir: l?ufe" in told[0]
    assert json.loads(told[1])["recipe"]["run_dir"] == "läufe"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (str(device_of(None)), str(device_of("cuda:1")), str(device_of("cpu"))) == ("cuda", "cuda:1", "cpu")
    for text in ("cuda:2", "tpu", "meta"):
        with pytest.raises(UserError, match="is no device of this machine, which has cpu, cuda:0, cuda:1"):
            device_of(text)
