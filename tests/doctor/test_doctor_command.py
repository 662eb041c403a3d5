"""`lmworks doctor` from the command line: findings, verdict, exit codes, and run folders that are damaged, foreign or hostile."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lmworks import doctor as doctor_package
from lmworks import watch
from lmworks.io.files import write_json
from lmworks.pages.run_page import write_page
from lmworks.recipe.keys import known_paths
from lmworks.recipe.schema.recipe import Recipe
from lmworks.watch import evidence as evidence_module
from lmworks.watch import rules, run_files
from lmworks.watch.diagnosis import all_rules, diagnose
from lmworks.watch.evidence import Evidence, stages_in
from lmworks.watch.rule import SYMPTOMS, Change, Exclusion, Finding, Measurement, Rule
from lmworks.watch.run_files import open_run
from written_run import command_line, write_run

RUNS = Path(__file__).parent / "runs_of_recipes"
FULL = {"event": "save_failed", "step": 30, "reason": "No space left on device", "in_a_row": 1}


def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return command_line(monkeypatch, capsys, "doctor", *arguments)


@pytest.fixture
def full(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", {"train/loss": [5.0 - 0.01 * i for i in range(60)]}, [FULL])


def test_a_full_disk_is_named_with_evidence_change_and_exit_code(
    full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = doctor(monkeypatch, capsys, full)
    assert code == 1
    assert "disk-full: A checkpoint could not be saved because the disk was full." in out
    assert "pretrain, step 30" in out and "1 problem" in out and "--set checkpoints.keep_last=1" in out
    code, out, _ = doctor(monkeypatch, capsys, full, "--json")
    found = json.loads(out)
    assert code == 1 and [one["code"] for one in found["stages"][0]["problems"]] == ["disk-full"]


def test_a_healthy_run_ends_with_0_and_says_what_could_not_be_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = doctor(monkeypatch, capsys, write_run(tmp_path / "run", {"train/loss": [5.0 - 0.01 * i for i in range(60)]}))
    assert code == 0 and "0 problems" in out and "could not run: no " in out and "experts" not in out


@pytest.mark.parametrize(("recipe", "passed"), [("quickstart", 69), ("assistant", 25)])
def test_finished_runs_of_the_shipped_recipes_have_no_findings(
    recipe: str, passed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bundles of whole runs on two cores: phases of unequal length, a tune that uses experts unevenly, a busy machine."""
    code, out, _ = doctor(monkeypatch, capsys, RUNS / f"{recipe}.zip", "--json")
    stages = json.loads(out)["stages"]
    assert code == 0 and not [one for stage in stages for one in (*stage["problems"], *stage["unsure"], *stage["notes"])]
    assert sum(len(stage["passed"]) for stage in stages) >= passed  # a rule that can no longer judge would be silent too


def test_keys_that_rules_name_are_keys_of_the_recipe() -> None:
    """A key that is misspelled reads as one that is not set, and nothing else would show it."""
    known = set(known_paths(Recipe))
    wrong = set[str]()
    for module in [*rules.__path__, Path(watch.__file__).parent, Path(doctor_package.__file__).parent]:
        for path in Path(module).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                is_key = re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", text) and text.partition(".")[0] in Recipe.model_fields
                if is_key and not text.endswith(".jsonl") and text not in known:
                    wrong.add(f"{path.name}: {text}")
    assert not wrong


def test_every_cause_can_be_explained_and_its_look_alikes_are_causes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for code, rule in all_rules().items():
        assert code == rule.code and set(rule.symptoms) <= set(SYMPTOMS) and rule.symptoms
        assert rule.sentence.endswith(".") and len(rule.explain) > 100
        status, out, _ = doctor(monkeypatch, capsys, "--explain", code)
        assert status == 0 and rule.explain in out
    assert doctor(monkeypatch, capsys, "--explain", "disk-ful")[::2] == (
        2,
        "error: 'disk-ful' is no cause that doctor knows; did you mean disk-full?\n",
    )


@pytest.mark.parametrize("kind", ["missing", "empty folder", "text", "image", "no run"])
def test_what_is_no_run_ends_in_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "it"
    if kind == "empty folder":
        path.mkdir()
    elif kind in ("text", "image"):
        path.write_bytes(b"hello" if kind == "text" else b"\x89PNG\r\n\x1a\n" + bytes(1000))
    code, out, err = doctor(monkeypatch, capsys, *([] if kind == "no run" else [path]))
    assert code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1


