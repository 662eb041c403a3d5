"""What a step draws at random (dropout) is a function of the seed, the step and the rank, so that no generator's state has to be kept."""

from __future__ import annotations

import hashlib


def seed_of(seed: int, step: int, rank: int) -> int:
    """63 bits for `torch.manual_seed`."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest(), "little") >> 1
