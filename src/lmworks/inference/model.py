"""Models for inference: weights cast once instead of for each token, and fewer and larger products.

Such a model computes what the original does, in the same precision, so answers and log-probabilities are the same up to the rounding of
sums in products of another shape. It holds weights only: it is never trained or saved.

On x86 CPUs oneDNN arranges the weights of linear layers for its products, as `torch.compile` does when it freezes weights. A product of a
few rows with a plain weight arranges it anew each time, which takes longer than to multiply by it.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lmworks.model.attention import Attention
from lmworks.model.layers import Adapter, Linear, RMSNorm, SwiGLU
from lmworks.model.lora import adapters
from lmworks.model.moe import Experts, has_grouped_mm
from lmworks.model.router import Router
from lmworks.model.transformer import Transformer

_FEW = 4
_ROWS = 16  # of a decode step, for which weights are arranged; other numbers of rows give the same results


class PackedLinear(nn.Module):
    """`Linear` without gradients and adapters."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), _ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


class FewNorm(nn.Module):
    """`RMSNorm` in four operators, where torch has six to nine: x / sqrt(|x|^2 + D eps) times the weight times sqrt(D)."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.size = norm.size
        self._weight = norm.weight.detach() * norm.size**0.5
        self._floor = norm.weight.new_full((), (norm.size * norm.eps) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x / self._length(x)).mul_(self._weight)

    def apply_(self, x: Tensor) -> None:
        """The norm in place."""
        x.div_(self._length(x)).mul_(self._weight)

    def _length(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)


def packing_pays(dtype: torch.dtype, device: torch.device, rows: int) -> bool:
    """Whether arranged weights of this type make products of so many rows faster on this device: those of fp32 do from a few rows on (fewer
    read each weight once in any case, and the plain product does it better), and those of bf16 always (LOG.md)."""
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    return (dtype == torch.float32 and rows >= _FEW) or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.no_grad()
def for_inference(
    model: Transformer, dtype: torch.dtype | None = None, device: torch.device | None = None, consume: bool = False,
    join: bool = True, rows: int = 1,
) -> Transformer:  # fmt: skip
    """A model in evaluation mode with the weights of `model` in `dtype`, by default that of its activations.

    Weights that have this type and place already are shared, not copied, unless they become a part of a larger matrix. Weights that are
    sharded are gathered one after another, so all ranks that share them call this together. `consume` empties `model`, whose memory is
    freed as the new weights are made. Without `join` the weights are only cast, and every result has the same bits. `rows` is the number
    of answers that it will usually write at a time. Routers keep fp32: a rounded gate could select another expert.
    """
    dtype, device = dtype or model.compute_dtype, device or model.embedding.weight.device
    new, joined = _skeleton(model, join)
    values: dict[str, Tensor] = dict(model.state_dict())
    values |= {name: buffer for name, buffer in model.named_buffers() if name not in values}  # those that no checkpoint holds
    if consume:
        model.to(device="meta")
    new.compute_dtype, new.logit_chunk_size = dtype, model.logit_chunk_size
    if new.config.tie_word_embeddings:
        values.pop("head.weight", None)  # sharing it would make it twice
    _fill(new, "", values, dtype, device, joined)
    if new.config.tie_word_embeddings:
        new.head.weight = new.embedding.weight  # type: ignore[assignment]
    if joined and packing_pays(dtype, device, rows):
        _pack(new)
    if joined and dtype == torch.float32 and device.type == "cpu":
        _few(new)
    new.configure(model.config)
    return new.eval()


def _pack(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is Linear and name != "kv_up":  # whose parts latent attention multiplies by
            setattr(module, name, PackedLinear(child))
        else:
            _pack(child)


def _few(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is RMSNorm:
            setattr(module, name, FewNorm(child))
        else:
            _few(child)


def is_whole(model: nn.Module) -> bool:
    """Whether this process holds all weights."""
    return not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _skeleton(model: Transformer, join: bool) -> tuple[Transformer, bool]:
    """The layers of a model without weights and without multi-token prediction, which is of use in training only, and
    whether matrices are joined in it."""
    with torch.device("meta"):
        new = Transformer(model.config).plain(model._plain)
        new.mtp = nn.ModuleList()
        found = list(adapters(model))
        for name, _, attribute, adapter in found:
            place, own = (name, "lora") if attribute == "weight" else (name.rpartition(".")[0], f"{attribute}_lora")
            module = new.get_submodule(place)
            setattr(module, own, Adapter(getattr(module, attribute), adapter.rank, adapter.scale, adapter.dropout))
    # an adapter is of one matrix, the reference implementations take one at a time, and joined heads are normed in place
    joined = join and not found and not model._plain and model.config.qk_norm_blend == 1
    new.prepared, new.joined = join, joined and not model.config.mla
    for block in new.every_block():
        block.in_place = joined
    return new, joined


def _fill(module: nn.Module, place: str, values: dict[str, Tensor], dtype: torch.dtype, device: torch.device, join: bool) -> None:
    """Move the weights of `values` into a module and those in it, and join matrices."""
    for name in [*module._parameters, *module._buffers]:
        if (value := values.pop(place + name, None)) is None:
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value.detach()
        is_weight = name in module._parameters
        placed = whole.to(device=device, dtype=dtype if is_weight and not isinstance(module, Router) else whole.dtype)
        if is_weight:
            module._parameters[name] = nn.Parameter(placed, requires_grad=False)
        else:
            module._buffers[name] = placed
        del value, whole
    for name, child in module.named_children():
        _fill(child, f"{place}{name}.", values, dtype, device, join)
    if join:
        _join(module)


def _join(module: nn.Module) -> None:
    """Make one matrix of those that are multiplied by the same input; the single ones are dropped."""
    if isinstance(module, Experts):
        if module.gate is not None and has_grouped_mm(module.down):
            module.joined = nn.Parameter(torch.cat((module.gate, module.up), dim=1), requires_grad=False)
            del module.gate, module.up
        return
    names = ("query", "key", "value") if isinstance(module, Attention) else ("gate", "up") if isinstance(module, SwiGLU) else ()
    if names:
        parts: list[Linear] = [module._modules.pop(name) for name in names]  # type: ignore[misc]
        with torch.device("meta"):
            joined = Linear(parts[0].weight.shape[1], sum(part.weight.shape[0] for part in parts))
        joined.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
        if parts[0].bias is not None:
            joined.bias = nn.Parameter(torch.cat([part.bias for part in parts if part.bias is not None]), requires_grad=False)
        module.joined = joined
    if isinstance(module, Attention) and module.query_norm is not None and module.query_norm.size == module.head_dim:
        assert module.key_norm is not None
        heads = ((module.query_norm, module.heads), (module.key_norm, module.kv_heads))
        with torch.device("meta"):
            module.joined_norm = RMSNorm(module.head_dim, module.query_norm.eps)
        weights = torch.cat([norm.weight.expand(count, -1) for norm, count in heads])
        module.joined_norm.weight = nn.Parameter(weights, requires_grad=False)
        module.query_norm = module.key_norm = None
