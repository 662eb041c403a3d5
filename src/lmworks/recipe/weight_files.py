"""Which files of a Hugging Face folder are its weights: those that `transformers` reads, and no others that lie beside them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from lmworks.errors import UserError
from lmworks.io.files import explain_damage, read_json

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def of_adapter(folder: Path) -> str | None:
    """What to do with a folder that is a PEFT adapter and no model; None if it is something else."""
    if not (folder / ADAPTER).is_file():
        return None
    with explain_damage(folder / ADAPTER):
        base = str(read_json(folder / ADAPTER).get("base_model_name_or_path") or "BASE")
    merged = folder.resolve().with_name(f"{folder.resolve().name}-merged")
    return (
        f"{folder} is a PEFT adapter of {base}, and no whole model; continue it with lora.init_from, or merge the two: pip install peft && "
        "python -c 'import sys, peft, transformers as t; a, b, c = sys.argv[1:]; M = t.AutoModelForCausalLM; "
        'peft.PeftModel.from_pretrained(M.from_pretrained(b, dtype="auto"), a).merge_and_unload().save_pretrained(c); '
        f"t.AutoTokenizer.from_pretrained(b).save_pretrained(c)' {shlex.join([str(folder), base, str(merged)])}"
    )


def safetensors_of(directory: Path) -> list[Path]:
    """The files of safetensors that are the weights of a model: `model.safetensors`, or else those that the index names, or else all.

    `model.safetensors` may be among the files of an index, which then counts: its others have layers that `transformers` does not load.
    Empty if there are none. Raises `UserError` for an index that is damaged, or that names a file which is not in the folder.
    """
    index = directory / INDEX
    named = _named(index) if index.is_file() else []
    if (directory / ONE).is_file() and ONE not in named:
        return [directory / ONE]
    if missing := [name for name in named if not (directory / name).is_file()]:
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        raise UserError(f"{directory / missing[0]}{more} does not exist, which {INDEX} names; download it too")
    return [directory / name for name in named] or sorted(directory.glob("*.safetensors"))


def left_aside(directory: Path) -> list[str]:
    """The names of files of safetensors in a folder that are no weights of its model: an average, another split, another format."""
    return sorted({path.name for path in directory.glob("*.safetensors")} - {path.name for path in safetensors_of(directory)})


def tensor_names(directory: Path) -> list[str]:
    """The names of all tensors of a model in files of safetensors, from their headers. Raises `UserError` for a damaged file."""
    return [name for file in safetensors_of(directory) if file.is_file() for name in _names_in(file)]


def _names_in(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as handle:
            return list(handle.keys())
    except SafetensorError as error:
        raise UserError(f"{file} is damaged ({error}); put a good copy there, or export it again") from None


def layers_ahead(names: Iterable[str], layers: int) -> int:
    """How many layers of multi-token prediction have tensors among these, in Hugging Face's format: they continue the `layers` others."""
    return max((int(found[1]) + 1 - layers for name in names if (found := _LAYER.search(name))), default=0)


def _named(index: Path) -> list[str]:
    with explain_damage(index, "get it again from its origin, or put the files of weights beside it, and only their names into it"):
        named = set(read_json(index)["weight_map"].values())
        strange = [name for name in named if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name]
        if strange or not named:
            raise ValueError(f"it names {str(strange[0])[:100]!r}, which is no file in its folder" if strange else "it names no files")
    return sorted(named)
