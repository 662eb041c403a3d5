"""Tuning a base model of another origin from the command line: no pretraining, its own tokenizer and chat template."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from command import Lmworks
from safetensors.torch import load_file, save_file

from base_models import KINDS, write_model, write_tokenizer
from docs.doc_pages import DOCS, blocks
from lmworks.checkpoint import listing
from lmworks.evaluate.answers import QUESTIONS
from lmworks.io import jsonl
from lmworks.io.files import read_json
from lmworks.metrics.log import read
from lmworks.pages import overview
from lmworks.pages.read_run import read_run
from lmworks.shards.indexed import IndexedFile
from lmworks.tokenizer import load
from lmworks.train.data.chat import chat_shards
from lmworks.watch.ledger import read_ledger
from lmworks.weights.huggingface import read_model
from lmworks.weights.open import open_model
from lmworks.weights.run_models import load_model
from tiny_run import checkpoint

ROWS, ENTRIES = 448, 372  # of the embedding; of the tokenizer of kind qwen
TRAIN = {"precision": "fp32", "compile": False, "micro_batch_sequences": 2, "validate_every": "100%",
         "validation_bytes_per_domain": "1000 bytes"}  # fmt: skip


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]}
        for a in range(12) for b in range(12)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("chats") / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def write_recipe(folder: Path, base: Path, chats: Path, **changes: Any) -> Path:
    tree = {
        "name": "tuned", "threads": 1, "start_from": str(base), "run_dir": str(folder / "run"),
        "optimizer": {"learning_rate": 0.003, "adam_learning_rate": 0.003},
        "tune": {
            "data": [{"name": "sums", "kind": "files", "path": str(chats), "max_rows": 50}], "tokens": "2Ki",
            "sequence_length": "64 tokens",
            "global_batch_tokens": "256 tokens",
        },
        "train": TRAIN,
        "evaluate": {"benchmarks": [], "questions": ["What is 1 + 2?"]},
        "export": {"huggingface": True, "gguf": False, "dtype": "fp32"},
    } | changes  # fmt: skip
    path = folder / "tune.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def _base(folder: Path, kind: str) -> Path:
    write_tokenizer(folder, kind)
    write_model(folder, ROWS, rope_theta=50000.0)
    return folder


@pytest.mark.parametrize("kind", ["qwen", *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name != "qwen")])
def test_a_base_model_is_tuned_evaluated_exported_and_served(lmworks: Lmworks, kind: str, chats: Path, tmp_path: Path) -> None:
    import transformers

    from lmworks.serve.models import load_engine

    base = _base(tmp_path / "base", kind)
    recipe = write_recipe(tmp_path, base, chats)
    done = lmworks("run", recipe)
    assert done.code == 0, done.err
    run_dir = tmp_path / "run"
    assert not (run_dir / "corpus").exists() and not (run_dir / "shards").exists()
    assert [path.name for path in listing.directories(run_dir / "checkpoints")] == ["step-00000000"]
    given, ours = read_model(base).state_dict(), load_model(run_dir, "base").state_dict()
    assert all(torch.equal(given[name], ours[name]) for name in given)
    tuned = load_model(run_dir, "tuned").state_dict()
    assert not torch.equal(tuned["embedding.weight"], given["embedding.weight"])
    event = next(line for line in read_ledger(run_dir / "ledger.jsonl") if line["event"] == "start_from")
    assert event["path"] == str(base) and set(event["blake3"]) == {"config.json", "model.safetensors"}
    first = event["first_loss"]
    assert first["difference"] < 1e-5 and first["transformers"] == pytest.approx(first["loss"], rel=1e-5), "fp32 sums in another order"
    assert f"first loss {first['loss']:.4f} on" in done.err and "random ones, in transformers" in " ".join(done.err.split())
    assert f"first loss {first['loss']:.4f}, {first['transformers']:.4f} in transformers" in (run_dir / "report.html").read_text()
    losses = [line["train/loss"] for line in read(run_dir / "tune") if "train/loss" in line]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.3, losses
    page = (run_dir / "report.html").read_text()
    assert "Nothing has been measured yet" not in page and "Base model" in page and "Pretraining" not in page
    run = read_run(run_dir)
    assert run.state == "finished" and ("Tokens", "2.05k", "in 8 steps") in overview.tiles(run, None)

    exported = run_dir / "export" / "huggingface"
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (exported / name).read_bytes() == (base / name).read_bytes()
    stops = set(read_json(exported / "generation_config.json")["eos_token_id"])
    assert stops >= set(read_json(base / "generation_config.json")["eos_token_id"])
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    peer = transformers.AutoTokenizer.from_pretrained(exported)
    engine = load_engine(run_dir)
    prompt = engine.vocabulary.chat_prompt(question)
    assert prompt == list(peer.apply_chat_template(question, add_generation_prompt=True, return_dict=False))
    assert set(engine.vocabulary.stop_ids) == stops
    results = read_json(run_dir / "evaluate" / "results.json")
    assert results["models"].keys() == {"base", "tuned"}
    costs = [results["models"][name]["bits_per_byte"]["answers: sums"] for name in ("base", "tuned")]
    assert costs[0]["documents"] == costs[1]["documents"] == 1, "2% of 50 conversations are held out"
    assert costs[0]["bits_per_byte"] == pytest.approx(_cost_of_answers(base, run_dir / "tune" / "data"), rel=1e-5)
    assert costs[1]["bits_per_byte"] < costs[0]["bits_per_byte"] - 0.3 and "answers: sums" in done.err + done.out
    before = [results["models"][name]["bits_per_byte"]["answers: as before"] for name in ("base", "tuned")]
    assert before[0]["documents"] == before[1]["documents"] > 16 and before[0]["bits_per_byte"] < before[1]["bits_per_byte"]
    assert "bits per byte, answers: as before" in results["forgetting"]["forgotten"] and "answers: as before" in done.err + done.out
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [list(peer.apply_chat_template(one, add_generation_prompt=True, return_dict=False)) for one in conversations]
    asked = [row["prompt"] for row in jsonl.read(run_dir / "evaluate" / "answers-before.jsonl")]
    assert asked and all(prompt in prompts for prompt in asked)
    assert load_engine(run_dir, base=True).tuned and open_model(f"{run_dir}@base").chat, "it answered in a chat before it was tuned"
    rates = [line["optim/learning_rate"] for line in read(run_dir / "tune") if "optim/learning_rate" in line]
    peak = read_json(run_dir / "resolved.json")["tune"]["learning_rate"]
    assert 0.9 * peak < max(rates) <= peak, "the rate falls from the first step after the warm-up"
    again = lmworks("run", recipe)
    assert again.code == 0 and [path.name for path in listing.directories(run_dir / "checkpoints")] == ["step-00000000"]
    assert len([line for line in read_ledger(run_dir / "ledger.jsonl") if line["event"] == "start_from"]) == 1


def _cost_of_answers(base: Path, data: Path) -> float:
    """Bits per byte of the answers of the held-out conversations, by transformers."""
    import transformers

    file = IndexedFile(chat_shards(data, "validation")[0]["sums"])
    assert file.mask is not None
    theirs, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval(), load(base)
    nats, text = 0.0, b""
    for start, stop in pairwise(file.document_start(np.arange(file.documents + 1))):
        ids, mask = torch.from_numpy(file.read(start, stop).astype(np.int64)), torch.from_numpy(file.mask[start:stop].astype(bool))
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(theirs(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        nats += float(losses[mask[1:]].sum())
        text += b"".join(tokenizer.token_bytes(int(token), skip_special=True) for token in ids[mask])
    return nats / math.log(2) / len(text)


SMALL = ["threads=1", "train.precision=fp32", "train.compile=false", "train.micro_batch_sequences=2", "evaluate.benchmarks=[]",
         "tune.sequence_length=64 tokens", "tune.global_batch_tokens=256 tokens", "tune.data.0.max_rows=40"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", ["tuning.md", "existing-models.md"])
def test_the_recipes_of_the_pages_tune_a_base_model(
    lmworks: Lmworks, chats: Path, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Each whole recipe of the page, and each section in place of that of the recipe before it, on a small model and few tokens."""
    monkeypatch.chdir(tmp_path)
    _base(tmp_path / "models" / "base", "qwen")
    for path in ("chats.jsonl", "data/chats/sums.jsonl"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(chats.read_bytes())
    recipe: dict[str, Any] = {}
    for number, block in enumerate(block for block in blocks(DOCS / page) if block.language == "yaml"):
        recipe |= yaml.safe_load("\n".join(block.lines))
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        sets = [*SMALL, f"run_dir=runs/{number}", *(["tune.tokens=1Ki"] if "tokens" in recipe["tune"] else [])]
        done = lmworks("run", "mine.yaml", *(word for one in sets for word in ("--set", one)))
        assert done.code == 0, done.err
        run_dir = tmp_path / "runs" / str(number)
        assert read_json(run_dir / "evaluate" / "results.json")["models"].keys() == {"base", "tuned"}
        assert (run_dir / "export" / "huggingface" / "model.safetensors").is_file()
        assert (run_dir / "export" / "peft").is_dir() == ("lora" in recipe["tune"])
    assert recipe, "the page shows a recipe"


@pytest.mark.parametrize("spare", [*(pytest.param(spare, marks=pytest.mark.slow) for spare in (0, 1)), 40])
def test_tokens_are_added_to_a_kept_tokenizer(lmworks: Lmworks, chats: Path, tmp_path: Path, spare: int) -> None:
    """`spare`: rows of the embedding that no token has."""
    import transformers

    words = ["It is", "半導體", "capitalize"]
    base = tmp_path / "base"
    write_tokenizer(base, "qwen")
    config = read_json(base / "tokenizer_config.json")
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {}}))
    first = load(base).vocab_size
    rows = first + spare
    write_model(base, rows)
    recipe = write_recipe(tmp_path, base, chats, tokenizer={"add_tokens": words})
    done = lmworks("run", recipe)
    assert done.code == 0, done.err
    run_dir, ids = tmp_path / "run", list(range(first, first + 3))
    given, ours = read_model(base).state_dict(), load_model(run_dir, "base").state_dict()
    for name in ("embedding.weight", "head.weight"):
        assert len(ours[name]) == max(rows, first + 3)
        torch.testing.assert_close(ours[name][ids], given[name][:first].mean(0).expand(3, -1))
        assert torch.equal(ours[name][:first], given[name][:first]) and torch.equal(ours[name][first + 3 :], given[name][first + 3 :])
    event = next(line for line in read_ledger(run_dir / "ledger.jsonl") if line["event"] == "start_from")
    assert event["first_loss"]["difference"] < 1e-5, "transformers has the same rows"
    tuned = load_model(run_dir, "tuned").state_dict()
    assert not torch.equal(tuned["embedding.weight"][first], ours["embedding.weight"][first]), "the conversations have the first one"
    assert torch.equal(tuned["embedding.weight"][first + 1], ours["embedding.weight"][first + 1])

    exported = run_dir / "export" / "huggingface"
    peer, ours_again = transformers.AutoTokenizer.from_pretrained(exported), load(exported)
    text = "It is capitalize 半導體. It is."
    assert peer.encode(text) == ours_again.encode(text) and set(ids) <= set(peer.encode(text))
    assert peer.decode(peer.encode(text)) == text
    assert read_json(exported / "config.json")["vocab_size"] == max(rows, first + 3)
    assert "with 3 added tokens" in (exported / "README.md").read_text()
    listed = read_json(exported / "tokenizer_config.json")["added_tokens_decoder"]
    assert [listed[str(number)]["content"] for number in ids] == words
    (run_dir / "tokenizer" / "tokenizer.json").unlink()
    assert lmworks("run", recipe).code == 0, "made again, equal"
    again = lmworks("show", recipe, "--set", f"start_from={run_dir}", "--set", "tokenizer.add_tokens=[other]")
    assert "are a checkpoint, to which no tokens are added; export the model" in again.error


