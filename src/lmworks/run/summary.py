"""The summary that `lmworks run` prints at its end: files, measurements, and the next command."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmworks.doctor.read_run import read_run
from lmworks.evaluate.tables import bits, forgotten, samples_table, scores
from lmworks.files import read_json
from lmworks.model_stages import BASE, MODEL_STAGES
from lmworks.recipe.loading.load import load_resolved
from lmworks.run.stamps import seconds_by_stage
from lmworks.run.time_budget import given_up, planned_and_actual_seconds
from lmworks.watch.ledger import LEDGER

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
    stages = read_run(run_dir).training  # one pass in bounded memory: the metrics of a long run are gigabytes
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
