"""How many calibration tokens each expert is routed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lmworks.model import Transformer
from lmworks.model.router import Router, Routing
from lmworks.progress import bar
from lmworks.quantize.texts import Window


@torch.no_grad()
def expert_tokens(model: Transformer, windows: Sequence[Window], limit: int) -> dict[str, Any] | None:
    """Tokens per expert over all layers: count of experts, least, median, most, and how many have fewer than `limit`; `fewest` names the
    layers and experts with the fewest. None for a dense model."""
    routers = [(name, module) for name, module in model.named_modules() if isinstance(module, Router) and not name.startswith("mtp.")]
    if not routers:
        return None
    counts: dict[str, Tensor] = {}

    def observe(name: str) -> Any:
        def hook(_: nn.Module, __: Any, routing: Routing) -> None:
            counts[name] = counts.get(name, torch.zeros_like(routing.counts)) + routing.counts

        return hook

    handles = [module.register_forward_hook(observe(name)) for name, module in routers]
    try:
        with bar("calibration: experts", sum(len(window.ids) for window in windows)) as progress:
            for window in windows:
                model.hidden(torch.tensor(window.ids)[None])
                progress.advance(len(window.ids))
    finally:
        for handle in handles:
            handle.remove()
    each = [(int(count), name.removesuffix(".ffn.router"), expert) for name, found in counts.items() for expert, count in enumerate(found)]
    values = [count for count, _, _ in each]
    return {
        "count": len(values), "least": min(values), "median": int(statistics.median(values)), "most": max(values), "limit": limit,
        "under_limit": sum(value < limit for value in values),
        "fewest": [{"layer": name, "expert": expert, "tokens": count} for count, name, expert in sorted(each)[:5]],
    }  # fmt: skip
