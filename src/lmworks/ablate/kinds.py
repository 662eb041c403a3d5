"""The kinds of ablations by name, and those that change the recipe from its first step; `branches` has the others.

Arms that are written out; equal arms (A/A) that differ in chance alone, to measure the noise floor; each source of the mixture taken out or
weighted otherwise; tokenizers; each feature of the model switched off, or on where the recipe does not have it; sweeps of learning rates
(with a parabola), of batch sizes on equal tokens, and of optimizers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from lmworks.ablate.file import Ablation, Expansion, Findings, distinct, meant, number, phases_of
from lmworks.errors import UserError
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe


def kinds() -> dict[str, type[Ablation]]:
    """The types of ablation files, by the value of `kind`; the one without a kind first."""
    from lmworks.ablate.branches import Anneal, CriticalBatch

    types = (Arms, Anneal, Architecture, Batch, CriticalBatch, LearningRate, Mixture, Noise, Optimizer, Tokenizer)
    return {one.model_fields["kind"].default: one for one in types}


class Arms(Ablation):
    """Arms that are written out: a name and its overrides."""

    kind: Literal["arms"] = Field("arms", description="which kind of ablation this is")
    arms: dict[str, list[str]] = Field(
        description="overrides of each arm by its name, each A.B=C as for --set; an empty list is the recipe itself"
    )
    baseline: str | None = Field(None, description="arm that the others are compared with; the first when omitted")

    @field_validator("arms")
    @classmethod
    def _several(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        if len(value) < 2:
            raise ValueError("needs two arms or more, one of them the baseline; an empty list of overrides is the recipe itself")
        return value

    def expand(self, recipe: Recipe) -> Expansion:
        baseline = self.baseline or next(iter(self.arms))
        if baseline not in self.arms:
            raise UserError(f"baseline: there is no arm {baseline!r}; {meant(baseline, self.arms)}")
        return Expansion(self.arms, baseline)


class Noise(Ablation):
    """A/A: copies of the recipe that have the same data order and other initial weights with each seed. Its noise floor serves later
    ablations (`noise`)."""

    kind: Literal["noise"] = "noise"
    copies: int = Field(2, ge=2, le=100, description="number of equal arms")

    def expand(self, recipe: Recipe) -> Expansion:
        arms = {f"copy-{number}": [f"train.init_seed={recipe.init_seed + number}"] for number in range(1, self.copies + 1)}
        return Expansion(arms, "copy-1")


class Mixture(Ablation):
    """Data mixture: one arm per source, whose weight is multiplied by `factor` in every phase; the other weights are scaled to a sum of
    1."""

    kind: Literal["mixture"] = "mixture"
    sources: list[str] = Field(default_factory=list, description="sources to change, an arm each; all sources of the mixtures when omitted")
    factor: float = Field(0.0, ge=0, le=1000, description="factor on the weight of the source; 0 takes it out")

    def expand(self, recipe: Recipe) -> Expansion:
        phases_of(recipe)
        if self.factor == 1:
            raise UserError("factor: 1 changes no mixture; write 0 to take sources out, or another factor")
        known = list(dict.fromkeys(name for phase in recipe.train.phases for name in phase.mixture))
        word = "without-{}" if not self.factor else f"{{}}-times-{number(self.factor)}"
        arms: list[tuple[str, list[str]]] = [("recipe", [])]
        for source in self.sources or known:
            if source not in known:
                raise UserError(f"sources: no mixture has {source!r}; {meant(source, known)}")
            overrides = []
            for phase in recipe.train.phases:
                weights = {name: weight * (self.factor if name == source else 1) for name, weight in phase.mixture.items()}
                total = sum(weights.values())
                if not total:
                    raise UserError(
                        f"sources: phase {phase.name} has no source but {source}, so it cannot be taken out; write a factor above 0"
                    )
                scaled = {name: weight / total for name, weight in weights.items() if weight}
                if source in phase.mixture:
                    overrides.append(f"train.phases.{phase.name}.mixture={json.dumps(scaled)}")
            arms.append((word.format(source), overrides))
        return Expansion(distinct("sources", arms), "recipe")


class Tokenizer(Ablation):
    """Tokenizers: one arm per vocabulary size, kind, or existing tokenizer. Only measures per byte are compared, on all held-out text."""

    kind: Literal["tokenizer"] = "tokenizer"
    vocab_sizes: list[int] = Field(default_factory=list, description="vocabulary sizes to train, an arm each")
    kinds: list[Literal["bytes", "sentencepiece"]] = Field(default_factory=list, description="kinds of tokenizer to train, an arm each")
    paths: dict[str, str] = Field(
        default_factory=dict, description="existing tokenizers by the name of their arm: a tokenizer.json or its folder"
    )

    default_measures: ClassVar = ("evaluation/bits_per_byte", "evaluation/{domain}/bits_per_byte")

    def expand(self, recipe: Recipe) -> Expansion:
        arms = [(f"vocab-{size}", f"tokenizer.vocab_size={size}") for size in self.vocab_sizes]
        arms += [(kind, f"tokenizer.kind={kind}") for kind in self.kinds]
        arms += [(name, f"tokenizer.path={path}") for name, path in self.paths.items()]
        if not arms:
            raise UserError("kind tokenizer needs something to compare: vocab_sizes, kinds or paths")
        own = [(name, [override, "model.vocab_size=null"]) for name, override in arms]
        return Expansion(distinct("vocab_sizes, kinds, paths", [("recipe", []), *own]), "recipe")


Feature = Literal["qk-norm", "tied-embeddings", "gqa", "moe", "mtp", "attention-bias", "z-loss", "post-norm", "rope"]
_Switched = tuple[str, dict[str, object]]  # a word for the arm, and the keys of the model that it changes


def _switch(key: str, off: object, on: object) -> Callable[[Model], _Switched]:
    """A feature that one key of the model switches."""
    return lambda model: ("without", {key: off}) if getattr(model, key) != off else ("with", {key: on})


def _qk_norm(model: Model) -> _Switched:
    word, keys = _switch("use_qk_norm", False, True)(model)
    return word, keys | ({"qk_norm_over": "head"} if word == "without" and model.qk_norm_over != "head" else {})


def _gqa(model: Model) -> _Switched:
    heads, shared = model.num_attention_heads or 1, model.num_key_value_heads or 1
    if heads == 1:
        raise UserError("features: gqa does not apply to a model with one attention head; remove it")
    if shared < heads:
        return "without", {"num_key_value_heads": heads}
    return "with", {"num_key_value_heads": heads // 4 if heads % 4 == 0 else 1}


def _moe(model: Model) -> _Switched:
    """A dense model whose feed-forward is as wide as the active experts: equal FLOPs per token."""
    if model.moe is None:
        raise UserError("features: moe switches experts off, and the model has none; write the experts as an arm of kind: arms")
    width = (model.moe.num_experts_per_tok + model.moe.n_shared_experts) * model.moe.moe_intermediate_size
    return "without", {"moe": None, "intermediate_size": width}


def _rope(model: Model) -> _Switched:
    """Half of each head rotated, or all of it: GLM's partial rotary."""
    partial = model.rope.partial_rotary_factor < 1
    return "full" if partial else "half", {"rope.partial_rotary_factor": 1.0 if partial else 0.5}


