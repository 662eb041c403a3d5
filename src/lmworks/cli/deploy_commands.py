"""`lmworks deploy`: the files of a deployment; the check of a server; recorded answers.

`lmworks handover slime`: what another trainer needs, and the check of what comes back.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from lmworks.cli.options import JsonOption, console, print_json
from lmworks.errors import UserError
from lmworks.ui.exit_codes import ExitCode

if TYPE_CHECKING:
    from lmworks.deploy.deploy import Deployment
    from lmworks.train.data.decontamination import Decontamination


ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A run directory with an export, or a model in Hugging Face format.")]
GgufOption = Annotated[str | None, typer.Option("--gguf", metavar="FILE", help="GGUF file for llama.cpp; by default that of the export.")]
NameOption = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name for clients; by default that of the directory.")]


class _WriteByDefault(TyperGroup):
    """`lmworks deploy MODEL` is `lmworks deploy write MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["write", *args]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    group = typer.Typer(no_args_is_help=True, cls=_WriteByDefault, help="Write the files that serve a model, and check a server.")
    group.command("write")(write)
    group.command("check")(check)
    group.command("record")(record)
    app.add_typer(group, name="deploy")


def write(
    model: ModelArgument,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Directory to write, new or empty.")],
    engine: Annotated[str, typer.Option("--engine", metavar="E", help="vllm, sglang, llama.cpp or lmworks.")] = "vllm",
    scenario: Annotated[str, typer.Option("--scenario", metavar="S", help="throughput, balanced or latency.")] = "balanced",
    gpus: Annotated[str | None, typer.Option("--gpus", metavar="NxGPU", help="GPUs of the machine, such as 8xh100.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Serve on this machine's CPU. By default, its GPUs are used if it has any.")] = False,
    context: Annotated[int | None, typer.Option("--context", min=1, help="Longest prompt with its answer, in tokens.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8000,
    api_key_file: Annotated[
        str | None, typer.Option("--api-key-file", metavar="FILE", help="File with the API key; by default a key is drawn.")
    ] = None,
    expect: Annotated[
        str | None, typer.Option("--expect", metavar="FILE", help="Recorded answers; by default they are recorded from the model.")
    ] = None,
    trainer: Annotated[
        str | None, typer.Option("--trainer", metavar="HOST:PORT", help="A run's metrics.prometheus_port, to be monitored too.")
    ] = None,
    gguf: GgufOption = None,
    uncertified: Annotated[
        bool, typer.Option("--uncertified", help="Serve a quantized model that has no passed certificate of lmworks quantize.")
    ] = False,
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write container file, compose file, start script, health check, monitoring and README of a server for MODEL."""
    from lmworks.deploy.deploy import plan_deployment, require_host, require_port, require_target, write_deployment
    from lmworks.deploy.engines import engine_of
    from lmworks.deploy.sizing import cpu as cpu_of
    from lmworks.deploy.sizing import detect, parse_gpus, scenario_of
    from lmworks.deploy.source import open_source, require_certified
    from lmworks.io.destinations import require_empty

    require_empty(Path(out))
    engine_of(engine), scenario_of(scenario)
    require_host(host, "--host")
    require_port(port)
    if gpus is not None and cpu:
        raise UserError("--gpus and --cpu exclude each other; give one of them")
    hardware = parse_gpus(gpus) if gpus is not None else cpu_of() if cpu else detect()
    if trainer is not None:
        require_target(trainer, port)
    source = open_source(Path(model), Path(gguf) if gguf else None, name)
    if not uncertified:
        require_certified(source, engine_of(engine).gguf)
    plan = plan_deployment(source, engine, scenario, hardware, context=context, host=host, port=port)
    write_deployment(
        plan, Path(out), key_file=Path(api_key_file) if api_key_file else None, expected=Path(expect) if expect else None, trainer=trainer
    )
    if as_json:
        print_json(plan.as_json() | {"directory": out})
        return
    _print(plan, out)


def _print(plan: Deployment, out: str) -> None:
    from rich.table import Table

    request = plan.request
    title = f"{request.source.name} on {plan.engine}: {request.hardware.text}, {request.scenario.name}"
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("option", "value", "reason"):
        table.add_column(heading)
    for flag in plan.launch.flags:
        table.add_row(flag.name, "" if flag.value is None else flag.value, flag.reason)
    terminal = console()
    terminal.print(table)
    terminal.print(f"Written to {out}. Start it: docker compose up --detach --build, or ./start.sh; README.md explains the rest.")


def check(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8000.")],
    expect: Annotated[str, typer.Option("--expect", metavar="FILE", help="Recorded answers: expected.json of a deployment.")],
    key_file: Annotated[str | None, typer.Option("--key-file", metavar="FILE", help="File with the API key.")] = None,
    tolerance: Annotated[float | None, typer.Option("--tolerance", min=0, help="Largest mean difference, in nats per token.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a server the recorded questions and compare log-probabilities; exit code 1 if they differ."""
    from lmworks.deploy import check as asking

    try:
        asking.require_address(url)
        result = asking.check(url, asking.read_expected(expect), asking.read_key(key_file), tolerance)
    except asking.Refused as error:
        raise UserError(str(error)) from None
    if as_json:
        print_json(result)
    elif result["ok"]:
        console().print(f"ok: log-probabilities of {result['tokens']} tokens differ by {result['difference']:.4f} nats on average")
    else:
        console().print(f"failed: {result['reason']}")
    if not result["ok"]:
        raise typer.Exit(ExitCode.FAILED)


def record(
    model: ModelArgument,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="File to write.")],
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Record a model's answers to fixed questions, for deployments on machines that cannot load it in fp32, or of its quantized form."""
    from lmworks.deploy.check import Refused, read_expected
    from lmworks.deploy.request import record as record_of
    from lmworks.deploy.source import open_source
    from lmworks.io.destinations import require_file
    from lmworks.io.files import write_json

    require_file(Path(out))
    if Path(out).exists():
        try:
            read_expected(out)
        except Refused:
            raise UserError(f"--out {out} is there, and holds no recorded answers; choose another file") from None
    answers = record_of(open_source(Path(model), None, name))
    write_json(Path(out), answers)
    tokens = sum(len(item["tokens"]) for item in answers["items"])
    if as_json:
        print_json({"file": out, "tokens": tokens, "tolerance": answers["tolerance"]})
        return
    console().print(f"{tokens} tokens recorded in {out}; a server may differ by {answers['tolerance']} nats on average")


def register_handover(app: typer.Typer) -> None:
    """Add the commands to the app."""
    group = typer.Typer(no_args_is_help=True, help="Hand a model over to another trainer.")
    group.callback()(lambda: None)
    group.command("slime")(slime)
    app.add_typer(group, name="handover")


def slime(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run directory with an export, or a model in Hugging Face format.")],
    prompts: Annotated[
        list[str] | None, typer.Option("--prompts", metavar="FILE", help="JSONL with prompts and labels, or a recipe with such tune.data.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="Directory to write, new or empty.")] = None,
    rm_type: Annotated[str, typer.Option("--rm-type", metavar="T", help="slime's reward for rows without their own.")] = "math",
    rm_url: Annotated[str | None, typer.Option("--rm-url", metavar="URL", help="Service of the reward remote_rm.")] = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="How often each prompt is asked.")] = 1,
    max_response: Annotated[int | None, typer.Option("--max-response", min=1, help="Longest answer in tokens; half the context.")] = None,
    back: Annotated[str | None, typer.Option("--back", metavar="DIR", help="Check a trained model that slime has converted.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the model, MODEL_ARGS, prompts and a run script for reinforcement learning with slime; or check the result with --back."""
    from lmworks.handover.prompts import prompt_files
    from lmworks.handover.slime import check_back, hand_over

    if back is not None:
        found = check_back(Path(model), Path(back))
        if as_json:
            print_json(found)
        else:
            console().print(f"{found['tensors']} tensors as in {model}, {found['changed']} of them changed; use it: start_from: {back}")
        return
    if not prompts or out is None:
        raise UserError("say which prompts to hand over, and where to: --prompts FILE --out DIR")
    made = hand_over(
        Path(model), prompt_files(prompts), Path(out), rm_type=rm_type, rm_url=rm_url, max_response=max_response, epochs=epochs,
        decontamination=_decontamination(Path(model), prompts),
    )  # fmt: skip
    if as_json:
        print_json(asdict(made) | {"directory": out})
        return
    terminal = console()
    for one in [*made.arguments, *(one for group in made.run_arguments.values() for one in group)]:
        terminal.print(f"  {one.name} {one.value or ''}  # {one.reason}")
    if made.contaminated is None:
        terminal.print("the prompts were not searched for items of the evaluation: no recipe with corpus.decontaminate is known")
    elif made.contaminated:
        terminal.print(f"{made.contaminated} of the prompts given hold an item of the evaluation")
    terminal.print(f"{made.tensors} tensors have names in both formats; {made.prompts} prompts; written to {out}. Start it: {out}/run.sh")


def _decontamination(model: Path, prompts: list[str]) -> Decontamination | None:
    """The search for items of the evaluation of the model's run, or else of the recipe that stands for the prompts; None without either."""
    from lmworks.evaluate.protection import protection
    from lmworks.recipe.load import load_recipe, load_resolved
    from lmworks.train.data.decontamination import Decontamination
    from lmworks.ui.terminal import console as notes

    resolved, named = model / "resolved.json", next((name for name in prompts if name.endswith((".yaml", ".yml"))), None)
    recipe = load_resolved(resolved) if resolved.is_file() else load_recipe(named, []).recipe if named is not None else None
    if recipe is None or recipe.corpus.decontaminate is None:
        return None
    protected = protection(recipe)
    for name, reason in protected.unread.items():
        notes.print(f"the prompts cannot be searched for the items of {name}: {reason}", style="yellow")
    questions = {one.text.strip() for one in protected.questions}
    decontaminator = protected.decontaminator(recipe.corpus.decontaminate.ngram_words)
    return Decontamination("--prompts", recipe, questions, decontaminator, generated=False)
