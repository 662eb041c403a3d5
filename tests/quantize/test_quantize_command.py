"""`lmworks quantize` from the command line, with Q8_0 by llama.cpp's Python package: certificates, planted faults, and bad input."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Lmworks
from safetensors.torch import load_file, save_file

from lmworks.export.export import write_huggingface
from lmworks.pages import model_pages
from lmworks.quantize import child
from lmworks.quantize import gguf as quantize_gguf
from lmworks.quantize import quantize as quantize_module
from lmworks.quantize.source import open_source

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'lmworks[export]'")


@pytest.fixture
def lmworks(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Lmworks:
    # llama.cpp's library is not installed, whatever the machine of the test has
    monkeypatch.setattr(quantize_gguf, "find_python", lambda modules, given: None)
    return Lmworks(monkeypatch, capfd)


@pytest.fixture
def run(make_run: Callable[..., Any]) -> Any:
    return make_run("glm4moe")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def quantize(lmworks: Lmworks, run: Any, out: Path, *options: str) -> Any:
    return lmworks("quantize", run.directory, "--to", "gguf-q8_0", "--out", out, "--tokens", "280", *options)


def test_a_result_is_certified_and_the_model_untouched(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    before = files(run.directory)
    done = quantize(lmworks, run, tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert files(run.directory) == before
    (found,) = json.loads(done.out)["results"]
    assert found == json.loads((tmp_path / "out" / "gguf-q8_0" / "certificate.json").read_text())
    assert found["verdict"] == "passed" and not found["failures"]
    assert found["agreement"]["tokens"] == 280 and 0 < found["agreement"]["kl_mean"] < 0.005
    low, high = found["agreement"]["perplexity_interval"]
    assert low <= found["agreement"]["perplexity_ratio"] <= high
    assert set(found["agreement"]["by_domain"]) == {"code", "docs"}
    assert found["bytes"] < 0.3 * found["original_bytes"], "8.5 bits for 32"
    matrices = sum(t.dim() > 1 and "router" not in name for name, t in run.model.state_dict().items())
    assert found["tensors"]["fates"] == {"quantized": matrices, "kept": len(run.model.state_dict()) - matrices}
    assert found["tensors"]["sensitive"] == {"router": ["F32"], "embedding": ["Q8_0"], "head": ["Q8_0"]}
    assert found["template"] == "equal" and "dequantized" in found["scored_by"] and "lmworks[llama]" in found["speed"]["not_measured"]
    records = json.loads((tmp_path / "out" / "gguf-q8_0" / "tensors.json").read_text())
    assert all(0 < one["error"] < 0.01 for one in records if one["fate"] == "quantized")
    page = (tmp_path / "out" / "quantization.html").read_text()
    assert "gguf-q8_0" in page and "<script" not in page and "not measured" in page
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gguf-q8_0", "quantization.html", "quantization.json"]


def test_a_certificate_tells_the_name_that_the_file_has_in_place_of_the_models(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    named = shutil.copytree(run.directory, tmp_path / "my-phi3")
    done = lmworks("quantize", named, "--to", "gguf-q8_0", "--out", tmp_path / "out", "--tokens", "280", "--json")
    assert done.code == 0, done.err
    told = "the file names the model my-phi_3, because llama.cpp takes my-phi3 for one with another tokenizer"
    assert told in json.loads(done.out)["results"][0]["warnings"]


def test_a_certified_result_is_kept_until_something_changes(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    made = tmp_path / "gguf-q8_0" / "model.gguf"
    times = []
    for options in ((), (), ("--limit", "kl=0.1")):
        assert quantize(lmworks, run, tmp_path, *options).code == 0
        times.append(made.stat().st_mtime_ns)
    assert times[0] == times[1] < times[2]


def test_other_contents_under_the_same_names_are_certified_anew(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    held_out, calibration, rows = (tmp_path / name for name in ("held.txt", "calibration.txt", "rows.jsonl"))
    task = tmp_path / "own.yaml"
    task.write_text("file: rows.jsonl\nchoices: c\nform: cloze\n")

    def write(path: Path, word: str) -> None:
        table = [{"question": f"{word} {n}?", "c": ["one", "two"], "answer": n % 2} for n in range(4)]
        many = "\n\n\n".join(f"{word} of number {n} and some more of it, " * 9 for n in range(6))
        path.write_text(many if path.suffix == ".txt" else "".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")

    write(held_out, "this")
    write(calibration, "that")
    write(rows, "Which")
    options = ("--held-out", held_out, "--calibration", calibration, "--tasks", task)
    made, times = tmp_path / "out" / "gguf-q8_0" / "model.gguf", []
    steps: list[Callable[[], Any]] = [
        lambda: None, lambda: None, lambda: write(held_out, "other"), lambda: write(calibration, "third"), lambda: write(rows, "What"),
        lambda: task.write_text(task.read_text() + "shots: 1\n"), lambda: None,
    ]  # fmt: skip
    for step in steps:
        step()
        done = quantize(lmworks, run, tmp_path / "out", *options)
        assert done.code == 0, done.err
        times.append(made.stat().st_mtime_ns)
    assert times[0] == times[1] < times[2] < times[3] < times[4] < times[5] == times[6]


def zero_router(path: Path) -> None:
    tensor(path, "blk.1.ffn_gate_inp.weight").data[:] = 0


def drop_tensor(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(b"blk.2.attn_k.weight") == 1
    path.write_bytes(data.replace(b"blk.2.attn_k.weight", b"blk.2.attn_K.weight"))


def wrong_scale(path: Path) -> None:
    """Blocks of 34 bytes, of which the first two are the scale in fp16: one tensor of them is a tenth too large."""
    blocks = tensor(path, "blk.1.attn_v.weight").data
    scales = blocks.reshape(-1, 34)[:, :2].copy().view("float16")
    blocks.reshape(-1, 34)[:, :2] = (scales * 1.1).astype("float16").view("uint8")


def other_template(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"<|assistant|>", b"<|assistent|>", 1) if data.count(b"<|assistant|>") else data)


def zero_expert(path: Path) -> None:
    tensor(path, "blk.2.ffn_up_exps.weight").data[3] = 0


def tensor(path: Path, name: str) -> Any:
    return next(one for one in gguf.GGUFReader(path, "r+").tensors if one.name == name)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (zero_router, r"blk\.1\.ffn_gate_inp\.weight was to be kept, but its values differ"),
        pytest.param(drop_tensor, r"blk\.2\.attn_k\.weight is missing", marks=pytest.mark.slow),
        (wrong_scale, r"blk\.1\.attn_v\.weight \(Q8_0\) has an error of 10\.\d%, more than 2%"),
        pytest.param(zero_expert, r"blk\.2\.ffn_up_exps\.weight \(Q8_0\) has an error of 3\d\.\d%", marks=pytest.mark.slow),
        (other_template, r"the chat template differs|tokenizer\.ggml\.tokens differs"),
    ],
)
def test_a_planted_fault_fails(
    lmworks: Lmworks, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], says: str
) -> None:
    honest = quantize_gguf.quantize

    def damaged(scheme: Any, original: Path, target: Path, python: Any) -> str:
        made_by = honest(scheme, original, target, python)
        damage(target)
        return made_by

    monkeypatch.setattr(quantize_gguf, "quantize", damaged)
    done = quantize(lmworks, run, tmp_path)
    assert done.code == 1 and re.search(says, done.out), done.out + done.err
    assert not (tmp_path / "gguf-q8_0").exists()
    certificate = json.loads((tmp_path / "gguf-q8_0.failed" / "certificate.json").read_text())
    assert certificate["verdict"] == "failed"
    assert "failed" in (tmp_path / "quantization.html").read_text()
    monkeypatch.undo()
    monkeypatch.setattr(quantize_gguf, "find_python", lambda modules, given: None)
    assert lmworks("quantize", run.directory, "--to", "gguf-q8_0", "--out", tmp_path, "--tokens", "300").code == 0
    assert not (tmp_path / "gguf-q8_0.failed").exists(), "a result replaces the one before it"


def test_the_limits_decide(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    done = quantize(lmworks, run, tmp_path, "--limit", "kl=1e-9", "--limit", "perplexity_ratio=0.5", "--limit", "same_choice=1.1")
    assert done.code == 1
    for what in ("mean KL divergence", "first choice", "perplexity"):
        assert what in done.out
    assert "one of the names kl, same_choice" in quantize(lmworks, run, tmp_path, "--limit", "size=3").error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_half_written_counts(
    lmworks: Lmworks, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = files(run.directory)

    def stop(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(quantize_gguf, "check_fields", stop)
        done = quantize(lmworks, run, tmp_path)
    assert done.code == (130 if isinstance(error, KeyboardInterrupt) else 2), done.err
    assert "interrupted" in done.err or "is full" in done.error
    assert not list(tmp_path.iterdir()) and files(run.directory) == before
    assert quantize(lmworks, run, tmp_path).code == 0


def test_what_a_killed_process_left_is_removed(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    """Also of one that had the same id: the first process of a container always has. What only has such a name stays."""
    left, others = [tmp_path / f".working-{process}" for process in (99999999, os.getpid())], tmp_path / ".working-copy"
    for folder in (*left, others):
        folder.mkdir()
        (folder / "original.gguf").write_bytes(b"x")
    assert quantize(lmworks, run, tmp_path).code == 0
    assert others.exists() and not any(folder.exists() for folder in left)


def test_what_others_keep_where_a_result_would_be_stays(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    for name, contents in (("gguf-q8_0", {"mine.txt": b"mine"}), ("gguf-q8_0.failed", {"sub/mine.txt": b"mine"})):
        out = tmp_path / name / "out"
        for file, content in contents.items():
            (out / name / file).parent.mkdir(parents=True)
            (out / name / file).write_bytes(content)
        before = files(out)
        refused = quantize(lmworks, run, out)
        assert refused.code == 2 and f"{out / name} is no result of lmworks quantize; nothing was changed" in refused.err.replace("\n", " ")
        assert files(out) == before


def test_a_hugging_face_directory_needs_text(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    model, text = tmp_path / "model", tmp_path / "text.jsonl"
    write_huggingface(run.model, run.tokenizer, model, torch.bfloat16)
    assert "--held-out FILE" in lmworks("quantize", model, "--to", "gguf-q8_0").error
    text.write_text("".join(json.dumps({"text": f"def f{n}(x): return x + {n}\n" * 9}) + "\n" for n in range(6)))
    before = files(model)
    done = lmworks("quantize", model, "--to", "gguf-q8_0", "--held-out", text, "--tokens", "128", "--json")
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)["results"]
    assert found["verdict"] == "passed" and found["made_from"]["dtype"] == "bfloat16"
    assert (tmp_path / "model-quantized" / "gguf-q8_0" / "model.gguf").is_file() and files(model) == before
    assert "share a document" in lmworks("quantize", model, "--to", "gguf-q8_0", "--held-out", text, "--calibration", text).error


def test_of_a_model_that_is_published_quantized_only_the_values_are_the_original(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    """As DeepSeek-V3 in FP8. The values are written out for what converts them, since it may not read their form."""
    model, text = tmp_path / "model", tmp_path / "text.jsonl"
    write_huggingface(run.model, run.tokenizer, model, torch.bfloat16)
    stored = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        stored[name] = tensor
        if "mlp" in name and name.endswith("_proj.weight"):
            scale = 2.0 ** (tensor.abs().amax().float() / 448).log2().ceil()  # so that the values are those of bf16
            stored |= {name: (tensor.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale[None]}
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    text.write_text("".join(json.dumps({"text": f"def f{n}(x): return x + {n}\n" * 9}) + "\n" for n in range(6)))
    done = lmworks("quantize", model, "--to", "gguf-q8_0", "--held-out", text, "--tokens", "128", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["results"][0]["verdict"] == "passed"
    source = open_source(str(model))
    written = load_file(source.write_huggingface(tmp_path / "written") / "model.safetensors")
    assert set(written) == {name for name in stored if not name.endswith("_scale_inv")}
    for name, tensor in written.items():
        scale = stored.get(f"{name}_scale_inv", torch.ones(1))
        assert torch.equal(tensor.float(), stored[name].float() * scale), name
    assert "is the model itself" in lmworks("quantize", model, "--to", "gguf-q8_0", "--held-out", text, "--out", model).error


def test_a_deployment_serves_what_is_certified(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    model, answers = tmp_path / "model", tmp_path / "answers.json"
    write_huggingface(run.model, run.tokenizer, model, torch.bfloat16)
    assert lmworks("deploy", "record", model, "--out", answers).code == 0
    assert quantize(lmworks, run, tmp_path / "out").code == 0
    result = tmp_path / "out" / "gguf-q8_0"

    def deploy(file: Path, out: str, *options: str) -> Any:
        return lmworks(
            "deploy", model, "--engine", "llama.cpp", "--cpu", "--gguf", file, "--expect", answers, "--out", tmp_path / out, *options
        )

    assert deploy(result / "model.gguf", "certified").code == 0
    certificate = json.loads((result / "certificate.json").read_text())
    passed = certificate["files"]["model.gguf"]
    for change, why in (
        ({"verdict": "failed", "failures": ["the mean KL divergence is 2"]}, "failed its certificate: the mean KL divergence is 2; serve"),
        ({"files": {"model.gguf": passed | {"bytes": 7}}}, "bytes instead of 7"),
        ({"files": {"model.gguf": passed | {"sha256": "0" * 64}}}, "model.gguf"),
        ({"files": {}}, "keeps no hashes of the files that passed"),
        ({"verdict": None, "failures": None}, "no reason given"), (None, "is damaged"),
    ):  # fmt: skip
        (result / "certificate.json").write_text(json.dumps(change and certificate | change))
        assert why in deploy(result / "model.gguf", "refused").error
    (result / "certificate.json").unlink()
    assert "is quantized and has no certificate.json" in deploy(result / "model.gguf", "refused").error
    assert not (tmp_path / "refused").exists()
    assert deploy(result / "model.gguf", "uncertified", "--uncertified").code == 0
    quantize_gguf.write_original(open_source(str(model)), tmp_path / "plain.gguf")
    assert deploy(tmp_path / "plain.gguf", "plain").code == 0, "nothing was rounded"


def test_benchmarks_of_both_models_are_compared(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    rows = tmp_path / "arc-easy.jsonl"
    choices = {"text": ["a list", "a tuple", "a dict"], "label": ["A", "B", "C"]}
    questions = [{"id": f"q{n}", "question": f"What is number {n}?", "choices": choices, "answerKey": "ABC"[n % 3]} for n in range(12)]
    rows.write_text("".join(json.dumps(one) + "\n" for one in questions))
    done = quantize(lmworks, run, tmp_path / "out", "--tasks", "arc-easy", "--data", str(tmp_path), "--json")
    assert done.code == 0, done.err
    (score,) = json.loads(done.out)["results"][0]["benchmarks"]["scores"]
    assert score["score"] == "arc-easy/cloze/0-shot" and score["n"] == 12
    assert score["interval"][0] <= score["difference"] <= score["interval"][1]
    assert "arc-easy/cloze" in (tmp_path / "out" / "quantization.html").read_text()


def test_bad_input_is_one_line(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    out, model = ("--out", tmp_path / "out"), tmp_path / "model"
    assert "no such scheme" in lmworks("quantize", run.directory, "--to", "gguf-q3", *out).error
    assert "names no scheme" in lmworks("quantize", run.directory, "--to", ",", *out).error
    for limit in ("kl=nan", "kl=inf", "kl=-1", "kl", "loss=1", "expert_tokens=0.5"):
        refused = lmworks("quantize", run.directory, "--to", "gguf-q8_0", *out, "--limit", limit).error
        assert f"--limit {limit}: write NAME=NUMBER, not negative" in refused
    assert "lmworks[llama]" in lmworks("quantize", run.directory, "--to", "gguf-q4_k_m", *out).error
    assert "neither a run" in lmworks("quantize", tmp_path, "--to", "gguf-q8_0", *out).error
    assert "does not exist" in lmworks("quantize", tmp_path / "no", "--to", "gguf-q8_0", *out).error
    write_huggingface(run.model, run.tokenizer, model, torch.bfloat16)
    text = ("--held-out", tmp_path / "text.txt")
    assert "text.txt does not exist" in lmworks("quantize", model, "--to", "gguf-q8_0", *text, *out).error
    text[1].write_text("\n\n")
    assert "holds no text" in lmworks("quantize", model, "--to", "gguf-q8_0", *text, *out).error
    text[1].write_bytes(b"\xff\xfe\x00")
    assert "damaged" in lmworks("quantize", model, "--to", "gguf-q8_0", *text, *out).error
    (model / "certificate.json").write_text("{}")
    assert "is a result of `lmworks quantize`" in lmworks("quantize", model, "--to", "gguf-q8_0", *text, *out).error
    (model / "certificate.json").unlink()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "only pytorch_model.bin, which is pickled" in lmworks("quantize", model, "--to", "gguf-q8_0", *text, *out).error
    assert not (tmp_path / "out").exists()


def test_a_python_that_does_not_run_is_named(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    command = Lmworks(monkeypatch, capfd)
    done = command("quantize", run.directory, "--to", "gguf-q8_0", "--out", tmp_path, "--python", tmp_path / "python")
    assert "is not a Python that runs" in done.error


def test_a_full_disk_is_noticed_before(lmworks: Lmworks, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_MACHINE", "peak=1e11,disk=1000")
    assert "are free" in quantize(lmworks, run, tmp_path / "out").error
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_while_an_engine_writes_logits_is_one_line(
    lmworks: Lmworks, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is a stand-in: the program that asks it, the failing write to a full device, and all else are real."""
    programs, out, made = tmp_path / "programs.py", tmp_path / "out", quantize_gguf.quantize
    programs.write_text(f"import sys\n\nsys.path.insert(0, {str(tmp_path)!r})\n{child.PROGRAMS.read_text()}")
    (tmp_path / "llama_cpp.py").write_text(f"""
import pathlib, numpy
__version__, GGML_TYPE_F32 = "0", 0
class Llama:
    def __init__(self, *arguments, **options):
        self.scores = numpy.zeros((512, {run.model.config.vocab_size}))
        for folder in pathlib.Path({str(out)!r}).glob(".working-*"):
            (folder / "logits.f32").symlink_to("/dev/full")
    def reset(self): pass
    def eval(self, ids): pass
""")
    monkeypatch.setattr(child, "PROGRAMS", programs)
    monkeypatch.setattr(quantize_gguf, "find_python", lambda modules, given: Path(sys.executable))
    monkeypatch.setattr(quantize_gguf, "quantize", lambda scheme, original, target, python: made(scheme, original, target, None))
    done = quantize(lmworks, run, out)
    assert done.code == 2 and re.search(r"the disk of \S+/out is full", done.error), done.err
    assert not list(out.iterdir())


