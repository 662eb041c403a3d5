"""config.json as people write it: what `transformers` computes from the same file is computed here, or the file is refused.

Tolerance of logits: as in test_huggingface.py.
"""

from __future__ import annotations

import dataclasses
import json
import random
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from config_changes import class_defaults, other, same
from random_configs import random_config
from test_huggingface import _randomize, close

from lmworks.errors import UserError
from lmworks.recipe.families import family as keys
from lmworks.recipe.families.family import Family
from lmworks.recipe.families.registry import FAMILIES, from_config, to_config
from lmworks.weights.huggingface import read_model

_ALL = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)


def _config_class(family: Family) -> Any:
    import transformers

    return getattr(transformers, family.name).config_class


def _kinds(annotation: Any) -> set[Any]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return {one for part in typing.get_args(annotation) for one in _kinds(part)}
    return {type(None) if annotation is None else origin or annotation}


@_ALL
def test_the_defaults_are_those_of_transformers(family: Family) -> None:
    """Against the installed version: key by key the default, the kind, whether null is allowed, the second names, the defaults of RoPE."""
    kind = _config_class(family)
    defaults = class_defaults(kind)
    hints = {kind.attribute_map.get(name, name): hint for name, hint in typing.get_type_hints(kind, localns={"torch": torch}).items()}
    spelled = {family.aliases.get(name, name): name for name in defaults}  # our name of a key -> transformers' own
    for key, declared in family.defaults.items():
        if isinstance(declared, keys.Extra):
            assert key not in {field.name for field in dataclasses.fields(kind)}, f"{key} is a key of the class now"
            continue
        name = spelled[key]
        default, typed = (declared.default, declared.kind) if isinstance(declared, keys.Null) else (declared, type(declared))
        if isinstance(declared, keys.Number):
            default, typed = declared.default, float
        assert (defaults[name], type(defaults[name])) == (default, type(default)), key
        assert typed in _kinds(hints[name]), key
        if isinstance(declared, keys.Null):
            assert type(None) in _kinds(hints[name]), key
    assert set(family.aliases.items()) == {
        (name, key) if key in family.defaults else (key, name) for name, key in kind.attribute_map.items()
    }
    if "rope_parameters" in family.omits:
        return
    empty = kind()
    of_kinds = {"full_attention": empty.rope_parameters, "sliding_attention": {"rope_theta": None}}
    ropes = of_kinds if family.sliding_rope_theta is None else empty.rope_parameters
    assert ropes["full_attention"]["rope_theta"] == family.rope_theta
    assert ropes["full_attention"].get("partial_rotary_factor", 1.0) == family.partial_rotary_factor
    assert ropes["sliding_attention"]["rope_theta"] == family.sliding_rope_theta


@_ALL
def test_every_key_of_the_class_is_read_or_known_to_change_nothing(family: Family) -> None:
    """A key that a later version of transformers adds must be looked at."""
    from transformers import GenerationConfig, PretrainedConfig

    known = {*family.defaults, *family.aliases, *family.fixed, *keys.ROPE, *keys.FIXED}
    kind = _config_class(family)
    for key, default in class_defaults(kind).items():
        assert default in (*family.fixed.get(key, (default,)), None), key
    written = {field.name for field in dataclasses.fields(kind)} | kind().to_dict().keys()
    assert not [key for key in written if key not in known and not keys.changes_no_number(key)]
    of_all = {field.name for field in dataclasses.fields(PretrainedConfig)} | GenerationConfig._get_default_generation_params().keys()
    assert not [key for key in of_all if key not in known and not keys.changes_no_number(key)]


def _written(family: Family, seed: int, folder: Path) -> tuple[dict[str, Any], Any]:
    import transformers

    config = random_config(family, seed)
    peer = getattr(transformers, family.name)(config).eval()
    _randomize(peer, seed)
    peer.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), type(config)


def _in_transformers(folder: Path) -> Any:
    """The model that transformers makes of the folder; None if it makes none, or draws weights that it did not find."""
    import transformers

    try:
        peer, found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except Exception:  # whatever its own checks and its layers raise
        return None
    return None if found["missing_keys"] or found["unexpected_keys"] else peer.eval()


