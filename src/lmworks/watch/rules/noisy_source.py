"""A source is noise that nothing can predict: random characters, compressed or encrypted data, broken OCR."""

from __future__ import annotations

import math

from lmworks.watch.data_facts import domain_shares, domains, fall, middle, mixture_key, mixture_with, number, validation_by_domain
from lmworks.watch.evidence import Evidence, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_FALL = 0.5
_BITS = 1.5
_FEWEST = 3  # validations


def _check(evidence: Evidence) -> Finding | None:
    losses, shares = validation_by_domain(evidence), domain_shares(evidence)
    if len(losses) < 2:
        raise NotJudged("fewer than two domains are validated")
    if min(map(len, losses.values())) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} validations")
    falls = {name: fall(one) for name, one in losses.items()}
    worst = min(falls, key=falls.__getitem__)
    if not shares.get(worst, 0.0) > 0.005:
        return None  # missing-domain
    typical = middle(value for name, value in falls.items() if name != worst)
    if not typical > 0.02:
        raise NotJudged("no domain has improved by 2%")
    bits = {name: one.finite.part(2 / 3, 1).median for name, one in evidence.per("validation/{domain}/bits_per_byte").items()}
    usual = middle(value for name, value in bits.items() if name != worst)
    source = [name for name, domain in domains(evidence).items() if domain == worst]
    own = evidence.per("train/source/{source}/loss")
    trained = {name: fall_of_lines(evidence, name) for name in own}
    theirs = [trained[name] for name in source if math.isfinite(trained.get(name, math.nan))]
    rest = middle(value for name, value in trained.items() if name not in source)
    measured = [
        Measurement(
            f"fall of validation/{worst}/loss relative to that of the other domains",
            falls[worst] / typical,
            low=_FALL,
            source="measured: 0.8 to 1.2 in healthy runs of make doctor",
        ),
        Measurement(
            f"validation/{worst}/bits_per_byte relative to that of the other domains",
            ratio(bits.get(worst, math.nan), usual),
            high=_BITS,
            source="measured: 0.8 to 1.13 in healthy runs of make doctor",
        ),
    ]
    if theirs and rest > 0:
        measured.append(
            Measurement(
                f"fall of train/source/{source[0]}/loss relative to that of the other sources",
                min(theirs) / rest,
                low=_FALL,
                source="measured: 0.8 to 1.2 in healthy runs of make doctor",
            )
        )
    pieces = _bytes_per_token(evidence)
    if worst in pieces and len(pieces) > 1:
        usual = middle(value for name, value in pieces.items() if name != worst)
        measured.append(
            Measurement(
                f"bytes per token of {worst} relative to the other domains",
                ratio(pieces[worst], usual),
                low=0.75,
                source="measured: 0.95 to 1.23 in healthy runs of make doctor",
            )
        )
    if not measured[0].abnormal or not any(one.abnormal for one in measured[1:]):
        return None
    return Finding(
        measured,
        steps=(int(losses[worst].steps[0]), int(losses[worst].steps[-1])),
        where=f"source {', '.join(source) or worst}",
        excluded=[
            Exclusion("missing-domain", f"it has {shares[worst]:.1%} of the training tokens"),
            Exclusion("wrong-tokenizer", f"the other domains have improved by {typical:.0%}"),
        ],
        changes=[
            Change(
                mixture_key(evidence),
                mixture_with(evidence, dict.fromkeys(source, 0.0)),
                "leave the source out",
                "from now on with lmworks data mixture; start again to have the tokens back",
            ),
            Change(advice=f"lmworks corpus sample --source {source[0] if source else worst} shows its documents"),
        ],
        check_afterwards="train/loss falls at once by what the source has added, and the other domains faster",
    )


def fall_of_lines(evidence: Evidence, source: str) -> float:
    """By how much a source's training loss has fallen, from the first twentieth of its lines to the last third."""
    one = evidence.per("train/source/{source}/loss")[source].finite
    early = one.part(0.0, 0.05) if len(one) >= 40 else one.part(0.0, 0.2)
    return 1 - ratio(one.part(2 / 3, 1).median, early.median) if len(early) else math.nan


def _bytes_per_token(evidence: Evidence) -> dict[str, float]:
    """By domain, from the tokenizer's evaluation on held-out text."""
    found: dict[str, float] = {}
    for one in evidence.document("tokenizer/report.json").get("evaluation") or []:
        if isinstance(one, dict) and one.get("tokenizer") == "this" and math.isfinite(value := number(one, "bytes_per_token")):
            found[str(one.get("domain"))] = value
    return found


RULE = Rule(
    "noisy-source",
    "A source is noise that the model cannot predict.",
    "data",
    ("not-decreasing",),
    _check,
    "Random characters, base64, compressed data or broken OCR are learned as far as the frequencies of their tokens, and then cost the "
    "same "
    "loss for ever: they take their share of the gradient without teaching anything. Their text has many more bits per byte than any "
    "language, and a tokenizer cuts it into short pieces. GLM-130B reports a NaN right after noisy data came into the mixture.",
    needs=("validation/{domain}/loss", "validation/{domain}/bits_per_byte", "train/tokens"),
    stages=("pretrain",),
    look_alikes={"missing-domain": "no share of the tokens", "wrong-tokenizer": "all domains are flat", "stalled-domain": "it fell before"},
)
