"""Errors in OpenAI's format."""

from __future__ import annotations

from typing import Any

from lmworks.errors import one_line


class BadRequest(Exception):
    """A rejected request; `param` names the invalid field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error response in OpenAI's format."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    error = {"message": one_line(message), "type": kind, "param": param, "code": code}
    # message and param may quote a lone surrogate from the request
    return {"error": {name: text and text.encode("utf-8", "replace").decode() for name, text in error.items()}}
