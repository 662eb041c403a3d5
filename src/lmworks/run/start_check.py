"""Compares the first loss of a base model with that of `transformers`, before anything is trained.

A wrong name, a transposed matrix or other rotary positions make a model that still trains, from a worse start. The loss of the weights as
they were loaded into the layout of the run, on the same tokens, shows them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmworks import machine
from lmworks.checkpoint.communicator import Communicator
from lmworks.errors import UserError
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.progress import console
from lmworks.recipe.derivation.parameters import count_parameters
from lmworks.recipe.loading.weights import Weights
from lmworks.shards.format.labels import IGNORE
from lmworks.shards.read.batch import Batch

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest relative difference of the losses, by the precision of our activations; theirs are fp32. Two fp32 libraries sum in different
orders, which costs 1e-6; rounding to bf16 costs 1e-3. One wrong matrix changes the loss by more than a tenth."""
_TOKENS = 128
_HEADROOM = 1.3  # of memory, relative to the fp32 weights, for loading and for activations


def compare_first_loss(start: Weights, model: ParallelModel, communicator: Communicator, seed: int, added: range) -> dict[str, Any]:
    """The loss of `model` beside that of `transformers` on the same random tokens, or why it was not compared; called on all ranks.

    `added`: ids of added tokens, whose rows are made in `transformers`, too, as are those of a larger vocabulary. Raises `UserError` on all
    ranks if the losses differ by more than `TOLERANCES`.
    """
    vocabulary = model.config.vocab_size
    assert vocabulary
    length = min(_TOKENS, int(start.model.max_position_embeddings or _TOKENS))
    rows = model.ranks.size("dp")
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (rows, length), dtype=np.int32)
    labels = np.concatenate([tokens[:, 1:], np.full((rows, 1), IGNORE, np.int32)], axis=1)
    batch = Batch(tokens, labels, np.arange(0, rows * length + 1, length, dtype=np.int32), 0, 0)
    was_training = model.training
    model.eval()
    try:
        ours = model.summed_cross_entropy(batch) / batch.valid_tokens
    finally:
        model.train(was_training)
    ask = lambda: _their_loss(start, tokens, vocabulary, added) if communicator.is_first else ""  # noqa: E731
    theirs = communicator.broadcast(communicator.run_on_all(ask))
    if isinstance(theirs, str):
        if communicator.is_first:
            console.print(f"first loss {ours:.4f}, not compared with transformers: {theirs}", style="yellow")
        return {"loss": ours, "not_compared": theirs}
    difference, tolerance = abs(ours - theirs) / abs(theirs), TOLERANCES[model.compute_dtype]
    if not difference <= tolerance:
        raise UserError(
            f"the first loss of {start.path} is {ours:.4f} here and {theirs:.4f} in transformers on the same {tokens.size} tokens; the "
            "weights are not read as what they are, so nothing was trained; please report this with config.json"
        )
    if communicator.is_first:
        console.print(f"first loss {ours:.4f}, in transformers {theirs:.4f}: equal to {difference:.0e}", style="dim")
    precision = str(model.compute_dtype).removeprefix("torch.")
    return {"loss": ours, "transformers": theirs, "difference": difference, "tokens": int(tokens.size), "precision": precision}


def _their_loss(start: Weights, tokens: np.ndarray, vocabulary: int, added: range) -> float | str:
    """The mean loss per token in `transformers`, in fp32 on the CPU, or why it cannot be computed."""
    needed, free = _HEADROOM * 4 * count_parameters(start.model), machine.available_memory()
    if needed > free:
        return f"its fp32 weights need {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free"
    try:
        import transformers
    except ImportError:
        return "it is not installed (pip install 'lmworks[export]')"
    from lmworks.export.huggingface import quiet_transformers

    with quiet_transformers():
        try:
            theirs = transformers.AutoModelForCausalLM.from_pretrained(Path(start.path), dtype=torch.float32).eval()
        except Exception as error:  # it raises what its dependencies raise
            return " ".join(f"it cannot load the weights ({type(error).__name__}: {error})".split())[:300]
    _add_rows(theirs, vocabulary, added)
    tokens_BT = torch.from_numpy(tokens).long()
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(theirs(row[None]).logits[0, :-1].float(), row[1:]) for row in tokens_BT]
    loss = float(torch.stack(losses).mean())
    return loss if math.isfinite(loss) else f"its loss is {loss}"


@torch.no_grad()
def _add_rows(theirs: Any, vocabulary: int, added: range) -> None:
    """Give the rows of new tokens the mean of the others, as `lmworks.export.huggingface.load_weights` does."""
    before = theirs.get_input_embeddings().weight.shape[0]
    rows = [*added, *range(before, vocabulary)]
    if not rows:
        return
    if vocabulary > before:
        theirs.resize_token_embeddings(vocabulary, mean_resizing=False)
    for table in (theirs.get_input_embeddings(), theirs.get_output_embeddings()):
        table.weight[rows] = table.weight[: min([before, *added[:1]])].double().mean(0).float()
