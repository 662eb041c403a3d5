"""Which parser of tool calls and of reasoning fits a model: decided by the marks in its chat template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parser:
    """Names of a parser in the engines; None if an engine has none."""

    vllm: str | None
    sglang: str | None
    reason: str


@dataclass(frozen=True)
class _Form:
    marks: tuple[str, ...]  # all of which the template must contain
    vllm: str
    sglang: str
    reason: str


_TOOLS = (
    _Form(("<tool_call>", "<arg_key>"), "glm45", "glm45", "the template writes tool calls as <arg_key> and <arg_value>, as GLM-4.5 does"),
    _Form(("<｜tool▁calls▁begin｜>",), "deepseek_v3", "deepseekv3", "the template has DeepSeek-V3's marks of tool calls"),
    _Form(("[TOOL_CALLS]",), "mistral", "mistral", "the template has Mistral's [TOOL_CALLS]"),
    _Form(("<|python_tag|>",), "llama3_json", "llama3", "the template has Llama 3's <|python_tag|>"),
    _Form(
        ("<tool_call>", '"arguments"'),
        "hermes",
        "qwen25",
        "the template writes tool calls as JSON inside <tool_call>, as Hermes and Qwen do",
    ),
)
_REASONING = (
    _Form(("<think>", "<arg_key>"), "glm45", "glm45", "the template puts thoughts into <think>, as GLM-4.5 does"),
    _Form(("<think>", "<｜Assistant｜>"), "deepseek_r1", "deepseek-r1", "the template has DeepSeek's marks and <think>"),
    _Form(("<think>", "enable_thinking"), "qwen3", "qwen3", "the template has <think> and enable_thinking, as Qwen3 does"),
)


def tool_parser(template: str) -> Parser:
    """The parser of tool calls for a chat template."""
    return _find(template, _TOOLS, "the template has no tool calls of a known form, so they stay text")


def reasoning_parser(template: str) -> Parser:
    """The parser of reasoning for a chat template."""
    return _find(template, _REASONING, "the template has no thoughts of a known form")


def _find(template: str, forms: tuple[_Form, ...], otherwise: str) -> Parser:
    for form in forms:
        if all(mark in template for mark in form.marks):
            return Parser(form.vllm, form.sglang, form.reason)
    return Parser(None, None, otherwise if template else "the model has no chat template")
