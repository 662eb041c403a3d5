"""Conversations in all published forms and files become the same tokens and masks."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from test_chat_data import everything

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import ChatData
from lmworks.tokenizer import Tokenizer, load
from lmworks.tokenizer.train import train
from lmworks.train.data import chat
from lmworks.train.data.chat import build_chat_data
from lmworks.train.data.forms import convert_conversation
from lmworks.train.data.masks import check_mask
from lmworks.train.data.row_columns import NoRow
from lmworks.train.data.row_files import read_files

ASKED, SAID = "What is 2 + 3?", "It is 5."
MESSAGES = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]
CALL = {"name": "add", "arguments": {"a": 2, "b": 3}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}}]
WITH_TOOLS = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "5"}, {"role": "assistant", "content": SAID},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("forms")
    (folder / "corpus" / "train" / "docs").mkdir(parents=True)
    texts = sorted(topics.values())[:40]
    pq.write_table(pa.table({"text": texts, "language": ["en"] * 40}), folder / "corpus" / "train" / "docs" / "00000.parquet")
    train(Recipe.model_validate({"name": "t", "tokenizer": {"vocab_size": 512, "sample_bytes": "100kB"}}), folder / "corpus", folder / "t")
    return load(folder / "t")


def built(tokenizer: Tokenizer, path: Path, out: Path, **data: Any) -> dict[str, Any]:
    body = {"name": "mine", "kind": "files", "path": str(path), **data}
    recipe = Recipe.model_validate({"name": "t", "tune": {"data": [body], "sequence_length": "1024 tokens"}})
    return dict(build_chat_data(recipe, tokenizer, out)["data"]["mine"])


@pytest.mark.parametrize(
    ("form", "row", "messages", "tools"),
    [
        ("messages", {"messages": MESSAGES, "id": 7}, MESSAGES, None),
        ("messages", {"conversations": MESSAGES}, MESSAGES, None),
        ("messages", {"messages": WITH_TOOLS, "tools": json.dumps(TOOLS)}, WITH_TOOLS, TOOLS),
        (
            "messages", {"messages": [{"role": "developer", "content": "x"}, *MESSAGES]},
            [{"role": "system", "content": "x"}, *MESSAGES], None,
        ),
        (
            "messages", {"messages": [MESSAGES[0], {**MESSAGES[1], "reasoning": "2 and 3", "tool_calls": None}]},
            [MESSAGES[0], {**MESSAGES[1], "reasoning_content": "2 and 3"}], None,
        ),
        ("sharegpt", {"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": SAID}]}, MESSAGES, None),
        (
            "sharegpt",
            {"system": "Be brief.", "tools": json.dumps(TOOLS), "conversations": [
                {"from": "human", "value": ASKED}, {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "5"}, {"from": "gpt", "value": SAID}]},
            WITH_TOOLS, TOOLS,
        ),
        ("alpaca", {"instruction": ASKED, "input": "", "output": SAID}, MESSAGES, None),
        ("alpaca", {"instruction": "Add.", "input": "2, 3", "output": "5", "history": [["Hi", "Hello"]]},
         [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Add.\n2, 3"},
          {"role": "assistant", "content": "5"}], None),
        ("completion", {"prompt": ASKED, "completion": SAID}, MESSAGES, None),
        ("completion", {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, MESSAGES, None),
    ],
)  # fmt: skip
def test_forms(tokenizer: Tokenizer, form: str, row: dict[str, Any], messages: list[Any], tools: Any) -> None:
    found = convert_conversation(row)
    assert (found.form, found.messages, found.tools) == (form, messages, tools)
    assert convert_conversation(row, form).messages == messages  # type: ignore[arg-type]
    assert tokenizer.encode_chat(found.messages, found.tools)[0]


@pytest.mark.parametrize(
    ("row", "form", "reason"),
    [
        ({"body": "x", "meta": 1}, "auto", "no known form: its columns are body, meta"),
        ({"messages": MESSAGES}, "alpaca", "not of the form alpaca: its columns are messages"),
        (["a"], "auto", "no object with columns: list"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "auto", "malformed: message 1 has the role 'narrator'"),
        ({"prompt": "x", "completion": ["y"]}, "auto", "malformed: message 1 is not an object"),
        ({"messages": MESSAGES, "tools": "{"}, "auto", "tools that are not JSON"),
        ({"messages": [MESSAGES[0], {**MESSAGES[1], "weight": 0.5}]}, "auto", "malformed: message 2 has weight 0.5; a part of a weight"),
        ({"messages": [MESSAGES[0], {**MESSAGES[1], "train": "maybe"}]}, "auto", "malformed: message 2 has train 'maybe'"),
        ({"instruction": "What is in <image>?", "output": "A cat", "images": ["cat.png"]}, "auto", "with images: only text is read"),
        ({"messages": [{"role": "user", "content": "\ud83d"}, MESSAGES[1]]}, "auto", "half a character: \\ud83d"),
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, "auto", "no known form: its columns are prompt, chosen, rejected; these"),
    ],
)
def test_rows_of_no_form_say_why(row: Any, form: Any, reason: str) -> None:
    with pytest.raises(NoRow) as error:
        convert_conversation(row, form)
    assert str(error.value).startswith(reason)


def _chats(count: int) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"Q {n}"}, {"role": "assistant", "content": f"A {n}"}]} for n in range(count)]


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    columns = dict.fromkeys(key for row in rows for key in row)
    if path.name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([columns | row for row in rows]), path, row_group_size=3)
    else:
        ending = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)
        path.write_bytes(ending(lines))
    return path


def test_all_files_hold_the_same_conversations(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Rows with and without tools in one table: the nulls that parquet adds are no part of a message."""
    rows = [*_chats(9), {"messages": WITH_TOOLS, "tools": json.dumps(TOOLS)}]
    expected = None
    for name in ("a.jsonl", "a.json", "a.parquet", "a.jsonl.gz", "a.jsonl.zst"):
        path = _write(tmp_path / name, rows)
        body = built(tokenizer, path, tmp_path / f"out-{name}")
        assert body["forms"] == {"messages": 10}
        assert body["left_out"] == {}
        found = sorted(everything(tmp_path / f"out-{name}", "mine"))
        expected = expected or found
        assert found == expected


