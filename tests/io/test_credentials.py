"""Credentials in URLs are in nothing that a run writes or says but a file for their owner, and every later command still has them."""

from __future__ import annotations

import base64
import json
import re
import stat
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from lmworks.cli.tables import recipe_as_json
from lmworks.corpus.engine.job import Job
from lmworks.errors import UserError
from lmworks.io import urls
from lmworks.io.masking import mask
from lmworks.recipe.load import load_recipe, load_resolved
from lmworks.recipe.schema.artifacts import Checkpoints
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.steps import Rewrite
from lmworks.run.runner import run_stages
from lmworks.watch.ledger import Ledger

PASSWORD, TOKEN = "s3cr3t-pw", "t0ps3cret"
NAMED = "name: a\nmodel: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2}\n"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "_known", {})


@pytest.mark.parametrize(("text", "masked"), [
    ("https://alice:pw@host:80/a@b?x=1", "https://***@host:80/a@b?x=1"),
    ("https://ghp_0123@github.com/a", "https://***@github.com/a"),
    ("simplecache::https://a:b@h/x", "simplecache::https://***@h/x"),
    ("https://a:p@ss@h/x", "https://***@h/x"),
    ("https://h/x?X-Amz-Signature=ab&part=2&token=cd", "https://h/x?X-Amz-Signature=***&part=2&token=***"),
    ("https://h/x?se=2026&sig=a%2Fb", "https://h/x?se=2026&sig=***"),
    ("https://h/x?k=0123456789abcdef01234567", "https://h/x?k=***"),
    ("abfs://container@account/x", "abfs://container@account/x"),
    ("hf://datasets/a/b@main/c.parquet?page=2", "hf://datasets/a/b@main/c.parquet?page=2"),
    ("mail a@b.c about http://h/x", "mail a@b.c about http://h/x"),
    ('{"to": "s3://k:s@b/x", "from": "a@b"}', '{"to": "s3://***@b/x", "from": "a@b"}'),
])  # fmt: skip
def test_what_is_masked(text: str, masked: str) -> None:
    assert mask(text) == masked == mask(masked)
    assert urls.hide([text]) == [masked]
    if not text.startswith("{"):
        assert urls.reveal([masked]) == [text]


def test_one_secret_serves_all_urls_of_its_host() -> None:
    urls.hide("https://a:b@h/data/*.jsonl")
    assert urls.reveal("https://***@h/data/1.jsonl") == "https://a:b@h/data/1.jsonl"
    for unknown in ("https://***@other/x", "http://***@h/x", "https://h/x?sig=***"):
        with pytest.raises(UserError, match="are not known here: write them into the recipe"):
            urls.reveal(unknown)


@pytest.mark.parametrize("make", [
    lambda: Source(name="a", kind="jsonl", path=f"https://u:{PASSWORD}@h/a.jsonl", license="x"),
    lambda: Rewrite(step="rewrite", endpoint=f"https://u:{PASSWORD}@h/v1", model="m", prompt="{text}", sources=("a",)),
    lambda: Checkpoints(copy_to=f"s3://u:{PASSWORD}@bucket/x"),
    lambda: Recipe(name="a", corpus={"executor": {"kind": "slurm", "setup": [f"export https_proxy=http://u:{PASSWORD}@proxy"]}}),
], ids=["source", "endpoint", "copy", "setup"])  # fmt: skip
def test_no_node_of_a_recipe_has_them(make: Callable[[], Any]) -> None:
    node = make()
    assert PASSWORD not in repr(node) + node.model_dump_json()
    assert PASSWORD in json.dumps(urls.reveal(node.model_dump(mode="json")))


def test_no_error_and_no_ledger_line_has_them(tmp_path: Path) -> None:
    url = f"https://u:{PASSWORD}@h/x?token={TOKEN}"
    assert str(UserError(f"cannot read {url} today")) == "cannot read https://***@h/x?token=*** today"
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write("checkpoint_copy_failed", to=url, reasons=[f"no answer from {url}"])
    assert not re.search(f"{PASSWORD}|{TOKEN}", (tmp_path / "ledger.jsonl").read_text())


RECIPE = """
name: far  # once from http://alice:{password}@127.0.0.1:{port}/old
corpus:
  processes: 1
  dedup: {{exact: false, minhash: null}}
  decontaminate: null
  max_validation_bytes: 100B
  sources:
    - {{name: user, kind: jsonl, path: http://alice:{password}@127.0.0.1:{port}/user.jsonl, license: none, rules: none}}
    - {{name: query, kind: jsonl, path: "http://127.0.0.1:{port}/query.jsonl?token={token}", license: none, rules: none}}
model: {{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2}}
train: {{phases: [{{name: one, tokens: 1M, mixture: {{user: 0.5, query: 0.5}}, sequence_length: 32 tokens, global_batch_tokens: 256
tokens}}]}}
checkpoints: {{copy_to: "memory://bob:{password}@bucket"}}
"""


@pytest.fixture
def port() -> Iterator[int]:
    """Two sources: one for a user with a password, one for a token. One line of each is no JSON."""
    text = "The quick brown fox number {} jumps over the lazy dog, and it does so on every day of the week because it likes to. "
    lines = [json.dumps({"text": text.format(number) * 3}) for number in range(40)]
    body = "\n".join([*lines[:20], "no JSON", *lines[20:]]).encode() + b"\n"
    basic = f"Basic {base64.b64encode(f'alice:{PASSWORD}'.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            user = self.path == "/user.jsonl" and self.headers.get("Authorization") == basic
            query = self.path == f"/query.jsonl?token={TOKEN}"
            self.send_response(200 if user or query else 403)
            self.send_header("Content-Length", str(len(body) if user or query else 0))
            self.end_headers()
            if (user or query) and self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def telling(folder: Path) -> list[str]:
    """Files in which one of the secrets stands, packed or not."""
    found = []
    for path in (path for path in folder.rglob("*") if path.is_file()):
        text = path.read_bytes() + (str(pq.read_table(path).to_pydict()).encode() if path.suffix == ".parquet" else b"")
        if PASSWORD.encode() in text or TOKEN.encode() in text:
            found.append(str(path.relative_to(folder)))
    return sorted(found)


