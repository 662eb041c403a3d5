"""`lmworks evaluate`: the evaluation stage of a recipe, or scores of any model on benchmark sets.

lm-evaluation-harness from the command line: its tasks on one of our models, and our sets as its tasks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmworks.cli.options import (
    AllowOption,
    DeviceOption,
    JsonOption,
    SetOption,
    SizeOption,
    TimeOption,
    console,
    device_of,
    print_json,
    within,
)
from lmworks.errors import Unavailable, UserError

if TYPE_CHECKING:
    import torch

    from lmworks.evaluate.harness.running import HarnessOptions
    from lmworks.evaluate.results_folder import Origin
    from lmworks.recipe.schema.artifacts import RopeExtension


HarnessOption = Annotated[
    str | None,
    typer.Option("--harness", metavar="TASK,...", help="MODEL: tasks of lm-evaluation-harness (`lm-eval ls tasks` lists them)."),
]
IncludeOption = Annotated[
    str | None, typer.Option("--include-path", metavar="DIR", help="--harness: a folder with task files of your own.")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-task-code", help="--harness: run the Python code that the task files of --include-path name.")
]
ChatOption = Annotated[bool, typer.Option("--apply-chat-template", help="--harness: ask in the chat template of the model.")]


def evaluate_with_harness(
    target: str, options: HarnessOptions, out: Path | None, as_json: bool, device: torch.device, rope: RopeExtension | None = None
) -> None:  # fmt: skip
    """Run tasks of lm-evaluation-harness on a model, and print or write what it reports."""
    from lmworks.evaluate.harness.running import evaluated, record, run, table
    from lmworks.weights.open import open_model

    origin = _origin(target, rope, out)
    opened = open_model(target, device, rope=rope)
    found = run(opened, options)
    one = evaluated(opened, found)
    try:
        if out is not None and origin is not None:
            one = record(one, found, out, origin)
    finally:  # what was measured is not lost where it cannot be written
        print_json(one.document) if as_json else console().print(table(one.name, found))


def harness_options(
    tasks: str, include_path: str | None, trusted: bool, chat: bool, shots: int | None, items: int | None, data: str | None, hub: bool
) -> HarnessOptions:  # fmt: skip
    """The options of a run. Raises `UserError` for those that say nothing, and without lm-evaluation-harness."""
    from lmworks.evaluate.harness import require_extra

    require_extra()
    from lmworks.evaluate.harness.running import HarnessOptions
    from lmworks.evaluate.harness.task_data import HUB, PACKAGE

    names = [name for name in map(str.strip, tasks.split(",")) if name]
    if not names:
        raise UserError("--harness names no task; for example: --harness arc_easy,hellaswag")
    if data is not None and hub:
        raise UserError("--data and --hub are two sources of the same rows; keep one of them")
    if data not in (None, PACKAGE) and not Path(str(data)).is_dir():
        raise UserError(f"--data {data} is not a directory; with --harness it is a folder with data, or {PACKAGE}")
    return HarnessOptions(
        names, Path(include_path) if include_path else None, trusted, shots, items, chat, HUB if hub else data
    )  # fmt: skip


def export_harness(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder for the task files (YAML) and their data (JSON lines).")],
    tasks: Annotated[str, typer.Option("--tasks", metavar="SET,...", help="Benchmark sets, and task files that end in .yaml.")],
    form: Annotated[str, typer.Option("--form", metavar="FORM,...", help="cloze, letters, or both.")] = "cloze,letters",
    shots: Annotated[int | None, typer.Option("--shots", help="Worked examples before each question.")] = None,
    items: Annotated[int | None, typer.Option("--items", help="Maximum items per set; all by default.")] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="DIR", help="A folder with the rows of each set.")] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Read the rows from the Hugging Face hub.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write benchmark sets as tasks of lm-evaluation-harness, so that our scores can be repeated there."""
    from lmworks.evaluate.harness.exporting import FORMS, export

    forms = [one for one in map(str.strip, form.split(",")) if one]
    if wrong := next((one for one in forms if one not in FORMS), None):
        raise UserError(f"--form {wrong}: lm-evaluation-harness scores choices by log-likelihood; the forms are {' and '.join(FORMS)}")
    try:
        written = export(Path(folder), benchmarks(tasks, "auto", shots, data, hub), forms or FORMS, items)
    except Unavailable as reason:
        raise UserError(str(reason)) from None
    if as_json:
        print_json([vars(one) for one in written])
        return
    for one in written:
        console().print(f"{one.task}: {one.items:,} items")
    console().print(f"{Path(folder) / 'README.md'} says how to run them", style="dim")


