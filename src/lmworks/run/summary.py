"""The end of the journey: where everything is, what was measured, and what to type next."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmworks.doctor.gather import gather
from lmworks.evaluate.tables import bits_table, samples_table, scores
from lmworks.files import read_json
from lmworks.run.stamps import seconds_by_stage
from lmworks.run.time_budget import planned_and_actual_seconds

_PLACES = (
    ("report.html", "the run page: open it in a browser"),
    ("corpus/report.json", "what was kept, what was dropped and why; rejected.jsonl and decisions/ beside it"),
    ("tokenizer", "tokenizer.json and the chat template"),
    ("shards", "token files with lineage"),
    ("checkpoints", "the base model"),
    ("tune/checkpoints", "the tuned model"),
    ("evaluate/results.json", "all scores"),
    ("export/huggingface", "for transformers, vLLM, SGLang"),
    ("export/gguf/model.gguf", "for llama.cpp"),
    ("ledger.jsonl", "everything that happened"),
)
_FIGURES = ("train/tokens", "train/loss", "perf/tokens_per_second", "perf/mfu")


def summary(run_dir: Path) -> RenderableType:
    """All of it for a terminal."""
    parts: list[RenderableType] = ["", _places(run_dir), "", _training(run_dir), *_plan(run_dir)]
    results = run_dir / "evaluate" / "results.json"
    if results.exists():
        document = read_json(results)
        parts += ["", bits_table(document), *scores(document), "", samples_table(document)]
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
    run = gather(run_dir).pretrain  # one pass that keeps little: after months the file has gigabytes
    tokens, loss, speed, share = (run.series.get(name) for name in _FIGURES)
    if tokens and loss and speed and share:
        table.add_row("trained on", f"{tokens.last[1]:,.0f} tokens in {run.step:,} steps")
        table.add_row("last training loss", f"{loss.last[1]:.3f} nats per token")
        table.add_row("speed", f"{speed.median():,.0f} tokens/s (median), {100 * share.median():.0f}% of the measured matrix-multiply peak")
    spread, dead = run.last("experts/load_cv"), run.last("experts/dead")
    if spread is not None and dead is not None:
        table.add_row("experts", f"load varies by {100 * spread:.0f}% (coefficient of variation), {dead:.0f} dead")
    times = seconds_by_stage(run_dir)
    spent = [f"{name} {seconds:.0f} s" for name, seconds in times.items() if seconds is not None]
    if spent:
        table.add_row("time", ", ".join(spent) + f"; {sum(s for s in times.values() if s is not None) / 60:.1f} minutes in all")
    return table



def _plan(run_dir: Path) -> list[RenderableType]:
    """What was planned of the recipe's time beside what it took; nothing for a run without one."""
    found = planned_and_actual_seconds(run_dir, seconds_by_stage(run_dir))
    if not found:
        return []
    table = Table(title="Where the time went, in seconds", title_justify="left", header_style="dim", box=None)
    for heading in ("", "planned", "took"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, (planned, took) in found.items():
        table.add_row(name, f"{planned:.0f}", "" if took is None else f"{took:.0f}")
    table.add_row("all", *(f"{sum(seconds or 0 for seconds in column):.0f}" for column in zip(*found.values(), strict=True)), style="bold")
    return ["", table]
