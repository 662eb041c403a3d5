"""What the shell completes behind commands: recipes, keys of recipes, stages, machines and runs. Nothing here loads torch."""

from __future__ import annotations

import glob
import os


def _beginning(words: list[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def recipes(incomplete: str) -> list[str]:
    """Shipped recipes, and YAML files and folders on disk."""
    from lmworks.recipe.load import shipped

    return _beginning(shipped(), incomplete) + _yaml_files(incomplete)


def ablations(incomplete: str) -> list[str]:
    """Shipped ablations, and YAML files and folders on disk."""
    from lmworks.recipe.load import shipped

    return _beginning(shipped("ablations"), incomplete) + _yaml_files(incomplete)


def topics(incomplete: str) -> list[str]:
    """Pages of the documentation."""
    from lmworks.cli.reference_commands import pages
    from lmworks.recipe.load import shipped_folder

    return _beginning([page.topic for page in pages(shipped_folder("docs"))], incomplete)


def _yaml_files(incomplete: str) -> list[str]:
    below = glob.glob(f"{glob.escape(incomplete)}*")
    found = [f"{path}/" if os.path.isdir(path) else path for path in below if os.path.isdir(path) or path.endswith((".yaml", ".yml"))]
    return sorted(found)


def keys(incomplete: str) -> list[str]:
    """Keys of a recipe for `--set`, one level at a time; NAME stands for the name of a list item."""
    from lmworks.recipe.keys import known_paths
    from lmworks.recipe.schema.recipe import Recipe

    depth = incomplete.count(".") + 1
    paths = list(known_paths(Recipe))
    inner = {".".join(path.split(".")[:depth]) for path in paths if path.count(".") >= depth}
    level = [path for path in {*paths, *inner} if path.count(".") == depth - 1]
    return sorted(f"{path}." if path in inner else f"{path}=" for path in _beginning(level, incomplete))


def stages(incomplete: str) -> list[str]:
    """Stages of a run."""
    from lmworks.run.start import HEADINGS

    return _beginning(list(HEADINGS), incomplete)


def clusters(incomplete: str) -> list[str]:
    """Shipped clusters, and GPUs with a number."""
    from lmworks.host.devices import GPUS
    from lmworks.recipe.load import shipped

    count = incomplete.partition("x")[0] if incomplete.partition("x")[0].isdecimal() else "1"
    return _beginning(list(dict.fromkeys([*shipped("clusters"), *(f"{count}x{name}" for name in GPUS)])), incomplete)


def runs(incomplete: str) -> list[str]:
    """Run directories: below the folder that was typed, or below runs/."""
    below = incomplete or "runs/"
    return sorted(path for path in glob.glob(f"{glob.escape(below)}*") if os.path.isdir(path))
