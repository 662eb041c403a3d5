"""The check of a server: a server of the true weights passes, one with perturbed weights fails although it is healthy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from deployable import QWEN3, export, serving
from lmworks.deploy import check
from lmworks.deploy.request import record
from lmworks.deploy.source import open_source
from lmworks.errors import UserError
from tiny_run import Tiny


@pytest.fixture(scope="session")
def expected(exported: Path) -> dict[str, Any]:
    return record(open_source(exported))


def test_true_weights_pass(exported: Path, expected: dict[str, Any]) -> None:
    assert sum(len(item["tokens"]) for item in expected["items"]) >= 15
    with serving(exported) as url:
        result = check.check(url, expected)
    assert result["ok"] and result["difference"] < 1e-4  # the same code and weights: only the five recorded decimals are lost


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_a_healthy_server_of_perturbed_weights_fails(exported: Path, expected: dict[str, Any], noise: float) -> None:
    with serving(exported, noise=noise) as url:
        assert json.load(urllib.request.urlopen(f"{url}/health"))["status"] == "ok"
        result = check.check(url, expected)
    assert not result["ok"] and result["difference"] > 2 * expected["tolerance"]
    assert "does not compute this model" in result["reason"]


def test_rounding_to_16_bits_passes(tiny: Tiny, tmp_path: Path) -> None:
    """The recorded tolerance covers a server that computes with weights in bfloat16."""
    expected = record(open_source(export(tiny, tmp_path / "full", QWEN3)))
    rounded = export(tiny, tmp_path / "half", QWEN3, torch.bfloat16)
    with serving(rounded) as url:
        result = check.check(url, expected)
    assert result["ok"] and result["difference"] > 1e-5


def test_another_model_fails(tiny: Tiny, tmp_path: Path, expected: dict[str, Any]) -> None:
    with serving(export(tiny, tmp_path, QWEN3)) as url:
        assert not check.check(url, expected)["ok"]


def token(*top: tuple[str, float]) -> dict[str, Any]:
    return {"top": [list(pair) for pair in top]}


def test_differences_are_lower_bounds() -> None:
    tokens = [token(("a", -0.1), ("b", -2.5), ("c", -4.0))]
    assert check.differences(tokens, [("a", -0.3)]) == [pytest.approx(0.2)]
    assert check.differences(tokens, [("b", -0.5)]) == [pytest.approx(2.0)]  # the server gives b 2.0 more
    assert check.differences(tokens, [("b", -2.4)]) == [pytest.approx(2.3)]  # and so gives a at most -2.4
    assert check.differences(tokens, [("z", -6.0)]) == [pytest.approx(5.9)]  # noise: a has at most -6.0
    assert check.differences(tokens, [("z", -0.01)]) == [pytest.approx(3.99)]  # sure of a token that has at most -4.0
    assert check.differences(tokens * 2, [("z", -1.0), ("a", -0.1)]) == [pytest.approx(3.0)]  # nothing counts after another token
    assert check.differences(tokens, []) == [check.MISSING]
    assert check.differences(tokens, [("a", float("nan"))]) == [100.0]


def test_the_script_needs_the_standard_library_only(exported: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    source = Path(check.__file__)
    tree = ast.parse(source.read_text(encoding="utf-8"))
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in modules} <= set(sys.stdlib_module_names)
    answers, key = tmp_path / "expected.json", tmp_path / "key"
    answers.write_text(json.dumps(expected))
    key.write_text("secret\n")
    key.chmod(0o600)
    with serving(exported, api_key="secret") as url:
        command = [sys.executable, "-I", str(source), url, "--expect", str(answers)]
        good = subprocess.run([*command, "--key-file", str(key)], capture_output=True, encoding="utf-8")
        without = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert (good.returncode, without.returncode) == (0, 1)
    assert good.stdout.startswith("ok: ") and "does not answer" in without.stdout
    assert subprocess.run(command, capture_output=True).returncode == 1  # nobody listens any more


def test_watch_serves_metrics(exported: Path, expected: dict[str, Any]) -> None:
    watch = check.Watch()
    server = check.listen(watch, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.server_port}/metrics"
    assert "lmworks_check_ok" not in urllib.request.urlopen(address).read().decode()
    with serving(exported) as url:
        watch.update(check.check(url, expected), 0.5)
    assert "lmworks_check_ok 1" in urllib.request.urlopen(address).read().decode()
    watch.update(check.check(url, expected), 0.5)
    text = urllib.request.urlopen(address).read().decode()
    assert "lmworks_check_ok 0" in text and 'lmworks_checks_total{result="failed"} 1' in text
    server.shutdown()
    server.server_close()


def test_a_model_too_large_for_the_memory_is_not_read(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_MACHINE", "peak=1e11,available=100000")
    with pytest.raises(UserError, match=r"recording answers of huggingface needs .* GiB of memory, and 0.00 GiB are available; run"):
        record(open_source(exported))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"items": []}', '{"items": [{"prompt": "a", "tokens": [{"top": []}]}], "tolerance": 1, "name": "x"}']
)
def test_files_without_answers_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(check.Refused, match="has no recorded answers"):
        check.read_expected(tmp_path / "e.json")
