"""`start_from` from the command line: pretraining goes on from a foreign model, and from another run of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command import Done, Lmworks

from lmworks.checkpoint import listing
from lmworks.evaluate.bits_per_byte import OVERALL
from lmworks.io.files import read_json, sha256_file
from lmworks.metrics.log import read
from lmworks.recipe.load import load_resolved
from lmworks.shards.batch import Batch
from lmworks.shards.batches import Batches
from lmworks.watch.ledger import read_ledger
from lmworks.weights.run_models import load_model
from tiny_run import Tiny

_PHASE = {
    "name": "more", "tokens": "512 tokens", "mixture": {"code": 0.5, "docs": 0.5}, "sequence_length": "32 tokens",
    "global_batch_tokens": "128 tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def foreign(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers, with the tokenizer of the tiny run beside it."""
    import transformers

    folder = tmp_path_factory.mktemp("foreign")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=520, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.2, rms_norm_eps=1e-6,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy2(tiny.run_dir / "tokenizer" / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def recipe(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe without a model and a tokenizer, in one short phase."""
    tree = yaml.safe_load(tiny.recipe.read_text())
    for key in ("model", "tokenizer", "tune"):
        del tree[key]
    tree["train"] |= {"phases": [_PHASE], "save_every": "2 steps"}
    path = tmp_path_factory.mktemp("recipe") / "more.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def _first_batch(run_dir: Path) -> Batch:
    return Batches(load_resolved(run_dir / "resolved.json"), run_dir / "shards").batch(0, 0, 4)


def _loss_of(logits_of: Any, batch: Batch) -> float:
    """Mean cross-entropy, each document by itself."""
    tokens, labels = torch.from_numpy(batch.tokens).long().flatten(), torch.from_numpy(batch.labels).long().flatten()
    total = 0.0
    for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        if (labels[begin:end] != -100).any():
            with torch.no_grad():
                logits = logits_of(tokens[None, begin:end])[0]
            total += float(torch.nn.functional.cross_entropy(logits.float(), labels[begin:end], reduction="sum", ignore_index=-100))
    return total / int((labels != -100).sum())


def _require_compared_with_start(run_dir: Path, done: Done) -> None:
    """The weights of `start_from` were measured on the held-out text, and the differences are in the results, on the page and printed."""
    results = read_json(run_dir / "evaluate" / "results.json")
    assert results["models"].keys() == {"base"} and "forgetting" not in results, "there is one model of the run"
    found = results["forgetting_since_start"]
    assert (found["model"], found["since"]) == ("base", "start") and found["measures"]
    for name, row in found["measures"].items():
        domain = {"all domains": OVERALL}.get(name.removeprefix("bits per byte, "), name.removeprefix("bits per byte, "))
        values = [of["bits_per_byte"][domain]["bits_per_byte"] for of in (results["start"], results["models"]["base"])]
        assert [row["a"], row["b"]] == pytest.approx(values), name
        assert row["difference"] == pytest.approx(values[1] - values[0]) and row["interval"][0] <= row["difference"] <= row["interval"][1]
        assert row["difference"] < 0, "it has learned that text"
    said = "Nothing is shown to be forgotten since the weights of start_from: "
    assert said in " ".join(done.out.split()) and said in (run_dir / "report.html").read_text()


def test_a_run_begins_with_a_foreign_model_and_another_with_that_run(
    lmworks: Lmworks, foreign: Path, recipe: Path, tmp_path: Path
) -> None:
    import transformers

    run_dir = tmp_path / "run"
    options = ("--set", f"start_from={foreign}", "--set", f"run_dir={run_dir}", "--set", "export.huggingface=true")
    done = lmworks("run", recipe, *options)
    assert done.code == 0, done.err
    batch = _first_batch(run_dir)
    peer = transformers.AutoModelForCausalLM.from_pretrained(foreign, dtype=torch.float32)
    expected = _loss_of(lambda tokens: peer(tokens).logits, batch)
    lines = [line for line in read(run_dir) if "train/loss" in line]
    assert lines[0]["train/loss"] == pytest.approx(expected, rel=1e-5), "the first step, before its update: fp32 sums in another order"
    _require_compared_with_start(run_dir, done)
    assert expected > 6.5, "an untrained model of ours would be near log(520) = 6.25, so that this tells them apart"

    resolved = json.loads((run_dir / "resolved.json").read_text())
    assert (resolved["model"]["num_hidden_layers"], resolved["model"]["vocab_size"], resolved["model"]["rms_norm_eps"]) == (2, 520, 1e-6)
    start = next(line for line in read_ledger(run_dir / "ledger.jsonl") if line["event"] == "start")
    newest = listing.directories(run_dir / "checkpoints")[-1]
    assert start["start_from"]["path"] == str(foreign)
    assert start["start_from"]["blake3"].keys() == {"config.json", "model.safetensors"}
    assert listing.read_meta(newest)["meta"]["start_from"] == start["start_from"]
    assert f"from the weights of `{foreign}`" in (run_dir / "export" / "huggingface" / "README.md").read_text()
    reread = transformers.AutoTokenizer.from_pretrained(run_dir / "export" / "huggingface")
    text = "def f(x): return 1"
    assert reread.encode(text) == transformers.PreTrainedTokenizerFast(tokenizer_file=str(foreign / "tokenizer.json")).encode(text)

    shutil.rmtree(newest)  # as if killed after the save of step 2: the origin is remembered, and the source is not read again
    for stage in ("evaluate", "export"):
        shutil.rmtree(run_dir / stage)
    (run_dir / "checkpoints" / "stage.json").write_text(
        json.dumps(read_json(run_dir / "checkpoints" / "stage.json") | {"done": False})
    )
    weights = (foreign / "model.safetensors").rename(tmp_path / "elsewhere")
    done = lmworks("run", recipe, *options)
    assert done.code == 0
    unknown = "What was forgotten since the weights of start_from is not known: "
    assert unknown in " ".join(done.out.split()) and unknown in (run_dir / "report.html").read_text()
    weights.rename(foreign / "model.safetensors")
    assert listing.read_meta(newest)["meta"]["start_from"] == start["start_from"]

    other = tmp_path / "other"
    done = lmworks(
        "run", recipe, "--set", f"start_from={run_dir}", "--set", f"run_dir={other}", "--set", "train.phases.0.name=again"
    )
    assert done.code == 0, done.err
    _require_compared_with_start(other, done)
    base = load_model(run_dir, "base")
    before, after = (read_json(place / "evaluate" / "results.json") for place in (run_dir, other))
    assert after["start"]["bits_per_byte"] == before["models"]["base"]["bits_per_byte"], "the same weights, text and context"
    expected = _loss_of(base, _first_batch(other))
    first = next(line["train/loss"] for line in read(other) if "train/loss" in line)
    assert first == pytest.approx(expected, rel=1e-5)
    assert sha256_file(other / "tokenizer" / "tokenizer.json") == sha256_file(run_dir / "tokenizer" / "tokenizer.json")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.hidden_size=64", "model.hidden_size is 64 in the recipe and 32 in FOREIGN, the weights of which are used"),
        ("model.use_qk_norm=true", "model.use_qk_norm is true in the recipe and false in FOREIGN"),
        ("tokenizer.path=elsewhere/tokenizer.json", "start_from uses the tokenizer of its weights; remove tokenizer.path"),
        ("size=1M", "size cannot be combined with start_from"),
        ("train.init_from=base", "train has no key 'init_from' any more; set start_from at the top of the recipe instead"),
        ("start_from=nowhere", "nowhere is no Hugging Face folder"),
    ],
)
def test_what_contradicts_the_weights_is_refused(lmworks: Lmworks, foreign: Path, recipe: Path, override: str, reason: str) -> None:
    done = lmworks("show", recipe, "--set", f"start_from={foreign}", "--set", override)
    assert reason.replace("FOREIGN", str(foreign)) in done.error
