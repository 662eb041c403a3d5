"""Text generation: batched, with a KV cache, streaming; greedy or sampled.

Shapes: B active rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.model.cache import Cache
from lmworks.model.transformer import Transformer

_GREEDY_BELOW = 1e-5
_PREFILL_TOKENS = 16_384  # of all prompts together in one forward pass: bounds the memory of the activations, not that of the cache
SAMPLING = {"temperature": 0.7, "min_p": 0.1}
"""Default sampling options of chat and samples; also written to exports as defaults for engines."""


@dataclass(frozen=True)
class GenerateOptions:
    """Sampling options. Temperature 0 is greedy, and so is one below 1e-5, by which logits cannot be divided; top_k 0, top_p 1 and min_p 0
    are off. `logprobs`: how many of the most likely tokens to return with each token."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    logprobs: int | None = None


@dataclass(frozen=True)
class Token:
    """One generated token; `logprob` is under the model's own distribution, before temperature and filters."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


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


@torch.no_grad()  # as a decorator it is active within the generator only, not in the caller; FSDP2 does not support inference mode
def stream(
    model: Transformer, prompts: list[list[int]], options: GenerateOptions, seeds: Sequence[int] | None = None
) -> Generator[list[Token | None], Container[int] | None, None]:
    """Yield one list per step with each prompt's next token, None for prompts that have ended.

    A stop token is yielded before its row ends. The caller may end more rows: it sends their numbers, as in `stream.send({2, 5})`.
    Each row's draws depend on its seed only, not on other rows: on its entry in `seeds`, or on (options.seed, row).
    """
    if not prompts or not all(prompts):
        raise UserError("a prompt is empty; give at least one token")
    longest = max(len(prompt) for prompt in prompts)
    limit = int(model.config.max_position_embeddings) if model.config.max_position_embeddings else longest + options.max_new_tokens
    if longest >= limit:
        raise UserError(f"the prompt has {longest} tokens, but the model's context is {limit}; shorten the prompt")
    capacity = min(longest + options.max_new_tokens, limit)
    device = model.embedding.weight.device
    seeds = seeds or [options.seed * 1_000_003 + row for row in range(len(prompts))]
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    live = list(range(len(prompts)))
    was_training = model.training
    model.eval()
    try:
        cache = model.cache(len(prompts), capacity)
        logits = model.logits(_prefill(model, prompts, cache))
        for _ in range(options.max_new_tokens):
            chosen = _choose(logits, [draws[row] for row in live], options)
            tokens = _tokens(logits, chosen, options.logprobs)
            step: list[Token | None] = [None] * len(prompts)
            for row, token in zip(live, tokens, strict=True):
                step[row] = token
            ended = (yield step) or ()
            room = (cache.lengths + 1 < capacity).tolist()
            going = [i for i, token in enumerate(tokens) if token.id not in options.stop_ids and room[i] and live[i] not in ended]
            if not going:
                return
            if len(going) < len(live):
                live, chosen = [live[i] for i in going], chosen[going]
                cache.keep(torch.tensor(going, device=device))
            hidden, _ = model.hidden(chosen[:, None], cache=cache)
            cache.finish(torch.ones_like(cache.lengths))
            logits = model.logits(hidden[:, -1])
    finally:
        model.train(was_training)


def _prefill(model: Transformer, prompts: list[list[int]], cache: Cache) -> Tensor:
    """Read the prompts into the cache, a piece of all rows at a time. Returns the hidden state of each prompt's last token, (B, D)."""
    device = model.embedding.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    width, last = max(1, _PREFILL_TOKENS // len(prompts)), []
    for start in range(0, padded.shape[1], width):
        piece = padded[:, start : start + width]
        hidden, _ = model.hidden(piece, cache=cache)
        read = (lengths - start).clamp(0, piece.shape[1])  # a row that has ended reads padding, which is not kept
        cache.finish(read)
        last.append(hidden[torch.arange(len(prompts), device=device), (read - 1).clamp(min=0)])
    return torch.stack(last)[(lengths - 1) // width, torch.arange(len(prompts), device=device)]


def generate(model: Transformer, prompts: list[list[int]], options: GenerateOptions) -> list[list[int]]:
    """The new tokens of each prompt, without the stop token."""
    out: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, options):
        for row, token in enumerate(step):
            if token is not None and token.id not in options.stop_ids:
                out[row].append(token.id)
    return out


def _choose(logits_BV: Tensor, draws: list[torch.Generator], options: GenerateOptions) -> Tensor:
    if options.temperature < _GREEDY_BELOW:
        return logits_BV.argmax(-1)
    probability = filter_logits(logits_BV, options).softmax(-1).cpu()
    picked = [torch.multinomial(row, 1, generator=draw) for row, draw in zip(probability, draws, strict=True)]
    return torch.cat(picked).to(logits_BV.device)


def _tokens(logits_BV: Tensor, chosen_B: Tensor, rivals: int | None) -> list[Token]:
    logprobs = logits_BV.log_softmax(-1)
    own = logprobs.gather(1, chosen_B[:, None])[:, 0].tolist()
    if not rivals:
        return [Token(int(token), logprob) for token, logprob in zip(chosen_B, own, strict=True)]
    top = logprobs.topk(rivals, dim=-1)
    pairs = [tuple(zip(ids, values, strict=True)) for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
    return [Token(int(token), logprob, rival) for token, logprob, rival in zip(chosen_B, own, pairs, strict=True)]
