"""The recurrences between chunks of linear attention, each one operator for the compiler: unrolled, a layer of long rows would be thousands
of operations.

The backward passes go through the chunks in reverse with the states that the forward pass has saved, as autograd does.

Shapes: * leading dimensions, C chunks, Q tokens of a chunk, K width of a key, V width of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmworks.model.operators import operator, register_autograd, register_fake


@operator
def decayed_states(added_CxKV: Tensor, factor_Cx: Tensor, state_xKV: Tensor) -> Tensor:
    """S_(c+1) = factor_c S_c + added_c for S_0 = `state`: all of them, (C + 1, *, K, V)."""
    states = added_CxKV.new_empty(added_CxKV.shape[0] + 1, *added_CxKV.shape[1:])
    states[0] = state_xKV
    factor = factor_Cx[..., None, None]
    for at, added in enumerate(added_CxKV):
        torch.addcmul(added, states[at], factor[at], out=states[at + 1])
    return states


@operator
def _decayed_states_backward(grad: Tensor, factor_Cx: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of S before each chunk and after the last: of `state`, and of each `added`; and of `factor`."""
    whole = grad.clone()
    factor = factor_Cx[..., None, None]
    for at in reversed(range(len(factor))):
        whole[at].addcmul_(whole[at + 1], factor[at])
    return whole, (whole[1:] * states[:-1]).sum((-1, -2))


@operator
def delta_states(
    values_CxQV: Tensor, reads_CxQK: Tensor, query_CxQK: Tensor, scores_CxQQ: Tensor, key_CxQK: Tensor, factor_Cx: Tensor, state_xKV: Tensor
) -> tuple[Tensor, Tensor]:
    """With U = values_c - reads_c S_c, the corrections of a chunk: outputs query_c S_c + scores_c U (C, *, Q, V), and the states
    S_(c+1) = factor_c S_c + key_c^T U for S_0 = `state`: all of them, (C + 1, *, K, V)."""
    out = torch.empty_like(values_CxQV, memory_format=torch.contiguous_format)
    states = state_xKV.new_empty(len(values_CxQV) + 1, *state_xKV.shape)
    states[0] = state_xKV
    factor = factor_Cx[..., None, None]
    for at, values in enumerate(values_CxQV):
        state = states[at]
        updates = values - reads_CxQK[at] @ state
        torch.matmul(query_CxQK[at], state, out=out[at])
        out[at] += scores_CxQQ[at] @ updates
        torch.addcmul(key_CxQK[at].mT @ updates, state, factor[at], out=states[at + 1])
    return out, states


@operator
def _delta_states_backward(
    grad_out: Tensor | None, grad_states: Tensor | None, values: Tensor, reads: Tensor, query: Tensor, scores: Tensor, key: Tensor,
    factor_Cx: Tensor, states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of all that `delta_states` takes."""
    grads = _like(values, reads, query, scores, key, factor_Cx)
    to_values, to_reads, to_query, to_scores, to_key, to_factor = grads
    factor = factor_Cx[..., None, None]
    after = torch.zeros_like(states[0]) if grad_states is None else grad_states[-1].clone()
    for at in reversed(range(len(values))):
        state = states[at]
        updates = values[at] - reads[at] @ state
        torch.matmul(key[at], after, out=to_values[at])  # the gradient of the corrections
        torch.matmul(updates, after.mT, out=to_key[at])
        torch.sum(after * state, (-1, -2), out=to_factor[at])
        before = after * factor[at]
        if grad_out is not None:
            to_values[at] += scores[at].mT @ grad_out[at]
            torch.matmul(grad_out[at], updates.mT, out=to_scores[at])
            torch.matmul(grad_out[at], state.mT, out=to_query[at])
            before += query[at].mT @ grad_out[at]
        torch.matmul(to_values[at], -state.mT, out=to_reads[at])
        before -= reads[at].mT @ to_values[at]
        after = before if grad_states is None else before + grad_states[at]
    if grad_out is None:
        to_scores.zero_()
        to_query.zero_()
    return (*grads, after)


def _like(*tensors: Tensor) -> tuple[Any, ...]:
    return tuple(torch.empty_like(one, memory_format=torch.contiguous_format) for one in tensors)


@register_fake(decayed_states)
def _(added: Tensor, factor: Tensor, state: Tensor) -> Tensor:
    return added.new_empty(added.shape[0] + 1, *added.shape[1:])


@register_fake(_decayed_states_backward)
def _(grad: Tensor, factor: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad, memory_format=torch.contiguous_format), torch.empty_like(factor, memory_format=torch.contiguous_format)


@register_fake(delta_states)
def _(values, reads, query, scores, key, factor, state):  # type: ignore[no-untyped-def]
    return *_like(values), state.new_empty(values.shape[0] + 1, *state.shape)


@register_fake(_delta_states_backward)
def _(grad_out, grad_states, values, reads, query, scores, key, factor, states):  # type: ignore[no-untyped-def]
    return *_like(values, reads, query, scores, key, factor), states.new_empty(states.shape[1:])


def _keep_decayed(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[1], output)


def _differentiate_decayed(ctx, grad):  # type: ignore[no-untyped-def]
    whole, factor = _decayed_states_backward(grad, *ctx.saved_tensors)
    return whole[1:], factor, whole[0]


def _keep_delta(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:-1], output[1])


def _differentiate_delta(ctx, grad_out, grad_states):  # type: ignore[no-untyped-def]
    return _delta_states_backward(grad_out, grad_states, *ctx.saved_tensors)


register_autograd(decayed_states, _differentiate_decayed, setup_context=_keep_decayed)
register_autograd(delta_states, _differentiate_delta, setup_context=_keep_delta)
