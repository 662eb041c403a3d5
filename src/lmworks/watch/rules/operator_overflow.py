"""One operator gives values that are not finite or beyond all reason, on batches of all kinds."""

from __future__ import annotations

import math
import re
from collections import Counter

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, Rule

_BATCHES = 3
"""Different batches that were not finite. Rows that are bad lie together, and are skipped by a roll-back."""
_BETWEEN_LAYERS = 1e4
"""RMS of a layer's output over that of the layer before. Measured on healthy runs: at most 20; at a hundred times the best rate 300."""
_CALM = 0.5


def _check(evidence: Evidence) -> Finding | None:
    used = [event.get("precision") for event in evidence.of("start", "resume") if event.get("precision")]
    fp16 = bool(used) and used[-1] == "float16"
    reports = [event for event in evidence.of("not_finite") if ", " in str(event.get("first"))]
    counted = Counter(_operator(str(event["first"])) for event in reports)
    operator, times = counted.most_common(1)[0] if counted else ("", 0)
    bad = sorted(set(evidence.steps_of("bad_step")))
    ratio, layer = _jump_between_layers(evidence)
    found = [
        Measurement("steps that were not finite, of different batches", len(bad), high=_BATCHES - 1, source="bad_step in the ledger"),
        Measurement("reports that begin with the same operator", times, high=0, source="the operators of the step, run again"),
        Measurement("activation_rms of a layer over that of the layer before", ratio, high=_BETWEEN_LAYERS, source="measured: make doctor"),
    ]
    overflows = len(bad) >= _BATCHES and times > 0 and times == sum(counted.values())
    if fp16 or not (overflows or ratio > _BETWEEN_LAYERS):
        return None
    first = bad[0] if bad else _first_jump(evidence)
    runup = _runup(evidence, first)
    if runup > _CALM:
        return None  # the loss rose before it: learning-rate-too-high, seen at its end
    return Finding(
        found,
        steps=(first, bad[-1] if bad else evidence.step),
        where=operator or f"layer {layer}",
        excluded=[
            Exclusion(
                "bad-batch", f"{len(bad)} different batches, {len(evidence.of('rollback'))} roll-backs that skipped rows did not help"
            ),
            Exclusion("fp16-overflow", f"the run computes in {used[-1] if used else 'an unknown precision'}"),
            Exclusion("learning-rate-too-high", f"the loss rose by {runup:.2g} nats in the steps before"),
        ],
        changes=[
            Change(
                "train.compile",
                "false",
                f"compute {operator or 'the layer'} with other kernels",
                cost="resume: no bad step has changed a weight",
            ),
            Change(advice="run lmworks preflight, which compares every kernel with its plain form on this machine"),
        ],
        check_afterwards=f"train/bad_steps does not rise over the 20 steps behind {first}",
        next_measurement="lmworks replay RUN, which repeats a saved batch operator by operator in fp32",
    )


def _operator(text: str) -> str:
    """`mul of layers.1.ffn` of "mul of layers.1.ffn, forward pass: its result is infinite"."""
    return re.split(r"[,:]", text)[0].strip()


def _jump_between_layers(evidence: Evidence) -> tuple[float, str]:
    layers = {int(name): one.finite for name, one in evidence.per("layers/{layer}/activation_rms").items() if name.isdigit()}
    found = [
        (float(now / before), str(layer))
        for layer, one in layers.items()
        if layer - 1 in layers
        for step, now in zip(one.steps, one.values, strict=True)
        if (before := trends.at(layers[layer - 1].between(step, step + 1), int(step))) > 0
    ]
    return max(found, default=(math.nan, ""))


def _first_jump(evidence: Evidence) -> int:
    steps = [
        int(one.finite.steps[one.finite.values > 1e6][0])
        for one in evidence.per("layers/{layer}/activation_rms").values()
        if (one.finite.values > 1e6).any()
    ]
    return min(steps, default=0)


def _runup(evidence: Evidence, first: int) -> float:
    """The rise of the loss over the ten lines before a step; 0 with too few."""
    loss = evidence.series("train/loss").finite.between(0, first + 1)
    return float(loss.values[-5:].mean() - loss.part(0, 1).values[-25:-5].mean()) if len(loss) >= 15 else 0.0


RULE = Rule(
    "operator-overflow",
    "One operator gives values that are not finite, whatever the batch.",
    "numerics",
    ("not-finite", "spikes"),
    _check,
    "A kernel with an error, a mask that leaves a row empty, or a layer whose weights are broken gives infinite or absurd values on every "
    "batch, or on all of a kind (LlamaFactory#8088, axolotl#1706). A step that is not finite is run again with a check behind every "
    "operator, and the first one stands in the ledger: if it is always the same, and the batches are not, it is the cause.",
    look_alikes={
        "bad-batch": "few batches that lie together",
        "fp16-overflow": "only in fp16",
        "learning-rate-too-high": "the loss rises before",
        "silent-corruption": "the same step is sound when it is run again",
    },
    outranks=("bad-batch", "frozen-gradient", "attention-logits-growing", "learning-rate-too-high", "learning-rate-too-low"),
)
