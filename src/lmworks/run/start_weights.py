"""Loads the weights that a run starts from (`start_from`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lmworks.checkpoint.communicator import Communicator
from lmworks.model import Transformer
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.progress import console
from lmworks.recipe.derivation.derive import count_entries
from lmworks.recipe.loading import hub
from lmworks.recipe.loading.start_from import find
from lmworks.recipe.loading.weights import Weights
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.start_check import compare_first_loss
from lmworks.tokenizer.keeping import kept_json
from lmworks.weights import reference
from lmworks.weights.chat import RECORD, is_chat
from lmworks.weights.verified import verify_export


def check_start(recipe: Recipe) -> None:
    """Raise `UserError` if the weights of `start_from` cannot be those of the model, by their headers and by tensors that must be equal, or
    if tokens cannot be added."""
    from lmworks.weights.huggingface import refuse_unequal_copies
    from lmworks.weights.verified import verify_export
    from lmworks.weights.weight_map import map_weights

    assert recipe.start_from is not None
    start = find(recipe.start_from)
    if start.kind == "huggingface":
        verify_export(start.path)
        map_weights(start.path, recipe.model)
        refuse_unequal_copies(start.path, recipe.model)
    if recipe.tokenizer.add_tokens:
        kept_json(recipe)


def load_start_weights(recipe: Recipe, model: ParallelModel, communicator: Communicator) -> dict[str, Any]:
    """Load the weights into the model; each rank reads its own parts. Returns their origin, for the ledger and all checkpoints, with the
    first loss of weights in Hugging Face's format beside that of `transformers`.

    Raises `UserError` on all ranks if the weights are damaged or do not fit the model, or if the losses differ.
    """
    assert recipe.start_from is not None
    start = communicator.broadcast(communicator.run_on_all(partial(find, recipe.start_from)))
    added = _added_tokens(recipe, start)
    if start.kind == "huggingface":
        communicator.run_on_all(lambda: verify_export(start.path) if communicator.is_first else None)
        communicator.run_on_all(lambda: reference.read(start, model.state_dict(), recipe.model, added))
    else:
        reference.load_model(start.path, {"model": model.state_dict()}, recipe.model, communicator=communicator)
        if start.averaged:  # the weights that an export of that run would have
            average = {name: value.data for name, value in model.named_parameters()}
            reference.load_model(start.path, {"average": average}, recipe.model, verified=True, communicator=communicator)
    about = communicator.broadcast(communicator.run_on_all(lambda: reference.describe(start) if communicator.is_first else {}))
    about[RECORD] = communicator.broadcast(communicator.run_on_all(lambda: is_chat(start) if communicator.is_first else False))
    if added:
        about["added"] = [added.start, added.stop]
    if (model_of_hub := hub.parse(recipe.start_from)) is not None:
        about["hub"] = {"name": model_of_hub.name, "revision": model_of_hub.revision, "commit": model_of_hub.commit}
    if communicator.is_first:
        console.print(f"initialized from the weights of {model_of_hub or start.name}", style="dim")
    if start.kind == "huggingface":  # under train.deepspeed, too: the model is whole on the CPU until DeepSpeed takes it over
        about["first_loss"] = compare_first_loss(start, model, communicator, recipe.seed, added)
    return about


def load_start_model(recipe: Recipe) -> Transformer:
    """The whole model that a run started from, in evaluation mode, on the first GPU, else the CPU.

    Raises `UserError` if the weights are not there any more, or damaged.
    """
    from lmworks.train.load import load_checkpoint

    assert recipe.start_from is not None
    start = find(recipe.start_from)
    if start.kind == "checkpoint":
        return load_checkpoint(start)
    verify_export(start.path)
    model = Transformer(recipe.model)
    reference.read(start, model.state_dict(), recipe.model, _added_tokens(recipe, start))
    return model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu")).eval()


def _added_tokens(recipe: Recipe, start: Weights) -> range:
    """The ids of `tokenizer.add_tokens`: those behind the last one of the tokenizer of the weights."""
    texts = recipe.tokenizer.add_tokens
    first = count_entries(start.tokenizer) if texts else 0
    return range(first, first + len(texts))
