"""Which files of a Hugging Face folder are read: those that `transformers` reads, whatever lies beside them."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from base_models import write_model
from lmworks.checkpoint.communicator import Communicator
from lmworks.deploy.deploy import plan_deployment
from lmworks.deploy.sizing import Hardware
from lmworks.deploy.source import open_source
from lmworks.errors import UserError
from lmworks.handover.slime import _place_model
from lmworks.io.files import read_json, write_json
from lmworks.recipe import hub
from lmworks.recipe.weight_files import INDEX, ONE, left_aside, safetensors_of
from lmworks.recipe.weights import find_weights
from lmworks.weights import reference
from lmworks.weights.huggingface import load_weights, map_weights, read_model

PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "base", 64)
    return tmp_path / "base"


def split(folder: Path, names: tuple[str, str] = PARTS, index: bool = True) -> dict[str, torch.Tensor]:
    """The model of a folder in two files; returns its tensors."""
    tensors = load_file(folder / ONE)
    order = sorted(tensors)
    (folder / ONE).unlink()
    parts = {names[0]: order[::2], names[1]: order[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    if index:
        write_json(folder / INDEX, {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}})
    return tensors


def _renamed(folder: Path, change: Any) -> None:
    """The model of a folder with other names of its tensors; None leaves one out."""
    tensors = {change(name): tensor for name, tensor in load_file(folder / ONE).items()}
    save_file({name: tensor for name, tensor in tensors.items() if name}, folder / ONE, {"format": "pt"})


def test_a_tied_embedding_under_the_name_of_the_head(tmp_path: Path) -> None:
    write_model(tmp_path, 64, tie_word_embeddings=True)
    expected = read_model(tmp_path).state_dict()
    _renamed(tmp_path, lambda name: "lm_head.weight" if "embed_tokens" in name else name)
    model = find_weights(tmp_path, needs_tokenizer=False).model
    assert "model.embed_tokens.weight" in map_weights(tmp_path, model) and same(tmp_path)
    torch.testing.assert_close(read_model(tmp_path).state_dict(), expected, rtol=0, atol=0)
    write_json(tmp_path / "config.json", read_json(tmp_path / "config.json") | {"tie_word_embeddings": False})
    with pytest.raises(UserError, match=r"has no tensor model\.embed_tokens\.weight"):
        read_model(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_was_saved_without_its_head(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModel

    write_model(tmp_path / "whole", 64, tie_word_embeddings=tied)
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "saved")
    assert read_json(tmp_path / "saved" / "config.json")["architectures"] == ["LlamaModel"]
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "saved" / ONE))
    model = find_weights(tmp_path / "saved", needs_tokenizer=False).model
    if tied:
        assert map_weights(tmp_path / "saved", model).keys() == map_weights(tmp_path / "whole", model).keys()
        torch.testing.assert_close(read_model(tmp_path / "saved").state_dict(), read_model(tmp_path / "whole").state_dict(), rtol=0, atol=0)
        return
    with pytest.raises(UserError, match=r"has no tensor lm_head\.weight"):
        map_weights(tmp_path / "saved", model)


def test_weights_that_are_no_numbers_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors, name = load_file(folder / ONE), "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 3] = float("nan")
    save_file(tensors, folder / ONE, {"format": "pt"})
    model = read_model(folder)
    assert f"tensor {name} has weights that are not numbers (NaN)" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UserError, match=r"up_proj\.weight has weights that are not numbers \(NaN\); the files are damaged"):
        load_weights(folder, model.state_dict(), model.config, extend=True)


def others(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor + 1 for name, tensor in load_file(folder / ONE).items()}


def same(folder: Path) -> bool:
    """Whether what is read is what transformers loads."""
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(1, 30)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        return torch.allclose(read_model(folder)(tokens), theirs, atol=1e-4)


@pytest.mark.parametrize("name", ["model_ema.safetensors", "original.safetensors", "consolidated.safetensors", "adapter_model.safetensors"])
@pytest.mark.parametrize("index", [False, True])
def test_what_lies_beside_the_weights_is_named_and_not_read(
    folder: Path, name: str, index: bool, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    beside = others(folder) if "model" in name else {"tok_embeddings.weight": torch.ones(2)}
    if index:
        split(folder)
    save_file(beside, folder / name)
    assert same(folder)
    map_weights(folder, find_weights(folder, needs_tokenizer=False).model)
    assert " ".join(capsys.readouterr().err.split()).count(f"not read, as in transformers: {name}") == 1
    assert left_aside(folder) == [name]


def test_shards_of_an_earlier_split_are_not_read(folder: Path) -> None:
    stale = others(folder)
    split(folder)
    for at, name in enumerate(stale):
        save_file({name: stale[name]}, folder / f"model-{at + 1:05d}-of-{len(stale):05d}.safetensors")
    assert same(folder) and len(left_aside(folder)) == len(stale)


def test_one_file_comes_before_an_index_that_does_not_name_it(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "other")
    write_model(folder.parent / "other", 64, seed=5)
    split(folder.parent / "other")
    for name in (*PARTS, INDEX):
        shutil.copy(folder.parent / "other" / name, folder)
    assert same(folder) and safetensors_of(folder) == [folder / ONE]


def test_an_index_may_name_the_one_file_among_others(folder: Path) -> None:
    tensors = split(folder, (ONE, "model-mtp.safetensors"))
    assert {file.name for file in safetensors_of(folder)} == {ONE, "model-mtp.safetensors"}
    assert len(map_weights(folder, read_model(folder).config)) == len(tensors)


def test_a_tensor_that_two_files_have_is_refused(folder: Path) -> None:
    split(folder, index=False)
    read_model(folder)
    shutil.copy(folder / PARTS[0], folder / "model-00001-of-00004.safetensors")
    with pytest.raises(UserError, match=r"model-00001-of-00004\.safetensors and .*model-00001-of-00002\.safetensors both have the tensor "):
        read_model(folder)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("../other/model.safetensors", r"it names '\.\./other/model\.safetensors', which is no file in its folder"),
        ("part/model.safetensors", r"no file in its folder\); .* put the files of weights beside it, and only their names into it"),
        ("/etc/model.safetensors", "which is no file in its folder"), ("..", "which is no file in its folder"),
        (7, "which is no file in its folder"), (None, "which is no file in its folder"),
        ("gone.safetensors", r"gone\.safetensors does not exist, which model\.safetensors\.index\.json names"),
    ],
)  # fmt: skip
def test_an_index_names_files_of_its_folder(folder: Path, named: Any, message: str) -> None:
    split(folder)
    shutil.copytree(folder, folder.parent / "other")
    write_json(folder / INDEX, {"weight_map": {"lm_head.weight": named, "model.norm.weight": PARTS[0]}})
    with pytest.raises(UserError, match=message):
        read_model(folder)
    write_json(folder / INDEX, {"weight_map": {}})
    with pytest.raises(UserError, match="it names no files"):
        read_model(folder)


def test_an_adapter_that_transformers_would_add_is_refused(folder: Path) -> None:
    write_json(folder / "adapter_config.json", {"peft_type": "LORA"})
    with pytest.raises(UserError, match=r"adapter_config\.json is of an adapter, which transformers would add"):
        read_model(folder)


def test_a_run_whose_base_model_got_other_files_is_refused(folder: Path) -> None:
    split(folder)
    checkpoint, about = folder.parent / "run" / "checkpoints" / "step-00000000", reference.describe(find_weights(folder, False))
    assert reference.find(checkpoint, about).path == folder
    save_file(load_file(folder / PARTS[0]), folder / ONE)
    with pytest.raises(UserError, match=r"is read from config\.json, model\.safetensors now, and .*run began with .*model-00002"):
        reference.find(checkpoint, about)


class _Threads(Communicator):
    """One rank of several that are threads of this process."""

    def __init__(self, rank: int, meeting: threading.Barrier, said: list[Any]) -> None:
        super().__init__()
        self.rank, self.size, self._meeting, self._said = rank, len(said), meeting, said

    def all_gather(self, value: Any) -> list[Any]:
        self._said[self.rank] = value
        self._meeting.wait(timeout=60)
        values = list(self._said)
        self._meeting.wait(timeout=60)
        return values


def test_the_files_of_a_base_model_are_hashed_by_all_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split(folder)
    checkpoint, about = folder.parent / "run" / "checkpoints" / "step-00000000", reference.describe(find_weights(folder, False))
    hashed: list[tuple[str, int]] = []
    meeting, said, hash_of = threading.Barrier(2), [None, None], reference.hash_of
    own = threading.local()

    def recorded(file: Path) -> str:
        hashed.append((file.name, own.rank))
        return hash_of(file)

    def find(rank: int) -> Path:
        own.rank = rank
        return reference.find(checkpoint, about, _Threads(rank, meeting, said)).path

    monkeypatch.setattr(reference, "hash_of", recorded)
    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(find, range(2))) == [folder, folder]
        assert sorted(name for name, _ in hashed) == sorted(about["blake3"]) and {rank for _, rank in hashed} == {0, 1}
        for name in about["blake3"]:  # whichever rank hashes it, all refuse
            content = (folder / name).read_bytes()
            (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            failures = [one.exception(timeout=60) for one in [ranks.submit(find, rank) for rank in range(2)]]
            assert all(f"{folder / name} is not the file that" in str(failure) for failure in failures)
            (folder / name).write_bytes(content)


def test_a_download_that_was_cut_off_is_not_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split(folder)
    (folder / PARTS[1]).rename(folder / "later")
    asked: list[bool] = []

    def snapshot(*_: object, local_files_only: bool = False, **__: object) -> str:
        asked.append(local_files_only)
        if not local_files_only:
            (folder / "later").rename(folder / PARTS[1])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert hub.folder(hub.HubModel("someone/base", "main", "0" * 40)) == folder and asked == [True, False]


def test_an_engine_that_would_read_every_file_is_not_deployed_with_others(folder: Path) -> None:
    save_file(others(folder), folder / "model_ema.safetensors")
    source = open_source(folder)
    assert source.weight_bytes == (folder / ONE).stat().st_size
    hardware = Hardware("h100", 1, 80e9)
    with pytest.raises(UserError, match=r"vllm would read model_ema\.safetensors too, which are no weights of this model"):
        plan_deployment(source, "vllm", "balanced", hardware)
    plan_deployment(source, "lmworks", "balanced", hardware)


def test_slime_gets_the_files_of_the_model_alone(folder: Path) -> None:
    save_file(others(folder), folder / "model_ema.safetensors")
    _place_model(folder, folder.parent / "target")
    assert {path.name for path in folder.iterdir()} - {path.name for path in (folder.parent / "target").iterdir()} == {
        "model_ema.safetensors"
    }
