"""Which way to a model: prompt an existing one, tune it, continue its pretraining, or train from nothing.

The ways are considered in the order of their cost, and the first that meets the need is advised. Each has its cost for the given base model
and cluster, what it needs of data, and the reason for its verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lmworks.plan.amounts import amount, size
from lmworks.plan.costs import device_hours, seconds
from lmworks.plan.flops import training_flops
from lmworks.plan.layout import MARGIN, devices
from lmworks.plan.memory import GIB, state_bytes
from lmworks.recipe.derivation.scaling_laws import TOKENS_PER_PARAMETER
from lmworks.recipe.schema.cluster import Cluster

Need = Literal["form", "facts", "knowledge", "skill", "language", "own"]
NEEDS: dict[Need, str] = {
    "form": "a style, a format or a role",
    "facts": "facts that change, or that must be quoted exactly",
    "knowledge": "a field that public models know little of",
    "skill": "a task whose answers can be checked or shown by examples",
    "language": "a language or a notation that public models read poorly",
    "own": "weights of known origin: license, privacy of the training data, an architecture or a size that does not exist",
}
assert set(NEEDS) == set(get_args(Need))
Route = Literal["prompt", "tune", "continue", "train"]
Verdict = Literal["advised", "possible", "not enough", "does not fit", "not affordable", "more than needed"]

_EXAMPLE_TOKENS = 600  # of a conversation
_TUNE_EPOCHS = 3
_FEW_EXAMPLES = 1_000  # good examples that suffice for form (LIMA, arXiv:2305.11206)
_SKILL_EXAMPLES = 10_000
_CONTINUE_TOKENS = 100_000_000  # distinct tokens of the field below which tuning and retrieval do as well
_REPEATS = 4  # epochs that are nearly as good as new text (arXiv:2305.16264)
_REPLAY: dict[str, float] = {"knowledge": 0.05, "language": 0.25}  # of general text, for a weak and a strong shift (arXiv:2403.08763)
_BASE_TOKENS = 10e12  # of an open base model; published ones have seen 2T to 36T
_ADAPTERS = 0.01  # of the parameters of the base model, which low-rank adapters train
_WEIGHT_BYTES = 2  # of a weight, and of a gradient, in bf16


@dataclass(frozen=True)
class Situation:
    """What there is: the need, labeled examples, distinct tokens of own text, the base model in question (active parameters), the seconds
    that the cluster may be used, and the cluster at `mfu`."""

    need: Need
    examples: int
    tokens: int
    base: int
    seconds: float
    cluster: Cluster

    @property
    def flops(self) -> float:
        """Useful operations that the time pays for."""
        return self.seconds * devices(self.cluster) * self.cluster.tflops * 1e12 * self.cluster.mfu

    @property
    def memory(self) -> float:
        """Bytes of all devices, without the margin that a plan leaves free."""
        return devices(self.cluster) * self.cluster.memory_gib * GIB * (1 - MARGIN)


@dataclass(frozen=True)
class Option:
    """One way, with its training cost on the cluster."""

    route: Route
    verdict: Verdict
    reason: str
    tokens: float
    seconds: float
    device_hours: float
    dollars: float


def advise(situation: Situation) -> list[Option]:
    """The four ways in the order of their cost; exactly one is advised."""
    judged = [_prompt(situation), _tune(situation), _continue(situation), _train(situation)]
    advised = next((one for one in judged if one.enough and one.fits and _affordable(situation, one)), judged[0])
    return [_option(situation, one, _verdict(situation, one, advised)) for one in judged]


@dataclass(frozen=True)
class _Judged:
    """A way, whether it meets the need, its tokens of training, the reason, and whether the memory of the cluster holds it."""

    route: Route
    enough: bool
    tokens: float
    reason: str
    fits: bool = True


def _verdict(situation: Situation, one: _Judged, advised: _Judged) -> Verdict:
    if one is advised:
        return "advised"
    if not one.enough:
        return "possible" if one.route == "prompt" else "not enough"
    if not one.fits:
        return "does not fit"
    return "more than needed" if _affordable(situation, one) else "not affordable"


def _affordable(situation: Situation, one: _Judged) -> bool:
    return training_flops(_size(situation, one.route), one.tokens) <= 1.01 * situation.flops


def _prompt(situation: Situation) -> _Judged:
    if situation.need == "facts":
        return _Judged("prompt", True, 0, "facts belong into the prompt (retrieval): weights cannot be corrected one by one")
    if situation.need == "form" and situation.examples < _FEW_EXAMPLES:
        return _Judged("prompt", True, 0, f"fewer than {_FEW_EXAMPLES:,} examples are better shown in the prompt than trained on")
    return _Judged("prompt", False, 0, "try it first, with an evaluation of your own: it sets the score that every other way has to beat")


def _tune(situation: Situation) -> _Judged:
    tokens = float(situation.examples * _EXAMPLE_TOKENS * _TUNE_EPOCHS)
    if situation.need in ("form", "skill"):
        least = _FEW_EXAMPLES if situation.need == "form" else _SKILL_EXAMPLES
        enough = situation.examples >= least
        more = "" if enough else "; collect or generate more, or reward answers that can be checked"
        known = f"{situation.examples:,} examples, about {least:,} are needed for {NEEDS[situation.need]}"
        return _Judged("tune", enough, tokens, known + more + _shortage(situation, adapters=True), _fits(situation, adapters=True))
    return _Judged("tune", False, tokens, "tuning teaches form and use of what the base model knows, and little that is new")


def _continue(situation: Situation) -> _Judged:
    if situation.need not in _REPLAY:
        return _Judged("continue", False, 0, "more text of a field changes what a model knows, which is not what is missing here")
    replay = _REPLAY[situation.need]
    wanted, paid = _REPEATS * situation.tokens / (1 - replay), situation.flops / (6 * situation.base)
    epochs = min(_REPEATS, paid * (1 - replay) / max(1, situation.tokens))
    text = f"{amount(situation.tokens)} distinct tokens for {epochs:.2g} epochs, with {replay:.0%} of general text against forgetting"
    if situation.tokens < _CONTINUE_TOKENS:
        return _Judged("continue", False, min(wanted, paid), f"{text}; below {amount(_CONTINUE_TOKENS)} retrieval and tuning do as well")
    if paid < _CONTINUE_TOKENS:
        limit = f"the time pays for {amount(paid)} tokens of a model of {amount(situation.base)}; take a smaller base"
        return _Judged("continue", True, wanted, limit)
    return _Judged("continue", True, min(wanted, paid), text + _shortage(situation), _fits(situation))


def _train(situation: Situation) -> _Judged:
    parameters = _size(situation, "train")
    tokens = situation.flops / (6 * parameters)
    known = f"the time trains {amount(parameters)} parameters on {amount(tokens)} tokens"
    against = f"; open models of {amount(situation.base)} parameters have seen about {amount(_BASE_TOKENS)}"
    if situation.need != "own":
        return _Judged("train", False, tokens, known + against)
    if not situation.tokens:
        return _Judged("train", False, tokens, f"{known}, and there is no text; give your distinct tokens with --tokens")
    enough = _REPEATS * situation.tokens >= tokens
    short = "" if enough else f"; {amount(tokens / _REPEATS)} distinct tokens are needed for that, add public text"
    return _Judged("train", True, tokens, known + short)


def _bytes(situation: Situation, adapters: bool = False) -> float:
    """Of weights, gradients and optimizer state of the base model, split over all devices; activations, and experts that a token does not
    use, are not counted."""
    if adapters:
        return situation.base * _WEIGHT_BYTES + _trained_bytes(_ADAPTERS * situation.base)
    return _trained_bytes(situation.base)


def _trained_bytes(parameters: float) -> float:
    return parameters * 2 * _WEIGHT_BYTES + state_bytes(parameters)


def _fits(situation: Situation, adapters: bool = False) -> bool:
    return _bytes(situation, adapters) <= situation.memory


def _shortage(situation: Situation, adapters: bool = False) -> str:
    """What to add to a reason about the memory: how to do with less of it, or that there is too little."""
    held = f"{situation.cluster.name} has {size(situation.memory)}"
    if not _fits(situation, adapters):
        least = size(_bytes(situation, adapters))
        how = "even with adapters (lora)" if adapters else "with its optimizer state"
        return f"; a model of {amount(situation.base)} takes at least {least} {how}, and {held}: take a smaller --base or a larger cluster"
    if adapters and not _fits(situation):
        return f"; it fits only with adapters (lora), since all weights take at least {size(_bytes(situation))} and {held}"
    return ""


def _size(situation: Situation, route: Route) -> int:
    """Parameters that are trained: the base model's, or from nothing those for which the time is optimal, as far as memory holds them."""
    if route != "train":
        return situation.base
    return max(1, int(min((situation.flops / (6 * TOKENS_PER_PARAMETER)) ** 0.5, situation.memory / _trained_bytes(1))))


def _option(situation: Situation, one: _Judged, verdict: Verdict) -> Option:
    count, cluster = devices(situation.cluster), situation.cluster
    time = seconds(training_flops(_size(situation, one.route), one.tokens), count, cluster, cluster.mfu)
    hours = device_hours(count, time)
    return Option(one.route, verdict, one.reason, one.tokens, time, hours, hours * cluster.dollars_per_hour)
