"""Rows in the forms that TRL, axolotl, LLaMA-Factory and OpenAI document become what these train on; published rows are all read."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from base_models import write_tokenizer
from lmworks.errors import UserError
from lmworks.recipe.schema.align import PreferenceData, RewardTask
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import ChatData
from lmworks.tokenizer import Tokenizer, load
from lmworks.train.data import forms, preference_forms
from lmworks.train.data.chat import build_chat_data
from lmworks.train.data.preferences import build_preferences, read_preferences
from lmworks.train.data.row_columns import TURNS_IN_TEXT, NoRow
from lmworks.train.data.row_files import read_dataset, read_files
from lmworks.train.data.sets import Drawn
from lmworks.train.prompts import _rows, read_prompts

_NEAR = [folder / "shared" / "real" for folder in Path(__file__).resolve().parents[2:]]  # beside the checkout
REAL = next((folder for folder in _NEAR if folder.is_dir()), _NEAR[1])
Q, A, B = "What is 2 + 3?", "It is 5.", "It is 6."
ASKED, GOOD, BAD = ({"role": role, "content": text} for role, text in (("user", Q), ("assistant", A), ("assistant", B)))
SYSTEM = {"role": "system", "content": "Be brief."}
EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("qwen")
    write_tokenizer(folder, "qwen")
    return load(folder)


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def tuned(tokenizer: Tokenizer, path: str, out: Path, length: int = 2048, **data: Any) -> dict[str, Any]:
    body = {"name": "mine", "kind": "files", "path": path, **data}
    recipe = Recipe.model_validate({"name": "t", "tune": {"data": [body], "sequence_length": f"{length} tokens"}})
    return dict(build_chat_data(recipe, tokenizer, out)["data"]["mine"])


def trained(tokenizer: Tokenizer, path: str, out: Path, **data: Any) -> list[list[str]]:
    """For each conversation, the texts that are trained."""
    from test_chat_data import documents

    tuned(tokenizer, path, out, **data)
    found = []
    for ids, mask in documents(out / "train" / "mine"):
        runs: list[list[int]] = []
        for at, (token, learned) in enumerate(zip(ids, mask, strict=True)):
            if learned:
                runs += [[]] if not at or not mask[at - 1] else []
                runs[-1].append(token)
        found.append([tokenizer.decode(run) for run in runs])
    return found


# conversations --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": Q, "response": A}, {"question": Q, "answer": A}, {"input": Q, "output": A}, {"instruction": Q, "response": A},
        {"prompt": Q, "generation": A}, {"message_1": Q, "message_2": A}, {"INSTRUCTION": Q, "RESPONSE": A}, {"query": Q, "response": A},
        {"problem": Q, "solution": A}, {"conversation": [ASKED, GOOD]}, {"messages": json.dumps([ASKED, GOOD])},
        {"conversations": [{"role": "human", "value": Q}, {"role": "gpt", "value": A}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?"}]}, GOOD]},
        {"messages": [ASKED, {"role": "assistant", "content": None, "refusal": A}]},
        {"conversations": [Q, A], "source": "stackexchange"}, {"conversation": [{"input": Q, "output": A}]},  # LIMA, Capybara
        {"prompt": json.dumps([ASKED]), "completion": A}, {"prompt": f"\n\nHuman: {Q}\n\nAssistant:", "response": f" {A}"},
    ],
    ids=lambda row: ",".join(row),
)  # fmt: skip
def test_one_question_and_answer_in_all_forms(row: dict[str, Any]) -> None:
    found = forms.convert_conversation(row)
    assert [(one["role"], one["content"]) for one in found.messages] == [("user", Q), ("assistant", A)]


@pytest.mark.parametrize(
    ("row", "asked", "said", "unused"),
    [
        ({"instruction": "Who won?", "context": "Italy won.", "response": A, "category": "qa"}, "Who won?\nItaly won.", A, ""),  # dolly
        ({"question": "Who won?", "context": "Italy won.", "answer": A}, "Who won?\nItaly won.", A, ""),  # sql-create-context
        ({"question": "Who won?", "input": "Italy won.", "answer": A}, "Who won?\nItaly won.", A, ""),
        ({"question": "Italy won. Who?", "context": "Italy won.", "answer": A}, "Italy won. Who?", A, ""),
        ({"instruction": "Add.", "input": "2", "output": A, "prompt": f"### Add.\n2\n### {A}"}, "Add.\n2", A, "prompt"),  # code_alpaca
        ({"instruction": "", "prompt": Q, "output": A}, Q, A, ""),
        ({"question": Q, "solution": f"{A} So 5.", "answer": "5"}, Q, f"{A} So 5.", ""),  # LIMO
        ({"question": Q, "solution": A, "answer": "five"}, Q, A, "answer"),
        ({"prompt": [ASKED], "instruction": "Add up.", "response": A}, Q, A, "instruction"),
        ({"question": Q, "solution": A, "thinking_trajectories": ["Hm."]}, Q, A, "thinking_trajectories"),  # s1K
        ({"question": Q, "options": {"A": "five", "B": "six"}, "choices": [A], "answer": A}, Q, A, "options"),
        ({"question": Q, "choices": [4, 7], "answer": A}, Q, A, "choices"),
        ({"instruction": "Square it.", "input": 5, "output": 25}, "Square it.\n5", "25", ""),
        ({"messages": [ASKED, GOOD], "prompt": Q, "context": "Sums", "id": "x"}, Q, A, "context"),  # ultrachat
    ],
    ids=lambda row: ",".join(row),
)  # fmt: skip
def test_no_column_of_question_or_answer_is_lost_in_silence(row: dict[str, Any], asked: str, said: str, unused: str) -> None:
    found = forms.convert_conversation(row)
    assert [one["content"] for one in found.messages] == [asked, said]
    assert [what for what, count in found.noted.items() if count] == ([f"with columns not used: {unused}"] if unused else [])
    if "messages" not in row:
        assert [one["content"] for one in forms.convert_prompt(row, "x").messages] == [asked]
        pair = preference_forms.convert_preference({**row, "chosen": A, "rejected": B}, "x", labeled=False)
        assert [one["content"] for one in pair.prompt] == [asked]


@pytest.mark.parametrize(
    ("row", "note"),
    [
        ({"text": "Write it.", "code": "def f(): pass", "test_list": ["assert f() is None"]}, "with columns not used: code"),  # MBPP
        ({"text": "A long bill.", "summary": "A bill.", "title": "Bill 1"}, "with columns not used: summary"),
        ({"text": "A good film.", "label": 1}, "with columns not used: label"), ({"text": "A page.", "url": "https://x", "id": "1"}, ""),
        ({"prompt": Q, "completion": B, "label": False}, "with a label of false, trained all the same"),
        ({"prompt": Q, "completion": A, "label": True}, ""),
        ({"prompt": f"\n\nHuman: {Q}\n\nAssistant:", "response": A}, TURNS_IN_TEXT),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_read_as_something_else_is_told(qwen: Tokenizer, tmp_path: Path, row: dict[str, Any], note: str) -> None:
    assert tuned(qwen, jsonl(tmp_path / "a.jsonl", row), tmp_path / "out")["noted"] == ({note: 1} if note else {})


@pytest.mark.parametrize("mark", ["\n", "\n\n"], ids=["lines", "paragraphs"])
def test_a_question_about_a_dialogue_is_no_dialogue(mark: str) -> None:
    asked = f"Human: Hi{mark}Assistant: Hello{mark}Human: Bye{mark}Assistant: Bye.\n\nWho spoke last?"
    row = {"instruction": asked, "input": "", "output": f"Human: Hi{mark}Assistant: A"}
    assert [(one["role"], one["content"]) for one in forms.convert_conversation(row).messages] == [
        ("user", asked), ("assistant", row["output"])
    ]  # fmt: skip
    assert forms.convert_prompt(row, "x").messages == [{"role": "user", "content": asked}]
    whole = f"\n\nHuman: {Q}\n\nAssistant: Sure:\nHuman: Hi\nAssistant: Hello"
    pair = preference_forms.convert_preference({"chosen": whole, "rejected": whole + "!"}, "x", labeled=False)
    assert pair.prompt == [ASKED] and pair.answers[0][0]["content"] == "Sure:\nHuman: Hi\nAssistant: Hello"


@pytest.mark.parametrize("system", ["Be brief.", SYSTEM, [SYSTEM], {"from": "system", "value": [{"type": "text", "text": "Be brief."}]}])
def test_a_system_prompt_in_a_column_is_text_or_messages(system: Any) -> None:
    row = {"system": system, "question": Q, "answer": A, "chosen": A, "rejected": B}
    assert forms.convert_conversation(row).messages == [SYSTEM, ASKED, GOOD]
    assert forms.convert_prompt(row, "x").messages == [SYSTEM, ASKED]
    assert preference_forms.convert_preference(row, "x", labeled=False).prompt == [SYSTEM, ASKED]
    with pytest.raises(NoRow, match="malformed: system has messages that are none of the system"):
        forms.convert_conversation({**row, "system": [ASKED]})


@pytest.mark.parametrize("history", [5, True, "Hi", {"Hi": "Hello"}, ["Hi", "Hello"]], ids=str)
def test_a_history_of_another_kind_costs_its_row(qwen: Tokenizer, tmp_path: Path, history: Any) -> None:
    good = {"instruction": Q, "output": A, "history": [["Hi", "Hello"]]}
    body = tuned(qwen, jsonl(tmp_path / "a.jsonl", good, {**good, "history": history}), tmp_path / "out")
    assert body["train"]["conversations"] == 1 and body["left_out"] == {"history is not a list of [question, answer]": 1}


def test_an_empty_cell_of_pandas_is_no_value() -> None:
    row = dict.fromkeys(("instruction", "input", "system", "history", "images", "messages", "tools"), float("nan"))
    found = forms.convert_conversation({**row, "question": Q, "answer": A})
    assert (found.messages, found.tools) == ([ASKED, GOOD], None)
    assert forms.convert_prompt({**row, "question": Q, "final_answer": float("nan"), "answer": 5}, "x").row["answer"] == 5


def test_messages_of_a_tree_are_no_documents() -> None:
    row = {"message_id": "m", "parent_id": None, "text": Q, "role": "prompter", "lang": "en"}  # OpenAssistant
    with pytest.raises(NoRow, match=r"these are single messages, as of a tree \(OpenAssistant\): a row is a whole conversation"):
        forms.convert_conversation(row)


def test_a_split_of_files_that_is_not_read_is_refused(qwen: Tokenizer, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"messages": [ASKED, GOOD]})
    with pytest.raises(UserError, match=r"tune\.data\.mine\.split: kind files reads all files of path"):
        tuned(qwen, path, tmp_path / "out", split="test")


def test_columns_that_the_set_names_come_before_those_that_are_guessed() -> None:
    named = ChatData.model_validate({"name": "x", "kind": "files", "columns": {"prompt": "q", "answer": "a", "input": "c"}})
    found = forms.convert_conversation({"instruction": "Other", "q": Q, "a": A, "response": "Other", "c": "Sums"}, data=named)
    assert [one["content"] for one in found.messages] == [f"{Q}\nSums", A]
    row = {"messages": [ASKED, GOOD], "q": "Which?", "chosen": A, "rejected": B, "a": A}
    asked = [{"role": "user", "content": "Which?"}]
    assert preference_forms.convert_preference(row, "x", labeled=False, data=named).prompt == asked
    assert forms.convert_prompt(row, "x", named).messages == asked


def test_columns_and_roles_may_have_other_names() -> None:
    data = ChatData.model_validate({
        "name": "x", "kind": "files", "columns": {"messages": "dialog", "role": "speaker", "content": "said", "train": "learn"},
        "roles": {"customer": "user", "agent": "assistant"},
    })  # fmt: skip
    turns = [{"speaker": "customer", "said": Q}, *({"speaker": "agent", "said": text, "learn": text == B} for text in (A, B))]
    found = forms.convert_conversation({"dialog": turns}, data=data)
    assert [(one["role"], one["content"], one.learned) for one in found.messages] == [
        ("user", Q, True), ("assistant", A, False), ("assistant", B, True)]  # fmt: skip
    named = ChatData.model_validate({"name": "x", "kind": "files", "columns": {"prompt": "q", "response": "a"}})
    assert forms.convert_conversation({"q": Q, "a": A, "prompt_id": 3}, data=named).messages == [ASKED, GOOD]
    with pytest.raises(NoRow, match="columns names response: a, which this row lacks"):
        forms.convert_conversation({"q": Q}, data=named)
    with pytest.raises(ValueError, match="columns has 'reply', which is none of our names"):
        ChatData.model_validate({"name": "x", "kind": "files", "columns": {"reply": "a"}})


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"weight": "0"}, {"weight": 0.0}, {"train": False}, {"train": "false"}, {"loss_weight": 0.0}], ids=str
)
def test_what_is_marked_not_to_be_trained_is_not(qwen: Tokenizer, tmp_path: Path, mark: dict[str, Any]) -> None:
    """OpenAI's, ShareGPT's, axolotl's and LLaMA-Factory's marks; the answer stays in the conversation."""
    row = {"messages": [*EARLIER[:1], EARLIER[1] | mark, ASKED, GOOD | {"weight": 1}]}
    path = jsonl(tmp_path / "a.jsonl", row, {"messages": [ASKED, GOOD | mark]})
    body = tuned(qwen, path, tmp_path / "out")
    assert body["noted"]["answers marked not to be trained"] == 2
    assert body["left_out"] == {"nothing to train": 1}
    assert trained(qwen, path, tmp_path / "again") == [["<think>\n\n</think>\n\nIt is 5.<|im_end|>"]]
    ids = qwen.encode_chat([*EARLIER, ASKED, GOOD])[0]
    assert body["train"]["tokens"] == len(ids)


@pytest.mark.parametrize("thought", ["think", "i", "Sure"])
def test_a_thought_that_is_a_part_of_what_stands_before_it_is_not_trained(qwen: Tokenizer, tmp_path: Path, thought: str) -> None:
    rows = [{"messages": [ASKED, {"role": "assistant", "content": f"Sure<think>\n{thought}\n</think>\n\n{A}"}]}]
    spoken = "".join(trained(qwen, jsonl(tmp_path / "a.jsonl", *rows), tmp_path / "out", thoughts={"train": False})[0])
    assert spoken.count("<think>") == spoken.count("</think>") and f"\n{thought}\n" not in spoken and A in spoken


def test_answers_of_a_prompt_are_not_trained_as_in_trl(qwen: Tokenizer, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": [*EARLIER, ASKED], "completion": [GOOD]})
    assert trained(qwen, path, tmp_path / "out") == [["<think>\n\n</think>\n\nIt is 5.<|im_end|>"]]


def test_parts_and_offsets_that_are_not_trained(qwen: Tokenizer, tmp_path: Path) -> None:
    """axolotl's flags of parts and its train_detail, which includes both ends."""
    parts = [{"type": "text", "text": "I guess it is 6.", "train": False}, {"type": "text", "text": " No, it is 5.", "weight": 1}]
    detail = {"content": "I guess it is 6. No, it is 5.", "train_detail": [{"begin_offset": 0, "end_offset": 15, "train": False}]}
    path = jsonl(tmp_path / "a.jsonl", {"messages": [ASKED, GOOD | {"content": parts}]})
    expected = [["<think>\n\n</think>\n\n", " No, it is 5.<|im_end|>"]]
    assert trained(qwen, path, tmp_path / "one") == expected
    assert trained(qwen, jsonl(tmp_path / "b.jsonl", {"messages": [ASKED, GOOD | detail]}), tmp_path / "two") == expected


