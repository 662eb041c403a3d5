"""A hand-over, from the command line to slime's own programs: run.sh starts slime's and Megatron's parsers, checks, data set and rewards.

What needs GPUs (SGLang's engines, training) is not run. The sources are those that `tests/export/engines.sh DIR slime` fetches.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_megatron import MODELS

import smollm2
from deployable import export
from lmworks.tokenizer import load
from tiny_run import Tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "export"))
from engines import engine

pytestmark = [pytest.mark.slow, pytest.mark.needs("slime")]
SCRIPT = Path(__file__).with_name("slime_parser.py")
ROWS = [{"question": f"What is {one} + {one}?", "answer": str(2 * one)} for one in range(1, 131)]
SCALED = {"llama, scaled": MODELS["llama"] | {"rope": {"scaling": "linear", "factor": 2}}}
EVERY = MODELS | SCALED


def hand_over(model: Path, folder: Path, *options: str) -> Path:
    """Write a hand-over, and where its run.sh expects slime's programs, `slime_parser.py`."""
    prompts, out = folder / "prompts.jsonl", folder / "out"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = [sys.executable, "-m", "lmworks.cli.main", "handover", "slime", str(model), "--prompts", str(prompts), "--out", str(out)]
    subprocess.run([*command, *options], check=True)
    (folder / "programs" / "tools").mkdir(parents=True)
    for name in ("train.py", "tools/convert_hf_to_torch_dist.py"):
        shutil.copyfile(SCRIPT, folder / "programs" / name)
    return out


def run(out: Path) -> subprocess.CompletedProcess[str]:
    """run.sh, whose programs write their answers beside `out`."""
    environment = os.environ | {
        "SLIME": str(out.parent / "programs"), "SLIME_SOURCE": str(engine("LMWORKS_SLIME")), "ANSWERS": str(out.parent),
        "PYTHONPATH": str(engine("LMWORKS_SLIME_MEGATRON")), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    return subprocess.run([out / "run.sh"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")


def answers(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def check(model: Path, folder: Path, rm_type: str) -> dict[str, Any]:
    out = hand_over(model, folder, "--rm-type", rm_type)
    done = run(out)
    assert done.returncode == 0, done.stdout[-4000:]
    converter, train = answers(folder, "convert_hf_to_torch_dist.py")["arguments"], answers(folder, "train.py")
    config = json.loads((model / "config.json").read_text())
    for name, value in (("num_layers", config["num_hidden_layers"]), ("hidden_size", config["hidden_size"]), ("hidden_dropout", 0)):
        assert converter[name] == train["arguments"][name] == value
    assert train["arguments"]["num_rollout"] == 2 and train["arguments"]["global_batch_tokens"] == 128 * 8 // 4
    ours = [load(model).apply_chat(row["prompt"], add_generation_prompt=True) for row in map(json.loads, (out / "prompts.jsonl").open())]
    assert sorted(train["prompts"]) == sorted(ours) and len(ours) == len(ROWS)
    assert all(right > wrong for right, wrong in train["rewards"])
    return train["arguments"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "rm_type"), zip(EVERY, ["math", "dapo", "f1", "deepscaler", "math", "dapo"], strict=True))
def test_slime_takes_the_hand_over_of_every_class(tiny: Tiny, tmp_path: Path, name: str, rm_type: str) -> None:
    found = check(export(tiny, tmp_path, EVERY[name]), tmp_path, rm_type)
    assert found["moe_router_dtype"] == ("fp32" if "moe" in EVERY[name] else None)


def test_slime_takes_a_real_model(tmp_path: Path) -> None:
    check(smollm2.write_huggingface_folder(tmp_path / "model"), tmp_path, "math")


def test_slime_refuses_a_model_of_other_sizes(tiny: Tiny, tmp_path: Path) -> None:
    """So the test would notice wrong arguments."""
    out = hand_over(export(tiny, tmp_path, MODELS["llama"]), tmp_path)
    script = out / "model_args.sh"
    script.write_text(script.read_text().replace("--ffn-hidden-size 128", "--ffn-hidden-size 64"))
    done = run(out)
    assert done.returncode != 0 and "intermediate_size in hf config 128 is not equal to ffn_hidden_size 64" in done.stdout
