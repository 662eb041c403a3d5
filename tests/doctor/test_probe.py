"""Recomputation: probes confirm and exclude causes on real runs, rows behind a step are found, two curves are compared."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_doctor_command import doctor

from lmworks.bundle.archive import collect
from lmworks.doctor import against
from lmworks.doctor import probe as probe_module
from lmworks.doctor.probe import PROBES, probe
from lmworks.doctor.recompute import Recomputation
from lmworks.doctor.rows import expert_use, find_rows
from lmworks.errors import UserError
from lmworks.io.run_layout import of_stage
from lmworks.pages.read_run import read_run
from lmworks.shards import epochs
from lmworks.shards.batch import Batch
from lmworks.watch.diagnosis import Diagnosis, all_rules
from lmworks.watch.evidence import Evidence
from lmworks.watch.ledger import LEDGER, Ledger, RunLock
from lmworks.watch.probes import KEPT, Probed, ProbeRecord, confirmed, diagnose_probed
from lmworks.watch.probes import kept as kept_probes
from lmworks.watch.rule import Finding, Measurement
from lmworks.watch.rules._commands import find_rows as find_rows_of
from lmworks.watch.rules._commands import show_batch
from lmworks.watch.run_files import open_run
from tiny_run import Tiny, prepare
from written_run import command_line, write_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHORT = ("train.phases.general.tokens=3008 tokens", "train.phases.long.tokens=1024 tokens", "checkpoints.keep_last=3")


@pytest.fixture(scope="module")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    run = tiny.copy(tmp_path_factory.mktemp("trained") / "run")
    run.walk(*SHORT, last="pretrain")
    return run


def measured(run: Tiny) -> dict[str, list[bool]]:
    """By code, which measurements are abnormal."""
    record = probe(Recomputation.open(run.run_dir))
    assert set(record.lacking) == {"read and unread text", "loss by source"}, "all text was read, and too little to judge what was learned"
    codes: dict[str, list[bool]] = {}
    for one in record.probed:
        codes.setdefault(one.code, []).append(one.measurement.abnormal)
    return codes


def test_a_sound_run_has_sound_measurements(trained: Tiny) -> None:
    found = measured(trained)
    assert {"duplicated-data", "unshuffled-data", "optimizer-state-lost", "low-precision-weights", "silent-corruption", "fp16-overflow",
            "bad-batch", "operator-overflow"} - set(found) <= {"duplicated-data"}  # fmt: skip
    assert not [code for code, abnormal in found.items() if any(abnormal)]


@pytest.mark.slow
def test_weights_that_no_step_changes_are_measured(tiny_copy: Tiny) -> None:
    tiny_copy.walk(*SHORT, "optimizer.learning_rate=1e-12", "optimizer.adam_learning_rate=1e-12", last="pretrain")
    assert measured(tiny_copy)["low-precision-weights"] == [True]


@pytest.mark.slow
def test_an_order_that_is_not_shuffled_is_measured(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "permute", lambda index, *_: index)
    tiny_copy.walk(*SHORT, last="pretrain")
    assert measured(tiny_copy)["unshuffled-data"] == [True]


@pytest.mark.slow
def test_repeated_documents_are_measured(tmp_path: Path) -> None:
    run = prepare(tmp_path)
    lines = (run.texts / "docs.jsonl").read_text(encoding="utf-8").splitlines()
    short = [json.dumps({"text": json.loads(one)["text"][:300]}) for one in lines[:6]]
    (run.texts / "docs.jsonl").write_text("\n".join(short * 50) + "\n", encoding="utf-8")
    run.walk(*SHORT, "corpus.dedup.exact=false", last="pretrain")
    assert measured(run)["duplicated-data"] == [True]


def test_probes_confirm_exclude_and_add() -> None:
    bad, fine = Measurement("a", 2.0, high=1.0), Measurement("a", 0.0, high=1.0)

    def unsure(code: str) -> Finding:
        return Finding((bad,), code=code, sentence="It is so.", area="data", stage="pretrain")

    before = Diagnosis("pretrain", [], [unsure("confirmed"), unsure("excluded"), unsure("open")], [], ["disk-full"], {})
    measured = [Probed("confirmed", bad), Probed("excluded", fine), Probed("disk-full", bad, exact=True, where="rank 3")]
    found = confirmed(before, ProbeRecord("pretrain", 8, "step-00000008", 1.0, measured))
    assert found.probes is not None and list(found.probes.excluded) == ["excluded"]
    assert [(one.code, one.where) for one in found.problems] == [("confirmed", ""), ("disk-full", "rank 3")]
    assert [one.code for one in found.unsure] == ["open"] and list(found.passed) == ["excluded"]
    assert found.problems[1].sentence == all_rules()["disk-full"].sentence


def test_what_the_command_measures_again_changes_its_answer(
    trained: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = Probed("disk-full", Measurement("blocks that are full", 1.0, high=0), exact=True)
    assert "disk-full: " not in doctor(monkeypatch, capsys, trained.run_dir)[1]
    monkeypatch.setattr(probe_module, "PROBES", {"the disk": lambda run: iter([proof])})
    code, out, _ = doctor(monkeypatch, capsys, trained.run_dir, "--probe")
    assert code == 1 and "disk-full: " in out and "blocks that are full = 1; healthy: at most 0" in out


@pytest.mark.parametrize(("own", "in_fp32", "other", "cause"), [
    (False, True, True, "fp16-overflow"), (False, False, True, "bad-batch"), (False, False, False, "operator-overflow"),
    (True, True, True, None),
])  # fmt: skip
def test_a_step_that_was_not_finite_is_told_apart_by_fp32_and_by_another_batch(
    trained: Tiny, monkeypatch: pytest.MonkeyPatch, own: bool, in_fp32: bool, other: bool, cause: str | None
) -> None:
    run = Recomputation.open(trained.run_dir)

    def repeat(self: Recomputation, step: int, batch: Batch, precision: str | None = None) -> tuple[float, float, str | None]:
        finite = in_fp32 if precision == "fp32" else own if batch.step == step else other
        return (1.0, 1.0, None) if finite else (float("nan"), 1.0, "layers.1")

    monkeypatch.setattr(Recomputation, "repeat", repeat)
    found = list(PROBES["a bad step in fp32"](run))
    assert [one.code for one in found if one.measurement.abnormal] == ([cause] if cause else [])
    assert {one.where for one in found} == {"" if cause is None else "layers.1"}


def test_a_step_that_repeats_with_another_loss_is_corrupt(trained: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter((1.0, 1.5))
    monkeypatch.setattr(Recomputation, "repeat", lambda *_: (next(losses), 1.0, None))
    (found,) = PROBES["a step twice"](Recomputation.open(trained.run_dir))
    assert found.code == "silent-corruption" and found.measurement.abnormal


@pytest.mark.parametrize(("unread", "abnormal"), [(3.0, True), (1.0, False)])
def test_text_to_come_that_is_worse_than_text_that_was_read_is_overfitting(
    trained: Tiny, monkeypatch: pytest.MonkeyPatch, unread: float, abnormal: bool
) -> None:
    run = Recomputation.open(trained.run_dir)
    monkeypatch.setattr(Recomputation, "step", 6)
    monkeypatch.setattr(Recomputation, "row_losses", lambda self, row: np.array([unread if row.step >= 6 else 2.0]))
    (found,) = PROBES["read and unread text"](run)
    assert found.code == "overfitting" and found.measurement.abnormal == abnormal


def test_a_step_that_was_skipped_was_not_trained(trained: Tiny, tmp_path: Path) -> None:
    run = trained.copy(tmp_path / "run").run_dir
    before = Recomputation.open(run).trained_steps(256)
    with Ledger(run / LEDGER) as ledger:
        ledger.write("rollback", stage="pretrain", step=9, to_step=4, skip=[5, 8], reason="a spike")
    after = Recomputation.open(run).trained_steps(256)
    assert sorted(set(before) - set(after)) == [5, 6, 7]


def test_a_row_that_is_not_finite_comes_first_and_hides_no_other(trained: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Recomputation.open(trained.run_dir)
    rows = find_rows(run, 12)
    losses, repeat = Recomputation.row_losses, Recomputation.repeat
    (worst, *_, best), tokens = (row.sequence for row in rows), run.batch(12).tokens

    def without(self: Recomputation, batch: Batch, step: int | None = None) -> np.ndarray:
        found = losses(self, batch, step)
        found[worst] = np.nan
        return found

    def explodes(self: Recomputation, step: int, batch: Batch, precision: str | None = None) -> tuple[float, float, str | None]:
        loss, norm, first = repeat(self, step, batch, precision)
        return loss, float("inf") if np.array_equal(batch.tokens[0], tokens[best]) else norm, first

    monkeypatch.setattr(Recomputation, "row_losses", without)
    monkeypatch.setattr(Recomputation, "repeat", explodes)
    first, second, *others = find_rows(run, 12)
    assert {first.sequence, second.sequence} == {worst, best}
    assert all(np.isfinite(row.loss_over_median) for row in others)


def test_the_command_probes_and_leaves_the_run_as_it_was(
    trained: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {path: path.stat().st_mtime_ns for path in trained.run_dir.rglob("*") if path.is_file()}
    _, out, _ = doctor(monkeypatch, capsys, trained.run_dir, "--probe", "--json")
    assert "probe: read and unread text" in json.loads(out)["stages"][0]["not_judged"]
    after = {path: path.stat().st_mtime_ns for path in trained.run_dir.rglob("*") if path.is_file()}
    files.pop(trained.run_dir / KEPT, None)  # of a test before
    assert after.pop(trained.run_dir / KEPT) and after == files
    _, again, _ = doctor(monkeypatch, capsys, trained.run_dir, "--json")
    assert json.loads(again) == json.loads(out), "the next diagnosis has what was measured"


EQUAL = Measurement("relative difference of two computations", 0.5, high=0.0, source="recomputed")
BITS = ProbeRecord("pretrain", 40, "step-00000040", 2.0e9, [Probed("silent-corruption", EQUAL, exact=True, where="layer 1")], {"a": "no b"})


def test_measurements_are_kept_with_a_run_that_is_going_on_and_shown_with_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", {"train/loss": [5.0 - 0.01 * i for i in range(60)]})
    ledger = (run / "ledger.jsonl").read_bytes()
    with RunLock(run):
        BITS.keep(run)
        code, out, _ = doctor(monkeypatch, capsys, run)
    assert (run / "ledger.jsonl").read_bytes() == ledger
    assert code == 1 and "silent-corruption" in out and "(recomputed at step 40)" in out and "pretrain, layer 1" in out
    assert "1 measurement of probes, at step 40 (step-00000040)" in out
    (found,) = [one for one in read_run(run).findings if one["code"] == "silent-corruption"]
    assert found["evidence"][0][3] == "recomputed at step 40" and found["kind"] == "problem"
    collect(run).write(tmp_path / "bundle.zip")
    code, out, _ = doctor(monkeypatch, capsys, tmp_path / "bundle.zip", "--json")
    (found,) = json.loads(out)["stages"][0]["problems"]
    assert code == 1 and found["code"] == "silent-corruption" and found["evidence"][0]["value"] == 0.5


@pytest.mark.parametrize(
    ("events", "holds"),
    [
        ([], True),
        ([{"event": "resume", "step": 40}], True),
        ([{"event": "mixture_changed", "step": 50, "time": 1.0e9}], True),  # before it was measured
        ([{"event": "mixture_changed", "step": 50}], False),
        ([{"event": "optimizer_reset", "step": 40}], False),
        ([{"event": "optimizer_reset", "step": 60}], True),  # the run has not trained beyond it; see below
        ([{"event": "recipe_changed", "allowed": [{"key": "optimizer.learning_rate"}]}], False),
        ([{"event": "recipe_changed", "allowed": [], "harmless": [{"key": "train.log_every"}]}], True),
        ([{"event": "rollback", "step": 60, "to_step": 32, "skip": None}], False),
        ([{"event": "rollback", "step": 60, "to_step": 48, "skip": None}], True),
        ([{"event": "start", "steps": 60}], False),
    ],
)
def test_a_measurement_holds_until_the_run_has_trained_beyond_it_after_a_change(
    events: list[dict[str, Any]], holds: bool, tmp_path: Path
) -> None:
    measured = 60 if events and events[0].get("step") == 60 and events[0]["event"] == "optimizer_reset" else 40
    later = [{"time": 3.0e9, **event} for event in events]
    run = write_run(tmp_path / "run", {"train/loss": [5.0 - 0.01 * i for i in range(60)]}, later)
    dataclasses.replace(BITS, step=measured).keep(run)
    assert (kept_probes(Evidence(open_run(run))) is not None) == holds


BACK = [{"time": 3.0e9, "event": "resume", "step": 40}, {"time": 1.0e9, "event": "optimizer_reset", "step": 41}]
SLOW = [{"time": 3.0e9, "event": "optimizer_reset", "step": 40}, {"time": 1.0e9, "event": "resume", "step": 40}]


@pytest.mark.parametrize(
    ("events", "seen", "holds"),
    [(BACK, 3.0e9, False), (SLOW, 1.0e9, True), (BACK, None, True), (SLOW, None, False), (BACK, 5.0, True), (SLOW, 5.0, False)],
)
def test_what_came_later_is_told_by_its_place_in_the_ledger(
    events: list[dict[str, Any]], seen: float | None, holds: bool, tmp_path: Path
) -> None:
    """Measured at 2.0e9, after the first event and after both. Without a place that is there, times are compared."""
    run = write_run(tmp_path / "run", {"train/loss": [5.0 - 0.01 * i for i in range(60)]}, events)
    dataclasses.replace(BITS, seen=seen).keep(run)
    assert (kept_probes(Evidence(open_run(run))) is not None) == holds


def test_a_probe_notes_the_newest_event_that_it_knows_of(trained: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.doctor.probe.PROBES", {})
    assert probe(Recomputation.open(trained.run_dir)).seen == Evidence(open_run(trained.run_dir)).events[-1]["time"]


@pytest.mark.parametrize(
    "damage",
    ["[]", "{", '{"step": "a"}', '{"step": 1, "time": 1, "probed": [3, {"code": []}, {"code": "no-such"}]}',
     '{"step": 1, "time": 1' + "0" * 400 + ', "probed": []}'],
)  # fmt: skip
def test_a_damaged_record_is_none(damage: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"train/loss": [5.0 - 0.01 * i for i in range(60)]})
    (run / KEPT).write_text(damage, encoding="utf-8")
    assert not diagnose_probed(Evidence(open_run(run))).problems


def test_what_is_not_finite_is_kept_and_what_was_not_measured_is_not(tmp_path: Path) -> None:
    values = (math.inf, math.nan, 0.0)
    run = write_run(tmp_path / "run", {"train/loss": [1.0] * 60})
    probed = [Probed("bad-batch", Measurement("a", value, low=-1.0)) for value in values]
    dataclasses.replace(BITS, probed=probed).keep(run)
    found = kept_probes(Evidence(open_run(run)))
    assert found is not None and found.lacking == BITS.lacking
    assert [one.measurement for one in found.probed] == [Measurement("a", value, low=-1.0) for value in (math.inf, 0.0)]


def test_a_folder_that_cannot_be_written_still_gives_the_report(
    trained: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained.copy(tmp_path / "run").run_dir
    (run / KEPT).unlink(missing_ok=True)
    (run / KEPT).mkdir()  # nothing can be renamed to it
    monkeypatch.setattr("lmworks.doctor.probe.PROBES", {"one": lambda _: iter(BITS.probed)})
    code, out, _ = doctor(monkeypatch, capsys, run, "--probe", "--json")
    assert code == 1 and "silent-corruption" in [one["code"] for one in json.loads(out)["stages"][0]["problems"]]


@pytest.mark.parametrize(
    "lora",
    [(), pytest.param(("tune.lora.rank=4", "tune.lora.dropout=0.1"), marks=pytest.mark.slow)],
    ids=["whole weights", "adapters"],
)
def test_tuning_is_probed(
    lora: tuple[str, ...], trained: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = trained.copy(tmp_path / "run")
    tuned.walk(*SHORT, *lora, "tune.tokens=2Ki", "tune.learning_rate=0.001", "train.save_every=2 steps", last="tune")
    record = probe(opened := Recomputation.open(tuned.run_dir, of_stage("tune")))
    assert record.step == 8 and record.checkpoint == "step-00000008"
    assert set(record.lacking) == {"order of the data", "loss by source"}
    found = {one.code: one.measurement for one in record.probed}
    assert set(found) == {"optimizer-state-lost", "low-precision-weights", "silent-corruption", "overfitting", "fp16-overflow",
                          "bad-batch", "operator-overflow"}  # fmt: skip
    assert not [code for code, one in found.items() if one.abnormal and code != "overfitting"]
    assert found["low-precision-weights"].value < 0.2 and found["silent-corruption"].value == 0
    # The loss of the line of a step is that of its batch with the weights before it.
    metrics = {line["step"]: line["train/loss"] for line in map(json.loads, (tuned.run_dir / "tune" / "metrics.jsonl").open())}
    if not lora:  # dropout draws others
        assert opened.repeat(6, opened.batch(6))[0] == pytest.approx(metrics[7], rel=1e-4)
    rows = find_rows(opened, 6)
    assert {row.source for row in rows} <= {"sums", ""} and "sums" in {row.source for row in rows} and rows[0].documents is None
    code, out, _ = doctor(monkeypatch, capsys, tuned.run_dir, "--find-rows", 6, "--model", "tuned")
    assert code == 0 and ", source sums" in out


@pytest.mark.parametrize("stage", ["dpo", "grpo"])
def test_stages_with_another_objective_say_why_they_cannot_be_probed(stage: str, trained: Tiny) -> None:
    with pytest.raises(UserError, match=f"the batches of {stage} cannot be computed again: its .*; those of pretraining and tuning can"):
        Recomputation.open(trained.run_dir, of_stage(stage))


def test_the_row_of_random_tokens_comes_first_and_the_others_name_their_documents(
    trained: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained.copy(tmp_path / "run").run_dir
    opened, step = Recomputation.open(run), 12
    rows = find_rows(opened, step)
    assert [row.loss for row in rows] == sorted((row.loss for row in rows), reverse=True)
    assert all(np.isfinite(row.grad_norm) for row in rows)
    assert all(row.documents is not None and row.documents.documents[0].origin.startswith(str(trained.texts)) for row in rows)
    batch = opened.batch(step)
    tokens, labels = batch.tokens.copy(), batch.labels.copy()
    tokens[3] = np.random.default_rng(0).integers(0, 512, tokens.shape[1])
    labels[3, :-1] = tokens[3, 1:]
    place = run / "bad_batches" / f"step-{step:08d}.npz"
    place.parent.mkdir()
    np.savez_compressed(place, tokens=tokens, labels=labels, cu_seqlens=batch.cu_seqlens)
    first = find_rows(opened, step)[0]
    assert first.sequence == 3 and first.loss_over_median > 1.1 and first.documents is None, "the saved batch is that of the step"
    code, out, _ = doctor(monkeypatch, capsys, run, "--find-rows", step)
    assert code == 0 and out.splitlines()[1].startswith("  sequence 3: loss")
    with pytest.raises(UserError, match="there is no step 999"):
        find_rows(opened, 999)


def test_the_advised_command_shows_the_rows_of_the_line_of_the_metrics(
    trained: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what the run itself has written of a step: how many sources its rows have, which differs from line to line here."""
    evidence = Evidence(open_run(trained.run_dir))
    written = evidence.series("train/effective_sources").finite
    values = dict(zip(written.steps.tolist(), written.values.tolist(), strict=True))
    apart = [step for step in values if step + 1 in values and abs(values[step] - values.get(step + 1, 0.0)) > 1e-3]
    for step in {one + later for one in apart[:2] for later in (0, 1)}:
        program, *arguments = shlex.split(find_rows_of(evidence, step))
        code, out, _ = command_line(monkeypatch, capsys, *arguments, "--json")
        counts = np.array(list(Counter(row["source"] for row in json.loads(out)).values()))
        shares = counts / counts.sum()
        assert program == "lmworks" and code == 0
        assert float(np.exp(-(shares * np.log(shares)).sum())) == pytest.approx(values[step], rel=1e-4)
        _, *arguments = shlex.split(show_batch(evidence, step))
        _, out, _ = command_line(monkeypatch, capsys, *arguments, "--json")
        assert sorted(Counter(row["source"] for row in json.loads(out)).values()) == sorted(counts.tolist())
    assert len(apart) >= 2


