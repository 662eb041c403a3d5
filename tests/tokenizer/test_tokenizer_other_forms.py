"""Tokenizers in other forms than tokenizer.json: what is said about them, that it works, and that the ids are those of the form."""

from __future__ import annotations

import base64
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import Lmworks

from base_models import write_model
from lmworks.errors import UserError
from lmworks.io.files import read_json, write_json
from lmworks.recipe.derive import vocabulary
from lmworks.recipe.scored_pieces import merges_of
from lmworks.recipe.tokenizer_files import other_form
from lmworks.recipe.weights import find_weights
from lmworks.tokenizer import load
from lmworks.tokenizer.convert import convert
from lmworks.tokenizer.from_sentencepiece import read

RECORDED = read_json(Path(__file__).parents[1] / "recorded" / "sentencepiece.json")
"""Models that the library sentencepiece has trained, and its ids of hostile texts."""
CONFIG = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _write(folder: Path, form: str = "bpe", **settings: Any) -> Path:
    """A folder as Llama 2 was published: a model of SentencePiece, and the config that names its special tokens."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(base64.b64decode(RECORDED["models"][form]["model"]))
    write_json(folder / "tokenizer_config.json", {key: one for key, one in (CONFIG | settings).items() if one is not None})
    return folder / "tokenizer.model"


def _run(lmworks: Lmworks, refused: str) -> None:
    """Run the command at the end of a refusal."""
    words = shlex.split(refused.partition("write it: ")[2])
    assert words[:3] == ["lmworks", "tokenizer", "convert"]
    ended = lmworks(*words[1:])
    assert ended.code == 0 and "wrote" in ended.out, ended


@pytest.fixture
def lmworks(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Lmworks:
    return Lmworks(monkeypatch, capfd)


@pytest.mark.parametrize("form", RECORDED["models"])
def test_the_command_writes_a_tokenizer_with_the_ids_of_sentencepiece(tmp_path: Path, form: str, lmworks: Lmworks, capfd: Any) -> None:
    folder = tmp_path / "a model's"  # a name that a shell would cut
    write_model(folder, 600)
    _write(folder, form)
    with pytest.raises(UserError, match=r"has no tokenizer\.json, only tokenizer\.model; write it: lmworks tokenizer convert") as refused:
        find_weights(folder)
    with pytest.raises(UserError) as opened:
        load(folder)
    assert str(opened.value) == str(refused.value)
    _run(lmworks, str(refused.value))
    assert find_weights(folder).tokenizer == folder / "tokenizer.json"
    tokenizer = load(folder)
    for text, ids in zip(RECORDED["texts"], RECORDED["models"][form]["ids"], strict=True):
        assert tokenizer.encode(text) == [1, *ids], text
    assert "beside it" not in capfd.readouterr().err, "the model beside it has the same ids"
    assert tokenizer.decode(tokenizer.encode("is it a text")[1:]) == "is it a text"


def test_transformers_gives_the_same_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    _write(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    write_json(tmp_path / "config.json", {"model_type": "mistral", "eos_token_id": 2})
    convert(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load(tmp_path)
    for text in RECORDED["texts"]:
        assert any(one in text for one in ours.special) or theirs(text)["input_ids"] == ours.encode(text), text
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")


def test_what_the_files_beside_it_say_is_kept(tmp_path: Path) -> None:
    size = len(read(_write(tmp_path, add_bos_token=False, add_eos_token=True)).texts)
    write_json(tmp_path / "added_tokens.json", {"<|im_end|>": size + 1})
    stated = {str(size): {"content": "<|im_start|>", "special": True, "rstrip": True}, "1": {"content": "<s>", "special": True}}
    write_json(tmp_path / "tokenizer_config.json", read_json(tmp_path / "tokenizer_config.json") | {"added_tokens_decoder": stated})
    before = (tmp_path / "tokenizer_config.json").read_bytes()
    convert(tmp_path)
    spec, tokenizer = read_json(tmp_path / "tokenizer.json"), load(tmp_path)
    added = {one["content"]: one for one in spec["added_tokens"]}
    assert [added["<|im_start|>"][key] for key in ("id", "special", "rstrip")] == [size, True, True]
    assert [added["<|im_end|>"][key] for key in ("id", "special", "rstrip")] == [size + 1, False, False]
    assert tokenizer.prefix == () and spec["post_processor"]["single"][-1] == {"SpecialToken": {"id": "</s>", "type_id": 0}}
    assert (tmp_path / "tokenizer_config.json").read_bytes() == before


@pytest.mark.parametrize(("legacy", "behind"), [(None, "\u2581two"), (True, "\u2581two"), (False, "two")])
def test_a_space_comes_behind_special_tokens_where_the_class_puts_one(tmp_path: Path, legacy: bool | None, behind: str) -> None:
    import tokenizers

    _write(tmp_path, legacy=legacy)
    found = tokenizers.Tokenizer.from_file(str(convert(tmp_path)))
    pieces = lambda text: "".join(found.encode(text, add_special_tokens=False).tokens)  # noqa: E731
    assert pieces("<s>two") == f"<s>{behind}"
    assert pieces("  two") == "\u2581\u2581\u2581two" and pieces("[REF]two") == "\u2581[REF]two" and pieces("two") == "\u2581two"


def test_a_tokenizer_json_with_other_ids_than_the_model_beside_it_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    _write(tmp_path)
    path = convert(tmp_path)
    write_json(path, read_json(path) | {"normalizer": None})  # as a conversion without the rules of SentencePiece
    load(tmp_path)
    load(tmp_path)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("tokenizer.json, which is used, gives 'Hello world") == 1
    assert "and tokenizer.model beside it [" in said and "move that away and run lmworks tokenizer convert" in said


def _refused(folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        convert(folder)
    assert not (folder / "tokenizer.json").exists()
    return str(raised.value)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (b"\x12\x02\x18\x03", "it has pieces of words or characters, which tokenizer.json cannot express"),
        (b"\x12\x03\xc0\x01\x01", "a space behind a text and not before it"),
        (b"\x1a\x02\x28\x00", "spaces that stay spaces"),
        (b"\x0a\x07\x0a\x03a\xc3\xbf\x18\x01", "merges of characters that are no pieces"),
        (b"\x0a\x06\x0a\x02xq\x18\x05", "unused pieces that are merged and cut again"),
        (b"\x0a\x05\x0a\x01a\x18\x01", "is damaged"), (b"\x0a\x7f", "is damaged"), (b"\x0a", "is damaged"),
    ],
)  # fmt: skip
def test_a_model_that_tokenizer_json_cannot_express_is_refused(tmp_path: Path, more: bytes, reason: str) -> None:
    path = _write(tmp_path)
    path.write_bytes(path.read_bytes() + more)
    assert reason in _refused(tmp_path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tokenizer_class": "XLNetTokenizer"}, "names the class XLNetTokenizer, of which lmworks does not know whether it puts a BOS"),
        ({"added_tokens_decoder": {"5000": {"content": "<new>"}}}, "gives the added token '<new>' the id 5000, where the vocabulary has"),
        ({"added_tokens_decoder": {"7": {"content": "<s>"}}}, "gives the added token '<s>' the id 7, where the vocabulary has 1"),
    ],
)  # fmt: skip
def test_settings_that_contradict_the_model_are_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    _write(tmp_path, **settings)
    assert reason in _refused(tmp_path)


def test_a_normalizer_with_a_table_is_said_to_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path)
    table = b"\x04\x00\x00\x00" + bytes(4) + b"\x00"
    path.write_bytes(path.read_bytes() + b"\x1a" + bytes([len(table) + 2]) + b"\x12" + bytes([len(table)]) + table)
    convert(tmp_path)
    assert "ids of text with combining marks or control characters may differ" in " ".join(capsys.readouterr().err.split())


def test_nothing_is_written_over_and_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer\.model, spiece\.model or tekken\.json"):
        convert(tmp_path)
    (tmp_path / "sentencepiece.bpe.model").touch()
    assert "whose pieces the Python class of its tokenizer numbers otherwise" in _refused(tmp_path)
    _write(tmp_path)
    before = convert(tmp_path).read_bytes()
    with pytest.raises(UserError, match=r"exists already; move it away"):
        convert(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize(
    ("pieces", "fits"),
    [
        ([2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11], True),  # of Llama 2 and Mistral, in their order
        ([2, 3], False),  # of four, the first pair leaves 3 and 1, the first piece 2 and 2
    ],
)
def test_runs_of_equal_score_are_read_where_their_order_makes_no_difference(pieces: list[int], fits: bool) -> None:
    texts = ["\u2581", *("\u2581" * size for size in pieces)]
    scores = [0.0, *[-1e9] * len(pieces)]
    if fits:
        assert merges_of(texts, [1] * len(texts), scores)[0] == ["\u2581", "\u2581"]
    else:
        with pytest.raises(UserError, match="entries of equal score"):
            merges_of(texts, [1] * len(texts), scores)


PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


@pytest.mark.parametrize("named", [False, True])
def test_tekken_json_has_the_ids_of_tiktoken_behind_its_special_tokens(tmp_path: Path, named: bool, lmworks: Lmworks) -> None:
    import tiktoken

    write_model(tmp_path, 400)
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b" t", b"he", b" the", b"\xc3\xa9", b"  ", b"in", b"ing", b" th", b"the"]
    count = 24
    given: dict[str, Any] = {
        "config": {"pattern": PATTERN, "default_vocab_size": len(tokens) - 1 + count, "default_num_special_tokens": count},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)],
    }
    if named:
        given["special_tokens"] = [{"rank": rank, "token_str": text} for rank, text in enumerate(["<unk>", "<s>", "</s>", "[THINK]"])]
    write_json(tmp_path / "tekken.json", given)
    reference = tiktoken.Encoding("tekken", pat_str=PATTERN, mergeable_ranks={token: rank for rank, token in enumerate(tokens[:-1])},
                                  special_tokens={})  # fmt: skip
    with pytest.raises(UserError) as refused:
        load(tmp_path)
    _run(lmworks, str(refused.value))
    tokenizer = load(tmp_path)
    for text in [*RECORDED["texts"], "brothers"]:
        assert tokenizer.encode(text) == [1, *(count + one for one in reference.encode(text, disallowed_special=()))], text
        assert tokenizer.decode(tokenizer.encode(text)[1:]) == text
    assert tokenizer.special["[THINK]" if named else "[INST]"] == 3 and tokenizer.special[f"<SPECIAL_{count - 1}>"] == count - 1


def test_the_command_for_merges_works(tmp_path: Path) -> None:
    from lmworks.tokenizer.tokenizer_json import BYTE_OF

    write_model(tmp_path, 300)
    write_json(tmp_path / "vocab.json", {text: number for number, text in enumerate([*BYTE_OF, "th", "the", "<|endoftext|>"])})
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    with pytest.raises(UserError) as refused:
        load(tmp_path)
    install, _, command = str(refused.value).partition("write it: ")[2].partition(" && ")
    assert install == "pip install transformers"
    done = subprocess.run([sys.executable, *shlex.split(command)[1:]], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    tokenizer = load(tmp_path)
    assert tokenizer.encode("the") == [257] and tokenizer.decode(tokenizer.encode("the th\u00e9")) == "the th\u00e9"


RANKED = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
"""A file of tiktoken."""


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "tiktoken.model"])
def test_a_file_of_tiktoken_is_no_whole_tokenizer(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(RANKED)
    for opened in (load, convert):
        with pytest.raises(UserError, match=rf"only {name}, a file of tiktoken, .*; put the tokenizer\.json of this model there"):
            opened(tmp_path)


@pytest.mark.parametrize("start", [b"", b"\n", b"\xef\xbb\xbf"])
def test_a_recipe_and_the_command_that_name_a_file_of_tiktoken_say_what_it_is(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "cl100k_base.tiktoken").write_bytes(start + RANKED)
    for path in (tmp_path, tmp_path / "cl100k_base.tiktoken"):
        for named in (lambda path: vocabulary({"tokenizer": {"path": str(path)}}), convert):
            with pytest.raises(UserError, match=r"only cl100k_base\.tiktoken, a file of tiktoken, .*; put the tokenizer\.json"):
                named(path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=rf"cl100k_base\.tiktoken is no tokenizer\.json; name {tmp_path}/tokenizer\.json"):
        vocabulary({"tokenizer": {"path": str(tmp_path / "cl100k_base.tiktoken")}})


def test_a_recipe_that_names_another_form_gets_the_command_that_writes_tokenizer_json(tmp_path: Path) -> None:
    model = _write(tmp_path)
    (tmp_path / "old.tiktoken").write_bytes(RANKED)
    for path in (tmp_path, model):
        with pytest.raises(UserError, match=r"only tokenizer\.model; write it: lmworks tokenizer convert"):
            vocabulary({"tokenizer": {"path": str(path)}})
    (tmp_path / "mine.json").write_text("[]")
    with pytest.raises(UserError, match=r"mine\.json is not a tokenizer\.json"):
        vocabulary({"tokenizer": {"path": str(tmp_path / "mine.json")}})


def test_a_tokenizer_that_may_not_be_read_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    def refuse(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)  # root may read every file
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json \(PermissionError: .*Permission denied"):
        vocabulary({"tokenizer": {"path": str(tmp_path)}})


def test_without_any_form_the_folder_is_that_of_a_run(tmp_path: Path) -> None:
    assert other_form(tmp_path) is None
    with pytest.raises(UserError, match="make it with `lmworks tokenizer train RECIPE`"):
        load(tmp_path)
