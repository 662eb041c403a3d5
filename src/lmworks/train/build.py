"""The model and the optimizer of a recipe, as every stage of training builds them, and what identifies the model in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lmworks.checkpoint.communicator import Communicator
from lmworks.optim.optimizer import Updates, build_optimizer
from lmworks.parallel.mesh import Ranks, alone, own_device
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.parallel.process_group import is_launched
from lmworks.recipe.changes import as_tree, not_architecture
from lmworks.recipe.schema.model import Lora, Model, is_adapter
from lmworks.recipe.schema.recipe import Recipe
from lmworks.weights.adapters import load_trained


def device_for(recipe: Recipe) -> torch.device:
    """This rank's, where it is a CPU with the recipe's threads unless other ranks share it."""
    device = own_device()
    if device.type == "cpu" and not is_launched():
        torch.set_num_threads(recipe.threads or 1)
    return device


def build_model(recipe: Recipe, ranks: Ranks | None = None, lora: Lora | None = None) -> ParallelModel:
    """The model at its start, this rank's parts of it, on its device; weights depend on the seed alone. With `lora` it is frozen and has
    adapters."""
    ranks = ranks or alone()
    device = device_for(recipe)
    if recipe.train.deepspeed is not None:
        device = torch.device("cpu")  # from where DeepSpeed fetches it
    return ParallelModel(build(recipe, ranks, device, lora), ranks)


def with_optimizer(recipe: Recipe, model: ParallelModel) -> tuple[ParallelModel, Updates]:
    """The model and what updates it: our optimizer, or DeepSpeed, which wraps the model."""
    if recipe.train.deepspeed is None:
        # Adapters are not averaged: they start from 0, and few of the base model's steps are left.
        options = recipe.optimizer.model_copy(update={"ema_decay": 0.0}) if model.has_adapters else recipe.optimizer
        return model, build_optimizer(model, options, recipe.model.num_hidden_layers, model.ranks.process_groups())
    from lmworks.parallel.zero_offload import ZeroModel

    taken = ZeroModel(model.parts[0], model.ranks, recipe)
    return taken, taken.optimizer()


def identity(recipe: Recipe) -> dict[str, object]:
    """What a checkpoint must share with the model that it is loaded into: all that decides what the weights compute.

    Positions may change between phases; how weights are trained (dropout, balancing, losses) may be changed by an allowed resume.
    """
    model, others = as_tree(recipe.model), {"rope", *not_architecture(Model)}
    moe = model["moe"] and {key: value for key, value in model["moe"].items() if f"moe.{key}" not in others}
    mtp = model["mtp"] and {"num_nextn_predict_layers": model["mtp"]["num_nextn_predict_layers"]}
    return {"model": {key: value for key, value in model.items() if key not in others} | {"moe": moe, "mtp": mtp}}


def load_weights(
    path: Path, model: ParallelModel, identity: dict[str, Any] | None, communicator: Communicator, averaged: bool, verified: bool = True,
    without: tuple[str, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """Load the weights of a checkpoint into a model on any layout, as `load_trained`. The model may have adapters of its own, which stay as
    they are; so do weights whose names end with one of `without`."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters() if not is_adapter(name)} if averaged else None
    state = model.base_state_dict()
    if without:
        state = {name: value for name, value in state.items() if not name.endswith(without)}
        parameters = parameters and {name: value for name, value in parameters.items() if not name.endswith(without)}
    return load_trained(path, state, parameters, model.config, identity, communicator, verified)
