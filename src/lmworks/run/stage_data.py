"""Reads the data files of tuning, preference optimization and reinforcement learning before a run, with the functions that the stages use.

The rows are encoded, packed and counted as the stage will, in a temporary folder, so the numbers are those of the run. Files larger than a
limit are counted whole and encoded in part. Without a tokenizer (it is trained by an earlier stage), a token is taken to be
`BYTES_PER_TOKEN` bytes: lmworks's own byte alphabet encodes the text, with lengths and batches scaled to match.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lmworks.io.files import read_json, sha256_file, write_json, write_text
from lmworks.io.wheels import cache_directory
from lmworks.plan.stages import BY_BYTES, EXACT, SAMPLED, StageData
from lmworks.recipe.changes import as_tree
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import Tune
from lmworks.recipe.schema.units import Tokens
from lmworks.run.run_dir import list_files
from lmworks.train.data.decontamination import Protect
from lmworks.train.data.row_files import files_of, read_files
from lmworks.ui import terminal

if TYPE_CHECKING:
    from lmworks.tokenizer.tokenizer import Tokenizer

EXACT_BYTES = 64 << 20
"""Files of a stage up to this size are encoded whole: about a minute. The result is kept by the hashes of what it depends on."""
BYTES_PER_TOKEN = 4  # of English text in vocabularies of 32k entries and more; 3 in those of 4k
_SPECIAL = 32  # special tokens: all that a chat needs
_SAMPLE = 2000  # rows of each set that are encoded of larger files
_WORTH_KEEPING = 1 << 20  # bytes of files; smaller ones are read in less time than it takes to hash what they depend on


def readable(recipe: Recipe, stage: str) -> bool:
    """Whether all sets of a stage are files here, so that they can be read before the run. Others are generated, or downloaded."""
    section = recipe.later_stages[stage]
    return bool(section.data) and all(data.kind == "files" for data in section.data)


def read_stage(
    recipe: Recipe, stage: str, tokenizer: Tokenizer | None, corpus_dir: Path, protect: Protect, most: int = EXACT_BYTES
) -> StageData:  # fmt: skip
    """Read the data of a stage whose sets are files.

    Files of more than `most` bytes in all are encoded in part. `protect` returns the evaluation items that are kept out of the data. Raises
    `UserError` for everything that the stage would refuse about its data.
    """
    section = recipe.later_stages[stage]
    size = sum(path.stat().st_size for data in section.data for path in files_of(f"{stage}.data.{data.name}", Path(data.path or "")))
    sampled = size > most
    kept = _kept_at(recipe, stage, tokenizer, corpus_dir, sampled) if size > _WORTH_KEEPING and tokenizer is not None else None
    if kept is not None and kept.is_file():
        return StageData(**read_json(kept))
    with TemporaryDirectory(prefix="lmworks-data-") as folder, _quiet():
        found = _read(recipe, stage, tokenizer, corpus_dir, protect, Path(folder), sampled)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, asdict(found))
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """What the stages say about their data is said when they run; a plan has it in its table."""
    before, terminal.console.quiet = terminal.console.quiet, True
    try:
        yield
    finally:
        terminal.console.quiet = before


def _kept_at(recipe: Recipe, stage: str, tokenizer: Tokenizer, corpus_dir: Path, sampled: bool) -> Path:
    """Where the result is kept: by the contents of the files and of the tokenizer, by the recipe, and by what is left out of the data:
    evaluation items, and documents that the corpus holds out."""
    files = {name: found for name, found in list_files(recipe, {}).items() if name.startswith((f"{stage}.data.", "evaluate."))}
    others = (*sorted(tokenizer.directory.glob("*.j*")), *corpus_dir.glob("manifest.json"))
    about = [as_tree(recipe), files, sampled, [one.name for one in fields(StageData)], [sha256_file(path) for path in others]]
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return cache_directory().parent / "data" / f"{key}.json"


def _read(
    recipe: Recipe, stage: str, tokenizer: Tokenizer | None, corpus_dir: Path, protect: Protect, folder: Path, sampled: bool
) -> StageData:  # fmt: skip
    counted = SAMPLED if sampled else EXACT
    if tokenizer is None:
        tokenizer, counted = bytes_tokenizer(folder / "tokenizer"), BY_BYTES
    scale = BYTES_PER_TOKEN if counted == BY_BYTES else 1
    seen = _scaled(recipe, stage, scale, _SAMPLE if sampled else None)
    if stage == "grpo":
        return _prompts(seen, tokenizer, protect, counted)
    data = folder / stage / "data"
    found = _conversations(seen, tokenizer, corpus_dir, protect, data) if stage == "tune" else _pairs(seen, tokenizer, protect, data)
    if sampled:
        found = _extrapolated(recipe, stage, found)
    return replace(
        found, tokens=found.tokens // scale, read=found.read // scale, longest=-(-found.longest // scale),
        length_for_all=-(-found.length_for_all // scale), counted=counted,
    )  # fmt: skip


def _scaled(recipe: Recipe, stage: str, scale: int, most: int | None) -> Recipe:
    """The recipe with lengths of the stage in units of 1 / `scale` tokens, and at most `most` rows of each set."""
    section = recipe.later_stages[stage]
    changes: dict[str, Any] = {"sequence_length": Tokens(section.sequence_length * scale)}
    for name in ("global_batch_tokens", "tokens"):
        if (value := getattr(section, name, None)) is not None:
            changes[name] = Tokens(value * scale)
    if most is not None:
        changes["data"] = [data.model_copy(update={"max_rows": min(most, data.max_rows or most)}) for data in section.data]
    model = recipe.model
    if scale > 1 and model.max_position_embeddings:
        model = model.model_copy(update={"max_position_embeddings": Tokens(model.max_position_embeddings * scale)})
    return recipe.model_copy(update={stage: section.model_copy(update=changes), "model": model})


def _conversations(recipe: Recipe, tokenizer: Tokenizer, corpus_dir: Path, protect: Protect, data: Path) -> StageData:
    from lmworks.train.curriculum import tuning_batches
    from lmworks.train.data.chat import build_chat_data

    options = recipe.tune
    assert options is not None
    bodies = build_chat_data(recipe, tokenizer, data, corpus_dir, *protect())["data"]
    batches, _ = tuning_batches(recipe, data)
    left, cut = Counter[str](), Counter[str]()
    for body in bodies.values():
        left.update(body["left_out"])
        cut.update({what: count for what, count in body["noted"].items() if "cut at" in what})
    count, tokens, held_out = (
        sum(body[split][key] for body in bodies.values())
        for split, key in (("train", "conversations"), ("train", "tokens"), ("validation", "conversations"))
    )
    passes = max(batches.epochs.values())
    read = batches.steps * int(options.global_batch_tokens)
    return StageData(
        "tune", count, held_out, tokens, batches.steps, read, passes, left_out=dict(left.most_common()), cut=dict(cut.most_common()),
        length_for_all=_length_for_all(bodies),
    )  # fmt: skip


def _pairs(recipe: Recipe, tokenizer: Tokenizer, protect: Protect, data: Path) -> StageData:
    from lmworks.train.data.preferences import build_preferences, read_preferences
    from lmworks.train.dpo import Pairs, rows_by_step

    options = recipe.dpo
    assert options is not None
    manifest = build_preferences(recipe, tokenizer, data, *protect())
    pairs, _ = read_preferences(data, "train")
    held_out = manifest["validation"]["pairs"]
    train = Pairs(pairs, None, None, options.pairs_per_step, options.epochs, recipe.training_seed)
    rows = rows_by_step(train, int(options.sequence_length))
    left: Counter[str] = Counter()
    for body in manifest["data"].values():
        left.update(body["left_out"])
    longest = max(answer.inputs for pair in pairs for answer in pair)
    read = sum(rows) * int(options.sequence_length)
    return StageData(
        "dpo", len(pairs), held_out, manifest["train"]["tokens"], len(rows), read, float(options.epochs),
        left_out=dict(left.most_common()), longest=longest, length_for_all=_length_for_all(manifest["data"]),
    )  # fmt: skip


def _prompts(recipe: Recipe, tokenizer: Tokenizer, protect: Protect, counted: str) -> StageData:
    """Of prompts all are encoded, also those of large files: no more are read than `count` says."""
    from lmworks.train.prompts import read_prompts

    options = recipe.grpo
    assert options is not None
    found = read_prompts(recipe, tokenizer, *protect())
    left: Counter[str] = Counter()
    for body in found.sets.values():
        left.update(body["left_out"])
    scale = BYTES_PER_TOKEN if counted == BY_BYTES else 1
    lengths = [len(prompt.ids) for prompt in found.train]
    answers = options.prompts_per_step * options.group_size
    return StageData(
        "grpo", len(found.train), len(found.held_out), sum(lengths) // scale, options.steps,
        options.steps * answers * int(options.sequence_length) // scale, options.steps * options.prompts_per_step / len(found.train),
        BY_BYTES if counted == BY_BYTES else EXACT, dict(left.most_common()), -(-max(lengths) // scale),
        length_for_all=-(-_length_for_all(found.sets) // scale) + options.max_new_tokens,
    )  # fmt: skip


def _length_for_all(sets: Mapping[str, Any]) -> int:
    """The `sequence_length` with which no row of these sets would be cut, or left out as too long; 0 where none is."""
    return max(body.get("sequence_length_for_all", 0) for body in sets.values())


def _extrapolated(recipe: Recipe, stage: str, found: StageData) -> StageData:
    """From the rows that were encoded to all rows of the files, which are counted."""
    section = recipe.later_stages[stage]
    rows = 0
    with terminal.bar("count rows", len(section.data)) as bar:
        for data in section.data:
            count = sum(row.fault is None for row in read_files(f"{stage}.data.{data.name}", data.path))
            rows += min(count, data.max_rows or count)
            bar.advance()
    factor = max(1.0, rows / (len(section.data) * _SAMPLE))
    examples, tokens = round(found.examples * factor), round(found.tokens * factor)
    found = replace(found, cut={what: round(count * factor) for what, count in found.cut.items()})
    if isinstance(section, Tune) and section.epochs is None:
        return replace(found, examples=examples, tokens=tokens, passes=found.passes / factor, held_out=round(found.held_out * factor))
    steps = round(found.steps * factor)
    return replace(
        found, examples=examples, tokens=tokens, steps=steps, read=round(found.read * factor), held_out=round(found.held_out * factor)
    )


def bytes_tokenizer(folder: Path) -> Tokenizer:
    """lmworks's tokenizer with the 256 bytes as its vocabulary, and its chat template."""
    from lmworks.tokenizer import load, special
    from lmworks.tokenizer.chat import shipped_template
    from lmworks.tokenizer.tokenizer_json import add_specials, byte_level_spec

    spec, names = byte_level_spec([]), special.names(_SPECIAL)
    add_specials(spec, names, 256 + len(names))
    folder.mkdir(parents=True)
    write_json(folder / "tokenizer.json", spec)
    write_text(folder / "chat_template.jinja", shipped_template("brief"))
    return load(folder)
