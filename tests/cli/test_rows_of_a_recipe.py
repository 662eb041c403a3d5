"""Rows of a user's files from the command line: what is trained, masked, drawn and left out is what the lines say."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Done, Lmworks

from base_models import write_model, write_tokenizer
from lmworks.cli.main import main
from lmworks.io.files import read_json
from lmworks.tokenizer import load
from lmworks.train.data.preferences import read_preferences

ROWS = 448  # of the embedding
MANY, SOME = 2_500, 60  # texts, pairs


def turns(*texts: str, **last: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return [*found[:-1], found[-1] | last]


MARKED = [
    [*turns("Hi?", "A bad one.", weight=0), *turns("And?", "A good one.")],
    [*turns("Ho?", "Another bad one.", train=False), *turns("And?", "Another good one.")],
    turns("Hu?", "The worst one.", weight=0),
]
THOUGHTS = [turns(f"{n} + 2?", f"It is {n + 2}.", reasoning_content=f"Add {n} and two") for n in range(3)]
PAIRS = [{"prompt": f"Number {n}?", "chosen": turns(f"Number {n}?", f"It is {n}."), "rejected": turns(f"Number {n}?", "No idea.")}
         for n in range(SOME)]  # fmt: skip


def _write(path: Path, rows: list[Any], before: bytes = b"") -> str:
    path.write_bytes(before + "".join(json.dumps(row) + "\n" for row in rows).encode())
    return str(path)


def _call(*arguments: object) -> Done:
    """As `lmworks` of conftest.py, for a fixture of the module."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["lmworks", *map(str, arguments)])
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A run of `lmworks dpo RECIPE`, tuning included, and what it printed."""
    folder = tmp_path_factory.mktemp("rows")
    write_tokenizer(folder / "base", "qwen")
    write_model(folder / "base", ROWS)
    marked = _write(folder / "MARKED.JSONL", [{"messages": row} for row in MARKED], b"\xef\xbb\xbf")
    thoughts = _write(folder / "thoughts.jsonl", [{"messages": row} for row in THOUGHTS])
    many = _write(folder / "many.jsonl", [{"text": f"It is {n}."} for n in range(MANY)])
    pairs = _write(folder / "pairs.jsonl", PAIRS)
    given: list[dict[str, Any]] = [
        {"name": "marked", "path": marked}, {"name": "thoughts", "path": thoughts},
        {"name": "silent", "path": thoughts, "thoughts": {"train": False}},
        {"name": "whole", "path": many}, {"name": "some", "path": many, "max_rows": 20},
    ]  # fmt: skip
    recipe = {
        "name": "rows", "threads": 1, "start_from": str(folder / "base"), "run_dir": str(folder / "run"),
        "tune": {"data": [one | {"kind": "files"} for one in given], "tokens": "512 tokens", "sequence_length": "64 tokens",
                 "global_batch_tokens": "256 tokens", "validation_fraction": 0},
        "dpo": {"data": [{"name": "whole", "kind": "files", "path": pairs}, {"name": "some", "kind": "files", "path": pairs,
        "max_rows": 9}],
                "loss": "simpo", "sequence_length": "64 tokens", "pairs_per_step": 4, "epochs": 0.1, "validation_fraction": 0},
        "train": {"precision": "fp32", "compile": False, "micro_batch_sequences": 2},
        "evaluate": {"benchmarks": []},
    }  # fmt: skip
    (folder / "rows.yaml").write_text(yaml.safe_dump(recipe))
    done = _call("dpo", folder / "rows.yaml")
    assert done.code == 0, done.err
    return folder / "run", done


def _trained(lmworks: Lmworks, run: Path, name: str) -> tuple[list[list[str]], str]:
    """By `lmworks data conversations`: for each conversation of a set the texts that are trained, and the texts of all together."""
    done = lmworks("data", "conversations", run, "--set", name, "--count", MANY, "--json")
    assert done.code == 0, done.err
    shown = json.loads(done.out)["conversations"]
    text = "".join(piece for one in shown for piece, _ in one["pieces"])
    return [[piece for piece, trained in one["pieces"] if trained] for one in shown], text


def test_marked_answers_stay_in_the_conversation_and_are_not_trained(lmworks: Lmworks, tuned: tuple[Path, Done]) -> None:
    """Of a file with a byte order mark, whose suffix is in capitals: its first row is read."""
    run, done = tuned
    trained, text = _trained(lmworks, run, "marked")
    assert trained == [[f"<think>\n\n</think>\n\n{answer}<|im_end|>"] for answer in ("A good one.", "Another good one.")]
    assert "A bad one." in text and "Another bad one." in text and "The worst one." not in text
    said = " ".join(done.err.split())
    assert "marked (messages): 2 conversations," in said and "3 answers marked not to be trained; left out: 1 nothing to train" in said
    printed = lmworks("data", "conversations", run, "--set", "marked").out
    assert "3 answers marked not to be trained" in printed and "A bad one.<|im_end|>" in printed and "A good one.<|im_end|>⟧" in printed


def test_thoughts_are_trained_unless_that_is_switched_off(lmworks: Lmworks, tuned: tuple[Path, Done]) -> None:
    run, done = tuned
    trained, _ = _trained(lmworks, run, "thoughts")
    assert trained == [[f"<think>\nAdd {n} and two\n</think>\n\nIt is {n + 2}.<|im_end|>"] for n in range(3)]
    trained, text = _trained(lmworks, run, "silent")
    assert trained == [["<think>\n", f"\n</think>\n\nIt is {n + 2}.<|im_end|>"] for n in range(3)]
    assert "Add 1 and two" in text, "it is read, and not learned"
    assert " ".join(done.err.split()).count("3 thoughts not trained") == 1


def test_a_file_is_read_whole_unless_count_is_set(lmworks: Lmworks, tuned: tuple[Path, Done]) -> None:
    run, done = tuned
    said = " ".join(done.err.split())
    everything, _ = _trained(lmworks, run, "whole")
    assert len(everything) == MANY and len({tuple(one) for one in everything}) == MANY
    drawn, _ = _trained(lmworks, run, "some")
    numbers = [int(re.findall(r"\d+", one[0])[0]) for one in drawn]
    assert len(numbers) == 20 and max(numbers) > MANY / 2, "not the first ones"
    assert re.search(r"whole \(\S+\): 2,500 conversations", said) and re.search(r"some \(\S+\): 20 conversations", said)
    assert said.count("drawn evenly from 2,500 rows, by count") == 1, "of the set with count"
    assert "dpo.data.whole: 60 pairs" in said and "dpo.data.some: 9 pairs; drawn evenly from 60 rows, by count" in said


def test_a_pair_whose_answers_repeat_the_prompt_is_trained_with_it_once(tuned: tuple[Path, Done]) -> None:
    run, _ = tuned
    tokenizer = load(run / "tokenizer")
    pairs, _ = read_preferences(run / "dpo" / "data", "train")
    assert len(pairs) == SOME + 9 and read_json(run / "dpo" / "data" / "manifest.json")["data"]["whole"]["left_out"] == {}
    for pair in pairs[:20]:
        number = int(tokenizer.decode(pair[0].ids.tolist()).partition("Number ")[2].partition("?")[0])
        row = PAIRS[number]
        for name, answer in zip(("chosen", "rejected"), pair, strict=True):
            expected, _ = tokenizer.encode_chat(row[name])
            assert answer.ids.tolist() == expected, tokenizer.decode(answer.ids.tolist())
            learned = tokenizer.decode(answer.ids[answer.learned].tolist())
            assert learned == f"<think>\n\n</think>\n\n{row[name][1]['content']}<|im_end|>"
