"""`plan` reads the data of tuning, preferences and prompts: its numbers are those of the run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Lmworks
from test_start_tuning import ROWS

from base_models import write_model, write_tokenizer
from lmworks.io.files import read_json
from lmworks.metrics.log import read
from lmworks.plan.stages import StageData, data_warnings
from lmworks.recipe.load import load_recipe, load_recipe_text
from lmworks.run import stage_data
from lmworks.tokenizer import load

MODEL = "model: {hidden_size: 64, num_hidden_layers: 2}\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    write_tokenizer(folder, "qwen")
    write_model(folder, ROWS)
    return folder


def _lines(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


def _recipe(folder: Path, base: Path, count: int = 45, **changes: Any) -> Path:
    """Questions of different lengths, some twice, one too long, one of no form."""
    asked = [f"What is {a} + {a * 7 % 13}? " + "Please say it. " * (a % 5) for a in range(count)]
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": f"It is {n}."}] for n, text in enumerate(asked)]
    rows = [{"messages": one} for one in [*chats, chats[0]]] + [{"foo": "bar"}]
    pairs = [{"prompt": text, "chosen": "It is right.", "rejected": "No, it is not."} for text in [*asked, "long " * 300]]
    small = {"sequence_length": "96 tokens", "lr_schedule": {"kind": "constant", "warmup": "0%"}}
    tree = {
        "name": "tuned", "threads": 1, "start_from": str(base), "run_dir": str(folder / "run"),
        "train": {"precision": "fp32", "compile": False, "micro_batch_sequences": 2},
        "tune": {"data": [{"name": "own", "kind": "files", "path": _lines(folder / "chats.jsonl", rows)}], "epochs": 3,
                 "global_batch_tokens": "384 tokens", **small},
        "dpo": {"data": [{"name": "own", "kind": "files", "path": _lines(folder / "pairs.jsonl", pairs)}], "pairs_per_step": 8,
                "epochs": 1.5, **small},
        "evaluate": {"benchmarks": []}, "export": {"huggingface": False, "gguf": False},
    }  # fmt: skip
    for name, more in changes.items():
        tree[name] = {**tree.get(name, {}), **more}  # type: ignore[dict-item]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def test_the_plan_has_the_steps_and_tokens_of_the_run(lmworks: Lmworks, base: Path, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, base)
    planned = lmworks("plan", recipe, "--json")
    assert planned.code == 0, planned.err
    plan = json.loads(planned.out)
    done = lmworks("dpo", recipe)
    assert done.code == 0, done.err
    for stage, noun in (("tune", "conversations"), ("dpo", "pairs")):
        found, folder = plan["data"][stage], tmp_path / "run" / stage
        last = list(read(folder))[-1]
        (phase,) = (one for one in plan["phases"] if one["name"] == stage)
        assert (found["steps"], found["read"]) == (last["step"], last["train/tokens"]) == (phase["steps"], phase["tokens"])
        manifest = read_json(folder / "data" / "manifest.json")
        body = manifest["data"]["own"]
        of_splits = body if stage == "tune" else manifest
        assert (found["examples"], found["tokens"]) == (of_splits["train"][noun], of_splits["train"]["tokens"])
        assert found["held_out"] == of_splits["validation"][noun]
        assert found["left_out"] == body["left_out"] and sum(body["left_out"].values()) == {"tune": 2, "dpo": 1}[stage]
        assert found["counted"] == "exact"
    assert plan["data"]["tune"]["passes"] == 3 and plan["data"]["dpo"]["passes"] == 1.5


def test_the_plan_warns_where_data_and_batch_do_not_fit(lmworks: Lmworks, base: Path, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, base, tune={"global_batch_tokens": "8064 tokens", "epochs": 1, "final_weights": "best"},
        dpo={"epochs": 20.0})
    done = lmworks("plan", recipe, "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)["warnings"]
    few = next(line for line in said if line.startswith("tune: ") and "make 1 step; set tune.global_batch_tokens=" in line)
    assert any("final_weights: best is decided by 1 held-out conversation, too few" in line for line in said)
    assert any(line.startswith("dpo: ") and "is read 20 times" in line for line in said)
    better = few.split("global_batch_tokens=")[1].split(",")[0]
    again = json.loads(lmworks("plan", recipe, "--json", "--set", f"tune.global_batch_tokens={better} tokens").out)
    assert again["data"]["tune"]["steps"] >= 20
    assert not any("tune: " in line and "make" in line for line in again["warnings"])


CUT = "with an answer that is cut at sequence_length"


@pytest.mark.parametrize(("length", "step", "keys"), [(64, 384, 1), (56, 224, 1), (48, 48, 2)])
def test_the_plan_warns_where_the_answers_are_cut(lmworks: Lmworks, base: Path, tmp_path: Path, length: int, step: int, keys: int) -> None:
    """They are among the examples, so the plan said nothing of a length that cut all of them."""
    recipe = _recipe(tmp_path, base, tune={"sequence_length": length, "global_batch_tokens": step})
    plan = json.loads(lmworks("plan", recipe, "--json").out)
    found = plan["data"]["tune"]
    left = found["left_out"]["with a question that leaves no room for an answer within sequence_length"]
    (line,) = (line for line in plan["warnings"] if line.startswith("tune: sequence_length is too short for "))
    cut, read = found["cut"][CUT], found["examples"] + found["held_out"] + left
    assert f"for {cut + left} of {read} conversations ({cut} {CUT}, " in line
    assert re.search(rf" held out +left out +cut .*\n.* {left + 2} +{cut} ", lmworks("plan", recipe).out)
    remedy = re.findall(r"tune\.\w+=\d+", line)
    assert len(remedy) == keys, line
    again = json.loads(lmworks("plan", recipe, "--json", *(part for one in remedy for part in ("--set", one))).out)
    assert again["data"]["tune"]["cut"] == {} and again["data"]["tune"]["left_out"] == {"no known form": 1, "repeated": 1}
    assert not any("too short" in line for line in again["warnings"])


def test_the_plan_warns_where_pairs_and_prompts_are_too_long(lmworks: Lmworks, base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {number} + 1?" + " Please." * (number % 2 * 9), "answer": str(number + 1)} for number in range(20)]
    own = {"name": "own", "kind": "files", "path": _lines(tmp_path / "asked.jsonl", rows), "reward": "numeric"}
    recipe = _recipe(tmp_path, base, dpo={"sequence_length": 48},
        grpo={"data": [own], "steps": 2, "prompts_per_step": 4, "validation_prompts": 2, "sequence_length": 40, "max_new_tokens": 8})
    plan = json.loads(lmworks("plan", recipe, "--json").out)
    short = [line for line in plan["warnings"] if ": sequence_length is too short" in line]
    said = {name: [line for line in short if line.startswith(name)] for name in ("dpo", "grpo")}
    assert "10 of 20 prompts" in said["grpo"][0] and " longer than sequence_length); " in said["dpo"][0], said
    remedies = [re.search(r"set (\w+\.sequence_length=\d+), ", *lines)[1] for lines in said.values()]  # type: ignore[index]
    again = json.loads(lmworks("plan", recipe, "--json", *(part for one in remedies for part in ("--set", one))).out)
    assert not any("sequence_length" in reason for name in said for reason in again["data"][name]["left_out"]), again["data"]


def test_a_few_long_conversations_may_be_cut() -> None:
    recipe = load_recipe_text(f"name: few\n{MODEL}tune: {{sequence_length: 64, global_batch_tokens: 64}}\n").recipe
    data = StageData("tune", 90, 10, 9000, 40, 9000, 1.0, cut={"cut at an answer": 10}, length_for_all=100)
    assert not any("too short" in line for line in data_warnings(recipe, {"tune": data}))
    assert any("for 11 of 100" in line for line in data_warnings(recipe, {"tune": replace(data, cut={"cut at an answer": 11})}))


def test_the_plan_warns_where_a_step_asks_a_prompt_twice(lmworks: Lmworks, base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "asked.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"What is {number} + 1?", "answer": str(number + 1)}) + "\n" for number in range(9)))
    own = {"name": "own", "kind": "files", "path": str(rows), "reward": "numeric"}
    tree = {
        "name": "few", "start_from": str(base), "run_dir": str(tmp_path / "few"), "threads": 1,
        "grpo": {"data": [own], "steps": 2, "prompts_per_step": 8, "validation_prompts": 2, "sequence_length": "64 tokens",
        "max_new_tokens": 8},
        "export": {"huggingface": False, "gguf": False},
    }  # fmt: skip
    (tmp_path / "few.yaml").write_text(json.dumps(tree))
    said = json.loads(lmworks("plan", tmp_path / "few.yaml", "--json").out)["warnings"]
    assert any(line.startswith("grpo: a step asks 8 prompts of the 7 that there are, some of them twice; set grpo.") for line in said), said
    fewer = json.loads(lmworks("plan", tmp_path / "few.yaml", "--json", "--set", "grpo.prompts_per_step=7").out)["warnings"]
    assert not any("twice" in line for line in fewer)


def test_what_was_read_is_read_again_where_other_rows_are_left_out(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_data, "_WORTH_KEEPING", 0)
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own.yaml").write_text("file: own.jsonl\n")
    recipe = load_recipe(_recipe(tmp_path, base, evaluate={"benchmarks": [str(tmp_path / "own.yaml")]})).recipe
    found = []
    for question in ("Who?", "", "What is 0 + 0?"):
        if question:
            _lines(tmp_path / "own.jsonl", [{"question": question, "answer": "It is 0."}])
        found.append(stage_data.read_stage(recipe, "tune", load(base), tmp_path, lambda question=question: ({question}, None)))
    assert found[0] == found[1] and found[2].examples == found[0].examples - 1
    assert len(list((tmp_path / "cache" / "data").iterdir())) == 2
    (tmp_path / "manifest.json").write_text("{}")  # of a corpus, which holds documents out
    stage_data.read_stage(recipe, "tune", load(base), tmp_path, lambda: ((), None))
    assert len(list((tmp_path / "cache" / "data").iterdir())) == 3


def test_without_a_tokenizer_tokens_are_estimated_and_large_files_are_sampled(
    lmworks: Lmworks, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(_recipe(tmp_path, base, count=400)).recipe
    exact = stage_data.read_stage(recipe, "tune", load(base), tmp_path, lambda: ((), None))
    by_bytes = stage_data.read_stage(recipe, "tune", None, tmp_path, lambda: ((), None))
    assert (exact.counted, by_bytes.counted) == ("exact", "by bytes")
    assert by_bytes.examples == exact.examples and 0.2 < by_bytes.tokens / exact.tokens < 1.5
    monkeypatch.setattr(stage_data, "_SAMPLE", 100)
    sampled = stage_data.read_stage(recipe, "tune", load(base), tmp_path, lambda: ((), None), most=1000)
    assert sampled.counted == "sampled"
    assert sampled.examples == pytest.approx(exact.examples, rel=0.05) and sampled.tokens == pytest.approx(exact.tokens, rel=0.1)
    assert sampled.steps == pytest.approx(exact.steps, rel=0.1)
