"""Recipes from Python: all forms resolve to what the command resolves, and plans and refusals are those of the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Lmworks

import lmworks
from lmworks.recipe.keys import flatten
from lmworks.recipe.load import load_recipe as load_as_command
from lmworks.watch.ledger import RunLock
from tiny_run import Tiny

CHANGES: dict[str, Any] = {
    "seed": 7, "model.hidden_size": 64, "model.moe": {"n_routed_experts": 8}, "train.phases.long.tokens": "6Ki",
    "train.phases.general.mixture": {"code": 0.5, "docs": 0.5}, "optimizer.learning_rate": 1e-05, "name": "a.larger-one",
    "evaluate.questions": ["yes", "é: # '\"\n*"], "train.compile": False, "tune.lora": None,
}  # fmt: skip
AS_TEXT = [
    "seed=7", "model.hidden_size=64", "model.moe.n_routed_experts=8", "train.phases.long.tokens=6Ki",
    "train.phases.general.mixture.code=0.5", "train.phases.general.mixture.docs=0.5", "optimizer.learning_rate=1e-5",
    "name=a.larger-one", r'''evaluate.questions=[yes, "é: # '\"\n*"]''', "train.compile=false", "tune.lora=null",
]  # fmt: skip


def test_every_form_of_recipe_and_override_is_what_the_command_reads(tiny: Tiny) -> None:
    expected = load_as_command(tiny.recipe, AS_TEXT)
    text = tiny.recipe.read_text(encoding="utf-8")
    forms = [tiny.recipe, str(tiny.recipe), text, yaml.safe_load(text)]
    for one in forms:
        assert lmworks.load_recipe(one, CHANGES).config == expected.recipe
        assert lmworks.load_recipe(one, AS_TEXT).fingerprint == expected.fingerprint
    nested: dict[str, Any] = {"model": {"hidden_size": 64, "moe": {"n_routed_experts": 8}}, "seed": 7}
    rest = {key: value for key, value in CHANGES.items() if not key.startswith(("model.", "seed"))}
    assert lmworks.load_recipe(tiny.recipe, rest, **nested).config == expected.recipe
    recipe = lmworks.load_recipe(tiny.recipe, CHANGES)
    assert recipe.values()["model.moe.n_routed_experts"] == 8 and recipe.values()["model.moe.num_experts_per_tok"] == 2
    assert recipe.origin("seed").kind == "override" and recipe.origin("threads").kind == "recipe"


def test_show_and_plan_are_those_of_the_commands(lmworks_command: Lmworks, tiny: Tiny) -> None:
    overrides = ["train.phases.long.tokens=1M", f"run_dir={tiny.run_dir}"]
    options = [word for one in overrides for word in ("--set", one)]
    recipe = lmworks.load_recipe(tiny.recipe, overrides)
    assert recipe.values() == flatten(json.loads(lmworks_command("show", tiny.recipe, *options, "--json").out)["recipe"])
    for cluster, mfu, to in ((None, None, "pretrain"), ("8xh100", 0.25, None)):
        more = ["--to", to] if cluster is None else ["--cluster", cluster, "--mfu", str(mfu)]
        done = lmworks_command("plan", tiny.recipe, *options, *more, "--json")
        planned = recipe.plan(cluster, mfu=mfu, to=to)
        assert planned.plan.later_stages == (() if to else ("tune",))
        assert mfu in (None, planned.plan.mfu)
        assert json.loads(done.out) == json.loads(json.dumps(planned.to_json()))
        assert (done.code == 0) == (not planned.refusals) and planned.seconds > 0
    assert recipe.plan("8xh100").dollars > 0
    timed = json.loads(lmworks_command("plan", tiny.recipe, *options, "--time", "2min", "--json").out)
    assert json.loads(json.dumps(lmworks.load_recipe(tiny.recipe, overrides, time="2min").plan().to_json())) == timed


def test_what_the_command_would_refuse_is_refused_with_the_same_words(
    lmworks_command: Lmworks, tiny: Tiny, mine: Callable[[str, str], Path]
) -> None:
    short = mine(f"path: {tiny.texts}/docs.jsonl", "path: nowhere.jsonl")
    refused = lmworks_command("run", short).error
    assert _message(lambda: lmworks.load_recipe(short).run(quiet=True)) == refused and "nowhere.jsonl" in refused
    with RunLock(tiny.run_dir), pytest.raises(lmworks.UserError, match=r"is in use by process \d+ on "):
        lmworks.load_recipe(tiny.recipe, run_dir=str(tiny.run_dir)).run(to="shards")
    with pytest.raises(lmworks.UserError, match=r"'shard' is not a stage; did you mean shards\?"):
        lmworks.load_recipe(tiny.recipe).run(to="shard")
    with pytest.raises(lmworks.UserError, match=r"^to 'shard' is not a stage; did you mean shards\?"):
        lmworks.load_recipe(tiny.recipe).plan(to="shard")
    assert lmworks_command("plan", short, "--mfu", "7").error == _message(lambda: lmworks.load_recipe(short).plan(mfu=7))


def _message(call: Callable[[], object]) -> str:
    with pytest.raises(lmworks.UserError) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        ("quickstarts", {}, "did you mean quickstart?"),
        ("name: x\nmodle: {}\n", {}, "<text>:2: the top has no key 'modle'; did you mean 'model'?"),
        ("name: x\nseed: [1\n", {}, "<text>:3: not readable as YAML"),
        ({"name": "x", "model": {"hidden_sizes": 3}}, {}, "has no key 'hidden_sizes'; did you mean 'hidden_size'?"),
        ({"name": {1, 2}}, {}, "a recipe has maps, lists, texts, numbers, true, false and null only"),
        ({"name": float("nan")}, {}, "a recipe has maps, lists"),
        ("quickstart", {"seed": object()}, "seed has a value that no recipe can have"),
        ("quickstart", {"seed": float("inf")}, "seed has a value that no recipe can have"),
        ("quickstart", {"seed=1\nname": 2}, "is no key of a recipe; write overrides as {'a.b': value}"),
        ("quickstart", {"seed": "[1"}, "seed: input should be a valid integer"),
        ("quickstart", "seed", "'seed' is not of the form a.b=c"),
        ("quickstart", {"train.phases.nowhere.tokens": 3}, "there is no item 'nowhere' here"),
        ("quickstart", {"seed": [[]] * 3 + [[[[[[[[]]]]]]]]}, "seed: Input should be a valid integer"),
    ],
)
def test_mistakes_are_one_line_with_the_remedy(recipe: Any, overrides: Any, said: str) -> None:
    message = _message(lambda: lmworks.load_recipe(recipe, overrides))
    assert said in message and "\n" not in message
