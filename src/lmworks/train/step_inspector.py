"""Inspects each step for faults: values that are not finite, spikes, silent corruption.

`first_non_finite` finds the first operator of a forward and backward pass whose result is not finite. An operator is reported if it made a
NaN from inputs without NaN, or an infinity from finite inputs. So neither masks of -inf nor operators that only propagate such values are
reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lmworks.model import documents
from lmworks.optim.groups import local
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.train.fault_handler import FaultHandler
from lmworks.train.saving import TrainingState, is_due
from lmworks.train.step import StepValues, Trained, micro_batch_of, seed_dropout
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.monitors import tensors_in
from lmworks.watch.policy import Limits, RollbackRequest

_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}  # memory as it was found
_FILLS = {"fill", "fill_", "full", "full_like", "new_full", "masked_fill", "masked_fill_", "scalar_tensor", "where"}
_ATTENTION = "scaled_dot_product"  # its first result is the attention; of a row that sees nothing the others may be infinite


class FirstNonFinite(TorchDispatchMode):
    """Within the block, observes all operators; afterwards `found` describes the first faulty one, or is None.

    It names the module within `parts`. Layers run eagerly meanwhile, because compiled code cannot be observed. The pass takes several
    times as long.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.found: str | None = None
        self._modules = [named for part in parts for named in part.named_modules()]
        self._where: list[str] = [""]
        self._backward = ""
        self._stack = ExitStack()

    def __enter__(self) -> FirstNonFinite:
        for name, module in self._modules:
            for key, value in (*module._parameters.items(), *module._buffers.items()):
                if self.found is None and any(_faults(_floats(value))):
                    self.found = f"{name}.{key}, before the step".removeprefix(".")
            hooks = (module.register_forward_pre_hook(self._enter(name)), module.register_forward_hook(self._leave, always_call=True))
            for hook in hooks:
                self._stack.callback(hook.remove)
        for name in ("attend_flex", "attend_flex_lse"):
            self._stack.callback(setattr, documents, name, getattr(documents, name))
            setattr(documents, name, self._fused(getattr(documents, name)))
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, inputs: Any) -> None:
            outer = self._where[-1]
            self._where.append(name)
            for tensor in tensors_in(inputs):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._back(outer))

        return enter

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self._where.pop()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self._back(name))

    def _back(self, name: str) -> None:
        """Called when the backward pass enters a module at its output, or leaves it at its input."""
        self._backward = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        if self.found is not None or name in _UNWRITTEN or "c10d" in func.namespace:  # received values are the other rank's error
            return func(*args, **kwargs)
        given = _floats((args, kwargs))
        before = _faults(given) if func._schema.is_mutable else None  # it overwrites its inputs
        result = func(*args, **kwargs)
        made = _floats(result)
        self._judge(name, given, made[:1] if _ATTENTION in name else made, before)
        return result

    def _fused(self, attend: Any) -> Any:
        """FlexAttention as one compiled operator: in eager mode it would compute all scores."""

        def attend_flex(*args: Any) -> Any:
            with torch.compiler.set_stance("default"), _disable_current_modes():
                result = attend(*args)
                if self.found is None:
                    self._judge("flex_attention", _floats(args[:3]), _floats(result))
            return result

        return attend_flex

    def _judge(self, name: str, given: list[Tensor], made: list[Tensor], before: tuple[bool, bool] | None = None) -> None:
        """Report an operator if its result is faulty; `before`: faults of its inputs, if it has overwritten them."""
        nan, infinite = _faults(made)
        if nan or infinite:
            had_nan, had_infinite = before or _faults(given)
            if (nan and not had_nan) or (infinite and not (had_infinite or had_nan or name in _FILLS)):
                self._describe(name, "NaN" if nan and not had_nan else "infinite")

    def _describe(self, name: str, what: str) -> None:
        # Without a current autograd node this is the forward pass, or its recomputation.
        backward = torch._C._current_autograd_node() is not None and len(self._where) == 1
        where = self._backward if backward else self._where[-1]
        place = f" of {where}" if where else ""
        self.found = f"{name}{place}, {'backward' if backward else 'forward'} pass: its result is {what}"


def first_non_finite(model: ParallelModel, batch: Batch, rows: int, micro_batch_size: int, scale: float | Tensor) -> str | None:
    """Run forward and backward of a step under observation; returns this rank's first operator with a result that is not finite. Gradients
    are discarded.

    `batch` is this rank's share of the step's `rows` sequences. A failure here does not end the run; it is described in the result.
    """
    watched = FirstNonFinite(model.parts)
    try:
        with watched:
            model.rerun_forward_backward(batch, rows, micro_batch_size, scale)
    except Exception as error:  # most likely out of memory
        reason = (str(error).splitlines() or [""])[0]
        return watched.found or f"an operator that could not be found ({type(error).__name__}: {reason})"
    return watched.found


