"""What a run is predicted to take before its first step, how far off the prediction was, and the summary at its end.

The prediction is the plan for this machine. It is written to the ledger (event `prediction`) once for each stage that trains, before it
begins, and compared with what was measured when it has ended (event `prediction_error`). The run page shows both beside each other. The
speed of a run can be the basis of other plans (`lmworks plan --mfu RUN`). The summary that `lmworks run` prints has files, measurements,
and the next command.

Whether a run has enough disk and text: what the file system of the run has room for, and what the sources have for the token budgets.

The text of the sources is known exactly only once the corpus is prepared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmworks.checkpoint import listing
from lmworks.checkpoint.listing import directories
from lmworks.corpus.read.snapshot import list_files
from lmworks.errors import UserError
from lmworks.evaluate.tables import bits, forgotten, samples_table, scores
from lmworks.host import machine
from lmworks.io.files import read_json
from lmworks.io.run_layout import BASE, MODEL_STAGES, of_stage
from lmworks.pages.read_run import read_run
from lmworks.pages.record_files import lines, number
from lmworks.plan.automatic import machine_for
from lmworks.plan.costs import disk
from lmworks.plan.counts import flops_per_token
from lmworks.plan.plan import make_plan
from lmworks.plan.stages import StageData, stages_as_phases
from lmworks.recipe.load import load_resolved
from lmworks.recipe.parameters import count_parameters
from lmworks.recipe.schema.layout import Cluster
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.rehearsal import kept
from lmworks.run.run_dir import seconds_by_stage
from lmworks.run.time_budget import given_up, planned_and_actual_seconds
from lmworks.shards.manifest import MANIFEST, Manifest
from lmworks.shards.order import Order
from lmworks.ui.amounts import size
from lmworks.watch.ledger import LEDGER, Ledger, events_of

PREDICTION, ERROR = "prediction", "prediction_error"
_NEWEST = 1000  # metrics lines whose median speed counts


@dataclass(frozen=True)
class MeasuredMfu:
    """The speed of a run as an MFU of a cluster. `with_layout`: communication between machines and pipeline bubble are in it."""

    mfu: float
    source: str
    with_layout: bool


def _micro_batches(recipe: Recipe, length: int) -> int:
    """Of a rank in a step with sequences of `length`, without a ramp of the batch size."""
    tokens = max((int(phase.global_batch_tokens) for phase in recipe.train.phases if phase.sequence_length == length), default=0)
    ranks = recipe.layout.data_ranks
    return -(-tokens // (length * ranks * (recipe.train.micro_batch_sequences or 1)))


def measured_mfu(run_dir: Path, cluster: Cluster) -> MeasuredMfu:
    """The MFU of `cluster` at which its devices are as fast as those that pretrained this run.

    Speed is the median of model FLOPs per second and device in the last 1,000 metrics lines since the newest start. Ranks on CPUs share
    one machine, which is one device. Raises `UserError` if the run has no such lines, or devices of another kind.
    """
    run = read_run(run_dir, judge=False)
    if run.recipe is None or not run.pretrain.starts:
        raise UserError(f"{run_dir} has not begun to pretrain, so it has no speed; give another run, a number, or --calibrate")
    model, start = run.recipe.model, run.pretrain.starts[-1]
    if bool(start.cores) != cluster.on_cpu:
        devices = "CPUs" if start.cores else "accelerators"
        raise UserError(f"{run_dir} was trained on {devices}, and cluster {cluster.name} has others; name one of its kind with --cluster")
    speeds: deque[float] = deque(maxlen=_NEWEST)
    for record in lines(run_dir / "metrics.jsonl"):
        speed, length = number(record.get("perf/tokens_per_second")), int(number(record.get("train/sequence_length")))
        if speed > 0 and length > 0 and number(record.get("step")) > start.step:
            speeds.append(speed * flops_per_token(model, length, micro_batches=_micro_batches(run.recipe, length)).total)
    if not speeds:
        raise UserError(f"{run_dir} has no metrics since it was last started; give another run, a number, or --calibrate")
    each = median(speeds) / (1 if start.cores else start.ranks)
    if (mfu := each / (cluster.tflops * 1e12)) > 1:
        raise UserError(
            f"{run_dir} ran at {each / 1e12:.3g} TFLOP/s per device, above the peak of cluster {cluster.name} ({cluster.tflops:g}); "
            "name the cluster on which it was trained with --cluster"
        )
    source = f"measured in {run_dir}: median of {len(speeds)} metrics lines, {each / 1e12:.3g} TFLOP/s per device"
    return MeasuredMfu(mfu, source, run.recipe.layout.pp > 1 or (not cluster.on_cpu and start.ranks > cluster.devices_per_node))


def record_prediction(recipe: Recipe, run_dir: Path, stage: str, data: Mapping[str, StageData]) -> None:
    """Write the prediction of a stage that trains, if there is none for these budgets and the layout can be planned for. `data` is what was
    read of the data of the stages after pretraining; a rehearsal of this recipe (`lmworks plan --calibrate`) on this machine is used."""
    data = {name: found for name, found in data.items() if name in recipe.later_stages}  # tuning may have been given up
    if stage != BASE.stage and recipe.trains_base:  # its own plan: that of a run without pretraining
        train = recipe.train.model_copy(update={"phases": []})
        recipe = recipe.model_copy(update={"train": train, "start_from": recipe.start_from or "the base model"})
    rehearsed = None if recipe.trains_base else kept(recipe, data)
    try:
        plan = make_plan(recipe, "", machine_for(recipe), data=data, measured=None if rehearsed is None else rehearsed.stages)
    except UserError:
        return
    phases = [phase for phase in plan.phases if stage in (BASE.stage, phase.name)]
    tokens = sum(phase.tokens for phase in phases)
    if not phases or any(event["tokens"] == tokens for event in events_of(run_dir, PREDICTION) if event["stage"] == stage):
        return
    training = seconds = sum(phase.seconds for phase in phases)
    source = f"{plan.mfu:.0%} MFU, {plan.mfu_source}"
    if planned := planned_and_actual_seconds(run_dir, {}).get(stage):
        training, source = planned[0], "the speed that was measured for the time budget"
        seconds = training
    elif rehearsed is not None:
        training, source = rehearsed.stages[stage]["steps"], rehearsed.how
    figures = {
        **({"perf/tokens_per_second": tokens / training} if training else {}),  # what was planned is rounded, and may be 0
        "seconds": seconds, "perf/memory": max(phase.placed.memory.total for phase in phases), "checkpoint_bytes": plan.disk.checkpoint,
    }  # fmt: skip
    with Ledger(run_dir / LEDGER) as ledger:
        ledger.write(PREDICTION, stage=stage, tokens=tokens, source=source, figures={k: float(f"{v:.6g}") for k, v in figures.items()})


def record_error(run_dir: Path, stage: str, seconds: float) -> None:
    """Write how far the newest prediction of a stage was from what it has measured when it has ended, once for each prediction. `seconds`
    are those that a stage after pretraining took in this process; of one that was interrupted they are not compared."""
    predictions, errors = ([one for one in events_of(run_dir, name) if one["stage"] == stage] for name in (PREDICTION, ERROR))
    if not predictions or len(errors) >= len(predictions):
        return
    training = read_run(run_dir, judge=False).training[stage]
    measured = training.measured()
    if stage != BASE.stage:
        measured.pop("seconds", None)
        measured |= {"seconds": seconds} if len(training.starts) == 1 else {}
    for newest in directories(run_dir / of_stage(stage).checkpoints)[-1:]:  # not verified: that would read every byte of it
        measured["checkpoint_bytes"] = float(sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()))
    figures = {
        name: {"predicted": predicted, "measured": found, "error": round(predicted / found - 1, 4)}
        for name, predicted in predictions[-1]["figures"].items()
        if (found := measured.get(name))
    }
    with Ledger(run_dir / LEDGER) as ledger:
        ledger.write(ERROR, stage=stage, source=predictions[-1]["source"], figures=figures)


_PLACES = (
    ("report.html", "the run page: open it in a browser"),
    ("corpus/report.json", "documents kept and dropped, with reasons; see also rejected.jsonl and decisions/"),
    ("tokenizer", "tokenizer.json and the chat template"),
    ("shards", "token files, with their lineage"),
    *((stage.checkpoints, f"the {stage.model} model") for stage in MODEL_STAGES),
    ("evaluate/results.json", "evaluation results"),
    ("export/huggingface", "for transformers, vLLM and SGLang"),
    ("export/gguf/model.gguf", "for llama.cpp"),
    (LEDGER, "event log of the run"),
)
_FIGURES = ("train/tokens", "train/loss", "perf/tokens_per_second", "perf/mfu")


def summary(run_dir: Path) -> RenderableType:
    """The whole summary, for a terminal."""
    parts: list[RenderableType] = ["", _places(run_dir), "", _training(run_dir), *_plan(run_dir)]
    results = run_dir / "evaluate" / "results.json"
    if results.exists():
        document = read_json(results)
        parts += ["", *bits(document), *scores(document), *forgotten(document), samples_table(document)]
    chat = Text("\nNow talk to it:  ") + Text(f"lmworks chat {run_dir}", style="bold")
    return Group(*parts, chat)


def _places(run_dir: Path) -> Table:
    table = Table(title="Where everything is", title_justify="left", box=None, show_header=False)
    for place, what in _PLACES:
        if (run_dir / place).exists():
            table.add_row(str(run_dir / place), Text(what, style="dim"))
    return table


def _training(run_dir: Path) -> Table:
    table = Table(title="What was measured", title_justify="left", box=None, show_header=False)
    stages = read_run(run_dir, judge=False).training  # one pass in bounded memory: the metrics of a long run are gigabytes
    name, run = next(((name, one) for name, one in stages.items() if one.series), (BASE.stage, stages[BASE.stage]))
    tokens, loss, speed, mfu = (run.series.get(name) for name in _FIGURES)
    if tokens and loss and speed and mfu:
        where = "" if name == BASE.stage else f" ({name})"  # of a recipe that trains no base model
        table.add_row("trained on", f"{tokens.last[1]:,.0f} tokens in {run.step:,} steps{where}")
        table.add_row("final training loss", f"{loss.last[1]:.3f} nats per token")
        fraction = f"{100 * mfu.median():.0f}% MFU (of the measured matrix-multiply peak)"
        table.add_row("speed", f"{speed.median():,.0f} tokens/s (median), {fraction}")
    spread, dead = run.last("experts/load_cv"), run.last("experts/dead")
    if spread is not None and dead is not None:
        table.add_row("experts", f"load imbalance {100 * spread:.0f}% (coefficient of variation), {dead:.0f} dead experts")
    times = seconds_by_stage(run_dir)
    spent = [f"{name} {seconds:.0f} s" for name, seconds in times.items() if seconds is not None]
    if spent:
        table.add_row("time", ", ".join(spent) + f"; {sum(s for s in times.values() if s is not None) / 60:.1f} minutes in total")
    return table


def _plan(run_dir: Path) -> list[RenderableType]:
    """Planned and actual time by stage, and what was given up; empty for a run without a time budget."""
    found = planned_and_actual_seconds(run_dir, seconds_by_stage(run_dir))
    if not found:
        return []
    table = Table(title="Where the time went, in seconds", title_justify="left", header_style="dim", box=None)
    for heading in ("", "planned", "actual"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, (planned, took) in found.items():
        table.add_row(name, f"{planned:.0f}", "" if took is None else f"{took:.0f}")
    totals = [f"{sum(seconds or 0 for seconds in column):.0f}" for column in zip(*found.values(), strict=True)]
    table.add_row("total", *totals, style="bold")
    lost = given_up(load_resolved(run_dir / "resolved.json"), run_dir)
    return ["", table, *([lost] if lost else [])]


_BYTES = {"fp32": 4, "bf16": 2}  # of a weight in an export
_HEADROOM = 1.05  # metrics, samples, pages, and what the file system itself needs


def written(recipe: Recipe, run_dir: Path, data: Mapping[str, StageData], most: bool) -> dict[str, float]:
    """Bytes that each stage still writes: at least (one checkpoint of each stage that trains, and the exports), or with `most` all
    checkpoints that are kept at a time and the token files. A stage that has a checkpoint already is left out."""
    return {name: amount for name, amount in _written(recipe, run_dir, data, most) if amount}


def _written(recipe: Recipe, run_dir: Path, data: Mapping[str, StageData], most: bool) -> Iterator[tuple[str, float]]:
    alone = recipe.model_copy(update={"start_from": recipe.start_from or "", "train": recipe.train.model_copy(update={"phases": []})})
    stages = {"pretrain": disk(recipe)} if recipe.trains_base else {}
    for name in recipe.later_stages:
        others = {other: None for other in recipe.later_stages if other != name}
        stages[name] = disk(stages_as_phases(alone.model_copy(update=others), data))
    for name, held in stages.items():
        if not listing.has_checkpoints(run_dir / of_stage(name).checkpoints):
            kept = held.checkpoints_kept + 1 if most else 1  # one more while the newest is written
            yield name, held.checkpoint * kept + (held.data if most and name == "pretrain" else 0)
    formats = recipe.export.huggingface + (recipe.export.gguf is True or (most and recipe.export.gguf == "auto"))
    weights = count_parameters(recipe.model) * _BYTES[recipe.export.dtype]
    yield "export", 0.0 if (run_dir / "export").is_dir() else weights * formats


def shortage(recipe: Recipe, run_dir: Path, data: Mapping[str, StageData], most: bool) -> str | None:
    """What the run needs, where less is free; None if it fits."""
    place = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    free, parts = machine.free_disk(place), written(recipe, run_dir, data, most)
    needed = sum(parts.values()) * _HEADROOM
    if needed <= free:
        return None
    named = ", ".join(f"{name} {size(amount)}" for name, amount in parts.items())
    return (
        f"{run_dir} needs {size(needed)} of disk space {'at most' if most else 'at least'} ({named}), and {size(free)} are free: free "
        "some, choose another run_dir, or train low-rank adapters (lora), whose checkpoints are small"
    )


def require_disk(recipe: Recipe, run_dir: Path, data: Mapping[str, StageData]) -> None:
    """Raise `UserError` if not even the least that the run writes has room."""
    if said := shortage(recipe, run_dir, data, most=False):
        raise UserError(said)


_PLAIN = ("text", "markdown", "jsonl", "html", "latex", "code", "notebook")  # kinds whose files are at least as large as their text
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".parquet")
_BYTES_PER_TOKEN = 2  # fewer than with any real tokenizer, so that no shortage is reported wrongly
_UNLIMITED = 1 << 60  # tokens of a source whose size is unknown


def text_shortage(recipe: Recipe, run_dir: Path) -> str | None:
    """A message that names the sources with too little text, from the token files of the run or, before they exist, from the file sizes of
    the sources; None if no shortage is known."""
    if recipe.time is not None or not recipe.train.phases:
        return None
    try:
        _order(recipe, run_dir)
    except UserError as error:
        return str(error)
    return None


def text_beyond_epochs(recipe: Recipe, run_dir: Path) -> str | None:
    """A message that names the source that budgets for a `time` would read more often than a run with that time does; None if none is
    known."""
    endless = recipe.model_copy(update={"shards": recipe.shards.model_copy(update={"max_epochs": float("inf")})})
    try:
        most = max(_order(endless, run_dir).shares(), key=lambda share: share.epochs)
    except UserError as error:
        return str(error)
    if most.epochs <= recipe.shards.max_epochs:
        return None
    return (
        f"the text does not last for these tokens: source {most.source} would be read {most.epochs:,.0f} times or more in phase "
        f"{most.phase}; a run with this time reads none more than {recipe.shards.max_epochs:g} times (shards.max_epochs) and leaves the "
        "rest of the time unused"
    )


def _order(recipe: Recipe, run_dir: Path) -> Order:
    """The order of the sequences by the token files of the run or, before they exist, by upper bounds of the tokens."""
    made = (run_dir / "shards" / MANIFEST).exists()
    return Order(recipe, _max_tokens(recipe) | (Manifest.load(run_dir / "shards").train_tokens() if made else {}))


def _max_tokens(recipe: Recipe) -> dict[str, int]:
    """An upper bound of the tokens of each source."""
    found = list_files(recipe, {})
    tokens = dict.fromkeys(recipe.shards.imported, _UNLIMITED)
    for source in recipe.corpus.sources:
        files = found.get(f"corpus.sources.{source.name}", {}) if source.kind in _PLAIN else {}
        unknown = not files or any(name.endswith(_COMPRESSED) for name in files)
        size = _UNLIMITED if unknown else sum(size for size, *_ in files.values()) // _BYTES_PER_TOKEN
        tokens |= dict.fromkeys(source.outputs, size)
    return tokens