def _compare(folder: Path, seed: int) -> bool | None:
    """Whether both read the folder, and then equally; None if transformers does not read it."""
    try:
        read, refusal = read_model(folder), ""
    except UserError as error:
        read, refusal = None, str(error)
    if read is None:
        assert "\n" not in refusal and len(refusal) < 600
        return False
    peer = _in_transformers(folder)
    if peer is None:
        return None
    tokens = torch.randint(1, 96, (2, 40), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        try:
            expected = peer(tokens).logits
        except Exception:  # a config that only the layers find impossible
            return None
        if not expected.isfinite().all():
            return None
        assert close(read(tokens), expected, read, tokens, peer), (folder / "config.json").read_text()
    return True


_FEW, _MANY = range(2), range(2, 40)
_SEEDS = pytest.mark.parametrize("seeds", [_FEW, pytest.param(_MANY, marks=pytest.mark.slow)], ids=["few", "many"])


@_ALL
@_SEEDS
def test_a_config_that_is_written_otherwise_is_read_alike(family: Family, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        folder, draw = tmp_path / f"{seed}", random.Random(f"{family.name}/same/{seed}")
        config, kind = _written(family, seed, folder)
        (folder / "config.json").write_text(json.dumps(same(config, family, kind, draw)))
        assert _compare(folder, seed), (folder / "config.json").read_text()


@_ALL
@_SEEDS
def test_a_config_that_says_something_else_is_never_read_as_another_model(family: Family, seeds: range, tmp_path: Path) -> None:
    outcomes = []
    for seed in seeds:
        folder, draw = tmp_path / f"{seed}", random.Random(f"{family.name}/other/{seed}")
        config, _ = _written(family, seed, folder)
        for number in range(30):
            if number >= (3 if seeds is _FEW else 10) and (seed != seeds[-1] or True in outcomes):
                break
            (folder / "config.json").write_text(json.dumps(other(config, draw)))
            outcomes.append(_compare(folder, seed))
    assert outcomes.count(True) > len(outcomes) // 20, "the test compares nothing"


_DERIVED = {"qk_head_dim", "max_window_layers"}  # from other keys that are written; layer_types are written out


@_ALL
def test_what_is_written_leaves_nothing_to_defaults(family: Family) -> None:
    """A reader with other defaults makes the same model of our config.json, also another version of transformers."""
    for seed in range(40):
        model = from_config(json.loads(random_config(family, seed).to_json_string()))
        written = to_config(model, model.rope, {})
        experts = {"n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "norm_topk_prob", "n_group",
                   "routed_scaling_factor", "topk_group", "moe_latent_size", "moe_shared_expert_intermediate_size",
                   } if model.moe is None else set()  # fmt: skip
        by_class = FAMILIES[written["architectures"][0]]
        extra = {key for key, declared in by_class.defaults.items() if isinstance(declared, keys.Extra) and key != "head_dim"}
        left = by_class.defaults.keys() - written.keys() - extra - _DERIVED - experts - set(by_class.omits)
        assert not left, (left, written)
        ropes = written.get("rope_parameters")
        kinds = [] if ropes is None else [ropes["full_attention"], ropes["sliding_attention"]] if by_class.sliding_rope_theta else [ropes]
        assert kinds or "rope_parameters" in by_class.omits
        for rope in kinds:
            assert by_class.rope_theta and "rope_theta" in rope and "rope_type" in rope
            assert "partial_rotary_factor" in rope or not by_class.has("partial RoPE")
        assert from_config(written) == model


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_the_interval_of_full_attention_says_what_the_kinds_of_layers_say(kind: str) -> None:
    """llama.cpp's converter reads `full_attention_interval` alone, and takes 4 where it is not written."""
    (family,) = [one for one in FAMILIES.values() if one.model_type == kind]
    seen = set()
    for seed in range(40):
        model = from_config(json.loads(random_config(family, seed).to_json_string()))
        written = to_config(model, model.rope, {})
        if "full_attention_interval" in written:
            seen.add(written["full_attention_interval"])
            assert from_config({key: value for key, value in written.items() if key != "layer_types"}).layer_types == model.layer_types
        else:
            assert "full_attention" in model.layer_types[:-1] or model.layer_types[-1] != "full_attention"
    assert seen - {4}, "the test compares nothing"
