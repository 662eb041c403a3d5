"""Held-out bits per byte: how many bits the model needs for a byte of text that it has not seen.

Bits per byte do not depend on the tokenizer, so models with other vocabularies, and compressors, stand on one scale.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmworks.evaluate.heldout import OVERALL
from lmworks.evaluate.logprobs import LogProbs, Request
from lmworks.evaluate.sets.forms import Encoder
from lmworks.ui.terminal import bar

HOW = (
    "whole documents, each from its own start and without its end token; longer ones in windows of the context length that "
    "overlap by a quarter, each token scored once; a document's first token, which nothing predicts, costs log2(vocabulary) bits"
)


ANSWERS = "answers: "
"""Domains of held-out conversations begin with this (`lmworks.evaluate.answers`)."""


@dataclass(frozen=True)
class DocumentBits:
    """The bits of one held-out document. `document` is a hash of its text."""

    document: str
    domain: str
    bits: float
    bytes: int
    tokens: int


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
    return by_domain(document_bits(held_out, encoder, vocab_size, logprobs, length, label))


def document_bits(
    held_out: Mapping[str, Sequence[str]], encoder: Encoder, vocab_size: int, logprobs: LogProbs, length: int, label: str = "held-out text"
) -> list[DocumentBits]:
    """The bits of each document, domain by domain; arguments as for `bits_per_byte`."""
    encoded = {domain: [encoder.encode(text) for text in texts] for domain, texts in held_out.items()}
    requests = {domain: [windows(ids, length) for ids in documents] for domain, documents in encoded.items()}
    found: list[DocumentBits] = []
    with bar(label, sum(map(len, (of_document for documents in requests.values() for of_document in documents)))) as progress:
        for domain, documents in encoded.items():
            progress.note(domain)
            nats = iter(logprobs([request for of_document in requests[domain] for request in of_document], progress.advance))
            for text, ids, own in zip(held_out[domain], documents, requests[domain], strict=True):
                bits = -math.fsum(next(nats) for _ in own) / math.log(2) + math.log2(vocab_size)
                data = text.encode()
                found.append(DocumentBits(hashlib.blake2b(data, digest_size=8).hexdigest(), domain, bits, len(data), len(ids)))
    return found


def by_domain(documents: Sequence[DocumentBits]) -> dict[str, BitsPerByte]:
    """Domain (and `overall`) -> bits per byte; nothing without documents. Answers in conversations are no part of the overall figure."""
    parts: dict[str, list[BitsPerByte]] = {}
    for one in documents:
        parts.setdefault(one.domain, []).append(BitsPerByte(one.bits, one.bytes, one.tokens, 1))
    measured = {domain: BitsPerByte.total(part) for domain, part in parts.items()}
    text = [value for domain, value in measured.items() if not domain.startswith(ANSWERS)]
    return measured | ({OVERALL: BitsPerByte.total(text)} if text else {})
