"""Replies in the forms of the chat templates that TRL publishes: what a template writes behind its prompt is read back, thoughts, text and
calls, and the prompt says where the reply begins."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lmworks.tokenizer import chat, rendering
from lmworks.tokenizer.chat import Template
from lmworks.tokenizer.reply import read, reply_reader
from lmworks.tokenizer.special import THINK, thought_form, tool_form

_TRL = find_spec("trl")
FOLDER = Path(_TRL.origin or "").parent / "chat_templates" if _TRL else Path("none")
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
FAST = {"deepseekv3", "gptoss", "nemotron_3_nano", "qwen3", "qwen3_5_think", "qwen3_5_nothink"}
OPEN = {"deepseek_r1_distill", "deepseekv3", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra",
        "qwen3_5_think", "qwen3_6", "qwen3_8"}  # fmt: skip
CLOSED = {"qwen3_5_nothink"}
NOT_READ = {  # families that lmworks does not load; text has what is not read in it
    "diffusion_gemma": {"thoughts", "text", "calls"}, "gemma4": {"thoughts", "calls"}, "gemma4_v2": {"calls"},
    "gemma4_v3": {"thoughts", "calls"}, "gemma4_v4": {"thoughts", "calls"}, "gemma4_v5": {"thoughts", "text", "calls"},
    "muse_glimmer": {"thoughts", "text", "calls"},
    "lfm2_2_5": {"calls"}, "lfm2_2_5_v2": {"calls"}, "lfm2_2_5_vl": {"calls"}, "lfm2_v2": {"calls"},
}  # fmt: skip
ENDS = ("<|im_end|>", "<|return|>", "<|call|>", "<｜end▁of▁sentence｜>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<turn|>",
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "</s>", "<|eot|>", "<|user|>")  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {
    "at": {"type": "string", "description": "Where."}, "days": {"type": "integer", "description": "How many."}}, "required": ["at"]}}}]
ARGUMENTS = {"at": "Rome, 007", "days": 3}
USER = {"role": "user", "content": "2 + 2?"}
THOUGHT, TEXT = "Two and <two>.", "It is 4."


def says(content: str, calls: int = 0, **more: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": ARGUMENTS}
    called = [{"id": f"call1234{number}", "type": "function", "function": function} for number in range(calls)]
    return {"role": "assistant", "content": content, **({"tool_calls": called} if calls else {}), **more}


MESSAGES = [says(TEXT), says(TEXT, reasoning_content=THOUGHT), says("", 1), says("", 1, reasoning_content=THOUGHT), says("", 2)]


def written(template: Template, prompt: str, message: dict[str, Any], begins: tuple[str, ...]) -> tuple[str, str] | None:
    """The prompt and the reply behind it; None if the template refuses the message. An answer without thoughts may be behind a shorter
    prompt than one that opens them, up to one of the places where a reply `begins`."""
    try:
        whole = template.render([USER, message], TOOLS)
    except Exception:  # templates raise what they like
        return None
    for cut in (prompt, *(prompt[: prompt.rindex(mark)] for mark in begins if mark in prompt)):
        if whole.startswith(cut):
            reply = whole[len(cut) :].rstrip()
            return cut, next((reply.removesuffix(end) for end in ENDS if reply.endswith(end)), reply)
    raise AssertionError(f"{whole!r} does not begin with {prompt!r}")


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in FAST else pytest.mark.slow) for one in NAMES])
def test_what_a_published_template_writes_is_read_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", minversion="1.16")
    monkeypatch.setattr(chat, "compiled_in_process", rendering.compiled)
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    template, calls = Template(source, name, {"bos_token": "<s>", "eos_token": "</s>"}), tool_form(source)
    thoughts = thought_form(source) or THINK
    prompt = template.render([USER], TOOLS, add_generation_prompt=True)
    assert thoughts.state(prompt) == ("open" if name in OPEN else "closed" if name in CLOSED else "free")
    missed, count = set(), 0
    for message in MESSAGES:
        if (shown := written(template, prompt, message, (thoughts.begin,))) is None:
            continue
        behind, reply = shown
        if name.startswith("phi3"):
            reply = reply.removesuffix("</s>").removesuffix("<|end|>\n")
        if message.get("tool_calls") and "Rome" not in reply:
            continue  # a template without calls
        found = read(reply, TOOLS, thoughts.state(behind), calls, thoughts)
        given = len(message.get("tool_calls", []))
        if name == "gptoss":
            given = min(given, 1)  # the model stops behind a call
        if [json.loads(call.arguments) for call in found.calls] != [ARGUMENTS] * given:
            missed.add("calls")
        elif found.content.strip() != message["content"]:
            missed.add("text")
        if message.get("reasoning_content") and THOUGHT in reply and found.reasoning.strip() != THOUGHT:
            missed.add("thoughts")
        assert message.get("reasoning_content") or not found.reasoning.strip()
        count += 1
        if name in NOT_READ:
            continue
        pieces = [read_in_pieces(reply, size, thoughts.state(behind), source) for size in (1, 3)]
        assert pieces == [(found.reasoning, found.content, found.calls)] * 2
    assert missed == NOT_READ.get(name, set()) and count


def read_in_pieces(reply: str, size: int, begins: Any, source: str) -> tuple[str, str, list[Any]]:
    reader = reply_reader(TOOLS, begins, tool_form(source), thought_form(source))
    parts = [*(reader.push(reply[at : at + size]) for at in range(0, len(reply), size)), reader.finish()]
    calls = [call for part in parts for call in part.calls]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls
