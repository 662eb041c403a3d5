"""ZeRO by DeepSpeed, for training state that the GPUs cannot hold (arXiv:1910.02054; on CPU: 2101.06840; on disks: 2104.07857).

It takes the place of FSDP2 and of our optimizer inside a step. Batches, losses, limits, schedules, metrics and checkpoints are those of
every other run. Weights, gradients and moments are fp32, as everywhere here; layers compute in `train.precision`.
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
from lmworks.files import explain_os_errors
from lmworks.model import Transformer
from lmworks.model.loss import HeadLoss
from lmworks.model.transformer import ExpertStats, Loss
from lmworks.optim.adamw import fused_update
from lmworks.optim.groups import Group, group_parameters
from lmworks.parallel.mesh import Ranks, backend_for, own_device
from lmworks.parallel.module_overrides import override_members
from lmworks.parallel.parallel_model import ParallelModel, micro_batches
from lmworks.precision import dtype_for
from lmworks.recipe.schema.deepspeed import BUCKET, LIVE, DeepSpeed
from lmworks.recipe.schema.optimizer import Optimizer as Options
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.read.batch import Batch

_MOMENTS = ("first", "second")


class FlatAdamW(torch.optim.Optimizer):
    """Our AdamW on the flat fp32 pieces that DeepSpeed makes of each group, in whatever memory they lie.

    DeepSpeed calls `step` piece by piece. `apply` says whether this step may change anything; `count` are the steps taken with it.
    """

    def __init__(self, groups: list[Group], options: Options) -> None:
        self.betas, self.eps = options.betas, options.eps
        self.apply, self.count = False, torch.zeros(())
        rules = [{"peak": group.learning_rate, "lr": 0.0, "weight_decay": group.weight_decay} for group in groups]
        super().__init__([{"params": [*group.parameters.values()]} | rule for group, rule in zip(groups, rules, strict=True)], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the pieces that have gradients; their state exists afterwards, also where nothing is applied."""
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
        """Zeros as the moments of pieces that have none."""
        for piece in [piece for group in self.param_groups for piece in group["params"] if piece not in self.state]:
            self.state[piece] = {kind: torch.zeros_like(piece) for kind in _MOMENTS}


