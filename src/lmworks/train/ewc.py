"""Elastic weight consolidation (Kirkpatrick et al. 2017, arXiv:1612.00796): keeps weights that matter for earlier data near their values.

The penalty is weight / 2 * sum over all weights of F (w - w0)^2. F is the empirical Fisher information per token: the mean over sequences
of the squared gradient of their summed loss, divided by tokens. So the penalty at weight 1 is the increase of the earlier loss in nats per
token, to second order. Both tensors are sharded like the parameters and are used elementwise, so the layout makes no difference.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.errors import UserError
from lmworks.io.run_layout import ewc_folder
from lmworks.optim.groups import local, local_grad
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from lmworks.recipe.schema.train import Ewc
from lmworks.shards.batch import Batch


class EwcPenalty:
    """The penalty of one phase: `fisher` (F) and `anchor` (w0), fp32, by parameter name."""

    def __init__(self, model: ParallelModel, options: Ewc) -> None:
        self._model, self.options = model, options
        self._parameters = dict(model.named_parameters())
        self.anchor = {name: parameter.detach().float().clone() for name, parameter in self._parameters.items()}
        self.fisher = {name: torch.zeros_like(anchor) for name, anchor in self.anchor.items()}

    def estimate(self, earlier: Iterable[Batch], loss_scale: float = 1.0) -> None:
        """Estimate F at the current weights, without dropout; each batch is one sequence. Collective, with the same batches on all ranks.

        Sequences are processed one at a time, because F sums the squares of their gradients. Raises `UserError` if no gradient is finite.
        """
        model, tokens = self._model, 0
        training = model.training
        model.eval()
        try:
            for batch in earlier:
                valid = batch.valid_tokens
                self._drop_gradients()
                share = valid / batch.tokens.size
                model.forward_backward(batch.rows(*model.rank_sequences(1)), 1, 1, loss_scale / max(valid, 1), share)
                if not torch.isfinite(model.clip_gradients(0.0)[0]):  # overflow in fp16
                    continue
                self._add_squares(valid, loss_scale)
                tokens += valid
        finally:
            self._drop_gradients()
            model.train(training)
        if not tokens:
            raise UserError("ewc: no gradient of the earlier data is finite, so the Fisher information cannot be estimated; remove ewc")
        for fisher in self.fisher.values():
            local(fisher).div_(tokens)

    @torch.no_grad()
    def _add_squares(self, valid: int, loss_scale: float) -> None:
        for name, parameter in self._parameters.items():
            if (grad := local_grad(parameter)) is not None:
                local(self.fisher[name]).add_((grad.float() * (valid / loss_scale)).square())

    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the penalty's gradient to those of the loss."""
        for name, parameter in self._parameters.items():
            if (grad := local_grad(parameter)) is not None:
                moved = local(parameter).float() - local(self.anchor[name])
                grad.add_((local(self.fisher[name]) * moved).to(grad.dtype), alpha=self.options.weight)

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """The current penalty, in nats per token, 0-d fp64; collective."""
        moved = {name: local(self.fisher[name]).sqrt() * (local(p) - local(self.anchor[name])) for name, p in self._parameters.items()}
        return self.options.weight / 2 * self._model.norm(moved) ** 2

    # F and w0 are constant within a phase, and are saved once, beside the checkpoints, and copied where those are.

    def save(self, checkpoints: Checkpoints, phase: str, step: int) -> None:
        """Keep F and w0 beside the checkpoints of the stage, as a checkpoint of `step`."""
        with _kept(checkpoints, phase) as kept:
            kept.save(step, self._model.without_duplicates(self._state()), {"tokens": 0}, wait=True)

    def load(self, checkpoints: Checkpoints, phase: str, step: int) -> None:
        """Take up again what was kept when the phase began with `step`. Raises `UserError` where it is lost or damaged."""
        with _kept(checkpoints, phase) as kept:
            meta = kept.load_latest(self._state(), lambda saved, _: saved != step)
        if meta is None:
            raise UserError(
                f"{kept.directory} does not hold what ewc estimated when the phase began (step {step:,}); put it back from a copy, or "
                f"estimate it again by going back to there: lmworks ckpt rollback {shlex.quote(str(checkpoints.directory.parent))} {step}"
            )

    def _state(self) -> dict[str, Any]:
        return {"fisher": dict(self.fisher), "anchor": dict(self.anchor)}


def _kept(checkpoints: Checkpoints, phase: str) -> Checkpoints:
    name = ewc_folder(phase)
    options = Options(keep_last=1, keep_best=False, asynchronous=False, copy_to=checkpoints.options.of(name).copy_to)

    def report(event: str, **fields: Any) -> None:  # it is no checkpoint of the stage
        if event == "checkpoint_copy_failed":
            checkpoints.report(event, **fields)

    return Checkpoints(checkpoints.directory / name, options, checkpoints.identity, report=report)
