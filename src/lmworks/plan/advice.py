"""Which way to a model: prompt an existing one, tune it, continue its pretraining, or train from nothing.

The ways are considered in the order of their cost, and the first that meets the need is advised. Each has its cost for the given base model
and cluster, what it needs of data, and the reason for its verdict. More data or more time never lead to a lesser way: where the time does
not pay for all examples or all text, it pays for a part, which is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lmworks.plan.costs import device_hours, seconds
from lmworks.plan.counts import FROZEN, TRAINED
from lmworks.plan.layout import MARGIN, devices
from lmworks.plan.memory import GIB, state_bytes
from lmworks.recipe.scaling_laws import EPOCHS_AS_NEW
from lmworks.recipe.schema.layout import Cluster
from lmworks.ui.amounts import amount, days, size

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
_REPLAY: dict[str, float] = {"knowledge": 0.05, "language": 0.25}  # of general text, for a weak and a strong shift (arXiv:2403.08763)
_BASE_TOKENS = 10e12  # of an open base model; published ones have seen 2T to 36T
_ADAPTERS = 0.01  # of the parameters of the base model, which low-rank adapters train
_START = 60  # seconds until the first step of a run on accelerators: processes, collectives, compilation (LOG.md), which no plan counts
_ACCURACY = 1.01  # a plan fills its time to within this
_WEIGHT_BYTES = 2  # of a weight, and of a gradient, in bf16


@dataclass(frozen=True)
class Trained:
    """What the time trains from nothing, as `lmworks plan --time` says: active parameters, tokens and seconds."""

    parameters: float
    tokens: float
    seconds: float


@dataclass(frozen=True)
class Situation:
    """What there is: the need, labeled examples, distinct tokens of own text, the base model in question (active parameters), the seconds
    that the cluster may be used, and the cluster at `mfu`. `trained` is the plan of a new model, or why there is none."""

    need: Need
    examples: int
    tokens: int
    base: int
    seconds: float
    cluster: Cluster
    trained: Trained | str

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
    advised = next((one for one in judged if one.enough and one.fits and one.affordable), judged[0])
    return [_option(situation, one, _verdict(one, advised)) for one in judged]


@dataclass(frozen=True)
class _Judged:
    """A way, whether it meets the need, its tokens and seconds of training, the reason, whether the memory of the cluster holds it, and
    whether the time pays for it."""

    route: Route
    enough: bool
    reason: str
    tokens: float = 0.0
    seconds: float = 0.0
    fits: bool = True
    affordable: bool = True


def _verdict(one: _Judged, advised: _Judged) -> Verdict:
    if one is advised:
        return "advised"
    if not one.enough:
        return "possible" if one.route == "prompt" else "not enough"
    if not one.fits:
        return "does not fit"
    return "more than needed" if one.affordable else "not affordable"


def _seconds(situation: Situation, tokens: float, each: float = TRAINED) -> float:
    """Of training the base model on `tokens`, with `each` operations per parameter and token."""
    cluster = situation.cluster
    return seconds(each * situation.base * tokens, devices(cluster), cluster, cluster.mfu)


def _prompt(situation: Situation) -> _Judged:
    if situation.need == "facts":
        return _Judged("prompt", True, "facts belong into the prompt (retrieval): weights cannot be corrected one by one")
    if situation.need == "form" and situation.examples < _FEW_EXAMPLES:
        return _Judged("prompt", True, f"fewer than {_FEW_EXAMPLES:,} examples are better shown in the prompt than trained on")
    return _Judged("prompt", False, "try it first, with an evaluation of your own: it sets the score that every other way has to beat")


def _tune(situation: Situation) -> _Judged:
    each, how = _weights_tuned(situation)
    per_example = _EXAMPLE_TOKENS * _TUNE_EPOCHS
    paid = int(situation.flops / (each * situation.base * per_example) * (1 + 1e-9))
    used = min(situation.examples, paid)
    tokens = float(used * per_example)
    fits, cost = _fits(situation, adapters=each == FROZEN), _seconds(situation, tokens, each)
    if situation.need not in ("form", "skill"):
        reason = "tuning teaches form and use of what the base model knows, and little that is new"
        return _Judged("tune", False, reason, tokens, cost, fits)
    least = _FEW_EXAMPLES if situation.need == "form" else _SKILL_EXAMPLES
    enough = situation.examples >= least
    reason = f"{situation.examples:,} examples, about {least:,} are needed for {NEEDS[situation.need]}"
    if not enough:
        reason += "; collect or generate more, or reward answers that can be checked"
    elif used < situation.examples:
        pays = f"the time pays for {used:,} of the {situation.examples:,} examples"
        reason = f"{pays}, and about {least:,} are needed for {NEEDS[situation.need]}" if used < least else f"{pays}, which are enough"
    return _Judged("tune", enough, reason + how, tokens, cost, fits, used >= min(least, situation.examples))


def _weights_tuned(situation: Situation) -> tuple[float, str]:
    """Operations per parameter and token, 4 with adapters and 6 without, and what to add to the reason: adapters where all weights do not
    fit into the memory, or where the time does not pay for them and all examples."""
    if not _fits(situation):
        return FROZEN, _shortage(situation, adapters=True)
    if _seconds(situation, situation.examples * _EXAMPLE_TOKENS * _TUNE_EPOCHS) > situation.seconds:
        return FROZEN, "; with adapters (lora), which take 4 operations per parameter and token instead of 6"
    return TRAINED, ""


def _continue(situation: Situation) -> _Judged:
    if situation.need not in _REPLAY:
        return _Judged("continue", False, "more text of a field changes what a model knows, which is not what is missing here")
    replay = _REPLAY[situation.need]
    wanted, paid = EPOCHS_AS_NEW * situation.tokens / (1 - replay), situation.flops / (TRAINED * situation.base)
    tokens = min(wanted, paid)
    cost = _seconds(situation, tokens)
    epochs = min(EPOCHS_AS_NEW, paid * (1 - replay) / max(1, situation.tokens))
    text = f"{amount(situation.tokens)} distinct tokens for {epochs:.2g} epochs, with {replay:.0%} of general text against forgetting"
    if situation.tokens < _CONTINUE_TOKENS:
        reason = f"{text}; below {amount(_CONTINUE_TOKENS)} retrieval and tuning do as well"
        return _Judged("continue", False, reason, tokens, cost)
    if paid < _CONTINUE_TOKENS:
        limit = (
            f"the time pays for {amount(paid)} tokens of a model of {amount(situation.base)}, and below {amount(_CONTINUE_TOKENS)} "
            "retrieval and tuning do as well; take a smaller base or more time"
        )
        return _Judged("continue", True, limit, tokens, cost, affordable=False)
    return _Judged("continue", True, text + _shortage(situation), tokens, cost, _fits(situation))


def _train(situation: Situation) -> _Judged:
    made = situation.trained
    if isinstance(made, str):
        return _Judged("train", situation.need == "own", made, fits=False)
    known = f"the time trains {amount(made.parameters)} active parameters on {amount(made.tokens)} tokens (lmworks plan --time)"
    against = f"; open models of {amount(situation.base)} parameters have seen about {amount(_BASE_TOKENS)}"
    figures = made.tokens, made.seconds
    if situation.need != "own":
        return _Judged("train", False, known + against, *figures)
    if not situation.tokens:
        return _Judged("train", False, f"{known}, and there is no text; give your distinct tokens with --tokens", *figures)
    if (wanted := max(made.seconds / _ACCURACY, _START)) > situation.seconds:
        limit = (
            f"the smallest run takes {days(wanted)}: {amount(made.parameters)} active parameters in the fewest steps, and at least "
            f"{_START} s to start it"
        )
        return _Judged("train", True, limit, *figures, affordable=False)
    enough = EPOCHS_AS_NEW * situation.tokens >= made.tokens
    short = "" if enough else f"; {amount(made.tokens / EPOCHS_AS_NEW)} distinct tokens are needed for that, add public text"
    return _Judged("train", True, known + short, *figures)


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


def _option(situation: Situation, one: _Judged, verdict: Verdict) -> Option:
    hours = device_hours(devices(situation.cluster), one.seconds)
    return Option(one.route, verdict, one.reason, one.tokens, one.seconds, hours, hours * situation.cluster.dollars_per_device_hour)
