"""Which file holds each tensor of a Hugging Face checkpoint, from the headers alone: no weights are read."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from lmworks.checkpoint.save_plan import local_slice
from lmworks.errors import UserError
from lmworks.files import read_json
from lmworks.model import Transformer
from lmworks.recipe.families.family import Family
from lmworks.recipe.families.registry import family_in
from lmworks.recipe.schema.model import Model
from lmworks.weights.huggingface import open_all
from lmworks.weights.names import refuse_foreign, sources, why_missing

_EXTENDED = ("embedding.weight", "head.weight")  # may have more rows than the file


@dataclass(frozen=True)
class Wanted:
    """A tensor of a checkpoint: `ours` is our name of it, or of the stack of experts that it is part of."""

    ours: str
    shape: tuple[int, ...]


def wanted_tensors(model: Model, family: Family) -> dict[str, Wanted]:
    """Every tensor that `model` is made of, by its name in Hugging Face's format. Takes no memory, whatever the size."""
    with torch.device("meta"):
        state = Transformer(model).state_dict()
    found: dict[str, Wanted] = {}
    for name, tensor in state.items():
        ours = "embedding.weight" if name == "head.weight" and model.tie_word_embeddings else name
        part = local_slice(ours, tensor)
        assert part is not None
        found |= {theirs: Wanted(ours, box.shape) for theirs, box in sources(part, model, family)}
    return found


def map_weights(directory: Path, model: Model) -> dict[str, Path]:
    """The file of each tensor of `model` in the checkpoint in `directory`. The vocabulary of `model` may be larger than the checkpoint's,
    and it may have layers of multi-token prediction that the checkpoint lacks.

    Raises `UserError` for files that are damaged or pickled, and for tensors that are missing, foreign, or of another shape.
    """
    directory = Path(directory)
    family = family_in(read_json(directory / "config.json"))
    wanted = wanted_tensors(model, family)
    with torch.device("meta"):
        ours = Transformer(model).state_dict()
    found: dict[str, Path] = {}
    with ExitStack() as stack:
        for file, handle in open_all(directory, stack).items():
            names = handle.keys()
            refuse_foreign(names, ours, model, family)
            for theirs in (name for name in names if name in wanted):
                shape, expected = tuple(handle.get_slice(theirs).get_shape()), wanted[theirs].shape
                fewer_rows = wanted[theirs].ours in _EXTENDED and shape[:1] < expected[:1] and shape[1:] == expected[1:]
                if shape != expected and not fewer_rows:
                    raise UserError(f"{file}: tensor {theirs} has shape {shape}, but the config says {expected}")
                found[theirs] = file
    missing = [name for name, one in wanted.items() if name not in found and not one.ours.startswith("mtp.")]
    if missing:
        more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
        raise UserError(f"{directory} has no tensor {missing[0]}{more}; {why_missing(wanted[missing[0]].ours)}")
    return found
