"""`lmworks launch nodes` and `lmworks launch job` of a Slurm job whose ranks are those of `toy_rank`; its nodes are this machine."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from lmworks.launch.slurm import launch_on_nodes
from lmworks.launch.torchrun import read_hosts
from lmworks.recipe.schema.recipe import Recipe

if __name__ == "__main__":
    if sys.argv[1] != "nodes":
        os.execv(sys.executable, [sys.executable, "-P", "-m", "lmworks.cli.main", "launch", *sys.argv[1:]])
    parser = argparse.ArgumentParser()
    for name in ("nodes", "run_dir", "steps", "--least", "--spares", "--hosts", "--address"):
        parser.add_argument(name)
    given = parser.parse_args()
    run_dir = Path(given.run_dir)
    recipe = Recipe.model_validate_json((run_dir / "recipe.json").read_text())
    work = [given.run_dir, given.steps]
    launch = launch_on_nodes(recipe, run_dir, read_hosts(Path(given.hosts)), int(given.least), work, "127.0.0.1", int(given.spares))
    sys.exit(replace(launch, module="toy_rank").supervise())
