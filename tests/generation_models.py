"""A model that writes what a test wants, behind the real generation loop, and rows of published form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn


class ScriptCache:
    def __init__(self, rows: int) -> None:
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self.tokens: list[list[int]] = [[] for _ in range(rows)]

    def finish(self, counts: Tensor) -> None:
        for row, count in enumerate(counts.tolist()):
            del self.tokens[row][int(self.lengths[row]) + count :]
        self.lengths = self.lengths + counts

    def keep(self, rows: Tensor) -> None:
        self.tokens = [self.tokens[row] for row in rows.tolist()]
        self.lengths = self.lengths[rows]


class Scripted(nn.Module):
    """Continues a prompt whose bytes end with a key of `replies` with the bytes of its value, then with <|endoftext|> (256).

    Vocabulary: `ByteTokenizer`. The state is the tokens of the row, so the model itself has no limits of length.
    """

    def __init__(self, replies: Mapping[str, str], context: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(259, 1)
        self.config = SimpleNamespace(max_position_embeddings=context)
        self.replies = replies
        self.widest = 0  # most tokens in one forward pass
        self.rows: list[int] = []  # rows of each batch

    def cache(self, rows: int, capacity: int) -> ScriptCache:
        self.rows.append(rows)
        return ScriptCache(rows)

    def hidden(self, tokens: Tensor, cache: ScriptCache) -> tuple[Tensor, None]:
        """Row and length of the text up to each token: what `logits` needs to know."""
        self.widest = max(self.widest, tokens.numel())
        rows, places = torch.meshgrid(torch.arange(len(tokens)), torch.arange(tokens.shape[1]), indexing="ij")
        for row, new in enumerate(tokens.tolist()):
            cache.tokens[row] = [*cache.tokens[row][: int(cache.lengths[row])], *new]
        self.texts = cache.tokens
        return torch.stack((rows, places + cache.lengths[:, None] + 1), -1).float(), None

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.zeros(len(hidden), 259)
        for place, (row, length) in enumerate(hidden.int().tolist()):
            out[place, self._next(self.texts[row][:length])] = 50.0
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
