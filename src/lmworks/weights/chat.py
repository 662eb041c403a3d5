"""Whether weights answer in a chat: whether they were trained on conversations, so that prompts are rendered by their chat template.

The weights that a run starts from are judged once, when it begins, and its checkpoints say it: the folder may have moved since.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.io.run_layout import BASE, of_checkpoint
from lmworks.recipe.hub import locate
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.weights import Weights, find_weights, holds_model
from lmworks.tokenizer.named import DEFAULT, chat_templates

TAG = "conversational"
"""The tag of a model card that says that the model was trained on conversations, as the Hugging Face Hub spells it."""
RECORD = "chat"
"""Key of what a checkpoint says about the weights that its run started from."""
_CARD_BYTES = 1 << 20


def is_chat(weights: Weights) -> bool:
    """Whether these weights answer in a chat. Our exports always have a chat template, and their card says what they were trained on; of
    other models the template is all that tells."""
    if weights.kind == "checkpoint":
        assert weights.recipe is not None
        stage, run_dir = of_checkpoint(weights.path.resolve())
        return stage is not BASE or base_is_chat(run_dir, weights.recipe)
    tags = _card(weights.path).get("tags")
    if isinstance(tags, list) and "lmworks" in tags:
        return TAG in tags
    return _has_template(weights.tokenizer.parent)


def start_is_chat(run_dir: Path) -> bool:
    """Whether the weights that a run started from answer in a chat, by its checkpoints; False where nothing says it."""
    for newest in reversed(listing.directories(run_dir / BASE.checkpoints)):
        with suppress(UserError, OSError):
            return (listing.read_meta(newest)["meta"].get("start_from") or {}).get(RECORD) is True
    return False


def base_is_chat(run_dir: Path, recipe: Recipe) -> bool:
    """Whether the base model of a run answers in a chat: it is the model of `start_from` as it was, and that one did."""
    return not recipe.trains_base and start_is_chat(run_dir)


def require_template(where: str) -> None:
    """Raise `UserError` if `where`, as for `open_model`, is a model of others without a chat template, as base models are.

    Reads no weights."""
    path = Path(locate(where)).expanduser()
    if holds_model(path) and not _has_template(find_weights(path).tokenizer.parent):
        raise UserError(
            f"{where} has no chat template, as base models have none: lmworks serve {where} completes text at /v1/completions; for a chat, "
            "tune it (start_from, with tokenizer.chat_template)"
        )


def _has_template(folder: Path) -> bool:
    """As `Tokenizer.has_chat_template`, by the files alone."""
    return DEFAULT in chat_templates(folder)


def _card(path: Path) -> dict[str, Any]:
    """The front matter of the model card; empty if there is none that can be read."""
    try:
        with open(path / "README.md", encoding="utf-8") as file:
            text = file.read(_CARD_BYTES)
        found = yaml.safe_load(text.split("\n---", 1)[0].removeprefix("---")) if text.startswith("---\n") else {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
