"""Tensors of a class that hold the rows of several of ours: `lmworks.weights.names.Packing`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lmworks.checkpoint.save_plan import TensorSlice
from lmworks.recipe.families import common, llama
from lmworks.recipe.families.registry import FAMILIES
from lmworks.recipe.schema.model import Model
from lmworks.weights.names import Packing, packed_together, packing, refuse_foreign, sources, to_huggingface

_ROWS = (4, 4, 12)
_MODEL = Model(
    vocab_size=32, hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6, intermediate_size=10
)
_JOINED = "model.layers.{i}.self_attn.qkv_proj.weight"
_FAMILY = replace(
    llama.FAMILY,
    names=(
        *((ours, _JOINED if theirs.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else theirs)
          for ours, theirs in common.LLAMA if not ours.endswith("bias")),
    ),
    groups={_JOINED: lambda model: model.num_key_value_heads or 1},
)  # fmt: skip


def _parts() -> list[torch.Tensor]:
    return [100 * at + torch.arange(2.0 * rows).view(rows, 2) for at, rows in enumerate(_ROWS)]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_rows_are_in_groups_in_the_order_of_the_parts(groups: int) -> None:
    packed, parts = Packing("theirs", ("a", "b", "c"), groups), _parts()
    whole = packed.pack(parts)
    by_hand = [
        part[group * len(part) // groups : (group + 1) * len(part) // groups] for group in range(groups) for part in parts
    ]  # fmt: skip
    assert torch.equal(whole, torch.cat(by_hand))
    assert all(torch.equal(found, part) for found, part in zip(packed.unpack(whole, _ROWS), parts, strict=True))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_any_slice_of_a_part_is_read_where_its_rows_are(groups: int) -> None:
    packed, parts = Packing("theirs", ("a", "b", "c"), groups), _parts()
    whole = packed.pack(parts)
    for name, part in zip(packed.ours, parts, strict=True):
        for begin in range(len(part)):
            for end in range(begin + 1, len(part) + 1):
                own = torch.full((end - begin, 1), -1.0)
                piece = TensorSlice(name, own.dtype, tuple(part.shape), (begin, 1), (end - begin, 1), lambda own=own: own)  # type: ignore[misc]
                for box in packed.boxes(piece, _ROWS):
                    assert box.shape == tuple(whole.shape)
                    box.values().copy_(whole[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))])
                assert torch.equal(own, part[begin:end, 1:])


def test_a_family_declares_it_by_naming_its_tensor_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.model import Transformer

    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", _FAMILY)
    state = {name: torch.randn(tensor.shape) for name, tensor in Transformer(_MODEL).state_dict().items() if "bias" not in name}
    written = dict(to_huggingface(state, _MODEL))
    theirs = "model.layers.1.self_attn.qkv_proj.weight"
    assert written[theirs].shape == (48, 8) and "model.layers.1.self_attn.o_proj.weight" in written
    heads = written[theirs].view(2, 24, 8)  # by key head: two query heads, a key, a value
    assert torch.equal(heads[1, :12], state["layers.1.attention.query.weight"][12:])
    assert torch.equal(heads[0, 18:], state["layers.1.attention.value.weight"][:6])
    refuse_foreign(written, state, _MODEL, _FAMILY)
    together = [names for names in packed_together(state, _MODEL) if len(names) > 1]
    assert together[0] == tuple(f"layers.0.attention.{part}.weight" for part in ("query", "key", "value")) and len(together) == 2
    assert sorted(name for names in packed_together(state, _MODEL) for name in names) == sorted(state)
    for name, tensor in state.items():
        own = torch.empty_like(tensor)
        part = TensorSlice(name, own.dtype, tuple(own.shape), (0,) * own.dim(), tuple(own.shape), lambda own=own: own)  # type: ignore[misc]
        for found, box in sources(part, state, _MODEL, _FAMILY):
            box.values().copy_(written[found][tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))])
        assert torch.equal(own, tensor), name
    assert packing("layers.0.attention.output.weight", _MODEL, _FAMILY) is None
