"""The export stage: writes the trained model in the formats of other programs, and verifies each before it counts as done.

    out_dir/huggingface/      safetensors, config, generation_config, tokenizer, README.md: transformers, vLLM, SGLang
    out_dir/peft/             low-rank adapters in PEFT's format, if the model was tuned with them
    out_dir/gguf/model.gguf   llama.cpp
    out_dir/gguf/adapter.gguf   the same adapters for llama.cpp
    out_dir/parity.json       comparison of the exports with the trained model, size and hash of each file; a part of it in each folder
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lmworks import machine
from lmworks.export import gguf as gguf_
from lmworks.export.card import write_card
from lmworks.export.huggingface import TOLERANCE, Parity, compare, require_parity, write_model
from lmworks.export.peft import adapter_tensors, write_peft
from lmworks.export.verify import PASSED, REPORT, file_records
from lmworks.files import read_json, whole_directory, write_json
from lmworks.model import Transformer
from lmworks.model.generate import SAMPLING
from lmworks.model_stages import BASE, of_checkpoint
from lmworks.recipe.derivation.parameters import count_parameters
from lmworks.recipe.derivation.positions import positions
from lmworks.recipe.loading.huggingface import class_for
from lmworks.recipe.schema.lora import Lora
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.format.manifest import Manifest
from lmworks.shards.read.validation import Validation
from lmworks.tokenizer import load as load_tokenizer
from lmworks.tokenizer.foreign import ForeignTokenizer
from lmworks.tokenizer.keeping import KEPT
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.adapters import adapters_of
from lmworks.train.load import final_checkpoint, final_model, load_model

if TYPE_CHECKING:
    from rich.table import Table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TOKENIZER_CONFIG, _GENERATION = "tokenizer_config.json", "generation_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja")
_ROWS = 4  # sequences compared, at least; each domain gives one or more
_LONGEST = 1024  # tokens of each; enough to detect a wrong rotation


@dataclass(frozen=True)
class Report:
    """The exports and their comparison with the model. `tensors` counts GGUF tensors that were read back and are equal bit for bit."""

    model: str
    dtype: str
    architecture: str | None = None
    huggingface: Parity | None = None
    sequences: int = 0
    gguf_architecture: str | None = None
    tensors: int = 0
    no_gguf_adapter: str | None = None  # why llama.cpp cannot apply the adapters that were trained
    bytes: dict[str, int] | None = None

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=f"Exports of the {self.model} model ({self.dtype})", title_justify="left", header_style="bold")
        for heading in ("for", "as", "size", "checked"):
            table.add_column(heading)
        size = self.bytes or {}
        if self.huggingface:
            parity = self.huggingface
            table.add_row(
                "transformers, vLLM, SGLang", self.architecture, _size(size["huggingface"]),
                f"loaded in transformers, fp32: logits differ by {parity.relative:.1e} of the largest (at most {TOLERANCE:.0e}), "
                f"{100 * parity.same_choice:.2f}% same next token, over {parity.tokens:,} held-out tokens",
            )  # fmt: skip
        if self.gguf_architecture:
            checked = f"read back: all {self.tensors} tensors equal, bit for bit"
            table.add_row("llama.cpp", self.gguf_architecture, _size(size["gguf"]), checked)
        for kind, use in (("peft", "peft, vLLM"), ("gguf_adapter", "llama.cpp --lora")):
            if kind in size:
                table.add_row(use, "low-rank adapter", _size(size[kind]), "")
        if self.no_gguf_adapter:
            table.add_row("llama.cpp --lora", "none", "", self.no_gguf_adapter)
        return table


def export(recipe: Recipe, run_dir: Path, out_dir: Path) -> Report:
    """Write the model of the last stage that has trained one in every format that `recipe.export` requests.

    Raises `UserError` if a format cannot express the model, if a package is missing (it names the extra), if an export is not equal to the
    trained model, or if memory or the disk does not suffice. The exports of an earlier call are unchanged then.
    """
    run_dir, out_dir = Path(run_dir), Path(out_dir)
    options = recipe.export
    check(recipe)
    _require_memory(recipe)
    which = final_model(run_dir, recipe)
    model = load_model(run_dir, which).to("cpu")
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    dtype = DTYPES[options.dtype]
    values: dict[str, Any] = {"model": which, "dtype": options.dtype}
    sizes: dict[str, int] = {}
    adapter = find_adapter(recipe, run_dir)
    folders: dict[str, Path] = {}
    with ExitStack() as verified:  # at its end all of them take the places of those of an earlier export, or none does
        if options.huggingface:
            directory = folders["huggingface"] = verified.enter_context(whole_directory(out_dir / "huggingface"))
            write_huggingface(model, tokenizer, directory, dtype)
            write_card(recipe, model, run_dir, directory, gguf=options.gguf)
            tokens_BT = held_out_tokens(recipe, run_dir / "shards") if recipe.has_text else drawn_tokens(recipe, tokenizer)
            parity = compare(model, directory, tokens_BT, dtype)
            require_parity(parity, directory)
            values |= {"architecture": class_for(model.config), "huggingface": parity, "sequences": len(tokens_BT)}
            sizes["huggingface"] = sum(file.stat().st_size for file in directory.iterdir())
            if adapter:
                beside = folders["peft"] = verified.enter_context(whole_directory(out_dir / "peft"))
                write_adapter(recipe, adapter, beside)
                sizes["peft"] = sum(file.stat().st_size for file in beside.iterdir())
        if options.gguf:
            folders["gguf"] = verified.enter_context(whole_directory(out_dir / "gguf"))
            path = folders["gguf"] / "model.gguf"
            gguf_.write_gguf(model, tokenizer, path, dtype, recipe.name)
            values |= {"gguf_architecture": gguf_.architecture_for(model.config), "tensors": gguf_.check_gguf(model, path, dtype)}
            sizes["gguf"] = path.stat().st_size
            if adapter:
                beside, name = path.with_name("adapter.gguf"), f"adapter of {_base_name(recipe, adapter.base)}"
                try:
                    gguf_.write_gguf_adapter(adapter_tensors(adapter.checkpoint), adapter.lora, model, beside, name)
                    sizes["gguf_adapter"] = beside.stat().st_size
                except gguf_.NoAdapter as error:
                    values["no_gguf_adapter"] = str(error)
        files: dict[str, Any] = {}
        for name, directory in folders.items():
            records = file_records(directory)
            write_json(directory / REPORT, {"verdict": PASSED, "model": which, "dtype": options.dtype, "files": records})
            files |= {f"{name}/{file}": record for file, record in records.items()}
    written = {"huggingface": options.huggingface, "peft": options.huggingface and adapter, "gguf": options.gguf}
    for name in (name for name, wanted in written.items() if not wanted):
        shutil.rmtree(out_dir / name, ignore_errors=True)  # of a model before this one
    report = Report(**values, bytes=sizes)
    write_json(out_dir / REPORT, {"verdict": PASSED} | asdict(report) | {"tolerance": TOLERANCE, "files": files})
    return report


@dataclass(frozen=True)
class TrainedAdapter:
    """The adapters of the last stage: their checkpoint, their options and the checkpoint of the model that they belong to."""

    checkpoint: Path
    lora: Lora
    base: Path


def find_adapter(recipe: Recipe, run_dir: Path) -> TrainedAdapter | None:
    """The adapters of the last stage, if it has trained such; they and their base are verified."""
    checkpoint = final_checkpoint(run_dir, final_model(run_dir, recipe))
    low_rank = adapters_of(checkpoint)
    return None if low_rank is None else TrainedAdapter(checkpoint, *low_rank)


def write_adapter(recipe: Recipe, adapter: TrainedAdapter, directory: Path) -> None:
    """Write adapters in PEFT's format."""
    from lmworks.checkpoint.listing import content_of

    base = adapter.base
    write_peft(adapter.checkpoint, adapter.lora, recipe.model, _base_name(recipe, base), content_of(base), directory)