def test_rows_are_added_without_tokens(lmworks: Lmworks, chats: Path, tmp_path: Path) -> None:
    base = _base(tmp_path / "base", "qwen")
    done = lmworks("pretrain", write_recipe(tmp_path, base, chats, tokenizer={"vocab_size": ROWS + 6}))
    assert done.code == 0, done.err
    event = next(line for line in read_ledger(tmp_path / "run" / "ledger.jsonl") if line["event"] == "start_from")
    assert event["first_loss"]["difference"] < 1e-5
    given = read_model(base).state_dict()["head.weight"]
    torch.testing.assert_close(load_model(tmp_path / "run", "base").state_dict()["head.weight"][ROWS:], given.mean(0).expand(6, -1))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"add_tokens": ["a"]}, "'a' is a token of BASE/tokenizer.json already"),
        ({"add_tokens": ["<|im_end|>"]}, "'<|im_end|>' is a token of"), ({"add_tokens": ["a b", "a b"]}, "'a b' is there twice"),
        ({"add_tokens": [""]}, "'' is empty"), ({"add_tokens": "word"}, "add_tokens"),
        ({"add_tokens": ["a b"], "vocab_size": ENTRIES}, f"has ids up to {ENTRIES} with tokenizer.add_tokens, but the embedding has"),
        ({"add_tokens": ["a b"], "chat_template": "brief"}, "tokens are added to a tokenizer that is kept"),
        ({"add_tokens": ["a b"]}, "adapters train no rows of tokenizer.add_tokens"),
    ],
)  # fmt: skip
def test_tokens_that_cannot_be_added(lmworks: Lmworks, chats: Path, tmp_path: Path, keys: dict[str, Any], why: str) -> None:
    base = tmp_path / "base"
    write_tokenizer(base, "qwen")
    assert load(base).vocab_size == ENTRIES
    write_model(base, ENTRIES)
    lora = ["--set", "tune.lora={}"] if "adapters" in why else []
    done = lmworks("run", write_recipe(tmp_path, base, chats, tokenizer=keys), *lora)
    assert why.replace("BASE", str(base)) in done.error
    assert not (tmp_path / "run" / "tokenizer").exists()


