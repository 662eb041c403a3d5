"""A folder in which a stage trains for a profile: links to the files of a run, so that nothing of the run is changed; or random
tokens, where a recipe has no token files yet.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.io.files import sha256_file, temporary_folder
from lmworks.io.run_layout import MODEL_STAGES, of_stage
from lmworks.profile.target import Target, alone
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.stage_data import bytes_tokenizer
from lmworks.shards.indexed import IndexedWriter, token_dtype, with_ending
from lmworks.shards.manifest import MANIFEST, TOKEN_BYTES, Manifest, Shard, SourceShards, Split
from lmworks.watch.ledger import LEDGER

RANDOM = "there are no token files yet, so the steps read random tokens in documents of random length"
_DATA = ("tokenizer", "shards", "corpus")
_MOST_TOKENS = 1 << 23  # of random text of a source
_SEQUENCES = 4  # of a source in each phase that reads it
_DOCUMENT = 600.0  # mean tokens of a random document, as of web text
_BYTES_PER_TOKEN = 4
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@contextmanager
def workspace(target: Target) -> Iterator[Target]:
    """The target with the folder in which it trains as its run directory, beside that of the run where this may be written; removed at the
    end of the block. Raises `UserError` for a stage that needs what there is not yet."""
    with temporary_folder(_place(target), ".lmworks-profile-") as folder:
        work = folder / "run"
        work.mkdir()
        yield replace(target, recipe=_fill(target, alone(target.recipe, target.stage, work), work), run_dir=work)


def _place(target: Target) -> Path:
    """The folder beside the run directory, on whose disk a run saves; that of temporary files where it cannot be written."""
    place = Path(target.run_dir or target.recipe.run_dir or ".").absolute().parent
    while not place.is_dir():
        place = place.parent
    return place if os.access(place, os.W_OK) else Path(tempfile.gettempdir())


def _fill(target: Target, recipe: Recipe, work: Path) -> Recipe:
    """Fill the folder; returns the recipe to train in it."""
    run, stage = target.run_dir, of_stage(target.stage)
    if run is not None and _is_complete(run, target):
        for name in _DATA:
            _link(run / name, work / name)
        for one in MODEL_STAGES[: MODEL_STAGES.index(stage) + 1]:
            _link_weights(run / one.checkpoints, work / one.checkpoints)
        if stage.folder:
            _link(run / stage.folder / "data", work / stage.folder / "data")
        if (run / LEDGER).is_file():  # with changes of the mixture, and rollbacks
            (work / LEDGER).write_bytes((run / LEDGER).read_bytes())
        return recipe
    if stage.stage != "pretrain":
        if target.recipe.trains_base:
            raise UserError(
                f"{target.stage} trains the model that pretraining makes, and there is none yet; run the recipe first, or profile "
                "pretraining (--stage pretrain)"
            )
        return _prepared(target, recipe, stage.stage, work)
    write_random_tokens(recipe, work)
    shards = recipe.shards.model_copy(update={"cache": None, "max_epochs": 1e15, "warn_epochs": 1e15, "imported": {}})
    return recipe.model_copy(update={"shards": shards})


def _is_complete(run: Path, target: Target) -> bool:
    """Whether a run has what its stage begins with."""
    if target.stage == "pretrain":
        made = run / "shards" / MANIFEST
        return made.exists() and Manifest.load(run / "shards").vocab_size <= (target.recipe.model.vocab_size or 0)
    return listing.has_checkpoints(run / "checkpoints")


def _link(folder: Path, to: Path) -> None:
    """The folders of `folder` anew, with links to its files: what is written into them is written here."""
    for here, _, files in os.walk(folder):
        place = to / Path(here).relative_to(folder)
        place.mkdir(parents=True, exist_ok=True)
        for name in files:
            if not name.endswith(".lock"):
                (place / name).symlink_to(Path(here, name).absolute())


def _link_weights(folder: Path, to: Path) -> None:
    """Links to the folders of the newest two checkpoints, one of which may be damaged or deleted by a run that goes on, and of what `ewc`
    has estimated: files of checkpoints that are links themselves are not read."""
    if folder.is_dir():
        to.mkdir(parents=True)
        for path in [*listing.directories(folder)[-2:], *folder.glob("ewc-*")]:
            (to / path.name).symlink_to(path.absolute())


def _prepared(target: Target, recipe: Recipe, stage: str, work: Path) -> Recipe:
    """A run without pretraining has its tokenizer and its base model made here, as the run would; later stages start from the latter."""
    from lmworks.run.runner import run_stages

    assert target.resolved is not None
    later: dict[str, Any] = {name: None for name in recipe.later_stages if name != stage}
    before = {name: os.environ.pop(name) for name in _RANKS if name in os.environ}  # this rank prepares for all
    try:
        little = target.resolved.overridden([f"run_dir={work}", "alerts.targets=[]"])
        run_stages(little, last="pretrain", on_event=lambda event: None, resume_command="")
    finally:
        os.environ.update(before)
    return recipe.model_copy(update=later)


def write_random_tokens(recipe: Recipe, work: Path) -> None:
    """Token files of all sources with random tokens, a little held-out text of each domain, and a tokenizer of the 256 bytes."""
    vocabulary = int(recipe.model.vocab_size or 0)
    bytes_tokenizer(work / "tokenizer")
    shards, draw = work / "shards", np.random.default_rng(recipe.seed)
    shards.mkdir()
    sizes = np.full(vocabulary, _BYTES_PER_TOKEN, np.int32)
    np.save(shards / TOKEN_BYTES, sizes)
    domains = {source.name: source.domain for source in recipe.corpus.sources}
    sizes_of = _tokens_of_sources(recipe, set(domains))
    held_out = int(recipe.train.validation_bytes_per_domain) // _BYTES_PER_TOKEN + 2

    def split(name: str, part: str, tokens: int) -> Split:
        shard = _write(shards, f"{part}/{name}-00000", tokens, vocabulary, draw)
        return Split(tokens=shard.tokens, bytes=shard.tokens * _BYTES_PER_TOKEN, documents=shard.documents, inputs="", shards=(shard,))

    sources = tuple(
        SourceShards(
            name=name, domain=domains.get(name, name), train=split(name, "train", size), validation=split(name, "validation", held_out)
        )
        for name, size in sizes_of.items()
    )
    Manifest(
        seed=recipe.seed, vocab_size=vocabulary, dtype=str(token_dtype(vocabulary)),
        tokenizer_sha256=sha256_file(work / "tokenizer" / "tokenizer.json"),
        token_bytes_sha256=sha256_file(shards / TOKEN_BYTES), sources=sources,
    ).save(shards / MANIFEST)  # fmt: skip


def _tokens_of_sources(recipe: Recipe, names: set[str]) -> dict[str, int]:
    """Tokens of each source: of each phase that reads it a few sequences at least, since the phases divide a source by what they read of
    it, and some steps of all of them."""
    phases = recipe.train.phases
    reads: dict[str, dict[int, float]] = {name: {} for name in sorted(names)}
    for number, phase in enumerate(phases):
        for mixture in (phase.mixture, *(change.mixture for change in phase.mixture_changes)):
            for name, weight in mixture.items():
                known = reads.setdefault(name, {})
                known[number] = max(known.get(number, 0.0), weight * float(phase.tokens))
    each = min(8 * max(int(phase.global_batch_tokens) for phase in phases), _MOST_TOKENS) // len(reads)
    found = {}
    for name, of_phases in reads.items():
        whole = sum(of_phases.values())
        needed = (_SEQUENCES * int(phases[number].sequence_length) * whole / read for number, read in of_phases.items())
        found[name] = int(min(_MOST_TOKENS, max(each, *needed, 2 * _DOCUMENT)))
    return found


def _write(shards: Path, prefix: str, tokens: int, vocabulary: int, draw: np.random.Generator) -> Shard:
    path = shards / prefix
    path.parent.mkdir(exist_ok=True)
    with IndexedWriter(path, token_dtype(vocabulary)) as writer:
        while writer.tokens < tokens:
            length = min(tokens - writer.tokens, max(2, int(draw.exponential(_DOCUMENT))))
            writer.add(draw.integers(0, vocabulary, length))
    files = {ending: with_ending(path, ending) for ending in (".bin", ".idx")}
    return Shard(
        prefix=prefix, tokens=writer.tokens, documents=writer.documents, sha256={e: sha256_file(file) for e, file in files.items()},
        size={e: file.stat().st_size for e, file in files.items()},
    )  # fmt: skip
