"""Conversations to one string and to token ids, with a mask of the tokens that the assistant wrote.

The template is `chat_template.jinja`, rendered as `transformers` renders it. Its format is that of GLM-4.x, in full and in the `brief`
form:

    [gMASK]<sop><|user|>\\nHi<|assistant|>\\n<think></think>\\nHello!<|user|>\\nBye<|assistant|>\\n<think></think>\\nSee you.
    [gMASK]<sop><|user|>\\nHi<|assistant|>\\nHello!<|user|>\\nBye<|assistant|>\\nSee you.<|endoftext|>

A turn has no end token of its own. It ends at the next role token, so the assistant learns to generate <|user|> at its end, <|observation|>
after a tool call, and <|endoftext|> at the end of the conversation. These three are the `stop_ids`, and generation_config.json must list
the same. Tokens after <|assistant|> that belong to the generation prompt (brief: the newline) have no loss. Whether the assistant wrote a
token follows from the ids alone; the template needs no markers, which some engines do not support.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from importlib.resources import files
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError
from lmworks.tokenizer.messages import Message, Span, normal, normal_tools
from lmworks.tokenizer.rendering import DATE, GENERATION, Refused, Render, compiled, compiled_in_process
from lmworks.tokenizer.special import ASSISTANT, OPEN

if TYPE_CHECKING:
    from lmworks.tokenizer.text_tokenizer import TextTokenizer

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look", "description": "Look there.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string", "description": "Where."}}, "required": ["at"]}}}]  # fmt: skip
"""Tools to try a template with that is for conversations with tools."""
_PROBE = "Qzx"  # no template has it of its own
# Unicode's noncharacters for internal use: one that the conversation does not contain marks text that must not become special.
MARKERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_PARTS = re.compile(r"for\s+\w+\s+in\s+\w+(?:\.content|\[['\"]content['\"]\])")


def _field(name: str) -> re.Pattern[str]:
    """A field of a message in the source of a template."""
    return re.compile(rf"\.{name}\b|\[['\"]{name}['\"]\]|get\(['\"]{name}['\"]")


def shipped_template(name: str = "brief") -> str:
    """The chat template of tokenizers trained by lmworks; "glm-4.6" renders the same strings as the published one."""
    source = files("lmworks.tokenizer").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    return source if name == "brief" else source.replace("set brief = true", "set brief = false", 1)


class Template:
    """A compiled chat template. Templates are untrusted code: a template that lmworks does not ship runs in jinja2's sandbox, in a process
    with limits. `date`, in ISO 8601, is the day that it shows where it asks for one; today's if None.
    """

    date: str | None = None

    def __init__(
        self, source: str, where: str, tokens: Mapping[str, str] | None = None, tools: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """`tokens` are variables of a foreign template: bos_token, eos_token and so on. It gets thoughts inside an answer as they are.
        `tools` are those that it is tried with, for a template that needs some."""
        self._splits_thoughts = tokens is None
        self._shipped = shipped = source in (shipped_template("brief"), shipped_template("glm-4.6"))
        self.source, self._where, self._tokens = source, where, dict(tokens or {})
        self.tools = tools
        named = "reasoning_content" in source  # gpt-oss reads `thinking`, others `reasoning`
        self._thoughts = None if named else next((name for name in ("thinking", "reasoning") if _field(name).search(source)), None)
        try:
            self._render: Render = compiled(source) if shipped else compiled_in_process(source)
        except Refused as reason:
            raise UserError(f"{where} is not a chat template: {reason}") from None

    def checked(self, messages: Sequence[dict[str, Any]]) -> list[Message]:
        """`messages` in our form. Raises `UserError` that names an invalid message."""
        return checked(messages, self._splits_thoughts)

    def _given(self, message: Message) -> dict[str, Any]:
        """A message in the form that this template takes: text as text or in parts, thoughts under its name for them."""
        content = message["content"]
        if isinstance(content, list) and not self._shipped:  # the shipped template shows each result of a tool apart
            content = "".join(part["text"] for part in content)
        if isinstance(content, str) and self._takes_parts:
            content = [{"type": "text", "text": content}]
        given = message | {"content": content}
        if self._thoughts is not None and "reasoning_content" in given:
            given[self._thoughts] = given.pop("reasoning_content")
        return _with_calls(given, *self._call_form) if given.get("tool_calls") and not self._shipped else given

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether a foreign template shows text only in parts."""
        if self._shipped or not _PARTS.search(self.source):
            return False
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            try:
                if _PROBE in self._shown([{"role": "user", "content": content}], self.tools, False):
                    return isinstance(content, list)
            except Refused:
                continue
        return False

    @cached_property
    def _call_form(self) -> tuple[bool, bool]:
        """How a foreign template shows a call: with arguments as JSON text, and without content. As objects, if it shows it in no form."""
        for as_text, no_content in product((False, True), repeat=2):
            call = {"role": "assistant", "content": "", "tool_calls": [tried_call({"at": _PROBE})]}
            messages = [{"role": "user", "content": "Hi"}, _with_calls(call, as_text, no_content)]
            with suppress(Refused):
                shown = self._shown(messages, self.tools, False)
                if _PROBE in shown and not re.search(r"""'at'|\\"at""", shown):  # no object of Python, and no text inside of text
                    return as_text, no_content
        return False, False

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
               add_generation_prompt: bool = False, thinking: bool | None = None, generation: tuple[str, str] | None = None) -> str:
        """The conversation as one string. `thinking` False adds an empty thinking block to the generation prompt; True lets the model
        decide. `generation` are two characters to put around what a foreign template marks as written by the assistant.
        """
        options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        options |= {} if generation is None else {GENERATION: list(generation)}
        options |= {} if self.date is None else {DATE: self.date}
        given = [self._given(message) for message in self.checked(messages)]
        try:
            return self._shown(given, normal_tools(tools), add_generation_prompt, options)
        except Refused as reason:
            raise UserError(f"{self._where} refused the conversation: {reason}") from None

    def _shown(self, messages: Any, tools: Any, prompt: bool, options: Mapping[str, Any] = MappingProxyType({})) -> str:
        """What the template makes of its variables, which are those that `transformers` has: `documents` too, of which there are none."""
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        return self._render(**(self._tokens | dict(options) | given))


