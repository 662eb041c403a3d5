"""What a changed recipe does to the state that a run has saved: it fits, it begins where it is new, or the change is refused by name before
anything is written."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import torch
import yaml

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.recipe.changes import as_tree, changed_keys, rule
from lmworks.recipe.keys import nodes_of
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Duration, Tokens
from lmworks.run.checkpoint_commands import prune, rollback
from lmworks.train.build import build_model, identity, with_optimizer
from lmworks.train.saving import TrainingState
from lmworks.watch.ledger import read_ledger
from lmworks.weights.run_models import load_model
from saved_run import save_run
from tiny_run import BRIEF, Tiny, checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SECTIONS = ("seed", "threads", "shards", "model", "optimizer", "train", "checkpoints", "stability", "metrics")
OTHERS: dict[Any, list[Any]] = {
    bool: [True, False], int: [0, 1, 2, 3, 4, 8], float: [0.0, 0.5, 2.0], Tokens: ["64 tokens", "512 tokens"], Duration: ["2 steps", "20%"],
    type(None): [None],
}  # fmt: skip
KEPT = ("train.save_every=1 steps", "checkpoints.keep_last=9", "tune=null")


def others(annotation: Any) -> list[Any]:
    """Some values of a type."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return [value for part in get_args(annotation) for value in others(part)]
    return OTHERS.get(annotation, []) if isinstance(annotation, type) else []


def keys(node: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that the recipe may have, with its type."""
    for key, info in node.model_fields.items():
        yield above + key, info.annotation
        for below in nodes_of(info.annotation):
            yield from keys(below, f"{above}{key}.{'general.' if get_origin(info.annotation) is list else ''}")


def state_of(recipe: Recipe) -> TrainingState:
    return TrainingState(recipe, *with_optimizer(recipe, build_model(recipe)))


def saved_by(recipe: Recipe) -> dict[str, tuple[Any, ...]]:
    """The names, shapes and types of the tensors in a checkpoint, without those that may be absent."""
    parts = {part: tensors for part, tensors in state_of(recipe).tensors().items() if part not in TrainingState.OPTIONAL}
    return {f"{part}/{name}": (one.shape, one.dtype) for part, tensors in parts.items() for name, one in tensors.items()}


def test_a_key_that_may_change_leaves_a_checkpoint_that_fits(tiny: Tiny) -> None:
    """Every key of a recipe to which another value can be given on its own."""
    before = tiny.resolve().recipe
    tensors, own, tried, wrong = saved_by(before), identity(before), set(), []
    for key, annotation in keys(Recipe):
        for value in others(annotation) if key.startswith(SECTIONS) else ():
            try:
                after = tiny.resolve(f"{key}={value if isinstance(value, str) else json.dumps(value)}").recipe
            except UserError:
                continue
            changed = [one for change in changed_keys(before, after) for one in change.keys]
            if not changed:
                continue
            tried.add(key)
            fits = not listing.differences(identity(after), own) and saved_by(after) == tensors
            if fits == (rule(changed) == "never"):
                wrong.append((key, value, fits))
            if not isinstance(value, str):
                break  # one number is like another
    assert not wrong
    assert len(tried) > 120 and {"model.moe.n_routed_experts", "model.rope.theta", "optimizer.ema_decay", "train.precision"} <= tried


@pytest.fixture(scope="module")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A run whose last three steps are to be trained again, from step 4."""
    run = tiny.copy(tmp_path_factory.mktemp("trained") / "run")
    run.walk(*BRIEF, *KEPT, last="pretrain")
    rollback(run.run_dir, "base", 4, None)
    return run


def test_averages_that_are_switched_on_begin_with_the_weights(trained: Tiny, tmp_path: Path) -> None:
    run = trained.copy(tmp_path / "run")
    run.walk(*BRIEF, *KEPT, "optimizer.ema_decay=0.5", last="pretrain", allow=["optimizer.ema_decay"])
    before = checkpoint(run.run_dir, 4)
    after = {step: checkpoint(run.run_dir, step) for step in (5, 6, 7)}
    names = [name.removeprefix("average/") for name in after[7] if name.startswith("average/")]
    assert len(names) > 10
    for name in names:
        expected = before[f"model/{name}"]
        for step in (5, 6, 7):
            expected = expected.lerp(after[step][f"model/{name}"], 0.5)
            assert torch.allclose(after[step][f"average/{name}"], expected, atol=1e-7), (name, step)
    assert torch.equal(load_model(run.run_dir, "base").head.weight, after[7]["average/head.weight"])
    rollback(run.run_dir, "base", 4, None)
    assert torch.equal(load_model(run.run_dir, "base").head.weight, before["model/head.weight"]), "the run has averages, step 4 has none"


def test_a_loss_scale_that_is_switched_on_begins_as_in_a_new_run(trained: Tiny, tmp_path: Path) -> None:
    run = trained.copy(tmp_path / "run")
    run.walk(*BRIEF, *KEPT, "train.precision=fp16", last="pretrain", allow=["train.precision"])
    assert not any(name.startswith("scaler/") for name in checkpoint(run.run_dir, 4))
    found = checkpoint(run.run_dir, 7)
    assert int(found["scaler/good_steps"]) == 3 and float(found["scaler/scale"]) == 2.0**16


def test_a_rollback_to_before_a_change_begins_them_again(tiny: Tiny) -> None:
    state = state_of(tiny.resolve("optimizer.ema_decay=0.5", "train.precision=fp16").recipe)
    assert state.optimizer.ema is not None and state.scaler is not None
    parts = state.tensors()
    for one in (*parts["average"].values(), *parts["scaler"].values()):
        one.fill_(7)
    state.loaded({name: tensors for name, tensors in parts.items() if name not in TrainingState.OPTIONAL})
    assert all(torch.equal(parts["average"][name], one) for name, one in state.optimizer.ema.parameters.items())
    assert parts["scaler"] == {"scale": 2.0**16, "good_steps": 0}
    parts["scaler"]["scale"].fill_(7)
    state.loaded(parts)
    assert parts["scaler"]["scale"] == 7, "what was loaded stays"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.intermediate_size=96", r"were trained with: model\.intermediate_size \(64 -> 96\); no --allow permits that, since"),
        (
            "optimizer.kind=adamw",
            r"state of another optimizer: optimizer\.kind \(muon -> adamw\); no --allow permits that: undo it, or choose another run_dir "
            r"and set start_from to this run, to begin with its weights$",
        ),
    ],
)
@pytest.mark.parametrize("allowed", [False, True])
def test_what_fits_no_checkpoint_is_refused_first(trained: Tiny, change: str, said: str, allowed: bool) -> None:
    before = {path.name: path.read_bytes() for path in trained.run_dir.iterdir() if path.is_file()}
    with pytest.raises(UserError, match=said) as refused:
        trained.walk(*BRIEF, *KEPT, change, last="pretrain", allow=[change.partition("=")[0]] if allowed else [])
    assert "continue with --allow" not in str(refused.value)
    after = {path.name: path.read_bytes() for path in trained.run_dir.iterdir() if path.is_file()}
    assert after["resolved.json"] == before["resolved.json"]
    assert [one["event"] for one in read_ledger(trained.run_dir / "ledger.jsonl")].count("recipe_changed") == 0


