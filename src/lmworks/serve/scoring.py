"""Log-probabilities of a given text under the model, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmworks.model.generate import Token

if TYPE_CHECKING:
    from lmworks.model import Transformer

_ROWS = 512  # positions whose (rows, vocabulary) log-softmax is in memory at once


def score(model: Transformer, prompt: Sequence[int], top: int = 0) -> tuple[Token, ...]:
    """Each token of `prompt` with its log-probability given those before it, and the `top` likeliest there.

    The first token has log-probability nan and no alternatives. One forward pass in the model's own precision; the softmax
    is in fp32.
    """
    import torch

    device = next(model.parameters()).device
    ids_1T = torch.tensor([list(prompt)], dtype=torch.long, device=device)
    tokens = [Token(int(prompt[0]), float("nan"), ())]
    with torch.inference_mode():
        hidden_1TD, _ = model.hidden(ids_1T)
        for start in range(0, len(prompt) - 1, _ROWS):
            stop = min(start + _ROWS, len(prompt) - 1)
            logprobs_RV = model.logits(hidden_1TD[0, start:stop]).log_softmax(dim=-1)
            chosen_R = logprobs_RV.gather(1, ids_1T[0, start + 1 : stop + 1, None])[:, 0].tolist()
            best, ids = logprobs_RV.topk(top, dim=-1) if top else (None, None)
            for row, value in enumerate(chosen_R):
                likeliest = () if best is None or ids is None else tuple(zip(ids[row].tolist(), best[row].tolist(), strict=True))
                tokens.append(Token(int(prompt[start + row + 1]), value, likeliest))
    return tuple(tokens)
