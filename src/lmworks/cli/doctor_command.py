"""`lmworks doctor`: name the cause of what went wrong in a run, from its files or by recomputation."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from lmworks.cli.options import JsonOption, console, print_json
from lmworks.errors import UserError
from lmworks.io.run_layout import BASE
from lmworks.recipe.keys import nearest_or_all
from lmworks.ui.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmworks.doctor.rows import Row
    from lmworks.watch.diagnosis import Diagnosis
    from lmworks.watch.evidence import Evidence
    from lmworks.watch.rule import Finding

_MARKS = {"ok": ("✓", "green"), "fail": ("✗", "red"), "warn": ("?", "yellow"), "skip": ("-", "dim")}
_ROWS = 10  # of `--find-rows` in a terminal


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("doctor")(doctor)


def doctor(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run directory, or a bundle that lmworks bundle has written.", show_default=False)
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also compute steps and losses again, which takes minutes, to confirm or exclude causes.")
    ] = False,
    find_rows: Annotated[
        int | None,
        typer.Option("--find-rows", metavar="STEP", help="The sequences behind a spike or a NaN of a step, with their documents.",
                     show_default=False),
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Of --find-rows: the model that the step trained, base or tuned.")] = BASE.model,
    experts: Annotated[
        Path | None, typer.Option("--experts", metavar="FILE", help="Which experts a text uses.", show_default=False)
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="RUN", help="Compare the loss with that of a reference run at equal tokens.",
                                 show_default=False)
    ] = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="CODE", help="Explain a cause, such as learning-rate-too-high.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Name the cause of what went wrong in a run, with the evidence, the key to change, and what to check afterwards.

    Reads files, also of a run that is still going or has died; --probe keeps what it measured in probes.json. Exit code 0: nothing found;
    1: a problem; 2: nothing could be judged.
    """
    if explain is not None:
        _explain(explain, as_json)
        return
    if run is None:
        raise UserError("doctor needs a RUN, such as runs/quickstart, or --explain CODE")
    if sum((probe, find_rows is not None, experts is not None, against is not None)) > 1:
        raise UserError("--probe, --find-rows, --experts and --against are different questions; ask one at a time")
    if find_rows is not None:
        _find_rows(Path(run), model, find_rows, as_json)
    elif experts is not None:
        _experts(Path(run), experts, as_json)
    elif against is not None:
        _against(Path(run), Path(against), as_json)
    else:
        _diagnose(Path(run), probe, as_json)


def _diagnose(run: Path, probe: bool, as_json: bool) -> None:
    from lmworks.doctor.report import as_document
    from lmworks.watch.evidence import stages_in
    from lmworks.watch.probes import diagnose_probed
    from lmworks.watch.run_files import open_run

    files = open_run(run)
    stages = list(stages_in(files))
    if not any(evidence.events or evidence.lines for evidence in stages):
        raise UserError(f"{run} has no records that can be judged: neither ledger.jsonl nor metrics.jsonl of lmworks")
    if probe and files.folder is None:
        raise UserError(f"{run} is a bundle, which has neither weights nor text; --probe needs the run directory")
    diagnoses = _probed(run, stages) if probe else [diagnose_probed(evidence) for evidence in stages]
    if as_json:
        print_json(as_document(files.label, diagnoses))
    else:
        _print(files.label, diagnoses)
    if any(one.problems for one in diagnoses):
        raise typer.Exit(ExitCode.FAILED)


def _probed(run: Path, stages: Sequence[Evidence]) -> list[Diagnosis]:
    """The diagnoses of all stages after the probes of those that can be computed again, whose measurements are kept with the run. Raises
    `UserError` if no stage can."""
    from lmworks.doctor import probe
    from lmworks.doctor.recompute import Recomputation
    from lmworks.io.run_layout import of_stage
    from lmworks.ui import terminal
    from lmworks.watch.probes import diagnose_probed

    opened: dict[str, Recomputation] = {}
    closed: dict[str, UserError] = {}
    for evidence in stages:
        try:
            opened[evidence.stage] = Recomputation.open(run, of_stage(evidence.stage))
        except UserError as error:
            closed[evidence.stage] = error
    if not opened:
        raise next(iter(closed.values()))
    terminal.console.print("recomputing; of the run, only probes.json is written", style="dim")
    found = []
    with terminal.bar("probe", len(opened) * len(probe.PROBES)) as bar:
        begun = False

        def began(title: str) -> None:
            nonlocal begun
            bar.advance(int(begun))
            begun = True
            bar.note(title)

        for evidence in stages:
            if evidence.stage in closed:
                one = diagnose_probed(evidence)
                found.append(replace(one, not_judged={**one.not_judged, "probes": str(closed[evidence.stage])}))
                continue
            record = probe.probe(opened.pop(evidence.stage), began)
            try:
                record.keep(run)
            except (UserError, OSError) as error:
                terminal.console.print(f"the measurements are not kept with the run: {error}", style="yellow")
            found.append(diagnose_probed(evidence, record))
        bar.advance(1)
    return found


def _find_rows(run: Path, model: str, step: int, as_json: bool) -> None:
    from lmworks.doctor.recompute import Recomputation
    from lmworks.doctor.rows import find_rows
    from lmworks.io.run_layout import of_model

    rows = find_rows(Recomputation.open(run, of_model(model)), step)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    out = console()
    line = f"line {step + 1:,} of the metrics"
    out.print(f"step {step:,} ({line}): {len(rows):,} sequences, by their loss with the weights before the step", soft_wrap=True)
    for row in rows[:_ROWS]:
        out.print(Text(_row_text(row)), soft_wrap=True)
        for document in row.documents.documents if row.documents else ():
            place = f"{document.id}, tokens {document.start:,} to {document.stop:,}, from {document.origin}"
            out.print(Text(f"    {place}", "dim"), soft_wrap=True)
    if len(rows) > _ROWS:
        out.print(f"and {len(rows) - _ROWS:,} more (--json has all)")


