"""AdamW's eps is comparable to the gradients, so that updates are far smaller than the learning rate says."""

from __future__ import annotations

import math

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_RATIO = 0.1
"""eps over the RMS of the gradients. Above it, an update loses a tenth; arXiv:2304.09871 has spikes at 546B near 1."""
_SIZE = 0.1
"""RMS of an update over the rate. Measured on healthy AdamW runs: 0.2 to 0.4, as arXiv:2502.16982 says; 0.05 where eps is three
times the gradients."""


def _check(evidence: Evidence) -> Finding | None:
    eps, norms = evidence.number("optimizer.eps"), evidence.series("optim/grad_norm").finite.part(0.1, 1)
    if not len(norms) or math.isnan(eps):
        raise NotJudged("no gradient norm, or no optimizer.eps")
    facts = trends.model_facts(evidence)
    clip = evidence.number("optimizer.max_grad_norm")
    norm = min(norms.median, clip) if clip > 0 else norms.median
    all_adam = evidence.value("optimizer.kind") == "adamw"
    clipped = norm / norms.median if norms.median > 0 else 1.0
    groups = {name: clipped * one.finite.part(0.1, 1).median for name, one in evidence.per("optim/grad_rms/{group}").items()}
    trained = {name: one for name, one in groups.items() if one > 0 and (all_adam or name in ("embedding", "head", "vectors"))}
    overall = norm / math.sqrt(facts.parameters)
    found = [Measurement("optimizer.eps over the RMS of the gradients", eps / max(overall, 1e-30), high=_RATIO, source="arXiv:2304.09871")]
    if trained:
        name = min(trained, key=lambda one: trained[one])
        found.append(Measurement(f"the same of the group {name}", eps / trained[name], high=_RATIO, source="arXiv:2304.09871"))
    start, stop = trends.near_peak(evidence)
    update, weights = (evidence.series(name).finite.between(start, stop).median for name in ("optim/update_ratio", "optim/weight_norm"))
    size = ratio(update * weights / math.sqrt(facts.parameters), trends.peak_rate(evidence))
    if all_adam and not math.isnan(size):
        found.append(Measurement("RMS of an update over the learning rate", size, low=_SIZE, source="arXiv:2502.16982: 0.2 to 0.4"))
    if not (found[0].abnormal and all_adam) and not (trained and eps / min(trained.values()) > 1.0):
        return None
    smallest = min([overall, *trained.values()])
    wanted = min(1e-8, 10.0 ** math.floor(math.log10(max(smallest, 1e-27) / 1000)))
    return Finding(
        found,
        steps=(int(norms.steps[0]), int(norms.steps[-1])),
        excluded=[
            Exclusion(
                "learning-rate-too-low", f"the peak rate is {trends.peak_rate(evidence):.3g}, and eps takes {eps / (eps + overall):.0%}"
            )
        ],
        changes=[
            Change(
                "optimizer.eps",
                f"{wanted:.0e}",
                "at most a thousandth of the RMS of the gradients",
                cost="resume: steps become larger at once, so lower the rate by the same factor if the loss rises",
                moves="down",
            )
        ],
        check_afterwards="optim/update_ratio rises by the share that eps took, within 1 / (1 - beta2) steps",
        next_measurement="optim/grad_rms by group and optim/update_ratio: --set metrics.detail_every=5%",
    )


RULE = Rule(
    "eps-too-large",
    "AdamW's eps is as large as the gradients, so the updates are too small.",
    "optimization",
    ("not-decreasing", "spikes"),
    _check,
    "AdamW divides the mean gradient by the root of its second moment plus eps. Where eps is not far below that root, the update is no "
    "longer of the size of the rate, but proportional to the gradient: training is slow where gradients are small, as in large models, "
    "and unstable when they change. The default 1e-8 is safe down to gradients of 1e-7.",
    needs=("optim/grad_norm",),
    look_alikes={"learning-rate-too-low": "eps is far below the gradients, and the rate itself is low"},
    outranks=("learning-rate-too-low",),
)
