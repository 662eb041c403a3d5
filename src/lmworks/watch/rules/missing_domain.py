"""A domain that is validated has no share, or nearly none, in the training text."""

from __future__ import annotations

from lmworks.watch.data_facts import domain_shares, domains, fall, middle, mixture_key, mixture_with, validation_by_domain
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_SHARE = 0.1  # of an equal share
_FALL = 0.5
_FEWEST = 3  # validations


def _check(evidence: Evidence) -> Finding | None:
    losses, shares = validation_by_domain(evidence), domain_shares(evidence)
    if len(losses) < 2:
        raise NotJudged("fewer than two domains are validated")
    if min(map(len, losses.values())) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} validations")
    equal = 1 / len(losses)
    missing = [name for name in losses if shares.get(name, 0.0) < _SHARE * equal]
    present = [name for name in losses if shares.get(name, 0.0) >= 0.5 * equal]
    if not missing or not present:
        return None
    falls = {name: fall(losses[name]) for name in losses}
    typical = middle(falls[name] for name in present)
    worst = min(missing, key=falls.__getitem__)
    if not typical > 0.02:
        raise NotJudged("no domain has improved by 2%")
    measured = [
        Measurement(
            f"share of the tokens of domain {worst}", shares.get(worst, 0.0), low=_SHARE * equal, source=f"{_SHARE:.0%} of an equal share"
        ),
        Measurement(
            f"fall of validation/{worst}/loss relative to that of the other domains",
            falls[worst] / typical,
            low=_FALL,
            source="measured: 0.8 to 1.2 in healthy runs of make doctor",
        ),
    ]
    if not measured[1].abnormal:
        return None
    of = domains(evidence)
    sources = [name for name, domain in of.items() if domain in missing]
    return Finding(
        measured,
        steps=(int(losses[worst].steps[0]), int(losses[worst].steps[-1])),
        where=", ".join(sorted(missing)),
        excluded=[
            Exclusion("noisy-source", "the domain has no share of the training text, so that its own text cannot be why it stays high")
        ],
        changes=[
            Change(
                mixture_key(evidence),
                mixture_with(evidence, dict.fromkeys(sources, equal / max(len(missing), 1))),
                "give its sources a share",
                "start again, or from now on with lmworks data mixture; text that was read is not read again",
            )
        ],
        check_afterwards=f"validation/{worst}/loss falls as the others do, within two validations",
    )


RULE = Rule(
    "missing-domain",
    "A domain that is validated is missing from the training text.",
    "data",
    ("not-decreasing",),
    _check,
    "Held-out text of every source is validated, also of sources whose weight in the mixture is zero or that a phase leaves out. Such a "
    "domain improves only as far as the text of others helps, which is little where vocabulary and form differ, as of code or another "
    "language. The total validation loss hides it.",
    needs=("validation/{domain}/loss", "train/tokens"),
    stages=("pretrain",),
    look_alikes={"noisy-source": "the domain has a share, and its training loss is flat too", "stalled-domain": "it fell before"},
)
