"""Recipes: the shipped ones and generated ones, mutated, through the commands that read them."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import fuzz_mutate as mutate
import yaml
from fuzz_campaign import Case
from pydantic import BaseModel

from lmworks.errors import UserError
from lmworks.recipe.keys import nodes_of
from lmworks.recipe.load import shipped_folder
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Bytes, Duration, Seconds, Tokens
from tiny_run import RECIPE

PLAUSIBLE: dict[Any, list[Any]] = {
    int: [0, 1, 2, 3, 4, 8, 64, 512, 4096, 65_536, 1_000_000, 10**12, 10**18],
    float: [0.0, 1e-12, 1e-4, 0.1, 0.5, 1.0, 1.5, 100.0, 1e9, 1e300, 1e-300],
    bool: [True, False],
    str: ["auto", "a", "general", "text", "a/b", "../x", "http://x/y", "125M", "1B"],
    Tokens: ["1 tokens", "64 tokens", "512 tokens", "4Ki tokens", "1M tokens", "1B tokens", "15T", "1e18 tokens"],
    Bytes: ["1B", "1MB", "16GiB", "1e18 B"],
    Seconds: ["0.001 s", "30 s", "2 h", "1e9 days"],
    Duration: ["10%", "0%", "1e18%", "200 steps", "0 steps", "1e18 steps", "1 tokens", "1B tokens", "1e-40%"],
}


class Recipes:
    """Each case is a recipe (and a cluster for plans) with the words of a command."""

    def prepare(self) -> None:
        import reasoning_gym  # noqa: F401  which makes a folder of settings in the home of the user

        from lmworks.cli.main import command_tree
        from lmworks.plan import plan, render  # noqa: F401  before there is a limit

        folder = shipped_folder()
        self._texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.yaml"))] + [RECIPE.format(texts="texts")]
        self._trees = [yaml.safe_load(text) for text in self._texts] + [
            {"name": "g", "size": "30M", "corpus": {"sources": [{"name": "a", "kind": "text", "path": "a", "license": "MIT"}]}},
            {
                "name": "g",
                "model": {"hidden_size": 64, "num_hidden_layers": 2},
                "train": {
                    "phases": [
                        {
                            "name": "p",
                            "tokens": "1M tokens",
                            "mixture": {"a": 1.0},
                            "sequence_length": "64 tokens",
                            "global_batch_tokens": "512 tokens",
                        }
                    ]
                },
                "corpus": {"sources": [{"name": "a", "kind": "text", "path": "a", "license": "MIT"}]},
            },
        ]
        self._weights = [1 / (len(json.dumps(tree)) + 500) for tree in self._trees]  # reading takes most of the time
        self._clusters = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((folder / "clusters").glob("*.yaml"))]
        self._names = [path.stem for path in sorted((folder / "clusters").glob("*.yaml"))]
        self._keys = list(typed_paths(Recipe))
        self._command = command_tree()

    def begin(self) -> None:
        sys.setrecursionlimit(1000)

    def case(self, draw: Random) -> Case:
        sys.setrecursionlimit(5_000)  # to copy what is nested deeper than the tested code may follow
        try:
            return self._case(draw)
        finally:
            self.begin()

    def _case(self, draw: Random) -> Case:
        if draw.random() < 0.15:
            text = mutate.text(draw.choices(self._texts, [1 / (len(text) + 500) for text in self._texts])[0], draw, 4)
        else:
            tree = draw.choices(self._trees, self._weights)[0]
            if draw.random() < 0.5:
                tree = mutate.tree(tree, draw, draw.choice([1, 1, 1, 2, 3]))
            if isinstance(tree, dict) and draw.random() < 0.5:
                tree = copy.deepcopy(tree)
                for _ in range(draw.randint(1, 3)):
                    keys, annotation = draw.choice(self._keys)
                    plant(tree, keys.split("."), self._value(annotation, draw))
            text = written(tree, draw)
        words = ["show" if draw.random() < 0.5 else "plan", "recipe.yaml"]
        for _ in range(draw.choice([0, 0, 0, 1, 2])):
            words += ["--set", self._override(draw)]
        if draw.random() < 0.15:
            words += [
                "--size",
                draw.choice(["30M", "1B", "999999T", "0M", "0.0001k", "auto", "1e9", "10T", "1", "99999999999999999999B", *mutate.TEXTS]),
            ]
        if draw.random() < 0.05:
            words += ["--time", draw.choice(["10min", "1e99 h", "0 s", *mutate.TEXTS])]
        if draw.random() < 0.5:
            words.append("--json")
        case = {"recipe": text, "words": words}
        if words[0] == "plan" and draw.random() < 0.5:
            if draw.random() < 0.5:
                words += ["--cluster", draw.choice(self._names)]
            else:
                words += ["--cluster", "cluster.yaml"]
                case["cluster"] = written(mutate.tree(draw.choice(self._clusters), draw), draw)
        return case

    def _value(self, annotation: Any, draw: Random) -> Any:
        return mutate.scalar(draw) if draw.random() < 0.2 else plausible(annotation, draw)

    def _override(self, draw: Random) -> str:
        if draw.random() < 0.1:
            return str(
                draw.choice(
                    [*mutate.TEXTS, "=", "a", "a=", "=b", "a..b=1", "a.b.c.d=1", "train.phases.99.name=x", "model=[", "x" * 300 + "=1"]
                )
            )
        keys, annotation = draw.choice(self._keys)
        value = self._value(annotation, draw)
        return f"{keys}={value if isinstance(value, str) else json.dumps(value)}"

    def run(self, case: Case, folder: Path) -> str:
        (folder / "recipe.yaml").write_bytes(case["recipe"].encode("utf-8", "surrogatepass"))
        if "cluster" in case:
            (folder / "cluster.yaml").write_bytes(case["cluster"].encode("utf-8", "surrogatepass"))
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8", errors="replace")):
            try:
                with self._command.make_context("lmworks", list(case["words"])) as context:
                    self._command.invoke(context)
            except Exception as error:
                if hasattr(error, "format_message"):  # the parser's own
                    raise UserError(error.format_message().replace("\n", " ")) from None
                raise
        return "accepted"


def typed_paths(node: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that a recipe may have, with its type; 0 is the first of a list."""
    for key, info in node.model_fields.items():
        yield above + key, info.annotation
        for below in nodes_of(info.annotation):
            yield from typed_paths(below, f"{above}{key}.{'0.' if get_origin(info.annotation) is list else ''}")


