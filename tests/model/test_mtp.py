"""Multi-token prediction: against single documents and single predictions, and what it leaves alone.

Tolerance 1e-5 relative unless a test says otherwise: both sides are fp32 and differ in the order of sums, which costs about 1e-6;
a label one place off costs more than 1e-2.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.model.test_transformer import build, relative, sample
from torch import Tensor

from lmworks.model import Transformer
from lmworks.model.init import initialize, standard_deviation
from lmworks.model.loss import IGNORE
from lmworks.model.mtp import look_ahead
from lmworks.recipe.parameters import count_active_parameters, count_parameters, parameters
from lmworks.recipe.schema.model import Balance, Mla, Model, Moe, Mtp
from small_config import small_config

_SMALL: dict[str, Any] = small_config(vocab_size=128)
_QUIET = Moe(
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    balance=Balance(sequence_aux_loss_weight=0.0),
)
CONFIGS = {
    "dense": Model(**_SMALL, mtp=Mtp()),
    "experts": Model(**_SMALL, moe=_QUIET, mtp=Mtp(loss_weight=0.5)),
    "two layers": Model(**_SMALL, moe=_QUIET, mtp=Mtp(num_nextn_predict_layers=2)),
    "tied": Model(**_SMALL, tie_word_embeddings=True, mtp=Mtp(num_nextn_predict_layers=2), z_loss_weight=1e-2),
    "latent": Model(
        **(_SMALL | {"num_key_value_heads": 4, "head_dim": 12}),
        mla=Mla(kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6),
        mtp=Mtp(),
    ),
}
BOUNDS = [0, 1, 3, 17, 24, 33, 48]


def documents() -> tuple[Tensor, Tensor, Tensor]:
    """Two rows of documents, and labels that end with each document; one inside is not learnt."""
    tokens = sample()[0]
    labels = tokens.flatten().roll(-1)
    labels[[end - 1 for end in BOUNDS[1:]]] = IGNORE
    labels[9] = IGNORE
    return tokens, labels.view(2, 24), torch.tensor(BOUNDS, dtype=torch.int32)


def on_paper(model: Transformer, tokens: Tensor, labels: Tensor) -> Tensor:
    """Equations 21 to 25 of arXiv:2412.19437 for one document: the cross-entropies summed, their mean over the layers."""
    T = len(tokens)
    hidden, _ = model.hidden(tokens[None])
    losses = []
    for depth, layer in enumerate(model.mtp, 1):
        if depth >= T:
            losses.append(torch.zeros(()))
            continue
        # only the places that still have a token `depth` further on
        hidden, embedded = hidden[:, : T - depth], model.embed(tokens[None, depth:])
        joined = torch.cat((layer.embedding_norm(embedded), layer.hidden_norm(hidden)), -1)
        spans = model.spans(tokens[None, : T - depth], None, None)
        x, *_ = layer.block(F.linear(joined, layer.projection.weight), model.rotations(spans)[0], None)
        hidden = layer.norm(x)
        losses.append(F.cross_entropy(model.logits(hidden)[0], labels[depth:].long(), ignore_index=IGNORE, reduction="sum"))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("plain", [False, True])
def test_each_document_alone_by_the_papers_equations(name: str, plain: bool) -> None:
    """Loss, every gradient, and nothing across the end of a document; a document of one token has nothing to predict."""
    model, (tokens, labels, cu_seqlens) = build(CONFIGS[name]).plain(plain), documents()
    loss = model.loss(tokens, labels, cu_seqlens)
    loss.total.backward()
    found = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    apart = [(tokens.flatten()[a:b], labels.flatten()[a:b]) for a, b in pairwise(BOUNDS)]
    expected = torch.stack([on_paper(model, *document) for document in apart]).sum()
    assert loss.mtp is not None and relative(loss.mtp, expected) < 1e-5
    model.eval()
    main = model.loss(tokens, labels, cu_seqlens)
    weight = model.config.mtp.loss_weight if model.config.mtp else 0.0
    if not model.config.z_loss_weight:
        (main.total + weight * expected).backward()
        torch.testing.assert_close(loss.total, main.total + weight * expected, rtol=1e-5, atol=0)
        for key, parameter in model.named_parameters():
            assert relative(found[key], parameter.grad) < 5e-5, key


def test_where_the_labels_lie() -> None:
    tokens, labels = torch.tensor([[10, 11, 12, 20, 21, 22, 23, 30]]), torch.tensor([[11, 12, -100, 21, 22, 23, -100, -100]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
    one, two = look_ahead(tokens, labels, positions, 2)
    no = IGNORE
    assert one.labels_BT.tolist() == [[12, no, no, 22, 23, no, no, no]]
    assert two.labels_BT.tolist() == [[no, no, no, 23, no, no, no, no]]
    assert one.tokens_BT[0, :7].tolist() == tokens[0, 1:].tolist()
    (only,) = look_ahead(tokens[:, :1], labels[:, :1], positions[:, :1], 1)
    assert only.labels_BT.tolist() == [[no]]


def test_no_gradient_crosses_the_end_of_a_document() -> None:
    model, (tokens, labels, cu_seqlens) = build(CONFIGS["two layers"]), documents()
    labels = labels.flatten()
    labels[:17] = IGNORE  # only the documents from place 17 on are learnt
    model.loss(tokens, labels.view(2, 24), cu_seqlens).total.backward()
    flat = tokens.flatten()
    before = [token for token in flat[:17].tolist() if token not in flat[17:].tolist()]
    assert len(before) > 5 and model.embedding.weight.grad[before].abs().max() == 0


def test_evaluation_leaves_it_out() -> None:
    model, batch = build(CONFIGS["experts"]).eval(), documents()
    loss = model.loss(*batch)
    loss.total.backward()
    assert loss.mtp is None and loss.layers.counts.shape == (1, 8)
    assert all((parameter.grad is None) == name.startswith("mtp.") for name, parameter in model.named_parameters())
    without = Transformer(model.config.model_copy(update={"mtp": None})).eval()
    without.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if not name.startswith("mtp.")})
    assert torch.equal(without(batch[0]), model(batch[0]))


def test_its_experts_are_counted_and_its_weight_changes() -> None:
    model, batch = build(CONFIGS["two layers"]), documents()
    loss = model.loss(*batch)
    assert loss.layers.counts.shape == (3, 8) and len(model.moe_layers()) == 3
    assert loss.layers.counts.sum(1).tolist() == [96.0] * 3
    main = model.eval().loss(*batch).total
    model.train().mtp_loss_weight = 0.1
    torch.testing.assert_close(model.loss(*batch).total, main + 0.1 * loss.mtp, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_and_first_weights(name: str) -> None:
    config = CONFIGS[name]
    model = initialize(Transformer(config), 3)
    assert {p.name: p.shape for p in parameters(config)} == {key: tuple(p.shape) for key, p in model.named_parameters()}
    own = sum(parameter.numel() for key, parameter in model.named_parameters() if not key.startswith("mtp."))
    assert count_parameters(config) == own == count_parameters(config.model_copy(update={"mtp": None}))
    assert count_active_parameters(config) == count_active_parameters(config.model_copy(update={"mtp": None}))
    state = dict(model.named_parameters())
    assert torch.equal(state["mtp.0.hidden_norm.weight"], torch.ones(32))
    for key in ("mtp.0.projection.weight", "mtp.0.block.attention.output.weight"):
        std = standard_deviation(key, config.initializer_range, 2)
        assert std == (0.02 if "projection" in key else 0.01)
        assert abs(float(state[key].detach().std()) / std - 1) < 0.1


@pytest.mark.slow  # a minute of compiling
def test_compiled_training_equals_eager() -> None:
    """Latent attention, experts and the layer that looks ahead. 1e-4: fusion changes the order of sums; a lost term is more than half."""
    config = CONFIGS["latent"].model_copy(
        update={"num_hidden_layers": 1, "moe": _QUIET.model_copy(update={"first_k_dense_replace": 0, "num_experts_per_tok": 8})}
    )
    model, batch = build(config), documents()
    expected = model.loss(*batch)
    expected.total.backward()
    eager = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    model.compile(dynamic=False, fullgraph=True)
    found = model.loss(*batch)
    found.total.backward()
    torch.testing.assert_close(found.total, expected.total, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.mtp, expected.mtp, rtol=1e-5, atol=0)
    for key, parameter in model.named_parameters():
        assert float((parameter.grad - eager[key]).norm() / eager[key].norm()) < 1e-4, key