JUNK: dict[str, bytes] = {
    "truncated": b'{"step": 3, "train/loss": 4.0}\n{"step": 4, "train/lo',
    "foreign": b'{"iter": 3, "loss": "4"}\n[1, 2]\nhello\n\xff\xfe\n',
    "deep": b"[" * 100_000 + b"\n",
    "large numbers": b'{"step": 1e400, "train/loss": 1e400, "optim/update_ratio": ' + b"9" * 5000 + b"}\n",
    "wrong types": b'{"step": "1", "train/loss": [1]}\n{"step": true, "train/loss": {}}\n{"step": -5, "train/loss": 1}\n',
    "no line end": b"x" * 1_000_000,
}


@pytest.mark.parametrize("kind", JUNK)
@pytest.mark.parametrize("file", ["metrics.jsonl", "ledger.jsonl", "resolved.json", "lock", "launch/hosts.json"])
def test_damaged_records_end_in_a_verdict(
    kind: str, file: str, full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (full / file).parent.mkdir(exist_ok=True)
    with open(full / file, "wb") as handle:
        handle.write(JUNK[kind])
    code, out, err = doctor(monkeypatch, capsys, full)
    assert (code == 2 and err.startswith("error: ")) or (code in (0, 1) and "problem" in out and not err)


def test_a_link_out_of_the_folder_is_not_followed(full: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"a": 1}')
    (full / "resolved.json").unlink()
    (full / "resolved.json").symlink_to(tmp_path / "secret.json")
    assert Evidence(open_run(full)).tree == {}


@pytest.mark.parametrize("command", ["doctor", "bundle", "report"])
def test_a_folder_that_may_not_be_entered_is_named(
    command: str, full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--list"] if command == "bundle" else []
    command_line(monkeypatch, capsys, command, full, *more)  # imports what another user may not read
    user, mode = os.geteuid(), full.stat().st_mode
    full.chmod(0)
    try:
        if user == 0:
            os.seteuid(65534)
        code, out, err = command_line(monkeypatch, capsys, command, full, *more)
    finally:
        os.seteuid(user)
        full.chmod(mode)
    assert code == 2 and not out and err.count("\n") == 1 and err.startswith(f"error: {full}") and "Permission denied; ask" in err


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a loop of links", "a folder", "a file without an end"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "resolved.json"])
def test_what_is_no_file_ends_neither_the_doctor_nor_the_page(
    kind: str, name: str, full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_files, "LONGEST_LINE", 1 << 12)
    path = full / name
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a file without an end":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to("/dev/zero" if kind == "a device" else name)
    code, out, err = doctor(monkeypatch, capsys, full)
    assert (code == 2 and err.startswith("error: ") and err.count("\n") == 1) or (code in (0, 1) and "problem" in out and not err)
    assert "<html" in write_page(full).read_text(encoding="utf-8")


def test_a_long_file_is_read_at_its_ends_and_in_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_HEAD", 4000), ("_TAIL", 4000), ("_WINDOW", 200), ("_WINDOWS", 10)):
        monkeypatch.setattr(run_files, name, value)
    run = write_run(tmp_path / "run", {"train/loss": [float(i) for i in range(5000)]})
    loss = Evidence(open_run(run)).series("train/loss")
    assert loss.steps[0] == 1 and loss.steps[-1] == 5000 and 100 < len(loss) < 400
    middle = loss.between(500, 4500)
    assert len(middle) >= 10 and (middle.values == middle.steps - 1).all() and (loss.steps[1:] > loss.steps[:-1]).all()


def test_a_bundle_is_read_like_the_folder(full: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in full.rglob("*"):
            if path.is_file():
                archive.write(path, path.relative_to(full))
    folder, bundle = (diagnose(Evidence(open_run(path))) for path in (full, tmp_path / "bundle.zip"))
    assert [one.code for one in bundle.problems] == [one.code for one in folder.problems] == ["disk-full"]


def rule(code: str, *evidence: Measurement, finding: Mapping[str, Any] = {}, **more: Any) -> Rule:
    return Rule(code, "It is so.", "data", ("spikes",), lambda _: Finding(evidence, **finding), "", **more)


def test_one_signal_is_not_sure_and_two_are(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, fine = Measurement("a", 2.0, high=1.0), Measurement("b", 0.5, high=1.0)
    both = [rule("one", bad, fine), rule("two", bad, bad), rule("worse", bad, bad, bad, outranks=("two",))]
    monkeypatch.setattr("lmworks.watch.diagnosis.all_rules", lambda: {one.code: one for one in both})
    found = diagnose(Evidence(open_run(full)))
    assert [one.code for one in found.unsure] == ["one"] and [one.code for one in found.problems] == ["worse", "two"]


def test_a_cause_that_is_not_sure_is_said_with_what_was_ruled_out_and_what_to_measure(
    full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = (Change(advice="lmworks data conversations RUN shows it"),)
    found = {"excluded": (Exclusion("two", "b is 3"),), "changes": changes, "next_measurement": "lmworks ckpt verify RUN"}
    one = rule("one", Measurement("a", 2.0, high=1.0), finding=found)
    monkeypatch.setattr("lmworks.watch.diagnosis.all_rules", lambda: {"one": one})
    code, out, _ = doctor(monkeypatch, capsys, full)
    assert code == 0 and "0 problems, 1 not sure, 0 checks passed" in out
    assert "two: b is 3" in out and "one signal alone; next: lmworks ckpt verify" in out
    (stage,) = json.loads(doctor(monkeypatch, capsys, full, "--json")[1])["stages"]
    (unsure,) = stage["unsure"]
    assert (unsure["code"], unsure["next_measurement"]) == ("one", f"lmworks ckpt verify {full}")
    assert unsure["changes"][0]["advice"] == f"lmworks data conversations {full} shows it"


def test_a_note_is_not_said_to_be_unsure(full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one = rule("one", Measurement("a", 2.0, high=1.0), finding={"note": True, "next_measurement": "lmworks ckpt verify RUN"})
    monkeypatch.setattr("lmworks.watch.diagnosis.all_rules", lambda: {"one": one})
    code, out, _ = doctor(monkeypatch, capsys, full)
    assert code == 0 and "1 note" in out and "a = 2" in out and "not sure" not in out and "next:" not in out


def test_the_last_step_of_a_process_that_was_killed_is_said(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "pretrain ! its process is gone since step 60, without a message"
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        holder = {"pid": process.pid, "host": socket.gethostname()}
    write_json(full / "lock", holder | {"pid": os.getpid()})
    assert said not in doctor(monkeypatch, capsys, full)[1], "it runs"
    write_json(full / "lock", holder)
    assert said in doctor(monkeypatch, capsys, full)[1]
    assert json.loads(doctor(monkeypatch, capsys, full, "--json")[1])["stages"][0]["died_at"] == 60
    command_line(monkeypatch, capsys, "bundle", full, "--out", tmp_path / "b.zip", "--yes")
    assert said in doctor(monkeypatch, capsys, tmp_path / "b.zip")[1]
    with open(full / "ledger.jsonl", "ab") as ledger:
        ledger.write(b'{"time": 1e9, "event": "finish", "stage": "pretrain", "step": 60}\n')
    assert said not in doctor(monkeypatch, capsys, full)[1]


def test_a_problem_of_a_later_stage_is_one(full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (full / "ledger.jsonl").unlink()
    write_run(full)
    write_run(full, {"train/loss": [5.0 - 0.01 * i for i in range(60)]}, [FULL], stage="tune")
    code, out, _ = doctor(monkeypatch, capsys, full)
    assert code == 1 and "tune, step 30" in out and "pretrain, step" not in out


def test_a_rule_that_meets_what_no_run_writes_does_not_end_the_others(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Rule("broken", "It is so.", "data", ("spikes",), lambda _: [][1], "")
    monkeypatch.setattr("lmworks.watch.diagnosis.all_rules", lambda: {"broken": broken, "disk-full": all_rules()["disk-full"]})
    found = diagnose(Evidence(open_run(full)))
    assert "damaged" in found.not_judged["broken"] and [one.code for one in found.problems] == ["disk-full"]


def test_a_run_of_an_earlier_version_is_judged_by_the_names_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its recipe has the keys of its time, and its metrics lack the signals that were added since."""
    stored = json.loads((Path(__file__).parents[1] / "recipe" / "earlier_run.json").read_text(encoding="utf-8"))
    run = write_run(tmp_path / "run", {"train/loss": [5.0 - 0.01 * i for i in range(60)]}, [FULL])
    (run / "resolved.json").write_text(json.dumps(stored["resolved"]), encoding="utf-8")
    evidence = Evidence(open_run(run))
    assert evidence.number("train.phases.0.global_batch_tokens") == 256 and evidence.value("train.phases.0.global_batch_size") is None
    assert evidence.number("train.phases.0.lr_schedule.warmup") == 4 and evidence.number("launch.timeout") == 600
    code, out, _ = doctor(monkeypatch, capsys, run)
    assert code == 1 and "disk-full" in out and "damaged" not in out


def test_without_a_recipe_rules_say_so(full: Path) -> None:
    write_run(full, {"train/loss": [5.0 - 0.01 * i for i in range(300)]})
    (full / "resolved.json").unlink()
    found = diagnose(Evidence(open_run(full)))
    assert not [reason for reason in found.not_judged.values() if "damaged" in reason]


def test_the_ledger_is_read_once_for_all_stages(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, honest = [], evidence_module.read_lines
    monkeypatch.setattr(evidence_module, "read_lines", lambda files, name: read.append(name) or honest(files, name))
    write_run(full, {"train/loss": [1.0, 2.0]}, stage="tune")
    assert [one.stage for one in stages_in(open_run(full))] == ["pretrain", "tune"] and read.count("ledger.jsonl") == 1
