"""Words and options of other tools are answered with the command that does the same; the shell completes commands, stages and keys."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from command import Lmworks

from lmworks.cli import completion, habits
from lmworks.cli.main import COMPLETE, command_tree
from lmworks.recipe.keys import known_paths
from lmworks.recipe.schema.recipe import Recipe


def command_of(words: list[str]) -> bool:
    tree = command_tree()
    for word in words:
        tree = getattr(tree, "commands", {}).get(word)
    return tree is not None


def test_the_table_leads_to_commands_and_keys_that_exist_and_to_one_each() -> None:
    words = [word for listed in habits.WORDS.values() for word in listed.split()]
    assert not [word for word, count in Counter(words).items() if count > 1]
    assert not {*words} & {*command_tree().commands}
    assert all(command_of(command.split()) for command in habits.WORDS if not command.startswith("--"))
    assert {*habits.KEYS} <= {*known_paths(Recipe)}


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("train r.yaml", "run r.yaml"),
        ("finetune r.yaml", "tune r.yaml"),
        ("sft r.yaml --lr 1e-4", "tune r.yaml --set tune.learning_rate=1e-4"),
        ("dpo r.yaml --epochs 2 --learning-rate=1e-6", "dpo r.yaml --set dpo.epochs=2 --set dpo.learning_rate=1e-6"),
        ("grpo r.yaml --epochs 2 --lr 1e-6", "grpo r.yaml --epochs 2 --set grpo.learning_rate=1e-6"),
        ("checkpoints list runs/x", "ckpt list runs/x"),
        ("checkpoint verify runs/x", "ckpt verify runs/x"),
        ("checkpoint runs/x", "ckpt list runs/x"),
        ("torchrun slurm r.yaml", "launch slurm r.yaml"),
        ("SFT r.yaml --size 3M", "tune r.yaml --size 3M"),
        ("eval runs/x", "evaluate runs/x"),
        ("eval --model runs/x", "evaluate runs/x"),
        ("generate runs/x", "chat runs/x"),
        ("merge_lora r.yaml", "export r.yaml"),
        ("preprocess r.yaml", "corpus prepare r.yaml"),
        ("tokenize r.yaml", "shards build r.yaml"),
        ("status runs/x", "report runs/x"),
        ("resume r.yaml", "run r.yaml"),
        ("gpus", "preflight"),
        ("help", "--help"),
        ("help run", "run --help"),
        ("version", "--version"),
        ("reprot runs/x", "report runs/x"),
        ("run --config r.yaml", "run r.yaml"),
        ("run --recipe=r.yaml --to tune", "run r.yaml --to tune"),
        ("show -c r.yaml", "show r.yaml"),
        ("run r.yaml optimizer.learning_rate=1e-3 ++seed=2", "run r.yaml --set optimizer.learning_rate=1e-3 --set seed=2"),
        ("run r.yaml --optimizer.learning_rate 1e-3", "run r.yaml --set optimizer.learning_rate=1e-3"),
        ("run r.yaml --lr=1e-3 --resume", "run r.yaml --set optimizer.learning_rate=1e-3"),
        ("run r.yaml --gpus 8", "launch local r.yaml --ranks 8"),
        ("plan r.yaml --gpus 8xh100", "plan r.yaml --cluster 8xh100"),
        ("sft --config r.yaml seed=3", "tune r.yaml --set seed=3"),
        ("run 'my recipe.yaml' seed=3", "run 'my recipe.yaml' --set seed=3"),
        ("run r.yaml --weight-decay 0.1 --max_grad_norm=2", "run r.yaml --set optimizer.weight_decay=0.1 --set optimizer.max_grad_norm=2"),
        ("run r.yaml --output-dir x --resume-from-checkpoint x/7", "run r.yaml --set run_dir=x"),
        ("run --resume-from-checkpoint r.yaml --seed=2", "run r.yaml --set seed=2"),
        ("sft r.yaml --max-length 512 --lora-r 8", "tune r.yaml --set tune.sequence_length=512 --set tune.lora.rank=8"),
    ],
)
def test_habits_are_answered_with_the_right_command(lmworks: Lmworks, typed: str, right: str) -> None:
    assert lmworks(*shlex.split(typed)).error.endswith(f"; write: lmworks {right}")


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--max-length 512", "train.phases.NAME.sequence_length or tune.sequence_length or dpo.sequence_length or grpo.sequence_length"),
        ("--save-steps=100", "train.save_every; such as 500 steps or 10%"),
        ("--bf16", "train.precision"),
    ],
)
def test_an_option_of_several_keys_or_another_unit_is_not_guessed(lmworks: Lmworks, option: str, instead: str) -> None:
    """Nor one without its value: a command that leaves out what was given would be run as it is."""
    name = option.partition("=")[0].split()[0]
    assert lmworks("run", "r.yaml", *option.split()).error == f"{name} is not an option: use {instead}"


def test_the_published_command_of_trl_is_answered_key_by_key(lmworks: Lmworks) -> None:
    """`trl/scripts/sft.py` 1.x, "LoRA". A batch in tokens is not guessed, so no command is written."""
    typed = """sft r.yaml --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 --num_train_epochs 1
        --packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --eos_token '<|im_end|>' --eval_strategy steps
        --eval_steps 100 --use_peft --lora_r 32 --lora_alpha 16 --output_dir Qwen2-0.5B-SFT --push_to_hub"""
    said = lmworks(*shlex.split(typed)).error
    for name, key in {
        "model_name_or_path": "start_from", "dataset_name": "tune.data", "packing": "shards.packing", "eval_steps": "train.validate_every",
        "per_device_train_batch_size": "train.micro_batch_sequences", "gradient_accumulation_steps": "tune.global_batch_tokens",
        "lora_r": "tune.lora.rank", "lora_alpha": "tune.lora.alpha", "output_dir": "run_dir",
    }.items():  # fmt: skip
        assert f"--{name} is not an option: use {key}" in said
    assert "write:" not in said


def test_what_nobody_knows_is_refused_as_before(lmworks: Lmworks) -> None:
    assert "No such command 'flurb'" in lmworks("flurb").error
    assert lmworks("run", "r.yaml", "--flurb").error == "No such option: --flurb"
    assert "write:" not in lmworks("run").error
    assert "write:" not in lmworks("run", "r.yaml", "x=y").error


def completed(words: str, shell: str = "bash") -> list[str]:
    place = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TYPER_COMPLETE_ARGS": words}
    program = (
        "import gc, sys\ncollections = lambda: gc.get_stats()[0]['collections']\nbefore = collections()\n"
        "from lmworks.cli.main import main\ntry:\n main()\nfinally:\n assert not {'torch', 'numpy', 'pyarrow'} & {*sys.modules}\n"
        " assert collections() - before < 30, 'garbage is collected all the time while modules are imported'"
    )
    given = os.environ | place | {COMPLETE: f"complete_{shell}"}
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, encoding="utf-8", check=True)
    return done.stdout.split()


def test_the_shell_completes_without_loading_torch() -> None:
    assert {"run", "report", "replay", "restore"} == {*completed("lmworks r")}
    assert completed("lmworks run quickstart --to t") == ["tokenizer", "tune"]
    assert completed("lmworks run quickstart --set optimizer.learn") == ["optimizer.learning_rate="]
    assert completed("lmworks docs abl") == ["ablations"] and completed("lmworks ablate qk") == ["qk-norm"]


def test_words_that_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.yaml").touch()
    (tmp_path / "quick.txt").touch()
    (tmp_path / "runs" / "a").mkdir(parents=True)
    assert completion.recipes("quick") == ["quickstart", "quick.yaml"] and completion.runs("") == ["runs/a"]
    assert completion.clusters("4xrtx40") == ["4xrtx4060ti", "4xrtx4070ti", "4xrtx4080", "4xrtx4090"]
    assert "train.phases." in completion.keys("train.p") and completion.keys("tune.lora.rank") == ["tune.lora.rank="]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_of_shells_call_it(lmworks: Lmworks, shell: str) -> None:
    script = subprocess.run(
        [sys.executable, "-m", "lmworks.cli.main"], env=os.environ | {COMPLETE: f"source_{shell}"}, capture_output=True, encoding="utf-8",
        check=True,
    ).stdout  # fmt: skip
    assert f"{COMPLETE}=complete_{shell}" in script and "lmworks" in script
