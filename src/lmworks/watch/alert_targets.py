"""Delivery of an alert to a URL or a command, with a time limit and without secrets in errors.

A redirect is not followed: it would send credentials, or the alert, to a host that the user has not named. Nothing of the response but its
status is read. A command runs without a shell in a session of its own, gets the alert on standard input, and is killed with its children
after the time limit; its output is discarded, since programs print the URLs that they call.
"""

from __future__ import annotations

import base64
import http.client
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lmworks.errors import UserError
from lmworks.io.masking import mask
from lmworks.io.urls import reveal
from lmworks.recipe.schema.alerts import Alerts, AlertTarget, check_url
from lmworks.watch.alerts import TEST

_PAUSE = 1.0  # seconds before the second attempt; doubled for each later one


class NotDelivered(Exception):
    """Why an alert was not delivered, without secrets. `final`: another attempt would fail in the same way."""

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


@dataclass(frozen=True)
class Target:
    """A target with the credentials that the recipe does not hold: they exist in the memory of the process that sends."""

    name: str
    form: str
    on: tuple[str, ...]
    url: str = ""
    token: str = ""
    command: tuple[str, ...] = ()

    def wants(self, kind: str) -> bool:
        return kind == TEST or kind in self.on

    def deliver(self, content: bytes, timeout: float) -> None:
        """Send once. Raises `NotDelivered`."""
        if self.command:
            _run(self.command, content, timeout)
        else:
            _post(self.url, self.token, content, "application/json" if self.form == "json" else "text/plain; charset=utf-8", timeout)

    def deliver_patiently(self, content: bytes, timeout: float, attempts: int, pause: Callable[[float], object] = time.sleep) -> int:
        """Send, with pauses between the attempts; returns the number of attempts that it took. Raises `NotDelivered`."""
        for attempt in range(1, attempts + 1):
            try:
                self.deliver(content, timeout)
                return attempt
            except NotDelivered as failure:
                if failure.final or attempt == attempts:
                    raise
            pause(_PAUSE * 2 ** (attempt - 1))
        raise AssertionError("there is at least one attempt")


def open_target(options: AlertTarget) -> Target:
    """A target with its credentials, from the recipe and the environment. Raises `UserError` if it cannot be used here."""
    where = f"alerts.targets.{options.name}"
    target = Target(options.name, options.format, options.on)
    if options.command:
        command = tuple(reveal(list(options.command)))
        if shutil.which(command[0]) is None:
            raise UserError(f"{where}.command: there is no program {mask(command[0])} here; install it, or give its path")
        return replace(target, command=command)
    url = reveal(options.url) if options.url is not None else _variable(options.url_variable, f"{where}.url_variable")
    if options.url_variable:
        try:
            check_url(url)
        except ValueError as error:
            raise UserError(f"{where}.url_variable: {options.url_variable}: {error}") from None
    token = _variable(options.token_variable, f"{where}.token_variable") if options.token_variable else ""
    if not (token.isascii() and token.isprintable()):
        raise UserError(f"{where}.token_variable: {options.token_variable} is not a token: it has characters that no header may have")
    return replace(target, url=url, token=token)


def _variable(name: str | None, where: str) -> str:
    found = os.environ.get(name or "", "").strip()
    if not found:
        raise UserError(f"{where}: the environment variable {name} is not set; export it in the shell that starts the run")
    return found


def refusals(options: Alerts) -> Iterator[UserError]:
    """The targets that cannot be used on this machine."""
    for target in options.targets:
        try:
            open_target(target)
        except UserError as error:
            yield error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, token: str, content: bytes, kind: str, timeout: float) -> None:
    parts = urllib.parse.urlsplit(url)
    headers = {"Content-Type": kind, "User-Agent": "lmworks"}
    if "@" in parts.netloc:
        pair = ":".join(urllib.parse.unquote(one or "") for one in (parts.username, parts.password))
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(urllib.parse.urlunsplit(parts), content, headers, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout):
            return
    except urllib.error.HTTPError as error:
        error.close()
        if 300 <= error.code < 400:
            raise NotDelivered(
                f"it answers with a redirect ({error.code}), which is not followed; give the final URL", final=True
            ) from None
        again = error.code == 429 or error.code >= 500
        raise NotDelivered(f"it answers with status {error.code} {error.reason}"[:200], final=not again) from None
    except TimeoutError:
        raise NotDelivered(f"it does not answer within {timeout:g} s") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise NotDelivered(f"it does not answer within {timeout:g} s") from None
        raise NotDelivered(f"{parts.hostname} cannot be reached ({mask(str(error.reason))[:200]})") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotDelivered(f"{parts.hostname} does not answer as a web server does ({type(error).__name__})") from None


def _run(command: Sequence[str], content: bytes, timeout: float) -> None:
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise NotDelivered(f"it cannot be started: {error.strerror}", final=True) from None
    try:
        process.communicate(content, timeout=timeout)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise NotDelivered(f"it did not end within {timeout:g} s and was killed") from None
    if process.returncode < 0:
        raise NotDelivered(f"it was killed by {signal.Signals(-process.returncode).name}")
    if process.returncode:
        raise NotDelivered(f"it ended with exit code {process.returncode}")
