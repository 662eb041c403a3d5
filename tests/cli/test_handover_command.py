"""`lmworks handover slime` from the command line: what it writes, and what it refuses with the number of the row."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from command import Lmworks
from safetensors.torch import load_file, save_file

from deployable import GLM, QWEN3, export
from lmworks.io.files import read_json, write_json
from lmworks.weights.verified import PASSED, REPORT, file_records
from tiny_run import Tiny

ROWS = [
    {"prompt": [{"role": "user", "content": "What is 2 + 3?"}], "label": "5"},
    {"question": "What is 4 + 4?", "answer": 8},
    {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}], "metadata": {"rm_type": "f1"}},
]


@pytest.fixture(scope="session")
def exported(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny, tmp_path_factory.mktemp("models"), GLM | {"mtp": {}})


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_what_slime_gets(lmworks: Lmworks, exported: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "slime"
    done = lmworks("handover", "slime", exported, "--prompts", prompts, "--out", out)
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert [(row["label"], row["metadata"]["rm_type"]) for row in rows] == [("5", "math"), ("8", "math"), ("2", "f1")]
    assert all(row["prompt"][-1]["role"] == "user" for row in rows)
    script = f'source "{out}/model_args.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    words = subprocess.run(["bash", "-c", script], capture_output=True, encoding="utf-8", check=True).stdout.splitlines()
    for name, value in (
        ("--num-layers", "3"), ("--moe-layer-freq", "[0]*1+[1]*2"), ("--kv-channels", "32"), ("--moe-router-topk-scaling-factor", "2.5"),
        ("--rotary-percent", "0.5"), ("--mtp-num-layers", "1"), ("--moe-router-score-function", "sigmoid"),
    ):  # fmt: skip
        assert words[words.index(name) + 1] == value
    assert {"--qk-layernorm", "--add-qkv-bias", "--untie-embeddings-and-output-weights", "--moe-router-enable-expert-bias"} <= set(words)
    names = json.loads((out / "names.json").read_text())
    assert names["tensors"]["mtp.layers.0.eh_proj.weight"]["huggingface"] == ["model.layers.3.eh_proj.weight"]
    assert load_file(out / "huggingface" / "model.safetensors").keys() == load_file(exported / "model.safetensors").keys()
    stops = read_json(exported / "generation_config.json")["eos_token_id"]
    run = (out / "run.sh").read_text()
    assert f"--rollout-stop-token-ids {' '.join(map(str, stops))}" in run and "--advantage-estimator gspo" in run
    assert subprocess.run(["bash", "-n", str(out / "run.sh")]).returncode == 0


def test_the_run_script_reaches_slime_with_its_arguments(lmworks: Lmworks, exported: Path, prompts: Path, tmp_path: Path) -> None:
    """Programs that print their arguments stand where slime would be."""
    out, slime, programs = tmp_path / "with space", tmp_path / "slime", tmp_path / "bin"
    assert lmworks("handover", "slime", exported, "--prompts", prompts, "--out", out).code == 0
    slime.mkdir()
    programs.mkdir()
    for name in ("torchrun", "python3"):
        (programs / name).write_text('#!/bin/sh\nprintf "%s|" "$@"\necho\n')
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "SLIME": str(slime)}
    done = subprocess.run([str(out / "run.sh"), "--extra", "1"], env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    convert, train = [line.split("|")[:-1] for line in done.stdout.splitlines()]
    assert convert[2] == "tools/convert_hf_to_torch_dist.py" and convert[-1] == str(out / "torch_dist")
    assert train[0] == "train.py" and train[-2:] == ["--extra", "1"]
    assert train[train.index("--prompt-data") + 1] == str(out / "prompts.jsonl") and "--mtp-num-layers" in train


def test_a_copy_that_came_out_different_is_not_handed_over(
    lmworks: Lmworks, exported: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(exported, tmp_path / "model"))
    write_json(model / REPORT, {"verdict": PASSED, "files": file_records(model)})

    def lossy(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[: -1 if source.name == "tokenizer.json" else None])

    monkeypatch.setattr(shutil, "copyfile", lossy)
    error = lmworks("handover", "slime", model, "--prompts", prompts, "--out", tmp_path / "slime").error
    assert "huggingface/tokenizer.json is not the file that passed" in error and not (tmp_path / "slime").exists()


BAD = {
    "malformed": ('{"prompt": ', "broken JSON"),
    "no label": ('{"prompt": "What is 1 + 1?"}', "the label is missing or empty"),
    "empty label": ('{"prompt": "What is 1 + 1?", "label": "  "}', "the label is missing or empty"),
    "over-long": (json.dumps({"prompt": "word " * 400, "label": "1"}), "tokens, more than 256"),
    "no prompt": ('{"label": "1"}', "no prompt: its columns are label"),
    "an answer": ('{"prompt": [{"role": "assistant", "content": "a"}], "label": "1"}', "no message of the user"),
    "role": ('{"prompt": [{"role": "root", "content": "a"}], "label": "1"}', "message 1 has the role 'root'"),
    "list": ("[1]", "no object with columns: list"),
    "reward": ('{"prompt": "a", "label": "1", "metadata": {"rm_type": "gold"}}', "metadata.rm_type 'gold' is not known"),
    "half a character": ('{"prompt": "\\ud83d", "label": "1"}', "half a character"),
    "picture": ('{"prompt": "What is this?", "label": "1", "images": ["a.png"]}', "with images: only text is read"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_slime_would_drop_is_refused_with_its_number(
    lmworks: Lmworks, exported: Path, prompts: Path, tmp_path: Path, case: str
) -> None:
    line, message = BAD[case]
    with prompts.open("a", encoding="utf-8") as file:
        file.write(line + "\n" + json.dumps(ROWS[0]) + "\n" + line + "\n")
    error = lmworks("handover", "slime", exported, "--prompts", prompts, "--out", tmp_path / "d").error
    assert "row 4: " in error and message in error and "also wrong: row 6;" in error
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(("url", "reason"), [
    ("http://user:s3cret@reward/score", "--rm-url has credentials, which run.sh and every list of processes would show"),
    ("http://reward/score?api_key=s3cret", "--rm-url has credentials"),
    ("reward:8000", "'reward:8000' is no address of a service"),
    ("$here/score", "is no address of a service"),
])  # fmt: skip
def test_a_service_of_rewards_has_a_plain_address(
    lmworks: Lmworks, exported: Path, prompts: Path, tmp_path: Path, url: str, reason: str
) -> None:
    options = ("--prompts", prompts, "--out", tmp_path / "d", "--rm-type", "remote_rm", "--rm-url", url)
    done = lmworks("handover", "slime", exported, *options)
    assert reason in done.error and "s3cret" not in done.out + done.err and not (tmp_path / "d").exists()


def test_other_refusals_are_one_line(lmworks: Lmworks, exported: Path, prompts: Path, tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "d"
    assert "--prompts FILE --out DIR" in lmworks("handover", "slime", exported).error
    done = lmworks("handover", "slime", exported, "--prompts", prompts, "--out", out, "--rm-type", "gold")
    assert "--rm-type 'gold' is not known" in done.error
    assert "cannot be read" in lmworks("handover", "slime", exported, "--prompts", tmp_path / "no.jsonl", "--out", out).error
    out.mkdir()
    (out / "mine").write_text("")
    assert "is not an empty directory" in lmworks("handover", "slime", exported, "--prompts", prompts, "--out", out).error
    window = export(tiny, tmp_path / "window", QWEN3 | {"sliding_window": "64 tokens"})
    refused = lmworks("handover", "slime", window, "--prompts", prompts, "--out", tmp_path / "e").error
    assert "a sliding window" in refused and not (tmp_path / "e").exists()


def test_lost_layers_of_multi_token_prediction_are_noticed(lmworks: Lmworks, exported: Path, tmp_path: Path) -> None:
    back = tmp_path / "back"
    shutil.copytree(exported, back)
    tensors = load_file(back / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"] = tensors["model.layers.1.self_attn.q_proj.weight"] + 1
    save_file(tensors, back / "model.safetensors", metadata={"format": "pt"})
    done = lmworks("handover", "slime", exported, "--back", back, "--json")
    assert json.loads(done.out) == {"tensors": len(tensors), "changed": 1, "mtp": 1}
    without = {name: one for name, one in tensors.items() if ".layers.3." not in name}
    save_file(without, back / "model.safetensors", metadata={"format": "pt"})
    assert "has lost multi-token prediction" in lmworks("handover", "slime", exported, "--back", back).error
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, back / "model.safetensors", metadata={"format": "pt"})
    assert "lacks lm_head.weight" in lmworks("handover", "slime", exported, "--back", back).error  # another model
    padded = tensors | {"lm_head.weight": torch.zeros(1024, 64)}
    save_file(padded, back / "model.safetensors", metadata={"format": "pt"})
    assert "padding of the vocabulary" in lmworks("handover", "slime", exported, "--back", back).error
    broken = tensors | {"model.norm.weight": torch.full_like(tensors["model.norm.weight"], float("nan"))}
    save_file(broken, back / "model.safetensors", metadata={"format": "pt"})
    assert "not finite" in lmworks("handover", "slime", exported, "--back", back).error


def test_a_config_with_layers_without_weights_is_corrected(lmworks: Lmworks, exported: Path, prompts: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "d"
    shutil.copytree(exported, model)
    tensors = {name: one for name, one in load_file(model / "model.safetensors").items() if ".layers.3." not in name}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    write_json(model / "config.json", read_json(exported / "config.json"))
    assert lmworks("handover", "slime", model, "--prompts", prompts, "--out", out).code == 0
    assert read_json(out / "huggingface" / "config.json")["num_nextn_predict_layers"] == 0
    assert "--mtp-num-layers" not in (out / "model_args.sh").read_text()


def test_a_recipe_stands_for_its_conversations(lmworks: Lmworks, exported: Path, tiny: Tiny, tmp_path: Path) -> None:
    done = lmworks("handover", "slime", exported, "--prompts", tiny.recipe, "--out", tmp_path / "d", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["prompts"] == 324  # all rows of the file
    first = json.loads((tmp_path / "d" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["prompt"] == [{"role": "user", "content": "What is 0 + 0?"}] and first["label"] == "0 + 0 is 0."


@pytest.mark.parametrize("action", ["drop", "report", "fail"])
def test_items_of_the_evaluation_are_not_handed_over(
    lmworks: Lmworks, exported: Path, prompts: Path, tiny: Tiny, tmp_path: Path, action: str
) -> None:
    run, out, own = tmp_path / "run", tmp_path / "d", tmp_path / "own.jsonl"
    recipe = read_json(tiny.run_dir / "resolved.json")
    own.write_text(json.dumps({"question": "What is 4 + 4?"}) + "\n")
    recipe["evaluate"]["protect"] = [{"name": "own", "kind": "jsonl", "path": str(own)}]
    recipe["corpus"]["decontaminate"] = {"ngram_words": 13, "action": action}
    shutil.copytree(exported, run / "export" / "huggingface")
    write_json(run / "resolved.json", recipe)
    done = lmworks("handover", "slime", run, "--prompts", prompts, "--out", out, "--json")
    if action == "fail":
        assert f"--prompts: {prompts}, row 2 is asked by the evaluation; take it out" in done.error and not out.exists()
        return
    assert done.code == 0, done.err
    asked = [json.loads(line)["prompt"][-1]["content"] for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert ("What is 4 + 4?" in asked) == (action == "report") and len(asked) == json.loads(done.out)["prompts"]
    assert json.loads(done.out)["contaminated"] == 1
    assert "1 held an item of the evaluation" in (out / "README.md").read_text()
