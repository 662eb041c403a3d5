"""ZeRO with DeepSpeed, for training state that the GPUs cannot hold (arXiv:1910.02054; on CPU: 2101.06840; on disks: 2104.07857).

It replaces FSDP2 and our optimizer within a step. Batches, losses, limits, schedules, metrics and checkpoints are those of every other
run. Weights, gradients and moments are fp32, as in every run; layers compute in `train.precision`.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmworks.errors import UserError
from lmworks.host.devices import dtype_for
from lmworks.io.files import explain_os_errors
from lmworks.model import Transformer
from lmworks.model.loss import HeadLoss
from lmworks.model.transformer import LayerStats, Loss
from lmworks.optim.adamw import fused_update
from lmworks.optim.groups import Group, group_parameters, largest_rates
from lmworks.parallel.collectives import override_members
from lmworks.parallel.mesh import Ranks, backend_for, own_device
from lmworks.parallel.parallel_model import ParallelModel, micro_batches
from lmworks.recipe.schema.layout import ZERO_BUCKET, ZERO_LIVE, DeepSpeed
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Optimizer as Options
from lmworks.shards.batch import Batch

_MOMENTS = ("first", "second")


class FlatAdamW(torch.optim.Optimizer):
    """Our AdamW on the flat fp32 tensors that DeepSpeed makes of each group, on any device.

    DeepSpeed calls `step` for one tensor at a time. `apply`: whether this step is applied; `count`: the number of applied steps.
    """

    def __init__(self, groups: list[Group], options: Options) -> None:
        self.betas, self.eps = options.betas, options.eps
        self.apply, self.count = False, torch.zeros(())
        self.groups = groups
        rules = [{"peak": group.learning_rate, "lr": 0.0, "weight_decay": group.weight_decay} for group in groups]
        super().__init__([{"params": [*group.parameters.values()]} | rule for group, rule in zip(groups, rules, strict=True)], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the tensors that have gradients. Their state exists afterwards, even if nothing is applied."""
        self.make_state()
        for group in self.param_groups if self.apply else ():
            for piece in group["params"]:
                if piece.grad is not None:
                    first, second = (self.state[piece][kind] for kind in _MOMENTS)
                    fused_update(
                        [piece], [piece.grad], [first], [second], self.count.to(piece.device),
                        group["lr"], self.betas, group["weight_decay"], self.eps,
                    )  # fmt: skip

    def make_state(self) -> None:
        """Create zero moments for tensors that have none."""
        for piece in [piece for group in self.param_groups for piece in group["params"] if piece not in self.state]:
            self.state[piece] = {kind: torch.zeros_like(piece) for kind in _MOMENTS}


