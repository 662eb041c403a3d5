"""The gradient is exactly zero."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_FEWEST = 5  # lines


def _check(evidence: Evidence) -> Finding | None:
    norms = evidence.series("optim/grad_norm").finite
    if len(norms) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines with a gradient norm")
    zero = norms.values == 0
    equal = evidence.series("grpo/equal_groups").finite
    valid = evidence.series("train/valid_tokens").finite
    if evidence.stage == "grpo" and equal.median > 0.5:
        return None  # no signal, by the rules of rewards
    if len(valid) and valid.median == 0:
        return None  # labels-all-masked
    if zero[-_FEWEST:].sum() < _FEWEST or zero.sum() < _FEWEST:
        return None
    steps = norms.steps[zero]
    loss = evidence.series("train/loss").finite
    change = abs(loss.part(0, 0.2).median - loss.part(0.8, 1).median) if len(loss) >= 5 else float("nan")
    adapters = evidence.value(f"{evidence.stage}.lora") is not None
    return Finding(
        [
            Measurement(
                "lines whose gradient is exactly 0", int(zero.sum()), high=0, source="no gradient of a loss over labels is exactly 0"
            ),
            Measurement("change of the loss over the stage", change, unit="nats"),
        ],
        steps=(int(steps[0]), int(steps[-1])),
        exact=True,
        excluded=[Exclusion("labels-all-masked", f"{valid.median:,.0f} tokens of a step carry loss")] if len(valid) else [],
        changes=[
            Change(
                f"{evidence.stage}.lora.targets",
                '["query", "key", "value", "output"]',
                "train adapters that the loss depends on",
                cost="start the stage again",
            )
            if adapters
            else Change(
                "train.activation_checkpointing",
                "none",
                "recomputation above a frozen first layer cuts the gradient",
                cost="resume; more memory",
            ),
        ],
        check_afterwards="optim/grad_norm is above 0 in the next step",
    )


RULE = Rule(
    "frozen-gradient",
    "The gradient is exactly zero, so nothing is trained.",
    "numerics",
    ("not-decreasing",),
    _check,
    "A gradient norm of exactly 0 means that no path leads from the loss to a trained weight: recomputation above a frozen first layer "
    "(transformers#21381), adapters on modules that are never called, or activations so large that a norm has no gradient. The loss stays "
    "where it is, and the run seems to go on.",
    needs=("optim/grad_norm",),
    look_alikes={
        "labels-all-masked": "no token carries loss",
        "rewards-all-wrong": "GRPO with equal rewards",
        "rewards-all-right": "GRPO with equal rewards",
        "learning-rate-too-low": "the gradient is not 0",
    },
)
