"""Commands that a finding advises about a step.

Findings count steps as the metrics and their charts do: line 1 is that of the first step. Batches count from 0, and so do the commands that
take one (`lmworks data batch`, `doctor --find-rows`, `ckpt rollback --skip-steps`) and the events of the ledger. The functions here take
the step of a finding; nothing else converts it.
"""

from __future__ import annotations

import shlex

from lmworks.io.run_layout import BASE, of_stage
from lmworks.watch.evidence import Evidence

REPLAYED = ("pretrain", "tune")  # stages whose steps can be computed again


def find_rows(evidence: Evidence, step: int) -> str:
    """The command that names the rows behind a step of one of the stages in `REPLAYED`."""
    return f"lmworks doctor {_run(evidence)} --find-rows {_batch(step)}{_model(evidence)}"


def show_batch(evidence: Evidence, step: int) -> str:
    """The command that shows the rows of a step of pretraining as text."""
    return f"lmworks data batch {_run(evidence)} {_batch(step)}"


def show_conversations(evidence: Evidence) -> str:
    """The command that shows conversations of the tuning data with what is trained."""
    return f"lmworks data conversations {_run(evidence)}"


def skip_steps(evidence: Evidence, first: int, last: int) -> str:
    """The command that goes back to a checkpoint, whose step the user fills in, and trains without the steps from `first` to `last`."""
    return f"lmworks ckpt rollback {_run(evidence)} STEP --skip-steps {_batch(first)}:{_batch(last) + 1}{_model(evidence)}"


def _batch(step: int) -> int:
    return max(0, step - 1)


def _model(evidence: Evidence) -> str:
    return "" if evidence.stage == BASE.stage else f" --model {of_stage(evidence.stage).model}"


def _run(evidence: Evidence) -> str:
    return shlex.quote(evidence.files.label)
