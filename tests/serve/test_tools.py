"""Tool calls and thoughts over HTTP, from a model that has learnt one conversation by heart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from lmworks import tokenizer as tokenizers
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.model import Model
from lmworks.serve.vocabulary import Vocabulary
from lmworks.tokenizer.chat import shipped_template
from started_server import ask

CONTEXT = 640
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "code": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
ASKED: list[Any] = [{"role": "user", "content": "Zürich?"}]
ARGUMENTS = {"city": "Zürich", "days": 3, "code": "007"}
CALLING = {"role": "assistant", "content": "I look.", "reasoning_content": "They want <b>weather</b>.", "tool_calls": [
    {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
    {"type": "function", "function": {"name": "clock", "arguments": {}}}]}  # fmt: skip
ANSWERS = [{"role": "tool", "content": "3 °C"}, {"role": "tool", "content": "12:00"}]
TOLD = {"role": "assistant", "content": "It is 3 °C.", "reasoning_content": "Good."}


@pytest.fixture(scope="module")
def taught(tokenizer: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = Path(shutil.copytree(tokenizer.directory, tmp_path_factory.mktemp("taught") / "tokenizer"))
    (folder / "chat_template.jinja").write_text(shipped_template("glm-4.6"), encoding="utf-8")
    speaker = tokenizers.load(folder)
    config = Model(vocab_size=speaker.vocab_size, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, intermediate_size=128, use_qk_norm=True,
                   max_position_embeddings=f"{CONTEXT} tokens")  # fmt: skip
    pupil = initialize(Transformer(config), seed=1).train()
    lessons = [speaker.encode_chat([*ASKED, CALLING], TOOLS), speaker.encode_chat([*ASKED, CALLING, *ANSWERS, TOLD], TOOLS)]
    # after the calls the tool is to speak: the first lesson ends there, not with the conversation
    lessons[0][0][-1] = speaker.special["<|observation|>"]
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=4e-3, weight_decay=0.0)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(1, (step + 1) / 10)
        loss = torch.zeros(())
        for ids, mask in lessons:
            target = torch.where(torch.tensor(mask), torch.tensor(ids), -100)
            loss = loss + torch.nn.functional.cross_entropy(pupil(torch.tensor([ids[:-1]]))[0].float(), target[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.02:
            break
    return pupil.eval(), Vocabulary(speaker)


@pytest.fixture
def client(taught: Any, start: Any) -> openai.OpenAI:
    served = start(context=CONTEXT, model=taught[0], vocabulary=taught[1])
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_calls_come_as_openai_has_them_and_go_back(client: openai.OpenAI) -> None:
    (choice,) = ask(client, ASKED, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == CALLING["content"]
    assert choice.message.reasoning_content == CALLING["reasoning_content"]
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name) for call in calls] == [("function", "weather"), ("function", "clock")]
    assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS, {}]  # the code is text, the days a number
    assert len({call.id for call in calls}) == 2
    results = [{"role": "tool", "tool_call_id": call.id, "content": said["content"]} for call, said in zip(calls, ANSWERS, strict=True)]
    (choice,) = ask(client, [*ASKED, choice.message.model_dump(exclude_none=True), *results], tools=TOOLS).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", TOLD["content"], None)


def test_streams_carry_the_same(client: openai.OpenAI) -> None:
    whole = ask(client, ASKED, tools=TOOLS).choices[0].message
    content, thoughts, calls, ends = "", "", {}, []
    for chunk in ask(client, ASKED, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        thoughts += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            calls[call.index] = (call.id, call.function.name, call.function.arguments)
        ends += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert (content, thoughts) == (whole.content, whole.reasoning_content)
    assert [calls[number][1:] for number in (0, 1)] == [(call.function.name, call.function.arguments) for call in whole.tool_calls]
    assert ends == ["tool_calls"]


def test_one_call_at_a_time(client: openai.OpenAI) -> None:
    """As vLLM does it: the first call counts."""
    (choice,) = ask(client, ASKED, tools=TOOLS, parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", CALLING["content"])
    chunks = list(ask(client, ASKED, tools=TOOLS, parallel_tool_calls=False, stream=True))
    assert [call.function.name for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []] == ["weather"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tokens_of_thoughts_are_counted(client: openai.OpenAI, taught: Any) -> None:
    reply = ask(client, ASKED, tools=TOOLS, logprobs=True)
    tokens = [entry.token for entry in reply.choices[0].logprobs.content]
    end = next(number for number in range(len(tokens)) if "</think>" in "".join(tokens[: number + 1]))
    assert reply.usage.completion_tokens_details.reasoning_tokens == end + 1 > 10
    *_, last = ask(client, ASKED, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details == reply.usage.completion_tokens_details
    silent = ask(client, ASKED, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert silent.usage.completion_tokens_details.reasoning_tokens == 0


def test_plain_completions_show_the_markup(client: openai.OpenAI, taught: Any) -> None:
    prompt = list(taught[1].chat_prompt(ASKED, TOOLS))
    text = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=180).choices[0].text
    assert "<tool_call>weather\n<arg_key>city</arg_key>" in text
