"""recipes/assistant.yaml on the real model, with little of everything: each stage that trains, evaluation, export, chat."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml
from command import Lmworks

from lmworks.io.files import read_json
from lmworks.metrics.log import read
from lmworks.weights.run_models import load_model
from smollm2 import ASSISTANT, gguf_file

PAIRS = [
    {"prompt": f"What is {a} plus {b}?", "chosen": f"It is {a + b}.", "rejected": f"It is {a + b + 3}, I think."}
    for a in range(3) for b in range(3)
]  # fmt: skip
LITTLE = {
    "tune.tokens": "4Ki", "tune.data.service.max_rows": 60, "tune.data.tasks.max_rows": 60, "tune.global_batch_tokens": "1Ki",
    "evaluate.benchmark_items": 4, "evaluate.task_items": 2, "evaluate.questions": ["What is the capital of France?"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_real_model_goes_through_every_stage(lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import transformers

    pairs, prompts, run_dir = tmp_path / "pairs.jsonl", tmp_path / "prompts.jsonl", tmp_path / "run"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in PAIRS), encoding="utf-8")
    asked = [{"prompt": row["prompt"], "answer": row["chosen"].removeprefix("It is ").rstrip(".")} for row in PAIRS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    lora = {"rank": 4, "targets": ["attention"]}
    tree = yaml.safe_load(ASSISTANT.read_text(encoding="utf-8")) | {"run_dir": str(run_dir), "start_from": str(gguf_file())}
    data = [{"name": "sums", "kind": "files", "path": str(pairs)}]
    tree["dpo"] = {"data": data, "pairs_per_step": 4, "sequence_length": "64 tokens", "lora": lora}
    tree["grpo"] = {
        "data": [{"name": "sums", "kind": "files", "path": str(prompts), "reward": "numeric"}], "steps": 1, "group_size": 2,
        "validation_prompts": 1,
        "prompts_per_step": 2, "max_new_tokens": 16, "sequence_length": "64 tokens", "lora": lora,
    }  # fmt: skip
    recipe = tmp_path / "assistant.yaml"
    recipe.write_text(yaml.safe_dump(tree), encoding="utf-8")
    done = lmworks("run", recipe, *(word for key, value in LITTLE.items() for word in ("--set", f"{key}={json.dumps(value)}")))
    assert done.code == 0, done.err

    assert sum(path.stat().st_size for path in (run_dir / "checkpoints").rglob("*")) < 1e6, "the base model is not copied into the run"
    results = read_json(run_dir / "evaluate" / "results.json")["models"]
    assert results.keys() == {"base", "tuned", "dpo", "grpo"}
    assert {"answers: service", "answers: tasks"} <= results["base"]["bits_per_byte"].keys()
    before, after = (results[name]["bits_per_byte"]["answers: service"]["bits_per_byte"] for name in ("base", "tuned"))
    assert after < before, "a few steps of tuning at the derived rate help"
    for stage in ("tune", "dpo", "grpo"):
        assert abs(read(run_dir / stage)[-1]["validation/forgetting"]) < 0.05
    assert "Paris" in results["grpo"]["samples"][0]["completion"]

    exported = run_dir / "export" / "huggingface"
    assert (run_dir / "export" / "gguf" / "model.gguf").is_file() and (run_dir / "export" / "peft").is_dir()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 12 plus 345?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )  # fmt: skip
    ours = load_model(run_dir, "grpo").float().eval()
    with torch.no_grad():
        expected, found = theirs(ids).logits, ours(ids)
    assert (found - expected).abs().max() < 0.02 * expected.abs().max(), "the export is in bf16"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What is the capital of France?\n"), "utf-8"))
    chat = lmworks("chat", run_dir, "--temperature", 0)
    assert chat.code == 0 and "Paris" in chat.out, chat.err
