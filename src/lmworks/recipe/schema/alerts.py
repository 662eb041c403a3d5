"""Alerts: messages about a run to commands and URLs of the user."""

from __future__ import annotations

import re
import urllib.parse
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from lmworks.io.masking import MASK
from lmworks.recipe.schema.base import NO_EFFECT, Node
from lmworks.recipe.schema.units import Seconds

AlertKind = Literal[
    "finding", "spike", "stall", "save_failed", "dead_rank", "slow_rank", "excluded_host", "finished", "failed", "preempted", "stopped"
]
DEFAULT_KINDS: tuple[AlertKind, ...] = (
    "finding", "spike", "stall", "save_failed", "dead_rank", "slow_rank", "excluded_host", "finished", "failed", "preempted"
)  # fmt: skip
_SECRET_SEGMENT = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9%+=.~:]{20,}")
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


def check_url(url: str) -> None:
    """Raise `ValueError` if this is no URL to send to."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = None, None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or re.search(r"[\x00-\x20\x7f]", url):
        raise ValueError("it is not a URL of the form https://HOST/PATH")


class AlertTarget(Node):
    """Where alerts are sent: a URL, or a command that reads the alert from its standard input."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", description="name of the target in the ledger and in errors")
    url: str | None = Field(
        None, description="URL to which an alert is sent with POST; credentials before the @ and in the query are masked everywhere"
    )
    url_variable: str | None = Field(
        None,
        pattern=_VARIABLE,
        description="environment variable with the URL, for one whose path is a secret, such as that of a chat service",
    )
    token_variable: str | None = Field(
        None, pattern=_VARIABLE, description="environment variable with a token that is sent as `Authorization: Bearer TOKEN`"
    )
    command: tuple[Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00]*$")], ...] = Field(
        (), description="command and its arguments, run without a shell; no secrets, because a recipe is stored"
    )
    format: Literal["json", "text"] = Field("json", description="json: the alert as a JSON object; text: its sentence alone")
    on: tuple[AlertKind, ...] = Field(
        DEFAULT_KINDS, description="kinds of alerts that are sent; all but `stopped`, a stop that was asked for with Ctrl-C, by default"
    )

    @field_validator("url")
    @classmethod
    def _sound(cls, url: str | None) -> str | None:
        if url is not None:
            check_url(url)
            path = urllib.parse.urlsplit(url).path
            if MASK in path or any(_SECRET_SEGMENT.fullmatch(one) for one in path.split("/")):
                raise ValueError(
                    "the path of this URL looks like a secret, and a recipe is stored and printed; export the URL in the shell that starts "
                    "the run, and give the name of the variable as url_variable"
                )
        return url

    @model_validator(mode="after")
    def _one_way(self) -> AlertTarget:
        given = [key for key in ("url", "url_variable", "command") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(f"alerts.targets.{self.name}: give one of url, url_variable and command, not {' and '.join(given) or 'none'}")
        if self.command and self.token_variable:
            raise ValueError(f"alerts.targets.{self.name}: token_variable is for a URL; a command reads the environment by itself")
        return self


class Alerts(Node):
    """Messages about a run: findings, stalls, spikes, failed saves, ranks and hosts, and its end. No key here affects a weight."""

    effect: ClassVar = NO_EFFECT

    targets: list[AlertTarget] = Field(default_factory=list, description="commands and URLs that get the alerts")
    repeat_after: Seconds = Field(Seconds.parse("1 h"), description="time in which an alert of the same cause is sent only once")
    timeout: Seconds = Field(Seconds.parse("10 s"), description="time limit of one attempt, after which a command is killed")
    attempts: int = Field(3, gt=0, le=10, description="attempts to send an alert, with growing pauses")
    stall_factor: float = Field(10.0, gt=1, description="time without a step that counts as a stall, as a multiple of the median step time")
    stall_min: Seconds = Field(Seconds.parse("1 min"), description="minimum time without a step that counts as a stall")

    @model_validator(mode="after")
    def _names_differ(self) -> Alerts:
        names = [one.name for one in self.targets]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"alerts.targets lists {twice} twice; give each target a name of its own")
        return self
