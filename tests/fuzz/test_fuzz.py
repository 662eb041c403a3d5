"""Hostile input: what the campaign has found, each fault once; a slice of it on every run; and that it finds what it is made to find."""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuzz_campaign
import fuzz_steps
import pytest
import torch
from fuzz_artifacts import Artifacts
from fuzz_campaign import Fault, campaign, outcome
from fuzz_recipes import Recipes
from fuzz_steps import Steps
from fuzz_traps import TRAPS, Traps

from lmworks.errors import UserError
from lmworks.host import machine
from tiny_run import Tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "pages"))  # the records of a run
GIVEN = "peak=1e11,cores=2,memory=64e9,available=32e9,disk=1e12,filesystem=ext4,bf16=yes"
SHAPE = "{hidden_size: 64, num_hidden_layers: 2}"
PHASE = "{name: p, tokens: 1M tokens, mixture: {a: 1.0}, sequence_length: 64 tokens, global_batch_tokens: 512 tokens}"
SOURCES = "corpus: {sources: [{name: a, kind: text, path: a, license: MIT}]}"
RECIPE = f"name: g\nmodel: {SHAPE}\n{SOURCES}\ntrain: {{phases: [{PHASE}]}}\n"
DIAL = f"name: g\nsize: 30M\n{SOURCES}\n"


@pytest.fixture(autouse=True)
def _this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.VARIABLE, GIVEN)


@pytest.fixture(scope="module")
def recipes() -> Recipes:
    kind = Recipes()
    kind.prepare()
    return kind


@pytest.fixture(scope="module")
def artifacts() -> Artifacts:
    kind = Artifacts()
    kind.prepare()
    return kind


def test_the_seeds_are_good(recipes: Recipes, artifacts: Artifacts, tmp_path: Path) -> None:
    """Otherwise every case would be refused, whatever is wrong with it."""
    for number, (text, word) in enumerate(((RECIPE, "plan"), (DIAL, "show"), (DIAL, "plan"))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "a").write_text("A text that is long enough for the budget. " * 100_000)
        words = [word, "recipe.yaml", "--set", "shards.max_epochs=1000"]  # of so little text
        assert recipes.run({"recipe": text, "words": words}, tmp_path / str(number)) == "accepted"
    for name in ("tokens", "tokenizer", "records", "model", "run", "foreign", "foreign tokenizer", "source a.tar"):
        (tmp_path / name).mkdir()
        assert artifacts.run({"artifact": name, "files": {}, "signed": False}, tmp_path / name) == f"{name} read"


