"""Tool calls in the forms of Mistral and Llama: whole and cut anywhere, several, malformed, and as their templates write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base_models import KINDS, write_tokenizer
from lmworks.errors import UserError
from lmworks.tokenizer import StreamDecoder, load
from lmworks.tokenizer.reply import Reply, ReplyReader, ToolCall, read
from lmworks.tokenizer.special import tool_form

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}}}}}, {"name": "clock"}]
FORMS = {"mistral": "[TOOL_CALLS]", "llama": "<|python_tag|>", "llama-3.2": '<|start_header_id|> {"name": n, "parameters": p}',
         "hermes": '<tool_call>{"name": n, "arguments": a}', "glm": "<tool_call> <arg_key>", "deepseek": "<｜tool▁calls▁begin｜>",
         "coder": "<tool_call> <function= <parameter="}
CITY, CLOCK = ToolCall("weather", '{"city": "Zürich [TOOL_CALLS] } ;"}'), ToolCall("clock", "{}")
LISTED = f'{{"name": "weather", "arguments": {CITY.arguments}, "id": "abc123456"}}'
NAMED = f"[TOOL_CALLS]weather[CALL_ID]abc123456[ARGS]{CITY.arguments}"
PLAIN = f'{{"type": "function", "name": "weather", "parameters": {CITY.arguments}}}'
TIME = '{"name": "clock", "parameters": {}}'
CODE = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{CITY.arguments}\n```<｜tool▁call▁end｜>"
BARE = "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
CALLS = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
CODER = f"<tool_call>\n<function=weather>\n<parameter=city>\n{json.loads(CITY.arguments)['city']}\n</parameter>\n</function>\n</tool_call>"

REPLIES: list[tuple[str, str, Reply]] = [
    ("mistral", f"[TOOL_CALLS] [{LISTED}]", Reply("", "", [CITY])),
    ("mistral", f'[TOOL_CALLS][{LISTED}, {{"arguments": {{}}, "name": "clock"}}]\n', Reply("", "", [CITY, CLOCK])),
    ("mistral", f"<think>t</think>\nI look. [TOOL_CALLS][{LISTED}] Done.", Reply("t", "I look.Done.", [CITY])),
    ("mistral", NAMED, Reply("", "", [CITY])),
    ("mistral", f"{NAMED}[TOOL_CALLS]clock[ARGS]{{}}", Reply("", "", [CITY, CLOCK])),
    ("mistral", f"{NAMED}[TOOL_CALLS]clock[ARGS]{{", Reply("", "[TOOL_CALLS]clock[ARGS]{", [CITY])),
    ("mistral", f"[TOOL_CALLS]bad [TOOL_CALLS][{LISTED}]", Reply("", "[TOOL_CALLS]bad", [CITY])),
    ("llama", f"<|python_tag|>{PLAIN}", Reply("", "", [CITY])),
    ("llama", f"I look. <|python_tag|>{PLAIN}; {TIME}", Reply("", "I look.", [CITY, CLOCK])),
    ("llama", f"<|python_tag|>{PLAIN}<|python_tag|>{TIME}", Reply("", "", [CITY, CLOCK])),
    ("llama", f"<|python_tag|>{PLAIN} then {TIME}", Reply("", f"then {TIME}", [CITY])),
    ("llama", PLAIN, Reply("", "", [CITY])),
    ("llama", f"\n {PLAIN};\n{TIME}\n", Reply("", "", [CITY, CLOCK])),
    ("llama", f"<think>t</think>\n\n{PLAIN}", Reply("t", "", [CITY])),
    ("llama-3.2", PLAIN, Reply("", "", [CITY])),
    ("deepseek", CALLS.format(CODE), Reply("", "", [CITY])),
    ("deepseek", "<think>t</think>\n\nI look. " + CALLS.format(f"{CODE}\n{BARE}") + " Done.", Reply("t", "I look.Done.", [CITY, CLOCK])),
    ("deepseek", f"<｜tool▁calls▁begin｜>{BARE}", Reply("", "", [CLOCK])),
    ("deepseek", CALLS.format(f"{BARE}{BARE}"), Reply("", "", [CLOCK, CLOCK])),
    ("coder", "I look.\n\n" + CODER, Reply("", "I look.", [CITY])), ("coder", f"{CODER}\n{CODER}", Reply("", "", [CITY, CITY])),
    ("coder", "<tool_call>\n<function=clock>\n<parameter=on>\nTrue\n</parameter>\n</tool_call>",
     Reply("", "", [ToolCall("clock", '{"on": true}')])),
]  # fmt: skip
TEXTS = [
    ("deepseek", "<tool_call>clock</tool_call>"), ("deepseek", CALLS.format("")), ("deepseek", CALLS.format(f"{BARE} and")),
    ("deepseek", CALLS.format(BARE.replace("clock", "unknown"))), ("deepseek", CALLS.format(BARE.replace("{}", "{"))),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}"), ("deepseek", "a <｜tool▁ca"),
    ("coder", CODER.replace("weather", "unknown")), ("coder", CODER.replace("</parameter>", "")), ("coder", CODER[:-4]),
    ("mistral", "[TOOL_CALLS]"), ("mistral", "[TOOL_CALLS][]"), ("mistral", "[TOOL_CALLS] [{"), ("mistral", "a [TOOL_CA"),
    ("mistral", f"[TOOL_CALLS][{LISTED}"), ("mistral", f'[TOOL_CALLS][{LISTED}, {{"name": "unknown", "arguments": {{}}}}]'),
    ("mistral", '[TOOL_CALLS][{"name": "clock", "arguments": []}]'), ("mistral", '[TOOL_CALLS][{"name": ["clock"], "arguments": {}}]'),
    ("mistral", '[TOOL_CALLS][{"name": "clock", "arguments": {"a": NaN}}]'),
    ("mistral", '[TOOL_CALLS][{"name": "clock", "arguments": {"a": 1e999}}]'), ("mistral", "[TOOL_CALLS][[[1]]]"),
    ("mistral", "[TOOL_CALLS]" + "[" * 100_000), ("mistral", "[TOOL_CALLS]clock[ARGS]{'a': 1}"), ("mistral", "[TOOL_CALLS]clock[ARGS]"),
    ("mistral", "[TOOL_CALLS]clock[ARGS]7"), ("mistral", "[TOOL_CALLS]clock"), ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("mistral", "[TOOL_CALLS][ARGS]{}"), ("mistral", PLAIN), ("mistral", "<tool_call>clock</tool_call>"),
    ("llama", '<|python_tag|>weather.call(city="Bern")'), ("llama", "<|python_tag|>{"), ("llama", '<|python_tag|>{"name": "clock"}'),
    ("llama", "{"), ("llama", '{"name": "clock"}'), ("llama", '{"name": "unknown", "parameters": {}}'), ("llama", f"{PLAIN} it is."),
    ("llama", f"It is {PLAIN}"), ("llama", f"[{PLAIN}]"), ("llama", '{"name": "clock", "parameters": "{}"}'),
    ("llama", '{"a":' * 100_000), ("llama", "[TOOL_CALLS][]"), ("hermes", PLAIN), ("glm", TIME),
]  # fmt: skip


def streamed(text: str, form: str, tools: list[dict[str, object]] | None, size: int = 1) -> Reply:
    reader, parts = ReplyReader(tools, form=tool_form(FORMS[form])), Reply()
    for piece in [*(reader.push(text[at : at + size]) for at in range(0, len(text), size)), reader.finish()]:
        parts = Reply(parts.reasoning + piece.reasoning, parts.content + piece.content, parts.calls + piece.calls)
    return parts


@pytest.mark.parametrize(("form", "text", "reply"), REPLIES)
def test_calls_are_read_however_the_reply_is_cut(form: str, text: str, reply: Reply) -> None:
    assert read(text, TOOLS, form=tool_form(FORMS[form])) == reply
    for size in (1, 2, 5):
        assert streamed(text, form, TOOLS, size) == reply


@pytest.mark.parametrize(("form", "text"), TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_call_stays_text(form: str, text: str) -> None:
    assert read(text, TOOLS, form=tool_form(FORMS[form])) == Reply("", text)
    assert streamed(text, form, TOOLS, 1 if len(text) < 1000 else 50_000) == Reply("", text)


@pytest.mark.parametrize(("form", "text", "reply"), [case for case in REPLIES if "<think>" not in case[1]])
def test_without_tools_nothing_is_a_call(form: str, text: str, reply: Reply) -> None:
    assert read(text, form=tool_form(FORMS[form])) == streamed(text, form, None) == Reply("", text)


def test_text_is_streamed_unless_it_may_be_a_call() -> None:
    plain, bare, marked = (ReplyReader(TOOLS, form=tool_form(FORMS["llama"])) for _ in range(3))
    assert plain.push("It is").content == "It is"
    assert ReplyReader(form=tool_form(FORMS["llama"])).push('{"a": 1}').content == '{"a": 1}', "no tools are offered"
    assert not bare.push('{"a": 1}') and bare.finish() == Reply("", '{"a": 1}')
    assert marked.push("I look.<|python_tag|>").content == "I look." and not marked.push(PLAIN) and marked.finish().calls == [CITY]


def test_half_of_a_surrogate_pair_can_be_sent() -> None:
    (call,) = read('[TOOL_CALLS][{"name": "clock", "arguments": {"a": "\\ud83d"}}]', TOOLS, form=tool_form(FORMS["mistral"])).calls
    assert json.loads(call.arguments.encode()) == {"a": "\ud83d"}


@given(st.text(alphabet='[TOOL_CALLS]ARGS{}:,"name" clock<|python_tag|>', max_size=60), st.sampled_from(["mistral", "llama"]))
def test_no_reply_is_lost_or_depends_on_its_pieces(text: str, form: str) -> None:
    whole = read(text, TOOLS, form=tool_form(FORMS[form]))
    assert streamed(text, form, TOOLS, 3) == whole
    assert whole.calls or whole.content == text


def test_templates_of_each_family() -> None:
    families = {name: form.family for name, template in FORMS.items() if (form := tool_form(template))}
    assert families == {name: {"llama-3.2": "llama", "coder": "qwen3_coder"}.get(name, name) for name in FORMS}
    published = {name: form.family for name, kind in KINDS.items() if (form := tool_form(kind.template))}
    assert published == {"glm": "hermes", "qwen": "hermes", "llama": "llama", "mistral": "mistral"}
    assert tool_form("{{ messages }}") is tool_form("") is None


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_marks_reach_the_reader_and_no_other_control_token_does(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path, name)
    tokenizer = load(tmp_path)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    ids, mask = tokenizer.encode_chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}])
    written = [one for one, spoken in zip(ids, mask, strict=True) if spoken]
    form = tool_form(tokenizer.chat_template)
    assert form is not None
    kept = {tokenizer.special[mark] for mark in form.marks if mark in tokenizer.special}
    decoder, reader, calls = StreamDecoder(tokenizer, skip_special=True, keep=kept), ReplyReader(TOOLS, form=form), []
    for one in written:
        calls += reader.push(decoder.push(one)).calls
    rest = reader.finish()
    assert [*calls, *rest.calls] == [ToolCall("weather", '{"city": "Zürich"}')] and not rest.content
    hidden = StreamDecoder(tokenizer, skip_special=True)
    assert form.marks[0] not in "".join(map(hidden.push, written))


def test_what_is_nested_too_deep_is_refused_by_name(tmp_path: Path) -> None:
    """Of a request, whose JSON nobody has looked into: templates could not be given it."""
    write_tokenizer(tmp_path, "qwen")
    tokenizer, deep = load(tmp_path), []
    for _ in range(3000):
        deep = [deep]
    asked = {"role": "user", "content": "Hi"}
    with pytest.raises(UserError, match="message 2 is nested deeper than 100 levels"):
        tokenizer.encode_chat([asked, {"role": "assistant", "content": "Hi", "more": deep}])
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"a": deep}}}
    with pytest.raises(UserError, match="tools that are nested deeper than 100 levels"):
        tokenizer.encode_chat([asked], [tool], add_generation_prompt=True)
    call = {"function": {"name": "clock", "arguments": '{"a": ' + "[" * 200 + "]" * 200 + "}"}}
    with pytest.raises(UserError, match="message 1 has a tool call whose arguments are nested deeper than 100 levels"):
        tokenizer.encode_chat([{"role": "assistant", "content": "", "tool_calls": [call]}])
