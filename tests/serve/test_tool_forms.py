"""Tool calls of Mistral and Llama over HTTP, whose marks are control tokens: from models that have learnt one conversation by heart."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import openai
import pytest
import torch

import base_models
from base_models import LLAMA, MISTRAL, write_tokenizer
from child_process import child_process
from lmworks import tokenizer as tokenizers
from lmworks.export.huggingface import write_model
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.model import Model
from lmworks.serve.structured import tools_grammar
from lmworks.serve.vocabulary import Vocabulary
from started_server import ask, wait_until_served

CONTEXT = 512
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}}},
]  # fmt: skip
ASKED: list[Any] = [{"role": "user", "content": "Zürich?"}]
ARGUMENTS = {"city": "Zürich", "days": 3}
CALLS = [{"id": "abc123456", "type": "function", "function": {"name": name, "arguments": arguments}}
         for name, arguments in (("weather", ARGUMENTS), ("clock", {}))]  # fmt: skip
TOLD = "It is 3."

_ID = "{{- raise_exception('an id has 9 characters') if %s is not defined or %s | length != 9 -}}"
_NAMED = MISTRAL.replace(
    "{{- '[TOOL_CALLS] ' -}}{{- m.tool_calls | map(attribute='function') | list | tojson -}}",
    "{%- for call in m.tool_calls -%}" + _ID.replace("%s", "call.id") + "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' -}}"
    "{{- call.function.arguments | tojson -}}{%- endfor -%}",
).replace("{{- '[TOOL_RESULTS] '", _ID.replace("%s", "m.tool_call_id") + "{{- '[TOOL_RESULTS] '")
_BARE = LLAMA.replace("{{- '<|python_tag|>' }}", "").replace("'parameters'", '"parameters"')
TEMPLATES = {
    "mistral": ("mistral", MISTRAL, 2, '[TOOL_CALLS][{"name":"clock","arguments":{}}]'),
    "mistral, named": ("mistral", _NAMED, 2, "[TOOL_CALLS]clock[ARGS]{}"),  # since version 11 of its tokenizers
    "llama": ("llama", LLAMA, 1, '{"name":"clock","parameters":{}}'),  # behind <|python_tag|>
    "llama, bare": ("llama", _BARE, 1, '{"name":"clock","parameters":{}}'),
}


@pytest.fixture(scope="module", params=TEMPLATES)
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, template, calls, forced = TEMPLATES[request.param]
    folder = tmp_path_factory.mktemp("taught")
    with pytest.MonkeyPatch.context() as patch:
        given = base_models.KINDS[kind]
        more = ("[ARGS]",) if "[ARGS]" in template else ()
        patch.setitem(base_models.KINDS, kind, replace(given, template=template, special=given.special + more))
        write_tokenizer(folder, kind)
    speaker = tokenizers.load(folder)
    config = Model(vocab_size=speaker.vocab_size, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                   head_dim=16, intermediate_size=128, use_qk_norm=True, max_position_embeddings=f"{CONTEXT} tokens")  # fmt: skip
    pupil = initialize(Transformer(config), seed=1).train()
    results = [{"role": "tool", "tool_call_id": "abc123456", "content": "3 °C"}] * calls
    told = {"role": "assistant", "content": TOLD}
    ids, mask = speaker.encode_chat([*ASKED, {"role": "assistant", "content": "", "tool_calls": CALLS[:calls]}, *results, told], TOOLS)
    target = torch.where(torch.tensor(mask), torch.tensor(ids), -100)[1:]
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(300):
        loss = torch.nn.functional.cross_entropy(pupil(torch.tensor([ids[:-1]]))[0].float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    return pupil.eval(), Vocabulary(speaker), calls, folder, forced


@pytest.fixture
def client(taught: Any, start: Any) -> openai.OpenAI:
    served = start(context=CONTEXT, model=taught[0], vocabulary=taught[1])
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def named(calls: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_calls_are_read_whole_and_streamed_and_their_results_are_understood(client: openai.OpenAI, taught: Any) -> None:
    (choice,) = ask(client, ASKED, tools=TOOLS).choices
    message, expected = choice.message, [("weather", ARGUMENTS), ("clock", {})][: taught[2]]
    assert (choice.finish_reason, (message.content or "").strip()) == ("tool_calls", "")
    assert named(message.tool_calls) == expected
    results = [{"role": "tool", "tool_call_id": call.id, "content": "3 °C"} for call in message.tool_calls]
    after = ask(client, [*ASKED, message.model_dump(exclude_none=True), *results], tools=TOOLS).choices[0]
    assert (after.finish_reason, after.message.content.strip(), after.message.tool_calls) == ("stop", TOLD, None)
    content, calls, ends = "", [], []
    for chunk in ask(client, ASKED, tools=TOOLS, stream=True):
        content += chunk.choices[0].delta.content or ""
        calls += chunk.choices[0].delta.tool_calls or []
        ends += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert (content.strip(), named(calls), ends) == ("", expected, ["tool_calls"])
    assert [call.index for call in calls] == list(range(taught[2]))


@pytest.mark.parametrize("taught", ["mistral"], indirect=True)
def test_calls_are_read_from_the_command_line(taught: Any) -> None:
    write_model(taught[0], taught[3], {}, torch.float32)
    command = [sys.executable, "-m", "lmworks.cli.main", "serve", str(taught[3]), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
    with child_process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        url, _ = wait_until_served(process)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        (choice,) = client.chat.completions.create(model=taught[3].name, messages=ASKED, tools=TOOLS, temperature=0).choices
        process.send_signal(signal.SIGINT)
    assert choice.finish_reason == "tool_calls" and named(choice.message.tool_calls) == [("weather", ARGUMENTS), ("clock", {})]


def test_without_tools_and_for_other_tools_calls_are_text(client: openai.OpenAI) -> None:
    (choice,) = ask(client, ASKED).choices
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert '"Zürich"' in choice.message.content
    assert not re.search(r"python_tag|TOOL_CALLS|ARGS", choice.message.content), "a control token where no tools are offered"
    (other,) = ask(client, ASKED, tools=[{"type": "function", "function": {"name": "other"}}]).choices
    assert other.finish_reason == "stop" and other.message.tool_calls is None and '"Zürich"' in other.message.content


def test_forced_calls_are_written_in_the_form_of_the_template(client: openai.OpenAI, taught: Any) -> None:
    pytest.importorskip("llguidance")
    for temperature in (0, 2):
        (choice,) = client.chat.completions.create(
            model="tiny", messages=ASKED, tools=TOOLS, tool_choice="required", temperature=temperature, seed=1, max_tokens=120
        ).choices
        assert choice.finish_reason == "tool_calls" and not (choice.message.content or "").strip()
        assert {name for name, _ in named(choice.message.tool_calls)} <= {"weather", "clock"}
    only = {"type": "function", "function": {"name": "clock"}}
    (choice,) = ask(client, ASKED, tools=TOOLS, tool_choice=only).choices
    assert named(choice.message.tool_calls) == [("clock", {})]
    path = tools_grammar(taught[1], TOOLS[1:], several=True).answer(120).path
    assert path and b"".join(map(taught[1].token_bytes, path)).decode() == taught[4]