RECIPES = {
    "a control character": ("name: a\x07", [], "the character '\\\\x07' may not stand in a recipe"),
    "half a surrogate pair": ('name: "\\ud800"', [], "the character '.ud800' stands in a value"),
    "a null byte": ('name: "a\\0b"', [], "the character '.x00' stands in a value"),
    "nesting": ("name: " + "[" * 5000, [], "more than 64 levels of nesting"),
    "a whole number of 5,000 digits": ("seed: " + "9" * 5000, [], "a whole number of 5,000 characters"),
    "a whole number beyond 10^18": (RECIPE, ["seed=1000000000000000001"], "is too large; the largest whole number is"),
    "an infinite number": (RECIPE, ["optimizer.eps=1e999"], "'1e999' is no finite number"),
    "a tag": ("name: !!binary aGk=", [], "a recipe has no tags"),
    "a tag that lies": ("seed: !!int x", [], "'x' is no int"),
    "a section that is a text": (DIAL + "model: x", [], "model is a map of keys, not 'x'"),
    "a section that is nothing": (DIAL + "model:", [], "model is a map of keys, not nothing"),
    "a list that is a map": (DIAL + "train: {phases: {a: 1}}", [], "train.phases is a list of maps"),
    "an item that is a text": (DIAL + "train: {phases: [x]}", [], "train.phases.0 is a map of keys, not 'x'"),
    "no tokens at all": (RECIPE, ["train.phases.p.sequence_length=0 tokens"], "'0 tokens' is too few"),
    "an exponent without end": (RECIPE, ["train.phases.p.tokens=1e400000000 tokens"], "is not a quantity"),
    "more tokens than there are": (RECIPE, ["train.phases.p.tokens=1e9T"], "is too large; nothing here is more than 1e.18"),
    "a unit without end": (RECIPE, ["train.phases.p.tokens=1 " + "x" * 70_000 + "!"], "is not a quantity"),
    "a size without end": (DIAL, ["size=999999T"], "is no size of a model; shapes are derived up to 10T"),
    "a size of nothing": (DIAL, ["size=0M"], "is no size of a model"),
    "a billion heads": (RECIPE, ["model.num_attention_heads=1000000000"], "input should be less than or equal to 65536"),
    "a billion threads": (RECIPE, ["threads=1000000000"], "input should be less than or equal to 4096"),
    "a billion layers": (RECIPE, ["model.num_hidden_layers=1000000000"], "input should be less than or equal to 2000"),
    "a key below an item that is a text": (RECIPE, ["tokenizer.special=[a]", "tokenizer.special.0.b=1"], "is a single value; nothing"),
    "an override of two lines": (RECIPE, ["time=\n"], "--set time= : time: '' is not a quantity"),
    "an override without end": (RECIPE, ["x" * 70_000], "is not of the form a.b=c"),
    "a time without phases": (RECIPE.partition("train:")[0], ["time=10min"], "this recipe has no train.phases; add some"),
    "a base model's name that no file can have": (RECIPE, [f"start_from={'x' * 300}"], "xxx cannot be opened: File name too long"),
    "a preset's name that no file can have": (RECIPE, [f"model.preset={'x' * 300}"], "there is no model preset"),
    "a preset of a user that is not there": (RECIPE, ["model.preset=~nobody-here"], "there is no model preset"),
}  # fmt: skip


@pytest.mark.parametrize("what", RECIPES)
def test_a_recipe(recipes: Recipes, tmp_path: Path, what: str) -> None:
    text, overrides, said = RECIPES[what]
    words = ["plan", "recipe.yaml", *(word for one in overrides for word in ("--set", one))]
    with pytest.raises(UserError, match=said) as caught:
        recipes.run({"recipe": text, "words": words}, tmp_path)
    assert len(str(caught.value)) < 5000 and "\n" not in str(caught.value)


