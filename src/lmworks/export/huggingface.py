"""Writes Hugging Face checkpoints, and compares an export with `transformers`; `lmworks.weights.huggingface` reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.files import atomic_path, final_name, write_json
from lmworks.model import Transformer
from lmworks.model.router import Router
from lmworks.progress import bar
from lmworks.recipe.loading.huggingface import to_config
from lmworks.weights.names import exports_mtp, to_huggingface

_SHARD_BYTES = 5 * 10**9
TOLERANCE = 2e-5
"""Largest difference of logits, relative to the largest logit, that still counts as equal in fp32. The two libraries sum in different
orders, which costs 5e-7 with 4 layers and grows with the square root of their number; one wrong row of one expert costs more than 1e-4."""


@dataclass(frozen=True)
class Parity:
    """The difference between an export and the trained model, in fp32 on the same tokens."""

    tokens: int
    max_difference: float
    relative: float
    same_choice: float


def write_model(model: Transformer, directory: Path, tokens: dict[str, Any], dtype: torch.dtype) -> None:
    """Write config.json and safetensors (in files of at most 5 GB); `tokens` has eos_token_id and pad_token_id."""
    from safetensors.torch import save_file

    config = to_config(model.config, model.rope, tokens) | {"dtype": str(dtype).removeprefix("torch.")}
    directory.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("head.weight", None)
    if not exports_mtp(model.config):
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
                aside.chmod(directory.stat().st_mode & 0o666)  # safetensors makes it unreadable for others, such as a server's user
            index |= dict.fromkeys(chosen, file)
            total += sum(tensor.nbytes for tensor in chosen.values())
            progress.advance(sum(state[key].numel() for key in names))
    if len(files) > 1:
        write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    write_json(directory / "config.json", config)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # not rounded: the selection bias decides near-ties between experts
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
def compare(model: Transformer, directory: Path, tokens_BT: Tensor, dtype: torch.dtype) -> Parity:
    """Load the export in `transformers` and compare logits in fp32 with `model`, its weights rounded to the export's dtype.

    The two libraries sum in different orders. Occasionally this decides a near-tie between two experts differently, which changes the
    logits but is not an error. Our model therefore selects experts by the router logits of `transformers`: both use the same experts
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
    with quiet_transformers():
        try:
            return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        except Exception as error:  # any failure means that the export is unusable
            reason = final_name(" ".join(f"{type(error).__name__}: {error}".split()))
            raise UserError(
                f"transformers cannot load the export in {final_name(directory)} ({reason}), so it is not kept: export again"
            ) from error


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


def require_parity(parity: Parity, directory: Path) -> None:
    """Raise `UserError` if the export is not equal to the trained model (promise 8)."""
    if not parity.relative <= TOLERANCE:
        raise UserError(
            f"the export in {final_name(directory)} differs from the trained model: logits by {parity.relative:.1e} of the largest, "
            f"more than {TOLERANCE:.0e}; so it is not kept; please report this with resolved.json"
        )
