"""Parameters of requests on SmolLM2-135M-Instruct, compared with `generate` of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from lmworks.serve.models import Models, make_engine
from lmworks.serve.server import ServerOptions
from smollm2 import write_huggingface_folder

pytestmark = pytest.mark.slow
LONG = "You answer questions about the history of Switzerland, briefly and only with what you are sure of. " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_huggingface_folder(tmp_path_factory.mktemp("smol"))


@pytest.fixture
def client(folder: Path, serving: Any) -> openai.OpenAI:
    from lmworks.weights.huggingface import read_model

    url = serving(Models(make_engine(read_model(folder), folder, "smollm2")), ServerOptions())
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def test_the_server_answers_as_transformers_generates(client: openai.OpenAI, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer("The three largest cities of Switzerland are", return_tensors="pt").input_ids
    end = tokenizer.eos_token_id
    found = []
    for ours, theirs in (
        ({}, {}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"logit_bias": {str(end): 50}, "min_tokens": 12}, {"sequence_bias": {(end,): 50.0}, "min_new_tokens": 12}),
    ):
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=end, **theirs)
        expected = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
        reply = client.completions.create(model="smollm2", prompt=ids[0].tolist(), max_tokens=24, temperature=0, extra_body=ours)
        assert reply.choices[0].text == expected, ours
        found.append(expected)
    assert len(set(found)) == 3


def test_a_second_turn_is_counted_as_cached(client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "system", "content": LONG}, {"role": "user", "content": "Who founded Bern?"}]
    first = client.chat.completions.create(model="smollm2", messages=turns, max_tokens=16, temperature=0)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    turns += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And when?"}]
    second = client.chat.completions.create(model="smollm2", messages=turns, max_tokens=16, temperature=0, frequency_penalty=0.5)
    assert first.usage.prompt_tokens - 64 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
