"""Masks of the chat templates that TRL publishes, against those of its training variants, whose {% generation %} blocks others have set.

TRL marks an answer with its header and with the white space behind it. What lmworks trains begins where the generation prompt ends, and
ends at the token at which generation stops.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import base_models
from base_models import Kind, write_tokenizer
from lmworks.errors import UserError
from lmworks.tokenizer import load

pytestmark = pytest.mark.slow
_TRL = find_spec("trl")
FOLDER = Path(_TRL.origin or "").parent / "chat_templates" if _TRL else Path("none")
NAMES = sorted(path.name.removesuffix("_training.jinja") for path in FOLDER.glob("*_training.jinja"))
MARKUP = r"</?think>|</?tool_call>|</?tool_response>"
SPECIAL = (r"<\|[A-Za-z0-9_/]+\|>|<｜[^｜<>]+｜>|<\|(?:turn|channel|tool\w*|\")>|<(?:turn|channel|tool\w*)\|>|\[/?INST\]"
           "|<(?:start|end)_of_turn>|<end_of_utterance>")  # fmt: skip
_DEEPSEEK = "<｜end▁of▁sentence｜>"
ENDS = {"gptoss": "<|return|>", "llama3": "<|eot_id|>", "deepseekv3": _DEEPSEEK, "deepseek_r1_distill": _DEEPSEEK,
        "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>", "phi3": "<|end|>", "phi3_5": "<|end|>", "glm4moe": "<|endoftext|>",
        "cohere": "<|END_OF_TURN_TOKEN|>", "cohere2": "<|END_OF_TURN_TOKEN|>", "idefics3": "<end_of_utterance>",
        "smolvlm": "<end_of_utterance>", "diffusion_gemma": "<turn|>", "llava_next": "</s>", "muse_glimmer": "<|eot|>"}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string", "description": "Where."}}, "required": ["at"]}}}]  # fmt: skip
CALL: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": {"at": "Rome"}}}]}  # fmt: skip


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


SEEN = says("tool", "sunny", name="look", tool_call_id="call12345")
AGAIN = [says("user", "And now?"), says("assistant", "  It rains.\n")]
CONVERSATIONS = [
    ([says("user", "Hi"), says("assistant", "Hello, café")], None),
    ([says("user", "Hi"), says("assistant", "Hello."), *AGAIN, *AGAIN], None),
    ([says("system", "Be brief."), says("user", "2 + 2?"), says("assistant", "4.", reasoning_content="Two and two.")], None),
    ([says("user", "2 + 2?"), says("assistant", "4.", reasoning_content="Two and two."), *AGAIN], None),
    ([says("user", "Weather?"), CALL, SEEN, says("assistant", "Sunny.")], TOOLS),
    ([says("user", "Weather?"), CALL, SEEN, says("assistant", "Sunny."), *AGAIN], TOOLS),
    ([says("user", "Weather?"), CALL | {"reasoning_content": "Look."}, SEEN, says("assistant", "Sunny.", reasoning_content="It is.")],
     TOOLS),
]  # fmt: skip


def forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The forms in which templates take a conversation: text or parts, arguments as objects or text, calls with or without content."""

    def changed(message: dict[str, Any], parts: bool, as_text: bool, none: bool) -> dict[str, Any]:
        content: Any = [{"type": "text", "text": message["content"]}] if parts else message["content"]
        found = message | {"content": content}
        if "tool_calls" in message:
            call = message["tool_calls"][0]
            arguments = call["function"]["arguments"]
            arguments = json.dumps(arguments) if as_text else arguments
            found = found | {
                "content": None if none else content,
                "tool_calls": [call | {"function": {"name": "look", "arguments": arguments}}],
            }
        if "reasoning_content" in message:
            found |= {"thinking": message["reasoning_content"]}  # as gpt-oss calls it
        return found

    return [[changed(one, *flags) for one in messages] for flags in product((False, True), repeat=3)]


def rendered(peer: Any, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[int]] | None:
    """What transformers makes of the first form that it takes, whose texts and calls are all shown; None if it takes none."""
    for form in forms(messages):
        try:
            found = peer.apply_chat_template(form, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        except Exception:  # templates raise what they like
            continue
        text = peer.decode(found["input_ids"])
        if all(one["content"].strip() in text for one in messages) and ("Rome" in text or tools is None):
            return list(found["input_ids"]), list(found["assistant_masks"])
    return None


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path, Path]:
    """Two folders with the same tokenizer: with the template as it is published, and with that for training."""
    pytest.importorskip("trl", minversion="1.16")
    name, folders = request.param, []
    sources = [(FOLDER / f"{name}{end}.jinja").read_text() for end in ("", "_training")]
    end = ENDS.get(name, "<|im_end|>")
    special = tuple(sorted({*re.findall(SPECIAL, "".join(sources)), end, "<s>"}))
    for number, source in enumerate(sources):
        markup = tuple(sorted(set(re.findall(MARKUP, sources[0]))))
        monkeypatch.setitem(base_models.KINDS, "trl", Kind(source, special, markup, "<s>", end, (end,)))
        folders.append(tmp_path / str(number))
        write_tokenizer(folders[-1], "trl", 512)
    return name, folders[0], folders[1]


def runs(mask: list[int]) -> list[tuple[int, int]]:
    edges = [at for at, (before, now) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if bool(before) != bool(now)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_masks_of_published_templates_are_those_of_their_training_variants(pair: tuple[str, Path, Path]) -> None:
    import transformers

    name, published, training = pair
    ours = load(published)
    peer, marked = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (published, training))
    around = re.compile(rf"{SPECIAL}|{MARKUP}|assistant|model|thought|\s")
    compared = 0
    for messages, tools in CONVERSATIONS:
        shown = rendered(peer, messages, tools)
        try:
            ids, mask = ours.encode_chat(messages, tools)
        except UserError:
            assert shown is None, f"transformers renders {messages}"
            continue
        if shown is not None:
            assert ids[: len(shown[0])] == shown[0] and len(ids) <= len(shown[0]) + 1
        assert ids[max(at for at, spoken in enumerate(mask) if spoken)] in ours.stop_ids
        theirs = rendered(marked, messages, tools)
        if shown is None or theirs is None or theirs[0][: len(shown[0]) - 1] != shown[0][:-1]:
            continue  # the training variant shows thoughts that this one leaves out
        compared += 1
        size = min(len(theirs[0]), len(shown[0]))
        trained = [int(one) for one in mask[:size]]
        assert all(len(runs(trained[begin:end])) == 1 for begin, end in runs(theirs[1][:size])), f"an answer of {messages} in parts"
        for begin, end in runs([one ^ other for one, other in zip(trained, theirs[1][:size], strict=True)]):
            assert not around.sub("", text := str(peer.decode(ids[begin:end]))), f"{text!r} of {messages} is no header"
    assert compared >= 2, f"{name}: {compared} conversations"
