"""Choosing the next token of each row.

First what changes the logits, in vLLM's order: a minimum length, `logit_bias`, penalties of repetition, frequency and presence. Then
temperature, top-k, top-p, min-p, restrictions by a grammar, and log-probabilities.

`drawn_chunk_loss` is the loss of tokens under the distribution that they were drawn from. The probability of a sampled token in a rollout
and in training is one number only if the sampling filters are part of both.

Shapes: B rows, M tokens of a chunk, V vocabulary; R rows that use penalties or biases.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.host.devices import at_least_fp32
from lmworks.model.loss import ChunkLoss, soft_cap
from lmworks.model.transfers import moved, to_device


@dataclass(frozen=True, kw_only=True)
class LogitOptions:
    """`min_tokens`: how many tokens come before any of `stop_ids`. `logit_bias`: pairs of an id and what is added to its logit, each id
    once. A `repetition_penalty` of 1 is off. The formulas are those of `adjust`."""

    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether any of these options is on."""
        penalized = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalized or bool(self.logit_bias) or self.min_tokens > 0


class History:
    """The tokens of one row so far, by id, and its constant tensors; about 5 bytes for each entry of the vocabulary, from the first token
    on."""

    def __init__(self, options: LogitOptions, prompt: Sequence[int]) -> None:
        self.options, self.written, self._prompt = options, 0, prompt
        self._ready = False

    def prepare(self, size: int, device: torch.device) -> History:
        """Make the tensors, once."""
        if not self._ready:
            options, self._ready = self.options, True
            self.stop_ids = to_device(options.stop_ids if options.min_tokens else (), torch.long, device)
            self.bias_ids = to_device([token for token, _ in options.logit_bias], torch.long, device)
            self.bias = to_device([value for _, value in options.logit_bias], torch.float32, device)
            self.counts_V = torch.zeros(size, dtype=torch.float32, device=device)  # of generated tokens
            self.seen_V = torch.zeros(size, dtype=torch.bool, device=device)  # in the prompt or the answer
            self.seen_V.index_fill_(0, to_device(self._prompt, torch.long, device), True)
        return self

    def add(self, token: int) -> None:
        """Note the next generated token."""
        self.written += 1
        self.counts_V.narrow(0, token, 1).add_(1)
        self.seen_V.narrow(0, token, 1).fill_(True)


