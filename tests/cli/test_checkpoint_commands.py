"""`lmworks ckpt`: comparing, going back, resetting, pruning and averaging, on a run that has trained."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from command import Lmworks

from lmworks.checkpoint import listing, manifest, rewrite, tensor_files, verify
from lmworks.export.export import find_adapter, write_adapter
from lmworks.io.run_layout import USED
from lmworks.recipe.weights import find_weights
from lmworks.watch.ledger import RunLock, read_ledger
from lmworks.weights.adapters import adapter_identity
from lmworks.weights.run_models import load_checkpoint, load_model
from tiny_run import BRIEF, STEPS, Tiny, checkpoint, curve, same_bits

KEEP = "checkpoints.keep_last=9"
SAVED = [4, 8, 12, 16, 20, STEPS]


@pytest.fixture(scope="module")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A run up to the end of pretraining, with all its checkpoints."""
    run = tiny.copy(tmp_path_factory.mktemp("trained") / "run")
    run.walk(KEEP, last="pretrain")
    assert steps(run) == SAVED
    return run


@pytest.fixture
def run(trained: Tiny, tmp_path: Path) -> Tiny:
    return trained.copy(tmp_path / "run")


def steps(run: Tiny) -> list[int]:
    return [listing.step_of(path) for path in listing.directories(run.run_dir / "checkpoints")]


def asides(run: Tiny) -> list[str]:
    return sorted(path.name for path in (run.run_dir / "checkpoints").glob("step-*.*"))


def found_tokens(run: Tiny, step: int) -> int:
    return int(listing.read_meta(run.run_dir / "checkpoints" / listing.name_of(step))["meta"]["tokens"])


def events(run: Tiny, name: str) -> list[dict]:
    return [line for line in read_ledger(run.run_dir / "ledger.jsonl") if line["event"] == name]


