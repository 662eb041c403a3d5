"""Rules of the data: each signature is named, and what looks like it is not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rule_verdicts import STEPS, at_validations, falling, judge, verdict

from lmworks.watch.rule import Finding

SOURCES = {"chats": "chat", "docs": "code", "news": "prose"}
EQUAL = {name: 1 / len(SOURCES) for name in SOURCES}
TEXT = 10_000_000  # training tokens of a source: less than one pass


def manifest(tokens: float = TEXT, documents: int = 10_000) -> dict[str, Any]:
    listed = [{"name": name, "domain": domain, "train": {"tokens": tokens, "documents": documents}} for name, domain in SOURCES.items()]
    return {"shards/manifest.json": {"sources": listed}}


def mixture(shares: Mapping[str, float]) -> str:
    return f"train.phases.0.mixture={json.dumps(shares)}"


def corpus() -> str:
    sources = [{"name": n, "kind": "jsonl", "path": f"{n}.jsonl", "domain": d, "license": "MIT"} for n, d in SOURCES.items()]
    return f"corpus.sources={json.dumps(sources)}"


def run(shares: Mapping[str, float] = EQUAL, validation: Mapping[str, Any] = {}, **more: Any) -> dict[str, Any]:
    """A run of `STEPS` steps with `SOURCES`; `validation`: losses by domain, at ten validations."""
    metrics: dict[str, Any] = {
        "train/loss": falling(),
        "train/tokens": [1024.0 * (step + 1) for step in range(STEPS)],
        "train/batch_tokens": [1024.0] * STEPS,
        "train/valid_tokens": [1020.0] * STEPS,
        "train/sequence_length": [64.0] * STEPS,
        "train/phase": [0.0] * STEPS,
    }
    curves = {domain: np.linspace(5.0, 3.6, 10) for domain in SOURCES.values()} | dict(validation)
    for domain, curve in curves.items():
        metrics[f"validation/{domain}/loss"] = at_validations(curve)
        metrics[f"validation/{domain}/bits_per_byte"] = at_validations(np.asarray(curve) / 1.25)
    metrics["validation/loss"] = at_validations(np.mean([np.asarray(one, float) for one in curves.values()], axis=0))
    return {
        "metrics": metrics | more.pop("metrics", {}),
        "overrides": [corpus(), mixture(shares), *more.pop("overrides", [])],
        "documents": manifest() | more.pop("documents", {}),
        **more,
    }


def sources(curve: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"train/source/{name}/loss": values for name, values in curve.items()}


def test_a_domain_without_a_share_is_missing(tmp_path: Path) -> None:
    flat = {"code": np.linspace(5.0, 4.85, 10)}
    found = judge(tmp_path, "missing-domain", **run({"chats": 0.5, "news": 0.5}, flat))
    assert verdict(found) == "named" and isinstance(found, Finding) and found.where == "code"
    assert found.changes[0].key == "train.phases.0.mixture" and "docs: 0.333" in found.changes[0].value
    # unequal losses of domains that all have a share; a small share that is enough; a domain without a share that improves all the same
    assert verdict(judge(tmp_path, "missing-domain", **run(EQUAL, flat))) == "silent"
    assert verdict(judge(tmp_path, "missing-domain", **run({"chats": 0.46, "news": 0.46, "docs": 0.08}, flat))) == "silent"
    assert verdict(judge(tmp_path, "missing-domain", **run({"chats": 0.5, "news": 0.5}))) == "silent"


def test_a_source_of_noise_is_named_by_its_losses_and_its_tokens(tmp_path: Path) -> None:
    flat = {"code": np.linspace(4.6, 4.45, 10)}
    bits = {"validation/code/bits_per_byte": at_validations(np.linspace(6.6, 6.3, 10))}
    found = judge(tmp_path, "noisy-source", **run(EQUAL, flat, metrics=bits))
    assert verdict(found) == "named" and isinstance(found, Finding) and found.where == "source docs"
    assert found.changes[0].value == "{chats: 0.5, news: 0.5}"
    own = sources({"docs": falling(5.0, 4.5), "chats": falling(), "news": falling()})
    assert verdict(judge(tmp_path, "noisy-source", **run(EQUAL, flat, metrics=own))) == "named"
    report = {
        "tokenizer/report.json": {
            "evaluation": [{"tokenizer": "this", "domain": d, "bytes_per_token": 1.0 if d == "code" else 1.9} for d in SOURCES.values()]
        }
    }
    assert verdict(judge(tmp_path, "noisy-source", **run(EQUAL, flat, documents=report))) == "named"
    # a hard domain that improves; one signal alone; a domain without a share
    assert verdict(judge(tmp_path, "noisy-source", **run(EQUAL, {"code": np.linspace(6.0, 4.9, 10)}, metrics=bits))) == "silent"
    assert verdict(judge(tmp_path, "noisy-source", **run(EQUAL, flat))) == "silent"
    assert verdict(judge(tmp_path, "noisy-source", **run({"chats": 0.5, "news": 0.5}, flat, metrics=bits))) == "silent"


def ordered_loss() -> np.ndarray:
    """Levels of ten steps, as where one kind of text follows another."""
    return falling() + np.repeat(np.random.default_rng(1).normal(0, 0.15, STEPS // 10), 10)


SWAYING = {domain: np.linspace(5.0, 3.6, 10) + 0.35 * np.cos(np.arange(10) * 2.2 + phase) for phase, domain in enumerate(SOURCES.values())}


def test_unshuffled_data_is_named_with_and_without_the_count_of_sources(tmp_path: Path) -> None:
    few = {"train/loss": ordered_loss(), "train/effective_sources": [1.1] * STEPS}
    assert verdict(judge(tmp_path, "unshuffled-data", **run(metrics=few))) == "named"
    assert verdict(judge(tmp_path, "unshuffled-data", **run(validation=SWAYING, metrics={"train/loss": ordered_loss()}))) == "named"
    mixed = {"train/effective_sources": [2.98] * STEPS}
    assert verdict(judge(tmp_path, "unshuffled-data", **run(metrics=mixed))) == "silent"
    # levels of the loss alone, as of documents of unequal lengths; a noisy loss; validation that sways
    assert verdict(judge(tmp_path, "unshuffled-data", **run(metrics={"train/loss": ordered_loss()}))) == "silent"
    assert verdict(judge(tmp_path, "unshuffled-data", **run(metrics={"train/loss": falling(noise=0.3)}))) == "silent"
    assert verdict(judge(tmp_path, "unshuffled-data", **run(validation=SWAYING))) == "silent"
    # a spike and its recovery, in all domains alike
    spike = 0.8 * np.exp(-np.arange(STEPS - 100) / 15)
    hit = {domain: np.linspace(5.0, 3.6, 10) + np.where(np.arange(10) == 5, 0.8, 0.0) for domain in SOURCES.values()}
    recovering = {"train/loss": falling() + np.concatenate([np.zeros(100), spike])}
    assert verdict(judge(tmp_path, "unshuffled-data", **run(validation=hit, metrics=recovering))) == "silent"
    # two sequences hold two sources at most, also where the phase before had more; in one order they hold one
    length = {"train/sequence_length": [64.0] * (STEPS // 2) + [512.0] * (STEPS // 2)}
    shared = {"train/effective_sources": [2.98] * (STEPS // 2) + [2.0] * (STEPS // 2)}
    mixture = {"event": "mixture_changed", "step": STEPS // 2, "mixture": {"chats": 0.3, "docs": 0.3, "news": 0.4}}
    assert verdict(judge(tmp_path, "unshuffled-data", **run(metrics=length | shared, events=[mixture]))) == "silent"
    assert verdict(judge(tmp_path, "unshuffled-data", **run(metrics=shared, events=[mixture]))) == "unsure"
    one = {"train/effective_sources": [2.98] * (STEPS // 2) + [1.0] * (STEPS // 2)}
    assert verdict(judge(tmp_path, "unshuffled-data", **run(metrics=length | one, events=[mixture]))) == "unsure"


def test_an_order_that_changes_late_is_told_from_one_that_never_was_mixed(tmp_path: Path) -> None:
    half = STEPS // 2
    count = {"train/effective_sources": [2.98] * half + [1.2] * half}
    shifted = falling(noise=0.01) - np.repeat([0.0, 0.5], half)
    found = judge(tmp_path, "order-changed", **run(metrics=count | {"train/loss": shifted}))
    assert verdict(found) == "named" and isinstance(found, Finding) and found.steps == (half + 1, STEPS)
    assert verdict(judge(tmp_path, "unshuffled-data", **run(metrics=count | {"train/loss": shifted}))) == "silent"
    assert verdict(judge(tmp_path, "order-changed", **run(metrics={"train/effective_sources": [1.1] * STEPS}))) == "silent"
    # the same counts where the ledger has a change of the mixture
    change = {"event": "mixture_changed", "step": half, "mixture": {"chats": 0.95, "docs": 0.05}}
    assert verdict(judge(tmp_path, "order-changed", **run(metrics=count | {"train/loss": shifted}, events=[change]))) == "silent"


def test_rows_that_repeat_within_a_pass_are_copies(tmp_path: Path) -> None:
    repeated = {"train/repeated_rows": [0.0] * 50 + [0.2] * (STEPS - 50)}
    found = judge(tmp_path, "duplicated-data", **run(metrics=repeated, overrides=["corpus.dedup.exact=false", "corpus.dedup.minhash=null"]))
    assert verdict(found) == "named" and isinstance(found, Finding) and found.exact
    assert [str(change.key) for change in found.changes] == ["corpus.dedup.exact", "corpus.dedup.minhash"]
    # a second pass over a source repeats its rows; a loader that begins anew at a resume is another cause
    assert verdict(judge(tmp_path, "duplicated-data", **run(metrics=repeated, documents=manifest(tokens=50_000)))) == "silent"
    late = {"train/repeated_rows": [0.0] * 100 + [1.0] * 100}
    assert verdict(judge(tmp_path, "duplicated-data", **run(metrics=late, events=[{"event": "resume", "step": 100}]))) == "silent"
    assert verdict(judge(tmp_path, "duplicated-data", **run(metrics={"train/repeated_rows": [0.0] * STEPS}))) == "silent"


def test_rows_that_several_ranks_read_are_told_from_copies(tmp_path: Path) -> None:
    """Copies in half of the steps, as in later passes over a small source, are no rows that ranks share."""
    compared = range(20, STEPS + 1, 20)
    shared = {"train/repeated_rows": [0.0] * STEPS, "train/shared_rows": dict.fromkeys(compared, 0.5)}
    assert verdict(judge(tmp_path, "rows-repeated-across-ranks", **run(metrics=shared))) == "named"
    assert verdict(judge(tmp_path, "duplicated-data", **run(metrics=shared))) == "silent"
    copies = {
        "train/repeated_rows": {step: 0.5 * (step in compared or step % 3 == 0) for step in range(1, STEPS + 1)},
        "train/shared_rows": dict.fromkeys(compared, 0.0),
    }
    assert verdict(judge(tmp_path, "rows-repeated-across-ranks", **run(metrics=copies))) == "silent"
    assert verdict(judge(tmp_path, "duplicated-data", **run(metrics=copies))) == "named"


@pytest.mark.parametrize(("share", "expected"), [(0.0, "silent"), (0.01, "silent"), (0.05, "named"), (0.9, "named")])
def test_held_out_text_that_was_found_in_training_text_is_a_leak(share: float, expected: str, tmp_path: Path) -> None:
    report = {"shards/report.json": {"held_out_found": share, "sources": {"docs": share, "news": 0.0}}}
    found = judge(tmp_path, "validation-leak", **run(documents=report, overrides=["corpus.decontaminate=null"]))
    assert verdict(found) == expected
    if isinstance(found, Finding):
        assert found.exact and found.where.endswith("docs") and found.changes[0].key == "corpus.decontaminate"


def test_without_the_search_a_low_validation_is_not_sure(tmp_path: Path) -> None:
    own = sources({name: np.full(STEPS, 4.2) for name in SOURCES})
    assert verdict(judge(tmp_path, "validation-leak", **run(metrics=own))) == "unsure"
    assert verdict(judge(tmp_path, "validation-leak", **run(metrics=sources({name: np.full(STEPS, 3.5) for name in SOURCES})))) == "silent"
    assert verdict(judge(tmp_path, "validation-leak", **run())) == "not judged"


def test_a_gap_from_the_beginning_is_a_note(tmp_path: Path) -> None:
    own = {name: np.full(STEPS, 3.5) for name in SOURCES}
    assert verdict(judge(tmp_path, "validation-gap", **run(metrics=sources(own)))) == "silent"
    assert verdict(judge(tmp_path, "validation-gap", **run(metrics=sources(own | {"docs": np.full(STEPS, 2.5)})))) == "note"
    many = run(metrics=sources(own | {"docs": np.full(STEPS, 2.5)}), documents=manifest(tokens=20_000))
    assert verdict(judge(tmp_path, "validation-gap", **many)) == "silent"  # overfitting has that name


def test_the_entropy_of_single_tokens_is_the_floor_of_text_without_order(tmp_path: Path) -> None:
    floor = {"shards/report.json": {"unigram_nats": dict.fromkeys(SOURCES, 5.0)}}
    stuck = {"train/loss": 5.05 + 1.2 * np.exp(-np.arange(STEPS) / 4)}
    assert verdict(judge(tmp_path, "wrong-tokenizer", **run(metrics=stuck, documents=floor))) == "named"
    assert verdict(judge(tmp_path, "wrong-tokenizer", **run(documents=floor))) == "silent"
    assert verdict(judge(tmp_path, "wrong-tokenizer", **run(metrics=stuck))) == "not judged"
    few = stuck | {"train/tokens": [16.0 * (step + 1) for step in range(STEPS)]}  # tiny steps: too few tokens for more than frequencies
    assert verdict(judge(tmp_path, "wrong-tokenizer", **run(metrics=few, documents=floor))) == "not judged"
    # a rate that is too low has not come so far, and still falls; a rate that is too high makes large updates
    slow = {"train/loss": np.linspace(6.2, 5.2, STEPS)}
    assert verdict(judge(tmp_path, "wrong-tokenizer", **run(metrics=slow, documents=floor))) == "silent"
    large = stuck | {"optim/update_ratio": [0.05] * STEPS}
    assert verdict(judge(tmp_path, "wrong-tokenizer", **run(metrics=large, documents=floor))) == "silent"


def test_token_files_of_another_tokenizer_are_known_by_its_hash(tmp_path: Path) -> None:
    files = manifest() | {"tokenizer/tokenizer.json": {"model": {}}}
    files["shards/manifest.json"]["tokenizer_sha256"] = "0" * 64
    found = judge(tmp_path, "wrong-tokenizer", **run(documents=files))
    assert verdict(found) == "named" and isinstance(found, Finding) and found.exact


@pytest.mark.parametrize(("valid", "expected"), [(1024.0, "silent"), (900.0, "silent"), (690.0, "named")])
def test_padding_of_more_than_a_quarter_is_waste(valid: float, expected: str, tmp_path: Path) -> None:
    given = run(metrics={"train/valid_tokens": [valid] * STEPS}, overrides=["shards.packing=best_fit"])
    found = judge(tmp_path, "wasted-tokens", **given)
    assert verdict(found) == expected
    if isinstance(found, Finding):
        assert found.changes[0].key == "shards.packing"


def test_overfitting_is_validation_that_rises_while_the_loss_falls(tmp_path: Path) -> None:
    up = {domain: np.concatenate([np.linspace(5, 4, 4), np.linspace(4, 4.6, 6)]) for domain in SOURCES.values()}
    again = manifest(tokens=20_000)
    found = judge(tmp_path, "overfitting", **run(validation=up, documents=again))
    assert verdict(found) == "named" and isinstance(found, Finding) and found.steps == (80, STEPS)
    staircase = {"train/loss": falling() - np.repeat([0.0, 0.4, 0.8, 1.1], STEPS // 4)}
    assert verdict(judge(tmp_path, "overfitting", **run(metrics=staircase, documents=again))) == "silent"
    for tokens, expected in ((60_000, "named"), (80_000, "silent")):  # a third of 204,800 tokens: 1.1 and 0.9 passes
        assert verdict(judge(tmp_path, "overfitting", **run(validation=up, documents=manifest(tokens=tokens)))) == expected
    # both rise: it diverges. Both end a little above the lowest: noise.
    diverging = {"train/loss": np.concatenate([falling(count=80), np.linspace(3.6, 5, STEPS - 80)])}
    assert verdict(judge(tmp_path, "overfitting", **run(validation=up, metrics=diverging))) == "silent"
    noisy = {domain: [*np.linspace(5, 4, 7), 3.98, 4.01, 4.02] for domain in SOURCES.values()}
    assert verdict(judge(tmp_path, "overfitting", **run(validation=noisy))) == "silent"


def test_a_domain_that_stalls_while_others_improve_is_named(tmp_path: Path) -> None:
    rising = {"code": np.concatenate([np.linspace(5, 3.8, 5), np.linspace(3.85, 4.2, 5)])}
    found = judge(tmp_path, "stalled-domain", **run(validation=rising))
    assert verdict(found) == "named" and isinstance(found, Finding) and found.where == "domain code"
    assert verdict(judge(tmp_path, "stalled-domain", **run())) == "silent"
    flat = {"code": np.concatenate([np.linspace(5, 3.8, 5), np.linspace(3.8, 3.79, 5)])}
    assert verdict(judge(tmp_path, "stalled-domain", **run(validation=flat))) == "silent"
    everywhere = dict.fromkeys(SOURCES.values(), rising["code"])
    assert verdict(judge(tmp_path, "stalled-domain", **run(validation=everywhere))) == "silent"  # overfitting
    late = {"event": "mixture_changed", "step": 100, "mixture": {"chats": 0.9, "docs": 0.1}}
    assert verdict(judge(tmp_path, "stalled-domain", **run(validation=rising, events=[late]))) == "not judged"


def test_lines_of_every_tenth_step_lead_to_the_same_names(tmp_path: Path) -> None:
    few = [*range(10, 10 * STEPS + 1, 10)]
    given = run({"chats": 0.5, "news": 0.5}, {"code": np.linspace(5.0, 4.9, 10)})
    metrics = {
        name: {10 * step: value for step, value in values.items()} if isinstance(values, dict) else values
        for name, values in given["metrics"].items()
    }
    assert verdict(judge(tmp_path, "missing-domain", **given | {"metrics": metrics, "steps": few})) == "named"
    assert verdict(judge(tmp_path, "missing-domain", **run(metrics={"validation/code/loss": at_validations([5.0, math.nan, 4.0])}))) in (
        "silent",
        "not judged",
    )
