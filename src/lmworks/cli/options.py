"""Shared by the commands: arguments and options, printing."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from lmworks.cli import completion
from lmworks.errors import UserError
from lmworks.run.start import HEADINGS
from lmworks.ui.terminal import Terminal

if TYPE_CHECKING:
    import torch

    from lmworks.run.runner import StageEvent


RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", autocompletion=completion.recipes, help="A recipe file, or the name of a shipped recipe.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", autocompletion=completion.runs, help="A run directory, such as runs/quickstart.")
]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="A.B=C", autocompletion=completion.keys, help="Override a recipe value; may be repeated.", default_factory=list,
        show_default=False,
    ),
]  # fmt: skip
AllowOption = Annotated[
    list[str],
    typer.Option(
        "--allow", metavar="A.B", default_factory=list, show_default=False,
        help="Allow this recipe key to differ from the one that training began with; may be repeated.",
    ),
]  # fmt: skip
SizeOption = Annotated[
    str | None, typer.Option("--size", metavar="N", help="Parameter count, such as 125M; everything else is derived from it.")
]
TimeOption = Annotated[
    str | None,
    typer.Option("--time", metavar="T", help="Wall time of the whole run, such as 8min; token budgets are scaled by the measured speed."),
]
ToOption = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="STAGE", autocompletion=completion.stages, help=f"Last stage of the run: {', '.join(HEADINGS)}; by default all."
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="D", show_default=False, help="Device, such as cpu, cuda or cuda:1; by default the first GPU, else the CPU."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def device_of(text: str | None) -> torch.device:
    """The device of `--device`. Raises `UserError` if this machine has no such device."""
    import torch

    has_gpu = torch.cuda.is_available()
    if text is None:
        return torch.device("cuda" if has_gpu else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu" or (device.type == "cuda" and has_gpu and (device.index or 0) < torch.cuda.device_count()):
        return device
    there = ", ".join(["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count() if has_gpu else 0))])
    raise UserError(f"--device: {text!r} is no device of this machine, which has {there}")


def within(time: str | None, overrides: Sequence[str]) -> list[str]:
    """The overrides, including `--time`."""
    return [*overrides, *([f"time={time}"] if time is not None else [])]


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Expand a parameter that is a dataclass of options into one parameter per field, because typer reads options from the signature."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if is_dataclass(kind):
            groups[name] = kind
            own = get_type_hints(kind, include_extras=True)
            parameters += [_parameter(one.name, own[one.name], one.default) for one in fields(kind)]
        else:
            parameters.append(_parameter(name, kind, parameter.default))

    @wraps(command)
    def whole(**given: Any) -> None:
        made = {name: kind(**{one.name: given.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()}
        command(**made, **given)

    whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    whole.__annotations__ = {one.name: one.annotation for one in parameters}
    return whole


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    absent = default is MISSING or default is inspect.Parameter.empty
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=inspect.Parameter.empty if absent else default
    )


_CONTROL = re.compile("[\x7f-\x9f]")  # the others are escaped anyway


def console(piped: int = 1000) -> Terminal:
    """Standard output; in a pipe or a file no line is cut to a width that nothing has, unless a table of long texts asks for one."""
    found = Terminal()
    return found if found.is_terminal else Terminal(width=piped)


def print_json(value: Any) -> None:
    """For machines."""
    plain = (sys.stdout.encoding or "ascii").lower() != "utf-8"
    text = json.dumps(value, indent=2, ensure_ascii=plain)
    print(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def note_stage(event: StageEvent) -> None:
    """Say on stderr that a stage begins, or how long it took."""
    from lmworks.ui.terminal import console as notes

    if event.kind == "begin":
        notes.print(f"{event.stage}: begins", style="dim")
    elif event.kind == "end":
        notes.print(f"{event.stage} took {event.seconds:.0f} s", style="dim")
