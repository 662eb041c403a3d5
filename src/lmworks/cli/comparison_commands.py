"""`lmworks compare`, `lmworks speed` and `lmworks quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmworks.cli.evaluate_commands import benchmarks
from lmworks.cli.options import DeviceOption, JsonOption, console, device_of, print_json
from lmworks.errors import UserError
from lmworks.io.destinations import require_file, require_folder
from lmworks.ui.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.table import Table


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
    from lmworks.evaluate.compared_models import Asked, gather
    from lmworks.evaluate.comparison import compare
    from lmworks.evaluate.tables import printable_comparison
    from lmworks.pages.model_pages import write_comparison_page

    if html is not None:
        require_file(html, "--html")
    named = None if tasks is None else benchmarks(tasks, form, shots, None, False)
    document = compare(gather(models, Asked(named, items, cache, device_of(device))), examples)
    if html is not None:
        write_comparison_page(html, document)
    if as_json:
        print_json(document)
        return
    console().print(printable_comparison(document))
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
    from lmworks.evaluate.speed import measure_speed, speed_table
    from lmworks.weights.open import open_model

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


def register_quantize(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("quantize")(quantize)


def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run (RUN, RUN@base, RUN@tuned, RUN@STEP) or a Hugging Face directory.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="SCHEME,...", help="Schemes, such as gguf-q8_0,gguf-q4_k_m,fp8,int8,gptq,awq.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the results: RUN/quantized, or MODEL-quantized.", show_default=False),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            "--held-out", metavar="FILE", help="Text to measure on: .txt, .md, .jsonl or .parquet; by default a run's validation text.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration", metavar="FILE", help="Text to calibrate with; by default every second document of the held-out text.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=64, help="Maximum tokens to measure on, and to calibrate with.")
    ] = 16384,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit", metavar="NAME=X", show_default=False,
            help="Limit that decides, for all schemes: kl, same_choice, perplexity_ratio, error, expert_tokens; may be repeated.",
        ),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", metavar="SET,...", help="Benchmark sets to compare on, in cloze form.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DIR", help="Folder with the rows of each set, as DIR/SET/ or DIR/SET.jsonl.")
    ] = None,
    items: Annotated[int, typer.Option("--items", metavar="N", min=1, help="Maximum items of each set.")] = 200,
    python: Annotated[
        list[Path] | None,
        typer.Option(
            "--python", metavar="FILE", show_default=False,
            help="Python of an environment with llama-cpp-python or llmcompressor; may be repeated.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Quantize a model by several schemes, and certify each result against the original. Exit code 1 if one is outside of its limits; 2 if
    a library is missing, after the schemes that do not need it."""
    from lmworks.pages.model_pages import write_quantization_page
    from lmworks.quantize.quantize import Options, available, default_out, quantize
    from lmworks.quantize.source import chosen, with_limits

    schemes = [with_limits(one, limit or []) for one in chosen(to)]
    sets = tuple(benchmarks(tasks, "cloze", None, data, False)) if tasks else ()
    folder = out or default_out(model)
    require_folder(folder)
    options = Options(held_out, calibration, tokens, tuple(python or ()), sets, items)
    schemes, missing = available(schemes, options.pythons)
    document = quantize(model, schemes, folder, options)
    page = folder / "quantization.html"
    write_quantization_page(page, document)
    if as_json:
        print_json(document)
    else:
        console().print(_table(document))
        for one in document["results"]:
            for failure in one["failures"]:
                console().print(f"{one['scheme']} failed: {failure}", markup=False)
            for warning in one["warnings"]:
                console().print(f"{one['scheme']}: {warning}", markup=False)
        console().out(str(page))
    if missing:
        raise UserError("; ".join(map(str, missing)))
    asked = {one.name for one in schemes}
    if any(one["verdict"] == "failed" for one in document["results"] if one["scheme"] in asked):
        raise typer.Exit(ExitCode.FAILED)


def _table(document: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{document['model']} ({document['dtype']}) against its quantized forms"), title_justify="left")
    table.add_column("scheme")
    for heading in ("size", "KL", "99th percentile", "same first choice", "perplexity ratio", "decode, tokens/s"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for one in document["results"]:
        found = one["agreement"]
        figures = ["–"] * 4
        if "kl_mean" in found:
            low, high = found["perplexity_interval"]
            ratio = f"{found['perplexity_ratio']:.4f} [{low:.4f}, {high:.4f}]"
            figures = [f"{found['kl_mean']:.2g}", f"{found['kl_p99']:.2g}", f"{found['same_choice']:.1%}", ratio]
        speed = f"{one['speed']['decode']:,.0f}" if "decode" in one["speed"] else "not measured"
        table.add_row(one["scheme"], f"{one['bytes'] / 1e6:,.1f} MB", *figures, speed, one["verdict"])
    return table
