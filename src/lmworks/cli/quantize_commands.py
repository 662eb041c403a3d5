"""`lmworks quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmworks.cli.evaluate_commands import benchmarks
from lmworks.cli.options import JsonOption
from lmworks.cli.output import console, print_json
from lmworks.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table


def register(app: typer.Typer) -> None:
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
    from lmworks.doctor.quantization_page import write_quantization_page
    from lmworks.quantize.quantize import Options, available, default_out, quantize
    from lmworks.quantize.schemes import chosen, with_limits

    schemes = [with_limits(one, limit or []) for one in chosen(to)]
    sets = tuple(benchmarks(tasks, "cloze", None, data, False)) if tasks else ()
    folder = out or default_out(model)
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
        raise typer.Exit(1)


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