class ZeroModel(ParallelModel):
    """A model and its optimizer under DeepSpeed.

    Construction takes over the model, which may be in CPU memory, and is collective.
    """

    def __init__(self, model: Transformer, ranks: Ranks, recipe: Recipe) -> None:
        options = recipe.train.deepspeed
        assert options is not None
        deepspeed = require_library(options)
        device = own_device()
        if not dist.is_initialized():  # a single process that was not launched
            dist.init_process_group(backend_for(device), store=dist.HashStore(), rank=0, world_size=1)
        model.compute_dtype = dtype_for(recipe.train.precision, device)
        _route_through_call(model)
        self._deepspeed, self._world, self._sharded = deepspeed, dist.get_world_size(), ranks.layout.zero == 3
        self.flat = FlatAdamW(
            group_parameters(model.named_parameters(), recipe.optimizer, recipe.model.num_hidden_layers), recipe.optimizer
        )
        settings = _settings(options, ranks.layout.zero, recipe.optimizer.max_grad_norm, max(p.numel() for p in model.parameters()))
        if self._sharded:
            sparse = {type(ffn) for ffn in model.moe_layers()}  # gathered as one: hooks cannot handle the output of a router
            if sparse:
                deepspeed.utils.set_z3_leaf_modules(model, list(sparse))
            deepspeed.zero.Init(module=model, config_dict_or_path=settings)
            for parameter in (model.embedding.weight, model.head.weight):  # used directly, not through their modules
                deepspeed.zero.register_external_parameter(model, parameter)
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(device))
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=self.flat, config=settings)
        super().__init__([model], ranks)
        self.device = device
        self._make_state()

    def _make_state(self) -> None:
        """Take a step that changes nothing. With ZeRO-3 the optimizer gets its tensors only in a step, and a checkpoint needs their state.

        Below ZeRO-3 all state must exist before the first step: DeepSpeed 0.19 links only state that exists after its first group.
        """
        self.flat.make_state()
        nothing = torch.zeros(1, 8, dtype=torch.int64, device=self.device)
        self.train()
        self._backward(self.parts[0], (nothing, nothing, torch.tensor([0, 8], dtype=torch.int32, device=self.device)), 0.0, last=True)
        self.engine.step()

    def _backward(self, model: Transformer, inputs: tuple[Any, ...], scale: float | Tensor, last: bool) -> Loss:
        self.engine.set_gradient_accumulation_boundary(last)
        parts = self.engine(*inputs, entry=_loss_parts)
        # DeepSpeed averages over the ranks, but `scale` already divides by the valid tokens of all of them.
        self.engine.backward(parts["total"] * (scale * self._world))
        return _joined(parts)

    @torch.no_grad()
    def rerun_forward_backward(self, batch: Batch, rows: int, micro_batch_size: int, scale: float | Tensor) -> None:
        """Forward only: DeepSpeed would add the gradients of a backward pass to those of the next step."""
        largest = -(-rows // self.ranks.size("dp"))
        for piece, _ in micro_batches(batch, -(-largest // micro_batch_size), micro_batch_size):
            self.parts[0].loss(*self._inputs(piece))

    def end_norms(self) -> Tensor | None:
        return None

    def clip_gradients(self, max_grad_norm: float) -> tuple[Tensor, Tensor | None]:
        """The global norm of the gradients, by which DeepSpeed clips in its own step; it has the gradients, so that nothing is known of
        their kinds."""
        optimizer = self.engine.optimizer
        # ZeRO-3 has no public name for its norm (DeepSpeed 0.19).
        norms = optimizer._get_norm_groups() if self._sharded else [optimizer.scaled_global_norm()]
        norm = torch.stack([norm.float().to(self.device) for norm in norms])
        return torch.linalg.vector_norm(torch.where(norm < 0, torch.nan, norm)), None  # -1 means not finite

    def optimizer(self) -> ZeroOptimizer:
        """The optimizer of this model."""
        return ZeroOptimizer(self)

    def state_dict(self, values: bool = True) -> dict[str, Any]:
        """Buffers, and full fp32 copies in CPU memory of the weights that this rank saves."""
        parameters = self._by_name()
        buffers = {name: value for name, value in self.parts[0].state_dict().items() if name not in parameters}
        return self._copies(None, parameters, values) | buffers

    def optimizer_state(self, values: bool) -> dict[str, Tensor]:
        """The moments that this rank saves, with the names of `Optimizer.state_dict`, and the step count."""
        parameters = dict(self.named_parameters())
        moments = {f"{kind}.{name}": t for kind in _MOMENTS for name, t in self._copies(kind, parameters, values).items()}
        return {"count": self.flat.count} | moments

    @torch.no_grad()
    def state_loaded(self, state: dict[str, Any]) -> None:
        """Distribute the tensors that the ranks have loaded into those of `state_dict`, one parameter at a time."""
        set_weight, set_moment = self._deepspeed.utils.safe_set_full_fp32_param, self._deepspeed.utils.safe_set_full_optimizer_state
        for name, parameter, keeper in self._kept(self._by_name()):
            value = self._spread(state["model"].get(name), parameter, keeper)
            set_weight(parameter, value)
            with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(value)
        for name, parameter, keeper in self._kept(dict(self.named_parameters())):
            for kind in _MOMENTS:
                set_moment(parameter, self._spread(state["optimizer"].get(f"{kind}.{name}"), parameter, keeper), kind)

    def _by_name(self) -> dict[str, nn.Parameter]:
        """Parameters by every name that they have in a checkpoint."""
        return dict(self.parts[0].named_parameters(remove_duplicate=False))

    def _kept(self, parameters: dict[str, nn.Parameter]) -> list[tuple[str, nn.Parameter, int]]:
        """Each parameter with the rank that saves and loads it; the ranks share the bytes evenly."""
        load, found = [0] * self._world, []
        for name, parameter in parameters.items():
            keeper = min(range(self._world), key=load.__getitem__)
            load[keeper] += _shape(parameter).numel()
            found.append((name, parameter, keeper))
        return found

    @torch.no_grad()
    def _copies(self, kind: str | None, parameters: dict[str, nn.Parameter], values: bool) -> dict[str, Tensor]:
        """Full weights, or moments of a kind. Parameters are gathered one at a time, and copied on the rank that saves them."""
        utils, found = self._deepspeed.utils, {}
        for name, parameter, keeper in self._kept(parameters):
            if values:
                weight = utils.safe_get_full_fp32_param(parameter) if kind is None else utils.safe_get_full_optimizer_state(parameter, kind)
            if keeper == dist.get_rank():
                found[name] = weight.to("cpu", copy=True) if values else torch.empty(_shape(parameter))
        return found

    def _spread(self, value: Tensor | None, parameter: nn.Parameter, keeper: int) -> Tensor:
        whole = torch.empty(_shape(parameter), device=self.device) if value is None else value.to(self.device)
        dist.broadcast(whole, keeper)
        return whole


class ZeroOptimizer:
    """The optimizer interface of the trainer, implemented by DeepSpeed and `FlatAdamW`."""

    ema = None

    def __init__(self, model: ZeroModel) -> None:
        self._model = model

    def step(self, lr_factor: float = 1.0, apply: Tensor | bool = True, logits_AH: Tensor | None = None) -> None:
        """As `Optimizer.step` without QK-clip, but with a host synchronization."""
        flat = self._model.flat
        flat.apply = bool(apply)
        flat.count += float(flat.apply)
        for group in flat.param_groups:
            group["lr"] = lr_factor * group["peak"]
        self._model.engine.step()

    def zero_grad(self) -> None:
        """Does nothing: DeepSpeed frees the gradients at the end of each step."""

    def learning_rates(self) -> dict[str, float]:
        """As `Optimizer.learning_rates`."""
        return largest_rates(self._model.flat.groups)

    def state_dict(self, values: bool = True) -> dict[str, Tensor]:
        """As `ParallelModel.state_dict`."""
        return self._model.optimizer_state(values)


def require_library(options: DeepSpeed) -> ModuleType:
    """Import DeepSpeed; raises `UserError` if it, or a library that the options need, is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        import deepspeed
    except ImportError:
        raise UserError("train.deepspeed needs DeepSpeed: pip install 'lmworks[deepspeed]'") from None
    # Otherwise DeepSpeed compiles shared-memory collectives for minutes before the first step on CPUs; gloo is used instead.
    deepspeed.ops.__compatible_ops__ = {}
    if options.path is not None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise UserError("train.deepspeed with nvme needs libaio and its headers: apt-get install libaio-dev")
        with explain_os_errors(Path(options.path)):
            Path(options.path).mkdir(parents=True, exist_ok=True)
    deepspeed.utils.logger.setLevel(logging.ERROR)  # it warns about optimizers other than its own
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)  # new names, which torch 2.11 does not have
    os.environ.setdefault("LOCAL_RANK", "0")  # a single process, or a launcher other than torchrun
    return deepspeed


def _settings(options: DeepSpeed, zero: int, clip: float, largest: int) -> dict[str, Any]:
    """DeepSpeed's own configuration; `largest` is the number of elements of the largest parameter."""
    places: dict[str, dict[str, Any]] = {}
    if options.offload != "none":
        places["offload_optimizer"] = {"device": options.offload, "nvme_path": options.path}
    if options.offload_weights != "none":  # each transfer buffer holds one parameter
        places["offload_param"] = {"device": options.offload_weights, "nvme_path": options.path, "buffer_size": largest}
    # Any access to a parameter on disk reads its whole sub-group, so each parameter is a sub-group of its own.
    pieces = {"sub_group_size": 1} if options.offload == "nvme" else {}
    live = {"stage3_max_live_parameters": ZERO_LIVE, "stage3_prefetch_bucket_size": ZERO_BUCKET} if zero == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,  # only for its statistics: the trainer sets the boundary
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,  # FlatAdamW is elementwise, as ZeRO requires
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW on CPU instead of a kernel that DeepSpeed would compile
        "zero_optimization":
            {"stage": zero, "reduce_bucket_size": ZERO_BUCKET, "allgather_bucket_size": ZERO_BUCKET} | live | places | pieces,
    }  # fmt: skip


def _shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of the full parameter, even if ZeRO-3 has sharded it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _route_through_call(model: Transformer) -> None:
    """Route every entry point of the model through `__call__`, where DeepSpeed's hooks gather the weights."""
    override_members(model, {"forward": _forward, "loss": _loss, "hidden": _hidden, "logits": _logits})


def _forward(model: Transformer, *args: Any, entry: Any = Transformer.forward, **options: Any) -> Any:
    return entry(model, *args, **options)


def _loss(model: Transformer, *args: Any) -> Loss:
    return _joined(model(*args, entry=_loss_parts))


def _hidden(model: Transformer, *args: Any, **options: Any) -> Any:
    return model(*args, entry=Transformer.hidden, **options)


def _logits(model: Transformer, *args: Any) -> Any:
    return model(*args, entry=Transformer.logits)


def _loss_parts(model: Transformer, *args: Any) -> dict[str, Tensor]:
    """A loss as a dictionary of plain tensors, which hooks can handle."""
    loss = Transformer.loss(model, *args)
    parts = {
        "total": loss.total, "cross_entropy": loss.head.cross_entropy, "z": loss.head.z,
        "of_tokens": loss.head.of_tokens_N,
        "counts": loss.layers.counts, "auxiliary": loss.layers.aux, "mtp": loss.mtp,
    }  # fmt: skip
    return {name: value for name, value in parts.items() if value is not None}


def _joined(parts: dict[str, Tensor]) -> Loss:
    head = HeadLoss(parts["cross_entropy"], parts["z"], parts["of_tokens"])
    return Loss(parts["total"], head, LayerStats(parts.get("counts"), parts.get("auxiliary")), parts.get("mtp"))