def _floats(values: Any) -> list[Tensor]:
    """The floating-point tensors among arguments or results, as this rank holds them."""
    found: Iterable[Any] = tree_leaves(values)
    real = [one for one in found if isinstance(one, Tensor) and not isinstance(one, FakeTensor)]  # fake tensors belong to a compilation
    return [local(one) for one in real if one.is_floating_point() and one.itemsize > 1 and one.numel()]


def _faults(tensors: list[Tensor]) -> tuple[bool, bool]:
    """Whether any is NaN, and whether any is infinite."""
    if all(bool(torch.isfinite(one).all()) for one in tensors):
        return False, False
    return any(bool(torch.isnan(one).any()) for one in tensors), any(bool(torch.isinf(one).any()) for one in tensors)


def _arrays(trained: Trained) -> Mapping[str, np.ndarray]:
    """The rows of all ranks, for replay."""
    batch = trained.whole() if callable(trained.whole) else trained.whole
    arrays = {"tokens": batch.tokens, "labels": batch.labels, "cu_seqlens": batch.cu_seqlens}
    return arrays if batch.weights is None else arrays | {"weights": batch.weights}


class StepInspector:
    """Judges the result of each step. `bad_steps` counts the steps of the stage that were not finite."""

    def __init__(
        self, recipe: Recipe, model: ParallelModel, state: TrainingState, faults: FaultHandler, heartbeat: Heartbeat,
        recheck_interval: int | None,
    ) -> None:  # fmt: skip
        self.bad_steps = 0
        self._recipe, self._model, self._state, self._faults = recipe, model, state, faults
        self._heartbeat, self._recheck_interval = heartbeat, recheck_interval

    def inspect(
        self, step: int, values: StepValues, updates: Sequence[Trained], limits: Limits, first: str | None
    ) -> RollbackRequest | None:
        """Judge a step; the rollback that it calls for, or None. Of several `updates` the first that was not applied is examined and saved.
        `first` is this rank's first operator with a result that is not finite, where it is known (`stability.detect_anomaly`)."""
        loss, norm = values.loss, values.grad_norm
        good = math.isfinite(loss) and math.isfinite(norm)
        self.bad_steps += not good
        # An overflow that a smaller scale avoids is how fp16 finds its scale, and no fault.
        if not good and math.isfinite(loss) and self._state.scaler is not None and not values.scale_exhausted:
            self._faults.policy.fault = ""
            return None
        number = min(values.updates or 0, len(updates) - 1)
        trained = updates[number]
        if not good and self._faults.policy.bad_steps.in_a_row == 0:
            first = self._find_first_non_finite(step, trained) if first is None else first
            self._faults.report_not_finite(step, first, (number, len(updates)))
        return self._faults.policy.observe(step, loss, norm, limits, partial(_arrays, trained))

    def recheck(self, step: int, batch: Batch) -> RollbackRequest | None:
        """Test for silent corruption, if it is due after this step."""
        if not is_due(step + 1, self._recheck_interval):
            return None
        return self._faults.check_corruption(step, self._model, self._state.optimizer, batch, self._micro_batch_size(batch))

    def _find_first_non_finite(self, step: int, trained: Trained) -> str | None:
        """Run forward and backward of an update again, to find this rank's first operator with a result that is not finite."""
        self._heartbeat.beat(step, "rehearse")
        seed_dropout(self._recipe.training_seed, step, self._model.ranks.global_rank, self._model.device)
        scaler = self._state.scaler
        scale = (1.0 if scaler is None else scaler.scale) / trained.normalizer
        found = first_non_finite(self._model, trained.batch, trained.rows, self._micro_batch_size(trained.batch), scale)
        weights = trained.batch.weights  # looked at last: the pass is collective
        return found if weights is None or np.isfinite(weights).all() else "the weights of the labels, before the step"

    def _micro_batch_size(self, batch: Batch) -> int:
        return micro_batch_of(self._recipe, batch.tokens.shape[1], self._model.pipeline is not None)

    def meta(self) -> dict[str, Any]:
        return {"bad_steps": self.bad_steps}

    def load(self, meta: Mapping[str, Any]) -> None:
        """Continue from a checkpoint with this meta."""
        self.bad_steps = int(meta["bad_steps"])
