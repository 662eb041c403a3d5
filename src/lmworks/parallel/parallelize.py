"""Applies all parallelism to a model, in one place and in a fixed order; the model code knows nothing of it.

Activation checkpointing (Chen et al. 2016, arXiv:1604.06174), applied to a model from outside.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lmworks.errors import UserError
from lmworks.host.compiler_cache import remove_partial_libraries
from lmworks.host.devices import dtype_for
from lmworks.model import Transformer
from lmworks.model.init import initialize, whole
from lmworks.model.lora import attach
from lmworks.model.moe import grouped_mm_cpu
from lmworks.parallel import context, data, experts, tensor
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.pipeline import cut, stage_numbers
from lmworks.parallel.splits import split_problems
from lmworks.recipe.parameters import alignment_problems
from lmworks.recipe.schema.layout import ActivationCheckpointing
from lmworks.recipe.schema.model import Lora
from lmworks.recipe.schema.recipe import Recipe

_SAVED = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten._grouped_mm.default, grouped_mm_cpu}


def checkpoint_activations(model: Transformer, policies: ActivationCheckpointing, adapter_dropout: float = 0.0) -> None:
    """Recompute each layer in the backward pass according to its policy in `policies`.

    The outputs of the forward pass (expert counts, auxiliary loss) are those of the first pass, so nothing is counted twice.
    """
    preserve = model.config.residual_dropout + model.config.attention_dropout + adapter_dropout > 0
    for layer, block in model.numbered_blocks():
        policy = policies.of(layer)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve}
        if policy.keeps == "products":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        if policy.keeps != "everything":
            block.forward = _recomputed(block.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, **options) if torch.is_grad_enabled() else forward(*args)

    return run


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


_SHAPES = 1024  # no valid recipe has more input shapes of a layer


def build(recipe: Recipe, ranks: Ranks, device: torch.device, lora: Lora | None = None) -> list[Transformer]:
    """Build and initialize this rank's parts of the model: one, or one per pipeline stage of this rank.

    The model is built on the meta device, split, and then materialized: no rank ever holds more than its part, and the initial weights
    depend only on the seed. With `lora` the model is frozen and has adapters (`lmworks.model.lora`).
    """
    for problem in split_problems(recipe, ranks.layout):
        raise UserError(f"layout: {problem}")
    if recipe.train.deterministic:
        _repeat()
    dtype = dtype_for(recipe.train.precision, device)
    if dtype == torch.bfloat16 or device.type == "cpu":  # otherwise grouped products are not used
        for problem in alignment_problems(recipe.model, ranks.size("tp"), dtype.itemsize):
            raise UserError(problem)
    with torch.device("meta"):
        stages = stage_numbers(ranks.layout, ranks.rank("pp"))
        parts = [cut(with_adapters(Transformer(recipe.model), lora), ranks.layout, stage) for stage in stages]
    for part in parts:
        part.compute_dtype = dtype
        part.logit_chunk_size = int(recipe.train.logit_chunk_tokens)
        if ranks.size("tp") > 1:
            tensor.shard_tensors(part, ranks)
        if ranks.size("ep") > 1 or (ranks.size("tp") > 1 and part.moe_layers()):
            experts.shard_experts(part, ranks)
        if ranks.size("cp") > 1:
            context.shard_context(part, ranks)
        if recipe.optimizer.qk_clip_threshold is not None:
            part.record_logits()
        checkpoint_activations(part, recipe.train.activation_checkpointing, lora.dropout if lora else 0.0)
        if is_compiled(recipe, device):
            compile_layers(part)
        if ranks.size("weights") > 1 and recipe.train.deepspeed is None:
            data.shard(part, ranks)
        materialize(part, recipe.init_seed, device)
    return parts


def _repeat() -> None:
    """From now on, in this process, kernels give the same bits each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing is read before it is written
    torch.use_deterministic_algorithms(True, warn_only=True)


def with_adapters(model: Transformer, lora: Lora | None) -> Transformer:
    """The model, with the adapters of `lora` if there are any."""
    if lora is not None:
        attach(model, lora)
    return model


def is_compiled(recipe: Recipe, device: torch.device) -> bool:
    """Whether layers are compiled on this device.

    It must not depend on the course of the run: compiled code rounds differently, and a resumed run would not be bit-exact.
    """
    return device.type != "cpu" if recipe.train.compile == "auto" else recipe.train.compile


def compile_layers(part: Transformer) -> None:
    """Compile each input shape separately, without a limit on their number. Past its limit (8) torch would silently run new shapes in
    eager mode; which shapes those are, and so the last bits of the weights, would depend on where the run was last resumed."""
    import torch._dynamo
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    remove_partial_libraries(Path(cache_dir()))
    torch._dynamo.config.recompile_limit = _SHAPES
    torch._dynamo.config.accumulated_recompile_limit = 16 * _SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.capture_scalar_outputs = True  # the numbers of rows exchanged between the ranks of `ep` are symbolic sizes
    part.compile(dynamic=False)


def materialize(part: Transformer, seed: int, device: torch.device) -> None:
    """Allocate and initialize a model that was built on the meta device."""
    made: dict[int, Tensor] = {}  # a weight that two modules share stays one
    for module in part.modules():
        for held in (module._parameters, module._buffers):
            for name, planned in held.items():
                if planned is not None:
                    held[name] = made.setdefault(id(planned), _allocated(planned, device))  # type: ignore[assignment]
    initialize(part, seed, local_shard)
    part.configure(part.config)  # its frequencies are a buffer, whose values the meta device has not kept


def _allocated(planned: Tensor, device: torch.device) -> Tensor:
    found = torch.empty_like(planned, device=device, requires_grad=False)
    return nn.Parameter(found, planned.requires_grad) if isinstance(planned, nn.Parameter) else found


def local_shard(parameter: Tensor) -> tuple[Tensor, Sequence[int]]:
    """This rank's shard of a parameter, and its offsets in the full tensor."""
    if not isinstance(parameter, DTensor):
        return whole(parameter)
    _, begins = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), begins
