"""The result of each check of a node, the report of all, and that of several hosts: verdict, exit code and JSON, which is stable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from lmworks.ui.exit_codes import ExitCode

VERSION = 1  # of the JSON
Status = Literal["ok", "warn", "fail", "skip", "unknown"]
"""`skip`: not checked, because this machine lacks what is checked; `unknown`: the check began, and could not judge."""
_MOST_TEXT = 2000  # characters of a text that another host has sent


@dataclass(frozen=True)
class Result:
    """`text` is one line, `advice` the remedy; `figures` are measurements by name with unit."""

    status: Status
    text: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Checked:
    """The result of the check `name`, and its duration in seconds."""

    name: str
    title: str
    result: Result
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """All checks of a node. `began` is by its own clock, in seconds since 1970, and `ended` is as many seconds later as the checks took;
    `versions`: of driver and libraries."""

    host: str
    began: float
    ended: float
    checks: Sequence[Checked]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def code(self) -> ExitCode:
        return code_of(self.checks)

    @property
    def failures(self) -> list[str]:
        """Title and text of each failed check."""
        return [f"{checked.title}: {checked.result.text}" for checked in self.checks if checked.result.status == "fail"]

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION, "host": self.host, "began": round(self.began, 3), "ended": round(self.ended, 3),
            "verdict": _verdict(self.code), "code": int(self.code), "versions": dict(self.versions), "checks": _plain(self.checks),
        }  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that another host has printed. Raises ValueError for anything else."""
        try:
            tree = json.loads(text)
            if tree["version"] != VERSION:
                raise ValueError(f"version {tree['version']!r} of the report")
            checks = [
                Checked(
                    str(one["name"])[:100], str(one["title"])[:200],
                    Result(
                        _status(one["status"]), _line(one["text"]), _line(one["advice"]),
                        {str(name)[:200]: float(value) for name, value in one["figures"].items()},
                    ), float(one["seconds"]),
                ) for one in tree["checks"]
            ]  # fmt: skip
            versions = {str(name)[:100]: _line(value) for name, value in tree["versions"].items()}
            return cls(str(tree["host"])[:200], float(tree["began"]), float(tree["ended"]), checks, versions)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class HostsReport:
    """The reports of several hosts by name, and the `checks` in which all of them take part."""

    hosts: Mapping[str, Report]
    checks: Sequence[Checked] = ()

    @property
    def code(self) -> ExitCode:
        """That of the worst host or check."""
        asked = [checked for checked in self.checks if checked.result.status != "skip"]  # one host alone has no links
        found = {*(report.code for report in self.hosts.values()), *([code_of(asked)] if asked else [])}
        return next((code for code in (ExitCode.FAILED, ExitCode.USER_ERROR) if code in found), ExitCode.OK)

    def to_json(self) -> dict[str, Any]:
        hosts = [report.to_json() for report in self.hosts.values()]
        return {
            "version": VERSION, "verdict": _verdict(self.code), "code": int(self.code), "hosts": hosts, "checks": _plain(self.checks),
        }  # fmt: skip


def code_of(checks: Sequence[Checked]) -> ExitCode:
    """0 healthy, 1 a check failed, 2 nothing failed and at least one check could not judge."""
    found = {checked.result.status for checked in checks}
    if "fail" in found:
        return ExitCode.FAILED
    return ExitCode.USER_ERROR if "unknown" in found or found <= {"skip"} else ExitCode.OK


def _verdict(code: ExitCode) -> str:
    return {ExitCode.OK: "healthy", ExitCode.FAILED: "failed"}.get(code, "unknown")


def _plain(checks: Sequence[Checked]) -> list[dict[str, Any]]:
    return [{"name": one.name, "title": one.title, **asdict(one.result), "seconds": round(one.seconds, 3)} for one in checks]


def _status(value: Any) -> Status:
    if value not in get_args(Status):
        raise ValueError(f"status {value!r}")
    found: Status = value
    return found


def _line(value: Any) -> str:
    return " ".join(str(value).split())[:_MOST_TEXT]
