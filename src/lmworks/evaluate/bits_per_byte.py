"""Held-out bits per byte: how many bits the model needs for a byte of text that it has not seen.

Bits per byte do not depend on the tokenizer, so models with other vocabularies, and compressors, stand on one scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmworks.evaluate.forms.likelihood import Encoder
from lmworks.evaluate.logprobs import LogProbs, Request
from lmworks.evaluate.references import OVERALL
from lmworks.progress import bar

HOW = (
    "whole documents, each from its own start and without its end token; longer ones in windows of the context length that "
    "overlap by a quarter, each token scored once; a document's first token, which nothing predicts, costs log2(vocabulary) bits"
)


@dataclass(frozen=True)
class BitsPerByte:
    bits: float
    bytes: int
    tokens: int
    documents: int

    @property
    def value(self) -> float:
        return self.bits / self.bytes

    def to_json(self) -> dict[str, Any]:
        return {"bits_per_byte": self.value, "bytes": self.bytes, "tokens": self.tokens, "documents": self.documents,
                "bytes_per_token": self.bytes / self.tokens}

    @staticmethod
    def total(parts: Sequence[BitsPerByte]) -> BitsPerByte:
        return BitsPerByte(
            math.fsum(p.bits for p in parts), sum(p.bytes for p in parts), sum(p.tokens for p in parts), sum(p.documents for p in parts)
        )


def windows(ids: Sequence[int], length: int) -> list[Request]:
    """Requests that score tokens 1, 2, ... of a document once each, in order.

    The first window scores as much as `length` inputs can; each later one moves on by three quarters of a window, so every
    token is predicted from at least `length // 4` tokens (or from all before it, near the start), for 4/3 of the work.
    """
    assert length >= 2
    stride = max(1, length - max(1, length // 4))
    requests: list[Request] = []
    done = 1  # the first token is the context of the rest
    while done < len(ids):
        end = min(len(ids), length + 1 if done == 1 else done + stride)
        start = max(0, end - 1 - length)
        requests.append((ids[start:done], ids[done:end]))
        done = end
    return requests


def bits_per_byte(
    held_out: Mapping[str, Sequence[str]], encoder: Encoder, vocab_size: int, logprobs: LogProbs, length: int, label: str = "held-out text"
) -> dict[str, BitsPerByte]:
    """Domain (and `overall`) -> bits per byte. `length` is the context that the model was trained for, in tokens."""
    encoded = {domain: [encoder.encode(text) for text in texts] for domain, texts in held_out.items()}
    requests = {domain: [request for ids in documents for request in windows(ids, length)] for domain, documents in encoded.items()}
    measured: dict[str, BitsPerByte] = {}
    with bar(label, sum(map(len, requests.values()))) as progress:
        for domain, documents in encoded.items():
            progress.note(domain)
            nats = -math.fsum(logprobs(requests[domain], progress.advance))
            bits = nats / math.log(2) + len(documents) * math.log2(vocab_size)
            size = sum(len(text.encode()) for text in held_out[domain])
            measured[domain] = BitsPerByte(bits, size, sum(map(len, documents)), len(documents))
    measured[OVERALL] = BitsPerByte.total(list(measured.values()))
    return measured