class ZeroModel(ParallelModel):
    """A whole model in DeepSpeed's hands, with the optimizer that belongs to it.

    Construction takes over the model, which may lie in CPU memory, and is collective.
    """

    def __init__(self, model: Transformer, ranks: Ranks, recipe: Recipe) -> None:
        options = recipe.train.deepspeed
        assert options is not None
        deepspeed = _library(options)
        device = own_device()
        if not dist.is_initialized():  # one process that nobody launched
            dist.init_process_group(backend_for(device), store=dist.HashStore(), rank=0, world_size=1)
        model.compute_dtype = dtype_for(recipe.train.precision, device)
        _enter_by_call(model)
        self._deepspeed, self._world, self._sharded = deepspeed, dist.get_world_size(), ranks.layout.zero == 3
        self.flat = FlatAdamW(
            group_parameters(model.named_parameters(), recipe.optimizer, recipe.model.num_hidden_layers), recipe.optimizer
        )
        settings = _settings(options, ranks.layout.zero, recipe.optimizer.max_grad_norm, max(p.numel() for p in model.parameters()))
        if self._sharded:
            sparse = {type(ffn) for ffn in model.moe_layers()}  # gathered as one: what a router returns is no plain tensor to hook
            if sparse:
                deepspeed.utils.set_z3_leaf_modules(model, list(sparse))
            deepspeed.zero.Init(module=model, config_dict_or_path=settings)
            for parameter in (model.embedding.weight, model.head.weight):  # used by the model itself, not through their modules
                deepspeed.zero.register_external_parameter(model, parameter)
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(device))
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=self.flat, config=settings)
        super().__init__([model], ranks)
        self.device = device
        self._make_state()

    def _make_state(self) -> None:
        """Take a step that changes nothing: at ZeRO-3 the pieces meet the optimizer only in a step, and a checkpoint needs their state.

        Below ZeRO-3 all state must be there before the first step: DeepSpeed 0.19 finds in it what exists when its first group is done.
        """
        self.flat.make_state()
        nothing = torch.zeros(1, 8, dtype=torch.int64, device=self.device)
        self.train()
        self._backward(self.parts[0], (nothing, nothing, torch.tensor([0, 8], dtype=torch.int32, device=self.device)), 0.0, last=True)
        self.engine.step()

    def _backward(self, model: Transformer, inputs: tuple[Any, ...], scale: float | Tensor, last: bool) -> Loss:
        self.engine.set_gradient_accumulation_boundary(last)
        parts = self.engine(*inputs, entry=_loss_parts)
        # DeepSpeed averages over the ranks, and `scale` has the valid tokens of all of them.
        self.engine.backward(parts["total"] * (scale * self._world))
        return _joined(parts)

    @torch.no_grad()
    def rerun_forward_backward(self, batch: Batch, rows: int, micro_batch_size: int, scale: float | Tensor) -> None:
        """Forward only: DeepSpeed would add the gradients of a backward pass to those of the next step."""
        largest = -(-rows // self.ranks.size("dp"))
        for piece, _ in micro_batches(batch, -(-largest // micro_batch_size), micro_batch_size):
            self.parts[0].loss(*self._inputs(piece))

    def clip_gradients(self, max_grad_norm: float) -> Tensor:
        """The global norm of the gradients; DeepSpeed clips by it in its own step."""
        optimizer = self.engine.optimizer
        # ZeRO-3 has no public name for its norm (DeepSpeed 0.19).
        norms = optimizer._get_norm_groups() if self._sharded else [optimizer.scaled_global_norm()]
        norm = torch.stack([norm.float().to(self.device) for norm in norms])
        return torch.linalg.vector_norm(torch.where(norm < 0, torch.nan, norm))  # -1 stands for not finite

    def optimizer(self) -> ZeroOptimizer:
        """What updates this model."""
        return ZeroOptimizer(self)

    def state_dict(self, values: bool = True) -> dict[str, Any]:
        """Buffers, and the weights that this rank has to save: whole fp32 copies, in CPU memory."""
        parameters = self._by_name()
        buffers = {name: value for name, value in self.parts[0].state_dict().items() if name not in parameters}
        return self._copies(None, parameters, values) | buffers

    def optimizer_state(self, values: bool) -> dict[str, Tensor]:
        """The moments that this rank has to save, as `Optimizer.state_dict` names them, and the count of steps."""
        parameters = dict(self.named_parameters())
        moments = {f"{kind}.{name}": t for kind in _MOMENTS for name, t in self._copies(kind, parameters, values).items()}
        return {"count": self.flat.count} | moments

    @torch.no_grad()
    def state_loaded(self, state: dict[str, Any]) -> None:
        """Distribute what the ranks have loaded into the places of `state_dict`, one parameter at a time."""
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
        """Whole weights, or moments of a kind; one parameter at a time is whole on all ranks, and then on the one that keeps it."""
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
    """What the trainer needs of an optimizer, carried out by DeepSpeed and `FlatAdamW`."""

    ema = None

    def __init__(self, model: ZeroModel) -> None:
        self._model = model

    def step(self, lr_factor: float = 1.0, apply: Tensor | bool = True) -> None:
        """As `Optimizer.step`. DeepSpeed drops the gradients of a bad step, and the host waits to know it."""
        flat = self._model.flat
        flat.apply = bool(apply)
        flat.count += float(flat.apply)
        for group in flat.param_groups:
            group["lr"] = lr_factor * group["peak"]
        self._model.engine.step()

    def zero_grad(self) -> None:
        """Nothing: every step of DeepSpeed ends without gradients."""

    def learning_rates(self, lr_factor: float = 1.0) -> dict[str, float]:
        """The largest rate at this `lr_factor`, for the metrics."""
        return {"adamw": lr_factor * max(group["peak"] for group in self._model.flat.param_groups)}

    def state_dict(self, values: bool = True) -> dict[str, Tensor]:
        """As `ParallelModel.state_dict`."""
        return self._model.optimizer_state(values)


def _library(options: DeepSpeed) -> ModuleType:
    """DeepSpeed, if it is installed with what the options need."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        import deepspeed
    except ImportError:
        raise UserError("train.deepspeed needs DeepSpeed: pip install 'lmworks[deepspeed]'") from None
    # Else collectives in shared memory would be compiled for minutes before the first step on CPUs, where gloo is there.
    deepspeed.ops.__compatible_ops__ = {}
    if options.path is not None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise UserError("train.deepspeed with nvme needs libaio and its headers: apt-get install libaio-dev")
        with explain_os_errors(Path(options.path)):
            Path(options.path).mkdir(parents=True, exist_ok=True)
    deepspeed.utils.logger.setLevel(logging.ERROR)  # it warns of any optimizer that is not its own
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)  # new names, which torch 2.11 does not have
    os.environ.setdefault("LOCAL_RANK", "0")  # where one process was started alone, or by something else than torchrun
    return deepspeed


def _settings(options: DeepSpeed, zero: int, clip: float, largest: int) -> dict[str, Any]:
    """DeepSpeed's own configuration; `largest` is how many elements a parameter has at most."""
    places: dict[str, dict[str, Any]] = {}
    if options.offload != "none":
        places["offload_optimizer"] = {"device": options.offload, "nvme_path": options.path}
    if options.offload_weights != "none":  # its buffers for weights on their way hold one parameter each
        places["offload_param"] = {"device": options.offload_weights, "nvme_path": options.path, "buffer_size": largest}
    # Whatever is asked of a parameter on disk reads the whole piece that it is a part of: one piece for each.
    pieces = {"sub_group_size": 1} if options.offload == "nvme" else {}
    live = {"stage3_max_live_parameters": LIVE, "stage3_prefetch_bucket_size": BUCKET} if zero == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,  # only for its figures: the trainer says which is the last
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,  # FlatAdamW: elementwise, as ZeRO asks
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW on CPU instead of a kernel that is compiled at the start
        "zero_optimization": {"stage": zero, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET} | live | places | pieces,
    }  # fmt: skip


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Of the whole, also where ZeRO-3 has left nothing of it here."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _enter_by_call(model: Transformer) -> None:
    """Let every way into the model be a call of it: only there do DeepSpeed's hooks see that weights are needed."""
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
    """A loss as the plain tensors that hooks know how to handle."""
    loss = Transformer.loss(model, *args)
    parts = {
        "total": loss.total, "cross_entropy": loss.head.cross_entropy, "z": loss.head.z,
        "of_tokens": loss.head.of_tokens_N,
        "counts": loss.experts.counts, "auxiliary": loss.experts.aux, "mtp": loss.mtp,
    }  # fmt: skip
    return {name: value for name, value in parts.items() if value is not None}


def _joined(parts: dict[str, Tensor]) -> Loss:
    head = HeadLoss(parts["cross_entropy"], parts["z"], parts.get("of_tokens"))
    return Loss(parts["total"], head, ExpertStats(parts.get("counts"), parts.get("auxiliary")), parts.get("mtp"))
