"""Masks and stop tokens of templates that answer in channels, open thoughts in the prompt, or take calls in another form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import base_models
from base_models import Kind, write_tokenizer
from lmworks.errors import UserError
from lmworks.tokenizer import load

HEAD = "<|im_start|>assistant\n"
USER = "{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}"
LAST = ("{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}")  # fmt: skip
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.at }}</tool_call>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
SILENT = ("{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think></think>' if enable_thinking is false else '<think>\n' }}"
          "{% endif %}")  # fmt: skip
# gpt-oss: thoughts are a message of their own, which the token closes that closes earlier answers
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and (loop.last or m.tool_calls) %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "<|start|>assistant to={{ f.name }}<|message|>{{ f.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Qwen3.5: the prompt opens thoughts, which only answers behind the last user show, empty ones too
REOPENED = LAST + (
    "{% for m in messages %}" + USER + "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}" + CALLS + "<|im_end|>"
    "{% endif %}{% endfor %}" + PROMPT
)
# Nemotron 3: an answer without thoughts is behind an empty block, as where the prompt turns thinking off
EMPTY = (
    "{% for m in messages %}" + USER + "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% else %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>{% endif %}{% endfor %}" + SILENT
)
# DeepSeek-R1: thoughts are never shown, and calls only without text, with arguments that are text
DROPPED = (
    "{% for m in messages %}" + USER + "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.content is none %}{% for c in m.tool_calls %}<tool_call>{{ c.function.name + '\n' + c.function.arguments }}</tool_call>"
    "{% endfor %}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>{% endif %}{% endfor %}" + PROMPT
)
KINDS = {
    "channels": (CHANNELS, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"), "<|return|>"),
    **{name: (source, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|endoftext|>")
       for name, source in (("reopened", REOPENED), ("empty", EMPTY), ("dropped", DROPPED))},
}  # fmt: skip


def opened(folder: Path, template: str, special: tuple[str, ...], eos: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        markup = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        patch.setitem(base_models.KINDS, "mine", Kind(template, special, markup, None, eos, (eos,)))
        write_tokenizer(folder, "mine")
    return load(folder)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {name: opened(tmp_path_factory.mktemp(name), *given) for name, given in KINDS.items()}


def says(*turns: Any) -> list[dict[str, Any]]:
    roles = ["assistant" if at % 2 else "user" for at in range(len(turns))]
    return [turn if isinstance(turn, dict) else {"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]


def answer(text: str, thoughts: str = "", field: str = "reasoning_content") -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({field: thoughts} if thoughts else {})


CALL: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": {"at": "Köln"}}}]}  # fmt: skip
RESULT = {"role": "tool", "name": "look", "tool_call_id": "call12345", "content": "sun"}


def written(tokenizer: Any, messages: list[dict[str, Any]]) -> list[str]:
    ids, mask = tokenizer.encode_chat(messages)
    runs = [""]
    for token, spoken in zip(ids, mask, strict=True):
        runs = [*runs[:-1], runs[-1] + tokenizer.token_bytes(token).decode("latin-1")] if spoken else [*runs, ""]
    return [run.encode("latin-1").decode() for run in runs if run]


def test_the_final_text_behind_thoughts_in_a_channel_is_trained(kinds: dict[str, Any]) -> None:
    tokenizer = kinds["channels"]
    assert [tokenizer.decode([one]) for one in tokenizer.stop_ids] == ["<|return|>", "<|call|>"], "generation goes on behind thoughts"
    final, thoughts = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for field in ("thinking", "reasoning_content"):
        assert written(tokenizer, says("Hi", answer("4.", "Hm.", field))) == [f"{thoughts}{final}4.<|return|>"]
    # an earlier answer ends with a token at which generation does not stop, which is not to be learned
    assert written(tokenizer, says("Hi", answer("4.", "Hm."), "Bye", "5.")) == [f"{final}4.", f"{final}5.<|return|>"]
    call = CALL | {"reasoning_content": "Hm."}
    assert written(tokenizer, [*says("Hi"), call, RESULT | {"content": ""}, answer("5.", "Hm."), *says("Bye", "6.")]) == [
        f'{thoughts} to=look<|message|>{{"at": "Köln"}}<|call|>', f"{final}5.", f"{final}6.<|return|>"]  # fmt: skip


def test_prompts_that_open_thoughts_which_the_answer_has_not(kinds: dict[str, Any]) -> None:
    two, thoughtful = says("Hi", "One", "Hi", "<b>"), says("Hi", answer("One", "Hm"), "Hi", answer("Two", "So"))
    looped = [*says("Hi"), CALL, RESULT, answer("Sun"), *says("Bye", "Two")]
    end = "<|im_end|>"
    assert {name: [written(kinds[name], one) for one in (two, thoughtful)] for name in ("reopened", "empty", "dropped")} == {
        "reopened": [[f"One{end}", f"</think>\n\n<b>{end}"], [f"One{end}", f"So\n</think>\n\nTwo{end}"]],
        "empty": [[f"One{end}", f"<b>{end}"], [f"Hm\n</think>\nOne{end}", f"So\n</think>\nTwo{end}"]],
        "dropped": [[f"One{end}", f"<b>{end}"], [f"One{end}", f"Two{end}"]],
    }
    # the call shows an empty block where its result is the last message, and none in the whole conversation
    assert written(kinds["reopened"], looped) == [f"<tool_call>Köln</tool_call>{end}", f"Sun{end}", f"</think>\n\nTwo{end}"]


def test_a_token_before_the_end_of_the_text_ends_no_turn(tmp_path: Path) -> None:
    """As <|END_RESPONSE|> of Command R7B, or the marks of DeepSeek's calls: generation stops where the base model stops."""
    source = EMPTY.replace("{{ m.content }}<|im_end|>{% endif %}", "{{ m.content }}<|close|><|im_end|>{% endif %}")
    tokenizer = opened(tmp_path, source, ("<|im_start|>", "<|im_end|>", "<|close|>"), "<|im_end|>")
    assert written(tokenizer, says("Hi", "One", "Hi", "Two")) == ["One<|close|><|im_end|>", "Two<|close|><|im_end|>"]
    assert [tokenizer.decode([one]) for one in tokenizer.stop_ids] == ["<|im_end|>"]