def plausible(annotation: Any, draw: Random) -> Any:
    """A value of a type, not always one that the recipe would take."""
    origin, parts = get_origin(annotation), [part for part in get_args(annotation) if part is not type(None)]
    if origin is Literal:
        return draw.choice(get_args(annotation))
    if origin is Annotated:
        return plausible(parts[0], draw)
    if origin in (Union, types.UnionType):
        return None if draw.random() < 0.1 else plausible(draw.choice(parts), draw)
    if origin in (list, tuple):
        return [plausible(draw.choice([part for part in parts if part is not ...]), draw) for _ in range(draw.choice([0, 1, 2, 3]))]
    if origin is dict:
        return draw.choice([{}, {"a": 1.0}, {"a": 0.5, "b": 0.5}, {"a": plausible(parts[1], draw)}])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        required = {key: info.annotation for key, info in annotation.model_fields.items() if info.is_required() or draw.random() < 0.1}
        return {key: plausible(one, draw) for key, one in required.items()}
    return draw.choice(PLAUSIBLE.get(annotation, PLAUSIBLE[str]))


def plant(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    """Put a value at a path as far as there is something to put it into."""
    node: Any = tree
    for key in keys[:-1]:
        if isinstance(node, dict):
            node = node.setdefault(key, {})
        elif isinstance(node, list) and node:
            node = node[0]
    if isinstance(node, dict):
        node[keys[-1]] = value


@functools.lru_cache(1)
def _dumper() -> type[yaml.SafeDumper]:
    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return Dumper


def written(tree: Any, draw: Random) -> str:
    """A tree as YAML: in its own form, or as JSON, which is YAML too."""
    if draw.random() < 0.5:
        with contextlib.suppress(yaml.YAMLError, RecursionError):
            return str(yaml.dump(tree, Dumper=_dumper(), sort_keys=False, allow_unicode=True))
    try:
        return json.dumps(tree, ensure_ascii=draw.random() < 0.5)
    except (RecursionError, ValueError):
        return "name: deep"
