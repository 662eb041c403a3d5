"""docs/continue-pretraining.md as it stands, with a tiny base model and few tokens."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from command import Lmworks

from base_models import write_model, write_tokenizer
from lmworks.io.files import read_json
from lmworks.metrics.log import read

PAGE = Path(__file__).parents[2] / "docs" / "continue-pretraining.md"


def test_the_guide(lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pydoc_data.topics import topics

    monkeypatch.chdir(tmp_path)
    write_tokenizer(Path("models/base"), "llama")
    write_model(Path("models/base"), 448)
    texts = [topics[name][:1500] for name in sorted(topics)]
    for name in ("notes", "manuals"):
        Path("data", name).mkdir(parents=True)
    Path("data/notes/all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:40]), encoding="utf-8")
    for number, text in enumerate(texts[40:80]):
        Path(f"data/manuals/{number}.txt").write_text(text, encoding="utf-8")
    tree = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0])
    tree["train"] |= {"precision": "fp32", "compile": False, "validate_every": "100%", "validation_bytes_per_domain": "2000 bytes"}
    tree["train"]["phases"][0] |= {"tokens": "4Ki", "sequence_length": "64 tokens", "global_batch_tokens": "512 tokens"}
    tree["optimizer"] |= {"learning_rate": 0.005, "adam_learning_rate": 0.005}
    tree |= {"threads": 1, "evaluate": {"references": False}}
    tree["corpus"] |= {"validation_fraction": 0.3, "dedup": {"minhash": None}}
    tree["export"]["dtype"] = "fp32"
    Path("domain.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) for line in block.splitlines()]
    assert [shlex.split(line)[1] for line in commands] == ["plan", "run", "run", "compare"]
    for line in commands:
        done = lmworks(*shlex.split(line)[1:])
        assert done.code == 0, (line, done.err)
    assert "docs" in done.out and "prose" in done.out, "bits per byte of both domains are compared"
    results = [read_json(Path("runs", name, "evaluate", "results.json")) for name in ("start", "domain")]
    start, domain = (one["models"]["base"]["bits_per_byte"] for one in results)
    assert domain["docs"]["bits_per_byte"] < start["docs"]["bits_per_byte"] - 0.1
    assert not list(Path("runs/start").glob("metrics.jsonl")) and len([1 for one in read(Path("runs/domain")) if "train/loss" in one]) == 8
