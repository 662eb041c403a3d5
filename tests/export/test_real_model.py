"""A real model of thirty layers, SmolLM2-135M-Instruct, through the gate and into llama.cpp; tuned and untouched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ask, engine
from planted import DENSE
from small_models import gelu_of_a_table
from tokenizer_kinds import texts

from gemma3 import write_gguf as write_gguf_of_gemma
from lmworks.export import parity as gate
from lmworks.export.export import write_huggingface
from lmworks.export.gguf import write_gguf
from lmworks.export.parity import TEXT, compare, require_parity
from lmworks.inference.generate import GenerateOptions, generate
from lmworks.inference.model import for_inference
from lmworks.model import Transformer
from lmworks.tokenizer import load
from lmworks.weights.huggingface import read_model
from lmworks.weights.open import open_model
from smollm2 import write_huggingface_folder

pytestmark = pytest.mark.slow

@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Any, Path]:
    """The model, its tokenizer and its Hugging Face folder, as transformers dequantizes the file."""
    folder = write_huggingface_folder(tmp_path_factory.mktemp("smol"))
    return read_model(folder), load(folder), folder


def tokens(tokenizer: Any) -> dict[str, list[torch.Tensor]]:
    drawn = torch.randint(tokenizer.vocab_size, (128,), generator=torch.Generator().manual_seed(1))
    return {"text": [torch.tensor(tokenizer.encode(TEXT)[:192])], "random": [drawn]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tuned", [False, True], ids=["untouched", "tuned"])
def test_it_passes(smol: tuple[Transformer, Any, Path], tmp_path: Path, dtype: torch.dtype, tuned: bool) -> None:
    model, tokenizer, folder = smol
    if tuned:
        model = stepped(read_model(folder), tokenizer)
    write_huggingface(model, tokenizer, tmp_path, dtype)
    parity = compare(model, tmp_path, tokens(tokenizer), dtype)
    require_parity(parity, tmp_path)
    assert not parity.narrow and parity.relative < parity.bound / 10


def stepped(model: Transformer, tokenizer: Any) -> Transformer:
    """Some steps of AdamW at 2e-4 on all weights."""
    ids = torch.tensor([tokenizer.encode(TEXT)[:256]])
    labels = torch.cat((ids[:, 1:], torch.full((1, 1), -100)), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    for _ in range(4):
        (model.loss(ids, labels).total / ids.numel()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("mistake", DENSE)
def test_a_mistake_in_its_last_layer_is_found(
    smol: tuple[Transformer, Any, Path], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    model, tokenizer, folder = smol
    loader: Callable[[Path], Any] = gate._load_in_transformers

    def wrong(directory: Path) -> Any:
        theirs = loader(directory)
        with torch.no_grad():
            DENSE[mistake](theirs)
        return theirs

    monkeypatch.setattr(gate, "_load_in_transformers", wrong)
    parity = compare(model, folder, {"text": [tokens(tokenizer)["text"][0][:64]]}, torch.float32)
    assert parity.relative > 10 * parity.bound and parity.reason


@pytest.mark.needs("llama")
def test_llama_cpp_gives_its_ids_and_its_greedy_answer(smol: tuple[Transformer, Any, Path], tmp_path: Path) -> None:
    import transformers

    model, tokenizer, folder = smol
    model = stepped(read_model(folder), tokenizer)
    write_gguf(model, tokenizer, tmp_path / "model.gguf", torch.float32, "smol")
    asked = texts(tokenizer)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Name three rivers of Europe."}], add_generation_prompt=True)[0]
    python, library = engine("LMWORKS_LLAMA_PYTHON"), engine("LMWORKS_LLAMA_SERVER").parent
    question = {"model": str(tmp_path / "model.gguf"), "texts": asked, "prompt": prompt, "count": 24}
    answer = ask(python, "tokenize_llama.py", question, LLAMA_CPP_LIB_PATH=str(library))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert answer["ids"] == [theirs(text, add_special_tokens=False)["input_ids"] for text in asked]
    expected = generate(model, [prompt], GenerateOptions(max_new_tokens=24, temperature=0.0, stop_ids=tokenizer.stop_ids))[0]
    assert answer["greedy"][: len(expected)] == expected


@pytest.mark.needs("llama")
@torch.no_grad()
def test_llama_cpp_computes_the_real_gemma(tmp_path: Path) -> None:
    """The published Gemma 3 270M, dequantized, in our GGUF file: ids and log-probabilities, also beyond its window of 512 tokens.

    Its activations are large, so that the fp16 table that llama.cpp has of GELU costs 1e-3: the difference is that of such a table.
    """
    opened = open_model(write_gguf_of_gemma(tmp_path / "published.gguf"))
    model, tokenizer = for_inference(opened.model, torch.float32, join=False), opened.tokenizer
    write_gguf(model, tokenizer, tmp_path / "model.gguf", torch.float32, "gemma")
    asked = ["The capital of France is Paris. The capital of Italy is Rome.", (TEXT * 4)[:3000]]
    question = {"model": str(tmp_path / "model.gguf"), "texts": asked}
    library = {"LLAMA_CPP_LIB_PATH": str(engine("LMWORKS_LLAMA_SERVER").parent)}
    answers = ask(engine("LMWORKS_LLAMA_PYTHON"), "scores_llama.py", question, **library)
    for text, answer in zip(asked, answers, strict=True):
        ids = answer["ids"]
        assert tokenizer.encode(text) == [*tokenizer.prefix, *ids]
        found = log_probabilities(model, ids)
        with gelu_of_a_table(model):
            rounded = log_probabilities(model, ids)
        difference, table = ((found - other).abs() for other in (torch.tensor(answer["logprobs"], dtype=torch.float64), rounded))
        print(f"{len(ids)} tokens: {difference.max():.1e}, mean {difference.mean():.1e}; its table {table.max():.1e}, {table.mean():.1e}")
        assert difference.max() < 3 * table.max() and difference.mean() < 1.5 * table.mean() < 5e-3
    assert len(answers[1]["ids"]) > 512


def log_probabilities(model: Transformer, ids: list[int]) -> torch.Tensor:
    """Of each token but the first, in fp64."""
    return model(torch.tensor([ids]))[0].double().log_softmax(-1)[range(len(ids) - 1), ids[1:]]
