"""Kernels of flash-linear-attention (Yang & Zhang 2024, github.com/fla-org/flash-linear-attention; extra `linear`) in place of `ssd.scan`
and `delta_rule.delta_rule`, on NVIDIA GPUs, for activations in half precision. Its functions are not compiled: a graph ends before and
begins after each.

Shapes: B batch, T time, G heads of queries and keys, H heads of values, K width of a key, V width of a value.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor

# The state that reaches the next document is multiplied by exp(-40), 4e-18: 1e-10 of what fp32 resolves. The kernels add up decays within
# a chunk of 64 tokens, and with a larger number the decays after it would lose digits: here 2e-6 for each border, of bf16's 4e-3.
_EMPTIES = -40.0
_HALF = (torch.bfloat16, torch.float16)


def usable(*activations: Tensor) -> bool:
    """Whether the kernels take these activations, one of which is in half precision: by their device and what is installed."""
    return any(x.dtype in _HALF for x in activations) and _available(activations[0].device)


@cache
def _available(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return find_spec("fla") is not None


def installed(device: torch.device) -> str | None:
    """The version of flash-linear-attention, if layers in half precision use it on this device."""
    return version("flash-linear-attention") if _available(device) else None


def scan(
    query_BTGK: Tensor, key_BTGK: Tensor, value_BTHV: Tensor, log_decay_BTH: Tensor, positions_BT: Tensor,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ssd.scan`."""
    from fla.ops.simple_gla import chunk_simple_gla

    query, key, value = _prepared(query_BTGK, key_BTGK, value_BTHV)
    out, state = chunk_simple_gla(
        query, key, value, g=_emptied(log_decay_BTH, positions_BT), scale=1.0,
        initial_state=state_BHKV, output_final_state=True,
    )  # fmt: skip
    return out.float(), state


def delta_rule(
    query_BTGK: Tensor, key_BTGK: Tensor, value_BTHV: Tensor, log_decay_BTH: Tensor, beta_BTH: Tensor, positions_BT: Tensor,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`delta_rule.delta_rule`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    query, key, value = _prepared(query_BTGK, key_BTGK, value_BTHV)
    out, state = chunk_gated_delta_rule(
        query, key, value, _emptied(log_decay_BTH, positions_BT), beta_BTH.float(), scale=1.0,
        initial_state=state_BHKV, output_final_state=True,
    )  # fmt: skip
    return out.float(), state


def _prepared(query_BTGK: Tensor, key_BTGK: Tensor, value_BTHV: Tensor) -> list[Tensor]:
    """All three with H heads, in half precision where one of them is."""
    shared = value_BTHV.shape[2] // query_BTGK.shape[2]
    query, key = (x.repeat_interleave(shared, dim=2) if shared > 1 else x for x in (query_BTGK, key_BTGK))
    dtype = query.dtype if query.dtype in _HALF else value_BTHV.dtype
    return [x.to(dtype) for x in (query, key, value_BTHV)]


def _emptied(log_decay_BTH: Tensor, positions_BT: Tensor) -> Tensor:
    """The decays with one that empties the state before each document."""
    return log_decay_BTH.float().masked_fill((positions_BT == 0)[..., None], _EMPTIES)
