"""`lmworks data`: batches, plans, changes of the mixture and imports, as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from command import Lmworks

from lmworks.tokenizer import load
from lmworks.watch.ledger import Ledger, RunLock, read_ledger
from tiny_run import FIRST, Tiny


def test_batch_shows_documents_and_plan_how_often_they_are_read(lmworks: Lmworks, tiny: Tiny) -> None:
    shown = lmworks("data", "batch", tiny.run_dir, 3, "--json")
    rows = json.loads(shown.out)
    assert [row["number"] for row in rows] == list(range(rows[0]["number"], rows[0]["number"] + len(rows)))
    assert all(row["documents"][0]["origin"] for row in rows)
    plan = json.loads(lmworks("data", "plan", tiny.run_dir, "--json").out)
    assert {(share["phase"], share["source"]) for share in plan["shares"]} == {("general", "code"), ("general", "docs"), ("long", "docs")}
    assert plan["readings"].keys() == {"code", "docs"}
    assert {one["sequence_length"] for one in plan["waste"]} == {32, 64}
    assert all(0 <= one["padding"] < 0.5 and 0 <= one["cut"] <= 1 for one in plan["waste"])
    printed = lmworks("data", "plan", tiny.run_dir).out
    assert "What each phase reads" in printed and "documents are read in part by two phases" in printed


def test_a_batch_that_a_rollback_left_out_is_shown_as_that(lmworks: Lmworks, tiny_copy: Tiny) -> None:
    with Ledger(tiny_copy.run_dir / "ledger.jsonl") as ledger:
        ledger.write("rollback", stage="pretrain", step=4, to_step=2, skip=[3, 5])
        ledger.write("rollback", stage="tune", step=4, to_step=0, skip=[0, 3])
    shown = [lmworks("data", "batch", tiny_copy.run_dir, step).out for step in (2, 3)]
    assert ["(left out by a rollback)" in text for text in shown] == [False, True]


def asked(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_ledger(run_dir / "ledger.jsonl") if line["event"] == "mixture_asked"]


def test_a_change_of_the_mixture_is_shown_and_asked_for(lmworks: Lmworks, tiny_copy: Tiny) -> None:
    done = lmworks("data", "mixture", tiny_copy.run_dir, "--at", 9, "--set", "code=0.2", "--set", "docs=0.8")
    assert done.code == 0, done.err
    assert "requested from step 9 on; it is applied when the run resumes" in done.out
    (line,) = asked(tiny_copy.run_dir)
    assert (line["step"], line["mixture"]) == (9, {"code": 0.2, "docs": 0.8})
    later = json.loads(lmworks("data", "batch", tiny_copy.run_dir, FIRST - 1, "--json").out)
    assert {row["source"] for row in later} == {"code", "docs"}
    with RunLock(tiny_copy.run_dir):
        live = lmworks("data", "mixture", tiny_copy.run_dir, "--set", "docs=1")
        assert "requested from step 0 on; the running process applies it before it reads its next batch" in live.out
    soon = json.loads(lmworks("data", "batch", tiny_copy.run_dir, 8, "--json").out)
    assert {row["source"] for row in soon} == {"docs"}, "as it will be read"
    refused = lmworks("data", "mixture", tiny_copy.run_dir, "--set", "docs=0.5", "--set", "poems=0.5")
    assert "the mixture names source poems, which has no tokens" in refused.error
    assert "sum to 0.5" in lmworks("data", "mixture", tiny_copy.run_dir, "--set", "docs=0.5").error
    assert len(asked(tiny_copy.run_dir)) == 2, "what is refused is not asked for"


def test_verify_and_import(lmworks: Lmworks, tiny_copy: Tiny, tmp_path: Path) -> None:
    assert "all files match their hashes" in lmworks("data", "verify", tiny_copy.run_dir).out
    (path,) = (tiny_copy.run_dir / "shards" / "train").glob("code-00000.bin")
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    assert "is damaged" in lmworks("data", "verify", tiny_copy.run_dir).error
    tokenizer = load(tiny_copy.run_dir / "tokenizer")
    np.array([*tokenizer.encode("Words of another tool. " * 9), tokenizer.eos_id] * 3, "<u2").tofile(tmp_path / "a.npy")
    arguments = ["--tokenizer", tokenizer.directory, "--name", "web", "--out", tmp_path / "web"]
    done = lmworks("data", "import", "olmo", tmp_path / "a.npy", *arguments)
    assert done.code == 0, done.err
    assert done.out.startswith("3 documents,") and "Words of another tool." in done.out
    unknown = lmworks("data", "import", "arrow", "a", *arguments)
    assert "'arrow' cannot be imported; the formats are: megatron, datatrove" in unknown.error