_FEATURES: dict[Feature, Callable[[Model], _Switched]] = {
    "qk-norm": _qk_norm, "gqa": _gqa, "moe": _moe, "rope": _rope,
    "tied-embeddings": _switch("tie_word_embeddings", False, True), "attention-bias": _switch("attention_bias", False, True),
    "mtp": _switch("mtp", None, {"num_nextn_predict_layers": 1}), "z-loss": _switch("z_loss_weight", 0.0, 0.0001),
    "post-norm": _switch("norm_position", "pre", "post"),
}  # fmt: skip


class Architecture(Ablation):
    """Architecture: one arm per feature, which is switched off, or on where the recipe does not have it. moe: a dense model of equal FLOPs
    per token; rope: half of each head rotated instead of all of it, or the reverse."""

    kind: Literal["architecture"] = "architecture"
    features: list[Feature] = Field(min_length=1, description="features of the model to switch, an arm each")

    def expand(self, recipe: Recipe) -> Expansion:
        arms: list[tuple[str, list[str]]] = [("recipe", [])]
        for feature in self.features:
            word, keys = _FEATURES[feature](recipe.model)
            arms.append((f"{word}-{feature}", [f"model.{key}={json.dumps(value)}" for key, value in keys.items()]))
        return Expansion(distinct("features", arms), "recipe")


