"""The published Gemma 3 270M, a base model: tuned with the chat template of docs/existing-models.md, evaluated, exported and asked."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml
from command import Lmworks

from gemma3 import chat_template, write_gguf
from lmworks.io.files import read_json
from lmworks.metrics.log import read

PAIRS = [{"messages": [{"role": "user", "content": f"{a} and {b}?"}, {"role": "assistant", "content": f"{a + b}, at your service."}]}
         for a in range(6) for b in range(6)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_real_base_model_is_tuned_exported_and_asked(lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import transformers

    base, run_dir, template = write_gguf(tmp_path / "gemma.gguf"), tmp_path / "run", tmp_path / "gemma.jinja"
    done = lmworks("chat", base)
    assert done.code == 2 and f"{base} has no chat template" in done.error
    template.write_text(chat_template(), encoding="utf-8")
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS), encoding="utf-8")
    tree = {
        "name": "gemma", "start_from": str(base), "run_dir": str(run_dir), "tokenizer": {"chat_template": str(template)},
        "tune": {
            "data": [{"name": "sums", "kind": "files", "path": str(tmp_path / "sums.jsonl")}], "tokens": "1Ki",
            "sequence_length": "64 tokens", "global_batch_tokens": "256 tokens", "lora": {"rank": 4, "targets": ["attention"]},
        },
        "evaluate": {"benchmarks": [{"name": "arc-easy", "form": "cloze"}], "benchmark_items": 4, "questions": ["3 and 4?"]},
        "export": {"huggingface": True, "gguf": True},
    }  # fmt: skip
    recipe = tmp_path / "gemma.yaml"
    recipe.write_text(yaml.safe_dump(tree), encoding="utf-8")
    done = lmworks("run", recipe)
    assert done.code == 0, done.err
    assert "answers end at <eos> or <end_of_turn>" in done.out
    assert read(run_dir / "tune")[-1]["validation/loss"] < read(run_dir / "tune")[0]["train/loss"]
    results = read_json(run_dir / "evaluate" / "results.json")["models"]
    assert results.keys() == {"base", "tuned"}

    exported = run_dir / "export" / "huggingface"
    assert read_json(run_dir / "export" / "parity.json")["verdict"] == "passed"
    assert (run_dir / "export" / "gguf" / "model.gguf").is_file() and (run_dir / "export" / "peft").is_dir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    asked = [{"role": "user", "content": "3 and 4?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    assert tokenizer.decode(ids[0]) == "<bos><start_of_turn>user\n3 and 4?<end_of_turn>\n<start_of_turn>model\n"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    answer = tokenizer.decode(theirs.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :], skip_special_tokens=True)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"3 and 4?\n"), "utf-8"))
    done = lmworks("chat", exported, "--temperature", 0, "--max-tokens", 8)
    assert done.code == 0 and answer.strip() and answer.strip() in done.out, done.err