def test_an_engine_that_was_killed_says_nothing_about_the_model(
    lmworks: Lmworks, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result would be kept as failed. The engine is a stand-in that dies as the system kills where memory is short."""
    programs, out, made = tmp_path / "programs.py", tmp_path / "out", quantize_gguf.quantize
    programs.write_text("import os, signal, sys\n\nsys.stdin.readline()\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setattr(child, "PROGRAMS", programs)
    monkeypatch.setattr(quantize_gguf, "find_python", lambda modules, given: Path(sys.executable))
    monkeypatch.setattr(quantize_gguf, "quantize", lambda scheme, original, target, python: made(scheme, original, target, None))
    done = quantize(lmworks, run, out)
    assert done.code == 2 and "gguf-q8_0: llama.cpp was killed (signal 9), as the system does where memory is short" in done.error
    assert not list(out.iterdir())


def test_shutil_is_not_followed_out_of_the_folder(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    """A result under the name of a scheme is replaced; what lies beside it is not touched."""
    (tmp_path / "notes.txt").write_text("mine")
    assert quantize(lmworks, run, tmp_path).code == 0
    shutil.rmtree(tmp_path / "gguf-q8_0")
    assert quantize(lmworks, run, tmp_path).code == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_can_be_made_is_made_and_the_other_scheme_is_named_at_the_end(lmworks: Lmworks, run: Any, tmp_path: Path) -> None:
    done = lmworks("quantize", run.directory, "--to", "gguf-q4_k_m,gguf-q8_0", "--out", tmp_path / "out", "--tokens", "280", "--json")
    assert done.error.startswith("gguf-q4_k_m needs llama.cpp's library") and "lmworks[llama]" in done.error
    assert [one["scheme"] for one in json.loads(done.out)["results"]] == ["gguf-q8_0"]
    assert (tmp_path / "out" / "gguf-q8_0" / "certificate.json").is_file() and (tmp_path / "out" / "quantization.html").is_file()


def test_one_form_that_fails_is_exit_code_1(lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = {"gguf-q8_0": "passed", "gguf-q6_k": "failed"}
    document = {"results": [{"scheme": name, "verdict": verdict} for name, verdict in verdicts.items()]}
    monkeypatch.setattr(quantize_module, "available", lambda schemes, _: (schemes, []))
    monkeypatch.setattr(quantize_module, "quantize", lambda *_: document)
    monkeypatch.setattr(model_pages, "write_quantization_page", lambda *_: None)
    for names, code in (("gguf-q8_0,gguf-q6_k", 1), ("gguf-q8_0", 0)):
        done = lmworks("quantize", tmp_path, "--to", names, "--out", tmp_path, "--json")
        assert done.code == code, done.err
