"""Former keys are refused with the new name and translated in what was stored; keys of other tools are answered with ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lmworks.cli.main import main
from lmworks.errors import UserError
from lmworks.io.files import write_json
from lmworks.ladder.run import LadderFile
from lmworks.recipe.changes import as_tree
from lmworks.recipe.former import translated
from lmworks.recipe.keys import known_paths, sections
from lmworks.recipe.load import load_recipe, load_resolved
from lmworks.recipe.names import CONVERTED, FOREIGN, FORMER, MOVED, REMOVED
from lmworks.recipe.schema.layout import Cluster
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.run_dir import stage_inputs, stale_reason
from lmworks.run.stages import STAGES, STAMP

NODES = {node.__name__: node for root in (Recipe, Cluster, LadderFile) for node, _ in sections(root)}
EARLIER = json.loads((Path(__file__).parent / "earlier_run.json").read_text(encoding="utf-8"))
"""The resolved recipe and the inputs in the stamps of a run of commit befa0ea8."""


def test_every_new_name_is_a_key_and_no_old_name_is() -> None:
    assert sum(map(len, FORMER.values())) > 80
    wrong = [
        (name, old, new) for name, names in FORMER.items() for old, new in names.items()
        if new not in NODES[name].model_fields or old in NODES[name].model_fields
    ]  # fmt: skip
    assert not wrong, "a key that is there cannot have been renamed, and its new name must be there"
    assert all(key in FORMER[name] for name, key in CONVERTED)
    assert all(key not in NODES[name].model_fields for table in (MOVED, REMOVED) for name, keys in table.items() for key in keys)


def test_what_stands_for_keys_of_other_tools_is_there() -> None:
    known = set(known_paths(Recipe))
    wrong = [(tool, key, path) for tool, names in FOREIGN.items() for key, ours in names.items() for path in ours.keys if path not in known]
    assert not wrong
    assert all(ours.keys or ours.note for names in FOREIGN.values() for ours in names.values())


@pytest.mark.parametrize(
    ("override", "path", "new"),
    [
        ("model.layers=3", "model", "num_hidden_layers"),
        ("optimizer.clip=1", "optimizer", "max_grad_norm"),
        ("train.phases.general.batch=8Ki tokens", "train.phases.general", "global_batch_tokens"),
        ("train.phases.general.global_batch_size=8Ki tokens", "train.phases.general", "global_batch_tokens"),
        ("corpus.sources.speeches.licence=MIT", "corpus.sources.speeches", "license"),
        ("corpus.steps=[{step: code, seconds: 5 s}]", "corpus.steps.code", "timeout"),
        ("tune.replay.share=0.5", "tune.replay", "fraction"),
    ],
)
def test_an_old_name_is_refused_with_the_new_one(override: str, path: str, new: str) -> None:
    old = override.partition("=")[0].rpartition(".")[2] if "[" not in override else "seconds"
    with pytest.raises(UserError, match=rf"{path} has no key '{old}' any more; it is called '{new}' now$") as error:
        load_recipe("quickstart", [override])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tune.lora_r=8", "tune has no key 'lora_r'; use tune.lora.rank$"),
        ("lora_r=8", "the top has no key 'lora_r'; use tune.lora.rank or dpo.lora.rank or grpo.lora.rank$"),
        ("optimizer.lr=0.1", "optimizer has no key 'lr'; use optimizer.learning_rate$"),
        ("train.phases.general.warmup_ratio=0.1", r"train.phases.general has no key 'warmup_ratio'; use "
         r"train.phases.general.lr_schedule.warmup; a share such as 3%, or steps or tokens with their unit$"),
        ("train.per_device_train_batch_size=4", "use train.micro_batch_sequences; it changes speed and memory only"),
        ("model.num-query-groups=4", "use model.num_key_value_heads$"),
        ("resume_from_checkpoint=x", "the top has no key 'resume_from_checkpoint'; a run resumes by itself"),
        ("tune.load_in_4bit=true", "tune has no key 'load_in_4bit'; weights stay fp32 in training"),
    ],
)  # fmt: skip
def test_a_key_of_another_tool_is_answered_with_ours(override: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        load_recipe("quickstart", [override])
    assert "\n" not in str(error.value)


def test_the_command_has_a_line_for_each_former_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\ntrain:\n  micro_batch_size: 4\n  phases:\n    - {name: a, tokens: 1M,\n       global_batch_size: 4Ki}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lmworks", "show", "mine.yaml"])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert end.value.code == 2 and not said.out
    assert said.err.splitlines() == [
        "error: mine.yaml:3: train has no key 'micro_batch_size' any more; it is called 'micro_batch_sequences' now",
        "mine.yaml:6: train.phases.a has no key 'global_batch_size' any more; it is called 'global_batch_tokens' now",
    ]


def test_a_stored_recipe_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text(json.dumps(EARLIER["resolved"], indent=2))
    recipe = load_resolved(tmp_path / "resolved.json")
    tree, before = as_tree(recipe), EARLIER["resolved"]
    assert tree["train"]["phases"][0]["global_batch_tokens"] == before["train"]["phases"][0]["global_batch_size"]
    assert tree["grpo"]["data"][0]["timeout"] == "4.5 s" and before["grpo"]["data"][0]["seconds"] == 4.5
    assert tree["train"]["validation_bytes_per_domain"] == "600 bytes" and tree["tokenizer"]["as_is"] is False
    assert translated(tree) == tree
    again = load_recipe(tmp_path / "resolved.json", ["train.micro_batch_sequences=2"])
    assert again.origins["train.micro_batch_sequences"].kind == "override"
    assert ":" in again.origins["tune.final_weights"].detail, "the line of the former key"
    with pytest.raises(UserError, match="it is called 'micro_batch_sequences' now"):
        load_recipe(tmp_path / "resolved.json", ["train.micro_batch_size=2"])


def changed_inputs(recipe: Recipe, run_dir: Path) -> set[str]:
    """The recipe keys by which stages that the earlier version has finished would run again."""
    found: set[str] = set()
    for stage in STAGES:
        stamp = {"stage": stage.name, "done": True, "inputs": EARLIER["inputs"][stage.name], "outputs": {}}
        write_json(run_dir / stage.folder / STAMP, stamp)
        reason = stale_reason(stage, recipe, run_dir, stage_inputs(stage, recipe, run_dir, {}))
        assert not reason.new and not reason.stopped
        found |= {name for name in reason.changed if "/" not in name and not name.endswith(".files")}
    return found


def test_stages_that_an_earlier_version_has_finished_are_done(tmp_path: Path) -> None:
    for stage in STAGES:
        (tmp_path / stage.folder).mkdir()
    recipe = Recipe.model_validate(translated(EARLIER["resolved"]))
    assert changed_inputs(recipe, tmp_path) == set()
    other = json.loads(json.dumps(EARLIER["resolved"]))
    other["grpo"]["data"][0]["seconds"], other["tune"]["keep"] = 5.0, "last"
    assert changed_inputs(Recipe.model_validate(translated(other)), tmp_path) == {"grpo.data.short.timeout", "tune.final_weights"}
