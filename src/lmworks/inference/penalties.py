"""What changes the logits of a row before temperature and filters: a minimum length, biases of tokens, and penalties of repetition.

They are applied in vLLM's order: minimum length, `logit_bias`, repetition penalty, frequency penalty, presence penalty.

Shapes: B rows, V vocabulary; R rows that use any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmworks.model.transfers import to_device


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
