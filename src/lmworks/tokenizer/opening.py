"""Opens the tokenizer of a directory: one of lmworks or another model's; and takes another model's as it is (`tokenizer.as_is`).
"""

from __future__ import annotations

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.io.files import atomic_path, explain_damage, read_json, write_bytes, write_json, write_text
from lmworks.recipe.gguf_model import tokenizer_file
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tokenizer_files import other_form
from lmworks.tokenizer import special
from lmworks.tokenizer.chat import shipped_template
from lmworks.tokenizer.convert import name_other_ids
from lmworks.tokenizer.foreign import ForeignTokenizer
from lmworks.tokenizer.named import TEMPLATE, TEMPLATES, chat_templates, read_object, tokenizer_files
from lmworks.tokenizer.tokenizer import Tokenizer


def load(directory: Path) -> Tokenizer:
    """The tokenizer of a run or of a Hugging Face directory: a `Tokenizer` if it has our special tokens, and the chat template, if there is
    one, is ours; else a `ForeignTokenizer`. Raises `UserError` if there is none or it cannot be read."""
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise UserError(other_form(path.parent) or f"{path} does not exist; make it with `lmworks tokenizer train RECIPE`")
    spec = read_json(path)
    with explain_damage(path):
        added = {token["content"] for token in spec.get("added_tokens") or []}
    ours = added.issuperset(special.REQUIRED) and _has_own_template(Path(directory))
    tokenizer = Tokenizer(directory) if ours else ForeignTokenizer(directory)
    name_other_ids(tokenizer)
    return tokenizer


def _has_own_template(directory: Path) -> bool:
    ours = (shipped_template("brief"), shipped_template("glm-4.6"))
    return all(source in ours for source, _ in chat_templates(directory).values())


