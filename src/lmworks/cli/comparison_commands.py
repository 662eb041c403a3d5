"""`lmworks speed`: how fast a model generates."""

from __future__ import annotations

from typing import Annotated

import typer

from lmworks.cli.options import DeviceOption, JsonOption, device_of
from lmworks.cli.output import console, print_json
from lmworks.errors import UserError

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run (RUN, RUN@base, RUN@tuned, RUN@STEP), a checkpoint, or a Hugging Face directory.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("speed")(speed)


def speed(
    model: ModelArgument,
    batches: Annotated[str, typer.Option("--batch", metavar="N,...", help="Batch sizes.")] = "1,8",
    prompts: Annotated[str, typer.Option("--prompt", metavar="N,...", help="Prompt lengths in tokens.")] = "128,512",
    new_tokens: Annotated[int, typer.Option("--new-tokens", metavar="N", help="Tokens to generate after each prompt.")] = 32,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="Limit of the whole measurement.")] = 60.0,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure prefill and decode speed, time to first token and peak memory of a model, by batch size and prompt length."""
    from lmworks.evaluate.opening import open_model
    from lmworks.evaluate.speed import measure_speed, speed_table

    sizes, lengths = _numbers("--batch", batches), _numbers("--prompt", prompts)
    opened = open_model(model, device_of(device))
    found = measure_speed(opened.model, sizes, lengths, new_tokens, seconds)
    if as_json:
        print_json({"model": opened.name, **found.to_json()})
    else:
        console().print(speed_table(opened.name, found))


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option}: {text!r} is no list of whole numbers; write it like 1,8") from None
