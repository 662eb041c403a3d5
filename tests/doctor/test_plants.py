"""Some of the runs of `make doctor`, shortened: planted causes are named and healthy runs are silent. And what the campaign computes with."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "doctor"))
import baselines
import matrix
import plants
import recipe
import runs
from scenarios import Case


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of the campaign whose text is of the standard library, so that nothing is fetched."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("doctor")
    names = sorted(topics)

    def source(name: str) -> dict[str, Any]:
        place = recipe.SOURCES.index(name)
        texts = [topics[one] for one in names[place :: len(recipe.SOURCES)]]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        domain = ("prose", "chat", "dialogue", "docs")[place]
        return {"name": name, "kind": "jsonl", "path": str(path), "domain": domain, "license": "PSF-2.0"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMWORKS_MACHINE", "peak=1e11,memory=16e9")
        patch.setattr(recipe, "_source", source)
        patch.setattr(recipe, "_from_files", lambda tree, root: None)
        recipe.prepare(folder, recipe.SIZES["small"], "base")
        yield folder


def made(out: Path, name: str, dose: str = "clear", steps: int = 0, seed: int = 0) -> dict[str, Any]:
    """A run with a plant, of so many steps if that is not the plant's own choice, and what the doctor says of it."""
    plant = plants.PLANTS[name]
    chosen = plant.doses[dose]
    shorter = replace(chosen, sets=lambda size: [*chosen.sets(size), *([size.budget(steps)] if steps else [])])
    case = Case(replace(plant, doses=plant.doses | {dose: shorter}), dose, "small", seed)
    record = runs.run_case(case, out)
    assert not record["outcome"].startswith("failed"), (out / record["folder"] / "output.txt").read_text(encoding="utf-8")
    return matrix._scored(record | matrix.judge(out / record["folder"]))


NAMED = (("B1", "clear", 0), ("E5-full", "strong", 30), ("S1", "strong", 50))
