"""fp16 overflows in steps that no loss scale can mend."""

from __future__ import annotations

import math

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_IN_A_ROW = 6
"""Steps in a row that are not finite. The scale begins at 65,536 and is halved by each: measured healthy runs need one to four halvings."""


def _check(evidence: Evidence) -> Finding | None:
    used = [event.get("precision") for event in evidence.of("start", "resume") if event.get("precision")]
    precision = str(used[-1]) if used else str(evidence.value("train.precision"))
    if precision not in ("float16", "fp16"):
        return None
    bad = evidence.of("bad_step")
    scale = evidence.series("optim/loss_scale").finite
    if not bad and not len(scale):
        raise NotJudged("no loss scale and no bad step")
    in_a_row = max((int(event["in_a_row"]) for event in bad if isinstance(event.get("in_a_row"), int)), default=0)
    forward = [event for event in evidence.of("not_finite") if "forward pass" in str(event.get("first"))]
    lowest = float(scale.values.min()) if len(scale) else math.nan
    share = len(bad) / max(1, evidence.step + 1)
    found = [
        Measurement(
            "steps in a row that were not finite", in_a_row, high=_IN_A_ROW, source="measured: make doctor; Micikevicius et al. 2018"
        ),
        Measurement(
            "overflows in the forward pass, which the loss scale does not reach", len(forward), high=0, source="the operators of the step"
        ),
        Measurement("smallest loss scale", lowest, low=2.0, source="DeepSpeed#697: 1 means that every step overflows"),
    ]
    if in_a_row <= _IN_A_ROW and not lowest <= 1:
        return None
    steps = evidence.steps_of("bad_step")
    first = str(forward[0].get("first")) if forward else ""
    wide = evidence.number("model.initializer_range")
    return Finding(
        [*found, Measurement("share of the steps that were not finite", share)],
        steps=(min(steps), max(steps)) if steps else None,
        where=first[:200],
        excluded=[
            Exclusion("operator-overflow", f"the run computes in {precision}, whose largest number is 65,504"),
            Exclusion("bad-batch", f"{len({event.get('step') for event in bad})} different batches overflow"),
        ],
        changes=[
            Change(
                "train.precision",
                "bf16",
                "the range of fp32 at the cost of fp16; fp32 where the device has no bf16",
                cost="resume from the last checkpoint: no bad step has changed a weight",
            ),
            *(
                [
                    Change(
                        "model.initializer_range",
                        "0.02",
                        "the initial weights are larger than usual",
                        cost="start again from step 0",
                        moves="down",
                    )
                ]
                if wide > 0.06
                else []
            ),
        ],
        check_afterwards="train/bad_steps stays as it is over the next 100 steps",
        next_measurement="lmworks replay RUN, which repeats a saved batch in fp32",
    )


RULE = Rule(
    "fp16-overflow",
    "Values exceed the range of fp16, and no loss scale helps.",
    "numerics",
    ("not-finite",),
    _check,
    "fp16 has nothing above 65,504. Gradients that overflow are mended by the loss scale, which halves until they fit: a few such steps, "
    "now and then, are healthy. Activations or logits that overflow in the forward pass are not reached by it; then every step is left "
    "out, the scale falls to 1 (DeepSpeed#697), and nothing is learned. bf16 has the range of fp32.",
    look_alikes={
        "operator-overflow": "also in fp32 or bf16",
        "bad-batch": "only some batches",
        "init-too-wide": "the first loss is finite",
    },
    outranks=("operator-overflow", "init-too-wide", "learning-rate-too-high", "learning-rate-too-low"),
)
