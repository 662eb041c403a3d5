"""A test alert to every target of the recipe."""

from __future__ import annotations

import time

from lmworks.errors import UserError
from lmworks.preflight.check_result import CheckContext, CheckResult
from lmworks.watch.alert_targets import NotDelivered, open_target
from lmworks.watch.alerts import TEST, Alert, body


def sent(context: CheckContext) -> CheckResult:
    """Send an alert of the kind `test` to every target, once. Fails with the reason of the first target that does not take it."""
    options, name = context.recipe.alerts, context.recipe.name
    if not options.targets:
        return CheckResult("skip", "the recipe has no alerts.targets")
    alert = Alert(TEST, TEST, "this is a test of preflight; nothing is wrong", time.time(), {})
    failed, figures = [], {}
    for target in options.targets:
        began = time.monotonic()
        try:
            open_target(target).deliver(body(alert, name, context.run_dir, target.format), float(options.timeout))
        except UserError as error:
            failed.append(str(error))
        except NotDelivered as error:
            failed.append(f"alerts.targets.{target.name}: {error}")
        figures[f"{target.name}/seconds"] = round(time.monotonic() - began, 3)
    if failed:
        return CheckResult("fail", "; ".join(failed), "mend the target, or leave it out; the run would be as silent", figures)
    return CheckResult("ok", f"taken by {', '.join(one.name for one in options.targets)}", figures=figures)