def test_calls_and_tools_in_all_forms() -> None:
    """As text and as objects, legacy calls and LLaMA-Factory's parts: never text letter by letter."""
    bare, call = TOOL["function"], json.dumps({"name": "add", "arguments": {"a": 2}})
    calls: list[Any] = [
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}},
        {"from": "function_call", "value": call}, {"role": "assistant", "content": [{"type": "tool_call", "value": call}]},
    ]  # fmt: skip
    tools: list[Any] = [[TOOL], json.dumps([TOOL]), json.dumps([bare]), [json.dumps(TOOL)], TOOL]
    for called in calls:
        for offered in tools:
            turns = [ASKED, called, {"role": "observation", "content": "5"}, GOOD]
            found = forms.convert_conversation({"messages": turns, "tools": offered}, "messages" if "role" in called else "auto")
            assert found.tools == [TOOL]
            assert found.messages[1]["tool_calls"][0]["function"] == CALLED["tool_calls"][0]["function"]
            assert [one["role"] for one in found.messages] == ["user", "assistant", "tool", "assistant"]
    row = {"query": Q, "answers": json.dumps([CALLED["tool_calls"][0]["function"]]), "tools": json.dumps([TOOL["function"]])}  # xLAM
    found = forms.convert_conversation(row)
    assert (found.messages, found.tools) == ([ASKED, CALLED], [TOOL])