def _base_name(recipe: Recipe, base: Path) -> str:
    """The model that adapters belong to: what the run started from, or `NAME@MODEL`."""
    before = of_checkpoint(base)[0]
    return recipe.start_from or recipe.name if before is BASE else f"{recipe.name}@{before.model}"


def check(recipe: Recipe) -> None:
    """Raise `UserError` if a format that the recipe requests cannot express the model, before anything is trained or written."""
    if recipe.export.huggingface:
        class_for(recipe.model)
    if recipe.export.gguf:
        phases = positions(recipe)
        gguf_.architecture_for(recipe.model.model_copy(update={"rope": phases[-1].rope}) if phases else recipe.model)


def _require_memory(recipe: Recipe) -> None:
    """The weights in fp32: once to write them, and to compare the Hugging Face export once more here, once in transformers, and once while
    they are rounded to another dtype."""
    copies = 1 + (2 + (recipe.export.dtype != "fp32") if recipe.export.huggingface else 0)
    machine.require_memory(
        copies * 4 * count_parameters(recipe.model), f"exporting {recipe.name}", "free some, or export on a machine with more"
    )


def write_huggingface(model: Transformer, tokenizer: Tokenizer, directory: Path, dtype: torch.dtype) -> None:
    """Write all files that `transformers`, vLLM and SGLang read from a model directory."""
    stops = {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}
    if isinstance(tokenizer, ForeignTokenizer):
        _write_foreign(model, tokenizer, directory, dtype, stops)
        return
    write_model(model, directory, stops, dtype)
    write_json(directory / _GENERATION, stops | {"do_sample": True} | SAMPLING)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(tokenizer.directory / name, directory / name)
    longest = {"model_max_length": int(model.config.max_position_embeddings)} if model.config.max_position_embeddings else {}
    write_json(directory / _TOKENIZER_CONFIG, read_json(tokenizer.directory / _TOKENIZER_CONFIG) | longest)


