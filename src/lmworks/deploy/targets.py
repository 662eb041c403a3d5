"""Addresses that the user gives."""

from __future__ import annotations

import ipaddress
import re

from lmworks.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?\Z")


def require_host(text: str) -> None:
    """Raise `UserError` unless `text` is an IP address or a host name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if not _NAME.match(text):
            raise UserError(f"--host {text!r} is neither an IP address nor a host name") from None


def require_target(text: str) -> None:
    """Raise `UserError` unless `text` is HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--trainer {text!r} must be HOST:PORT, such as 127.0.0.1:9400")
    require_host(host.removeprefix("[").removesuffix("]"))
