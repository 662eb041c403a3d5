"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464, section 3): linear attention whose state forgets, and is corrected.

S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T and o_t = S_t^T q_t, with 0 < a_t <= 1 and 0 < b_t < 1: the state decays, and what it
predicts for the key is replaced by the value to the degree b_t. Written as a correction: S_t = a_t S_(t-1) + k_t u_t^T with
u_t = b_t (v_t - (a_t S_(t-1))^T k_t).

The chunked form is that of section 3.3: with d_ij the product of the decays after j up to i, the corrections U of a chunk solve the
triangular system (I + strictly lower (b_i d_ij k_i^T k_j)) U = b V - (b d_i0 K) S, so all of a chunk is products of matrices, and only
the states at the borders of chunks follow one after another. Nothing of a document reaches the next: the state is empty at its start.

Shapes: B batch, T time, G key heads, R value heads of a key head, H = G R value heads, K width of a key, V width of a value, Q tokens of a
chunk, C chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.host.devices import at_least_fp32
from lmworks.model import linear_kernels
from lmworks.model.states import delta_states

_CHUNK = 64


def delta_rule_plain(
    query_BTGK: Tensor, key_BTGK: Tensor, value_BTHV: Tensor, log_decay_BTH: Tensor, beta_BTH: Tensor, positions_BT: Tensor,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The outputs (B, T, H, V) and the last state (B, H, K, V) in at least fp32, one token after another: the reference implementation, and
    the step of decoding.

    `positions_BT`: the place of each token in its document, which begins at 0. `state_BHKV`: the state of what precedes the rows; it
    reaches the tokens whose documents began earlier. A token with `beta` 0 and `log_decay` 0 changes no state.
    """
    query, key, value, log_decay, beta = map(at_least_fp32, (query_BTGK, key_BTGK, value_BTHV, log_decay_BTH, beta_BTH))
    B, T, G, K = query.shape
    H, V = value.shape[2:]
    if G < H:
        query, key = (x.repeat_interleave(H // G, dim=2) for x in (query, key))
    decay_BTH = log_decay.exp() * (positions_BT > 0)[..., None]
    state = query.new_zeros(B, H, K, V) if state_BHKV is None else state_BHKV
    out = []
    for at in range(T):
        state = state * decay_BTH[:, at, :, None, None]
        key_BHK1 = key[:, at, :, :, None]
        update_BH1V = (value[:, at, :, None] - key_BHK1.mT @ state) * beta[:, at, :, None, None]
        state = torch.addcmul(state, key_BHK1, update_BH1V)
        out.append((query[:, at, :, None] @ state)[:, :, 0])
    return torch.stack(out, dim=1), state


def delta_rule(
    query_BTGK: Tensor, key_BTGK: Tensor, value_BTHV: Tensor, log_decay_BTH: Tensor, beta_BTH: Tensor, positions_BT: Tensor,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`delta_rule_plain`, chunk by chunk, or by a kernel where there is one (`linear_kernels`)."""
    T = query_BTGK.shape[1]
    if T == 1:
        return delta_rule_plain(query_BTGK, key_BTGK, value_BTHV, log_decay_BTH, beta_BTH, positions_BT, state_BHKV)
    if linear_kernels.usable(value_BTHV, query_BTGK):
        return linear_kernels.delta_rule(query_BTGK, key_BTGK, value_BTHV, log_decay_BTH, beta_BTH, positions_BT, state_BHKV)
    query, key, value, log_decay, beta = map(at_least_fp32, (query_BTGK, key_BTGK, value_BTHV, log_decay_BTH, beta_BTH))
    (B, _, G, K), (H, V) = query.shape, value.shape[2:]
    R, Q = H // G, min(_CHUNK, T)
    documents_BT = (positions_BT == 0).cumsum(1)  # number in the row; 0 continues what precedes the row
    if rest := -T % Q:  # tokens that change no state, of the last document
        query, key, value = (F.pad(x, (0, 0, 0, 0, 0, rest)) for x in (query, key, value))
        log_decay, beta = (F.pad(x, (0, 0, 0, rest)) for x in (log_decay, beta))
        documents_BT = torch.cat((documents_BT, documents_BT[:, -1:].expand(-1, rest)), dim=1)
    query_BGCQK, key_BGCQK = (x.view(B, -1, Q, G, K).permute(0, 3, 1, 2, 4) for x in (query, key))
    value_BGRCQV = value.view(B, -1, Q, G, R, V).permute(0, 3, 4, 1, 2, 5)
    decay_BGRCQ, beta_BGRCQ = (x.view(B, -1, Q, G, R).permute(0, 3, 4, 1, 2) for x in (log_decay, beta))
    beta_BGRCQ = beta_BGRCQ.contiguous()
    sum_BGRCQ = decay_BGRCQ.cumsum(-1)

    documents_BCQ = documents_BT.view(B, -1, Q)
    before_BC1 = F.pad(documents_BCQ[:, :-1, -1], (1, 0)).unsqueeze(-1)
    seen_BCQQ = (documents_BCQ[..., None] == documents_BCQ[..., None, :]).tril()
    reads_BCQ, adds_BCQ = documents_BCQ == before_BC1, documents_BCQ == documents_BCQ[..., -1:]
    between_BGRCQQ = (sum_BGRCQ[..., None] - sum_BGRCQ[..., None, :]).masked_fill(~seen_BCQQ[:, None, None], float("-inf")).exp()
    enters_BGRCQ1 = (sum_BGRCQ.exp() * reads_BCQ[:, None, None])[..., None]
    leaves_BGRCQ1 = ((sum_BGRCQ[..., -1:] - sum_BGRCQ).exp() * adds_BCQ[:, None, None])[..., None]
    through_BGRC = sum_BGRCQ[..., -1].exp() * reads_BCQ[:, None, None, :, -1]

    # within a chunk: the corrections with an empty state, and what a state would change of them
    system_BGRCQQ = between_BGRCQQ * (key_BGCQK @ key_BGCQK.mT)[:, :, None] * beta_BGRCQ[..., None]
    key_BG1CQK, query_BG1CQK = key_BGCQK[:, :, None], query_BGCQK[:, :, None]
    wanted = torch.cat((value_BGRCQV * beta_BGRCQ[..., None], key_BG1CQK * (enters_BGRCQ1 * beta_BGRCQ[..., None])), dim=-1)
    solved = torch.linalg.solve_triangular(system_BGRCQQ, wanted, upper=False, unitriangular=True)
    scores_BGRCQQ = between_BGRCQQ * (query_BGCQK @ key_BGCQK.mT)[:, :, None]

    # between chunks
    state = query.new_zeros(B, G, R, K, V) if state_BHKV is None else state_BHKV.view(B, G, R, K, V)
    parts = (
        solved[..., :V], solved[..., V:], query_BG1CQK * enters_BGRCQ1, scores_BGRCQQ, key_BG1CQK * leaves_BGRCQ1, through_BGRC,
    )  # fmt: skip
    out_CBGRQV, states = delta_states(*(x.movedim(3, 0) for x in parts), state)
    out_BTHV = out_CBGRQV.permute(1, 0, 4, 2, 3, 5).reshape(B, -1, H, V)
    return out_BTHV[:, :T], states[-1].flatten(1, 2).clone()  # a view would keep all of them
