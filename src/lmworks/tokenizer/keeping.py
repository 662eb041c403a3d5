"""Taking the tokenizer of another model as it is (`tokenizer.keep`)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.files import atomic_path, read_json, write_json, write_text
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer.foreign import ForeignTokenizer
from lmworks.tokenizer.opening import TEMPLATE, load
from lmworks.tokenizer.tokenizer import Tokenizer

KEPT = ("tokenizer.json", "tokenizer_config.json", TEMPLATE, "special_tokens_map.json", "generation_config.json")
"""The files of a tokenizer in a Hugging Face directory; the last names the tokens at which generation stops."""


def keep(recipe: Recipe, out_dir: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Copy the tokenizer at `tokenizer.path` into `out_dir`, byte for byte; returns it and a report.

    A chat template that is part of tokenizer_config.json is also written as a file of its own, with the same characters. Raises `UserError`
    if the tokenizer cannot be read, has ids that the embedding does not have, or if the recipe tunes on conversations and there is no chat
    template, or one that does not show which tokens the assistant writes.
    """
    assert recipe.tokenizer.path
    path = Path(recipe.tokenizer.path).expanduser()
    source = path.parent if path.suffix == ".json" else path
    if not (source / "tokenizer.json").is_file():
        raise UserError(f"{source} has no tokenizer.json, which the weights need; put it there")
    tokenizer = load(source)
    require_fit(tokenizer, recipe)
    if recipe.tune is not None:
        require_chat(tokenizer)
    out_dir.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (source / name).is_file():
            with atomic_path(out_dir / name) as aside:
                shutil.copyfile(source / name, aside)
    if tokenizer.has_chat_template and not (out_dir / TEMPLATE).exists():
        write_text(out_dir / TEMPLATE, tokenizer.chat_template)
    if isinstance(tokenizer, ForeignTokenizer):
        _write_stops(tokenizer, out_dir / "generation_config.json")
    report = {"origin": str(path), "kept": True, "vocab_size": tokenizer.vocab_size, "special_tokens": len(tokenizer.special),
              "stop_tokens": [tokenizer.decode([token]) for token in tokenizer.stop_ids]}  # fmt: skip
    return tokenizer, report


def _write_stops(tokenizer: ForeignTokenizer, path: Path) -> None:
    """config.json, which may name the end-of-text tokens, is not a file of the tokenizer."""
    known = read_json(path) if path.is_file() else {}
    if "eos_token_id" not in known:
        write_json(path, known | {"eos_token_id": list(tokenizer.eos_ids)})


def require_fit(tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Raise `UserError` if the tokenizer has ids that the embedding has no rows for."""
    rows = recipe.model.vocab_size or recipe.tokenizer.vocab_size
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"{tokenizer.directory / 'tokenizer.json'} has ids up to {tokenizer.vocab_size - 1:,}, but the embedding has {rows:,} rows; "
            f"put the tokenizer of these weights there, or add rows with tokenizer.vocab_size={tokenizer.vocab_size}"
        )


def require_chat(tokenizer: Tokenizer) -> None:
    """Raise `UserError` if a model with this tokenizer cannot be tuned on conversations."""
    if not tokenizer.has_chat_template:
        raise UserError(
            f"{tokenizer.directory} has no chat template, which tuning needs; set tokenizer.chat_template=brief for that of lmworks, or "
            f"put a {TEMPLATE} there"
        )
    tokenizer.encode_chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
