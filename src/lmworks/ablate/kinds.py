"""The kinds of ablations by name, and those that change the recipe from its first step.

Arms that are written out; equal arms (A/A) that differ in chance alone, to measure the noise floor; each source of the mixture taken out or
weighted otherwise; tokenizers; each feature of the model switched off, or on where the recipe does not have it. `sweeps` and `branches`
have the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from lmworks.ablate.file import Ablation, Expansion, distinct, meant, number, phases_of
from lmworks.errors import UserError
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe


def kinds() -> dict[str, type[Ablation]]:
    """The types of ablation files, by the value of `kind`; the one without a kind first."""
    from lmworks.ablate.branches import Anneal, CriticalBatch
    from lmworks.ablate.sweeps import Batch, LearningRate, Optimizer

    types = (Arms, Anneal, Architecture, Batch, CriticalBatch, LearningRate, Mixture, Noise, Optimizer, Tokenizer)
    return {one.model_fields["kind"].default: one for one in types}


def table() -> str:
    """The keys of all kinds as Markdown, for docs/ablations.md."""
    common = Ablation.model_fields
    lines = [_head(), *(_row(name, field) for name, field in common.items() if name != "kind")]
    for name, kind in kinds().items():
        own = {key: field for key, field in kind.model_fields.items() if key not in common}
        text = " ".join((kind.__doc__ or "").split())
        lines += ["", f"### `kind: {name}`", "", text, "", _head(), *(_row(key, field) for key, field in own.items())]
    return "\n".join(lines)


def _head() -> str:
    return "| key | default | meaning |\n|---|---|---|"


def _row(name: str, field: object) -> str:
    default, needed = getattr(field, "default", None), getattr(field, "is_required", lambda: False)()
    factory = getattr(field, "default_factory", None)
    value = factory() if factory else default
    shown = "required" if needed else "" if value is None or value in ([], {}) else f"`{value}`"
    return f"| `{name}` | {shown} | {getattr(field, 'description', '')} |"


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


_PRIME = 1_000_003


class Noise(Ablation):
    """A/A: copies of the recipe with the same data order and other initial weights. Its noise floor serves later ablations (`noise`)."""

    kind: Literal["noise"] = "noise"
    copies: int = Field(2, ge=2, le=100, description="number of equal arms")

    def expand(self, recipe: Recipe) -> Expansion:
        arms = {f"copy-{number}": [f"train.init_seed={number * _PRIME + recipe.init_seed}"] for number in range(1, self.copies + 1)}
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


def _switch(key: str) -> Callable[[Model], tuple[str, list[str]]]:
    def change(model: Model) -> tuple[str, list[str]]:
        has = bool(getattr(model, key))
        return "without" if has else "with", [f"model.{key}={str(not has).lower()}"]

    return change


def _qk_norm(model: Model) -> tuple[str, list[str]]:
    if model.use_qk_norm and model.qk_norm_over != "head":
        return "without", ["model.use_qk_norm=false", "model.qk_norm_over=head"]
    return _switch("use_qk_norm")(model)


def _gqa(model: Model) -> tuple[str, list[str]]:
    heads, shared = model.num_attention_heads or 1, model.num_key_value_heads or 1
    if shared < heads:
        return "without", [f"model.num_key_value_heads={heads}"]
    if heads == 1:
        raise UserError("features: gqa does not apply to a model with one attention head; remove it")
    return "with", [f"model.num_key_value_heads={max(1, heads // 4) if heads % 4 == 0 else 1}"]


def _moe(model: Model) -> tuple[str, list[str]]:
    """A dense model whose feed-forward is as wide as the active experts: equal FLOPs per token."""
    if model.moe is None:
        raise UserError("features: moe switches experts off, and the model has none; write the experts as an arm of kind: arms")
    width = (model.moe.num_experts_per_tok + model.moe.n_shared_experts) * model.moe.moe_intermediate_size
    return "without", ["model.moe=null", f"model.intermediate_size={width}"]


def _mtp(model: Model) -> tuple[str, list[str]]:
    return ("without", ["model.mtp=null"]) if model.mtp else ("with", ["model.mtp={num_nextn_predict_layers: 1}"])


def _z_loss(model: Model) -> tuple[str, list[str]]:
    return ("without", ["model.z_loss_weight=0.0"]) if model.z_loss_weight else ("with", ["model.z_loss_weight=0.0001"])


def _norm(model: Model) -> tuple[str, list[str]]:
    has = model.norm_position == "post"
    return "without" if has else "with", [f"model.norm_position={'pre' if has else 'post'}"]


def _rope(model: Model) -> tuple[str, list[str]]:
    """Half of each head rotated, or all of it: GLM's partial rotary."""
    partial = model.rope.partial_rotary_factor < 1
    return ("full" if partial else "half"), [f"model.rope.partial_rotary_factor={1.0 if partial else 0.5}"]


_FEATURES: dict[Feature, Callable[[Model], tuple[str, list[str]]]] = {
    "qk-norm": _qk_norm, "tied-embeddings": _switch("tie_word_embeddings"), "gqa": _gqa, "moe": _moe, "mtp": _mtp,
    "attention-bias": _switch("attention_bias"), "z-loss": _z_loss, "post-norm": _norm, "rope": _rope,
}  # fmt: skip


class Architecture(Ablation):
    """Architecture: one arm per feature, which is switched off, or on where the recipe does not have it. moe: a dense model of equal FLOPs
    per token; rope: half of each head rotated instead of all of it, or the reverse."""

    kind: Literal["architecture"] = "architecture"
    features: list[Feature] = Field(min_length=1, description="features of the model to switch, an arm each")

    def expand(self, recipe: Recipe) -> Expansion:
        arms: list[tuple[str, list[str]]] = [("recipe", [])]
        for feature in self.features:
            word, overrides = _FEATURES[feature](recipe.model)
            arms.append((f"{word}-{feature}", overrides))
        return Expansion(distinct("features", arms), "recipe")


if __name__ == "__main__":
    print(table())
