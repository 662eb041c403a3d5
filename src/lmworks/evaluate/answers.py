"""What held-out conversations of tuning cost: the bits of the assistant's answers, per byte of them, as rows beside the held-out text.

A conversation is scored as it is trained: rendered by the chat template, with loss on the assistant's tokens only.
"""

from __future__ import annotations

import hashlib
import math
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from lmworks.evaluate.bits_per_byte import ANSWERS, DocumentBits
from lmworks.evaluate.logprobs import LogProbs, Request
from lmworks.evaluate.replies import ChatTokenizer
from lmworks.progress import bar
from lmworks.shards.format.indexed import IndexedFile
from lmworks.train.data.chat import chat_shards

_MOST = 100
"""Conversations of a set. The difference of two models on a hundred has a standard error of about 1% of the cost itself."""


def answer_bits(data: Path, tokenizer: ChatTokenizer, logprobs: LogProbs, context: int, label: str) -> list[DocumentBits]:
    """The bits of the answers of each held-out conversation in `data`, a folder of `build_chat_data`; none where there is no such folder.

    A conversation longer than `context`, and one whose answers have no text, is left out.
    """
    if not (data / "manifest.json").is_file():
        return []
    conversations = [
        (name, ids, mask)
        for name, prefix in chat_shards(data, "validation")[0].items()
        for ids, mask in _read(prefix)
        if len(ids) <= context + 1 and tokenizer.byte_lengths[ids[mask]].sum()
    ]
    requests = [_requests(ids, mask) for _, ids, mask in conversations]
    found = []
    with bar(label, sum(map(len, requests))) as progress:
        nats = iter(logprobs([one for of_conversation in requests for one in of_conversation], progress.advance))
        for (name, ids, mask), own in zip(conversations, requests, strict=True):
            bits = -math.fsum(next(nats) for _ in own) / math.log(2)
            digest, size = hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest(), int(tokenizer.byte_lengths[ids[mask]].sum())
            found.append(DocumentBits(digest, f"{ANSWERS}{name}", bits, size, int(mask.sum())))
    return found


def _read(prefix: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, mask) of the first conversations of a shard; the mask is of the ids that are trained."""
    file = IndexedFile(prefix)
    assert file.mask is not None
    starts = file.document_start(np.arange(min(_MOST, file.documents) + 1))
    return [(file.read(start, stop).astype(np.int64), file.mask[start:stop].astype(bool)) for start, stop in pairwise(starts)]


def _requests(ids: np.ndarray, mask: np.ndarray) -> list[Request]:
    """One request per answer, after all that is before it."""
    spans = [[int(at) for at, _ in span] for trained, span in groupby(enumerate(mask), lambda pair: bool(pair[1])) if trained]
    return [(ids[: span[0]].tolist(), ids[span[0] : span[-1] + 1].tolist()) for span in spans if span[0]]
