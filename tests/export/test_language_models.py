"""Classes that also read images: their folders are read as the language model in them.

Tolerance of logits: as in test_huggingface.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from random_configs import random_config
from test_huggingface import close

from lmworks.errors import UserError
from lmworks.recipe.families.family import Family
from lmworks.recipe.families.registry import FAMILIES, from_config
from lmworks.weights.huggingface import map_weights, read_model

WRAPPED = [family for family in FAMILIES.values() if family.wrapper]
_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "num_position_embeddings": 16,
}  # fmt: skip


def written(family: Family, folder: Path, **changes: Any) -> Any:
    import transformers

    assert family.wrapper
    kind = getattr(transformers, family.wrapper[0])
    text = random_config(family, 0).to_dict() | {"tie_word_embeddings": False}
    vision = _VISION | {"out_hidden_size": text["hidden_size"]}
    peer = kind(kind.config_class(text_config=text, vision_config=vision, attn_implementation="eager")).eval()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    peer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return peer


@pytest.mark.parametrize("family", WRAPPED, ids=lambda family: family.model_type)
def test_the_language_model_of_a_class_with_images_is_read(family: Family, tmp_path: Path) -> None:
    peer = written(family, tmp_path)
    tokens = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    read = read_model(tmp_path)
    with torch.no_grad():
        assert close(read(tokens), peer(input_ids=tokens).logits, read, tokens, peer)
    assert map_weights(tmp_path, read.config).keys() >= {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": True}, "has tie_word_embeddings twice"),
        ({"logits_to_scale": 2.0}, "has logits_to_scale 2.0 beside text_config"),
        ({"model_type": "gemma3"}, "has model_type \"gemma3\" and text_config.model_type"),
        ({"text_config": None}, "has text_config null, which must be an object"),
    ],
)  # fmt: skip
def test_what_may_change_the_language_model_is_refused(change: dict[str, Any], message: str) -> None:
    import transformers

    family = WRAPPED[0]
    assert family.wrapper
    config = getattr(transformers, family.wrapper[0]).config_class(text_config=random_config(family, 0).to_dict()).to_dict()
    config |= {"architectures": [family.wrapper[0]]}
    config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"] = False
    assert from_config(config).gated_delta is not None
    with pytest.raises(UserError, match=message):
        from_config(config | change)
