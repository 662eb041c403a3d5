"""`lmworks doctor`: name the cause of what went wrong in a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from lmworks.cli.options import JsonOption, console, print_json
from lmworks.errors import UserError
from lmworks.recipe.keys import nearest_or_all
from lmworks.ui.exit_codes import ExitCode

if TYPE_CHECKING:
    from lmworks.watch.diagnosis import Diagnosis
    from lmworks.watch.rule import Finding

_MARKS = {"ok": ("✓", "green"), "fail": ("✗", "red"), "warn": ("?", "yellow"), "skip": ("-", "dim")}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("doctor")(doctor)


def doctor(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run directory, or a bundle that lmworks bundle has written.", show_default=False)
    ] = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="CODE", help="Explain a cause, such as learning-rate-too-high.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Name the cause of what went wrong in a run, with the evidence, the key to change, and what to check afterwards.

    Reads files only, also of a run that is still going or has died. Exit code 0: nothing found; 1: a problem; 2: nothing could be judged.
    """
    if explain is not None:
        _explain(explain, as_json)
        return
    if run is None:
        raise UserError("doctor needs a RUN, such as runs/quickstart, or --explain CODE")
    from lmworks.doctor.report import as_document
    from lmworks.watch.diagnosis import diagnose
    from lmworks.watch.evidence import stages_in
    from lmworks.watch.run_files import open_run

    files = open_run(Path(run))
    stages = list(stages_in(files))
    if not any(evidence.events or evidence.lines for evidence in stages):
        raise UserError(f"{run} has no records that can be judged: neither ledger.jsonl nor metrics.jsonl of lmworks")
    diagnoses = [diagnose(evidence) for evidence in stages]
    if as_json:
        print_json(as_document(files.label, diagnoses))
    else:
        _print(files.label, diagnoses)
    if any(one.problems for one in diagnoses):
        raise typer.Exit(ExitCode.FAILED)


def _print(label: str, diagnoses: list[Diagnosis]) -> None:
    from lmworks.doctor.report import areas, verdict

    out = console()
    out.print(Text(label, "bold"))
    for diagnosis in diagnoses:
        for area, result, words in areas(diagnosis):
            mark, style = _MARKS[result]
            out.print(Text.assemble(f"  {diagnosis.stage:9}", (mark, style), f" {area:13}", words), soft_wrap=True)
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
