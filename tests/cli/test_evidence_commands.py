"""The commands that look at a corpus: what they print and write, their exit codes, their one-line errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command import Lmworks

from lmworks.io.run_layout import corpus_files
from lmworks.shards.lineage import document_at, find_document
from lmworks.shards.manifest import Manifest
from lmworks.shards.remote import ShardFiles
from lmworks.tokenizer import load
from tiny_run import Tiny


def texts(tiny: Tiny) -> dict[str, str]:
    files = [path for some in corpus_files(tiny.run_dir / "corpus", "train").values() for path in some]
    return {row["id"]: row["text"] for path in files for row in pq.read_table(path).to_pylist()}


def test_analyze_prints_tables_and_writes_a_page(lmworks: Lmworks, tiny_copy: Tiny) -> None:
    done = lmworks("corpus", "analyze", tiny_copy.run_dir)
    assert done.code == 0, done.err
    assert "docs" in done.out and "Dropped" in done.out and str(tiny_copy.run_dir / "corpus.html") in done.out
    assert "<h1>tiny</h1>" in (tiny_copy.run_dir / "corpus.html").read_text()
    figures = json.loads((tiny_copy.run_dir / "corpus" / "analysis.json").read_text())
    own = load(tiny_copy.run_dir / "tokenizer")
    assert figures["whole"]["train"]["tokens"] == sum(len(own.encode(text)) for text in texts(tiny_copy).values())


def test_analyze_for_machines(lmworks: Lmworks, tiny_copy: Tiny, tmp_path: Path) -> None:
    done = lmworks("corpus", "analyze", tiny_copy.run_dir, "--json", "--page", tmp_path / "there.html")
    assert json.loads(done.out) == json.loads((tiny_copy.run_dir / "corpus" / "analysis.json").read_text())
    assert (tmp_path / "there.html").is_file() and not (tiny_copy.run_dir / "corpus.html").exists()


def test_the_stages_after_it_are_not_done_again(lmworks: Lmworks, tiny_copy: Tiny) -> None:
    lmworks("corpus", "analyze", tiny_copy.run_dir)
    assert tiny_copy.walk(last="shards") == [("corpus", "skip"), ("tokenizer", "skip"), ("shards", "skip")]


def test_sample(lmworks: Lmworks, tiny: Tiny) -> None:
    drawn = json.loads(lmworks("corpus", "sample", tiny.run_dir, "--fate", "train", "-n", 3, "--json").out)
    kept = texts(tiny)
    assert len(drawn) == 3 and all(one["text"] == kept[one["id"]] for one in drawn)
    shown = lmworks("corpus", "sample", tiny.run_dir, "--fate", "train", "-n", 3, "--characters", 30).out
    assert all(one["id"] in shown and one["origin"] in shown for one in drawn)
    assert drawn[0]["text"][:20].splitlines()[0] in shown and drawn[0]["text"][100:160] not in shown


def test_text_is_printed_as_it_is(lmworks: Lmworks, tmp_path: Path) -> None:
    """Square brackets in a text, a file's name or a license are no markup, and no escape of theirs reaches the terminal."""
    page = "A list such as [red] or [/bold] or [link=x] or :smile: is only text. " * 5
    retitle, clear = "\x1b]0;mine\x07", "\x9b2J"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / f"[red]{retitle}.jsonl").write_text(
        "".join(json.dumps({"text": f"{page}\n\nPage {number}.{retitle}{clear}"}) + "\n" for number in range(6)) + f"broken {retitle}\n"
    )
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"name: mine\nrun_dir: {tmp_path}/run\ncorpus:\n  sources: [{{name: mine, kind: jsonl, path: {tmp_path}/texts, license: '[/x]', "
        "rules: none}]\n  dedup: {exact: false, minhash: null}\n  decontaminate: null\n"
        "tokenizer: {vocab_size: 512}\nmodel: {preset: glm-tiny}\n"
        "train: {phases: [{name: a, tokens: 1M, mixture: {mine: 1}, sequence_length: 64 tokens, global_batch_tokens: 1Ki}]}\n"
    )
    made = lmworks("corpus", "prepare", recipe)
    assert made.code == 0 and ", [/x]" in made.out
    shown = [lmworks("corpus", "sample", recipe, "-n", 1), lmworks("corpus", "trace", tmp_path / "run", "mine/0/0")]
    assert all(page[:69] in one.out for one in shown)
    unknown = lmworks("corpus", "trace", tmp_path / "run", f"[/x]{retitle}")
    shown += [made, lmworks("corpus", "sample", recipe, "--fate", "quarantine", "--json"), unknown]
    assert "/[red]]0;mine.jsonl" in shown[1].out and "[/x]" in unknown.err
    for one in shown:
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", one.out + one.err)


