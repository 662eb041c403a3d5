"""nanochat's own scripts with parts of its model left out, for `learning.py --without`:

    python benchmarks/nanochat_parts.py value-embeddings,softcap scripts.base_train ARGUMENT...

No exported class of ours can express these parts, or none in one model. Weight decay is left out by nanochat's own option.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

PARTS = ("value-embeddings", "softcap", "scalars", "weight-decay")


def leave_out(parts: Iterable[str]) -> None:
    """Change `nanochat.gpt` in this process."""
    from nanochat import gpt  # type: ignore[import-not-found]

    for part in parts:
        if part == "value-embeddings":
            gpt.has_ve = lambda layer, layers: False
        elif part == "softcap":
            gpt.torch = _Without(gpt.torch, tanh=lambda logits: logits)  # it has no other use there
        elif part == "scalars":
            _hold_scalars(gpt.GPT)


def _hold_scalars(model: Any) -> None:
    """The factors on the residual stream stay at 1; those on the embedding, on the token before and on the middle layer at 0."""
    first, groups = model.init_weights, model.setup_optimizer
    held = lambda self: (self.x0_lambdas, self.smear_lambda, self.backout_lambda, self.smear_gate.weight)  # noqa: E731

    def init_weights(self: Any) -> None:
        first(self)
        self.resid_lambdas.data.fill_(1.0)
        for one in held(self):
            one.data.zero_()

    def setup_optimizer(self: Any, **options: Any) -> Any:
        optimizer = groups(self, **options)
        still = {id(one) for one in (*held(self), self.resid_lambdas)}
        for group in optimizer.param_groups:
            if any(id(one) in still for one in group["params"]):
                group["lr"] = group["initial_lr"] = 0.0
        return optimizer

    model.init_weights, model.setup_optimizer = init_weights, setup_optimizer


class _Without(SimpleNamespace):
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        super().__init__(**names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


if __name__ == "__main__":
    leave_out(sys.argv[1].split(","))
    sys.argv[:] = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
