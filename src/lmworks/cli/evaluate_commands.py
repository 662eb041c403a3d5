"""`lmworks evaluate`: the evaluation stage of a recipe, or scores of any model on benchmark sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lmworks.cli import harness_commands
from lmworks.cli.harness_commands import ChatOption, HarnessOption, IncludeOption, TrustOption, harness_options
from lmworks.cli.options import AllowOption, JsonOption, SetOption, SizeOption, TimeOption, within
from lmworks.cli.output import console, print_json
from lmworks.errors import UserError

RunStages = Callable[[str, Sequence[str], str | None, Sequence[str], str | None], None]
_DEFAULT_ITEMS = 200


def register(app: typer.Typer, run_stages: RunStages) -> None:
    """Add the command to the app; `run_stages` runs the stages of a recipe up to one of them."""

    def evaluate(
        target: Annotated[
            str,
            typer.Argument(
                metavar="RECIPE|MODEL",
                help="A recipe, for its evaluation stage; or a model: a run directory (RUN, RUN@base, RUN@tuned, RUN@STEP), a checkpoint, "
                "or a Hugging Face folder.",
            ),
        ],
        overrides: SetOption, allow: AllowOption,
        tasks: Annotated[
            str | None, typer.Option("--tasks", metavar="SET,...", help="MODEL: benchmark sets, and task files that end in .yaml.")
        ] = None,
        form: Annotated[
            str, typer.Option("--form", metavar="FORM,...", help="MODEL: auto, cloze, letters, free, or several of them.")
        ] = "auto",
        shots: Annotated[int | None, typer.Option("--shots", help="MODEL: worked examples before each question.")] = None,
        items: Annotated[
            int | None,
            typer.Option(
                "--items", show_default=False, help=f"MODEL: maximum items per set or task; {_DEFAULT_ITEMS} per set, all with --harness."
            ),
        ] = None,
        data: Annotated[
            str | None,
            typer.Option("--data", metavar="DIR", help="MODEL: a folder with the rows of each set, as DIR/SET/ or DIR/SET.jsonl."),
        ] = None,
        samples: Annotated[int | None, typer.Option("--samples", help="MODEL, humaneval: programs per problem.")] = None,
        temperature: Annotated[float | None, typer.Option("--temperature", help="MODEL, humaneval: temperature of sampling.")] = None,
        lengths: Annotated[
            str | None, typer.Option("--lengths", metavar="N,...", help="MODEL, ruler: lengths of the items in tokens.")
        ] = None,
        hub: Annotated[bool, typer.Option("--hub", help="MODEL: read the rows from the Hugging Face hub.")] = False,
        harness: HarnessOption = None, include_path: IncludeOption = None, trust_task_code: TrustOption = False,
        apply_chat_template: ChatOption = False,
        out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="MODEL: folder for results, outcomes and items.")] = None,
        as_json: JsonOption = False, size: SizeOption = None, time: TimeOption = None,
    ) -> None:  # fmt: skip
        """Evaluation: the stage of a recipe (the stages before it run first if they are not done), or scores of one model."""
        if tasks is None and harness is None:
            _require_recipe(target)
            run_stages(target, within(time, overrides), size, allow, "evaluate")
            return
        by = "--tasks" if harness is None else "--harness"
        given = [name for name, value in (("--set", overrides), ("--allow", allow), ("--size", size), ("--time", time)) if value]
        if given:
            raise UserError(f"{given[0]} changes a recipe, and with {by} {target} is a model; leave one of them out")
        sampling = {"samples": samples, "temperature": temperature, "lengths": _numbers(lengths)}
        generated = {name: value for name, value in sampling.items() if value is not None}
        folder = Path(out) if out else None
        if harness is not None:
            if tasks is not None or form != "auto" or generated:
                odd = "--tasks" if tasks is not None else "--form" if form != "auto" else f"--{min(generated)}"
                raise UserError(f"--harness runs tasks of lm-evaluation-harness, in their own form; leave {odd} out")
            options = harness_options(harness, include_path, trust_task_code, apply_chat_template, shots, items, data, hub)
            harness_commands.evaluate(target, options, folder, as_json)
        elif tasks is not None:
            if include_path is not None or trust_task_code or apply_chat_template:
                raise UserError("--include-path, --trust-task-code and --apply-chat-template belong to --harness; leave them out")
            _evaluate_model(target, benchmarks(tasks, form, shots, data, hub, generated), items or _DEFAULT_ITEMS, folder, as_json)

    app.command("evaluate")(evaluate)
    app.command("export-harness")(harness_commands.export_harness)


def _require_recipe(target: str) -> None:
    path = Path(target).expanduser()
    if path.is_dir() or (not path.exists() and "@" in target):
        from lmworks.evaluate.sets.registry import CHOICE, GENERATION

        known = ", ".join([*CHOICE, *GENERATION])
        raise UserError(f"{target} is a model: say on which sets to evaluate it with --tasks SET,...; known sets: {known}")


def _numbers(text: str | None) -> list[str] | None:
    if text is None:
        return None
    numbers = [one.strip() for one in text.split(",")]
    if odd := next((one for one in numbers if not one.isascii() or not one.isdecimal() or not 0 < int(one) < 1 << 40), None):
        raise UserError(f"--lengths {odd}: a length is a number of tokens, such as --lengths 4096,8192")
    return [f"{one} tokens" for one in dict.fromkeys(numbers)]


def benchmarks(
    tasks: str, form: str, shots: int | None, data: str | None, hub: bool, generated: Mapping[str, Any] | None = None
) -> list[Any]:  # fmt: skip
    """The `Benchmark` of each set: of a multiple-choice set in each form, of a generation set with those options of `generated` that it
    has. Raises `UserError`."""
    from lmworks.evaluate.sets.registry import GENERATION

    wanted: list[dict[str, Any]] = []
    used: set[str] = set()
    for task in filter(None, map(str.strip, tasks.split(","))):
        if task in GENERATION:
            takes = GENERATION[task].options
            given = {name: value for name, value in (generated or {}).items() if name in takes}
            place: dict[str, Any] = {"hub": hub and "hub" in takes}
            if data and "path" in takes and (path := _local_texts(data) if task.startswith("ruler") else _local_rows(data, task)):
                place["path"] = path
            used |= given.keys()
            wanted.append({"name": task, "shots": shots, **place, **given})
            continue
        own = task.endswith((".yaml", ".yml"))
        place = {} if own else {"hub": hub} | ({"path": _local_rows(data, task)} if data else {})
        forms = filter(None, map(str.strip, form.split(",")))
        wanted += ({("file" if own else "name"): task, "form": one, "shots": shots, **place} for one in forms)
    if unused := [name for name in generated or {} if name not in used]:
        raise UserError(f"--{unused[0]}: none of the sets of --tasks has this option; leave it out")
    if not wanted:
        raise UserError("--tasks names no set; for example: --tasks arc-easy,sciq")
    return [_benchmark(one) for one in wanted]


def _benchmark(wanted: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from lmworks.recipe.schema.evaluate import Benchmark

    try:
        return Benchmark.model_validate(wanted)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = wanted.get("name", wanted.get("file"))
        raise UserError(f"--tasks {what}: {where}: {first['msg'].removeprefix('Value error, ')}".replace(": :", ":")) from None


def _local_rows(data: str, name: str) -> str:
    folder = Path(data).expanduser()
    if (folder / name).is_dir():
        return str(folder / name)
    found = sorted(folder.glob(f"{name}.*"))
    if not found:
        raise UserError(f"--data {data} has neither {name}/ nor {name}.jsonl, {name}.parquet or {name}.arrow")
    return str(found[0])


def _local_texts(data: str) -> str | None:
    """The folder with RULER's own texts, which its tasks share and can do without."""
    folder = Path(data).expanduser() / "ruler"
    return str(folder) if folder.is_dir() else None


def _evaluate_model(target: str, wanted: list[Any], most: int, out: Path | None, as_json: bool) -> None:
    from lmworks.evaluate.tables import scores_table
    from lmworks.run.model_evaluation import evaluate

    results = evaluate(target, wanted, most, out)
    if as_json:
        print_json(results)
    else:
        console().print(scores_table(results))
