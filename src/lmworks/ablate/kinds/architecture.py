"""Architecture: each feature of the model switched off, or on where the recipe does not have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field

from lmworks.ablate.kinds.base import Ablation, Expansion, distinct
from lmworks.errors import UserError
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe

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
