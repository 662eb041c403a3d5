"""A Hugging Face checkpoint read by ranks that hold parts of a model: each reads its own, and together they have what one process reads."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from lmworks.errors import UserError
from lmworks.export import huggingface
from lmworks.export.huggingface import write_model
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.optim.groups import local
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.model import Model
from lmworks.weights.huggingface import load_weights, read_model
from parallel.parity import MODELS, recipe_of, whole
from rank_pool import RankPool
from small_config import small_config

_MODELS: dict[str, dict[str, Any]] = {
    "mla": MODELS["mla"], "moe": MODELS["moe"],
    "tied": MODELS["dense"] | {"tie_word_embeddings": True, "attention_bias": False, "rope": {"partial_rotary_factor": 1.0}},
}  # fmt: skip


def _filled(layout: dict[str, Any], kind: str, folder: Path) -> dict[str, np.ndarray]:
    recipe = recipe_of("dense").model_copy(update={"model": Model.model_validate(_MODELS[kind])})
    ranks = Ranks(Layout(**layout))
    model = ParallelModel(build(recipe, ranks, torch.device("cpu")), ranks)
    load_weights(folder, model.state_dict(), recipe.model)
    return {name: whole(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ({"tp": 2}, "mla"), ({"dp_shard": 2, "ep": 2, "zero": 3}, "moe"), ({"pp": 2}, "tied"),
        pytest.param({"dp_shard": 3, "zero": 3}, "mla", marks=pytest.mark.slow),
        pytest.param({"pp": 2, "tp": 2}, "moe", marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_read_what_one_process_reads(ranks: RankPool, tmp_path: Path, layout: dict[str, Any], kind: str) -> None:
    write_model(initialize(Transformer(Model.model_validate(_MODELS[kind])), 7), tmp_path, {}, torch.float32)
    expected = read_model(tmp_path).state_dict()
    world = int(np.prod([size for axis, size in layout.items() if axis in ("tp", "pp", "dp_shard")]))
    found = ranks.run(_filled, world, layout, kind, tmp_path)
    assert {name for one in found for name in one} == expected.keys()
    for one in found:
        for name, value in one.items():
            np.testing.assert_array_equal(value, expected[name].numpy(), err_msg=name)


_LARGE = _MODELS["tied"] | {
    "tie_word_embeddings": False, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 2048, "head_dim": 64,
}  # fmt: skip


class _Measured(dict[str, torch.Tensor]):
    """A state that notes this process's own memory (mapped pages of files are the system's, and not counted) before each tensor."""

    peak = 0

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        for item in super().items():
            self.peak = max(self.peak, _own_memory())
            yield item


def _own_memory() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _growth(layout: dict[str, Any], folder: Path, reader: Callable[..., None]) -> tuple[int, int]:
    """By how many bytes this rank grew while it loaded, and the bytes of its parts, whose memory it has before."""
    recipe = recipe_of("dense").model_copy(update={"model": Model.model_validate(_LARGE)})
    ranks = Ranks(Layout(**layout))
    model = ParallelModel(build(recipe, ranks, torch.device("cpu")), ranks)
    state = _Measured(model.state_dict())
    load_weights(folder, state, recipe.model)  # imports what it needs
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # freed memory that is taken again would not be seen
    before, state.peak = _own_memory(), 0
    reader(folder, state, recipe.model)
    return state.peak - before, sum(local(value).nbytes for value in state.values())


def _load_all(folder: Path, state: dict[str, torch.Tensor], model: Model) -> None:
    """What a rank must not do."""
    whole = [load(file.read_bytes()) for file in sorted(folder.glob("*.safetensors"))]
    load_weights(folder, state, model)
    assert whole


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_no_rank_holds_more_than_its_part(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks has its half of all files and copies of one tensor at a time; that the measurement would see a rank that reads
    everything first is shown with one that does."""
    monkeypatch.setattr(huggingface, "_SHARD_BYTES", 1 << 22)
    write_model(initialize(Transformer(Model.model_validate(_LARGE)), 7), tmp_path, {}, torch.float32)
    files = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(files) > 2
    layout = {"dp_shard": 2, "zero": 3}
    for grown, own in ranks.run(_growth, 2, layout, tmp_path, load_weights):
        assert own == pytest.approx(sum(files) / 2, rel=0.01)
        assert grown < 0.25 * sum(files), (grown, files)
    for grown, _ in ranks.run(_growth, 2, layout, tmp_path, _load_all):
        assert grown > 0.5 * sum(files), (grown, files)


def test_rows_of_the_vocabulary_may_be_more_and_other_weights_are_refused(tmp_path: Path) -> None:
    small = small_config()
    source = initialize(Transformer(Model.model_validate(small)), 7)
    write_model(source, tmp_path, {}, torch.float32)
    config = Model.model_validate(small | {"vocab_size": 70})
    larger = initialize(Transformer(config), 1)
    load_weights(tmp_path, larger.state_dict(), config, extend=True)
    assert torch.equal(larger.embedding.weight[:64], source.embedding.weight) and torch.equal(larger.head.weight[:64], source.head.weight)
    for table, given in ((larger.embedding.weight, source.embedding.weight), (larger.head.weight, source.head.weight)):
        torch.testing.assert_close(table[64:], given.mean(0).expand(6, -1))
    load_weights(tmp_path, larger.state_dict(), config, extend=True, added=range(60, 62))
    assert torch.equal(larger.embedding.weight[62:64], source.embedding.weight[62:]), "rows that no token uses stay"
    torch.testing.assert_close(larger.embedding.weight[[60, 61, 64]], source.embedding.weight[:60].mean(0).expand(3, -1))
    for change, reason in (
        ({"intermediate_size": 56}, "has shape"), ({"vocab_size": 60}, "has shape"), ({"num_hidden_layers": 3}, "has no tensor"),
        ({"num_hidden_layers": 1}, "does not belong"), ({"use_qk_norm": True}, "has no tensor"),
    ):  # fmt: skip
        config = Model.model_validate(small | change)
        with pytest.raises(UserError, match=reason):
            load_weights(tmp_path, Transformer(config).state_dict(), config, extend=True)


def test_a_config_of_a_larger_model_is_refused_before_there_is_one(tmp_path: Path) -> None:
    write_model(initialize(Transformer(Model.model_validate(_MODELS["tied"])), 7), tmp_path, {}, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 100_000}))
    with pytest.raises(UserError, match=r"config\.json does not describe the .* weights beside it"):
        read_model(tmp_path)
