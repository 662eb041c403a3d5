"""A run in which every secret stands in every place where a run could have it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmworks.io.jsonl import line
from written_run import write_run

SECRETS: Mapping[str, str] = {
    "document": "Zanzibar quokkas marinate whispering teapots before the equinox",
    "prompt": "Summarize the merger of Brontosaurus Holdings with Figwort Trust",
    "password": "hunter2Xq9vLm",
    "url": "s3://figwort:hunter2Xq9vLm@brontosaurus-data/quokka/part.jsonl?X-Amz-Signature=9f8e7d6c5b4a39281706f5e4d3c2b1a0",
    "api key": "sk-proj-4f9dWa7b6c5eXd3c2b1aYf9e8d7c6b5a",
    "hex key": "4f9d8a7b6c5e4d3c2b1a0f9e8d7c6b5a",
    "user": "marguerite.duval",
    "path": "/home/marguerite.duval/payroll-zanzibar/quokka.jsonl",
    "bucket": "brontosaurus-data",
    "address": "203.0.113.77",
    "address 6": "2001:db8:77::c0de",
    "email": "m.duval@figwort.example",
    "host": "gpu-brontosaurus-07",
    "phone": "+49 151 555 01234",
    "model": "figwort-labs/quokka-7b",
}
TRACES = (
    "zanzibar", "quokka", "marinate", "teapots", "equinox", "brontosaurus", "figwort", "hunter2", "9f8e7d6c", "sk-proj", "4f9d",
    "marguerite", "duval", "payroll", "203.0.113", "2001:db8", "01234", "summarize the", "5e4d3c2b",
)  # fmt: skip
"""Parts of the secrets in lower case, none of which may be in a bundle."""

_EVENTS = (
    "checkpoint_refused", "save_failed", "stopped", "spike", "rollback", "slow_rank", "recipe_changed", "restart", "finding", "unheard_of",
)  # fmt: skip
_FIELDS = ("reason", "path", "cause", "sentence", "message", "hosts", "first", "what", "unheard_of", "data", "name")


def sentences(secret: str) -> list[str]:
    """Lines that contain a secret, in the forms of messages that are kept and in others."""
    return [
        secret, f"Loading {secret}", f"prompt: {secret}", f"{secret} does not exist", f"step 3: {secret}",
        f"Authorization: Bearer {secret}",
        f"/tmp/{secret} is in use by process 12 on {secret}; wait for it, stop it, or choose another run_dir",
        f"rank 3 on {secret} (process 4711) ended without an error message (perhaps out of memory); its last heartbeat was at step 12 "
        f"({secret})",
        f"[Errno 28] No space left on device: '{secret}'", f"[Errno 2] No such file or directory: '/data/{secret}/x.bin'",
        f"KeyError: '{secret}'", f"RuntimeError: {secret}", f"{secret.split()[0]}Error: {secret}", f"No module named '{secret}'",
        f"The client socket has failed to connect to [{secret}]:29500 (errno: 111 - Connection refused).",
        f"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of {secret} of which 1.0 GiB is free. {secret}",
        f"Connection closed by peer [{secret}]:{secret}", f"'{secret}' object has no attribute '{secret}'", f"loss, {secret}, model",
        f"train; {secret}; loss", f"https://{secret}/x", f"s3://{secret}/{secret}", f"{secret}:{secret}", f"10 tokens {secret}",
    ]  # fmt: skip


def traceback_lines(secret: str) -> list[str]:
    """What Python, torchrun and libraries write to the log of a rank."""
    return [
        "Traceback (most recent call last):",
        f'  File "/home/{secret}/reward.py", line 12, in {secret}',
        f'    answer = ask("{secret}")',
        "    ^^^^^^^^^^^^^^^",
        '  File "/usr/lib/python3/somewhere/else.py", line 3, in helper',
        f"    {secret}",
        f"ValueError: {secret}",
        f"acme.{secret}.Error: {secret}",
        f"[rank3]: RuntimeError: [/opt/{secret}/pair.cc:534] Connection closed by peer [{secret}]:4711",
        f"W1126 21:14:57.123000 4711 /home/{secret}/torch/elastic.py:12] [{secret}] Sending process 12 closing signal {secret}",
        f"2026-11-26 21:14:57 {secret}",
        f"/srv/{secret}/hooks.py:3: UserWarning: {secret}",
        f"INFO:{secret}:{secret}",
        *(f"{prefix}{text}" for prefix in ("", "[rank1]: ", "ValueError: ") for text in sentences(secret)),
    ]


def write_planted(folder: Path) -> Path:
    """The run."""
    every = list(SECRETS.values())
    texts = [text for secret in every for text in sentences(secret)]
    events = [{"event": event, "step": 3, **dict.fromkeys(_FIELDS, text)} for event in _EVENTS for text in (*every, *texts[::37])]
    events += [{"event": "restart", "hosts": every, "ranks": [1], "reason": text, secret: 1} for secret in every for text in texts[::61]]
    events += [{"event": secret, "step": 1} for secret in every]
    metrics = {"train/loss": [5.0 - 0.01 * i for i in range(50)]} | {f"validation/{secret}/loss": [2.0] * 50 for secret in every}
    write_run(folder, metrics, events)
    tree: dict[str, Any] = json.loads((folder / "resolved.json").read_text())
    _plant(tree, every)
    (folder / "resolved.json").write_text(json.dumps(tree))
    (folder / "origins.json").write_text(json.dumps({secret: f"override --set x={secret}" for secret in every}))
    (folder / "recipe.yaml").write_text("\n".join(f"# {one}" for one in every))
    with open(folder / "metrics.jsonl", "ab") as file:
        for secret in every:
            file.write(line({"step": 60, "time": 1e9, secret: 1.0, "train/loss": secret, f"train/source/{secret}/loss": 1.0}))
    for stage in ("tune", "dpo"):
        (folder / stage / "data").mkdir(parents=True)
        (folder / stage / "metrics.jsonl").write_bytes(line({"step": 1, "time": 1e9, f"train/{every[0]}": 1.0}))
        (folder / stage / "data" / "manifest.json").write_text(json.dumps(dict.fromkeys(every, every)))
        (folder / stage / "samples.jsonl").write_text(json.dumps({"prompt": every[1], "completion": every[0]}))
    for name in ("corpus", "tokenizer", "shards", "evaluate", "export", "oom", "bad_batches"):
        (folder / name).mkdir()
    document = {"sources": [{"name": one, "path": one, one: {one: one}} for one in every], "samples": [{"prompt": one} for one in texts]}
    for name in ("corpus/report.json", "corpus/manifest.json", "corpus/stage.json", "tokenizer/report.json", "shards/manifest.json",
                 "evaluate/results.json", "export/parity.json", "oom/rank-0.json", "lock"):  # fmt: skip
        (folder / name).write_text(json.dumps(document))
    check = {"number": 1, "result": "fail"}
    kept = [check | dict.fromkeys(("name", "title", "text", "advice"), secret) | {"figures": {secret: 1.0}} for secret in every]
    (folder / "preflight.json").write_text(json.dumps({"time": 1e9, "checks": kept}))
    number = {"code": "noisy-source", "value": 2.0, "high": 1.0}
    probed = [number | dict.fromkeys(("name", "source", "unit", "where"), one) for one in texts]
    probes = {"step": 40, "time": 2e9, "checkpoint": every[0], "lacking": dict(zip(every, every, strict=True)), "probed": probed}
    for place in (folder, folder / "tune"):
        (place / "probes.json").write_text(json.dumps(probes))
    (folder / "lock").write_text(json.dumps({"pid": 3, "host": SECRETS["host"]}))
    for name in ("corpus/rejected.jsonl", "bad_batches/step-1.json", "url_credentials.json", "sources.json", "samples.jsonl", "core"):
        (folder / name).write_text(json.dumps(document))
    for secret in every:
        place = folder / "checkpoints" / secret.replace("/", "_")[:100]
        place.mkdir(parents=True)
        entry = {"bytes": 1, "blake3": secret}
        (place / "manifest.json").write_text(json.dumps({"files": {secret: entry, "meta.json": entry}, "blake3": secret}))
        (place / "meta.json").write_text(json.dumps({"format": 1, "meta": {secret: secret, "phase": secret}}))
        (folder / "corpus" / f"{secret.replace('/', '_')[:100]}.parquet").write_bytes(b"x")
    _write_launch(folder / "launch", every)
    return folder


def _write_launch(launch: Path, every: list[str]) -> None:
    for name in ("logs", "heartbeats", "flight_recorder", "last_failure"):
        (launch / name).mkdir(parents=True)
    (launch / "outcome.json").write_text(json.dumps({"code": 1, "rank": 1, "message": "; ".join(every)}))
    (launch / "hosts.json").write_text(json.dumps({"hosts": [{"name": one, "slots": 1, "excluded": one} for one in every]}))
    (launch / f"{SECRETS['host']}.sh").write_text(f"export API_KEY={SECRETS['api key']}")
    for number, secret in enumerate(every):
        beat = {"rank": number, "host": secret, "machine": secret, "pid": 3, "step": 2, "doing": secret, "reason": secret,
                "state": "running",
                "entered": {secret: {"number": 1, "name": secret, "time": 1.0}}}  # fmt: skip
        (launch / "heartbeats" / f"{number}.json").write_text(json.dumps(beat) + "\n")
        (launch / "logs" / f"rank-{number}.log").write_text("\n".join(traceback_lines(secret)), encoding="utf-8")
        (launch / "logs" / f"{secret.replace('/', '_')[:60]}.log").write_text(f"{secret}\n")
        record = {"pg_config": {"0": {"name": secret, "desc": secret, "ranks": "[0, 1]"}}, "entries": [
            {"process_group": ("0", secret), "collective_seq_id": 7, "profiling_name": f"nccl:{secret}", "time_created_ns": 1,
             "frames": [{"name": secret, "filename": f"/home/{secret}/x.py", "line": 3}], "state": secret}]}  # fmt: skip
        for folder in ("flight_recorder", "last_failure"):
            (launch / folder / f"rank_{number}").write_bytes(pickle.dumps(record))


def _plant(tree: Any, every: list[str]) -> None:
    """Secrets in place of and behind every string of the recipe, and as keys of every map of it."""
    number = 0

    def walk(value: Any) -> Any:
        nonlocal number
        if isinstance(value, dict):
            number += 1
            return {key: walk(item) for key, item in value.items()} | {every[number % len(every)]: every[(number + 1) % len(every)]}
        if isinstance(value, list):
            return [walk(item) for item in value] + [every[number % len(every)]]
        return value

    for key in list(tree):
        tree[key] = walk(tree[key])
    tree["name"] = SECRETS["user"]
    tree["run_dir"] = SECRETS["path"]
    tree["launch"]["environment"] = {"API_KEY": SECRETS["api key"], "NCCL_SOCKET_IFNAME": SECRETS["host"]}
    tree["corpus"]["sources"] = [{"name": one, "domain": one, "path": one, "license": one, "include": one} for one in every]
    tree["train"]["phases"] = [{"name": one, "mixture": {one: 1.0}} for one in every]
    tree["train"]["sample_prompts"] = every
