"""Renders a plan as tables for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmworks.plan.budget import TimeBudget
from lmworks.plan.laws import LossLaw
from lmworks.plan.layout import describe
from lmworks.plan.memory import GIB
from lmworks.plan.plan import PhasePlan, Plan
from lmworks.ui.amounts import amount, days, size


def render(plan: Plan, budget: TimeBudget | None = None, law: LossLaw | None = None) -> RenderableType:
    """All tables of the plan, with the loss that a law predicts."""
    trained = [_phases(plan), *_positions(plan), *_data(plan), *_stages(plan), _layouts(plan), _memory(plan)] if plan.phases else []
    return Group(
        _title(plan), *_budget(budget), *_loss(plan, law), _parameters(plan), *trained, _costs(plan, law), *_warnings(plan),
    )  # fmt: skip


def _title(plan: Plan) -> Text:
    cluster = plan.cluster
    return Text.assemble(
        (plan.recipe, "bold"), f"  on  {cluster.name}: {plan.devices:,} x {cluster.device}, {cluster.memory_gib:g} GiB, "
        f"{cluster.tflops:g} dense {'bf16' if cluster.bf16 else 'fp32'} TFLOPS each  (recipe {plan.fingerprint[:12]})",
    )  # fmt: skip


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _budget(budget: TimeBudget | None) -> list[RenderableType]:
    """Sizes with the tokens that fit into the time, the chosen one in bold."""
    if budget is None:
        return []
    table = _table(f"\nTokens that fit into {days(budget.seconds)}", "size", "active", "tokens", "per active parameter")
    known = any(one.loss is not None for one in budget.candidates)
    if known:
        table.add_column(f"predicted loss ({budget.loss_unit})", justify="right")
    for one in budget.candidates:
        loss = [f"{one.loss:.3f}"] if one.loss is not None else []
        style = "bold" if one.size == budget.chosen and len(budget.candidates) > 1 else None
        table.add_row(one.size, amount(one.active), amount(one.tokens), f"{one.tokens_per_parameter:,.1f}", *loss, style=style)
    return [table, Text(f"chosen: {budget.chosen}, {budget.why}", style="dim")]


def _loss(plan: Plan, law: LossLaw | None) -> list[RenderableType]:
    if law is None:
        return []
    size, tokens = plan.counts.active_computed, plan.tokens
    interval = law.interval(size, tokens)
    between = f", 90% interval {interval[0]:.3f} to {interval[1]:.3f}" if interval else ""
    predicted = Text(f"\npredicted loss: {law.predict(size, tokens):.3f} {law.unit}{between} ({law.source})")
    return [predicted, *(Text(f"warning: {line}", style="yellow") for line in law.cautions(size, tokens))]


def _parameters(plan: Plan) -> Table:
    counts = plan.counts
    table = _table("\nParameters", "component", "total", "active per token")
    for name, number in counts.components.items():
        table.add_row(name, f"{number:,}", f"{counts.active_components[name]:,}")
    table.add_row("all", f"{counts.total:,}", f"{counts.active:,}", style="bold")
    table.add_row(
        "", amount(counts.total), f"{amount(counts.active)} ({amount(counts.active_computed)} without the embedding look-up)", style="bold"
    )
    if counts.mtp:
        table.add_row("multi-token prediction", f"{counts.mtp:,}", f"{counts.mtp_active:,}")
        both = (amount(counts.trained), amount(counts.active + counts.mtp_active))
        table.add_row("all, in training", *both, style="bold")
    return table


def _steps(*phases: PhasePlan) -> str:
    """The steps of phases; with the fewest where the batch grows with the loss."""
    most = sum(phase.steps for phase in phases)
    fewest = sum(phase.steps if phase.fewest_steps is None else phase.fewest_steps for phase in phases)
    return f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"


def _phases(plan: Plan) -> Table:
    table = _table("\nPhases", "phase", "tokens", "steps", "length", "batch", "6N FLOP", "attention", "time")
    for phase in plan.phases:
        table.add_row(
            phase.name, amount(phase.tokens), _steps(phase), f"{phase.sequence_length:,}", amount(phase.batch_tokens),
            f"{phase.flops_parameters:.3g}", f"{phase.flops_attention:.3g}", days(phase.seconds),
        )  # fmt: skip
    attention = plan.flops - plan.flops_parameters - plan.flops_mtp
    table.add_row(
        "all",
        amount(plan.tokens),
        _steps(*plan.phases),
        "",
        "",
        f"{plan.flops_parameters:.3g}",
        f"{attention:.3g}",
        days(plan.seconds),
        style="bold",
    )
    return table


def _positions(plan: Plan) -> list[Table]:
    """How the phases change the position encoding; no table if none does."""
    if not any("->" in phase.positions for phase in plan.phases):
        return []
    table = _table("\nPositions", "phase", "length", "positions")
    table.columns[2].justify = "left"
    for phase in plan.phases:
        table.add_row(phase.name, f"{phase.sequence_length:,}", phase.positions)
    return [table]


def _data(plan: Plan) -> list[Table]:
    """What was read of the data of the stages after pretraining."""
    if not plan.data:
        return []
    table = _table("\nData", "stage", "examples", "held out", "left out", "cut", "tokens", "steps", "read", "passes", "counted")
    for name, found in plan.data.items():
        table.add_row(
            name, f"{found.examples:,} {found.noun}", f"{found.held_out:,}", f"{sum(found.left_out.values()):,}",
            f"{sum(found.cut.values()):,}", f"{found.tokens:,}", f"{found.steps:,}", f"{found.read:,}", f"{found.passes:.3g}",
            found.counted,
        )  # fmt: skip
    return [table]


def _stages(plan: Plan) -> list[Table]:
    """The time of every stage of the run, where a rehearsal measured it."""
    if not plan.stages:
        return []
    table = _table("\nTime of the whole run", "stage", "time", "of which")
    table.columns[2].justify = "left"
    for name, parts in plan.stages.items():
        listed = ", ".join(f"{part} {days(took)}" for part, took in parts.items() if took >= 0.5) if len(parts) > 1 else ""
        table.add_row(name, days(sum(parts.values())), listed)
    table.add_row("all", days(plan.seconds), "", style="bold")
    return [table]


def _layouts(plan: Plan) -> Table:
    table = _table("\nLayout", "phase", "ranks", "micro-batch", "accumulation", "checkpointing", "bubble")
    table.columns[1].justify = "left"
    for phase in plan.phases:
        placed = phase.placed
        split = f"{placed.micro_batch_size}", f"{placed.accumulation}"
        table.add_row(phase.name, describe(placed.layout), *split, plan.activation_checkpointing, f"{phase.bubble:.0%}")
    return table


def _memory(plan: Plan) -> Table:
    """Components as rows, phases as columns; phases with equal memory share a column. Offloaded state is listed below."""
    columns: dict[tuple[float, ...], list[str]] = {}
    needs = [phase.placed.memory for phase in plan.phases]
    inside = list(dict.fromkeys(name for held in needs for name in held.components))
    outside = list(dict.fromkeys(name for held in needs for name in held.elsewhere))
    for phase, held in zip(plan.phases, needs, strict=True):
        sizes = [*(held.components.get(name, 0.0) for name in inside), *(held.elsewhere.get(name, 0.0) for name in outside)]
        columns.setdefault(tuple(round(value / GIB, 2) for value in sizes), []).append(phase.name)
    names = [group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in columns.values()]
    table = _table(f"\nMemory of the rank that needs most, GiB of {plan.cluster.memory_gib:g}", "", *names)
    for row, name in enumerate(inside):
        table.add_row(name, *(f"{values[row]:.2f}" for values in columns))
    table.add_row("all", *(f"{sum(values[: len(inside)]):.2f}" for values in columns), style="bold")
    for row, name in enumerate(outside, len(inside)):
        table.add_row(f"offloaded: {name}", *(f"{values[row]:.2f}" for values in columns))
    return table


def _costs(plan: Plan, law: LossLaw | None) -> Table:
    table = _table("\nCosts", "", "")
    table.columns[1].justify, table.show_header = "left", False
    cluster, files = plan.cluster, ("token files", f"at most {size(plan.disk.data)}")
    if not plan.phases:
        table.add_row("time", f"not counted: {plan.not_counted}")
        table.add_row(*files)
        return table
    attention = plan.flops - plan.flops_parameters - plan.flops_mtp
    mtp = f", {plan.flops_mtp:.3g} for MTP" if plan.flops_mtp else ""
    table.add_row("operations", f"{plan.flops:.3g} FLOP: {plan.flops_parameters:.3g} for 6N, {attention:.3g} for attention{mtp}")
    table.add_row("speed", f"{amount(plan.tokens_per_second)} tokens/s at {plan.mfu:.1%} MFU ({plan.mfu_source})")
    table.add_row("time", f"{days(plan.seconds)} ({days(plan.seconds_parameters)} for 6N alone)")
    counted = vars(plan.overheads) | ({"communication": 0.0, "bubble": 0.0} if plan.layout_in_mfu else {})
    counted["pipeline bubble"], counted["uneven shares of a batch"] = counted.pop("bubble"), counted.pop("uneven_shares")
    besides = ", ".join(f"{name} {days(took)}" for name, took in counted.items() if took >= 0.5)
    if besides and not plan.stages:
        table.add_row("", f"including, besides computation: {besides}")
    if plan.not_counted:
        table.add_row("", f"not counted: {plan.not_counted}")
    table.add_row("reads", f"{size(plan.tokens_per_second * plan.disk.data / max(1, plan.tokens))} of token files per second")
    hours = f"{amount(plan.device_hours)} device-hours"
    table.add_row(
        "cost",
        f"{hours}, ${plan.dollars:,.{0 if plan.dollars >= 100 else 2}f} at ${cluster.dollars_per_device_hour:g} per hour"
        if cluster.dollars_per_device_hour
        else hours,
    )
    if watts := cluster.watts_per_device:
        table.add_row("energy", f"{amount(plan.device_hours * watts / 1000)} kWh at {watts:g} W per device")
    table.add_row(
        "budget",
        f"{plan.tokens_per_parameter:,.1f} tokens per active parameter ({_optimal_ratio(plan, law)}; more makes a smaller model for "
        "serving)",
    )
    one, kept = plan.disk.checkpoint, plan.disk.checkpoints_kept
    table.add_row("checkpoint", f"{size(one)} each, at most {kept} kept: {size(one * kept)}")
    if plan.disk.staged:
        nodes = -(-plan.devices // cluster.devices_per_node)
        table.add_row("", f"saved from a copy in host memory: {size(plan.disk.staged / nodes)} per node besides the memory above")
    if plan.saves:
        found = plan.saves
        table.add_row(
            "saves",
            f"at the latest every {days(found.interval)}, so that a failure costs {days(found.interval / 2)} of work on average; one "
            f"failure in {days(found.between_failures)} is expected on {plan.devices:,} device{'s' * (plan.devices > 1)} (rate of Llama 3, "
            f"arXiv:2407.21783): saves and repeated work take {found.lost:.2%} of the time",
        )
    table.add_row(*files)
    shrink = f", {plan.kv_cache_shrink:g} times smaller than without {plan.kv_cache_by}" if plan.kv_cache_shrink > 1 else ""
    table.add_row("KV cache", f"{size(plan.kv_cache)} per sequence of {plan.max_length:,} tokens in bf16{shrink}")
    return table


def _optimal_ratio(plan: Plan, law: LossLaw | None) -> str:
    """The compute-optimal tokens per parameter: by a fitted law where it tells them, at the operations of the plan."""
    if law is None or law.undetermined:
        return "20 is compute-optimal"
    product = float(plan.counts.active_computed) * plan.tokens
    return f"{product / law.optimal_parameters(6 * product) ** 2:,.1f} is compute-optimal by the fitted law"


def _warnings(plan: Plan) -> list[Text]:
    return [Text(f"\nwarning: {line}", style="yellow") for line in plan.warnings()]