class LearningRate(Ablation):
    """Learning rate sweep: one arm per factor on the recipe's peak learning rates. A parabola in the logarithm of the rate gives the
    optimum."""

    kind: Literal["learning-rate"] = "learning-rate"
    factors: list[float] = Field(
        [0.25, 0.5, 1.0, 2.0, 4.0], min_length=3,
        description="factors on optimizer.learning_rate and optimizer.adam_learning_rate; 1 is the baseline, else the factor nearest to it",
    )  # fmt: skip

    def expand(self, recipe: Recipe) -> Expansion:
        if min(self.factors) <= 0 or len(set(self.factors)) < len(self.factors):
            raise UserError("factors: must be positive and differ from each other")
        rate, factors = recipe.optimizer.learning_rate, sorted(self.factors)
        assert rate
        arms = distinct("factors", ((f"rate-{number(rate * factor)}", _scaled_rates(recipe, factor)) for factor in factors))
        rates = dict(zip(arms, factors, strict=True))
        baseline = min(rates, key=lambda name: max(rates[name], 1 / rates[name]))
        return Expansion(arms, baseline, labels={name: rate * factor for name, factor in rates.items()})

    def conclude(self, findings: Findings) -> dict[str, Any] | None:
        return findings.optimum("learning rate")


Rescale = Literal["none", "sqrt", "linear"]


def rescaled(ratio: float, rescale: Rescale) -> float:
    """The factor on the learning rate for a batch that is `ratio` times as large (sqrt: Malladi et al. 2022, arXiv:2205.10287)."""
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[rescale]


def _scaled_rates(recipe: Recipe, factor: float) -> list[str]:
    """The overrides by which both learning rates are multiplied."""
    rate, adam = recipe.optimizer.learning_rate, recipe.optimizer.adam_learning_rate
    assert rate and adam
    return [] if factor == 1 else [f"optimizer.learning_rate={rate * factor!r}", f"optimizer.adam_learning_rate={adam * factor!r}"]


class Batch(Ablation):
    """Batch size sweep: one arm per factor on the batch size of every phase, on equal tokens."""

    kind: Literal["batch"] = "batch"
    factors: list[float] = Field(
        [0.5, 1.0, 2.0, 4.0], min_length=2, description="factors on global_batch_tokens of every phase; 1 is the baseline"
    )
    rescale: Rescale = Field("sqrt", description="how the learning rate follows the batch size")

    def expand(self, recipe: Recipe) -> Expansion:
        phases_of(recipe)
        if min(self.factors) <= 0 or 1 not in self.factors or len(set(self.factors)) < len(self.factors):
            raise UserError("factors: must be positive, differ from each other, and contain 1, the baseline")
        arms: dict[str, list[str]] = {}
        labels: dict[str, float] = {}
        for factor in sorted(self.factors):
            overrides = []
            for phase in recipe.train.phases:
                size = phase.global_batch_tokens * factor
                if size % phase.sequence_length or size < 1:
                    raise UserError(
                        f"factors: {factor:g} times the batch of phase {phase.name} ({phase.global_batch_tokens:,} tokens) is no multiple "
                        f"of its sequence length {phase.sequence_length:,}; take another factor"
                    )
                overrides.append(f"train.phases.{phase.name}.global_batch_tokens={int(size)} tokens")
                if phase.batch_ramp:
                    overrides.append(f"train.phases.{phase.name}.batch_ramp=null")
            first = recipe.train.phases[0].global_batch_tokens * factor
            arms[f"batch-{int(first)}"] = overrides + _scaled_rates(recipe, rescaled(factor, self.rescale))
            labels[f"batch-{int(first)}"] = first
        return Expansion(arms, f"batch-{int(recipe.train.phases[0].global_batch_tokens)}", labels=labels)


class Optimizer(Ablation):
    """Optimizers: one arm per optimizer and learning rate. Under muon the rate is that of the matrices, and the recipe's adam_learning_rate
    stays."""

    kind: Literal["optimizer"] = "optimizer"
    rates: dict[Literal["muon", "adamw"], list[float]] = Field(
        min_length=1, description="learning rates to try, by optimizer; the first one of the first optimizer is the baseline"
    )

    @field_validator("rates")
    @classmethod
    def _positive(cls, value: dict[str, list[float]]) -> dict[str, list[float]]:
        for name, rates in value.items():
            if not rates or min(rates) <= 0:
                raise ValueError(f"{name} needs at least one learning rate above 0")
        return value

    def expand(self, recipe: Recipe) -> Expansion:
        arms = []
        for kind, rate in ((kind, rate) for kind, rates in self.rates.items() for rate in rates):
            keys = ["learning_rate", *(["adam_learning_rate"] if kind == "adamw" else [])]
            arms.append((f"{kind}-{number(rate)}", [f"optimizer.kind={kind}", *(f"optimizer.{key}={rate!r}" for key in keys)]))
        found = distinct("rates", arms)
        return Expansion(found, next(iter(found)))
