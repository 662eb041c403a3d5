"""What changes the logits of a row before temperature and filters: a minimum length, biases of tokens, and penalties of repetition.

They are applied in vLLM's order: minimum length, `logit_bias`, repetition penalty, frequency penalty, presence penalty.

Shapes: B rows, V vocabulary; R rows that use any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmworks.model.sampling import Draw, GenerateOptions


def changes_logits(options: GenerateOptions) -> bool:
    """Whether any of these options is on."""
    penalized = options.repetition_penalty != 1 or options.frequency_penalty != 0 or options.presence_penalty != 0
    return penalized or bool(options.logit_bias) or options.min_tokens > 0


class History:
    """The tokens of one row so far, by id, and its constant tensors; about 5 bytes for each entry of the vocabulary."""

    def __init__(self, options: GenerateOptions, prompt: Sequence[int], size: int, device: torch.device) -> None:
        self.written = 0
        self.stop_ids = torch.tensor(options.stop_ids if options.min_tokens else (), dtype=torch.long, device=device)
        self.bias_ids = torch.tensor([token for token, _ in options.logit_bias], dtype=torch.long, device=device)
        self.bias = torch.tensor([value for _, value in options.logit_bias], dtype=torch.float32, device=device)
        self.counts_V = torch.zeros(size, dtype=torch.float32, device=device)  # of generated tokens
        self.seen_V = torch.zeros(size, dtype=torch.bool, device=device)  # in the prompt or the answer
        self.seen_V[torch.tensor(prompt, dtype=torch.long, device=device)] = True

    def add(self, token: int) -> None:
        """Note the next generated token."""
        self.written += 1
        self.counts_V[token] += 1
        self.seen_V[token] = True


def adjust(logits_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The logits after these options; the same tensor if no row uses any, else a new one.

    With c the count of a token among the generated ones of its row: a token of prompt or answer has a positive logit divided by the
    repetition penalty and a negative one multiplied by it (arXiv:1909.05858); then frequency_penalty * c is subtracted, and
    presence_penalty if c > 0 (OpenAI). Stop tokens are excluded from the first `min_tokens` tokens.
    """
    rows = [row for row, draw in enumerate(draws) if draw.adjusts]
    if not rows:
        return logits_BV
    size, device = logits_BV.shape[-1], logits_BV.device
    histories = []
    for draw in (draws[row] for row in rows):
        draw.history = draw.history or History(draw.options, draw.prompt, size, device)
        histories.append(draw.history)
    options = [draws[row].options for row in rows]
    logits_RV = logits_BV[rows]

    short = [number for number, history in enumerate(histories) if history.written < options[number].min_tokens]
    if short:
        places = [torch.full_like(histories[number].stop_ids, number) for number in short]
        logits_RV[torch.cat(places), torch.cat([histories[number].stop_ids for number in short])] = float("-inf")
    if any(one.logit_bias for one in options):
        places = [torch.full_like(history.bias_ids, number) for number, history in enumerate(histories)]
        ids, bias = torch.cat([history.bias_ids for history in histories]), torch.cat([history.bias for history in histories])
        logits_RV.index_put_((torch.cat(places), ids), bias.to(logits_RV.dtype), accumulate=True)

    repetition_R1, frequency_R1, presence_R1 = (
        torch.tensor(values, dtype=torch.float32, device=device)[:, None]
        for values in zip(*((one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in options), strict=True)
    )
    if any(one.repetition_penalty != 1 for one in options):
        seen_RV = torch.stack([history.seen_V for history in histories])
        penalized_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
        logits_RV = torch.where(seen_RV, penalized_RV, logits_RV)
    if any(one.frequency_penalty or one.presence_penalty for one in options):
        counts_RV = torch.stack([history.counts_V for history in histories])
        logits_RV = logits_RV - frequency_R1 * counts_RV - presence_R1 * (counts_RV > 0)
    if len(rows) == len(draws):
        return logits_RV.to(logits_BV.dtype)
    adjusted_BV = logits_BV.clone()
    adjusted_BV[rows] = logits_RV.to(logits_BV.dtype)
    return adjusted_BV