def test_a_folder_holds_all_its_files_and_forms(tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    _write(folder / "a.jsonl.gz", _chats(5))
    _write(folder / "more" / "b.parquet", [{"instruction": f"I {n}", "input": "", "output": "O"} for n in range(4)])
    (folder / "notes.txt").write_text("no data")
    (folder / "c.jsonl").write_text('{"body": "x"}\n{"prompt": "P", "completion": "C"}\n')
    body = built(tokenizer, folder, tmp_path / "out")
    assert body["forms"] == {"messages": 5, "alpaca": 4, "completion": 1}
    assert body["left_out"] == {"no known form": 1}
    assert body["examples"][0]["detail"] == "its columns are body"
    printed = capsys.readouterr().err
    assert "1 file of other kinds not read: notes.txt" in " ".join(printed.split())
    assert "mine (messages, alpaca, completion): 10 conversations, 1 of them held out" in " ".join(printed.split())
    assert built(tokenizer, folder / "*.jsonl", tmp_path / "pattern")["forms"] == {"completion": 1}


def test_a_dataset_of_the_library_is_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"conversations": [{"from": "human", "value": f"Q {n}"}, {"from": "gpt", "value": "A"}]} for n in range(8)]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "saved"))
    for kind in ("files", "huggingface"):
        assert built(tokenizer, tmp_path / "saved", tmp_path / kind, kind=kind)["forms"] == {"sharegpt": 8}
    with pytest.raises(UserError, match="split test"):
        built(tokenizer, tmp_path / "saved", tmp_path / "none", kind="huggingface", split="test")