def test_text_without_a_template(qwen: Tokenizer, tmp_path: Path) -> None:
    """axolotl's segments, in which special tokens are special, and documents, in which they are text."""
    segments = [{"text": "<|im_start|>user\nHi", "label": False}, {"text": " Hello there<|im_end|>", "label": True}]
    assert trained(qwen, jsonl(tmp_path / "a.jsonl", {"segments": segments}), tmp_path / "one") == [[" Hello there<|im_end|>"]]
    path = jsonl(tmp_path / "b.jsonl", {"text": "one two three <|im_end|> " * 20})
    body = tuned(qwen, path, tmp_path / "two", length=16)
    assert body["noted"] == {"of text without a template in pieces of sequence_length": 1}
    ids = [*qwen.encode_parts(["one two three <|im_end|> " * 20]), qwen.eos_id]
    assert sum(body[split]["learned_tokens"] for split in ("train", "validation")) == len(ids) - 1, "each token is a label once"


# preferences ----------------------------------------------------------------------------------------------------------------------------

PAIRS: list[Any] = [
    {"prompt": Q, "chosen": A, "rejected": B},
    {"prompt": Q, "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},  # UltraFeedback: the prompt three times
    {"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, {"prompt": [ASKED], "chosen": GOOD, "rejected": BAD},
    {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    {"question": Q, "chosen": A, "rejected": B}, {"instruction": Q, "chosen_response": A, "rejected_response": B},
    {"input": Q, "chosen": A, "rejected": B}, {"instruction": "What is", "input": "2 + 3?", "chosen": A, "rejected": B},
    {"conversations": [{"from": "human", "value": Q}], "chosen": {"from": "gpt", "value": A}, "rejected": {"from": "gpt", "value": B}},
    {"messages": [ASKED], "chosen": GOOD, "rejected": BAD},
    {"prompt": Q, "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "messages": [ASKED, GOOD]},  # ultrafeedback_binarized
    {"prompt": Q, "chosen": [GOOD], "rejected": [BAD], "messages": [ASKED, BAD]}, {"messages": [ASKED, GOOD], "chosen": A, "rejected": B},
    {"messages": [ASKED, GOOD], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": Q, "chosen": A, "rejected": B, "messages": [ASKED, {"role": "assistant", "content": "Five."}]},
    {"input": {"messages": [ASKED]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
    {"chosen": f"\n\nHuman: {Q}\n\nAssistant: {A}", "rejected": f"\n\nHuman: {Q}\n\nAssistant: {B}"},
    {"prompt": f"\n\nHuman: {Q}\n\nAssistant:", "chosen": f" {A}", "rejected": f" {B}"},
    {"prompt": Q, "chosen": json.dumps([ASKED, GOOD]), "rejected": json.dumps([ASKED, BAD])},
    {"conversation": [{"input": Q, "output": A}], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},  # Capybara
    {"chosen": [{**ASKED, "id": "1"}, GOOD], "rejected": [{**ASKED, "id": "2"}, BAD]},
]  # fmt: skip


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: ",".join(row))
def test_a_pair_in_all_forms_has_its_prompt_once(row: dict[str, Any]) -> None:
    found = preference_forms.convert_preference(row, "x", labeled=False)
    assert [" ".join(str(one["content"]).split()) for one in found.prompt] == [Q]
    assert [[one["content"] for one in answer] for answer in found.answers] == [[A], [B]]


@pytest.mark.slow
@pytest.mark.parametrize("row", [
    row for row in PAIRS
    if isinstance(row.get("chosen"), list) and (row["chosen"][0]["role"] == "user" or isinstance(row.get("prompt"), list))
    and "id" not in row["chosen"][0]
], ids=str)  # fmt: skip
def test_conversations_of_pairs_are_those_of_trl(row: dict[str, Any]) -> None:
    from trl.data_utils import extract_prompt

    found = preference_forms.convert_preference(row, "x", labeled=False)
    peer = extract_prompt({key: row[key] for key in ("chosen", "rejected")}) if row["chosen"][0]["role"] == "user" else row
    assert list(found.prompt) == peer["prompt"]
    assert [list(answer) for answer in found.answers] == [peer["chosen"], peer["rejected"]]


def test_longer_pairs() -> None:
    """With a system prompt, earlier turns, and answers that go on after a call."""
    result = {"role": "tool", "content": "5"}
    row = {"system": "Be brief.", "prompt": Q, "chosen": [*EARLIER, ASKED, CALLED, result, GOOD], "rejected": [*EARLIER, ASKED, BAD],
           "tools": json.dumps([TOOL])}  # fmt: skip
    found = preference_forms.convert_preference(row, "x", labeled=False)
    assert found.prompt == [SYSTEM, *EARLIER, ASKED]
    assert found.answers == ([CALLED, result, GOOD], [BAD]) and found.tools == [TOOL]
    assert [one.learned for one in found.conversation(found.answers[1]) if one["role"] == "assistant"] == [False, True]
    odd = preference_forms.convert_preference({"prompt": "p-17", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "x", labeled=False)
    assert odd.prompt == [ASKED] and sum(odd.noted.values()) == 1


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"prompt": Q, "completion": A, "label": True}, True), ({"prompt": [ASKED], "completion": [GOOD], "label": False}, False),
        ({"prompt": Q, "messages": [ASKED, GOOD], "completion": A, "label": True}, True),
        ({"messages": [ASKED, GOOD], "label": True}, True), ({"messages": [ASKED, GOOD], "kto_tag": False}, False),
        ({"conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}], "label": 1}, True),
        ({"instruction": Q, "output": A, "kto_tag": "false"}, False),
    ],
    ids=str,
)  # fmt: skip
def test_labeled_answers_in_all_forms(row: dict[str, Any], label: bool) -> None:
    found = preference_forms.convert_preference(row, "x", labeled=True)
    assert (found.prompt, found.answers, found.label) == ([ASKED], ([GOOD],), label)
    with pytest.raises(NoRow, match=r"a labeled answer: these are for dpo\.loss kto"):
        preference_forms.convert_preference(row, "x", labeled=False)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Count", "completions": ["1", "2"], "labels": [True, False]}, "stepwise supervision has no loss here"),
        ({"prompt": [ASKED], "chosen": [EARLIER[0], GOOD], "rejected": [EARLIER[0], BAD]}, "do not begin with the prompt"),
        ({"chosen": [ASKED, GOOD], "rejected": [EARLIER[0], BAD]}, "different prompts"),
        ({"messages": [ASKED, {"role": "assistant", "content": "Five."}], "chosen": A, "rejected": B}, "messages end with an answer that"),
        ({"prompt": Q, "completion": A, "label": "good"}, "label is 'good', not true or false"),
        ({"prompt": Q, "chosen": A, "rejected": B, "images": ["x.png"]}, "with images"),
    ],
)
def test_rows_that_are_no_preferences_say_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoRow, match=reason):
        preference_forms.convert_preference(row, "x", labeled=True)


def test_all_rows_of_a_file_are_used_and_a_limit_draws_evenly(qwen: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"Number {n}?", "chosen": f"It is {n}.", "rejected": "No idea."} for n in range(2100)]
    path = jsonl(tmp_path / "a.jsonl", *rows)

    def pairs(count: int | None) -> tuple[int, list[int]]:
        data = [{"name": "mine", "kind": "files", "path": path, "max_rows": count}]
        recipe = Recipe.model_validate({"name": "t", "dpo": {"data": data, "sequence_length": "128 tokens", "validation_fraction": 0}})
        made = build_preferences(recipe, qwen, tmp_path / f"out-{count}")
        texts = [qwen.decode(one.ids.tolist()) for one, _ in read_preferences(tmp_path / f"out-{count}", "train")[0]]
        return made["data"]["mine"]["pairs"], sorted(int(text.split("Number ")[1].split("?")[0]) for text in texts)

    assert pairs(None) == (2100, list(range(2100)))
    count, numbers = pairs(100)
    assert count == 100 and max(numbers) > 1500 and numbers[50] > 500, "not the first ones"
    assert "drawn evenly from 2,100 rows, by count" in " ".join(capsys.readouterr().err.split())


# prompts --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": Q, "answer": "5"}, {"prompt": [ASKED], "answer": "5"}, {"question": Q, "final_answer": "5"},
        {"problem": Q, "solution": "5"}, {"messages": [ASKED], "ground_truth": "5"},
        {"prompt": [ASKED], "reward_model": {"ground_truth": "5"}},
        {"messages": [ASKED, {"role": "assistant", "content": "5"}]}, {"conversations": [{"from": "human", "value": Q}], "answer": "5"},
    ],
    ids=lambda row: ",".join(row),
)  # fmt: skip
def test_a_prompt_in_all_forms(row: dict[str, Any]) -> None:
    found = forms.convert_prompt(row, "x")
    assert found.messages == [ASKED] and found.row["answer"] == "5"


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": None, "question": Q}, Q), ({"messages": [ASKED, GOOD]}, [ASKED]), ({"prompt": json.dumps([ASKED])}, [ASKED]),
        ({"conversations": [{"from": "human", "value": Q}]}, [ASKED]), ({"prompt": Q, "messages": [ASKED]}, Q),
        ({"prompt": Q}, Q), ({"prompt": 7}, "7"),
        ({"system": "Be brief.", "prompt": [ASKED, GOOD]}, [SYSTEM, ASKED]),
    ],
    ids=str,
)  # fmt: skip
def test_a_reward_is_given_the_prompt_that_is_asked(row: dict[str, Any], prompt: Any) -> None:
    found = forms.convert_prompt({**row, "answer": 5, "answers": ["5"], "tools": [TOOL]}, "x").row
    assert found["prompt"] == prompt and type(found["answer"]) is int, "as the file has it"


