"""One domain stops improving, or gets worse, while the others go on."""

from __future__ import annotations

from lmworks.recipe.scaling_laws import EPOCHS_AS_NEW
from lmworks.watch import trends
from lmworks.watch.data_facts import domain_shares, domains, middle, mixture_key, mixture_with, passes, stretches, validation_by_domain
from lmworks.watch.evidence import Evidence, Series, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_RISE, _OTHERS = 0.01, 0.01
_FEWEST = 8  # validations


def _check(evidence: Evidence) -> Finding | None:
    losses = {name: one for name, one in validation_by_domain(evidence).items() if len(one) >= _FEWEST}
    if len(losses) < 2:
        raise NotJudged(f"fewer than two domains with {_FEWEST} validations")
    stretch = stretches(evidence)[-1] if stretches(evidence) else None
    if stretch is not None and stretch.start > 0:
        losses = {name: one.between(stretch.start + 1, evidence.step + 1) for name, one in losses.items()}
        if min(map(len, losses.values())) < _FEWEST:
            raise NotJudged("too few validations since the mixture has changed")
    late = {name: one.part(0.5, 1) for name, one in losses.items()}
    rises = {name: _change(one) for name, one in late.items()}
    worst = max(rises, key=rises.__getitem__)
    others = middle(-value for name, value in rises.items() if name != worst)
    share = domain_shares(evidence).get(worst, 0.0)
    fell = 1 - ratio(late[worst].first, losses[worst].first)
    if not (rises[worst] > _RISE and others > _OTHERS and fell > 0.05 and share > 0.1 / len(losses)):
        return None
    sources = [name for name, domain in domains(evidence).items() if domain == worst]
    read = max((count for name, count in passes(evidence).items() if name in sources), default=0.0)
    return Finding(
        [
            Measurement(
                f"rise of validation/{worst}/loss over the second half",
                rises[worst],
                high=_RISE,
                source="measured: at most -0.02 in healthy runs of make doctor",
            ),
            Measurement("share of its validations there above the one before", _up(late[worst]), high=0.6, source="noise alone gives 0.5"),
            Measurement("fall of the other domains over the same steps", others),
            Measurement("passes over its text", read, high=float(EPOCHS_AS_NEW), source="arXiv:2305.16264"),
        ],
        steps=(int(late[worst].steps[0]), int(late[worst].steps[-1])),
        where=f"domain {worst}",
        excluded=[
            Exclusion("overfitting", f"the other domains have fallen by {others:.1%}"),
            Exclusion("missing-domain", f"it has {share:.1%} of the tokens"),
            Exclusion("noisy-source", f"it fell by {fell:.0%} before"),
        ],
        changes=[
            Change(
                mixture_key(evidence),
                mixture_with(evidence, {name: _weight(evidence, name) * (0.5 if read > 4 else 2) for name in sources}),
                "less of a source that is read too often" if read > 4 else "more of its sources",
                "from now on with lmworks data mixture",
            )
        ],
        check_afterwards=f"validation/{worst}/loss falls again within two validations",
        next_measurement="lmworks doctor RUN --probe, which measures the loss per source at two checkpoints",
    )


def _weight(evidence: Evidence, source: str) -> float:
    mixture = stretches(evidence)[-1].mixture
    return min(mixture.get(source, 0.0), 0.4)


def _change(series: Series) -> float:
    """The Theil-Sen slope over the whole part, relative to its median."""
    return ratio(trends.slope(series.steps, series.values) * float(series.steps[-1] - series.steps[0]), series.median)


def _up(series: Series) -> float:
    moves = series.values[1:] - series.values[:-1]
    return float((moves > 0).mean())


RULE = Rule(
    "stalled-domain",
    "A domain gets worse while the others improve.",
    "data",
    ("not-decreasing", "overfitting"),
    _check,
    "The mean over domains can fall while one of them rises: its text is read too often and memorized, it has too small a share against "
    "the others, or a change of the mixture has taken it away. The curves of single domains show it.",
    needs=("validation/{domain}/loss",),
    stages=("pretrain",),
    look_alikes={"missing-domain": "it never had a share", "noisy-source": "it never fell", "overfitting": "all domains rise"},
)
