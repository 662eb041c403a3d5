"""A profile as tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmworks.plan.memory_kinds import KINDS, Remedy, total
from lmworks.profile.report import Item, Largest, Profile
from lmworks.ui.amounts import percent, short_size, significant, span

_WORTH = 0.02  # of a step, or of its tokens: a smaller item is not worth a change
_KERNELS = 8
_WASTE = {"waiting": "waiting for batches", "padding": "padding", "without_loss": "tokens without loss"}


def render(profile: Profile) -> RenderableType:
    """All tables, each with its largest item."""
    return Group(
        _title(profile), _memory(profile), _largest(profile.largest_memory, "memory", short_size),
        _time(profile), _largest(profile.largest_time, "time", _seconds, profile.largest_time.measured / _whole(profile)),
        *_ranks(profile), *_data(profile), _largest(profile.largest_data, "data", percent, profile.largest_data.measured),
        *_kernels(profile), *(Text(f"note: {note}", style="yellow") for note in profile.notes),
    )  # fmt: skip


def _title(profile: Profile) -> Text:
    steps = f"steps {profile.first_step + profile.warm_up:,} to {profile.first_step + profile.warm_up + profile.timed - 1:,}"
    return Text.assemble(
        (profile.target, "bold"), f"  {profile.stage}, {profile.phase}, {steps} after {profile.warm_up} of warm-up; "
        f"{profile.sequences:,} x {profile.sequence_length:,} tokens, {profile.micro_batch_size} sequences at a time; "
        f"{profile.layout}, {profile.device}",
    )  # fmt: skip


def _table(title: str, *columns: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column == "" else "right")
    return table


def _rows(table: Table, items: Mapping[str, Item], largest: str, show: Callable[[float], str], about: Mapping[str, str]) -> None:
    total = sum(item.measured for item in items.values()) or 1.0
    for name, item in items.items():
        planned = "" if item.planned is None else show(item.planned)
        cells = [name, planned, show(item.measured), _share(item.measured / total), about.get(name, "")]
        table.add_row(*cells[: len(table.columns)], style="bold" if name == largest else None)


def _memory(profile: Profile) -> Table:
    table = _table("Memory of the rank that needs most", "", "planned", "measured", "share", "")
    _rows(table, profile.memory, profile.largest_memory.name, short_size, KINDS)
    planned, measured = (
        total({kind: getattr(item, name) or 0.0 for kind, item in profile.memory.items()}) for name in ("planned", "measured")
    )
    table.add_row("all", short_size(planned), short_size(measured), "", f"the peak was {short_size(profile.memory_peak)}")
    return table


def _whole(profile: Profile) -> float:
    return sum(item.measured for item in profile.time.values()) or 1.0


def _share(value: float) -> str:
    return f"{value:.1%}"


def _seconds(value: float) -> str:
    return span(value) if value else "0"


def _time(profile: Profile) -> Table:
    table = _table("Time of a step", "", "planned", "measured", "share")
    _rows(table, profile.time, profile.largest_time.name, _seconds, {})
    step, every = profile.planned_step_seconds, [item.planned or 0.0 for item in profile.time.values()]
    planned = "" if step is None else _seconds(sum(every))
    table.add_row("all", planned, _seconds(_whole(profile)), "", style="bold")
    planned, spread = "" if step is None else _seconds(step), f"± {percent(profile.spread / 2)}" if profile.spread else ""
    table.add_row("without validation and save", planned, _seconds(profile.step_seconds), spread)
    assumed = "" if profile.planned_mfu is None else percent(profile.planned_mfu)
    table.add_row("MFU of the measured peak", assumed, percent(profile.mfu), f"{significant(profile.tokens_per_second, 3)} tokens/s")
    return table


def _largest(one: Largest, of: str, show: Callable[[float], str], share: float = 1.0) -> Text:
    name = _WASTE.get(one.name, one.name)
    if share < _WORTH:
        return Text(f"largest: {name}, {show(one.measured)}; less than {percent(_WORTH)}, so that nothing is gained here")
    if one.remedy is None:
        return Text.assemble(
            "largest: ", (f"{name}, {show(one.measured)}", "bold"), f"; no key of the recipe makes this {of} smaller alone"
        )
    return Text.assemble("largest: ", (f"{name}, {show(one.measured)}", "bold"), f"; {_change(one.remedy, show)}")


def _change(remedy: Remedy, show: Callable[[float], str]) -> str:
    command = remedy.change if remedy.key.isupper() else f"--set {remedy.change}"
    command = f"{remedy.key}={remedy.change}" if remedy.key.isupper() else command
    saves = f"takes about {show(remedy.saves)} off" if remedy.saves else "takes some off"
    return f"{command} {saves}" + (f" (costs: {remedy.costs})" if remedy.costs else "")


def _ranks(profile: Profile) -> Iterator[RenderableType]:
    if len(profile.ranks) < 2:
        return
    table = _table("Ranks", "rank", "step", "own work", "data", "peak memory", "")
    staged = any(one.stage for one in profile.ranks)
    for one in profile.ranks:
        about = [f"pipeline stage {one.stage}"] if staged else []
        about += ["slowest by its own work"] if one.rank == profile.slowest else []
        table.add_row(
            f"{one.rank} on {one.host}", _seconds(one.step), _seconds(one.own), _seconds(one.data), short_size(one.memory), ", ".join(about)
        )
    yield table


def _data(profile: Profile) -> Iterator[RenderableType]:
    data, table = profile.data, _table("Data", "", "measured")
    for name in _WASTE:
        table.add_row(_WASTE[name], percent(data[name]), style="bold" if name == profile.largest_data.name else None)
    table.add_row("read, while it is read", f"{short_size(data['read_bytes_per_second'])}/s")
    table.add_row("needed", f"{short_size(data['needed_bytes_per_second'])}/s")
    table.add_row("mean document", f"{significant(data['tokens_per_document'], 3)} tokens")
    yield table


def _kernels(profile: Profile) -> Iterator[RenderableType]:
    if not profile.kernels:
        return
    table = _table("Operators with most time of their own, in the profiled step", "", "time", "share", "calls")
    for one in profile.kernels[:_KERNELS]:
        table.add_row(
            Text(str(one["name"])[:60]), _seconds(float(one["seconds"])), percent(float(one["share"])), f"{float(one['calls']):,.0f}"
        )
    yield table


def render_out_of_memory(record: Mapping[str, Any]) -> RenderableType:
    """The table of a run whose memory has run out (`lmworks.run.out_of_memory`)."""
    table = _table(f"Memory when it ran out, in the {record['doing']} of step {record['step']:,}", "", "planned", "measured", "")
    for name, item in record["kinds"].items():
        if item["measured"] or item["planned"]:
            planned = "" if item["planned"] is None else short_size(item["planned"])
            style = "bold" if name == record["largest"]["kind"] else None
            table.add_row(name, planned, short_size(item["measured"]), "estimated" if item["estimated"] else "", style=style)
    return table
