"""Which form suits a model, and why.

A model of little training does not use letters: it answers near chance in letter form, whatever it knows, and cloze form says more
(OLMES, arXiv:2406.08446). A model that can use them is asked with letters, since the likelihood of a text also depends on its length and
wording. A chat model is asked as a user would ask it, if its replies can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmworks.evaluate.items import Form
from lmworks.evaluate.statistics import Score
from lmworks.recipe.derivation.parameters import parameters
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe

LETTERS_FLOPS = 1e21
"""Training FLOPs below which no model has been reported to answer with letters above chance; above it, a probe decides. (OLMES finds
Pythia-6.7B, of 1.2e22, still at chance and Llama-2-7B, of 8e22, far above it.)"""
PROBE_ITEMS = 100  # over all sets
READABLE = 0.5  # share of replies that name a choice, from which free answers say something


@dataclass(frozen=True)
class Probes:
    """Measurements on a few items, made only if they decide: the score in letter form, and the share of free replies that name a choice."""

    letters: Callable[[], Score]
    readable: Callable[[], float]


@dataclass(frozen=True)
class Choice:
    """Forms to score a model in, and the reason in words."""

    forms: tuple[Form, ...]
    reason: str


def choose(chat: bool, flops: float | None, probes: Probes, paired: tuple[Form, ...] = ()) -> Choice:
    """The forms that suit a model.

    `chat`: it was tuned on conversations. `flops`: what its training took, None if that is not known. `paired`: the forms of the base
    model that it is compared with, which are always among them.
    """
    refused = ""
    if chat:
        share = probes.readable()
        measured = f"tuned on conversations, and {share:.0%} of its replies to probe items name a choice"
        free: tuple[Form, ...] = ("free",) if share >= READABLE else ()
        if paired:
            return Choice((*paired, *free), f"{', '.join(paired)} as the base model; {measured}")
        if free:
            return Choice(free, measured)
        refused = f"{measured}; "
    if flops is not None and flops < LETTERS_FLOPS:
        few = f"trained with {flops:.1e} FLOPs, and models answer with letters from about {LETTERS_FLOPS:.0e} on"
        return Choice(("cloze",), refused + few)
    found = probes.letters()
    measured = f"{found.correct} of {found.n} probe items are right in letter form, where a constant letter gets {found.baseline:.0%}"
    return Choice(("letters" if found.interval[0] > found.baseline else "cloze",), refused + measured)


def training_flops(recipe: Recipe, config: Model) -> float | None:
    """FLOPs of pretraining a model with this configuration, 6 per active parameter and token (Kaplan et al. 2020, arXiv:2001.08361); None
    for a run that began with weights of unknown training."""
    if recipe.start_from is not None:
        return None
    active = sum(one.size * one.active for one in parameters(config) if not one.mtp)
    return 6 * active * sum(int(phase.tokens) for phase in recipe.train.phases)