def tried_call(arguments: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """A call to try a template with."""
    return {"id": f"call1234{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}


def _with_calls(message: dict[str, Any], as_text: bool, no_content: bool) -> dict[str, Any]:
    """A message with the arguments of its calls as JSON text, and None for an empty text."""
    found = dict(message)
    if as_text:
        functions = [call["function"] for call in message["tool_calls"]]
        texts = [function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)} for function in functions]
        found["tool_calls"] = [call | {"function": text} for call, text in zip(message["tool_calls"], texts, strict=True)]
    if no_content and not message["content"]:
        found["content"] = None
    return found


def checked(messages: Sequence[dict[str, Any]], split_thoughts: bool = True) -> list[Message]:
    """`messages` in our form (`lmworks.tokenizer.messages`); with `split_thoughts`, thoughts inside an answer become its
    `reasoning_content`.

    Raises `UserError` that names an invalid message.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise UserError("a conversation is a list of at least one message {role, content}")
    found = [normal(number, message) for number, message in enumerate(messages, 1)]
    return [with_thoughts(message) if split_thoughts and message["role"] == "assistant" else message for message in found]


def begin_of_thoughts(content: str, thoughts: str) -> int:
    """Where the thoughts of a content begin: they may also be a part of their mark, as `think`, or of the text before it."""
    return content.rindex(thoughts, 0, content.index("</think>"))


def with_thoughts(message: Message) -> Message:
    """An answer with its thoughts as `reasoning_content`: as in the published template, text before the last </think> is thought."""
    content = message["content"]
    if "</think>" not in content or isinstance(message.get("reasoning_content"), str):
        return message
    before, _, after = content.rpartition("</think>")
    thoughts = before.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    answer = after.lstrip("\n")
    if not (spans := message.untrained.get("content")):
        return message.saying(reasoning_content=thoughts, content=answer)
    begin = begin_of_thoughts(content, thoughts)
    at = {"reasoning_content": (begin, thoughts), "content": (len(content) - len(answer), answer)}
    moved = {name: [(max(a - begin, 0), min(b - begin, len(text))) for a, b in spans if a < begin + len(text) and b > begin]
             for name, (begin, text) in at.items()}  # fmt: skip
    return message.saying(reasoning_content=thoughts, content=answer).having(untrained={key: one for key, one in moved.items() if one})


def encode(tokenizer: TextTokenizer, template: Template, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
           add_generation_prompt: bool = False, thinking: bool | None = None) -> list[int]:
    """Ids of the rendered conversation, in which only the template's own special tokens are special (and /nothink in a user's message).

    Text of a message that looks like a special token is broken up with a marker before rendering; the marker is removed after splitting.
    A marker is also put behind the beginning of one at the end of a text (ignoring trailing white space, which templates strip), because
    the next part of the message could complete it.
    """
    messages = template.checked(messages)
    marker = unused_markers(messages, tools)[0]
    text = render_marked(tokenizer, template, messages, marker, tools, add_generation_prompt, thinking)
    return encode_marked(tokenizer, text, marker)


def render_marked(tokenizer: TextTokenizer, template: Template, messages: Sequence[dict[str, Any]], marker: str,
                  tools: Sequence[dict[str, Any]] | None = None, add_generation_prompt: bool = False,
                  thinking: bool | None = None, generation: tuple[str, str] | None = None,
                  untrained: tuple[str, str] | None = None) -> str:
    """The rendered conversation, in which `marker` breaks up what is not special, for `encode_marked`. The characters `untrained` are put
    around what is not to be trained of an answer (`Message.untrained`)."""
    found = template.checked(messages)
    if untrained is not None:
        found = [_surrounded(message, untrained) if message.untrained else message for message in found]
    marked = [
        _map_text(message, partial(mark, tokenizer, marker=marker, allowed=OPEN if message["role"] == "user" else ())) for message in found
    ]
    tools = _map_text(normal_tools(tools), partial(mark, tokenizer, marker=marker))
    return template.render(marked, tools, add_generation_prompt, thinking, generation)


def _surrounded(message: Message, marks: tuple[str, str]) -> Message:
    """A message with marks around what is not trained. White space at the ends of a text stays there, for templates to strip."""
    fields = {}
    for name, spans in message.untrained.items():
        text = str(message.get(name) or "")
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        for begin, end in sorted(((max(begin, first), min(end, last)) for begin, end in spans), reverse=True):
            if begin < end:
                text = text[:begin] + marks[0] + text[begin:end] + marks[1] + text[end:]
        fields[name] = text
    return message.saying(**fields)


def mark(tokenizer: TextTokenizer, text: str, marker: str, allowed: tuple[str, ...] = ()) -> str:
    """`text` with `marker` in each special token but those `allowed`, and behind the beginning of one at its end.

    A special token is broken up behind each of its characters: what is left of it may be another one, or begin another one with the text
    that follows. Behind a beginning, the marker breaks up every token that the next part could complete; inside it, the rest could be the
    beginning of another: </ is the beginning of </think>, and its second character that of /nothink.
    """
    parts = tokenizer.split_special(text, anywhere=True)
    parts[1::2] = [part if part in allowed else "".join(char + marker for char in part) for part in parts[1::2]]
    text = "".join(parts)
    end = len(text.rstrip())
    return text[:end] + marker + text[end:] if tokenizer.special_prefix_length(text[:end]) else text


def encode_marked(tokenizer: TextTokenizer, text: str, markers: str) -> list[int]:
    """Ids of marked text: special tokens that stand whole in it are special, and the markers are removed."""
    removed = str.maketrans("", "", markers)
    return tokenizer.encode_parts(tokenizer.split_special(text), transform=lambda part: part.translate(removed))


def take_out(text: str, marks: tuple[str, str], others: str = "") -> tuple[str, list[Span]]:
    """`text` without two marks, and the spans between them, in characters of a text that lacks `others` too."""
    parts: list[str] = []
    spans: list[Span] = []
    size = 0
    for number, piece in enumerate(text.split(marks[0])):
        inside, closed, outside = piece.partition(marks[1]) if number else ("", "", piece)
        lengths = [len(part) - sum(part.count(one) for one in others) for part in (inside, outside)]
        if closed:
            spans.append((size, size + lengths[0]))
        parts += [inside, outside]
        size += sum(lengths)
    return "".join(parts), spans


def unlearn(mask: list[bool], starts: Sequence[int], begin: int, end: int) -> None:
    """Take the tokens out of `mask` that have a part between `begin` and `end`; `starts` says where each token begins."""
    at = bisect_left(starts, begin)
    if at and (at == len(starts) or starts[at] > begin):  # a token that reaches into the span from before it
        at = bisect_left(starts, starts[at - 1])
    while at < len(starts) and starts[at] < end:
        mask[at] = False
        at += 1


def unused_markers(messages: Sequence[Any], tools: Any, count: int = 1) -> list[str]:
    """`count` characters of `MARKERS` that the conversation does not contain."""
    everything: list[str] = []
    _map_text([*messages, *(normal_tools(tools) or [])], lambda text: everything.append(text) or text)  # type: ignore[func-returns-value]
    text = "".join(everything)
    unused = [marker for marker in MARKERS if marker not in text]
    if len(unused) >= count:
        return unused[:count]
    raise UserError("the conversation contains nearly all of the noncharacters U+FDD0 to U+FDEF; it is not text")


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_text(key, change): _map_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_text(item, change) for item in value]
    return value


def assistant_mask(ids: Sequence[int], assistant: int, system: int, stops: Sequence[int],
                   prompt_ids: Sequence[Sequence[int]], learned: Sequence[bool] = ()) -> list[bool]:
    """For each id, whether the assistant wrote it: the ids after <|assistant|>, up to and including the token that ends the turn.

    `prompt_ids` has, for each turn, the ids after <|assistant|> that belong to the prompt: the matching prefix of the turn is not counted.
    A turn followed by <|system|> or another <|assistant|> has no end token with loss, since generation does not stop there. A turn whose
    place in `learned` is False has no loss.
    """
    mask, speaking, turns, flags = [False] * len(ids), False, iter(prompt_ids), iter(learned)
    prompt: list[int] = []
    for at, token in enumerate(ids):
        if token == assistant:
            speaking, prompt = next(flags, True), list(next(turns))[::-1]
        elif token == system:
            speaking = False
        elif speaking and prompt and prompt[-1] == token:
            prompt.pop()
        elif speaking:
            prompt = []
            mask[at] = True
            speaking = token not in stops
    return mask


def prompts(tokenizer: TextTokenizer, template: Template, messages: Sequence[dict[str, Any]], thinking: bool | None) -> list[list[int]]:
    """For each answer, and for the next one, the ids after <|assistant|> that belong to the prompt.

    If the template omits the thoughts of an earlier answer and puts an empty block in their place, the block belongs to the prompt and has
    no loss.
    """
    asked, empty = _prompt(tokenizer, template, thinking), _prompt(tokenizer, template, False)
    messages = template.checked(messages)
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    answers = [(number, message) for number, message in enumerate(messages) if message["role"] == "assistant"]
    dropped = [number < last and bool(message.get("reasoning_content")) for number, message in answers]
    return [*(empty if gone or message.silent else asked for gone, (_, message) in zip(dropped, answers, strict=True)), asked]


@lru_cache(16)
def _prompt(tokenizer: TextTokenizer, template: Template, thinking: bool | None) -> list[int]:
    ids = encode(tokenizer, template, [{"role": "user", "content": "?"}], None, True, thinking)
    return ids[ids.index(tokenizer.special[ASSISTANT]) + 1 :]
