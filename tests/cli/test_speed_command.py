"""`lmworks speed` from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import Lmworks

from saved_run import save_run
from tiny_run import Tiny


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("speed") / "run"
    save_run(tiny, to)
    return to


def test_speed_by_batch_and_length(lmworks: Lmworks, run: Path) -> None:
    options = ("--batch", "1,3", "--prompt", "8,16", "--new-tokens", 3, "--seconds", 3, "--device", "cpu")
    done = lmworks("speed", f"{run}@base", *options, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [(row["batch"], row["prompt"]) for row in found["rows"]] == [(1, 8), (1, 16), (3, 8), (3, 16)]
    assert found["model"] == "run@base"
    assert found["dtype"] == "float32"
    assert found["device"].startswith("cpu")
    for row in found["rows"]:
        for name in ("prefill", "decode", "first_token"):
            assert 0 < row[name]["least"] <= row[name]["median"] <= row[name]["greatest"]
        assert row["repeats"] >= 1
    table = lmworks("speed", run, *options).out
    assert "run@tuned" in table
    assert "time to first token" in table
    assert "activations in float32" in table


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--batch", "one"), "--batch: 'one' is no list of whole numbers"),
        (("--prompt", "0"), "numbers from 1"),
        (("--device", "gpu7"), "--device: 'gpu7' is no device of this machine"),
    ],
)
def test_bad_input_is_one_line(lmworks: Lmworks, run: Path, options: tuple[str, ...], expected: str) -> None:
    assert expected in lmworks("speed", run, *options).error


def test_a_tokenizer_of_another_model_is_one_line(lmworks: Lmworks, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"version"', '"version" ', 1))
    assert "tokenizer" in lmworks("speed", tmp_path / "run").error
    assert "does not exist" in lmworks("speed", tmp_path / "nowhere").error