def test_a_plan_without_phases_is_refused_as_a_run_is(recipes: Recipes, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A text.")
    with pytest.raises(UserError, match=r"train\.phases is empty"):
        recipes.run({"recipe": RECIPE.partition("train:")[0], "words": ["plan", "recipe.yaml", "--json"]}, tmp_path)


def test_a_cluster_without_end(recipes: Recipes, tmp_path: Path) -> None:
    words = ["plan", "recipe.yaml", "--cluster", "cluster.yaml"]
    with pytest.raises(UserError, match=r"tflops: input should be less than or equal to 1000000"):
        recipes.run({"recipe": RECIPE, "cluster": "{tflops: 1.0e+308, memory_gib: 80}", "words": words}, tmp_path)


def changed(artifacts: Artifacts, name: str, file: str, old: str, new: str) -> bytes:
    text = artifacts._good[name][file].decode()
    assert old in text
    return text.replace(old, new, 1).encode()


ARTIFACTS: dict[str, tuple[str, str, Any, str]] = {  # artifact, file, its content or what is replaced in it, what is said
    "a piece that is no id": ("tokenizer", "tokenizer.json", ('"#": 2,', '"#": "x",'), "tokenizer.json is damaged, or not what"),
    "added tokens that are none":
        ("tokenizer", "tokenizer.json", ('"added_tokens": [', '"added_tokens": [7, '), "tokenizer.json is damaged"),
    "a tokenizer of nesting": ("tokenizer", "tokenizer.json", b"[" * 100_000, "is not readable JSON.*get a file of yours again"),
    "a pattern that is none": ("tokenizer", "tokenizer.json", ("\\\\p{N}]?", "\\\\p{-}]?"), "tokenizer.json is damaged, or not what"),
    "a config that lacks a key": ("model", "config.json", ('"hidden_size"', '"hidden"'), "config.json has hidden "),
    "a config beyond its limits":
        ("model", "config.json", ('"initializer_range": 0.02', '"initializer_range": -1'), "config.json describes no model"),
    "a config that is a list": ("model", "config.json", b"[]", "config.json (is of class|has a value of the wrong kind)"),
    "an array without its head": ("foreign", "b.npy", b"\x93NUMPY\x01\x00\x76\x00{", "b.npy is damaged"),
    "a table that is not packed": ("foreign", "b.csv.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff" + b"\xff" * 50, "b.npy is damaged"),
    "ends that are cut off": ("foreign", "a.ds.index", b"\0" * 13, "a.ds is damaged"),
    "a manifest beyond all tokens": ("manifest", "manifest.json", ('"tokens": 45', f'"tokens": {10**30}'), "manifest.json: .*tokens"),
    "a shard without hashes": ("manifest", "manifest.json", ('".bin": "', '".bon": "'), "sha256.*the hash of .bin or .idx is missing"),
    "a ledger that is a list": ("records", "run/ledger.jsonl", b"[]\n", "line 1 is not a JSON object"),
    "a ledger of nesting": ("records", "run/ledger.jsonl", b"[" * 100_000 + b"\n", "line 1 is not JSON"),
    "a line of no event": ("records", "run/ledger.jsonl", b'{"time": 1}\n', "line 1 has no event name"),
    "a change without a step": ("records", "run/ledger.jsonl", b'{"time": 1, "event": "mixture_asked"}\n', "ledger.jsonl is damaged|^$"),
}  # fmt: skip


@pytest.mark.parametrize("what", ARTIFACTS)
def test_a_file(artifacts: Artifacts, tmp_path: Path, what: str) -> None:
    name, file, content, said = ARTIFACTS[what]
    data = content if isinstance(content, bytes) else changed(artifacts, name, file, *content)
    with pytest.raises(UserError, match=said) as caught:
        artifacts.run({"artifact": name, "files": {file: base64.b64encode(data).decode()}, "signed": False}, tmp_path)
    assert "\n" not in str(caught.value)


RECORDS = {
    "numbers that are none": ("metrics.jsonl", b'{"step": 1, "time": 2, "train/loss": NaN}\n{"step": 1e999, "time": 1}\n'),
    "numbers of 400 digits": ("metrics.jsonl", b'{"step": 1, "time": 2, "train/loss": 1' + b"0" * 400 + b"}\n"),
    "a load below zero": ("metrics.jsonl", b"".join(
        b'{"step": %d, "time": 2, "train/loss": 1, "experts/load_cv": 1, "experts/load_cv/1": %s, "experts/load_cv/2": 1}\n' % (step, value)
        for step, value in enumerate((b"1", b"-1e30", b"1e-300", b"-1"), 1))),
    "a score without a baseline that is a number": ("evaluate/results.json", b'{"models": {"base": {"scores": {"a": {"score": 1, "n": 1, '
        b'"interval": [0, 1], "baseline": []}}}}}'),
    "a difference of half an interval":
        ("evaluate/results.json", b'{"models": {"a": {}}, "compared": {"a": {"difference": 1, "interval": [1]}}}'),
    "a source that is a number": ("corpus/report.json", b'{"sources": [7, {"came": 7, "quarantined": [1], "steps": {"a": 1}}]}'),
    "efficiency that is a text":
        ("tokenizer/report.json", b'{"evaluation": [{"tokenizer": "this", "bytes_per_token": "x", "fertility": null}]}'),
    "a stage that is a list": ("ledger.jsonl", b'{"time": 1e300, "event": "start", "stage": [], "steps": "x", "tokens": {}}\n'),
    "half a surrogate pair": ("samples.jsonl", b'{"step": 1, "prompt": "\\ud800", "completion": 7}\n'),
    "a process of any number": ("lock", b'{"pid": 1' + b"0" * 30 + b"}"),
}  # fmt: skip


@pytest.mark.parametrize("what", RECORDS)
def test_a_record_of_another_form_still_makes_a_page(artifacts: Artifacts, tmp_path: Path, what: str) -> None:
    file, data = RECORDS[what]
    case = {"artifact": "records", "files": {f"run/{file}": base64.b64encode(data).decode()}, "signed": False}
    assert artifacts.run(case, tmp_path) == "records read"
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_a_run_without_a_model(artifacts: Artifacts, tmp_path: Path) -> None:
    recipe = json.loads(artifacts._good["run"]["resolved.json"])
    recipe["model"]["intermediate_size"] = None
    data = base64.b64encode(json.dumps(recipe).encode()).decode()
    artifacts.run({"artifact": "records", "files": {"run/resolved.json": data}, "signed": False}, tmp_path / "page")
    with pytest.raises(UserError, match=r"has no model.intermediate_size, so it describes no model; use a run that has trained one"):
        artifacts.run({"artifact": "run", "files": {"resolved.json": data}, "signed": False}, tmp_path)


def test_a_checkpoint_without_its_document(artifacts: Artifacts, tmp_path: Path) -> None:
    """Signed anew, so that nothing is said to be missing."""
    names = [name for name in artifacts._good["run"] if name.endswith("/meta.json")]
    with pytest.raises(UserError, match=r"meta.json cannot be read \(No such file or directory\); use another checkpoint of its run"):
        artifacts.run({"artifact": "run", "files": dict.fromkeys(names), "signed": True}, tmp_path)


def test_a_document_of_a_checkpoint_that_no_writer_wrote(artifacts: Artifacts, tmp_path: Path) -> None:
    """Signed anew, so that only its form is wrong; it is passed over, and not what ends the command."""
    meta = {"step": 1e999, "metric": [], "permanent": 0, "meta": 7, "identity": None, "values": {}}
    files = {"step-00000010/meta.json": base64.b64encode(json.dumps(meta).encode()).decode()}
    with pytest.raises(UserError, match=r"no good one|is not as it was written|does not match what was written"):
        artifacts.run({"artifact": "checkpoint", "files": files, "signed": True}, tmp_path)


class TestRequests:
    """To the application around a small model."""

    @pytest.fixture(scope="class")
    def ask(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        pytest.importorskip("starlette")
        pytest.importorskip("httpx")
        from fuzz_requests import Requests

        kind, before = Requests(), os.getcwd()
        kind.prepare()
        os.chdir(tmp_path_factory.mktemp("requests"))
        try:
            kind.begin()
        finally:
            os.chdir(before)

        def send(path: str, body: bytes, watched: bool = False, **headers: str) -> str:
            sent = {"content-type": "application/json", **headers}
            case = {"method": "POST", "path": path, "headers": sent, "body": base64.b64encode(body).decode(), "watched": watched}
            return outcome(kind, case, Path())[0]

        yield send
        kind._engine.close()

    def test_a_parameter_of_half_a_surrogate_pair(self, ask: Any) -> None:
        assert ask("/v1/completions", b'{"prompt": "a", "\\ud800": 1}') == "refused"

    def test_a_length_in_other_digits(self, ask: Any) -> None:
        assert ask("/v1/completions", b"{}", **{"content-length": "\xb2"}) == "refused"

    def test_constrained_answers_are_given_as_they_are_asked_for(self, ask: Any) -> None:
        """The requests that are made hostile are good ones; the last needs a longer context than this model has."""
        from fuzz_requests import CONSTRAINED

        found = [ask("/v1/chat/completions", json.dumps(body).encode()) for body in CONSTRAINED]
        assert found == ["answered"] * (len(CONSTRAINED) - 1) + ["refused"]

    def test_work_of_one_request_that_holds_others_up_is_a_failure(self, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Planted: seconds of processor time on the worker thread before an answer begins."""
        import fuzz_requests

        from lmworks.serve.engine import Engine

        honest = Engine._begin

        def busy(self: Engine, answer: Any) -> None:
            end = time.process_time() + (0.5 if answer.options.max_new_tokens > 1 else 0)
            while time.process_time() < end:
                pass
            honest(self, answer)

        monkeypatch.setattr(Engine, "_begin", busy)
        monkeypatch.setattr(fuzz_requests, "MOST_SECONDS", 0.4)
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 24, "guided_regex": "[a-z]{1,9}", "n": 2}
        assert ask("/v1/chat/completions", json.dumps(body).encode(), watched=True) == "failed"

    def test_an_id_that_only_pads_the_embedding_has_no_text(self, ask: Any) -> None:
        """The model has more rows than the vocabulary entries, as after padding; so many answers draw one of them for sure."""
        body = {"prompt": "a", "n": 64, "max_tokens": 40, "temperature": 2, "stream": True, "seed": 1}
        assert ask("/v1/completions", json.dumps(body).encode()) == "answered"


def test_the_campaign_finds_every_trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on behind each; a second call has nothing left to do; what is kept can be run again."""
    monkeypatch.setattr(fuzz_campaign, "SECONDS", 0.5)
    monkeypatch.setattr(fuzz_campaign, "WAIT", 3.0)
    report = campaign("traps", 16, 11, tmp_path / "out")
    kind = Traps()
    drawn = [kind.case(fuzz_campaign.draw_for("traps", 11, number))["trap"] for number in range(16)]
    assert set(drawn) == set(TRAPS)
    assert sum(report.ended.values()) == 16
    failed = {failure["number"]: failure["place"] for failure in report.failures}
    assert sorted(failed) == [number for number, trap in enumerate(drawn) if trap not in ("nothing", "refuses")]
    said = {drawn[number]: place for number, place in failed.items()}
    assert said["loops"] == "takes more than 0.5 s of processor time"
    assert said["waits"] == "waits for more than 3 s"
    assert said["exits"] == "ends the process (0)"
    assert said["crashes"] == "ends the process (-6)"
    assert said["two lines"] == "a message of several lines"
    assert [said[trap].split()[0] for trap in ("raises", "memory", "outside")] == ["KeyError", "MemoryError", "Outside"]
    assert not list((tmp_path / "out").glob(".box-*"))
    monkeypatch.setattr(fuzz_campaign, "watch", None)
    assert campaign("traps", 16, 11, tmp_path / "out").ended == report.ended
    kept = next((tmp_path / "out" / "failures").glob("KeyError*/*.json"))
    with pytest.raises(KeyError):
        fuzz_campaign.replay(kept)


def slice_of(kind: str, count: int, seed: int, out: Path) -> None:
    report = campaign(kind, count, seed, out)
    assert sum(report.ended.values()) == count
    assert not report.failures, report.table()
    assert report.ended["refused"] < count  # some are still what they were


@pytest.mark.parametrize(("kind", "count"), [("recipes", 20), ("requests", 20), ("artifacts", 15)])
def test_a_slice(tmp_path: Path, kind: str, count: int) -> None:
    slice_of(kind, count, 0, tmp_path)


def test_a_step_with_extreme_numbers_ends_with_finite_weights_or_one_line(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And weights that are not finite would be found."""
    kind = Steps()
    kind.take(tiny)
    assert kind.run({"set": ["optimizer.max_grad_norm=3.4e38", "model.z_loss_weight=1e-30"]}, tmp_path) == "trained"
    with pytest.raises(UserError, match="nearer to 0 than"):
        kind.run({"set": ["optimizer.eps=1e-45"]}, tmp_path / "refused")
    monkeypatch.setattr(fuzz_steps, "checkpoint", lambda run_dir: {"model/embedding": torch.tensor([1.0, float("inf")])})
    with pytest.raises(Fault, match=r"not finite: ..model/embedding"):
        kind.run({"set": []}, tmp_path / "planted")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("recipes", 1000), ("requests", 2000), ("artifacts", 200), ("steps", 300)])
def test_more_of_them(tmp_path: Path, kind: str, count: int) -> None:
    """For minutes; `make fuzz` takes as many as you like."""
    slice_of(kind, count, 1, tmp_path)