def test_a_token_leads_back_to_its_document(lmworks: Lmworks, tiny: Tiny) -> None:
    """And its document to the same tokens, which are its text."""
    shards, own, kept = tiny.run_dir / "shards", load(tiny.run_dir / "tokenizer"), texts(tiny)
    manifest = Manifest.load(shards)
    for identity in [*list(kept)[:4], *list(kept)[-4:]]:
        place = find_document(shards, identity, identity.split("/")[0], "train")
        assert place
        stream = manifest.stream(shards, place.source, "train", ShardFiles(shards, manifest))
        tokens = next(piece for _, _, piece in stream._pieces(place.start, place.stop))
        assert own.decode(tokens[:-1].tolist()) == kept[identity], "with <|endoftext|> after it"
        assert {document_at(shards, place.source, token).id for token in (place.start, place.stop - 1)} == {identity}
    (told,) = json.loads(lmworks("corpus", "trace", tiny.run_dir, f"{place.source}:{place.start}", "--json").out)
    assert told["id"] == identity and told["agrees"] is True
    assert (told["shard"]["start"], told["shard"]["stop"]) == (place.start, place.stop)
    assert find_document(shards, "docs/0/99999", "docs", "train") is None
    assert find_document(shards, "docs/0/1", "nothing", "train") is None


def test_a_sequence_leads_back_to_its_documents(lmworks: Lmworks, tiny: Tiny) -> None:
    rows = json.loads(lmworks("data", "batch", tiny.run_dir, 3, "--json").out)
    told = json.loads(lmworks("corpus", "trace", tiny.run_dir, "--step", 3, "--sequence", 2, "--json").out)
    assert [one["id"] for one in told] == list(dict.fromkeys(span["id"] for span in rows[2]["documents"]))
    shown = lmworks("corpus", "trace", tiny.run_dir, "--step", 3, "--sequence", 2).out
    assert all(one["origin"] in shown for one in told) and "shards" in shown


def test_diff_says_by_its_exit_code_whether_anything_differs(lmworks: Lmworks, tiny: Tiny, tiny_copy: Tiny) -> None:
    assert lmworks("corpus", "diff", tiny.run_dir, tiny_copy.run_dir).code == 0
    tiny_copy.walk("corpus.max_validation_bytes=20KB", last="corpus")
    done = lmworks("corpus", "diff", tiny.run_dir, tiny_copy.run_dir)
    assert done.code == 1 and "moved" in done.out and "train/docs" in done.out
    done = lmworks("corpus", "diff", tiny.run_dir, tiny_copy.run_dir, "--json")
    assert done.code == 1 and {one["name"] for one in json.loads(done.out)} == {"code", "docs"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("analyze", "{tmp}"), "has no corpus; make it with: lmworks corpus prepare RECIPE"),
        (("analyze", "nothing.yaml"), "there is no recipe"),
        (("sample", "{run}", "--reason", "blue"), "no document with reason blue; it has: "),
        (("trace", "{run}"), "name a document"),
        (("trace", "{run}", "docs/0/1", "--step", "1"), "name a document"),
        (("trace", "{run}", "docs"), "is not a document id"),
        (("trace", "{run}", "docs:999999999"), "there is no token 999,999,999"),
        (("trace", "{run}", "birds:1"), "source birds has no shards"),
        (("trace", "{run}", "--step", "1", "--sequence", "999"), "there is no sequence 999"),
        (("diff", "{run}", "{tmp}"), "has no corpus"),
    ],
)
def test_errors_are_one_line(lmworks: Lmworks, tiny: Tiny, tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    filled = [argument.format(run=tiny.run_dir, tmp=tmp_path) for argument in arguments]
    assert told in lmworks("corpus", *filled).error
