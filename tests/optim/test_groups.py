"""Every parameter of a real model gets the rule that its name calls for."""

from __future__ import annotations

import pytest
from torch import nn

from lmworks.errors import UserError
from lmworks.model.transformer import Transformer
from lmworks.optim.groups import Group, group_parameters
from lmworks.optim.optimizer import build_optimizer
from lmworks.recipe.schema.model import Mla, Model, Moe, Mtp
from lmworks.recipe.schema.train import Optimizer as Options
from small_config import small_config

MODEL = Model(
    **small_config(num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=16),
    use_qk_norm=True, attention_bias=True,
    moe=Moe(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
)  # fmt: skip


def by_name(model: nn.Module, **options: object) -> dict[str, Group]:
    groups = group_parameters(model.named_parameters(), Options(learning_rate=0.01, adam_learning_rate=0.002, **options))
    return {name: group for group in groups for name in group.parameters}


def test_every_parameter_is_in_one_group() -> None:
    model = Transformer(MODEL)
    groups = group_parameters(model.named_parameters(), Options(learning_rate=0.01))
    assert sum(len(group.parameters) for group in groups) == len(list(model.parameters()))
    assert by_name(model).keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_kind_and_decay(kind: str) -> None:
    groups = by_name(Transformer(MODEL), kind=kind)
    for name, group in groups.items():
        end = name.split(".")[0] in ("embedding", "head", "norm")
        small = name.endswith(".bias") or "norm" in name
        assert group.kind == ("adamw" if end or small else kind), name
        assert group.weight_decay == (0.0 if small or name == "embedding.weight" else 0.1), name
        assert group.learning_rate == (0.01 if group.kind == kind else 0.002), name
    # Spot checks that do not share the rule's own words.
    assert groups["layers.1.ffn.experts.down"].kind == kind
    assert groups["layers.1.ffn.router.weight"].kind == kind
    assert groups["layers.2.attention.query.bias"].weight_decay == 0
    assert groups["head.weight"].weight_decay == 0.1


def test_tied_embedding_is_an_embedding() -> None:
    model = Transformer(MODEL.model_copy(update={"tie_word_embeddings": True}))
    groups = by_name(model)
    assert "head.weight" not in groups
    assert groups["embedding.weight"].weight_decay == 0


def test_layer_decay() -> None:
    groups = by_name(Transformer(MODEL), layer_lr_decay=0.5)
    expected = {
        "head.weight": 0.002, "norm.weight": 0.002, "layers.2.ffn_norm.weight": 0.002, "layers.1.ffn_norm.weight": 0.001,
        "layers.2.attention.query.weight": 0.01, "layers.1.attention.query.weight": 0.005, "layers.0.ffn.gate.weight": 0.0025,
        "embedding.weight": 0.00025,
    }  # fmt: skip
    assert {name: groups[name].learning_rate for name in expected} == pytest.approx(expected)


def test_frozen_parameters_are_left_out() -> None:
    model = Transformer(MODEL)
    model.embedding.weight.requires_grad_(False)
    assert "embedding.weight" not in by_name(model)


def test_names_do_not_depend_on_compilation() -> None:
    model = Transformer(MODEL)
    names = dict(model.named_parameters()).keys()
    model.compile(dynamic=False)
    grouped = {name for group in group_parameters(model.named_parameters(), Options(learning_rate=0.01)) for name in group.parameters}
    assert grouped == names


def test_kinds_of_weights_have_factors() -> None:
    scales = {"embedding": 4.0, "head": 0.5, "matrices": 2.0, "experts": 3.0, "router": 0.25, "vectors": 5.0}
    expected = {
        "embedding.weight": 0.008, "head.weight": 0.001, "layers.0.attention.query.weight": 0.02, "layers.1.ffn.experts.up": 0.03,
        "layers.1.ffn.router.weight": 0.0025, "layers.1.ffn_norm.weight": 0.01, "layers.2.attention.query.bias": 0.01,
    }  # fmt: skip
    groups = by_name(Transformer(MODEL), lr_scales=scales)
    assert {name: groups[name].learning_rate for name in expected} == pytest.approx(expected)
    model = Transformer(MODEL)
    options = Options(learning_rate=0.01, adam_learning_rate=0.002, lr_scales=scales)
    assert build_optimizer(model, options).learning_rates() == pytest.approx({"muon": 0.01, "adamw": 0.002}), "without the factors"
    tied = by_name(Transformer(MODEL.model_copy(update={"tie_word_embeddings": True})), lr_scales={"embedding": 4.0})
    assert tied["embedding.weight"].learning_rate == 0.008 and tied["norm.weight"].learning_rate == 0.002


def test_a_missing_rate_is_named() -> None:
    model = Transformer(MODEL)
    with pytest.raises(UserError, match=r"optimizer\.learning_rate has no value"):
        group_parameters(model.named_parameters(), Options())
    with pytest.raises(UserError, match=r"optimizer\.adam_learning_rate has no value"):
        group_parameters(model.named_parameters(), Options(learning_rate=0.02, update_scale="spectral"))


def test_multi_token_prediction_is_trained_as_the_last_layer() -> None:
    ahead = MODEL.model_copy(update={"mtp": Mtp(num_nextn_predict_layers=2)})
    for kind in ("muon", "adamw"):
        groups = by_name(Transformer(ahead), kind=kind, layer_lr_decay=0.5)
        for name in ("projection.weight", "block.attention.query.weight", "block.ffn.experts.up", "block.ffn.router.weight"):
            assert (groups[f"mtp.1.{name}"].kind, groups[f"mtp.1.{name}"].weight_decay) == (kind, 0.1), name
            assert groups[f"mtp.0.{name}"].learning_rate == 0.01
        for name in ("embedding_norm.weight", "hidden_norm.weight", "norm.weight", "block.attention.query.bias"):
            assert (groups[f"mtp.0.{name}"].kind, groups[f"mtp.0.{name}"].weight_decay) == ("adamw", 0.0), name
        assert groups["layers.1.attention.query.weight"].learning_rate == 0.005  # it does not count as a layer


def test_latent_attention_is_made_of_matrices() -> None:
    mla = Mla(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4)
    groups = by_name(
        Transformer(
            Model(
                **small_config(num_hidden_layers=1, num_attention_heads=2),
                mla=mla,
            )
        )
    )
    kinds = {name.removeprefix("layers.0.attention."): group.kind for name, group in groups.items() if ".attention." in name}
    matrices = ("query_down", "query_up", "kv_down", "kv_up", "output")
    norms = ("query_latent_norm", "kv_latent_norm")
    assert kinds == {f"{name}.weight": "muon" for name in matrices} | {f"{name}.weight": "adamw" for name in norms}
