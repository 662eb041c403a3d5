"""The special tokens, after GLM-4.x, the pattern that splits text before byte-pair merging, and the forms of thoughts and of tool calls.

Models write thoughts and tool calls in several forms; the chat template shows which. Reading replies, grammars, and the parsers of other
engines are chosen by the form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

END = "<|endoftext|>"
SYSTEM, USER, ASSISTANT, OBSERVATION = "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"
CODE_PREFIX, CODE_MIDDLE, CODE_SUFFIX = "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"
NO_THINKING = "/nothink"

# Markup for tool and reasoning parsers. `tokenizers` treats it as added but not special, so that decoding with skip_special_tokens
# keeps it.
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
          "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

# GLM-4.5's own names in the order of its ids, which begin at 151329.
GLM = (END, "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", SYSTEM, USER, ASSISTANT, OBSERVATION,
       *(f"<|{edge}_of_{kind}|>" for kind in ("image", "video", "audio", "transcription") for edge in ("begin", "end")),
       CODE_PREFIX, CODE_MIDDLE, CODE_SUFFIX, NO_THINKING, *MARKUP, "<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>")

# Names that GLM-4.x has no token for. lmworks does not use them; they are in the vocabulary for runs that need them.
MORE = ("<|developer|>", "<|context|>", "<|critic|>",  # roles
        "<|tool_plan|>", "<|tool_error|>", "<|code_interpreter|>", "<|begin_of_citation|>", "<|end_of_citation|>",  # function calling
        "<|repository|>", "<|file|>", "<|code_pad|>", "<|test|>", "<|terminal|>",  # code
        "<|issue|>", "<|comment|>", "<|commit_before|>", "<|commit_message|>", "<|commit_after|>", "<|patch|>",
        "<|notebook_text|>", "<|notebook_code|>", "<|notebook_output|>",
        "<|masked_address|>", "<|masked_email|>", "<|masked_ip|>", "<|masked_key|>", "<|masked_name|>", "<|masked_number|>")

# Chat and document ends need these. An adopted tokenizer gets those that it lacks.
REQUIRED = (END, "[gMASK]", "<sop>", SYSTEM, USER, ASSISTANT, OBSERVATION)

# Each of these ends the assistant's turn. The model ends its turn by generating the next role token, as in GLM-4.x.
STOPS = (END, USER, OBSERVATION)

# The only special token that a user may type, as in GLM-4.x: it does not change the role.
OPEN = (NO_THINKING,)

# The exact pattern of cl100k and GLM-4, which llama.cpp's pre-tokenizer "glm4" implements.
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# The same with single digits, as in SentencePiece tokenizers like Llama 2's.
SPLIT_DIGITS = SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def reserved(number: int) -> str:
    """The name of an unused special token."""
    return f"<|reserved_{number}|>"


def names(count: int) -> list[str]:
    """The first `count` special tokens: GLM-4.x's, then ours, then reserved ones."""
    named = (GLM + MORE)[:count]
    return [*named, *(reserved(number) for number in range(count - len(named)))]


CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE_CALL, ONE_CALL_END, CALL_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY = (CHANNEL, START, CONSTRAIN, MESSAGE, *MESSAGE_ENDS)
"""The marks of OpenAI's harmony form, in which gpt-oss writes a reply as messages in channels."""

State = Literal["free", "open", "closed"]
"""Where a reply begins: the model may open thoughts, the prompt has opened them, or it has closed them."""


@dataclass(frozen=True)
class ThoughtForm:
    """A form of thoughts. The thoughts of a reply are between `begin` and `end`, and the answer is behind `end + then + answer`, or behind
    `answer` alone where there are no thoughts.

    template: what a chat template of this form contains, any of it
    marks: what `reply_reader` needs to see of a reply. They are special tokens in some vocabularies.
    """

    begin: str
    end: str
    template: tuple[str, ...]
    marks: tuple[str, ...]
    then: str = ""
    answer: str = ""

    def state(self, prompt: str) -> State:
        """The state at the end of a rendered prompt."""
        shown = prompt.rstrip()
        return "open" if shown.endswith(self.begin) else "closed" if shown.endswith(self.answer or self.end) else "free"


def _enclosed(begin: str, end: str) -> ThoughtForm:
    return ThoughtForm(begin, end, (begin, end), (begin, end))


THINK = _enclosed("<think>", "</think>")
CHANNELS = ThoughtForm(f"{CHANNEL}analysis{MESSAGE}", "<|end|>", (CHANNEL,), HARMONY, f"{START}assistant", f"{CHANNEL}final{MESSAGE}")
_THOUGHTS = (CHANNELS, _enclosed("[THINK]", "[/THINK]"), _enclosed("<seed:think>", "</seed:think>"),
             _enclosed("<|START_THINKING|>", "<|END_THINKING|>"), THINK)  # fmt: skip


def thought_form(template: str) -> ThoughtForm | None:
    """The form of the thoughts of a chat template; None if it has none that is known."""
    return next((form for form in _THOUGHTS if any(mark in template for mark in form.template)), None)


Family = Literal["glm", "hermes", "qwen3_coder", "mistral", "llama", "deepseek", "harmony"]


@dataclass(frozen=True)
class ToolForm:
    """A form of tool calls, named after the family of models that writes it.

    template: what a chat template of this form contains
    marks: what `reply_reader` needs to see of a reply, the mark with which calls begin first. They are special tokens in some vocabularies.
    """

    family: Family
    template: tuple[str, ...]
    marks: tuple[str, ...]
    reason: str


# The first that fits counts: marks of a single family before those that several use.
_FORMS = (
    ToolForm("glm", (CALL, KEY), (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END),
             "the template writes tool calls as <arg_key> and <arg_value>, as GLM-4.5 does"),
    ToolForm("deepseek", (CALLS,), (CALLS, CALLS_END, ONE_CALL, ONE_CALL_END, CALL_SEPARATOR),
             "the template has DeepSeek-V3's marks of tool calls"),
    ToolForm("harmony", (CHANNEL, "functions."), HARMONY, "the template has the channels of OpenAI's harmony form, as gpt-oss has"),
    ToolForm("mistral", (TOOL_CALLS,), (TOOL_CALLS, CALL_ID, ARGS), "the template has Mistral's [TOOL_CALLS]"),
    ToolForm("llama", (PYTHON_TAG,), (PYTHON_TAG,), "the template has Llama 3's <|python_tag|>"),
    ToolForm("qwen3_coder", (CALL, FUNCTION, PARAMETER), (CALL, CALL_END),
             "the template writes tool calls as <function=NAME> and <parameter=NAME>, as Qwen3-Coder does"),
    ToolForm("hermes", (CALL, "arguments"), (CALL, CALL_END),
             "the template writes tool calls as JSON inside <tool_call>, as Hermes and Qwen do"),
    ToolForm("llama", ("<|start_header_id|>", '"parameters"'), (PYTHON_TAG,),
             "the template writes tool calls as JSON with name and parameters, as Llama 3.2 does"),
)  # fmt: skip


def tool_form(template: str) -> ToolForm | None:
    """The form of the tool calls of a chat template; None if it has none that is known."""
    return next((form for form in _FORMS if all(mark in template for mark in form.template)), None)
