"""Initial weights as a pure function of (seed, parameter name, position in the global tensor) (promise 2).

Each element is drawn from a hash of its own index, so every rank can initialize its own part of a tensor, and only that.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from lmworks.model.transformer import Transformer
from lmworks.recipe.schema.model import is_convolution

_BLOCK = 1 << 15  # elements at a time, for each core: their 64-bit numbers stay in its cache, and torch does not divide so few further


def normal(seed: int, name: str, start: int, count: int) -> Tensor:
    """Elements start .. start + count of the standard normal stream of `name`, in fp32."""
    return normal_part(seed, name, (start + count,), (start,), (count,))


def normal_part(seed: int, name: str, shape: Sequence[int], begins: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The slice at offsets `begins` with `sizes` of a tensor of `shape` that is filled in row-major order from the stream of `name`; fp32.

    SplitMix64 (Steele et al. 2014) of an element's index gives 53 uniform bits; the inverse error function makes them normal.
    """
    key = np.uint64(int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little"))
    out = torch.empty(math.prod(sizes[:-1]), sizes[-1], dtype=torch.float32)
    first = _row_starts(shape, begins, sizes)

    width = max(1, min(_BLOCK, sizes[-1]))
    height = max(1, _BLOCK // width)
    across = -(-sizes[-1] // width)
    blocks = across * -(-len(first) // height)
    threads = min(torch.get_num_threads(), blocks)

    def draw(thread: int) -> None:
        for block in range(thread, blocks, threads):
            row, column = block // across * height, block % across * width
            z = first[row : row + height, None] + np.arange(column + 1, min(column + width, sizes[-1]) + 1, dtype=np.uint64)
            z = z * np.uint64(0x9E3779B97F4A7C15) + key
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
            uniform = torch.from_numpy(((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-52 - 1.0)
            out[row : row + height, column : column + width] = torch.special.erfinv(uniform) * math.sqrt(2)

    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:  # NumPy and torch release the lock of the interpreter
            deque(pool.map(draw, range(threads)), 0)
    elif blocks:
        draw(0)
    return out.view(tuple(sizes))


def _row_starts(shape: Sequence[int], begins: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """The index, in the full tensor, of the first element of each row of the slice."""
    first = np.full(1, begins[-1], dtype=np.uint64)
    stride = shape[-1]
    for dim in range(len(shape) - 2, -1, -1):
        places = np.arange(begins[dim], begins[dim] + sizes[dim], dtype=np.uint64) * np.uint64(stride)
        first = (places[:, None] + first).ravel()
        stride *= shape[dim]
    return first


def standard_deviation(name: str, init_std: float, layers: int) -> float | None:
    """The standard deviation of a parameter's initial values; None for constants.

    | parameter                           | value                                                |
    | embedding, head, router             | normal, initializer_range                            |
    | query, key, value, gate, up         | normal, initializer_range                            |
    | output and down (into the residual) | normal, initializer_range / sqrt(2 * layers) (GPT-2) |
    | norms                               | 1                                                    |
    | biases                              | 0                                                    |
    | filters of convolutions             | normal, 1 / sqrt(3 * width), as of PyTorch's uniform |

    Decays and time steps of recurrent layers are not normal: `_DRAWN`.
    Of a low-rank adapter, A has the variance of PEFT's uniform values, 1 / (3 * inputs), and B is 0.
    """
    if "norm" in name or name.endswith(("bias", "lora.B")):
        return None
    into_residual = name.endswith((
        "attention.output.weight", "attention.projection.weight", "mamba.projection.weight", ".down", ".down.weight"
    ))  # fmt: skip
    return init_std / math.sqrt(2 * layers) if into_residual else init_std


def _log_rates(uniform: Tensor) -> Tensor:
    """The logarithms of rates of decay between 0.01 and 16 (Qwen3-Next; Mamba-2: 1 to 16)."""
    return (0.01 + 15.99 * uniform).log()


def _time_steps(uniform: Tensor) -> Tensor:
    """What softplus makes a time step of, log-uniform between 0.001 and 0.1 (Mamba, arXiv:2312.00752, section 3.6)."""
    step = (0.001 * 100**uniform).clamp_min(1e-4)
    return step + (-(-step).expm1()).log()


_DRAWN: dict[str, Callable[[Tensor], Tensor]] = {"A_log": _log_rates, "dt_bias": _time_steps, "skip": torch.ones_like}
"""The last part of a name -> values from uniform ones."""


def whole(parameter: Tensor) -> tuple[Tensor, Sequence[int]]:
    """The part of a parameter that a single process holds: all of it, at offset 0."""
    return parameter, (0,) * parameter.ndim


@torch.no_grad()
def initialize(model: Transformer, seed: int, part: Callable[[Tensor], tuple[Tensor, Sequence[int]]] = whole) -> Transformer:
    """Initialize all parameters; selection biases start at zero.

    `part` returns this rank's slice of a parameter, as a plain tensor, and its offsets in the full tensor.
    """
    assert model.config.num_hidden_layers
    for name, parameter in model.named_parameters():
        std = standard_deviation(name, model.config.initializer_range, model.config.num_hidden_layers)
        if name.endswith("lora.A") or is_convolution(name):
            std = (3 * parameter.shape[-1]) ** -0.5
        here, begins = part(parameter)
        if (drawn := _DRAWN.get(name.rpartition(".")[2])) is not None:
            here.copy_(drawn(torch.special.ndtr(normal_part(seed, name, parameter.shape, begins, here.shape))))
        elif std is None:
            here.fill_(0.0 if name.endswith(("bias", "lora.B")) else 1.0)
        elif here.numel():
            here.copy_(normal_part(seed, name, parameter.shape, begins, here.shape) * std)
    for ffn in model.moe_layers():
        ffn.router.bias.zero_()
        ffn.router.temperature.fill_(1.0)
    return model
