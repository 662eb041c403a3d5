"""Thoughts and calls in the forms of published families, from a request to its reply: what the prompt has opened, control tokens that are
marks, channels, and grammars behind all of them. The tokens of the reply are given; no model runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import base_models
from base_models import Kind, write_tokenizer
from lmworks.inference.sampling import Token
from lmworks.serve.parameters import BadRequest
from lmworks.serve.protocol import ChatRequest
from lmworks.serve.requests import Delta
from lmworks.serve.responses import Chat
from lmworks.serve.vocabulary import Assembler, Vocabulary
from lmworks.tokenizer import load

_TURNS = "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{%- endfor -%}"
_IM = ("<|im_start|>", "<|im_end|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))


def asked_with(opened: str) -> str:
    return _TURNS + "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n" + opened + "' }}{%- endif -%}"


def kind(template: str, special: tuple[str, ...], end: str = "<|im_end|>") -> Kind:
    return Kind(template, special, (), None, end, (end,))


OPENED = asked_with("<think>\\n") + "{# </think> <tool_call> arguments #}"
FORMS = {
    "opened": kind(OPENED, (*_IM, "<think>", "</think>", "<tool_call>", "</tool_call>")),
    "opened in text": kind(OPENED, _IM),
    "closed": kind(asked_with("<think>\\n\\n</think>\\n\\n") + "{# <tool_call> arguments #}", (*_IM, "<think>", "</think>")),
    "coder": kind(OPENED + "{# <function= <parameter= #}", (*_IM, "<think>", "</think>")),
    "magistral": kind(asked_with("") + "{# [THINK] [TOOL_CALLS] [ARGS] #}",
                      (*_IM, "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]")),
    "deepseek": kind(asked_with("<think>\\n") + "{# <｜tool▁calls▁begin｜> ```json #}", (*_IM, "<think>", "</think>", *_DEEPSEEK)),
    "deepseek 3.1": kind(asked_with("</think>") + "{# <think> <｜tool▁calls▁begin｜> #}", (*_IM, "<think>", "</think>", *_DEEPSEEK)),
    "harmony": kind(
        "{%- for m in messages -%}{{ '<|start|>' + m.role + '<|message|>' + (m.content or '') + '<|return|>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}{# <|channel|>analysis functions. #}",
        _HARMONY, "<|return|>",
    ),
}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}}, "required": ["at", "days"],
    "additionalProperties": False}}}]  # fmt: skip
ARGUMENTS = {"at": "Rome", "days": 3}
TEXT = json.dumps(ARGUMENTS)
_FUNCTION = "<tool_call>\n<function=look>\n<parameter=at>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
_JSON = f'<tool_call>\n{{"name": "look", "arguments": {TEXT}}}\n</tool_call>'
_BLOCK = f"look\n```json\n{TEXT}\n```"
_CODE = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{_BLOCK}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_PLAIN = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{TEXT}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
REPLIES = [  # the form, the reply, thoughts, text, calls
    ("opened", "Hm.</think>\n\nIt is 3.", "Hm.", "It is 3.", 0),
    ("opened", "<think>\nHm.</think>\n\nIt is 3.", "\nHm.", "It is 3.", 0),
    ("opened", f"Hm.</think>\n\n{_JSON}\n{_JSON}", "Hm.", "", 2),
    ("opened", "Hm, and no end", "Hm, and no end", "", 0),
    ("opened in text", "Hm.</think>\n\nIt is 3.", "Hm.", "It is 3.", 0),
    ("closed", "It is 3.<think>", "", "It is 3.<think>", 0),
    ("closed", "<think>It is 3.", "", "<think>It is 3.", 0),
    ("coder", f"Hm.</think>\n\nI look.\n\n{_FUNCTION}\n{_FUNCTION}", "Hm.", "I look.", 2),
    ("magistral", "[THINK]Hm.[/THINK]It is 3.", "Hm.", "It is 3.", 0),
    ("magistral", f"[THINK]Hm.[/THINK][TOOL_CALLS]look[ARGS]{TEXT}", "Hm.", "", 1),
    ("deepseek", f"Hm.</think>\n\nI look.{_CODE}", "Hm.", "I look.", 1),
    ("deepseek", f"Hm.</think>{_CODE.removesuffix('<｜tool▁calls▁end｜>')}", "Hm.", "", 1),
    ("deepseek 3.1", f"I look.{_PLAIN}", "", "I look.", 1),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 3.", "Hm.", "It is 3.", 0),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
     f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{TEXT}", "Hm.", "I look.", 1),
    ("harmony", f" to=functions.look<|channel|>commentary json<|message|>{TEXT}", "", "", 1),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|><|start|>assist",
     "Hm.\nSo.", "", 0),
    ("harmony", "It is 3.", "", "It is 3.", 0),
]  # fmt: skip


def vocabulary(folder: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> Vocabulary:
    monkeypatch.setitem(base_models.KINDS, "form", FORMS[form])
    write_tokenizer(folder, "form")
    return Vocabulary(load(folder))


def engine(words: Vocabulary) -> Any:
    return SimpleNamespace(vocabulary=words, name="tiny", room=lambda prompt, wanted=400: min(wanted, 400))


def ask(**more: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": "2 + 1?"}], **more)


def answered(words: Vocabulary, asked: ChatRequest, ids: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The full body of a reply with these tokens, and its streamed parts put together."""
    request = asked.request(engine(words))
    whole, streamed = (Chat(engine(words), asked, request) for _ in range(2))
    assembler, joined, end = Assembler(words.decoder(request.marks)), {"reasoning_content": "", "content": "", "tool_calls": []}, None
    for number, token in enumerate([*ids, None]):
        piece = assembler.finish() if token is None else assembler.push(Token(token, 0.0, 0.0, ()))
        delta = Delta(0, piece.text, piece.tokens, len(ids), None if number < len(ids) else "stop")
        whole.add(delta)
        for chunk in streamed.chunks(delta):
            for key, value in chunk["choices"][0]["delta"].items():
                joined[key] += value
            end = chunk["choices"][0]["finish_reason"] or end
    body = whole.body()
    assert streamed.usage.reasoning == whole.usage.reasoning
    return body, joined | {"finish_reason": end}