def test_calls_have_the_form_that_the_template_takes(kinds: dict[str, Any]) -> None:
    shown = '<tool_call>look\n{"at": "Köln"}</tool_call>'
    for content in ("", None):
        assert written(kinds["dropped"], [*says("Hi"), CALL | {"content": content}, RESULT, answer("Sun")])[0] == f"{shown}<|im_end|>"
    assert '{"at": "Köln"}' in kinds["channels"].apply_chat([*says("Hi"), CALL]), "not text inside of text"


def test_the_fuller_of_two_fields_of_thoughts_counts(kinds: dict[str, Any]) -> None:
    both = answer("Two", "Hm", "thinking") | {"reasoning_content": ""}
    assert "<think>\nHm\n</think>" in kinds["empty"].apply_chat(says("Hi", both))


def test_what_cannot_be_told_is_refused_with_what_to_do(tmp_path: Path) -> None:
    special, eos = KINDS["empty"][1:]
    odd = opened(tmp_path / "odd", EMPTY.replace("<think></think>{% endif %}", "<none>{% endif %}"), special, eos)
    with pytest.raises(UserError, match=r"prompt of message 2 otherwise .* give tokenizer.chat_template a copy .* \{% generation %\}"):
        odd.encode_chat(says("Hi", "One"))
    # a call that nothing ends runs into its result
    endless = EMPTY.replace("{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
                            "{{ m.content }}{{ '' if m.tool_calls else '<|im_end|>' }}{% endif %}{% endfor %}")  # fmt: skip
    endless = opened(tmp_path / "endless", endless.replace("<|im_start|>{{ m.role }}\n", "{{ m.role }}: "), special, eos)
    assert written(endless, says("Hi", "One"))
    with pytest.raises(UserError, match="ends message 2 with no special token before the next message"):
        endless.encode_chat([*says("Hi"), CALL | {"content": "Look"}, RESULT, answer("Sun")])
