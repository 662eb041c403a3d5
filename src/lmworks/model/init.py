"""Initial weights as a pure function of (seed, parameter name, position in the global tensor) (promise 2).

Each element is drawn by hashing its own index, so any rank can make its own part of a tensor, and only that.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from lmworks.model.transformer import Transformer

_BLOCK = 1 << 22  # elements at a time: memory stays small for any tensor


def normal(seed: int, name: str, start: int, count: int) -> Tensor:
    """Elements start .. start + count of the standard normal stream of `name`, in fp32.

    SplitMix64 (Steele et al. 2014) of the index gives 53 uniform bits; the inverse error function makes them normal.
    """
    key = np.uint64(int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little"))
    out = torch.empty(count, dtype=torch.float32)
    for begin in range(0, count, _BLOCK):
        size = min(_BLOCK, count - begin)
        z = np.arange(start + begin + 1, start + begin + 1 + size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        uniform = torch.from_numpy(((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-52 - 1.0)
        out[begin : begin + size] = torch.special.erfinv(uniform) * math.sqrt(2)
    return out


def standard_deviation(name: str, init_std: float, layers: int) -> float | None:
    """The table of all initialisations; None means the constant of `constant`.

    | parameter                          | value                                                       |
    | embedding, head, router            | normal, init_std                                            |
    | query, key, value, gate, up        | normal, init_std                                            |
    | output and down (into the residual)| normal, init_std / sqrt(2 * layers) (GPT-2)                 |
    | norms 1, biases 0                  | constant                                                    |
    """
    if "norm" in name or name.endswith("bias"):
        return None
    into_residual = name.endswith(("attention.output.weight", ".down", ".down.weight"))
    return init_std / math.sqrt(2 * layers) if into_residual else init_std


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> Transformer:
    """Fill all parameters; selection biases start at zero."""
    assert model.config.layers
    for name, parameter in model.named_parameters():
        std = standard_deviation(name, model.config.init_std, model.config.layers)
        if std is None:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.copy_((normal(seed, name, 0, parameter.numel()) * std).view_as(parameter))
    for ffn in model.routers():
        ffn.router.bias.zero_()
    return model
