"""One optimizer object over Muon, AdamW and the weight average, with state by parameter name.

The weight average is an exponential moving average (Polyak & Juditsky 1992).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lmworks.errors import UserError
from lmworks.optim.adamw import AdamW
from lmworks.optim.groups import Group, conditional_update, group_parameters, largest_rates, local, part_of
from lmworks.optim.muon import Muon
from lmworks.optim.qk_clip import QkClip
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.train import Optimizer as Options


class Ema:
    """average <- decay * average + (1 - decay) * weight, in fp32, starting from the initial weights.

    State: `average[name]`, with the placement of the parameter.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.decay, self.parameters = decay, dict(parameters)
        self.average = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the weights as they are."""
        for name, parameter in self.parameters.items():
            local(self.average[name]).copy_(local(parameter))

    @torch.no_grad()
    def step(self, apply: Tensor | None = None) -> None:
        """Update the average with the weights; `apply` (0-d bool) False leaves it unchanged."""
        for name, parameter in self.parameters.items():
            average = local(self.average[name])
            with conditional_update([average], apply):
                average.lerp_(local(parameter).float(), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model has the averaged weights. Needs memory for one more parameter."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            weight, average = local(parameter), local(self.average[name])
            assert weight.dtype == average.dtype, f"{name} would be rounded"
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)


class Trainable(Protocol):
    """A model, or the parts of one."""

    @property
    def compute_dtype(self) -> torch.dtype: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    @property
    def config(self) -> Model: ...


class Updates(Protocol):
    """What a training loop needs of an optimizer."""

    @property
    def ema(self) -> Ema | None: ...

    def step(self, lr_factor: float = 1.0, apply: Tensor | bool = True, logits_AH: Tensor | None = None) -> None: ...

    def zero_grad(self) -> None: ...

    def learning_rates(self) -> dict[str, float]: ...

    def state_dict(self, values: bool = True) -> dict[str, Tensor]: ...


class Optimizer:
    """Trains the parameters of `groups`, sharded or not. All state exists from the start, so a checkpoint can be loaded in place.

    Where parameters are sharded, construction and `step` are collective, and `apply` must be the same on all ranks. `compute_dtype` is
    that of the model: Newton-Schulz runs in bf16 if it is bf16 or fp16, in fp32 if it is fp32, so that a run in fp32 is so throughout.
    """

    def __init__(
        self, groups: list[Group], options: Options, process_groups: Iterable[ProcessGroup] = (),
        compute_dtype: torch.dtype = torch.float32, qk_clip: QkClip | None = None,
    ) -> None:  # fmt: skip
        self.groups = groups
        self.parameters: dict[str, nn.Parameter] = {name: p for group in groups for name, p in group.parameters.items()}
        self.muon = Muon(
            [group for group in groups if group.kind == "muon"],
            momentum=options.momentum, nesterov=options.nesterov, steps=options.newton_schulz_steps, scale=options.update_scale,
            dtype=torch.float32 if compute_dtype == torch.float32 else torch.bfloat16, process_groups=process_groups,
        )  # fmt: skip
        self.adamw = AdamW([group for group in groups if group.kind == "adamw"], betas=options.betas, eps=options.eps)
        self.qk_clip = qk_clip
        self.ema = Ema(self.parameters, options.ema_decay) if options.ema_decay else None

    def step(self, lr_factor: float = 1.0, apply: Tensor | bool = True, logits_AH: Tensor | None = None) -> None:
        """One update from the gradients at `lr_factor` (`Schedules.lr_factor(step)`) times the peak rates.

        `apply` says whether the step may be used. Where it is already known to the host (a bool, or a tensor on the CPU) a bad step
        is left out; on an accelerator the old weights and state are selected there, and the host does not wait (promise 5).
        Either way nothing changes by a bad step, the count of steps included. `logits_AH`: the largest score of each head in the step,
        which QK-clip needs.
        """
        if isinstance(apply, bool) or apply.device.type == "cpu":
            if not apply:
                return
            apply = True
        on_device = None if isinstance(apply, bool) else apply
        self.muon.step(lr_factor, on_device)
        self.adamw.step(lr_factor, on_device)
        if self.qk_clip is not None:
            assert logits_AH is not None, "the model does not record its scores"
            self.qk_clip.step(logits_AH, on_device)
        if self.ema:
            self.ema.step(on_device)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def learning_rates(self) -> dict[str, float]:
        """`largest_rates`, for the metrics."""
        return largest_rates(self.groups)

    def state_dict(self, values: bool = True) -> dict[str, Tensor]:
        """The state itself, not a copy: flat, KIND.PARAMETER, each shaped and placed as its parameter; and `count`, the steps taken.

        `values` as in `ParallelModel.state_dict`.
        """
        kinds: dict[str, Mapping[str, Tensor]] = {"momentum": self.muon.momentum, "first": self.adamw.first, "second": self.adamw.second}
        if self.ema:
            kinds["average"] = self.ema.average
        return {"count": self.adamw.count} | {f"{kind}.{name}": t for kind, tensors in kinds.items() for name, t in tensors.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` in; names and shapes must be those of `state_dict()`. A tensor is placed as the parameter, or plain and whole."""
        own = self.state_dict()
        wrong = sorted(own.keys() ^ state.keys()) + [name for name in own.keys() & state.keys() if own[name].shape != state[name].shape]
        if wrong:
            raise UserError(
                f"optimizer state does not fit this model and recipe: {len(wrong)} entries differ, the first is {wrong[0]}; "
                "load the checkpoint with the recipe it was made with"
            )
        for name, tensor in own.items():
            given = state[name]
            if isinstance(given, DTensor):
                assert isinstance(tensor, DTensor) and given.placements == tensor.placements, f"{name} is placed {given.placements}"
            local(tensor).copy_(local(given) if isinstance(given, DTensor) else part_of(given, tensor))


def build_optimizer(
    model: Trainable, options: Options, layers: int | None = None, process_groups: Iterable[ProcessGroup] = ()
) -> Optimizer:  # fmt: skip
    """The optimizer of a model whose parameters have lmworks' names. Shard it and move it to its device first: the state follows it.

    Of a pipeline stage, `layers` is how many the whole model has (`optimizer.layer_lr_decay` counts from the top). Sharded matrices travel
    in those of `process_groups` that have just the right ranks, else in new ones, with torch's time-out.
    """
    groups, qk_clip = group_parameters(model.named_parameters(), options, layers), None
    if options.qk_clip_threshold is not None:
        qk_clip = QkClip(dict(model.named_parameters()), model.config, options.qk_clip_threshold)
    return Optimizer(groups, options, process_groups, model.compute_dtype, qk_clip)