def _write_foreign(
    model: Transformer, tokenizer: ForeignTokenizer, directory: Path, dtype: torch.dtype, stops: dict[str, Any]
) -> None:
    """With the tokenizer's files as they were taken over; only the stop tokens of its template are added to generation_config.json."""
    bos = tokenizer.special.get(tokenizer.tokens.get("bos_token", ""))
    write_model(model, directory, stops | ({} if bos is None else {"bos_token_id": bos}), dtype)
    for name in KEPT:
        if (tokenizer.directory / name).is_file():
            shutil.copyfile(tokenizer.directory / name, directory / name)
    given = tokenizer.directory / _GENERATION
    known = read_json(given) if given.is_file() else {"do_sample": True} | SAMPLING
    write_json(directory / _GENERATION, known | stops)


def held_out_tokens(recipe: Recipe, shards_dir: Path) -> Tensor:
    """(B, T) token ids of held-out documents, the same number of sequences from every domain."""
    manifest = Manifest.load(shards_dir)
    length = min([_LONGEST, *(int(phase.sequence_length) for phase in recipe.train.phases[-1:])])
    rows = -(-_ROWS // len(manifest.domains()))
    found = [Validation(shards_dir, manifest, domain, length, rows).batch(0) for domain in manifest.domains()]
    return torch.from_numpy(np.concatenate([batch.tokens for batch in found])).long()


def drawn_tokens(recipe: Recipe, tokenizer: Tokenizer) -> Tensor:
    """(B, T) ids of random words, for a run without a corpus; what they say makes no difference to a comparison."""
    generator = torch.Generator().manual_seed(recipe.seed)
    length = min(_LONGEST, int(recipe.model.max_position_embeddings or _LONGEST))
    return torch.randint(tokenizer.vocab_size, (_ROWS, length), generator=generator)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
