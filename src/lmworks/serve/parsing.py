"""Parses request bodies of clients, which may be invalid or hostile."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import ValidationError

from lmworks.recipe.keys import nearest
from lmworks.serve.parameters import BadRequest, accepted, instead
from lmworks.serve.protocol import ChatRequest, CompletionRequest, Sampling

_MAX_DEPTH = 64  # of nested lists and objects
R = TypeVar("R", bound=Sampling)


def parse(kind: type[R], body: bytes, models: Collection[str]) -> R:
    """Parse and validate a request body, for a server with `models`. Raises `BadRequest` with one line that names the field."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    if _is_deeper(value, _MAX_DEPTH):
        raise BadRequest(f"the lists and objects of the body are nested more than {_MAX_DEPTH} deep")
    value = _known(kind, value)
    try:
        request = kind.model_validate(value)
    except ValidationError as error:
        # Each member of a union reports an error; the deepest one belongs to the member that was probably meant.
        deepest = max(error.errors(include_url=False, include_input=False), key=lambda found: len(found["loc"]))
        where = ".".join(str(part) for part in deepest["loc"] if not (isinstance(part, str) and "[" in part))
        raise BadRequest(f"{where or 'body'}: {deepest['msg']}", where or None) from None
    if request.model is not None:
        require_known(request.model, models)
    return request


def require_known(name: str, models: Collection[str]) -> None:
    """Raise `BadRequest` unless a model of this name is served."""
    if name not in models:
        has = " and ".join(f"`{known}`" for known in models)
        raise BadRequest(f"the model `{name}` does not exist; this server has {has}", "model", "model_not_found", 404)


def _known(kind: type[Sampling], value: dict[str, Any]) -> dict[str, Any]:
    """The parameters that are used. Raises `BadRequest` that names the first unknown one that could change the answer."""
    unknown = next((key for key, item in value.items() if key not in kind.model_fields and not accepted(key, item)), None)
    if unknown is None:
        return {key: item for key, item in value.items() if key in kind.model_fields}
    name, other = unknown[:100], ChatRequest if kind is CompletionRequest else CompletionRequest
    close = instead(unknown) or nearest(name, list(kind.model_fields))
    if unknown in other.model_fields:
        hint = f"is a parameter of /v1/{'chat/completions' if other is ChatRequest else 'completions'}, not of this endpoint"
    elif instead(unknown):
        hint = f"is not supported by this server; use {close}"
    else:
        hint = f"is not a known parameter; did you mean {close}?" if close else "is not a known parameter; remove it"
    raise BadRequest(f"{name} {hint}", name)


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [item for one in level if isinstance(one, (dict, list)) for item in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return False
    return any(isinstance(one, (dict, list)) for one in level)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
