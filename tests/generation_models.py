"""A model that writes what a test wants, behind the real generation loop, and rows of published form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lmworks.model.cache import JoinedCache


class ScriptCache:
    """The tokens of each row, with the interface of `lmworks.model.cache.Cache`."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.device = torch.device("cpu")
        self.lengths = [0] * rows
        self.tokens: list[list[int]] = [[] for _ in range(rows)]

    def expect(self, counts: list[int]) -> None:
        """Padding matters to states alone."""

    def finish(self, counts: list[int] | int) -> None:
        kept = [counts] * len(self.lengths) if isinstance(counts, int) else counts
        self.lengths = [length + count for length, count in zip(self.lengths, kept, strict=True)]
        for row, length in enumerate(self.lengths):
            del self.tokens[row][length:]

    def keep(self, rows: list[int]) -> None:
        self.tokens = [self.tokens[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]

    def reserve(self, rows: int) -> None:
        assert rows >= len(self.lengths)

    def add(self, source: ScriptCache, row: int) -> None:
        self.tokens.append(list(source.tokens[row]))
        self.lengths.append(source.lengths[row])

    def remove(self, row: int) -> None:
        self.tokens[row], self.lengths[row] = self.tokens[-1], self.lengths[-1]
        self.tokens.pop()
        self.lengths.pop()

    def write(self, row: int, kept: list[object]) -> None:
        assert not kept


class Scripted(nn.Module):
    """Continues a prompt whose bytes end with a key of `replies` with the bytes of its value, then with <|endoftext|> (256).

    Vocabulary: `ByteTokenizer`. The state is the tokens of the row, so the model itself has no limits of length.
    """

    def __init__(self, replies: Mapping[str, str], context: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(259, 1)
        self.config = SimpleNamespace(max_position_embeddings=context, sliding_window=None)
        self.replies = replies
        self.widest = 0  # most tokens in one forward pass
        self.rows: list[int] = []  # rows of each cache
        self.texts: list[list[int]] = []  # of the forward passes since the last logits

    def cache(self, rows: int, capacity: int, behind: int = 0) -> ScriptCache:
        if rows:
            self.rows.append(rows)
        return ScriptCache(rows, capacity)

    def hidden(self, tokens: Tensor, cache: ScriptCache | JoinedCache) -> tuple[Tensor, None]:
        """Row and length of the text up to each token: what `logits` needs to know."""
        self.widest = max(self.widest, tokens.numel())
        rows, places = torch.meshgrid(torch.arange(len(tokens)), torch.arange(tokens.shape[1]), indexing="ij")
        parts: list[ScriptCache] = list(cache.parts) if isinstance(cache, JoinedCache) else [cache]  # type: ignore[arg-type]
        lengths = torch.tensor([length for part in parts for length in part.lengths])
        new = iter(tokens.tolist())
        for part in parts:
            part.tokens = [[*text[:length], *next(new)] for text, length in zip(part.tokens, part.lengths, strict=True)]
        first = len(self.texts)
        self.texts += [text for part in parts for text in part.tokens]
        return torch.stack((rows + first, places + lengths[:, None] + 1), -1).float(), None

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.zeros(len(hidden), 259)
        for place, (row, length) in enumerate(hidden.int().tolist()):
            out[place, self._next(self.texts[row][:length])] = 50.0
        self.texts = []
        return out

    def _next(self, read: list[int]) -> int:
        text = bytes(token for token in read if token < 256)
        for key, reply in self.replies.items():
            _, found, written = text.rpartition(key.encode())
            if found and reply.encode().startswith(written):
                rest = reply.encode()[len(written) :]
                return rest[0] if rest else 256
        return 256


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


GSM8K = [
    {"question": f"Tom has {n} eggs and buys {n} more. How many has he?", "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
    for n in range(2, 10)
]
HUMANEVAL = [
    {
        "task_id": f"HumanEval/{n}",
        "prompt": f'import math\n\n\ndef add_{n}(x):\n    """ Add {n} to x.\n    >>> add_{n}(1)\n    {n + 1}\n    """\n',
        "canonical_solution": f"    return x + {n}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n    assert candidate(-{n}) == 0\n",
        "entry_point": f"add_{n}",
    }
    for n in range(4)
]
