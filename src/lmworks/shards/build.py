"""Builds token shards from clean documents: encoded, shuffled, with lineage and hashes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from lmworks.corpus.contamination import Decontaminator
from lmworks.errors import UserError
from lmworks.host.pool import map_unordered
from lmworks.io.files import atomic_path, explain_os_errors, read_json, sha256_file, write_json
from lmworks.io.run_layout import corpus_files
from lmworks.recipe.changes import as_tree
from lmworks.recipe.schema.corpus import Fim
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.decontaminate import decontaminate
from lmworks.shards.encode import Encoded, encode_part, find_encoded, open_parquet
from lmworks.shards.indexed import token_dtype, with_ending
from lmworks.shards.manifest import MANIFEST, TOKEN_BYTES, Manifest, Shard, SourceShards, Split, SplitName
from lmworks.shards.report import write_report
from lmworks.shards.row_plans import FOLDER as ROWS
from lmworks.shards.shuffle import shard_borders, write_shard
from lmworks.tokenizer import Tokenizer
from lmworks.ui.terminal import bar

_FORMAT = 2  # of the written files; if it changes, shards are built again
_ASIDE, _DONE = "encoded", "done.json"
_SPLITS: tuple[SplitName, ...] = ("train", "validation")
_WORTH_A_PROCESS = 16 << 20  # bytes that one process encodes in the time that it takes to start another
_HASH_SPEED = 64  # bytes that are hashed in the time that one byte is encoded


def build_shards(
    recipe: Recipe, corpus_dir: Path, tokenizer_dir: Path, out_dir: Path, decontaminator: Decontaminator | None = None,
    protected_sha256: str = "",
) -> Manifest:
    """Write the shards of every source in `corpus_dir`; returns the manifest, which is written last.

    Each document ends with <|endoftext|>. The documents of a source are in the order of a keyed permutation, so that any stretch of a shard
    is a random sample of the source. Uses `threads` processes, first per part and then per shard. Memory: some text in each process, and 4
    bytes per document of the largest source in this one. Disk: twice the tokens during the build. An interrupted build keeps what was
    finished from the same inputs; the result does not depend on the number of processes. Imported sources are searched with
    `decontaminator`, whose protected texts have the hash `protected_sha256`.

    Raises UserError for a missing or empty corpus, a broken parquet file, and a tokenizer that is not lossless.
    """
    from lmworks.tokenizer import load

    corpus_dir, tokenizer_dir, out_dir = Path(corpus_dir), Path(tokenizer_dir), Path(out_dir)
    tokenizer, tokenizer_sha256 = load(tokenizer_dir), sha256_file(tokenizer_dir / "tokenizer.json")
    with explain_os_errors(out_dir):
        return _build(recipe, corpus_dir, tokenizer, tokenizer_sha256, out_dir, decontaminator, protected_sha256)


def _build(
    recipe: Recipe, corpus_dir: Path, tokenizer: Tokenizer, tokenizer_sha256: str, out_dir: Path, decontaminator: Decontaminator | None,
    protected_sha256: str
) -> Manifest:
    out_dir.mkdir(parents=True, exist_ok=True)
    with atomic_path(out_dir / TOKEN_BYTES) as aside, open(aside, "wb") as handle:
        np.save(handle, tokenizer.byte_lengths, allow_pickle=False)
    manifest = Manifest(
        seed=recipe.seed,
        vocab_size=tokenizer.vocab_size,
        dtype=token_dtype(tokenizer.vocab_size).name,
        tokenizer_sha256=tokenizer_sha256,
        token_bytes_sha256=sha256_file(out_dir / TOKEN_BYTES),
        sources=(),
    )
    jobs = _jobs(recipe, corpus_dir, tokenizer_sha256)
    finished = _finished(recipe, jobs, out_dir)
    waiting = [job for job in jobs if job.inputs not in finished]
    _encode(recipe, waiting, tokenizer.directory, out_dir)
    for job, split in shuffled(waiting, out_dir, recipe.seed, int(recipe.shards.shard_tokens), recipe.threads or 1):
        finished[job.inputs] = split
    manifest = _with_sources(manifest, jobs, finished)
    imported = tuple(_imported(recipe, manifest, tokenizer, out_dir, decontaminator, protected_sha256))
    manifest = manifest.model_copy(update={"sources": (*manifest.sources, *imported)})
    _remove_stale_files(out_dir, manifest)
    write_report(out_dir, manifest, _processes(recipe.threads or 1, sum(source.train.tokens for source in manifest.sources)))
    manifest.save(out_dir / MANIFEST)
    if (out_dir / _ASIDE).exists():
        shutil.rmtree(out_dir / _ASIDE)
    return manifest


@dataclass(frozen=True)
class Job:
    """One split of one source. `digests` are the hashes of what the parts are made from, `inputs` that of all the shards are made from."""

    name: str
    split: SplitName
    domain: str
    parts: tuple[Path, ...]
    digests: tuple[str, ...]
    inputs: str
    fim: Fim | None

    def folder(self, out_dir: Path) -> Path:
        return out_dir / _ASIDE / self.split / self.name

    def prefix(self, out_dir: Path, number: int) -> Path:
        return self.folder(out_dir) / f"{number:05d}"

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.parts)


def _jobs(recipe: Recipe, corpus_dir: Path, tokenizer_sha256: str) -> list[Job]:
    """All jobs, sorted by source."""
    splits = {split: corpus_files(corpus_dir, split) for split in _SPLITS}
    if not splits["train"]:
        raise UserError(f"{corpus_dir}/train holds no .parquet file; make the corpus first with: lmworks run RECIPE")
    filled = {(split, name): [path for path in paths if _rows(path)] for split in _SPLITS for name, paths in splits[split].items()}
    for name in splits["train"]:
        if not filled["train", name]:
            raise UserError(f"{corpus_dir}/train/{name} has no documents; take source {name} out of the recipe, or loosen its rules")
    paths = [path for some in filled.values() for path in some]
    processes = _processes(recipe.threads or 1, sum(path.stat().st_size for path in paths) // _HASH_SPEED)
    sha256 = {task[0]: digest for task, digest in map_unordered(processes, sha256_file, [(path,) for path in paths])}
    fim_by_output = {output: source.fim for source in recipe.corpus.sources for output in source.outputs}
    jobs = []
    for name in splits["train"]:
        for split in _SPLITS:
            if some := filled.get((split, name)):
                fim = fim_by_output.get(name) if split == "train" else None
                order = [as_tree(fim), recipe.seed] if fim else []
                digests = tuple(_digest([_FORMAT, sha256[path], tokenizer_sha256, *order]) for path in some)
                inputs = _digest([_FORMAT, digests, recipe.seed, int(recipe.shards.shard_tokens), split, name])
                jobs.append(Job(name, split, _first(filled["train", name][0], "domain"), tuple(some), digests, inputs, fim))
    return jobs


def _encode(recipe: Recipe, jobs: Sequence[Job], tokenizer_dir: Path, out_dir: Path) -> None:
    """Encode every part in the order of the corpus. Reading text in shuffled order would decompress a row group for each document."""
    missing = [
        (path, job.prefix(out_dir, number), digest, job.fim)
        for job in jobs
        for number, (path, digest) in enumerate(zip(job.parts, job.digests, strict=True))
        if find_encoded(job.prefix(out_dir, number), digest) is None
    ]
    total = sum(path.stat().st_size for path, *_ in missing)
    processes = min(_processes(recipe.threads or 1, total), max(1, len(missing)))
    threads = max(1, (recipe.threads or 1) // processes)
    tasks = [(path, tokenizer_dir, prefix, digest, threads, fim, recipe.seed) for path, prefix, digest, fim in missing]
    with bar("tokens", total) as progress:
        for task, _ in map_unordered(processes, encode_part, tasks):
            progress.advance(task[0].stat().st_size)
            progress.note(f"{task[2].parent.name} {task[2].name}")


def shuffled(jobs: Sequence[Job], out_dir: Path, seed: int, shard_tokens: int, threads: int) -> Iterator[tuple[Job, Split]]:
    """Write the shards of each job from its encoded parts, which are then removed; yields a job when its last shard is written."""
    parts = {job: [_found(job, number, out_dir) for number in range(len(job.parts))] for job in jobs}
    shards: dict[Job, list[Shard | None]] = {}
    tasks: dict[str, tuple[Job, int, Path]] = {}
    work = []
    for job in jobs:
        begins = shard_borders(parts[job], seed, job.name, shard_tokens)
        shards[job] = [None] * (len(begins) - 1)
        for number, (start, stop) in enumerate(pairwise(begins)):
            name, marker = f"{job.split}/{job.name}-{number:05d}", job.folder(out_dir) / f"shard-{number:05d}.json"
            shards[job][number] = _marked(marker, job.inputs, out_dir)
            if shards[job][number] is None:
                tasks[name] = job, number, marker
                work.append((out_dir, name, parts[job], seed, job.name, start, stop))
    tokens = {job: sum(part.tokens for part in parts[job]) for job in jobs}
    yield from ((job, _finish(job, shards[job], parts[job], out_dir)) for job in jobs if all(shards[job]))
    with bar("shards", sum(tokens.values())) as progress:
        for task, shard in map_unordered(_processes(threads, 4 * sum(tokens.values())), write_shard, work):
            job, number, marker = tasks[task[1]]
            write_json(marker, {"inputs": job.inputs, "shard": shard.model_dump()})
            shards[job][number] = shard
            progress.advance(shard.tokens)
            progress.note(task[1])
            if all(shards[job]):
                yield job, _finish(job, shards[job], parts[job], out_dir)


def _found(job: Job, number: int, out_dir: Path) -> Encoded:
    part = find_encoded(job.prefix(out_dir, number), job.digests[number])
    assert part is not None, "every part was encoded"
    return part


def _marked(marker: Path, inputs: str, out_dir: Path) -> Shard | None:
    """The shard that an earlier run finished from these inputs, if it is intact."""
    made = read_json(marker) if marker.exists() else {}
    if made.get("inputs") != inputs:
        return None
    shard = Shard.model_validate(made["shard"])
    return shard if _intact(out_dir, shard) else None


def _finish(job: Job, shards: Sequence[Shard | None], parts: Sequence[Encoded], out_dir: Path) -> Split:
    """Record that the job is done, and remove its encoded parts."""
    split = Split(
        tokens=sum(part.tokens for part in parts),
        bytes=sum(part.bytes for part in parts),
        documents=sum(part.documents for part in parts),
        inputs=job.inputs,
        shards=tuple(shard for shard in shards if shard),
    )
    write_json(job.folder(out_dir) / _DONE, split.model_dump())
    for path in job.folder(out_dir).iterdir():
        if path.name != _DONE:
            path.unlink()
    return split


def _with_sources(manifest: Manifest, jobs: Iterable[Job], splits: Mapping[str, Split]) -> Manifest:
    """The manifest with the sources that have training text."""
    made: dict[str, dict[str, Split]] = {}
    domains: dict[str, str] = {}
    for job in jobs:
        made.setdefault(job.name, {})[job.split] = splits[job.inputs]
        domains[job.name] = job.domain
    sources = [SourceShards(name=name, domain=domains[name], **made[name]) for name in made if "train" in made[name]]
    return manifest.model_copy(update={"sources": tuple(sources)})


def check_imported(name: str, folder: str, tokenizer_sha256: str | None) -> tuple[Path, Manifest]:
    """The folder of an imported source and its manifest. Raises `UserError` if it was not made by an import, or for another tokenizer than
    that of this hash; None is a tokenizer that is not known yet."""
    place = Path(os.path.expanduser(folder)).resolve()
    other = Manifest.load(place)
    if tokenizer_sha256 is not None and other.tokenizer_sha256 != tokenizer_sha256:
        raise UserError(
            f"shards.imported.{name}: {place} was imported for another tokenizer ({other.tokenizer_sha256[:12]}, this run's is "
            f"{tokenizer_sha256[:12]}); set tokenizer.path to that one, or import again"
        )
    if any(Path(shard.prefix).is_absolute() for shard in other.source(name).train.shards):
        raise UserError(f"shards.imported.{name}: {place} was not made by `lmworks data import`: its token files are elsewhere")
    return place, other


def _imported(
    recipe: Recipe, manifest: Manifest, tokenizer: Tokenizer, out_dir: Path, decontaminator: Decontaminator | None, protected_sha256: str
) -> Iterator[SourceShards]:
    """The imported sources, in place, except for shards in which `decontaminator` found protected text: these are written again."""
    before = {source.name: source for source in Manifest.load(out_dir).sources} if (out_dir / MANIFEST).exists() else {}
    for name, folder in sorted(recipe.shards.imported.items()):
        place, other = check_imported(name, folder, manifest.tokenizer_sha256)
        if any(source.name == name for source in manifest.sources):
            raise UserError(f"shards.imported.{name}: the corpus has a source of this name too; give one of them another name")
        train = other.source(name).train
        shards = tuple(shard.model_copy(update={"prefix": str(place / shard.prefix)}) for shard in train.shards)
        train = train.model_copy(update={"shards": shards})
        if decontaminator is not None and recipe.corpus.decontaminate is not None:
            what = recipe.corpus.decontaminate.action
            inputs = _digest([train.inputs, str(place), protected_sha256, decontaminator.ngram, what])
            made = before[name].train if name in before else None
            if made is not None and made.inputs == inputs and all(_intact(out_dir, shard) for shard in made.shards):
                train = made
            else:
                train = decontaminate(name, train, tokenizer, decontaminator, what, out_dir).model_copy(update={"inputs": inputs})
        yield other.source(name).model_copy(update={"train": train})


def _finished(recipe: Recipe, jobs: Sequence[Job], out_dir: Path) -> dict[str, Split]:
    """The splits that an earlier run completed and whose files are intact, by the hash of their inputs."""
    marked = [Split.model_validate(read_json(path)) for job in jobs if (path := job.folder(out_dir) / _DONE).exists()]
    sources = Manifest.load(out_dir).sources if (out_dir / MANIFEST).exists() else ()
    there = {split.inputs: split for source in sources for split in (source.train, source.validation) if split}
    there |= {split.inputs: split for split in marked}
    splits = {job.inputs: there[job.inputs] for job in jobs if job.inputs in there}
    tasks = [(out_dir, shard) for split in splits.values() for shard in split.shards]
    processes = _processes(recipe.threads or 1, sum(sum(shard.size.values()) for _, shard in tasks) // _HASH_SPEED)
    broken = {task[1].prefix for task, good in map_unordered(processes, _intact, tasks) if not good}
    return {inputs: split for inputs, split in splits.items() if not any(shard.prefix in broken for shard in split.shards)}


def _intact(out_dir: Path, shard: Shard) -> bool:
    paths = {ending: with_ending(out_dir / shard.prefix, ending) for ending in shard.sha256}
    return all(path.exists() and sha256_file(path) == shard.sha256[ending] for ending, path in paths.items())


def _remove_stale_files(out_dir: Path, manifest: Manifest) -> None:
    """Delete the remains of killed runs and removed sources, and row plans of other shards."""
    ours = {with_ending(out_dir / shard.prefix, ending) for shard in manifest.shards() for ending in shard.sha256}
    before = Manifest.load(out_dir).fingerprint() if (out_dir / MANIFEST).exists() else None
    for path in [*out_dir.glob("train/*"), *out_dir.glob("validation/*"), *out_dir.glob("*.part")]:
        if path not in ours:
            path.unlink()
    if before != manifest.fingerprint() and (out_dir / ROWS).exists():
        shutil.rmtree(out_dir / ROWS)


def _processes(threads: int, size: int) -> int:
    return max(1, min(threads, size // _WORTH_A_PROCESS))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _rows(path: Path) -> int:
    rows: int = open_parquet(path).metadata.num_rows
    return rows


def _first(path: Path, column: str) -> str:
    return str(next(open_parquet(path).iter_batches(batch_size=1, columns=[column])).column(0)[0].as_py())