def test_a_run_without_pretraining_may_change_its_optimizer_and_is_pruned(tiny: Tiny, tmp_path: Path) -> None:
    """Its base model has no state of an optimizer, and no steps of its own."""
    save_run(tiny, tmp_path / "given")
    tree = {
        "name": "tuned", "threads": 1, "start_from": str(tmp_path / "given"), "run_dir": str(tmp_path / "run"),
        "tune": as_tree(tiny.resolve("tune.tokens=1Ki").recipe)["tune"], "optimizer": {"learning_rate": 0.01, "adam_learning_rate": 0.01},
        "train": {"precision": "fp32", "compile": False, "micro_batch_sequences": 4, "save_every": "1 steps", "validate_every": "100%"},
        "checkpoints": {"keep_last": 1, "keep_every": "50%"}, "evaluate": {"references": False},
    }  # fmt: skip
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    run = Tiny(recipe, tmp_path / "run")
    run.walk(last="tune")
    for model, saved in (("base", [0]), ("tuned", [2, 4])):
        place = run.run_dir / ("tune/checkpoints" if model == "tuned" else "checkpoints")
        assert [listing.step_of(path) for path in listing.directories(place)] == saved
        done = prune(run.run_dir, model, run.resolve().recipe.checkpoints, set_aside=False, dry=False)
        assert done["steps"] == [] and [listing.step_of(path) for path in listing.directories(place)] == saved
    with pytest.raises(UserError, match=r"continue with --allow optimizer\.kind$"):
        run.walk("optimizer.kind=adamw", last="tune")
    told = run.walk("optimizer.kind=adamw", last="tune", allow=["optimizer.kind"])
    assert ("tune", "begin") in told
    assert any("first.layers.0.attention.query.weight" in name for name in checkpoint(run.run_dir, folder="tune/checkpoints"))
