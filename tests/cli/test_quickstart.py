"""`recipes/quickstart.yaml` as it is shipped, run by the command line from raw text to the exported model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmworks.checkpoint import listing
from lmworks.io.files import read_json

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
# Its ten minutes made short. Everything else is the recipe's own: sources, tokenizer, batches, schedules, rope, tasks, formats.
SHORT = (
    "threads=1", "time=null", "model.num_hidden_layers=2", "train.phases.general.tokens=32Ki", "train.phases.anneal.tokens=8Ki",
    "tune.tokens=4Ki",
    "evaluate.benchmark_items=1", "evaluate.task_items=1",
)  # fmt: skip
STEPS = 8 + 2  # of 4Ki tokens in both phases


@pytest.mark.slow  # a minute
def test_the_shipped_recipe_runs_to_its_end_without_a_network(tmp_path: Path) -> None:
    """The standard library is what is left of its sources; the others are optional."""
    pytest.importorskip("transformers", reason="transformers is not installed (extra: export)")
    run = tmp_path / "run"
    sets = [word for value in (f"run_dir={run}", *SHORT) for word in ("--set", value)]
    away = {"LMWORKS_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}  # no wheel is at hand, none comes
    command = [sys.executable, "-m", "lmworks.cli.main", "run", str(RECIPE), *sets]
    done = subprocess.run(command, env=os.environ | away, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "Now talk to it:" in done.stdout

    report = read_json(run / "corpus" / "report.json")
    assert [one["name"] for one in report["sources"] if one["train"]["documents"]] == ["code", "docs"]
    assert set(report["missing"]) == {"speeches", "facts", "chats", "stories", "stories-ja", "stories-zh"}
    assert listing.step_of(listing.directories(run / "checkpoints")[-1]) == STEPS
    assert read_json(run / "tune" / "data" / "manifest.json")["data"]["tasks"]["train"]["conversations"] > 1000
    models = read_json(run / "evaluate" / "results.json")["models"]
    assert list(models) == ["base", "tuned"]
    for model in models.values():
        assert set(model["bits_per_byte"]) == {"answers: tasks", "code", "docs", "overall"}
        assert {score["set"] for score in model["scores"].values()} >= {"aiw", "syllogism"}
        assert len(model["samples"]) > 0
    exported = read_json(run / "export" / "parity.json")
    assert (exported["model"], exported["architecture"], exported["gguf_architecture"]) == ("tuned", "Glm4MoeForCausalLM", "glm4moe")
    assert (run / "export" / "huggingface" / "model.safetensors").is_file() and (run / "export" / "gguf" / "model.gguf").is_file()
    assert (run / "report.html").is_file()