@pytest.mark.parametrize(("form", "reply", "thoughts", "text", "calls"), REPLIES)
def test_replies_are_read_behind_the_prompt_that_they_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, reply: str, thoughts: str, text: str, calls: int
) -> None:
    words = vocabulary(tmp_path, monkeypatch, form)
    ids = words._tokenizer.encode_parts(words._tokenizer.split_special(reply))
    body, joined = answered(words, ask(tools=TOOLS), ids)
    (choice,) = body["choices"]
    message = choice["message"]
    assert (message.get("reasoning_content", ""), message["content"] or "") == (thoughts, text)
    assert [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])] == [ARGUMENTS] * calls
    assert choice["finish_reason"] == joined["finish_reason"] == ("tool_calls" if calls else "stop")
    assert (joined["reasoning_content"], joined["content"]) == (thoughts, text) and len(joined["tool_calls"]) == calls
    counted = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert (0 < counted <= len(ids)) if thoughts else counted == 0


def test_only_tokens_of_thoughts_are_counted_between_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = vocabulary(tmp_path, monkeypatch, "harmony")
    parts = ["<|channel|>analysis<|message|>Hm.<|end|>", "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>",
             "<|start|>assistant<|channel|>analysis<|message|>So.<|end|>", "<|start|>assistant<|channel|>final<|message|>3"]  # fmt: skip
    pieces = [words._tokenizer.encode_parts(words._tokenizer.split_special(part)) for part in parts]
    body, joined = answered(words, ask(), [token for piece in pieces for token in piece])
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(pieces[0]) + len(pieces[2])
    assert (joined["reasoning_content"], joined["content"]) == ("Hm.\nSo.", "I look.\n3")