def keep(recipe: Recipe, out_dir: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Copy the tokenizer at `tokenizer.path` into `out_dir`, byte for byte where no tokens are added; returns it and a report.

    A chat template that is part of tokenizer_config.json is also written as a file of its own, with the same characters, unless there are
    several there, which that file would hide. One of `tokenizer.chat_template` takes the place of all. Raises `UserError`
    if the tokenizer cannot be read, if a token cannot be added, if it has ids that the embedding does not have, or if the recipe tunes on
    conversations and there is no chat template, or one that does not show which tokens the assistant writes.
    """
    source, template = _source(recipe), recipe.tokenizer.template_file
    tokenizer = load(source) if template is None else ForeignTokenizer(source, _template(template))
    require_fit(tokenizer, recipe)
    whole = kept_json(recipe)
    if recipe.tune is not None:
        require_chat(tokenizer)
    out_dir.mkdir(parents=True, exist_ok=True)
    names = [name for name in tokenizer_files(source) if template is None or not name.startswith(TEMPLATES)]
    for name in {*tokenizer_files(out_dir)} - {*names}:  # of what the recipe named before
        (out_dir / name).unlink()
    for name in names:
        (out_dir / name).parent.mkdir(exist_ok=True)
        with atomic_path(out_dir / name) as aside:
            shutil.copyfile(source / name, aside)
    if template is not None:
        write_text(out_dir / TEMPLATE, tokenizer.chat_template)
    if added := recipe.tokenizer.add_tokens:
        write_bytes(out_dir / "tokenizer.json", whole)
        _describe_added(out_dir, added)
        tokenizer = load(out_dir)
    if tokenizer.has_chat_template and not (out_dir / TEMPLATE).exists() and len(tokenizer.named_templates) == 1:
        write_text(out_dir / TEMPLATE, tokenizer.chat_template)
    if isinstance(tokenizer, ForeignTokenizer):
        _write_stops(tokenizer, out_dir / "generation_config.json")
    stops = [tokenizer.decode([token]) for token in tokenizer.stop_ids]
    before = read_json(out_dir / "report.json") if (out_dir / "report.json").is_file() else {}
    report = {"origin": str(recipe.tokenizer.path), "kept": True, "vocab_size": tokenizer.vocab_size, "added_tokens": len(added),
              "special_tokens": len(tokenizer.special), "stop_tokens": stops,
              "chat_date": before.get("chat_date") or date.today().isoformat()}  # fmt: skip
    return tokenizer, report


def _source(recipe: Recipe) -> Path:
    assert recipe.tokenizer.path
    source = tokenizer_file(Path(recipe.tokenizer.path).expanduser()).parent
    if not (source / "tokenizer.json").is_file():
        raise UserError(other_form(source) or f"{source} has no tokenizer.json, which the weights need; put it there")
    return source


def _template(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"{path} does not exist; put the chat template there, or correct tokenizer.chat_template")
    with explain_damage(path):
        return path.read_text(encoding="utf-8")


def kept_json(recipe: Recipe) -> bytes:
    """The tokenizer.json that is kept: that at `tokenizer.path`, with `tokenizer.add_tokens` behind its last id.

    Added tokens are text, not control tokens: what a user writes becomes them. Raises `UserError` for a text that is one token already.
    """
    source, texts = _source(recipe), recipe.tokenizer.add_tokens
    data = (source / "tokenizer.json").read_bytes()
    if not texts:
        return data
    tokenizer = load(source)
    if not isinstance(tokenizer, ForeignTokenizer):
        raise UserError(f"tokenizer.add_tokens: {source} has a tokenizer of lmworks, which takes no text as an added token; leave them out")
    require_fit(tokenizer, recipe)
    for text in texts:
        if text in tokenizer.special or len(tokenizer.encode_batch([text])[0]) == 1:
            raise UserError(f"tokenizer.add_tokens: {text!r} is a token of {source / 'tokenizer.json'} already; leave it out")
    spec = json.loads(data)
    own = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    spec["added_tokens"] += [{"id": number, "content": text} | own for number, text in enumerate(texts, tokenizer.vocab_size)]
    return (json.dumps(spec, ensure_ascii=False, indent=2) + "\n").encode()


def _describe_added(out_dir: Path, texts: list[str]) -> None:
    """tokenizer_config.json may list the added tokens once more."""
    config = read_json(out_dir / "tokenizer_config.json") if (out_dir / "tokenizer_config.json").is_file() else {}
    if "added_tokens_decoder" in config:
        added = read_json(out_dir / "tokenizer.json")["added_tokens"][-len(texts) :]
        config["added_tokens_decoder"] |= {str(one["id"]): {key: one[key] for key in one if key != "id"} for one in added}
        write_json(out_dir / "tokenizer_config.json", config)


def _write_stops(tokenizer: ForeignTokenizer, path: Path) -> None:
    """config.json, which may name the end-of-text tokens and that for padding, is not a file of the tokenizer."""
    known = read_object(path)
    stated = {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.stated_pad}
    if missing := {key: one for key, one in stated.items() if one is not None and known.get(key) is None}:
        write_json(path, known | missing)


def require_fit(tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Raise `UserError` if the tokenizer has ids that the embedding has no rows for."""
    rows = recipe.model.vocab_size or recipe.tokenizer.vocab_size
    entries = tokenizer.vocab_size + len(recipe.tokenizer.add_tokens)
    added = " with tokenizer.add_tokens" if recipe.tokenizer.add_tokens else ""
    if entries > rows:
        raise UserError(
            f"{tokenizer.directory / 'tokenizer.json'} has ids up to {entries - 1:,}{added}, but the embedding has {rows:,} rows; "
            f"put the tokenizer of these weights there, or add rows with tokenizer.vocab_size={entries}"
        )


def require_chat(tokenizer: Tokenizer) -> None:
    """Raise `UserError` if a model with this tokenizer cannot be tuned on conversations."""
    if not tokenizer.has_chat_template:
        raise UserError(
            f"{tokenizer.directory} has no chat template, which tuning needs; set tokenizer.chat_template=FILE.jinja for one with its own "
            "special tokens, or tokenizer.chat_template=brief for that of lmworks, which takes a byte-level tokenizer"
        )
    tokenizer.encode_chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
