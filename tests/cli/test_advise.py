"""`lmworks advise`: the way that is advised, by need, data and means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from command import Lmworks


def ways(lmworks: Lmworks, *words: str) -> dict[str, dict[str, Any]]:
    done = lmworks("advise", "--cluster", "8xh100", *words, "--json")
    assert done.code == 0, done.err
    options = json.loads(done.out)["options"]
    assert [one["route"] for one in options] == ["prompt", "tune", "continue", "train"]
    assert [one["verdict"] for one in options].count("advised") == 1
    return {one["route"]: one for one in options}


@pytest.mark.parametrize(
    ("words", "advised"),
    [
        (("--need", "facts", "--tokens", "10B"), "prompt"),
        (("--need", "form", "--examples", "200"), "prompt"),
        (("--need", "form", "--examples", "5000"), "tune"),
        (("--need", "skill", "--examples", "50000"), "tune"),
        (("--need", "knowledge", "--tokens", "5M"), "prompt"),
        (("--need", "knowledge", "--tokens", "300M"), "continue"),
        (("--need", "language", "--tokens", "50B", "--time", "2d"), "continue"),
        (("--need", "language", "--tokens", "50B", "--time", "10min"), "prompt"),
        (("--need", "own", "--tokens", "100B"), "train"),
    ],
)
def test_the_first_way_that_meets_the_need_is_advised(lmworks: Lmworks, words: tuple[str, ...], advised: str) -> None:
    assert ways(lmworks, *words)[advised]["verdict"] == "advised"


def test_costs_are_those_of_the_operations(lmworks: Lmworks) -> None:
    """Tuning 8B on 10,000 examples of 600 tokens, three times: 6 N D over 8 x 989 TFLOPS at 40%."""
    found = ways(lmworks, "--need", "skill", "--examples", "10000")["tune"]
    assert found["seconds"] == pytest.approx(6 * 8e9 * 18e6 / (8 * 989e12 * 0.4), rel=1e-3)
    assert found["dollars"] == pytest.approx(8 * found["seconds"] / 3600 * 2.5, rel=1e-3)
    train = ways(lmworks, "--need", "own", "--time", "7d")["train"]
    assert train["seconds"] == pytest.approx(7 * 86_400, rel=0.01), "the time is used"
    assert "distinct tokens are needed" in train["reason"]


def test_what_the_time_does_not_pay_for_is_cut_or_refused(lmworks: Lmworks) -> None:
    short = ways(lmworks, "--need", "knowledge", "--tokens", "50B", "--time", "2d")["continue"]
    assert short["seconds"] == pytest.approx(2 * 86_400, rel=0.01) and short["verdict"] == "advised"
    assert ways(lmworks, "--need", "knowledge", "--tokens", "50B", "--time", "1min")["continue"]["verdict"] == "not affordable"


def test_it_prints_the_ways_and_the_next_step(lmworks: Lmworks) -> None:
    done = lmworks("advise", "--need", "own", "--tokens", "3B", "--cluster", "8xh100")
    assert done.code == 0 and "next: lmworks plan --time" in done.out and "not enough" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--need", "magic"), "is not known; it is one of: form"),
        (("--need", "form", "--base", "big"), "is not a number of parameters"),
        (("--need", "form", "--tokens", "many"), "many"),
        (("--need", "form", "--cluster", "nowhere"), "there is no cluster"),
    ],
)
def test_bad_input_is_one_line(lmworks: Lmworks, words: tuple[str, ...], message: str) -> None:
    assert message in lmworks("advise", *words).error