def test_nothing_usable_names_the_columns(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.parquet", [{"question": "x", "reply": "y"}])
    with pytest.raises(UserError, match=r"tune\.data\.mine yields no conversation .*1 no known form.*its columns are question, reply"):
        built(tokenizer, path, tmp_path / "out")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.jsonl.zst", "a.json"])
def test_a_damaged_file_loses_what_is_damaged(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    path = _write(tmp_path / name, _chats(1000))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / name).write_bytes(path.read_bytes())
    _write(tmp_path / "good" / "z.jsonl", _chats(3))
    body = built(tokenizer, tmp_path / "good", tmp_path / "out")
    assert len(body["left_out"]) >= 1
    assert any(reason == "damaged file" or reason.startswith("rest of the file unread, ") for reason in body["left_out"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    """Four times as many rows need at most a quarter more memory."""
    peaks, count = [], 2000 if name == "a.json" else 1000  # an array is read in pieces of a megabyte
    for factor in (1, 4):
        rows = [{"messages": [{"role": "user", "content": f"{n} " + "x" * 1000}]} for n in range(factor * count)]
        path = _write(tmp_path / name, rows)
        data = ChatData(name="mine", kind="files", path=str(path))
        del rows
        tracemalloc.start()
        assert sum(1 for row in read_files("tune.data.mine", data.path) if row.fault is None) == factor * count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.25 * peaks[0] + 200_000, peaks


def test_a_broken_mask_is_refused(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "a.jsonl", _chats(4))
    whole = chat.fit

    def unstopped(*args: Any) -> Any:
        found = whole(*args)
        assert found is not None
        found.mask[-1] = False
        return found

    monkeypatch.setattr(chat, "fit", unstopped)
    with pytest.raises(UserError, match=r"4 wrong mask.*the stop token of the last answer is not trained"):
        built(tokenizer, path, tmp_path / "out")

    def empty(*args: Any) -> Any:
        found = whole(*args)
        assert found is not None
        return found._replace(mask=found.mask & False)

    monkeypatch.setattr(chat, "fit", empty)
    with pytest.raises(UserError, match=r"4 wrong mask.*no token is trained"):
        built(tokenizer, path, tmp_path / "out")


def test_answers_without_a_stop_token_and_special_text_are_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    open_one = [*MESSAGES, {"role": "assistant", "content": "Yes, 5."}]
    special = [{"role": "user", "content": "What is <|assistant|>?"}, MESSAGES[1]]
    path = _write(tmp_path / "a.jsonl", [{"messages": open_one}, {"messages": special}, {"messages": MESSAGES}])
    body = built(tokenizer, path, tmp_path / "out")
    assert body["answers"] == 4
    assert body["noted"] == {"answers without a stop token": 1, "with special tokens as text": 1}
    ids, mask = map(np.array, tokenizer.encode_chat(open_one))
    assert check_mask(ids, mask, tokenizer.stop_ids).fault is None


def test_links_that_lead_out_of_a_folder_of_conversations_are_not_followed(tmp_path: Path) -> None:
    for folder in ("secrets", "data/deep"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "secrets" / "key.jsonl").write_text('{"text": "a key"}\n')
    (tmp_path / "data" / "deep" / "a.jsonl").write_text('{"text": "mine"}\n')
    (tmp_path / "data" / "file.jsonl").symlink_to(tmp_path / "secrets" / "key.jsonl")
    (tmp_path / "data" / "folder").symlink_to(tmp_path / "secrets")
    (tmp_path / "data" / "inside.jsonl").symlink_to(tmp_path / "data" / "deep" / "a.jsonl")
    (tmp_path / "name").symlink_to(tmp_path / "data")
    for path in (tmp_path / "data", tmp_path / "name", tmp_path / "data" / "**" / "*.jsonl"):
        rows = list(read_files("tune.data.mine", str(path)))
        assert [row.value for row in rows if row.fault is None] == [{"text": "mine"}], "once, where it lies"
        outside = [row for row in rows if row.fault is not None]
        assert "file.jsonl" in {Path(row.origin).name for row in outside}
        assert all(row.fault and row.fault.startswith("leads out: a link") for row in outside)
        assert "key" not in str([row.value for row in rows])
    (row,) = read_files("tune.data.mine", str(tmp_path / "data" / "file.jsonl"))
    assert row.value == {"text": "a key"}, "named by the user"
