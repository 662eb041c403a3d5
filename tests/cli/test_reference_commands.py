"""What scripts and coding assistants rely on: `lmworks schema`, `lmworks docs`, exit codes and --json outputs, as docs/commands.md says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from command import Lmworks
from hypothesis import given
from hypothesis import strategies as st

from lmworks.ablate.kinds import kinds
from lmworks.cli.main import command_tree
from lmworks.cli.reference_commands import SCHEMAS, pages, schema_of
from lmworks.errors import UserError
from lmworks.recipe.changes import as_tree
from lmworks.recipe.document import parse, parse_file
from lmworks.recipe.json_schema import DIALECT
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.layout import ActivationCheckpointing
from lmworks.recipe.schema.units import Bytes, Duration, Quantity, Seconds, Tokens
from lmworks.ui import exit_codes
from saved_run import save_run
from tiny_run import Tiny

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
NOT_RECIPES = {"models": "model", "clusters": "cluster", "ablations": "ablation"}


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = schema_of(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == DIALECT == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    return jsonschema.Draft202012Validator(schema)


def faults(found: jsonschema.Draft202012Validator, tree: Any) -> list[str]:
    return [f"{error.json_path}: {error.message[:200]}" for error in found.iter_errors(tree)]


def test_every_shipped_file_is_valid_by_its_schema() -> None:
    validators = {kind: validator(kind) for kind in SCHEMAS}
    seen = set()
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        kind = NOT_RECIPES.get(path.parent.name, "recipe")
        seen.add(kind)
        if kind == "recipe" and "kind" in (tree := parse_file(path).tree) and tree["kind"] in kinds():
            kind = "ablation"
        assert faults(validators[kind], parse_file(path).tree) == [], path
        if kind == "recipe" and not str(parse_file(path).tree.get("start_from")).startswith("models/"):  # every value, spelled out
            assert faults(validators[kind], as_tree(load_recipe(path).recipe)) == [], path
    assert seen >= {"recipe", *NOT_RECIPES.values()}
    ladder = {"recipe": "dense-125m", "sizes": {name: [f"size={name}"] for name in ("10M", "20M", "40M")}, "horizons": ["1B", "2B", 4]}
    assert faults(validators["ladder"], ladder) == []


BASE = "name: x\nmodel: {hidden_size: 64}\n"


@pytest.mark.parametrize(
    "text",
    [
        "modle: {}", "model: {hidden_sizes: 64}", "seed: one", "seed: 1.5", "model: []", "train: {phases: {}}", "layout: automatic",
        "train: {phases: [{name: a, tokens: 5 steps, mixture: {a: 1.0}}]}", "train: {phases: [{name: A, tokens: 5M, mixture: {a: 1.0}}]}",
        "corpus: {sources: [{name: a, kind: pdf, path: a}]}", "corpus: {steps: [{step: linez}]}", "train: {precision: fp8}",
        "evaluate: {benchmarks: [{form: cloze}]}", "checkpoints: {keep_last: -1}", "train: {activation_checkpointing: half}",
    ],
)  # fmt: skip
def test_what_the_schema_rejects_is_rejected_by_the_loader_and_the_other_way_round(text: str, tmp_path: Path) -> None:
    found = validator("recipe")
    assert faults(found, parse(BASE, "x").tree) == []
    lines = [line for line in BASE.splitlines() if line.partition(":")[0] != text.partition(":")[0]]
    whole = "\n".join([*lines, text]) + "\n"
    assert faults(found, parse(whole, "x").tree) != []
    (tmp_path / "x.yaml").write_text(whole, encoding="utf-8")
    with pytest.raises(UserError):
        load_recipe(tmp_path / "x.yaml")


NUMBER = st.sampled_from(["1", "12", "2.5", "1_000", "1e3", "0"])
GAP = st.sampled_from(["", " ", "  "])
WORD = st.sampled_from(["", "K", "Ki", "M", "B", "T", "MB", "GiB", "tokens", "token", "s", "min", "h", "days", "d", "%", "step", "m"])


@given(st.tuples(NUMBER, GAP, WORD, GAP, WORD).map("".join))
def test_the_patterns_of_quantities_are_those_of_their_texts(text: str) -> None:
    """What is read matches; what matches is read, but for values that are out of range or not whole."""
    kind: type[Quantity]
    for kind in (Tokens, Bytes, Seconds, Duration):
        try:
            kind._validate(text)
            said = None
        except ValueError as error:
            said = str(error)
        matches = any(re.search(form["pattern"], text) for form in kind.forms() if "pattern" in form)
        allowed = said is not None and re.search("whole number|too few|no time at all", said)
        assert matches == (said is None) or (matches and allowed), (kind.__name__, text, said)


@pytest.mark.parametrize(("text", "good"), [("full", 1), ("50%", 1), ("selective 50%", 1), ("none 50%", 0), ("half", 0), ("%", 0)])
def test_activation_checkpointing_in_the_schema(text: str, good: int) -> None:
    schema = {"anyOf": ActivationCheckpointing.forms()}
    assert jsonschema.Draft202012Validator(schema).is_valid(text) == bool(good)


def test_the_command_prints_the_schema_with_descriptions_units_and_defaults(lmworks: Lmworks) -> None:
    schema = json.loads(lmworks("schema").out)
    assert schema == schema_of("recipe")
    assert schema["properties"]["seed"] == {
        "default": 1, "type": "integer", "description": "random seed of the data order, the initial weights and the samples"
    }  # fmt: skip
    described = [
        (name, key) for name, node in [("", schema), *schema["$defs"].items()] for key, field in node.get("properties", {}).items()
        if "description" not in field and "const" not in field
    ]  # fmt: skip
    assert described == [], "keys without a description"
    assert lmworks("schema", "clusters").error == "there is no schema of 'clusters'; did you mean cluster?"


def test_pages_are_listed_printed_and_found_by_similar_names(lmworks: Lmworks) -> None:
    topics = json.loads(lmworks("docs", "--json").out)
    assert {"running", "commands", "python", "recipe", "recipe/train"} <= {page["topic"] for page in topics}
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    for name in ("running", "running.md", "docs/running.md", "Run, inspect and resume"):
        assert lmworks("docs", name).out == text
    assert json.loads(lmworks("docs", "running", "--json").out)["text"] == text
    assert lmworks("docs", "runing").error == "there is no page 'runing'; did you mean running?"
    assert "running" in lmworks("docs", "resume").error and "list the topics" in lmworks("docs", "../pyproject").error
    assert "running" in lmworks("docs").out


def test_all_pages_are_in_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["data-files"]
    for page in pages(ROOT / "docs"):
        file = f"docs/{page.file}"
        found = [to for to, names in patterns.items() if any(fnmatch(file, name) and file.count("/") == name.count("/") for name in names)]
        assert found == [f"share/lmworks/{Path(file).parent.as_posix()}"], f"{file} is not packaged; add its folder to pyproject.toml"


@pytest.mark.slow
def test_a_wheel_contains_the_pages(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name.partition(".data/data/")[2] for name in zipfile.ZipFile(wheel).namelist()}
    assert {f"share/lmworks/docs/{page.file}" for page in pages(ROOT / "docs")} <= names


def commands(command: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    if not hasattr(command, "commands"):
        return {" ".join(path): command}
    return {name: one for key, below in command.commands.items() if not below.hidden for name, one in commands(below, (*path, key)).items()}


def rows(heading: str) -> list[list[str]]:
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("| `")]


def test_the_page_names_every_command_with_and_without_json() -> None:
    found = commands(command_tree())
    with_json = {name for name, one in found.items() if any("--json" in option.opts for option in one.params)}
    documented = {name.strip("`") for name, *_ in rows("JSON")}
    assert documented == with_json | {"schema"}, "the table of docs/commands.md"
    acting = {name for name in found if name not in documented}
    said = {name for row in rows("Commands without --json") for name in re.findall(r"`([^`]+)`", row[0])}
    assert said == acting


def test_json_has_the_keys_that_the_page_says(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    save_run(tiny, tmp_path / "run")
    keys = {name.strip("`"): re.findall(r"`([^`]+)`", columns[1]) for name, *columns in rows("JSON")}
    run, place = tmp_path / "run", f"run_dir={tiny.run_dir}"
    called = {
        "show": (tiny.recipe,), "plan": (tiny.recipe, "--set", place, "--cluster", "8xh100"), "data batch": (tiny.run_dir, 3),
        "data plan": (tiny.run_dir,), "ckpt list": (run,), "ckpt verify": (run,), "ckpt show": (run, 30),
        "advise": ("--need", "facts"), "docs": (), "corpus sample": (tiny.run_dir,), "schema": (),
    }  # fmt: skip
    for name, arguments in called.items():
        done = lmworks(*name.split(), *arguments, *([] if name == "schema" else ["--json"]))
        assert done.code in (0, exit_codes.ExitCode.FAILED), (name, done.err)
        found = json.loads(done.out)
        one = found[0] if isinstance(found, list) else found
        assert keys[name] and set(keys[name]) <= set(one), (name, sorted(set(keys[name]) - set(one)))


def test_the_exit_codes_are_those_of_the_page_and_of_the_source() -> None:
    assert exit_codes.table() in PAGE, "run python -m lmworks.ui.exit_codes"
    assert list(exit_codes.ExitCode) == [0, 1, 2, 70, 75, 130, 141]
    wrong = []
    for path in (ROOT / "src" / "lmworks").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        wrong += [f"{path}: {found[0]}" for found in re.finditer(r"(typer\.Exit|sys\.exit)\(\d+\)|_fail\([^()]*, \d+,", text)]
    assert [line for line in wrong if "untrusted" not in line and "quantize/programs" not in line] == []
    assert typer.Exit(exit_codes.ExitCode.FAILED).exit_code == 1
