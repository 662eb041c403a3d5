"""Our Hugging Face export in vLLM's CPU build: the same ids, the same log-probabilities, the same greedy text.

Tolerance of log-probabilities: 5e-5 in fp32, where 1e-5 is the most that was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import ask, engine
from small_models import CHATS, STEPS, TEXTS

from lmworks.export.export import write_huggingface
from lmworks.inference.generate import SAMPLING, GenerateOptions, generate
from lmworks.recipe.families.registry import class_for

pytestmark = [pytest.mark.slow, pytest.mark.needs("vllm")]


@pytest.mark.parametrize("name", ["glm4moe", "qwen3", "llama", "smollm3"])
def test_ids_log_probabilities_and_greedy_text(make_run: Callable[..., Any], tmp_path: Path, name: str) -> None:
    python, run = engine("LMWORKS_VLLM_PYTHON"), make_run(name, STEPS)
    write_huggingface(run.model, run.tokenizer, tmp_path / "hf", torch.float32)
    texts = [text[:300] for text in TEXTS if "<|user|>" not in text]  # transformers makes that a special token; lmworks on purpose does not
    answer = ask(python, "scores_vllm.py", {"model": str(tmp_path / "hf"), "texts": texts, "chats": CHATS})
    assert answer["architecture"] == class_for(run.recipe.model)
    for text, found in zip(texts, answer["texts"], strict=True):
        ids = run.tokenizer.encode(text)
        assert found["ids"] == ids
        with torch.no_grad():
            logprobs = run.model(torch.tensor([ids]))[0].double().log_softmax(-1)
        difference = np.abs(logprobs[range(len(ids) - 1), ids[1:]].numpy() - found["logprobs"])
        print(f"{name}: {len(ids)} tokens, log-probabilities differ by at most {difference.max():.1e}, mean {difference.mean():.1e}")
        assert difference.max() < 5e-5
        assert generate(run.model, [ids[:40]], GenerateOptions(max_new_tokens=16, temperature=0.0, stop_ids=())) == [found["greedy"]]
    for chat, ids in zip(CHATS, answer["chats"], strict=True):
        assert ids == run.tokenizer.encode_chat(chat["messages"], chat.get("tools"), add_generation_prompt=True)[0]
    assert {key: answer[key] for key in SAMPLING} == pytest.approx(SAMPLING)