def test_sequences_of_a_conversation_and_pairs_of_a_prompt_are_held_out_together(qwen: Tokenizer, tmp_path: Path) -> None:
    """Otherwise a stage would be validated on what it trains."""
    from test_chat_data import documents

    turns = [[{"role": role, "content": f"{role} {n} {turn}"} for turn in range(3) for role in ("user", "assistant")] for n in range(20)]
    path = jsonl(tmp_path / "chats.jsonl", *({"messages": one} for one in turns))
    body = {"name": "mine", "kind": "files", "path": path, "answers": "each", "max_rows": 10}
    options = {"data": [body], "sequence_length": "512 tokens", "validation_fraction": 0.3}
    made = build_chat_data(Recipe.model_validate({"name": "t", "tune": options}), qwen, tmp_path / "chats")["data"]["mine"]
    assert [made[split]["conversations"] for split in ("train", "validation")] == [21, 9], "three sequences of each of ten conversations"
    sides = [{qwen.decode(ids).split("user ")[1].split()[0] for ids, _ in documents(tmp_path / "chats" / split / "mine")}
             for split in ("train", "validation")]  # fmt: skip
    assert [len(side) for side in sides] == [7, 3] and not sides[0] & sides[1]

    pairs = jsonl(tmp_path / "pairs.jsonl", *({"prompt": f"Say {n // 3}", "chosen": f"Yes {n}", "rejected": f"No {n}"} for n in range(60)))
    for loss, fraction, count, held_out in (("sigmoid", 0.2, 60, 12), ("kto", 0.2, 120, 24), ("simpo", 0.02, 60, 3), ("ipo", 0, 60, 0)):
        dpo = {"data": [{"name": "mine", "kind": "files", "path": pairs}], "loss": loss, "validation_fraction": fraction}
        build_preferences(Recipe.model_validate({"name": "t", "dpo": dpo}), qwen, tmp_path / loss)
        read = [read_preferences(tmp_path / loss, split)[0] for split in ("train", "validation")]
        asked = [{qwen.decode(one.ids[~one.learned].tolist()) for one, _ in side} for side in read]
        assert sum(map(len, read)) == count and len(read[1]) == held_out and not asked[0] & asked[1]


