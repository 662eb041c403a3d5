"""Hugging Face checkpoints: written, read, and compared with the library they are for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.checkpoint.save_plan import TensorSlice, local_slice
from lmworks.errors import UserError
from lmworks.export.names import carries_mtp, from_huggingface, from_interleaved, refuse_foreign, rotates, sources, to_huggingface
from lmworks.files import atomic_path, explain_damage, read_json, write_json
from lmworks.model import Transformer
from lmworks.model.router import Router
from lmworks.progress import bar
from lmworks.recipe.families.registry import family_in
from lmworks.recipe.loading.huggingface import from_config, to_config
from lmworks.recipe.schema.model import Model as Config

_SHARD_BYTES = 5 * 10**9
_LITTLE = 1 << 20  # numbers, for which it is not worth while to look twice
TOLERANCE = 2e-5
"""Largest difference of logits, relative to the largest logit, that still counts as equal in fp32. The two libraries add in another
order, which costs 5e-7 at 4 layers and grows with the root of their number; one wrong row of one expert costs more than 1e-4."""


@dataclass(frozen=True)
class Parity:
    """How an export compares with what was trained, in fp32 on the same tokens."""

    tokens: int
    max_difference: float
    relative: float
    same_choice: float


def write_model(model: Transformer, directory: Path, tokens: dict[str, Any], dtype: torch.dtype) -> None:
    """config.json, generation_config.json and safetensors (in files of at most 5 GB); `tokens` holds eos_token_id and pad_token_id."""
    from safetensors.torch import save_file

    config = to_config(model.config, model.rope, tokens) | {"dtype": str(dtype).removeprefix("torch.")}
    directory.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("head.weight", None)
    if not carries_mtp(model.config):
        state = {name: tensor for name, tensor in state.items() if not name.startswith("mtp.")}
    files = list(_split(state, dtype))
    index: dict[str, str] = {}
    total = 0
    with bar("huggingface", sum(tensor.numel() for tensor in state.values())) as progress:
        for number, names in enumerate(files, 1):
            file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            part = {key: state[key] for key in names}
            chosen = {name: _cast(name, tensor, dtype) for name, tensor in to_huggingface(part, model.config)}
            with atomic_path(directory / file) as aside:
                save_file(chosen, aside, metadata={"format": "pt"})
                aside.chmod(directory.stat().st_mode & 0o666)  # safetensors lets nobody else read it; a server may be somebody else
            index |= dict.fromkeys(chosen, file)
            total += sum(tensor.nbytes for tensor in chosen.values())
            progress.advance(sum(state[key].numel() for key in names))
    if len(files) > 1:
        write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    write_json(directory / "config.json", config)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # the selection bias decides near-ties: rounding it would choose other experts
    return tensor.detach().to("cpu", torch.float32 if name.endswith("e_score_correction_bias") else dtype).contiguous()


def _split(state: dict[str, Tensor], dtype: torch.dtype) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in state.items():
        if names and size + tensor.numel() * dtype.itemsize > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.numel() * dtype.itemsize
    yield names


@torch.no_grad()
def fill(directory: Path, state: Mapping[str, Tensor], model: Config) -> None:
    """Copy the weights of a Hugging Face checkpoint into `state`, tensors of `model` by our names, of which this rank may hold parts: only
    what it holds is read. Rows of the vocabulary, and layers of multi-token prediction, that the checkpoint lacks stay as they are.

    Raises `UserError` if the weights are not those of `model`.
    """
    with ExitStack() as stack:
        handles = {name: handle for handle in _open_all(directory, stack) for name in handle.keys()}  # noqa: SIM118
        config = read_json(directory / "config.json")
        family = family_in(config)
        with torch.device("meta"):
            refuse_foreign(handles, Transformer(model).state_dict(), model, family)
        interleaved = bool(config.get("rope_interleave", True))
        for name, tensor in state.items():
            ours = "embedding.weight" if name == "head.weight" and model.tie_word_embeddings else name
            part = local_slice(ours, tensor)
            for theirs, box in sources(part, model, family) if part is not None else ():
                if theirs in handles:
                    order = partial(from_interleaved, ours, model=model) if interleaved and rotates(ours, model) else None
                    _read(handles[theirs].get_slice(theirs), theirs, box, order)
                elif not name.startswith("mtp."):
                    raise UserError(f"{directory} has no tensor {theirs}; the config and the weights are of different models")


def _read(source: Any, theirs: str, box: TensorSlice, order: Callable[[Tensor], Tensor] | None) -> None:
    """Copy what of a tensor of theirs is in `box`; where its rows have another `order` there, the whole is read."""
    there = tuple(source.get_shape())
    fewer = box.name in ("embedding.weight", "head.weight") and there[0] < box.shape[0]
    if there[1:] != box.shape[1:] or (there != box.shape and not fewer):
        raise UserError(f"tensor {theirs} has shape {there}, but the config says {box.shape}")
    begin, count = box.offsets[0], max(0, min(box.sizes[0], there[0] - box.offsets[0]))
    places = (slice(begin, begin + count), *(slice(at, at + size) for at, size in zip(box.offsets[1:], box.sizes[1:], strict=True)))
    if count:
        box.values()[:count].copy_(order(source[:])[places] if order else source[places])


def read_model(directory: Path) -> Transformer:
    """Our model from a Hugging Face checkpoint; `UserError` if it is of a class or with options that we do not have."""
    directory = Path(directory)
    config = read_json(directory / "config.json")
    with explain_damage(directory / "config.json"):
        described = from_config(config)
    sizes = _sizes(directory)
    if described.mtp and not any(name.startswith(f"model.layers.{described.num_hidden_layers}.") for name in sizes):
        described = described.model_copy(update={"mtp": None})  # transformers leaves the layer behind, and its number in the config
    _refuse_empty_promises(described, sizes, directory)
    model = Transformer(described)
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        state.pop("head.weight", None)
    interleaved = bool(config.get("rope_interleave", True))
    from_huggingface(_tensors(directory), state, model.config, family_in(config), interleaved=interleaved)
    return model.eval()


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for handle in _open(directory):
        for name in handle.keys():  # noqa: SIM118
            yield name, handle.get_tensor(name)


def _sizes(directory: Path) -> dict[str, int]:
    """The numbers of each tensor, from the heads of the files."""
    return {name: math.prod(handle.get_slice(name).get_shape()) for handle in _open(directory) for name in handle.keys()}  # noqa: SIM118


def _refuse_empty_promises(described: Config, sizes: dict[str, int], directory: Path) -> None:
    """Raise `UserError` if the config describes far more weights than there are, before memory is taken for them. Whether each fits is
    seen when they are read."""
    there, wanted = sum(sizes.values()), None
    if (described.num_hidden_layers or 0) <= len(sizes) and (described.moe is None or described.moe.n_routed_experts <= len(sizes)):
        try:
            with torch.device("meta"):
                wanted = sum(tensor.numel() for tensor in Transformer(described).state_dict().values())
        except (RuntimeError, OverflowError, TypeError):  # more numbers than can be counted
            wanted = None
    if wanted is None or wanted > 2 * there + _LITTLE:
        raise UserError(f"{directory / 'config.json'} describes a model of other size than the {there:,} weights beside it; they belong to "
                        "different models")


def _open(directory: Path) -> Iterator[Any]:
    """The safetensors files, one at a time."""
    for file in files_of(directory):
        with ExitStack() as stack:
            yield _opened(file, stack)


def _open_all(directory: Path, stack: ExitStack) -> list[Any]:
    """The safetensors files, all open; they are mapped, not read."""
    return [_opened(file, stack) for file in files_of(directory)]


def files_of(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint; `UserError` if there are none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory} has no .safetensors file")
    return files


def _opened(file: Path, stack: ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except SafetensorError as error:
        raise UserError(f"{file} is damaged ({error}); export it again") from None


@torch.no_grad()
def compare(model: Transformer, directory: Path, tokens_BT: Tensor, dtype: torch.dtype) -> Parity:
    """Load the export in `transformers` and compare logits in fp32 with `model`, its weights rounded to the export's type.

    Two libraries add in another order, and now and then that lets a near-tie between two experts fall the other way, which is no
    fault and changes the logits. So our side chooses by the router logits that `transformers` computed: both take the same experts
    unless the selection itself differs.
    """
    theirs = _load_in_transformers(directory)
    ours = Transformer(model.config).eval()
    ours.set_rope(model.rope)
    ours.load_state_dict({name: t if name.endswith("router.bias") else t.to(dtype).float() for name, t in model.state_dict().items()})
    output = theirs(tokens_BT.cpu(), output_router_logits=True) if model.config.moe else theirs(tokens_BT.cpu())
    routers = [module for module in ours.layers.modules() if isinstance(module, Router)]
    for router, logits_NE in zip(routers, output.router_logits if routers else (), strict=True):
        router._select = _select_by(router, logits_NE.float())  # type: ignore[method-assign, assignment]
    expected, found = ours(tokens_BT.cpu()), output.logits
    difference = float((expected - found).abs().max())
    relative = difference / float(expected.abs().max())
    return Parity(tokens_BT.numel(), difference, relative, float((expected.argmax(-1) == found.argmax(-1)).float().mean()))


def _select_by(router: Router, logits_NE: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    select = router._select
    return lambda gates_NE, _: select(router.gates(logits_NE.view_as(gates_NE)), logits_NE.view_as(gates_NE))


def _load_in_transformers(directory: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("checking an export needs transformers: pip install 'lmworks[export]'") from None
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    except Exception as error:  # whatever it is, the export is not usable
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"transformers cannot load the export in {directory} ({reason}); delete it and export again") from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def require_parity(parity: Parity, directory: Path) -> None:
    """Raise `UserError` if the export does not compute what was trained (promise 8)."""
    if not parity.relative <= TOLERANCE:
        raise UserError(
            f"the export in {directory} differs from the trained model: logits by {parity.relative:.1e} of the largest, "
            f"over {TOLERANCE:.0e}; it is not usable, please report it with resolved.json"
        )


