"""The token ids are not those of the tokenizer, or stand in an order without meaning."""

from __future__ import annotations

import math

from lmworks.watch import trends
from lmworks.watch.data_facts import number, tokens_by_source, validation_by_domain
from lmworks.watch.evidence import Evidence, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule
from lmworks.watch.rules._commands import show_batch

_FLOOR, _ABOVE = 0.97, 1.1
_FLAT, _BYTES = 0.03, 0.1
_LARGE, _TINY = 0.025, 1e-3  # of optim/update_ratio
_FEWEST, _SEEN = 60, 50  # lines; tokens for each entry of the vocabulary


def _check(evidence: Evidence) -> Finding | None:
    made, now = evidence.document("shards/manifest.json").get("tokenizer_sha256"), evidence.files.sha256("tokenizer/tokenizer.json")
    if isinstance(made, str) and now and made != now:
        return _finding(
            evidence,
            [
                Measurement(
                    "hash of the tokenizer that differs from the token files'", 1, high=0, source="sha256 of tokenizer/tokenizer.json"
                )
            ],
            True,
        )
    if (wrong := _wrong_bytes(evidence)) is not None:
        return _finding(evidence, [wrong], False)
    loss = evidence.series("train/loss").finite
    if len(loss) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines")
    seen = evidence.series("train/tokens").finite.last / max(evidence.number("model.vocab_size"), 1)
    if not seen >= _SEEN:
        raise NotJudged(f"fewer than {_SEEN} tokens for each entry of the vocabulary, too few to learn more than their frequencies")
    floor = _unigram_nats(evidence)
    if not math.isfinite(floor):
        raise NotJudged("no entropy of single tokens in shards/report.json, which an earlier version has made")
    late = loss.part(0.5, 1)
    flat = 1 - ratio(late.part(0.75, 1).median, late.part(0, 0.25).median)
    early = 1 - ratio(loss.part(0.1, 0.5).median, loss.first)
    measured = [
        Measurement(
            "train/loss relative to the entropy of single tokens",
            ratio(late.median, floor),
            high=_FLOOR,
            source=f"{floor:.3g} nats: what a model has that knows the frequencies of tokens and nothing else",
        ),
        Measurement(
            "fall of train/loss over the second half", flat, low=_FLAT, source="measured: 0.05 in the median of healthy runs of make doctor"
        ),
    ]
    update = trends.at(evidence.series("optim/update_ratio"), evidence.step // 2)
    if not all(one.abnormal for one in measured) or late.median > _ABOVE * floor or not early > 0.05:
        return None  # it is learning, or has not begun to
    if update > _LARGE or update < _TINY or loss.first > 1.15 * math.log(max(evidence.number("model.vocab_size"), 2)):
        return None  # a rate that is too high or too low, weights that began too wide
    return _finding(evidence, measured, False)


def _finding(evidence: Evidence, measured: list[Measurement], exact: bool) -> Finding:
    loss = evidence.series("train/loss").finite
    vocabulary = evidence.number("model.vocab_size")
    return Finding(
        measured,
        steps=(int(loss.steps[0]), int(loss.steps[-1])) if len(loss) else None,
        exact=exact,
        excluded=_excluded(loss.first, vocabulary)
        if not exact
        else [Exclusion("init-too-wide", "the hashes differ, whatever the losses are")],
        changes=[
            Change(
                advice="make the token files again with the tokenizer of this run (delete shards/), or set tokenizer.path to theirs; "
                f"{show_batch(evidence, 1)} shows rows as text",
                cost="start again from step 0",
            )
        ],
        check_afterwards="train/loss is below the entropy of single tokens within the first fifth of the steps",
        next_measurement=f"{show_batch(evidence, 1)}, which shows rows as text",
    )


def _excluded(first: float, vocabulary: float) -> list[Exclusion]:
    return [
        Exclusion("init-too-wide", f"the first loss, {first:.3g}, is that of equal probabilities, {math.log(max(vocabulary, 1)):.3g}"),
        Exclusion("learning-rate-too-high", "the loss does not move, and updates are of a normal size"),
    ]


def _unigram_nats(evidence: Evidence) -> float:
    """The entropy of single tokens, mean over what was trained on, where a model knows which source it reads; NaN if it is not known."""
    tokens = tokens_by_source(evidence)
    nats = {name: number(evidence.document("shards/report.json"), "unigram_nats", name) for name in tokens}
    return sum(nats[name] * count for name, count in tokens.items()) / max(sum(tokens.values()), 1) if tokens else math.nan


def _wrong_bytes(evidence: Evidence) -> Measurement | None:
    """Bytes per token as validation counts them, relative to those that the tokenizer's report has measured on the same text."""
    report = {
        str(one.get("domain")): number(one, "bytes_per_token")
        for one in evidence.document("tokenizer/report.json").get("evaluation") or []
        if isinstance(one, dict) and one.get("tokenizer") == "this"
    }
    worst: tuple[float, str] = (0.0, "")
    for domain, loss in validation_by_domain(evidence).items():
        bits = evidence.series(f"validation/{domain}/bits_per_byte").finite
        if len(bits) and report.get(domain, 0.0) > 0 and bits.last > 0:
            counted = loss.last / math.log(2) / bits.last / report[domain]
            worst = max(worst, (abs(math.log(max(counted, 1e-9))), domain))
    if worst[0] <= math.log(1 + 4 * _BYTES):  # a part of the held-out text is read, which may be cut otherwise
        return None
    return Measurement(
        f"bytes per token of {worst[1]} in validation relative to the tokenizer's report",
        math.exp(worst[0]),
        0.9,
        1.1,
        "tokenizer/report.json",
    )


RULE = Rule(
    "wrong-tokenizer",
    "The token ids are not those of this tokenizer, or their order has no meaning.",
    "data",
    ("not-decreasing", "bad-answers"),
    _check,
    "Token files that were written with another vocabulary, read at the wrong byte, or shuffled within rows still have frequencies, "
    "which a "
    "model learns in its first steps. Their order has no meaning, so the loss stays at the entropy of single tokens. lmworks keeps the "
    "hash "
    "of the tokenizer with the token files. Where bytes per token are wrong, bits per byte are too (nanochat#693: 0.95 instead of 1.13).",
    needs=("train/loss",),
    stages=("pretrain",),
    look_alikes={
        "init-too-wide": "starts above the loss of equal probabilities",
        "noisy-source": "one domain alone",
        "learning-rate-too-high": "large updates",
        "learning-rate-too-low": "tiny updates, and a loss that still falls",
    },
)
