"""Statistics of each layer (`layers/...`, every `metrics.detail_every`, and when `detail_lines.py` says so), from hooks that are registered
for one forward pass.

Shapes: B batch, H heads, K key/value heads, T queries, S keys, C head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lmworks.model.transfers import to_host
from lmworks.model.transformer import Block
from lmworks.optim.groups import local, local_grad, shards
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.shards.batch import Batch
from lmworks.watch.monitors import tensors_in

_STATISTICS = ("activation_rms", "attention_logit_max", "grad_norm", "update_ratio")


_SAMPLED = 1 << 18  # elements of a tensor of a rank, from which its update is estimated: to 0.2%, for independent elements
_SHORT = 1024  # tokens of the sequence that a sampled pass is over


class LayerStatistics:
    """The statistics of one step. Construct before the update, call `metrics` after it; holds a copy of the weights in between.

    Without `whole`, it needs little memory and time, whatever the model and its sequences: it copies evenly spaced elements of each tensor,
    1 MB at most, from which it estimates the updates, and its forward pass is over the beginning of one sequence.

    Collective. Activations and attention scores are those of the sequences of rank 0, gradients and updates those of all ranks.
    """

    def __init__(self, model: ParallelModel, whole: bool = True) -> None:
        self._model, self._whole = model, whole
        self._blocks = {
            int(name.split(".")[1]): block
            for part in model.parts for name, block in part.named_modules() if isinstance(block, Block) and name.startswith("layers.")
        }  # fmt: skip
        model.release()  # a forward pass without a backward pass, as of a validation, leaves gathered weights in the places of a rank's own
        self._before = {name: self._part(weight).clone() for name, weight in model.named_parameters()}
        self._names = {id(weight): name for name, weight in model.named_parameters()}

    @torch.no_grad()
    def metrics(self, batch: Batch) -> dict[str, float]:
        """`layers/...` of this step, and norms of the whole model. Activations and scores come from a forward pass in evaluation mode over
        some sequences of `batch`, this rank's share of the step."""
        model, layers = self._model, self._model.config.num_hidden_layers
        assert layers
        seen = observe_pass(model, batch) if self._whole else observe_pass(model, beginning(batch, _SHORT), rows=1)
        # the last column: squares of the weights
        found = torch.zeros(layers, len(_STATISTICS) + 1, dtype=torch.float64, device=model.device)
        activations, logits = seen.activations(), seen.logits()
        for layer, block in self._blocks.items():
            if model.ranks.rank("weights") == 0:
                squares, count = activations.get(str(layer), (0.0, 1))
                found[layer, 0], found[layer, 1] = squares / count, logits.get(str(layer), 0.0)
            for weight in block.parameters():
                before = self._before[self._names[id(weight)]]
                share = shards(weight) / model.ranks.size("weights")  # each rank with the same part counts for some of it
                grad = local_grad(weight)
                if grad is not None:
                    found[layer, 2] += share * _square(grad)
                share *= local(weight).numel() / max(1, before.numel())  # what is sampled stands for all
                found[layer, 3] += share * _square(self._part(weight) - before)
                found[layer, 4] += share * _square(before)
        found = model.ranks.all_reduce(model.ranks.all_reduce(found, "weights"), "pp")
        found, sums = to_host(found, self._sums())
        columns = (found[:, 0].sqrt(), found[:, 1], found[:, 2].sqrt(), (found[:, 3] / found[:, 4].clamp_min(1e-30)).sqrt())
        named = list(zip(_STATISTICS, columns, strict=True))
        update, before, norm, same, trained = sums.tolist()
        values = {"optim/weight_norm": norm**0.5, "optim/update_ratio": (update / max(before, 1e-30)) ** 0.5}
        values |= {"optim/unchanged_weights": same / trained} if trained else {}
        return values | {f"layers/{layer}/{name}": float(column[layer]) for layer in range(layers) for name, column in named}

    def _part(self, weight: Tensor) -> Tensor:
        """The elements of a tensor that are compared: all, or evenly spaced ones; a view."""
        flat = local(weight).detach().reshape(-1)
        return flat if self._whole else flat[:: max(1, -(-flat.numel() // _SAMPLED))]

    def _sums(self) -> Tensor:
        """Of the whole model: squares of the update, of the weights before it and of those after it; trained weights that are as before to
        the bit, and all trained weights. (5,) fp64 on the device."""
        model, held = self._model, {id(duplicate) for duplicate in self._model.duplicates}
        sums = torch.zeros(5, dtype=torch.float64, device=model.device)
        for name, weight in model.named_parameters():
            if id(weight) in held:
                continue
            before, now = self._before[name], self._part(weight)
            share, count = shards(weight) / model.ranks.size("weights"), local(weight).numel()
            of_part = share * count / max(1, before.numel())
            sums[0] += of_part * _square(now - before)
            sums[1] += of_part * _square(before)
            sums[2] += share * _square(local(weight).detach())
            if weight.requires_grad:
                sums[3] += of_part * (now == before).sum()
                sums[4] += share * count
        return model.ranks.all_reduce(model.ranks.all_reduce(sums, "weights"), "pp")


def _square(tensor: Tensor) -> Tensor:
    """The sum of squares, without a copy of the tensor in another type: row by row, as torch adds up a whole tensor in fp32."""
    if tensor.numel() == 0:
        return tensor.new_zeros((), dtype=torch.float64)
    rows = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32) if tensor.ndim > 1 else tensor
    return rows.double().square().sum()


def beginning(batch: Batch, length: int) -> Batch:
    """The first `length` tokens of each row; the whole batch if its rows are no longer."""
    rows, whole = batch.tokens.shape
    if whole <= length:
        return batch
    row, place = np.divmod(batch.cu_seqlens[:-1], whole)
    starts = (row * length + place)[place < length]
    return Batch(
        batch.tokens[:, :length], batch.labels[:, :length], np.append(starts, rows * length).astype(np.int32), batch.phase, batch.step,
        weights=None if batch.weights is None else batch.weights[:, :length],
    )  # fmt: skip


def observe_pass(model: ParallelModel, batch: Batch, rows: int = 4) -> ActivationStatistics:
    """Statistics of a forward pass in evaluation mode over `rows` sequences of a rank's share of a batch."""
    blocks = {
        name.removeprefix("layers."): block for part in model.parts for name, block in part.named_modules() if isinstance(block, Block)
    }
    attention = {name: block.attention for name, block in blocks.items() if block.attention is not None}
    training = model.training
    model.eval()
    try:
        with record_activations(blocks, attention) as seen:
            model.summed_cross_entropy_on_device(batch.rows(0, min(rows * model.ranks.size("dp"), len(batch.tokens))))
    finally:
        model.train(training)
        model.release()
    return seen


class ActivationStatistics:
    """Sums over the activations and attention scores of a forward pass. Values stay on the device until they are read."""

    def __init__(self) -> None:
        self._squares: dict[str, list[Tensor]] = {}
        self._counts: dict[str, int] = {}
        self._logits: dict[str, list[Tensor]] = {}

    def activations(self) -> dict[str, tuple[Tensor, int]]:
        """By module, the sum of squares of its outputs and how many there were."""
        return {name: (torch.stack(squares).sum(), self._counts[name]) for name, squares in self._squares.items()}

    def logits(self) -> dict[str, Tensor]:
        """By attention, the largest score before the softmax."""
        return {name: torch.stack(largest).max() for name, largest in self._logits.items()}

    def output(self, name: str, output: Any) -> None:
        tensor = next(tensors_in(output), None)
        if tensor is None or not tensor.is_floating_point():
            return
        values = tensor.detach()
        self._squares.setdefault(name, []).append(values.double().square().sum())
        self._counts[name] = self._counts.get(name, 0) + values.numel()

    def scores(self, name: str, query_BHTC: Tensor, key_BKSC: Tensor, visible: Any) -> None:
        key, mask = (key_BKSC, None) if visible is None else (visible.whole(key_BKSC.detach()), visible.dense())
        largest = largest_score(query_BHTC.detach(), key.detach(), mask)
        self._logits.setdefault(name, []).append(largest)


@contextmanager
def record_activations(modules: Mapping[str, nn.Module], attentions: Mapping[str, nn.Module]) -> Iterator[ActivationStatistics]:
    """Within the block, record the outputs of `modules` and the scores of `attentions`, which call the functions of `model.attention`.

    Compiled code skips hooks inside it: use this in evaluation mode, where the model is eager.
    """
    seen, inside = ActivationStatistics(), [""]

    def enter(name: str) -> Callable[..., None]:
        return lambda module, inputs: inside.__setitem__(0, name)

    handles = [module.register_forward_hook(_noting(seen, name)) for name, module in modules.items()]
    handles += [module.register_forward_pre_hook(enter(name)) for name, module in attentions.items()]
    replaced = _replace_attention(lambda *given: seen.scores(inside[0], *given))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for place, name, honest in replaced:
            setattr(place, name, honest)


def _noting(seen: ActivationStatistics, name: str) -> Callable[..., None]:
    return lambda module, inputs, output: seen.output(name, output)


def _replace_attention(note: Callable[[Tensor, Tensor, Any], None]) -> list[tuple[Any, str, Any]]:
    """Wrap the attention functions to record their inputs: the scores exist nowhere else, and the model stays free of this code."""
    from lmworks.model import attention, mla

    replaced = []
    for place, names in ((attention, ("attend_fast", "attend_plain", "attend_sinks")), (mla, ("attend_fast", "attend_plain"))):
        for name in names:
            honest = getattr(place, name)

            def telling(query: Tensor, key: Tensor, value: Tensor, mask: Any, *options: Any, honest: Any = honest) -> Tensor:
                note(query, key, mask)
                out: Tensor = honest(query, key, value, mask, *options)
                return out

            setattr(place, name, telling)
            replaced.append((place, name, honest))
    return replaced


@torch.no_grad()
def largest_score(query_BHTC: Tensor, key_BKSC: Tensor, seen_B1TS: Tensor | None) -> Tensor:
    """The largest q k^T / sqrt(C) over the visible keys (causal without a mask); 0-d fp32. One head at a time, to need little memory."""
    T, S, group = query_BHTC.shape[2], key_BKSC.shape[2], query_BHTC.shape[1] // key_BKSC.shape[1]
    if seen_B1TS is None:
        seen_B1TS = torch.ones(1, 1, T, S, dtype=torch.bool, device=query_BHTC.device).tril(S - T)
    largest = [
        (query_BHTC[:, head].float() @ key_BKSC[:, head // group].float().mT).masked_fill(~seen_B1TS[:, 0], float("-inf")).max()
        for head in range(query_BHTC.shape[1])
    ]
    return torch.stack(largest).max() * query_BHTC.shape[-1] ** -0.5
