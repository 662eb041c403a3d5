"""Writes Hugging Face checkpoints; `lmworks.weights.huggingface` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.io.files import atomic_path, write_json
from lmworks.model import Transformer
from lmworks.recipe.families.registry import family_of, to_config
from lmworks.recipe.schema.model import Model
from lmworks.recipe.weight_files import INDEX, ONE
from lmworks.ui.terminal import bar
from lmworks.weights.huggingface import open_all
from lmworks.weights.names import exports_mtp, to_huggingface
from lmworks.weights.stacked import stack, stored_together

_SHARD_BYTES = 5 * 10**9
_SELECTION_BIAS = ("e_score_correction_bias", "expert_bias")  # ends of its names in the classes


def write_model(model: Transformer, directory: Path, tokens: dict[str, Any], dtype: torch.dtype) -> None:
    """Write config.json and safetensors (in files of at most 5 GB); `tokens` has eos_token_id and pad_token_id."""
    from safetensors.torch import save_file

    config = to_config(model.config, model.rope, tokens) | {"dtype": str(dtype).removeprefix("torch.")}
    directory.mkdir(parents=True, exist_ok=True)
    state, family = _exported(model), family_of(model.config)
    files = list(_split(state, model.config, dtype))
    index: dict[str, str] = {}
    total = 0
    with bar("huggingface", sum(tensor.numel() for tensor in state.values())) as progress:
        for number, names in enumerate(files, 1):
            file = ONE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            part = {key: state[key] for key in names}
            named = {name: _cast(name, tensor, dtype) for name, tensor in to_huggingface(part, model.config)}
            chosen = dict(stack(named, family))
            with atomic_path(directory / file) as aside:
                save_file(chosen, aside, metadata={"format": "pt"})
                aside.chmod(directory.stat().st_mode & 0o666)  # safetensors makes it unreadable for others, such as a server's user
            index |= dict.fromkeys(chosen, file)
            total += sum(tensor.nbytes for tensor in chosen.values())
            progress.advance(sum(state[key].numel() for key in names))
    if len(files) > 1:
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
    write_json(directory / "config.json", config)


def _exported(model: Transformer) -> dict[str, Tensor]:
    """The tensors that a checkpoint holds, by our names."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("head.weight", None)
    if not exports_mtp(model.config):
        state = {name: tensor for name, tensor in state.items() if not name.startswith("mtp.")}
    return state


def unequal_tensors(model: Transformer, directory: Path, dtype: torch.dtype) -> list[str]:
    """Names of the tensors in the files of `write_model` that are not, bit for bit, those of `model`."""
    found = []
    with ExitStack() as stack:
        handles = {name: handle for handle in open_all(directory, stack).values() for name in handle.keys()}  # noqa: SIM118
        for name, tensor in to_huggingface(_exported(model), model.config):
            stored = handles.pop(name).get_tensor(name) if name in handles else None
            if stored is None or not torch.equal(stored, _cast(name, tensor, dtype)):
                found.append(name)
    return [*found, *handles]


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # not rounded: the selection bias decides near-ties between experts
    return tensor.detach().to("cpu", torch.float32 if name.endswith(_SELECTION_BIAS) else dtype).contiguous()


def _split(state: dict[str, Tensor], model: Model, dtype: torch.dtype) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for together in stored_together(state, model, family_of(model)):
        more = sum(state[name].numel() for name in together) * dtype.itemsize
        if names and size + more > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names += together
        size += more
    yield names


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the messages and progress bars of `transformers`, which is installed."""
    import transformers

    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
