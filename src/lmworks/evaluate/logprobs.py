"""Log-probabilities of continuations: the one thing that cloze items and bits per byte ask of a model.

Shapes: B rows, T tokens, V vocabulary entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Protocol

import torch

from lmworks.errors import UserError

if TYPE_CHECKING:
    from lmworks.model import Transformer

Ids = Sequence[int]
Request = tuple[Ids, Ids]  # context (at least one token), continuation
Advance = Callable[[int], None]

_ENOUGH = 1 / 8  # of `batch_tokens`: a batch so large keeps a processor busy, so from there on padding costs more than another batch
_FILLED = 3 / 4  # of the width of such a batch: a row that is shorter begins another


class LogProbs(Protocol):
    """Natural-log probability of each continuation after its context, summed over the continuation's tokens."""

    def __call__(self, requests: Sequence[Request], advance: Advance | None = None) -> list[float]:
        """One float per request, in order. `advance` is called with the number of requests done since the last call."""


def _inputs(request: Request, limit: int | None) -> tuple[int, ...]:
    """The row to feed: all but the last token; its first tokens fall away beyond `limit`, never any of the continuation."""
    context, continuation = request
    if not context:
        raise ValueError("a request needs at least one token of context: the model predicts no first token")
    row = (*context, *continuation)[:-1]
    if limit is not None and len(row) > limit:
        row = row[-max(limit, len(continuation)):]
    return row


class PlainLogProbs:
    """The twin: one request at a time, no padding, fp32 log-softmax over the whole row."""

    def __init__(self, model: Transformer, max_length: int | None = None) -> None:
        self.model, self.max_length = model, max_length

    @torch.no_grad()
    def __call__(self, requests: Sequence[Request], advance: Advance | None = None) -> list[float]:
        device = self.model.embedding.weight.device
        sums = []
        for request in requests:
            row = _inputs(request, self.max_length)
            logits_TV = self.model(torch.tensor([row], device=device))[0].float()
            logprobs_TV = logits_TV.log_softmax(-1)[len(row) - len(request[1]):]
            wanted = torch.tensor(request[1], dtype=torch.long, device=device)[:, None]
            sums.append(logprobs_TV.gather(1, wanted).double().sum().item())
            if advance:
                advance(1)
        return sums


@dataclass
class _Row:
    inputs: tuple[int, ...]
    requests: list[int]  # what can be read from this row's logits


class BatchedLogProbs:
    """Rows of similar length in one batch, padded on the right, where causal attention cannot look. Raises `UserError` for a model whose
    log-probabilities are NaN: every comparison with them is false, which would look like an answer.

    A row whose tokens begin another row is not run at all: its logits are the other's first ones. All one-token choices of
    an item thus cost one row. The head is run only where a continuation stands, `logit_chunk_size` places at a time.
    `batch_tokens` bounds B * T (a single longer row is still run). Rows much shorter than a batch's longest are left to the next one.
    """

    def __init__(self, model: Transformer, max_length: int | None = None, batch_tokens: int = 8192, logit_chunk_size: int = 1024) -> None:
        self.model, self.max_length, self.batch_tokens, self.logit_chunk_size = model, max_length, batch_tokens, logit_chunk_size

    def __call__(self, requests: Sequence[Request], advance: Advance | None = None) -> list[float]:
        return self._run(requests, advance, None)

    def with_greedy(self, requests: Sequence[Request], advance: Advance | None = None) -> list[tuple[float, bool]]:
        """Also whether greedy decoding would write each continuation: whether each of its tokens is the most likely one."""
        greedy = [True] * len(requests)
        return list(zip(self._run(requests, advance, greedy), greedy, strict=True))

    @torch.no_grad()
    def _run(self, requests: Sequence[Request], advance: Advance | None, greedy: list[bool] | None) -> list[float]:
        sums = [0.0] * len(requests)
        for batch in self._batches(_merge_prefixes([_inputs(request, self.max_length) for request in requests])):
            self._score(batch, requests, sums, greedy)
            if advance:
                advance(sum(len(row.requests) for row in batch))
        if wrong := sum(map(math.isnan, sums)):
            raise UserError(
                f"the model gives {wrong:,} of {len(sums):,} texts a log-probability that is not a number (NaN), so nothing can be scored: "
                "its weights are damaged, or its activations overflow in this precision"
            )
        return sums

    def _batches(self, rows: list[_Row]) -> list[list[_Row]]:
        batches: list[list[_Row]] = []
        width = 0
        for row in sorted(rows, key=lambda row: -len(row.inputs)):  # the longest first: memory trouble shows at once
            tokens = len(batches[-1]) * width if batches else 0
            padded = tokens >= _ENOUGH * self.batch_tokens and len(row.inputs) < _FILLED * width
            if not batches or tokens + width > self.batch_tokens or padded:
                batches.append([])
                width = max(1, len(row.inputs))
            batches[-1].append(row)
        return batches

    def _score(self, batch: list[_Row], requests: Sequence[Request], sums: list[float], greedy: list[bool] | None) -> None:
        device = self.model.embedding.weight.device
        width = max(1, len(batch[0].inputs))
        tokens_BT = torch.zeros(len(batch), width, dtype=torch.long)
        owner: list[int] = []
        place: list[int] = []
        wanted: list[int] = []
        for b, row in enumerate(batch):
            tokens_BT[b, : len(row.inputs)] = torch.tensor(row.inputs)
            for index in row.requests:
                continuation = requests[index][1]
                end = len(_inputs(requests[index], self.max_length))
                owner += [index] * len(continuation)
                place += [b * width + t for t in range(end - len(continuation), end)]
                wanted += continuation
        if not owner:
            return
        hidden_BTD, _ = self.model.hidden(tokens_BT.to(device))
        hidden_ND = hidden_BTD.flatten(0, 1)[torch.tensor(place, device=device)]
        target_N = torch.tensor(wanted, device=device)
        values: list[float] = []
        wrong: list[bool] = []
        for hidden, target in zip(hidden_ND.split(self.logit_chunk_size), target_N.split(self.logit_chunk_size), strict=True):
            logits = self.model.logits(hidden)
            values += (logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(-1)).double().tolist()
            if greedy is not None:
                wrong += (logits.argmax(-1) != target).tolist()
        for index, value in zip(owner, values, strict=True):
            sums[index] += value
        for index in compress(owner, wrong):
            assert greedy is not None
            greedy[index] = False


def _merge_prefixes(inputs: list[tuple[int, ...]]) -> list[_Row]:
    """One row for every input that begins no other. In sorted order whatever begins a row stands directly before its like."""
    rows: list[_Row] = []
    for index in sorted(range(len(inputs)), key=inputs.__getitem__, reverse=True):
        if rows and rows[-1].inputs[: len(inputs[index])] == inputs[index]:
            rows[-1].requests.append(index)
        else:
            rows.append(_Row(inputs[index], [index]))
    return rows