# files ----------------------------------------------------------------------------------------------------------------------------------

ROWS = [{"messages": [ASKED, GOOD], "n": n} for n in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
FILES: dict[str, bytes] = {
    "a.jsonl": LINES.encode(), "bom.jsonl": b"\xef\xbb\xbf" + LINES.encode(), "utf16.jsonl": LINES.encode("utf-16"),
    "utf16be.jsonl": b"\xfe\xff" + LINES.encode("utf-16-be"), "utf32.json": LINES.encode("utf-32"),
    "crlf.jsonl": LINES.replace("\n", "\r\n").encode(), "blank.jsonl": ("\n \n" + LINES.replace("\n", "\n\n")).encode(),
    "B.JSONL": LINES.encode(), "C.JSON.GZ": gzip.compress(LINES.encode()), "array.jsonl": json.dumps(ROWS).encode(),
    "pretty.json": json.dumps(ROWS, indent=2).encode(), "bom-array.json": b"\xef\xbb\xbf" + json.dumps(ROWS, indent=1).encode(),
    "objects.jsonl": "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(), "open.jsonl": LINES.rstrip().encode(),
    "nan.jsonl": LINES.replace('"n": 1', '"n": NaN').encode(), "utf16.json.gz": gzip.compress(json.dumps(ROWS).encode("utf-16")),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FILES))
