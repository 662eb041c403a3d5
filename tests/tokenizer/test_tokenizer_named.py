"""Chat templates and special tokens by name, of other models: texts and ids are those of transformers, and the files stay what they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from base_models import write_tokenizer
from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import load
from lmworks.tokenizer.opening import keep

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}" + PLAIN.replace("<|im_end|>", "<|tools_end|>")
PARTS = (
    "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]  # fmt: skip
ASKED = [{"role": "user", "content": "Hello <|im_end|>there"}, {"role": "assistant", "content": "Yes."}]
NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]
SPECIAL = ("<s>", "<|tools_end|>", "<|sep|>", "<|image|>")


def folder_with(folder: Path, template: Any = None, beside: dict[str, Any] | None = None, more: dict[str, str] | None = None,
                **config: Any) -> Path:  # fmt: skip
    """A tokenizer with a template in tokenizer_config.json, which has `config`; `beside` is special_tokens_map.json, `more` other files."""
    write_tokenizer(folder, "qwen")
    (folder / "chat_template.jinja").unlink()
    spec = json.loads((folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first = max(token["id"] for token in spec["added_tokens"]) + 1
    spec["added_tokens"] += [{"id": number, "content": text} | flags for number, text in enumerate(SPECIAL, first)]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config | ({} if template is None else {"chat_template": template})))
    if beside is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(beside))
    for name, text in (more or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


NAMES = "{{ sep_token }}|{{ image_token }}|{{ think_token }}|{{ bos_token is defined }}|{{ documents is defined }}" + PLAIN
ADDED = {"added_tokens_decoder": {"0": {"content": "!", "special": False}}}
FOLDERS: dict[str, Callable[[Path], Path]] = {
    "a list": lambda path: folder_with(path, NAMED, bos_token="<s>"),
    "a list without one for tools": lambda path: folder_with(path, NAMED[:1]),
    "an object": lambda path: folder_with(path, {one["name"]: one["template"] for one in NAMED}),
    "files": lambda path: folder_with(path, "other", more={
        "chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": WITH_TOOLS}),
    "a file of the default beside the others": lambda path: folder_with(path, more={
        "chat_template.jinja": "other", "additional_chat_templates/default.jinja": PLAIN}),
    "a file that replaces a list": lambda path: folder_with(path, NAMED, more={"chat_template.jinja": PLAIN}),
    "a map": lambda path: folder_with(path, PLAIN, {"bos_token": "<s>"}),
    "a map of objects": lambda path: folder_with(path, NAMES, {"bos_token": {"content": "<s>", "lstrip": False, "rstrip": False,
                                                                             "normalized": False, "single_word": False}}),
    "a map that comes first": lambda path: folder_with(path, PLAIN, {"bos_token": "<s>"}, bos_token="<|sep|>"),
    "a map that takes a token away": lambda path: folder_with(path, NAMES, {"bos_token": None}, bos_token="<s>"),
    "a map that does not count": lambda path: folder_with(path, NAMES, {"bos_token": "<s>", "think_token": "<s>"}, **ADDED),
    "a map beside names of the model": lambda path: folder_with(path, NAMES, {"think_token": "<s>", "image_token": "<s>"},
                                                               think_token="<|sep|>"),
    "other names": lambda path: folder_with(path, NAMES, sep_token="<|sep|>", think_token="<|im_start|>", bos_token="<s>"),
    "names of the model": lambda path: folder_with(path, NAMES, extra_special_tokens={"image_token": "<|image|>", "think_token": "<s>"},
                                                   think_token="<|sep|>"),
    "names of the model in a map": lambda path: folder_with(path, NAMES, {"extra_special_tokens": {"image_token": "<|image|>"}},
                                                            extra_special_tokens={"image_token": "<|sep|>"}),
    "names in the older key": lambda path: folder_with(path, NAMES, additional_special_tokens={"image_token": "<|image|>"}),
    "a list of further tokens": lambda path: folder_with(path, NAMES, extra_special_tokens=["<|image|>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_text_and_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    import transformers

    folder = FOLDERS[name](tmp_path / "model")
    ours, peer = load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for tools in (None, TOOLS):
        for prompt, messages in ((True, ASKED[:1]), (False, ASKED)):
            options: Any = {"tools": tools, "add_generation_prompt": prompt}
            text = peer.apply_chat_template(messages, tokenize=False, **options)
            assert ours.apply_chat(messages, **options) == text
            plain = [one | {"content": one["content"].replace("<|im_end|>", "")} for one in messages]
            ids = peer.apply_chat_template(plain, tokenize=True, return_dict=False, **options)
            assert ours.encode_chat(plain, **options)[0] == list(ids)


def test_a_template_for_tools_gets_text_as_it_takes_it(tmp_path: Path) -> None:
    """As parts, which only a conversation with tools shows."""
    tokenizer = load(folder_with(tmp_path, [NAMED[0], {"name": "tool_use", "template": PARTS}]))
    assert tokenizer.apply_chat(ASKED[1:], TOOLS) == "weather <|im_start|>assistant\nYes.<|im_end|>\n"


def test_the_answers_are_those_of_the_template_for_tools(tmp_path: Path) -> None:
    """Its end of a turn is learned, and generation stops there."""
    tokenizer = load(folder_with(tmp_path, NAMED))
    for tools, end in ((None, "<|im_end|>"), (TOOLS, "<|tools_end|>"), ([], "<|im_end|>")):
        ids, mask = tokenizer.encode_chat(ASKED, tools)
        assert tokenizer.decode([one for one, spoken in zip(ids, mask, strict=True) if spoken]) == f"Yes.{end}"
        assert tokenizer.special[end] in tokenizer.stop_ids
    assert tokenizer.tool_template == WITH_TOOLS and tokenizer.chat_template == PLAIN


def test_calls_have_the_form_of_the_template_for_tools(tmp_path: Path) -> None:
    from lmworks.serve.vocabulary import Vocabulary

    calling = WITH_TOOLS + '{# <tool_call> {"arguments" #}'
    words = Vocabulary(load(folder_with(tmp_path, [NAMED[0], {"name": "tool_use", "template": calling}])))
    assert words.tool_form is not None and words.tool_form.family == "hermes"
    assert words.template == PLAIN and words.tool_template == calling


def test_a_folder_without_a_default_template_is_asked_in_no_chat(tmp_path: Path) -> None:
    """transformers refuses it too; and a file for tools alone hides what tokenizer_config.json has."""
    tokenizer = load(folder_with(tmp_path, PLAIN, more={"additional_chat_templates/tool_use.jinja": WITH_TOOLS}))
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="has no chat_template"):
        tokenizer.apply_chat(ASKED)


def test_all_templates_show_the_day_of_the_run(tmp_path: Path) -> None:
    dated = [one | {"template": "{{ strftime_now('%Y-%m-%d') }}" + one["template"]} for one in NAMED]
    folder = folder_with(tmp_path, dated, more={"report.json": json.dumps({"chat_date": "2024-02-03"})})
    tokenizer = load(folder)
    assert tokenizer.stop_ids and tokenizer.apply_chat(ASKED, TOOLS).startswith(date.today().isoformat()[:3])
    tokenizer.fix_date()
    assert all(tokenizer.apply_chat(ASKED, tools).startswith("2024-02-03") for tools in (None, TOOLS))


def test_a_token_named_as_a_variable_does_not_replace_it(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path, PLAIN, extra_special_tokens={"messages": "<s>", "call": "<s>", "add_generation_prompt": "<s>"}))
    assert tokenizer.apply_chat(ASKED[1:]) == "<|im_start|>assistant\nYes.<|im_end|>\n"


def kept(source: Path, out: Path, **changes: Any) -> Any:
    return keep(Recipe.model_validate({"name": "t", "tokenizer": {"path": str(source)} | changes}), out)[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["a list", "files", "a map"])
def test_a_run_keeps_the_files_and_hides_no_template(tmp_path: Path, name: str) -> None:
    source, out = FOLDERS[name](tmp_path / "model"), tmp_path / "run"
    before = load(source)
    tokenizer = kept(source, out)
    found = contents(out)
    added = {"chat_template.jinja": PLAIN.encode()} if name == "a map" else {}  # the one template, as a file of its own
    assert found == contents(source) | added
    assert all(tokenizer.apply_chat(ASKED, tools) == before.apply_chat(ASKED, tools) for tools in (None, TOOLS))


def test_a_template_of_the_recipe_replaces_all_and_leaves_with_it(tmp_path: Path) -> None:
    source, out, own = FOLDERS["files"](tmp_path / "model"), tmp_path / "run", tmp_path / "own.jinja"
    own.write_text(PLAIN.replace("user", "asks"))
    kept(source, out)
    tokenizer = kept(source, out, chat_template=str(own), as_is=True)
    assert load(out).apply_chat(ASKED, TOOLS) == tokenizer.apply_chat(ASKED, TOOLS) == tokenizer.apply_chat(ASKED)
    assert not (out / "additional_chat_templates" / "tool_use.jinja").exists()
    kept(FOLDERS["a list"](tmp_path / "other"), out)
    assert contents(out) == contents(tmp_path / "other")


@pytest.mark.parametrize(("generation", "config", "pad"), [(3, 5, 3), (None, 5, 5), (None, -1, None), (None, None, None)])
def test_the_pad_id_that_a_model_states_comes_first(tmp_path: Path, generation: int | None, config: int | None, pad: int | None) -> None:
    folder = folder_with(tmp_path / "model", PLAIN)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": generation}))
    (folder / "config.json").write_text(json.dumps({"pad_token_id": config}))
    for tokenizer in (load(folder), kept(folder, tmp_path / "run"), load(tmp_path / "run")):  # config.json is none of its files
        assert tokenizer.pad_id == (tokenizer.eos_id if pad is None else pad)


def test_add_bos_token_says_nothing_beside_a_tokenizer_json(tmp_path: Path) -> None:
    import transformers

    folder = folder_with(tmp_path, PLAIN, bos_token="<s>", add_bos_token=True)
    assert load(folder).encode("Hello") == transformers.AutoTokenizer.from_pretrained(folder)("Hello")["input_ids"]


def test_a_token_that_is_a_single_word_is_none_inside_of_one(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, PLAIN)
    spec = json.loads((folder / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["single_word"] = token["content"] in ("<|sep|>", "<s>")
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    from tokenizers import Tokenizer

    ours, peer = load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    around = ["", " ", "a", "é", "東", "_", "7", ".", "\u0301", "\u200d", "\u0903", "Ⅷ", "²", "<s>", "<|image|>"]
    for text in (f"{one}<|sep|>{other}" for one in around for other in around):
        assert ours.encode(text, allow_special=True) == peer.encode(text).ids, text
    # a template may cut the word off, so none of a user's stays whole
    cut = "{% for m in messages %}{{ m.content | replace('no', '') }}<|im_end|>{% endfor %}"
    ours = load(folder_with(tmp_path, cut))
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    ids = load(folder).encode_chat([{"role": "user", "content": "no<|sep|>"}], add_generation_prompt=True)[0]
    assert ours.special["<|sep|>"] not in ids
