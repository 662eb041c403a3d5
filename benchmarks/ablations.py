"""Real A/A ablations on the tests' tiny run: how often equal arms get a verdict. At most 5% of them should.

    python benchmarks/ablations.py runs/aa --count 40 --jobs 2
    python benchmarks/ablations.py runs/aa --count 40 --residuals tests/ablate/residuals.json

Every ablation has two copies of the recipe (`kind: noise`: equal data order, other initial weights) and three seeds of its own, so no
run is in two ablations. It resumes where it stopped. Prints a row per ablation, and at the end how many have a verdict. `--residuals`
writes the values of all runs, from which the simulations of tests/ablate draw their noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import lmworks  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)
from lmworks.ablate.ablate import Options, run_ablation
from lmworks.io.files import read_json, write_json, write_text
from lmworks.recipe.load import load_recipe
from lmworks.run.runner import run_stages
from lmworks.ui.terminal import console
from tiny_run import RECIPE, write_texts

SEEDS = 3
FILE = """kind: noise
recipe: {recipe}
budget: {budget}
seeds: {seeds}
out: {out}
"""


def prepare(place: Path) -> Path:
    """The tiny recipe, with its corpus, tokenizer and shards made once; all ablations take links to them."""
    recipe = place / "tiny.yaml"
    if not recipe.exists():
        write_text(recipe, RECIPE.format(texts=write_texts(place / "texts")) + f"run_dir: {place / 'run'}\n")
    run_stages(load_recipe(recipe), last="shards", on_event=lambda event: None, resume_command="this command")
    return recipe


def ablation(place: Path, recipe: Path, number: int, budget: str, jobs: int) -> dict[str, object]:
    """The results of the ablation with this number."""
    file, out = place / f"aa-{number:03d}.yaml", place / f"aa-{number:03d}"
    seeds = [number * SEEDS + index for index in range(1, SEEDS + 1)]
    write_text(file, FILE.format(recipe=recipe, budget=budget, seeds=seeds, out=out))
    if (out / "ablation.json").exists() and not (found := read_json(out / "ablation.json"))["unfinished"]:
        return found  # type: ignore[no-any-return]
    return run_ablation(str(file), Options(jobs=jobs), lambda event: None, console.print)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path, help="directory of the ablations")
    parser.add_argument("--count", type=int, default=40, help="number of ablations")
    parser.add_argument("--budget", default="4096 tokens", help="training tokens of each run")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--residuals", type=Path, help="write the values of all runs to this file")
    options = parser.parse_args()
    recipe = prepare(options.place.resolve())
    with_verdict, rows = 0, []
    print("| ablation | verdicts | smallest p after Holm |\n|---|---|---|")
    for number in range(options.count):
        found = ablation(options.place.resolve(), recipe, number, options.budget, options.jobs)
        verdicts: list[dict[str, float]] = found["verdicts"]  # type: ignore[assignment]
        shown = sum(one["verdict"] != "no difference shown" for one in verdicts)
        with_verdict += shown > 0
        print(f"| {number} | {shown} | {min(one['p'] for one in verdicts):.3f} |", flush=True)
        measures: dict[str, dict[str, dict[str, dict[str, float]]]] = found["measures"]  # type: ignore[assignment]
        for arm in found["arms"]:  # type: ignore[attr-defined]
            rows += [{name: one["values"][arm][str(seed)] for name, one in measures.items()} for seed in found["seeds"]]  # type: ignore[attr-defined]
    print(f"\n{with_verdict} of {options.count} A/A ablations have a verdict")
    if options.residuals:
        how = f"python benchmarks/ablations.py PLACE --count {options.count} --budget '{options.budget}' --residuals FILE"
        write_json(options.residuals, {"how": how, "runs": json.loads(json.dumps(rows))})


if __name__ == "__main__":
    main()