def test_without_tools_a_call_is_text_and_no_mark_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for form, reply in (("deepseek", f"Hm.</think>{_CODE}"), ("harmony", f" to=functions.look<|channel|>commentary<|message|>{TEXT}")):
        words = vocabulary(tmp_path / form, monkeypatch, form)
        body, _ = answered(words, ask(), words._tokenizer.encode_parts(words._tokenizer.split_special(reply)))
        message = body["choices"][0]["message"]
        assert "tool_calls" not in message and TEXT in message["content"]
        assert "｜" not in message["content"] and "<|" not in message["content"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
FORCED = {"tools": TOOLS, "tool_choice": "required"}


@pytest.mark.parametrize("form", FORMS)
def test_grammars_follow_the_state_that_the_prompt_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Whatever the model would write, thoughts end in time, behind them stands what was asked for, and the reader finds it."""
    pytest.importorskip("llguidance")
    words = vocabulary(tmp_path, monkeypatch, form)
    thoughts, begun = words.thoughts, words._tokenizer.encode_parts(words._tokenizer.split_special('so "</thin')) * 3
    mark = words._tokenizer.encode_parts(words._tokenizer.split_special(thoughts.begin))
    for more in (JSON, FORCED):
        asked = ask(max_tokens=200, **more)
        request = asked.request(engine(words))
        state = words.state_of_thoughts(request.prompts[0])
        assert request.grammar is not None and state == ("closed" if form in ("closed", "deepseek 3.1") else
                                                         "free" if form in ("harmony", "magistral") else "open")  # fmt: skip
        assert request.grammar.path is not None
        led = request.grammar.answer(200)
        for token in request.grammar.path:
            assert led.allowed()[token], (form, "the way to an end")
            led.accept(token)
        starts = [[]] + ([begun, [*mark, *begun]] if state == "open" else [[*mark, *begun]] if state == "free" else [])
        for start in starts:
            answer, ids = request.grammar.answer(200), list[int]()
            for step in range(200):
                allowed = answer.allowed()
                assert step >= len(start) or allowed[start[step]], (form, start, step)
                token = answer.accept(start[step] if step < len(start) else int(allowed.nonzero()[step * 7 % int(allowed.sum())]))
                if token in words.stop_ids:
                    break
                ids.append(token)
            assert answer.error is None
            body, _ = answered(words, asked, ids)
            message = body["choices"][0]["message"]
            assert bool(message.get("reasoning_content")) >= bool(start), (form, message)
            if more is JSON:
                assert set(json.loads(message["content"])) == {"a"}
            else:
                assert set(json.loads(message["tool_calls"][0]["function"]["arguments"])) == {"at", "days"} and not message["content"]


def test_a_call_in_no_known_form_is_not_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setitem(FORMS, "plain", kind(asked_with(""), _IM))
    words = vocabulary(tmp_path, monkeypatch, "plain")
    with pytest.raises(BadRequest, match="tool_choice: the chat template writes tool calls in no form that this server knows"):
        ask(**FORCED).request(engine(words))


def test_forced_calls_are_those_of_the_published_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.serve.structured import tools_grammar

    pytest.importorskip("llguidance")
    short = json.dumps(ARGUMENTS, separators=(",", ":"))
    exact = [{"function": {"name": "look", "parameters": {**TOOLS[0]["function"]["parameters"], "properties": {
        "at": {"type": "string", "const": "Rome"}, "days": {"const": 3}}}}}]  # fmt: skip
    for form, written in (("deepseek", _CODE), ("deepseek 3.1", _PLAIN), ("coder", _FUNCTION), (
        "harmony", f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{TEXT}")):  # fmt: skip
        words = vocabulary(tmp_path / form, monkeypatch, form)
        path = tools_grammar(words, exact, several=False).answer(120).path
        assert path and b"".join(map(words.token_bytes, path)).decode() == written.replace(TEXT, short), form
        assert set(words._tokenizer.encode_parts(words._tokenizer.split_special(written))) & words.special_ids <= set(path)
