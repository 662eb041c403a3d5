"""`lmworks bundle`: nothing secret leaves, the doctor reads it, it stays small, and the same run gives the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import zipfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from planted_run import SECRETS, TRACES, sentences, write_planted

from lmworks.bundle import archive, contents
from lmworks.bundle.archive import MOST_BYTES, collect
from lmworks.bundle.contents import CONTENTS, HASHED, thinned
from lmworks.bundle.log_lines import redact_log
from lmworks.bundle.redact import Redactor
from lmworks.cli import main
from lmworks.doctor.report import as_document
from lmworks.errors import UserError
from lmworks.preflight import checks
from lmworks.preflight.check_result import CheckResult
from lmworks.watch.evidence import stages_in
from lmworks.watch.probes import diagnose_probed
from lmworks.watch.run_files import open_run, read_document, read_lines
from written_run import command_line, write_run

MEND = "fix the cause before the run starts; the run would fail in the same way"
FULL = {"event": "save_failed", "step": 30, "reason": "No space left on device", "in_a_row": 1}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("planted")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("API_KEY", "HF_TOKEN", "OPENAI_TOKEN", "NCCL_SOCKET_IFNAME", "TORCH_HOME", "CUDA_VISIBLE_DEVICES", "LMWORKS_HOST"):
            patch.setenv(name, SECRETS["api key"])
        patch.setattr("socket.gethostname", lambda: SECRETS["host"])
        patch.setattr("getpass.getuser", lambda: SECRETS["user"])
        collect(write_planted(folder / SECRETS["user"])).write(folder / "out.zip")
    return zipfile.ZipFile(folder / "out.zip")


def test_no_trace_of_a_planted_secret_is_in_any_member_or_name(planted: zipfile.ZipFile) -> None:
    members = {name: planted.read(name).decode().lower() for name in planted.namelist()}
    assert len(members) > 60 and {"ledger.jsonl", "launch/logs/rank-3.log", "launch/last_failure/rank_2.json"} <= set(members)
    found = [(name, trace) for name, text in members.items() for trace in TRACES if trace in text or trace in name.lower()]
    assert not found, found[:20]
    for name in ("samples.jsonl", "recipe.yaml", "url_credentials.json", "sources.json", "corpus/rejected.jsonl"):
        assert name not in members


def test_what_tells_causes_apart_is_still_there(planted: zipfile.ZipFile) -> None:
    log = planted.read("launch/logs/rank-3.log").decode()
    assert "Traceback (most recent call last):" in log and ", line 12, in " in log and "ValueError: [text of" in log
    assert "No space left on device" in log and "Connection closed by peer" in log
    assert "ended without an error message (perhaps out of memory)" in log and "CUDA out of memory. Tried to allocate 2.00 GiB" in log
    assert " lines of " in log, "what was left out is counted"
    record = json.loads(planted.read("launch/flight_recorder/rank_0.json"))
    assert record["entries"][0]["collective_seq_id"] == 7
    beats = [json.loads(planted.read(f"launch/heartbeats/{rank}.json")) for rank in (12, 0)]
    hosts = json.loads(planted.read("launch/hosts.json"))["hosts"]
    assert beats[0]["host"] == hosts[12]["name"], "one host has one pseudonym everywhere"
    environment = json.loads(planted.read("environment.json"))["environment"]
    assert environment["NCCL_SOCKET_IFNAME"].startswith("host-") and not {"API_KEY", "HF_TOKEN", "OPENAI_TOKEN"} & set(environment)


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_a_message_keeps_its_form_and_not_what_it_names(secret: str) -> None:
    redactor = Redactor(["/runs/x"])
    for text in sentences(secret):
        said = "\n".join([redactor.text(text), redactor.key(text), *redact_log([text], redactor)]).lower()
        assert not [trace for trace in TRACES if trace in said], (text, said)


def test_words_of_the_sources_in_a_sentence_are_a_text() -> None:
    redactor = Redactor()
    for text in ("the loss of the model in the last step was not finite", "train the model on the data of rank 3", "step 3 loss model"):
        assert redactor.text(text) == f"[text of {len(text):,} characters]"
        assert redact_log([text, text], redactor) == [f"[2 lines of {2 * len(text):,} characters]"]


def test_a_message_that_a_terminal_has_wrapped_is_one_message() -> None:
    lines = ["runs/a is in use by process 12 on localhost; wait for it, stop it,", "or choose another run_dir"]
    (said,) = redact_log(lines, Redactor(["runs/a"]))
    assert said.endswith("in use by process 12 on localhost; wait for it, stop it, or choose another run_dir")


def test_a_frame_of_an_installed_package_keeps_its_file_and_another_does_not() -> None:
    import torch

    lines = [
        f'  File "{torch.__file__}", line 3, in forward',
        "    return secret_line()",
        '  File "/x/torch/own.py", line 4, in mine_alone',
    ]
    assert redact_log(lines, Redactor()) == [
        '  File "torch/__init__.py", line 3, in forward', '  File "path-1.py", line 4, in name-1',
    ]  # fmt: skip


def test_a_path_through_a_package_to_another_file_is_no_path_of_the_package(tmp_path: Path) -> None:
    import torch

    (tmp_path / "quokka.py").touch()
    package = Path(torch.__file__).parent
    (line,) = redact_log([f'  File "{package}/{os.path.relpath(tmp_path / "quokka.py", package)}", line 3, in forward'], Redactor())
    assert line == '  File "path-1.py", line 3, in forward'


def test_of_a_long_log_the_last_lines_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", {"train/loss": [1.0] * 5})
    (run / "launch" / "logs").mkdir(parents=True)
    said = [f"Timed out waiting {number}ms for recv operation to complete\n" for number in range(40_000)]
    (run / "launch" / "logs" / "rank-0.log").write_text("".join(said))
    for least, limit in ((1000, archive._SHARES["logs"]), (10, 800)):
        monkeypatch.setattr(archive, "_SHARES", archive._SHARES | {"logs": limit})
        (kept,) = [one for one in collect(run).members if one.name == "launch/logs/rank-0.log"]
        lines = kept.data.decode().splitlines(keepends=True)
        assert lines == said[-len(lines) :] and least <= len(lines) <= 1000 and (kept.note == "") == (len(lines) == 1000)


def test_checkpoints_that_do_not_fit_are_the_oldest_and_are_listed_as_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {f"data-{part}.bin": {"bytes": 1, "blake3": hashlib.sha256(bytes([part])).hexdigest()} for part in range(20)}
    places = [f"checkpoints/step-{step:08d}/manifest.json" for step in range(8, 80, 8)]
    run = write_run(tmp_path / "run", {"train/loss": [1.0] * 80}, documents={place: {"format": 2, "files": entries} for place in places})
    monkeypatch.setattr(archive, "_SHARES", archive._SHARES | {"checkpoints": 5000})
    _, said, _ = bundle(monkeypatch, capsys, run, "--list", "--json")
    found = json.loads(said)
    kept = [one["name"] for one in found["members"] if one["name"] in places]
    assert 1 < len(kept) < len(places) and kept == places[: -len(kept) - 1 : -1]
    assert set(found["omitted"]) == set(places) - set(kept)
    assert all("exceed what is left of the 5,000 bytes for checkpoints" in reason for reason in found["omitted"].values())


def test_how_ranks_ended_is_the_same_in_the_bundle(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"train/loss": [1.0] * 50})
    (run / "launch" / "exits").mkdir(parents=True)
    (run / "launch" / "exits" / "n1.jsonl").write_text('{"time": 1e9, "rank": 1, "code": -9, "signal": "SIGKILL"}\n')
    collect(run).write(tmp_path / "a.zip")
    (name,) = [one for one in open_run(tmp_path / "a.zip").names() if one.startswith("launch/exits/")]
    ((line,), _) = read_lines(open_run(tmp_path / "a.zip"), name)
    assert (line["rank"], line["code"], line["signal"]) == (1, -9, "SIGKILL")


def test_the_doctor_names_the_same_for_the_bundle_and_the_bytes_are_the_same(tmp_path: Path) -> None:
    values = {"train/loss": [5.0 - 0.01 * i for i in range(300)], "optim/update_ratio": [0.5] * 300, "optim/learning_rate": [0.01] * 300}
    run = write_run(tmp_path / "run", values | {"validation/quokka/loss": [3.0] * 300}, [FULL])
    collect(run).write(tmp_path / "a.zip")
    collect(run).write(tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    files, of_run = open_run(tmp_path / "a.zip"), open_run(run)
    assert _codes(files) == _codes(of_run) and "disk-full" in str(_codes(files))
    assert [one["step"] for one in read_lines(files, "metrics.jsonl")[0]] == list(range(1, 301))
    assert "doctor.json" not in of_run.names() and files.size_in_run("recipe.yaml") == of_run.size("recipe.yaml") > 0
    assert read_document(files, "origins.json")["optimizer.learning_rate"]["kind"] == "recipe"
    assert files.size("recipe.yaml") == -1, "it is listed, and not in the archive"
    assert read_document(files, "doctor.json")["stages"][0]["problems"][0]["code"] == "disk-full"


def test_the_last_preflight_is_in_the_bundle_and_the_doctor_notes_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kept by `lmworks preflight` in the folder of a run, and measured again with `--preflight`."""
    run = write_run(tmp_path / "run", {"train/loss": [1.0] * 50})
    (check, other) = checks.CHECKS[3], checks.CHECKS[5]
    full = CheckResult("fail", f"{run} has 3 bytes free", MEND, {"bytes": 3.0})
    answers = [checks.Answer(4, check, full, 1.5), checks.Answer(6, other, CheckResult("ok", "2 GB/s"), 0.5)]
    checks.keep(answers, tmp_path / "none")
    assert not (tmp_path / "none").exists(), "a preflight makes no folder"
    checks.keep(answers, run)
    collect(run).write(tmp_path / "kept.zip")
    mended = [checks.Answer(4, check, CheckResult("ok", "room"), 1.5)]
    monkeypatch.setattr(checks, "preflight", lambda context, begin, end: mended)
    assert command_line(monkeypatch, capsys, "bundle", run, "--preflight", "--yes", "--out", tmp_path / "now.zip")[0] == 0
    for path, failed in ((run, True), (tmp_path / "kept.zip", True), (tmp_path / "now.zip", False)):
        code, out, _ = command_line(monkeypatch, capsys, "doctor", path, "--json")
        notes = [one for one in json.loads(out)["stages"][0]["notes"] if one["code"] == "preflight-failed"]
        assert code == 0 and [one["where"] for one in notes] == ["disks"] * failed, path
    kept = read_document(open_run(tmp_path / "kept.zip"), "preflight.json")["checks"]
    assert [(one["name"], one["result"]) for one in kept] == [("disks", "fail"), ("collectives", "ok")]
    assert str(tmp_path) not in json.dumps(kept) and kept[0]["advice"] == MEND