def test_a_run_keeps_them_in_files_of_its_owner_alone(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    recipe, run_dir = tmp_path / "far.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.format(password=PASSWORD, token=TOKEN, port=port))
    resolved = load_recipe(recipe, [f"run_dir={run_dir}", f"checkpoints.copy_to=memory://bob:{PASSWORD}@bucket/2"])
    assert not re.search(f"{PASSWORD}|{TOKEN}", repr(resolved) + json.dumps(recipe_as_json(resolved)))

    def corpus() -> Any:
        told: list[Any] = []
        run_stages(resolved, last="corpus", on_event=told.append, resume_command="")
        assert [one.kind for one in told] == ["begin", "end"]
        return json.loads((run_dir / "corpus" / "report.json").read_text())

    report = corpus()
    origins = {str(one) for path in run_dir.rglob("train/**/*.parquet") for one in pq.read_table(path, columns=["origin"])["origin"]}
    assert any(one.startswith(f"http://***@127.0.0.1:{port}/user.jsonl:") for one in origins), report
    assert any(one.startswith(f"http://127.0.0.1:{port}/query.jsonl?token=***:") for one in origins)
    kept = telling(run_dir)
    assert kept == ["corpus/staging/url_credentials.json", "url_credentials.json"]
    assert all(stat.S_IMODE((run_dir / name).stat().st_mode) == 0o600 for name in kept)
    assert "# once from http://***@127.0.0.1" in (run_dir / "recipe.yaml").read_text()

    # What is done is seen as done by another process, from the run's own copy of the recipe as well, and done again it finds its way.
    for source in (recipe, run_dir / "recipe.yaml", run_dir / "resolved.json"):
        monkeypatch.setattr(urls, "_known", {})
        resolved = load_recipe(source, [f"run_dir={run_dir}", "checkpoints.copy_to=memory://***@bucket/2"])
        told: list[Any] = []
        run_stages(resolved, last="corpus", on_event=told.append, resume_command="")
        assert [one.kind for one in told] == ["skip"]
    monkeypatch.setattr(urls, "_known", {})
    assert urls.reveal(load_resolved(run_dir / "resolved.json").checkpoints.copy_to) == f"memory://bob:{PASSWORD}@bucket/2"
    monkeypatch.setattr(urls, "_known", {})
    job = Job.load(run_dir / "corpus")
    assert urls.reveal(job.parts["query"][0].files[0].path) == f"http://127.0.0.1:{port}/query.jsonl?token={TOKEN}"


@pytest.mark.parametrize("path", ["user.jsonl", "none.jsonl"])
def test_a_wrong_password_is_one_line_without_it(tmp_path: Path, port: int, path: str) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    recipe = tmp_path / "far.yaml"
    recipe.write_text(RECIPE.format(password="wr0ng-pw", token=TOKEN, port=port).replace("/user.jsonl", f"/{path}"))
    resolved = load_recipe(recipe, [f"run_dir={tmp_path / 'run'}"])
    said = r"source user: path: http://\*\*\*@127\S* denies access .*; check the key or password"
    with pytest.raises(UserError, match=said) as caught:
        run_stages(resolved, last="corpus", on_event=lambda _: None, resume_command="")
    assert not re.search("wr0ng-pw|Basic|\n", str(caught.value))
    assert "wr0ng-pw" not in "".join(traceback.format_exception(caught.value))


def test_a_text_that_cannot_be_masked_as_it_stands_is_written_anew(tmp_path: Path) -> None:
    """YAML has more ways to write an @ than one."""
    recipe = tmp_path / "a.yaml"
    recipe.write_text(NAMED + 'checkpoints: {copy_to: "s3://u:s3cr3t-pw\\x40bucket"}\n')
    load_recipe(recipe).save(tmp_path / "run")
    assert telling(tmp_path / "run") == ["url_credentials.json"]
    assert urls.reveal(load_recipe(tmp_path / "run" / "recipe.yaml").recipe.checkpoints.copy_to) == "s3://u:s3cr3t-pw@bucket"


def test_one_host_has_one_user(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    source = "{{name: {0}, kind: jsonl, path: https://u:{0}@h/{0}.jsonl, license: none}}"
    recipe.write_text(f"{NAMED}corpus: {{sources: [{source.format('one')}, {source.format('two')}]}}\n")
    with pytest.raises(UserError, match=re.escape("https://***@h is written with two different credentials")):
        load_recipe(recipe)


def test_changed_credentials_are_no_other_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    fingerprints = set()
    for password in ("one", "two"):
        recipe.write_text(f"{NAMED}checkpoints: {{copy_to: s3://u:{password}@bucket}}\n")
        resolved = load_recipe(recipe)
        resolved.save(tmp_path / "run")
        fingerprints.add(resolved.fingerprint)
        urls.load(tmp_path / "run")
        assert urls.reveal(resolved.recipe.checkpoints.copy_to) == f"s3://u:{password}@bucket"
    assert len(fingerprints) == 1
