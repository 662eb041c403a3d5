"""Rules of tuning, preferences and reinforcement learning: each signature is named, and what looks like it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rule_verdicts import at_validations, falling, judge, verdict

from lmworks.watch.rule import Finding

COUNT = 80
TUNE = 'tune={"data": [{"name": "chats", "kind": "files", "path": "chats.jsonl"}], "learning_rate": 0.001, "epochs": 2}'
DPO = 'dpo={"data": [{"name": "pairs", "kind": "files", "path": "pairs.jsonl"}], "learning_rate": 0.001, "beta": 0.1}'
GRPO = 'grpo={"data": [{"name": "sums", "kind": "files", "path": "sums.jsonl", "reward": "exact"}], "learning_rate": 0.001}'


def manifest(forms: dict[str, int] | None = None, left_out: dict[str, int] | None = None, **counts: int) -> dict[str, Any]:
    train = {"conversations": 400, "tokens": 40_000, "learned_tokens": 18_000, "ended": 400, "whole": 0} | counts
    body = {"train": train, "left_out": left_out or {}, "forms": forms or {"messages": 400}, "weight": 1.0}
    return {"tune/data/manifest.json": {"sequence_length": 64, "data": {"chats": body}}}


def tune(folder: Path, code: str, documents: dict[str, Any], metrics: Mapping[str, Any] = {}, *overrides: str) -> Finding | str | None:
    columns: dict[str, Any] = {
        "train/loss": falling(2.5, 1.2, COUNT), "train/valid_tokens": [450.0] * COUNT, "train/batch_tokens": [1024.0] * COUNT,
        "train/sequence_length": [64.0] * COUNT, "train/tokens": [1024.0 * (step + 1) for step in range(COUNT)],
    }  # fmt: skip
    own = [TUNE, "tune.sequence_length=64 tokens", *overrides]
    return judge(folder, code, "tune", metrics={**columns, **metrics}, documents=documents, overrides=own)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [({}, "silent"), ({"ended": 0}, "named"), ({"ended": 150}, "named"), ({"ended": 340}, "silent")],  # some answers are cut
)
def test_an_end_token_that_is_no_label_is_named(counts: dict[str, int], expected: str, tmp_path: Path) -> None:
    assert verdict(tune(tmp_path, "end-token-not-trained", manifest(**counts))) == expected


def test_segments_without_an_end_need_another_form_and_old_manifests_are_not_judged(tmp_path: Path) -> None:
    found = tune(tmp_path, "end-token-not-trained", manifest({"segments": 400}, ended=0))
    assert isinstance(found, Finding) and found.changes[0].key == "tune.data.0.format"
    old = manifest()
    del old["tune/data/manifest.json"]["data"]["chats"]["train"]["ended"]
    assert verdict(tune(tmp_path, "end-token-not-trained", old)) == "not judged"
    assert verdict(tune(tmp_path, "end-token-not-trained", {})) == "not judged"


def sets(**bodies: dict[str, Any]) -> dict[str, Any]:
    """The manifest of several sets, from those of one each."""
    (path, first), *_ = next(iter(bodies.values())).items()
    return {path: first | {"data": {name: body[path]["data"]["chats"] for name, body in bodies.items()}}}


def test_documents_have_no_answers_that_could_end(tmp_path: Path) -> None:
    """A document is cut into pieces, of which only the last one ends: 295 of 672 in a real set."""
    documents = manifest({"text": 685}, conversations=672, ended=295, tokens=34_517, learned_tokens=33_845, whole=672)
    full = {"train/valid_tokens": [950.0] * COUNT}
    for code in ("end-token-not-trained", "prompt-not-masked"):
        assert tune(tmp_path, code, documents, full) == "all sets of tune.data are documents, which have no answers"
        assert verdict(tune(tmp_path, code, sets(chats=manifest(), books=documents), full)) == "silent"
    assert verdict(tune(tmp_path, "end-token-not-trained", sets(chats=manifest(ended=0), books=documents))) == "named"
    bad = manifest({"segments": 400}, learned_tokens=39_600, whole=400)
    assert verdict(tune(tmp_path, "prompt-not-masked", sets(chats=bad, books=documents), full)) == "named"


def test_answers_that_are_cut_need_the_length_that_their_data_says(tmp_path: Path) -> None:
    cut = manifest(ended=0)
    body = cut["tune/data/manifest.json"]["data"]["chats"]
    body |= {"noted": {"with an answer that is cut at sequence_length": 400}, "sequence_length_for_all": 535}
    found = tune(tmp_path, "end-token-not-trained", cut)
    assert isinstance(found, Finding) and [(one.key, one.value) for one in found.changes if one.key] == [
        ("tune.sequence_length", "576 tokens")
    ], "the template is brief already"
    short = tune(tmp_path, "end-token-not-trained", cut, {}, "tune.global_batch_tokens=512 tokens")
    assert isinstance(short, Finding) and short.changes[0].value == "512 tokens", "no more than a step"
    body["noted"] = {"with an answer that is cut at sequence_length": 40}
    few = tune(tmp_path, "end-token-not-trained", cut, {}, "tokenizer.chat_template=glm-4.6")
    assert isinstance(few, Finding) and [one.key for one in few.changes] == ["tokenizer.chat_template", ""]


def test_questions_that_are_trained_are_named_and_documents_are_not(tmp_path: Path) -> None:
    whole = {"learned_tokens": 39_600, "whole": 400}
    full = {"train/valid_tokens": [950.0] * COUNT}
    assert verdict(tune(tmp_path, "prompt-not-masked", manifest({"segments": 400}, **whole), full)) == "named"
    assert verdict(tune(tmp_path, "prompt-not-masked", manifest({"text": 400}, **whole), full)) != "named"
    assert verdict(tune(tmp_path, "prompt-not-masked", manifest(learned_tokens=34_000))) == "silent"  # long answers to short questions
    assert verdict(tune(tmp_path, "prompt-not-masked", manifest())) == "silent"


def test_rows_without_a_label_are_named(tmp_path: Path) -> None:
    lost = {"wrong mask": 900, "repeated": 20}
    found = tune(tmp_path, "labels-all-masked", manifest(left_out=lost))
    assert verdict(found) == "named" and isinstance(found, Finding) and str(found.changes[0].key) == "tune.sequence_length"
    assert verdict(tune(tmp_path, "labels-all-masked", manifest(), {"train/valid_tokens": [3.0] * COUNT})) == "named"
    assert verdict(tune(tmp_path, "labels-all-masked", manifest(left_out={"repeated": 5000, "malformed": 900}))) == "silent"
    assert verdict(tune(tmp_path, "labels-all-masked", manifest(left_out={"wrong mask": 40}))) == "silent"


def test_padding_of_conversations_is_told_from_questions_without_loss(tmp_path: Path) -> None:
    assert verdict(tune(tmp_path, "wasted-tokens", manifest())) == "silent"  # 44% are valid, and 45% of the text is trained
    assert verdict(tune(tmp_path, "wasted-tokens", manifest(), {"train/valid_tokens": [200.0] * COUNT})) == "named"
    replay = 'tune.replay={"fraction": 0.1}'
    assert verdict(tune(tmp_path, "wasted-tokens", manifest(), {"train/valid_tokens": [200.0] * COUNT}, replay)) == "not judged"


def forgotten(rise: list[float], before: float = 2.9) -> dict[str, Any]:
    return {
        "validation/forgetting": at_validations(rise, COUNT),
        "validation/general_bits_per_byte": at_validations([before + one for one in rise], COUNT),
        "validation/loss": at_validations(np.linspace(2.4, 1.2, len(rise)), COUNT),
    }  # fmt: skip


def test_general_text_that_gets_worse_and_worse_is_forgetting(tmp_path: Path) -> None:
    found = tune(tmp_path, "forgetting", {}, forgotten([0.2, 0.5, 0.9, 1.2, 1.6]), "tune.learning_rate=0.02")
    assert verdict(found) == "named" and isinstance(found, Finding)
    assert [change.key for change in found.changes] == ["tune.learning_rate", "tune.replay", "tune.lora"]
    adapters = tune(tmp_path, "forgetting", {}, forgotten([0.2, 0.5, 0.9, 1.2, 1.6]), "tune.lora={rank: 8}", "tune.learning_rate=0.02")
    assert isinstance(adapters, Finding) and [one.name for one in adapters.evidence if "rate" in one.name] == [], "theirs is higher"
    # what any tuning costs; a rise that was made good again; noise
    assert verdict(tune(tmp_path, "forgetting", {}, forgotten([0.08, 0.17, 0.15, 0.1, 0.08]))) == "silent"
    assert verdict(tune(tmp_path, "forgetting", {}, forgotten([0.6, 0.9, 0.5, 0.3, 0.1]))) == "silent"
    assert verdict(tune(tmp_path, "forgetting", {}, forgotten([0.01, -0.01, 0.02, 0.0, 0.01]))) == "silent"


def test_a_tuning_set_that_is_memorized_is_overfitting_and_noise_of_eight_conversations_is_not(tmp_path: Path) -> None:
    up = {"validation/loss": at_validations([2.0, 1.5, 1.4, 1.5, 1.7, 1.9], COUNT)}
    assert verdict(tune(tmp_path, "overfitting", manifest(tokens=5000), up)) == "named"
    noise = {"validation/loss": at_validations([1.34, 0.85, 0.46, 0.207, 0.23, 0.222], COUNT)}
    assert verdict(tune(tmp_path, "overfitting", manifest(tokens=5000), noise)) == "silent"


def grpo(folder: Path, code: str, equal: float = 0.3, metrics: Mapping[str, Any] = {}, count: int = 40, overrides: Sequence[str] = (),
         **fates: float) -> Any:  # fmt: skip
    fixed = {"wrong": 0.5, "solved": 0.4, "empty": 0.0, "truncated": 0.1, "unparsed": 0.0, "failed": 0.0} | fates
    columns = {f"grpo/{name}": [value] * count for name, value in fixed.items()}
    columns |= {"grpo/equal_groups": [equal] * count, "grpo/reward": [0.4] * count, "train/sequence_length": [64.0] * count}
    columns |= {"train/loss": [0.0] * count, "grpo/mismatch_mean": [1e-5] * count, "optim/grad_norm": [0.3] * count}
    return judge(folder, code, "grpo", metrics={**columns, **metrics}, overrides=[GRPO, *overrides])


SIGNALS: dict[str, dict[str, float]] = {
    "rewards-all-wrong": {"equal": 1.0, "wrong": 0.95, "solved": 0.0, "truncated": 0.05},
    "rewards-all-right": {"equal": 0.8, "wrong": 0.0, "solved": 0.94, "truncated": 0.06},
    "answers-cut": {"equal": 1.0, "wrong": 0.0, "solved": 0.0, "truncated": 1.0},
    "reward-failing": {"equal": 1.0, "wrong": 0.0, "solved": 0.0, "failed": 0.9},
}


@pytest.mark.parametrize("case", [*SIGNALS, "healthy"])
def test_each_kind_of_missing_signal_has_its_name_and_no_other(case: str, tmp_path: Path) -> None:
    found = {code: verdict(grpo(tmp_path, code, **SIGNALS.get(case, {}))) for code in SIGNALS}
    assert found == {code: "named" if code == case else "silent" for code in SIGNALS}


def test_a_loss_of_zero_is_no_cause_and_a_set_that_was_learned_is_a_note(tmp_path: Path) -> None:
    assert all(verdict(grpo(tmp_path, code)) == "silent" for code in SIGNALS)  # the loss is 0 here
    learned = {"grpo/solved": np.minimum(1.0, np.linspace(0.1, 2.0, 40)), "grpo/equal_groups": np.linspace(0.2, 0.95, 40)}
    assert verdict(grpo(tmp_path, "rewards-all-right", metrics=learned)) == "note"
    assert verdict(grpo(tmp_path, "rewards-all-wrong", count=4, **SIGNALS["rewards-all-wrong"])) == "not judged"
    assert verdict(grpo(tmp_path, "rewards-all-right", count=8, **SIGNALS["rewards-all-right"])) == "named"
    # a stage that ended because its reward failed on every answer has a few lines
    assert verdict(grpo(tmp_path, "reward-failing", count=3, **SIGNALS["reward-failing"])) == "named"


def test_a_number_that_is_far_enough_is_not_turned_back(tmp_path: Path) -> None:
    more = ["grpo.group_size=128", "grpo.resample_rounds=5"]
    found = grpo(tmp_path, "rewards-all-wrong", **SIGNALS["rewards-all-wrong"], overrides=more)
    assert [one.key for one in found.changes] == [""]
    right = grpo(tmp_path, "rewards-all-right", **SIGNALS["rewards-all-right"], overrides=more)
    assert [one.key for one in right.changes] == [""]
    usual = grpo(tmp_path, "rewards-all-wrong", **SIGNALS["rewards-all-wrong"])
    assert [one.key for one in usual.changes] == ["", "grpo.group_size", "grpo.resample_rounds"]


def test_a_sampler_that_differs_is_named_when_the_reward_falls(tmp_path: Path) -> None:
    away = {"grpo/mismatch_mean": np.linspace(0.01, 0.2, 40)}
    fall = {"grpo/reward": np.concatenate([np.linspace(0.2, 0.6, 20), np.linspace(0.6, 0.2, 20)])}
    assert verdict(grpo(tmp_path, "sampler-mismatch", metrics=away | fall)) == "named"
    assert verdict(grpo(tmp_path, "sampler-mismatch", metrics=fall)) == "silent"
    assert verdict(grpo(tmp_path, "sampler-mismatch", metrics={"grpo/mismatch_mean": [0.02] * 40} | fall)) == "silent"


def dpo(folder: Path, chosen: float, rejected: float, metrics: Mapping[str, Any] = {}, *overrides: str) -> Any:
    part = np.linspace(0, 1, COUNT)
    columns = {"dpo/reward_chosen": chosen * part, "dpo/reward_rejected": rejected * part, "dpo/margin": (chosen - rejected) * part}
    return judge(folder, "dpo-over-optimized", "dpo", metrics={**columns, **metrics}, overrides=[DPO, *overrides])


def test_preferences_that_move_far_away_are_told_from_a_chosen_reward_that_falls(tmp_path: Path) -> None:
    worse = {"validation/reward_accuracy": at_validations([0.8, 0.85, 0.7], COUNT)}
    rises = {"validation/reward_accuracy": at_validations([0.7, 0.8, 0.85], COUNT)}
    lost = {name: values for name, values in forgotten([0.5, 2.0, 5.0]).items() if name != "validation/loss"}
    assert verdict(dpo(tmp_path, -20, -45, worse)) == "named"
    assert verdict(dpo(tmp_path, -0.3, -11.4, lost, "dpo.beta=0.01")) == "named"
    assert verdict(dpo(tmp_path, -2, -5, rises)) == "silent"  # DPO#8, trl#800
    assert verdict(dpo(tmp_path, -2, -5, worse)) == "silent"  # near the reference: noise of few pairs
    assert verdict(dpo(tmp_path, -20, -45, rises)) == "unsure"
