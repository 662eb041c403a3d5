"""What a plan says of learning rates and weight decays that the laws behind them do not carry."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from command import Lmworks

from lmworks.plan.plan import make_plan
from lmworks.recipe import scaling_laws
from lmworks.recipe.load import load_cluster, load_recipe, shipped

FORGETS, UNLIKE = "forgets what was learned", "is that of the Step Law"


def said(name: str, overrides: Sequence[str] = ()) -> list[str]:
    recipe = load_recipe(name, overrides).recipe
    found = make_plan(recipe, "", load_cluster("2-cores").model_copy(update={"memory_gib": 1e9})).warnings()
    return [one for one in found if FORGETS in one or UNLIKE in one]


# Parameters, tokens, tokens per step, peak rate and weight decay as published: arXiv:2307.09288, 2501.00656, 2005.14165, 2412.19437 and
# 2508.06471.
PUBLISHED = {
    "Llama 2 7B": (6.7e9, 2e12, 4e6, 3e-4, 0.1),
    "Llama 2 70B": (69e9, 2e12, 4e6, 1.5e-4, 0.1),
    "OLMo 2 7B": (7.3e9, 3.9e12, 4.2e6, 3e-4, 0.1),
    "OLMo 2 13B": (13.7e9, 5e12, 8.4e6, 9e-4, 0.1),
    "GPT-3": (175e9, 300e9, 3.2e6, 0.6e-4, 0.1),
    "DeepSeek-V3": (671e9, 14.8e12, 62.9e6, 2.2e-4, 0.1),
    "GLM-4.5": (355e9, 23e12, 64e6, 2.5e-4, 0.1),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_within_what_is_not_warned_of(name: str) -> None:
    parameters, tokens, batch, rate, decay = PUBLISHED[name]
    times = rate * decay * tokens / batch * scaling_laws.optimal_timescale(tokens / parameters)
    assert 0.4 < times < 2.6 < scaling_laws.STRONG_DECAY


@pytest.mark.parametrize("parameters", [10**8, 10**9, 10**10, 10**11])
def test_the_default_decay_is_that_of_the_law_at_the_rate_and_batch_of_the_other(parameters: int) -> None:
    for per_parameter, low, high in ((20, 0.085, 0.11), (2000, 0.03, 0.045)):
        tokens = per_parameter * parameters
        steps = tokens / (0.58 * tokens**0.571)
        rate = 1.79 * parameters**-0.713 * tokens**0.307
        assert low < 1 / (rate * steps * scaling_laws.optimal_timescale(per_parameter)) < high


@pytest.mark.parametrize("name", [name for name in shipped() if name != "assistant"])  # which pretrains nothing
def test_no_recipe_that_is_shipped_forgets_too_soon(name: str) -> None:
    assert not [one for one in said(name) if FORGETS in one]


def test_the_decay_of_a_speedrun_in_a_run_of_months_is_said_by_the_plan(lmworks: Lmworks) -> None:
    """Muon's spectral rate with a decay of 0.1, as the recipe had it: forgotten after 500 of 5.7 million steps."""
    as_it_was = ["optimizer.update_scale=spectral", "optimizer.learning_rate=0.02", "optimizer.weight_decay=0.1"]
    words = [word for one in as_it_was for word in ("--set", one)]
    plan = json.loads(lmworks("plan", "glm46-355b-a32b", "--cluster", "8192xh800", "--json", *words).out)
    (warning,) = (one for one in plan["warnings"] if FORGETS in one)
    assert warning == (
        "optimizer.weight_decay 0.1 at a learning rate of 0.02 forgets what was learned after 1 / (rate x decay) = 500 of 5,679,899 steps, "
        "and 679,636 are best at 65.5 tokens per parameter (arXiv:2505.13738); set it to 7e-05"
    )
    advised = re.findall(r"set it to (\S+)$", warning)[0]
    assert not [one for one in said("glm46-355b-a32b", [*as_it_was[:2], f"optimizer.weight_decay={advised}"]) if FORGETS in one]


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        ([], False),
        (["size=1.5M"], False),  # the rate is the limit of what is derived, 0.01
        (["size=60M"], True),
        (["size=20B"], True),
        (["size=20B", "optimizer.learning_rate=2e-4"], False),
        (["model.num_hidden_layers=80", "train.phases.0.tokens=60B"], False),
        (["model.num_hidden_layers=80", "train.phases.0.tokens=400B", "optimizer.kind=adamw"], True),
        (["optimizer.update_scale=spectral", "size=20B", "optimizer.weight_decay=0"], False),
    ],
)
def test_a_rate_outside_of_its_law_is_said(overrides: list[str], warned: bool) -> None:
    found = [one for one in said("dense-125m", overrides) if UNLIKE in one]
    assert len(found) == warned
    assert all("60M to 1B parameters outside the embeddings and 2B to 100B tokens" in one for one in found)
