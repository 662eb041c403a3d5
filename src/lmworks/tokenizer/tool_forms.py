"""The forms in which models write tool calls, and which of them a chat template has.

Reading replies, grammars of forced calls, and the parsers of other engines are chosen by the form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"

Family = Literal["glm", "hermes", "mistral", "llama", "deepseek"]


@dataclass(frozen=True)
class ToolForm:
    """A form of tool calls, named after the family of models that writes it.

    template: what a chat template of this form contains
    marks: what `ReplyReader` needs to see of a reply, the mark with which calls begin first; empty if it does not read the form. They are
        special tokens in some vocabularies.
    """

    family: Family
    template: tuple[str, ...]
    marks: tuple[str, ...]
    reason: str


# The first that fits counts: marks of a single family before those that several use.
_FORMS = (
    ToolForm("glm", (CALL, KEY), (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END),
             "the template writes tool calls as <arg_key> and <arg_value>, as GLM-4.5 does"),
    ToolForm("deepseek", ("<｜tool▁calls▁begin｜>",), (), "the template has DeepSeek-V3's marks of tool calls"),
    ToolForm("mistral", (TOOL_CALLS,), (TOOL_CALLS, CALL_ID, ARGS), "the template has Mistral's [TOOL_CALLS]"),
    ToolForm("llama", (PYTHON_TAG,), (PYTHON_TAG,), "the template has Llama 3's <|python_tag|>"),
    ToolForm("hermes", (CALL, '"arguments"'), (CALL, CALL_END),
             "the template writes tool calls as JSON inside <tool_call>, as Hermes and Qwen do"),
    ToolForm("llama", ("<|start_header_id|>", '"parameters"'), (PYTHON_TAG,),
             "the template writes tool calls as JSON with name and parameters, as Llama 3.2 does"),
)  # fmt: skip


def tool_form(template: str) -> ToolForm | None:
    """The form of the tool calls of a chat template; None if it has none that is known."""
    return next((form for form in _FORMS if all(mark in template for mark in form.template)), None)
