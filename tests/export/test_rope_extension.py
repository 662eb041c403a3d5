"""A context that is extended at export: config.json, GGUF and what `open_model` computes with `rope` are one model, for each method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.errors import UserError
from lmworks.export.export import check, export
from lmworks.io.files import read_json
from lmworks.recipe.gguf_header import read_header
from lmworks.recipe.schema.artifacts import RopeExtension
from lmworks.weights.open import open_model

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'lmworks[export]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'lmworks[export]'")
TYPES = {"linear": ("linear", 2.0), "ntk": ("default", None), "yarn": ("yarn", 2.0), "llama3": ("llama3", 2.0)}


@pytest.mark.parametrize("method", [pytest.param(one, marks=() if one in ("yarn", "ntk") else pytest.mark.slow) for one in TYPES])
def test_exports_are_what_is_served(make_run: Callable[..., Any], tmp_path: Path, method: str) -> None:
    run, extension = make_run("llama"), RopeExtension(scaling=method, factor=2)  # type: ignore[arg-type]
    recipe = run.recipe.model_copy(update={"export": run.recipe.export.model_copy(update={"rope": extension, "gguf": True})})
    check(recipe)
    export(recipe, run.directory, tmp_path)  # transformers has computed the same logits
    config = read_json(tmp_path / "huggingface" / "config.json")
    kind, factor = TYPES[method]
    assert config["max_position_embeddings"] == 512 and config["rope_parameters"]["rope_type"] == kind
    assert config["rope_parameters"].get("factor") == factor

    plain, served = open_model(run.directory, "cpu", as_stored=True), open_model(run.directory, "cpu", as_stored=True, rope=extension)
    plain.model.compute_dtype = served.model.compute_dtype = torch.float32  # the run computes in bf16 where the processor does
    assert served.context == 512 and plain.context < 512
    ids = torch.randint(0, 600, (1, 400), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, before = served.model(ids), plain.model(ids)
        assert (expected - before).abs().max() > 2e-4
        for path in (tmp_path / "huggingface", tmp_path / "gguf" / "model.gguf"):
            read = open_model(path, "cpu")
            assert read.context == 512
            torch.testing.assert_close(read.model(ids), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    keys = read_header(tmp_path / "gguf" / "model.gguf").metadata
    assert keys["llama.context_length"] == 512
    if method == "yarn":
        assert (keys["llama.rope.scaling.type"], keys["llama.rope.scaling.factor"]) == ("yarn", 2.0)
        assert keys["llama.rope.scaling.original_context_length"] == 256


def test_what_cannot_be_extended(make_run: Callable[..., Any]) -> None:
    for name, says in (("llama-yarn", "stretched already"),):
        run = make_run(name)
        with pytest.raises(UserError, match=says):
            open_model(run.directory, "cpu", rope=RopeExtension(factor=2))
        with pytest.raises(UserError, match=says):
            check(run.recipe.model_copy(update={"export": run.recipe.export.model_copy(update={"rope": RopeExtension(factor=2)})}))
    with pytest.raises(UserError, match="METHOD:FACTOR"):
        RopeExtension.parse("yarn")
    with pytest.raises(UserError, match="METHOD:FACTOR"):
        RopeExtension.parse("yarn:0.5")
