"""Base models that cannot be started from: one line, exit code 2, nothing trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Lmworks
from test_start_tuning import ROWS, write_recipe

from base_models import write_model, write_tokenizer
from lmworks.checkpoint import listing
from lmworks.tokenizer import load as load_tokenizer


def _config(**changes: object) -> Callable[[Path], None]:
    def change(base: Path) -> None:
        path = base / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _pickled(base: Path) -> None:
    (base / "model.safetensors").rename(base / "pytorch_model.bin")


def _truncated(base: Path) -> None:
    path = base / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _template(text: str | None) -> Callable[[Path], None]:
    def write(base: Path) -> None:
        path = base / "chat_template.jinja"
        path.unlink() if text is None else path.write_text(text)

    return write


_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "one.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}) + "\n")
    return path


@pytest.mark.parametrize(
    ("rows", "damage", "reason"),
    [
        (ROWS, _config(model_type="mamba", architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
        (ROWS, _pickled, "has no .safetensors file, only pytorch_model.bin, which is pickled and could run any program"),
        (ROWS, _truncated, "model.safetensors is damaged"),
        (ROWS, _config(intermediate_size=64), "has shape (32, 48), but the config says (32, 64)"),
        (ROWS, _config(num_hidden_layers=3), "has no tensor model.layers.2."),
        (320, lambda base: None, "has ids up to 371, but the embedding has 320 rows"),
        (ROWS, lambda base: (base / "tokenizer.json").unlink(), "has no tokenizer.json, which the weights need"),
        (ROWS, _template(None), "has no chat template, which tuning needs; set tokenizer.chat_template=FILE.jinja"),
        (ROWS, _template(_LOOP), "it takes more than 0.5 s"),
        (ROWS, _template("{{ messages.__class__.__mro__ }}"), "is unsafe"),
        (ROWS, _template("{{ messages }}"), "ends no answer with a special token"),
    ],
)
def test_one_line_and_nothing_is_trained(
    lmworks: Lmworks, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, damage: Callable[[Path], None], reason: str
) -> None:
    monkeypatch.setattr("lmworks.tokenizer.rendering.SECONDS", 0.5)
    base = tmp_path / "base"
    write_tokenizer(base, "qwen")
    write_model(base, rows)
    damage(base)
    done = lmworks("run", write_recipe(tmp_path, base, chats))
    assert done.code == 2 and reason in done.error and "\n" not in done.error.strip()
    assert not listing.directories(tmp_path / "run" / "checkpoints")


def test_a_base_model_is_not_asked_in_a_chat(lmworks: Lmworks, tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_tokenizer(base, "qwen")
    write_model(base, ROWS)
    _template(None)(base)
    (base / "model.safetensors").write_bytes(b"")  # the weights are not read
    done = lmworks("chat", base)
    assert done.code == 2 and f"{base} has no chat template" in done.error and f"lmworks serve {base} completes text" in done.error


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_of_a_file_takes_the_place_of_that_of_the_tokenizer(lmworks: Lmworks, chats: Path, tmp_path: Path) -> None:
    import transformers

    base, template = tmp_path / "base", tmp_path / "own.jinja"
    write_tokenizer(base, "qwen")
    write_model(base, ROWS)
    _template(None)(base)
    recipe = write_recipe(tmp_path, base, chats, tokenizer={"chat_template": str(template)})
    done = lmworks("run", recipe)
    assert done.code == 2 and f"{template} does not exist" in done.error
    template.write_text(CHATML)
    done = lmworks("tokenizer", "train", recipe)
    assert done.code == 0, done.err
    kept = tmp_path / "run" / "tokenizer"
    assert (kept / "chat_template.jinja").read_text() == CHATML
    assert (kept / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    ids, mask = load_tokenizer(kept).encode_chat(chat)
    theirs = transformers.AutoTokenizer.from_pretrained(kept)
    assert ids == theirs.apply_chat_template(chat, return_dict=False)
    assert theirs.decode([one for one, trained in zip(ids, mask, strict=True) if trained]) == "Hello<|im_end|>"
    for value, why in (("chatml", "is neither brief nor glm-4.6 nor the path of a .jinja file"), ("brief", "")):
        done = lmworks("plan", recipe, "--set", f"tokenizer.chat_template={value}")
        assert (done.code == 2 and why in done.error) if why else done.code == 0, done.err
    done = lmworks("plan", recipe, "--set", "tokenizer.as_is=false")
    assert done.code == 2 and "set tokenizer.as_is=true" in done.error
