"""The small files of a run beside the copies of its checkpoints; a copy may come from a stranger."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lmworks.checkpoint.run_bundle import pack, run_files_of, unpack
from lmworks.errors import UserError


def bundle(path: Path, *entries: tuple[str, bytes, int | None]) -> Path:
    with gzip.open(path, "wb") as packed:
        for name, content, size in entries:
            packed.write(json.dumps({"name": name, "bytes": len(content) if size is None else size}).encode() + b"\n" + content)
    return path


def test_what_a_run_keeps_comes_back_and_nothing_else_is_packed(tmp_path: Path) -> None:
    run, wanted = tmp_path / "run", {}
    for name in ("ledger.jsonl", "resolved.json", "recipe.yaml", "tokenizer/tokenizer.json", "tokenizer/chat_template.jinja",
                 "tokenizer/additional_chat_templates/tool_use.jinja",
                 "tune/metrics.jsonl", "tune/searched.npy", "tune/stage.json", "wandb_id",
                 "url_credentials.json", "lock", "report.html", "own.py",
                 ".hidden.json", "evaluate/results.json"):  # fmt: skip
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(name.encode() * 1000)
        wanted[name] = name.encode() * 1000
    left_out = {"url_credentials.json", "lock", "report.html", "own.py", ".hidden.json", "evaluate/results.json"}
    with pack(run_files_of(run, run / "tune" / "checkpoints")) as packed:
        unpack(packed, tmp_path / "back")
    found = {str(path.relative_to(tmp_path / "back")): path.read_bytes() for path in (tmp_path / "back").rglob("*") if path.is_file()}
    assert found == {name: content for name, content in wanted.items() if name not in left_out}
    assert {*run_files_of(run, run / "checkpoints")} == {name for name in found if not name.startswith("tune/")}


@pytest.mark.parametrize("name", [
    "url_credentials.json", "tune/url_credentials.json", "own.py", "sitecustomize.py", "conftest.py", "lock", "code/x.json", "../x.json",
    "/etc/x.json", "tokenizer/../x.json", "tokenizer//x.json", ".x.json", "a\nb.json", "tune/data/x.json", "report.html", "x.so", "",
])  # fmt: skip
def test_what_no_run_has_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"run\.gz of the copy is damaged \(a name or size in it is not one of a run\)"):
        unpack(bundle(tmp_path / "run.gz", ("ledger.jsonl", b"{}\n", None), (name, b"{}", None)), tmp_path / "to" / "here")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] in (["run.gz", "ledger.jsonl"], ["ledger.jsonl", "run.gz"])


def test_a_bundle_that_expands_too_far_is_refused_before_it_is_written(tmp_path: Path) -> None:
    """300 KB that become 300 MB, in one file or in several; a log that packs a hundred times smaller is none."""
    zeros = bytes(100_000_000)
    whole = bundle(tmp_path / "run.gz", ("ledger.jsonl", zeros, None), ("metrics.jsonl", zeros, None), ("samples.jsonl", zeros, None))
    assert whole.stat().st_size < 1_000_000
    with pytest.raises(UserError, match="its files have more than 100 times its size"):
        unpack(whole, tmp_path / "to")
    assert sum(path.stat().st_size for path in (tmp_path / "to").rglob("*") if path.is_file()) == 0
    unpack(bundle(tmp_path / "fair.gz", ("ledger.jsonl", zeros[:60_000_000], None)), tmp_path / "fair")
