"""Some of the runs of `make doctor`, shortened: planted causes are named, healthy runs are silent. And what the campaign computes with."""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "doctor"))
import baselines
import matrix
import plants
import runs
from scenarios import Case

import recipe


def _parts(text: str, characters: int = 500) -> list[str]:
    """Documents of about so many characters, so that of the smallest source of a plant (10 kB) some are held out."""
    parts: list[str] = [""]
    for paragraph in text.split("\n\n"):
        if len(parts[-1]) > characters:
            parts.append("")
        parts[-1] += f"{paragraph}\n\n"
    return parts


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of the campaign whose text is of the standard library, so that nothing is fetched."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("doctor")
    names = sorted(topics)

    def source(name: str) -> dict[str, Any]:
        place = recipe.SOURCES.index(name)
        texts = [part for one in names[place :: len(recipe.SOURCES)] for part in _parts(topics[one])]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        domain = ("prose", "chat", "dialogue", "docs")[place]
        return {"name": name, "kind": "jsonl", "path": str(path), "domain": domain, "license": "PSF-2.0"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMWORKS_MACHINE", "peak=1e11,memory=16e9")
        patch.setattr(recipe, "_source", source)
        patch.setattr(recipe, "_from_files", lambda tree, root: None)
        runs.warm(folder)
        yield folder


def made(out: Path, name: str, dose: str = "clear", steps: int = 0, seed: int = 0) -> dict[str, Any]:
    """A run with a plant, of so many steps if that is not the plant's own choice, and what the doctor says of it."""
    plant = plants.PLANTS[name]
    chosen = plant.doses[dose]
    options = chosen.options | ({"stop": steps // 2 + 2} if steps and "stop" in chosen.options else {})
    shorter = replace(chosen, sets=lambda size: [*chosen.sets(size), *([size.budget(steps)] if steps else [])], options=options)
    case = Case(replace(plant, doses=plant.doses | {dose: shorter}), dose, "small", seed)
    record = runs.run_case(case, out)
    assert not record["outcome"].startswith("failed"), (out / record["folder"] / "output.txt").read_text(encoding="utf-8")
    return matrix._scored(record | matrix.judge(out / record["folder"]))


_SLOW = pytest.mark.slow
NAMED = (("E1", "clear", 24), pytest.param("E5-full", "strong", 24, marks=_SLOW), pytest.param("M1", "clear", 40, marks=_SLOW))
SILENT = (("H-base", 60), pytest.param("H-base", 120, marks=_SLOW), pytest.param("N20", 30, marks=_SLOW))


@pytest.mark.parametrize(("name", "dose", "steps"), NAMED)
def test_a_planted_cause_is_named(out: Path, name: str, dose: str, steps: int) -> None:
    found = made(out, name, dose, steps)
    assert found["named"] == plants.PLANTS[name].code, found["codes"] + found["unsure"]


@pytest.mark.parametrize(("name", "steps"), SILENT)
def test_a_healthy_run_is_silent(out: Path, name: str, steps: int) -> None:
    found = made(out, name, steps=steps)
    assert not found["training"] and found["named"] in (matrix.HEALTHY, matrix.UNSURE), found["codes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.name for one in plants.PLANTS.values() if one.starred and one.scenario in ("pretrain", "resumed")])
def test_starred_causes_are_named_at_full_length(out: Path, name: str) -> None:
    found = made(out, name, seed=2)
    if found["named"] != plants.PLANTS[name].code:
        lines = baselines.read_lines(out / found["folder"])
        columns = {key: [line[key] for line in lines if isinstance(line.get(key), int | float)] for line in lines for key in line}
        medians = {key: statistics.median(values) for key, values in columns.items() if values and not key.startswith("layers/")}
        pytest.fail(f"{name}: named {found['named']}, noted {found['notes']}, not judged {found['not_judged']}; medians: {medians}")


@pytest.mark.slow
def test_of_two_ranks_one_that_is_slow_from_the_start_is_named(out: Path) -> None:
    found = made(out, "S3-start")
    if "machine-oversubscribed" in found["codes"]:
        pytest.skip("other programs take the processors, so that both ranks are slow")
    assert found["named"] == "S3-start", (found["codes"], found["unsure"])


OTHERS = {"cpu_share": 1.0, "plain": {"problems": [], "unsure": []}}


HOOKED = {
    name: (plant.name, dose)
    for plant in plants.PLANTS.values()
    for dose, chosen in plant.doses.items()
    for name, _ in (*chosen.hooks, *chosen.options.get("hooks", ()))
}


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKED)
def test_every_hook_fits_the_code_that_it_changes(out: Path, hook: str) -> None:
    name, dose = HOOKED[hook]
    made(out, name, dose, steps=12)


def row(plant: str, named: str, **more: Any) -> dict[str, Any]:
    code = plants.PLANTS[plant].code
    known = {"plant": plant, "code": code, "named": named, "dose": "clear", "training": [], "first": None, "folder": plant}
    return known | {"right": named == code, "anywhere": False, "trainproof": "PASS", "six_sigma": False} | OTHERS | more


def test_rates_count_runs_of_other_causes_against_precision() -> None:
    rows = [row("A1", "A1"), row("A1", "A1"), row("A1", matrix.UNSURE), row("A2", "A1"), row("H-base", "A1", training=["x"])]
    found = matrix.rates(rows, "A1")
    assert found["precision"][0] == 0.5 and found["recall"][0] == pytest.approx(2 / 3) and found["runs"] == 3
    assert found["f1"] == pytest.approx(2 * 0.5 * (2 / 3) / (0.5 + 2 / 3))
    table = matrix.tables(rows)
    assert table["silent"]["training_causes"] == 1 and table["abstained"] == {"A1": 1, "A2": 0}
    assert table["confusions"]["A2"] == {"A1": 1} and table["macro_f1"] == pytest.approx(found["f1"] / 2)


def test_intervals_are_wilsons() -> None:
    assert matrix.wilson(0, 60)[2] == pytest.approx(0.0602, abs=1e-4)
    assert matrix.wilson(9, 10)[1:] == (pytest.approx(0.5958, abs=1e-4), pytest.approx(0.9821, abs=1e-4))
    assert math.isnan(matrix.wilson(0, 0)[0])


def test_a_machine_that_is_shared_in_truth_is_not_held_against_the_doctor() -> None:
    said = {"problems": ["machine-oversubscribed"], "unsure": [], "training": [], "cpu_share": 0.3}
    assert matrix._scored(row("H-base", "") | said)["right"]
    assert not matrix._scored(row("H-base", "") | said | {"cpu_share": 0.95})["right"]
    assert matrix._scored(row("S2", "") | said)["named"] == "S2"


def test_six_sigma_sees_a_jump_and_no_trend() -> None:
    falling = [{"train/loss": 6.0 - 0.01 * step + 0.05 * math.sin(step), "optim/grad_norm": 1.0} for step in range(300)]
    assert not baselines.six_sigma(falling)
    assert baselines.six_sigma([*falling, {"train/loss": 9.0, "optim/grad_norm": 1.0}])
    assert baselines.six_sigma([*falling, {"train/loss": None, "optim/grad_norm": 1.0}])


def test_every_plant_has_its_codes_and_every_dose_a_recipe(out: Path) -> None:
    from lmworks.recipe.load import load_recipe

    path = out / "data" / "small-base.yaml"
    for plant in plants.PLANTS.values():
        assert plant.silent or plant.code in plants.CODES
        for dose in plant.doses.values():
            if dose.data == "base":
                load_recipe(path, dose.sets(recipe.SIZES["small"]))


def test_keys_of_runs_depend_on_what_is_planted() -> None:
    one, other = (Case(plants.PLANTS["B2"], dose, "small", 0) for dose in ("weak", "clear"))
    assert runs.key_of(one, "s") == runs.key_of(one, "s") != runs.key_of(other, "s") != runs.key_of(other, "t")
    assert len({case.name for case in runs.cases()}) == sum(1 for _ in runs.cases()) > 1000
