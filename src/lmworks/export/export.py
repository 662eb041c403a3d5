"""The export stage: writes the trained model in the formats of other programs, and verifies each before it counts as done.

    out_dir/huggingface/      safetensors, config, generation_config, tokenizer, README.md: transformers, vLLM, SGLang
    out_dir/peft/             low-rank adapters in PEFT's format, if the model was tuned with them
    out_dir/gguf/model.gguf   llama.cpp
    out_dir/gguf/adapter.gguf   the same adapters for llama.cpp
    out_dir/parity.json       comparison of the exports with the trained model, size and hash of each file; a part of it in each folder
    out_dir/refused/FORMAT/   an export that is not equal to the trained model, with its parity.json

Each format stands for itself: one that is refused does not keep the others from their places.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lmworks.errors import UserError
from lmworks.export import gguf as gguf_
from lmworks.export.card import write_card
from lmworks.export.gguf_tokenizer import find_rule
from lmworks.export.huggingface import write_model
from lmworks.export.parity import NotLoaded, Parity, compare, compared_tokens
from lmworks.export.peft import adapter_tensors, class_of, unequal_adapters, why_not_loaded, write_peft
from lmworks.host import machine
from lmworks.inference.generate import SAMPLING
from lmworks.io.files import read_json, replace_directory, whole_directory, write_json
from lmworks.io.run_layout import BASE, of_checkpoint
from lmworks.model import Transformer
from lmworks.recipe import hub
from lmworks.recipe.families.registry import class_for
from lmworks.recipe.parameters import count_parameters
from lmworks.recipe.phases import extended, final
from lmworks.recipe.schema.model import Lora, Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.weights import start_context, start_dtype
from lmworks.tokenizer import load as load_tokenizer
from lmworks.tokenizer.foreign import ForeignTokenizer
from lmworks.tokenizer.named import tokenizer_files
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.weights.adapters import adapters_of
from lmworks.weights.gguf import gguf_package
from lmworks.weights.run_models import final_checkpoint, final_model, load_model
from lmworks.weights.verified import PASSED, REFUSED, REPORT, file_records

if TYPE_CHECKING:
    from rich.table import Table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FINER: dict[str, tuple[str, ...]] = {"fp32": ("float64",), "bf16": ("float64", "float32", "float16")}  # in config.json; these are rounded
_TOKENIZER_CONFIG, _GENERATION = "tokenizer_config.json", "generation_config.json"
_LEAST = 1  # tokens; a resolved recipe states its context
_TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja")

@dataclass(frozen=True)
class Report:
    """The exports and their comparison with the model. `tensors` counts GGUF tensors that were read back and are equal bit for bit.

    refused: why a format is not in its place, by its name. no_gguf: why there is no file for llama.cpp under `export.gguf: auto`;
    no_gguf_adapter: why llama.cpp cannot apply the adapters that were trained; not_in_peft: why PEFT does not. notes: for which
    texts llama.cpp gives other ids, and another name of the model in its file. stored: the type of the weights of `start_from`, if `dtype`
    rounds its values.
    """

    model: str
    dtype: str
    architecture: str | None = None
    huggingface: Parity | None = None
    sequences: int = 0
    gguf_architecture: str | None = None
    tensors: int = 0
    no_gguf: str | None = None
    no_gguf_adapter: str | None = None
    not_in_peft: str | None = None
    notes: tuple[str, ...] = ()
    stored: str | None = None
    refused: dict[str, str] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=f"Exports of the {self.model} model ({self.dtype})", title_justify="left", header_style="bold")
        for heading in ("for", "as", "size", "checked"):
            table.add_column(heading)
        size = self.bytes
        if self.huggingface:
            parity = self.huggingface
            table.add_row(
                "transformers, vLLM, SGLang", self.architecture, _size(size["huggingface"]),
                f"loaded in transformers: logits in fp64 differ by {parity.relative:.1e} of the largest (at most {parity.bound:.1e}), in "
                f"fp32 by {parity.fp32:.1e}; {100 * parity.same_choice:.2f}% same next token, over {parity.tokens:,} tokens",
            )  # fmt: skip
        if "gguf" in size:
            checked = "; ".join((f"read back: all {self.tensors} tensors equal, bit for bit", *self.notes))
            table.add_row("llama.cpp", self.gguf_architecture, _size(size["gguf"]), checked)
        if self.no_gguf:
            table.add_row("llama.cpp", "none", "", self.no_gguf)
        if "peft" in size:
            checked = "; ".join(("read back: equal, bit for bit", *([self.not_in_peft] if self.not_in_peft else ())))
            table.add_row("peft, vLLM", "low-rank adapter", _size(size["peft"]), checked)
        if "gguf_adapter" in size:
            table.add_row("llama.cpp --lora", "low-rank adapter", _size(size["gguf_adapter"]), "")
        if self.no_gguf_adapter:
            table.add_row("llama.cpp --lora", "none", "", self.no_gguf_adapter)
        if self.stored:
            table.caption_justify = "left"
            table.caption = (
                f"The weights of start_from are in {self.stored}; {self.dtype} rounds them, also where the run has not changed them. "
                "export.dtype=fp32 does not."
            )
        return table


class _Formats:
    """The folders of the formats: those that pass take their places together, at the end; one that is refused goes aside at once."""

    def __init__(self, out_dir: Path, places: ExitStack, about: dict[str, Any]) -> None:
        self.out_dir, self.places, self.about = out_dir, places, about
        self.passed: dict[str, dict[str, Any]] = {}
        self.refused: dict[str, str] = {}

    def new(self, name: str) -> Path:
        """An empty folder for a format."""
        return self.places.enter_context(whole_directory(self.out_dir / name))

    def judge(self, name: str, directory: Path, reason: str | None, **found: Any) -> None:
        """Record in the folder what was found, and put it aside if there is a reason."""
        verdict = {"verdict": PASSED} if reason is None else {"verdict": REFUSED, "reason": reason}
        records = file_records(directory)
        write_json(directory / REPORT, verdict | self.about | found | {"files": records})
        if reason is None:
            self.passed[name] = records
            return
        self.refused[name] = reason
        aside = self.out_dir / "refused" / name
        aside.parent.mkdir(parents=True, exist_ok=True)
        replace_directory(directory, aside)


def export(recipe: Recipe, run_dir: Path, out_dir: Path) -> Report:
    """Write the model of the last stage that has trained one in every format that `recipe.export` requests.

    Raises `UserError` if a format cannot express the model, if a package is missing (it names the extra), or if memory or the disk does not
    suffice: the exports of an earlier call are unchanged then. An export that is not equal to the trained model is put aside, in
    `out_dir/refused`, with its report; the others take their places, and a `UserError` then names both.
    """
    run_dir, out_dir = Path(run_dir), Path(out_dir)
    options = recipe.export
    check(recipe)
    _require_memory(recipe)
    which = final_model(run_dir, recipe)
    model = load_model(run_dir, which).to("cpu")
    if options.rope is not None:
        model.configure(extended(model.config, _LEAST, options.rope))
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    dtype = DTYPES[options.dtype]
    values: dict[str, Any] = {"model": which, "dtype": options.dtype, "stored": rounded_from(recipe)}
    sizes: dict[str, int] = {}
    adapter = find_adapter(recipe, run_dir)
    wants_gguf = options.gguf is not False
    if wants_gguf and (why := why_no_gguf(model.config, tokenizer)) is not None:
        if not options.huggingface:
            raise UserError(why)
        wants_gguf = False
        values["no_gguf"] = why
    with ExitStack() as places:
        formats = _Formats(out_dir, places, dict(values))
        if options.huggingface:
            directory = formats.new("huggingface")
            write_huggingface(model, tokenizer, directory, dtype)
            _state_context(model.config, start_context(recipe), directory / _TOKENIZER_CONFIG)
            write_card(recipe, model, run_dir, directory, gguf=wants_gguf)
            tokens = compared_tokens(recipe, run_dir / "shards", tokenizer)
            sizes["huggingface"] = _bytes(directory)
            try:
                parity = compare(model, directory, tokens, dtype)
            except NotLoaded as error:
                formats.judge("huggingface", directory, str(error))
            else:
                values |= {"architecture": class_for(model.config), "huggingface": parity, "sequences": sum(map(len, tokens.values()))}
                formats.judge("huggingface", directory, parity.reason, parity=asdict(parity))
            if adapter:
                beside = formats.new("peft")
                write_adapter(recipe, adapter, beside)
                sizes["peft"] = _bytes(beside)
                theirs = class_of(adapter.base, model.config)
                unequal = unequal_adapters(adapter.checkpoint, recipe.model, theirs, beside)
                values["not_in_peft"] = why_not_loaded(adapter_tensors(adapter.checkpoint), recipe.model, theirs, adapter.lora)
                reason = f"tensor {unequal[0]} of the file is not the adapter's" if unequal else None
                formats.judge("peft", beside, reason, not_in_peft=values["not_in_peft"])
        if wants_gguf:
            directory = formats.new("gguf")
            path = directory / "model.gguf"
            gguf_.write_gguf(model, tokenizer, path, dtype, recipe.name)
            sizes["gguf"] = path.stat().st_size
            notes = gguf_.notes(tokenizer, recipe.name)
            values |= {"gguf_architecture": gguf_.architecture_for(model.config), "notes": notes}
            if adapter:
                beside, name = path.with_name("adapter.gguf"), f"adapter of {_base_name(recipe, adapter.base)}"
                try:
                    gguf_.write_gguf_adapter(adapter_tensors(adapter.checkpoint), adapter.lora, model, beside, name)
                    sizes["gguf_adapter"] = beside.stat().st_size
                except gguf_.NoAdapter as error:
                    values["no_gguf_adapter"] = str(error)
            try:
                values["tensors"] = gguf_.check_gguf(model, path, dtype)
            except gguf_.Differs as error:
                formats.judge("gguf", directory, str(error))
            else:
                formats.judge("gguf", directory, None, tensors=values["tensors"])
    for name in {"huggingface", "peft", "gguf"} - formats.passed.keys() - formats.refused.keys():
        shutil.rmtree(out_dir / name, ignore_errors=True)  # of a model before this one
    for name in formats.passed:
        shutil.rmtree(out_dir / "refused" / name, ignore_errors=True)
    if (out_dir / "refused").is_dir() and not any((out_dir / "refused").iterdir()):
        (out_dir / "refused").rmdir()
    files = {f"{name}/{file}": record for name, records in formats.passed.items() for file, record in records.items()}
    report = Report(**values, refused=formats.refused, bytes=sizes)
    write_json(out_dir / REPORT, {"verdict": REFUSED if formats.refused else PASSED} | asdict(report) | {"files": files})
    _require_all(report, formats, out_dir)
    if options.gguf is True and report.no_gguf:
        raise UserError(f"{report.no_gguf}; kept: {_kept(formats, out_dir)}")
    return report


def _require_all(report: Report, formats: _Formats, out_dir: Path) -> None:
    """Raise `UserError` that names the formats that were refused, and those that were not."""
    if not report.refused:
        return
    parts = []
    for name, reason in report.refused.items():
        parts.append(f"the export {name} differs from the trained model: {reason}; it is in {out_dir / 'refused' / name} with its {REPORT}")
        if (out_dir / name).is_dir():
            parts.append(f"{out_dir / name} is of an earlier model")
    raise UserError("; ".join([*parts, f"kept: {_kept(formats, out_dir)}"]))


def _kept(formats: _Formats, out_dir: Path) -> str:
    return ", ".join(str(out_dir / name) for name in formats.passed) or "none"


def _bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


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

    base, model = adapter.base, recipe.model
    write_peft(adapter.checkpoint, adapter.lora, model, class_of(base, model), _base_name(recipe, base), content_of(base), directory)


def _base_name(recipe: Recipe, base: Path) -> str:
    """The model that adapters belong to: what the run started from, if it has not trained that further, or the run or `NAME@MODEL`."""
    before = of_checkpoint(base)[0]
    if before is not BASE:
        return f"{recipe.name}@{before.model}"
    start = None if recipe.trains_base else recipe.start_from
    model = hub.parse(start) if start else None
    return model.name if model else start or recipe.name


def check(recipe: Recipe) -> None:
    """Raise `UserError` if a format that the recipe requests cannot express the model or its tokenizer, before anything is trained or
    written. A tokenizer that the recipe takes over (`tokenizer.path`) is read; one that the run trains can be expressed.

    Under `export.gguf: auto` a model that llama.cpp cannot express is none of these, unless no other format is requested.
    """
    options, model = recipe.export, final(recipe)
    if options.rope is not None:
        model = extended(model, _LEAST, options.rope)
    if options.huggingface:
        class_for(model)
    required = options.gguf is True or (options.gguf == "auto" and not options.huggingface)
    if required and (why := why_no_gguf(model, _known_tokenizer(recipe))) is not None:
        raise UserError(why)


def _known_tokenizer(recipe: Recipe) -> Tokenizer | None:
    """The tokenizer of another model that the recipe takes over, if it is there already."""
    if not recipe.tokenizer.path or not recipe.tokenizer.as_is:
        return None
    path = Path(recipe.tokenizer.path).expanduser()
    directory = path.parent if path.suffix == ".json" else path
    return load_tokenizer(directory) if (directory / "tokenizer.json").is_file() else None


def why_no_gguf(model: Model, tokenizer: Tokenizer | None) -> str | None:
    """Why llama.cpp cannot run a model with this tokenizer; None if it can."""
    try:
        gguf_package()
        gguf_.architecture_for(model)
        if tokenizer is not None:
            find_rule(tokenizer)
    except UserError as error:
        return str(error)
    return None


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


def rounded_from(recipe: Recipe) -> str | None:
    """The type of the weights of `start_from`, if that of the export rounds its values; None without them."""
    stored = start_dtype(recipe)
    return stored if stored in _FINER[recipe.export.dtype] else None


def _state_context(model: Model, of_weights: int | None, path: Path) -> None:
    """Raise the length that a tokenizer of others states to the context of the model, unless that is still the one of its weights: vLLM
    takes the shorter of the two."""
    config, context = read_json(path) if path.is_file() else {}, int(model.max_position_embeddings or 0)
    stated = config.get("model_max_length")
    if context != of_weights and isinstance(stated, int) and stated < context:
        write_json(path, config | {"model_max_length": context})


def _write_foreign(
    model: Transformer, tokenizer: ForeignTokenizer, directory: Path, dtype: torch.dtype, stops: dict[str, Any]
) -> None:
    """With the tokenizer's files as they were taken over; only the stop tokens of its template are added to generation_config.json."""
    bos = tokenizer.special.get(tokenizer.tokens.get("bos_token", ""))
    write_model(model, directory, stops | ({} if bos is None else {"bos_token_id": bos}), dtype)
    for name in tokenizer_files(tokenizer.directory):
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(tokenizer.directory / name, directory / name)
    given = tokenizer.directory / _GENERATION
    known = read_json(given) if given.is_file() else {"do_sample": True} | SAMPLING
    write_json(directory / _GENERATION, known | stops)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
