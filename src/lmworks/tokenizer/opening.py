"""Opens the tokenizer of a directory: one of lmworks, or that of another model."""

from __future__ import annotations

from pathlib import Path

from lmworks.errors import UserError
from lmworks.files import explain_damage, read_json
from lmworks.tokenizer import special
from lmworks.tokenizer.chat import shipped_template
from lmworks.tokenizer.foreign import ForeignTokenizer
from lmworks.tokenizer.tokenizer import Tokenizer

TEMPLATE = "chat_template.jinja"


def load(directory: Path) -> Tokenizer:
    """The tokenizer of a run or of a Hugging Face directory: a `Tokenizer` if it has our special tokens, and the chat template, if there is
    one, is ours; else a `ForeignTokenizer`. Raises `UserError` if there is none or it cannot be read."""
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; make it with `lmworks tokenizer train RECIPE`")
    spec = read_json(path)
    with explain_damage(path):
        added = {token["content"] for token in spec.get("added_tokens") or []}
    ours = added.issuperset(special.REQUIRED) and _has_own_template(Path(directory))
    return Tokenizer(directory) if ours else ForeignTokenizer(directory)


def _has_own_template(directory: Path) -> bool:
    path, config = directory / TEMPLATE, directory / "tokenizer_config.json"
    source: str | None
    if path.is_file():
        source = path.read_text(encoding="utf-8", errors="replace")
    else:
        found = read_json(config) if config.is_file() else {}
        source = found.get("chat_template") if isinstance(found, dict) else None
    return source is None or source in (shipped_template("brief"), shipped_template("glm-4.6"))
