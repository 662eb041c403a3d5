"""Linear attention whose state decays by one factor per head and token: the mathematics of Mamba-2 and of lightning attention.

S_t = a_t S_(t-1) + k_t v_t^T and o_t = S_t^T q_t, with 0 < a_t <= 1: state-space duality (Dao & Gu 2024, arXiv:2405.21060, sections 3 and
6), where q is C, k is B, v is the input times its time step and a_t = exp(dt_t A). Lightning attention (MiniMax-01, arXiv:2501.08313,
section 2.2.1) has the same form with one constant a per head. Nothing of a document reaches the next: the state is empty at its start.

Shapes: B batch, T time, G groups that share queries and keys, R heads of a group, H = G R heads, N size of queries and keys, P size of
values, Q tokens of a chunk, C chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.host.devices import at_least_fp32
from lmworks.model import linear_kernels
from lmworks.model.states import decayed_states

_CHUNK = 64  # tokens: products within a chunk cost in proportion to it, and the states between chunks in inverse proportion
_FEW = 4  # tokens, up to which one after another is faster than a chunk of them


def scan(
    query_BTGN: Tensor, key_BTGN: Tensor, value_BTHP: Tensor, log_decay_BTH: Tensor, positions_BT: Tensor,
    state_BHNP: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The outputs (B, T, H, P) and the last state (B, H, N, P), in fp32, chunk by chunk, or by a kernel where there is one
    (`linear_kernels`).

    `positions_BT`: the place of each token in its document, which begins at 0. `state_BHNP`: the state of what precedes the rows; it
    reaches the tokens whose position says that their document began earlier. A token with value 0 and `log_decay` 0 changes no state.
    """
    if query_BTGN.shape[1] <= _FEW:
        return scan_plain(query_BTGN, key_BTGN, value_BTHP, log_decay_BTH, positions_BT, state_BHNP)
    if linear_kernels.usable(query_BTGN, value_BTHP):
        return linear_kernels.scan(query_BTGN, key_BTGN, value_BTHP, log_decay_BTH, positions_BT, state_BHNP)
    query, key, value, log_decay = (at_least_fp32(x) for x in (query_BTGN, key_BTGN, value_BTHP, log_decay_BTH))
    (B, T, G, N), (H, P) = query.shape, value.shape[2:]
    Q = min(_CHUNK, T)
    place_T = torch.arange(T, device=query.device)
    start_BT = place_T - positions_BT
    if rest := -T % Q:  # tokens that change no state, of the last document
        query, key, value = (F.pad(x, (0, 0, 0, 0, 0, rest)) for x in (query, key, value))
        log_decay, start_BT = F.pad(log_decay, (0, 0, 0, rest)), torch.cat((start_BT, start_BT[:, -1:].expand(-1, rest)), dim=1)
    start_BCQ = start_BT.view(B, -1, Q)
    begin_C1 = Q * torch.arange(start_BCQ.shape[1], device=query.device)[:, None]
    query_BCGQN, key_BCGQN = (x.view(B, -1, Q, G, N).transpose(2, 3) for x in (query, key))
    value_BCGQX = value.view(B, -1, Q, G, H // G * P).transpose(2, 3)
    sum_BCQH = log_decay.view(B, -1, Q, H).cumsum(2, dtype=torch.float64)

    # within a chunk: a masked product of queries and keys, as in attention
    place_Q = torch.arange(Q, device=query.device)
    seen_BCQQ = (place_Q <= place_Q[:, None]) & (begin_C1[..., None] + place_Q >= start_BCQ[..., None])
    sum_BCHQ = sum_BCQH.transpose(2, 3)
    between_BCHQQ = (sum_BCHQ[..., None] - sum_BCHQ[..., None, :]).to(value.dtype)
    decay_BCHQQ = between_BCHQQ.masked_fill(~seen_BCQQ[:, :, None], float("-inf")).exp()
    scores_BCGQQ = query_BCGQN @ key_BCGQN.transpose(-1, -2)
    weights_BCGRQQ = decay_BCHQQ.unflatten(2, (G, -1)) * scores_BCGQQ[:, :, :, None]
    out_BCGRQP = weights_BCGRQQ @ value_BCGQX.unflatten(-1, (-1, P)).transpose(3, 4)

    # between chunks: what each adds to the state at its end, the state at its beginning, and what that gives
    last_BC1 = start_BCQ[:, :, -1:]
    adds_BCQ1 = (begin_C1 + place_Q >= last_BC1)[..., None]
    to_end_BCQH = (sum_BCQH[:, :, -1:] - sum_BCQH).to(value.dtype).masked_fill(~adds_BCQ1, float("-inf")).exp()
    ending_BCGQX = (value_BCGQX.unflatten(-1, (-1, P)) * _grouped(to_end_BCQH, G)[..., None]).flatten(-2)
    added_BCGNX = key_BCGQN.transpose(-1, -2) @ ending_BCGQX
    through_BCH = sum_BCQH[:, :, -1].to(value.dtype).exp() * (last_BC1 < begin_C1)
    added_CBGRNP = added_BCGNX.unflatten(-1, (-1, P)).permute(1, 0, 2, 4, 3, 5)
    state = query.new_zeros(added_CBGRNP[0].shape) if state_BHNP is None else at_least_fp32(state_BHNP).unflatten(1, (G, -1))
    states_CBGRNP = decayed_states(added_CBGRNP, through_BCH.unflatten(-1, (G, -1)).transpose(0, 1), state)
    reaches_BCQH = sum_BCQH.to(value.dtype).exp() * (start_BCQ < begin_C1)[..., None]
    entering_BCGQX = query_BCGQN @ states_CBGRNP[:-1].permute(1, 0, 2, 4, 3, 5).flatten(-2)
    entering_BCGQRP = entering_BCGQX.unflatten(-1, (-1, P)) * _grouped(reaches_BCQH, G)[..., None]
    out_BCQGRP = entering_BCGQRP.transpose(2, 3) + out_BCGRQP.permute(0, 1, 4, 2, 3, 5)
    return out_BCQGRP.reshape(B, -1, H, P)[:, :T], states_CBGRNP[-1].flatten(1, 2).clone()  # a view would keep all of them


def scan_plain(
    query_BTGN: Tensor, key_BTGN: Tensor, value_BTHP: Tensor, log_decay_BTH: Tensor, positions_BT: Tensor,
    state_BHNP: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`scan` one token after another: the reference implementation, and the step of decoding."""
    query, key, value, log_decay = (at_least_fp32(x) for x in (query_BTGN, key_BTGN, value_BTHP, log_decay_BTH))
    (B, T, G, N), (H, P) = query.shape, value.shape[2:]
    state = query.new_zeros(B, H, N, P) if state_BHNP is None else state_BHNP
    decay_BTH = log_decay.exp() * (positions_BT > 0)[..., None]
    query_BTHN, key_BTHN = (x.repeat_interleave(H // G, dim=2) if G < H else x for x in (query, key))
    out = []
    for at in range(T):
        added = key_BTHN[:, at, :, :, None] * value[:, at, :, None]
        state = torch.addcmul(added, state, decay_BTH[:, at, :, None, None])
        out.append((query_BTHN[:, at, :, None] @ state)[:, :, 0])
    return torch.stack(out, dim=1), state


def _grouped(x_BCQH: Tensor, groups: int) -> Tensor:
    """(B, C, G, Q, R)"""
    return x_BCQH.unflatten(-1, (groups, -1)).transpose(2, 3)
