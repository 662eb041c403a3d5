"""Runs whose files an earlier version has written, before some recipe keys were known, go on, are tuned and averaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command import Lmworks
from pydantic_core import to_jsonable_python

from lmworks.checkpoint import listing, manifest
from lmworks.io.files import write_json
from lmworks.recipe.keys import node_for
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from tiny_run import FIRST, STEPS, Tiny

RECORDED = Path(__file__).parent.parent / "recorded" / "identity-2026-11-25.json"


def older(tree: Any, root: Any) -> Any:
    """Without any key that has its default: each of them may have come later."""
    if not isinstance(tree, dict) or (node := node_for(root, tree)) is None:
        return tree
    kept = {}
    for key, value in tree.items():
        field = node.model_fields.get(key)
        known = field is None or field.is_required() or to_jsonable_python(field.get_default(call_default_factory=True)) != value
        if known:
            kept[key] = older(value, field.annotation if field else None)
    return kept


def age(run_dir: Path) -> None:
    for place in run_dir.rglob("step-*"):
        document = listing.read_meta(place)
        document["identity"]["model"] = older(document["identity"]["model"], Model)
        assert 5 < len(document["identity"]["model"]) < 20
        (place / listing.META).write_text(json.dumps(document), encoding="utf-8")
        entries = {path.name: manifest.entry_of(path.read_bytes()) for path in place.iterdir() if path.name != manifest.NAME}
        (place / manifest.NAME).write_bytes(manifest.canonical(entries))
    resolved = json.loads((run_dir / "resolved.json").read_text(encoding="utf-8"))
    write_json(run_dir / "resolved.json", older(resolved, Recipe) | {"name": resolved["name"]})


def test_it_is_tuned_and_averaged_and_goes_on(lmworks: Lmworks, finished: Tiny, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run")
    age(run.run_dir)
    into = ("--set", f"run_dir={run.run_dir}")
    for stage in ("tune", "evaluate", "export"):
        if (run.run_dir / stage).exists():
            (run.run_dir / stage).rename(tmp_path / f"former-{stage}")
    tuned = lmworks("tune", run.recipe, *into)
    assert tuned.code == 0 and "tune took" in tuned.err + tuned.out
    more = "train.phases.long.tokens=2560 tokens"
    said = lmworks("pretrain", run.recipe, *into, "--set", more, "--allow", "train.phases")
    assert said.code == 0 and f"resumes from step {STEPS} of {STEPS + 2}" in said.out + said.err
    kept = [listing.step_of(path) for path in listing.directories(run.run_dir / "checkpoints")]
    assert kept[-1] == STEPS + 2 and len(kept) > 1 and kept[-2] >= FIRST
    assert lmworks("ckpt", "average", run.run_dir, *kept[-2:], "--to", tmp_path / "mean").code == 0


def test_what_another_version_has_stored() -> None:
    """A checkpoint of a model that another version trained. Other values are told by their key."""
    there = json.loads(RECORDED.read_text(encoding="utf-8"))
    here = {"model": there["model"] | {"attention_sinks": False, "qk_norm_blend": 1.0}}
    assert listing.differences(here, there) == listing.differences(there, here) == []
    sinks = {"model": here["model"] | {"attention_sinks": True}}
    assert listing.differences(sinks, there) == ["model.attention_sinks is False there and True here"]
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    assert listing.differences({"model": there["model"] | {"moe": experts}}, there)
