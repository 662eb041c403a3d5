"""What `lmworks show` prints, and the reference made from the types."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console
from typer.testing import CliRunner

from lmworks.cli import recipe_commands
from lmworks.cli.tables import recipe_tree
from lmworks.recipe.changes import as_tree
from lmworks.recipe.keys import flatten
from lmworks.recipe.load import load_recipe
from lmworks.recipe.reference import reference

Write = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]
app = typer.Typer()
recipe_commands.register(app)


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_every_value_is_shown_with_its_origin(write: Write) -> None:
    resolved = load_recipe(write(), ["seed=7"])
    out = io.StringIO()
    Console(file=out, width=1000).print(recipe_tree(resolved))
    text = out.getvalue()
    assert text.count("default") + text.count("recipe ") + text.count("preset ") + text.count("derived: ") + text.count("override ") >= len(
        resolved.origins
    )
    assert set(flatten(as_tree(resolved.recipe))) == set(resolved.origins)
    for line in (
        "seed: 7  override --set seed=7",
        "n_routed_experts: 16  preset glm-tiny",
        "run_dir: runs/small  derived: runs/ and the name",
        "momentum: 0.95  default",
    ):
        assert line in text
    assert "small.yaml:11" in next(line for line in text.splitlines() if "tokens: 2000000 tokens" in line)


def test_show_as_json(write: Write) -> None:
    path = str(write())
    shown = json.loads(printed("show", path, "--json", "--set", "seed=7"))
    assert shown["recipe"]["seed"] == 7
    assert shown["origins"]["seed"] == "override --set seed=7"
    assert shown["fingerprint"] == load_recipe(path, ["seed=7"]).fingerprint


def test_show_without_defaults(write: Write) -> None:
    text = printed("show", str(write()), "--changed")
    assert "preset: glm-tiny" in text
    assert not [line for line in text.splitlines() if line.endswith("  default")]
    shown = json.loads(printed("show", str(write()), "--changed", "--json"))
    whole = json.loads(printed("show", str(write()), "--json"))
    assert set(flatten(shown["recipe"])) == set(shown["origins"]) < set(whole["origins"])
    assert set(whole["origins"].values()) - set(shown["origins"].values()) == {"default"} and "default" not in shown["origins"].values()


def test_json_says_what_the_terminal_says(write: Write) -> None:
    """The note on a time, and the faults of sources, which are not here."""
    path = str(write())
    shown = json.loads(printed("show", path, "--json", "--time", "3d"))
    text = " ".join(printed("show", path, "--time", "3d").split())
    assert shown["note"].startswith("time is 3.0 days: ") and shown["faults"]
    assert all(" ".join(line.split()) in text for line in (shown["note"], *shown["faults"]))


def test_reference_is_up_to_date() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "recipe").iterdir()}
    assert written == reference(), "run: python -m lmworks.recipe.reference docs/recipe"


def test_reference_says_what_every_key_means() -> None:
    rows = [line for page in reference().values() for line in page.splitlines() if line.startswith("| `") and line.count(" | ") >= 3]
    assert len(rows) > 150
    assert not [row for row in rows if row.endswith("|  |")]
