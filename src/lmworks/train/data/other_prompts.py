"""Answers to other prompts, from which KTO estimates its reference point (arXiv:2402.01306, section 4.2).

The estimate is the mean of log-probability ratios of answers that have nothing to do with their prompts. Peers take the answer of the row
before in the batch, which is the other answer to the same prompt wherever files list them together.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any


def prompt_key(messages: Sequence[dict[str, Any]]) -> str:
    """What makes two prompts the same: roles and contents of their messages, except for case, white space and system prompts."""
    asked = [one for one in messages if one.get("role") != "system"]
    return json.dumps([[one.get("role"), _plain(one.get("content")), one.get("tool_calls")] for one in asked])


def _plain(content: Any) -> Any:
    return " ".join(content.casefold().split()) if isinstance(content, str) else content


def other_rows(prompts: Sequence[str], rows: Sequence[bytes], seed: int) -> list[int] | None:
    """For each row the number of a row with another prompt; None if all have the same.

    `prompts` are the keys of the rows' prompts and `rows` identify the rows. Each row is taken once, unless more than half of the rows have
    one prompt: then the remaining ones are taken in turn. A function of the seed and of what the rows are, not of their order.
    """

    def mixed(value: bytes) -> bytes:
        return hashlib.blake2b(value, digest_size=16, key=str(seed).encode()).digest()

    count, sizes = len(prompts), Counter(prompts)
    if len(sizes) < 2:
        return None
    commonest, most = max(sizes.items(), key=lambda item: (item[1], item[0]))
    order = sorted(range(count), key=lambda row: (prompts[row] != commonest, mixed(prompts[row].encode()), mixed(rows[row])))
    found = [0] * count
    for place, row in enumerate(order):
        if 2 * most <= count or place >= most:
            # rows of equal prompts are neighbors, at most `most` of them: this far away is another prompt
            found[row] = order[(place + most) % count]
        else:
            found[row] = order[most + place % (count - most)]
    return found
