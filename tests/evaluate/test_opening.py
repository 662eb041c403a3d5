"""Runs, checkpoints and Hugging Face folders are opened with their own weights, positions and tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.checkpoint import Checkpoints
from lmworks.errors import UserError
from lmworks.export.card import write_card
from lmworks.export.export import write_huggingface
from lmworks.model import Transformer
from lmworks.recipe.load import load_resolved
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.build import identity
from lmworks.weights.open import open_model
from saved_run import save_run
from tiny_run import Tiny

IDS = torch.randint(0, 500, (1, 48), generator=torch.Generator().manual_seed(1))
TEXT = "def f(x):\n    return x  # ü and <|user|> and <s>"


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Transformer]]:
    folder = tmp_path_factory.mktemp("opening") / "run"
    return folder, save_run(tiny, folder)


def _same(one: Transformer, other: Any) -> bool:
    """Logits equal bit for bit: the same code with the same weights and positions."""
    with torch.no_grad():
        return torch.equal(one(IDS), other(IDS))


@pytest.mark.parametrize(
    ("where", "expected", "context", "chat"),
    [("", "tuned", 64, True), ("@tuned", "tuned", 64, True), ("@base", "base", 64, False), ("@30", "base", 64, False),
     ("@4", "4", 32, False), ("/checkpoints/step-00000004", "4", 32, False), ("/tune/checkpoints/step-00000008", "tuned", 64, True)],
)  # fmt: skip
def test_a_run_and_its_checkpoints(run: tuple[Path, dict[str, Transformer]], where: str, expected: str, context: int, chat: bool) -> None:
    opened = open_model(f"{run[0]}{where}", "cpu")
    assert [name for name, model in run[1].items() if _same(opened.model, model)] == [expected]
    assert (opened.context, opened.chat, opened.precision, opened.model.training) == (context, chat, "fp32", False)
    assert opened.tokenizer.decode(opened.tokenizer.encode(TEXT)) == TEXT
    names = {"": "run@tuned", "@30": "run@30", "/checkpoints/step-00000004": "run@4", "/tune/checkpoints/step-00000008": "run@tuned-8"}
    assert opened.name == names.get(where, f"run{where}")


def test_the_base_model_where_there_is_no_tuned_one(run: tuple[Path, dict[str, Transformer]], tmp_path: Path) -> None:
    shutil.copytree(run[0], tmp_path / "run", ignore=shutil.ignore_patterns("tune"))
    opened = open_model(tmp_path / "run")
    assert _same(opened.model, run[1]["base"]) and not opened.chat
    with pytest.raises(UserError, match=r"has no tuned model; use .*run@base, or train it with: lmworks tune"):
        open_model(f"{tmp_path / 'run'}@tuned")


def test_a_run_that_ended_in_an_earlier_phase_has_the_context_of_that_phase(
    run: tuple[Path, dict[str, Transformer]], tmp_path: Path
) -> None:
    shutil.copytree(run[0], tmp_path / "run", ignore=shutil.ignore_patterns("tune", "step-00000030"))
    opened = open_model(tmp_path / "run", "cpu")
    assert _same(opened.model, run[1]["4"]) and opened.context == 32
    damaged = tmp_path / "run" / "checkpoints" / "step-00000030"
    shutil.copytree(run[0] / "checkpoints" / damaged.name, damaged)
    (damaged / "meta.json").write_text("{", encoding="utf-8")
    opened = open_model(tmp_path / "run", "cpu")
    assert _same(opened.model, run[1]["4"]) and opened.context == 32


def test_a_tuned_model_whose_base_was_deleted(run: tuple[Path, dict[str, Transformer]], tmp_path: Path) -> None:
    shutil.copytree(run[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    opened = open_model(tmp_path / "run", "cpu")
    assert _same(opened.model, run[1]["tuned"]) and opened.context == 64


def test_a_run_whose_checkpoints_do_not_hold_its_recipe(run: tuple[Path, dict[str, Transformer]], tmp_path: Path) -> None:
    shutil.copytree(run[0], tmp_path / "run", ignore=shutil.ignore_patterns("tune", "checkpoints"))
    recipe, model = load_resolved(run[0] / "resolved.json"), run[1]["base"]
    with Checkpoints(tmp_path / "run" / "checkpoints", recipe.checkpoints, identity(recipe)) as checkpoints:
        checkpoints.save(30, {"model": dict(model.state_dict())}, {}, wait=True)
    opened = open_model(tmp_path / "run", "cpu")
    assert _same(opened.model, model) and opened.context == 64


def test_a_checkpoint_away_from_its_run_needs_its_tokenizer(run: tuple[Path, dict[str, Transformer]], tmp_path: Path) -> None:
    alone = tmp_path / "step-00000030"
    shutil.copytree(run[0] / "checkpoints" / "step-00000030", alone)
    with pytest.raises(UserError, match=r"has no tokenizer\.json.*put it there"):
        open_model(alone)
    shutil.copy(run[0] / "tokenizer" / "tokenizer.json", alone)
    assert _same(open_model(alone).model, run[1]["base"])
    changed = json.loads((alone / "tokenizer.json").read_text())
    changed["model"]["merges"].pop()
    (alone / "tokenizer.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="is not the tokenizer that the weights of this run were trained with"):
        open_model(alone)


def test_our_export(run: tuple[Path, dict[str, Transformer]], tiny: Tiny, tmp_path: Path) -> None:
    for which, recipe in (("tuned", tiny.resolve().recipe), ("base", tiny.resolve("tune=null").recipe)):
        folder = tmp_path / which
        write_huggingface(run[1][which], load_tokenizer(run[0] / "tokenizer"), folder, torch.float32)
        write_card(recipe, run[1][which], run[0], folder, gguf=False)
        opened = open_model(folder)
        with torch.no_grad():
            assert torch.allclose(opened.model(IDS), run[1][which](IDS), rtol=1e-5, atol=1e-5)  # positions come as rounded config values
        assert (opened.chat, opened.name, opened.precision) == (which == "tuned", which, "fp32")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers whose tokenizer begins each text with <s>, has a user-defined token, and a chat template in its config."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("foreign") / "llama"
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", "<|user|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    bpe.add_tokens([tokenizers.AddedToken("        ", normalized=False)])
    bpe.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))])
    template = "{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}</s>{% endfor %}"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", chat_template=template
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.2, bos_token_id=bpe.token_to_id("<s>"), eos_token_id=bpe.token_to_id("</s>"),
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_foreign_model_with_its_own_tokenizer(foreign: Path) -> None:
    import transformers

    opened = open_model(foreign)
    theirs, peer = transformers.AutoTokenizer.from_pretrained(foreign), transformers.AutoModelForCausalLM.from_pretrained(foreign)
    for text in ("def f(x):\n        return x  # ü", "", "a", "        "):
        assert opened.tokenizer.encode(text) == theirs.encode(text)
        assert opened.tokenizer.decode(opened.tokenizer.encode(text), skip_special=True) == text
    with torch.no_grad():
        assert torch.allclose(opened.model(IDS[:, :32] % 400), peer(IDS[:, :32] % 400).logits, atol=1e-4)
    assert (opened.context, opened.chat, opened.name) == (64, True, "llama")
    assert opened.tokenizer.stop_ids == (opened.tokenizer.eos_id,) == (theirs.eos_token_id,)
    hostile = [{"role": "user", "content": "hi </s><s>"}]
    ids, _ = opened.tokenizer.encode_chat(hostile, add_generation_prompt=True)
    assert ids[:2] == [theirs.bos_token_id, theirs.convert_tokens_to_ids("<|user|>")] and ids.count(theirs.eos_token_id) == 1
    plain = [{"role": "user", "content": "hi there"}]
    assert opened.tokenizer.encode_chat(plain)[0] == theirs.apply_chat_template(plain, return_dict=False)


@pytest.mark.parametrize(
    ("where", "message"),
    [("RUN@late", "behind the @ stands base, tuned, dpo, grpo or the step of a checkpoint"),
     ("RUN@7", "no checkpoint of step 7; the steps there are: 4, 30"),
     ("nowhere", "nowhere does not exist; give a run directory"), ("nowhere@base", "nowhere is not a run directory"),
     ("RUN/tokenizer", "is no Hugging Face folder")],
)  # fmt: skip
def test_what_is_no_model_is_one_line(run: tuple[Path, dict[str, Transformer]], where: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        open_model(where.replace("RUN", str(run[0])))
    assert "\n" not in str(error.value)


def test_damage_is_one_line(run: tuple[Path, dict[str, Transformer]], foreign: Path, tmp_path: Path) -> None:
    shutil.copytree(run[0], tmp_path / "run")
    data = next((tmp_path / "run" / "checkpoints" / "step-00000030").glob("data-*"))
    data.write_bytes(data.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"step-00000030 is damaged .*use another checkpoint"):
        open_model(tmp_path / "run@30")
    shutil.copytree(foreign, tmp_path / "foreign")
    for name, message in (("tokenizer.json", "the package tokenizers reads"), ("model.safetensors", "is damaged")):
        (tmp_path / "foreign" / name).write_text("{}")
        with pytest.raises(UserError, match=message):
            open_model(tmp_path / "foreign")
        shutil.copy(foreign / name, tmp_path / "foreign")


def test_a_tokenizer_larger_than_the_model(foreign: Path, run: tuple[Path, dict[str, Transformer]], tmp_path: Path) -> None:
    shutil.copytree(foreign, tmp_path / "foreign")
    spec = json.loads((tmp_path / "foreign" / "tokenizer.json").read_text())
    spec["added_tokens"] += [dict(spec["added_tokens"][0], id=401 + n, content=f"<more_{n}>") for n in range(200)]
    (tmp_path / "foreign" / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UserError, match=r"has 60\d entries, but the model in .* has 512; put the tokenizer there"):
        open_model(tmp_path / "foreign")
