"""Text generation for a list of prompts: greedy or sampled, all at once, or streaming."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence

from lmworks.errors import UserError
from lmworks.inference.batching import ContinuousBatch
from lmworks.inference.model import for_inference, is_whole
from lmworks.inference.sampling import SAMPLING, GenerateOptions, Token, filter_logits
from lmworks.model.transformer import Transformer

__all__ = ["SAMPLING", "GenerateOptions", "Token", "filter_logits", "generate", "stream"]

_PREFILL_TOKENS = 16_384  # of all prompts together in one forward pass: bounds the memory of the activations, not that of the cache


def stream(
    model: Transformer, prompts: list[list[int]], options: GenerateOptions, seeds: Sequence[int] | None = None
) -> Generator[list[Token | None], Collection[int] | None, None]:
    """Yield one list per step with each prompt's next token. None: the prompt has ended, or it has not been read to its end yet: not all
    prompts are read in the first step if their lengths differ much, or if they have more than 16,384 tokens together.

    A stop token is yielded before its row ends. The caller may end more rows: it sends their numbers, as in `stream.send({2, 5})`.
    A model that is whole computes with weights that are cast once (`for_inference`); one whose weights are sharded over ranks gathers them
    for each token. Each row's draws depend on its seed only, not on other rows: on its entry in `seeds`, or on (options.seed, row).
    """
    if not prompts or not all(prompts):
        raise UserError("a prompt is empty; give at least one token")
    seeds = seeds or [options.seed * 1_000_003 + row for row in range(len(prompts))]
    if isinstance(model, Transformer) and not model.prepared and is_whole(model):
        model = for_inference(model, rows=len(prompts))
    batch = ContinuousBatch(model, max_rows=len(prompts), prefill_tokens=_PREFILL_TOKENS)
    ids = [batch.add(prompt, options, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    was_training = model.training
    model.eval()
    try:
        while batch.busy:
            step: list[Token | None] = [None] * len(prompts)
            for sampled in batch.step():
                step[sampled.id] = sampled.token
            if any(token is not None for token in step):
                for row in (yield step) or ():
                    batch.cancel(ids[row])
    finally:
        model.train(was_training)


def generate(model: Transformer, prompts: list[list[int]], options: GenerateOptions) -> list[list[int]]:
    """The new tokens of each prompt, without the stop token."""
    out: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, options):
        for row, token in enumerate(step):
            if token is not None and token.id not in options.stop_ids:
                out[row].append(token.id)
    return out