RunStages = Callable[[str, Sequence[str], str | None, Sequence[str], str | None], None]
_DEFAULT_ITEMS = 200
_MODES = {  # the parameters that each use of the command has, besides those that choose it
    "a recipe": ("overrides", "allow", "size", "time", "show_failures"),
    "--tasks": ("form", "shots", "items", "data", "samples", "temperature", "lengths", "rope", "hub", "out", "show_failures", "device",
                "as_json"),
    "--harness": (
        "include_path", "trust_task_code", "apply_chat_template", "shots", "items", "data", "rope", "hub", "out", "device", "as_json",
    ),
    "--follow": ("tasks", "items", "data", "hub", "wait", "device"),
}  # fmt: skip


def register(app: typer.Typer, run_stages: RunStages) -> None:
    """Add the command to the app; `run_stages` runs the stages of a recipe up to one of them."""

    def evaluate(
        context: typer.Context, overrides: SetOption, allow: AllowOption,
        target: Annotated[
            str | None,
            typer.Argument(
                metavar="[RECIPE|MODEL]",
                help="A recipe, for its evaluation stage; or a model: a run directory (RUN, RUN@base, RUN@tuned, RUN@STEP), a checkpoint, "
                "or a Hugging Face folder. None with --follow.",
                show_default=False,
            ),
        ] = None,
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
                "--items", min=1, show_default=False,
                help=f"MODEL: maximum items per set or task; {_DEFAULT_ITEMS} per set, all with --harness.",
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
        rope: Annotated[
            str | None,
            typer.Option(
                "--rope", metavar="METHOD:FACTOR", show_default=False,
                help="MODEL: extend the trained context by a factor: linear, ntk, yarn or llama3, such as yarn:2.",
            ),
        ] = None,
        out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="MODEL: folder for results, outcomes and items.")] = None,
        show_failures: Annotated[
            bool, typer.Option("--failures", help="Also print failures by kind, subject and prompt length, with examples.")
        ] = False,
        followed: Annotated[
            Path | None,
            typer.Option("--follow", metavar="RUN", show_default=False, help="Evaluate each new checkpoint of a run, until it is done."),
        ] = None,
        wait: Annotated[
            float, typer.Option("--wait", metavar="S", min=0, help="--follow: seconds to wait for a run in which nothing changes.")
        ] = 1800.0,
        device: DeviceOption = None, as_json: JsonOption = False, size: SizeOption = None, time: TimeOption = None,
    ) -> None:  # fmt: skip
        """Evaluation: the stage of a recipe (the stages before it run first if they are not done), scores of one model, or of the
        checkpoints of a run while it trains."""
        from lmworks.recipe.load import load_recipe
        from lmworks.recipe.schema.artifacts import RopeExtension

        given = [name for name, value in (("--set", overrides), ("--allow", allow), ("--size", size), ("--time", time)) if value]
        if followed is not None:
            if target is not None or given:
                raise UserError(f"--follow names the run to evaluate; leave {target if target is not None else given[0]} out")
            _refuse_unused(context, "--follow", ("followed",))
            _follow(followed, None if tasks is None else benchmarks(tasks, "cloze", 0, data, hub), items, device_of(device), wait)
            return
        if target is None:
            raise UserError("name a recipe or a model, or a run to follow: --follow RUN")
        if tasks is None and harness is None:
            _require_recipe(target)
            _refuse_unused(context, "a recipe", ())
            run_stages(target, within(time, overrides), size, allow, "evaluate")
            if show_failures:
                run_dir = load_recipe(target, within(time, overrides), size).recipe.run_dir
                _print_failures(_failures(Path(str(run_dir)) / "evaluate"))
            return
        by = "--tasks" if harness is None else "--harness"
        if given:
            raise UserError(f"{given[0]} changes a recipe, and with {by} {target} is a model; leave one of them out")
        sampling = {"samples": samples, "temperature": temperature, "lengths": _numbers(lengths)}
        generated = {name: value for name, value in sampling.items() if value is not None}
        folder = Path(out) if out else None
        extension = None if rope is None else RopeExtension.parse(rope)
        if harness is not None:
            if tasks is not None or form != "auto" or generated:
                odd = "--tasks" if tasks is not None else "--form" if form != "auto" else f"--{min(generated)}"
                raise UserError(f"--harness runs tasks of lm-evaluation-harness, in their own form; leave {odd} out")
            _refuse_unused(context, "--harness", ("harness",))
            options = harness_options(harness, include_path, trust_task_code, apply_chat_template, shots, items, data, hub)
            evaluate_with_harness(target, options, folder, as_json, device_of(device), extension)
        elif tasks is not None:
            if include_path is not None or trust_task_code or apply_chat_template:
                raise UserError("--include-path, --trust-task-code and --apply-chat-template belong to --harness; leave them out")
            _refuse_unused(context, "--tasks", ("tasks",))
            wanted, most = benchmarks(tasks, form, shots, data, hub, generated), items or _DEFAULT_ITEMS
            _evaluate_model(target, wanted, most, folder, show_failures, device_of(device), as_json, extension)

    app.command("evaluate")(evaluate)
    app.command("export-harness")(export_harness)


