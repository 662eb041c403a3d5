"""Masking of credentials in URLs, for text that is shown or written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

MASK = "***"
# The user info of a URL: everything between :// and the last @ before the path.
USER = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*)://([^\s/?#\"]*)@")
_QUERY = re.compile(r"([?&;]([^=&;?#\s\"]{1,100})=)([^&;#\s\"]*)")
# Webhooks of Slack, Discord and Telegram, whose path is the secret.
_WEBHOOK = re.compile(r"(://[^\s/?#\"]+/(?:services/|api/webhooks/|bot(?=\d+:)))[^\s?#\"]+")
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")  # Azure: the part before the @ is not a user
ISSUED = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"(?:AKIA|ASIA)[0-9A-Z]{16}"  # Amazon
    r"|gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{22,255}|glpat-[A-Za-z0-9_-]{20,64}"
    r"|xox[abeprs]-[A-Za-z0-9-]{10,250}"  # Slack
    r"|sk-(?:ant-|proj-|live-)?[A-Za-z0-9_-]{20,250}|AIza[A-Za-z0-9_-]{35}|hf_[A-Za-z0-9]{30,64}"
    r"|[sr]k_live_[A-Za-z0-9]{16,128}|SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}|npm_[A-Za-z0-9]{36}|pypi-AgEI[A-Za-z0-9_-]{40,250}"
    r"|eyJ[A-Za-z0-9_-]{10,2000}\.eyJ[A-Za-z0-9_-]{10,2000}\.[A-Za-z0-9_-]{10,2000}"  # JSON Web Token
    r")(?![A-Za-z0-9_-])"
)
"""A key or token of a known issuer, by its prefix."""
_HANDED = re.compile(r"\bBearer +[\w.~+/=-]{8,}|\bsshpass +-p *(?!\$)\S", re.IGNORECASE)  # one that a command is given
SECRET_NAME = re.compile(r"key|token|secret|sig|pass|pwd|auth|cred|session|jwt", re.IGNORECASE)
_SECRET_LOOK = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[\w%+/=.~-]{24,}")


def mask(text: str) -> str:
    """`text` with *** for the user info of each URL, for query values that are secret by name or form, and for the path of a webhook."""
    return mask_values(_WEBHOOK.sub(rf"\1{MASK}", USER.sub(_without_user, text))) if "://" in text else text


def holds_secret(text: str) -> bool:
    """Whether a text has a key or token of a known issuer, or hands one to a command."""
    return ISSUED.search(text) is not None or _HANDED.search(text) is not None


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` applied to every string in it."""
    if isinstance(value, str):
        return change(value)
    if value is None or isinstance(value, (int, float)):  # most of a recipe, and asking whether a number is a Mapping is slow
        return value
    if isinstance(value, Mapping):
        return {key: map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_strings(item, change) for item in value)
    return value


def mask_values(text: str) -> str:
    """`text` with *** for query values that are secret by name or form."""
    return _QUERY.sub(_without_value, text)


def _without_user(found: re.Match[str]) -> str:
    if found[1].lower() in _CONTAINERS and ":" not in found[2]:
        return found[0]
    return f"{found[1]}://{MASK}@"


def _without_value(found: re.Match[str]) -> str:
    secret = found[3] and (SECRET_NAME.search(found[2]) or _SECRET_LOOK.fullmatch(found[3]))
    return found[1] + MASK if secret else found[0]