def test_every_file_has_the_same_rows_for_tuning_and_corpus(tmp_path: Path, name: str) -> None:
    from lmworks.corpus.read import parts, read
    from lmworks.recipe.schema.corpus import Source

    (tmp_path / name).write_bytes(FILES[name])
    rows = list(read_files("tune.data.mine", str(tmp_path)))
    assert [row.fault for row in rows] == [None] * 3
    assert [row.value["messages"] for row in rows] == [[ASKED, GOOD]] * 3
    options = {"name": "x", "kind": "jsonl", "path": str(tmp_path), "license": "MIT", "text_key": "messages", "fact_keys": ["n"]}
    source = Source.model_validate(options)
    for size in (1 << 20, 50):  # whole, and cut into parts where that can be done
        items = [item for part in parts(source, size) for item in read(source, part, 10_000)]
        assert [item.reason for item in items] == ["wrong_type"] * 3, "three rows, whose column is a list"


@pytest.mark.parametrize(
    ("data", "faults"),
    [
        (b'{"a": "caf\xe9"}\n{"a": 1}\n', ["bad UTF-8: byte 0xe9 at 10 is not UTF-8; save the file as UTF-8", None]),
        (b'{"a": 1}\n{"a": \n{"a": 2}\n', [None, "broken JSON: Expecting value", None]),
        (b'[{"a": "\xff"}, {"a": 1}]', ["bad UTF-8: byte 0xff", None]),
        (b'[{"a": 1}, {"a": \\x}, {"a": 2}]', [None, "broken JSON: Expecting value", None]),
        (b'[{"a": 1}, {"a": ', [None, "broken JSON: rest of the file unread, 6 bytes: Expecting value"]),
        (b'[{"a": 1},', [None, "broken JSON: the array does not end"]),
        (b'[{"a": 1}] {"b": 2}', [None, "broken JSON: rest of the file unread, 8 bytes: it follows the end"]),
        (b'{"a": [1,\n{"b": 2}\n{"b": 3}\n', ["broken JSON", None, None]),
        (LINES.encode("utf-16-le"), ["broken JSON: it has zero bytes: save the file as UTF-8"] * 4),
        (b'\xff\xfe{\x00"', ["damaged file: it is not UTF-16, which its byte order mark says"]),
        (b"", []),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_read_is_named_and_costs_no_other_row(tmp_path: Path, data: bytes, faults: list[str | None]) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    found = [row.fault for row in read_files("tune.data.mine", str(tmp_path / "a.jsonl"))]
    assert len(found) == len(faults), found
    for fault, wanted in zip(found, faults, strict=True):
        assert fault is None if wanted is None else fault is not None and fault.startswith(wanted), (fault, wanted)


def test_a_file_of_which_nothing_is_used_is_told_with_its_first_reasons(
    qwen: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl(folder / "good.jsonl", *ROWS[:1])
    jsonl(folder / "bad.jsonl", {"a": 1}, {"b": 1}, {"messages": []}, {"c": 1})
    (folder / "TABLE.CSV").write_text("a,b\n")
    body = tuned(qwen, str(folder), tmp_path / "out")
    assert body["skipped_files"] == "1 file of other kinds not read: TABLE.CSV"
    said = "".join(capsys.readouterr().err.split())  # lines break anywhere in a long path
    assert "bad.jsonlisused:" in said and "itscolumnsarea" in said and "itscolumnsareb" in said and "itscolumnsarec" not in said


def test_a_rest_that_is_not_read_is_told_with_its_size(qwen: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("[" + json.dumps(ROWS[0]) + ', {"messages": [}, ' + ", ".join(map(json.dumps, ROWS)) + "]")
    body = tuned(qwen, str(tmp_path / "a.json"), tmp_path / "out")
    (reason,) = body["left_out"]
    assert reason.startswith("rest of the file unread, ") and body["examples"][0]["origin"] == f"{tmp_path}/a.json:2"
    assert f"left out: 1 {reason}" in " ".join(capsys.readouterr().err.split())


def test_rows_of_parquet_that_are_not_utf8_cost_themselves(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    raw = pa.array([b"good", b"\xff\xfe bad", b"also good"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "A.PARQUET")
    found = list(read_files("tune.data.mine", str(tmp_path)))
    assert [row.fault and row.fault.partition(":")[0] for row in found] == [None, "bad UTF-8", None]
    (tmp_path / "B.parquet.gz").write_bytes(gzip.compress((tmp_path / "A.PARQUET").read_bytes()))
    assert len(list(read_files("tune.data.mine", str(tmp_path / "B.parquet.gz")))) == 3


WHEN = datetime(2023, 4, 1, tzinfo=UTC)
OTHERS = {"when": WHEN, "score": Decimal("1.5"), "day": WHEN.date(), "took": timedelta(seconds=2)}


def table(path: Path, *rows: dict[str, Any]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def test_times_and_decimals_of_a_table_are_texts_to_templates_and_rewards(qwen: Tokenizer, tmp_path: Path) -> None:
    """WildChat has a timestamp in every message; templates and the process of a reward get JSON."""
    path = table(tmp_path / "a.parquet", {"messages": [ASKED | OTHERS, GOOD | OTHERS], **OTHERS})
    assert trained(qwen, path, tmp_path / "out") == [["<think>\n\n</think>\n\nIt is 5.<|im_end|>"]]
    (row,) = read_files("tune.data.mine", path)
    assert row.value["messages"][0]["when"] == "2023-04-01T00:00:00+00:00" and row.value["score"] == "1.5"
    json.dumps(row.value)
    pairs = {name: [ASKED | OTHERS, answer | OTHERS] for name, answer in (("chosen", GOOD), ("rejected", BAD))}
    dpo = {"data": [{"name": "mine", "kind": "files", "path": table(tmp_path / "b.parquet", pairs)}]}
    made = build_preferences(Recipe.model_validate({"name": "t", "dpo": dpo}), qwen, tmp_path / "pairs")
    assert made["data"]["mine"]["pairs"] == 1


def test_bytes_cost_the_row_that_has_them(qwen: Tokenizer, tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", {"messages": [ASKED | {"raw": b"\xff"}, GOOD]}, {"messages": [ASKED, GOOD]})
    body = tuned(qwen, path, tmp_path / "out")
    assert body["left_out"] == {"malformed": 1} and "bytes is not JSON serializable" in body["examples"][0]["detail"]
    task = {"name": "a", "kind": "files", "reward": "python", "file": "r.py"}
    data = RewardTask.model_validate(task | {"path": table(tmp_path / "b.parquet", {"prompt": Q, "raw": b"\xff"})})
    ((_, reason),) = _rows(data, None, {}, None)  # type: ignore[arg-type,misc]
    assert reason == "columns that a reward cannot be given: raw (Object of type bytes is not JSON serializable)"


@pytest.mark.parametrize("depth", [90, 120, 600, 900])
@pytest.mark.parametrize("form", ["column", "message", "arguments", "text", "parts", "tools"])
def test_what_is_nested_too_deep_costs_its_row(qwen: Tokenizer, tmp_path: Path, form: str, depth: int) -> None:
    """In each place where it is read, also with names of roles, for which all columns are searched."""
    deep = "[" * (depth - 6) + "]" * (depth - 6)
    call = json.dumps({"name": "add", "arguments": {"a": "DEEP"}}).replace('"DEEP"', deep)
    thoughts = '[{"type":"thinking","thinking":' * (depth // 2) + '"Hm"' + "}]" * (depth // 2)
    row: dict[str, Any] = {
        "column": {"messages": [ASKED, GOOD], "other": "DEEP"}, "message": {"messages": [ASKED | {"other": "DEEP"}, GOOD]},
        "arguments": {"messages": [ASKED, {"role": "assistant", "function_call": call}]},
        "text": {"messages": json.dumps([ASKED | {"other": "DEEP"}, GOOD]).replace('"DEEP"', deep)},
        "parts": {"messages": f'[{json.dumps(ASKED)}, {{"role": "assistant", "content": {thoughts}}}]'},
        "tools": {"messages": [ASKED, GOOD], "tools": json.dumps([TOOL | {"other": "DEEP"}]).replace('"DEEP"', deep)},
    }[form]  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row).replace('"DEEP"', deep) + "\n" + json.dumps({"messages": [ASKED, BAD]}) + "\n")
    body = tuned(qwen, str(path), tmp_path / "out", roles={"agent": "assistant"})
    conversations = body["train"]["conversations"] + body["validation"]["conversations"]
    kept = depth == 90 and form != "parts"  # thoughts of thoughts are no text
    assert (conversations, sum(body["left_out"].values())) == ((2, 0) if kept else (1, 1))


def test_a_limit_is_reached_though_most_rows_do_not_fit(qwen: Tokenizer, tmp_path: Path) -> None:
    """Each row is counted once, in the order in which all were drawn."""
    rows: list[Any] = [{"prompt": f"Q{n}", "chosen": "good " * (1 if n % 20 == 0 else 400) + str(n), "rejected": "bad"} for n in range(400)]
    data = {"name": "mine", "kind": "files", "path": jsonl(tmp_path / "a.jsonl", *rows, {"body": 1}), "max_rows": 10}
    dpo = {"data": [data], "sequence_length": "128 tokens", "validation_fraction": 0}
    made = build_preferences(Recipe.model_validate({"name": "t", "dpo": dpo}), qwen, tmp_path / "pairs")["data"]["mine"]
    assert (made["pairs"], made["rows"], made["left_out"]["no known form"]) == (10, 400, 1)
    path = jsonl(tmp_path / "b.jsonl", *({"prompt": f"Q{n if n % 20 == 0 else 1}", "completion": A} for n in range(400)), {"body": 1})
    body = tuned(qwen, path, tmp_path / "out", max_rows=12)
    assert body["forms"] == {"completion": 12} and body["rows"] == 400 and body["left_out"]["no known form"] == 1
    grpo = {"data": [data | {"path": path, "reward": "exact", "columns": {"answer": "completion"}, "max_rows": 15}]}
    found = read_prompts(Recipe.model_validate({"name": "t", "grpo": grpo | {"sequence_length": "512 tokens"}}), qwen)
    assert found.sets["mine"]["prompts"] == 15 and found.sets["mine"]["left_out"]["no prompt"] == 1
    drawn = [list(Drawn(lambda first: iter(range(50)), limit, 1, "x")) for limit in (2, 50)]
    assert drawn[0] == drawn[1] and sorted(drawn[0]) == list(range(50))


def test_an_answer_that_is_good_in_one_pair_and_bad_in_another_has_both_labels(qwen: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": Q, "chosen": "A", "rejected": "B"}, {"prompt": Q, "chosen": "B", "rejected": "A"},
            {"prompt": "Hi", "chosen": "B", "rejected": "A"}, {"prompt": Q, "chosen": "A", "rejected": "B"}]  # fmt: skip
    data = [{"name": "mine", "kind": "files", "path": jsonl(tmp_path / "a.jsonl", *rows)}]
    dpo: dict[str, Any] = {"data": data, "loss": "kto", "validation_fraction": 0}
    made = build_preferences(Recipe.model_validate({"name": "t", "dpo": dpo}), qwen, tmp_path / "pairs")["data"]["mine"]
    assert (made["pairs"], made["left_out"]) == (6, {"repeated": 2})

    def written(folder: Path) -> list[Any]:
        pairs, labels = read_preferences(folder, "train")
        assert labels is not None and labels.sum() == 3
        return sorted((*(one.ids.tolist() for one in pair), bool(label)) for pair, label in zip(pairs, labels, strict=True))

    dpo["data"] = [{"name": "mine", "kind": "files", "path": jsonl(tmp_path / "b.jsonl", *rows[2::-1])}]
    build_preferences(Recipe.model_validate({"name": "t", "dpo": dpo}), qwen, tmp_path / "other")
    assert written(tmp_path / "pairs") == written(tmp_path / "other"), "whatever the order of the rows"


DATED = (
    "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y, %H:%M:%S') }}.<|im_end|>\n{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_with_the_date_renders_the_same_on_another_day(tmp_path: Path) -> None:
    """In training; elsewhere, as for a server, it shows today's. The run records the day on which it takes the tokenizer."""
    from lmworks.tokenizer.opening import keep

    source = tmp_path / "source"
    source.mkdir()
    write_tokenizer(source, "qwen")
    (source / "chat_template.jinja").write_text(DATED)
    recipe = Recipe.model_validate({"name": "t", "tokenizer": {"path": str(source)}})
    report = keep(recipe, tmp_path / "run")[1]
    assert report["chat_date"] == date.today().isoformat()
    (tmp_path / "run" / "report.json").write_text(json.dumps(report | {"chat_date": "2024-02-03"}))
    assert keep(recipe, tmp_path / "run")[1]["chat_date"] == "2024-02-03"
    tokenizer = load(tmp_path / "run")
    assert "03 Feb 2024" not in tokenizer.apply_chat([ASKED])
    path = jsonl(tmp_path / "a.jsonl", {"prompt": Q, "completion": A, "answer": "5", "chosen": A, "rejected": B})
    data = {"name": "mine", "kind": "files", "path": path}
    sections: dict[str, Any] = {
        "tune": {"data": [data]}, "dpo": {"data": [data]},
        "grpo": {"data": [data | {"reward": "numeric"}], "sequence_length": "512 tokens"},
    }  # fmt: skip
    for stage, section in sections.items():
        recipe, tokenizer = Recipe.model_validate({"name": "t", stage: section}), load(tmp_path / "run")
        if stage == "grpo":
            shown = tokenizer.decode(read_prompts(recipe, tokenizer).train[0].ids)
        elif stage == "dpo":
            build_preferences(recipe, tokenizer, tmp_path / stage)
            shown = tokenizer.decode(read_preferences(tmp_path / stage, "train")[0][0][0].ids.tolist())
        else:
            build_chat_data(recipe, tokenizer, tmp_path / stage)
            from test_chat_data import documents

            shown = tokenizer.decode(documents(tmp_path / stage / "train" / "mine")[0][0])
        assert "Today is 03 Feb 2024, 00:00:00." in shown, stage


# published rows -------------------------------------------------------------------------------------------------------------------------


def real(name: str) -> str:
    path = REAL / name
    if not path.is_file():
        pytest.skip(f"needs {name} of LLaMA-Factory's data in {REAL}")
    return str(path)


@pytest.mark.slow
def test_all_published_pairs_are_read() -> None:
    """LLaMA-Factory's 300 pairs and 300 labeled answers: prompt and answers are what it trains on."""
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    given = json.loads(Path(real("dpo_en_demo.json")).read_text(encoding="utf-8"))
    assert len(given) == 300
    data = PreferenceData.model_validate({"name": "x", "kind": "files", "path": real("dpo_en_demo.json")})
    for row, raw in zip(given, read_files("dpo.data.x", data.path), strict=True):
        found = preference_forms.convert_preference(raw.value, raw.origin, labeled=False)
        assert [(one["role"], one["content"]) for one in found.prompt] == [(roles[t["from"]], t["value"]) for t in row["conversations"]]
        assert [[one["content"] for one in answer] for answer in found.answers] == [[row["chosen"]["value"]], [row["rejected"]["value"]]]
    given = json.loads(Path(real("kto_en_demo.json")).read_text(encoding="utf-8"))
    assert len(given) == 300
    for row, raw in zip(given, read_files("dpo.data.x", real("kto_en_demo.json")), strict=True):
        found = preference_forms.convert_preference(raw.value, raw.origin, labeled=True)
        assert found.prompt == row["messages"][:-1] and found.answers == ([row["messages"][-1]],) and found.label == row["label"]


@pytest.mark.slow
def test_all_published_conversations_are_read(qwen: Tokenizer, tmp_path: Path) -> None:
    """Instructions, calls with tools as text, and messages of parts with thoughts and several calls."""
    given = json.loads(Path(real("alpaca_en_demo.json")).read_text(encoding="utf-8"))
    for row, raw in zip(given, read_files("tune.data.x", real("alpaca_en_demo.json")), strict=True):
        asked = "\n".join(filter(None, (row["instruction"], row["input"])))
        assert [one["content"] for one in forms.convert_conversation(raw.value).messages] == [asked, row["output"]]
    for name, form, count in (("glaive_toolcall_en_demo.json", "sharegpt", 300), ("reason_tool_use_demo_50.jsonl", "messages", 50)):
        body = tuned(qwen, real(name), tmp_path / name, length=8192)
        assert body["forms"] == {form: count - sum(body["left_out"].values())}
        assert set(body["left_out"]) <= {"repeated"}
    noted = tuned(qwen, real("reason_tool_use_demo_50.jsonl"), tmp_path / "cut", length=1024)["noted"]
    cut, left_out = ("cut at an answer", "with an answer that is cut at sequence_length"), "thoughts that the chat template leaves out"
    assert noted.keys() == {*cut, left_out}, "no answer that is whole lacks its stop token"
    assert all(0 < count <= 50 for count in noted.values())
    found = [forms.convert_conversation(raw.value) for raw in read_files("tune.data.x", real("reason_tool_use_demo_50.jsonl"))]
    assert sum(len(one.get("tool_calls", [])) for row in found for one in row.messages) == 41 + 2 * 9 + 3 * 3
    assert sum("reasoning_content" in one for row in found for one in row.messages) == 112
    assert all(isinstance(one["content"], str) for row in found for one in row.messages if one["role"] != "tool")


def test_values_that_python_cannot_hold_cost_their_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    late = pa.array([300_000_000_000_000_000, None], pa.timestamp("us"))
    pq.write_table(pa.table({"prompt": [Q, Q], "when": late}), tmp_path / "a.parquet")
    first, second = read_files("tune.data.mine", str(tmp_path / "a.parquet"))
    assert first.fault == "bad value: a value of this row cannot be read (date value out of range)"
    assert (second.value, second.fault) == ({"prompt": Q}, None)


def test_a_dataset_whose_files_do_not_fit_is_damaged_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    jsonl(tmp_path / "data" / "a.jsonl", {"prompt": Q})
    jsonl(tmp_path / "data" / "b.jsonl", {"other": A})
    good, bad = read_dataset("tune.data.mine", str(tmp_path / "data"), "train")
    assert good.value == {"prompt": Q} and bad.fault is not None
    assert bad.fault.startswith("damaged file: Couldn't cast other: string") and "\n" not in bad.fault
