"""`lmworks compare` and `lmworks speed`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmworks.cli.evaluate_commands import benchmarks
from lmworks.cli.options import DeviceOption, JsonOption, device_of
from lmworks.cli.output import console, print_json
from lmworks.errors import UserError

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run (RUN, RUN@base, RUN@tuned, RUN@STEP), a checkpoint, or a Hugging Face directory.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("compare")(compare)
    app.command("speed")(speed)


def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...",
            help="Runs (RUN, RUN@base, RUN@tuned, RUN@STEP), checkpoints, Hugging Face directories, folders of evaluations, or tables of "
            "published scores (.json, .yaml, .csv). All are compared with the first.",
        ),
    ],
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="SET,...", help="Evaluate all models on these sets, also those that have outcomes."),
    ] = None,
    form: Annotated[str, typer.Option("--form", metavar="FORM,...", help="Forms of --tasks: auto, cloze, letters, free.")] = "auto",
    shots: Annotated[int | None, typer.Option("--shots", metavar="N", min=0, help="Worked examples before each question.")] = None,
    items: Annotated[int, typer.Option("--items", metavar="N", min=1, help="Maximum items of each set.")] = 200,
    examples: Annotated[int, typer.Option("--examples", metavar="N", min=0, help="Examples to print of each kind.")] = 2,
    cache: Annotated[
        Path, typer.Option("--cache", metavar="DIR", help="Folder for the outcomes of models that had none.")
    ] = Path("runs/evaluations"),
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write the comparison as an HTML page.")] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare models on the same items: intervals, corrected tests, items lost and gained, and failures in groups."""
    from lmworks.doctor.comparison_page import write_comparison_page
    from lmworks.evaluate.compare.comparison import compare
    from lmworks.evaluate.compare.sources import Asked, gather
    from lmworks.evaluate.compare.tables import printable

    named = None if tasks is None else benchmarks(tasks, form, shots, None, False)
    document = compare(gather(models, Asked(named, items, cache, device_of(device))), examples)
    if html is not None:
        write_comparison_page(html, document)
    if as_json:
        print_json(document)
        return
    console().print(printable(document))
    if html is not None:
        console().out(str(html))


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