def _row_text(row: Row) -> str:
    norm = "" if row.grad_norm != row.grad_norm and row.loss == row.loss else f", gradient norm {row.grad_norm:.4g}"
    source = f", source {row.source}" if row.source else ""
    more = f", {row.repeated:.0%} one token" if row.repeated > 0.3 else ""
    return f"  sequence {row.sequence}: loss {row.loss:.4f}, {row.loss_over_median:.2f} times the median{norm}{more}{source}"


def _experts(run: Path, text: Path, as_json: bool) -> None:
    from lmworks.doctor.recompute import Recomputation
    from lmworks.doctor.rows import expert_use

    found = expert_use(Recomputation.open(run), text)
    if as_json:
        print_json(found)
        return
    out = console()
    out.print(f"{found['tokens']:,} tokens of {text} over {found['experts']} experts, by {found['checkpoint']}", soft_wrap=True)
    for layer in found["layers"]:
        largest = sorted(enumerate(layer["shares"]), key=lambda one: -one[1])[:4]
        busiest = ", ".join(f"{expert} ({share:.1%})" for expert, share in largest)
        unused = f"; unused: {', '.join(map(str, layer['unused']))}" if layer["unused"] else ""
        out.print(f"  layer {layer['layer']}: effectively {layer['effective']:.1f} experts; busiest: {busiest}{unused}", soft_wrap=True)


def _against(run: Path, reference: Path, as_json: bool) -> None:
    from lmworks.doctor.against import compare
    from lmworks.watch.evidence import Evidence
    from lmworks.watch.run_files import open_run

    found = compare(Evidence(open_run(run)), Evidence(open_run(reference)))
    if as_json:
        print_json(asdict(found))
    else:
        _print_comparison(found, run, reference)
    if found.parted_at is not None:
        raise typer.Exit(ExitCode.FAILED)


def _print_comparison(found: Any, run: Path, reference: Path) -> None:
    out = console()
    out.print(f"{run} against {reference}, over the {found.tokens:,.0f} tokens that both have trained", soft_wrap=True)
    if found.parted_at is None:
        out.print("the losses do not part: no three ranges of tokens in a row differ by more than 4 standard errors")
    else:
        out.print(f"the losses part at {found.parted_at:,.0f} tokens")
        for event in found.before:
            out.print(f"  before: {event}")
    out.print(f"last quarter: {found.difference:+.4f} nats per token (standard error {found.error:.4f})")
    for key, (one, other) in found.keys.items():
        out.print(Text(f"  {key}: {one} here, {other} there"), soft_wrap=True)


def _print(label: str, diagnoses: list[Diagnosis]) -> None:
    from lmworks.doctor.report import areas, died_text, probes_text, verdict

    out = console()
    out.print(Text(label, "bold"))
    for diagnosis in diagnoses:
        for area, result, words in areas(diagnosis):
            mark, style = _MARKS[result]
            out.print(Text.assemble(f"  {diagnosis.stage:9}", (mark, style), f" {area:13}", words), soft_wrap=True)
        if words := died_text(diagnosis):
            out.print(Text(f"  {diagnosis.stage:9}! {words}", "yellow"), soft_wrap=True)
        if words := probes_text(diagnosis):
            out.print(Text(f"  {diagnosis.stage:9}  {words}", "dim"), soft_wrap=True)
    for diagnosis in diagnoses:
        for kind, style in (("problems", "red"), ("unsure", "yellow"), ("notes", "cyan")):
            for finding in getattr(diagnosis, kind):
                _print_finding(finding, style)
    out.print()
    out.print(Text(verdict(diagnoses), "bold"), soft_wrap=True)


def _print_finding(finding: Finding, style: str) -> None:
    from lmworks.doctor.report import lines

    out = console()
    out.print()
    out.print(Text.assemble((finding.code, f"bold {style}"), f": {finding.sentence}"), soft_wrap=True)
    before = ""
    for label, text in lines(finding):
        out.print(Text.assemble((f"  {label if label != before else '':17}", "dim"), text), soft_wrap=True)
        before = label


def _explain(code: str, as_json: bool) -> None:
    from lmworks.doctor.report import measured, rates_text
    from lmworks.watch.diagnosis import all_rules
    from lmworks.watch.rule import SYMPTOMS

    rules = all_rules()
    if code not in rules:
        raise UserError(f"{code!r} is no cause that doctor knows; {nearest_or_all(code, list(rules))}")
    rule = rules[code]
    rates = measured().get(code)
    if as_json:
        print_json({
            "code": rule.code, "sentence": rule.sentence, "area": rule.area, "symptoms": list(rule.symptoms), "explain": rule.explain,
            "needs": list(rule.needs), "look_alikes": dict(rule.look_alikes), "measured": rates,
        })  # fmt: skip
        return
    out = console()
    out.print(Text.assemble((rule.code, "bold"), f": {rule.sentence}"), soft_wrap=True)
    out.print(Text(rule.explain), soft_wrap=True)
    out.print(Text(f"symptoms: {'; '.join(SYMPTOMS[name] for name in rule.symptoms)}"), soft_wrap=True)
    for other, tells in rule.look_alikes.items():
        out.print(Text(f"not {other}: that {tells}"), soft_wrap=True)
    if rates:
        out.print(Text(f"this rule: {rates_text(rates)}"), soft_wrap=True)
