"""Records what a model answers to fixed prompts, for the check of a server that claims to serve it."""

from __future__ import annotations

from typing import Any

import torch

from lmworks import machine
from lmworks.deploy.source import Source
from lmworks.errors import UserError
from lmworks.model import Transformer
from lmworks.model.generate import GenerateOptions, stream
from lmworks.serve.vocabulary import Vocabulary
from lmworks.tokenizer import load
from lmworks.weights.huggingface import only_pickled, read_model

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\ndef main():\n",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
    "Once upon a time there was a",
    '{"name": "Alice", "age": 30, "city": "',
    "A B C D E F G",
    "The following is a list of the months:",
    "In the beginning",
    "# Introduction\n\nThis document describes",
    "for i in range(10):\n    print(",
)
_LENGTH = 8  # tokens generated for each prompt
_TOP = 10  # alternatives kept for each token
_ROUNDING = 4  # a server may differ by so many times the difference that 16-bit arithmetic makes
_LEAST = {16: 0.05, 8: 0.2, 4: 0.6}
"""Smallest tolerance in nats by the bits of the weights. Published quantizations of 8 and 4 bits change log-probabilities by about 0.02 and
0.1 on average; a model with one damaged layer by more than 1."""


def record(source: Source) -> dict[str, Any]:
    """The recorded answers: {"name", "tolerance", "items": [{"prompt", "tokens": [{"top": [[text, log-probability], ...]}]}]}.

    The model decodes greedily in fp32 on the CPU. The tolerance is the difference that computing in bfloat16 makes, times four, and at
    least 0.05 nats. Raises `UserError` if the model does not fit in memory, or is quantized.
    """
    if source.quantization:
        raise UserError(
            f"{source.name} is quantized, and answers are recorded from the model before that: run lmworks deploy record on it, "
            "and give the file with --expect"
        )
    need = 1.5 * 4 * source.weight_bytes / (4 if source.dtype == "float32" else 2)
    if not source.weight_bytes:
        why = only_pickled(source.directory)
        raise UserError(
            f"answers are recorded from .safetensors files, and {source.directory} has none{why}; or give a file of recorded answers with "
            "--expect"
        )
    machine.require_memory(
        need, f"recording answers of {source.name}", "run lmworks deploy record on a larger machine, and give the file with --expect"
    )
    model = read_model(source.directory)
    vocabulary = Vocabulary(load(source.directory))
    return {"name": source.name, **record_answers(model, vocabulary)}


def record_answers(model: Transformer, vocabulary: Vocabulary) -> dict[str, Any]:
    """Tolerance and items of `record` for a model in memory."""
    items, rounding = [], []
    half = Transformer(model.config).eval()
    half.load_state_dict(model.state_dict())
    half = half.to(torch.bfloat16)
    for prompt in PROMPTS:
        ids = vocabulary.encode(prompt)
        tokens, chosen = [], []
        options = GenerateOptions(max_new_tokens=_LENGTH, logprobs=_TOP, stop_ids=vocabulary.stop_ids)
        for (token,) in stream(model, [ids], options):
            if token is None or not _plain(vocabulary, token.id):
                break
            top = sorted(token.top, key=lambda pair: -pair[1])
            tokens.append({"top": [[vocabulary.token_text(other), round(value, 5)] for other, value in top]})
            chosen.append((token.id, token.logprob))
        if tokens:
            items.append({"prompt": prompt, "tokens": tokens})
            rounding += _differences(half, ids, chosen)
    if not items:
        raise UserError("the model ends its answer to every prompt at once; there is nothing to compare a server with")
    tolerance = max(_LEAST[16], _ROUNDING * sum(rounding) / len(rounding))
    return {"tolerance": round(tolerance, 4), "items": items}


def tolerance_for(recorded: float, bits: int) -> float:
    """The tolerance (nats) for a server whose weights have so many bits."""
    return max([recorded, *(least for limit, least in _LEAST.items() if bits <= limit)])


def _plain(vocabulary: Vocabulary, token: int) -> bool:
    """Whether every engine shows the token alike: not a control token, whose text some engines leave out, nor an incomplete character."""
    return vocabulary.decoder().push(token) != ""


@torch.inference_mode()
def _differences(half: Transformer, ids: list[int], chosen: list[tuple[int, float]]) -> list[float]:
    """How much log-probabilities of the chosen tokens change in bfloat16."""
    whole = torch.tensor([[*ids, *(token for token, _ in chosen)]])
    hidden_1TD, _ = half.hidden(whole[:, :-1])
    logprobs_TV = half.logits(hidden_1TD[0, len(ids) - 1 :]).float().log_softmax(-1)
    return [abs(float(logprobs_TV[row, token]) - value) for row, (token, value) in enumerate(chosen)]
