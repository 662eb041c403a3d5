from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmworks.tokenizer import Tokenizer
from lmworks.tokenizer.chat import Template, shipped_template
from lmworks.tokenizer.reply import Reply, ReplyReader, ToolCall, read

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "note": {"type": "string"}}}}}, {"name": "clock"}]
CALL = ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>12</arg_value>\n</tool_call>")
CALLED = ToolCall("weather", '{"city": "12", "days": 12}')


@pytest.mark.parametrize(("text", "reply"), [
    ("", Reply()),
    (" \n plain text \n", Reply("", " \n plain text \n")),
    ("\n<think></think>\nHello", Reply("", "Hello")),
    ("<think>so\nwhat</think>\n\n Hello ", Reply("so\nwhat", "Hello ")),
    ("<think>never ends </thin", Reply("never ends </thin")),
    ("a <think>b</think>", Reply("", "a <think>b</think>")),
    ("<thinking>", Reply("", "<thinking>")),
    (CALL, Reply("", "", [CALLED])),
    (f"\n<think>t</think>\nI look. \n{CALL}\n{CALL}\n", Reply("t", "I look.", [CALLED, CALLED])),
    ("<tool_call>clock\n</tool_call>", Reply("", "", [ToolCall("clock", "{}")])),
    ("<tool_call>clock</tool_call> and so", Reply("", "and so", [ToolCall("clock", "{}")])),
    ("x \n<tool_call>unknown\n</tool_call>", Reply("", "x \n<tool_call>unknown\n</tool_call>")),
    ("<tool_call>clock\n<arg_key>a</arg_key>\n", Reply("", "<tool_call>clock\n<arg_key>a</arg_key>\n")),
    ("<tool_call>clock junk</tool_call>", Reply("", "<tool_call>clock junk</tool_call>")),
    ("a < b <tool", Reply("", "a < b <tool")),
])
def test_parts_of_an_answer_do_not_depend_on_how_it_is_cut(text: str, reply: Reply) -> None:
    assert read(text, TOOLS) == reply
    reader, parts = ReplyReader(TOOLS), Reply()
    for piece in [*map(reader.push, text), reader.finish()]:
        parts = Reply(parts.reasoning + piece.reasoning, parts.content + piece.content, parts.calls + piece.calls)
    assert parts == reply


def test_without_tools_nothing_is_a_call_and_after_a_silent_prompt_nothing_a_thought() -> None:
    assert read(CALL) == Reply("", CALL)
    assert read("\n<think>x</think>", thinking=False) == Reply("", "<think>x</think>")


@given(st.text(alphabet="<think>/tol_cargkeyvu \n{", max_size=80))
def test_text_that_holds_no_markup_comes_out_as_it_went_in(text: str) -> None:
    if "<think>" not in text and "<tool_call>" not in text:
        assert read(text, TOOLS) == Reply("", text)


values = st.one_of(st.integers(), st.booleans(), st.none(), st.text(max_size=8), st.lists(st.text(max_size=4), max_size=3),
                   st.dictionaries(st.text(max_size=4), st.integers(), max_size=2))
no_markup = st.text(max_size=20).filter(lambda text: "<" not in text)


@given(city=no_markup, days=values, thoughts=no_markup, content=no_markup, count=st.integers(1, 3))
@pytest.mark.parametrize("name", [pytest.param("brief", marks=pytest.mark.slow), "glm-4.6"])
def test_what_the_template_writes_is_read_back(name: str, city: str, days: Any, thoughts: str, content: str, count: int) -> None:
    if isinstance(days, str) and _reads_as_json(days):
        days = "x"  # a bare string for a parameter that is declared no string is read as what it looks like
    if "<" in json.dumps(days, ensure_ascii=False):
        days = 1
    arguments = {"city": city, "days": days}
    message = {"role": "assistant", "content": content, "reasoning_content": thoughts,
               "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}] * count}
    template = Template(shipped_template(name), name)
    text = template.render([{"role": "user", "content": "?"}, message], TOOLS)
    written = text.split("<|assistant|>")[1].removesuffix("<|endoftext|>")
    reply = read(written, TOOLS)
    assert (reply.reasoning.strip(), reply.content.strip()) == (thoughts.strip(), content.strip())
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("weather", arguments)] * count


def _reads_as_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_generated_ids_reach_the_reader_with_their_markup(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"\n<think>t</think>\nI look.\n{CALL}<|observation|>", allow_special=True)
    assert read(tokenizer.decode(ids, skip_special=True), TOOLS) == Reply("t", "I look.", [CALLED])
