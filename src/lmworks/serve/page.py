"""The chat page: one file without external resources, with a Content-Security-Policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmworks.serve.models import Models


@cache
def _source() -> str:
    return files("lmworks.serve").joinpath("page.html").read_text(encoding="utf-8")


def page(models: Models, chosen: str | None = None) -> tuple[str, str]:
    """The page for the `chosen` model (the first one if there is no model of that name), and its Content-Security-Policy."""
    name = chosen if chosen in models.known else models.first.name
    model = models.known[name]
    about = {"model": name, "context": model.context, "tuned": model.tuned, "models": list(models.known), "sampling": dict(model.sampling)}
    text = _source().replace("{{ABOUT}}", html.escape(json.dumps(about))).replace("{{MODEL}}", html.escape(name))
    policy = [
        "default-src 'none'", f"script-src {_hash(text, 'script')}", f"style-src {_hash(text, 'style')}", "connect-src 'self'",
        "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    ]  # fmt: skip
    return text, "; ".join(policy)


def _hash(text: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in found)
