from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmworks.tokenizer import Tokenizer
from lmworks.tokenizer.calls import ToolCall
from lmworks.tokenizer.chat import Template, shipped_template
from lmworks.tokenizer.reply import Reply, ReplyReader, read, reply_reader
from lmworks.tokenizer.special import CHANNELS, THINK, State, ThoughtForm, thought_form

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
    assert read("\n<think>x</think>", begins="closed") == Reply("", "<think>x</think>")


@pytest.mark.parametrize(("template", "prompt", "state"), [
    ("<think>", "<|assistant|>\n<think>\n", "open"), ("<think>", "<|assistant|>\n<think></think>\n", "closed"),
    ("<think>", "<｜Assistant｜></think>", "closed"), ("<think>", "What is <think>?<|im_end|>\n<|im_start|>assistant\n", "free"),
    ("[THINK]", "[/INST][THINK]", "open"), ("[THINK]", "<think>\n", "free"), ("<seed:think>", "<seed:think>\n</seed:think>", "closed"),
    ("<|START_THINKING|>", "<|CHATBOT_TOKEN|><|START_THINKING|>", "open"), ("<|channel|>", "<|start|>assistant", "free"),
    ("<|channel|>", "<|start|>assistant<|channel|>analysis<|message|>", "open"), ("<|channel|>", "<|message|>Hi<|end|>", "free"),
    ("<|channel|>", "<|start|>assistant<|channel|>final<|message|>", "closed"), ("", "", "free"),
])
def test_the_end_of_a_prompt_says_where_the_reply_begins(template: str, prompt: str, state: State) -> None:
    assert (thought_form(template) or THINK).state(prompt) == state


_CALL = '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}'


@pytest.mark.parametrize(("begins", "text", "reply"), [
    ("free", "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|> It is.<|return|>",
     Reply("so", " It is.")),
    ("free", f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{_CALL}<|call|>", Reply("so", "", [ToolCall("clock", "{}")])),
    ("free", f"{_CALL}<|call|><|start|>assistant{_CALL}", Reply("", "", [ToolCall("clock", "{}")] * 2)),
    ("free", " to=functions.clock<|channel|>commentary json<|message|>{}", Reply("", "", [ToolCall("clock", "{}")])),
    ("free", _CALL.replace("clock", "unknown"), Reply("", "{}")), ("free", _CALL + "{", Reply("", "{}{")),
    ("free", "<|channel|>analysis to=python<|message|>1 + 1<|end|>", Reply("1 + 1")),
    ("free", "<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", Reply("", "a\nb")),
    ("free", "<|channel|>analysis<|message|>a <|en", Reply("a <|en")), ("free", "<|channel|>anal", Reply()), ("free", "", Reply()),
    ("free", "plain < text", Reply("", "plain < text")),
    ("free", "<|channel|>analysis<|message|>a<|channel|>final<|message|>b", Reply("a", "b")),
    ("open", "so<|end|><|start|>assistant<|channel|>final<|message|>It is.", Reply("so", "It is.")),
    ("closed", "It is.<|return|>", Reply("", "It is.")),
])
def test_messages_in_channels_are_read_however_they_are_cut(begins: State, text: str, reply: Reply) -> None:
    assert read(text, TOOLS, begins, thoughts=CHANNELS) == reply
    for size in (1, 2, 7):
        reader, parts = reply_reader(TOOLS, begins, thoughts=CHANNELS), Reply()
        for piece in [*(reader.push(text[at : at + size]) for at in range(0, len(text), size)), reader.finish()]:
            parts = Reply(parts.reasoning + piece.reasoning, parts.content + piece.content, parts.calls + piece.calls)
        assert parts == reply


@pytest.mark.parametrize(("text", "reply"), [
    ("so</think>\n\nIt is.", Reply("so", "It is.")), ("\n<think>\nso</think>It is.", Reply("\nso", "It is.")), ("so", Reply("so")),
    ("", Reply()), ("</think>It is.", Reply("", "It is.")), ("<thin", Reply("<thin")), ("so<think></think>It", Reply("so<think>", "It")),
])
def test_a_reply_begins_in_the_thoughts_that_its_prompt_has_opened(text: str, reply: Reply) -> None:
    assert read(text, TOOLS, "open") == reply
    reader, parts = ReplyReader(TOOLS, "open"), Reply()
    for piece in [*map(reader.push, text), reader.finish()]:
        parts = Reply(parts.reasoning + piece.reasoning, parts.content + piece.content)
    assert parts == reply


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


def test_rollouts_and_evaluations_decode_control_tokens_that_are_marks(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's mark stands for one of a channel here, the observation's for a control token that is none."""
    form = ThoughtForm("<|user|>", "<|user|>", (), ("<|user|>",))
    monkeypatch.setitem(tokenizer.__dict__, "thoughts", form)
    ids = tokenizer.encode("<|user|>Hm.<|user|>6<|observation|>", allow_special=True)
    assert tokenizer.decode_reply(ids) == "<|user|>Hm.<|user|>6" and tokenizer.decode(ids, skip_special=True) == "Hm.6"
    assert tokenizer.state_of_thoughts(ids[:1]) == "open" and tokenizer.state_of_thoughts(ids[:2]) == "free"
