"""The llama3 scaling behind the divisors of frequencies that a GGUF file stores."""

from __future__ import annotations

import random

from lmworks.model.rope import frequencies
from lmworks.recipe.gguf_model import _llama3
from lmworks.recipe.schema.model import Rope


def test_the_scaling_is_that_of_the_factors_at_every_frequency() -> None:
    """With few rotated dimensions, or a large theta, no frequency or one alone lies between those that are kept and divided: a limit that
    is rounded onto a neighbour turns it by 0.1 radians at position 100,000."""
    draw = random.Random(1)
    worst = 0.0
    for _ in range(2000):
        low = draw.choice([0.5, 1.0, 2.0])
        rope = Rope.model_validate({
            "scaling": "llama3", "theta": float(f"{10 ** draw.uniform(3.5, 6.5):.3g}"), "factor": draw.choice([2.0, 4.0, 8.0, 32.0]),
            "original_max_position_embeddings": f"{draw.choice([16, 64, 1024, 8192])} tokens",
            "low_freq_factor": low, "high_freq_factor": low * draw.choice([1.01, 2.0, 4.0]),
        })  # fmt: skip
        rotated = draw.choice([8, 16, 32, 64, 128])
        plain, scaled = (frequencies(one, rotated)[0] for one in (rope.model_copy(update={"scaling": "none", "factor": 1.0}), rope))
        found = Rope.model_validate({"theta": rope.theta} | _llama3((plain / scaled).tolist(), rope.theta, rotated))
        worst = max(worst, float((frequencies(found, rotated)[0] / scaled - 1).abs().max()))
    assert worst < 2e-6  # of fp32


def test_published_limits_are_found_as_they_are_written() -> None:
    rope = Rope.model_validate({
        "scaling": "llama3", "theta": 5e5, "factor": 8.0, "original_max_position_embeddings": "8192 tokens",
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    })  # fmt: skip
    plain, scaled = (frequencies(one, 128)[0] for one in (rope.model_copy(update={"scaling": "none", "factor": 1.0}), rope))
    found = _llama3((plain / scaled).tolist(), 5e5, 128)
    assert (found["factor"], found["low_freq_factor"], found["high_freq_factor"]) == (8.0, 1.0, 4.0)
