"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, such as runs/quickstart.")]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="A.B=C", help="Override a value; may be repeated.", default_factory=list, show_default=False),
]
AllowOption = Annotated[
    list[str],
    typer.Option(
        "--allow", metavar="A.B", default_factory=list, show_default=False,
        help="Go on although this key changed since training began; may be repeated.",
    ),
]  # fmt: skip
SizeOption = Annotated[
    str | None, typer.Option("--size", metavar="N", help="The one dial: a parameter count such as 125M; the rest derives.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