@pytest.mark.parametrize(
    ("config", "rows", "export", "why"),
    [
        ({"tie_word_embeddings": True}, ROWS, {}, "lm_head.weight differs from model.embed_tokens.weight"),
        ({}, ENTRIES - 2, {}, f"tokenizer.json has ids up to {ENTRIES - 1}, but the embedding has {ENTRIES - 2} rows"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 2.0}, "rope_parameters": None}, ROWS, {}, "scales cos and sin"),
        ({"query_pre_attn_scalar": 8}, ROWS, {}, "query_pre_attn_scalar 8, a key that this class does not have"),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_bias": None, "mlp_bias": None}, ROWS,
            {"gguf": True}, "it has a sliding window, and llama.cpp runs Mistral as llama",
        ),
    ],
    ids=["head", "tokens", "rope", "unknown", "mistral"],
)  # fmt: skip
def test_a_base_that_is_not_what_its_config_says_is_refused_before_the_first_stage(
    lmworks: Lmworks, chats: Path, tmp_path: Path, config: dict[str, Any], rows: int, export: dict[str, Any], why: str
) -> None:
    base = tmp_path / "base"
    write_tokenizer(base, "qwen")
    write_model(base, rows)
    (base / "config.json").write_text(json.dumps(read_json(base / "config.json") | config))
    done = lmworks("run", write_recipe(tmp_path, base, chats, export={"huggingface": True, "gguf": False} | export))
    assert done.code == 2 and why in done.error and (export or str(base) in done.error)
    assert not (tmp_path / "run" / "tokenizer").exists()


