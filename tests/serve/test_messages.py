"""A request's messages are those of tuning data: one conversion, so that a model is asked in the form in which it was trained."""

from __future__ import annotations

from typing import Any

import pytest

from lmworks.serve.parameters import BadRequest
from lmworks.serve.protocol import ChatRequest
from lmworks.train.data.forms import convert_conversation

CALL = {"name": "add", "arguments": '{"a": 2}'}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "input_text", "text": "there"}]},
         {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
        [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": None, "function_call": CALL},
         {"role": "function", "name": "add", "content": "5"}, {"role": "assistant", "content": "5", "reasoning": "2 and 3"}],
        [{"role": "user", "content": "2 + 3?"},
         {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": CALL}]},
         {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "5"}]}, {"role": "assistant", "refusal": "No."}],
    ],
)  # fmt: skip
def test_a_request_is_read_as_tuning_data(messages: list[dict[str, Any]]) -> None:
    request = ChatRequest.model_validate({"messages": messages})
    assert [message.plain(number) for number, message in enumerate(request.messages, 1)] == convert_conversation(
        {"messages": messages}
    ).messages


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "robot", "content": "x"}, "message 1 has the role 'robot'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "a part of type 'image_url' as content"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}, "whose arguments are not JSON"),
    ],
)
def test_what_is_no_message_is_a_bad_request(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        ChatRequest.model_validate({"messages": [message]}).messages[0].plain(1)
    assert caught.value.param == "messages"
