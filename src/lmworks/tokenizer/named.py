"""The special tokens and chat templates that the files of a Hugging Face folder name, as `transformers` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmworks.io.files import explain_damage, read_json

TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
DEFAULT, TOOL_USE = "default", "tool_use"
"""The names of two templates: that of a conversation, and that of one with tools where a folder has one of its own for them."""
_CONFIG, _MAP = "tokenizer_config.json", "special_tokens_map.json"
FILES = ("tokenizer.json", _CONFIG, TEMPLATE, _MAP, "generation_config.json")
"""The files of a tokenizer; the last names the tokens at which generation stops."""
_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_files(directory: Path) -> list[str]:
    """The files of the tokenizer that are in a folder, by their names below it."""
    more = sorted(f"{TEMPLATES}/{path.name}" for path in (directory / TEMPLATES).glob("*.jinja"))
    return [name for name in (*FILES, *more) if (directory / name).is_file()]


def chat_templates(directory: Path) -> dict[str, tuple[str, Path]]:
    """The chat templates by name, each with the file that it is in. Files of their own take the place of all in tokenizer_config.json."""
    paths = {DEFAULT: directory / TEMPLATE} | {path.stem: path for path in sorted((directory / TEMPLATES).glob("*.jinja"))}
    found: dict[str, tuple[str, Path]] = {}
    for name, path in paths.items():
        if path.is_file():
            with explain_damage(path):
                found[name] = path.read_text(encoding="utf-8"), path
    if found:
        return found
    given = read_object(directory / _CONFIG).get("chat_template")
    if isinstance(given, list):
        given = {one["name"]: one.get("template") for one in given if isinstance(one, dict) and isinstance(one.get("name"), str)}
    named = given if isinstance(given, dict) else {DEFAULT: given}
    return {name: (source, directory / _CONFIG) for name, source in named.items() if isinstance(source, str)}


def special_tokens(directory: Path) -> dict[str, str]:
    """The texts of the special tokens by the names that a chat template has for them: bos_token, eos_token and all others.

    Where tokenizer_config.json describes each added token itself, special_tokens_map.json does not count; else it comes first for the names
    that all tokenizers have, and last for those of one model.
    """
    config = read_object(directory / _CONFIG)
    beside = {} if "added_tokens_decoder" in config else read_object(directory / _MAP)
    named: dict[str, Any] = {name: config.get(name) for name in _STANDARD} | {name: beside[name] for name in _STANDARD if name in beside}
    for source in (beside, config):
        named |= {name: one for name, one in source.items() if name.endswith("_token") and name not in _STANDARD and one is not None}
    for extra in (config.get("extra_special_tokens") or config.get("additional_special_tokens"), beside.get("extra_special_tokens")):
        named |= extra if isinstance(extra, dict) else {}
    return {name: text for name, one in named.items() if (text := _text_of(one)) is not None}


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file, or another value in it."""
    found = read_json(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _text_of(token: Any) -> str | None:
    """The text of a special token, which is a string or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
