"""Tokenizers in other forms than tokenizer.json: what is said about them, and that it works."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from base_models import write_model
from lmworks.errors import UserError
from lmworks.recipe.tokenizer_files import other_form
from lmworks.recipe.weights import find_weights
from lmworks.tokenizer import load

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581a", "\u2581", "a", "b", "ab"]


def _sentencepiece(folder: Path) -> None:
    """A folder as Llama 2 was published: a model of SentencePiece, and the config that names its special tokens."""
    from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

    proto = sentencepiece.ModelProto()
    proto.trainer_spec.model_type = 2  # BPE
    proto.trainer_spec.byte_fallback = True
    for number, piece in enumerate(PIECES):
        kind = {0: 2, 1: 3, 2: 3}.get(number, 6 if piece.startswith("<0x") else 1)  # unknown, control, byte, normal
        proto.pieces.add(piece=piece, score=float(-number), type=kind)
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _with_sentencepiece(folder: Path) -> dict[str, str]:
    """An environment with a package sentencepiece. transformers uses only its description of the file, of which it has a copy."""
    (folder / "sentencepiece").mkdir(parents=True)
    (folder / "sentencepiece" / "__init__.py").touch()
    copy = "from transformers.utils.sentencepiece_model_pb2_new import *\n"
    (folder / "sentencepiece" / "sentencepiece_model_pb2.py").write_text(copy)
    return os.environ | {"PYTHONPATH": str(folder)}


def test_the_command_for_a_tokenizer_of_sentencepiece_works(tmp_path: Path) -> None:
    folder = tmp_path / "a model's"  # a name that a shell would cut
    write_model(folder, 300)
    _sentencepiece(folder)
    with pytest.raises(UserError, match=r"has no tokenizer\.json, only tokenizer\.model; write it: pip install") as refused:
        find_weights(folder)
    with pytest.raises(UserError) as opened:
        load(folder)
    assert str(opened.value) == str(refused.value)
    install, _, command = str(refused.value).partition("write it: ")[2].partition(" && ")
    assert install == "pip install transformers sentencepiece protobuf"
    done = subprocess.run([sys.executable, *shlex.split(command)[1:]], env=_with_sentencepiece(tmp_path / "packages"), capture_output=True,
                          encoding="utf-8", check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert find_weights(folder).tokenizer == folder / "tokenizer.json"
    tokenizer = load(folder)
    ids = tokenizer.encode("a ab")
    assert [PIECES[one] for one in ids[:2]] == ["<s>", "\u2581a"] and tokenizer.decode(ids[1:]).strip() == "a ab"


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "tiktoken.model"])
def test_a_file_of_tiktoken_is_no_whole_tokenizer(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)))
    with pytest.raises(UserError, match=rf"only {name}, a file of tiktoken, .*; put the tokenizer\.json of this model there"):
        load(tmp_path)


def test_the_package_that_a_form_needs_is_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    assert "only tekken.json; write it: pip install transformers mistral-common && python -c" in str(other_form(tmp_path))
    (tmp_path / "tekken.json").unlink()
    assert other_form(tmp_path) is None
    with pytest.raises(UserError, match="make it with `lmworks tokenizer train RECIPE`"):
        load(tmp_path)