def everything(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_checkpoint_that_is_pruned_while_it_is_compared_is_named(lmworks: Lmworks, run: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(one: Path, other: Path) -> None:
        shutil.rmtree(one)
        raise FileNotFoundError(2, "No such file or directory", str(one))

    monkeypatch.setattr("lmworks.checkpoint.rewrite.diff", late)
    ended = lmworks("ckpt", "diff", run.run_dir, 4, 20)
    said = "the run has removed step-00000004 meanwhile; compare others, or set checkpoints.keep_last to more"
    assert ended.code == 2 and said in " ".join(ended.err.split())


def test_diff_says_how_far_each_tensor_moved(lmworks: Lmworks, run: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.checkpoint.rewrite.split_rows", lambda record: tensor_files.split_rows(record, 1000))
    found = json.loads(lmworks("ckpt", "diff", run.run_dir, 4, 20, "--json").out)
    before, after = checkpoint(run.run_dir, 4), checkpoint(run.run_dir, 20)
    assert found["steps"] == [4, 20]
    assert found["meta"]["phase"] == ["general", "long"]
    assert not found["only_before"]
    assert {row["name"] for row in found["tensors"]} == before.keys()
    for row in found["tensors"]:
        a, b = before[row["name"]].double(), after[row["name"]].double()
        expected = float((b - a).norm() / a.norm()) if a.norm() else None if b.norm() else 0.0
        assert row["change"] == (expected if expected is None else pytest.approx(expected, rel=1e-9)), row
    changes = [math.inf if row["change"] is None else row["change"] for row in found["tensors"]]
    assert changes == sorted(changes, reverse=True)
    assert 0 < sum(changes[len(changes) // 2:]) < math.inf
    shown = lmworks("ckpt", "diff", run.run_dir).out
    assert shown.startswith(f"step 20 to {STEPS}\n")
    assert "more (--json shows all)" in shown
    assert f"\ntokens: {found_tokens(run, 20):,} -> {found_tokens(run, STEPS):,}\n" in shown
    assert "{" not in shown


def test_a_checkpoint_carries_the_recipe_that_it_was_trained_with(lmworks: Lmworks, run: Tiny) -> None:
    found = json.loads(lmworks("ckpt", "show", run.run_dir, 8, "--json").out)
    resolved = json.loads((run.run_dir / "resolved.json").read_text())
    assert found["recipe"] | {"run_dir": None} == resolved | {"run_dir": None}
    shown = lmworks("ckpt", "show", run.run_dir, 8).out
    head, _, recipe = shown.partition("\n\n")
    assert yaml.safe_load(recipe) == found["recipe"]
    assert "step: 8\n" in head and re.search(r"^bytes: \d+\S* [kM]B$", head, re.M)
    assert re.search(r"^time: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", head, re.M)
    listed = lmworks("ckpt", "list", run.run_dir).out
    assert re.search(r"\d{4}-\d\d-\d\d", listed) and re.search(r"\d [kM]B", listed)
    path = run.run_dir / "checkpoints" / listing.name_of(8) / listing.META
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"recipe": document["recipe"] | {"seed": 6}}, indent=1) + "\n")
    assert "other content than was written" in lmworks("ckpt", "verify", run.run_dir).out


def test_rollback_sets_later_ones_aside_and_the_run_goes_on_from_there(lmworks: Lmworks, run: Tiny) -> None:
    last, whole = checkpoint(run.run_dir, STEPS), curve(run.run_dir)
    (run.run_dir / "evaluate").mkdir()
    (run.run_dir / "evaluate" / "stage.json").write_text('{"stage": "evaluate", "done": true}')
    done = lmworks("ckpt", "rollback", run.run_dir, 12)
    assert done.code == 0, done.err
    assert "the next run resumes from step 12\n" in done.out
    assert "will be repeated: evaluate" in done.out
    assert steps(run) == [4, 8, 12]
    assert asides(run) == [f"step-{step:08d}.rolled-back-1" for step in (16, 20, STEPS)]
    (told,) = events(run, "rollback")
    assert (told["stage"], told["step"], told["to_step"], told["skip"]) == ("pretrain", STEPS, 12, None)
    run.walk(KEEP, "shards.warn_epochs=5", last="pretrain")
    assert events(run, "resume")[-1]["step"] == 12
    assert json.loads(lmworks("ckpt", "diff", run.run_dir, 12, 20, "--json").out)["recipe"]["shards.warn_epochs"] == [4.0, 5.0]
    assert "\nrecipe shards.warn_epochs: 4 -> 5\n" in lmworks("ckpt", "diff", run.run_dir, 12, 20).out
    assert "\nrecipe " not in lmworks("ckpt", "diff", run.run_dir, 16, 20).out, "both were saved by the run that goes on"
    assert same_bits(checkpoint(run.run_dir, STEPS), last) == []
    assert curve(run.run_dir) == whole
    assert json.loads(lmworks("ckpt", "rollback", run.run_dir, 20, "--skip-steps", 3, "--json").out)["skip"] == [20, 23]
    assert f"step-{STEPS:08d}.rolled-back-2" in asides(run)
    assert json.loads(lmworks("ckpt", "rollback", run.run_dir, 20, "--skip-steps", "28:30", "--json").out)["skip"] == [28, 30]


@pytest.mark.parametrize("window", [pytest.param(f"16:{STEPS}", marks=pytest.mark.slow), "16:1000"])  # the same as 16:1000
def test_a_window_to_the_end_or_beyond_ends_there_with_the_rope_that_was_trained(lmworks: Lmworks, run: Tiny, window: str) -> None:
    trained = listing.read_meta(run.run_dir / "checkpoints" / listing.name_of(STEPS))["meta"]
    earlier = listing.read_meta(run.run_dir / "checkpoints" / listing.name_of(4))["meta"]
    assert trained["architecture"] != earlier["architecture"], "the phases differ"
    assert lmworks("ckpt", "rollback", run.run_dir, 16, "--skip-steps", window).code == 0
    run.walk(KEEP, last="pretrain")
    assert steps(run)[-1] == STEPS, "a step beyond the end was saved"
    ended = listing.read_meta(run.run_dir / "checkpoints" / listing.name_of(STEPS))["meta"]
    assert all(ended[key] == trained[key] for key in ("architecture", "phase", "tokens"))
    assert same_bits(checkpoint(run.run_dir, STEPS), checkpoint(run.run_dir, 16)) == []


def test_reset_optimizer_changes_nothing_else_and_keeps_the_old_one(lmworks: Lmworks, run: Tiny) -> None:
    before = checkpoint(run.run_dir, STEPS)
    old = everything(run.run_dir / "checkpoints" / listing.name_of(STEPS))
    done = lmworks("ckpt", "reset-optimizer", run.run_dir)
    assert done.code == 0, done.err
    kept = run.run_dir / "checkpoints" / f"{listing.name_of(STEPS)}.before-reset-1"
    assert str(kept) in done.out
    assert everything(kept) == old
    assert manifest.problem(kept) is None
    after = checkpoint(run.run_dir, STEPS)
    changed = set(same_bits(before, after))
    assert changed and all(name.startswith("optimizer/") for name in changed)
    assert all(not tensor.any() for name, tensor in after.items() if name.startswith("optimizer/"))
    assert all(row["good"] for row in verify(run.run_dir / "checkpoints"))
    assert events(run, "optimizer_reset")[0]["kept"] == str(kept)
    assert "to resume from this one: lmworks ckpt rollback" in lmworks("ckpt", "reset-optimizer", run.run_dir, "--step", 8).out
    assert lmworks("ckpt", "rollback", run.run_dir, 8).code == 0
    run.walk(KEEP, last="pretrain")
    assert events(run, "resume")[-1]["step"] == 8
    assert same_bits(checkpoint(run.run_dir, STEPS), before), "with a fresh optimizer the weights become others"


def test_prune_by_the_rules_of_the_recipe_or_others(lmworks: Lmworks, run: Tiny) -> None:
    before = everything(run.run_dir)
    dry = json.loads(lmworks("ckpt", "prune", run.run_dir, "--keep-last", 3, "--keep-every", "10 steps", "--dry-run", "--json").out)
    assert {path: data for path, data in everything(run.run_dir).items() if path != "ledger.jsonl"} == {
        path: data for path, data in before.items() if path != "ledger.jsonl"
    }
    rows = listing.list_checkpoints(run.run_dir / "checkpoints")
    best = min((row["metric"], row["step"]) for row in rows if row["metric"] is not None)[1]
    assert dry["steps"] == [step for step in SAVED if step not in {12, 16, 20, STEPS, best}]
    assert lmworks("ckpt", "prune", run.run_dir).out == "nothing to delete\n", "the recipe keeps nine"
    lmworks("ckpt", "prune", run.run_dir, "--keep-last", 3, "--keep-every", "10 steps")
    assert steps(run) == [step for step in SAVED if step not in dry["steps"]]
    assert [line["step"] for line in events(run, "checkpoint_pruned")][-len(dry["steps"]):] == dry["steps"]
    lmworks("ckpt", "rollback", run.run_dir, 16)
    assert len(asides(run)) == 2
    assert "would delete: step-" in lmworks("ckpt", "prune", run.run_dir, "--set-aside", "--dry-run").out
    assert len(asides(run)) == 2
    lmworks("ckpt", "prune", run.run_dir, "--set-aside")
    assert not asides(run)
    assert steps(run)[-1] == 16


def test_prune_keeps_the_newest_good_one(lmworks: Lmworks, run: Tiny) -> None:
    for step in SAVED[4:]:
        (run.run_dir / "checkpoints" / listing.name_of(step) / tensor_files.TABLE).write_bytes(b"")
    lmworks("ckpt", "prune", run.run_dir, "--keep-last", 1)
    assert SAVED[3] in steps(run)


@pytest.fixture(scope="module")
def aligned(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Tuned with adapters, on routed experts, too, and aligned: both in epochs, with checkpoints kept after shares of the tokens."""
    run = tiny.copy(tmp_path_factory.mktemp("aligned") / "run")
    pairs = run.run_dir.parent / "pairs.jsonl"
    pairs.write_text("\n".join(
        json.dumps({"prompt": f"What is {a} + 1?", "chosen": f"{a + 1}.", "rejected": f"{a + 2}."}) for a in range(80)
    ))  # fmt: skip
    run.walk(
        *BRIEF, "tune.lora={rank: 2, alpha: 4, rslora: true, targets: [all-linear, experts]}", "tune.learning_rate=0.01",
        "tune.tokens=null", f"dpo.data=[{{name: pairs, kind: files, path: {pairs}}}]", "dpo.pairs_per_step=16", "dpo.epochs=2",
        "dpo.sequence_length=64 tokens", "checkpoints.keep_every=20%", "checkpoints.keep_last=1", "train.save_every=1 steps", last="dpo",
    )  # fmt: skip
    return run


@pytest.mark.parametrize("model", ["base", "tuned", "dpo"])
def test_prune_keeps_what_the_run_has_kept(lmworks: Lmworks, aligned: Tiny, model: str) -> None:
    place = aligned.run_dir / ("checkpoints" if model == "base" else f"{'tune' if model == 'tuned' else model}/checkpoints")
    assert len(listing.directories(place)) > 4
    assert lmworks("ckpt", "prune", aligned.run_dir, "--model", model, "--dry-run").out == "nothing to delete\n"
    half = json.loads(lmworks("ckpt", "prune", aligned.run_dir, "--model", model, "--keep-every", "100%", "--dry-run", "--json").out)
    assert half["steps"] and set(half["steps"]) < {listing.step_of(path) for path in listing.directories(place)}


def test_prune_keeps_the_weights_that_a_stage_ends_with(lmworks: Lmworks, run: Tiny) -> None:
    place = run.run_dir / "checkpoints"
    newest = place / listing.name_of(STEPS)
    document = json.loads((newest / listing.META).read_text())
    document["meta"][USED] = 8
    (newest / listing.META).write_text(json.dumps(document))
    entries = {path.name: manifest.entry_of(path.read_bytes()) for path in newest.iterdir() if path.name != manifest.NAME}
    (newest / manifest.NAME).write_bytes(manifest.canonical(entries))
    resolved = json.loads((run.run_dir / "resolved.json").read_text())
    resolved["checkpoints"]["keep_best"] = False
    (run.run_dir / "resolved.json").write_text(json.dumps(resolved))
    lmworks("ckpt", "prune", run.run_dir, "--keep-last", 1)
    assert steps(run) == [8, STEPS]
    assert {(one["stage"], one["step"]) for one in events(run, "checkpoint_pruned")} == {("pretrain", step) for step in (4, 12, 16, 20)}


def test_an_average_of_adapters_is_the_mean_of_their_models(lmworks: Lmworks, aligned: Tiny, tmp_path: Path) -> None:
    kept = [listing.step_of(path) for path in listing.directories(aligned.run_dir / "tune" / "checkpoints")]
    first, last, to = kept[1], kept[-1], tmp_path / "averaged"
    weights = ("--weight", 1, "--weight", 3)
    done = lmworks("ckpt", "average", aligned.run_dir, first, last, *weights, "--to", to, "--model", "tuned")
    assert done.code == 0, done.err

    def loaded(step: int) -> dict[str, torch.Tensor]:
        found = find_weights(aligned.run_dir / "tune" / "checkpoints" / listing.name_of(step))
        return load_checkpoint(found).state_dict()

    one, other, mean, base = loaded(first), loaded(last), load_model(to, "tuned").state_dict(), load_model(to, "base").state_dict()
    for name, found in mean.items():
        expected = 0.25 * one[name].double() + 0.75 * other[name].double()
        assert (found - expected).norm() <= 1e-6 * max((expected - base[name]).norm(), base[name].norm()), name
    assert max((one[name] - other[name]).norm() / other[name].norm() for name in mean) > 1e-3, "they differ"
    adapter = find_adapter(aligned.resolve().recipe.model_copy(update={"dpo": None}), to)
    assert adapter is not None and (adapter.lora.rank, adapter.lora.scale) == (4, pytest.approx(4 / 2**0.5))
    document = listing.read_meta(to / "tune" / "checkpoints" / listing.name_of(last))
    assert document["identity"]["lora"] == adapter_identity(adapter.lora, adapter.base)["lora"]
    write_adapter(aligned.resolve().recipe, adapter, tmp_path / "peft")
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["r"] == 4


def test_average_is_a_run_of_its_own(lmworks: Lmworks, run: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "split_rows", lambda record: tensor_files.split_rows(record, 1000))
    before, to = everything(run.run_dir), tmp_path / "averaged"
    done = lmworks("ckpt", "average", run.run_dir, 16, 20, STEPS, "--weight", 1, "--weight", 1, "--weight", 2, "--to", to)
    assert done.code == 0, done.err
    assert everything(run.run_dir) == before
    parts = [checkpoint(run.run_dir, step) for step in (16, 20, STEPS)]
    found = checkpoint(to)
    assert found.keys() == {name for name in parts[0] if name.startswith("model/")}
    for name, tensor in found.items():
        mean = sum(part[name].double() * share for part, share in zip(parts, (0.25, 0.25, 0.5), strict=True))
        assert torch.equal(tensor, mean.to(tensor.dtype)), name
    model = load_model(to)
    assert torch.equal(model.state_dict()["embedding.weight"], found["model/embedding.weight"])
    told = json.loads((to / "checkpoints" / listing.name_of(STEPS) / listing.META).read_text())["meta"]
    assert told["average_of"] == {listing.name_of(16): 0.25, listing.name_of(20): 0.25, listing.name_of(STEPS): 0.5}
    averaged = Tiny(run.recipe, to)
    assert averaged.walk(KEEP, "tune=null")[:4] == [("corpus", "skip"), ("tokenizer", "skip"), ("shards", "skip"), ("pretrain", "skip")]
    assert (to / "evaluate" / "stage.json").exists()
    assert everything(run.run_dir) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rollback", 5), "has no checkpoint of step 5; the newest are 4, 8, 12"),
        (("rollback", STEPS), "is the newest checkpoint, from which the run resumes anyway"),
        (("rollback", 8, "--skip-steps", "soon"), "'soon' is neither a number of steps nor a window such as 100:120"),
        (("rollback", 8, "--skip-steps", "4:6"), "4:6 is not a range of steps from step 8 on"),
        (("rollback", 8, "--skip-steps", "0"), "8:8 is not a range of steps"),
        (("diff", 4), "diff needs two checkpoints, not 1"),
        (("diff", 4, 5), "has no checkpoint of step 5"),
        (("diff", "--model", "tuned"), "has no checkpoints"),
        (("reset-optimizer", "--step", 7), "has no checkpoint of step 7"),
        (("prune", "--keep-every", "often"), "--keep-every: "),
        (("average", 4, "--to", "x"), "an average takes two different steps or more"),
        (("average", 4, 8, "--weight", 1, "--to", "x"), "one positive number for each of the 2 steps"),
        (("average", 4, 8, "--to", "."), ". exists already"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_changes_nothing(
    lmworks: Lmworks, trained: Tiny, arguments: tuple[object, ...], message: str
) -> None:
    before = everything(trained.run_dir)
    verb, *rest = arguments
    assert message in lmworks("ckpt", verb, trained.run_dir, *rest).error
    assert everything(trained.run_dir) == before


@pytest.mark.parametrize("arguments", [("rollback", 8), ("reset-optimizer",), ("prune",)])
def test_nothing_is_changed_while_the_run_goes_on(lmworks: Lmworks, trained: Tiny, arguments: tuple[object, ...]) -> None:
    before, (verb, *rest) = everything(trained.run_dir), arguments
    with RunLock(trained.run_dir):
        assert f"is in use by process {os.getpid()}" in lmworks("ckpt", verb, trained.run_dir, *rest).error
    assert everything(trained.run_dir) == before


@pytest.mark.parametrize("arguments", [("rollback", 12), ("reset-optimizer", "--step", 12), ("average", 12, 16, "--to")])
def test_a_damaged_checkpoint_is_not_built_on(lmworks: Lmworks, run: Tiny, tmp_path: Path, arguments: tuple[object, ...]) -> None:
    data = run.run_dir / "checkpoints" / listing.name_of(12) / "data-00000-00000.bin"
    content = bytearray(data.read_bytes())
    content[1000] ^= 1
    data.write_bytes(content)
    before, (verb, *rest) = everything(run.run_dir / "checkpoints"), arguments
    error = lmworks("ckpt", verb, run.run_dir, *rest, *([tmp_path / "to"] if verb == "average" else [])).error
    assert "is damaged: data-00000-00000.bin has other content than was written" in error
    assert everything(run.run_dir / "checkpoints") == before
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("verb", ["reset-optimizer", "average"])
def test_ctrl_c_leaves_everything_as_it_was(
    lmworks: Lmworks, run: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Ctrl-C in the middle of the writing, and in the instant before the new one gets its name."""
    before = everything(run.run_dir / "checkpoints")
    arguments = (verb, run.run_dir, *((4, 8, "--to", tmp_path / "to") if verb == "average" else ()))

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place in ("write_metadata", "publish"):
        with monkeypatch.context() as patch:
            patch.setattr(rewrite, place, interrupt)
            assert lmworks("ckpt", *arguments).code == 130
        now = everything(run.run_dir / "checkpoints")
        assert {path: data for path, data in now.items() if ".before-reset-" not in path} == before
        assert not (tmp_path / "to").exists()
    assert lmworks("ckpt", *arguments).code == 0


def test_the_meta_of_a_checkpoint_is_shown_without_control_characters(lmworks: Lmworks, run: Tiny) -> None:
    """Anybody may have written it: an escape in it must not reach the terminal."""
    place = run.run_dir / "checkpoints" / listing.name_of(STEPS)
    document = json.loads((place / "meta.json").read_text())
    document["meta"] |= {"phase": "a\x1b]0;title\x07b", "k\x9b2J": 1}
    document["recipe"] = (document.get("recipe") or {}) | {"name": "r\x1b[2J"}
    (place / "meta.json").write_text(json.dumps(document))
    entries = {path.name: manifest.entry_of(path.read_bytes()) for path in place.iterdir() if path.name != manifest.NAME}
    (place / manifest.NAME).write_bytes(manifest.canonical(entries))
    for words in (["show", run.run_dir], ["diff", run.run_dir]):
        out = lmworks("ckpt", *words).out
        assert "a]0;titleb" in out and "k2J: " in out
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out)
    out = lmworks("ckpt", "show", run.run_dir, "--json").out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out) and json.loads(out)["meta"]["k\x9b2J"] == 1