def test_experts_of_a_text(trained: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os\n" * 100, encoding="utf-8")
    found = expert_use(Recomputation.open(trained.run_dir), text)
    assert [layer["layer"] for layer in found["layers"]] == [1] and found["experts"] == 4
    for layer in found["layers"]:
        assert sum(layer["shares"]) == pytest.approx(1, abs=1e-5) and 1 <= layer["effective"] <= 4
    code, out, _ = doctor(monkeypatch, capsys, trained.run_dir, "--experts", text)
    assert code == 0 and "layer 1: effectively" in out
    assert doctor(monkeypatch, capsys, trained.run_dir, "--experts", tmp_path / "none")[0] == 2
    monkeypatch.setattr("lmworks.doctor.rows._MOST_TEXT", 10)
    code, _, err = doctor(monkeypatch, capsys, trained.run_dir, "--experts", text)
    assert code == 2 and "is larger than" in err


def curve(folder: Path, shift: Any, **more: Any) -> Path:
    noise = np.random.default_rng(more.pop("seed", 0))
    steps = np.arange(1, 801)
    loss = 2 + 4 / np.sqrt(steps) + noise.normal(0, 0.02, 800) + shift(steps)
    return write_run(folder, {"train/loss": loss.tolist(), "train/tokens": (1000.0 * steps).tolist()}, **more)


def test_two_curves_part_where_one_was_shifted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = [{"event": "resume", "step": step} for step in (400, 700)]
    one = curve(tmp_path / "one", lambda steps: 0.1 * (steps > 400), events=resumed, overrides=["seed=7"])
    other = curve(tmp_path / "other", lambda steps: 0 * steps, seed=1)
    found = against.compare(*(Evidence(open_run(path)) for path in (one, other)))
    assert found.parted_at is not None and 390_000 < found.parted_at < 520_000
    assert found.difference == pytest.approx(0.1, abs=0.01) and found.before == ["resume at step 400"]
    assert found.keys["seed"][0] == 7 and "run_dir" not in found.keys
    better = against.compare(*(Evidence(open_run(path)) for path in (other, one)))
    assert better.parted_at == found.parted_at, "a run that becomes better parts, too"
    code, out, _ = doctor(monkeypatch, capsys, one, "--against", other)
    assert code == 1 and "the losses part at" in out and "seed: 7 here" in out


def test_equal_curves_with_other_noise_and_one_spike_do_not_part(tmp_path: Path) -> None:
    one = curve(tmp_path / "one", lambda steps: 3.0 * (steps == 500))
    other = curve(tmp_path / "other", lambda steps: 0 * steps, seed=1)
    assert against.compare(*(Evidence(open_run(path)) for path in (one, other))).parted_at is None


def test_one_question_at_a_time(trained: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = doctor(monkeypatch, capsys, trained.run_dir, "--probe", "--find-rows", 0)
    assert code == 2 and "ask one at a time" in err
