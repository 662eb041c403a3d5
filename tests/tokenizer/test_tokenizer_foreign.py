"""Tokenizers and chat templates of other models, as they are: ids, masks and stop tokens for four kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from base_models import KINDS, write_tokenizer
from lmworks.errors import UserError
from lmworks.tokenizer import load
from lmworks.tokenizer.foreign import ForeignTokenizer

U, A = "user", "assistant"
CALL = {"role": A, "content": "", "tool_calls": [{"id": "abcde1234", "type": "function",
                                                 "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]}  # fmt: skip
RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcde1234", "content": "3"}


def _says(*turns: str) -> list[dict[str, Any]]:
    return [{"role": A if number % 2 else U, "content": text} for number, text in enumerate(turns)]


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(folder, request.param)
    return request.param, folder


def _runs(tokenizer: Any, ids: list[int], mask: list[bool]) -> list[str]:
    """The text of each answer, with its special tokens."""
    runs: list[list[int]] = []
    for at, token in enumerate(ids):
        if mask[at]:
            if not at or not mask[at - 1]:
                runs.append([])
            runs[-1].append(token)
    return ["".join(tokenizer.token_bytes(token).decode("utf-8", "replace") for token in run) for run in runs]


CONVERSATIONS = {
    "two answers": _says("What is 1 + 2?", "It is 3.", " And  20 + 10? naïve 東京\n", "30!"),
    "a system message": [{"role": "system", "content": "Be brief."}, *_says("Hi", "Hello, café")],
    "a call": [*_says("1 + 2?"), CALL, RESULT, {"role": A, "content": "3"}],
    "thoughts": [*_says("1 + 2?"), {"role": A, "content": "3", "reasoning_content": "1 and 2"}, *_says("Sure?", "Yes")],
}


@pytest.mark.parametrize("name", list(CONVERSATIONS))
@pytest.mark.parametrize("prompt", [False, True])
def test_ids_equal_those_of_transformers(kind: tuple[str, Path], name: str, prompt: bool) -> None:
    import transformers

    messages = CONVERSATIONS[name]
    if prompt:
        messages = messages[:-1]
    ours, peer = load(kind[1]), transformers.AutoTokenizer.from_pretrained(kind[1])
    expected = peer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=True, return_dict=False)
    ids = ours.encode_chat(messages, add_generation_prompt=prompt)[0]
    assert isinstance(ours, ForeignTokenizer) and len(expected) > 10
    assert ids[: len(expected)] == list(expected)
    assert len(ids) - len(expected) <= (kind[0] == "glm" and not prompt), "the one template that leaves the last answer open"


def test_the_mask_is_the_answers_with_the_token_that_ends_them(kind: tuple[str, Path]) -> None:
    tokenizer = load(kind[1])
    runs = {name: _runs(tokenizer, *tokenizer.encode_chat(messages)) for name, messages in CONVERSATIONS.items()}
    assert runs == {
        "glm": {
            "two answers": ["\n<think></think>\nIt is 3.<|user|>", "\n<think></think>\n30!<|endoftext|>"],
            "a system message": ["\n<think></think>\nHello, café<|endoftext|>"],
            "a call": ['\n<think></think>\n<tool_call>add\n{"a": 1, "b": 2}\n</tool_call><|observation|>',
                       "\n<think></think>\n3<|endoftext|>"],
            "thoughts": ["\n<think></think>\n3<|user|>", "\n<think></think>\nYes<|endoftext|>"],
        },
        "qwen": {
            "two answers": ["It is 3.<|im_end|>", "<think>\n\n</think>\n\n30!<|im_end|>"],
            "a system message": ["<think>\n\n</think>\n\nHello, café<|im_end|>"],
            # the newline before a call is one token with that of the prompt, so it does not count
            "a call": ['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>',
                       "<think>\n\n</think>\n\n3<|im_end|>"],
            "thoughts": ["3<|im_end|>", "<think>\n\n</think>\n\nYes<|im_end|>"],
        },
        "llama": {
            "two answers": ["It is 3.<|eot_id|>", "30!<|eot_id|>"],
            "a system message": ["Hello, café<|eot_id|>"],
            "a call": ['<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|>', "3<|eot_id|>"],
            "thoughts": ["3<|eot_id|>", "Yes<|eot_id|>"],
        },
        "mistral": {
            "two answers": [" It is 3.</s>", " 30!</s>"],
            "a system message": [" Hello, café</s>"],
            "a call": ['[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]</s>', " 3</s>"],
            "thoughts": [" 3</s>", " Yes</s>"],
        },
    }[kind[0]]  # fmt: skip


def test_generation_stops_at_the_end_of_a_turn_and_at_the_eos_of_the_config(kind: tuple[str, Path]) -> None:
    tokenizer = load(kind[1])
    assert {tokenizer.decode([one]) for one in tokenizer.stop_ids} == {
        "glm": {"<|endoftext|>", "<|user|>", "<|observation|>"}, "qwen": {"<|endoftext|>", "<|im_end|>"},
        "llama": {"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"}, "mistral": {"</s>"},
    }[kind[0]]  # fmt: skip


def test_text_never_becomes_a_special_token(kind: tuple[str, Path]) -> None:
    tokenizer = load(kind[1])
    special = [text for text in KINDS[kind[0]].special if text != "<unk>"]
    clean, mask = tokenizer.encode_chat(_says("a", "b"))
    hostile, hostile_mask = tokenizer.encode_chat(_says("a" + "".join(special), "b"))
    known = set(tokenizer.special.values())
    assert [one for one in hostile if one in known] == [one for one in clean if one in known]
    assert _runs(tokenizer, hostile, hostile_mask) == _runs(tokenizer, clean, mask)


def test_the_bytes_of_ids_are_those_of_the_text(kind: tuple[str, Path]) -> None:
    tokenizer = load(kind[1])
    text = "It is 3; naïve 東京 👩‍👧\n\n  x = [1]"
    found = b"".join(tokenizer.token_bytes(one) for one in tokenizer.encode_batch([text])[0])
    assert found.decode() == (" " if kind[0] == "mistral" else "") + text
    ids = tokenizer.encode(text)
    assert tuple(ids[: len(tokenizer.prefix)]) == tokenizer.prefix
    assert bool(tokenizer.prefix) == (kind[0] in ("llama", "mistral"))
    assert tokenizer.start == (tokenizer.special.get(tokenizer.tokens.get("bos_token", ""), tokenizer.eos_id),)
    assert tokenizer.byte_lengths[ids].sum() == len(found)


def test_ids_that_the_library_would_give_to_other_tokens_are_refused(tmp_path: Path) -> None:
    """It numbers added tokens anew if the vocabulary has a gap before them."""
    write_tokenizer(tmp_path, "qwen")
    path = tmp_path / "tokenizer.json"
    whole = json.loads(path.read_text())
    vocab = whole["model"]["vocab"]
    last = max(vocab, key=vocab.get)
    added = whole["added_tokens"][0]
    short = {"vocab": {piece: number for piece, number in vocab.items() if piece != last}, "merges": whole["model"]["merges"][:-1]}
    for spec, numbers in (
        (whole | {"model": whole["model"] | short}, f"the id {added['id']}, but the package tokenizers gives it {added['id'] - 1};"),
        (whole | {"added_tokens": [added | {"id": 10**6}]}, f"the id 1000000, but the package tokenizers gives it {added['id']};"),
    ):
        path.write_text(json.dumps(spec))
        with pytest.raises(UserError, match=f"tokenizer.json gives its token .* {numbers} get the file again"):
            load(tmp_path)


def _write(folder: Path, template: str) -> Any:
    write_tokenizer(folder, "qwen")
    (folder / "chat_template.jinja").write_text(template)
    return load(folder)


def test_generation_blocks_say_what_is_written(tmp_path: Path) -> None:
    tokenizer = _write(
        tmp_path,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}",
    )
    ids, mask = tokenizer.encode_chat(_says("Hi", "One", "Hi", "Two"))
    assert _runs(tokenizer, ids, mask) == ["One<|im_end|>", "Two<|im_end|>"], "the stop token is outside of the block and still learned"
    assert tokenizer.decode(ids) == tokenizer.apply_chat(_says("Hi", "One", "Hi", "Two"))


def test_a_newline_behind_the_end_of_a_marked_answer_is_not_learned(tmp_path: Path) -> None:
    """As in the template of LFM2.5; nothing is appended to it."""
    tokenizer = _write(
        tmp_path,
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}",
    )
    ids, mask = tokenizer.encode_chat(_says("Hi", "One\n", "Hi", "Two"))
    assert _runs(tokenizer, ids, mask) == ["One\n<|im_end|>", "Two<|im_end|>"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat(_says("Hi", "One\n", "Hi", "Two"))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "ends no answer with a special token"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "otherwise than in the whole conversation"),
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}", "otherwise"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% if loop.last and m.role == 'assistant' %}<|im_end|>{% endif %}"
            "{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}",
            "ends message 2 with no special token before the next message",
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content or m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "does not show which tokens the assistant writes",
        ),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
        ("{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", r"the answer has [\d,]+ bytes, and at most 1,\d{3},\d{3} are read"),
        ("{{ ''.__class__.__mro__ }}{{ messages.__class__.__init__.__globals__ }}", "is unsafe"),
        ("{% for m in messages %}", "is not a chat template"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_show_the_answers_is_refused(tmp_path: Path, template: str, reason: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("lmworks.tokenizer.rendering.SECONDS", 1.0)
    with pytest.raises(UserError, match=reason):
        _write(tmp_path, template).encode_chat(_says("Hi", "Hello"))