def adjust(logits_BV: Tensor, rows_B: Sequence[History | None]) -> Tensor:
    """The logits after these options; the same tensor if no row uses any, else a new one. None: the row uses none.

    With c the count of a token among the generated ones of its row: a token of prompt or answer has a positive logit divided by the
    repetition penalty and a negative one multiplied by it (arXiv:1909.05858); then frequency_penalty * c is subtracted, and
    presence_penalty if c > 0 (OpenAI). Stop tokens are excluded from the first `min_tokens` tokens.
    """
    size, device = logits_BV.shape[-1], logits_BV.device
    rows = [row for row, history in enumerate(rows_B) if history is not None]
    if not rows:
        return logits_BV
    histories = [history.prepare(size, device) for history in rows_B if history is not None]
    options = [history.options for history in histories]
    rows_R = to_device(rows, torch.long, device)
    logits_RV = logits_BV.index_select(0, rows_R)

    short = [number for number, history in enumerate(histories) if history.written < options[number].min_tokens]
    if short:
        places = [torch.full_like(histories[number].stop_ids, number) for number in short]
        ids = torch.cat([histories[number].stop_ids for number in short])
        logits_RV.index_put_((torch.cat(places), ids), torch.full((), float("-inf"), dtype=logits_RV.dtype, device=device))
    if any(one.logit_bias for one in options):
        places = [torch.full_like(history.bias_ids, number) for number, history in enumerate(histories)]
        ids, bias = torch.cat([history.bias_ids for history in histories]), torch.cat([history.bias for history in histories])
        logits_RV.index_put_((torch.cat(places), ids), bias.to(logits_RV.dtype), accumulate=True)

    repetition_R1, frequency_R1, presence_R1 = (
        to_device(values, torch.float32, device)[:, None]
        for values in zip(*((one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in options), strict=True)
    )
    if any(one.repetition_penalty != 1 for one in options):
        seen_RV = torch.stack([history.seen_V for history in histories])
        penalized_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
        logits_RV = torch.where(seen_RV, penalized_RV, logits_RV)
    if any(one.frequency_penalty or one.presence_penalty for one in options):
        counts_RV = torch.stack([history.counts_V for history in histories])
        logits_RV = logits_RV - frequency_R1 * counts_RV - presence_R1 * (counts_RV > 0)
    if len(rows) == len(rows_B):
        return logits_RV.to(logits_BV.dtype)
    return logits_BV.index_copy(0, rows_R, logits_RV.to(logits_BV.dtype))


_GREEDY_BELOW = 1e-5
SAMPLING = {"temperature": 0.7, "min_p": 0.1}
"""Default sampling options of chat and samples; also written to exports as defaults for engines."""


@dataclass(frozen=True)
class GenerateOptions(LogitOptions):
    """Sampling options. Temperature 0 is greedy, and so is one below 1e-5, by which logits cannot be divided; top_k 0, top_p 1 and min_p 0
    are off; top_p 0 leaves the most likely token. `logprobs`: how many of the most likely tokens to return with each token. `entries`: ids
    from here on, rows that only pad the embedding, are never drawn and not among those most likely; None: there are none."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    entries: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < _GREEDY_BELOW

    @property
    def distribution(self) -> tuple[float, int, float, float]:
        """The options that shape the distribution which tokens are drawn from."""
        return (self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `logprob` is under the model's own distribution, before penalties, temperature, filters and grammars;
    `drawn_logprob` is under the distribution that the token was drawn from, after all of these: 0 if it was chosen greedily. nan: it was
    not drawn."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    drawn_logprob: float = float("nan")


class Grammar(Protocol):
    """Restricts the tokens of one row."""

    def allowed(self) -> Tensor:
        """Which ids may come next: (at most V,) of bool, on the CPU, at least one of them True. Ids beyond its end may not."""
        ...

    def accept(self, token: int) -> int:
        """Advance by the token that was chosen; returns the token that is to stand in its place, usually the same."""
        ...


@dataclass
class Draw:
    """How tokens of one row are chosen: its options, the stream of its random numbers, its grammar, and its prompt, which a repetition
    penalty reads. Other rows have no influence."""

    options: GenerateOptions
    seed: int
    grammar: Grammar | None = None
    prompt: Sequence[int] = ()
    random: random.Random = field(init=False, repr=False)
    history: History | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        # of an integer, Python takes the absolute value: a negative seed would draw what the positive one does
        self.random = random.Random(self.seed if self.seed >= 0 else hex(self.seed))
        if self.options.changes_logits:
            self.history = History(self.options, self.prompt)


def filter_logits(logits_BV: Tensor, options: GenerateOptions) -> Tensor:
    """Apply temperature, then top-k, top-p (arXiv:1904.09751) and min-p (arXiv:2407.01082); what is excluded becomes -inf."""
    logits = logits_BV / options.temperature
    if options.top_k and options.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(options.top_k, dim=-1).values[:, -1:], float("-inf"))
    if options.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probability = ordered.softmax(-1)
        beyond = probability.cumsum(-1) - probability >= options.top_p
        beyond[..., 0] = False  # the most likely token is kept, even if top_p rounds to 0 in the tensor's dtype
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), float("-inf"))
    if options.min_p > 0:
        probability = logits.softmax(-1)
        logits = logits.masked_fill(probability < options.min_p * probability.amax(-1, keepdim=True), float("-inf"))
    return logits


def choose(logits_BV: Tensor, draws: Sequence[Draw]) -> list[Token]:
    """Choose the next token of each row, and advance its random numbers and its grammar. Each random row takes one number per token.

    The host waits once for the device, for all results together; once more if a grammar puts another token in the place of a chosen one.
    Raises `UserError` if the logits of a row have NaN.
    """
    device = logits_BV.device
    beyond_BV = _beyond(logits_BV, draws)
    allowed_BV = _without(_restricted(adjust(logits_BV, [draw.history for draw in draws]), draws), beyond_BV)
    groups: dict[tuple[float, int, float, float] | None, list[int]] = {}  # None: greedy
    for row, draw in enumerate(draws):
        groups.setdefault(None if draw.options.greedy else draw.options.distribution, []).append(row)
    picked, drawn = [], []
    for rows in groups.values():
        part = allowed_BV if len(groups) == 1 else allowed_BV.index_select(0, to_device(rows, torch.long, device))
        options = draws[rows[0]].options
        if options.greedy:
            picked.append(part.argmax(-1, keepdim=True))
            drawn.append(torch.zeros_like(picked[-1], dtype=torch.float64))
        else:
            probability = filter_logits(part, options).softmax(-1)
            picked.append(_invert(probability, to_device([draws[row].random.random() for row in rows], torch.float64, device)))
            drawn.append(probability.gather(1, picked[-1]).log().double())
    chosen_B1, drawn_B1 = _in_order(picked, groups), _in_order(drawn, groups)
    logprobs_BV = logits_BV.log_softmax(-1)
    rivals = [min(draw.options.logprobs or 0, draw.options.entries or logits_BV.shape[1]) for draw in draws]
    found = [chosen_B1, logprobs_BV.gather(1, chosen_B1), drawn_B1]
    if most := max(rivals, default=0):
        top = _without(logprobs_BV, beyond_BV).topk(most, dim=-1)
        found += [top.indices, top.values]
    # fp64 holds ids and log-probabilities of fp32 and fp64 as they are
    table = torch.cat([part.double() for part in found], dim=1).tolist()
    if any(math.isnan(line[1]) for line in table):
        raise UserError("the logits of the model are not numbers (NaN): its weights are damaged, or activations overflow in this precision")
    chosen = [int(line[0]) for line in table]
    replaced: list[int] = []
    for row, draw in enumerate(draws):
        if draw.grammar is not None and (token := draw.grammar.accept(chosen[row])) != chosen[row]:
            chosen[row], table[row][2] = token, float("nan")
            replaced.append(row)
        if draw.history is not None:
            draw.history.add(chosen[row])
    if replaced:
        places = to_device([[row, chosen[row]] for row in replaced], torch.long, device)
        for row, value in zip(replaced, logprobs_BV[places[:, 0], places[:, 1]].tolist(), strict=True):
            table[row][1] = value
    return [
        Token(token, line[1], tuple(zip(map(int, line[3 : 3 + count]), line[3 + most : 3 + most + count], strict=True)), line[2])
        for token, line, count in zip(chosen, table, rivals, strict=True)
    ]


def _in_order(parts: Sequence[Tensor], groups: Mapping[Any, list[int]]) -> Tensor:
    """What was found for each group of rows, in the order of the rows."""
    if len(parts) == 1:
        return parts[0]
    places = [row for rows in groups.values() for row in rows]
    order = sorted(range(len(places)), key=places.__getitem__)
    return torch.cat(list(parts)).index_select(0, to_device(order, torch.long, parts[0].device))


def _beyond(logits_BV: Tensor, draws: Sequence[Draw]) -> Tensor | None:
    """Which ids of each row are no entries of the vocabulary (`GenerateOptions.entries`); None: all are entries."""
    size = logits_BV.shape[1]
    entries = [size if draw.options.entries is None else draw.options.entries for draw in draws]
    if min(entries) >= size:
        return None
    return torch.arange(size, device=logits_BV.device)[None] >= to_device(entries, torch.long, logits_BV.device)[:, None]


def _without(values_BV: Tensor, left_out_BV: Tensor | None) -> Tensor:
    return values_BV if left_out_BV is None else values_BV.masked_fill(left_out_BV, float("-inf"))


def _restricted(logits_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The logits with -inf where a row's grammar forbids the token; the masks of all rows are one copy to the device."""
    held = [(row, draw.grammar) for row, draw in enumerate(draws) if draw.grammar is not None]
    if not held:
        return logits_BV
    forbidden_RV = torch.ones(len(held), logits_BV.shape[1], dtype=torch.bool)
    for place, (_, grammar) in enumerate(held):
        allowed = grammar.allowed()
        forbidden_RV[place, : len(allowed)] = ~allowed
    forbidden = moved(forbidden_RV, logits_BV.device)
    if len(held) == len(draws):
        return logits_BV.masked_fill(forbidden, float("-inf"))
    rows_R = to_device([row for row, _ in held], torch.long, logits_BV.device)
    return logits_BV.index_copy(0, rows_R, logits_BV.index_select(0, rows_R).masked_fill_(forbidden, float("-inf")))


def _invert(probability_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The id (B, 1) at which the cumulative distribution exceeds a number in [0, 1); a token of probability 0 is never chosen."""
    cumulative = probability_BV.cumsum(-1, dtype=torch.float64)
    total_B1 = cumulative[:, -1:]
    # below the total, which a product with a number just below 1 could round to
    target_B1 = torch.minimum(uniform_B[:, None] * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    return torch.searchsorted(cumulative, target_B1, right=True).clamp_(max=cumulative.shape[-1] - 1)  # NaN is beyond all


def drawn_chunk_loss(inner: ChunkLoss, options: GenerateOptions) -> ChunkLoss:
    """`inner` on tempered and filtered logits, with the gradient of the original ones.

    The filters are constants in the gradient. The label itself is never excluded: where rounding moves it across the border of a filter,
    its probability stays finite. Filters (not the temperature) need the whole vocabulary on each rank.
    """

    def chunk_loss(
        logits_MV: Tensor, labels_M: Tensor, softcap: float, z_weight: float, needs_grad: bool, weights_M: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        capped = soft_cap(at_least_fp32(logits_MV), softcap)
        drawn = filter_logits(capped, options)
        if (options.top_k, options.top_p, options.min_p) != (0, 1.0, 0.0):
            target = labels_M.long().clamp_min(0)[:, None]
            drawn = drawn.scatter(1, target, capped.gather(1, target) / options.temperature)
        ce, z, grad_MV = inner(drawn, labels_M, 0.0, z_weight, needs_grad, weights_M)
        if grad_MV is None:
            return ce, z, None
        grad = grad_MV / options.temperature
        if softcap:
            grad *= 1 - (capped / softcap).square()
        return ce, z, grad.to(logits_MV.dtype)

    return torch.no_grad()(chunk_loss)
