"""Which parser of tool calls and of reasoning fits a model: decided by the marks in its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from lmworks.tokenizer.tool_forms import Family, tool_form


@dataclass(frozen=True)
class Parser:
    """Names of a parser in the engines; None if an engine has none."""

    vllm: str | None
    sglang: str | None
    reason: str


@dataclass(frozen=True)
class _Thoughts:
    marks: tuple[str, ...]  # all of which the template must contain
    vllm: str
    sglang: str
    reason: str


_TOOLS: dict[Family, tuple[str, str]] = {  # vLLM, SGLang
    "glm": ("glm45", "glm45"),
    "deepseek": ("deepseek_v3", "deepseekv3"),
    "mistral": ("mistral", "mistral"),
    "llama": ("llama3_json", "llama3"),
    "hermes": ("hermes", "qwen25"),
}
_REASONING = (
    _Thoughts(("<think>", "<arg_key>"), "glm45", "glm45", "the template puts thoughts into <think>, as GLM-4.5 does"),
    _Thoughts(("<think>", "<｜Assistant｜>"), "deepseek_r1", "deepseek-r1", "the template has DeepSeek's marks and <think>"),
    _Thoughts(("<think>", "enable_thinking"), "qwen3", "qwen3", "the template has <think> and enable_thinking, as Qwen3 does"),
)
_NO_TEMPLATE = "the model has no chat template"


def tool_parser(template: str) -> Parser:
    """The parser of tool calls for a chat template."""
    form = tool_form(template)
    if form is None:
        return Parser(None, None, "the template has no tool calls of a known form, so they stay text" if template else _NO_TEMPLATE)
    return Parser(*_TOOLS[form.family], form.reason)


def reasoning_parser(template: str) -> Parser:
    """The parser of reasoning for a chat template."""
    for form in _REASONING:
        if all(mark in template for mark in form.marks):
            return Parser(form.vllm, form.sglang, form.reason)
    return Parser(None, None, "the template has no thoughts of a known form" if template else _NO_TEMPLATE)