def test_a_truncated_checkpoint_is_named_by_the_sizes_that_the_bundle_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many other files there are."""
    monkeypatch.setattr(contents, "_MOST_LISTED", 1)
    run = write_run(tmp_path / "run", {"train/loss": [1.0] * 50})
    for number in range(3):
        (run / f"a file {number}").touch()
    place = run / "checkpoints" / "step-00000040"
    place.mkdir(parents=True)
    (place / "data-00000-00000.bin").write_bytes(b"x" * 90)
    (place / "meta.json").write_text('{"format": 1}')
    entries = {"data-00000-00000.bin": {"bytes": 100, "blake3": "ab" * 32}, "meta.json": {"bytes": 13, "blake3": "cd" * 32}}
    (place / "manifest.json").write_text(json.dumps({"format": 2, "files": entries}))
    collect(run).write(tmp_path / "a.zip")
    files = open_run(tmp_path / "a.zip")
    assert _codes(files) == _codes(open_run(run)) and "damaged-checkpoint" in str(_codes(files))
    kept = read_document(files, "checkpoints/step-00000040/manifest.json")["files"]["data-00000-00000.bin"]
    assert kept == {"bytes": 100, "blake3": "ab" * 32}, "hashes of checkpoints are kept"


def test_hashes_are_pseudonyms_that_can_be_compared(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"train/loss": [1.0] * 70})
    for folder in ("shards", "tokenizer"):
        (run / folder).mkdir()
    (run / "tokenizer" / "tokenizer.json").write_text("{}")
    for made, named in ((hashlib.sha256(b"{}").hexdigest(), False), ("ab" * 32, True)):
        (run / "shards" / "manifest.json").write_text(json.dumps({"tokenizer_sha256": made}))
        collect(run).write(tmp_path / f"{named}.zip")
        files = open_run(tmp_path / f"{named}.zip")
        assert "tokenizer/tokenizer.json" not in zipfile.ZipFile(tmp_path / f"{named}.zip").namelist()
        assert ("wrong-tokenizer" in str(_codes(files))) == named == ("wrong-tokenizer" in str(_codes(open_run(run))))


def _codes(files: object) -> object:
    keep = ("code", "steps", "sure", "evidence")
    return [
        [{key: one[key] for key in keep} for kind in ("problems", "unsure", "notes") for one in stage[kind]]
        for stage in as_document("", [diagnose_probed(one) for one in stages_in(files)])["stages"]  # type: ignore[arg-type]
    ]


def test_an_enormous_run_is_thinned_to_its_shares_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_SHARES", {name: limit // 200 for name, limit in archive._SHARES.items()})
    run = write_run(tmp_path / "run", {"train/loss": [hash((i, "x")) / 1e17 for i in range(9000)]}, [FULL] * 3)
    (run / "launch" / "logs").mkdir(parents=True)
    for rank in range(30):
        (run / "launch" / "logs" / f"rank-{rank}.log").write_text(f"[Errno 28] No space left on device: '/{rank}'\n" * 3000)
    made = collect(run)
    notes = {one.name: one.note for one in made.members}
    assert notes["metrics.jsonl"].endswith(" of 9,000 lines") and notes["ledger.jsonl"] == ""
    assert len(made.archive()) < MOST_BYTES / 200 * 1.5
    steps = [json.loads(one)["step"] for m in made.members if m.name == "metrics.jsonl" for one in m.data.splitlines()]
    assert steps[0] == 1 and steps[-1] == 9000 and steps == sorted(steps)
    assert max(b - a for a, b in pairwise(steps)) < 200
    index = json.loads(made.members[0].data)
    assert set(index["omitted"]) == set(made.omitted) and index["members"]["metrics.jsonl"]["note"] == notes["metrics.jsonl"]
    logs = [one for one in made.members if one.name.startswith("launch/logs")]
    assert logs and all(one.data.count(b"\n") <= 1000 for one in logs)


def test_lines_are_thinned_from_the_middle() -> None:
    assert thinned(list(range(10)), 20) == list(range(10))
    kept = thinned(list(range(1000)), 100)
    assert len(kept) == 100 and kept[:25] == list(range(25)) and kept[-50:] == list(range(950, 1000)) and kept == sorted(set(kept))


URLS = {"s3://***@a": "s3://me:open-sesame@a", "https://***@c": "https://lone-token@c", "https://b/x?sig=***&v=20260101": "https://b/x?sig=sesame-query&v=20260101"}


@pytest.mark.parametrize(("said", "what"), [
    ("qwertzuiop123", "the variable SOME_API_KEY"), ("open-sesame", "a credential of url_credentials.json"),
    ("lone-token", "a credential of url_credentials.json"),
    ("sesame-query", "a credential of url_credentials.json"), ("/home/quokka/x", "the home folder"), ("v=20260101", ""),
])  # fmt: skip
def test_a_secret_that_would_get_through_stops_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str, what: str
) -> None:
    """The last look does not rely on the redaction: here it is switched off."""
    run = write_run(tmp_path / "run", {"train/loss": [1.0] * 5}, [{"event": "stopped", "reason": f"used {said}"}])
    (run / "url_credentials.json").write_text(json.dumps(URLS))
    monkeypatch.setenv("SOME_API_KEY", "qwertzuiop123")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/quokka"))
    monkeypatch.setattr(Redactor, "text", lambda self, text, depth=0: text)
    code, _, error = bundle(monkeypatch, capsys, run, "--out", tmp_path / "out.zip", "--yes")
    assert (code == 2 and f"would contain {what}; please report this" in error) if what else (code == 0 and said)
    assert (tmp_path / "out.zip").exists() == (not what)


def test_a_hostile_record_of_collectives_is_not_unpickled(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"train/loss": [1.0] * 5})
    (run / "launch" / "flight_recorder").mkdir(parents=True)
    for rank, content in enumerate((pickle.dumps(_Hostile()), b"", b"junk", pickle.dumps([1]), pickle.dumps({"entries": {("a",): 1}}))):
        (run / "launch" / "flight_recorder" / f"rank_{rank}").write_bytes(content)
    os.environ.pop("LMWORKS_HARMED", None)
    names = {one.name for one in collect(run).members}
    assert "LMWORKS_HARMED" not in os.environ
    assert {one for one in names if "rank_" in one} == {"launch/flight_recorder/rank_4.json"}


class _Hostile:
    def __reduce__(self) -> object:
        return os.putenv, ("LMWORKS_HARMED", "1")


@pytest.mark.parametrize("content", [b"", b"\x00" * 4096, b"{" * 100_000, b"[]\nnull\n" * 50, b"9" * 5000 + b"\n"])
def test_damaged_and_foreign_folders_end_in_one_line_or_a_bundle(tmp_path: Path, content: bytes) -> None:
    run = tmp_path / "run"
    (run / "launch" / "logs").mkdir(parents=True)
    for name in ("resolved.json", "ledger.jsonl", "metrics.jsonl", "lock", "launch/logs/rank-1.log", "launch/hosts.json"):
        (run / name).write_bytes(content)
    with pytest.raises(UserError, match="has no records of a run"):
        collect(run)
    with open(run / "ledger.jsonl", "ab") as file:
        file.write(b'\n{"event":"start","stage":"pretrain","steps":3}\n')
    assert "ledger.jsonl" in {one.name for one in collect(run).members}


def test_what_the_rules_read_is_in_the_bundle() -> None:
    """Files that rules name in the sources are files that a bundle has."""
    import re

    import lmworks.watch.rules as rules

    named = {
        name
        for path in Path(rules.__path__[0]).glob("*.py")
        for name in re.findall(r'"([\w/]+\.(?:json|jsonl|log))"', path.read_text(encoding="utf-8"))
    }
    named -= {name for name in named if any(one.fits(name) or one.fits(f"checkpoints/step-1/{name}") for one in CONTENTS)}
    assert named <= set(HASHED), "add them to lmworks.bundle.contents.CONTENTS"


def bundle(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return command_line(monkeypatch, capsys, "bundle", *arguments)


def test_the_command_shows_the_files_asks_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write_run(tmp_path / "run", {"train/loss": [1.0] * 5, "validation/quokka/loss": [1.0]}, [FULL]), tmp_path / "out.zip"
    code, said, _ = bundle(monkeypatch, capsys, run, "--out", out, "--list", "--names")
    assert code == 0 and "ledger.jsonl" in said and "nothing was written" in said and not out.exists()
    assert "quokka" in said, "--names shows what the pseudonyms stand for"
    code, _, error = bundle(monkeypatch, capsys, run, "--out", out)
    assert code == 2 and "give --yes, or --list" in error and not out.exists()
    code, said, _ = bundle(monkeypatch, capsys, run, "--out", out, "--yes")
    assert code == 0 and f"{out.stat().st_size:,} bytes" in said
    code, _, error = bundle(monkeypatch, capsys, run, "--out", out, "--yes")
    assert code == 2 and "exists and is not overwritten" in error
    with pytest.raises(UserError, match="is not overwritten"):
        collect(run).write(out)
    code, said, _ = bundle(monkeypatch, capsys, run, "--list", "--json", "--names")
    assert json.loads(said)["file"] is None and "quokka" in json.loads(said)["names"].values()
    code, _, error = bundle(monkeypatch, capsys, tmp_path / "nothing", "--list")
    assert code == 2 and "is not the folder of a run" in error
    monkeypatch.setattr("sys.argv", ["lmworks", "doctor", str(out)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1 and "disk-full" in capsys.readouterr().out


def test_the_checks_of_preflight_are_in_the_archive_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, asked = write_run(tmp_path / "run", {"train/loss": [1.0] * 5}), []
    answer = SimpleNamespace(plain=lambda: {"check": "disk", "status": "fail", "text": f"{tmp_path}/quokka is full"})
    monkeypatch.setattr("lmworks.preflight.checks.preflight", lambda context, *_: asked.append(context.recipe.name) or [answer])
    for name, words in (("without", ()), ("with", ("--preflight",))):
        assert bundle(monkeypatch, capsys, run, "--out", tmp_path / f"{name}.zip", "--yes", *words)[0] == 0
    assert asked == ["written"] and "preflight.json" not in zipfile.ZipFile(tmp_path / "without.zip").namelist()
    (found,) = read_document(open_run(tmp_path / "with.zip"), "preflight.json")["checks"]
    assert (found["check"], found["status"]) == ("disk", "fail") and "quokka" not in found["text"]