def _refuse_unused(context: typer.Context, mode: str, chosen_by: Sequence[str]) -> None:
    """Raises `UserError` for a given option that has no effect in this use of the command."""
    used = {"target", *chosen_by, *_MODES[mode]}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in used and source is not None and source.name == "COMMANDLINE":
            owners = [name for name, names in _MODES.items() if parameter.name in names]
            remedy = "leave it out" if mode != "a recipe" else "leave it out, and set evaluate.* with --set, or name a model"
            raise UserError(f"{parameter.opts[0]} has no effect with {mode}, only with {' or '.join(owners)}; {remedy}")


def _require_recipe(target: str) -> None:
    path = Path(target).expanduser()
    if path.is_dir() or (not path.exists() and "@" in target):
        from lmworks.evaluate.sets.benchmarks import CHOICE, GENERATION

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
    from lmworks.evaluate.sets.benchmarks import GENERATION

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
    from lmworks.evaluate.sets.sources import SUFFIXES

    folder = Path(data).expanduser()
    if (folder / name).is_dir():
        return str(folder / name)
    found = sorted(path for path in folder.glob(f"{name}.*") if path.name.lower().endswith(SUFFIXES))
    if not found:
        raise UserError(f"--data {data} has neither {name}/ nor {name}.jsonl, {name}.parquet or {name}.arrow")
    if len(found) > 1:
        raise UserError(f"--data {data} has {' and '.join(path.name for path in found)}, of which one would be read; keep that one")
    return str(found[0])


def _local_texts(data: str) -> str | None:
    """The folder with RULER's own texts, which its tasks share and can do without."""
    folder = Path(data).expanduser() / "ruler"
    return str(folder) if folder.is_dir() else None


def _evaluate_model(
    target: str, wanted: list[Any], most: int, out: Path | None, show_failures: bool, device: torch.device, as_json: bool,
    rope: RopeExtension | None = None,
) -> None:  # fmt: skip
    from lmworks.evaluate import results_folder
    from lmworks.evaluate.tables import scores_table
    from lmworks.run.model_evaluation import evaluate

    origin = _origin(target, rope, out)
    one = evaluate(target, wanted, most, device, rope)
    if not one.model["scores"] and (missing := one.model["unavailable"]):
        name, why = next(iter(missing.items()))
        raise UserError(
            f"nothing was scored: {name}: {why}; give the rows as files with --data DIR, or read them where they can be loaded"
        )
    results = one.document
    try:
        if out is not None and origin is not None:
            one = results_folder.add(out, one, origin)
            results = one.document
        if show_failures:
            with tempfile.TemporaryDirectory() as place:
                results["failures"] = _failures(Path(place), [results_folder.add(Path(place), one).name])
    finally:  # what was measured is not lost where it cannot be written
        if as_json:
            print_json(results)
        else:
            console().print(scores_table(results))
            _print_failures(results.get("failures", {}))


def _origin(target: str, rope: RopeExtension | None, out: Path | None) -> Origin | None:
    """What `--out` records of a model. This comes before the model is opened. Raises `UserError` if nothing can be added to the folder."""
    from lmworks.evaluate.results_folder import Origin, require_usable

    if out is None:
        return None
    require_usable(out)
    return Origin.of(target, rope)


def _failures(folder: Path, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Model -> score -> failures in groups, from the records in the folder of an evaluation."""
    from lmworks.evaluate.comparison import failures
    from lmworks.evaluate.results import names_in, read_results

    return {name: failures(read_results(folder, name, name)) for name in names or names_in(folder)}


def _print_failures(of_models: dict[str, Any]) -> None:
    from lmworks.evaluate.tables import failure_tables

    for name, scores in of_models.items():
        console().print(failure_tables(name, scores))


def _follow(run: Path, wanted: list[Any] | None, items: int | None, device: torch.device, wait: float) -> None:
    from lmworks.evaluate.follow import follow, scores_in_loop
    from lmworks.run.run_dir import require_run

    scores = scores_in_loop(require_run(run), wanted or (), items)
    count = follow(run, scores, device, wait, asked=scores.asked)
    console().out(f"evaluated {count} checkpoints of {run}")