def test_another_first_loss_than_that_of_transformers_ends_the_run(
    lmworks: Lmworks, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmworks.weights import huggingface

    load = huggingface.load_weights

    def wrong(directory: Path, state: Any, *arguments: Any, **options: Any) -> None:
        load(directory, state, *arguments, **options)
        state["layers.0.attention.query.weight"].mul_(1.5)

    monkeypatch.setattr(huggingface, "load_weights", wrong)
    recipe = write_recipe(tmp_path, _base(tmp_path / "base", "llama"), chats)
    done = lmworks("run", recipe)
    assert done.code == 2 and "in transformers on the same 128 tokens; the weights are not read as what they are" in done.error
    assert not listing.directories(tmp_path / "run" / "checkpoints")


def test_a_first_loss_that_cannot_be_compared_is_said(
    lmworks: Lmworks, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMWORKS_MACHINE", "peak=1e11,available=1000")
    recipe = write_recipe(tmp_path, _base(tmp_path / "base", "llama"), chats)
    done = lmworks("pretrain", recipe)
    assert done.code == 0 and "not compared with transformers: its fp32 weights need 0.0 GB of memory" in " ".join(done.err.split())
    assert "0.0 GB are free" in _first_loss(tmp_path / "run")["not_compared"]


def _first_loss(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = next(line for line in read_ledger(run_dir / "ledger.jsonl") if line["event"] == "start_from")["first_loss"]
    return found


def test_the_first_loss_of_fp8_weights_is_compared(lmworks: Lmworks, chats: Path, tmp_path: Path) -> None:
    base, side = _base(tmp_path / "base", "llama"), 16
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        stored[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.unflatten(0, (-1, side)).unflatten(2, (-1, side)).abs().amax((1, 3)) / 448
            stored[f"{name}_scale_inv"] = scale
            stored[name] = (tensor / scale.repeat_interleave(side, 0).repeat_interleave(side, 1)).to(torch.float8_e4m3fn)
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [side, side]}
    config = read_json(base / "config.json") | {"dtype": "bfloat16", "quantization_config": fp8}
    (base / "config.json").write_text(json.dumps(config))
    done = lmworks("pretrain", write_recipe(tmp_path, base, chats))
    assert done.code == 0, done.err
    assert _first_loss(tmp_path / "run")["difference"] < 1e-4


def test_other_ids_of_the_class_in_transformers_are_said(lmworks: Lmworks, chats: Path, tmp_path: Path) -> None:
    base = _base(tmp_path / "base", "mistral")
    spec = read_json(base / "tokenizer.json")
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    spec |= {"pre_tokenizer": None, "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, space]}}
    (base / "tokenizer.json").write_text(json.dumps(spec))
    config = read_json(base / "tokenizer_config.json")
    recipe, said = write_recipe(tmp_path, base, chats), {}
    for name in ("LlamaTokenizer", "PreTrainedTokenizerFast"):
        about = {"tokenizer_class": name, "unk_token": "<unk>", "legacy": False}
        (base / "tokenizer_config.json").write_text(json.dumps(config | about))
        done = lmworks("pretrain", recipe, "--set", f"run_dir={tmp_path / name}")
        assert done.code == 0, done.err
        said[name] = " ".join(done.err.split())
    assert "encodes ' two spaces' as [" in said["LlamaTokenizer"]
    assert "two spaces" not in said["PreTrainedTokenizerFast"]


def test_a_failure_of_transformers_is_no_failure_of_the_run(
    lmworks: Lmworks, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", fails)
    done = lmworks("pretrain", write_recipe(tmp_path, _base(tmp_path / "base", "llama"), chats))
    assert done.code == 0, done.err
    assert _first_loss(tmp_path / "run")["not_compared"] == "it cannot compute with the weights (RuntimeError: no kernel for this)"


def test_general_text_is_replayed_and_what_was_forgotten_is_said(lmworks: Lmworks, chats: Path, tmp_path: Path) -> None:
    from lmworks.recipe.load import load_resolved
    from lmworks.train.curriculum import TuningCurriculum

    base = _base(tmp_path / "base", "qwen")
    recipe = write_recipe(tmp_path, base, chats, corpus=_pages(tmp_path))
    replay = ("--set", "tune.replay={fraction: 0.25}", "--set", "export.huggingface=false", "--set", "evaluate.references=false")
    done = lmworks("run", recipe, *replay)
    assert done.code == 0, done.err
    run_dir = tmp_path / "run"
    assert (run_dir / "shards" / "manifest.json").exists()
    curriculum = TuningCurriculum(load_resolved(run_dir / "resolved.json"), run_dir / "tune" / "data")
    assert (curriculum.steps, curriculum.sequences(0)) == (8, 4)
    for step in range(curriculum.steps):
        batch = curriculum.batch(step, 0, 4)
        learned = (batch.labels != -100).sum(axis=1)
        assert all(count < 50 for count in learned[:3]) and learned[3] >= 60, "three sequences of conversations, and one of text"
        assert batch.cu_seqlens[-1] == batch.tokens.size and {0, 64, 128, 192} <= set(batch.cu_seqlens.tolist())
        assert (curriculum.batch(step, 3, 4).tokens == batch.tokens[3:]).all()
    forgetting = read_json(run_dir / "evaluate" / "results.json")["forgetting"]
    row = forgetting["measures"]["bits per byte, docs"]
    assert row["difference"] == pytest.approx(row["b"] - row["a"]) and row["interval"][0] <= row["difference"] <= row["interval"][1]
    said = " ".join(done.out.split())
    assert ("Forgotten since the base model" in said) == bool(forgetting["forgotten"])
    assert ("Nothing is shown to be forgotten" in said) == (not forgetting["forgotten"])


def _pages(tmp_path: Path) -> dict[str, Any]:
    """A corpus of documentation, a third of it held out."""
    from pydoc_data.topics import topics

    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": topics[name][:800]}) + "\n" for name in sorted(topics)[:60]))
    source = {"name": "pages", "kind": "jsonl", "path": str(tmp_path / "text.jsonl"), "domain": "docs", "license": "PSF-2.0"}
    return {"sources": [source], "validation_fraction": 0.3, "dedup": {"minhash": None}}


@pytest.mark.parametrize("stage", ["tune", pytest.param("train", marks=pytest.mark.slow)])
def test_a_base_model_is_held_by_the_fisher_information_of_named_text(lmworks: Lmworks, chats: Path, tmp_path: Path, stage: str) -> None:
    """In tuning, and in the first phase of further pretraining: the weights drift less, by what they mattered for the text."""
    base = _base(tmp_path / "base", "qwen")
    phase = {"name": "more", "tokens": "2Ki", "mixture": {"pages": 1}, "sequence_length": "64 tokens", "global_batch_tokens": "256 tokens"}
    train = TRAIN | ({"phases": [phase]} if stage == "train" else {})
    recipe = write_recipe(tmp_path, base, chats, corpus=_pages(tmp_path), train=train)
    key, command = ("tune.ewc", "tune") if stage == "tune" else ("train.phases.more.ewc", "pretrain")
    unnamed = lmworks(command, recipe, "--set", f"{key}={{weight: 1}}")
    assert "what the weights of start_from were trained on is not known; name sources of general text with ewc.mixture" in unnamed.error
    other = lmworks(command, recipe, "--set", f"{key}={{weight: 1, mixture: {{page: 1}}}}")
    assert "no source is called 'page'; did you mean 'pages'?" in other.error

    model, folder, drift = ("tuned", "tune", {}) if stage == "tune" else ("base", "", {})
    start = read_model(base).state_dict()
    for weight in (1e-9, 1e4):
        run_dir = tmp_path / f"run-{weight}"
        held = f"{key}={{weight: {weight}, sequences: 4, mixture: {{pages: 1}}}}"
        done = lmworks(command, recipe, "--set", held, "--set", f"run_dir={run_dir}")
        assert done.code == 0, done.err
        (kept,) = (run_dir / folder / "checkpoints").glob("ewc-*/step-00000000")
        fisher = checkpoint(kept.parents[1], folder=kept.parent.name)
        now = load_model(run_dir, model).state_dict()
        assert all(torch.equal(fisher[f"anchor/{name}"], start[name]) for name in start)
        drift[weight] = sum(float((fisher[f"fisher/{name}"] * (now[name] - start[name]).square()).sum()) for name in start)
        (event,) = [line for line in read_ledger(run_dir / "ledger.jsonl") if line["event"] == "ewc"]
        assert (event["step"], event["sequences"]) == (0, 4)
        penalties = [line["train/ewc"] for line in read(run_dir / folder) if "train/ewc" in line]
        assert len(penalties) == 8 and all(value > 0 for value in penalties)
    assert drift[1e4] < 0.5 * drift[1e-9], drift


def test_the_first_loss_is_compared_where_deepspeed_will_train(
    lmworks: Lmworks, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before DeepSpeed takes the model over, so it need not be installed; tuning, which trains, needs it."""
    recipe = write_recipe(tmp_path, _base(tmp_path / "base", "llama"), chats)
    changes = ("--set", "train.deepspeed={}", "--set", "optimizer.kind=adamw")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "deepspeed", None)
        refused = lmworks("pretrain", recipe, *changes)
        assert refused.code == 2 and "pip install 'lmworks[deepspeed]'" in refused.error, "tuning will need it"
        done = lmworks("pretrain", recipe, *changes, "--set", "tune=null")
    assert done.code == 0, done.err
    event = next(line for line in read_ledger(tmp_path / "run" / "ledger.jsonl") if line["event"] == "start_from")
    assert event["first_loss"]["difference"] < 1e-5
    assert f"first loss {event['first_loss']['loss']:.4f} on" in done.err


def test_a_replay_that_cannot_be_is_refused(lmworks: Lmworks, chats: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, _base(tmp_path / "base", "qwen"), chats)
    done = lmworks("show", recipe, "--set", "tune.replay={fraction: 0.5}")
    assert "there is no text to replay; add corpus.sources or shards.imported" in done.error
    source = "corpus.sources=[{name: pages, kind: stdlib, domain: docs, license: PSF-2.0}]"
    done = lmworks("show", recipe, "--set", source, "--set", "tune.replay={fraction: 0.5, mixture: {page: 1}}")
    assert "no source is called 'page'; did you mean 'pages'?" in done.error
    done = lmworks("show", recipe, "--set", source, "--set", "tune.replay={fraction: 0.5, mixture: {pages: 0.5}}")
    assert "tune.replay" in done.error and done.code == 2


@pytest.mark.slow
def test_half_a_billion_parameters_are_tuned_on_two_ranks(lmworks: Lmworks, chats: Path, tmp_path: Path) -> None:
    """Each rank reads its own halves of the tensors, and transformers has the same first loss of the whole."""
    base = tmp_path / "base"
    write_tokenizer(base, "qwen")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 25}
    write_model(base, 65_536, initializer_range=0.02, **sizes)
    recipe = write_recipe(
        tmp_path, base, chats, layout={"dp_shard": 2, "zero": 3},
        train={"precision": "fp32", "compile": False, "micro_batch_sequences": 1}, checkpoints={"asynchronous": False},
        optimizer={"kind": "adamw", "learning_rate": 0.001},  # Muon's products would take minutes on a CPU
        tune={
            "data": [{"name": "sums", "kind": "files", "path": str(chats), "max_rows": 20}], "tokens": "256 tokens",
            "sequence_length": "64 tokens", "global_batch_tokens": "128 tokens",
        },
    )  # fmt: skip
    done = lmworks("launch", "local", recipe, "--ranks", 2, "--to", "tune")
    assert done.code == 0, done.err
    run_dir = tmp_path / "run"
    event = next(line for line in read_ledger(run_dir / "ledger.jsonl") if line["event"] == "start_from")
    assert event["first_loss"]["loss"] == pytest.approx(event["first_loss"]["transformers"], rel=1e-4)
    lines = [line["train/loss"] for line in read(run_dir / "tune") if "train/loss" in line]
    assert len(lines) == 2 and lines[1] < lines[0]
    newest = listing.directories(run_dir / "tune" / "checkpoints")[-1]
    assert listing.read_meta(newest)["step"] == 2
    assert sum(value.numel() for value in load_model(run_dir, "tuned").parameters()) > 500_000_000
